"""Cross-entropy of a linear head in Triton: fp32 in the interpreter on a CPU, bf16 on a GPU, against its definition in fp64."""

import pytest
import torch
from triton_cases import DEVICE, poison, relative_error

import kernels
from kernels import eager, reference, triton_loss


def loss_inputs(N, d, V, ignored=0.2):
    x, weight, labels = torch.randn(N, d), torch.randn(V, d), torch.randint(V, (N,))
    return x.to(DEVICE), weight.to(DEVICE), torch.where(torch.rand(N) < ignored, -1, labels).to(DEVICE)


def results(op, dtype, inputs, g, low=None):
    """nll and the gradients of (nll * g).sum(); x as `low`."""
    x, weight = inputs[0].to(low or dtype).requires_grad_(), inputs[1].to(dtype).requires_grad_()
    nll = op(x, weight, inputs[2])
    dx, dw = torch.autograd.grad(nll, (x, weight), g.to(nll.dtype).expand(nll.shape))
    return {"nll": nll, "x": dx, "weight": dw}


def agree(got, want, limit):
    for name in want:
        assert relative_error(got[name].double(), want[name]) < limit, name


@pytest.fixture(params=[0, 1, 5])
def short_chunks(monkeypatch, request):
    """Chunks of 16 tokens, blocks of 64 of the vocabulary, of which none, one or all stay in registers."""
    monkeypatch.setattr(triton_loss, "chunk_length", lambda N, row, memory: min(N, 16))
    options = {"cross_entropy": {"BLOCK": 64, "KEPT": request.param, "num_warps": 4, "num_stages": 1}}
    monkeypatch.setattr(triton_loss, "LAUNCH", dict.fromkeys(triton_loss.LAUNCH, options))


UPSTREAM = {"number": lambda N: torch.tensor(0.25), "same": lambda N: torch.full((N,), 0.25), "any": lambda N: torch.randn(N)}


@pytest.mark.parametrize("upstream", UPSTREAM)
@pytest.mark.parametrize("shape", [(37, 24, 150), (1, 16, 64), (16, 8, 7)])
def test_in_fp32(shape, upstream, short_chunks):
    inputs, g = loss_inputs(*shape), UPSTREAM[upstream](shape[0]).to(DEVICE)
    agree(
        results(triton_loss.linear_cross_entropy, torch.float32, inputs, g),
        results(reference.linear_cross_entropy, torch.float64, inputs, g),
        1e-5,
    )


def test_the_sum_and_its_gradient(short_chunks):
    inputs = loss_inputs(37, 24, 150)
    sums = []
    for module, dtype in ((triton_loss, torch.float32), (eager, torch.float64)):
        x, weight = (u.to(dtype).requires_grad_() for u in inputs[:2])
        total, nll = module.linear_cross_entropy_sum(x, weight, inputs[2])
        assert not nll.requires_grad and relative_error(nll.sum(), total.detach()) < 1e-6
        sums.append({"total": total, **dict(zip(("x", "weight"), torch.autograd.grad(total / 7, (x, weight)), strict=True))})
    agree(*sums, 1e-5)


def test_no_labels_at_all(short_chunks):
    x, weight, labels = loss_inputs(20, 8, 50, ignored=1.1)
    got = results(triton_loss.linear_cross_entropy, torch.float32, (x, weight, labels), torch.randn(20, device=DEVICE))
    assert all((u == 0).all() for u in got.values())


def test_a_label_that_is_no_token_shows():
    x, weight, labels = loss_inputs(4, 8, 50, ignored=0.0)
    labels[2] = 50
    assert triton_loss.linear_cross_entropy(x, weight, labels).isnan().tolist() == [False, False, True, False]


def test_without_gradients_none_are_computed(monkeypatch):
    inputs = loss_inputs(20, 8, 50)
    monkeypatch.setattr(triton_loss, "_add_product", None)
    with torch.no_grad():
        x, weight, labels = inputs[0].requires_grad_(), inputs[1], inputs[2]
        assert relative_error(triton_loss.linear_cross_entropy(x, weight, labels), eager.linear_cross_entropy(*inputs)) < 1e-5


def test_chunks_are_equal_and_fit():
    assert triton_loss.chunk_length(32768, 2 * 50304, 2**32) == 32768
    assert triton_loss.chunk_length(32768, 2 * 50304, 2**31) == 16384
    assert triton_loss.chunk_length(65537, 2 * 50304, 2**32) == 33024
    assert triton_loss.chunk_length(100, 2 * 50304, 2**30) == 100
    assert triton_loss.chunk_length(10**6, 2 * 10**7, 2**30) == 1024
    for N in (1, 255, 4097, 20000, 10**6):
        for memory in (2**27, 2**30, 2**32):
            assert triton_loss.chunk_length(N, 2 * 50304, memory) * 2 * 50304 <= max(memory, 1024 * 2 * 50304)


def test_logits_far_apart(short_chunks):
    """A thread's largest logit may lie hundreds below the row's: what it kept is scaled down to 0, not to NaN."""
    x, weight = torch.ones(3, 1, device=DEVICE), torch.randn(150, 1, device=DEVICE)
    weight[:70] -= 400
    weight[140:] += 300
    inputs = x, weight, torch.tensor([0, 145, -1], device=DEVICE)
    agree(
        results(triton_loss.linear_cross_entropy, torch.float32, inputs, torch.tensor(1.0, device=DEVICE)),
        results(reference.linear_cross_entropy, torch.float64, inputs, torch.tensor(1.0, device=DEVICE)),
        1e-5,
    )


def test_outputs_are_written_everywhere(monkeypatch, short_chunks):
    poison(monkeypatch)
    got = results(triton_loss.linear_cross_entropy, torch.float32, loss_inputs(37, 24, 150), torch.randn(37, device=DEVICE))
    assert all(u.isfinite().all() for u in got.values())


def test_the_custom_operators_are_sound():
    x, weight, labels = loss_inputs(9, 16, 50)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for op in (triton_loss._forward, triton_loss._forward_sum):
        torch.library.opcheck(op, (x, weight, labels, True), test_utils=tests)
    nll, dx, dw = (u.detach() for u in triton_loss._forward(x, weight, labels, True))
    torch.library.opcheck(triton_loss._backward, (x.detach(), weight.detach(), labels, dx, dw, nll), test_utils=tests)


def gradients(f, *leaves):
    loss = f(*leaves)
    return [loss, *torch.autograd.grad(loss, leaves)]


def test_with_convolution_and_norms_in_one_compiled_graph():
    x, weight, gain = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((1, 20, 32), (32, 4), (32,)))
    head, labels = torch.randn(50, 32, device=DEVICE, requires_grad=True), torch.randint(50, (20,), device=DEVICE)

    def model(x, weight, gain, head):
        y, _ = kernels.causal_conv1d(x, weight, activation="silu", l2_heads=(1, 16))
        y = kernels.gated_rms_norm(kernels.rms_norm(y, gain), x, gain)[0]
        total, _ = kernels.linear_cross_entropy_sum(y, head, labels)
        return total / 20 + kernels.linear_cross_entropy(y, head, labels).mean()

    want = gradients(model, x, weight, gain, head)
    with kernels.use_backend("triton"):
        for f in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
            assert all(relative_error(a, b) < 1e-5 for a, b in zip(gradients(f, x, weight, gain, head), want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("upstream", UPSTREAM)
@pytest.mark.parametrize("shape", [(1, 768, 50304), (127, 768, 50257), (1000, 256, 50304), (20000, 128, 32000), (4096, 64, 257)])
def test_in_bf16(shape, upstream):
    N, d, V = shape
    x, weight, labels = loss_inputs(*shape)
    inputs = x.bfloat16(), (weight * d**-0.5).bfloat16().float(), labels
    g = UPSTREAM[upstream](N).to(DEVICE)
    want = results(eager.linear_cross_entropy, torch.float64, inputs, g)
    got = [results(triton_loss.linear_cross_entropy, torch.float32, inputs, g, low=torch.bfloat16) for _ in range(30)]
    agree(got[0], want, 1e-2)
    assert all(torch.equal(got[0][n], other[n]) for other in got[1:] for n in want)
