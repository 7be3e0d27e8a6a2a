"""The operators of `reference.py` in plain PyTorch, chunked: differentiable by autograd, fast enough for a laptop.

No loop over tokens in the sequence operators (the recurrent ones loop over chunks) and no T x T matrix for the recurrent family.
Everything that is accumulated or exponentiated runs in fp32 (fp64 for fp64 inputs), whatever autocast says around it.
"""

import functools

import torch
import torch.nn.functional as F

from . import reference
from .reference import cache_positions, cache_slots, gated_rms_norm, key_distances, l2_norm, rms_norm, segment_runs

# Log decays below this count as this: e^-40 is under fp64's epsilon, and running sums of hundreds per token would cost the other
# tokens of a chunk their precision (with gates down to -2000 in fp32: 20 to 100 times the token loop's error, now 3 to 10 times).
FORGOTTEN = -40.0

PAIRS = 2**26  # scores of attention to a cache made at once: a chunk of 8192 tokens on a cache of 131,072 has 10^9 a head

# Elementwise definitions serve as they are; listed here because the dispatch looks them up in this module.
__all__ = ["gated_rms_norm", "l2_norm", "rms_norm"]


def _full_precision(op):
    """Run `op` outside autocast: inside it every matmul would be cast to bf16, the states and the solve included."""

    @functools.wraps(op)
    def call(q, *args, **kwargs):
        with torch.autocast(q.device.type, enabled=False):
            return op(q, *args, **kwargs)

    return call


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _chunks(x, size):
    """(B, T, H, ...) -> (B, H, N, C, ...), zero-padded at the end to whole chunks."""
    T = x.shape[1]
    pad = -T % size
    if pad:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, pad))
    return x.transpose(1, 2).unflatten(2, (-1, size)).contiguous()  # every product would copy a strided view anew


def _chunk_masks(segment_ids, size):
    """Which pairs and tokens of a chunk meet, for a chunked recurrence over packed documents.

    Returns, with the head axis in front: `same (B, 1, N, C, C)` (i and j in one document), `open (B, 1, N, C)` (i still in the
    document of the incoming state), `last (B, 1, N, C)` (i in the document of the outgoing state), `keep (B, 1, N)` (the incoming
    document is still the outgoing one).
    """
    run, _ = segment_runs(segment_ids)
    run = F.pad(run[:, None], (0, -run.shape[1] % size), mode="replicate")  # (B, 1, N*C)
    run = run.unflatten(2, (-1, size))
    incoming = F.pad(run[:, :, :-1, -1], (1, 0))[..., None]
    outgoing = run[..., -1:]
    return run[..., :, None] == run[..., None, :], run == incoming, run == outgoing, (incoming == outgoing)[..., 0]


def _document_cumsum(g, same):
    """(B, H, N, C, ...) running sums inside the chunk, from the document's first token: an earlier one costs no precision."""
    G = g.cumsum(3)
    if same is None:
        return G
    C = g.shape[3]
    first = torch.where(F.pad(~same.diagonal(-1, -2, -1), (1, 0)), torch.arange(C, device=g.device), 0).cummax(-1).values
    first = first.reshape(*first.shape, *[1] * (g.ndim - 4)).expand_as(G)
    before = torch.cat([torch.zeros_like(G[:, :, :, :1]), G[:, :, :, :-1]], dim=3)
    return G - before.gather(3, first)


def _channel_scores(q, k, G, pair, block=16):
    """sum_c q_ic k_jc e^{G_ic - G_jc} for the pairs (i, j) of a chunk, decays per channel: (B, H, N, C, C), 0 elsewhere.

    Only exponents <= 0 are taken: rows of 16 are scaled from their block's first row, the columns before them up to it, and the
    16 x 16 blocks on the diagonal are summed channel by channel.
    """
    rows = []
    for i in range(0, q.shape[3], block):
        here, start = slice(i, i + block), G[..., i : i + 1, :]
        within = (G[..., here, None, :] - G[..., None, here, :]).clamp(max=0.0).exp()  # (B, H, N, 16, 16, K)
        row = [torch.einsum("...ic,...jc,...ijc->...ij", q[..., here, :], k[..., here, :], within)]
        if i:
            left, right = (G[..., here, :] - start).clamp(max=0.0).exp(), (start - G[..., :i, :]).clamp(max=0.0).exp()
            row.insert(0, (q[..., here, :] * left) @ (k[..., :i, :] * right).transpose(-1, -2))
        rows.append(F.pad(torch.cat(row, dim=-1), (0, q.shape[3] - i - row[-1].shape[-1])))
    return torch.cat(rows, dim=-2) * pair


def _recurrence(q, k, v, g, beta, scale, initial_state, segment_ids, C, delta):
    """The chunked form of `reference._recurrence`; the formulas are in the docstring of `delta_rule`."""
    T, H, K = *v.shape[1:3], q.shape[-1]
    dtype, scale = v.dtype, K**-0.5 if scale is None else scale
    if k.shape[2] != H:
        q, k = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (q, k))
    q, k, v = _wide(q) * scale, _wide(k), _wide(v)
    real = same = None
    if g is not None:
        g = (g.expand(v.shape[:3]) if g.ndim == 1 else g).to(v.dtype).clamp(min=FORGOTTEN)
    if segment_ids is not None:  # padding: no write (k = 0), no decay (g = 0), no output
        real = segment_ids > 0
        k = k * real[..., None, None]
        g = None if g is None else g * real.reshape(*real.shape, *[1] * (g.ndim - 2))
        same, opened, last, keep = _chunk_masks(segment_ids, C)
    q, k, v = (_chunks(x, C) for x in (q, k, v))  # (B, H, N, C, .)
    pair = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    pair = pair if same is None else pair & same

    # Decays: e from the chunk's start to each token, r from each token to the chunk's end, e_end over the whole chunk.
    e = r = e_end = None
    if g is not None:
        G = _document_cumsum(_chunks(g, C), same)
        G = G[..., None] if g.ndim == 3 else G  # (B, H, N, C, 1 or K)
        e, r, e_end = G.exp(), (G[..., -1:, :] - G).clamp(max=0.0).exp(), G[..., -1, :].exp()
    if same is not None:
        opened, last, keep = opened[..., None].to(v.dtype), last[..., None].to(v.dtype), keep[..., None].to(v.dtype)
        e, r = (opened, last) if e is None else (e * opened, r * last)
        e_end = keep.expand(*v.shape[:3], 1) if e_end is None else e_end * keep
    ke, qe, kr = (k, q, k) if e is None else (k * e, q * e, k * r)

    # Scores between the tokens of a chunk, decayed.
    if g is None or g.ndim == 3:
        qk, kk = _Scores.apply(q, k, None if g is None else G, pair, delta)
    else:
        qk, kk = _channel_scores(q, k, G, pair), _channel_scores(k, k, G, pair) if delta else None

    S = v.new_zeros(*v.shape[:2], K, v.shape[-1]) if initial_state is None else initial_state.to(v.dtype)
    if delta:
        beta = torch.ones_like(v[..., :1]) if beta is None else _chunks(beta.to(v.dtype)[..., None], C)
        out, S = _DeltaScan.apply(qk, beta * kk, ke, qe, kr, v, beta, e_end, S)
    else:
        decays = [None] * v.shape[2] if e_end is None else e_end[..., None].unbind(2)
        states = []  # what each chunk writes does not depend on the state: only the sum is sequential
        for decay, add in zip(decays, (kr.transpose(-1, -2) @ v).unbind(2), strict=True):
            states.append(S)
            S = add + (S if decay is None else S * decay)
        out = qe @ torch.stack(states, 2) + qk @ v
    out = out.flatten(2, 3)[:, :, :T].transpose(1, 2)
    return (out if real is None else out * real[..., None, None]).to(dtype), S


class _Scores(torch.autograd.Function):
    """`Q K^T * Gamma` and, if asked for, `K K^T * Gamma`; `Gamma_ij = e^{G_i - G_j}` for the pairs (i, j) of a chunk, else 0.

    q, k `(B, H, N, C, K)`, G `(B, H, N, C, 1)` or None (no decay). A backward of its own, since autograd keeps and fills three more
    C x C tensors: dG = rowsum(D) - colsum(D) with D = dQK * QK + dKK * KK.
    """

    @staticmethod
    def forward(ctx, q, k, G, pair, both):
        gamma = pair.to(q.dtype) if G is None else (G - G.mT).masked_fill_(~pair, -torch.inf).exp_()  # masked first: no inf * 0
        qk, kk = (q @ k.mT).mul_(gamma), (k @ k.mT).mul_(gamma) if both else None
        ctx.save_for_backward(q, k, gamma, *(() if G is None else (qk, kk)))
        return qk, kk

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dqk, dkk):
        q, k, gamma, *scores = ctx.saved_tensors
        dscore = dqk * gamma
        dq, dk = dscore @ k, dscore.mT @ q
        if dkk is not None:
            torch.mul(dkk, gamma, out=dscore)
            dk += dscore @ k
            dk += dscore.mT @ k
        if not scores:
            return dq, dk, None, None, None
        D = torch.mul(dqk, scores[0], out=dscore)
        D = D if dkk is None else D.addcmul_(dkk, scores[1])
        return dq, dk, D.sum(-1, keepdim=True) - D.sum(-2).unsqueeze(-1), None, None


class _DeltaScan(torch.autograd.Function):
    """The part of the chunked delta rule that is not elementwise, with its own backward.

    Per chunk, A = (I + L)^-1:  R = V - Ke S,  Vn = A (beta R),  O = Qe S + P Vn,  S' = e_C S + Kr^T Vn. The backward differentiates
    the solve implicitly: with X = A^T dVn, dL = -stril(X Vn^T), dV = beta X, dKe = -dV S^T. Left to autograd, the slices of every
    chunk cost a zero-filled gradient of the whole tensor each: half the time at T = 1024, and quadratic in T.
    qk, L `(B, H, N, C, C)`, ke, qe, kr `(B, H, N, C, K)`, v `(B, H, N, C, V)`, beta `(..., 1)`, e_end `(B, H, N, 1 or K)` or None.
    """

    @staticmethod
    def forward(ctx, qk, L, ke, qe, kr, v, beta, e_end, S):
        shape, (C, K) = v.shape, ke.shape[-2:]

        def flat(x):  # (B, H, N, ., .) -> (B*H, N, ., .)
            return x.reshape(-1, *x.shape[2:])

        qk, L, ke, qe, kr, v, beta = map(flat, (qk, L, ke, qe, kr, v, beta))
        S, decay = S.reshape(-1, K, shape[-1]), None if e_end is None else flat(e_end[..., None])
        eye = torch.eye(C, dtype=v.dtype, device=v.device)
        A = torch.linalg.solve_triangular(L.tril(-1), eye.expand_as(L), upper=False, unitriangular=True)
        states, R, written, out = v.new_empty(v.shape[1], *S.shape), torch.empty_like(v), torch.empty_like(v), torch.empty_like(v)
        for n in range(v.shape[1]):
            states[n] = S
            R[:, n] = torch.baddbmm(v[:, n], ke[:, n], S, alpha=-1)
            written[:, n] = A[:, n] @ (beta[:, n] * R[:, n])
            out[:, n] = qe[:, n] @ S
            S = torch.baddbmm(S if decay is None else S * decay[:, n], kr[:, n].mT, written[:, n])
        out += qk @ written
        ctx.save_for_backward(qk, A, ke, qe, kr, beta, decay, states, R, written)
        ctx.lead = shape[:2]
        return out.view(shape), S.view(*shape[:2], K, shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dS):
        qk, A, ke, qe, kr, beta, decay, states, R, written = ctx.saved_tensors
        do, dS = do.reshape(R.shape), dS.reshape(states.shape[1:])
        dvn, qdo = qk.mT @ do, qe.mT @ do  # what does not depend on dS, for all chunks at once
        X, dv, dstates = torch.empty_like(R), torch.empty_like(R), torch.empty_like(states)
        for n in reversed(range(R.shape[1])):
            dstates[n] = dS
            dvn[:, n].baddbmm_(kr[:, n], dS)
            X[:, n] = A[:, n].mT @ dvn[:, n]
            dv[:, n] = X[:, n] * beta[:, n]
            dS = torch.baddbmm(qdo[:, n] if decay is None else qdo[:, n] + decay[:, n] * dS, ke[:, n].mT, dv[:, n], alpha=-1)
            dS = dS if decay is not None else dS + dstates[n]
        S, dSn = states.transpose(0, 1), dstates.transpose(0, 1)  # (B*H, N, K, V)
        grads = (
            do @ written.mT,
            (X @ written.mT).neg_().tril_(-1),
            (dv @ S.mT).neg_(),
            do @ S.mT,
            written @ dSn.mT,
            dv,
            (X * R).sum(-1, keepdim=True),
        )
        grads = [x.unflatten(0, ctx.lead) for x in grads]
        de_end = (
            None if decay is None else (S * dSn).sum(-1 if decay.shape[-2] > 1 else (-1, -2)).reshape(*ctx.lead, S.shape[1], -1)
        )
        return *grads, de_end, dS.unflatten(0, ctx.lead)


@_full_precision
def delta_rule(q, k, v, g=None, beta=None, *, scale=None, initial_state=None, segment_ids=None, chunk_size=64):
    """`reference.delta_rule` in chunks of C tokens. With G the decay's running sum inside the chunk,

        L = stril(diag(beta) (K K^T) * Gamma),  Gamma_ij = exp(G_i - G_j),  e_i = exp(G_i),  r_i = exp(G_C - G_i)
        Vn = (I + L)^-1 diag(beta) (V - (e*K) S)           (a triangular solve: exact for correlated keys too)
        O = scale (e * (Q S) + (Q K^T * Gamma) Vn),  S' = e_C S + (r*K)^T Vn

    Memory O(T (K + V + C) + T K V / C), and 16 T K more with decays per channel. Yang et al. 2406.06484 (WY), 2412.06464 (decay).
    """
    return _recurrence(q, k, v, g, beta, scale, initial_state, segment_ids, chunk_size, delta=True)


@_full_precision
def linear_attention(q, k, v, g=None, *, scale=None, initial_state=None, segment_ids=None, chunk_size=64):
    """`reference.linear_attention` in chunks: `delta_rule` with Vn = V, so that the chunks depend on each other by a sum only."""
    return _recurrence(q, k, v, g, None, scale, initial_state, segment_ids, chunk_size, delta=False)


def normalized_linear_attention(q, k, v, *, eps=1e-6, initial_state=None, segment_ids=None):
    """`reference.normalized_linear_attention`: the normaliser is one more column of v."""
    v1 = torch.cat([_wide(v), torch.ones_like(v[..., :1], dtype=_wide(v).dtype)], -1)
    out, state = linear_attention(q, k, v1, scale=1.0, initial_state=initial_state, segment_ids=segment_ids)
    return (out[..., :-1] / (out[..., -1:] + eps)).to(v.dtype), state


def _step(q, k, v, g, beta, state, scale, delta):
    """Two matrix-vector products and a rank-one update per token, in place; without delta one product less."""
    H, dtype = v.shape[2], v.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if k.shape[2] != H:
        q, k = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (q, k))
    q, k, v = (x.to(state.dtype).transpose(1, 2) for x in (q, k, v))  # (B, H, T, .)
    g = g.expand(q.shape[0], q.shape[2], H) if g is not None and g.ndim == 1 else g
    outs = []
    for t in range(v.shape[2]):
        if g is not None:
            state.mul_(g[:, t].to(state.dtype).exp().reshape(*state.shape[:2], -1, 1))
        k_t, u = k[:, :, t : t + 1], v[:, :, t : t + 1]
        u = u - k_t @ state if delta else u
        if beta is not None:
            u = u * beta[:, t, :, None, None].to(state.dtype)
        state.add_(k_t.transpose(-1, -2) * u)
        outs.append(scale * (q[:, :, t : t + 1] @ state))
    return torch.cat(outs, 2).transpose(1, 2).to(dtype)


@_full_precision
def delta_rule_step(q, k, v, g=None, beta=None, *, state, scale=None):
    """`reference.delta_rule_step`."""
    return _step(q, k, v, g, beta, state, scale, delta=True)


channel_delta_rule, channel_delta_rule_step = delta_rule, delta_rule_step


@_full_precision
def linear_attention_step(q, k, v, g=None, *, state, scale=None):
    """`reference.linear_attention_step`."""
    return _step(q, k, v, g, None, state, scale, delta=False)


def normalized_linear_attention_step(q, k, v, *, state, eps=1e-6):
    """`reference.normalized_linear_attention_step`."""
    v1 = torch.cat([v.to(state.dtype), torch.ones_like(v[..., :1], dtype=state.dtype)], -1)
    out = linear_attention_step(q, k, v1, state=state, scale=1.0)
    return (out[..., :-1] / (out[..., -1:] + eps)).to(v.dtype)


def causal_conv1d(
    x, weight, bias=None, *, activation=None, l2_heads=None, split=None, initial_state=None, segment_ids=None, eps=1e-6
):
    """`reference.causal_conv1d` as W shifted multiply-adds, each masked where the shift crosses into another document."""
    T, W = x.shape[1], weight.shape[1]
    past = x.new_zeros(x.shape[0], W - 1, x.shape[2]) if initial_state is None else initial_state.to(x.dtype)
    inputs = torch.cat([past, x], dim=1)  # (B, W-1+T, D)
    weight = weight.to(x.dtype)
    if segment_ids is not None:
        run, valid = segment_runs(segment_ids)
        runs = F.pad(run, (W - 1, 0))  # the incoming inputs belong to run 0
    y = x * weight[:, -1]
    for j in range(1, W):
        shifted = inputs[:, W - 1 - j : W - 1 - j + T]
        if segment_ids is not None:
            shifted = shifted * (runs[:, W - 1 - j : W - 1 - j + T] == run)[..., None]
        y = y + shifted * weight[:, W - 1 - j]
    y = y if bias is None else y + bias.to(x.dtype)
    y = F.silu(y) if activation == "silu" else y
    y = y if l2_heads is None else reference.l2_norm_heads(y, *l2_heads, eps)
    y = y if segment_ids is None else y * valid[..., None]
    y = y if split is None else y.split(split, dim=-1)
    if segment_ids is None:
        return y, inputs[:, T:]
    at = valid.sum(1, keepdim=True) + torch.arange(W - 1, device=x.device)  # the W-1 inputs up to the last real one
    final = inputs.gather(1, at[..., None].expand(-1, -1, x.shape[2]))
    return y, final * (runs.gather(1, at) == run[:, -1:])[..., None]


def causal_conv1d_step(x, weight, bias=None, *, state, activation=None, l2_heads=None, split=None, eps=1e-6):
    """`reference.causal_conv1d_step`."""
    options = {"activation": activation, "l2_heads": l2_heads, "split": split, "eps": eps}
    out, new = causal_conv1d(x, weight, bias, initial_state=state, **options)
    state.copy_(new)
    return out


def softmax_attention(q, k, v, *, scale=None, window=None, keep_first=0, sinks=None, past=None, segment_ids=None, dropout_p=0.0):
    """`reference.softmax_attention` by PyTorch's SDPA, with a `(B, 1, T, S+T)` mask for everything but plain causal attention.

    A sink is one more key, of score b_h and value 0. Where there are earlier keys, so many queries at once as have `PAIRS` scores.
    """
    (B, T, H, _), shape = q.shape, (q.shape[:2], q.device, past, segment_ids)
    if past is None and segment_ids is None and window is None and sinks is None:
        return _sdpa(q, k, v, None, None, scale, dropout_p)
    rows, outs = max(1, T), []
    if past is not None:
        k, v = torch.cat([past[0].to(k.dtype), k], 1), torch.cat([past[1].to(v.dtype), v], 1)
        rows = max(1, min(rows, PAIRS // (B * H * k.shape[1])))
    for i, queries in enumerate(q.split(rows, dim=1)):
        distance, position = key_distances(*shape, slice(i * rows, (i + 1) * rows))
        mask = distance >= 0  # padding sees its own row's last document: no row is empty
        if window is not None:
            mask = mask & ((distance < window) | (position < keep_first)[:, None])
        outs.append(_sdpa(queries, k, v, mask[:, None], sinks, scale, dropout_p))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    return out if segment_ids is None else out * (segment_ids > 0)[..., None, None]


def _sdpa(q, k, v, mask, sinks=None, scale=None, dropout_p=0.0):
    """(B, T, H, D) attention under a boolean mask `(B, 1, T, S)`; None: causal."""
    if sinks is not None:
        k, v = F.pad(k, (0, 0, 0, 0, 1, 0)), F.pad(v, (0, 0, 0, 0, 1, 0))
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
        bias = bias.expand(-1, q.shape[2], -1, -1)
        mask = torch.cat([sinks.to(q.dtype)[:, None, None].expand(*bias.shape[:3], 1), bias], dim=-1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )
    return out.transpose(1, 2)


def _keep_one(pairs, length, keep_first=0):
    """Write one token a row into its slot of each cache."""
    for cache, new in pairs:
        slot = cache_slots(length.long(), cache.shape[1], keep_first)
        cache.scatter_(
            1,
            slot[:, None, None, None].expand_as(new) if new.ndim == 4 else slot[:, None, None].expand_as(new),
            new.to(cache.dtype),
        )


def _filled(longest, x):
    """The part of a cache to read: what is filled; on CUDA all of it, since cuDNN plans anew for every shape (67 ms a token)."""
    return slice(None if longest is None or x.is_cuda else longest)


def softmax_attention_step(q, k, v, *, k_cache, v_cache, length, window=None, keep_first=0, sinks=None, scale=None, longest=None):
    """`reference.softmax_attention_step`; a single token is written first, so that the caches need not be copied."""
    if q.shape[1] > 1:
        return reference.softmax_attention_step(
            q, k, v, k_cache=k_cache, v_cache=v_cache, length=length, window=window, keep_first=keep_first, sinks=sinks, scale=scale
        )
    _keep_one(((k_cache, k), (v_cache, v)), length, keep_first)
    read = _filled(longest, q)
    position = cache_positions(length + 1, k_cache.shape[1], keep_first)[:, read]
    mask = position >= 0
    if window is not None:
        mask = mask & ((length[:, None] - position < window) | (position < keep_first))
    return _sdpa(q, k_cache[:, read].to(q.dtype), v_cache[:, read].to(q.dtype), mask[:, None, None], sinks, scale)


@_full_precision
def indexer_scores(q, k, w):
    """`reference.indexer_scores` as one product of all index heads with all keys."""
    q, k, w = _wide(q), _wide(k), _wide(w)
    z = torch.einsum("btjd,bsd->btjs", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("btj,btjs->bts", w, z.relu())


def _top_k_indices(scores, distance, top_k, local):
    """(B, T, min(top_k, S)) key indices of `select_top_k`, best first, and which of them may be seen at all.

    A stable sort of the keys from last to first: keys lie in the order of their positions, so of equals the nearer comes first.
    """
    ranked = scores.masked_fill(distance < 0, -torch.inf).masked_fill((distance >= 0) & (distance < local), torch.inf)
    order = ranked.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    index = scores.shape[-1] - 1 - order
    return index, distance.expand_as(scores).gather(-1, index) >= 0


def select_top_k(scores, distance, top_k, local=0):
    """`reference.select_top_k` by one stable sort; keys must lie in the order of their positions."""
    index, seen = _top_k_indices(scores, distance, top_k, local)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, index, seen)


def selected_attention(q, k, v, selected, *, scale=None):
    """`reference.selected_attention` by SDPA under the selection as a mask."""
    nothing = ~selected.any(-1)
    out = _sdpa(q, k, v, (selected | nothing[..., None])[:, None], scale=scale)
    return out.masked_fill(nothing[..., None, None], 0.0)


def sparse_attention(q, k, v, index_q, index_k, index_w, *, top_k, local=0, scale=None, past=None, segment_ids=None):
    """`reference.sparse_attention`; the selection is a mask, so that it costs what dense attention costs and the indexer more."""
    if past is not None:
        k, v, index_k = (torch.cat([old.to(new.dtype), new], dim=1) for old, new in zip(past[:3], (k, v, index_k), strict=True))
    distance, _ = key_distances(q.shape[:2], q.device, past, segment_ids)
    selected = select_top_k(indexer_scores(index_q, index_k, index_w), distance, top_k, local)
    out = selected_attention(q, k, v, selected, scale=scale)
    return out if segment_ids is None else out * (segment_ids > 0)[..., None, None]


def sparse_attention_step(
    q, k, v, index_q, index_k, index_w, *, k_cache, v_cache, index_cache, length, top_k, local=0, scale=None, longest=None
):
    """`reference.sparse_attention_step`; a single token reads all index keys, and top_k rows of keys and values."""
    if q.shape[1] > 1:
        return reference.sparse_attention_step(
            q,
            k,
            v,
            index_q,
            index_k,
            index_w,
            k_cache=k_cache,
            v_cache=v_cache,
            index_cache=index_cache,
            length=length,
            top_k=top_k,
            local=local,
            scale=scale,
        )
    _keep_one(((k_cache, k), (v_cache, v), (index_cache, index_k)), length)
    read = _filled(longest, q)
    position = cache_positions(length + 1, k_cache.shape[1])[:, read]
    distance = torch.where(position >= 0, length[:, None] - position, -1)[:, None]
    index, seen = _top_k_indices(indexer_scores(index_q, index_cache[:, read], index_w), distance, top_k, local)
    rows = index[:, 0, :, None, None].expand(-1, -1, *k_cache.shape[2:])
    k, v = (cache.gather(1, rows).to(q.dtype) for cache in (k_cache, v_cache))
    return _sdpa(q, k, v, seen[:, None], scale=scale)


def indexer_kl(q, k, index_q, index_k, index_w, *, top_k=None, local=0, scale=None, segment_ids=None):
    """`reference.indexer_kl`, attention's distribution one head at a time."""
    (B, T, H, D), R = q.shape, q.shape[2] // k.shape[2]
    distance, _ = key_distances((B, T), q.device, None, segment_ids)
    scores = indexer_scores(index_q, index_k, index_w)
    read = distance >= 0 if top_k is None else select_top_k(scores.detach(), distance, top_k, local)
    hidden = torch.zeros_like(scores).masked_fill(~read, -torch.inf)
    with torch.no_grad():
        q = q * (D**-0.5 if scale is None else scale)
        p = sum((_wide(q[:, :, h] @ k[:, :, h // R].mT) + hidden).softmax(-1) for h in range(H)) / H
    kl = torch.xlogy(p, p).sum(-1) - (p * scores).sum(-1) + (scores + hidden).logsumexp(-1)
    return kl if segment_ids is None else kl * (segment_ids > 0)


def layer_norm(x, weight, bias=None, eps=1e-5):
    """`reference.layer_norm` as one operator of PyTorch: forward and backward take a quarter of what the parts take on a CPU."""
    if weight.ndim > 1:  # a weight of its own for each head
        return reference.layer_norm(x, weight, bias, eps)
    h = _wide(x)
    return F.layer_norm(h, weight.shape, weight.to(h.dtype), None if bias is None else bias.to(h.dtype), eps).to(x.dtype)


def linear_cross_entropy(x, weight, labels):
    """`reference.linear_cross_entropy` with PyTorch's cross-entropy, which keeps one copy of the logits less."""
    return F.cross_entropy(_wide(F.linear(x, weight.to(x.dtype))), labels, ignore_index=-1, reduction="none")


def linear_cross_entropy_sum(x, weight, labels):
    """`reference.linear_cross_entropy_sum`."""
    nll = linear_cross_entropy(x, weight, labels)
    return nll.sum(), nll.detach()
