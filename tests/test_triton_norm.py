"""The norms in Triton: fp32 in the interpreter on a CPU, bf16 on a GPU, against their definitions in fp64."""

import functools

import pytest
import torch
from triton_cases import DEVICE, poison, relative_error

import kernels
from kernels import reference, triton_norm

CASES = {
    "rms": ("rms_norm", ("weight",), {}),
    "rms1p": ("rms_norm", ("weight",), {"unit_offset": True}),
    "layer": ("layer_norm", ("weight", "bias"), {}),
    "layer, no bias": ("layer_norm", ("weight",), {}),
    "l2": ("l2_norm", (), {}),
    "gate last": ("gated_rms_norm", ("z", "weight"), {}),
    "sigmoid gate last": ("gated_rms_norm", ("z", "weight"), {"activation": "sigmoid"}),
    "gate first": ("gated_rms_norm", ("z", "weight"), {"gate_first": True}),
}


def norm_inputs(names, *shape, groups=None):
    D = shape[-1]
    of = {"weight": (D,) if groups is None else (groups, D), "bias": (D,), "z": shape}
    inputs = {"x": 3.0 * torch.randn(shape)} | {n: torch.randn(of[n]) for n in names}
    return {n: x.to(DEVICE) for n, x in inputs.items()}


def results(op, dtype, inputs, low=None):
    """y and every gradient of a fixed random functional; x and z as `low`."""
    leaves = {n: x.to(low if low and n in "xz" else dtype).requires_grad_() for n, x in inputs.items()}
    y = op(**leaves)
    generator = torch.Generator(DEVICE).manual_seed(1)
    weights = torch.randn(y.shape, generator=generator, device=DEVICE, dtype=torch.float64).to(y.dtype)
    return {"y": y, **dict(zip(leaves, torch.autograd.grad((y * weights).sum(), list(leaves.values())), strict=True))}


def pair(case, *shape, groups=None):
    """The definition, the operator in Triton and their inputs."""
    name, names, options = CASES[case]
    definition, op = (functools.partial(getattr(m, name), **options) for m in (reference, triton_norm))
    return definition, op, norm_inputs(names, *shape, groups=groups)


def agree(got, want, limit):
    for name in want:
        assert relative_error(got[name].double(), want[name]) < limit, name


@pytest.mark.parametrize("shape", [(2, 5, 40), (3, 7, 2, 16), (1, 96), (2, 9, 200)])
@pytest.mark.parametrize("case", CASES)
def test_in_fp32(case, shape):
    definition, op, inputs = pair(case, *shape)
    agree(results(op, torch.float32, inputs), results(definition, torch.float64, inputs), 1e-5)


@pytest.mark.parametrize("case", ["rms", "gate first"])
def test_a_weight_for_each_group(case):
    definition, op, inputs = pair(case, 2, 35, 3, 24, groups=3)
    agree(results(op, torch.float32, inputs), results(definition, torch.float64, inputs), 1e-5)


def test_more_rows_than_programs(monkeypatch):
    table = {key: {n: options | {"elements": 128} for n, options in row.items()} for key, row in triton_norm.LAUNCH.items()}
    for row in table.values():
        row["backward_narrow"] = row["backward_narrow"] | {"programs": 4}
    monkeypatch.setattr(triton_norm, "LAUNCH", table)
    monkeypatch.setattr(triton_norm, "_plan", triton_norm._plan.__wrapped__)
    for groups in (None, 2):
        definition, op, inputs = pair("gate last", 2, 30, 2, 40, groups=groups)
        agree(results(op, torch.float32, inputs), results(definition, torch.float64, inputs), 1e-5)


def test_slices_of_a_projection_and_strided_gradients():
    wide, weight = torch.randn(2, 7, 96, device=DEVICE), torch.randn(16, device=DEVICE)
    x, z = wide[..., :32].view(2, 7, 2, 16), wide[..., 40:72].view(2, 7, 2, 16)
    want = triton_norm.gated_rms_norm(x.contiguous(), z.contiguous(), weight)
    assert torch.equal(triton_norm.gated_rms_norm(x, z, weight), want)
    for gradient in (torch.randn(2, 2, 7, 16, device=DEVICE).transpose(1, 2), torch.ones((), device=DEVICE).expand(2, 7, 2, 16)):
        grads = []
        for g in (gradient, gradient.contiguous()):
            leaf = wide.clone().requires_grad_()
            triton_norm.l2_norm(leaf[..., :32].view(2, 7, 2, 16)).backward(g)
            grads.append(leaf.grad)
        assert torch.equal(*grads)


def test_outputs_are_written_everywhere(monkeypatch):
    poison(monkeypatch)
    for case in ("layer", "gate first", "gate last"):
        _, op, inputs = pair(case, 3, 7, 20)
        assert all(x.isfinite().all() for x in results(op, torch.float32, inputs).values())


def test_the_custom_operators_are_sound():
    x, z = (torch.randn(2, 5, 2, 16, device=DEVICE, requires_grad=True) for _ in range(2))
    weight = torch.randn(2, 16, device=DEVICE, requires_grad=True)
    arguments = (x, z, weight, None, 1e-6, 0.0, True, False, triton_norm.GATE_LAST, True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(triton_norm._forward, arguments, test_utils=tests)
    inputs = [None if u is None else u.detach() for u in arguments[:4]]
    torch.library.opcheck(triton_norm._backward, (*inputs, torch.randn_like(x), *arguments[4:]), test_utils=tests)


def test_a_compiler_fuses_norms_itself(monkeypatch):
    monkeypatch.setitem(kernels.PREFERENCE, DEVICE, ("triton", "eager"))
    backends, x = [], torch.randn(3, 16, device=DEVICE)

    def f(x):
        backends.append(kernels.backend_of("l2_norm", DEVICE))
        return kernels.l2_norm(x)

    assert torch.allclose(f(x), torch.compile(f, backend="eager", fullgraph=True)(x), atol=1e-6)
    assert backends == ["triton", "eager"]


def test_what_it_does_not_take():
    x, weight = torch.zeros(2, 4, 8), torch.ones(8)
    assert "float64" in triton_norm.supports_l2_norm(x.double())
    assert "at most" in triton_norm.supports_rms_norm(torch.zeros(1, 20000), torch.ones(20000))
    assert "(3, 8)" in triton_norm.supports_layer_norm(x, torch.ones(3, 8))
    assert "gate" in triton_norm.supports_gated_rms_norm(x, x[:1], weight)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 15, 64, 127, 4096])
@pytest.mark.parametrize("tail", [(768,), (6, 128), (2, 80), (4096,)])
@pytest.mark.parametrize("case", CASES)
def test_in_bf16(case, tail, rows):
    definition, op, inputs = pair(case, rows, *tail)
    inputs = {n: x.bfloat16() if n in "xz" else x for n, x in inputs.items()}
    want = results(definition, torch.float64, inputs)
    got = [results(op, torch.float32, inputs, low=torch.bfloat16) for _ in range(30)]
    agree(got[0], want, 6e-3)
    assert all(torch.equal(got[0][n], other[n]) for other in got[1:] for n in want)
