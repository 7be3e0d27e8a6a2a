"""DeepSeek sparse attention in Triton: softmax attention over what each query selected, its backward, and one-token decoding.

    attend     (16 queries, a key head)  out and lse over the list of keys that any of the queries selected
    dq         (16 queries, a key head)  dq, and delta = sum_d dO * O
    partials   (16 queries, a key head)  dk, dv of the listed keys from these queries alone, in the order of the list
    reduce     (a key)                   their sums over the lists that hold the key

    decode_scores (blocks of 256 keys)   one token: its index scores, its keys and values into the caches; then a list by `choose`
    decode     (a key head, a slice)     attention over a slice of the list; the slices are joined as in triton_step.py

Neighbouring queries select much the same keys, so that 16 of them (times the query heads of a key head) make one matrix product
over the union of their selections, and each row of k and v is fetched once for all; what a single query reads stays its own choice
(the bits of triton_selection.py). Partial gradients exist for one strip of lists at a time, of bounded size, and are added in the
order of the lists: no atomics, and memory that grows as T * top_k. DeepSeek-V3.2, 2512.02556.
"""

import torch
import triton
import triton.language as tl

from . import triton_selection as selection
from . import triton_step as step
from .launch import direct, launch, operand_types, options, traced
from .reference import _keep, cache_positions
from .triton_selection import LOCAL, QUERIES, UNSEEN, ordered, padded
from .triton_step import _heads, _prepared

STRIP = 2**30  # bytes of partial gradients at a time
LOG2E = 1.4426950408889634


# ----------------------------------------------------------------------------------------------------------------------
# Attention over lists. A program serves Q queries and HB of the G query heads of one key head; row r is query r // HB, head r % HB.


@triton.jit
def _program(H, NT, NH, Q: tl.constexpr, G: tl.constexpr, HB: tl.constexpr, T):
    """Of a program: its list (and the row's batch element, its first query), key head, rows' queries, heads, and which exist."""
    i = tl.program_id(0).to(tl.int64)
    i_g, i_hk, i_tile = (i % NH).to(tl.int32), ((i // NH) % (H // G)).to(tl.int32), i // (NH * (H // G))
    o_r = tl.arange(0, Q * HB)
    o_t, o_g = (i_tile % NT).to(tl.int32) * Q + o_r // HB, i_g * HB + o_r % HB
    return i_tile, i_tile // NT, i_hk, o_t, i_hk * G + o_g, (o_t < T) & (o_g < G), o_r // HB


@triton.jit
def selected_keys(index, bits, o_u, n, o_q, o_t, b_low, KEYS: tl.constexpr):
    """Keys at entries o_u of a list of n, and which rows read them `(rows, entries)`: with KEYS "bits" those whose bit is set,
    with "dense", where there is no list, those that see the key."""
    if KEYS == "dense":
        b_s = o_u
        read = (o_u[None, :] >= b_low[:, None]) & (o_u[None, :] <= o_t[:, None])
    else:
        b_s = tl.load(index + o_u, mask=o_u < n, other=0)
        b_bits = tl.load(bits + o_u, mask=o_u < n, other=0)
        read = ((b_bits[None, :] >> o_q[:, None]) & 1) != 0
    return b_s, read


@triton.jit(do_not_specialize=["T", "S", "NT"])
def attend_kernel(
    q, k, v, index, bits, count, lows, out, lse, scale, T, S, H, NT, NH, CAP,
    Q: tl.constexpr, G: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    N: tl.constexpr, KEYS: tl.constexpr, OUT: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """out, and lse in log2 (0 where nothing is read), over the keys that KEYS says. OUT false: only lse."""
    i_tile, i_b, i_hk, o_t, o_h, m_r, o_q = _program(H, NT, NH, Q, G, HB, T)
    o_d, o_v, o_n = tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, N)
    o_row = (i_b * T + o_t) * H + o_h
    b_q = tl.load(q + o_row[:, None] * D + o_d[None, :], mask=m_r[:, None] & (o_d < D)[None, :], other=0.0).to(DOT)
    HK = H // G
    if KEYS == "dense":
        b_low, n = tl.load(lows + i_b * T + o_t, mask=o_t < T, other=T), tl.minimum((i_tile % NT).to(tl.int32) * Q + Q, T)
    else:
        b_low, n = o_t, tl.load(count + i_tile)
    index, bits = index + i_tile * CAP, bits + i_tile * CAP
    p_k, p_v = k + (i_b * S * HK + i_hk) * D + o_d[None, :], v + (i_b * S * HK + i_hk) * V + o_v[None, :]
    b_m, b_l = tl.full([Q * HB], float("-inf"), dtype=tl.float32), tl.zeros([Q * HB], dtype=tl.float32)
    b_o = tl.zeros([Q * HB, BV], dtype=tl.float32)
    for u in range(0, n, N):
        o_u = u + o_n
        b_s, read = selected_keys(index, bits, o_u, n, o_q, o_t, b_low, KEYS)
        m_u, o_s = (o_u < n)[:, None], b_s[:, None].to(tl.int64) * HK
        b_k = tl.load(p_k + o_s * D, mask=m_u & (o_d < D)[None, :], other=0.0).to(DOT)
        b_p = tl.where(read, tl.dot(b_q, tl.trans(b_k), input_precision=PREC) * scale, float("-inf"))
        m_new = tl.maximum(b_m, tl.max(b_p, axis=1))
        shift = tl.where(m_new > float("-inf"), m_new, 0.0)  # of a row that has read nothing yet
        b_p = tl.exp2(b_p - shift[:, None])
        shrink = tl.exp2(b_m - shift)
        b_l = b_l * shrink + tl.sum(b_p, axis=1)
        b_m = m_new
        if OUT:
            b_v = tl.load(p_v + o_s * V, mask=m_u & (o_v < V)[None, :], other=0.0).to(DOT)
            b_o = tl.dot(b_p.to(DOT), b_v, b_o * shrink[:, None], input_precision=PREC)
    some = b_l > 0
    tl.store(lse + o_row, tl.where(some, b_m + tl.log2(tl.where(some, b_l, 1.0)), 0.0), mask=m_r)
    if OUT:
        b_o = tl.where(some[:, None], b_o / tl.where(some, b_l, 1.0)[:, None], 0.0)
        tl.store(out + o_row[:, None] * V + o_v[None, :], b_o.to(out.dtype.element_ty), mask=m_r[:, None] & (o_v < V)[None, :])


@triton.jit(do_not_specialize=["T", "S", "NT"])
def dq_kernel(
    q, k, v, out, do, lse, index, bits, count, dq, delta, scale, T, S, H, NT, NH, CAP,
    Q: tl.constexpr, G: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    N: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq = scale dS K with dS = P (dO V^T - delta), delta = rowsum(dO * O). `scale` here and in lse is in log2."""
    i_tile, i_b, i_hk, o_t, o_h, m_r, o_q = _program(H, NT, NH, Q, G, HB, T)
    o_d, o_v, o_n = tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, N)
    o_row, HK = (i_b * T + o_t) * H + o_h, H // G
    m_q, m_v = m_r[:, None] & (o_d < D)[None, :], m_r[:, None] & (o_v < V)[None, :]
    b_q = tl.load(q + o_row[:, None] * D + o_d[None, :], mask=m_q, other=0.0).to(DOT)
    b_do = tl.load(do + o_row[:, None] * V + o_v[None, :], mask=m_v, other=0.0).to(DOT)
    b_out = tl.load(out + o_row[:, None] * V + o_v[None, :], mask=m_v, other=0.0).to(tl.float32)
    b_delta = tl.sum(b_out * b_do.to(tl.float32), axis=1)
    tl.store(delta + o_row, b_delta, mask=m_r)
    b_lse, n = tl.load(lse + o_row, mask=m_r, other=0.0), tl.load(count + i_tile)
    index, bits = index + i_tile * CAP, bits + i_tile * CAP
    p_k, p_v = k + (i_b * S * HK + i_hk) * D + o_d[None, :], v + (i_b * S * HK + i_hk) * V + o_v[None, :]
    b_dq = tl.zeros([Q * HB, BD], dtype=tl.float32)
    for u in range(0, n, N):
        o_u = u + o_n
        b_s, read = selected_keys(index, bits, o_u, n, o_q, o_t, o_t, "bits")
        m_u, o_s = (o_u < n)[:, None], b_s[:, None].to(tl.int64) * HK
        b_k = tl.load(p_k + o_s * D, mask=m_u & (o_d < D)[None, :], other=0.0).to(DOT)
        b_v = tl.load(p_v + o_s * V, mask=m_u & (o_v < V)[None, :], other=0.0).to(DOT)
        b_p = tl.where(read, tl.dot(b_q, tl.trans(b_k), input_precision=PREC) * scale - b_lse[:, None], float("-inf"))
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PREC) - b_delta[:, None]
        b_dq = tl.dot((tl.exp2(b_p) * b_dp).to(DOT), b_k, b_dq, input_precision=PREC)
    b_dq *= scale * 0.6931471805599453
    tl.store(dq + o_row[:, None] * D + o_d[None, :], b_dq.to(dq.dtype.element_ty), mask=m_q)


@triton.jit(do_not_specialize=["i_0", "B", "T", "S", "NT", "NC"])
def partials_kernel(
    q, k, v, do, lse, delta, index, bits, count, dk, dv, scale, i_0, B, T, S, H, NT, NC, CAP,
    Q: tl.constexpr, G: tl.constexpr, HB: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Of lists i_0 on: dk, dv `(lists, CAP, Hk, D)` of CHUNK entries from the queries of the list. The scores are formed
    transposed, from operands that were loaded."""
    i = tl.program_id(0).to(tl.int64)
    HK = H // G
    i_c, i_hk, i_l = (i % NC).to(tl.int32), ((i // NC) % HK).to(tl.int32), i // (NC * HK)
    i_tile = i_0 + i_l
    if i_tile >= B * NT:
        return
    n, i_b = tl.load(count + i_tile), i_tile // NT
    o_r, o_d, o_v, o_n = tl.arange(0, Q * HB), tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, N)
    o_t, o_q = (i_tile % NT).to(tl.int32) * Q + o_r // HB, o_r // HB
    index, bits = index + i_tile * CAP, bits + i_tile * CAP
    p_k, p_v = k + (i_b * S * HK + i_hk) * D + o_d[None, :], v + (i_b * S * HK + i_hk) * V + o_v[None, :]
    for u in range(i_c * CHUNK, tl.minimum(n, i_c * CHUNK + CHUNK), N):
        o_u = u + o_n
        m_u = (o_u < n)[:, None]
        b_s, b_bits = tl.load(index + o_u, mask=o_u < n, other=0), tl.load(bits + o_u, mask=o_u < n, other=0)
        o_s = b_s[:, None].to(tl.int64) * HK
        b_k = tl.load(p_k + o_s * D, mask=m_u & (o_d < D)[None, :], other=0.0).to(DOT)
        b_v = tl.load(p_v + o_s * V, mask=m_u & (o_v < V)[None, :], other=0.0).to(DOT)
        read = ((b_bits[:, None] >> o_q[None, :]) & 1) != 0
        b_dk, b_dv = tl.zeros([N, BD], dtype=tl.float32), tl.zeros([N, BV], dtype=tl.float32)
        for i_g in tl.static_range(NH):
            o_g = i_g * HB + o_r % HB
            m_r, o_row = (o_t < T) & (o_g < G), (i_b * T + o_t) * H + i_hk * G + o_g
            b_q = tl.load(q + o_row[:, None] * D + o_d[None, :], mask=m_r[:, None] & (o_d < D)[None, :], other=0.0).to(DOT)
            b_do = tl.load(do + o_row[:, None] * V + o_v[None, :], mask=m_r[:, None] & (o_v < V)[None, :], other=0.0).to(DOT)
            b_lse = tl.load(lse + o_row, mask=m_r, other=0.0)
            b_delta = tl.load(delta + o_row, mask=m_r, other=0.0)
            b_pT = tl.dot(b_k, tl.trans(b_q), input_precision=PREC) * scale - b_lse[None, :]
            b_pT = tl.exp2(tl.where(read, b_pT, float("-inf")))
            b_dv = tl.dot(b_pT.to(DOT), b_do, b_dv, input_precision=PREC)
            b_dpT = tl.dot(b_v, tl.trans(b_do), input_precision=PREC) - b_delta[None, :]
            b_dk = tl.dot((b_pT * b_dpT).to(DOT), b_q, b_dk, input_precision=PREC)
        o_e = ((i_l * CAP + o_u[:, None]) * HK + i_hk).to(tl.int64)
        b_dk *= scale * 0.6931471805599453
        tl.store(dk + o_e * D + o_d[None, :], b_dk.to(dk.dtype.element_ty), mask=m_u & (o_d < D)[None, :])
        tl.store(dv + o_e * V + o_v[None, :], b_dv.to(dv.dtype.element_ty), mask=m_u & (o_v < V)[None, :])


@triton.jit
def reduce_kernel(part, order, starts, total, F, BF: tl.constexpr, E: tl.constexpr, NF: tl.constexpr):
    """total `(keys, F)` fp32 += the rows of `part (entries, F)` that belong to a key, order[starts[key] : starts[key + 1]]."""
    i = tl.program_id(0).to(tl.int64)
    i_key, o_f = i // NF, (i % NF).to(tl.int32) * BF + tl.arange(0, BF)
    start, end = tl.load(starts + i_key), tl.load(starts + i_key + 1)
    if start >= end:
        return
    b_sum = tl.zeros([BF], dtype=tl.float32)
    for e in range(start, end, E):
        o_e = e + tl.arange(0, E)
        b_e = tl.load(order + o_e, mask=o_e < end, other=0).to(tl.int64)
        b_x = tl.load(part + b_e[:, None] * F + o_f[None, :], mask=(o_e < end)[:, None] & (o_f < F)[None, :], other=0.0)
        b_sum += tl.sum(b_x.to(tl.float32), axis=0)
    p = total + i_key * F + o_f
    tl.store(p, tl.load(p, mask=o_f < F) + b_sum, mask=o_f < F)


# ----------------------------------------------------------------------------------------------------------------------
# One token. Its heads may come as a projection gives them: then they are normalised and rotated here.


@triton.jit
def _rotation(frequency, position, o_d, ROPE: tl.constexpr):
    """Of channels o_d: the other of each rotated pair, the sign of its part, cosine, sine; as in `triton_step.attention_kernel`."""
    first = o_d < ROPE // 2
    pair, sign = tl.where(first, o_d + ROPE // 2, o_d - ROPE // 2), tl.where(first, -1.0, 1.0)
    angle = position.to(tl.float32) * tl.load(frequency + tl.where(first, o_d, pair), mask=o_d < ROPE, other=0.0)
    return pair, sign, tl.cos(angle), tl.sin(angle)  # beyond ROPE: the angle is 0


@triton.jit
def _index_key(p, weight, bias, eps, o_d, pair, sign, cos, sin, D: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr):
    """The index key `(BD,)` at p, after its layer norm and rotation."""
    x, m = tl.load(p + o_d, mask=o_d < D, other=0.0).to(tl.float32), o_d < ROPE
    mean, r = 0.0, 1.0
    if NORM:
        mean = tl.sum(x, 0) / D
        centred = tl.where(o_d < D, x - mean, 0.0)
        r = tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
        x = centred * r * tl.load(weight + o_d, mask=o_d < D, other=0.0) + tl.load(bias + o_d, mask=o_d < D, other=0.0)
    if ROPE > 0:
        y = tl.load(p + pair, mask=m, other=0.0).to(tl.float32)
        if NORM:
            y = (y - mean) * r * tl.load(weight + pair, mask=m, other=0.0) + tl.load(bias + pair, mask=m, other=0.0)
        x = x * cos + tl.where(m, y, 0.0) * sign * sin
    return x


@triton.jit
def _write_token(
    k, v, k_slot, v_slot, k_norm, frequency, position, HK, eps, BH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, QK_NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """A token's keys, normalised and rotated, and its values into their slots."""
    o_h, o_d, o_v = tl.arange(0, BH), tl.arange(0, BD), tl.arange(0, BV)
    pair, sign, cos, sin = o_d, tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if ROPE > 0:
        pair, sign, cos, sin = _rotation(frequency, position, o_d, ROPE)
    p_k, m_k = k + o_h[:, None] * D, (o_h < HK)[:, None] & (o_d < D)[None, :]
    b_k = _prepared(p_k + o_d[None, :], p_k + pair[None, :], k_norm, o_d, m_k, sign, cos, sin, eps, D, QK_NORM, ROPE)
    tl.store(k_slot + o_h[:, None] * D + o_d[None, :], b_k.to(k_slot.dtype.element_ty), mask=m_k)
    o_hv, m_v = o_h[:, None] * V + o_v[None, :], (o_h < HK)[:, None] & (o_v < V)[None, :]
    tl.store(v_slot + o_hv, tl.load(v + o_hv, mask=m_v, other=0.0).to(tl.float32).to(v_slot.dtype.element_ty), mask=m_v)


@triton.jit(do_not_specialize=["S", "NC", "HK", "local"])
def decode_scores_kernel(
    index_q, index_k, index_w, k, v, k_cache, v_cache, index_cache, length, index_norm, index_bias, index_frequency, k_norm,
    frequency, keys, maxima, tops, scale, index_eps, eps, S, W, NC, HK, local, index_q_b, index_k_b, index_w_b, k_b, v_b,
    J: tl.constexpr, BJ: tl.constexpr, DI: tl.constexpr, BDI: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, INDEX_NORM: tl.constexpr, INDEX_ROPE: tl.constexpr, QK_NORM: tl.constexpr,
    ROPE: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Scores of one query a row against blocks i_c, i_c + NC, ... of 256 keys of its cache, as `scores_kernel`, with the maximum of
    each block in tops. The program of the new token's block writes it into the three caches; nobody reads it from there."""
    i = tl.program_id(0).to(tl.int64)
    i_c, i_b = (i % NC).to(tl.int32), i // NC
    position = tl.load(length + i_b).to(tl.int32)
    at = tl.minimum(position, S - 1)
    if i_c * 256 > at:
        return
    o_j, o_i, o_n = tl.arange(0, BJ), tl.arange(0, BDI), tl.arange(0, N)
    pair, sign, cos, sin = o_i, tl.zeros([BDI], tl.float32), tl.zeros([BDI], tl.float32), tl.zeros([BDI], tl.float32)
    if INDEX_ROPE > 0:
        pair, sign, cos, sin = _rotation(index_frequency, position, o_i, INDEX_ROPE)
    p_q, m_q = index_q + i_b * index_q_b + o_j[:, None] * DI, (o_j < J)[:, None] & (o_i < DI)[None, :]
    b_q = _prepared(p_q + o_i[None, :], p_q + pair[None, :], index_norm, o_i, m_q, sign, cos, sin, 0.0, DI, False, INDEX_ROPE)
    b_q = b_q.to(DOT)
    b_w = tl.load(index_w + i_b * index_w_b + o_j, mask=o_j < J, other=0.0).to(tl.float32) * scale
    p_new = index_k + i_b * index_k_b
    b_new = _index_key(p_new, index_norm, index_bias, index_eps, o_i, pair, sign, cos, sin, DI, INDEX_NORM, INDEX_ROPE)
    b_new = b_new.to(index_cache.dtype.element_ty)
    for block in range(i_c, at // 256 + 1, NC):
        b_top = tl.full([], UNSEEN, tl.int32)
        for n in range(block * 256, block * 256 + 256, N):
            o_s = n + o_n
            p_k = index_cache + (i_b * S + o_s[:, None]) * DI + o_i[None, :]
            b_k = tl.load(p_k, mask=(o_s < at)[:, None] & (o_i < DI)[None, :], other=0.0).to(DOT)
            b_k = tl.where((o_s == at)[:, None], b_new.to(DOT)[None, :], b_k)
            b_z = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
            b_key = ordered(tl.sum(tl.maximum(b_z, 0.0) * b_w[:, None], axis=0))
            b_key = tl.where(o_s > at, UNSEEN, tl.where(at - o_s < local, LOCAL, b_key))
            tl.store(keys + i_b * W + o_s, b_key)
            b_max = tl.max(tl.reshape(b_key, [N // 16, 16]), axis=1)
            tl.store(maxima + i_b * (W // 16) + n // 16 + tl.arange(0, N // 16), b_max)
            b_top = tl.maximum(b_top, tl.max(b_max, axis=0))
        tl.store(tops + i_b * (W // 256) + block, b_top)
    if at // 256 % NC == i_c:
        tl.store(index_cache + (i_b * S + at) * DI + o_i, b_new, mask=o_i < DI)
        row = i_b * S + at
        _write_token(
            k + i_b * k_b, v + i_b * v_b, k_cache + row * HK * D, v_cache + row * HK * V, k_norm, frequency, position, HK, eps,
            BH, D, BD, V, BV, QK_NORM, ROPE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["S", "CAP", "NS", "HK"])
def decode_kernel(
    q, k_cache, v_cache, length, index, count, q_norm, frequency, parts, stats, scale, eps, S, CAP, NS, HK, q_b,
    R: tl.constexpr, BR: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    QK_NORM: tl.constexpr, ROPE: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The R query heads of a key head over one slice of a list: the unnormalised output, its maximum and its sum."""
    i = tl.program_id(0).to(tl.int64)
    i_s, i_h, i_b = (i % NS).to(tl.int32), (i // NS) % HK, i // (NS * HK)
    position, n = tl.load(length + i_b).to(tl.int32), tl.load(count + i_b)
    o_r, o_d, o_v, o_n = tl.arange(0, BR), tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, N)
    pair, sign, cos, sin = o_d, tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if ROPE > 0:
        pair, sign, cos, sin = _rotation(frequency, position, o_d, ROPE)
    p_q, m_q = q + i_b * q_b + (i_h * R + o_r)[:, None] * D, (o_r < R)[:, None] & (o_d < D)[None, :]
    b_q = _prepared(p_q + o_d[None, :], p_q + pair[None, :], q_norm, o_d, m_q, sign, cos, sin, eps, D, QK_NORM, ROPE)
    b_q = (b_q * scale).to(DOT)
    b_m, b_l = tl.full([BR], float("-inf"), tl.float32), tl.zeros([BR], tl.float32)
    b_o = tl.zeros([BR, BV], tl.float32)
    size = tl.cdiv(tl.cdiv(n, N), NS) * N
    for u in range(i_s * size, tl.minimum(i_s * size + size, n), N):  # a slice that runs has a key in every round
        m_u = u + o_n < n
        o_s = (i_b * S + tl.load(index + i_b * CAP + u + o_n, mask=m_u, other=0)[:, None]) * HK + i_h
        b_k = tl.load(k_cache + o_s * D + o_d[None, :], mask=m_u[:, None] & (o_d < D)[None, :], other=0.0).to(DOT)
        b_v = tl.load(v_cache + o_s * V + o_v[None, :], mask=m_u[:, None] & (o_v < V)[None, :], other=0.0).to(DOT)
        b_p = tl.where(m_u[None, :], tl.dot(b_q, tl.trans(b_k), input_precision=PREC), float("-inf"))
        m_new = tl.maximum(b_m, tl.max(b_p, 1))
        b_p, shrink = tl.exp2(b_p - m_new[:, None]), tl.exp2(b_m - m_new)
        b_o = tl.dot(b_p.to(DOT), b_v, b_o * shrink[:, None], input_precision=PREC)
        b_l = b_l * shrink + tl.sum(b_p, 1)
        b_m = m_new
    row = ((i_b * HK + i_h) * R + o_r) * NS + i_s
    tl.store(parts + row[:, None] * V + o_v[None, :], b_o, mask=(o_r < R)[:, None] & (o_v < V)[None, :])
    tl.store(stats + row * 2, b_m, mask=o_r < R)
    tl.store(stats + row * 2 + 1, b_l, mask=o_r < R)


# ----------------------------------------------------------------------------------------------------------------------
# Launches

_HOPPER = {
    "attend": {"num_warps": 4, "num_stages": 3, "N": 64},
    "dq": {"num_warps": 4, "num_stages": 2, "N": 64},
    "partials": {"num_warps": 4, "num_stages": 1, "N": 64, "CHUNK": 512},
    "reduce": {"num_warps": 1, "num_stages": 2, "BF": 512, "E": 4},
    "decode_scores": {"num_warps": 4, "num_stages": 2, "N": 128},
    "decode": {"num_warps": 4, "num_stages": 2, "N": 64},
}
_WIDE = _HOPPER | {  # operands of 4 bytes
    "attend": {"num_warps": 8, "num_stages": 1, "N": 16},
    "dq": {"num_warps": 8, "num_stages": 1, "N": 16},
    "partials": {"num_warps": 8, "num_stages": 1, "N": 16, "CHUNK": 512},
    "decode_scores": {"num_warps": 4, "num_stages": 1, "N": 64},
    "decode": {"num_warps": 4, "num_stages": 1, "N": 32},
}
_AMPERE = _HOPPER | {
    "attend": {"num_warps": 4, "num_stages": 2, "N": 32},
    "dq": {"num_warps": 4, "num_stages": 2, "N": 32},
    "partials": {"num_warps": 8, "num_stages": 1, "N": 32, "CHUNK": 512},
}
LAUNCH = {(80, 2): _AMPERE, (80, 4): _WIDE, (90, 2): _HOPPER, (90, 4): _WIDE, (100, 2): _HOPPER, (100, 4): _WIDE}


def _options(kernel, x):
    return options(LAUNCH, kernel, x)


def attention_shapes(q, k, v):
    """Arguments of the kernels over lists: runtime T, S, H, and constants. HB heads of G make 64 rows with 16 queries."""
    T, H, D = q.shape[1:]
    S, HK, V = v.shape[1:]
    G = H // HK
    HB = min(4, triton.next_power_of_2(G))
    constants = {"Q": QUERIES, "G": G, "HB": HB, "D": D, "V": V, "BD": padded(D), "BV": padded(V)}
    return (T, S, H), triton.cdiv(G, HB), HK, constants | selection.operands(q, attend_kernel)


def attend(q, k, v, index, bits, count, lows, scale, keys, out=True):
    """out `(B, T, H, V)` (of no size unless `out`), lse `(B, T, H)`. keys "bits": those of the lists; "dense": all from lows on."""
    runtime, NH, HK, constants = attention_shapes(q, k, v)
    B, NT, CAP = index.shape if keys != "dense" else (q.shape[0], triton.cdiv(q.shape[1], QUERIES), 0)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o = torch.empty(*q.shape[:3], v.shape[-1] if out else 0, dtype=v.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    lists = (lse if x is None else x for x in (index, bits, count, lows))
    launch(attend_kernel, KEYS=keys, OUT=out, **constants, **_options("attend", q))(
        B * NT * HK * NH, q, k, v, *lists, o, lse, scale * LOG2E, *runtime, NT, NH, CAP
    )
    return o, lse


def inverted(index, count, first, n, B, keys):
    """Of lists first .. first + n, flattened: the entries in the order of their keys, and where each key's begin. Ties by entry."""
    _, NT, CAP = index.shape
    tile = torch.arange(first, min(first + n, B * NT), device=index.device)
    key = index.view(-1, CAP)[tile] + (tile // NT * keys).to(torch.int32)[:, None]
    key = torch.where(torch.arange(CAP, device=index.device) < count.view(-1)[tile, None], key, B * keys)
    key, order = key.view(-1).sort(stable=True)
    starts = torch.searchsorted(key, torch.arange(B * keys + 1, device=index.device, dtype=torch.int32))
    return order.to(torch.int32), starts.to(torch.int32)


def add_rows(part, order, starts, total):
    """total `(keys, F)` += rows of `part (entries, F)`, by key; deterministic."""
    F, chosen = total.shape[-1], dict(_options("reduce", total))
    chosen["BF"] = min(chosen["BF"], padded(F))
    NF = triton.cdiv(F, chosen["BF"])
    reduce_kernel[(total.shape[0] * NF,)](part, order, starts, total, F, NF=NF, **chosen)


def _forward_pass(q, k, v, index, bits, count, scale):
    return attend(q, k, v, index, bits, count, None, scale, "bits")


@torch.library.custom_op("hybrid::sparse_forward", mutates_args=())
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor, bits: torch.Tensor, count: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward_pass(q, k, v, index, bits, count, scale)


@_forward.register_fake
def _(q, k, v, index, bits, count, scale):
    return v.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_pass(q, k, v, index, bits, count, out, lse, do, scale):
    runtime, NH, HK, constants = attention_shapes(q, k, v)
    (B, NT, CAP), S, V = index.shape, k.shape[1], v.shape[-1]
    q, k, v, do = q.contiguous(), k.contiguous(), v.contiguous(), do.contiguous()
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    lists = index, bits, count
    dq_kernel[(B * NT * HK * NH,)](
        q, k, v, out, do, lse, *lists, dq, delta, scale * LOG2E, *runtime, NT, NH, CAP, **constants, **_options("dq", q)
    )
    F = HK * q.shape[-1], HK * V
    n = min(B * NT, max(1, STRIP // (CAP * sum(F) * q.element_size())))  # lists in a strip
    dk_part, dv_part = (torch.empty(n * CAP, f, dtype=q.dtype, device=q.device) for f in F)
    dk, dv = (torch.zeros(B * S, f, dtype=torch.float32, device=q.device) for f in F)
    chosen = _options("partials", q)
    NC = triton.cdiv(CAP, chosen["CHUNK"])
    for first in range(0, B * NT, n):
        partials_kernel[(n * HK * NC,)](
            q, k, v, do, lse, delta, *lists, dk_part, dv_part, scale * LOG2E, first, B, *runtime, NT, NC, CAP, NH=NH, **constants,
            **chosen,
        )  # fmt: skip
        order, starts = inverted(index, count, first, n, B, S)
        add_rows(dk_part, order, starts, dk)
        add_rows(dv_part, order, starts, dv)
    return dq, dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype)


@torch.library.custom_op("hybrid::sparse_backward", mutates_args=())
def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor, bits: torch.Tensor, count: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _backward_pass(q, k, v, index, bits, count, out, lse, do, scale)


@_backward.register_fake
def _(q, k, v, index, bits, count, out, lse, do, scale):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, dlse=None, backward=_backward):
    if do is None:
        return (None,) * 7
    return *backward(*ctx.saved_tensors, do, ctx.scale), None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
_direct = direct(_forward_pass, _save, lambda ctx, do: _differentiate(ctx, do, backward=_backward_pass))


def decode_scores(
    index_q, index_k, index_w, k, v, k_cache, v_cache, index_cache, length, local, index_scale, index_norm, index_frequency, k_norm,
    eps, frequency,
):  # fmt: skip
    """keys `(B, W)`, their maxima of 16 and of 256; the new token goes into the caches. Arguments are those of `decode`."""
    (B, J, DI), (S, HK, D), V = index_q.shape, k_cache.shape[1:], v.shape[-1]
    blocks = triton.cdiv(S, 256)
    NC = min(blocks, max(1, 1024 // B))  # a program goes on to further blocks: the cost follows the length, not the capacity
    keys, maxima, tops = (torch.empty(B, n * blocks, dtype=torch.int32, device=k.device) for n in (256, 16, 1))
    weight, bias, index_eps = (k, k, 0.0) if index_norm is None else index_norm  # k stands in for what is not read
    constants = {"J": J, "BJ": padded(J), "DI": DI, "BDI": padded(DI), "BH": padded(HK, 1), "D": D, "BD": padded(D), "V": V}
    constants |= {"BV": padded(V), "INDEX_NORM": index_norm is not None, "QK_NORM": k_norm is not None}
    constants |= {"INDEX_ROPE": _rotated(index_frequency), "ROPE": _rotated(frequency)}
    constants |= operand_types(index_cache, decode_scores_kernel, wide="ieee")
    launch(decode_scores_kernel, **constants, **_options("decode_scores", index_cache))(
        B * NC, index_q, index_k, index_w, k, v, k_cache, v_cache, index_cache, length, weight, bias,
        *(k if x is None else x for x in (index_frequency, k_norm, frequency)), keys, maxima, tops, index_scale, index_eps, eps, S,
        256 * blocks, NC, HK, local, *(x.stride(0) for x in (index_q, index_k, index_w, k, v)),
    )  # fmt: skip
    return keys, maxima, tops


def _rotated(frequency):
    return 0 if frequency is None else 2 * len(frequency)


def decode_attention(q, k_cache, v_cache, length, index, count, scale, q_norm, eps, frequency, gate):
    """Attention of one token a row, q `(B, H, D)`, over the keys that its list names: `(B, H, V)`."""
    (B, H, D), (S, HK, V), CAP = q.shape, v_cache.shape[1:], index.shape[1]
    chosen = _options("decode", k_cache)
    NS = 1
    while NS < 64 and NS * chosen["N"] < CAP and 2 * NS * B * HK <= 1024:
        NS *= 2
    parts = torch.empty(B, H, NS, V, dtype=torch.float32, device=q.device)
    stats = torch.empty(B, H, NS, 2, dtype=torch.float32, device=q.device)
    constants = {"R": H // HK, "BR": padded(H // HK), "D": D, "BD": padded(D), "V": V, "BV": padded(V)}
    constants |= {"QK_NORM": q_norm is not None, "ROPE": _rotated(frequency)}
    launch(decode_kernel, **constants, **operand_types(k_cache, decode_kernel, wide="ieee"), **chosen)(
        B * HK * NS, q, k_cache, v_cache, length, index, count, *(parts if x is None else x for x in (q_norm, frequency)), parts,
        stats, scale * LOG2E, eps, S, CAP, NS, HK, q.stride(0),
    )  # fmt: skip
    out = torch.empty(B, H, V, dtype=q.dtype, device=q.device)
    launch(step.merge_kernel, V=V, BV=padded(V), NS=NS, SINKS=False, GATE=gate is not None, **options(step.LAUNCH, "merge", out))(
        B * H, parts, stats, q, q if gate is None else gate, out, 0 if gate is None else gate.stride(0), H
    )
    return out


def decode(
    q, k, v, index_q, index_k, index_w, *, k_cache, v_cache, index_cache, length, top_k, local, scale, index_scale, index_norm=None,
    index_frequency=None, norms=None, eps=0.0, frequency=None, gate=None,
):  # fmt: skip
    """One token: q `(B, H, D)`, k `(B, Hk, D)`, v `(B, Hk, V)`, index_q `(B, J, d)`, index_k `(B, d)`, index_w `(B, J)`, each row's
    heads contiguous; returns `(B, H, V)`.

    Scores are `index_scale sum_j w_j relu(q_j k)`. norms, eps, frequency and gate as in `triton_step.attention`; index_norm =
    (weight, bias, eps) of the index key's layer norm, in fp32; index_frequency rotates the index heads. Nothing waits for the
    device. A row that is full writes over its last slot.
    """
    S, (q_norm, k_norm) = k_cache.shape[1], norms or (None, None)
    caches, index = (k_cache, v_cache, index_cache, length), (index_scale, index_norm, index_frequency)
    scores = decode_scores(index_q, index_k, index_w, k, v, *caches, local, *index, k_norm, eps, frequency)
    lists = selection.chosen_keys(*scores, length, S, min(top_k, S))
    return decode_attention(q, k_cache, v_cache, length, *lists, scale, q_norm, eps, frequency, gate)


def _decode_pass(q, k, v, index_q, index_k, index_w, k_cache, v_cache, index_cache, length, top_k, local, scale):
    q, k, v, index_q = (_heads(x)[:, 0] for x in (q, k, v, index_q))
    caches = {"k_cache": k_cache, "v_cache": v_cache, "index_cache": index_cache, "length": length}
    rest = {"top_k": top_k, "local": local, "scale": scale, "index_scale": index_q.shape[-1] ** -0.5}
    return decode(q, k, v, index_q, _last(index_k), _last(index_w), **caches, **rest)[:, None]


def _last(x):
    """x `(B, 1, D)` as `(B, D)`, the channels side by side."""
    return x[:, 0] if x.stride(2) == 1 else x[:, 0].contiguous()


@torch.library.custom_op("hybrid::sparse_decode", mutates_args=("k_cache", "v_cache", "index_cache"))
def _decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index_q: torch.Tensor, index_k: torch.Tensor, index_w: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, index_cache: torch.Tensor, length: torch.Tensor, top_k: int, local: int,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    return _decode_pass(q, k, v, index_q, index_k, index_w, k_cache, v_cache, index_cache, length, top_k, local, scale)


@_decode.register_fake
def _(q, k, v, index_q, index_k, index_w, k_cache, v_cache, index_cache, length, top_k, local, scale):
    return q.new_empty(*q.shape[:3], v.shape[-1])


# ----------------------------------------------------------------------------------------------------------------------
# The public operators


def supports_selected_attention(q, k, v, selected, **_):
    return selection.unsupported(q)


def supports_sparse_attention(q, k, v, index_q, *_, **__):
    return selection.unsupported(q) or selection.unsupported(index_q, index_q)


def supports_sparse_attention_step(q, k, v, index_q, *_, k_cache, v_cache, index_cache, **__):
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and index_cache.is_contiguous()):
        return "caches that are not contiguous"
    return supports_sparse_attention(q, k, v, index_q)


def _attend_selected(q, k, v, lists, scale):
    inputs = q, k.to(q.dtype), v.to(q.dtype), *lists, scale
    return _forward(*inputs)[0] if traced(q, k, v) else _direct(*inputs)


def selected_attention(q, k, v, selected, *, scale=None):
    """`reference.selected_attention`, for selections that neighbouring queries largely share."""
    (B, T), scale = q.shape[:2], q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _attend_selected(q, k, v, selection.lists_of(selected.expand(B, T, k.shape[1])), scale)


def sparse_attention(q, k, v, index_q, index_k, index_w, *, top_k, local=0, scale=None, past=None, segment_ids=None):
    """`reference.sparse_attention` without any matrix of all queries and keys; bf16, fp16 or fp32. Differentiable in q, k, v."""
    if past is not None:
        k, v, index_k = (torch.cat([old.to(new.dtype), new], dim=1) for old, new in zip(past[:3], (k, v, index_k), strict=True))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    lists = selection.lists_for(index_q, index_k, index_w, top_k, local, past, segment_ids)
    return _attend_selected(q, k, v, lists, scale)


def sparse_attention_step(
    q, k, v, index_q, index_k, index_w, *, k_cache, v_cache, index_cache, length, top_k, local=0, scale=None, longest=None
):
    """`reference.sparse_attention_step`; a single token reads all index keys, and top_k rows of keys and values."""
    if q.shape[1] == 1:
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        inputs = q, k, v, index_q, index_k, index_w, k_cache, v_cache, index_cache, length, top_k, local, scale
        return _decode(*inputs) if traced(q, k, v) else _decode_pass(*inputs)
    past = (k_cache, v_cache, index_cache, cache_positions(length, k_cache.shape[1]), length)
    out = sparse_attention(q, k, v, index_q, index_k, index_w, top_k=top_k, local=local, scale=scale, past=past)
    _keep(((k_cache, k), (v_cache, v), (index_cache, index_k)), length)
    return out
