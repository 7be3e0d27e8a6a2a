"""No Triton kernel touches memory outside the tensors that it was given, and bounds.py notices if one does."""

import bounds
import pytest
import torch
import triton
import triton.language as tl
from triton_cases import documents

import kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="addresses are checked in the interpreter")


@triton.jit
def copy_kernel(x, y, n, shift, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i + shift, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


@pytest.mark.parametrize(
    "n, shift, said",
    [(11, 0, "loads 4 bytes 0 bytes after the end of `x`"), (10, 1, "stores 4 bytes 0 bytes after"), (10, -2, "8 bytes before")],
)
def test_a_wrong_kernel_is_caught(n, shift, said):
    x, memory = torch.randn(10), torch.zeros(30)
    y = memory[10:20]  # what lies around a view is not the view's
    with bounds.checked():
        copy_kernel[(1,)](x, y, 10, 0, 16)
        with pytest.raises(Exception, match=said):
            copy_kernel[(1,)](x, y, n, shift, 16)
    assert torch.equal(x, y) and not memory[:10].any() and not memory[20:].any()


def heads(T, *shapes):
    return [torch.randn(2, T, h, d) for h, d in shapes]


def sparse(T, **options):
    q, k, v, index_q = heads(T, (4, 20), (2, 20), (2, 20), (3, 12))
    return (q, k, v, index_q, torch.randn(2, T, 12), torch.randn(2, T, 3)), options


def packed(T):
    return {"segment_ids": documents(2, T)}


CASES = {
    "delta_rule": lambda: ([*heads(70, (2, 24), (2, 24), (4, 20)), -torch.rand(2, 70, 4), torch.rand(2, 70, 4)], packed(70)),
    "channel_delta_rule": lambda: ([*heads(33, (1, 32), (1, 32), (1, 32)), -torch.rand(2, 33, 1, 32), torch.rand(2, 33, 1)], {}),
    "linear_attention": lambda: ([*heads(70, (2, 24), (2, 24), (4, 20)), -torch.rand(2, 70, 4)], packed(70)),
    "softmax_attention": lambda: (heads(70, (4, 24), (2, 24), (2, 24)), {"window": 9, **packed(70)}),
    "sparse_attention": lambda: sparse(35, top_k=5, local=2, **packed(35)),
    "causal_conv1d": lambda: ([torch.randn(2, 19, 20), torch.randn(20, 4)], {"activation": "silu", **packed(19)}),
    "gated_rms_norm": lambda: ([*heads(5, (3, 20), (3, 20)), torch.rand(20)], {}),
    "linear_cross_entropy": lambda: ([torch.randn(19, 24), torch.randn(50, 24), torch.arange(19)], {}),
}


@pytest.mark.parametrize("op", CASES)
def test_operators_stay_in_bounds(op):
    """Forward and backward, at lengths that are a multiple of nothing."""
    inputs, options = CASES[op]()
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    with bounds.checked(), kernels.use_backend("triton"):
        out = getattr(kernels, op)(*inputs, **options)
        sum(x.sum() for x in (out if isinstance(out, tuple) else (out,))).backward()


@pytest.mark.parametrize("top_k", [None, 5, 50])
def test_the_indexers_loss_stays_in_bounds(top_k):
    (q, k, _, *index), _ = sparse(19)
    index = [x.requires_grad_() for x in index]
    with bounds.checked(), kernels.use_backend("triton"):
        kernels.indexer_kl(q, k, *index, top_k=top_k).sum().backward()


def test_decoding_stays_in_bounds():
    (q, k, v, *index), length = sparse(1)[0], torch.tensor([0, 39])
    caches = {"k_cache": torch.randn(2, 40, 2, 20), "v_cache": torch.randn(2, 40, 2, 20), "length": length}
    with bounds.checked(), kernels.use_backend("triton"):
        kernels.softmax_attention_step(q, k, v, **caches)
        kernels.sparse_attention_step(q, k, v, *index, index_cache=torch.randn(2, 40, 12), top_k=50, **caches)
        kernels.delta_rule_step(q, q, v.repeat(1, 1, 2, 1), state=torch.randn(2, 4, 20, 20))
