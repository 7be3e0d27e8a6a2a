"""Softmax attention in Triton, forward and backward: windows, documents, kept first tokens, sinks, grouped heads, earlier keys.

With S = scale Q K^T under the mask, b the head's sink and Z_i = e^b + sum_j e^S_ij:

    forward  (per block of queries)  O_i = sum_j e^S_ij V_j / Z_i by the online softmax, LSE = log2 Z
    queries  (per block of queries)  delta = rowsum(dO * O);  dS = P * (dO V^T - delta);  dQ = scale dS K
    keys     (per block of keys)     dV = P^T dO;  dS^T = P^T * (V dO^T - delta);  dK = scale dS^T Q

and db = -sum_i e^b / Z_i delta_i. Exponentials are powers of 2. Queries and keys recompute P from LSE rather than share it: 7
products where 5 would do, and no atomics, so that results repeat. A block of keys serves the query heads of its group in turn.

A query i sees the keys start_i <= j <= i of its document that are nearer than the window or before kept_i. Both grow with i, so the
keys of a block of queries are at most two ranges: kept ones, and those from the window's left edge to the diagonal, the inner part
of which every query of the block sees. Loops run over these ranges only, and only outer parts are masked: what a window or a
document hides is never read. P^T is computed from K Q^T, never transposed: Triton before 3.7.1 miscompiles dots of transposed
results. Keys of earlier calls, in the slots of a cache, are one more range, in the forward only.

Dao 2307.08691; sinks as in GPT-OSS, first tokens kept as in StreamingLLM 2309.17453.
"""

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .launch import architecture, direct, interpreted, launch, operand_types, ready, shared_by_layers, tile, traced
from .reference import segment_runs

LOG2_E = tl.constexpr(1.4426950408889634)
FOREVER = 2**30  # a window without end
RUNTIME = ["T", "H", "S", "window"]  # no new compilation for a new length


@triton.jit
def _ends(p_limit, a, last, WANTED: tl.constexpr):
    """A limit at tokens a and last. To be loaded before the tiles: a tile's load is waited for where it stands."""
    at_a, at_last = 0, 0
    if WANTED:
        at_a, at_last = tl.load(p_limit + a), tl.load(p_limit + last)
    return at_a, at_last


@triton.jit
def _key_ranges(
    a, T, window, starts, kept,
    BM: tl.constexpr, BN: tl.constexpr, DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The keys of queries a to a + BM, in multiples of BN: first, kept, lo, whole, whole_end, end. Masked are [first, kept),
    [lo, whole) and [whole_end, end); all queries see all of [whole, whole_end). starts and kept are `_ends`."""
    last = tl.minimum(a + BM, T) - 1
    end = tl.cdiv(last + 1, BN) * BN
    first, lo, whole = 0, 0, 0
    if DOCUMENTS:
        lo, whole = starts
        first = lo // BN * BN
    kept_end = first
    if WINDOW:
        lo, whole = tl.maximum(lo, a + 1 - window), tl.maximum(whole, last + 1 - window)
    lo = tl.minimum(lo // BN * BN, end)
    whole = tl.minimum(tl.cdiv(whole, BN) * BN, end)
    if KEPT:  # of the first query's document: the others begin inside this block, right of lo
        kept_end = tl.maximum(tl.minimum(tl.cdiv(kept[0], BN) * BN, lo), first)
    return first, kept_end, lo, whole, tl.maximum((a + 1) // BN * BN, whole), end


@triton.jit
def _visible(i, j, start, kept, window, DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr, KEPT: tl.constexpr):
    """Whether queries i, with their start and kept, see keys j; i, start and kept vary along one axis, j along the other."""
    seen, first = i >= j, start
    if WINDOW:
        first = tl.maximum(start, i + 1 - window)  # along one axis only: two comparisons an entry, however many limits
    if DOCUMENTS or WINDOW:
        near = j >= first
        if KEPT:
            near |= (j >= start) & (j < kept)
        seen &= near
    return seen


@triton.jit
def _absorb(s, b_v, m, z, acc, scale, MASKED: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr):
    """One step of the online softmax over scores s, -inf where masked: new maxima, sums and outputs."""
    m_new = tl.maximum(m, tl.max(s, axis=1) * scale)
    shift = m_new
    if MASKED:  # a row may have seen nothing yet: no -inf - -inf
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * scale - shift[:, None])
    alpha = tl.exp2(m - shift)
    acc = tl.dot(p.to(DOT), b_v, acc * alpha[:, None], input_precision=PREC)
    return m_new, z * alpha + tl.sum(p, axis=1), acc


@triton.jit(do_not_specialize=RUNTIME)
def forward_kernel(
    q, k, v, o, lse, start, kept, sinks, past_k, past_v, reach, scale, T, H, S, window,
    R: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DOCUMENTS: tl.constexpr,
    WINDOW: tl.constexpr, KEPT: tl.constexpr, SINKS: tl.constexpr, PAST: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Outputs and log2 sums of BM queries of one head. The blocks of a head are neighbours, so that its keys stay in the L2 cache;
    the last comes first, since it has most to do."""
    N = tl.cdiv(T, BM)
    i = tl.program_id(0)
    a, i_h, i_b = (N - 1 - i % N) * BM, (i // N) % H, i // (N * H)
    i_hk = i_h // R
    o_m, o_n = a + tl.arange(0, BM), tl.arange(0, BN)
    start += i_b.to(tl.int64) * T
    kept += i_b.to(tl.int64) * T
    b_start, b_kept = tl.zeros([BM], dtype=tl.int32), tl.zeros([BM], dtype=tl.int32)
    if DOCUMENTS:
        b_start = tl.load(start + tl.minimum(o_m, T - 1))
    if KEPT:
        b_kept = tl.load(kept + tl.minimum(o_m, T - 1))
    last = tl.minimum(a + BM, T) - 1
    starts, kepts = _ends(start, a, last, DOCUMENTS), _ends(kept, a, last, KEPT)
    scale *= LOG2_E
    m, z = tl.full([BM], float("-inf"), dtype=tl.float32), tl.zeros([BM], dtype=tl.float32)
    if SINKS:
        m, z = tl.zeros([BM], dtype=tl.float32) + tl.load(sinks + i_h) * LOG2_E, z + 1.0
    acc = tl.zeros([BM, BV], dtype=tl.float32)
    b_q = q.load([i_b, i_h, a, 0]).reshape(BM, BK).to(DOT)
    first, kept_end, lo, whole, whole_end, end = _key_ranges(a, T, window, starts, kepts, BM, BN, DOCUMENTS, WINDOW, KEPT)
    if PAST:
        near = KEPT or a + 1 < window
        for n in range(0, tl.where((starts[0] == 0) & near, S, 0), BN):
            b_reach = tl.load(reach + i_b.to(tl.int64) * S + n + o_n, mask=n + o_n < S, other=-(2**30))
            b_k = past_k.load([i_b, i_hk, n, 0]).reshape(BN, BK).to(DOT)
            s = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
            seen = (o_m[:, None] - b_reach[None, :] < window) & (b_start == 0)[:, None]
            b_v = past_v.load([i_b, i_hk, n, 0]).reshape(BN, BV).to(DOT)
            m, z, acc = _absorb(tl.where(seen, s, float("-inf")), b_v, m, z, acc, scale, True, DOT, PREC)
    for n in range(whole, whole_end, BN):
        b_k = k.load([i_b, i_hk, n, 0]).reshape(BN, BK).to(DOT)
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
        b_v = v.load([i_b, i_hk, n, 0]).reshape(BN, BV).to(DOT)
        m, z, acc = _absorb(s, b_v, m, z, acc, scale, False, DOT, PREC)
    for x in range(first, end - (lo - kept_end) - (whole_end - whole), BN):
        n = tl.where(x < kept_end, x, x + lo - kept_end)
        n = tl.where(n < whole, n, n + whole_end - whole)
        b_k = k.load([i_b, i_hk, n, 0]).reshape(BN, BK).to(DOT)
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
        seen = _visible(o_m[:, None], n + o_n[None, :], b_start[:, None], b_kept[:, None], window, DOCUMENTS, WINDOW, KEPT)
        b_v = v.load([i_b, i_hk, n, 0]).reshape(BN, BV).to(DOT)
        m, z, acc = _absorb(tl.where(seen, s, float("-inf")), b_v, m, z, acc, scale, True, DOT, PREC)
    nothing = z == 0.0  # padding
    z = tl.where(nothing, 1.0, z)
    o.store([i_b, i_h, a, 0], (acc / z[:, None]).to(o.dtype).reshape(1, 1, BM, BV))
    p_lse = lse + (i_b.to(tl.int64) * H + i_h) * T + o_m
    tl.store(p_lse, tl.where(nothing, float("inf"), m + tl.log2(z)), mask=o_m < T)


@triton.jit
def _score_gradient(s, lse, b_do, b_v, delta, seen, scale, MASKED: tl.constexpr, PREC: tl.constexpr):
    """dS (BM, BN) of the scores s, without the factor `scale`."""
    p = tl.exp2(s * scale - lse[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    return p * (tl.dot(b_do, tl.trans(b_v), input_precision=PREC) - delta[:, None])


@triton.jit(do_not_specialize=RUNTIME)
def queries_kernel(
    q, k, v, o, do, dq, lse, delta, start, kept, scale, T, H, window,
    R: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DOCUMENTS: tl.constexpr,
    WINDOW: tl.constexpr, KEPT: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dQ of BM queries of one head, and their delta for `keys_kernel`; loops as in `forward_kernel`."""
    N = tl.cdiv(T, BM)
    i = tl.program_id(0)
    a, i_h, i_b = (N - 1 - i % N) * BM, (i // N) % H, i // (N * H)
    i_hk = i_h // R
    o_m, o_n = a + tl.arange(0, BM), tl.arange(0, BN)
    start += i_b.to(tl.int64) * T
    kept += i_b.to(tl.int64) * T
    b_start, b_kept = tl.zeros([BM], dtype=tl.int32), tl.zeros([BM], dtype=tl.int32)
    if DOCUMENTS:
        b_start = tl.load(start + tl.minimum(o_m, T - 1))
    if KEPT:
        b_kept = tl.load(kept + tl.minimum(o_m, T - 1))
    last = tl.minimum(a + BM, T) - 1
    starts, kepts = _ends(start, a, last, DOCUMENTS), _ends(kept, a, last, KEPT)
    b_do = do.load([i_b, i_h, a, 0]).reshape(BM, BV)
    b_o = o.load([i_b, i_h, a, 0]).reshape(BM, BV)
    b_delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), axis=1)
    o_row = (i_b.to(tl.int64) * H + i_h) * T + o_m
    tl.store(delta + o_row, b_delta, mask=o_m < T)
    b_lse = tl.load(lse + o_row, mask=o_m < T, other=float("inf"))
    b_do = b_do.to(DOT)
    b_q = q.load([i_b, i_h, a, 0]).reshape(BM, BK).to(DOT)
    b_dq = tl.zeros([BM, BK], dtype=tl.float32)
    first, kept_end, lo, whole, whole_end, end = _key_ranges(a, T, window, starts, kepts, BM, BN, DOCUMENTS, WINDOW, KEPT)
    log2_scale = scale * LOG2_E
    for n in range(whole, whole_end, BN):
        b_k = k.load([i_b, i_hk, n, 0]).reshape(BN, BK).to(DOT)
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
        b_v = v.load([i_b, i_hk, n, 0]).reshape(BN, BV).to(DOT)
        ds = _score_gradient(s, b_lse, b_do, b_v, b_delta, s, log2_scale, False, PREC)
        b_dq = tl.dot(ds.to(DOT), b_k, b_dq, input_precision=PREC)
    for x in range(first, end - (lo - kept_end) - (whole_end - whole), BN):
        n = tl.where(x < kept_end, x, x + lo - kept_end)
        n = tl.where(n < whole, n, n + whole_end - whole)
        b_k = k.load([i_b, i_hk, n, 0]).reshape(BN, BK).to(DOT)
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
        seen = _visible(o_m[:, None], n + o_n[None, :], b_start[:, None], b_kept[:, None], window, DOCUMENTS, WINDOW, KEPT)
        b_v = v.load([i_b, i_hk, n, 0]).reshape(BN, BV).to(DOT)
        ds = _score_gradient(s, b_lse, b_do, b_v, b_delta, seen, log2_scale, True, PREC)
        b_dq = tl.dot(ds.to(DOT), b_k, b_dq, input_precision=PREC)
    dq.store([i_b, i_h, a, 0], (b_dq * scale).to(dq.dtype).reshape(1, 1, BM, BK))


@triton.jit
def _query_ranges(
    n, T, window, stops, kept,
    BM: tl.constexpr, BN: tl.constexpr, DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The queries of keys n to n + BN, in multiples of BM: lo, whole, whole_end, end. Masked are [lo, whole) and [whole_end, end);
    all of [whole, whole_end) see all keys. stops and kept are `_ends`."""
    last = tl.minimum(n + BN, T) - 1
    lo = n // BM * BM
    whole_end, end = T, T
    if DOCUMENTS:
        whole_end, end = stops
    if WINDOW:
        near = tl.minimum(end, last + window)
        if KEPT:  # of the last key's document: the others end inside this block
            near = tl.where(kept[1] > n, end, near)
        whole_end, end = tl.minimum(whole_end, n + window), near
    end = tl.maximum(tl.cdiv(end, BM) * BM, lo)
    whole = tl.minimum(tl.cdiv(n + BN - 1, BM) * BM, end)
    return lo, whole, tl.maximum(whole_end // BM * BM, whole), end


@triton.jit
def _key_gradients(
    q, do, b_k, b_v, dk, dv, m, i_b, i_h, lse, delta, start, kept, o_n, T, H, window, scale,
    MASKED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr, KEPT: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk and dv with what queries m to m + BM of head i_h add. Beyond T, lse is infinite and P therefore 0."""
    o_m, o_head = m + tl.arange(0, BM), (i_b.to(tl.int64) * H + i_h) * T
    m_m = (o_m < T) if MASKED else None
    b_lse = tl.load(lse + o_head + o_m, mask=m_m, other=float("inf") if MASKED else None)
    b_q = q.load([i_b, i_h, m, 0]).reshape(BM, BK).to(DOT)
    p = tl.exp2(tl.dot(b_k, tl.trans(b_q), input_precision=PREC) * scale - b_lse[None, :])  # (BN, BM): P^T
    if MASKED:
        b_start, b_kept = tl.zeros([BM], dtype=tl.int32), tl.zeros([BM], dtype=tl.int32)
        if DOCUMENTS:
            b_start = tl.load(start + o_m, mask=m_m, other=0)
        if KEPT:
            b_kept = tl.load(kept + o_m, mask=m_m, other=0)
        seen = _visible(o_m[None, :], o_n[:, None], b_start[None, :], b_kept[None, :], window, DOCUMENTS, WINDOW, KEPT)
        p = tl.where(seen, p, 0.0)
    b_do = do.load([i_b, i_h, m, 0]).reshape(BM, BV).to(DOT)
    if DV:
        dv = tl.dot(p.to(DOT), b_do, dv, input_precision=PREC)
    if DK:
        b_delta = tl.load(delta + o_head + o_m, mask=m_m, other=0.0 if MASKED else None)
        ds = p * (tl.dot(b_v, tl.trans(b_do), input_precision=PREC) - b_delta[None, :])
        dk = tl.dot(ds.to(DOT), b_q, dk, input_precision=PREC)
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME)
def keys_kernel(
    q, k, v, do, dk, dv, lse, delta, start, stop, kept, scale, T, H, window,
    R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DOCUMENTS: tl.constexpr, WINDOW: tl.constexpr, KEPT: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dK, dV or both of BN keys of one key head, summed over the R query heads it serves; the first keys, seen by most, first."""
    N, Hk = tl.cdiv(T, BN), H // R
    i = tl.program_id(0)
    n, i_hk, i_b = (i % N) * BN, (i // N) % Hk, i // (N * Hk)
    o_n = n + tl.arange(0, BN)
    start += i_b.to(tl.int64) * T
    stop += i_b.to(tl.int64) * T
    kept += i_b.to(tl.int64) * T
    last = tl.minimum(n + BN, T) - 1
    stops, kepts = _ends(stop, n, last, DOCUMENTS), _ends(kept, n, last, KEPT)
    b_k = k.load([i_b, i_hk, n, 0]).reshape(BN, BK).to(DOT)
    b_v = v.load([i_b, i_hk, n, 0]).reshape(BN, BV).to(DOT)
    b_dk, b_dv = tl.zeros([BN, BK], dtype=tl.float32), tl.zeros([BN, BV], dtype=tl.float32)
    lo, whole, whole_end, end = _query_ranges(n, T, window, stops, kepts, BM, BN, DOCUMENTS, WINDOW, KEPT)
    log2_scale = scale * LOG2_E
    n_whole, n_left = whole_end - whole, whole - lo
    n_masked = n_left + end - whole_end
    for x in range(0, R * n_whole, BM):
        b_dk, b_dv = _key_gradients(
            q, do, b_k, b_v, b_dk, b_dv, whole + x % n_whole, i_b, i_hk * R + x // n_whole, lse, delta, start, kept, o_n, T, H,
            window, log2_scale, False, DK, DV, BK, BV, BM, DOCUMENTS, WINDOW, KEPT, DOT, PREC,
        )  # fmt: skip
    for x in range(0, R * n_masked, BM):
        m = lo + x % n_masked
        m = tl.where(m < whole, m, m + n_whole)
        b_dk, b_dv = _key_gradients(
            q, do, b_k, b_v, b_dk, b_dv, m, i_b, i_hk * R + x // n_masked, lse, delta, start, kept, o_n, T, H,
            window, log2_scale, True, DK, DV, BK, BV, BM, DOCUMENTS, WINDOW, KEPT, DOT, PREC,
        )  # fmt: skip
    if DK:
        dk.store([i_b, i_hk, n, 0], (b_dk * scale).to(dk.dtype).reshape(1, 1, BN, BK))
    if DV:
        dv.store([i_b, i_hk, n, 0], b_dv.to(dv.dtype).reshape(1, 1, BN, BV))


# ----------------------------------------------------------------------------------------------------------------------
# Launches

# Queries (BM) and keys (BN) of a tile, by the wider of the padded widths of keys and values.
_HOPPER = {
    "forward_64": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3},
    "forward_128": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3},
    "forward_256": {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 2},
    "queries_64": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3},
    "queries_128": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
    "queries_256": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
    "keys_64": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
    "keys_128": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
    "keys_256": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
}
_AMPERE = {  # not timed: the tiles that spill least, since there descriptors turn into tensors of addresses
    "forward_64": {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
    "forward_128": {"BM": 64, "BN": 64, "num_warps": 8, "num_stages": 2},
    "forward_256": {"BM": 64, "BN": 32, "num_warps": 8, "num_stages": 1},
    "queries_64": {"BM": 64, "BN": 32, "num_warps": 4, "num_stages": 2},
    "queries_128": {"BM": 64, "BN": 32, "num_warps": 8, "num_stages": 1},
    "queries_256": {"BM": 64, "BN": 32, "num_warps": 8, "num_stages": 1},
    "keys_64": {"BM": 32, "BN": 64, "num_warps": 4, "num_stages": 2},
    "keys_128": {"BM": 32, "BN": 64, "num_warps": 8, "num_stages": 1},
    "keys_256": {"BM": 32, "BN": 64, "num_warps": 8, "num_stages": 1},
}
# fp32 runs in the interpreter only: in its dots the operands alone spill 2 to 20 KB a thread.
LAUNCH = {(80, 2): _AMPERE, (90, 2): _HOPPER, (100, 2): _HOPPER, (90, 4): _HOPPER}


@functools.lru_cache(maxsize=256)
def _options(kernel, K, V, architecture, dtype):
    """The launch options and constants that follow from the head widths and the type, BM and BN among them."""
    BK, BV = (max(16, triton.next_power_of_2(x)) for x in (K, V))
    chosen = LAUNCH[architecture, dtype.itemsize][f"{kernel}_{max(64, BK, BV)}"]
    return {"BK": BK, "BV": BV, **chosen, **operand_types(dtype, forward_kernel)}


def _options_of(kernel, q, v):
    return _options(kernel, q.shape[-1], v.shape[-1], architecture(q), q.dtype)


def parts(width):
    """The launches of `keys_kernel`: one for both gradients; one for each where both would spill 0.9 KB a thread."""
    if width <= 128:
        return {"": {"DK": True, "DV": True}}
    return {"dk": {"DK": True, "DV": False}, "dv": {"DK": False, "DV": True}}


def _flags(bounds, window):
    return {"DOCUMENTS": bounds is not None, "WINDOW": window < FOREVER, "KEPT": bounds is not None and len(bounds) == 3}


def _forward_pass(q, k, v, sinks, bounds, past_k, past_v, reach, window, scale):
    """o `(B, T, H, V)` and lse `(B, H, T)`, in log2."""
    B, T, H, _ = q.shape
    o = v.new_empty(B, T, H, v.shape[-1])
    lse = q.new_empty(B, H, T, dtype=torch.float32)
    c, past = _options_of("forward", q, v), reach is not None
    if past:  # the loop over earlier keys takes the 56 bytes of shared memory that a second CTA on the SM would lack
        c = c | {"num_stages": min(c["num_stages"], 2)}
    start, kept = (lse, lse) if bounds is None else (bounds[0], bounds[-1])
    k_tile, v_tile = tile(ready(k), [c["BN"], c["BK"]]), tile(ready(v), [c["BN"], c["BV"]])
    past_tiles, S = (k_tile, v_tile), T
    if past:
        past_tiles, S = (tile(ready(past_k), [c["BN"], c["BK"]]), tile(ready(past_v), [c["BN"], c["BV"]])), past_k.shape[1]
    forward = launch(forward_kernel, R=H // k.shape[2], SINKS=sinks is not None, PAST=past, **_flags(bounds, window), **c)
    forward(
        triton.cdiv(T, c["BM"]) * H * B, tile(ready(q), [c["BM"], c["BK"]]), k_tile, v_tile, tile(o, [c["BM"], c["BV"]]), lse,
        start, kept, sinks, *past_tiles, reach, scale, T, H, S, window,
    )  # fmt: skip
    return o, lse


def _backward_pass(q, k, v, sinks, bounds, o, lse, do, window, scale):
    """dq, dk, dv and dsinks, of no size without sinks."""
    B, T, H, _ = q.shape
    R, flags = H // k.shape[2], _flags(bounds, window)
    q, k, v, do = ready(q), ready(k), ready(v), ready(do)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    delta = lse.new_empty(lse.shape)
    start, stop, kept = (lse, lse, lse) if bounds is None else (bounds[0], bounds[1], bounds[-1])
    c = _options_of("queries", q, v)
    (M, N), (BK, BV) = (c["BM"], c["BN"]), (c["BK"], c["BV"])
    launch(queries_kernel, R=R, **flags, **c)(
        triton.cdiv(T, M) * H * B, tile(q, [M, BK]), tile(k, [N, BK]), tile(v, [N, BV]), tile(o, [M, BV]), tile(do, [M, BV]),
        tile(dq, [M, BK]), lse, delta, start, kept, scale, T, H, window,
    )  # fmt: skip
    c = _options_of("keys", q, v)
    M, N = c["BM"], c["BN"]
    for part in parts(max(BK, BV)).values():
        launch(keys_kernel, R=R, **part, **flags, **c)(
            triton.cdiv(T, N) * (H // R) * B, tile(q, [M, BK]), tile(k, [N, BK]), tile(v, [N, BV]), tile(do, [M, BV]),
            tile(dk, [N, BK]), tile(dv, [N, BV]), lse, delta, start, stop, kept, scale, T, H, window,
        )  # fmt: skip
    if sinks is None:
        return dq, dk, dv, lse.new_empty(0)
    to_sink = torch.exp2(sinks[:, None] * LOG2_E.value - lse)  # (B, H, T)
    return dq, dk, dv, -(to_sink * delta).sum((0, 2))


@torch.library.custom_op("hybrid::attention_forward", mutates_args=())
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, bounds: torch.Tensor | None,
    past_k: torch.Tensor | None, past_v: torch.Tensor | None, reach: torch.Tensor | None, window: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return _forward_pass(q, k, v, sinks, bounds, past_k, past_v, reach, window, scale)


@_forward.register_fake
def _(q, k, v, sinks, bounds, past_k, past_v, reach, window, scale):
    B, T, H, _ = q.shape
    return v.new_empty(B, T, H, v.shape[-1]), q.new_empty(B, H, T, dtype=torch.float32)


@torch.library.custom_op("hybrid::attention_backward", mutates_args=())
def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, bounds: torch.Tensor | None, o: torch.Tensor,
    lse: torch.Tensor, do: torch.Tensor, window: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _backward_pass(q, k, v, sinks, bounds, o, lse, do, window, scale)


@_backward.register_fake
def _(q, k, v, sinks, bounds, o, lse, do, window, scale):
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, lse.new_empty(0 if sinks is None else q.shape[2])


def _save(ctx, inputs, output):
    q, k, v, sinks, bounds, _, _, reach, ctx.window, ctx.scale = inputs
    if reach is not None:
        raise NotImplementedError("no gradients of attention with earlier keys: call it under torch.no_grad(), or in eager")
    ctx.save_for_backward(q, k, v, sinks, bounds, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, dlse=None, backward=_backward):
    q, k, v, sinks, bounds, o, lse = ctx.saved_tensors
    if do is None:
        return (None,) * 10
    dq, dk, dv, dsinks = backward(q, k, v, sinks, bounds, o, lse, do, ctx.window, ctx.scale)
    return dq, dk, dv, None if sinks is None else dsinks, *[None] * 6


_forward.register_autograd(_differentiate, setup_context=_save)
_direct = direct(_forward_pass, _save, lambda ctx, do: _differentiate(ctx, do, backward=_backward_pass))


def supports(q, k, v, *, scale=None, past=None, dropout_p=0.0, **_):
    """None if these inputs can run here, else the reason why not."""
    if q.dtype not in (torch.bfloat16, torch.float16) and not (q.dtype == torch.float32 and interpreted(forward_kernel)):
        return f"{q.dtype} inputs"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"head widths {q.shape[-1]} and {v.shape[-1]}: at most 256"
    if scale is not None and scale <= 0:
        return f"scale={scale}: only positive ones"
    if dropout_p:
        return "dropout"
    if past is not None and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *past[:2])):
        return "gradients with earlier keys"
    return None


def prefers_eager(*, window=None, sinks=None, past=None, segment_ids=None, **_):
    """Whether eager is the faster: causal attention and nothing else is PyTorch's own kernel (cuDNN's on an H200)."""
    return window is None and sinks is None and past is None and segment_ids is None


@shared_by_layers
def _bounds(segment_ids, shape, device, keep):
    """For each token `(2 or 3, B, T)` int32: its document's first token in this row, the one after its last and, where some are
    kept, the one after the document's first `keep`. Padding starts at T and sees nothing. All grow along a row."""
    B, T = shape
    t = torch.arange(T, device=device).expand(B, T)
    start, stop = torch.zeros_like(t), torch.full_like(t, T)
    if segment_ids is not None:
        run, valid = segment_runs(segment_ids)
        opens = run[:, 1:] != run[:, :-1]
        start = torch.where(valid, torch.where(F.pad(opens, (1, 0)), t, 0).cummax(1).values, T)
        stop = torch.where(F.pad(opens, (0, 1)), t + 1, T).flip(1).cummin(1).values.flip(1)
        stop = torch.minimum(stop, valid.sum(1, keepdim=True))
    return torch.stack([start, stop, start + keep] if keep else [start, stop]).int()


def _after(bounds, keep, length):
    """Those bounds where the row's first document has had `length (B,)` tokens, and with them some or all it keeps, before."""
    start, stop, kept = bounds
    return torch.stack([start, stop, torch.where(start == 0, (keep - length).clamp(min=0)[:, None], kept).int()])


def _reach(position, length, keep):
    """How far earlier keys are seen, `(B, S)` int32: by queries i - reach < window. -FOREVER if the slot is empty."""
    reach = torch.where(position < keep, FOREVER, position - length[:, None])
    return torch.where(position < 0, -FOREVER, reach).int()


def softmax_attention(q, k, v, *, scale=None, window=None, keep_first=0, sinks=None, past=None, segment_ids=None, dropout_p=0.0):
    """`reference.softmax_attention` for heads of up to 256 in bf16 or fp16 (in the interpreter fp32), without dropout."""
    scale, width = q.shape[-1] ** -0.5 if scale is None else float(scale), v.shape[-1]
    window, keep = (FOREVER, 0) if window is None else (min(window, FOREVER), keep_first)
    k, v = k.to(q.dtype), v.to(q.dtype)
    bounds = past_k = past_v = reach = None
    if past is not None:
        past_k, past_v, position, length = past
        past_k, past_v, reach = past_k.to(q.dtype), past_v.to(q.dtype), _reach(position, length, keep)
    if segment_ids is not None or past is not None or keep:
        bounds = _bounds(segment_ids, q.shape[:2], q.device, keep)
        bounds = bounds if past is None or not keep else _after(bounds, keep, past[3])
    if q.shape[-1] % 8 or width % 8:  # a tile's rows are whole 16 bytes
        q, k, v, past_k, past_v = (None if x is None else F.pad(x, (0, -x.shape[-1] % 8)) for x in (q, k, v, past_k, past_v))
    sinks = None if sinks is None else sinks.float()
    inputs = q, k, v, sinks, bounds, past_k, past_v, reach, window, scale
    o = _forward(*inputs)[0] if traced(q, k, v, sinks) else _direct(*inputs)
    return o[..., :width]
