"""Softmax attention in Triton: interpreted in fp32 on a CPU, in bf16 on a GPU, both against eager in fp64."""

import pytest
import torch
from triton_cases import DEVICE, LENGTHS, documents, poison, relative_error

import kernels
from kernels import eager, launch, triton_attention

MASKS = {
    "causal": {},
    "window": {"window": 7},
    "long window": {"window": 100},
    "kept": {"window": 20, "keep_first": 3},
    "sinks": {"sinks": True},
    "all": {"window": 66, "keep_first": 70, "sinks": True, "scale": 0.5},
}
BF16 = torch.bfloat16
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="fp32 runs in the interpreter only, which a GPU replaces")


def inputs(B, T, Hk, H, D, V):
    return [torch.randn(B, T, h, d, device=DEVICE) for h, d in ((H, D), (Hk, D), (Hk, V))]


def outputs(op, dtype, tensors, *, sinks=False, **options):
    """The output and the gradient of a fixed random functional of it in q, k, v and the sinks."""
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    if sinks:
        leaves.append(torch.linspace(-1, 2, tensors[0].shape[2], device=DEVICE, dtype=torch.float64).to(dtype).requires_grad_())
        options["sinks"] = leaves[3]
    out = op(*leaves[:3], **options)
    generator = torch.Generator(DEVICE).manual_seed(1)
    weight = torch.randn(out.shape, generator=generator, device=DEVICE, dtype=torch.float64).to(dtype)
    return dict(zip(("out", "q", "k", "v", "sinks"), [out, *torch.autograd.grad((out * weight).sum(), leaves)], strict=False))


def error(got, want):
    """Relative, but absolute where everything is small: of one visible key the gradients in q and k are 0."""
    return ((got.double() - want).norm() / max(want.norm().item(), 0.1 * want.numel() ** 0.5)).item()


def agree(tensors, tolerance=5e-6, **options):
    want = outputs(eager.softmax_attention, torch.float64, tensors, **options)
    got = outputs(triton_attention.softmax_attention, torch.float32, tensors, **options)
    for name in want:
        assert torch.isfinite(got[name]).all(), name
        assert error(got[name], want[name]) < tolerance, name


@interpreted
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask, packed, monkeypatch):
    poison(monkeypatch)
    agree(inputs(2, 130, 1, 2, 16, 16), **MASKS[mask], segment_ids=documents(2, 130) if packed else None)


@interpreted
@pytest.mark.parametrize("T", [1, 15, 63, 64, 65, 127])
def test_lengths(T):
    agree(inputs(1, T, 1, 1, 16, 16))


@interpreted
@pytest.mark.parametrize("window", [1, 2, 63, 65, 130, 131, 2**40])
def test_windows(window):
    agree(inputs(1, 130, 1, 1, 16, 16), window=window)


@interpreted
@pytest.mark.parametrize("heads", [(1, 4, 16, 16), (2, 4, 24, 40), (1, 1, 12, 20), (1, 1, 96, 128), (1, 1, 200, 256)])
def test_heads(heads):
    """Grouped, widths of their own for keys and values, not powers of two, not multiples of 8, wide."""
    agree(inputs(1, 70, *heads))


@interpreted
@pytest.mark.parametrize("blocks", [(16, 32), (64, 16), (32, 32)])
def test_blocks(blocks, monkeypatch):
    """Every range of blocks at once, whichever of queries and keys has the larger."""
    table = {name: options | {"BM": blocks[0], "BN": blocks[1]} for name, options in triton_attention.LAUNCH[90, 4].items()}
    monkeypatch.setitem(triton_attention.LAUNCH, (90, 4), table)
    monkeypatch.setattr(triton_attention, "_options", triton_attention._options.__wrapped__)
    agree(inputs(2, 130, 1, 2, 16, 16), window=40, keep_first=5, sinks=True, segment_ids=documents(2, 130))
    agree(inputs(1, 130, 1, 2, 16, 16), window=40, keep_first=5)


@interpreted
def test_large_scores_and_padding():
    """Scores of hundreds neither overflow nor lose the softmax; a row of padding alone is 0 and gives no gradient."""
    q, k, v = inputs(2, 66, 1, 1, 16, 16)
    ids = torch.stack([torch.ones(66), torch.zeros(66)]).int()
    agree([100 * q, k, v], tolerance=1e-5, segment_ids=ids)
    got = outputs(triton_attention.softmax_attention, torch.float32, (q, k, v), segment_ids=ids, sinks=True)
    assert all((got[name][1] == 0).all() for name in ("out", "q", "k", "v"))


@interpreted
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", ["causal", "window", "kept"])
def test_earlier_keys(mask, packed):
    """Keys in a cache, at its slots' order, of rows of several lengths, one of them empty."""
    options = MASKS[mask]
    keep, size = options.get("keep_first", 0), options.get("window", 90) + options.get("keep_first", 0)
    length = torch.tensor([85, 2, 0], dtype=torch.int32)
    q, k, v = inputs(3, 70, 1, 2, 16, 24)
    past = [torch.randn(3, size, 1, d) for d in (16, 24)]
    past = (*past, kernels.cache_positions(length, size, keep), length)
    ids = documents(3, 70) if packed else None
    exact = [x.double() for x in (q, k, v, *past[:2])]
    want = eager.softmax_attention(*exact[:3], **options, segment_ids=ids, past=(*exact[3:], *past[2:]))
    with torch.no_grad():
        got = triton_attention.softmax_attention(q, k, v, **options, segment_ids=ids, past=past)
    assert relative_error(got.double(), want) < 1e-6


@interpreted
def test_strided_inputs_and_an_expanded_gradient():
    q, k, v = inputs(1, 70, 2, 2, 16, 16)
    packed = torch.cat([q, k, v], dim=-1)
    want = triton_attention.softmax_attention(q, k, v)
    assert torch.equal(triton_attention.softmax_attention(*packed.split(16, dim=-1)), want)
    v = v.clone().requires_grad_()
    triton_attention.softmax_attention(q, k, v).sum().backward()  # a gradient of stride 0
    w = v.detach().double().requires_grad_()
    eager.softmax_attention(q.double(), k.double(), w).sum().backward()
    assert relative_error(v.grad.double(), w.grad) < 1e-6


@interpreted
def test_the_custom_operators_are_sound():
    """PyTorch's own checks of schema, fake tensors and autograd registration, and a graph without breaks."""
    q, k, v = (x.requires_grad_() for x in inputs(1, 66, 1, 2, 16, 16))
    bounds = triton_attention._bounds(documents(1, 66), (1, 66), q.device, 2)
    arguments = (q, k, v, torch.zeros(2, requires_grad=True), bounds, None, None, None, 9, 0.25)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(triton_attention._forward, arguments, test_utils=tests)

    def loss(q, k, v, ids):
        return triton_attention.softmax_attention(q, k, v, window=9, segment_ids=ids).square().sum()

    want, got = loss(q, k, v, documents(1, 66)), torch.compile(loss, backend="aot_eager", fullgraph=True)(q, k, v, documents(1, 66))
    for a, b in zip(torch.autograd.grad(want, (q, k, v)), torch.autograd.grad(got, (q, k, v)), strict=True):
        assert torch.equal(a, b)


def test_layers_share_what_follows_from_the_ids():
    """Computed once for one tensor of ids while it lives; anew for other ids, for ids written to, and in inference mode."""
    seen = []

    @launch.shared_by_layers
    def first(ids, *rest):
        seen.append(rest)
        return None if ids is None else ids[0, 0].item()

    ids = torch.ones(1, 4, dtype=torch.int32)
    assert [first(ids, 1), first(ids, 1), first(ids, 2), first(ids, 1)] == [1] * 4 and seen == [(1,), (2,)]
    ids[0, 0] = 5
    assert [first(ids, 1), first(ids, 1), first(ids.clone(), 1), first(ids, 1)] == [5] * 4 and len(seen) == 4
    del ids
    assert [first(None, 1), first(None, 1), first(torch.full((1, 4), 7), 1), first(None, 1)] == [None, None, 7, None]
    with torch.inference_mode():
        ids = torch.ones(1, 4)
        assert [first(ids), first(ids)] == [1, 1] and seen[-2:] == [(), ()]


def test_who_runs_what():
    """Plain causal attention is PyTorch's unless Triton is asked for by name; what Triton cannot take has a reason."""
    assert kernels.backend_of("softmax_attention", "cuda") == "eager"
    assert kernels.backend_of("softmax_attention", "cuda", window=8) == "triton"
    assert kernels.backend_of("softmax_attention", "cuda", segment_ids=documents(1, 8)) == "triton"
    with kernels.use_backend("triton"):
        assert kernels.backend_of("softmax_attention", "cuda") == "triton"
    q = torch.zeros(1, 4, 2, 16, dtype=BF16, requires_grad=True)
    wide = torch.zeros(1, 4, 2, 264, dtype=BF16)
    past = (q, q, torch.zeros(1, 4), torch.zeros(1))
    assert triton_attention.supports(q, q, q, window=3) is None
    reasons = [({"dropout_p": 0.1}, "dropout"), ({"scale": -1.0}, "positive"), ({"past": past}, "earlier keys")]
    for options, reason in reasons:
        assert reason in triton_attention.supports(q, q, q, **options)
    assert "at most 256" in triton_attention.supports(wide, wide, wide)
    assert "float64" in triton_attention.supports(q.double(), q, q)


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_bf16(mask, width, monkeypatch):
    """Every length, alone and packed: bf16's own error, no element unwritten, and 30 equal repeats."""
    poison(monkeypatch)
    options = MASKS[mask] | ({"window": 300} if mask == "all" else {})
    for T in LENGTHS:
        tensors = [x.to(BF16) for x in inputs(2, T, 2, 4, width, width)]
        for ids in (None, documents(2, T)):
            want = outputs(eager.softmax_attention, torch.float64, tensors, **options, segment_ids=ids)
            runs = [outputs(triton_attention.softmax_attention, BF16, tensors, **options, segment_ids=ids) for _ in range(30)]
            for name in want:
                assert error(runs[0][name], want[name]) < 2e-2, (T, ids is not None, name)
                assert all(torch.equal(runs[0][name], run[name]) for run in runs[1:]), (T, ids is not None, name)


@pytest.mark.gpu
def test_offsets_beyond_31_bits():
    """16 x 17477 x 64 x 128 elements: the last row as if it were alone."""
    q, k, v = (torch.randn(16, 17477, h, 128, device=DEVICE, dtype=BF16, requires_grad=True) for h in (64, 1, 1))
    out = triton_attention.softmax_attention(q, k, v, window=64)
    out.backward(torch.ones_like(out[:, :, :, :1]).expand_as(out))
    last = [x[-1:].detach().requires_grad_() for x in (q, k, v)]
    alone = triton_attention.softmax_attention(*last, window=64)
    alone.backward(torch.ones_like(alone))
    assert torch.equal(out[-1:], alone)
    assert all(torch.equal(x.grad[-1:], y.grad) for x, y in zip((q, k, v), last, strict=True))


@pytest.mark.gpu
def test_a_new_length_compiles_nothing():
    names = ("forward_kernel", "queries_kernel", "keys_kernel")
    counts = set()
    for T in (64, 65, 1, 128, 1000, 16):
        tensors = [x.to(BF16) for x in inputs(1, T, 1, 2, 64, 64)]
        outputs(triton_attention.softmax_attention, BF16, tensors, window=5)
        caches = [cache for name in names for cache in getattr(triton_attention, name).device_caches.values()]
        counts.add(sum(len(cache[0]) for cache in caches))
    assert len(counts) == 1
