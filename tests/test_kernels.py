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


def delta_inputs(B, T, Hk, H, K, V, gate, keys="random", beta_max=1.0):
    k = torch.randn(B, T, Hk, K, dtype=F64)
    if keys == "correlated":
        k = 0.9 * torch.randn(1, 1, Hk, K, dtype=F64) + 0.1 * k
    g = {
        "none": None,
        "mild": -torch.rand(B, T, H, dtype=F64) * 0.2,
        "zero": torch.zeros(B, T, H, dtype=F64),
        "extreme": -1000.0 * (torch.rand(B, T, H, dtype=F64) < 0.05),
        "wide": torch.log(torch.rand(B, T, H, dtype=F64) ** 8),
    }[gate]
    return dict(
        q=torch.randn(B, T, Hk, K, dtype=F64),
        k=unit(k),
        v=torch.randn(B, T, H, V, dtype=F64),
        g=g,
        beta=beta_max * torch.rand(B, T, H, dtype=F64),
    )


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


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("gate", ["none", "mild", "zero", "extreme", "wide"])
def test_delta_rule(segments, gate):
    ids, B, T = segment_ids(segments)
    inputs = delta_inputs(B, T, 1, 2, 8, 6, gate, keys="correlated" if gate == "zero" else "random", beta_max=2.0)
    state = torch.randn(B, 2, 8, 6, dtype=F64)
    weights = torch.randn(B, T, 2, 6, dtype=F64), torch.randn(B, 2, 8, 6, dtype=F64)
    want, got = (
        run(reference.delta_rule, inputs, state, ids, weights),
        run(eager.delta_rule, inputs, state, ids, weights),
    )
    for name in want:
        assert torch.isfinite(got[name]).all(), name
        assert relative_error(got[name], want[name]) < 1e-9, name


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


@pytest.mark.parametrize("with_past", [False, True])
@pytest.mark.parametrize("segments", SEGMENTS)
def test_softmax_attention(segments, with_past):
    ids, B, T = segment_ids(segments)
    q, k, v = torch.randn(B, T, 4, 8, dtype=F64), torch.randn(B, T, 2, 8, dtype=F64), torch.randn(B, T, 2, 8, dtype=F64)
    lengths = torch.tensor([5, 0, 3, 2][:B], dtype=torch.int32)
    past = (torch.randn(B, 6, 2, 8, dtype=F64), torch.randn(B, 6, 2, 8, dtype=F64), lengths) if with_past else None
    results = []
    for op in (reference.softmax_attention, eager.softmax_attention):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = op(*leaves, past=past, segment_ids=ids)
        results.append([out, *torch.autograd.grad((out * q).sum(), leaves)])
    for want, got in zip(*results, strict=True):
        assert relative_error(got, want) < 1e-12


@pytest.mark.parametrize("T", [1, 3])
def test_step_operators(T):
    inputs = delta_inputs(2, T, 1, 2, 8, 6, "mild")
    states = [torch.randn(2, 2, 8, 6, dtype=F64)] * 2
    states = [s.clone() for s in states]
    a, b = reference.delta_rule_step(**inputs, state=states[0]), eager.delta_rule_step(**inputs, state=states[1])
    assert relative_error(b, a) < 1e-12 and relative_error(states[1], states[0]) < 1e-12

    x, weight, conv = torch.randn(2, T, 6, dtype=F64), torch.randn(6, 4, dtype=F64), torch.randn(2, 3, 6, dtype=F64)
    states = [conv.clone(), conv.clone()]
    a = reference.causal_conv1d_step(x, weight, state=states[0], activation="silu")
    b = eager.causal_conv1d_step(x, weight, state=states[1], activation="silu")
    assert relative_error(b, a) < 1e-12 and torch.equal(states[1], states[0])

    q, k, v = torch.randn(2, T, 4, 8, dtype=F64), torch.randn(2, T, 2, 8, dtype=F64), torch.randn(2, T, 2, 8, dtype=F64)
    caches, length = (
        [torch.randn(2, 2, 10, 2, 8, dtype=F64) for _ in range(1)] * 2,
        torch.tensor([4, 0], dtype=torch.int32),
    )
    caches = [c.clone() for c in caches]
    a = reference.softmax_attention_step(q, k, v, k_cache=caches[0][0], v_cache=caches[0][1], length=length)
    b = eager.softmax_attention_step(q, k, v, k_cache=caches[1][0], v_cache=caches[1][1], length=length, longest=4 + T)
    assert relative_error(b, a) < 1e-12 and torch.equal(caches[1], caches[0])


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
    with kernels.use_backend("reference"):
        assert kernels.backend_of("delta_rule", "cpu") == "reference"
        a = kernels.causal_conv1d(x, weight)[0]
    assert torch.allclose(a, kernels.causal_conv1d(x, weight)[0], atol=1e-6)
    with pytest.raises(ValueError, match="nonsense"), kernels.use_backend("nonsense"):
        pass
