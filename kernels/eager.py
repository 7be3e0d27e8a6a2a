"""The operators of `reference.py` in plain PyTorch, chunked: differentiable by autograd, fast enough for a laptop.

No loop over tokens in the sequence operators (the recurrent ones loop over chunks) and no T x T matrix for the recurrent family.
Everything that is accumulated or exponentiated runs in fp32 (fp64 for fp64 inputs), whatever autocast says around it.
"""

import functools

import torch
import torch.nn.functional as F

from .reference import gated_rms_norm, l2_norm, rms_norm, segment_runs

__all__ = [
    "causal_conv1d",
    "causal_conv1d_step",
    "delta_rule",
    "delta_rule_step",
    "gated_rms_norm",
    "l2_norm",
    "linear_cross_entropy",
    "rms_norm",
    "softmax_attention",
    "softmax_attention_step",
]


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
    return x.transpose(1, 2).unflatten(2, (-1, size))


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


@_full_precision
def delta_rule(q, k, v, g=None, beta=None, *, scale=None, initial_state=None, segment_ids=None, chunk_size=64):
    """`reference.delta_rule` in chunks of C tokens (scalar decay): with G the decay's running sum inside the chunk,

        L = stril(diag(beta) (K K^T) * Gamma),  Gamma_ij = exp(G_i - G_j),  e_i = exp(G_i),  r_i = exp(G_C - G_i)
        [W | U] = (I + L)^-1 diag(beta) [e*K | V]          (a triangular solve; beta_i, beta_j, k correlated: still stable)
        Vn = U - W S,  O = scale (e * (Q S) + (Q K^T * Gamma) Vn),  S' = e_C S + (r*K)^T Vn

    Memory O(T (K + V + C) + T K V / C). Yang et al. 2406.06484 (WY form), 2412.06464 (decay).
    """
    T, H = v.shape[1:3]
    dtype, scale, C = v.dtype, q.shape[-1] ** -0.5 if scale is None else scale, chunk_size
    if H != k.shape[2]:
        q, k = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (q, k))
    q, k, v = _wide(q) * scale, _wide(k), _wide(v)
    beta = torch.ones_like(v[..., 0]) if beta is None else beta.to(v.dtype)
    g = None if g is None else g.to(v.dtype)
    real = None
    if segment_ids is not None:  # padding: no write (k = beta = 0), no decay (g = 0), no output
        real = segment_ids > 0
        beta, k = beta * real[..., None], k * real[..., None, None]
        g = None if g is None else g.masked_fill(~real[..., None], 0.0)
        same, opened, last, keep = _chunk_masks(segment_ids, C)
    q, k, v, beta = (_chunks(x, C) for x in (q, k, v, beta[..., None]))  # (B, H, N, C, .)

    pair = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    pair = pair if segment_ids is None else pair & same
    gamma, e, r, e_end = pair.to(v.dtype), None, None, None
    if g is not None:
        G = _chunks(g, C).cumsum(-1)  # (B, H, N, C)
        if segment_ids is not None:  # count from the document's start, so that an earlier document costs no precision
            first = torch.where(F.pad(~same.diagonal(-1, -2, -1), (1, 0)), torch.arange(C, device=q.device), 0).cummax(-1).values
            before = F.pad(G, (1, 0))[..., :-1].gather(-1, first.expand_as(G))
            G = G - before
        gamma = (G[..., :, None] - G[..., None, :]).masked_fill(~pair, -torch.inf).exp()  # mask first: no inf * 0
        e, r, e_end = G.exp()[..., None], (G[..., -1:] - G).clamp(max=0.0).exp()[..., None], G[..., -1].exp()
    if segment_ids is not None:
        e = opened[..., None].to(v.dtype) if e is None else e * opened[..., None]
        r = last[..., None].to(v.dtype) if r is None else r * last[..., None]
        e_end = keep.to(v.dtype).expand(v.shape[:3]) if e_end is None else e_end * keep

    kt = k.transpose(-1, -2)
    L = (beta * (k @ kt) * gamma).tril(-1)
    ke, qe, kr = (k, q, k) if e is None else (k * e, q * e, k * r)
    W, U = torch.linalg.solve_triangular(L, beta * torch.cat([ke, v], -1), upper=False, unitriangular=True).split(
        [k.shape[-1], v.shape[-1]], dim=-1
    )
    reads = torch.cat([W, qe], dim=-2)  # (B, H, N, 2C, K): both read the state, one product
    krt = kr.transpose(-1, -2)
    S = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state.to(v.dtype)
    vn, inter = [], []
    for n in range(v.shape[2]):
        x = reads[:, :, n] @ S
        vn.append(U[:, :, n] - x[:, :, :C])
        inter.append(x[:, :, C:])
        S = (S if e_end is None else S * e_end[:, :, n, None, None]) + krt[:, :, n] @ vn[-1]
    out = torch.stack(inter, 2) + ((q @ kt) * gamma) @ torch.stack(vn, 2)
    out = out.flatten(2, 3)[:, :, :T].transpose(1, 2)
    return (out if real is None else out * real[..., None, None]).to(dtype), S


@_full_precision
def delta_rule_step(q, k, v, g=None, beta=None, *, state, scale=None):
    """`reference.delta_rule_step`: two matrix-vector products and a rank-one update per token, in place."""
    H, dtype = v.shape[2], v.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if H != k.shape[2]:
        q, k = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (q, k))
    q, k, v = (x.to(state.dtype).transpose(1, 2) for x in (q, k, v))  # (B, H, T, .)
    outs = []
    for t in range(v.shape[2]):
        if g is not None:
            state.mul_(g[:, t].to(state.dtype).exp().reshape(*state.shape[:2], -1, 1))
        k_t, u = k[:, :, t : t + 1], v[:, :, t : t + 1]
        u = u - k_t @ state
        if beta is not None:
            u = u * beta[:, t, :, None, None].to(state.dtype)
        state.add_(k_t.transpose(-1, -2) * u)
        outs.append(scale * (q[:, :, t : t + 1] @ state))
    return torch.cat(outs, 2).transpose(1, 2).to(dtype)


def causal_conv1d(x, weight, bias=None, *, activation=None, initial_state=None, segment_ids=None):
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
    if segment_ids is None:
        return y, inputs[:, T:]
    at = valid.sum(1, keepdim=True) + torch.arange(W - 1, device=x.device)  # the W-1 inputs up to the last real one
    final = inputs.gather(1, at[..., None].expand(-1, -1, x.shape[2]))
    return y * valid[..., None], final * (runs.gather(1, at) == run[:, -1:])[..., None]


def causal_conv1d_step(x, weight, bias=None, *, state, activation=None):
    """`reference.causal_conv1d_step`."""
    out, new = causal_conv1d(x, weight, bias, activation=activation, initial_state=state)
    state.copy_(new)
    return out


def softmax_attention(q, k, v, *, scale=None, past=None, segment_ids=None, dropout_p=0.0):
    """`reference.softmax_attention` by PyTorch's SDPA, with a `(B, 1, T, S+T)` mask where documents or a past ask for one."""
    B, T = q.shape[:2]
    mask = real = None
    if past is not None or segment_ids is not None:
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().expand(B, T, T)
    if segment_ids is not None:
        run, real = segment_runs(segment_ids)
        mask = mask & (run[:, :, None] == run[:, None, :])  # padding keeps the last run: no row is empty
    if past is not None:
        k, v = torch.cat([past[0].to(k.dtype), k], 1), torch.cat([past[1].to(v.dtype), v], 1)
        seen = (torch.arange(past[0].shape[1], device=q.device) < past[2][:, None])[:, None].expand(B, T, -1)
        mask = torch.cat([seen if segment_ids is None else seen & (run == 0)[..., None], mask], dim=-1)
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=None if mask is None else mask[:, None],
        dropout_p=dropout_p,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)
    return out if real is None else out * real[..., None, None]


def softmax_attention_step(q, k, v, *, k_cache, v_cache, length, scale=None, longest=None):
    """`reference.softmax_attention_step`: write, then attend to the first `longest` entries under a mask of the lengths."""
    T, longest = q.shape[1], k_cache.shape[1] if longest is None else longest
    at = length[:, None].long() + torch.arange(T, device=q.device)  # (B, T)
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.scatter_(1, at[..., None, None].expand_as(new), new.to(cache.dtype))
    mask = torch.arange(longest, device=q.device) <= at[..., None]  # (B, T, S)
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        *(x[:, :longest].to(q.dtype).transpose(1, 2) for x in (k_cache, v_cache)),
        attn_mask=mask[:, None],
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def linear_cross_entropy(x, weight, labels):
    """`reference.linear_cross_entropy` with PyTorch's cross-entropy, which keeps one copy of the logits less."""
    return F.cross_entropy(_wide(F.linear(x, weight.to(x.dtype))), labels, ignore_index=-1, reduction="none")
