"""The recurrent family in Triton, forward and backward: `delta_rule` and `linear_attention` for a decay per head or none.

Chunks of C = 64 tokens. With G the running sum of the decay (log2) inside the chunk, e_i = 2^G_i, r_i = 2^(G_C - G_i),
Gamma_ij = 2^(G_i - G_j) for i >= j, and A' = (I + stril(diag(beta) K K^T * Gamma))^-1 diag(beta):

    prepare  (per chunk)         G, A'
    forward  (per head, V/BV)    Vn = A' (V - e * K S),  O = scale (e * Q S + (Q K^T * Gamma) Vn),  S' = e_C S + K^T (r * Vn)
    reverse  (per head, V/BV)    dVn = r * K dS + (K Q^T * Gamma^T) dO,  dV = A'^T dVn,  dS' = e_C dS + Q^T (e * dO) - K^T (e * dV)
    inputs   (per chunk)         dQ, dK, dbeta, dG from the stored S, dS, Vn, dV

Linear attention is the same with Vn = V: without A', beta and the terms in dV above (DELTA is false).

Where gradients are wanted the forward scan keeps each chunk's S and Vn in the type of q, 768 bytes a token and head at K = V = 128
(reverse scan and inputs would otherwise wait for a scan that makes them anew: 0.25 ms of 1.9 at B8 T4096 H16 on an H200).
Where batch and heads are few, a sequence is scanned in slices side by side: the state behind a slice is M S + L, of which one scan
from zero gives L and one from the identity, with V = 0, gives M; M^T carries the gradient back.

The gradient of the solve is implicit: with X = A'^T dVn, which is dV, that of beta * K K^T * Gamma is -stril(X Vn^T), and no
gradient of A is formed. For keys of cosine 0.9 and beta up to 2, X is a small difference of large terms, and dG one of terms of dQ
and dK: in bf16 dV is 2e-2 off and dG up to 5e-2, with fp16 below 1e-2 and 1.5e-2. Hence fp16 for A' and V - e * K S, and, divided
by a unit that suits the largest element, for dVn in reverse and the gradients of the scores in inputs; q and k beside these are
fp16 too: elements of q, k and v must not exceed 65504, and those of v be at least about 1e-5 to count. Every transposed product is
computed as such, from operands that were loaded: Triton before 3.7.1 miscompiles a dot whose operand is the transpose of another
dot's result. A document's first token carries 128 less in log2, so that every 2^(difference) across a boundary is 0. Yang et al.
2406.06484, 2412.06464; Dao and Gu 2405.21060."""

import functools

import torch
import triton
import triton.language as tl

from .eager import FORGOTTEN
from .launch import architecture, differentiable, direct, interpreted, launch, operand_types, ready, shared_by_layers, tile, traced
from .reference import segment_runs

LOG2_E = 1.4426950408889634
C = 64
COUNTS = ["B", "T", "H", "N", "NS"]  # arguments no kernel is compiled anew for


@triton.jit
def _half_of(x):
    """fp32 x in fp16, what is beyond its range at its end: one instruction for two elements, where clamping takes four more."""
    return tl.inline_asm_elementwise(
        "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
    )  # fmt: skip


if interpreted(_half_of) or torch.version.hip:  # which know no such assembly

    @triton.jit
    def _half_of(x):
        return tl.clamp(x, -65504.0, 65504.0).to(tl.float16)


@triton.jit
def _merge(a, b, PREC: tl.constexpr, HALF: tl.constexpr):
    if HALF:
        a, b = _half_of(a), _half_of(b)
    return tl.dot(a, b, input_precision=PREC)


@triton.jit
def inverse_64(b_L, PREC: tl.constexpr, HALF: tl.constexpr = False):
    """(I + L)^-1 of a strictly lower b_L (64, 64), by merging blocks of s into blocks of 2s: X - X S X, with X the inverse of the
    diagonal blocks of s and S what L has between the two of a pair. Unlike powers of L, no intermediate exceeds the inverse.

    Up to blocks of 16 as four products side by side. In tf32 the inverse is 2e-3 off with keys correlated 0.9, in tf32x3 6e-7: for
    fp32 inputs that is the error of output and gradients, for 16-bit ones a few percent of it. HALF: products in fp16, whose
    mantissa is tf32's. Its range suffices while beta |k|^2 <= 2, where the update contracts and entries stay below 2 for keys of
    one length; beyond fp16's largest number they are clamped, so that the inverse stays finite but is wrong."""
    o, r, o_c = tl.arange(0, 4), tl.arange(0, 16), tl.arange(0, 64)
    same = o[:, None, None, None] == o[None, None, :, None]
    low = tl.sum(tl.where(same, tl.reshape(b_L, (4, 16, 4, 16)), 0.0), axis=2)  # (4, 16, 16): the diagonal blocks
    i, j = r[None, :, None], r[None, None, :]
    x = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -low, 0.0))
    for s in tl.static_range(1, 4):
        part = tl.where((i >> (s + 1) == j >> (s + 1)) & (i >> s != j >> s), low, 0.0)
        x -= _merge(x, _merge(part, x, PREC, HALF), PREC, HALF)
    x = tl.reshape(tl.where(same, x[:, :, None, :], 0.0), (64, 64))
    i, j = o_c[:, None], o_c[None, :]
    for s in tl.static_range(4, 6):
        part = tl.where((i >> (s + 1) == j >> (s + 1)) & (i >> s != j >> s), b_L, 0.0)
        x -= _merge(x, _merge(part, x, PREC, HALF), PREC, HALF)
    return x


@triton.jit
def _rows(x, i_b, i_h, t0, d0, T, s_t, D: tl.constexpr, BD: tl.constexpr):
    """64 rows and BD columns of x (B, T, H, D), its tokens s_t apart; within a chunk offsets are in 32 bits."""
    o_t, o_d = tl.arange(0, 64), tl.arange(0, BD)
    p = x + (i_b.to(tl.int64) * T + t0) * s_t + i_h * D + d0
    mask = (o_t < T - t0)[:, None] if D % BD == 0 else (o_t < T - t0)[:, None] & (d0 + o_d < D)[None, :]
    return tl.load(p + (o_t[:, None] * s_t + o_d[None, :]), mask=mask, other=0.0)


@triton.jit(do_not_specialize=COUNTS)
def prepare_kernel(
    k, g, beta, starts, A, G, T, H, N, s_k,
    R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, HAS_G: tl.constexpr, HAS_STARTS: tl.constexpr, DELTA: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """G (B H, N, 64) of one chunk of one head, and for the delta rule A' (B, T, H, 64)."""
    i = tl.program_id(0)
    i_c, i_h, i_b = i % N, (i // N) % H, i // (N * H)
    t0 = i_c * 64
    o_c = tl.arange(0, 64)
    row = i_b.to(tl.int64) * T + t0  # what follows is within a chunk: offsets in 32 bits
    left = T - t0
    seen = o_c < left
    head = row * H + i_h
    if DELTA:  # by pointers, and before anything waits: see inputs_kernel
        o_d = tl.arange(0, BK)
        mask = seen[:, None] if BK == K else seen[:, None] & (o_d < K)[None, :]
        b_k = tl.load(k + row * s_k + (i_h // R) * K + (o_c[:, None] * s_k + o_d[None, :]), mask=mask, other=0.0).to(DOT)
        b_beta = tl.load(beta + head + o_c * H, mask=seen, other=0.0).to(tl.float32)
    b_G = tl.zeros([64], dtype=tl.float32)
    if HAS_G or HAS_STARTS:
        b_g = tl.zeros([64], dtype=tl.float32)
        if HAS_G:
            b_g = tl.maximum(tl.load(g + head + o_c * H, mask=seen, other=0.0).to(tl.float32), -40.0) * 1.4426950408889634
        if HAS_STARTS:
            b_g -= 128.0 * tl.load(starts + row + o_c, mask=seen, other=0).to(tl.float32)
        b_G = tl.cumsum(b_g, 0)
        tl.store(G + ((i_b * H + i_h).to(tl.int64) * N + i_c) * 64 + o_c, b_G)
    if DELTA:
        b_L = tl.dot(b_k, tl.trans(b_k), input_precision=PREC) * b_beta[:, None]
        if HAS_G or HAS_STARTS:
            b_L *= tl.exp2(tl.where(o_c[:, None] > o_c[None, :], b_G[:, None] - b_G[None, :], float("-inf")))
        else:
            b_L = tl.where(o_c[:, None] > o_c[None, :], b_L, 0.0)
        b_A = inverse_64(b_L, PREC, DOT != tl.float32) * b_beta[None, :]
        b_A = _half_of(b_A) if DOT != tl.float32 else b_A
        tl.store(A + head * 64 + (o_c[:, None] * (H * 64) + o_c[None, :]), b_A, mask=seen[:, None])


@triton.jit
def _decays(G, i_b, i_h, i_c, T, H, N, DECAYS: tl.constexpr):
    """Of one chunk: G (64,), e = 2^G, r = 2^(G_end - G), 2^G_end. DECAYS: 0 none, 1 one a token, G (B H, N, 64), which behind the
    last token stays as it is, 2 constant, G (H,) its log2."""
    o = tl.arange(0, 64)
    b_G = tl.zeros([64], dtype=tl.float32)
    end = 0.0
    if DECAYS == 1:
        p_G = G + ((i_b * H + i_h).to(tl.int64) * N + i_c) * 64
        b_G = tl.load(p_G + o)
        end = tl.load(p_G + 63)
    if DECAYS == 2:
        rate = tl.load(G + i_h)
        b_G = rate * (o + 1)
        end = rate * tl.minimum(64, T - i_c * 64)
    return b_G, tl.exp2(b_G), tl.exp2(tl.minimum(end - b_G, 0.0)), tl.exp2(end)


@triton.jit
def _unit(most):
    """What to divide by so that numbers up to `most` fit fp16 with room above and as much as there can be below."""
    return tl.maximum(most, 1e-30) * 0.00006103515625  # 2^-14


@triton.jit
def solved(b_A, b_x, DOT: tl.constexpr, PREC: tl.constexpr):
    """b_A b_x in fp32, b_A as it was loaded: in fp16, with b_x over a unit that suits its largest element, unless all is fp32."""
    if DOT == tl.float32:
        b_y = tl.dot(b_A.to(DOT), b_x, input_precision=PREC)
    else:
        unit = _unit(tl.max(tl.abs(b_x)))
        b_y = tl.dot(b_A, (b_x * (1.0 / unit)).to(tl.float16)) * unit
    return b_y


@triton.jit
def _scan(B, H, K, V, N, NS, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr):
    """A scan's program: batch, head, columns of V, chunks from and to, offsets and mask of its state (slices, B, H, K, V)."""
    i = tl.program_id(0).to(tl.int64)
    i_v, i_h, i_b, i_s = i % NV, (i // NV) % H, (i // (NV * H)) % B, i // (NV * H * B)
    o_k, o_v = tl.arange(0, BK)[:, None], i_v * BV + tl.arange(0, BV)[None, :]
    o_h = ((i_s * B + i_b) * H + i_h) * K * V + o_k * V + o_v
    first = (i_s * NS).to(tl.int32)
    i_v, i_h, i_b = i_v.to(tl.int32), i_h.to(tl.int32), i_b.to(tl.int32)
    return i_b, i_h, i_v * BV, first, tl.minimum(first + NS, N), o_h, (o_k < K) & (o_v < V)


# Stores of the scans go through pointers: a descriptor's staging tiles would push the second of two programs off an SM.
@triton.jit
def _store_rows(x, b_x, i_b, i_h, t0, d0, T, H, D: tl.constexpr, BD: tl.constexpr):
    """64 rows and BD columns of x (B, T, H, D)."""
    o_t, o_d = tl.arange(0, 64), tl.arange(0, BD)
    p = x + ((i_b.to(tl.int64) * T + t0) * H + i_h) * D + d0
    mask = (o_t < T - t0)[:, None] if D % BD == 0 else (o_t < T - t0)[:, None] & (d0 + o_d < D)[None, :]
    tl.store(p + (o_t[:, None] * (H * D) + o_d[None, :]), b_x.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _store_state(x, b_x, i_b, i_h, i_c, v0, H, N, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """BV columns of the state of one chunk in x (B H, N, K, V)."""
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    p = x + ((i_b * H + i_h).to(tl.int64) * N + i_c) * K * V + v0 + (o_k[:, None] * V + o_v[None, :])
    if K == BK and V % BV == 0:
        tl.store(p, b_x.to(x.dtype.element_ty))
    else:
        tl.store(p, b_x.to(x.dtype.element_ty), mask=(o_k < K)[:, None] & (v0 + o_v < V)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q, k, v, A, G, o, h, vn, h0, hT, scale, B, T, H, N, NS,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, DECAYS: tl.constexpr,
    HAS_H0: tl.constexpr, OUT: tl.constexpr, STATES: tl.constexpr, DELTA: tl.constexpr, EYE: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """NS chunks of one head and BV columns of V, in order, from h0 to hT (slices, B, H, K, V). OUT: write o; STATES: write each S
    and Vn. EYE: start from the identity and take V for zero, which ends in the slice's transition matrix (slices, B, H, K, K)."""
    i_b, i_h, v0, first, last, o_h, m_h = _scan(B, H, K, V, N, NS, BK, BV, NV)
    i_hk = i_h // R
    o_c = tl.arange(0, 64)
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_H0:
        b_S += tl.load(h0 + o_h, mask=m_h, other=0.0)
    if EYE:
        b_S += tl.where(tl.arange(0, BK)[:, None] == v0 + tl.arange(0, BV)[None, :], 1.0, 0.0)
    causal = o_c[:, None] >= o_c[None, :]
    for i_c in range(first, last):
        t0 = i_c * 64
        b_k = k.load([i_b, i_hk, t0, 0]).reshape(64, BK).to(DOT)
        b_G, e, r, e_end = _decays(G, i_b, i_h, i_c, T, H, N, DECAYS)
        b_S16 = b_S.to(DOT)
        if STATES:
            _store_state(h, b_S16, i_b, i_h, i_c, v0, H, N, K, V, BK, BV)
        if DELTA:
            b_u = tl.dot(b_k, b_S16, input_precision=PREC)
            if DECAYS:
                b_u *= e[:, None]
        if OUT:  # before Vn is made: S is then needed no more, and its operand makes room in shared memory
            b_q = q.load([i_b, i_hk, t0, 0]).reshape(64, BK).to(DOT)
            b_o = tl.dot(b_q, b_S16, input_precision=PREC)
            if DECAYS:
                b_o *= e[:, None]
        if not EYE:
            b_vn = v.load([i_b, i_h, t0, v0]).reshape(64, BV).to(tl.float32)
        if DELTA:
            b_A = A.load([i_b, i_h, t0, 0]).reshape(64, 64)
            b_vn = -b_u if EYE else b_vn - b_u
            if DOT == tl.float32:
                b_vn = tl.dot(b_A.to(DOT), b_vn, input_precision=PREC)
            else:  # of order 1: a unit as in reverse would take 0.03 ms of 0.33
                b_vn = tl.dot(b_A, _half_of(b_vn))
        if OUT:
            b_p = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
            if DECAYS:
                b_p *= tl.exp2(tl.where(causal, b_G[:, None] - b_G[None, :], float("-inf")))
            else:
                b_p = tl.where(causal, b_p, 0.0)
            b_o += tl.dot(b_p.to(DOT), b_vn.to(DOT), input_precision=PREC)
            _store_rows(o, b_o * scale, i_b, i_h, t0, v0, T, H, V, BV)
        if DELTA and STATES:
            _store_rows(vn, b_vn, i_b, i_h, t0, v0, T, H, V, BV)
        if DECAYS:
            b_S *= e_end
            b_vn *= r[:, None]
        b_S += tl.dot(tl.trans(b_k), b_vn.to(DOT), input_precision=PREC)
    if OUT or not STATES:
        tl.store(hT + o_h, b_S, mask=m_h)


@triton.jit(do_not_specialize=COUNTS)
def reverse_kernel(
    q, k, do, A, G, dv, dh, dhT, dh0, scale, B, T, H, N, NS,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, DECAYS: tl.constexpr,
    HAS_DHT: tl.constexpr, OUT: tl.constexpr, STATES: tl.constexpr, DELTA: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """NS chunks of one head and BV columns of V, last first, from the gradient dhT of the state behind them to that before, dh0
    (both slices, B, H, K, V). OUT: write dV; STATES: write each chunk's dS, that of its outgoing state."""
    i_b, i_h, v0, first, last, o_h, m_h = _scan(B, H, K, V, N, NS, BK, BV, NV)
    i_hk = i_h // R
    o_c = tl.arange(0, 64)
    b_dS = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_DHT:
        b_dS += tl.load(dhT + o_h, mask=m_h, other=0.0)
    anticausal = o_c[:, None] <= o_c[None, :]
    for j in range(first, last):
        i_c = first + last - 1 - j
        t0 = i_c * 64
        b_q = q.load([i_b, i_hk, t0, 0]).reshape(64, BK).to(DOT)
        b_do = do.load([i_b, i_h, t0, v0]).reshape(64, BV).to(DOT)
        b_G, e, r, e_end = _decays(G, i_b, i_h, i_c, T, H, N, DECAYS)
        b_dS16 = b_dS.to(DOT)
        if STATES:
            _store_state(dh, b_dS16, i_b, i_h, i_c, v0, H, N, K, V, BK, BV)
        if DELTA or OUT:
            b_k = k.load([i_b, i_hk, t0, 0]).reshape(64, BK).to(DOT)
            b_pT = tl.dot(b_k, tl.trans(b_q), input_precision=PREC)  # computed transposed: rows are keys
            b_dvn = tl.dot(b_k, b_dS16, input_precision=PREC)
            if DECAYS:
                b_pT *= tl.exp2(tl.where(anticausal, b_G[None, :] - b_G[:, None], float("-inf"))) * scale
                b_dvn *= r[:, None]
            else:
                b_pT = tl.where(anticausal, b_pT * scale, 0.0)
            b_dvn = tl.dot(b_pT.to(DOT), b_do, b_dvn, input_precision=PREC)
            if DELTA:
                b_A = A.load([i_b, i_h, t0, 0]).reshape(64, 64)
                b_dvn = solved(tl.trans(b_A), b_dvn, DOT, PREC)
            if OUT:
                _store_rows(dv, b_dvn, i_b, i_h, t0, v0, T, H, V, BV)
        if DECAYS:
            b_dS *= e_end
        b_do = b_do.to(tl.float32) * (e * scale)[:, None]
        b_dS += tl.dot(tl.trans(b_q), b_do.to(DOT), input_precision=PREC)
        if DELTA:
            if DECAYS:
                b_dvn *= e[:, None]
            b_dS -= tl.dot(tl.trans(b_k), b_dvn.to(DOT), input_precision=PREC)
    tl.store(dh0 + o_h, b_dS, mask=m_h)


@triton.jit
def _state(x, i_b, i_h, i_c, k0, v0, H, N, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """A tile of the state of one chunk in x (B H, N, K, V)."""
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    p = x + ((i_b * H + i_h).to(tl.int64) * N + i_c) * K * V + k0 * V + v0 + (o_k[:, None] * V + o_v[None, :])
    if K % BK == 0 and V % BV == 0:
        return tl.load(p)
    else:
        return tl.load(p, mask=(k0 + o_k < K)[:, None] & (v0 + o_v < V)[None, :], other=0.0)


@triton.jit
def _ask_rows(x, i_b, i_h, t0, T, s_t, D: tl.constexpr, BD: tl.constexpr, LINE: tl.constexpr):
    """Ask for 64 rows of x (B, T, H, D), BD >= D, into L2, without waiting; a pointer every LINE bytes."""
    step: tl.constexpr = LINE * 8 // x.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = BD // step if BD > step else 1
    o_t = i_b.to(tl.int64) * T + tl.minimum(t0 + tl.arange(0, 64), T - 1)
    o_d = tl.minimum(tl.arange(0, lines) * step, D - 1)
    p = x + o_t[:, None] * s_t + i_h * D + o_d[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _ask_state(x, i_b, i_h, i_c, H, N, K: tl.constexpr, V: tl.constexpr):
    """Ask for a chunk's state in x (B H, N, K, V) into L2, in one piece, by one thread."""
    size: tl.constexpr = K * V * x.dtype.element_ty.primitive_bitwidth // 8
    p = x + ((i_b * H + i_h).to(tl.int64) * N + i_c) * K * V
    tl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 t;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""", "=r,l,r", [p.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def inputs_kernel(
    q, k, do, vn, dv, h, dh, G, g, beta, dq, dk, gates, scale, T, H, N, s_q, s_k, s_vn, s_gate,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BKB: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr,
    NV: tl.constexpr, DECAYS: tl.constexpr, DG: tl.constexpr, DELTA: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
    LINE: tl.constexpr,
):  # fmt: skip
    """dq, dk (B, T, H, K) and dbeta, dg (2, B, T, H) of one chunk and value head, NK tiles of BKB key channels one after the other.

    Loads go through pointers, many at a time: descriptors are waited for one by one outside a pipelined loop. Where V is one tile,
    all that the scores need is loaded before anything waits; the rest is asked for into L2 meanwhile, a pointer every LINE bytes
    (0: not). The gradients of the scores serve all tiles, and are computed transposed as well: a transposed result is no operand
    (see above)."""
    i = tl.program_id(0).to(tl.int64)
    i_c, i_h, i_b = (i % N).to(tl.int32), ((i // N) % H).to(tl.int32), (i // (N * H)).to(tl.int32)
    i_hk, t0, s_do = i_h // R, i_c * 64, H * V
    o_c = tl.arange(0, 64)
    seen = t0 + o_c < T
    o_t = (i_b.to(tl.int64) * T + t0 + o_c) * H + i_h
    LOW: tl.constexpr = tl.float16 if DELTA and DOT != tl.float32 else DOT  # of the scores' gradients and what they multiply
    if NV == 1:
        b_do = _rows(do, i_b, i_h, t0, 0, T, s_do, V, BV).to(DOT)
        b_vn = _rows(vn, i_b, i_h, t0, 0, T, s_vn, V, BV).to(DOT)
        if DELTA:
            b_x = _rows(dv, i_b, i_h, t0, 0, T, s_do, V, BV).to(DOT)
    if LINE:
        _ask_state(h, i_b, i_h, i_c, H, N, K, V)
        _ask_state(dh, i_b, i_h, i_c, H, N, K, V)
        _ask_rows(q, i_b, i_hk, t0, T, s_q, K, BK, LINE)
        _ask_rows(k, i_b, i_hk, t0, T, s_k, K, BK, LINE)
    b_G, e, r, e_end = _decays(G, i_b, i_h, i_c, T, H, N, DECAYS)
    dp = tl.zeros([64, 64], dtype=tl.float32)
    if DELTA:
        dl = tl.zeros([64, 64], dtype=tl.float32)
    for i_v in tl.static_range(NV):
        if NV > 1:
            b_do = _rows(do, i_b, i_h, t0, i_v * BV, T, s_do, V, BV).to(DOT)
            b_vn = _rows(vn, i_b, i_h, t0, i_v * BV, T, s_vn, V, BV).to(DOT)
            if DELTA:
                b_x = _rows(dv, i_b, i_h, t0, i_v * BV, T, s_do, V, BV).to(DOT)
        dp = tl.dot(b_do, tl.trans(b_vn), dp, input_precision=PREC)
        if DELTA:
            dl = tl.dot(b_x, tl.trans(b_vn), dl, input_precision=PREC)
    causal = o_c[:, None] >= o_c[None, :]
    if DECAYS:
        gamma = tl.exp2(tl.where(causal, b_G[:, None] - b_G[None, :], float("-inf")))
    else:
        gamma = tl.where(causal, 1.0, 0.0)
    dp *= gamma
    unit, per_unit = 1.0, 1.0
    if DELTA:  # Vn = (diag(1 / beta) + M)^-1 U, so that dbeta is the diagonal of X Vn^T over beta^2
        b_dbeta = tl.sum(tl.where(o_c[:, None] == o_c[None, :], dl, 0.0), axis=1)
        dl = tl.where(o_c[:, None] == o_c[None, :], 0.0, dl * gamma)
        if LOW != tl.float32:
            unit = _unit(tl.max(tl.maximum(tl.abs(dp), tl.abs(dl))) * tl.maximum(tl.abs(scale), 1.0))
            per_unit = 1.0 / unit
        dl = (dl * -per_unit).to(LOW)
    # Scaled before it is rounded, here and below: in dG the two cancel to the last bit, or leave 6e-2 of error.
    dp = (dp * (scale * per_unit)).to(LOW)
    # Columns, computed as rows of the transpose: what reaches k_j, whose decay falls with j.
    dpT = tl.zeros([64, 64], dtype=tl.float32)
    if DELTA:
        dlT = tl.zeros([64, 64], dtype=tl.float32)
    for i_v in tl.static_range(NV):
        if NV > 1:  # else what was loaded above
            b_do = _rows(do, i_b, i_h, t0, i_v * BV, T, s_do, V, BV).to(DOT)
            b_vn = _rows(vn, i_b, i_h, t0, i_v * BV, T, s_vn, V, BV).to(DOT)
        dpT = tl.dot(b_vn, tl.trans(b_do), dpT, input_precision=PREC)
        if DELTA:
            if NV > 1:
                b_x = _rows(dv, i_b, i_h, t0, i_v * BV, T, s_do, V, BV).to(DOT)
            dlT = tl.dot(b_vn, tl.trans(b_x), dlT, input_precision=PREC)
    anticausal = o_c[:, None] <= o_c[None, :]
    if DECAYS:
        gamma = tl.exp2(tl.where(anticausal, b_G[None, :] - b_G[:, None], float("-inf")))
    else:
        gamma = tl.where(anticausal, 1.0, 0.0)
    dpT = (dpT * gamma * (scale * per_unit)).to(LOW)
    if DELTA:
        dlT = (tl.where(o_c[:, None] == o_c[None, :], 0.0, dlT * gamma) * -per_unit).to(LOW)
    if DECAYS:
        of_q, of_p, of_k = (e * (scale * per_unit))[:, None], -(e * per_unit)[:, None], (r * per_unit)[:, None]
    else:
        of_q, of_p, of_k = scale * per_unit, -per_unit, per_unit
    b_dG = tl.zeros([64], dtype=tl.float32)
    b_end = tl.zeros([64], dtype=tl.float32)
    o_d = tl.arange(0, BKB)
    b_trace = tl.zeros([BKB], dtype=tl.float32)
    diagonal = o_d[:, None] == o_d[None, :]
    for i_k in range(NK):
        k0 = i_k * BKB
        b_q = _rows(q, i_b, i_hk, t0, k0, T, s_q, K, BKB).to(DOT)
        b_k = _rows(k, i_b, i_hk, t0, k0, T, s_k, K, BKB).to(DOT)
        g_q = tl.zeros([64, BKB], dtype=tl.float32)
        for i_v in tl.static_range(NV):
            if NV > 1:
                b_do = _rows(do, i_b, i_h, t0, i_v * BV, T, s_do, V, BV).to(DOT)
            b_S = _state(h, i_b, i_h, i_c, k0, i_v * BV, H, N, K, V, BKB, BV).to(DOT)
            b_dS = _state(dh, i_b, i_h, i_c, k0, i_v * BV, H, N, K, V, BKB, BV).to(DOT)
            if DG:
                b_SS = tl.dot(b_S, tl.trans(b_dS), input_precision=PREC)  # its trace is <S, dS>
                b_trace += tl.sum(tl.where(diagonal, b_SS, 0.0), axis=1)
            g_q = tl.dot(b_do, tl.trans(b_S), g_q, input_precision=PREC)
        low_q, low_k = b_q.to(LOW), b_k.to(LOW)  # not sooner: spills
        g_q = tl.dot(dp, low_k, g_q * of_q, input_precision=PREC)
        if DG:
            b_dG += tl.sum(g_q * b_q.to(tl.float32), axis=1)
        _store_rows(dq, g_q * unit, i_b, i_h, t0, k0, T, H, K, BKB)
        g_p = tl.zeros([64, BKB], dtype=tl.float32)
        if DELTA:
            for i_v in tl.static_range(NV):
                if NV > 1:
                    b_x = _rows(dv, i_b, i_h, t0, i_v * BV, T, s_do, V, BV).to(DOT)
                    b_S = _state(h, i_b, i_h, i_c, k0, i_v * BV, H, N, K, V, BKB, BV).to(DOT)
                g_p = tl.dot(b_x, tl.trans(b_S), g_p, input_precision=PREC)
            g_p = tl.dot(dl, low_k, g_p * of_p, input_precision=PREC)
            if DG:
                b_dG += tl.sum(g_p * b_k.to(tl.float32), axis=1)
        g_m = tl.zeros([64, BKB], dtype=tl.float32)
        for i_v in tl.static_range(NV):
            if NV > 1:
                b_vn = _rows(vn, i_b, i_h, t0, i_v * BV, T, s_vn, V, BV).to(DOT)
                b_dS = _state(dh, i_b, i_h, i_c, k0, i_v * BV, H, N, K, V, BKB, BV).to(DOT)
            g_m = tl.dot(b_vn, tl.trans(b_dS), g_m, input_precision=PREC)
        g_m *= of_k
        if DG:
            b_end += tl.sum(g_m * b_k.to(tl.float32), axis=1)
        g_m = tl.dot(dpT, low_q, g_m, input_precision=PREC)
        if DELTA:
            g_m = tl.dot(dlT, low_k, g_m, input_precision=PREC)
        if DG:
            b_dG -= tl.sum(g_m * b_k.to(tl.float32), axis=1)
        _store_rows(dk, (g_p + g_m) * unit, i_b, i_h, t0, k0, T, H, K, BKB)
    if DELTA:
        b_beta = tl.load(beta + o_t, mask=seen, other=1.0).to(tl.float32)
        b_beta = tl.where(b_beta == 0, float("inf"), b_beta)
        tl.store(gates + o_t, b_dbeta / b_beta / b_beta, mask=seen)
    if DG:  # g reaches every G behind it in the chunk; one that was clamped has no gradient
        b_g = tl.load(g + o_t, mask=seen, other=0.0).to(tl.float32)
        b_dG += tl.where(o_c == tl.minimum(64, T - t0) - 1, e_end * tl.sum(b_trace) * per_unit + tl.sum(b_end), 0.0)
        b_dG = tl.cumsum(b_dG, 0, reverse=True) * unit
        tl.store(gates + s_gate + o_t, tl.where(b_g < -40.0, 0.0, b_dG), mask=seen)


# ----------------------------------------------------------------------------------------------------------------------
# Launches


def _entry(v_columns, warps, stages):
    return {"BV": v_columns, "num_warps": warps, "num_stages": stages}


# Columns of V a program takes, warps, stages, and bytes a prefetch asks for (0: none), by architecture and bytes of a dot operand.
LAUNCH = {
    (90, 2): {
        "prepare": {"num_warps": 4, "num_stages": 1},
        "forward": _entry(64, 4, 2),
        "keep": _entry(64, 4, 2),
        "states": _entry(64, 4, 2),
        "reverse": _entry(64, 4, 2),
        **dict.fromkeys(("inputs", "inputs_linear"), _entry(128, 4, 1) | {"LINE": 128}),
    },
    (90, 4): {
        "prepare": {"num_warps": 4, "num_stages": 1},
        **dict.fromkeys(("forward", "keep", "states", "reverse"), _entry(32, 4, 1)),
        **dict.fromkeys(("inputs", "inputs_linear"), _entry(32, 4, 1) | {"LINE": 128}),
    },
}
LAUNCH[100, 2], LAUNCH[100, 4] = LAUNCH[90, 2], LAUNCH[90, 4]
MOST = {"maxnreg": 255}  # or ptxas, asked for sm_80, may take 32 and spill 4 to 22 KB
LAUNCH[80, 4] = LAUNCH[80, 2] = {
    "prepare": {"num_warps": 4, "num_stages": 1},
    **dict.fromkeys(("forward", "keep", "states", "reverse"), _entry(16, 8, 1) | MOST),
    **dict.fromkeys(("inputs", "inputs_linear"), _entry(32, 8, 1) | MOST | {"LINE": 0}),
}
SLICES = {"programs": 264, "chunks": 8}


class Plan:
    """Sizes of a call (B, T, H, K, V; R value heads a key head; N chunks; BK, the padded K; slices of so many chunks) and the
    options of its launches. Made once for a set of sizes, since a launch takes less time than putting its options together."""

    def __init__(self, B, T, H, Hk, K, V, delta, table, types):
        self.B, self.T, self.H, self.K, self.V, self.R, self.N = B, T, H, K, V, H // Hk, triton.cdiv(T, C)
        self.BK, self.delta, self.table, self.launches = max(16, triton.next_power_of_2(K)), delta, table, {}
        self.common = types | {"R": self.R, "DELTA": delta}
        self.prepare = table["prepare"] | types | {"R": self.R, "K": K, "BK": self.BK, "DELTA": delta}
        self.forward, self.keep, self.reverse = (self.scan(kernel, V) for kernel in ("forward", "keep", "reverse"))
        self.states, self.eye = self.scan("states", V), self.scan("states", K)
        inputs = dict(table["inputs" if delta else "inputs_linear"])
        if interpreted(inputs_kernel):
            inputs["LINE"] = 0  # it knows no assembly
        BV, BKB = min(inputs.pop("BV"), max(16, triton.next_power_of_2(V))), min(self.BK, 64)
        NK = triton.cdiv(K, BKB)
        columns = {"BK": self.BK, "BKB": BKB, "NK": NK, "BV": BV, "NV": triton.cdiv(V, BV)}
        self.inputs = inputs | self.common | {"K": K, "V": V} | columns
        # Slices of a sequence, until there are so many programs, or so few chunks in a slice.
        wanted = min(SLICES["programs"] // (B * H * self.forward["NV"]), self.N // SLICES["chunks"])
        self.chunks = triton.cdiv(self.N, wanted) if wanted > 1 else self.N
        self.slices = triton.cdiv(self.N, self.chunks)

    def launch(self, kernel, options, **flags):
        """The launch of a kernel with these options, a dict of the plan's, and flags: put together once."""
        key = id(options), *flags.values()
        if key not in self.launches:
            self.launches[key] = launch(kernel, **options, **flags)
        return self.launches[key]

    def ends(self, device):
        """Room for the state at the end of each slice."""
        shape = (self.B, self.H, self.K, self.V) if self.slices == 1 else (self.slices, self.B, self.H, self.K, self.V)
        return torch.empty(shape, dtype=torch.float32, device=device)

    def scan(self, kernel, columns):
        """Options of a scan over `columns` of V; NV programs a sequence and head."""
        chosen = dict(self.table[kernel])
        if self.BK > 128:
            chosen |= {"BV": 32, "num_stages": 1}
        chosen["BV"] = min(chosen["BV"], max(16, triton.next_power_of_2(columns)))
        return chosen | self.common | {"NV": triton.cdiv(columns, chosen["BV"]), "K": self.K, "V": columns, "BK": self.BK}


@functools.lru_cache(maxsize=1024)
def _plan(q_shape, v_shape, delta, architecture, dtype):
    B, T, H, V = v_shape
    table, types = LAUNCH[architecture, dtype.itemsize], operand_types(dtype, forward_kernel)
    return Plan(B, T, H, *q_shape[2:], V, delta, table, types)


def plan(q, v, delta):
    return _plan(q.shape, v.shape, delta, architecture(q), q.dtype)


def _by_token(x):
    """x (B, T, H, D) itself if a stride of its tokens is all a kernel must know, as with a slice of a projection; else a copy."""
    s_b, s_t, s_h, s_d = x.stride()
    return ready(x) if s_d == 1 and s_h == x.shape[3] and s_b == x.shape[1] * s_t else x.contiguous()


def _half(dtype):
    """The type of A' for inputs of `dtype`: bf16 has too few bits for it, and its entries are of order 1."""
    return torch.float16 if dtype == torch.bfloat16 else dtype


def _decay_mode(g, starts):
    return 2 if g is not None and g.ndim == 1 else int(g is not None or starts is not None)


def _forward_pass(q, k, v, g, beta, h0, starts, scale, keep):
    """Output, final state, and for the backward A', G, each chunk's S and Vn, and the slices' transitions. None are A' and Vn
    without beta, S and Vn unless `keep`, G of constant decays, and the transitions of one slice."""
    s, mode = plan(q, v, beta is not None), _decay_mode(g, starts)
    q, k, v = ready(q), _by_token(k), ready(v)
    A = torch.empty(s.B, s.T, s.H, C, dtype=_half(q.dtype), device=q.device) if s.delta else None
    G = g if mode == 2 else torch.empty(s.B * s.H, s.N, C, dtype=torch.float32, device=q.device)
    if s.delta or mode == 1:
        gates = G if g is None else g.contiguous(), beta.contiguous() if s.delta else G, G if starts is None else starts
        prepare = s.launch(prepare_kernel, s.prepare, HAS_G=g is not None, HAS_STARTS=starts is not None)
        prepare(s.N * s.B * s.H, k, *gates, A if s.delta else G, G, s.T, s.H, s.N, k.stride(1))
    o, hT, h, vn, M = _forward_scan(s, q, k, v, A, G, h0, scale, mode, keep)
    return o, hT, A, None if mode == 2 else G, h, vn, M


def _forward_scan(s, q, k, v, A, G, h0, scale, mode, keep=False):
    """Output, final state, each chunk's S and Vn, transitions of the slices."""
    k_tile, M = tile(k, [C, s.BK]), None
    if s.slices > 1:
        h0, M = _slice_starts(s, k_tile, v, A, G, h0, mode)
    options = s.keep if keep else s.forward
    o = torch.empty(s.B, s.T, s.H, s.V, dtype=v.dtype, device=v.device)
    hT = s.ends(v.device)
    h = torch.empty(s.B * s.H, s.N, s.K, s.V, dtype=q.dtype, device=q.device) if keep else None
    vn = torch.empty(s.B, s.T, s.H, s.V, dtype=q.dtype, device=q.device) if keep and s.delta else None
    q_tile, v_tile = tile(q, [C, s.BK]), tile(v, [C, options["BV"]])
    scan = s.launch(forward_kernel, options, HAS_H0=h0 is not None, OUT=True, STATES=keep, EYE=False, DECAYS=mode)
    scan(
        options["NV"] * s.B * s.H * s.slices, q_tile, k_tile, v_tile, tile(A, [C, C]) if s.delta else v_tile, G, o,
        o if h is None else h, o if vn is None else vn, hT if h0 is None else h0, hT, scale, s.B, s.T, s.H, s.N, s.chunks,
    )  # fmt: skip
    return o, hT if s.slices == 1 else hT[-1], h, vn, M


def _slice_starts(s, k_tile, v, A, G, h0, mode):
    """The state before each slice (slices, B, H, K, V), from what each adds to zero and the matrix M by which it carries one on."""
    local = s.ends(v.device)
    A_tile = tile(A, [C, C]) if s.delta else k_tile

    def scan(out, options, eye):
        v_tile = k_tile if eye else tile(v, [C, options["BV"]])
        one = s.launch(forward_kernel, options, HAS_H0=False, OUT=False, STATES=False, EYE=eye, DECAYS=mode)
        n, sizes = options["NV"] * s.B * s.H * s.slices, (s.B, s.T, s.H, s.N, s.chunks)
        one(n, k_tile, k_tile, v_tile, A_tile, G, out, out, out, out, out, 0.0, *sizes)
        return out

    scan(local, s.states, False)
    if s.delta:
        M = scan(torch.empty(s.slices, s.B, s.H, s.K, s.K, dtype=torch.float32, device=v.device), s.eye, True)
    else:
        M = _slice_decays(s, G, mode)
    before = torch.empty_like(local)
    before[0] = 0.0 if h0 is None else h0
    _carry(M, before, local, range(s.slices - 1), 1)
    return before, M


def _slice_decays(s, G, mode):
    """The decay over each slice (slices, B, H, 1, 1)."""
    if mode == 0:
        return torch.ones(s.slices, s.B, s.H, 1, 1, device=G.device)
    if mode == 2:
        first = torch.arange(s.slices, device=G.device) * s.chunks * C
        total = ((first + s.chunks * C).clamp(max=s.T) - first)[:, None, None] * G.expand(s.B, s.H)
    else:  # G at the ends of the chunks, summed over the slice; beyond the sequence there are none
        ends = torch.nn.functional.pad(G[..., -1], (0, s.slices * s.chunks - s.N))
        total = ends.view(s.B, s.H, s.slices, s.chunks).sum(-1).movedim(-1, 0).contiguous()  # as the fake says
    return torch.exp2(total)[..., None, None]


def _carry(M, state, local, order, step):
    """state[i + step] = M[i] state[i] + local[i] for i in order; M a matrix of a head, or its decay."""
    M, state, local = (x.flatten(1, 2).unbind(0) for x in (M, state, local))
    for i in order:
        if M[i].shape[-1] == 1:
            torch.addcmul(local[i], M[i], state[i], out=state[i + step])
        else:
            torch.baddbmm(local[i], M[i], state[i], out=state[i + step])


def _reverse_scan(s, q, k, do, A, G, M, dhT, scale, mode, keep=False):
    """dV, dh0, each chunk's dS."""
    options = s.reverse
    dv = torch.empty(s.B, s.T, s.H, s.V, dtype=do.dtype, device=do.device)
    dh = torch.empty(s.B * s.H, s.N, s.K, s.V, dtype=do.dtype, device=do.device) if keep else None
    q_tile, k_tile, do_tile = tile(q, [C, s.BK]), tile(k, [C, s.BK]), tile(do, [C, options["BV"]])
    A_tile = tile(A, [C, C]) if s.delta else do_tile

    def scan(start, out):
        before = s.ends(do.device)
        one = s.launch(reverse_kernel, options, HAS_DHT=start is not None, OUT=out, STATES=out and keep, DECAYS=mode)
        one(
            options["NV"] * s.B * s.H * s.slices, q_tile, k_tile, do_tile, A_tile, G, dv, dv if dh is None else dh,
            before if start is None else start, before, scale, s.B, s.T, s.H, s.N, s.chunks,
        )  # fmt: skip
        return before

    if s.slices > 1:
        local = scan(None, False)
        behind = torch.empty_like(local)
        behind[-1] = 0.0 if dhT is None else dhT
        _carry(M.mT, behind, local, range(s.slices - 1, 0, -1), -1)
        dhT = behind
    before = scan(dhT, True)
    return dv, before if s.slices == 1 else before[0], dh


def _backward_pass(q, k, v, g, beta, h0, starts, A, G, h, vn, M, do, dhT, scale, dg_wanted):
    """dq, dk, dv, dbeta and dg as one tensor (2, B, T, H), each written where there is such an input, dh0."""
    s, mode = plan(q, v, beta is not None), _decay_mode(g, starts)
    B, T, H, K = s.B, s.T, s.H, s.K
    G = g if mode == 2 else G
    q, k, v, do = _by_token(q), _by_token(k), _by_token(v), ready(do.contiguous())
    dhT = None if dhT is None else dhT.contiguous()
    if h is None:  # Linear attention whose decay needs no gradient: its forward, with the inputs in other places.
        # dQ = f(dO, V, K), dK = f'(V, dO, Q), dV = f'(K, Q, dO), f' from the last token to the first: no states in memory.
        t, (h0, dhT_t) = plan(do, k, False), (None if x is None else x.mT.contiguous() for x in (h0, dhT))
        dq, *_, of_slices = _forward_scan(t, do, v, k, A, G, h0, scale, mode)  # t has other slices than s where K and V differ
        dk = _reverse_scan(t, do, v, q, A, G, of_slices, dhT_t, scale, mode)[0]
        dv, dh0, _ = _reverse_scan(s, q, k, do, A, G, M, dhT, scale, mode)
        return dq, dk, dv, None, dh0
    dv, dh0, dh = _reverse_scan(s, q, k, do, A, G, M, dhT, scale, mode, keep=True)
    dq, dk = (torch.empty(B, T, H, K, dtype=q.dtype, device=q.device) for _ in range(2))
    gates = torch.empty(2, B, T, H, dtype=torch.float32, device=q.device)
    vn = vn if s.delta else v
    g, beta = g.contiguous() if dg_wanted else G, beta.contiguous() if s.delta else G
    s.launch(inputs_kernel, s.inputs, DECAYS=mode, DG=dg_wanted)(
        s.N * B * H, q, k, do, vn, dv, h, dh, G, g, beta, dq, dk, gates, scale, T, H, s.N, q.stride(1), k.stride(1),
        vn.stride(1), B * T * H,
    )  # fmt: skip
    if s.R > 1:  # value heads that share a key head
        dq, dk = (x.view(B, T, H // s.R, s.R, K).sum(3) for x in (dq, dk))
    return dq, dk, dv, gates, dh0


@torch.library.custom_op("hybrid::recurrence_forward", mutates_args=())
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor | None, h0: torch.Tensor | None,
    starts: torch.Tensor | None, scale: float, keep: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """A custom operator's results are all tensors: those that are None have no size here."""
    outputs = _forward_pass(q, k, v, g, beta, h0, starts, scale, keep)
    return [q.new_empty(0, dtype=torch.float32 if i in (3, 6) else None) if x is None else x for i, x in enumerate(outputs)]


@_forward.register_fake
def _(q, k, v, g, beta, h0, starts, scale, keep):
    q_shape, v_shape = (tuple(map(int, x.shape)) for x in (q, v))  # a compiler's symbols become numbers: slices depend on them
    s = _plan(q_shape, v_shape, beta is not None, architecture(q), q.dtype)
    wide = {"dtype": torch.float32}
    mode = _decay_mode(g, starts)
    M = (s.slices, s.B, s.H, *((s.K, s.K) if s.delta else (1, 1))) if s.slices > 1 else (0,)
    return [
        v.new_empty(v.shape),
        v.new_empty(s.B, s.H, s.K, s.V, **wide),
        q.new_empty((s.B, s.T, s.H, C) if s.delta else 0, dtype=_half(q.dtype) if s.delta else q.dtype),
        q.new_empty((0,) if mode == 2 else (s.B * s.H, s.N, C), **wide),
        q.new_empty((s.B * s.H, s.N, s.K, s.V) if keep else 0),
        q.new_empty((s.B, s.T, s.H, s.V) if keep and s.delta else 0),
        q.new_empty(M, **wide),
    ]


@torch.library.custom_op("hybrid::recurrence_backward", mutates_args=())
def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor | None,
    h0: torch.Tensor | None, starts: torch.Tensor | None, A: torch.Tensor, G: torch.Tensor, h: torch.Tensor, vn: torch.Tensor,
    M: torch.Tensor, do: torch.Tensor, dhT: torch.Tensor | None, scale: float, dg_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    A, h, vn, M = (x if x.numel() else None for x in (A, h, vn, M))
    dq, dk, dv, gates, dh0 = _backward_pass(q, k, v, g, beta, h0, starts, A, G, h, vn, M, do, dhT, scale, dg_wanted)
    return dq, dk, dv, G.new_empty(0) if gates is None else gates, dh0


@_backward.register_fake
def _(q, k, v, g, beta, h0, starts, A, G, h, vn, M, do, dhT, scale, dg_wanted):
    gates = (2, *v.shape[:3]) if h.numel() else (0,)
    heads, gates = torch.empty(q.shape, dtype=q.dtype, device=q.device), v.new_empty(gates, dtype=torch.float32)
    state = v.new_empty(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1], dtype=torch.float32)
    return heads, torch.empty_like(heads), v.new_empty(v.shape), gates, state


def _save(ctx, inputs, output):
    *tensors, scale = inputs[:8]
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.scale = scale
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, dhT, backward=_backward):
    q, k, v, g, beta, h0, starts, *kept = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    wanted = ctx.needs_input_grad[3]
    dq, dk, dv, gates, dh0 = backward(q, k, v, g, beta, h0, starts, *kept, do, dhT, ctx.scale, wanted)
    dbeta, dg = (None, None) if beta is None and not wanted else gates.unbind()
    dg, dbeta = dg.to(g.dtype) if wanted else None, None if beta is None else dbeta.to(beta.dtype)
    return dq, dk, dv, dg, dbeta, dh0 if ctx.needs_input_grad[5] else None, None, None, None


_forward.register_autograd(lambda ctx, grads: _differentiate(ctx, *grads[:2]), setup_context=_save)
_direct = direct(_forward_pass, _save, lambda ctx, do, dhT: _differentiate(ctx, do, dhT, _backward_pass), outputs=2)


def supports(q, k, v, g=None, beta=None, **_):
    """None if these inputs can run here, else the reason why not."""
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{q.dtype} inputs"
    if q.shape[-1] > 256:
        return f"K={q.shape[-1]}: at most 256 key channels a head"
    if g is not None and g.ndim == 4:
        return "a decay per key channel"
    return None


@shared_by_layers
def _constant(g):
    """What kernels read of constant decays: in powers of 2, and no less than is forgotten at once."""
    return g.float().clamp(min=FORGOTTEN) * LOG2_E


@shared_by_layers
def _documents(segment_ids):
    """Where documents but the row's first start, `(B, T)` int8, and which tokens are real, bool."""
    run, valid = segment_runs(segment_ids)
    return torch.nn.functional.pad(run[:, 1:] != run[:, :-1], (1, 0)).to(torch.int8), valid


def _of_tokens(x, v):
    """A gate for the values v, of which kernels read one for every token and head: a view (B, T, H), or an error."""
    return x if x.shape == v.shape[:3] else x.expand(v.shape[:3])


def _run(q, k, v, g, beta, scale, initial_state, segment_ids):
    starts = valid = None
    if segment_ids is not None:  # padding neither decays nor writes
        starts, valid = _documents(segment_ids)
        if beta is None:
            v = v * valid[..., None, None]
        else:
            beta = beta * valid[..., None]
    if g is not None and g.ndim == 1 and beta is None and starts is None and not g.requires_grad:
        g = _constant(g)
    elif g is not None:
        g = _of_tokens(g, v)
        g = g if valid is None else g * valid[..., None]
    beta = None if beta is None else _of_tokens(beta, v)
    h0 = None if initial_state is None else initial_state.to(torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    k, v_wide = k.to(q.dtype), v.shape[-1]
    K, V = -q.shape[-1] % 8, -v_wide % 8  # descriptors read whole 16 bytes
    if K or V:
        pad = torch.nn.functional.pad
        q, k, v, h0 = pad(q, (0, K)), pad(k, (0, K)), pad(v, (0, V)), None if h0 is None else pad(h0, (0, V, 0, K))
    h0 = None if h0 is None else h0.contiguous()
    keep = differentiable((q, k, v, g, beta, h0)) and (
        beta is not None or v.shape[2] > k.shape[2] or (g is not None and g.requires_grad)
    )
    inputs = (q, k, v.to(q.dtype), g, beta, h0, starts, scale, keep)
    o, hT = _forward(*inputs)[:2] if traced(q, k, v) else _direct(*inputs)
    if K or V:
        o, hT = o[..., :v_wide], hT[..., : hT.shape[2] - K, :v_wide]
    o = o.to(v.dtype)
    return (o if valid is None else o * valid[..., None, None]), hT


def delta_rule(q, k, v, g=None, beta=None, *, scale=None, initial_state=None, segment_ids=None):
    """`reference.delta_rule` for a decay per head, per head and token, or none; bf16, fp16 or fp32, gates and states in fp32.

    With 16-bit inputs A' is fp16, in which a small beta has few bits: dv and dbeta of that token are 0.2% off at a beta of 1e-4, 2%
    at 1e-5, 12% at 1e-6. Where beta is 0 its gradient comes out as 0; through a sigmoid it would be 0 anyway. No beta is raised to
    2^-14 instead: 16,000 tokens of one key would then write over 63% of what it held.
    """
    beta = torch.ones(v.shape[:3], dtype=torch.float32, device=v.device) if beta is None else beta
    return _run(q, k, v, g, beta, scale, initial_state, segment_ids)


def linear_attention(q, k, v, g=None, *, scale=None, initial_state=None, segment_ids=None):
    """`reference.linear_attention` for a decay per head, per head and token, or none; v is rounded to the type of q."""
    return _run(q, k, v, g, None, scale, initial_state, segment_ids)


def normalized_linear_attention(q, k, v, *, eps=1e-6, initial_state=None, segment_ids=None):
    """`reference.normalized_linear_attention`. The normaliser is a second, narrow call with 8 columns of ones: as one more column
    of v it would take another 64."""
    S = z = None
    if initial_state is not None:
        S, z = initial_state[..., :-1], initial_state[..., -1:].expand(*initial_state.shape[:-1], 8)
    ones = torch.ones(*v.shape[:3], 8, dtype=v.dtype, device=v.device)
    above, S = _run(q, k, v, None, None, 1.0, S, segment_ids)
    below, z = _run(q, k, ones, None, None, 1.0, z, segment_ids)
    return above / (below[..., :1] + eps), torch.cat([S, z[..., :1]], -1)
