"""The recurrent family in Triton: in the interpreter on a CPU, and on a GPU where there is one."""

import functools
import os

import pytest
import torch
import triton
import triton.language as tl
from triton_cases import DEVICE, delta_inputs, documents, outputs, relative_error, unit

import kernels
from kernels import eager, reference, triton_recurrence

MEMORY = 120 * 2**30  # bytes that the test of more than 2^31 elements may take
SHAPES = [(2, 130, 1, 2, 16, 16), (1, 70, 2, 2, 24, 40), (1, 1, 1, 1, 16, 16), (1, 63, 1, 1, 64, 8), (1, 129, 1, 1, 128, 64)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gate", ["none", "zero", "mild", "wide", "extreme"])
@pytest.mark.parametrize("shape", SHAPES)
def test_delta_rule_in_fp32(shape, gate, packed):
    if packed and shape[1] < 120:
        shape = (2, 130, *shape[2:])
    B, T, _, H, K, V = shape
    inputs = delta_inputs(*shape, gate, correlated=gate == "zero")
    ids = documents(B, T) if packed else None
    state = torch.randn(B, H, K, V, device=DEVICE)
    want = outputs(eager.delta_rule, torch.float64, inputs, state, ids)
    with kernels.use_backend("triton"):
        got = outputs(kernels.delta_rule, torch.float32, inputs, state, ids)
    for name in want:  # dg is a difference of terms of order 1, however small it is
        floor = 0.01 * want[name].numel() ** 0.5 if name == "g" else 0.0
        error = (got[name].double() - want[name]).norm() / max(want[name].norm().item(), floor, 1e-30)
        assert error < 2e-4, name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gate", ["none", "constant", "mild", "wide", "extreme"])
@pytest.mark.parametrize("shape", [(2, 130, 1, 2, 16, 16), (2, 130, 2, 2, 24, 40), (1, 1, 1, 1, 16, 16), (1, 129, 1, 3, 128, 64)])
def test_linear_attention_in_fp32(shape, gate, packed):
    if packed and shape[1] < 120:
        shape = (2, 130, *shape[2:])
    B, T, _, H, K, V = shape
    inputs = delta_inputs(*shape, "none" if gate == "constant" else gate)
    inputs.pop("beta")
    if gate == "constant":
        inputs["g"] = -0.1 * torch.rand(H, device=DEVICE)
    ids = documents(B, T) if packed else None
    state = torch.randn(B, H, K, V, device=DEVICE)
    want = outputs(eager.linear_attention, torch.float64, inputs, state, ids)
    with kernels.use_backend("triton"):
        got = outputs(kernels.linear_attention, torch.float32, inputs, state, ids)
    for name in want:
        floor = 0.01 * want[name].numel() ** 0.5 if name == "g" else 0.0
        assert (got[name].double() - want[name]).norm() / max(want[name].norm().item(), floor, 1e-30) < 2e-4, name


def compare(op, inputs, state, ids, limit=2e-4):
    """Triton in fp32 against eager in fp64: output, final state and every gradient."""
    want = outputs(getattr(eager, op), torch.float64, inputs, state, ids)
    with kernels.use_backend("triton"):
        got = outputs(getattr(kernels, op), torch.float32, inputs, state, ids)
    for name in want:
        floor = 0.01 * want[name].numel() ** 0.5 if name == "g" else 0.0
        assert (got[name].double() - want[name]).norm() / max(want[name].norm().item(), floor, 1e-30) < limit, name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gate", ["none", "zero", "wide"])
@pytest.mark.parametrize("op", ["delta_rule", "linear_attention"])
def test_a_sequence_in_slices(op, gate, packed, monkeypatch):
    """Scans of 5 chunks in 3 slices, the last one shorter and ending within a chunk."""
    monkeypatch.setattr(triton_recurrence, "SLICES", {"programs": 6, "chunks": 1})
    inputs = delta_inputs(1, 300, 1, 2, 16, 24, gate, correlated=True)
    if op == "linear_attention":
        inputs.pop("beta")
    triton_recurrence._plan.cache_clear()
    made = triton_recurrence.plan(inputs["q"], inputs["v"], op == "delta_rule")
    assert (made.slices, made.chunks) == (3, 2)
    compare(op, inputs, torch.randn(1, 2, 16, 24, device=DEVICE), documents(1, 300) if packed else None)
    triton_recurrence._plan.cache_clear()


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("K, V, n", [(16, 24, 2), (40, 24, 3), (24, 40, 5)])
def test_matrices_of_slices(K, V, n, state, monkeypatch):
    """Those of the delta rule, which without a gradient are made by the scan that makes the slices' states: of two slices, of as
    many as there are chunks, K below and above V, heads that share keys."""
    monkeypatch.setattr(triton_recurrence, "SLICES", {"programs": 2 * n * triton.cdiv(V, 32), "chunks": 1})
    triton_recurrence._plan.cache_clear()
    inputs = delta_inputs(1, 300, 1, 2, K, V, "mild", correlated=True)
    assert triton_recurrence.plan(inputs["q"], inputs["v"], True).slices == n
    h0 = torch.randn(1, 2, K, V, device=DEVICE) if state else None
    leaves = {n: x.double().requires_grad_() for n, x in inputs.items()}
    want = eager.delta_rule(**leaves, initial_state=h0 if h0 is None else h0.double())
    for x, y in zip(triton_recurrence.delta_rule(**inputs, initial_state=h0), want, strict=True):
        assert relative_error(x.double(), y) < 2e-5
    ones = {n: x.requires_grad_() for n, x in inputs.items()}
    out, weight = triton_recurrence.delta_rule(**ones, initial_state=h0)[0], torch.randn(want[0].shape, device=DEVICE)
    got = torch.autograd.grad((out * weight).sum(), list(ones.values()))  # none of the final state
    for x, y in zip(got, torch.autograd.grad((want[0] * weight).sum(), list(leaves.values())), strict=True):
        assert relative_error(x.double(), y) < 2e-4
    triton_recurrence._plan.cache_clear()


def test_the_decay_of_a_long_slice(monkeypatch):
    """Two slices of 65 chunks, the second one ragged, whose decays are summed 64 chunks at a time."""
    monkeypatch.setattr(triton_recurrence, "SLICES", {"programs": 2, "chunks": 1})
    triton_recurrence._plan.cache_clear()
    T = 129 * 64 + 3
    inputs = {n: x for n, x in delta_inputs(1, T, 1, 1, 16, 16, "mild").items() if n != "beta"}
    inputs["g"] *= 1e-3
    compare("linear_attention", inputs, torch.randn(1, 1, 16, 16, device=DEVICE), None)
    triton_recurrence._plan.cache_clear()


@pytest.mark.parametrize("K, V, heads", [(16, 24, (1, 2)), (16, 40, (2, 2)), (40, 16, (2, 2))])
def test_a_constant_decay_in_slices(K, V, heads, monkeypatch):
    """Without states in memory too, where the backward exchanges K and V and with them how many slices there are."""
    monkeypatch.setattr(triton_recurrence, "SLICES", {"programs": 6, "chunks": 1})
    triton_recurrence._plan.cache_clear()
    inputs = delta_inputs(1, 300, *heads, K, V, "none")
    inputs = {n: inputs[n] for n in "qkv"}
    g, state = -0.1 * torch.rand(2, device=DEVICE), torch.randn(1, 2, K, V, device=DEVICE)
    want = outputs(functools.partial(eager.linear_attention, g=g.double()), torch.float64, inputs, state, None)
    got = outputs(functools.partial(triton_recurrence.linear_attention, g=g), torch.float32, inputs, state, None)
    for name in want:
        assert relative_error(got[name].double(), want[name]) < 2e-4, name
    triton_recurrence._plan.cache_clear()


@pytest.mark.parametrize("programs", [1, 20, 1000])
@pytest.mark.parametrize(
    "shape, gate, packed",
    [
        ((1, 130, 2, 8, 24, 40), "wide", False),
        ((2, 130, 1, 3, 16, 8), "extreme", True),
        ((1, 70, 1, 3, 136, 72), "mild", False),
        ((1, 130, 2, 6, 32, 16), "none", True),
        ((1, 70, 1, 3, 72, 24), "zero", False),
        ((1, 130, 1, 4, 16, 16), "zero", True),
    ],
)
def test_heads_that_share_keys(shape, gate, packed, programs, monkeypatch):
    """Programs that sum over all heads of a key, over some of them, one a head; every element of a result is written."""
    monkeypatch.setattr(triton_recurrence, "PARTS", {"programs": programs})
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **kw: empty(*sizes, **kw).fill_(float("nan")))
    triton_recurrence._plan.cache_clear()
    B, T, Hk, H, K, V = shape
    inputs = delta_inputs(*shape, gate)
    inputs.pop("beta")
    made = triton_recurrence.plan(inputs["q"], inputs["v"], False)
    assert made.parts == {1: 1, 1000: H // Hk}.get(programs, made.parts) and made.heads * made.parts >= H // Hk
    compare("linear_attention", inputs, torch.randn(B, H, K, V, device=DEVICE), documents(B, T) if packed else None)
    triton_recurrence._plan.cache_clear()


@pytest.mark.parametrize("packed", [False, True])
def test_gates_of_other_sizes(packed):
    """One decay a head stands for those of all tokens; what does not is refused: a kernel would read beyond its end."""
    inputs = delta_inputs(2, 130, 1, 2, 16, 24, "none") | {"g": -torch.rand(2, device=DEVICE)}
    compare("delta_rule", inputs, torch.randn(2, 2, 16, 24, device=DEVICE), documents(2, 130) if packed else None)
    for name in ("g", "beta"):
        with pytest.raises(RuntimeError, match="expanded size"):
            triton_recurrence.delta_rule(**inputs | {name: torch.rand(2, 129, 2, device=DEVICE)})


def test_a_beta_of_zero_or_less():
    """A beta of 0 writes nothing, and its own gradient, which would need a division by it, is 0; all others are right."""
    inputs = delta_inputs(1, 70, 1, 2, 16, 24, "mild", beta_max=1.0)
    inputs["beta"] = torch.where(torch.rand(1, 70, 2, device=DEVICE) < 0.3, 0.0, inputs["beta"] - 0.3)
    state, none = torch.randn(1, 2, 16, 24, device=DEVICE), inputs["beta"] == 0
    want = outputs(eager.delta_rule, torch.float64, inputs, state, None)
    got = outputs(triton_recurrence.delta_rule, torch.float32, inputs, state, None)
    assert (got["beta"][none] == 0).all() and (want["beta"][none] != 0).all()
    want["beta"] = want["beta"].masked_fill(none, 0.0)
    assert all(relative_error(got[name].double(), want[name]) < 2e-4 for name in want)


@pytest.mark.parametrize("packed", [False, True])
def test_the_normalised_form(packed):
    inputs = {n: x.abs() if n in "qk" else x for n, x in delta_inputs(2, 130, 2, 2, 16, 24, "none").items() if n in "qkv"}
    state = torch.rand(2, 2, 16, 25, device=DEVICE)
    compare("normalized_linear_attention", inputs, state, documents(2, 130) if packed else None)


@pytest.mark.parametrize("K, V", [(10, 3), (136, 20), (256, 48), (20, 256)])
def test_head_widths_that_are_no_powers_of_two_or_wide(K, V):
    compare("delta_rule", delta_inputs(1, 70, 1, 1, K, V, "mild"), torch.randn(1, 1, K, V, device=DEVICE), None)


@triton.jit
def inverse_kernel(L, X, HALF: tl.constexpr):
    o = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(X + o, triton_recurrence.inverse_64(tl.load(L + o), "tf32x3", HALF))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("length, beta", [(1.0, 2.0), (4.0, 2 / 16), (4.0, 2.0), (100.0, 2.0)])
def test_the_inverse(length, beta, half):
    """Right where beta |k|^2 <= 2; in fp16 finite beyond, where entries grow to 1e19 and more."""
    k = length * unit(0.9 * torch.randn(16) + 0.3 * torch.randn(64, 16)).to(DEVICE)
    L = (beta * torch.rand(64, 1, device=DEVICE) * k @ k.T).tril(-1)
    X = torch.empty_like(L)
    inverse_kernel[(1,)](L, X, half)
    if beta * length**2 <= 2:
        assert relative_error(X.double(), torch.linalg.inv(torch.eye(64, device=DEVICE) + L.double())) < (4e-3 if half else 2e-5)
    elif half:
        assert X.isfinite().all()


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU multiplies 16-bit operands in every other test")
@pytest.mark.parametrize(
    "gate, packed, length", [("mild", False, 1.0), ("zero", True, 1.0), ("none", False, 1.0), ("zero", False, 4.0)]
)
@pytest.mark.parametrize("op", ["delta_rule", "linear_attention"])
def test_operands_of_16_bits(op, gate, packed, length, monkeypatch):
    """The interpreter, whose bf16 operands are fp32, knows fp16: the products that are scaled into its range, for values and
    gradients of any size. Keys of length 4, with beta in proportion, too."""
    half = {"DOT": tl.float16, "PREC": "tf32"}
    monkeypatch.setattr(triton_recurrence, "operand_types", lambda *_: half)
    triton_recurrence._plan.cache_clear()
    inputs = delta_inputs(2, 130, 1, 2, 32, 24, gate, correlated=gate != "mild")
    inputs["k"], inputs["beta"], inputs["v"] = length * inputs["k"], inputs["beta"] / length**2, 30 * inputs["v"]
    if op == "linear_attention":
        inputs.pop("beta")
    inputs = {n: x.half().float() if n in "qkv" else x for n, x in inputs.items()}
    state, ids = 30 * torch.randn(2, 2, 32, 24), documents(2, 130) if packed else None
    want = outputs(getattr(eager, op), torch.float64, inputs, state, ids)
    got = outputs(getattr(triton_recurrence, op), torch.float32, inputs, state, ids, torch.float16)
    triton_recurrence._plan.cache_clear()
    for name in want:
        assert relative_error(got[name].double(), want[name]) < (1e-2 if name == "g" else 6e-3), name


def test_eager_is_the_reference_here():
    """The test above compares with eager in fp64, for speed: once, that it is the token loop."""
    inputs = {n: x.double() for n, x in delta_inputs(2, 130, 1, 2, 16, 16, "wide").items()}
    ids = documents(2, 130)
    assert relative_error(eager.delta_rule(**inputs, segment_ids=ids)[0], reference.delta_rule(**inputs, segment_ids=ids)[0]) < 1e-9


def test_strided_inputs_and_an_expanded_gradient():
    inputs = delta_inputs(1, 70, 2, 2, 16, 16, "mild")
    packed = torch.cat([inputs["q"], inputs["k"], inputs["v"]], dim=-1)
    q, k, v = packed.split(16, dim=-1)
    rest = {"g": inputs["g"], "beta": inputs["beta"].transpose(1, 2).contiguous().transpose(1, 2)}
    want = triton_recurrence.delta_rule(**inputs)[0]
    assert torch.equal(triton_recurrence.delta_rule(q, k, v, **rest)[0], want)
    v = inputs["v"].clone().requires_grad_()
    triton_recurrence.delta_rule(inputs["q"], inputs["k"], v, **rest)[0].sum().backward()  # a gradient of stride 0
    w = inputs["v"].double().requires_grad_()
    eager.delta_rule(inputs["q"].double(), inputs["k"].double(), w, **rest)[0].sum().backward()
    assert relative_error(v.grad.double(), w.grad) < 2e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_custom_operators_are_sound(dtype):
    """PyTorch's own checks of schema, fake tensors and autograd registration."""
    inputs = delta_inputs(1, 66, 1, 2, 16, 16, "mild")
    q, k, v, g, beta = ((x.to(dtype) if n in "qkv" else x).requires_grad_() for n, x in inputs.items())
    arguments = (q, k, v, g, beta, torch.randn(1, 2, 16, 16, device=DEVICE, requires_grad=True), None, 0.25, True)
    torch.library.opcheck(triton_recurrence._forward, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["none", "zero", "mild", "wide"])
@pytest.mark.parametrize(
    "shape", [(2, 1024, 4, 4, 128, 128), (2, 1000, 2, 4, 64, 64), (2, 333, 2, 2, 96, 80), (1, 4096, 2, 2, 128, 128)]
)
def test_delta_rule_in_bf16(shape, gate):
    hard = gate == "zero"
    inputs = delta_inputs(*shape, gate, correlated=hard, beta_max=2.0 if hard else 1.0)
    inputs = {n: x if n in ("g", "beta") or x is None else x.bfloat16() for n, x in inputs.items()}
    state = torch.zeros(shape[0], shape[3], *shape[4:], device=DEVICE)
    want = outputs(eager.delta_rule, torch.float64, inputs, state, None)
    got = [outputs(triton_recurrence.delta_rule, torch.float32, inputs, state, None, torch.bfloat16) for _ in range(30)]
    for name in want:
        limit = (3e-2 if name == "beta" else 2e-2) if hard else {"out": 6e-3, "g": 2e-2, "beta": 2e-2}.get(name, 1e-2)
        assert relative_error(got[0][name].double(), want[name]) < limit, name
        assert all(torch.equal(got[0][name], other[name]) for other in got[1:]), name


@pytest.mark.gpu
@pytest.mark.parametrize("correlated", [False, True])
def test_large_keys_leave_everything_finite(correlated):
    """Keys of lengths up to 4 with beta up to 1: the state grows from token to token, beyond fp16 but not beyond bf16."""
    inputs = delta_inputs(2, 200, 2, 2, 128, 128, "mild", correlated, beta_max=0.25 if correlated else 1.0)
    inputs["k"] = inputs["k"] * 4 * torch.rand(2, 200, 2, 1, device=DEVICE)
    state = torch.zeros(2, 2, 128, 128, device=DEVICE)
    got = outputs(triton_recurrence.delta_rule, torch.float32, inputs, state, None, torch.bfloat16)
    for name, x in got.items():
        assert x.isfinite().all(), name


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["none", "mild", "wide"])
@pytest.mark.parametrize(
    "shape", [(2, 1024, 4, 4, 128, 128), (2, 1000, 1, 8, 128, 64), (2, 333, 2, 2, 96, 80), (1, 4096, 2, 2, 64, 64)]
)
def test_linear_attention_in_bf16(shape, gate):
    inputs = delta_inputs(*shape, gate)
    inputs.pop("beta")
    inputs = {n: x if n == "g" or x is None else x.bfloat16() for n, x in inputs.items()}
    state = torch.zeros(shape[0], shape[3], *shape[4:], device=DEVICE)
    want = outputs(eager.linear_attention, torch.float64, inputs, state, None)
    got = [outputs(triton_recurrence.linear_attention, torch.float32, inputs, state, None, torch.bfloat16) for _ in range(30)]
    for name in want:
        assert relative_error(got[0][name].double(), want[name]) < {"out": 6e-3, "g": 2e-2}.get(name, 1e-2), name
        assert all(torch.equal(got[0][name], other[name]) for other in got[1:]), name


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["delta_rule", "linear_attention"])
def test_tensors_of_more_than_two_to_the_31_elements(op):
    """The last head of 72, whose offsets pass 2^31, is what it is alone. Run it with `pytest -n 0 -m gpu -k 31_elements`."""
    if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1":
        pytest.skip("takes the memory of its neighbours: run it with -n 0")
    if torch.cuda.mem_get_info()[0] < MEMORY:
        pytest.skip(f"needs {MEMORY // 2**30} GiB of free memory")
    T, H = 2**18 + 100, 72
    make = functools.partial(torch.randn, 1, T, H, 128, device=DEVICE, dtype=torch.bfloat16)
    inputs = {"q": make(), "k": make() * 128**-0.5, "v": make(), "g": -0.1 * torch.rand(1, T, H, device=DEVICE)}
    if op == "delta_rule":
        inputs["beta"] = torch.rand(1, T, H, device=DEVICE)
    assert inputs["q"].numel() > 2**31

    def run(x):
        x = {n: y.detach().requires_grad_() for n, y in x.items()}
        out = getattr(triton_recurrence, op)(**x)[0]
        return [out, *torch.autograd.grad(out[:, -4096:].float().sum(), list(x.values()))]

    whole, alone = run(inputs), run({n: x[:, :, -1:].contiguous() for n, x in inputs.items()})
    for x, y in zip(whole, alone, strict=True):  # alone it runs in more slices
        assert relative_error(x[:, :, -1:].float(), y.float()) < 5e-3
