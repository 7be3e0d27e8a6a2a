"""Triton kernels: in the interpreter on a CPU, compiled ahead of time for sm_90 without a GPU, and on a GPU where there is one."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from test_kernels import relative_error, unit

import kernels
from kernels import eager, reference, triton_recurrence

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def delta_inputs(B, T, Hk, H, K, V, gate, correlated=False, beta_max=2.0):
    q, k = torch.randn(B, T, Hk, K), torch.randn(B, T, Hk, K)
    if correlated:
        k = 0.9 * torch.randn(1, 1, Hk, K) + 0.1 * k
    g = {
        "none": None,
        "zero": torch.zeros(B, T, H),
        "mild": -0.2 * torch.rand(B, T, H),
        "wide": torch.log(torch.rand(B, T, H) ** 8),
        "extreme": -1000.0 * (torch.rand(B, T, H) < 0.05),
    }[gate]
    inputs = dict(q=unit(q), k=unit(k), v=torch.randn(B, T, H, V), g=g, beta=beta_max * torch.rand(B, T, H))
    return {n: None if x is None else x.to(DEVICE) for n, x in inputs.items()}


def documents(B, T):
    """Ids of documents of 1 token and more, across chunk edges, the last row with padding."""
    ids = torch.ones(B, T, dtype=torch.int32)
    for i, cut in enumerate((1, 2, 60, 64, 65, 100)):
        ids[:, cut:] = i + 2
    ids[-1, T - 9 :] = 0
    return ids.to(DEVICE)


def outputs(op, dtype, inputs, state, ids, low=None):
    """Output, final state and every gradient of a fixed random functional, inputs as `dtype` (q, k, v as `low`)."""
    leaves = {n: x.to(low if low and n in "qkv" else dtype).requires_grad_() for n, x in inputs.items() if x is not None}
    state = state.to(dtype).clone().requires_grad_()
    out, final = op(**{n: leaves.get(n) for n in inputs}, initial_state=state, segment_ids=ids)
    generator = torch.Generator(DEVICE).manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, device=DEVICE, dtype=torch.float64).to(x.dtype) for x in (out, final)]
    loss = (out * weights[0]).sum() + (final * weights[1]).sum()
    grads = torch.autograd.grad(loss, [*leaves.values(), state])
    return {"out": out, "final": final, **dict(zip([*leaves, "state"], grads, strict=True))}


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
    for name in want:  # merges of the inverse are in tf32 on a GPU; dg is a difference of terms of order 1, however small it is
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


def test_the_custom_operators_are_sound():
    """PyTorch's own checks of schema, fake tensors and autograd registration."""
    q, k, v, g, beta = (x.requires_grad_() for x in delta_inputs(1, 66, 1, 2, 16, 16, "mild").values())
    arguments = (q, k, v, g, beta, torch.randn(1, 2, 16, 16, device=DEVICE, requires_grad=True), None, 0.25)
    torch.library.opcheck(
        triton_recurrence._forward, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


def test_compiled_for_hopper_without_one():
    """Registers and spills of every kernel on sm_90, in a process without the interpreter."""
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "tests/aot.py"], cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("sm_90") == 20, done.stdout


@pytest.mark.skipif(not CUDA, reason="bf16 needs a GPU: Triton's interpreter keeps bf16 as bit patterns")
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


@pytest.mark.skipif(not CUDA, reason="bf16 needs a GPU: Triton's interpreter keeps bf16 as bit patterns")
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
