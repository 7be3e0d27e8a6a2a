"""What every operator means: token by token, any dtype, no cleverness. The truth the tests compare with.

Shapes: q, k `(B, T, Hk, K)`, v `(B, T, H, V)` with `H % Hk == 0` (value head h reads key head h // (H // Hk)), gates `(B, T, H)`,
states `(B, H, K, V)`. Sequence operators are functional, `op(..., initial_state=None, segment_ids=None) -> (out, final_state)`.
Step operators take one token or a few, change the state they are given in place, return only the output and have no autograd.

`segment_ids` `(B, T)`: tokens act within their own segment only. Ids are positive and non-decreasing in a row, 0 is trailing
padding, which reads and writes nothing. The incoming state belongs to the segment of the row's first token, the outgoing state
is that of the last real token.
"""

import torch
import torch.nn.functional as F


def segment_runs(segment_ids):
    """Number the documents of each row: `run (B, T)` int64 counts from 0 (the incoming state's document), `valid (B, T)` bool.

    A run ends wherever the id changes, so an id that comes back later is a new document; padding keeps the last run's number.
    """
    valid = segment_ids > 0
    starts = (segment_ids[:, 1:] != segment_ids[:, :-1]) & valid[:, 1:]
    return F.pad(starts, (1, 0)).cumsum(1), valid


def document_positions(segment_ids, length=None):
    """Position of each token in its document, `(B, T)` int64; the first document of a row goes on from `length (B,)`."""
    run, _ = segment_runs(segment_ids)
    t = torch.arange(run.shape[1], device=run.device).expand_as(run)
    starts = torch.where(F.pad(run[:, 1:] != run[:, :-1], (1, 0)), t, 0)
    position = t - starts.cummax(1).values
    return position if length is None else position + (run == 0) * length[:, None]


def _repeat_heads(x, n_head):
    """(B, T, Hk, D) -> (B, T, H, D), each key head serving H // Hk neighbouring heads."""
    return x if x.shape[2] == n_head else x.repeat_interleave(n_head // x.shape[2], dim=2)


def _recurrence(q, k, v, g, beta, scale, initial_state, segment_ids, delta):
    B, T, H, V = v.shape
    q, k = _repeat_heads(q, H), _repeat_heads(k, H)
    K = q.shape[-1]
    scale = K**-0.5 if scale is None else scale
    state = v.new_zeros(B, H, K, V) if initial_state is None else initial_state.to(v.dtype)
    if g is not None and g.ndim == 3:
        g = g[..., None]  # (B, T, H, 1): one decay for all key channels
    run, valid = (None, None) if segment_ids is None else segment_runs(segment_ids)
    outs = []
    for t in range(T):
        if t > 0 and run is not None:
            state = state * (run[:, t] == run[:, t - 1]).to(state.dtype)[:, None, None, None]
        new = state if g is None else state * g[:, t].exp()[..., None]
        u = v[:, t]  # (B, H, V)
        if delta:
            u = u - torch.einsum("bhk,bhkv->bhv", k[:, t], new)
        if beta is not None:
            u = u * beta[:, t, :, None]
        new = new + k[:, t, :, :, None] * u[:, :, None, :]
        out = scale * torch.einsum("bhk,bhkv->bhv", q[:, t], new)
        if valid is not None:
            real = valid[:, t, None, None]
            new = torch.where(real[..., None], new, state)
            out = torch.where(real, out, 0.0)
        state = new
        outs.append(out)
    return torch.stack(outs, dim=1), state


def delta_rule(q, k, v, g=None, beta=None, *, scale=None, initial_state=None, segment_ids=None):
    """(Gated) delta rule: `S_t = e^{g_t} S_{t-1} + k_t^T u_t`, `u_t = beta_t (v_t - k_t e^{g_t} S_{t-1})`, `o_t = scale q_t S_t`.

    g `(B, T, H)` log decay <= 0, or `(B, T, H, K)` per key channel (KDA), or None (DeltaNet); beta `(B, T, H)` in [0, 2] or None
    (1); scale defaults to K^-0.5. Returns out `(B, T, H, V)`, state `(B, H, K, V)`. Stable only for keys of norm at most 1.
    Schlag et al. 2102.11174, Yang et al. 2412.06464.
    """
    return _recurrence(q, k, v, g, beta, scale, initial_state, segment_ids, delta=True)


def delta_rule_step(q, k, v, g=None, beta=None, *, state, scale=None):
    """One token or a few of `delta_rule`; `state (B, H, K, V)` is updated in place. Returns out `(B, T, H, V)`."""
    out, new = delta_rule(q, k, v, g, beta, scale=scale, initial_state=state)
    state.copy_(new)
    return out


def causal_conv1d(x, weight, bias=None, *, activation=None, initial_state=None, segment_ids=None):
    """Depthwise causal convolution: `y_t = act(bias + sum_j weight[:, W-1-j] * x_{t-j})`, j < W, within the document.

    x `(B, T, D)`, weight `(D, W)` (last column: the current token), activation None or "silu". The state `(B, W-1, D)` holds the
    last W-1 raw inputs of the document, oldest first, zero where the document is shorter.
    """
    B, T, D = x.shape
    W = weight.shape[1]
    past = x.new_zeros(B, W - 1, D) if initial_state is None else initial_state.to(x.dtype)
    run, valid = (None, None) if segment_ids is None else segment_runs(segment_ids)
    outs = []
    for t in range(T):
        if t > 0 and run is not None:
            past = past * (run[:, t] == run[:, t - 1]).to(x.dtype)[:, None, None]
        inputs = torch.cat([past, x[:, t : t + 1]], dim=1)  # (B, W, D)
        y = torch.einsum("bwd,dw->bd", inputs, weight)
        y = y if bias is None else y + bias
        y = F.silu(y) if activation == "silu" else y
        new = inputs[:, 1:]
        if valid is not None:
            real = valid[:, t, None]
            y, new = torch.where(real, y, 0.0), torch.where(real[..., None], new, past)
        past = new
        outs.append(y)
    return torch.stack(outs, dim=1), past


def causal_conv1d_step(x, weight, bias=None, *, state, activation=None):
    """One token or a few of `causal_conv1d`; `state (B, W-1, D)` is updated in place. Returns out `(B, T, D)`."""
    out, new = causal_conv1d(x, weight, bias, activation=activation, initial_state=state)
    state.copy_(new)
    return out


def softmax_attention(q, k, v, *, scale=None, past=None, segment_ids=None, dropout_p=0.0):
    """Causal attention: `o_i = sum_j softmax_j(scale q_i k_j) v_j` over j <= i of the same document, grouped key/value heads.

    q `(B, T, H, D)`, k, v `(B, T, Hk, D)`. `past = (k, v, length)`: keys and values `(B, S, Hk, D)` of earlier tokens of the
    first document, of which row b holds `length[b]` (in order). Returns out `(B, T, H, D)`; its state is the keys and values
    themselves, which the caller keeps. Vaswani et al. 1706.03762.
    """
    if dropout_p:
        raise ValueError("reference.softmax_attention has no dropout: the definition is deterministic")
    B, T, H, D = q.shape
    scale = D**-0.5 if scale is None else scale
    k, v = _repeat_heads(k, H), _repeat_heads(v, H)
    run, valid = (None, None) if segment_ids is None else segment_runs(segment_ids)
    out = torch.zeros_like(q)
    for b in range(B):
        for t in range(T):
            if valid is not None and not valid[b, t]:
                continue
            seen = torch.arange(t + 1, device=q.device)
            if run is not None:
                seen = seen[run[b, : t + 1] == run[b, t]]
            keys, values = k[b, seen], v[b, seen]  # (n, H, D)
            if past is not None and (run is None or run[b, t] == 0):
                n = int(past[2][b])
                keys = torch.cat([_repeat_heads(past[0][b : b + 1, :n], H)[0], keys])
                values = torch.cat([_repeat_heads(past[1][b : b + 1, :n], H)[0], values])
            p = (scale * torch.einsum("hd,nhd->hn", q[b, t], keys)).softmax(-1)
            out[b, t] = torch.einsum("hn,nhd->hd", p, values)
    return out


def softmax_attention_step(q, k, v, *, k_cache, v_cache, length, scale=None, longest=None):
    """One token or a few: write k, v at `length[b]` of the caches `(B, S, Hk, D)`, then attend to all written so far.

    `length (B,)` is read, not advanced. `longest` (host int) bounds length + T, so that no more of the cache is read.
    """
    for b in range(q.shape[0]):
        n = int(length[b])
        k_cache[b, n : n + q.shape[1]] = k[b]
        v_cache[b, n : n + q.shape[1]] = v[b]
    return softmax_attention(q, k, v, scale=scale, past=(k_cache, v_cache, length))


def rms_norm(x, weight, eps=1e-6, *, unit_offset=False):
    """`x / sqrt(mean(x^2) + eps) * w`, w + 1 where `unit_offset`; in fp32 or wider, cast back. Zhang & Sennrich 1910.07467."""
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    h = h * (h.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (h * (weight.to(h.dtype) + 1.0 if unit_offset else weight.to(h.dtype))).to(x.dtype)


def gated_rms_norm(x, z, weight, eps=1e-6, *, activation="silu"):
    """`RMSNorm(x) * w * act(z)` over the last dimension: normalised first, then gated, in fp32 or wider, cast back to x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    gate = {"silu": F.silu, "sigmoid": torch.sigmoid}[activation](z.to(wide))
    return (rms_norm(x.to(wide), weight, eps) * gate).to(x.dtype)


def l2_norm(x, eps=1e-6):
    """`x / sqrt(sum(x^2) + eps)` over the last dimension, in fp32 or wider, cast back."""
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    return (h * (h.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def linear_cross_entropy(x, weight, labels):
    """Negative log-likelihood `-log softmax(x W^T)[label]` per token, fp32 or wider; 0 where the label is -1.

    x `(N, d)`, weight `(vocab, d)`, labels `(N,)` int64. Returns `(N,)`.
    """
    logits = x @ weight.to(x.dtype).T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll = logits.logsumexp(-1) - logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels >= 0, nll, 0.0)
