"""The step operators in Triton against eager in fp64: outputs and the states they leave, in the interpreter on a CPU."""

import copy

import pytest
import torch
from triton_cases import DEVICE, log_decay, relative_error, unit

import kernels
from kernels import eager, triton_step


def both(op, inputs, state_names, fp32=torch.float32, **options):
    """`op` by eager in fp64 and by Triton in fp32 on copies of the same states: what it returns and the states, as pairs."""

    def cast(x, dtype):
        return x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else copy.deepcopy(x)

    sides = []
    for backend, dtype in (("eager", torch.float64), ("triton", fp32)):
        mine = {n: cast(x.clone() if torch.is_tensor(x) else x, dtype) for n, x in inputs.items()}
        with kernels.use_backend(backend):
            out = getattr(kernels, op)(**mine, **options)
        sides.append((out, *(mine[n] for n in state_names)))
    return list(zip(*sides, strict=True))


def agree(pairs, tolerance=2e-6):
    for want, got in pairs:
        assert got.shape == want.shape and relative_error(got.double(), want) < tolerance


SHAPES = [(2, 1, 1, 2, 16, 16), (1, 3, 2, 2, 24, 40), (3, 1, 2, 4, 64, 8), (1, 1, 1, 1, 96, 72)]


@pytest.mark.parametrize("gate", ["none", "mild", "extreme", "channel"])
@pytest.mark.parametrize("shape", SHAPES)
def test_delta_rule_step(shape, gate):
    B, T, Hk, H, K, V = shape
    g = log_decay("wide", B, T, H, K) if gate == "channel" else log_decay(gate, B, T, H)
    inputs = dict(q=unit(torch.randn(B, T, Hk, K)), k=unit(torch.randn(B, T, Hk, K)), v=torch.randn(B, T, H, V), g=g,
                  beta=2 * torch.rand(B, T, H), state=torch.randn(B, H, K, V))  # fmt: skip
    op = "channel_delta_rule_step" if gate == "channel" else "delta_rule_step"
    agree(both(op, {n: x if x is None else x.to(DEVICE) for n, x in inputs.items()}, ["state"]))


@pytest.mark.parametrize("gate", ["none", "constant", "mild", "channel"])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_attention_step(shape, gate):
    B, T, Hk, H, K, V = shape
    g = -torch.rand(H) if gate == "constant" else log_decay("mild", B, T, H, K) if gate == "channel" else log_decay(gate, B, T, H)
    inputs = dict(q=torch.randn(B, T, Hk, K), k=torch.randn(B, T, Hk, K), v=torch.randn(B, T, H, V), g=g,
                  state=torch.randn(B, H, K, V))  # fmt: skip
    agree(both("linear_attention_step", {n: x if x is None else x.to(DEVICE) for n, x in inputs.items()}, ["state"], scale=0.3))


@pytest.mark.parametrize("shape", SHAPES)
def test_normalized_linear_attention_step(shape):
    B, T, Hk, H, K, V = shape
    inputs = dict(q=torch.rand(B, T, Hk, K), k=torch.rand(B, T, Hk, K), v=torch.randn(B, T, H, V), state=torch.rand(B, H, K, V + 1))
    agree(both("normalized_linear_attention_step", {n: x.to(DEVICE) for n, x in inputs.items()}, ["state"]))


def test_strided_inputs():
    """Slices of a projection, as the mixers have them."""
    B, H, K, V = 2, 2, 16, 24
    x = torch.randn(B, 1, H * (2 * K + V), device=DEVICE)
    q, k, v = x.split([H * K, H * K, H * V], dim=-1)
    inputs = dict(q=q.view(B, 1, H, K), k=k.view(B, 1, H, K), v=v.view(B, 1, H, V), state=torch.randn(B, H, K, V, device=DEVICE))
    for op in ("delta_rule_step", "linear_attention_step"):
        states = inputs["state"].double(), inputs["state"].clone()
        want = getattr(eager, op)(*(inputs[n].double() for n in "qkv"), state=states[0])
        got = getattr(triton_step, op)(*(inputs[n] for n in "qkv"), state=states[1])
        agree([(want, got), states])


ATTENTION = {
    "plain": {}, "grouped": {"H": 6, "Hk": 2}, "odd widths": {"D": 24, "V": 40}, "scale": {"scale": 0.1}, "sinks": {"sinks": True},
    "window": {"S": 24, "window": 24}, "window kept": {"S": 28, "window": 24, "keep_first": 4, "sinks": True},
    "short window": {"S": 80, "window": 5},
}  # fmt: skip


@pytest.mark.parametrize("case", ATTENTION)
def test_softmax_attention_step(case):
    """Over an empty cache, one that is half filled, one that has come round: every row has its own length."""
    options = {"H": 2, "Hk": 2, "D": 16, "V": 16, "S": 200} | ATTENTION[case]
    H, Hk, D, V, S = (options.pop(n) for n in ("H", "Hk", "D", "V", "S"))
    lengths = torch.tensor([0, 1, 23, 70] if S < 80 else [0, 1, 79, 70] if S == 80 else [0, 63, 129, 198], dtype=torch.int32)
    B = len(lengths)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(H, device=DEVICE)
    inputs = {"q": torch.randn(B, 1, H, D), "k": torch.randn(B, 1, Hk, D), "v": torch.randn(B, 1, Hk, V)}
    inputs |= {"k_cache": torch.randn(B, S, Hk, D), "v_cache": torch.randn(B, S, Hk, V), "length": lengths}
    for b, n in enumerate(lengths.tolist()):  # what has not been written must not be read
        inputs["k_cache"][b, n:], inputs["v_cache"][b, n:] = torch.inf, torch.nan
    inputs = {n: x.to(DEVICE) for n, x in inputs.items()}
    mine = {n: x.clone() for n, x in inputs.items()}
    got = triton_step.softmax_attention_step(**mine, **options)
    wide = {n: x.double().nan_to_num(0.0, 0.0) if x.is_floating_point() else x for n, x in inputs.items()}
    want = eager.softmax_attention_step(**wide, **{n: x.double() if torch.is_tensor(x) else x for n, x in options.items()})
    agree([(want, got)])
    for name in ("k_cache", "v_cache"):
        assert torch.equal(mine[name].nan_to_num(0.0, 0.0), wide[name].float())


def test_latents_serve_as_keys_and_values():
    """MLA: the values are a part of the keys, in the same cache."""
    B, H, D, V, S = 2, 3, 24, 16, 40
    cache, q, k = torch.randn(B, S, 1, D), torch.randn(B, 1, H, D), torch.randn(B, 1, 1, D)
    length = torch.tensor([7, 39], dtype=torch.int32, device=DEVICE)
    sides = []
    for op, dtype in ((eager.softmax_attention_step, torch.float64), (triton_step.softmax_attention_step, torch.float32)):
        c, one, new = (x.to(DEVICE, dtype, copy=True) for x in (cache, q, k))
        sides.append((op(one, new, new[..., :V], k_cache=c, v_cache=c[..., :V], length=length), c))
    agree(list(zip(*sides, strict=True)))


def test_what_is_refused():
    q = torch.zeros(1, 1, 1, 300, device=DEVICE)
    assert "at most 256" in triton_step.supports(q, q, q, state=torch.zeros(1, 1, 300, 300))
    assert "in fp32" in triton_step.supports(q[..., :8], q[..., :8], q[..., :8], state=torch.zeros(1, 1, 8, 8, dtype=torch.float64))
    two = torch.zeros(1, 2, 1, 16)
    assert "2 tokens" in triton_step.supports_softmax_attention_step(two, two, two, k_cache=two)


# -- the parts of a layer --


def silu_conv(y, conv):
    """What `Conv` does to y `(B, n)`, in eager."""
    return eager.causal_conv1d_step(y[:, None], conv.weight, conv.bias, state=conv.state, activation="silu")[:, 0]


@pytest.mark.parametrize("B", [1, 3, 33])
def test_linear(B):
    D, N = 72, 40
    x, w, bias = torch.randn(B, D, device=DEVICE), torch.randn(N, D, device=DEVICE), torch.randn(N, device=DEVICE)
    z, weight, r = (
        torch.randn(B, 2 * D, device=DEVICE)[:, D:],
        1 + 0.1 * torch.randn(D, device=DEVICE),
        torch.randn(B, N, device=DEVICE),
    )
    tolerance = 5e-6
    for kind, norm in (("rms", kernels.rms_norm), ("layer", lambda x, w, eps: kernels.layer_norm(x, w, None, eps))):
        got = triton_step.linear(x, w, bias, norm=triton_step.Norm(kind, weight, 1e-6), residual=r, alpha=2.0, beta=-1.5)
        agree([(2 * r.double() - 1.5 * (norm(x, weight, 1e-6).double() @ w.T.double() + bias.double()), got)], tolerance)
    for first in (True, False):
        want = kernels.gated_rms_norm(x.double(), z.double(), weight.double(), 1e-6, gate_first=first)
        got = triton_step.linear(x, w, norm=triton_step.Norm("rms", weight, 1e-6), gate=z, gate_first=first)
        agree([(want @ w.T.double(), got)], tolerance)
    y = (x.double() @ w.T.double() + bias.double()).chunk(2, 1)
    agree([(torch.nn.functional.silu(y[0]) * y[1], triton_step.linear(x, w, bias, act="swiglu"))], tolerance)
    whole = torch.cat(y, 1)
    agree([(torch.nn.functional.gelu(whole, approximate="tanh"), triton_step.linear(x, w, bias, act="gelu"))], tolerance)
    agree([(whole.relu().square(), triton_step.linear(x, w, bias, act="relu2"))], tolerance)


@pytest.mark.parametrize("W", [2, 4])
def test_linear_with_a_convolution_behind(W):
    B, D, N, n = 3, 40, 56, 36
    x, w = torch.randn(B, D, device=DEVICE), torch.randn(N, D, device=DEVICE)
    for bias in (None, torch.randn(n, device=DEVICE)):
        conv = triton_step.Conv(torch.randn(n, W, device=DEVICE), bias, torch.randn(B, W - 1, n, device=DEVICE))
        wide = triton_step.Conv(*(None if u is None else u.double() for u in conv))
        want = x.double() @ w.T.double()
        want = torch.cat([silu_conv(want[:, :n], wide), want[:, n:]], 1)
        agree([(want, triton_step.linear(x, w, conv=conv)), (wide.state, conv.state)], 5e-6)


def test_add_norm():
    x, y, weight, bias = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40), torch.randn(40)
    x, y, weight, bias = (u.to(DEVICE) for u in (x, y, weight, bias))
    rms, layer = triton_step.Norm("rms", weight, 1e-6), triton_step.Norm("layer", weight, 1e-6)
    agree([(x.double() + kernels.rms_norm(y.double(), weight), triton_step.add_norm(x, y, rms))])
    agree([(kernels.layer_norm(y.double(), weight, bias, 1e-6), triton_step.add_norm(None, y, layer, bias))])


# -- on a GPU --


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["delta_rule_step", "linear_attention_step", "channel_delta_rule_step"])
def test_bf16_on_a_gpu(op):
    """bf16 inputs, the outputs poisoned before, the same bits 30 times."""
    B, H, K, V = 5, 6, 128, 128
    q, k, v = (torch.randn(B, 1, H, n, device="cuda", dtype=torch.bfloat16) for n in (K, K, V))
    g = -torch.rand(B, 1, H, *([K] if "channel" in op else []), device="cuda")
    beta = {} if "linear" in op else {"beta": torch.rand(B, 1, H, device="cuda")}
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    start = torch.randn(B, H, K, V, device="cuda")
    want_state = start.double()
    want = getattr(eager, op)(q.double(), k.double(), v.double(), g.double(), **beta, state=want_state)
    seen = set()
    for _ in range(30):
        torch.full((B, 1, H, V), torch.nan, device="cuda", dtype=torch.bfloat16)  # freed, and given out again
        state = start.clone()
        out = getattr(triton_step, op)(q, k, v, g, **beta, state=state)
        seen.add((out.float().sum().item(), state.sum().item()))
    agree([(want, out)], 4e-3)
    agree([(want_state, state)], 1e-5)
    assert len(seen) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("longest", [1, 64, 65, 1000, 4096])
def test_attention_in_bf16_on_a_gpu(longest):
    B, H, Hk, D, S = 4, 12, 4, 64, 4200
    q, k, v = (torch.randn(B, 1, n, D, device="cuda", dtype=torch.bfloat16) for n in (H, Hk, Hk))
    caches = {n: torch.randn(B, S, Hk, D, device="cuda", dtype=torch.bfloat16) for n in ("k_cache", "v_cache")}
    length = torch.tensor([longest, longest // 2, 0, longest - 1], dtype=torch.int32, device="cuda")
    want = eager.softmax_attention_step(
        q.double(), k.double(), v.double(), **{n: x.double() for n, x in caches.items()}, length=length
    )
    for b, n in enumerate(length.tolist()):
        for x in caches.values():
            x[b, n:] = torch.nan
    outs = [triton_step.softmax_attention_step(q, k, v, **caches, length=length) for _ in range(30)]
    agree([(want, outs[0])], 8e-3)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 7, 32, 100])
def test_linear_in_bf16_on_a_gpu(B):
    D, N, n = 768, 3084, 2304
    x, w = torch.randn(B, D, device="cuda"), (0.05 * torch.randn(N, D, device="cuda")).bfloat16()
    norm = triton_step.Norm("rms", 1 + 0.1 * torch.randn(D, device="cuda"), 1e-6)
    weight, past = torch.randn(n, 4, device="cuda"), torch.randn(B, 3, n, device="cuda", dtype=torch.bfloat16)
    wide = past.double()
    want = kernels.rms_norm(x.double(), norm.weight) @ w.T.double()
    want = torch.cat([silu_conv(want[:, :n], triton_step.Conv(weight.double(), None, wide)), want[:, n:]], 1)
    outs, states = [], [past.clone() for _ in range(30)]
    for state in states:
        outs.append(triton_step.linear(x, w, norm=norm, conv=triton_step.Conv(weight, None, state)))
    agree([(want, outs[0]), (wide, states[0])], 8e-3)
    assert all(torch.equal(a, outs[0]) and torch.equal(b, states[0]) for a, b in zip(outs, states, strict=True))
