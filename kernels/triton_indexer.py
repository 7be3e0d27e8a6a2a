"""The training loss of the sparse-attention indexer in Triton: KL of the index scores' softmax from attention's distribution.

For a query t and the keys s that it sees (the dense stage) or has selected:

    p_ts = 1/H sum_h exp(s_tsh - lse_th)
    KL_t = sum_s p_ts (ln p_ts - I_ts) + ln sum_s exp I_ts
    dI_ts = dKL_t (softmax(I_t)_s - p_ts)

    lse        (triton_sparse.attend)  of each head's attention, without reading v
    divergence (16 queries)            KL and the index scores' own lse, from tiles of p and I; in the backward pass dI instead
    index_dq   (16 queries, 4 heads)   gradients of the indexer's queries and weights
    index_dk   (16 queries)            those of the keys from these queries alone, then added as in triton_sparse

Neither p nor I is ever stored, and dI for one strip of lists at a time, so that memory does not grow faster than the lists do.
DeepSeek-V3.2, 2512.02556, section 2.1.
"""

import torch
import triton
import triton.language as tl

from . import triton_selection as selection
from . import triton_sparse as sparse
from .launch import direct, options, traced
from .triton_selection import QUERIES, padded
from .triton_sparse import selected_keys

HEADS = 4  # of the indexer, side by side with 16 queries: 64 rows
STRIP = 2**29  # bytes of dI and of the keys' partial gradients at a time


@triton.jit
def _index_rows(q, w, o_t, o_j, T, J, D: tl.constexpr, BD: tl.constexpr, DOT: tl.constexpr):
    """Queries `(rows, BD)` and weights `(rows,)` of index heads o_j at tokens o_t of one batch element."""
    o_d, m_r = tl.arange(0, BD), (o_t < T) & (o_j < J)
    o_row = o_t.to(tl.int64) * J + o_j
    b_q = tl.load(q + o_row[:, None] * D + o_d[None, :], mask=m_r[:, None] & (o_d < D)[None, :], other=0.0).to(DOT)
    return b_q, tl.load(w + o_row, mask=m_r, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["i_0", "most", "T", "S", "NT"])
def divergence_kernel(
    q, k, lse, index_q, index_k, index_w, index, bits, count, lows, kl, lse_index, d_kl, d_scores, scale, index_scale, i_0, most,
    T, S, H, J, NT, CAP,
    Q: tl.constexpr, G: tl.constexpr, HB: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, JB: tl.constexpr,
    NJ: tl.constexpr, DI: tl.constexpr, BDI: tl.constexpr, N: tl.constexpr, KEYS: tl.constexpr, GRAD: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """kl and lse_index `(B, T)` of list i_0 + i, or (GRAD) dI `(lists, Q, CAP)` of its entries: `most` keys if there is no list."""
    i_l = tl.program_id(0).to(tl.int64)
    i_tile = i_0 + i_l
    i_b, HK = i_tile // NT, H // G
    o_q, o_n, o_d, o_i = tl.arange(0, Q), tl.arange(0, N), tl.arange(0, BD), tl.arange(0, BDI)
    o_t, t0 = (i_tile % NT).to(tl.int32) * Q + o_q, (i_tile % NT).to(tl.int32) * Q
    o_r, o_rj = tl.arange(0, Q * HB), tl.arange(0, Q * JB)
    if KEYS == "dense":
        b_low, n = tl.load(lows + i_b * T + o_t, mask=o_t < T, other=T), tl.minimum(t0 + Q, T)
        if GRAD:
            n = most
    else:
        b_low, n = o_t, tl.load(count + i_tile)
    index, bits = index + i_tile * CAP, bits + i_tile * CAP
    q, lse, k = q + i_b * T * H * D, lse + i_b * T * H, k + i_b * S * HK * D
    index_q, index_w, index_k = index_q + i_b * T * J * DI, index_w + i_b * T * J, index_k + i_b * S * DI
    b_m, b_l = tl.full([Q], float("-inf"), dtype=tl.float32), tl.zeros([Q], dtype=tl.float32)
    b_kl = tl.zeros([Q], dtype=tl.float32)
    if GRAD:
        b_lse_index = tl.load(lse_index + i_b * T + o_t, mask=o_t < T, other=0.0)
        b_d = tl.load(d_kl + i_b * T + o_t, mask=o_t < T, other=0.0)
    for u in range(0, n, N):
        o_u = u + o_n
        b_s, read = selected_keys(index, bits, o_u, n, o_q, o_t, b_low, KEYS)
        m_u, o_s = (o_u < n)[:, None], b_s[:, None].to(tl.int64)
        b_p = tl.zeros([Q, N], dtype=tl.float32)
        for i_hk in range(HK):
            b_k = tl.load(k + (o_s * HK + i_hk) * D + o_d[None, :], mask=m_u & (o_d < D)[None, :], other=0.0).to(DOT)
            for i_g in range(NH):
                o_g, o_tr = i_g * HB + o_r % HB, t0 + o_r // HB
                m_r, o_row = (o_tr < T) & (o_g < G), o_tr * H + i_hk * G + o_g
                b_q = tl.load(q + o_row[:, None].to(tl.int64) * D + o_d[None, :], mask=m_r[:, None] & (o_d < D)[None, :], other=0.0)
                b_lse = tl.load(lse + o_row, mask=m_r, other=float("inf"))  # of a head that is not there: p = 0
                b_x = tl.exp2(tl.dot(b_q.to(DOT), tl.trans(b_k), input_precision=PREC) * scale - b_lse[:, None])
                b_p += tl.sum(tl.reshape(b_x, [Q, HB, N]), axis=1)
        b_p = tl.where(read, b_p / H, 0.0)
        b_ki = tl.load(index_k + o_s * DI + o_i[None, :], mask=m_u & (o_i < DI)[None, :], other=0.0).to(DOT)
        b_I = tl.zeros([Q, N], dtype=tl.float32)
        for i_j in range(NJ):
            b_q, b_w = _index_rows(index_q, index_w, t0 + o_rj // JB, i_j * JB + o_rj % JB, T, J, DI, BDI, DOT)
            b_z = tl.maximum(tl.dot(b_q, tl.trans(b_ki), input_precision=PREC), 0.0) * (b_w * index_scale)[:, None]
            b_I += tl.sum(tl.reshape(b_z, [Q, JB, N]), axis=1)
        if GRAD:
            b_dI = tl.where(read, tl.exp(tl.where(read, b_I - b_lse_index[:, None], 0.0)) - b_p, 0.0) * b_d[:, None]
            tl.store(d_scores + (i_l * Q + o_q[:, None]) * CAP + o_u[None, :], b_dI, mask=(o_u < n)[None, :])
        else:
            b_kl += tl.sum(tl.where(b_p > 0, b_p * (tl.log(tl.where(b_p > 0, b_p, 1.0)) - b_I), 0.0), axis=1)
            b_I = tl.where(read, b_I, float("-inf"))
            m_new = tl.maximum(b_m, tl.max(b_I, axis=1))
            shift = tl.where(m_new > float("-inf"), m_new, 0.0)
            b_l = b_l * tl.exp(b_m - shift) + tl.sum(tl.exp(b_I - shift[:, None]), axis=1)
            b_m = m_new
    if not GRAD:
        b_lse_index = tl.where(b_l > 0, b_m + tl.log(tl.where(b_l > 0, b_l, 1.0)), 0.0)
        tl.store(lse_index + i_b * T + o_t, b_lse_index, mask=o_t < T)
        tl.store(kl + i_b * T + o_t, b_kl + b_lse_index, mask=o_t < T)


@triton.jit(do_not_specialize=["i_0", "T", "S", "NT"])
def index_dq_kernel(
    index_q, index_k, index_w, index, count, d_scores, dq, dw, index_scale, i_0, T, S, J, NT, CAP,
    Q: tl.constexpr, JB: tl.constexpr, NJ: tl.constexpr, DI: tl.constexpr, BDI: tl.constexpr, N: tl.constexpr, KEYS: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq_tj = sum_s dz_tjs k_s and dw_tj = sum_s dI_ts relu(z_tjs), with dz = dI w where z > 0."""
    i = tl.program_id(0).to(tl.int64)
    i_l, i_j = i // NJ, (i % NJ).to(tl.int32)
    i_tile = i_0 + i_l
    i_b, t0 = i_tile // NT, (i_tile % NT).to(tl.int32) * Q
    o_n, o_i, o_r = tl.arange(0, N), tl.arange(0, BDI), tl.arange(0, Q * JB)
    o_t, o_j = t0 + o_r // JB, i_j * JB + o_r % JB
    b_q, b_w = _index_rows(index_q + i_b * T * J * DI, index_w + i_b * T * J, o_t, o_j, T, J, DI, BDI, DOT)
    n = tl.minimum(t0 + Q, T)
    if KEYS == "bits":
        n = tl.load(count + i_tile)
    b_dq, b_dw = tl.zeros([Q * JB, BDI], dtype=tl.float32), tl.zeros([Q * JB], dtype=tl.float32)
    for u in range(0, n, N):
        o_u = u + o_n
        b_s = o_u
        if KEYS == "bits":
            b_s = tl.load(index + i_tile * CAP + o_u, mask=o_u < n, other=0)
        p_k = index_k + (i_b * S + b_s[:, None]) * DI + o_i[None, :]
        b_k = tl.load(p_k, mask=(o_u < n)[:, None] & (o_i < DI)[None, :], other=0.0).to(DOT)
        p_d = d_scores + (i_l * Q + (o_r // JB)[:, None]) * CAP + o_u[None, :]
        b_dI = tl.load(p_d, mask=(o_u < n)[None, :], other=0.0)
        b_z = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
        b_dw += tl.sum(b_dI * tl.maximum(b_z, 0.0), axis=1)
        b_dz = tl.where(b_z > 0, b_dI * b_w[:, None], 0.0)
        b_dq = tl.dot(b_dz.to(DOT), b_k, b_dq, input_precision=PREC)
    o_row, m_r = (i_b * T + o_t) * J + o_j, (o_t < T) & (o_j < J)
    m_q = m_r[:, None] & (o_i < DI)[None, :]
    tl.store(dq + o_row[:, None] * DI + o_i[None, :], (b_dq * index_scale).to(dq.dtype.element_ty), mask=m_q)
    tl.store(dw + o_row, (b_dw * index_scale).to(dw.dtype.element_ty), mask=m_r)


@triton.jit(do_not_specialize=["i_0", "most", "T", "S", "NT", "NC"])
def index_dk_kernel(
    index_q, index_k, index_w, index, count, d_scores, dk, index_scale, i_0, most, T, S, J, NT, NC, CAP,
    Q: tl.constexpr, JB: tl.constexpr, NJ: tl.constexpr, DI: tl.constexpr, BDI: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk_s = sum_tj dz_tjs q_tj over the 16 queries of a list, `(lists, CAP, DI)`; z is formed transposed, from loaded operands."""
    i = tl.program_id(0).to(tl.int64)
    i_l, i_c = i // NC, (i % NC).to(tl.int32)
    i_tile = i_0 + i_l
    i_b, t0, n = i_tile // NT, (i_tile % NT).to(tl.int32) * Q, most
    if KEYS == "bits":
        n = tl.load(count + i_tile)
    o_n, o_i, o_r = tl.arange(0, N), tl.arange(0, BDI), tl.arange(0, Q * JB)
    for u in range(i_c * CHUNK, tl.minimum(n, i_c * CHUNK + CHUNK), N):
        o_u = u + o_n
        b_s = o_u
        if KEYS == "bits":
            b_s = tl.load(index + i_tile * CAP + o_u, mask=o_u < n, other=0)
        m_k = (o_u < n)[:, None] & (o_i < DI)[None, :]
        b_k = tl.load(index_k + (i_b * S + b_s[:, None]) * DI + o_i[None, :], mask=m_k, other=0.0).to(DOT)
        b_dk = tl.zeros([N, BDI], dtype=tl.float32)
        for i_j in tl.static_range(NJ):
            o_t, o_j = t0 + o_r // JB, i_j * JB + o_r % JB
            b_q, b_w = _index_rows(index_q + i_b * T * J * DI, index_w + i_b * T * J, o_t, o_j, T, J, DI, BDI, DOT)
            p_d = d_scores + (i_l * Q + (o_r // JB)[None, :]) * CAP + o_u[:, None]
            b_dI = tl.load(p_d, mask=(o_u < n)[:, None], other=0.0)
            b_zT = tl.dot(b_k, tl.trans(b_q), input_precision=PREC)
            b_dzT = tl.where(b_zT > 0, b_dI * b_w[None, :], 0.0)
            b_dk = tl.dot(b_dzT.to(DOT), b_q, b_dk, input_precision=PREC)
        tl.store(dk + (i_l * CAP + o_u[:, None]) * DI + o_i[None, :], b_dk * index_scale, mask=m_k)


# ----------------------------------------------------------------------------------------------------------------------
# Launches

_HOPPER = {
    "divergence": {"num_warps": 4, "num_stages": 2, "N": 64},
    "index_dq": {"num_warps": 4, "num_stages": 2, "N": 64},
    "index_dk": {"num_warps": 4, "num_stages": 1, "N": 64, "CHUNK": 512},
}
_WIDE = {  # operands of 4 bytes
    "divergence": {"num_warps": 8, "num_stages": 1, "N": 16},
    "index_dq": {"num_warps": 8, "num_stages": 1, "N": 16},
    "index_dk": {"num_warps": 8, "num_stages": 1, "N": 16, "CHUNK": 512},
}
LAUNCH = {(a, b): table for a in (80, 90, 100) for b, table in ((2, _HOPPER), (4, _WIDE))}


def _inputs(q, k, index_q, index_k, index_w, index, bits, count, lows):
    """What the three kernels take: attention's tensors, the indexer's, the lists; then KEYS, CAP and constants of the indexer."""
    lists, keys, CAP = (index, bits, count), "bits", triton.cdiv(q.shape[1], QUERIES) * QUERIES
    if index is None:
        lists, keys = (lows,) * 3, "dense"
    else:
        CAP = index.shape[2]
    J, DI = index_q.shape[2:]
    constants = {"Q": QUERIES, "JB": HEADS, "NJ": triton.cdiv(J, HEADS), "DI": DI, "BDI": padded(DI), "KEYS": keys}
    constants |= selection.operands(q, divergence_kernel)
    return (q.contiguous(), k.contiguous()), tuple(x.contiguous() for x in (index_q, index_k, index_w)), lists, CAP, constants


def _diverge(attention, lse, indexer, lists, lows, outputs, scale, first, most, n, CAP, constants):
    """Launch divergence_kernel for lists first .. first + n: kl and lse_index, or (most > 0) dI."""
    (T, S, H), NH, _, shapes = sparse.attention_shapes(*attention, attention[1])
    shapes = {name: x for name, x in shapes.items() if name not in ("V", "BV")}
    J, DI = indexer[0].shape[2:]
    divergence_kernel[(n,)](
        *attention, lse, *indexer, *lists, lows, *outputs, scale * sparse.LOG2E, DI**-0.5, first, most, T, S, H, J,
        triton.cdiv(T, QUERIES), CAP, NH=NH, GRAD=most > 0, **(shapes | constants), **options(LAUNCH, "divergence", attention[0]),
    )  # fmt: skip


def _forward_pass(index_q, index_k, index_w, q, k, index, bits, count, lows, scale):
    """kl `(B, T)`, attention's lse `(B, T, H)`, the index scores' lse `(B, T)`."""
    attention, indexer, lists, CAP, constants = _inputs(q, k, index_q, index_k, index_w, index, bits, count, lows)
    B, T = q.shape[:2]
    lse = sparse.attend(*attention, attention[1], index, bits, count, lows, scale, constants["KEYS"], out=False)[1]
    kl, lse_index = (torch.empty(B, T, dtype=torch.float32, device=q.device) for _ in range(2))
    outputs = kl, lse_index, kl, kl
    _diverge(attention, lse, indexer, lists, lows, outputs, scale, 0, 0, B * triton.cdiv(T, QUERIES), CAP, constants)
    return kl, lse, lse_index


@torch.library.custom_op("hybrid::indexer_kl_forward", mutates_args=())
def _forward(
    index_q: torch.Tensor, index_k: torch.Tensor, index_w: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    index: torch.Tensor | None, bits: torch.Tensor | None, count: torch.Tensor | None, lows: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _forward_pass(index_q, index_k, index_w, q, k, index, bits, count, lows, scale)


@_forward.register_fake
def _(index_q, index_k, index_w, q, k, index, bits, count, lows, scale):
    return tuple(q.new_empty(q.shape[:n], dtype=torch.float32) for n in (2, 3, 2))


def _backward_pass(index_q, index_k, index_w, q, k, index, bits, count, lows, lse, lse_index, d_kl, scale):
    attention, indexer, lists, CAP, constants = _inputs(q, k, index_q, index_k, index_w, index, bits, count, lows)
    (B, T, J, DI), NT, NJ = index_q.shape, triton.cdiv(q.shape[1], QUERIES), constants["NJ"]
    dq, dw = (torch.empty_like(x) for x in (indexer[0], indexer[2]))
    dk = torch.zeros(B * T, DI, dtype=torch.float32, device=q.device)
    n = min(NT, max(1, STRIP // (4 * CAP * (QUERIES + DI))))  # lists in a strip
    d_scores = torch.empty(n, QUERIES, CAP, dtype=torch.float32, device=q.device)
    part = torch.empty(n, CAP, DI, dtype=torch.float32, device=q.device)
    runtime, d_kl, by_dq, by_dk = (T, T, J, NT), d_kl.contiguous(), options(LAUNCH, "index_dq", q), options(LAUNCH, "index_dk", q)
    NC = triton.cdiv(CAP, by_dk["CHUNK"])
    for b in range(B):
        for start in range(0, NT, n):
            first, m = b * NT + start, min(n, NT - start)
            most = min((start + m) * QUERIES, T)  # keys that the strip's queries see
            outputs = d_kl, lse_index, d_kl, d_scores
            _diverge(attention, lse, indexer, lists, lows, outputs, scale, first, most, m, CAP, constants)
            index_dq_kernel[(m * NJ,)](
                *indexer, lists[0], lists[2], d_scores, dq, dw, DI**-0.5, first, *runtime, CAP, **constants, **by_dq
            )
            index_dk_kernel[(m * NC,)](
                *indexer, lists[0], lists[2], d_scores, part, DI**-0.5, first, most, *runtime, NC, CAP, **constants, **by_dk
            )
            if index is None:
                dk[b * T : b * T + most] += part[:m, :most].sum(0)
            else:
                sparse.add_rows(part.view(-1, DI), *sparse.inverted(index, count, first, m, B, T), dk)
    return dq, dk.view(B, T, DI).to(index_k.dtype), dw


@torch.library.custom_op("hybrid::indexer_kl_backward", mutates_args=())
def _backward(
    index_q: torch.Tensor, index_k: torch.Tensor, index_w: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    index: torch.Tensor | None, bits: torch.Tensor | None, count: torch.Tensor | None, lows: torch.Tensor, lse: torch.Tensor,
    lse_index: torch.Tensor, d_kl: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _backward_pass(index_q, index_k, index_w, q, k, index, bits, count, lows, lse, lse_index, d_kl, scale)


@_backward.register_fake
def _(index_q, index_k, index_w, q, k, index, bits, count, lows, lse, lse_index, d_kl, scale):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (index_q, index_k, index_w))


def _save(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_kl, *_, backward=_backward):
    if d_kl is None:
        return (None,) * 10
    return *backward(*ctx.saved_tensors, d_kl, ctx.scale), *(None,) * 7


_forward.register_autograd(_differentiate, setup_context=_save)
_direct = direct(_forward_pass, _save, lambda ctx, d_kl: _differentiate(ctx, d_kl, backward=_backward_pass))


def supports_indexer_kl(q, k, index_q, *_, **__):
    return selection.unsupported(q) or selection.unsupported(index_q, index_q)


def indexer_kl(q, k, index_q, index_k, index_w, *, top_k=None, local=0, scale=None, segment_ids=None):
    """`reference.indexer_kl` without any matrix of all queries and keys."""
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    lists = (None,) * 3 if top_k is None else selection.lists_for(index_q, index_k, index_w, top_k, local, None, segment_ids)
    if segment_ids is None:
        lows = torch.zeros(q.shape[:2], dtype=torch.int32, device=q.device)
    else:
        lows = selection.first_seen(segment_ids, 0)
    q, k = q.detach(), k.detach().to(q.dtype)
    inputs = index_q.to(q.dtype), index_k.to(q.dtype), index_w, q, k, *lists, lows, scale
    return _forward(*inputs)[0] if traced(*inputs[:5]) else _direct(*inputs)
