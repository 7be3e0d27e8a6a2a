"""The recurrent family in Triton, forward and backward: `delta_rule` and `linear_attention` for a decay per head or none.

Chunks of C = 64 tokens. With G the running sum of the decay (log2) inside the chunk, e_i = 2^G_i, r_i = 2^(G_C - G_i),
Gamma_ij = 2^(G_i - G_j) for i >= j, and A' = (I + stril(diag(beta) K K^T * Gamma))^-1 diag(beta):

    prepare  (per chunk)         G, A'
    forward  (per head, V/BV)    Vn = A' (V - e * K S),  O = scale (e * Q S + (Q K^T * Gamma) Vn),  S' = e_C S + K^T (r * Vn)
    reverse  (per head, V/BV)    dVn = r * K dS + (K Q^T * Gamma^T) dO,  dV = A'^T dVn,  dS' = e_C dS + Q^T (e * dO) - K^T (e * dV)
    inputs   (per chunk)         dQ, dK, dbeta, dG from the stored S, dS, Vn, dV

Linear attention is the same with Vn = V: without A', beta and the terms in dV above (DELTA is false). Where its heads share
q and k, as in Mamba-2, dQ and dK are summed over the heads on chip, which else write both for each head.

Where gradients are wanted the forward scan keeps each chunk's S and Vn in the type of q, 768 bytes a token and head at K = V = 128
(reverse scan and inputs would otherwise wait for a scan that makes them anew: 0.25 ms of 1.9 at B8 T4096 H16 on an H200).
Where batch and heads are few, a sequence is scanned in slices side by side: the state behind a slice is M S + L, of which one scan
from zero gives L and one from the identity, with V = 0, gives M. What S adds to the outputs is scale q_M S, q_M being those of the
second scan, so that the gradient of S is M^T dS' + scale q_M^T dO: products to be summed in place of a scan (256 bytes a token and
head are kept for it).

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
def _scan(B, H, N, NS, SKIP: tl.constexpr, TILES: tl.constexpr):
    """A scan's program: slice, from SKIP on, batch, head, tile of columns, chunks from and to."""
    i = tl.program_id(0)
    i_t, i_h, i_b, i_s = i % TILES, (i // TILES) % H, (i // (TILES * H)) % B, i // (TILES * H * B) + SKIP
    return i_s, i_b, i_h, i_t, i_s * NS, tl.minimum(i_s * NS + NS, N)


@triton.jit
def _end(i_s, i_b, i_h, v0, B, H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Offsets and mask of BV columns of a slice's state in a tensor (slices, B, H, K, V)."""
    o_k, o_v = tl.arange(0, BK)[:, None], v0 + tl.arange(0, BV)[None, :]
    return ((i_s * B + i_b).to(tl.int64) * H + i_h) * (K * V) + (o_k * V + o_v), (o_k < K) & (o_v < V)


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
    q, k, v, A, G, o, h, vn, h0, hT, M, scale, B, T, H, N, NS,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, NM: tl.constexpr,
    DECAYS: tl.constexpr, HAS_H0: tl.constexpr, OUT: tl.constexpr, STATES: tl.constexpr, LOCAL: tl.constexpr, DELTA: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """NS chunks of one head and BV columns of V, in order, from the slice's h0 (slices, B, H, K, V) to hT (B, H, K, V), that of the
    last slice. OUT: write o; STATES: write each S and Vn.

    LOCAL: what each slice but the last adds to zero, the first to h0 (B, H, K, V), in hT (slices, B, H, K, V) as the next one's;
    of NV + NM programs the last NM start from the identity and take V for zero, for the matrix that carries a state over the slice,
    M (slices - 1, B, H, K, K) from the second on; with OUT, which is for these alone (NV = 0, V = K), over the last slice too, and
    o is its queries carried back to the slice's start: what a state before the slice adds to the output is o times it."""
    i_s, i_b, i_h, i_t, first, last = _scan(B, H, N, NS, 0, NV + NM)
    i_hk = i_h // R
    o_c = tl.arange(0, 64)
    identity = i_t >= NV
    v0 = tl.where(identity, i_t - NV, i_t) * BV if NM else i_t * BV
    o_h, m_h = _end(i_s, i_b, i_h, v0, B, H, K, V, BK, BV)
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if LOCAL:
        wanted = last < N
        if NM:
            wanted = tl.where(identity, (i_s > 0) & (wanted | OUT), wanted)
            if identity:
                b_S += tl.where(tl.arange(0, BK)[:, None] == v0 + tl.arange(0, BV)[None, :], 1.0, 0.0)
        if HAS_H0:
            if (i_s == 0) & (i_t < NV):
                b_S += tl.load(h0 + o_h, mask=m_h, other=0.0)
        last = tl.where(wanted, last, first)
    elif HAS_H0:
        b_S += tl.load(h0 + o_h, mask=m_h, other=0.0)
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
        if NV:  # with the identity, rows behind the last token: zeros, and not fetched
            b_vn = v.load([i_b, i_h, tl.where(identity, T, t0) if NM else t0, v0]).reshape(64, BV).to(tl.float32)
        if DELTA:
            b_A = A.load([i_b, i_h, t0, 0]).reshape(64, 64)
            b_vn = b_vn - b_u if NV else -b_u
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
    if LOCAL:
        if wanted & (i_t < NV):
            o_h, m_h = _end(i_s + 1, i_b, i_h, v0, B, H, K, V, BK, BV)
            tl.store(hT + o_h, b_S, mask=m_h)
        if wanted & identity:
            o_h, m_h = _end(i_s - 1, i_b, i_h, v0, B, H, K, K, BK, BV)
            tl.store(M + o_h, b_S, mask=m_h)
    elif last == N:
        o_h, m_h = _end(0, i_b, i_h, v0, B, H, K, V, BK, BV)
        tl.store(hT + o_h, b_S, mask=m_h)


@triton.jit(do_not_specialize=COUNTS)
def reverse_kernel(
    q, k, do, A, G, dv, dh, dhT, dh0, scale, B, T, H, N, NS,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, DECAYS: tl.constexpr,
    HAS_DHT: tl.constexpr, OUT: tl.constexpr, STATES: tl.constexpr, DELTA: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """NS chunks of one head and BV columns of V, last first, from the gradient of the state behind the slice, dhT (slices, B, H, K,
    V), to that before the first, dh0 (B, H, K, V). OUT: write dV; else only what each slice but the first adds to zero, as the one
    behind the slice before it, in dh0 (slices, B, H, K, V). STATES: write each chunk's dS, that of its outgoing state."""
    i_s, i_b, i_h, i_v, first, last = _scan(B, H, N, NS, 0 if OUT else 1, NV)
    i_hk, v0 = i_h // R, i_v * BV
    o_h, m_h = _end(i_s, i_b, i_h, v0, B, H, K, V, BK, BV)
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
    if first == 0 or not OUT:
        o_h, m_h = _end(0 if OUT else i_s - 1, i_b, i_h, v0, B, H, K, V, BK, BV)
        tl.store(dh0 + o_h, b_dS, mask=m_h)


@triton.jit
def _carried(p_M, b_S, b_x, m0, m1, K: tl.constexpr, BM: tl.constexpr, REVERSE: tl.constexpr):
    """b_x + M b_S of the BM rows of a head's matrix M from m0 and columns from m1, with REVERSE of its transpose."""
    o = tl.arange(0, BM)
    i, j = (m1 + o[:, None], m0 + o[None, :]) if REVERSE else (m0 + o[:, None], m1 + o[None, :])
    b_M = tl.load(p_M + (i * K + j), mask=(i < K) & (j < K), other=0.0)
    return tl.dot(tl.trans(b_M) if REVERSE else b_M, b_S, b_x, input_precision="tf32x3")


@triton.jit(do_not_specialize=COUNTS)
def carry_kernel(
    M, G, ends, end, B, T, H, N, NS,
    K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, DECAYS: tl.constexpr,
    HAS_END: tl.constexpr, DELTA: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """From what each slice adds to zero to the states before all, x, in place in ends (slices, B, H, K, V): x[i + 1] += M_i x[i],
    BV columns of one head. x[0] is `end` (B, H, K, V), or 0, and x[1] is there already. REVERSE, for the gradients of the states
    behind the slices: x[i - 1] += M_i^T x[i], from the last one, which is `end` or 0. M_i, of slice i, is a matrix of M (slices -
    1, B, H, K, K) or, without DELTA, a decay. A state is held as two halves of BM rows."""
    i = tl.program_id(0)
    i_h, i_b, v0 = (i // NV) % H, i // (NV * H), (i % NV) * BV
    n, i_bh, tokens = tl.cdiv(N, NS), i_b * H + i_h, NS * 64
    o_k, o_v = tl.arange(0, BM)[:, None], v0 + tl.arange(0, BV)[None, :]
    m_a, m_b = (o_k < K) & (o_v < V), (BM + o_k < K) & (o_v < V)
    o_a, o_b = o_k * V + o_v, (BM + o_k) * V + o_v
    size = (B * H).to(tl.int64) * (K * V)
    x = ends + i_bh.to(tl.int64) * (K * V)
    a, b = tl.zeros([BM, BV], dtype=tl.float32), tl.zeros([BM, BV], dtype=tl.float32)
    if HAS_END:
        p = end + i_bh.to(tl.int64) * (K * V)
        a, b = tl.load(p + o_a, mask=m_a, other=0.0), tl.load(p + o_b, mask=m_b, other=0.0)
    p = x + (n - 1) * size if REVERSE else x
    tl.store(p + o_a, a, mask=m_a)
    tl.store(p + o_b, b, mask=m_b)
    if not REVERSE:
        a, b = tl.load(x + size + o_a, mask=m_a, other=0.0), tl.load(x + size + o_b, mask=m_b, other=0.0)
    for j in range(1, n if REVERSE else n - 1):
        i_s = n - j if REVERSE else j
        p = x + (i_s - 1 if REVERSE else i_s + 1) * size
        to_a, to_b = tl.load(p + o_a, mask=m_a, other=0.0), tl.load(p + o_b, mask=m_b, other=0.0)
        if DELTA:
            p_M = M + ((i_s - 1) * B * H + i_bh).to(tl.int64) * (K * K)
            to_a = _carried(p_M, a, to_a, 0, 0, K, BM, REVERSE)
            to_b = _carried(p_M, a, to_b, BM, 0, K, BM, REVERSE)
            to_a = _carried(p_M, b, to_a, 0, BM, K, BM, REVERSE)
            to_b = _carried(p_M, b, to_b, BM, BM, K, BM, REVERSE)
        else:
            decay = 0.0
            if DECAYS == 1:  # G at the ends of the chunks, summed
                for c in range(i_s * NS, tl.minimum(i_s * NS + NS, N), 64):
                    o_c = c + tl.arange(0, 64)
                    p_G = G + (i_bh.to(tl.int64) * N + o_c) * 64 + 63
                    decay += tl.sum(tl.load(p_G, mask=o_c < tl.minimum(i_s * NS + NS, N), other=0.0))
            if DECAYS == 2:
                decay = tl.load(G + i_h) * tl.minimum(tokens, T - i_s * tokens)
            to_a += tl.exp2(decay) * a
            to_b += tl.exp2(decay) * b
        a, b = to_a, to_b
        tl.store(p + o_a, a, mask=m_a)
        tl.store(p + o_b, b, mask=m_b)


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


@triton.jit(do_not_specialize=[*COUNTS, "HEADS", "PARTS"])
def grouped_inputs_kernel(
    q, k, do, v, h, dh, G, dq, dk, sums, scale, B, T, H, N, HEADS, PARTS, s_q, s_k,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BKB: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr,
    DECAYS: tl.constexpr, DG: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq, dk (PARTS, B, T, H / R, K) of linear attention: those of one chunk and BKB key channels, summed over HEADS of the R value
    heads that share a q and a k. And of what these channels add to dG, sums (NK, B H, N, 64 + BKB): 64 terms by token and, in BKB
    parts, what all tokens of the chunk share.

    What a head has to itself, dO, V, S and dS, is loaded ahead in a pipelined loop; q and k stay on chip. dk is summed transposed,
    where the gradient of the scores is a right operand as it is: no transpose of it is computed. It is rounded once for dq and dk,
    or dG is off (see inputs_kernel)."""
    i = tl.program_id(0).to(tl.int64)
    i_k, i_c, i = (i % NK).to(tl.int32), (i // NK % N).to(tl.int32), (i // NK // N).to(tl.int32)
    i_p, i_b, Hk = i % PARTS, i // PARTS // (H // R), H // R
    i_hk = i // PARTS % Hk
    k0, t0 = i_k * BKB, i_c * 64
    o_c, o_d = tl.arange(0, 64), tl.arange(0, BKB)
    b_q = _rows(q, i_b, i_hk, t0, k0, T, s_q, K, BKB).to(DOT)
    b_k = _rows(k, i_b, i_hk, t0, k0, T, s_k, K, BKB).to(DOT)
    b_kT = tl.trans(b_k)
    b_dq = tl.zeros([64, BKB], dtype=tl.float32)
    b_dkT = tl.zeros([BKB, 64], dtype=tl.float32)
    causal = o_c[:, None] >= o_c[None, :]
    first = i_hk * R + i_p * HEADS
    for i_h in range(first, tl.minimum(first + HEADS, i_hk * R + R)):
        b_G, e, r, e_end = _decays(G, i_b, i_h, i_c, T, H, N, DECAYS)
        i_bh = i_b * H + i_h
        b_p = tl.zeros([64, 64], dtype=tl.float32)
        for i_v in tl.static_range(NV):
            b_do = do.load([i_b, i_h, t0, i_v * BV]).reshape(64, BV).to(DOT)
            b_v = v.load([i_b, i_h, t0, i_v * BV]).reshape(64, BV).to(DOT)
            b_p = tl.dot(b_do, tl.trans(b_v), b_p, input_precision=PREC)
        if DECAYS:
            b_p *= tl.exp2(tl.where(causal, b_G[:, None] - b_G[None, :], float("-inf"))) * scale
        else:
            b_p = tl.where(causal, b_p * scale, 0.0)
        b_p = b_p.to(DOT)
        g_q = tl.zeros([64, BKB], dtype=tl.float32)
        for i_v in tl.static_range(NV):
            if NV > 1:
                b_do = do.load([i_b, i_h, t0, i_v * BV]).reshape(64, BV).to(DOT)
            b_S = h.load([i_bh, i_c, k0, i_v * BV]).reshape(BKB, BV).to(DOT)
            g_q = tl.dot(b_do, tl.trans(b_S), g_q, input_precision=PREC)
        g_q *= (e * scale)[:, None]
        g_q = tl.dot(b_p, b_k, g_q, input_precision=PREC)
        b_dq += g_q
        g_kT = tl.zeros([BKB, 64], dtype=tl.float32)
        for i_v in tl.static_range(NV):
            if NV > 1:
                b_v = v.load([i_b, i_h, t0, i_v * BV]).reshape(64, BV).to(DOT)
            b_dS = dh.load([i_bh, i_c, k0, i_v * BV]).reshape(BKB, BV).to(DOT)
            g_kT = tl.dot(b_dS, tl.trans(b_v), g_kT, input_precision=PREC)
        if DECAYS:
            g_kT *= r[None, :]
        if DG:
            b_dG = tl.sum(g_q * b_q.to(tl.float32), axis=1)
            b_end = tl.sum(g_kT * b_kT.to(tl.float32), axis=1)
        g_kT = tl.dot(tl.trans(b_q), b_p, g_kT, input_precision=PREC)
        b_dkT += g_kT
        if DG:
            b_dG -= tl.sum(g_kT * b_kT.to(tl.float32), axis=0)
            for i_v in tl.static_range(NV):
                if NV > 1:
                    b_S = h.load([i_bh, i_c, k0, i_v * BV]).reshape(BKB, BV).to(DOT)
                    b_dS = dh.load([i_bh, i_c, k0, i_v * BV]).reshape(BKB, BV).to(DOT)
                b_end += e_end * tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), axis=1)
            p_sums = sums + ((i_k.to(tl.int64) * B * H + i_bh) * N + i_c) * (64 + BKB)
            tl.store(p_sums + o_c, b_dG)
            tl.store(p_sums + 64 + o_d, b_end)
    i_b += i_p * B
    _store_rows(dq, b_dq, i_b, i_hk, t0, k0, T, Hk, K, BKB)
    p_dk = dk + ((i_b.to(tl.int64) * T + t0) * Hk + i_hk) * K + k0 + (o_c[None, :] * (Hk * K) + o_d[:, None])
    tl.store(p_dk, b_dkT.to(dk.dtype.element_ty), mask=(o_c < T - t0)[None, :] & (k0 + o_d < K)[:, None])


@triton.jit(do_not_specialize=COUNTS)
def gates_kernel(sums, g, dg, B, T, H, N, BKB: tl.constexpr, NK: tl.constexpr, BH: tl.constexpr):
    """dg (B, T, H) of one chunk and BH heads from the sums of `grouped_inputs_kernel`: g reaches every G behind it in the chunk."""
    i, n = tl.program_id(0), tl.cdiv(H, BH)
    i_c, h0, i_b = i % N, (i // N) % n * BH, i // (N * n)
    o_c, o_d, o_h = tl.arange(0, 64), tl.arange(0, BKB), h0 + tl.arange(0, BH)
    there = (o_h < H)[:, None]
    b_dG, b_end = tl.zeros([BH, 64], dtype=tl.float32), tl.zeros([BH, BKB], dtype=tl.float32)
    for i_k in tl.static_range(NK):
        p = sums + (((i_k * B + i_b).to(tl.int64) * H + o_h) * N + i_c)[:, None] * (64 + BKB)
        b_dG += tl.load(p + o_c[None, :], mask=there, other=0.0)
        b_end += tl.load(p + 64 + o_d[None, :], mask=there, other=0.0)
    b_dg = tl.cumsum(b_dG, 1, reverse=True) + tl.sum(b_end, axis=1)[:, None]
    o_t = (i_b.to(tl.int64) * T + i_c * 64 + o_c[None, :]) * H + o_h[:, None]
    seen = there & (i_c * 64 + o_c < T)[None, :]
    b_g = tl.load(g + o_t, mask=seen, other=0.0).to(tl.float32)
    tl.store(dg + o_t, tl.where(b_g < -40.0, 0.0, b_dg), mask=seen)  # one that was clamped has no gradient


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
        "local": _entry(64, 4, 2),
        "reverse": _entry(64, 4, 2),
        "sums": _entry(64, 4, 3),
        "carry": _entry(32, 4, 2),
        **dict.fromkeys(("inputs", "inputs_linear"), _entry(128, 4, 1) | {"LINE": 128}),
        "inputs_grouped": _entry(64, 4, 3),
    },
    (90, 4): {
        "prepare": {"num_warps": 4, "num_stages": 1},
        **dict.fromkeys(("forward", "keep", "local", "reverse", "sums", "carry", "inputs_grouped"), _entry(32, 4, 1)),
        **dict.fromkeys(("inputs", "inputs_linear"), _entry(32, 4, 1) | {"LINE": 128}),
    },
}
LAUNCH[100, 2], LAUNCH[100, 4] = LAUNCH[90, 2], LAUNCH[90, 4]
MOST = {"maxnreg": 255}  # or ptxas, asked for sm_80, may take 32 and spill 4 to 22 KB
LAUNCH[80, 4] = LAUNCH[80, 2] = {
    "prepare": {"num_warps": 4, "num_stages": 1},
    **dict.fromkeys(("forward", "keep", "local", "reverse", "sums", "carry", "inputs_grouped"), _entry(16, 8, 1) | MOST),
    **dict.fromkeys(("inputs", "inputs_linear"), _entry(32, 8, 1) | MOST | {"LINE": 0}),
}
SLICES = {"programs": 264, "chunks": 8}
PARTS = {"programs": 528}  # heads that share a key are divided while there are fewer


class Plan:
    """Sizes of a call (B, T, H, K, V; R value heads a key head; N chunks; BK, the padded K; slices of so many chunks) and the
    options of its launches. Made once for a set of sizes, since a launch takes less time than putting its options together."""

    def __init__(self, B, T, H, Hk, K, V, delta, table, types):
        self.B, self.T, self.H, self.K, self.V, self.R, self.N = B, T, H, K, V, H // Hk, triton.cdiv(T, C)
        self.BK, self.delta, self.table, self.launches = max(16, triton.next_power_of_2(K)), delta, table, {}
        self.common = types | {"R": self.R, "DELTA": delta}
        self.prepare = table["prepare"] | types | {"R": self.R, "K": K, "BK": self.BK, "DELTA": delta}
        self.forward, self.keep = (self.scan(kernel, V) | {"NM": 0} for kernel in ("forward", "keep"))
        self.reverse, self.sums = self.scan("reverse", V), self.scan("sums", V)
        inputs = dict(table["inputs" if delta else "inputs_linear"])
        if interpreted(inputs_kernel):
            inputs["LINE"] = 0  # it knows no assembly
        BV_most, BKB = max(16, triton.next_power_of_2(V)), min(self.BK, 64)
        BV = min(inputs.pop("BV"), BV_most)
        NK = triton.cdiv(K, BKB)
        columns = {"BK": self.BK, "BKB": BKB, "NK": NK, "BV": BV, "NV": triton.cdiv(V, BV)}
        self.inputs = inputs | self.common | {"K": K, "V": V} | columns
        if self.R > 1 and not delta:
            grouped = dict(table["inputs_grouped"])
            if V > 64:
                grouped["num_stages"] = 1  # or one program fits an SM, where two do
            BV = min(grouped["BV"], BV_most)
            self.gates = {"BKB": BKB, "NK": NK, "BH": min(16, triton.next_power_of_2(H))}
            columns = {"R": self.R, "K": K, "V": V, "BKB": BKB, "NK": NK, "BV": BV, "NV": triton.cdiv(V, BV)}
            self.grouped = grouped | types | columns
            # Of the R heads of a key, so many a program.
            self.heads = triton.cdiv(self.R, min(self.R, max(1, PARTS["programs"] // (B * Hk * self.N * NK))))
            self.parts = triton.cdiv(self.R, self.heads)
        # Slices of a sequence, until there are so many programs, or so few chunks in a slice.
        # Not with K > 128: there the kernel that carries states over them accessed memory out of bounds (Triton 3.6, an H200).
        wanted = 1 if self.BK > 128 else min(SLICES["programs"] // (B * H * self.forward["NV"]), self.N // SLICES["chunks"])
        self.chunks = triton.cdiv(self.N, wanted) if wanted > 1 else self.N
        self.slices = triton.cdiv(self.N, self.chunks)
        # The first pass over them: states alone, with the matrices that carry them on, and those alone; sums for their gradients.
        self.local = self.scan("local", V) | {"NM": 0}
        self.both, self.matrices = self.local | {"NM": triton.cdiv(K, self.local["BV"])}, self.scan("forward", K)
        self.matrices |= {"NV": 0, "NM": self.matrices["NV"]}
        self.products = self.sums | {"DELTA": False, "R": 1}
        carry, BM = dict(table["carry"]), max(16, self.BK // 2)
        carry["BV"] = min(carry["BV"], max(16, triton.next_power_of_2(V)))
        self.carry = carry | {"K": K, "V": V, "BM": BM, "NV": triton.cdiv(V, carry["BV"]), "DELTA": delta}

    def launch(self, kernel, options, **flags):
        """The launch of a kernel with these options, a dict of the plan's, and flags: put together once."""
        key = id(options), *flags.values()
        if key not in self.launches:
            self.launches[key] = launch(kernel, **options, **flags)
        return self.launches[key]

    def ends(self, device, slices):
        """Room for the state at an end of each slice, or of one alone."""
        shape = (slices, self.B, self.H, self.K, self.V) if slices > 1 else (self.B, self.H, self.K, self.V)
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
    """Output, final state, and for the backward A', G, each chunk's S and Vn, and the slices' M and q_M (see `_slice_starts`). None
    are A' and Vn without beta, S and Vn unless `keep`, G of constant decays, and what several slices of the delta rule need."""
    s, mode = plan(q, v, beta is not None), _decay_mode(g, starts)
    q, k, v = ready(q), _by_token(k), ready(v)
    A = torch.empty(s.B, s.T, s.H, C, dtype=_half(q.dtype), device=q.device) if s.delta else None
    G = g if mode == 2 else torch.empty(s.B * s.H, s.N, C, dtype=torch.float32, device=q.device)
    if s.delta or mode == 1:
        gates = G if g is None else g.contiguous(), beta.contiguous() if s.delta else G, G if starts is None else starts
        prepare = s.launch(prepare_kernel, s.prepare, HAS_G=g is not None, HAS_STARTS=starts is not None)
        prepare(s.N * s.B * s.H, k, *gates, A if s.delta else G, G, s.T, s.H, s.N, k.stride(1))
    o, hT, *kept = _forward_scan(s, q, k, v, A, G, h0, scale, mode, keep)
    return o, hT, A, None if mode == 2 else G, *kept


def _forward_scan(s, q, k, v, A, G, h0, scale, mode, keep=False):
    """Output, final state, each chunk's S and Vn, matrices of the slices and what they make of the queries."""
    k_tile, M, q_M = tile(k, [C, s.BK]), None, None
    q_tile, A_tile = tile(q, [C, s.BK]), tile(A, [C, C]) if s.delta else k_tile
    if s.slices > 1:
        h0, M, q_M = _slice_starts(s, q_tile, k_tile, v, A_tile, G, h0, mode, keep)
    options = s.keep if keep else s.forward
    o = torch.empty(s.B, s.T, s.H, s.V, dtype=v.dtype, device=v.device)
    hT = s.ends(v.device, 1)
    h = torch.empty(s.B * s.H, s.N, s.K, s.V, dtype=q.dtype, device=q.device) if keep else None
    vn = torch.empty(s.B, s.T, s.H, s.V, dtype=q.dtype, device=q.device) if keep and s.delta else None
    scan = s.launch(forward_kernel, options, HAS_H0=h0 is not None, OUT=True, STATES=keep, LOCAL=False, DECAYS=mode)
    scan(
        options["NV"] * s.B * s.H * s.slices, q_tile, k_tile, tile(v, [C, options["BV"]]), A_tile, G, o, o if h is None else h,
        o if vn is None else vn, hT if h0 is None else h0, hT, hT, scale, s.B, s.T, s.H, s.N, s.chunks,
    )  # fmt: skip
    return o, hT, h, vn, M, q_M


def _slice_starts(s, q_tile, k_tile, v, A_tile, G, h0, mode, keep):
    """The states before all slices (slices, B, H, K, V). For the delta rule, if `keep`, also the matrices M that carry a state over
    the second slice and those behind it (slices - 1, B, H, K, K), and queries times them, q_M (B, T, H, K), so that an output
    changes with the state before its slice by scale q_M; in the first slice q_M is left as it was."""
    starts, M, q_M = s.ends(v.device, s.slices), None, None
    if s.delta:
        M = torch.empty(s.slices - 1, s.B, s.H, s.K, s.K, dtype=torch.float32, device=v.device)

    def scan(options, slices, v_tile, out, **flags):
        one = s.launch(forward_kernel, options, **flags, STATES=False, LOCAL=True, DECAYS=mode)
        one(
            (options["NV"] + options["NM"]) * s.B * s.H * slices, q_tile, k_tile, v_tile, A_tile, G, out, out, out,
            starts if h0 is None else h0, starts, starts if M is None else M, 1.0, s.B, s.T, s.H, s.N, s.chunks,
        )  # fmt: skip

    options = s.both if s.delta and not keep else s.local
    scan(options, s.slices - 1, tile(v, [C, options["BV"]]), starts, HAS_H0=h0 is not None, OUT=False)
    if s.delta and keep:
        q_M = torch.empty(s.B, s.T, s.H, s.K, dtype=v.dtype, device=v.device)
        scan(s.matrices, s.slices, k_tile, q_M, HAS_H0=False, OUT=True)
    _carry(s, M, G, starts, h0, mode, False)
    return starts, M if keep else None, q_M


def _carry(s, M, G, ends, end, mode, reverse):
    """What slices add to zero becomes the states before them, or the gradients of those behind them, in place."""
    M, end, given = ends if M is None else M, ends if end is None else end, end is not None
    carry = s.launch(carry_kernel, s.carry, HAS_END=given, REVERSE=reverse, DECAYS=0 if s.delta else mode)
    carry(s.carry["NV"] * s.B * s.H, M, G, ends, end, s.B, s.T, s.H, s.N, s.chunks)


def _reverse_scan(s, q, k, do, A, G, M, q_M, dhT, scale, mode, keep=False):
    """dV, dh0, each chunk's dS."""
    dv = torch.empty(s.B, s.T, s.H, s.V, dtype=do.dtype, device=do.device)
    dh = torch.empty(s.B * s.H, s.N, s.K, s.V, dtype=do.dtype, device=do.device) if keep else None
    dh0 = s.ends(do.device, 1)
    k_tile = tile(k, [C, s.BK])

    def scan(options, slices, q, behind, before, **flags):
        q_tile, do_tile = tile(q, [C, s.BK]), tile(do, [C, options["BV"]])
        one = s.launch(reverse_kernel, options, HAS_DHT=behind is not None, **flags)
        one(
            options["NV"] * s.B * s.H * slices, q_tile, k_tile, do_tile, tile(A, [C, C]) if options["DELTA"] else k_tile, G, dv,
            dv if dh is None else dh, before if behind is None else behind, before, scale, s.B, s.T, s.H, s.N, s.chunks,
        )  # fmt: skip

    if s.slices > 1:  # with q_M what a slice adds to zero is a sum of products: q^T dO without a decay
        behind = s.ends(do.device, s.slices)
        options, of_slice, decays = (s.products, q_M, 0) if s.delta else (s.sums, q, mode)
        scan(options, s.slices - 1, of_slice, None, behind, OUT=False, STATES=False, DECAYS=decays)
        _carry(s, M, G, behind, dhT, mode, True)
        dhT = behind
    scan(s.reverse, s.slices, q, dhT, dh0, OUT=True, STATES=keep, DECAYS=mode)
    return dv, dh0, dh


def _backward_pass(q, k, v, g, beta, h0, starts, A, G, h, vn, M, q_M, do, dhT, scale, dg_wanted):
    """dq, dk, dv, dbeta and dg as one tensor (2, B, T, H), each written where there is such an input, dh0."""
    s, mode = plan(q, v, beta is not None), _decay_mode(g, starts)
    B, T, H, K = s.B, s.T, s.H, s.K
    G = g if mode == 2 else G
    q, k, v, do = _by_token(q), _by_token(k), _by_token(v), ready(do.contiguous())
    dhT = None if dhT is None else dhT.contiguous()
    if h is None:  # Linear attention whose decay needs no gradient: its forward, with the inputs in other places.
        # dQ = f(dO, V, K), dK = f'(V, dO, Q), dV = f'(K, Q, dO), f' from the last token to the first: no states in memory.
        t, (h0, dhT_t) = plan(do, k, False), (None if x is None else x.mT.contiguous() for x in (h0, dhT))
        dq = _forward_scan(t, do, v, k, A, G, h0, scale, mode)[0]  # t has other slices than s where K and V differ
        dk = _reverse_scan(t, do, v, q, A, G, M, q_M, dhT_t, scale, mode)[0]
        dv, dh0, _ = _reverse_scan(s, q, k, do, A, G, M, q_M, dhT, scale, mode)
        return dq, dk, dv, None, dh0
    dv, dh0, dh = _reverse_scan(s, q, k, do, A, G, M, q_M, dhT, scale, mode, keep=True)
    if s.R > 1 and not s.delta:
        dq, dk, gates = _grouped_inputs(s, q, k, do, v, h, dh, G, g, scale, mode, dg_wanted)
        return dq, dk, dv, gates, dh0
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


def _grouped_inputs(s, q, k, do, v, h, dh, G, g, scale, mode, dg_wanted):
    """dq, dk and, its second half where it is wanted, dg (2, B, T, H) of linear attention whose heads share keys."""
    options, wide = s.grouped, {"dtype": torch.float32, "device": q.device}
    BKB, NK, BV = options["BKB"], options["NK"], options["BV"]
    shape = (s.B, s.T, s.H // s.R, s.K)
    if s.parts == 1:
        dq, dk = (torch.empty(shape, dtype=q.dtype, device=q.device) for _ in range(2))
    else:
        dq, dk = (torch.empty(s.parts, *shape, **wide) for _ in range(2))
    gates = torch.empty(2, s.B, s.T, s.H, **wide)
    sums = torch.empty(NK, s.B * s.H, s.N, C + BKB, **wide) if dg_wanted else gates
    h_tile, dh_tile = (tile(x.transpose(1, 2), [BKB, BV]) for x in (h, dh))  # in the order (B H, N, K, V)
    s.launch(grouped_inputs_kernel, options, DECAYS=mode, DG=dg_wanted)(
        s.B * shape[2] * s.parts * s.N * NK, q, k, tile(do, [C, BV]), tile(v, [C, BV]), h_tile, dh_tile, G, dq, dk, sums, scale,
        s.B, s.T, s.H, s.N, s.heads, s.parts, q.stride(1), k.stride(1),
    )  # fmt: skip
    if dg_wanted:
        n = s.B * triton.cdiv(s.H, s.gates["BH"]) * s.N
        s.launch(gates_kernel, s.gates)(n, sums, g.contiguous(), gates[1], s.B, s.T, s.H, s.N)
    if s.parts > 1:
        dq, dk = (x.sum(0).to(q.dtype) for x in (dq, dk))
    return dq, dk, gates


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
    carried = keep and s.delta and s.slices > 1
    return [
        v.new_empty(v.shape),
        v.new_empty(s.B, s.H, s.K, s.V, **wide),
        q.new_empty((s.B, s.T, s.H, C) if s.delta else 0, dtype=_half(q.dtype) if s.delta else q.dtype),
        q.new_empty((0,) if mode == 2 else (s.B * s.H, s.N, C), **wide),
        q.new_empty((s.B * s.H, s.N, s.K, s.V) if keep else 0),
        q.new_empty((s.B, s.T, s.H, s.V) if keep and s.delta else 0),
        q.new_empty((s.slices - 1, s.B, s.H, s.K, s.K) if carried else 0, **wide),
        v.new_empty((s.B, s.T, s.H, s.K) if carried else 0),
    ]


@torch.library.custom_op("hybrid::recurrence_backward", mutates_args=())
def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor | None,
    h0: torch.Tensor | None, starts: torch.Tensor | None, A: torch.Tensor, G: torch.Tensor, h: torch.Tensor, vn: torch.Tensor,
    M: torch.Tensor, q_M: torch.Tensor, do: torch.Tensor, dhT: torch.Tensor | None, scale: float, dg_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    A, h, vn, M, q_M = (x if x.numel() else None for x in (A, h, vn, M, q_M))
    dq, dk, dv, gates, dh0 = _backward_pass(q, k, v, g, beta, h0, starts, A, G, h, vn, M, q_M, do, dhT, scale, dg_wanted)
    return dq, dk, dv, G.new_empty(0) if gates is None else gates, dh0


@_backward.register_fake
def _(q, k, v, g, beta, h0, starts, A, G, h, vn, M, q_M, do, dhT, scale, dg_wanted):
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
