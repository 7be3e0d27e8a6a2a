"""The model: one result however a sequence is cut, documents apart from each other, and agreement with transformers."""

import pytest
import torch
import torch.nn as nn
from conftest import from_transformers

import kernels
from benchmarks.measure import PeakMemory
from configurator import ConfigError, ModelConfig
from model import LatentAttention, Model, ModelState, SplitLinear, gelu, rotary

PATTERNS = [
    "gdn",
    "attn",
    "gdn gdn gdn attn",
    "attn(gate=true, rope=partial, n_kv_head=1) gdn(n_key_head=1, neg_eigval=true) mlp",
]
T = 80  # past one chunk of 64


def make(pattern, dtype=torch.float64, **overrides):
    torch.manual_seed(0)
    settings = dict(layers=pattern, n_layer=4, n_head=2, n_embd=32, block_size=128, vocab_size=61) | overrides
    model = Model(ModelConfig(**settings)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():  # large enough that every path matters, norms and gates off their initial values
            p.mul_(8.0) if p.ndim >= 2 else p.add_(0.3 * torch.randn_like(p))
    return model.eval()


def tokens_of(B=2, n=T):
    return torch.randint(0, 61, (B, n))


def close(a, b, tolerance=1e-9):
    return (a - b).abs().max().item() <= tolerance * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_split_gives_the_full_result(pattern):
    model, tokens = make(pattern), tokens_of()
    with torch.no_grad():
        want = model(tokens).logits
        for split in (0, 1, 3, 63, 64, 65, T - 1):
            state = model.init_state(2, T)
            parts = [model(tokens[:, :split], state=state).logits] if split else []
            parts += [model(tokens[:, t : t + 1], state=state).logits for t in range(split, T)]
            assert close(torch.cat(parts, 1), want), split
            assert state.length.tolist() == [T, T]
        state = model.init_state(2, T)
        parts = [model(piece, state=state).logits for piece in tokens.split([5, 1, 60, 14], dim=1)]
        assert close(torch.cat(parts, 1), want)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_future_does_not_leak(pattern):
    model, tokens = make(pattern), tokens_of(1)
    with torch.no_grad():
        want = model(tokens).logits
        for t in (0, 1, 62, 63, 64, T - 2):
            changed = tokens.clone()
            changed[:, t + 1 :] = (changed[:, t + 1 :] + 1) % 61
            got = model(changed).logits
            assert torch.equal(got[:, : t + 1], want[:, : t + 1]), t
            assert not close(got[:, t + 1 :], want[:, t + 1 :], 1e-3)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("gates", ["as they are", "near 0"])
def test_packed_documents_equal_separate_ones(pattern, gates):
    model, lengths = make(pattern), [1, 2, 61, 1, 9]
    if gates == "near 0":  # no decay: whatever leaks across a boundary is not forgotten
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.fill_(-30.0) if name.endswith("dt_bias") else None
    tokens = tokens_of(1, sum(lengths))
    labels = tokens_of(1, sum(lengths))
    ids = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths))[None].int()
    padded = [torch.nn.functional.pad(x, (0, 6)) for x in (tokens, labels, ids)]  # trailing padding, id 0
    padded[1][ids.shape[1] :] = -1

    def gradients(nll):
        return torch.autograd.grad(nll, list(model.parameters()), allow_unused=True)

    packed = model(padded[0], padded[1], segment_ids=padded[2]).nll[:, : ids.shape[1]]
    pieces = [model(a, b).nll for a, b in zip(tokens.split(lengths, 1), labels.split(lengths, 1), strict=True)]
    assert close(packed, torch.cat(pieces, 1))
    for got, want in zip(gradients(packed.sum()), gradients(torch.cat(pieces, 1).sum()), strict=True):
        assert (got is None) == (want is None)
        assert got is None or close(got, want)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_ragged_prompts_and_packed_prefill(pattern):
    """Rows of different lengths, padded behind, and a row whose prefill holds two documents: the last one goes on."""
    model, tokens = make(pattern), tokens_of(3, 40)
    ids = torch.ones(3, 40, dtype=torch.int32)
    ids[0, 17:], ids[1, 30:] = 0, 2
    with torch.no_grad():
        state = model.init_state(3, 60)
        last = model(tokens, segment_ids=ids, state=state, last_only=True).logits
        assert state.length.tolist() == [17, 10, 40]
        following = tokens_of(3, 5)
        got = [last, *(model(following[:, t : t + 1], state=state).logits for t in range(5))]
        for row, start, stop in ((0, 0, 17), (1, 30, 40), (2, 0, 40)):
            alone = torch.cat([tokens[row, start:stop], following[row]])[None]
            assert close(torch.cat(got, 1)[row], model(alone).logits[0, -6:]), row


@pytest.mark.parametrize("pattern", PATTERNS)
def test_states_fork_copy_save_and_load(pattern, tmp_path):
    model, tokens = make(pattern), tokens_of(2, 20)
    with torch.no_grad():
        state = model.init_state(2, 40)
        model(tokens[:, :10], state=state)
        forked = state.fork(3)
        state.save(tmp_path / "state.safetensors")
        captured = model.init_state(2, 40)
        addresses = [x.data_ptr() for s in captured.layers for x in s.tensors.values()]
        captured.copy_(state)
        loaded = model.init_state(2, 40).load(tmp_path / "state.safetensors")
        want = model(tokens[:, 10:], state=state).logits
        assert torch.equal(model(tokens[:, 10:], state=captured).logits, want)
        assert torch.equal(model(tokens[:, 10:], state=loaded).logits, want)
        assert [x.data_ptr() for s in captured.layers for x in s.tensors.values()] == addresses
        got = model(tokens[:, 10:].repeat_interleave(3, 0), state=forked).logits
        assert close(got, want.repeat_interleave(3, 0))
        with pytest.raises(ValueError, match="shape"):
            model.init_state(3, 40).load(tmp_path / "state.safetensors")
    assert isinstance(forked, ModelState) and forked.nbytes == 3 * state.nbytes
    assert model.state_bytes(2, 40, torch.float64) == state.nbytes - sum(
        s.nbytes for s, b in zip(state.layers, model.blocks, strict=True) if b.mixer is None
    )


@pytest.mark.parametrize("pattern", PATTERNS[:3])
def test_greedy_text_by_state_equals_greedy_text_by_full_evaluation(pattern):
    from sample import Generator

    model = make(pattern, torch.float32, tie_embeddings=False)
    prompt = tokens_of(1, 3)[0].tolist()
    written = [int(t) for t in Generator(model, prompt, max_new_tokens=200, temperature=0)]
    tokens = list(prompt)
    with torch.no_grad():
        while len(tokens) < len(prompt) + 200:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert written == tokens[len(prompt) :]
    assert len(set(written)) > 5  # not one token for ever


@pytest.mark.parametrize("pattern", PATTERNS)
def test_backends_agree(pattern):
    model, tokens = make(pattern), tokens_of(1, 70)
    with torch.no_grad():
        want = model(tokens).logits
        with kernels.use_backend("reference"):
            assert "reference" in model.describe("cpu")
            assert close(model(tokens).logits, want)


LATENT = "mla(rope=none, kv_rank=256, nope_dim=128, rope_dim=64, v_dim=128)"  # as in the recipe 124m/kimi_linear


@pytest.mark.parametrize("pattern", ["mla", LATENT])
@pytest.mark.parametrize("heads", [4, 3, 1])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_latents_are_read_a_few_heads_at_a_time(pattern, heads, backend, monkeypatch):
    model, tokens = make(pattern, torch.float32, n_layer=1, n_head=4), tokens_of(2, 40)
    mixer, seen = model.blocks[0].mixer, []
    monkeypatch.setattr(LatentAttention, "at_once", 4 * heads * 2 * 40 * (mixer.nope + mixer.split[1] + mixer.V))
    monkeypatch.setattr(kernels.eager, "PAIRS", 500)  # so few queries at a time
    ids = torch.ones(2, 40, dtype=torch.int32)
    ids[0, 33:], ids[1, 25:] = 0, 2
    with torch.no_grad(), kernels.use_backend(backend), kernels.observe(lambda op, args, kwargs, out: seen.append((op, args))):
        want = model(tokens).logits
        for split in ([17, 23], [1, 8, 31], [38, 1, 1]):
            state = model.init_state(2, 40)
            assert close(torch.cat([model(part, state=state).logits for part in tokens.split(split, 1)], 1), want, 1e-5), split
        want, state, seen[:] = model(tokens, segment_ids=ids).logits, model.init_state(2, 40), []
        got = torch.cat([model(tokens[:, c], segment_ids=ids[:, c], state=state).logits for c in (slice(0, 30), slice(30, 40))], 1)
        assert close(got[ids > 0], want[ids > 0], 1e-5) and state.length.tolist() == [33, 15]
    calls = [args[0].shape[2] for op, args in seen if op == "softmax_attention"]
    last = {4: [4], 3: [3, 1], 1: [1] * 4}[heads]
    assert calls[-len(last) :] == last
    assert all(max(q.shape[-1], v.shape[-1]) <= 256 for op, (q, _, v) in seen if op == "softmax_attention")  # what kernels take


def test_memory_of_reading_with_a_long_cache():
    """A chunk of 256 on a cache of 4096: scores and masks of all pairs would be 38 MB a tensor, keys of all heads 6 MB."""
    model = make(LATENT, torch.float32, n_layer=1, n_head=4)
    mixer, x = model.blocks[0].mixer, torch.randn(1, 4352, 32)
    peaks = {}
    for limited in (False, True):
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            if limited:
                patch.setattr(LatentAttention, "at_once", 4 * 4352 * 320)  # one head
                patch.setattr(kernels.eager, "PAIRS", 4352 * 16)
            state = mixer.init_state(1, 4352)
            for part in x[:, :4096].split(2048, 1):
                mixer(part, state=state)
            with PeakMemory() as memory:
                mixer(x[:, 4096:], state=state)
            peaks[limited] = memory.peak
    assert peaks[True] < 25e6 < 60e6 < peaks[False], peaks


def test_rotary_is_a_rotation_by_position_times_frequency():
    x, positions = torch.randn(2, 50, 3, 24, dtype=torch.float64), torch.randint(0, 100_000, (2, 50))
    angle = positions[..., None].double() * 5e5 ** (-torch.arange(8).double() / 8)
    z = torch.complex(x[..., :8], x[..., 8:16]) * torch.polar(torch.ones_like(angle), angle)[:, :, None]
    want = torch.cat([z.real, z.imag, x[..., 16:]], -1)
    (got,) = rotary(x, positions=positions, theta=5e5, dim=16)
    assert close(got, want, 1e-12)
    q, k = rotary(x.float(), x[:, :, :1].float(), positions=positions % 1000, theta=5e5, dim=16)
    want = rotary(x, positions=positions % 1000, theta=5e5, dim=16)[0]
    assert q.dtype == torch.float32 and close(q.double(), want, 1e-3) and torch.equal(k, q[:, :, :1])


@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_step_makes_the_tables_of_rope_once(packed):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    model, tokens = make("attn dsa(top_k=8, local=4) retnet mla", torch.float32).train(), tokens_of(2, 40)
    ids = (torch.arange(40).expand(2, -1) // 15 + 1).int() if packed else None
    torch.compiler.reset()
    steps = []
    for run in (torch.compile(model, backend=backend), model):
        model.zero_grad()
        loss = run(tokens, tokens, segment_ids=ids, total=True).loss
        loss.backward()
        steps.append((loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)))
    assert all(close(a, b, 1e-5) for a, b in zip(*steps, strict=True))
    forward, backward = graphs
    assert sum("rope_tables" in name for name in forward) == 1 and not any("rope_tables" in name for name in backward)
    assert not any("aten.cos" in name or "aten.sin" in name for name in forward + backward)


def test_dropout_leaves_attention_to_a_selection_alone():
    x = torch.randn(1, 40, 32)
    for name, same in (("dsa(top_k=8, local=4)", True), ("dsa(mode=dense)", True), ("attn", False), ("mla", False)):
        mixer = make(name, torch.float32, n_layer=1, dropout=0.5).train().blocks[0].mixer
        assert torch.equal(mixer(x), mixer(x)) == same, name


def test_a_state_with_gradients_is_refused():
    model = make("gdn attn")
    with pytest.raises(RuntimeError, match="no_grad"):
        model(tokens_of(1, 4), state=model.init_state(1, 8))


def test_a_full_cache_says_so():
    model = make("attn")
    with torch.no_grad(), pytest.raises(ValueError, match="at most 8 tokens"):
        model(tokens_of(1, 9), state=model.init_state(1, 8))


@pytest.mark.parametrize(
    "pattern, says",
    [
        ("gdm", "did you mean 'gdn'"),
        ("nonsense", "possible: attn"),
        ("gdn(window=3)", "no such option"),
        ("gdn(conv=1)", "gdn: conv=1 sees the current token only"),
        ("attn(rope=half)", "'full', 'partial' or 'none'"),
        ("attn(n_head=4, n_kv_head=3)", "n_head=4 is not a multiple of n_kv_head=3"),
        ("attn(head_dim=7)", "not even"),
        ("attn(ffn=wide)", "'swiglu', 'gelu', 'gelu_exact', 'relu2' or 'none'"),
        ("attn(alpha=2.0)", "no effect without residual=normed"),
        ("swa(window=0)", "greater than or equal to 1"),
        ("swa(window=true)", "window=True"),
        ("attn(gate=yes)", "valid boolean"),
        ("dsa(top_k=0)", "greater than or equal to 1"),
        ("dsa(top_k=4)", "local=16 is more than top_k=4"),
        ("dsa(window=8)", "a selection takes the place of a window"),
        ("dsa(topk=8)", "possible: n_head, .*, top_k, "),
        ("linear(feature_map=exp)", "'elu1', 'relu', 'silu' or 'identity'"),
        ("linear(feature_map=silu)", "use elu1 or relu"),
        ("mamba2(head_dim=48)", "whole number of heads"),
        ("gdn(n_head=4, n_key_head=3)", "not a multiple of n_key_head=3"),
        ("mlp(ffn=none)", "mlp is an FFN alone"),
    ],
)
def test_bad_patterns(pattern, says):
    with pytest.raises(ConfigError, match=says):
        make(pattern)


def test_weight_decay_leaves_gates_norms_and_convolutions_alone():
    model = make("gdn attn", n_layer=2)
    decayed, exempt = model.parameter_groups(0.1)
    assert {n.split(".")[-1] for n in exempt["names"]} == {"A_log", "dt_bias", "conv_weight", "weight"}
    assert all("norm" in n for n in exempt["names"] if n.endswith(".weight"))
    assert len(decayed["params"]) + len(exempt["params"]) == len(list(model.parameters()))
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)


def test_tied_and_untied_heads_and_parameter_count():
    tied, untied = make("attn", n_layer=1), make("attn", n_layer=1, tie_embeddings=False)
    assert untied.n_params() - tied.n_params() == 61 * 32
    assert "head.weight" not in dict(tied.named_parameters())


def test_flops_per_token():
    model = make("attn(qk_norm=false)", n_layer=1, n_ffn=64)
    d, V, F, n = 32, 61, 64, 100
    assert model.flops_per_token(n) == 6 * (4 * d * d + 3 * d * F + V * d) + 3 * 2 * (n + 1) * d


def qwen3_next(dtype):
    """transformers' Qwen3-Next, tiny and random, every parameter off its initial value, and the same weights in our model."""
    Qwen3NextConfig, Qwen3NextForCausalLM = from_transformers("Qwen3NextConfig", "Qwen3NextForCausalLM")
    H, Hk, D, nk, nv, dk, dv, d = 4, 2, 16, 2, 4, 8, 16, 48
    theirs = (
        Qwen3NextForCausalLM(
            Qwen3NextConfig(
                vocab_size=61,
                hidden_size=d,
                intermediate_size=64,
                num_hidden_layers=4,
                num_attention_heads=H,
                num_key_value_heads=Hk,
                head_dim=D,
                linear_num_key_heads=nk,
                linear_num_value_heads=nv,
                linear_key_head_dim=dk,
                linear_value_head_dim=dv,
                num_experts=0,
                layer_types=["linear_attention"] * 3 + ["full_attention"],
                tie_word_embeddings=False,
                pad_token_id=None,
                bos_token_id=None,
                eos_token_id=None,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
                attn_implementation="eager",
            )
        )
        .to(dtype)
        .eval()
    )
    with torch.no_grad():
        for p in theirs.parameters():
            p.mul_(2.0) if p.ndim >= 2 else p.add_(0.3 * torch.randn_like(p))
    gdn = f"gdn(n_head={nv}, n_key_head={nk}, head_dim={dk}, value_head_dim={dv})"
    attn = f"attn(gate=true, rope=partial, rope_fraction=0.25, n_head={H}, n_kv_head={Hk}, head_dim={D})"
    ours = (
        Model(
            ModelConfig(
                layers=f"{gdn}*3 {attn}",
                n_layer=4,
                n_head=H,
                n_embd=d,
                n_ffn=64,
                vocab_size=61,
                norm="rmsnorm1p",
                tie_embeddings=False,
                rope_theta=1e4,
                norm_eps=theirs.config.rms_norm_eps,
            )
        )
        .to(dtype)
        .eval()
    )
    source, target = theirs.state_dict(), {}
    r = nv // nk
    for i in range(4):
        a, b = f"model.layers.{i}.", f"blocks.{i}."
        if i < 3:
            rows = source[f"{a}linear_attn.in_proj_qkvz.weight"].view(nk, 2 * dk + 2 * r * dv, d)
            parts = rows.split([dk, dk, r * dv, r * dv], dim=1)
            target[f"{b}mixer.in_proj.weight"] = torch.cat([p.reshape(-1, d) for p in parts])
            parts = source[f"{a}linear_attn.in_proj_ba.weight"].view(nk, 2 * r, d).split(r, dim=1)
            target[f"{b}mixer.ba_proj.weight"] = torch.cat([p.reshape(-1, d) for p in parts])
            target[f"{b}mixer.conv_weight"] = source[f"{a}linear_attn.conv1d.weight"][:, 0]
            for mine, other in (
                ("A_log", "A_log"),
                ("dt_bias", "dt_bias"),
                ("norm.weight", "norm.weight"),
                ("out_proj.weight",) * 2,
            ):
                target[f"{b}mixer.{mine}"] = source[f"{a}linear_attn.{other}"]
        else:
            q, gate = source[f"{a}self_attn.q_proj.weight"].view(H, 2 * D, d).split(D, dim=1)
            k, v = (source[f"{a}self_attn.{n}_proj.weight"] for n in "kv")
            target[f"{b}mixer.qkv_proj.weight"] = torch.cat([q.reshape(-1, d), k, v, gate.reshape(-1, d)])
            target[f"{b}mixer.out_proj.weight"] = source[f"{a}self_attn.o_proj.weight"]
            for n in "qk":
                target[f"{b}mixer.{n}_norm.weight"] = source[f"{a}self_attn.{n}_norm.weight"]
        target[f"{b}mixer_norm.weight"] = source[f"{a}input_layernorm.weight"]
        target[f"{b}ffn_norm.weight"] = source[f"{a}post_attention_layernorm.weight"]
        target[f"{b}ffn.gate_up_proj.weight"] = torch.cat([source[f"{a}mlp.{n}_proj.weight"] for n in ("gate", "up")])
        target[f"{b}ffn.down_proj.weight"] = source[f"{a}mlp.down_proj.weight"]
    target |= {
        "embedding.weight": source["model.embed_tokens.weight"],
        "norm.weight": source["model.norm.weight"],
        "head.weight": source["lm_head.weight"],
    }
    ours.load_state_dict(target)
    return theirs, ours


def test_agrees_with_transformers_qwen3_next():
    theirs, ours = qwen3_next(torch.float32)
    tokens = tokens_of(2, 100)
    with torch.no_grad():
        want, got = theirs(tokens).logits, ours(tokens).logits
        state = ours.init_state(2, 100)
        parts = [
            ours(tokens[:, :37], state=state).logits,
            *(ours(tokens[:, t : t + 1], state=state).logits for t in range(37, 100)),
        ]
    assert want.std() > 0.1
    assert (got - want).abs().max() < 1e-5
    assert (torch.cat(parts, 1) - want).abs().max() < 1e-5


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 4e-3)])
def test_gelu_compiled_is_gelu(dtype, tolerance):
    """To a rounding of its type, in both directions, where the sigmoid saturates too."""
    x = torch.linspace(-30, 30, 2001, dtype=dtype, requires_grad=True)
    out = torch.compile(gelu, backend="aot_eager")(x)
    want = torch.nn.functional.gelu(exact := x.detach().double().requires_grad_(), approximate="tanh")
    for a, b in ((out, want), *zip(torch.autograd.grad(out.sum(), x), torch.autograd.grad(want.sum(), exact), strict=True)):
        assert ((a.double() - b).abs() <= tolerance * (1 + b.abs())).all()
    assert torch.equal(gelu(x), torch.nn.functional.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "layers", ["gdn", "gdn(steps=2)", "deltanet(conv=0)", "kda", "mamba2(head_dim=8)", "lightning(conv=3)", "retnet", "linear"]
)
def test_products_by_slice_are_those_of_one_product(layers, bias, monkeypatch):
    """Output and every gradient, in documents; and the output without gradients, for which it is one product."""
    torch.manual_seed(0)
    m = Model(ModelConfig(layers=layers, n_layer=1, n_head=2, n_embd=32, vocab_size=11, block_size=64, bias=bias)).double()
    tokens, ids = torch.randint(11, (2, 37)), torch.tensor([1] * 20 + [2] * 17).repeat(2, 1)

    def results():
        logits = m(tokens, segment_ids=ids).logits
        return [logits, *torch.autograd.grad(logits.square().sum(), list(m.parameters()))]

    got = results()
    with torch.no_grad():
        torch.testing.assert_close(m(tokens, segment_ids=ids).logits, got[0], rtol=1e-10, atol=1e-12)
    calls = []

    def at_once(self, x):
        calls.append(self)
        return nn.Linear.forward(self, x).split(self.split, dim=-1)

    monkeypatch.setattr(SplitLinear, "forward", at_once)
    for a, b in zip(got, results(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    assert len(calls) == 2  # the mixer's and the FFN's
