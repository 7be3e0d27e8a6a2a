"""Operators against code that others wrote: the naive references of flash-linear-attention, and transformers' DSA indexer."""

import importlib

import pytest
import torch
from conftest import from_transformers
from test_kernels import relative_error, unit

from configurator import LayerSpec, ModelConfig
from kernels import eager, reference
from model import build_mixer

T, H, K, V = 70, 2, 16, 8


def naive(module, name):
    """A reference of fla-core, which computes in fp32; a skip where the package is missing."""
    pytest.importorskip("fla", reason="fla-core is not installed: pip install fla-core einops")
    return getattr(importlib.import_module(f"fla.ops.{module}.naive"), name)


def inputs():
    q, k, v = torch.randn(2, T, H, K), unit(torch.randn(2, T, H, K)), torch.randn(2, T, H, V)
    return q, k, v, -0.2 * torch.rand(2, T, H), torch.rand(2, T, H), torch.randn(2, H, K, V)


def agree(want, op, *args, **options):
    """Output and final state of the reference and of eager, in fp64, against fla's in fp32."""
    wide = [None if x is None else x.double() for x in args]
    options = {n: x.double() if torch.is_tensor(x) else x for n, x in options.items()}
    for backend in (reference, eager):
        got = getattr(backend, op)(*wide, **options)
        for ours, theirs in zip(got, want, strict=False):
            assert relative_error(ours, theirs.double()) < 1e-5, (op, backend.__name__)


def test_delta_rule():
    q, k, v, g, beta, state = inputs()
    flat = [x.transpose(1, 2) for x in (q, k, v, beta)]
    out, final = naive("delta_rule", "delta_rule_recurrence")(*flat, initial_state=state)
    agree((out.transpose(1, 2), final), "delta_rule", q, k, v, None, beta, initial_state=state)
    want = naive("gated_delta_rule", "naive_recurrent_gated_delta_rule")(
        q, k, v, beta, g, initial_state=state, output_final_state=True
    )
    agree(want, "delta_rule", q, k, v, g, beta, initial_state=state)


def test_kimi_delta_attention():
    q, k, v, _, beta, state = inputs()
    g = -torch.rand(2, T, H, K)
    want = naive("kda", "naive_recurrent_kda")(q, k, v, g, beta, initial_state=state, output_final_state=True)
    agree(want, "channel_delta_rule", q, k, v, g, beta, initial_state=state)


def test_linear_attention():
    q, k, v, g, _, state = inputs()
    plain = naive("linear_attn", "naive_recurrent_linear_attn")
    agree(plain(q, k, v, initial_state=state, output_final_state=True), "linear_attention", q, k, v, initial_state=state)
    agree(naive("simple_gla", "naive_recurrent_simple_gla")(q, k, v, g, initial_state=state), "linear_attention", q, k, v, g,
          initial_state=state)  # fmt: skip
    gk = -torch.rand(2, T, H, K)
    want = naive("gla", "naive_recurrent_gla")(q, k, v, gk, initial_state=state, output_final_state=True)
    agree(want, "linear_attention", q, k, v, gk, initial_state=state)
    constant = torch.log1p(-(2.0 ** (-5 - torch.arange(H, dtype=torch.float64))))
    retention = naive("retention", "naive_retention")(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    agree((retention,), "linear_attention", q, k, v, constant)
    q, k = q.exp(), k.exp()
    agree((plain(q, k, v, scale=1.0, normalize=True)[0],), "normalized_linear_attention", q, k, v)


def test_householder_steps():
    """DeltaProduct: our mixer runs the delta rule on n writes a token, of which the first decays."""
    n = 2
    q, _, _, g, _, _ = inputs()
    k, v, beta = unit(torch.randn(2, n * T, H, K)), torch.randn(2, n * T, H, V), 2 * torch.rand(2, n * T, H)
    want, _ = naive("gated_delta_product", "naive_recurrent_gated_delta_product")(
        q, k, v, g, beta, scale=K**-0.5, num_householder=n, output_final_state=True
    )
    spread = torch.nn.functional.pad(g[:, :, None], (0, 0, 0, n - 1)).flatten(1, 2)
    out, _ = eager.delta_rule(*(x.double() for x in (q.repeat_interleave(n, 1), k, v, spread, beta)))
    assert relative_error(out[:, n - 1 :: n], want.double()) < 1e-5


@pytest.mark.parametrize("top_k", [1, 8, 33])
def test_the_selection_is_that_of_transformers_indexer(top_k):
    """DeepseekV32's indexer module with our weights on our inputs: the same keys for every query, the first ones included."""
    config, module = from_transformers("DeepseekV32Config", "DeepseekV32ForCausalLM")
    indexer = importlib.import_module(module.__module__).DeepseekV32Indexer
    d, J, D, rope, length = 48, 16, 32, 16, 40
    theirs = indexer(
        config(hidden_size=d, index_n_heads=J, index_head_dim=D, qk_rope_head_dim=rope, index_topk=top_k, q_lora_rank=d), 0
    ).double()
    spec = LayerSpec("dsa", {"top_k": top_k, "local": 0, "index_heads": J, "index_dim": D, "n_head": 2, "head_dim": 16})
    ours = build_mixer(spec, ModelConfig(n_embd=d, vocab_size=8, n_head=2), 0).double()
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn_like(p) if p.ndim == 1 else torch.randn_like(p) / p.shape[1] ** 0.5)
        ours.index_q_proj.weight.copy_(theirs.wq_b.weight)
        ours.index_k_proj.weight.copy_(theirs.wk.weight)
        ours.index_w_proj.weight.copy_(theirs.weights_proj.weight)
        ours.index_k_norm.weight.copy_(theirs.k_norm.weight)
        ours.index_k_norm.bias.copy_(theirs.k_norm.bias)
        x, positions = torch.randn(2, length, d, dtype=torch.float64), torch.arange(length)[None]
        angle = positions[..., None] * 10000.0 ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope)
        angle = torch.cat([angle, angle], dim=-1)
        causal = torch.ones(1, length, length, dtype=torch.bool).tril()
        chosen = theirs(x, x, (angle.cos(), angle.sin()), causal, positions).long()
        want = torch.zeros(2, length, length, dtype=torch.bool).scatter(-1, chosen, True) & causal
        q, k, w = ours.index(x, positions)
        distance = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=-1).expand(2, -1, -1)
        for backend in (reference, eager):
            got = backend.select_top_k(backend.indexer_scores(q, k, w), distance, top_k)
            assert torch.equal(got, want)
