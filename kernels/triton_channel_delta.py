"""The delta rule with a decay per key channel (Kimi Delta Attention) in Triton, forward and backward: `channel_delta_rule`.

Chunks of C = 64 tokens. With G (C, K) the running sums of the decay (log2) inside the chunk, e = 2^G, r = 2^(G_C - G), E = 2^G_C
and <x, y>_ij = sum_c x_ic y_jc 2^(G_ic - G_jc) for i >= j, the rule is triton_recurrence.py's with decays inside the products:

    prepare  (per chunk)       scale e * Q, e * K, r * K, E,  P = scale <Q, K>,  A' = (I + stril(diag(beta) <K, K>))^-1 diag(beta)
    forward  (per head, V/BV)  Vn = A' (V - (e * K) S),  O = scale (e * Q) S + P Vn,  S' = diag(E) S + (r * K)^T Vn
    reverse  (per head, V/BV)  dVn = (r * K) dS + P^T dO,  dV = A'^T dVn,  dS' = diag(E) dS + (scale e * Q)^T dO - (e * K)^T dV
    scores   (per chunk)       dP = tril(scale dO Vn^T),  dL = -stril(dV Vn^T),  dbeta = rowsum(dV * Vn) / beta^2
    inputs   (per chunk, K/64) dQ, dK, dg from dP, dL and the stored S, dS, Vn, dV

The scans read their operands ready made: what a chunk costs there is paid once in each of a sequence's chunks, one after the other.

<x, y> is a product of matrices only after 2^(G_i - G_j) is split in 2^(G_i - M) 2^(M - G_j), of which one exceeds 1 unless M lies
between the two. With M that of the chunk's middle row, one product serves all pairs if no |G_i - M| exceeds 60. Otherwise it serves
the pairs that the middle separates, with powers <= 1 only, and both halves of the chunk are treated likewise: exact for any decay,
and one product where no channel forgets more than 2^-60 in half a chunk. All blocks of a size are taken at once, each with an M of
its own, and pairs of different blocks masked: never more than six products.

A' is fp16, and so is what it multiplies, divided by a unit that suits the largest element of the tile. In bf16, with keys of cosine
0.9 and beta up to 2, dV is 2e-2 off and dbeta of one token up to 3e-2, now 5e-3 and 1e-2; with random keys dbeta falls from 5e-3 to
3.5e-3. It suffices while beta |k|^2 <= 2, where the update contracts; beyond, entries of A' may exceed fp16 and are clamped.

Documents are masks on e, r, E and on the pairs of a chunk. Kimi team 2510.26692; Yang et al. 2412.06464 for the implicit solve.
"""

import functools

import torch
import triton
import triton.language as tl

from .launch import Tile, architecture, direct, launch, operand_types, ready, shared_by_layers, tile, traced
from .reference import segment_runs
from .triton_recurrence import _by_token, _half, inverse_64, solved

C = 64
BK_TILE = 64  # key channels of a tile; narrower heads are padded with zeros, which a descriptor reads beyond the end


@triton.jit
def _parts(b_x, WIDE: tl.constexpr):
    """b_x as two addends that products can take: 16 bits of it in bf16, all of it in fp32 (and nothing, which is not used)."""
    b_h = b_x.to(WIDE)
    return b_h, (b_x - b_h.to(tl.float32)).to(WIDE)


@triton.jit
def _sums(b_m, b_h, b_l, PREC: tl.constexpr):
    """b_m (b_h + b_l) in fp32, b_m (64, 64) of -1, 0 and 1: sums over tokens, made as products so that they lie as others do."""
    b_m = b_m.to(b_h.dtype)
    b_s = tl.dot(b_m, b_h, input_precision=PREC)
    if b_h.dtype != tl.float32:
        b_s = tl.dot(b_m, b_l, b_s, input_precision=PREC)
    return b_s


@triton.jit
def _of_documents(documents, i_b, t0, o_c, T):
    """Of tokens o_c of a chunk: 2 number of the document + is there a token, as `documents (B, T)` holds it; is it in the document
    of the incoming state, of the outgoing state; and whether these two are one."""
    documents += i_b.to(tl.int64) * T
    code = tl.load(documents + t0 + o_c, mask=t0 + o_c < T, other=0)
    incoming = tl.load(documents + tl.maximum(t0 - 1, 0)) >> 1  # that of the row's first token in the first chunk
    outgoing = tl.load(documents + tl.minimum(t0 + 64, T) - 1) >> 1
    run, real = code >> 1, code & 1 == 1
    return code, real & (run == incoming), real & (run == outgoing), incoming == outgoing


@triton.jit
def _documents(documents, i_b, t0, T, HAS_DOCUMENTS: tl.constexpr):
    """The same of all of its tokens in order, with number and is there a token apart; one document if there are none."""
    o_c = tl.arange(0, 64)
    run, real, keep = tl.zeros([64], dtype=tl.int32), t0 + o_c < T, True
    opened, last = real, real
    if HAS_DOCUMENTS:
        code, opened, last, keep = _of_documents(documents, i_b, t0, o_c, T)
        run, real = code >> 1, (code & 1) == 1
    return run, real, opened, last, keep


@triton.jit
def _beta(beta, o_t, real, WIDE: tl.constexpr):
    """beta, away from 0, where its gradient needs Vn / beta and dV / beta; 0 where there is no token. Smaller numbers than 2^-14
    have fewer bits in fp16, in which A' is kept unless all is fp32."""
    least: tl.constexpr = 1e-6 if WIDE == tl.float32 else 0.00006103515625
    b_beta = tl.load(beta + o_t, mask=real, other=0.0).to(tl.float32)
    return tl.where(real & (tl.abs(b_beta) < least), least, b_beta)


@triton.jit
def _by_thread(SIZE: tl.constexpr):
    """The tokens (64,) of the rows of a tile in which a thread holds SIZE tokens in a row, which makes their sums a thread's own
    work: a tile of 64 x 16 SIZE is read in passes of 64 / SIZE rows, of which each thread has one."""
    o = tl.arange(0, 64)
    return o % (64 // SIZE) * SIZE + o // (64 // SIZE)


@triton.jit
def _in_order(b_x, BK: tl.constexpr):
    """The rows of such a tile in the order of their tokens."""
    return tl.reshape(tl.permute(tl.reshape(b_x, (BK // 16, 1024 // BK, BK)), (1, 0, 2)), (64, BK))


@triton.jit
def _running_sums(b_a, BK: tl.constexpr):
    """Of a tile (64, BK) by thread: the sums G of its columns up to each token, up to the middle of the chunk and to its end.
    Differences of these are off by 2e-4 at most, where every token forgets everything and G reaches -3,700: below bf16's 4e-3."""
    COUNT: tl.constexpr = 1024 // BK
    b_a = tl.reshape(b_a, (BK // 16, COUNT, BK))
    total = tl.sum(b_a, axis=0)
    b_G = tl.cumsum(b_a, axis=0) + (tl.cumsum(total, axis=0) - total)[None, :, :]
    middle = tl.sum(tl.where(tl.arange(0, COUNT)[:, None] < COUNT // 2, total, 0.0), axis=0)
    return tl.reshape(b_G, (64, BK)), middle, tl.sum(total, axis=0)


@triton.jit
def _pointers(x, i_b, i_h, t0, k0, T, s_t, K: tl.constexpr, BK: tl.constexpr):
    """Pointers to a tile by thread of x (B, T, H, K), whose tokens are s_t apart, and their mask."""
    o_t, o_k = t0 + _by_thread(BK // 16)[:, None], k0 + tl.arange(0, BK)[None, :]
    return x + (i_b.to(tl.int64) * T + o_t) * s_t + i_h * K + o_k, (o_t < T) & (o_k < K)


@triton.jit
def _clamped(b_g, documents, i_b, t0, T, BK: tl.constexpr, HAS_DOCUMENTS: tl.constexpr):
    """Log2 decays of a tile by thread; log decays below -40 count as -40, as in eager.py, padding's as 0."""
    b_a = tl.maximum(b_g.to(tl.float32), -40.0) * 1.4426950408889634
    if HAS_DOCUMENTS:
        o_t = t0 + _by_thread(BK // 16)
        code = tl.load(documents + i_b.to(tl.int64) * T + o_t, mask=o_t < T, other=0)
        b_a = tl.where((code & 1 == 1)[:, None], b_a, 0.0)
    return b_a


@triton.jit
def _scaled(
    q, k, g, documents, qe, ke, kr, E, scale, i_b, i_h, i_c, k0, T, H, N, s_q, s_k, s_g,
    R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Write scale e * Q, e * K, r * K and E of BK channels of one chunk. Returns Q, K and G, by thread, and G of the middle
    and of the end. Loads go through pointers, all before anything waits: a descriptor's would be waited for one by one."""
    t0, i_bh = i_c * 64, i_b.to(tl.int64) * H + i_h
    p_g, m = _pointers(g, i_b, i_h, t0, k0, T, s_g, K, BK)
    b_g = tl.load(p_g, mask=m, other=0.0)
    b_k = tl.load(_pointers(k, i_b, i_h // R, t0, k0, T, s_k, K, BK)[0], mask=m, other=0.0)
    b_q = tl.load(_pointers(q, i_b, i_h // R, t0, k0, T, s_q, K, BK)[0], mask=m, other=0.0)
    b_a = _clamped(b_g, documents, i_b, t0, T, BK, HAS_DOCUMENTS)
    b_G, middle, end = _running_sums(b_a, BK)
    e, r, b_E = tl.exp2(b_G), tl.exp2(tl.minimum(end[None, :] - b_G, 0.0)), tl.exp2(end)
    if HAS_DOCUMENTS:
        _, opened, last, keep = _of_documents(documents, i_b, t0, _by_thread(BK // 16), T)
        e, r, b_E = tl.where(opened[:, None], e, 0.0), tl.where(last[:, None], r, 0.0), tl.where(keep, b_E, 0.0)
    o_k = k0 + tl.arange(0, BK)
    tl.store(E + (i_bh * N + i_c) * K + o_k, b_E, mask=o_k < K)
    o_x = (i_bh * T + t0 + _by_thread(BK // 16))[:, None] * K + o_k[None, :]
    tl.store(qe + o_x, (b_q.to(tl.float32) * (e * scale)).to(qe.dtype.element_ty), mask=m)
    tl.store(ke + o_x, (b_k.to(tl.float32) * e).to(ke.dtype.element_ty), mask=m)
    tl.store(kr + o_x, (b_k.to(tl.float32) * r).to(kr.dtype.element_ty), mask=m)
    return b_q, b_k, b_G, middle, end


@triton.jit(do_not_specialize=["T", "H", "N"])
def rescale_kernel(
    q, k, g, documents, qe, ke, kr, E, G, scale, T, H, N, s_q, s_k, s_g,
    R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """What the backward makes anew of one chunk of one head: the scaled q and k and G (B, H, T, K)."""
    i = tl.program_id(0).to(tl.int64)
    i_c, i_h, i_b = (i % N).to(tl.int32), ((i // N) % H).to(tl.int32), (i // (N * H)).to(tl.int32)
    for i_k in range(NK):
        _, _, b_G, _, _ = _scaled(
            q, k, g, documents, qe, ke, kr, E, scale, i_b, i_h, i_c, i_k * BK, T, H, N, s_q, s_k, s_g, R, K, BK, HAS_DOCUMENTS
        )
        p_G, m = _pointers(G, i_b * H + i_h, 0, i_c * 64, i_k * BK, T, K, K, BK)
        tl.store(p_G, b_G, mask=m)


@triton.jit
def _operands(b_q, b_k, b_d, most, rows, columns, BK: tl.constexpr, WIDE: tl.constexpr):
    """q and k as rows and k as columns of the products, b_d being G - M, for the `rows` and `columns` (64,) that these serve."""
    b_q, b_k = b_q.to(tl.float32), b_k.to(tl.float32)
    up = tl.exp2(tl.minimum(b_d, tl.where(rows, most, -200.0)[:, None]))
    down = tl.exp2(tl.minimum(-b_d, tl.where(columns, most, -200.0)[:, None]))
    return _in_order((b_q * up).to(WIDE), BK), _in_order((b_k * up).to(WIDE), BK), _in_order((b_k * down).to(WIDE), BK)


@triton.jit(do_not_specialize=["T", "H", "N"])
def prepare_kernel(
    q, k, g, beta, documents, qe, ke, kr, E, A, P, scale, T, H, N, s_q, s_k, s_g,
    R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    WIDE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: the scaled q and k (B, H, T, K), E (B, H, N, K), A' and P (B, H, T, 64)."""
    i = tl.program_id(0).to(tl.int64)
    i_c, i_h, i_b = (i % N).to(tl.int32), ((i // N) % H).to(tl.int32), (i // (N * H)).to(tl.int32)
    t0 = i_c * 64
    o_c, o_p = tl.arange(0, 64), _by_thread(BK // 16)
    b_P = tl.zeros([64, 64], dtype=tl.float32)
    b_L = tl.zeros([64, 64], dtype=tl.float32)
    near = True
    for i_k in range(NK):
        b_q, b_k, b_G, middle, end = _scaled(
            q, k, g, documents, qe, ke, kr, E, scale, i_b, i_h, i_c, i_k * BK, T, H, N, s_q, s_k, s_g, R, K, BK, HAS_DOCUMENTS
        )
        near &= tl.max(tl.maximum(-middle, middle - end), axis=0) <= 60.0
        x_q, x_k, x_c = _operands(b_q, b_k, b_G - middle[None, :], 60.0, o_p >= 0, o_p >= 0, BK, WIDE)
        b_P = tl.dot(x_q, tl.trans(x_c), b_P, input_precision=PREC)
        b_L = tl.dot(x_k, tl.trans(x_c), b_L, input_precision=PREC)
    if not near:  # by blocks of 64, 32, ... tokens, as in `_block`, and from the start: what is kept for it would spill above
        b_P = tl.zeros([64, 64], dtype=tl.float32)
        b_L = tl.zeros([64, 64], dtype=tl.float32)
        for i_k in range(NK):
            p_g, m = _pointers(g, i_b, i_h, t0, i_k * BK, T, s_g, K, BK)
            p_k, _ = _pointers(k, i_b, i_h // R, t0, i_k * BK, T, s_k, K, BK)
            p_q, _ = _pointers(q, i_b, i_h // R, t0, i_k * BK, T, s_q, K, BK)
            b_a = _clamped(tl.load(p_g, mask=m, other=0.0), documents, i_b, t0, T, BK, HAS_DOCUMENTS)
            b_G, _, _ = _running_sums(b_a, BK)
            size = 64
            while size > 0:
                o_m = (o_p & -size) + (size // 2 - 1)  # the middle of each token's block, and the row that holds it
                i_m = o_m % (BK // 16) * (1024 // BK) + o_m // (BK // 16)
                b_d = b_G - tl.gather(b_G, tl.broadcast_to(i_m[:, None], (64, BK)), 0)
                fits = tl.max(tl.max(tl.abs(b_d), axis=1), axis=0) <= 60.0
                b_k, b_q, most = tl.load(p_k, mask=m, other=0.0), tl.load(p_q, mask=m, other=0.0), tl.where(fits, 60.0, 0.0)
                rows, columns = o_p > tl.where(fits, -1, o_m), o_p <= tl.where(fits, 64, o_m)
                x_q, x_k, x_c = _operands(b_q, b_k, b_d, most, rows, columns, BK, WIDE)
                same = (o_c & -size)[:, None] == (o_c & -size)[None, :]
                b_P += tl.where(same, tl.dot(x_q, tl.trans(x_c), input_precision=PREC), 0.0)
                b_L += tl.where(same, tl.dot(x_k, tl.trans(x_c), input_precision=PREC), 0.0)
                size = tl.where(fits, 0, size // 2)
    run, real, _, _, _ = _documents(documents, i_b, t0, T, HAS_DOCUMENTS)
    b_beta = _beta(beta, (i_b.to(tl.int64) * T + t0 + o_c) * H + i_h, real, WIDE)
    below = o_c[:, None] >= o_c[None, :]
    if HAS_DOCUMENTS:
        below &= (run[:, None] == run[None, :]) & real[:, None]
    o_x = ((i_b.to(tl.int64) * H + i_h) * T + t0 + o_c[:, None]) * 64 + o_c[None, :]
    m_x = t0 + o_c[:, None] < T
    tl.store(P + o_x, tl.where(below, b_P * scale, 0.0).to(P.dtype.element_ty), mask=m_x)
    b_L = tl.where(below & (o_c[:, None] > o_c[None, :]), b_L * b_beta[:, None], 0.0)
    b_A = inverse_64(b_L, PREC, WIDE != tl.float32) * b_beta[None, :]
    if WIDE != tl.float32:
        b_A = tl.clamp(b_A, -65504.0, 65504.0)
    tl.store(A + o_x, b_A.to(A.dtype.element_ty), mask=m_x)


@triton.jit
def _scan(H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr):
    """Of a scan's program: batch, head, first column of V; offsets and mask of its states (B, H, K, V)."""
    i = tl.program_id(0).to(tl.int64)
    i_v, i_h, i_b = i % NV, (i // NV) % H, i // (NV * H)
    o_k, o_v = tl.arange(0, BK)[:, None], i_v * BV + tl.arange(0, BV)[None, :]
    o_h = (i_b * H + i_h) * K * V + o_k * V + o_v
    return i_b.to(tl.int32), i_h.to(tl.int32), (i_v * BV).to(tl.int32), o_h, (o_k < K) & (o_v < V)


@triton.jit(do_not_specialize=["T", "H", "N"])
def forward_kernel(
    qe, ke, kr, v, A, P, E, o, h, vn, h0, hT, T, H, N,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, HAS_H0: tl.constexpr,
    STATES: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """All chunks of one head and BV columns of V, in order: o and the final state. STATES: each chunk's S and Vn too."""
    i_b, i_h, v0, o_h, m_h = _scan(H, K, V, BK, BV, NV)
    o_c, o_k, o_v = tl.arange(0, 64), tl.arange(0, BK), v0 + tl.arange(0, BV)
    E += (i_b * H + i_h).to(tl.int64) * N * K
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_H0:
        b_S += tl.load(h0 + o_h, mask=m_h, other=0.0)
    for i_c in range(N):
        t0 = i_c * 64
        b_E = tl.load(E + i_c * K + o_k, mask=o_k < K, other=0.0)
        b_ke = ke.load([i_b, i_h, t0, 0]).reshape(64, BK).to(DOT)
        b_v = v.load([i_b, i_h, t0, v0]).reshape(64, BV).to(tl.float32)
        b_A = A.load([i_b, i_h, t0, 0]).reshape(64, 64)
        b_qe = qe.load([i_b, i_h, t0, 0]).reshape(64, BK).to(DOT)
        b_P = P.load([i_b, i_h, t0, 0]).reshape(64, 64).to(DOT)
        b_kr = kr.load([i_b, i_h, t0, 0]).reshape(64, BK).to(DOT)
        b_S16 = b_S.to(DOT)
        if STATES:
            h.store([i_b * H + i_h, i_c, 0, v0], b_S.to(h.dtype).reshape(1, 1, BK, BV))
        b_u = tl.dot(b_ke, b_S16, input_precision=PREC)
        b_o = tl.dot(b_qe, b_S16, input_precision=PREC)
        b_vn = solved(b_A, b_v - b_u, DOT, PREC)
        if STATES:
            vn.store([i_b, i_h, t0, v0], b_vn.to(vn.dtype).reshape(1, 1, 64, BV))
        b_vn16 = b_vn.to(DOT)
        b_S = tl.dot(tl.trans(b_kr), b_vn16, b_S * b_E[:, None], input_precision=PREC)
        b_o = tl.dot(b_P, b_vn16, b_o, input_precision=PREC)
        # Not through a descriptor, which would need a tile of shared memory.
        p_o = o + ((i_b.to(tl.int64) * T + t0 + o_c[:, None]) * H + i_h) * V + o_v[None, :]
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=(t0 + o_c[:, None] < T) & (o_v[None, :] < V))
    tl.store(hT + o_h, b_S, mask=m_h)


@triton.jit(do_not_specialize=["T", "H", "N"])
def reverse_kernel(
    qe, ke, kr, do, A, P, E, dv, dh, dhT, dh0, T, H, N,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, HAS_DHT: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """All chunks of one head and BV columns of V, last first: dV, each chunk's dS (of its outgoing state), and dh0."""
    i_b, i_h, v0, o_h, m_h = _scan(H, K, V, BK, BV, NV)
    o_k = tl.arange(0, BK)
    E += (i_b * H + i_h).to(tl.int64) * N * K
    b_dS = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_DHT:
        b_dS += tl.load(dhT + o_h, mask=m_h, other=0.0)
    for j in range(N):
        i_c = N - 1 - j
        t0 = i_c * 64
        b_E = tl.load(E + i_c * K + o_k, mask=o_k < K, other=0.0)
        b_kr = kr.load([i_b, i_h, t0, 0]).reshape(64, BK).to(DOT)
        b_P = P.load([i_b, i_h, t0, 0]).reshape(64, 64).to(DOT)
        b_do = do.load([i_b, i_h, t0, v0]).reshape(64, BV).to(DOT)
        b_A = A.load([i_b, i_h, t0, 0]).reshape(64, 64)
        b_qe = qe.load([i_b, i_h, t0, 0]).reshape(64, BK).to(DOT)
        b_ke = ke.load([i_b, i_h, t0, 0]).reshape(64, BK).to(DOT)
        dh.store([i_b * H + i_h, i_c, 0, v0], b_dS.to(dh.dtype).reshape(1, 1, BK, BV))
        b_dvn = tl.dot(b_kr, b_dS.to(DOT), input_precision=PREC)
        b_dvn = tl.dot(tl.trans(b_P), b_do, b_dvn, input_precision=PREC)
        b_dS = tl.dot(tl.trans(b_qe), b_do, b_dS * b_E[:, None], input_precision=PREC)
        b_dv = solved(tl.trans(b_A), b_dvn, DOT, PREC)
        dv.store([i_b, i_h, t0, v0], b_dv.to(dv.dtype).reshape(1, 1, 64, BV))
        b_dS = tl.dot(tl.trans(b_ke), (-b_dv).to(DOT), b_dS, input_precision=PREC)
    tl.store(dh0 + o_h, b_dS, mask=m_h)


@triton.jit
def _load(p, s, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile at p whose rows are s apart, of `rows` rows and `columns` columns at most. A scalar pointer and offsets in 32 bits:
    pointers to each row would be kept in registers all along."""
    o_r, o_c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    return tl.load(p + (o_r * s + o_c), mask=(o_r < rows) & (o_c < columns), other=0.0)


@triton.jit
def _store(p, b_x, s, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    o_r, o_c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    tl.store(p + (o_r * s + o_c), b_x.to(p.dtype.element_ty), mask=(o_r < rows) & (o_c < columns))


@triton.jit(do_not_specialize=["T", "H", "N"])
def scores_kernel(
    do, vn, dv, beta, documents, dP, dL, dbeta, scale, T, H, N, s_do,
    V: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Of one chunk of one head, the gradients of <Q, K> and <K, K> (B, H, T, 64) and of beta (B, T, H)."""
    i = tl.program_id(0).to(tl.int64)
    i_c, i_h, i_b = (i % N).to(tl.int32), ((i // N) % H).to(tl.int32), (i // (N * H)).to(tl.int32)
    t0 = i_c * 64
    o_c = tl.arange(0, 64)
    run, real, _, _, _ = _documents(documents, i_b, t0, T, HAS_DOCUMENTS)
    b_dP = tl.zeros([64, 64], dtype=tl.float32)
    b_dL = tl.zeros([64, 64], dtype=tl.float32)
    b_xv = tl.zeros([64], dtype=tl.float32)
    rows, o_v, i_bh = T - t0, ((i_b.to(tl.int64) * T + t0) * H + i_h) * V, i_b.to(tl.int64) * H + i_h
    do += (i_b.to(tl.int64) * T + t0) * s_do + i_h * V
    for i_v in tl.static_range(NV):  # unrolled: a loop of these dots is serialised by ptxas
        b_do = _load(do + i_v * BV, s_do, rows, V - i_v * BV, 64, BV).to(DOT)
        b_vn = _load(vn + o_v + i_v * BV, H * V, rows, V - i_v * BV, 64, BV).to(DOT)
        b_x = _load(dv + o_v + i_v * BV, H * V, rows, V - i_v * BV, 64, BV).to(DOT)
        b_dP = tl.dot(b_do, tl.trans(b_vn), b_dP, input_precision=PREC)
        b_dL = tl.dot(b_x, tl.trans(b_vn), b_dL, input_precision=PREC)
        b_xv += tl.sum(b_x.to(tl.float32) * b_vn.to(tl.float32), axis=1)
    below = o_c[:, None] >= o_c[None, :]
    if HAS_DOCUMENTS:
        below &= (run[:, None] == run[None, :]) & real[:, None]
    o_x = (i_bh * T + t0) * 64
    _store(dP + o_x, tl.where(below, b_dP * scale, 0.0), 64, rows, 64, 64, 64)
    below &= o_c[:, None] > o_c[None, :]
    _store(dL + o_x, tl.where(below, -b_dL, 0.0), 64, rows, 64, 64, 64)
    o_t = (i_b.to(tl.int64) * T + t0 + o_c) * H + i_h
    # Vn / beta is what the token found missing, V - K S, and dV / beta the gradient of what it wrote.
    b_beta = tl.where(real, _beta(beta, o_t, real, DOT), 1.0)
    tl.store(dbeta + o_t, b_xv / b_beta / b_beta, mask=t0 + o_c < T)


@triton.jit
def _block(p_G, size, rows, columns, K: tl.constexpr, BK: tl.constexpr):
    """2^(G - M) of rows and 2^(M - G) of columns (64, BK) that one product with M in the middle of each block of `size` tokens
    serves, for all blocks; which pairs are of one block; and the size to go on with, 0 if all pairs of a block were served."""
    o_c, o_k = tl.arange(0, 64), tl.arange(0, BK)
    o_m = (o_c & -size) + (size // 2 - 1)
    b_G = _load(p_G, K, rows, columns, 64, BK)
    b_M = tl.load(p_G + (tl.minimum(o_m, rows - 1)[:, None] * K + o_k[None, :]), mask=(o_k < columns)[None, :], other=0.0)
    b_d = tl.where((o_c < rows)[:, None], b_G - b_M, 0.0)
    # 2^60 leaves the products 2^67 either way in bf16 and fp32. A block of 2 always fits: no token decays by less than 2^-57.8.
    fits = tl.max(tl.max(tl.abs(b_d), axis=1), axis=0) <= 60.0
    most = tl.where(fits, 60.0, 0.0)
    up = tl.exp2(tl.minimum(b_d, tl.where(o_c > tl.where(fits, -1, o_m), most, -200.0)[:, None]))
    down = tl.exp2(tl.minimum(-b_d, tl.where(o_c <= tl.where(fits, 64, o_m), most, -200.0)[:, None]))
    same = (o_c & -size)[:, None] == (o_c & -size)[None, :]
    return up, down, same, tl.where(fits, 0, size // 2)


@triton.jit(do_not_specialize=["T", "H", "N"])
def inputs_kernel(
    q, k, G, do, vn, dv, h, dh, dP, dL, documents, E, dq, dk, dg, scale, T, H, N, s_q, s_k, s_do,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq, dk (of one value head) and dg of one chunk, one head and BK key channels.

    Registers are what it lacks: a tile is read again, through pointers, wherever it is used."""
    i = tl.program_id(0).to(tl.int64)
    i_k, i_c = (i % NK).to(tl.int32), ((i // NK) % N).to(tl.int32)
    i_h, i_b = ((i // (NK * N)) % H).to(tl.int32), (i // (NK * N * H)).to(tl.int32)
    t0, k0 = i_c * 64, i_k * BK
    o_c = tl.arange(0, 64)
    _, real, opened, last, _ = _documents(documents, i_b, t0, T, HAS_DOCUMENTS)
    rows, columns = T - t0, K - k0
    i_t, i_bh = i_b.to(tl.int64) * T + t0, i_b.to(tl.int64) * H + i_h
    q += i_t * s_q + i_h // R * K + k0
    k += i_t * s_k + i_h // R * K + k0
    G += (i_bh * T + t0) * K + k0
    dP += (i_bh * T + t0) * 64
    dL += (i_bh * T + t0) * 64
    do += i_t * s_do + i_h * V
    dv += (i_t * H + i_h) * V
    vn += (i_t * H + i_h) * V
    h += ((i_bh * N + i_c) * K + k0) * V
    dh += ((i_bh * N + i_c) * K + k0) * V
    E += (i_bh * N + i_c) * K + k0
    o_x = (i_t * H + i_h) * K + k0
    # dQ, through the states and then through the scores. What a pair adds to dG at i and takes from it at j, below, cancels in dg
    # for all tokens before both: with the rounded operands of the products it does to fp32's last bits.
    b_dq = tl.zeros([64, BK], dtype=tl.float32)
    for i_v in tl.static_range(NV):
        b_S = _load(h + i_v * BV, V, columns, V - i_v * BV, BK, BV).to(DOT)
        b_do = _load(do + i_v * BV, s_do, rows, V - i_v * BV, 64, BV).to(DOT)
        b_dq = tl.dot(b_do, tl.trans(b_S), b_dq, input_precision=PREC)
    e = tl.exp2(_load(G, K, rows, columns, 64, BK)) * scale
    b_dq *= tl.where(opened[:, None], e, 0.0) if HAS_DOCUMENTS else e
    b_dG = _load(q, s_q, rows, columns, 64, BK).to(tl.float32) * b_dq
    size = 64
    while size > 0:
        up, down, same, size = _block(G, size, rows, columns, K, BK)
        b_dP = tl.where(same, _load(dP, 64, rows, 64, 64, 64), 0.0)
        b_kc = (_load(k, s_k, rows, columns, 64, BK).to(tl.float32) * down).to(WIDE)
        b_t = tl.dot(b_dP, b_kc, input_precision=PREC)
        b_qr = (_load(q, s_q, rows, columns, 64, BK).to(tl.float32) * up).to(WIDE)
        b_dG += b_t * b_qr.to(tl.float32)
        b_dq += b_t * up
    _store(dq + o_x, b_dq, H * K, rows, columns, 64, BK)
    # dK through the scores and then through the states.
    b_dk = tl.zeros([64, BK], dtype=tl.float32)
    size = 64
    while size > 0:
        up, down, same, size = _block(G, size, rows, columns, K, BK)
        b_dP = tl.where(same, _load(dP, 64, rows, 64, 64, 64), 0.0)
        b_dL = tl.where(same, _load(dL, 64, rows, 64, 64, 64), 0.0)
        b_k = _load(k, s_k, rows, columns, 64, BK).to(tl.float32)
        b_qr = (_load(q, s_q, rows, columns, 64, BK).to(tl.float32) * up).to(WIDE)
        b_kr = (b_k * up).to(WIDE)
        b_t = tl.dot(tl.trans(b_dP), b_qr, input_precision=PREC)
        b_t = tl.dot(tl.trans(b_dL), b_kr, b_t, input_precision=PREC)
        b_kc = (b_k * down).to(WIDE)
        b_dG -= b_t * b_kc.to(tl.float32)
        b_dk += b_t * down
        b_t = tl.dot(b_dL, b_kc, input_precision=PREC)
        b_dG += b_t * b_kr.to(tl.float32)
        b_dk += b_t * up
    b_dp = tl.zeros([64, BK], dtype=tl.float32)
    for i_v in tl.static_range(NV):
        b_S = _load(h + i_v * BV, V, columns, V - i_v * BV, BK, BV).to(DOT)
        b_x = _load(dv + i_v * BV, H * V, rows, V - i_v * BV, 64, BV).to(DOT)
        b_dp = tl.dot(b_x, tl.trans(b_S), b_dp, input_precision=PREC)
    b_G = _load(G, K, rows, columns, 64, BK)
    e = tl.exp2(b_G)
    b_dp *= tl.where(opened[:, None], e, 0.0) if HAS_DOCUMENTS else e
    b_k = _load(k, s_k, rows, columns, 64, BK).to(tl.float32)
    b_dk -= b_dp
    b_dG -= b_k * b_dp
    b_dm = tl.zeros([64, BK], dtype=tl.float32)
    b_dE = tl.zeros([BK], dtype=tl.float32)
    for i_v in tl.static_range(NV):
        b_S = _load(h + i_v * BV, V, columns, V - i_v * BV, BK, BV).to(DOT)
        b_dS = _load(dh + i_v * BV, V, columns, V - i_v * BV, BK, BV).to(DOT)
        b_vn = _load(vn + i_v * BV, H * V, rows, V - i_v * BV, 64, BV).to(DOT)
        b_dE += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), axis=1)
        b_dm = tl.dot(b_vn, tl.trans(b_dS), b_dm, input_precision=PREC)
    o_k = tl.arange(0, BK)
    end = tl.load(G + (tl.minimum(rows, 64) - 1) * K + o_k, mask=o_k < columns, other=0.0)
    r = tl.exp2(tl.minimum(end[None, :] - b_G, 0.0))
    b_dm *= tl.where(last[:, None], r, 0.0) if HAS_DOCUMENTS else r
    _store(dk + o_x, b_dk + b_dm, H * K, rows, columns, 64, BK)
    # A token's decay reaches what it and later ones read, what earlier ones leave to the next chunk (all less what it and later
    # ones do), and the state. Where it was clamped, that is 2^-57 of a whole and rounding.
    b_dm *= b_k
    end = tl.load(E + o_k, mask=o_k < columns, other=0.0) * b_dE + tl.sum(b_dm, axis=0)
    b_h, b_l = _parts(b_dG - b_dm, WIDE)
    b_dg = _sums(tl.where(o_c[None, :] >= o_c[:, None], 1.0, 0.0), b_h, b_l, PREC) + end[None, :]
    if HAS_DOCUMENTS:
        b_dg = tl.where(real[:, None], b_dg, 0.0)
    _store(dg + o_x, b_dg, H * K, rows, columns, 64, BK)


# ----------------------------------------------------------------------------------------------------------------------
# Launches

LAUNCH = {
    (90, 2): {
        "prepare": {"BK": 64, "num_warps": 4, "num_stages": 1},
        "rescale": {"BK": 128, "num_warps": 4, "num_stages": 1},
        "forward": {"BV": 64, "num_warps": 4, "num_stages": 3},
        "keep": {"BV": 64, "num_warps": 4, "num_stages": 2},
        "reverse": {"BV": 64, "num_warps": 4, "num_stages": 2},
        "scores": {"BV": 128, "num_warps": 4, "num_stages": 1},
        "inputs": {"BV": 64, "num_warps": 4, "num_stages": 1},
    }
}
LAUNCH[100, 2] = LAUNCH[90, 2]
# Without wgmma the tiles take more registers, and 8 warps are safe: only wgmma raced among more than 4, before Triton 3.7.1.
LAUNCH[80, 2] = {
    kernel: chosen | {"num_warps": 8, "num_stages": 1} | ({"BV": 32} if "BV" in chosen else {})
    for kernel, chosen in LAUNCH[90, 2].items()
}
LAUNCH[90, 4] = LAUNCH[90, 2]  # for the interpreter: see `supports`


OPERANDS = "DOT", "PREC"


class Plan:
    """Sizes of a call (B, T, H, K, V; R value heads a key head; N chunks) and the launches of its kernels, made once for a set of
    sizes: a launch takes less time than putting its options together."""

    def __init__(self, q_shape, v_shape, table, dtype):
        self.B, self.T, self.H, self.V = v_shape
        self.K, self.R, self.N = q_shape[3], self.H // q_shape[2], triton.cdiv(self.T, C)
        self.table, self.types = table, operand_types(dtype, forward_kernel)
        self.wide = torch.float32 if dtype == torch.float32 else torch.bfloat16  # of what is scaled by 2^60
        self.options = functools.cache(self.options)

    def options(self, kernel, *names):
        """Launch options and constants of a kernel: those of `names`, and its columns of V where it has any. Not to be changed."""
        chosen = dict(self.table[kernel])
        if "BV" in chosen:
            chosen["NV"] = triton.cdiv(self.V, chosen["BV"])
        whole = triton.cdiv(self.K, BK_TILE) * BK_TILE
        BK = min(chosen.pop("BK", BK_TILE), whole)
        constants = {"R": self.R, "K": self.K, "V": self.V, "NK": triton.cdiv(self.K, BK), "BK": BK} | self.types
        if kernel in ("forward", "keep", "reverse"):  # all of a state's rows in one program
            constants["BK"] = whole
        constants["WIDE"] = tl.float32 if self.types["DOT"] == tl.float32 else tl.bfloat16
        return chosen | {n: constants[n] for n in names}


@functools.lru_cache(maxsize=1024)
def _plan(q_shape, v_shape, architecture, dtype):
    return Plan(q_shape, v_shape, LAUNCH[architecture, dtype.itemsize], dtype)


def plan(q, v):
    return _plan(q.shape, v.shape, architecture(q), q.dtype)


def _rows(x, rows, columns):
    """A descriptor of x (., ., rows, columns), as it lies in memory, in tiles of the last two dimensions."""
    return Tile(x, list(x.shape), list(x.stride()), [1, 1, rows, columns])


def _prepare(s, q, k, g, beta, documents, scale, scores):
    """The operands of the scans (B, H, T, K), E (B H, N, K), and A' and P (B, H, T, 64) or else G (B, H, T, K)."""
    operands = [torch.empty(s.B, s.H, s.T, s.K, dtype=q.dtype, device=q.device) for _ in range(3)]
    E = torch.empty(s.B * s.H, s.N, s.K, dtype=torch.float32, device=q.device)
    flags = {"HAS_DOCUMENTS": documents is not None}
    ids, strides = E if documents is None else documents, (q.stride(1), k.stride(1), g.stride(1))
    sizes = scale, s.T, s.H, s.N, *strides
    if scores:
        chosen = s.options("prepare", "R", "K", "BK", "NK", "WIDE", "PREC")
        A, P = (torch.empty(s.B, s.H, s.T, C, dtype=kind, device=q.device) for kind in (_half(q.dtype), q.dtype))
        prepare = launch(prepare_kernel, **flags, **chosen)
        prepare(s.N * s.B * s.H, q, k, g, beta, ids, *operands, E, A, P, *sizes)
        return operands, E, A, P
    G = torch.empty(s.B, s.H, s.T, s.K, dtype=torch.float32, device=q.device)
    rescale = launch(rescale_kernel, **flags, **s.options("rescale", "R", "K", "BK", "NK"))
    rescale(s.N * s.B * s.H, q, k, g, ids, *operands, E, G, *sizes)
    return operands, E, G


def _forward_pass(q, k, v, g, beta, h0, documents, scale, keep):
    """Output, final state, and for the backward A', P and each chunk's S and Vn (of no size unless `keep`)."""
    s = plan(q, v)
    operands, E, A, P = _prepare(s, _by_token(q), _by_token(k), _by_token(g), beta.contiguous(), documents, scale, True)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    hT = torch.empty(s.B, s.H, s.K, s.V, dtype=torch.float32, device=v.device)
    h = torch.empty(s.B * s.H, s.N if keep else 0, s.K, s.V, dtype=q.dtype, device=q.device)
    vn = torch.empty(s.B, s.T if keep else 0, s.H, s.V, dtype=q.dtype, device=q.device)
    scan = s.options("keep" if keep else "forward", "K", "V", "BK", *OPERANDS)
    BK, BV = scan["BK"], scan["BV"]
    v_tile = tile(ready(v), [C, BV])
    launch(forward_kernel, HAS_H0=h0 is not None, STATES=keep, **scan)(
        scan["NV"] * s.B * s.H, *(_rows(x, C, BK) for x in operands), v_tile, _rows(A, C, C), _rows(P, C, C), E, o,
        _rows(h, BK, BV) if keep else v_tile, tile(vn, [C, BV]) if keep else v_tile, hT if h0 is None else h0, hT, s.T, s.H, s.N,
    )  # fmt: skip
    return o, hT, A, P, h, vn


def _backward_pass(q, k, v, g, beta, documents, A, P, h, vn, do, dhT, scale):
    """dq, dk, dv, dg, dbeta, dh0."""
    s = plan(q, v)
    q, k, g, beta, do = _by_token(q), _by_token(k), _by_token(g), beta.contiguous(), _by_token(do)
    operands, E, G = _prepare(s, q, k, g, beta, documents, scale, False)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    dh = torch.empty(s.B * s.H, s.N, s.K, s.V, dtype=q.dtype, device=q.device)
    dh0 = torch.empty(s.B, s.H, s.K, s.V, dtype=torch.float32, device=q.device)
    scan = s.options("reverse", "K", "V", "BK", *OPERANDS)
    BK, BV = scan["BK"], scan["BV"]
    launch(reverse_kernel, HAS_DHT=dhT is not None, **scan)(
        scan["NV"] * s.B * s.H, *(_rows(x, C, BK) for x in operands), tile(do, [C, BV]), _rows(A, C, C), _rows(P, C, C), E,
        tile(dv, [C, BV]), _rows(dh, BK, BV), dh0 if dhT is None else dhT.contiguous(), dh0, s.T, s.H, s.N,
    )  # fmt: skip
    del operands

    dP, dL = torch.empty(2, s.B, s.H, s.T, C, dtype=s.wide, device=q.device)
    dbeta = torch.empty(s.B, s.T, s.H, dtype=torch.float32, device=q.device)
    ids, flags = E if documents is None else documents, {"HAS_DOCUMENTS": documents is not None}
    scores = launch(scores_kernel, **flags, **s.options("scores", "V", *OPERANDS))
    scores(s.N * s.B * s.H, do, vn, dv, beta, ids, dP, dL, dbeta, scale, s.T, s.H, s.N, do.stride(1))
    kind = q.dtype if s.R == 1 else torch.float32
    dq, dk = (torch.empty(s.B, s.T, s.H, s.K, dtype=kind, device=q.device) for _ in range(2))
    dg = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    chosen = s.options("inputs", "R", "K", "V", "BK", "NK", "WIDE", *OPERANDS)
    launch(inputs_kernel, **flags, **chosen)(
        chosen["NK"] * s.N * s.B * s.H, q, k, G, do, vn, dv, h, dh, dP, dL, ids, E, dq, dk, dg, scale, s.T, s.H, s.N, q.stride(1),
        k.stride(1), do.stride(1),
    )  # fmt: skip
    if s.R > 1:
        dq, dk = (x.unflatten(2, (-1, s.R)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta, dh0


@torch.library.custom_op("hybrid::channel_delta_forward", mutates_args=())
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, h0: torch.Tensor | None,
    documents: torch.Tensor | None, scale: float, keep: bool,
) -> list[torch.Tensor]:  # fmt: skip
    return list(_forward_pass(q, k, v, g, beta, h0, documents, scale, keep))


@_forward.register_fake
def _(q, k, v, g, beta, h0, documents, scale, keep):
    (B, T, H, V), K = v.shape, q.shape[3]
    return [
        v.new_empty(v.shape),
        v.new_empty(B, H, K, V, dtype=torch.float32),
        q.new_empty(B, H, T, C, dtype=_half(q.dtype)),
        q.new_empty(B, H, T, C),
        q.new_empty(B * H, -(-T // C) if keep else 0, K, V),
        q.new_empty(B, T if keep else 0, H, V),
    ]


@torch.library.custom_op("hybrid::channel_delta_backward", mutates_args=())
def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, documents: torch.Tensor | None,
    A: torch.Tensor, P: torch.Tensor, h: torch.Tensor, vn: torch.Tensor, do: torch.Tensor, dhT: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _backward_pass(q, k, v, g, beta, documents, A, P, h, vn, do, dhT, scale)


@_backward.register_fake
def _(q, k, v, g, beta, documents, A, P, h, vn, do, dhT, scale):
    state = v.new_empty(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1], dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in (q, k, v, g)), v.new_empty(v.shape[:3], dtype=torch.float32), state


def _save(ctx, inputs, output):
    q, k, v, g, beta, _, documents, scale, _ = inputs
    ctx.save_for_backward(q, k, v, g, beta, documents, *output[2:])
    ctx.scale = scale
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, dhT, backward=_backward):
    v, beta = ctx.saved_tensors[2], ctx.saved_tensors[4]
    do = torch.zeros_like(v) if do is None else do
    dq, dk, dv, dg, dbeta, dh0 = backward(*ctx.saved_tensors, do, dhT, ctx.scale)
    return dq, dk, dv, dg, dbeta.to(beta.dtype), dh0 if ctx.needs_input_grad[5] else None, None, None, None


_forward.register_autograd(lambda ctx, grads: _differentiate(ctx, *grads[:2]), setup_context=_save)
_direct = direct(_forward_pass, _save, lambda ctx, do, dhT: _differentiate(ctx, do, dhT, _backward_pass), outputs=2)


@shared_by_layers
def _numbered(segment_ids):
    """What the kernels read of segment ids: 2 x number of the document in its row + is there a token, int32."""
    run, valid = segment_runs(segment_ids)
    return (2 * run + valid).to(torch.int32)


def supports(q, k, v, g=None, beta=None, **_):
    """None if these inputs can run here, else the reason why not."""
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{q.dtype} inputs"
    if q.dtype == torch.float32 and q.is_cuda:
        return "fp32 inputs, whose exact products take no tensor cores (11 KB of spills a thread in the scans)"
    if q.shape[-1] > 128:
        return f"K={q.shape[-1]}: at most 128 key channels a head"
    if g is None or g.ndim != 4:
        return "no decay per key channel (delta_rule takes one per head)"
    return None


def channel_delta_rule(q, k, v, g=None, beta=None, *, scale=None, initial_state=None, segment_ids=None):
    """`reference.channel_delta_rule` for g `(B, T, H, K)`; q, k and v in bf16 or fp16 (interpreted: fp32), states in fp32.

    Log decays below -40 count as -40, as in eager.py; k and v are rounded to the type of q. With 16-bit inputs a beta nearer to 0
    than 2^-14 counts as 2^-14, so that it has a gradient; padding still writes nothing.
    """
    beta = torch.ones(v.shape[:3], dtype=torch.float32, device=v.device) if beta is None else beta
    documents = None if segment_ids is None else _numbered(segment_ids)
    h0 = None if initial_state is None else initial_state.to(torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    k, kind, width = k.to(q.dtype), v.dtype, v.shape[-1]
    K, V = -q.shape[-1] % 8, -width % 8  # descriptors read whole 16 bytes
    if K or V:
        pad = torch.nn.functional.pad
        q, k, g, v, h0 = pad(q, (0, K)), pad(k, (0, K)), pad(g, (0, K)), pad(v, (0, V)), h0 if h0 is None else pad(h0, (0, V, 0, K))
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, g, beta, h0))
    inputs = q, k, v.to(q.dtype), g, beta, None if h0 is None else h0.contiguous(), documents, scale, keep
    o, hT = _forward(*inputs)[:2] if traced(q, k, v, g, beta, h0) else _direct(*inputs)
    if K or V:
        o, hT = o[..., :width], hT[..., : hT.shape[2] - K, :width]
    return o.to(kind), hT
