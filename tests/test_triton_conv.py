"""The short convolution in Triton: fp32 in the interpreter on a CPU, bf16 on a GPU, against eager in fp64."""

import pytest
import torch
from triton_cases import DEVICE, LENGTHS, documents, poison, relative_error

from kernels import eager, reference, triton_conv


def conv_inputs(B, T, D, W):
    return dict(x=torch.randn(B, T, D), weight=torch.randn(D, W), bias=torch.randn(D), initial_state=torch.randn(B, W - 1, D))


def results(op, dtype, inputs, ids, final=True, low=None, **options):
    """y, the final state and every gradient of a fixed random functional; x and the state as `low`."""
    leaves = {n: x.to(DEVICE, low if low and n in ("x", "initial_state") else dtype).requires_grad_() for n, x in inputs.items()}
    y, state = op(**leaves, segment_ids=ids, **options)
    generator = torch.Generator(DEVICE).manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, device=DEVICE, dtype=torch.float64).to(x.dtype) for x in (y, state)]
    loss = (y * weights[0]).sum() + ((state * weights[1]).sum() if final else 0.0)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"y": y, "final": state, **dict(zip(leaves, grads, strict=True))}


def some(inputs, *names):
    return {n: x for n, x in inputs.items() if n not in names}


def agree(got, want, limit):
    for name in want:
        assert relative_error(got[name].double(), want[name]) < limit, name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("shape", "activation", "left_out"),
    [
        ((2, 70, 40, 4), "silu", ()),
        ((1, 40, 40, 4), None, ("bias",)),
        ((1, 33, 130, 3), "silu", ("initial_state",)),
        ((1, 40, 24, 8), "silu", ("bias",)),
        ((2, 9, 8, 2), "silu", ("bias", "initial_state")),
    ],
)
def test_in_fp32(shape, activation, left_out, packed):
    inputs = some(conv_inputs(*shape), *left_out)
    ids = documents(*shape[:2]) if packed else None
    want = results(eager.causal_conv1d, torch.float64, inputs, ids, activation=activation)
    agree(results(triton_conv.causal_conv1d, torch.float32, inputs, ids, activation=activation), want, 1e-5)


@pytest.mark.parametrize("T", [1, 2, 3, 4])
def test_shorter_than_the_window(T):
    for left_out in ((), ("initial_state",)):
        inputs = some(conv_inputs(2, T, 8, 4), *left_out)
        want = results(reference.causal_conv1d, torch.float64, inputs, None, activation="silu")
        agree(results(triton_conv.causal_conv1d, torch.float32, inputs, None, activation="silu"), want, 1e-5)


def test_a_row_of_padding_keeps_its_state():
    inputs, ids = conv_inputs(2, 5, 8, 4), torch.zeros(2, 5, dtype=torch.int32, device=DEVICE)
    ids[1, :2] = torch.tensor([3, 4], dtype=torch.int32)
    want = results(reference.causal_conv1d, torch.float64, inputs, ids, activation="silu")
    agree(results(triton_conv.causal_conv1d, torch.float32, inputs, ids, activation="silu"), want, 1e-5)


@pytest.mark.parametrize(("packed", "width"), [(False, 16), (True, 16), (True, 12)])
def test_with_normalised_heads(packed, width):
    inputs = conv_inputs(2, 30, 2 * width + 4, 4)
    ids = documents(2, 30) if packed else None
    options = dict(activation="silu", l2_heads=(2, width))
    want = results(eager.causal_conv1d, torch.float64, inputs, ids, **options)
    agree(results(triton_conv.causal_conv1d, torch.float32, inputs, ids, **options), want, 2e-5)
    assert (want["y"][0, 0, : 2 * width].unflatten(-1, (2, width)).norm(dim=-1) - 1).abs().max() < 1e-5


def test_normalised_heads_mean_the_same_in_eager_and_reference():
    inputs = {n: x.double() for n, x in conv_inputs(1, 7, 40, 3).items()}
    a, b = (m.causal_conv1d(**inputs, activation="silu", l2_heads=(1, 16))[0] for m in (eager, reference))
    assert relative_error(a, b) < 1e-12
    again = eager.causal_conv1d(**inputs, activation="silu")[0]
    assert relative_error(a, torch.cat([reference.l2_norm(again[..., :16]), again[..., 16:]], -1)) < 1e-12


def test_slices_of_a_projection_and_strided_gradients():
    wide = torch.randn(2, 20, 64, device=DEVICE)
    x, weight = wide[..., 8:40], torch.randn(32, 4, device=DEVICE)
    want = triton_conv.causal_conv1d(x.contiguous(), weight)[0]
    assert torch.equal(triton_conv.causal_conv1d(x, weight)[0], want)
    for gradient in (torch.randn(2, 20, 96, device=DEVICE)[..., 5:37], torch.ones((), device=DEVICE).expand(2, 20, 32)):
        grads = []
        for g in (gradient, gradient.contiguous()):
            leaf = wide.clone().requires_grad_()
            triton_conv.causal_conv1d(leaf[..., 8:40], weight)[0].backward(g)
            grads.append(leaf.grad)
        assert torch.equal(*grads)


def test_outputs_are_written_everywhere(monkeypatch):
    poison(monkeypatch)
    inputs = conv_inputs(1, 37, 20, 4)
    got = results(triton_conv.causal_conv1d, torch.float32, inputs, documents(1, 37), activation="silu", l2_heads=(1, 16))
    assert all(x.isfinite().all() for x in got.values())


def test_the_custom_operators_are_sound():
    x, weight, bias, state = (x.to(DEVICE).requires_grad_() for x in conv_inputs(1, 9, 16, 4).values())
    arguments = (x, weight, bias, state, documents(1, 9), True, 1, 16, 1e-6)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(triton_conv._forward, arguments, test_utils=tests)
    dy = torch.randn(1, 9, 16, device=DEVICE)
    torch.library.opcheck(triton_conv._backward, (*(x.detach() for x in arguments[:5]), dy, *arguments[5:]), test_utils=tests)


def test_what_it_does_not_take():
    x = torch.zeros(1, 4, 24)
    assert "width of 9" in triton_conv.supports(x, torch.zeros(24, 9))
    assert "float64" in triton_conv.supports(x.double(), torch.zeros(24, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize(("D", "W", "l2_heads"), [(512, 4, None), (200, 4, None), (640, 4, (4, 128)), (96, 8, (1, 64))])
def test_in_bf16(T, D, W, l2_heads, packed):
    inputs = {n: x.bfloat16() if n in ("x", "initial_state") else x for n, x in conv_inputs(2, T, D, W).items()}
    ids, options = documents(2, T) if packed else None, dict(activation="silu", l2_heads=l2_heads)
    want = results(eager.causal_conv1d, torch.float64, inputs, ids, **options)
    got = [results(triton_conv.causal_conv1d, torch.float32, inputs, ids, low=torch.bfloat16, **options) for _ in range(30)]
    agree(got[0], want, 6e-3)
    assert all(torch.equal(got[0][n], other[n]) for other in got[1:] for n in want)
