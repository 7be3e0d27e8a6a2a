"""Sparse attention in Triton: selection, attention over it, decoding and the indexer's loss; interpreted on a CPU, or on a GPU.

Index inputs are small integers (weights are eighths), so that the scores of fp32 and fp64 are the same numbers and many are equal.
"""

import pytest
import torch
from triton_cases import DEVICE, relative_error

import kernels
from kernels import eager, reference, triton_indexer, triton_selection, triton_sparse

F64 = torch.float64


def whole(*shape, most=2):
    return torch.randint(-most, most + 1, shape, device=DEVICE).float()


def index_inputs(B, T, J=3, d=16):
    return whole(B, T, J, d), whole(B, T, d), whole(B, T, J) / 8


def qkv(B, T, H=6, Hk=2, D=20, V=24):
    return (torch.randn(B, T, h, d, device=DEVICE) for h, d in ((H, D), (Hk, D), (Hk, V)))


def documents(T):
    """Three rows of T tokens: documents of one token and more, one with padding, and nothing at all."""
    ids = torch.zeros(3, T, dtype=torch.int32, device=DEVICE)
    ids[0] = 1
    for i, cut in enumerate((1, 2, 15, 16, T // 2)):
        ids[0, cut:] = i + 2
    ids[1, : T - 5] = 1
    ids[1, T // 3 : T - 5] = 4
    return ids


def earlier(B, S=12, Hk=2, D=20, V=24, d=16):
    """A `past` of up to S tokens whose rows are filled unequally."""
    length = torch.tensor([9, 0, S][:B], device=DEVICE)
    slot = torch.arange(S, device=DEVICE)
    k, v = torch.randn(B, S, Hk, D, device=DEVICE), torch.randn(B, S, Hk, V, device=DEVICE)
    return k, v, whole(B, S, d), torch.where(slot < length[:, None], slot, -1), length


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """`torch.empty` is full of NaN, or of the integer that stands for the nearest keys: what is read unwritten shows."""
    empty = torch.empty

    def poisoned(*shape, **kwargs):
        x = empty(*shape, **kwargs)
        if x.dtype == torch.bool:
            return x
        return x.fill_(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max - 1)

    for module in (triton_selection, triton_sparse, triton_indexer):
        monkeypatch.setattr(module.torch, "empty", poisoned)


def with_gradients(op, inputs, *rest, **options):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = op(*leaves, *rest, **options)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=F64).to(out)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves)]


def wide(xs):
    return None if xs is None else tuple(x.to(F64) if x.is_floating_point() else x for x in xs)


@pytest.mark.parametrize("scores", ["ties", "normal", "signed zeros"])
def test_top_k_is_exact(scores):
    """Few keys and many (more groups than top_k), equals at the bound, more local keys than top_k, fewer keys than top_k."""
    for T, S, top_k, local in ((4, 8, 5, 0), (2, 200, 3, 0), (2, 200, 7, 9), (2, 90, 120, 2)):
        x = torch.randn(1, T, S, device=DEVICE)
        x = {"ties": x.round(), "normal": x, "signed zeros": 0 * x}[scores]
        distance = S - T + torch.arange(T, device=DEVICE)[:, None] - torch.arange(S, device=DEVICE)
        want = eager.select_top_k(x, distance.clamp(min=-1)[None], top_k, local)
        assert torch.equal(triton_selection.select_top_k(x, distance.clamp(min=-1)[None], top_k, local), want), (T, S, top_k)


@pytest.mark.parametrize("block", [32, 64, 4096])
@pytest.mark.parametrize("scores", ["equal", "ties", "normal"])
def test_the_list_of_a_row_is_exact(scores, block, monkeypatch):
    """Rows of 1 to 1,100 keys, more and fewer than a block, than top_k, than 16 blocks; rows where all scores are the same."""
    monkeypatch.setattr(triton_selection, "choose_options", lambda *_: {"num_warps": 4, "num_stages": 1, "BLOCK": block})
    length = torch.tensor([0, 1, 6, 7, 31, 200, 511, 512, 513, 1099], device=DEVICE, dtype=torch.int32)
    B, S, W = len(length), 1100, 1280
    x = torch.randn(B, S, device=DEVICE)
    x = {"equal": 0 * x, "ties": x.round(), "normal": x}[scores] + 0.0  # -0 and 0 are the same score
    distance = length[:, None] - torch.arange(S, device=DEVICE)
    for top_k, local in ((7, 3), (40, 0), (600, 5)):
        want = eager.select_top_k(x[:, None], distance.clamp(min=-1)[:, None], top_k, local)[:, 0]
        bits = x.view(torch.int32)
        keys = torch.where(distance < local, triton_selection.LOCAL.value, bits ^ ((bits >> 31) & 0x7FFFFFFF))
        keys = torch.where(distance < 0, triton_selection.UNSEEN.value, keys)
        keys = torch.nn.functional.pad(keys, (0, W - S), value=triton_selection.UNSEEN.value)
        maxima, tops = (keys.unflatten(-1, (-1, n)).amax(-1) for n in (16, 256))
        index, count = triton_selection.chosen_keys(keys, maxima, tops, length, S, top_k)
        for b in range(B):
            assert index[b, : count[b]].tolist() == want[b].nonzero()[:, 0].tolist(), (top_k, b)


def test_indexer_scores():
    q, k, w = index_inputs(2, 20, d=12)
    got = triton_selection.indexer_scores(q, torch.cat([k, k], 1), w)
    assert relative_error(got.double(), eager.indexer_scores(*wide((q, torch.cat([k, k], 1), w)))) < 1e-6


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_past", [False, True])
def test_sparse_attention_in_fp32(packed, with_past):
    """Output and gradients are those of eager in fp64: 3 query heads a key head, widths that are no power of 2."""
    T = 37
    ids, B = (documents(T), 3) if packed else (None, 2)
    inputs, index, past = list(qkv(B, T)), index_inputs(B, T), earlier(B) if with_past else None
    options = {"top_k": 6, "local": 2, "segment_ids": ids}
    want = with_gradients(eager.sparse_attention, wide(inputs), *wide(index), past=wide(past), **options)
    with kernels.use_backend("triton"):
        got = with_gradients(kernels.sparse_attention, inputs, *index, past=past, **options)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert relative_error(a.double(), b) < 1e-5, name


def test_more_strips_than_one(monkeypatch):
    """Scores in strips of 64 queries and partial gradients one list at a time give what one strip gives, bit for bit."""
    inputs, index = list(qkv(1, 70)), index_inputs(1, 70)
    want = with_gradients(triton_sparse.sparse_attention, inputs, *index, top_k=66)
    monkeypatch.setattr(triton_selection, "STRIP", 1)
    monkeypatch.setattr(triton_sparse, "STRIP", 1)
    got = with_gradients(triton_sparse.sparse_attention, inputs, *index, top_k=66)
    assert all(torch.equal(a, b) for a, b in zip(got[:2], want[:2], strict=True))
    for a, b in zip(got[2:], want[2:], strict=True):  # sums over a key's lists, cut at the strips
        assert relative_error(a, b) < 1e-6


def test_selected_attention():
    q, k, v = qkv(2, 40)
    k, v = torch.cat([k, k + 1], 1), torch.cat([v, v - 1], 1)
    selected = torch.rand(2, 40, 80, device=DEVICE) < 0.1
    selected[0, 3] = False
    want = with_gradients(eager.selected_attention, wide((q, k, v)), selected)
    got = with_gradients(triton_sparse.selected_attention, (q, k, v), selected)
    assert all(relative_error(a.double(), b) < 1e-5 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("T, S, top_k, lengths", [
    (1, 48, 6, [7, 0]), (1, 48, 6, [40, 47]), (3, 48, 6, [20, 1]), (1, 601, 90, [600, 89]), (1, 520, 300, [255, 256]),
    (1, 270, 1000, [269, 3]),
])  # fmt: skip
def test_sparse_attention_step(T, S, top_k, lengths):
    """Rows of unlike lengths, equal scores, lists of several slices, blocks of 256 keys just full, as many as all keys."""
    k_cache, v_cache, index_cache, length = (
        *(torch.randn(2, S, 2, 20, device=DEVICE) for _ in range(2)),
        whole(2, S, 16),
        torch.tensor(lengths, device=DEVICE, dtype=torch.int32),
    )
    (q, k, v), index, results = qkv(2, T, V=20), index_inputs(2, T), []
    options = {"length": length, "longest": max(lengths) + T, "top_k": top_k, "local": 2}
    for module in (eager, triton_sparse):
        caches = dict(k_cache=k_cache.clone(), v_cache=v_cache.clone(), index_cache=index_cache.clone())
        results.append((module.sparse_attention_step(q, k, v, *index, **caches, **options), *caches.values()))
    assert relative_error(results[1][0], results[0][0]) < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(results[1][1:], results[0][1:], strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("top_k", [None, 6])
def test_indexer_kl(top_k, packed):
    """The dense stage and the selected one against autograd of the dense definition."""
    T = 37
    ids, B = (documents(T), 3) if packed else (None, 2)
    (q, k, _), index = qkv(B, T), index_inputs(B, T, J=5, d=12 if top_k is None else 16)
    options = {"top_k": top_k, "local": 2, "segment_ids": ids}
    want = with_gradients(lambda *x: eager.indexer_kl(q.double(), k.double(), *x, **options), wide(index))
    got = with_gradients(lambda *x: triton_indexer.indexer_kl(q, k, *x, **options), index)
    for name, a, b in zip(("kl", "dq", "dk", "dw"), got, want, strict=True):
        assert (a - b).abs().max() < 1e-5 * max(1.0, b.abs().max().item()), name


def test_eager_is_the_definition_of_the_loss():
    (q, k, _), index = qkv(3, 20), index_inputs(3, 20)
    for options in ({}, {"top_k": 5, "local": 2, "scale": 0.3}):
        options |= {"segment_ids": documents(20)}
        want, got = (
            with_gradients(lambda *x, f=f, o=options: f(q.double(), k.double(), *x, **o), wide(index))
            for f in (reference.indexer_kl, eager.indexer_kl)
        )
        assert all(relative_error(a, b) < 1e-12 for a, b in zip(got, want, strict=True))


def test_the_custom_operators_are_sound():
    """PyTorch's own checks of schema, fake tensors and autograd registration."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    (q, k, v), index = qkv(1, 20, 2, 1, 16, 16), index_inputs(1, 20, 2, 8)
    lists = triton_selection.lists_for(*index, 4, 1)
    torch.library.opcheck(triton_selection._select, (*index, None, None, None, 4, 1), test_utils=tests[::2])
    attention = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(triton_sparse._forward, (*attention, *lists, 0.25), test_utils=tests)
    lows = torch.zeros(1, 20, dtype=torch.int32, device=DEVICE)
    leaves = [x.requires_grad_() for x in index]
    torch.library.opcheck(triton_indexer._forward, (*leaves, q.detach(), k.detach(), *lists, lows, 0.25), test_utils=tests)
    caches = [torch.zeros(1, 24, *x.shape[2:], device=DEVICE) for x in (k, v, index[1])]
    new = [x.detach()[:, :1] for x in (q, k, v, *index)]
    length = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(triton_sparse._decode, (*new, *caches, length, 4, 1, 0.25), test_utils=tests[::2])


def test_compiles_without_a_graph_break():
    (q, k, v), index = qkv(1, 20, 2, 1, 16, 16), index_inputs(1, 20, 2, 8)

    def loss(q, k, v, *index):
        y = triton_sparse.sparse_attention(q, k, v, *index, top_k=4, local=1)
        return y.sum() + triton_indexer.indexer_kl(q, k, *index, top_k=4, local=1).mean()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    inputs = [q, k, v, *index]
    assert all(torch.equal(a, b) for a, b in zip(with_gradients(compiled, inputs), with_gradients(loss, inputs), strict=True))


def test_what_runs_in_eager_says_why():
    q, k, v = qkv(1, 4)
    assert "float64" in triton_sparse.supports_sparse_attention(q.double(), k, v, *index_inputs(1, 4))
    assert "gradient" in triton_selection.supports_indexer_scores(*(x.requires_grad_() for x in index_inputs(1, 4)))


def overlapping(B, T, J=8, d=64):
    """Index queries that drift, so that neighbours select nearly the same keys; bf16, weights in fp32."""
    knots = torch.randn(B, T // 64 + 2, J, d, device=DEVICE)
    t = torch.arange(T, device=DEVICE)
    q = torch.lerp(knots[:, t // 64], knots[:, t // 64 + 1], (t % 64 / 64)[:, None, None])
    return q.bfloat16(), torch.randn(B, T, d, device=DEVICE).bfloat16(), torch.rand(B, T, J, device=DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("T", [1, 15, 63, 64, 65, 127, 1000, 4096])
def test_sparse_attention_in_bf16(T, packed):
    """Given the selection (exact for the scores that the indexer computes), out and gradients; 30 repeats over NaN."""
    if packed and T < 40:
        pytest.skip("too short for the documents")
    ids, B = (documents(T), 3) if packed else (None, 1)
    inputs = [x.bfloat16() for x in qkv(B, T, 8, 2, 128, 128)]
    index = overlapping(B, T)
    options = {"top_k": 128, "local": 16, "segment_ids": ids}
    distance = eager.key_distances((B, T), DEVICE, None, ids)[0]
    distance = distance if ids is None else torch.where((ids > 0)[..., None], distance, -1)
    selected = eager.select_top_k(triton_selection.indexer_scores(*index), distance, 128, 16)
    want = with_gradients(eager.selected_attention, wide(inputs), selected)
    poison = torch.full((2**27,), float("nan"), device=DEVICE)
    del poison  # the next outputs come from this memory
    got = [with_gradients(triton_sparse.sparse_attention, inputs, *index, **options) for _ in range(30)]
    for name, a, b in zip(("out", "dq", "dk", "dv"), got[0], want, strict=True):
        assert (a.double() - b).norm() / b.norm().clamp(min=1e-3) < 1e-2, name
    assert all(torch.equal(a, b) for other in got[1:] for a, b in zip(got[0], other, strict=True))
