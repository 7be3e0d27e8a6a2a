"""Operators: eager against reference in fp64 (outputs, states and gradients), with documents and incoming state."""

import pytest
import torch

import kernels
from kernels import eager, reference

F64 = torch.float64
# (lengths of the documents of each row, padding to the longest): one row of documents straddling chunk edges, tiny ones, padding
SEGMENTS = {
    "none": None,
    "one": [[130]],
    "packed": [[1, 2, 61, 1, 65], [64, 66], [3, 5, 100, 2]],
    "padding": [[130], [7], [64, 1], []],
}


def segment_ids(name):
    docs = SEGMENTS[name]
    if docs is None:
        return None, 2, 130
    T = 130
    ids = torch.zeros(len(docs), T, dtype=torch.int32)
    for row, lengths in zip(ids, docs, strict=True):
        at = 0
        for i, n in enumerate(lengths):
            row[at : at + n] = i + 1
            at += n
    return ids, len(docs), T


def relative_error(a, b):
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def log_decay(kind, *shape):
    return {
        "none": lambda: None,
        "mild": lambda: -torch.rand(*shape, dtype=F64) * 0.2,
        "zero": lambda: torch.zeros(*shape, dtype=F64),
        "extreme": lambda: -1000.0 * (torch.rand(*shape, dtype=F64) < 0.05),
        "wide": lambda: torch.log(torch.rand(*shape, dtype=F64) ** 8),
    }[kind]()


def delta_inputs(B, T, Hk, H, K, V, gate, keys="random", beta_max=1.0, per_channel=False):
    k = torch.randn(B, T, Hk, K, dtype=F64)
    if keys == "correlated":
        k = 0.9 * torch.randn(1, 1, Hk, K, dtype=F64) + 0.1 * k
    g = log_decay(gate, B, T, H, *([K] if per_channel else []))
    return dict(
        q=torch.randn(B, T, Hk, K, dtype=F64),
        k=unit(k),
        v=torch.randn(B, T, H, V, dtype=F64),
        g=g,
        beta=beta_max * torch.rand(B, T, H, dtype=F64),
    )


def linear_inputs(B, T, Hk, H, K, V, decay, kind="mild"):
    shape = {"none": (), "constant": (H,), "token": (B, T, H), "channel": (B, T, H, K)}[decay]
    q, k = torch.randn(B, T, Hk, K, dtype=F64), torch.randn(B, T, Hk, K, dtype=F64)
    return dict(q=q, k=k, v=torch.randn(B, T, H, V, dtype=F64), g=log_decay(kind, *shape) if shape else None)


def run(op, inputs, initial_state, ids, weights):
    """Outputs and the gradient of a random linear functional of them in every floating input."""
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items() if x is not None}
    state = initial_state.clone().requires_grad_()
    out, final = op(**{n: leaves.get(n) for n in inputs}, initial_state=state, segment_ids=ids)
    loss = (out * weights[0]).sum() + (final * weights[1]).sum()
    names = [*leaves, "initial_state"]
    return {
        "out": out,
        "final": final,
        **dict(zip(names, torch.autograd.grad(loss, [*leaves.values(), state]), strict=True)),
    }


def agree(reference_op, eager_op, inputs, state, ids, tolerance=1e-9):
    out, final = reference_op(**inputs, initial_state=state, segment_ids=ids)
    weights = torch.randn_like(out), torch.randn_like(final)
    want, got = run(reference_op, inputs, state, ids, weights), run(eager_op, inputs, state, ids, weights)
    for name in want:
        assert torch.isfinite(got[name]).all(), name
        assert relative_error(got[name], want[name]) < tolerance, name


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("gate", ["none", "mild", "zero", "extreme", "wide"])
def test_delta_rule(segments, gate):
    ids, B, T = segment_ids(segments)
    inputs = delta_inputs(B, T, 1, 2, 8, 6, gate, keys="correlated" if gate == "zero" else "random", beta_max=2.0)
    agree(reference.delta_rule, eager.delta_rule, inputs, torch.randn(B, 2, 8, 6, dtype=F64), ids)


@pytest.mark.parametrize("segments", ["none", "packed"])
def test_delta_rule_with_a_constant_decay(segments):
    ids, B, T = segment_ids(segments)
    inputs = delta_inputs(B, T, 1, 2, 8, 6, "none") | {"g": torch.tensor([-0.1, -0.2], dtype=F64)}
    agree(reference.delta_rule, eager.delta_rule, inputs, torch.randn(B, 2, 8, 6, dtype=F64), ids)
    spread = inputs | {"g": inputs["g"].expand(B, T, 2)}
    assert torch.equal(reference.delta_rule(**inputs, segment_ids=ids)[0], reference.delta_rule(**spread, segment_ids=ids)[0])


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("gate", ["mild", "zero", "extreme", "wide"])
def test_delta_rule_with_a_decay_per_channel(segments, gate):
    ids, B, T = segment_ids(segments)
    inputs = delta_inputs(B, T, 1, 2, 8, 6, gate, keys="correlated" if gate == "zero" else "random", per_channel=True)
    agree(reference.delta_rule, eager.delta_rule, inputs, torch.randn(B, 2, 8, 6, dtype=F64), ids)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize(
    "decay, kind",
    [("none", "none"), ("constant", "mild"), ("token", "mild"), ("token", "zero"), ("token", "extreme"), ("channel", "wide")],
)
def test_linear_attention(segments, decay, kind):
    ids, B, T = segment_ids(segments)
    inputs = linear_inputs(B, T, 1, 2, 8, 6, decay, kind)
    agree(reference.linear_attention, eager.linear_attention, inputs, torch.randn(B, 2, 8, 6, dtype=F64), ids)


@pytest.mark.parametrize("segments", SEGMENTS)
def test_normalized_linear_attention(segments):
    ids, B, T = segment_ids(segments)
    inputs = linear_inputs(B, T, 2, 2, 8, 6, "none")
    inputs = {"q": inputs["q"].exp(), "k": inputs["k"].exp(), "v": inputs["v"]}
    state = torch.rand(B, 2, 8, 7, dtype=F64)
    agree(reference.normalized_linear_attention, eager.normalized_linear_attention, inputs, state, ids)


def test_normalized_linear_attention_is_a_weighted_mean():
    """The definition in one line, over time and not over heads; and zero features give 0, not a division by zero."""
    q, k, v = torch.rand(2, 9, 3, 4, dtype=F64), torch.rand(2, 9, 3, 4, dtype=F64), torch.randn(2, 9, 3, 5, dtype=F64)
    w = torch.einsum("bihk,bjhk->bhij", q, k).tril()
    want = torch.einsum("bhij,bjhv->bihv", w / w.sum(-1, keepdim=True), v)
    for op in (reference.normalized_linear_attention, eager.normalized_linear_attention):
        assert relative_error(op(q, k, v, eps=0.0)[0], want) < 1e-12
        assert torch.equal(op(0 * q, k, v)[0], torch.zeros_like(v))


@pytest.mark.parametrize("decay, kind", [("none", "none"), ("constant", "mild"), ("token", "wide"), ("channel", "wide")])
def test_parallel_forms(decay, kind):
    inputs = linear_inputs(2, 37, 1, 2, 8, 6, decay, kind)
    assert relative_error(reference.linear_attention_parallel(**inputs), reference.linear_attention(**inputs)[0]) < 1e-10
    if decay != "constant":
        delta = delta_inputs(2, 37, 1, 2, 8, 6, kind, per_channel=decay == "channel", beta_max=2.0)
        assert relative_error(reference.delta_rule_parallel(**delta), reference.delta_rule(**delta)[0]) < 1e-9


def test_reductions_between_the_operators():
    """What must coincide does: each operator at the setting where it is another one."""
    T, H, K, V = 70, 2, 8, 6
    d = delta_inputs(2, T, H, H, K, V, "mild")
    channels = d["g"][..., None].expand(-1, -1, -1, K)
    zero = torch.zeros_like(d["g"])
    gdn = eager.delta_rule(**d)[0]
    assert relative_error(eager.delta_rule(**d | {"g": channels})[0], gdn) < 1e-12  # KDA with equal channels is GDN
    assert (
        relative_error(eager.delta_rule(**d | {"g": zero})[0], eager.delta_rule(**d | {"g": None})[0]) < 1e-12
    )  # GDN(g=0): DeltaNet
    one = {"q": d["q"], "k": d["k"], "v": d["v"]}
    constant = torch.tensor([-0.1, -0.3], dtype=F64)
    spread = constant.expand(2, T, H)
    assert relative_error(eager.linear_attention(**one, g=spread)[0], eager.linear_attention(**one, g=constant)[0]) < 1e-12
    assert relative_error(eager.linear_attention(**one, g=0 * constant)[0], eager.linear_attention(**one)[0]) < 1e-12
    eye = torch.eye(K, dtype=F64)[None, :, None].expand(2, K, H, K)  # orthonormal keys: nothing to correct
    short = {"q": d["q"][:, :K], "k": eye, "v": d["v"][:, :K]}
    delta = eager.delta_rule(**short, g=None, beta=torch.ones(2, K, H, dtype=F64))[0]
    assert relative_error(delta, eager.linear_attention(**short)[0]) < 1e-12
    q, k, v = (torch.randn(2, T, H, K, dtype=F64) for _ in range(3))
    assert relative_error(eager.softmax_attention(q, k, v, window=T), eager.softmax_attention(q, k, v)) < 1e-12
    index = torch.randn(2, T, 4, 8, dtype=F64), torch.randn(2, T, 8, dtype=F64), torch.randn(2, T, 4, dtype=F64)
    assert relative_error(eager.sparse_attention(q, k, v, *index, top_k=T), eager.softmax_attention(q, k, v)) < 1e-12


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 129])
@pytest.mark.parametrize("chunk", [16, 64])
def test_delta_rule_lengths_and_chunks(T, chunk):
    inputs = delta_inputs(2, T, 2, 2, 16, 16, "mild")
    out, state = eager.delta_rule(**inputs, chunk_size=chunk)
    want, want_state = reference.delta_rule(**inputs)
    assert relative_error(out, want) < 1e-10 and relative_error(state, want_state) < 1e-10


@pytest.mark.parametrize("beta_max", [1.0, 2.0])
def test_delta_rule_correlated_keys_in_fp32(beta_max):
    inputs = delta_inputs(2, 256, 2, 2, 64, 64, "zero", keys="correlated", beta_max=beta_max)
    want, want_state = reference.delta_rule(**inputs)
    out, state = eager.delta_rule(**{n: x.float() for n, x in inputs.items()})
    assert relative_error(out.double(), want) < 1e-4 and relative_error(state.double(), want_state) < 1e-4


@pytest.mark.parametrize("per_channel", [False, True])
def test_strong_decays_cost_no_precision_in_fp32(per_channel):
    """A token that forgets everything adds thousands to the running sums of its chunk; the others must not lose digits to it."""
    inputs = delta_inputs(2, 128, 2, 2, 16, 16, "mild", per_channel=per_channel)
    inputs["g"] = torch.where(torch.rand_like(inputs["g"]) < 0.2, -2000.0, inputs["g"])
    want = reference.delta_rule(**inputs)[0]
    assert relative_error(eager.delta_rule(**{n: x.float() for n, x in inputs.items()})[0].double(), want) < 2e-5
    linear = {n: inputs[n] for n in "qkvg"}
    want = reference.linear_attention(**linear)[0]
    assert relative_error(eager.linear_attention(**{n: x.float() for n, x in linear.items()})[0].double(), want) < 2e-5


def test_delta_rule_stays_fp32_inside_autocast():
    inputs = {n: x.float() for n, x in delta_inputs(1, 70, 2, 2, 16, 16, "mild").items()}
    want, want_state = eager.delta_rule(**inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = eager.delta_rule(**inputs)
    assert torch.equal(out, want) and torch.equal(state, want_state)


@pytest.mark.parametrize("segments", SEGMENTS)
def test_causal_conv1d(segments):
    ids, B, T = segment_ids(segments)
    inputs = dict(x=torch.randn(B, T, 6, dtype=F64), weight=torch.randn(6, 4, dtype=F64), bias=torch.randn(6, dtype=F64))
    state, weights = torch.randn(B, 3, 6, dtype=F64), (torch.randn(B, T, 6, dtype=F64), torch.randn(B, 3, 6, dtype=F64))

    def silu(op):
        return lambda **kw: op(**kw, activation="silu")

    want = run(silu(reference.causal_conv1d), inputs, state, ids, weights)
    got = run(silu(eager.causal_conv1d), inputs, state, ids, weights)
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-12, name


@pytest.mark.parametrize("T", [1, 2, 3, 4])
def test_causal_conv1d_shorter_than_its_window(T):
    x, weight = torch.randn(2, T, 6, dtype=F64), torch.randn(6, 4, dtype=F64)
    want, got = reference.causal_conv1d(x, weight), eager.causal_conv1d(x, weight)
    assert all(relative_error(b, a) < 1e-12 for a, b in zip(want, got, strict=True))


ATTENTION = {
    "plain": {},
    "window": {"window": 7},
    "kept": {"window": 5, "keep_first": 2},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=F64)},
    "all": {"window": 66, "keep_first": 3, "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=F64)},
}


def qkv(B, T):
    return [torch.randn(B, T, h, 8, dtype=F64) for h in (4, 2, 2)]


def past_of(B, options, length):
    """Caches filled one token at a time, a ring where there is a window, and the past an operator takes."""
    keep, size = options.get("keep_first", 0), 12 if "window" not in options else options["window"] + options.get("keep_first", 0)
    length = torch.tensor(length[:B], dtype=torch.int32)
    caches = [torch.randn(B, size, 2, 8, dtype=F64) for _ in range(2)]
    return (*caches, kernels.cache_positions(length, size, keep), length)


@pytest.mark.parametrize("with_past", [False, True])
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("options", ATTENTION)
def test_softmax_attention(segments, with_past, options):
    ids, B, T = segment_ids(segments)
    options = ATTENTION[options]
    tensors = qkv(B, T) + ([options["sinks"]] if "sinks" in options else [])
    past = past_of(B, options, [9, 0, 3, 12]) if with_past else None
    results = []
    for op in (reference.softmax_attention, eager.softmax_attention):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = op(*leaves[:3], **options | ({"sinks": leaves[3]} if "sinks" in options else {}), past=past, segment_ids=ids)
        results.append([out, *torch.autograd.grad((out * tensors[0]).sum(), leaves)])
    for want, got in zip(*results, strict=True):
        assert relative_error(got, want) < 1e-11


def test_window_and_sinks_by_their_definition():
    """As a masked softmax with one more logit: independent of both implementations. The window counts the token itself."""
    q, k, v = (torch.randn(1, 20, 2, 8, dtype=F64) for _ in range(3))
    sinks = torch.randn(2, dtype=F64)
    i = torch.arange(20)
    mask = (i[:, None] >= i) & ((i[:, None] - i < 4) | (i < 2))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
    p = scores.masked_fill(~mask, -torch.inf).exp()
    p = p / (p.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    want = torch.einsum("bhij,bjhd->bihd", p, v)
    for op in (reference.softmax_attention, eager.softmax_attention):
        assert relative_error(op(q, k, v, window=4, keep_first=2, sinks=sinks), want) < 1e-12
    alone = eager.softmax_attention(q, k, v, window=1)
    assert relative_error(alone, v) < 1e-12


def test_cache_slots_and_positions():
    for size, keep in ((8, 0), (5, 2), (3, 2)):
        for n in range(20):
            held = {}
            for p in range(n):
                held[int(kernels.cache_slots(torch.tensor(p), size, keep))] = p
            positions = kernels.cache_positions(torch.tensor([n]), size, keep)[0].tolist()
            assert {s: p for s, p in enumerate(positions) if p >= 0} == held


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("options", ATTENTION)
def test_softmax_attention_step(T, options):
    options = ATTENTION[options]
    q, k, v = qkv(2, T)
    k_cache, v_cache, _, length = past_of(2, options, [7, 0])
    state = {"length": length} | ({"longest": 7 + T} if "window" not in options else {})
    results = []
    for op in (reference.softmax_attention_step, eager.softmax_attention_step):
        caches = k_cache.clone(), v_cache.clone()
        results.append((op(q, k, v, k_cache=caches[0], v_cache=caches[1], **state, **options), *caches))
    assert relative_error(results[1][0], results[0][0]) < 1e-12
    assert torch.equal(results[1][1], results[0][1]) and torch.equal(results[1][2], results[0][2])


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("per_channel", [False, True])
def test_recurrent_steps(T, per_channel):
    inputs = delta_inputs(2, T, 1, 2, 8, 6, "mild", per_channel=per_channel)
    linear = {n: inputs[n] for n in "qkvg"}
    constant = linear | {"g": torch.tensor([-0.1, -0.2], dtype=F64)}
    positive = {n: inputs[n].exp() for n in "qkv"}
    for op, args, V in (("delta_rule", inputs, 6), ("delta_rule", inputs | {"g": constant["g"]}, 6),
                        ("linear_attention", linear, 6), ("linear_attention", constant, 6),
                        ("normalized_linear_attention", positive, 7)):  # fmt: skip
        start = torch.rand(2, 2, 8, V, dtype=F64)
        want, final = getattr(reference, op)(**args, initial_state=start)
        for backend in (reference, eager):
            state = start.clone()
            out = getattr(backend, f"{op}_step")(**args, state=state)
            assert relative_error(out, want) < 1e-12 and relative_error(state, final) < 1e-12, (op, backend)


@pytest.mark.parametrize("T", [1, 3])
def test_causal_conv1d_step(T):
    x, weight, start = torch.randn(2, T, 6, dtype=F64), torch.randn(6, 4, dtype=F64), torch.randn(2, 3, 6, dtype=F64)
    want, final = reference.causal_conv1d(x, weight, initial_state=start, activation="silu")
    for backend in (reference, eager):
        state = start.clone()
        got = backend.causal_conv1d_step(x, weight, state=state, activation="silu", split=[4, 2])
        assert [y.shape[2] for y in got] == [4, 2] and relative_error(torch.cat(got, -1), want) < 1e-12
        assert torch.equal(state, final)


def index_inputs(B, T):
    return torch.randn(B, T, 8, 4, dtype=F64), torch.randn(B, T, 4, dtype=F64), torch.randn(B, T, 8, dtype=F64)


@pytest.mark.parametrize("with_past", [False, True])
@pytest.mark.parametrize("segments", ["none", "packed", "padding"])
def test_sparse_attention(segments, with_past):
    ids, B, T = segment_ids(segments)
    q, k, v = qkv(B, T)
    index = index_inputs(B, T)
    past = None
    if with_past:
        *caches, positions, length = past_of(B, {}, [9, 0, 3, 12])
        past = (*caches, torch.randn(B, 12, 4, dtype=F64), positions, length)
    results = []
    for op in (reference.sparse_attention, eager.sparse_attention):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = op(*leaves, *index, top_k=6, local=2, past=past, segment_ids=ids)
        results.append([out, *torch.autograd.grad((out * q).sum(), leaves)])
    for want, got in zip(*results, strict=True):
        assert relative_error(got, want) < 1e-11


@pytest.mark.parametrize("T", [1, 3])
def test_sparse_attention_step(T):
    (q, k, v), index = qkv(2, T), index_inputs(2, T)
    k_cache, v_cache, _, length = past_of(2, {}, [7, 1])
    index_cache, results = torch.randn(2, 12, 4, dtype=F64), []
    for op in (reference.sparse_attention_step, eager.sparse_attention_step):
        caches = dict(k_cache=k_cache.clone(), v_cache=v_cache.clone(), index_cache=index_cache.clone())
        results.append((op(q, k, v, *index, **caches, length=length, longest=7 + T, top_k=4, local=1), *caches.values()))
    assert relative_error(results[1][0], results[0][0]) < 1e-12
    assert all(torch.equal(b, a) for a, b in zip(results[0][1:], results[1][1:], strict=True))


@pytest.mark.parametrize("local", [0, 1, 3, 9])
def test_top_k_takes_the_nearer_of_equals(local):
    """Scores of few values, many of them 0 as with relu: the choice must not depend on the sort."""
    scores = torch.randint(0, 3, (2, 30, 30)).double()
    distance = (torch.arange(30)[:, None] - torch.arange(30)).clamp(min=-1).expand(2, 30, 30)
    want = reference.select_top_k(scores, distance, 7, local)
    assert torch.equal(eager.select_top_k(scores, distance, 7, local), want)
    assert want.sum(-1).tolist() == [[min(7, t + 1) for t in range(30)]] * 2
    zeros = eager.select_top_k(0 * scores, distance, 7, local)
    assert torch.equal(zeros, (distance >= 0) & (distance < 7))


def test_indexer_scores():
    q, k, w = index_inputs(2, 9)
    assert relative_error(eager.indexer_scores(q, k, w), reference.indexer_scores(q, k, w)) < 1e-12


def test_document_positions():
    ids = torch.tensor([[1, 1, 2, 2, 2, 0], [4, 5, 4, 4, 0, 0]])
    assert kernels.document_positions(ids).tolist() == [[0, 1, 0, 1, 2, 3], [0, 0, 0, 1, 2, 3]]
    assert kernels.document_positions(ids, torch.tensor([7, 2])).tolist()[0] == [7, 8, 0, 1, 2, 3]


def test_linear_cross_entropy():
    x, weight, labels = torch.randn(7, 5), torch.randn(11, 5), torch.tensor([3, -1, 0, 10, 2, -1, 9])
    want = torch.nn.functional.cross_entropy(x @ weight.T, labels, ignore_index=-1, reduction="none")
    assert torch.allclose(kernels.linear_cross_entropy(x, weight, labels), want, atol=1e-6)


def test_dispatch():
    x, weight = torch.randn(1, 3, 4), torch.randn(4, 4)
    assert kernels.backend_of("delta_rule", "cpu") == "eager"
    assert kernels.backend_of("delta_rule", "cuda") == "triton"
    assert kernels.backend_of("an operator Triton lacks", "cuda") == "eager"
    with kernels.use_backend("reference"):
        assert kernels.backend_of("delta_rule", "cuda") == "reference"
        a = kernels.causal_conv1d(x, weight)[0]
    assert torch.allclose(a, kernels.causal_conv1d(x, weight)[0], atol=1e-6)
    with pytest.raises(ValueError, match="nonsense"), kernels.use_backend("nonsense"):
        pass


def test_what_triton_cannot_take_runs_in_eager_and_says_so():
    inputs = delta_inputs(1, 5, 1, 1, 12, 8, "none")
    with kernels.use_backend("triton"), pytest.warns(UserWarning, match="float64"):
        assert torch.equal(kernels.delta_rule(**inputs)[0], eager.delta_rule(**inputs)[0])
    inputs = {n: None if x is None else x.float() for n, x in delta_inputs(1, 5, 1, 1, 260, 8, "none").items()}
    with kernels.use_backend("triton"), pytest.warns(UserWarning, match="K=260"):
        kernels.delta_rule(**inputs)


@pytest.mark.parametrize("shape, biased", [((7,), True), ((7,), False), ((3, 7), True)])
def test_layer_norm(shape, biased):
    torch.manual_seed(0)
    x = (3 + 2 * torch.randn(2, 5, 3, 7, dtype=F64)).requires_grad_()
    parameters = [torch.randn(shape, dtype=F64, requires_grad=True) for _ in range(1 + biased)]
    out, right = (module.layer_norm(x, *parameters, eps=1e-2) for module in (eager, reference))
    dout = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(y, [x, *parameters], dout) for y in (out, right))
    assert all(relative_error(a, b) < 1e-13 for a, b in zip([out, *found], [right, *wanted], strict=True))
    half = x.detach().bfloat16()  # computed in fp32 and rounded once, the weights unrounded
    fp32 = [p.detach().float() for p in parameters]
    assert torch.equal(eager.layer_norm(half, *fp32), eager.layer_norm(half.float(), *fp32).bfloat16())
