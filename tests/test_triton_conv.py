"""The short convolution in Triton: fp32 in the interpreter on a CPU, bf16 on a GPU, against eager in fp64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor
from triton_cases import DEVICE, LENGTHS, documents, poison, relative_error

import kernels
import model
from configurator import ModelConfig
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


def in_slices(split, strided=False):
    """The convolution's y in slices and put together again, where their gradients are slices of one tensor if `strided`."""

    def op(*args, **kwargs):
        ys, final = triton_conv.causal_conv1d(*args, split=split, **kwargs)
        assert [y.shape[2] for y in ys] == split
        return torch.cat(ys if strided else [y * 1.0 for y in ys], -1), final

    return op


@pytest.mark.parametrize(
    ("split", "l2_heads", "left_out", "packed", "strided"),
    [
        ([128, 128], None, (), True, False),
        ([130, 3, 17], None, ("initial_state",), False, True),
        ([32, 16, 20], (3, 16), (), True, True),
        ([16, 7, 5], (1, 16), ("bias",), False, False),
        ([16, 32, 16], (2, 32), (), True, False),
    ],
)
def test_slices_are_those_of_the_whole(split, l2_heads, left_out, packed, strided, monkeypatch):
    """Bit for bit, and in one pass but for the last case, in which a slice begins within a head."""
    T, direct, slices = 37, triton_conv._direct, []
    monkeypatch.setattr(triton_conv, "_direct", lambda *inputs: slices.append(inputs[5]) or direct(*inputs))
    inputs, ids = some(conv_inputs(1, T, sum(split), 4), *left_out), documents(1, T) if packed else None
    options = dict(activation="silu", l2_heads=l2_heads)
    want = results(triton_conv.causal_conv1d, torch.float32, inputs, ids, **options)
    got = results(in_slices(split, strided), torch.float32, inputs, ids, **options)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert slices == [[sum(split)], [sum(split)] if l2_heads == (2, 32) else split]


def test_outputs_are_written_everywhere(monkeypatch):
    poison(monkeypatch)
    inputs = conv_inputs(1, 37, 20, 4)
    for op in (triton_conv.causal_conv1d, in_slices([16, 4])):
        got = results(op, torch.float32, inputs, documents(1, 37), activation="silu", l2_heads=(1, 16))
        assert all(x.isfinite().all() for x in got.values())


def test_the_custom_operators_are_sound():
    x, weight, bias, state = (x.to(DEVICE).requires_grad_() for x in conv_inputs(1, 9, 40, 4).values())
    arguments = (x, weight, bias, state, documents(1, 9), [16, 24], True, 1, 16, 1e-6)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(triton_conv._forward, arguments, test_utils=tests)
    dys = [torch.randn(1, 9, n, device=DEVICE) for n in (16, 24)]
    torch.library.opcheck(triton_conv._backward, (*(x.detach() for x in arguments[:5]), dys, *arguments[5:]), test_utils=tests)


def test_slices_without_a_gradient_and_slices_in_every_backend():
    inputs = {n: x.to(DEVICE) for n, x in conv_inputs(1, 7, 24, 3).items()}
    x = inputs["x"].requires_grad_()
    first, _ = triton_conv.causal_conv1d(**inputs, split=[8, 16])[0]
    whole = triton_conv.causal_conv1d(**inputs)[0]
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (first, whole[..., :8])))
    for backend in (reference, eager):
        for y, want in zip(backend.causal_conv1d(**inputs, split=[8, 16])[0], whole.split([8, 16], -1), strict=True):
            assert relative_error(y, want) < 1e-5
    with pytest.raises(ValueError, match="adds up to 20: x has 24"):
        triton_conv.causal_conv1d(**inputs, split=[8, 12])


class Cats(TorchDispatchMode):
    """The shapes of what is put together within this mode."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if func is torch.ops.aten.cat.default:
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("name", ["gdn", "gdn(conv=0)", "kda", "mamba2", "lightning", "lightning(conv=4)", "linear"])
def test_no_gradients_are_put_together(name, monkeypatch):
    """Those of the slices of a projection and of a convolution are read where they are: gradients of weights and of the two numbers
    a head apart, a mixer's backward makes no tensor out of parts."""
    if triton_conv.launch.interpreted(triton_conv.forward_kernel):
        monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: None)  # what the kernels compute does not matter here
    B, T, config = 2, 40, ModelConfig(layers=name, n_layer=1, n_head=2, n_embd=64, vocab_size=8, block_size=40)
    mixer, x = model.Model(config).blocks[0].mixer.to(DEVICE), torch.randn(B, T, 64, device=DEVICE, requires_grad=True)

    def put_together():
        with kernels.use_backend("triton"):
            y = mixer(x, segment_ids=documents(B, T))
            with Cats() as cats:
                y.sum().backward()
        return [shape for shape in cats.shapes if shape[:2] == (B, T) and shape[2] > 4 * config.n_head]

    assert put_together() == []
    monkeypatch.setattr(model.SplitLinear, "forward", lambda self, x: torch.nn.Linear.forward(self, x).split(self.split, -1))
    assert len(put_together()) == 1


def test_what_it_does_not_take():
    x = torch.zeros(1, 4, 24)
    assert "width of 9" in triton_conv.supports(x, torch.zeros(24, 9))
    assert "float64" in triton_conv.supports(x.double(), torch.zeros(24, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize(("D", "W", "l2_heads"), [(512, 4, None), (200, 4, None), (640, 4, (4, 128)), (96, 8, (1, 64))])
@pytest.mark.parametrize("sliced", [False, True])
def test_in_bf16(T, D, W, l2_heads, sliced, packed):
    inputs = {n: x.bfloat16() if n in ("x", "initial_state") else x for n, x in conv_inputs(2, T, D, W).items()}
    ids, options = documents(2, T) if packed else None, dict(activation="silu", l2_heads=l2_heads)
    want = results(eager.causal_conv1d, torch.float64, inputs, ids, **options)
    first = 2 * l2_heads[1] if D == 640 else 64
    op = in_slices([first, D - first]) if sliced else triton_conv.causal_conv1d
    got = [results(op, torch.float32, inputs, ids, low=torch.bfloat16, **options) for _ in range(30)]
    agree(got[0], want, 6e-3)
    assert all(torch.equal(got[0][n], other[n]) for other in got[1:] for n in want)
