"""The recurrent family in Triton, forward and backward: `delta_rule` and `linear_attention` for a decay per head or none.

Chunks of C = 64 tokens. With G the running sum of the decay (log2) inside the chunk, e_i = 2^G_i, r_i = 2^(G_C - G_i),
Gamma_ij = 2^(G_i - G_j) for i >= j, and A' = (I + stril(diag(beta) K K^T * Gamma))^-1 diag(beta):

    prepare  (per chunk)         G, A'
    forward  (per head, V/BV)    Vn = A' (V - e * K S),  O = scale (e * Q S + (Q K^T * Gamma) Vn),  S' = e_C S + K^T (r * Vn)
    states   (per head, V/BV)    the same without O, keeping each chunk's S and Vn
    reverse  (per head, V/BV)    dVn = r * K dS + (K Q^T * Gamma^T) dO,  dV = A'^T dVn,  dS' = e_C dS + Q^T (e * dO) - K^T (e * dV)
    inputs   (per chunk)         dQ, dK, dbeta, dG from the stored S, dS, Vn, dV

Linear attention is the same with Vn = V: without A', beta and the terms in dV above (DELTA is false).

The gradient of the solve is implicit: with X = A'^T dVn, which is dV, that of beta * K K^T * Gamma is -stril(X Vn^T), and no
gradient of A is formed. Every transposed product is computed as such, from operands that were loaded: Triton before 3.7.1
miscompiles a dot whose operand is the transpose of another dot's result. A document's first token carries 128 less in log2, so that
every 2^(difference) across a boundary is 0. Yang et al. 2406.06484, 2412.06464; Dao and Gu 2405.21060.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .eager import FORGOTTEN
from .reference import segment_runs

C = 64


@triton.jit
def _substitute(x, i, o):
    """Row i of the inverse, from the rows before it; x holds -L below the rows done and the inverse's strict part in them."""
    row = tl.sum(tl.where(o[:, None] == i, x, 0.0), axis=0)  # (16,): row i of -L
    row += tl.sum(row[:, None] * x, axis=0) * (o < i)
    return tl.where(o[:, None] == i, row[None, :], x)


@triton.jit
def _inverses_16(a, b, c, d, o):
    """(I + L)^-1 of four strictly lower 16 x 16 tiles by substitution, side by side, since each step waits on the last."""
    below, eye = o[:, None] > o[None, :], o[:, None] == o[None, :]
    a, b, c, d = tl.where(below, -a, 0.0), tl.where(below, -b, 0.0), tl.where(below, -c, 0.0), tl.where(below, -d, 0.0)
    for i in range(1, 16):
        a, b, c, d = _substitute(a, i, o), _substitute(b, i, o), _substitute(c, i, o), _substitute(d, i, o)
    return a + eye, b + eye, c + eye, d + eye


@triton.jit
def prepare_kernel(
    k, g, beta, starts, A, G, L, T, H, N,
    R: tl.constexpr, BK: tl.constexpr, HAS_G: tl.constexpr, HAS_STARTS: tl.constexpr, DELTA: tl.constexpr, DOT: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """G (B, T, H) of one chunk of one head, and for the delta rule A' (B, T, H, 64). L is scratch, 64 x 64 fp32 a program: it is
    written as one product and read back in 16 x 16 tiles, which Triton cannot cut from registers (small products spill)."""
    i = tl.program_id(0).to(tl.int64)
    i_c, i_h, i_b = (i % N).to(tl.int32), ((i // N) % H).to(tl.int32), (i // (N * H)).to(tl.int32)
    t0 = i_c * 64
    o_c = tl.arange(0, 64)
    o_t = (i_b.to(tl.int64) * T + t0 + o_c) * H + i_h
    seen = t0 + o_c < T
    b_G = tl.zeros([64], dtype=tl.float32)
    if HAS_G or HAS_STARTS:
        b_g = tl.zeros([64], dtype=tl.float32)
        if HAS_G:
            b_g = tl.maximum(tl.load(g + o_t, mask=seen, other=0.0).to(tl.float32), -40.0) * 1.4426950408889634
        if HAS_STARTS:
            b_g -= 128.0 * tl.load(starts + i_b.to(tl.int64) * T + t0 + o_c, mask=seen, other=0).to(tl.float32)
        b_G = tl.cumsum(b_g, 0)
        tl.store(G + o_t, b_G, mask=seen)
    if not DELTA:
        return
    b_k = k.load([i_b, i_h // R, t0, 0]).reshape(64, BK).to(DOT)
    b_L = tl.dot(b_k, tl.trans(b_k), input_precision=PREC)
    b_L *= tl.load(beta + o_t, mask=seen, other=0.0).to(tl.float32)[:, None]
    if HAS_G or HAS_STARTS:
        b_L *= tl.exp2(tl.minimum(b_G[:, None] - b_G[None, :], 0.0))
    L += i * 4096
    tl.store(L + o_c[:, None] * 64 + o_c[None, :], tl.where(o_c[:, None] > o_c[None, :], b_L, 0.0))
    tl.debug_barrier()  # what the other threads wrote is read below

    o = tl.arange(0, 16)
    p = L + o[:, None] * 64 + o[None, :]
    A00, A11, A22, A33 = _inverses_16(tl.load(p), tl.load(p + 16 * 65), tl.load(p + 32 * 65), tl.load(p + 48 * 65), o)
    L10, L21, L32 = tl.load(p + 16 * 64), tl.load(p + 16 * 65 + 16 * 64), tl.load(p + 32 * 65 + 16 * 64)
    L20, L31, L30 = tl.load(p + 32 * 64), tl.load(p + 16 * 65 + 32 * 64), tl.load(p + 48 * 64)
    # Blocks below the diagonal: A_ij = -A_ii (sum over j <= m < i of L_im A_mj). tf32 on these is as good as ieee end to end.
    A10 = -tl.dot(A11, tl.dot(L10, A00, input_precision="tf32"), input_precision="tf32")
    A21 = -tl.dot(A22, tl.dot(L21, A11, input_precision="tf32"), input_precision="tf32")
    A32 = -tl.dot(A33, tl.dot(L32, A22, input_precision="tf32"), input_precision="tf32")
    x = tl.dot(L21, A10, tl.dot(L20, A00, input_precision="tf32"), input_precision="tf32")
    A20 = -tl.dot(A22, x, input_precision="tf32")
    x = tl.dot(L32, A21, tl.dot(L31, A11, input_precision="tf32"), input_precision="tf32")
    A31 = -tl.dot(A33, x, input_precision="tf32")
    x = tl.dot(L31, A10, tl.dot(L30, A00, input_precision="tf32"), input_precision="tf32")
    A30 = -tl.dot(A33, tl.dot(L32, A20, x, input_precision="tf32"), input_precision="tf32")
    p_beta = beta + (i_b.to(tl.int64) * T + t0 + o) * H + i_h
    beta0, beta1 = tl.load(p_beta, mask=t0 + o < T, other=0.0), tl.load(p_beta + 16 * H, mask=t0 + 16 + o < T, other=0.0)
    beta2 = tl.load(p_beta + 32 * H, mask=t0 + 32 + o < T, other=0.0)
    beta3 = tl.load(p_beta + 48 * H, mask=t0 + 48 + o < T, other=0.0)
    zero = tl.zeros([16, 16], dtype=tl.float32)
    p_A = A + ((i_b.to(tl.int64) * T + t0) * H + i_h) * 64 + o[:, None].to(tl.int64) * H * 64 + o[None, :]
    _store_16(p_A, A00 * beta0[None, :], zero, zero, zero, t0 + o, T)
    _store_16(p_A + 16 * H * 64, A10 * beta0[None, :], A11 * beta1[None, :], zero, zero, t0 + 16 + o, T)
    _store_16(p_A + 32 * H * 64, A20 * beta0[None, :], A21 * beta1[None, :], A22 * beta2[None, :], zero, t0 + 32 + o, T)
    A30, A31, A32, A33 = A30 * beta0[None, :], A31 * beta1[None, :], A32 * beta2[None, :], A33 * beta3[None, :]
    _store_16(p_A + 48 * H * 64, A30, A31, A32, A33, t0 + 48 + o, T)


@triton.jit
def _store_16(p, x0, x1, x2, x3, t, T):
    """One block row of A': four 16 x 16 tiles side by side."""
    m = (t < T)[:, None]
    tl.store(p, x0.to(p.dtype.element_ty), mask=m)
    tl.store(p + 16, x1.to(p.dtype.element_ty), mask=m)
    tl.store(p + 32, x2.to(p.dtype.element_ty), mask=m)
    tl.store(p + 48, x3.to(p.dtype.element_ty), mask=m)


@triton.jit
def _decays(G, t0, T, H, DECAYS: tl.constexpr):
    """Of one chunk: G (64,), e = 2^G, r = 2^(G_end - G), 2^G_end; G_end is that of the last token there is."""
    o = tl.arange(0, 64)
    b_G = tl.zeros([64], dtype=tl.float32)
    end = 0.0
    if DECAYS:
        b_G = tl.load(G + (t0 + o).to(tl.int64) * H, mask=t0 + o < T, other=0.0)
        end = tl.load(G + (tl.minimum(t0 + 64, T) - 1).to(tl.int64) * H)
    return b_G, tl.exp2(b_G), tl.exp2(tl.minimum(end - b_G, 0.0)), tl.exp2(end)


@triton.jit
def forward_kernel(
    q, k, v, A, G, o, h, vn, h0, hT, scale, T, H, N,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, DECAYS: tl.constexpr,
    HAS_H0: tl.constexpr, OUT: tl.constexpr, STATES: tl.constexpr, DELTA: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """All chunks of one head and BV columns of V, in order. OUT: write o and the final state; STATES: write each S and Vn."""
    i = tl.program_id(0).to(tl.int64)
    i_v, i_h, i_b = (i % NV).to(tl.int32), ((i // NV) % H).to(tl.int32), (i // (NV * H)).to(tl.int32)
    i_hk = i_h // R
    G += i_b.to(tl.int64) * T * H + i_h
    o_c, o_k, o_v = tl.arange(0, 64), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    o_h = (i_b.to(tl.int64) * H + i_h) * K * V + o_k[:, None] * V + o_v[None, :]
    m_h = (o_k[:, None] < K) & (o_v[None, :] < V)
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_H0:
        b_S += tl.load(h0 + o_h, mask=m_h, other=0.0)
    causal = o_c[:, None] >= o_c[None, :]
    for i_c in range(N):
        t0 = i_c * 64
        b_k = k.load([i_b, i_hk, t0, 0]).reshape(64, BK).to(DOT)
        b_v = v.load([i_b, i_h, t0, i_v * BV]).reshape(64, BV)
        b_G, e, r, e_end = _decays(G, t0, T, H, DECAYS)
        b_S16 = b_S.to(DOT)
        if STATES:
            h.store([i_b * H + i_h, i_c, 0, i_v * BV], b_S.to(h.dtype).reshape(1, 1, BK, BV))
        b_vn = b_v.to(tl.float32)
        if DELTA:
            b_A = A.load([i_b, i_h, t0, 0]).reshape(64, 64).to(DOT)
            b_u = tl.dot(b_k, b_S16, input_precision=PREC)
            if DECAYS:
                b_u *= e[:, None]
            b_vn = tl.dot(b_A, (b_vn - b_u).to(DOT), input_precision=PREC)
            if STATES:
                vn.store([i_b, i_h, t0, i_v * BV], b_vn.to(vn.dtype).reshape(1, 1, 64, BV))
        if OUT:
            b_q = q.load([i_b, i_hk, t0, 0]).reshape(64, BK).to(DOT)
            b_p = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
            b_o = tl.dot(b_q, b_S16, input_precision=PREC)
            if DECAYS:
                b_p *= tl.exp2(tl.minimum(b_G[:, None] - b_G[None, :], 0.0))
                b_o *= e[:, None]
            b_p = tl.where(causal, b_p, 0.0)
            b_o += tl.dot(b_p.to(DOT), b_vn.to(DOT), input_precision=PREC)
            # Not through a descriptor: its staging tile would push two CTAs of this kernel off one SM.
            p_o = o + ((i_b.to(tl.int64) * T + t0 + o_c[:, None]) * H + i_h) * V + o_v[None, :]
            tl.store(p_o, (b_o * scale).to(o.dtype.element_ty), mask=(t0 + o_c[:, None] < T) & (o_v[None, :] < V))
        if DECAYS:
            b_S *= e_end
            b_vn *= r[:, None]
        b_S += tl.dot(tl.trans(b_k), b_vn.to(DOT), input_precision=PREC)
    if OUT:
        tl.store(hT + o_h, b_S, mask=m_h)


@triton.jit
def reverse_kernel(
    q, k, do, A, G, dv, dh, dhT, dh0, scale, T, H, N,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, DECAYS: tl.constexpr,
    HAS_DHT: tl.constexpr, DELTA: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """All chunks of one head and BV columns of V, last first: dV, each chunk's dS (of its outgoing state), and dh0."""
    i = tl.program_id(0).to(tl.int64)
    i_v, i_h, i_b = (i % NV).to(tl.int32), ((i // NV) % H).to(tl.int32), (i // (NV * H)).to(tl.int32)
    i_hk = i_h // R
    G += i_b.to(tl.int64) * T * H + i_h
    o_c, o_k, o_v = tl.arange(0, 64), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    o_h = (i_b.to(tl.int64) * H + i_h) * K * V + o_k[:, None] * V + o_v[None, :]
    m_h = (o_k[:, None] < K) & (o_v[None, :] < V)
    b_dS = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_DHT:
        b_dS += tl.load(dhT + o_h, mask=m_h, other=0.0)
    anticausal = o_c[:, None] <= o_c[None, :]
    for j in range(N):
        i_c = N - 1 - j
        t0 = i_c * 64
        b_q = q.load([i_b, i_hk, t0, 0]).reshape(64, BK).to(DOT)
        b_k = k.load([i_b, i_hk, t0, 0]).reshape(64, BK).to(DOT)
        b_do = do.load([i_b, i_h, t0, i_v * BV]).reshape(64, BV).to(tl.float32) * scale
        b_G, e, r, e_end = _decays(G, t0, T, H, DECAYS)
        b_dS16 = b_dS.to(DOT)
        dh.store([i_b * H + i_h, i_c, 0, i_v * BV], b_dS.to(dh.dtype).reshape(1, 1, BK, BV))
        b_pT = tl.dot(b_k, tl.trans(b_q), input_precision=PREC)  # computed transposed: rows are keys
        b_dvn = tl.dot(b_k, b_dS16, input_precision=PREC)
        if DECAYS:
            b_pT *= tl.exp2(tl.minimum(b_G[None, :] - b_G[:, None], 0.0))
            b_dvn *= r[:, None]
        b_pT = tl.where(anticausal, b_pT, 0.0)
        b_dvn += tl.dot(b_pT.to(DOT), b_do.to(DOT), input_precision=PREC)
        if DELTA:
            b_A = A.load([i_b, i_h, t0, 0]).reshape(64, 64).to(DOT)
            b_dvn = tl.dot(tl.trans(b_A), b_dvn.to(DOT), input_precision=PREC)
        dv.store([i_b, i_h, t0, i_v * BV], b_dvn.to(dv.dtype).reshape(1, 1, 64, BV))
        if DECAYS:
            b_dS *= e_end
            b_do *= e[:, None]
            b_dvn *= e[:, None]
        b_dS += tl.dot(tl.trans(b_q), b_do.to(DOT), input_precision=PREC)
        if DELTA:
            b_dS -= tl.dot(tl.trans(b_k), b_dvn.to(DOT), input_precision=PREC)
    tl.store(dh0 + o_h, b_dS, mask=m_h)


@triton.jit
def inputs_kernel(
    q, k, v, do, vn, dv, h, dh, G, beta, dq, dk, dbeta, dG, scale, T, H, N, s_part,
    R: tl.constexpr, V: tl.constexpr, BKB: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, DECAYS: tl.constexpr,
    DELTA: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq, dk of one chunk, one key head and BKB key channels; their parts of dbeta and dG, one slice of `s_part` elements each."""
    i = tl.program_id(0).to(tl.int64)
    i_k, i_c = (i % NK).to(tl.int32), ((i // NK) % N).to(tl.int32)
    i_hk, i_b = ((i // (NK * N)) % (H // R)).to(tl.int32), (i // (NK * N * (H // R))).to(tl.int32)
    t0 = i_c * 64
    o_c = tl.arange(0, 64)
    causal, strict = o_c[:, None] >= o_c[None, :], o_c[:, None] > o_c[None, :]
    b_q = q.load([i_b, i_hk, t0, i_k * BKB]).reshape(64, BKB).to(DOT)
    b_k = k.load([i_b, i_hk, t0, i_k * BKB]).reshape(64, BKB).to(DOT)
    b_dq = tl.zeros([64, BKB], dtype=tl.float32)
    b_dk = tl.zeros([64, BKB], dtype=tl.float32)
    for j in range(R):
        i_h = i_hk * R + j
        p_G = G + i_b.to(tl.int64) * T * H + i_h
        b_G, e, r, e_end = _decays(p_G, t0, T, H, DECAYS)
        o_t = i_k * s_part + (i_b.to(tl.int64) * T + t0 + o_c) * H + i_h
        # Rows of the scores: what reaches q_i and, through the solve, k_i, whose decay grows with i.
        dp = tl.zeros([64, 64], dtype=tl.float32)
        g_q = tl.zeros([64, BKB], dtype=tl.float32)
        if DELTA:
            dl = tl.zeros([64, 64], dtype=tl.float32)
            g_p = tl.zeros([64, BKB], dtype=tl.float32)
            xv = tl.zeros([64], dtype=tl.float32)
        for i_v in range(NV):
            b_do = do.load([i_b, i_h, t0, i_v * BV]).reshape(64, BV).to(DOT)
            b_vn = vn.load([i_b, i_h, t0, i_v * BV]).reshape(64, BV).to(DOT)
            b_S = h.load([i_b * H + i_h, i_c, i_k * BKB, i_v * BV]).reshape(BKB, BV).to(DOT)
            dp = tl.dot(b_do, tl.trans(b_vn), dp, input_precision=PREC)
            g_q = tl.dot(b_do, tl.trans(b_S), g_q, input_precision=PREC)
            if DELTA:
                b_x = dv.load([i_b, i_h, t0, i_v * BV]).reshape(64, BV).to(DOT)
                dl = tl.dot(b_x, tl.trans(b_vn), dl, input_precision=PREC)
                g_p = tl.dot(b_x, tl.trans(b_S), g_p, input_precision=PREC)
                if i_k == 0:
                    b_v = v.load([i_b, i_h, t0, i_v * BV]).reshape(64, BV)
                    xv += tl.sum(b_x.to(tl.float32) * b_v.to(tl.float32), axis=1)
        if DECAYS:
            gamma = tl.exp2(tl.minimum(b_G[:, None] - b_G[None, :], 0.0))
            dp, g_q = dp * gamma, g_q * e[:, None]
            if DELTA:
                dl, g_p = dl * gamma, g_p * e[:, None]
        # Scaled before it is rounded, as its transpose below is: in dG the two cancel to the last bit, or leave 6e-2 of error.
        dp = tl.where(causal, dp, 0.0) * scale
        g_q = tl.dot(dp.to(DOT), b_k, g_q * scale, input_precision=PREC)
        b_dq += g_q
        b_dG = tl.sum(g_q * b_q.to(tl.float32), axis=1)
        if DELTA:
            dl = tl.where(strict, dl, 0.0)
            g_p = -tl.dot(dl.to(DOT), b_k, g_p, input_precision=PREC)
            b_dk += g_p
            kp = tl.sum(g_p * b_k.to(tl.float32), axis=1)
            b_dG += kp
            p_beta = beta + (i_b.to(tl.int64) * T + t0 + o_c) * H + i_h
            b_beta = tl.load(p_beta, mask=t0 + o_c < T, other=1.0).to(tl.float32)
            tl.store(dbeta + o_t, tl.where(b_beta > 0, (xv + kp) / b_beta, 0.0), mask=t0 + o_c < T)
        # Columns of the scores, computed as rows of their transposes: what reaches k_j, whose decay falls with j.
        dpT = tl.zeros([64, 64], dtype=tl.float32)
        g_m = tl.zeros([64, BKB], dtype=tl.float32)
        if DELTA:
            dlT = tl.zeros([64, 64], dtype=tl.float32)
        ss = 0.0
        for i_v in range(NV):
            b_do = do.load([i_b, i_h, t0, i_v * BV]).reshape(64, BV).to(DOT)
            b_vn = vn.load([i_b, i_h, t0, i_v * BV]).reshape(64, BV).to(DOT)
            b_dS = dh.load([i_b * H + i_h, i_c, i_k * BKB, i_v * BV]).reshape(BKB, BV).to(DOT)
            dpT = tl.dot(b_vn, tl.trans(b_do), dpT, input_precision=PREC)
            g_m = tl.dot(b_vn, tl.trans(b_dS), g_m, input_precision=PREC)
            if DELTA:
                b_x = dv.load([i_b, i_h, t0, i_v * BV]).reshape(64, BV).to(DOT)
                dlT = tl.dot(b_vn, tl.trans(b_x), dlT, input_precision=PREC)
            if DECAYS:
                b_S = h.load([i_b * H + i_h, i_c, i_k * BKB, i_v * BV]).reshape(BKB, BV)
                ss += tl.sum(tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), axis=1), axis=0)
        if DECAYS:
            gammaT = tl.exp2(tl.minimum(b_G[None, :] - b_G[:, None], 0.0))
            dpT, g_m = dpT * gammaT, g_m * r[:, None]
            if DELTA:
                dlT *= gammaT
            last = tl.minimum(t0 + 64, T) - 1 - t0
            at_end = tl.sum(tl.sum(g_m * b_k.to(tl.float32), axis=1), axis=0) + e_end * ss
            b_dG += tl.where(o_c == last, at_end, 0.0)
        dpT = tl.where(o_c[:, None] <= o_c[None, :], dpT, 0.0) * scale
        g_m = tl.dot(dpT.to(DOT), b_q, g_m, input_precision=PREC)
        if DELTA:
            dlT = tl.where(o_c[:, None] < o_c[None, :], -dlT, 0.0)
            g_m = tl.dot(dlT.to(DOT), b_k, g_m, input_precision=PREC)
        b_dk += g_m
        if DECAYS:
            tl.store(dG + o_t, b_dG - tl.sum(g_m * b_k.to(tl.float32), axis=1), mask=t0 + o_c < T)
    dq.store([i_b, i_hk, t0, i_k * BKB], b_dq.to(dq.dtype).reshape(1, 1, 64, BKB))
    dk.store([i_b, i_hk, t0, i_k * BKB], b_dk.to(dk.dtype).reshape(1, 1, 64, BKB))


# ----------------------------------------------------------------------------------------------------------------------
# Launches


def _tile(x, block):
    """A descriptor of x `(B, T, H, D)` in the order (B, H, T, D), in tiles `(1, 1, *block)`; zeros beyond the ends."""
    x = x.permute(0, 2, 1, 3)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, *block])


def _ready(x):
    """x itself if a descriptor can read it: last stride 1, the others multiples of 16 bytes; else a copy."""
    fine = x.stride(-1) == 1 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fine else x.contiguous()


# Warps and stages of each kernel, by bytes of a dot operand; on an H200 at B8 T4096 H16 K=V=128, ms: prepare 0.26 (0.42 with 2
# warps, 0.58 with 4: its sums over 16 rows cross warps), inputs 0.90 (1.32 with 1 stage). More than 4 warps around several dots are
# serialised by ptxas, or wrong before Triton 3.7.1.
LAUNCH = {
    2: {"prepare": (1, 1), "forward": (4, 2), "states": (4, 2), "reverse": (4, 2), "inputs": (4, 2)},
    4: {"prepare": (1, 1), "forward": (4, 1), "states": (4, 1), "reverse": (4, 1), "inputs": (4, 1)},
}


def _launch(kernel, x):
    warps, stages = LAUNCH[x.element_size()][kernel]
    return {"num_warps": warps, "num_stages": stages}


def _shapes(q, v):
    B, T, H, V = v.shape
    Hk, K = q.shape[2:]
    BK, BV = max(16, triton.next_power_of_2(K)), min(64, max(16, triton.next_power_of_2(V)))
    if BK > 128:
        BV = min(BV, 32)
    return B, T, H, V, H // Hk, K, BK, BV, triton.cdiv(V, BV), triton.cdiv(T, C)


def _types(x):
    """The type of dot operands and the precision of fp32 dots. The interpreter keeps bf16 as bit patterns: fp32 there."""
    interpreted = not isinstance(forward_kernel, triton.JITFunction)
    if interpreted or x.dtype == torch.float32:
        return {"DOT": tl.float32, "PREC": "ieee"}
    return {"DOT": {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[x.dtype], "PREC": "tf32"}


def _forward_pass(q, k, v, g, beta, h0, starts, scale):
    """Output, final state, A' (of no size without beta) and G."""
    B, T, H, V, R, K, BK, BV, NV, N = _shapes(q, v)
    delta, types = beta is not None, _types(q)
    q, k, v = _ready(q), _ready(k), _ready(v)
    G = torch.empty(B, T, H, dtype=torch.float32, device=q.device)
    A = torch.empty(B, T, H, C if delta else 0, dtype=q.dtype, device=q.device)
    scratch = torch.empty(N * B * H if delta else 0, C, C, dtype=torch.float32, device=q.device)
    o = torch.empty(B, T, H, V, dtype=v.dtype, device=v.device)
    hT = torch.empty(B, H, K, V, dtype=torch.float32, device=v.device)
    q_tile, k_tile, v_tile = _tile(q, [C, BK]), _tile(k, [C, BK]), _tile(v, [C, BV])
    A_tile = _tile(A, [C, C]) if delta else v_tile
    decays = g is not None or starts is not None
    types |= {"DELTA": delta}
    if delta or decays:
        gates = G if g is None else g.contiguous(), beta.contiguous() if delta else G, G if starts is None else starts
        flags = {"R": R, "BK": BK, "HAS_G": g is not None, "HAS_STARTS": starts is not None}
        prepare_kernel[(N * B * H,)](k_tile, *gates, A, G, scratch, T, H, N, **flags, **types, **_launch("prepare", q))
    flags = {"R": R, "K": K, "V": V, "BK": BK, "BV": BV, "NV": NV, "DECAYS": decays, "HAS_H0": h0 is not None, "OUT": True}
    tiles, start = (q_tile, k_tile, v_tile, A_tile), hT if h0 is None else h0.contiguous()
    forward_kernel[(NV * B * H,)](
        *tiles, G, o, v_tile, v_tile, start, hT, scale, T, H, N, STATES=False, **flags, **types, **_launch("forward", q)
    )
    return o, hT, A, G


def _backward_pass(q, k, v, g, beta, h0, starts, A, G, do, dhT, scale):
    """dq, dk, dv, dg (of no size without g), dbeta (likewise), dh0."""
    B, T, H, V, R, K, BK, BV, NV, N = _shapes(q, v)
    delta, decays, types = beta is not None, g is not None or starts is not None, _types(q)
    q, k, v, do = _ready(q), _ready(k), _ready(v), _ready(do)
    dv = torch.empty(B, T, H, V, dtype=v.dtype, device=v.device)
    vn = torch.empty_like(dv) if delta else v
    h, dh = (torch.empty(B * H, N, K, V, dtype=q.dtype, device=q.device) for _ in range(2))
    dh0 = torch.empty(B, H, K, V, dtype=torch.float32, device=q.device)
    BKB = min(BK, 64)
    NK = triton.cdiv(K, BKB)

    def states(x, rows):
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, BV])

    shared = {"R": R, "V": V, "BV": BV, "NV": NV, "DECAYS": decays, "DELTA": delta, **types}
    q_tile, k_tile, v_tile = _tile(q, [C, BK]), _tile(k, [C, BK]), _tile(v, [C, BV])
    vn_tile, dv_tile, do_tile = _tile(vn, [C, BV]), _tile(dv, [C, BV]), _tile(do, [C, BV])
    A_tile = _tile(A, [C, C]) if delta else v_tile
    forward_kernel[(NV * B * H,)](
        q_tile, k_tile, v_tile, A_tile, G, dv, states(h, BK), vn_tile, dh0 if h0 is None else h0.contiguous(), dh0, scale, T, H, N,
        K=K, BK=BK, HAS_H0=h0 is not None, OUT=False, STATES=True, **shared, **_launch("states", q),
    )  # fmt: skip
    reverse_kernel[(NV * B * H,)](
        q_tile, k_tile, do_tile, A_tile, G, dv_tile, states(dh, BK), dh0 if dhT is None else dhT.contiguous(), dh0, scale, T, H, N,
        K=K, BK=BK, HAS_DHT=dhT is not None, **shared, **_launch("reverse", q),
    )  # fmt: skip
    dq, dk = (torch.empty(B, T, H // R, K, dtype=q.dtype, device=q.device) for _ in range(2))
    parts = torch.empty(2, NK, B, T, H, dtype=torch.float32, device=q.device)
    inputs_kernel[(NK * N * B * (H // R),)](
        _tile(q, [C, BKB]), _tile(k, [C, BKB]), v_tile, do_tile, vn_tile, dv_tile, states(h, BKB), states(dh, BKB), G,
        beta.contiguous() if delta else G, _tile(dq, [C, BKB]), _tile(dk, [C, BKB]), parts[0], parts[1], scale, T, H, N, B * T * H,
        BKB=BKB, NK=NK, **shared, **_launch("inputs", q),
    )  # fmt: skip
    dbeta = parts[0].sum(0) if delta else parts.new_empty(0)
    if g is None:
        return dq, dk, dv, parts.new_empty(0), dbeta, dh0
    dG = torch.nn.functional.pad(parts[1].sum(0), (0, 0, 0, N * C - T)).view(B, N, C, H)
    dg = dG.flip(2).cumsum(2).flip(2).reshape(B, N * C, H)[:, :T]
    return dq, dk, dv, torch.where(g < FORGOTTEN, 0.0, dg).to(g.dtype), dbeta, dh0


@torch.library.custom_op("hybrid::recurrence_forward", mutates_args=())
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor | None, h0: torch.Tensor | None,
    starts: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _forward_pass(q, k, v, g, beta, h0, starts, scale)


@_forward.register_fake
def _(q, k, v, g, beta, h0, starts, scale):
    B, T, H, V = v.shape
    A = q.new_empty(B, T, H, C if beta is not None else 0)
    state = v.new_empty(B, H, q.shape[-1], V, dtype=torch.float32)
    return v.new_empty(B, T, H, V), state, A, q.new_empty(B, T, H, dtype=torch.float32)


@torch.library.custom_op("hybrid::recurrence_backward", mutates_args=())
def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor | None, h0: torch.Tensor | None,
    starts: torch.Tensor | None, A: torch.Tensor, G: torch.Tensor, do: torch.Tensor, dhT: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _backward_pass(q, k, v, g, beta, h0, starts, A, G, do, dhT, scale)


@_backward.register_fake
def _(q, k, v, g, beta, h0, starts, A, G, do, dhT, scale):
    state = v.new_empty(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1], dtype=torch.float32)
    dg = G.new_empty(0) if g is None else torch.empty_like(g)
    dbeta = G.new_empty(0) if beta is None else torch.empty_like(G)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dg, dbeta, state


def _save(ctx, inputs, output):
    q, k, v, g, beta, h0, starts, scale = inputs
    _, _, A, G = output
    ctx.save_for_backward(q, k, v, g, beta, h0, starts, A, G)
    ctx.scale = scale
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, dhT, dA, dG):
    q, k, v, g, beta, h0, starts, A, G = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    dq, dk, dv, dg, dbeta, dh0 = _backward(q, k, v, g, beta, h0, starts, A, G, do, dhT, ctx.scale)
    dg, dbeta = None if g is None else dg, None if beta is None else dbeta.to(beta.dtype)
    return dq, dk, dv, dg, dbeta, None if h0 is None else dh0, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def supports(q, k, v, g=None, beta=None, **_):
    """None if these inputs can run here, else the reason why not."""
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{q.dtype} inputs"
    if q.shape[-1] % 8 or v.shape[-1] % 8 or q.shape[-1] > 128:
        return f"head widths K={q.shape[-1]} and V={v.shape[-1]}: both must be multiples of 8, K at most 128"
    if g is not None and g.ndim == 4:
        return "a decay per key channel"
    return None


def _run(q, k, v, g, beta, scale, initial_state, segment_ids):
    starts = valid = None
    if segment_ids is not None:  # padding neither decays nor writes
        run, valid = segment_runs(segment_ids)
        starts = torch.nn.functional.pad(run[:, 1:] != run[:, :-1], (1, 0)).to(torch.int8)
        g = None if g is None else g * valid[..., None]
        if beta is None:
            v = v * valid[..., None, None]
        else:
            beta = beta * valid[..., None]
    h0 = None if initial_state is None else initial_state.to(torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    o, hT, _, _ = _forward(q, k.to(q.dtype), v.to(q.dtype), g, beta, h0, starts, scale)
    o = o.to(v.dtype)
    return (o if valid is None else o * valid[..., None, None]), hT


def delta_rule(q, k, v, g=None, beta=None, *, scale=None, initial_state=None, segment_ids=None):
    """`reference.delta_rule` for a decay per head and token, or none; bf16, fp16 or fp32, gates and states in fp32."""
    beta = torch.ones(v.shape[:3], dtype=torch.float32, device=v.device) if beta is None else beta
    return _run(q, k, v, g, beta, scale, initial_state, segment_ids)


def linear_attention(q, k, v, g=None, *, scale=None, initial_state=None, segment_ids=None):
    """`reference.linear_attention` for a decay per head, per head and token, or none; v is rounded to the type of q."""
    g = g.expand(v.shape[:3]) if g is not None and g.ndim == 1 else g
    return _run(q, k, v, g, None, scale, initial_state, segment_ids)
