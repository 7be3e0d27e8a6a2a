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


def cache_slots(positions, size, keep_first=0):
    """Where a cache of `size` slots keeps the token at a document position: the first `keep_first` fixed, the rest a ring."""
    ring = keep_first + (positions - keep_first) % max(1, size - keep_first)
    return torch.where(positions < keep_first, positions, ring)


def cache_positions(length, size, keep_first=0):
    """The document position that each slot of a cache holds after `length (B,)` tokens, `(B, size)` int64; -1: empty."""
    slot, length = torch.arange(size, device=length.device), length[:, None].long()
    latest = length - 1 - (length - 1 - slot) % max(1, size - keep_first)  # the last position < length that maps to the slot
    latest = torch.where(latest >= keep_first, latest, -1)
    return torch.where(slot < keep_first, torch.where(slot < length, slot, -1), latest)


def key_distances(shape, device, past=None, segment_ids=None, rows=slice(None)):
    """How far each key lies behind each query, and where the keys lie in their document.

    shape (B, T). Keys are those of `past = (..., positions (B, S), length (B,))`, if any, then the T tokens themselves. Returns
    distance `(B, T, S + T)` int64, -1 where the query must not see the key, and position `(B, S + T)`. `rows` slices the queries.
    """
    B, T = shape
    t = torch.arange(T, device=device)
    behind = (t[rows, None] - t).clamp(min=-1).expand(B, -1, T)
    if segment_ids is None:
        run, position = torch.zeros(B, T, dtype=torch.int64, device=device), t.expand(B, T)
    else:
        run, position = segment_runs(segment_ids)[0], document_positions(segment_ids)
        behind = torch.where(run[:, rows, None] == run[:, None, :], behind, -1)
    if past is None:
        return behind, position
    *_, past_position, length = past
    position = position + (run == 0) * length[:, None]
    seen = (past_position >= 0)[:, None] & (run == 0)[:, rows, None]
    back = torch.where(seen, position[:, rows, None] - past_position[:, None], -1)
    return torch.cat([back, behind], dim=-1), torch.cat([past_position, position], dim=-1)


def _repeat_heads(x, n_head):
    """(B, T, Hk, D) -> (B, T, H, D), each key head serving H // Hk neighbouring heads."""
    return x if x.shape[2] == n_head else x.repeat_interleave(n_head // x.shape[2], dim=2)


def _recurrence(q, k, v, g, beta, scale, initial_state, segment_ids, delta):
    B, T, H, V = v.shape
    q, k = _repeat_heads(q, H), _repeat_heads(k, H)
    K = q.shape[-1]
    scale = K**-0.5 if scale is None else scale
    state = v.new_zeros(B, H, K, V) if initial_state is None else initial_state.to(v.dtype)
    if g is not None:
        g = (g.expand(B, T, H) if g.ndim == 1 else g).to(torch.promote_types(g.dtype, v.dtype))
        g = g[..., None] if g.ndim == 3 else g  # (B, T, H, 1): one decay for all key channels
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


def linear_attention(q, k, v, g=None, *, scale=None, initial_state=None, segment_ids=None):
    """Linear attention with decay: `S_t = e^{g_t} S_{t-1} + k_t^T v_t`, `o_t = scale q_t S_t`.

    g None (Katharopoulos 2006.16236), `(H,)` constant per head (RetNet 2307.08621, lightning 2501.08313), `(B, T, H)` per token
    (Mamba-2's SSD 2405.21060, with q = C, k = B, v = dt x, g = dt A), or `(B, T, H, K)` per key channel (GLA 2312.06635); natural
    log, <= 0. scale defaults to K^-0.5. Returns out `(B, T, H, V)`, state `(B, H, K, V)`.
    """
    return _recurrence(q, k, v, g, None, scale, initial_state, segment_ids, delta=False)


def linear_attention_step(q, k, v, g=None, *, state, scale=None):
    """One token or a few of `linear_attention`; `state (B, H, K, V)` is updated in place. Returns out `(B, T, H, V)`."""
    out, new = linear_attention(q, k, v, g, scale=scale, initial_state=state)
    state.copy_(new)
    return out


def normalized_linear_attention(q, k, v, *, eps=1e-6, initial_state=None, segment_ids=None):
    """`o_t = q_t S_t / (q_t z_t + eps)` with `S_t = S_{t-1} + k_t^T v_t`, `z_t = z_{t-1} + k_t^T`; q, k are non-negative features.

    The state `(B, H, K, V + 1)` holds z as its last column. Katharopoulos et al. 2006.16236.
    """
    ones = torch.ones_like(v[..., :1])
    out, state = linear_attention(q, k, torch.cat([v, ones], -1), scale=1.0, initial_state=initial_state, segment_ids=segment_ids)
    return out[..., :-1] / (out[..., -1:] + eps), state


def normalized_linear_attention_step(q, k, v, *, state, eps=1e-6):
    """One token or a few of `normalized_linear_attention`; `state (B, H, K, V + 1)` is updated in place."""
    out, new = normalized_linear_attention(q, k, v, eps=eps, initial_state=state)
    state.copy_(new)
    return out


def linear_attention_parallel(q, k, v, g=None, *, scale=None):
    """`linear_attention` as one masked T x T product: `O = scale (Q K^T * Gamma) V`, `Gamma_ij = e^{G_i - G_j}`, i >= j."""
    H = v.shape[2]
    q, k = _repeat_heads(q, H), _repeat_heads(k, H)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * scale if g is None or g.ndim < 4 else _channel_scores(q * scale, k, g)
    if g is not None and g.ndim < 4:
        scores = scores * _decay_matrix(g.expand(v.shape[:3]))
    return torch.einsum("bhij,bjhv->bihv", scores.tril(), v)


def delta_rule_parallel(q, k, v, g=None, beta=None, *, scale=None):
    """`delta_rule` without a loop: `U = (I + stril(diag(beta) K K^T * Gamma))^-1 diag(beta) V`, `O = scale tril(Q K^T * Gamma) U`.

    The WY form with one chunk of length T: it costs T^3, and shows that the rule is linear attention on corrected values.
    """
    H, T = v.shape[2], v.shape[1]
    q, k = _repeat_heads(q, H), _repeat_heads(k, H)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    beta = (torch.ones_like(v[..., 0]) if beta is None else beta).transpose(1, 2)[..., None]  # (B, H, T, 1)
    if g is not None and g.ndim == 4:
        kk, qk = _channel_scores(k, k, g), _channel_scores(q * scale, k, g)
    else:
        gamma = 1.0 if g is None else _decay_matrix(g.expand(v.shape[:3]))
        kk, qk = (torch.einsum("bihk,bjhk->bhij", x, k) * gamma for x in (k, q * scale))
    system = torch.eye(T, dtype=v.dtype, device=v.device) + (beta * kk).tril(-1)
    u = torch.linalg.solve(system, beta * v.transpose(1, 2))
    return (qk.tril() @ u).transpose(1, 2)


def _decay_matrix(g):
    """(B, T, H) -> (B, H, T, T): e^{G_i - G_j} on and below the diagonal, 0 above."""
    G = g.cumsum(1).transpose(1, 2)
    below = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).tril()
    return (G[..., :, None] - G[..., None, :]).masked_fill(~below, -torch.inf).exp()


def _channel_scores(q, k, g):
    """(B, H, T, T): sum_c q_ic k_jc e^{G_ic - G_jc} on and below the diagonal, 0 above."""
    G = g.cumsum(1)
    below = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).tril()[None, :, :, None, None]
    decay = (G[:, :, None] - G[:, None]).masked_fill(~below, -torch.inf).exp()  # (B, T, T, H, K)
    return torch.einsum("bihc,bjhc,bijhc->bhij", q, k, decay)


def delta_rule(q, k, v, g=None, beta=None, *, scale=None, initial_state=None, segment_ids=None):
    """(Gated) delta rule: `S_t = e^{g_t} S_{t-1} + k_t^T u_t`, `u_t = beta_t (v_t - k_t e^{g_t} S_{t-1})`, `o_t = scale q_t S_t`.

    g `(B, T, H)` log decay <= 0, or `(H,)` constant, or `(B, T, H, K)` per key channel (KDA), or None (DeltaNet); beta `(B, T, H)`
    in [0, 2] or None (1); scale defaults to K^-0.5. Returns out `(B, T, H, V)`, state `(B, H, K, V)`. Stable only for keys of norm
    at most 1. Schlag et al. 2102.11174, Yang et al. 2412.06464.
    """
    return _recurrence(q, k, v, g, beta, scale, initial_state, segment_ids, delta=True)


def delta_rule_step(q, k, v, g=None, beta=None, *, state, scale=None):
    """One token or a few of `delta_rule`; `state (B, H, K, V)` is updated in place. Returns out `(B, T, H, V)`."""
    out, new = delta_rule(q, k, v, g, beta, scale=scale, initial_state=state)
    state.copy_(new)
    return out


# The same definition with g `(B, T, H, K)`: an operator by itself, since its kernels are others (Kimi Delta Attention, 2510.26692).
channel_delta_rule, channel_delta_rule_step = delta_rule, delta_rule_step


def causal_conv1d(
    x, weight, bias=None, *, activation=None, l2_heads=None, split=None, initial_state=None, segment_ids=None, eps=1e-6
):
    """Depthwise causal convolution: `y_t = act(bias + sum_j weight[:, W-1-j] * x_{t-j})`, j < W, within the document.

    x `(B, T, D)`, weight `(D, W)` (last column: the current token), activation None or "silu". `l2_heads = (n, width)` divides each
    of the first n heads of `width` channels of y by its l2 norm (`l2_norm` with `eps`): the queries and keys of a delta rule. With
    `split`, a list of widths that add up to D, y is a tuple of slices of its channels, `(B, T, n)` each. The state `(B, W-1, D)`
    holds the last W-1 raw inputs of the document, oldest first, zero where the document is shorter.
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
        y = y if l2_heads is None else l2_norm_heads(y, *l2_heads, eps)
        new = inputs[:, 1:]
        if valid is not None:
            real = valid[:, t, None]
            y, new = torch.where(real, y, 0.0), torch.where(real[..., None], new, past)
        past = new
        outs.append(y)
    y = torch.stack(outs, dim=1)
    return y if split is None else y.split(split, dim=-1), past


def causal_conv1d_step(x, weight, bias=None, *, state, activation=None, l2_heads=None, split=None, eps=1e-6):
    """One token or a few of `causal_conv1d`; `state (B, W-1, D)` is updated in place. Returns out `(B, T, D)`, or its slices."""
    options = {"activation": activation, "l2_heads": l2_heads, "split": split, "eps": eps}
    out, new = causal_conv1d(x, weight, bias, initial_state=state, **options)
    state.copy_(new)
    return out


def softmax_attention(q, k, v, *, scale=None, window=None, keep_first=0, sinks=None, past=None, segment_ids=None, dropout_p=0.0):
    """Causal attention: `o_i = sum_j p_ij v_j`, `p_ij = e^{s_ij} / (e^{b_h} + sum_j e^{s_ij})`, `s_ij = scale q_i k_j`.

    q `(B, T, H, D)`, k, v `(B, T, Hk, D)`. j runs over the document up to i; with `window` w over 0 <= i - j < w (w counts the
    token itself), and over the document's first `keep_first` tokens too (StreamingLLM 2309.17453). `sinks (H,)` are learned
    logits b_h that take attention and give nothing (GPT-OSS); without them e^{b_h} is 0.
    `past = (k, v, positions, length)`: keys and values `(B, S, Hk, D)` of earlier tokens of the row's first document, in any order,
    at document positions `(B, S)` (-1: empty slot), and the document's length so far `(B,)`.
    Returns out `(B, T, H, D)`; its state is the keys and values themselves, which the caller keeps. Vaswani et al. 1706.03762.
    """
    if dropout_p:
        raise ValueError("reference.softmax_attention has no dropout: the definition is deterministic")
    B, T, H, D = q.shape
    scale = D**-0.5 if scale is None else scale
    ids = torch.ones(B, T, dtype=torch.int32, device=q.device) if segment_ids is None else segment_ids
    run, valid = segment_runs(ids)
    position = document_positions(ids, None if past is None else past[3])
    out = q.new_zeros(B, T, H, v.shape[-1])
    for b in range(B):
        for t in range(T):
            if not valid[b, t]:
                continue
            mine = run[b, : t + 1] == run[b, t]
            keys, values, at = k[b, : t + 1][mine], v[b, : t + 1][mine], position[b, : t + 1][mine]  # (n, Hk, D), (n,)
            if past is not None and run[b, t] == 0:
                there = past[2][b] >= 0
                keys, values = torch.cat([past[0][b][there].to(k.dtype), keys]), torch.cat([past[1][b][there].to(v.dtype), values])
                at = torch.cat([past[2][b][there], at])
            if window is not None:
                near = (position[b, t] - at < window) | (at < keep_first)
                keys, values = keys[near], values[near]
            keys, values = (_repeat_heads(x[None], H)[0] for x in (keys, values))
            scores = scale * torch.einsum("hd,nhd->hn", q[b, t], keys)
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None].to(scores.dtype)], dim=1)
            p = scores.softmax(-1)[:, : len(keys)]
            out[b, t] = torch.einsum("hn,nhd->hd", p, values)
    return out


def softmax_attention_step(q, k, v, *, k_cache, v_cache, length, keep_first=0, longest=None, **options):
    """One token or a few of `softmax_attention`: attend to the caches `(B, S, Hk, D)` and k, v, then keep these in the caches.

    Token p of a document lies in slot p, or in a ring where S is smaller (`cache_slots`). `length (B,)` is read, not advanced.
    `longest` (host int) bounds length + T: no more of the cache is read.
    """
    past = (k_cache, v_cache, cache_positions(length, k_cache.shape[1], keep_first), length)
    out = softmax_attention(q, k, v, past=past, keep_first=keep_first, **options)
    _keep(((k_cache, k), (v_cache, v)), length, keep_first)
    return out


def _keep(pairs, length, keep_first=0):
    """Write new tokens, one after the other, into their slots."""
    for cache, new in pairs:
        for t in range(new.shape[1]):
            slot = cache_slots(length + t, cache.shape[1], keep_first)
            cache[torch.arange(len(slot), device=slot.device), slot.long()] = new[:, t].to(cache.dtype)


def indexer_scores(q, k, w):
    """DeepSeek's lightning indexer: `I_ts = sum_j w_tj relu(q_tj k_s / sqrt(d))`, one key head for all index heads.

    q `(B, T, J, d)`, k `(B, S, d)`, w `(B, T, J)` signed. Returns `(B, T, S)` in fp32 or wider. DeepSeek-V3.2, 2512.02556.
    """
    q, k, w = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, w))
    out = []
    for t in range(q.shape[1]):
        z = torch.einsum("bjd,bsd->bjs", q[:, t], k) * q.shape[-1] ** -0.5
        out.append(torch.einsum("bj,bjs->bs", w[:, t], z.relu()))
    return torch.stack(out, dim=1)


def select_top_k(scores, distance, top_k, local=0):
    """Which keys each query may read: the `local` nearest, then the highest scores, `top_k` in all; of equals the nearer.

    scores `(B, T, S)`; distance `(B, T, S)` int, i - j in the document, negative where the key is not to be seen at all.
    Returns bool `(B, T, S)`; fewer than top_k where fewer can be seen.
    """
    selected = torch.zeros_like(distance, dtype=torch.bool)
    for b in range(scores.shape[0]):
        for t in range(scores.shape[1]):
            seen = (distance[b, t] >= 0).nonzero()[:, 0].tolist()
            near = {s: int(distance[b, t, s]) for s in seen}
            ranked = sorted(seen, key=lambda s: (near[s] >= local, 0.0 if near[s] < local else -scores[b, t, s].item(), near[s]))
            selected[b, t, ranked[:top_k]] = True
    return selected


def selected_attention(q, k, v, selected, *, scale=None):
    """Softmax attention over the selected keys only, one selection for all heads; 0 where nothing is selected.

    q `(B, T, H, D)`, k, v `(B, S, Hk, D)`, selected `(B, T, S)` bool. Returns `(B, T, H, D)`.
    """
    H, scale = q.shape[2], q.shape[-1] ** -0.5 if scale is None else scale
    k, v = _repeat_heads(k, H), _repeat_heads(v, H)
    scores = scale * torch.einsum("bthd,bshd->bhts", q, k)
    p = scores.masked_fill(~selected[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhts,bshd->bthd", p, v)


def sparse_attention(q, k, v, index_q, index_k, index_w, *, top_k, local=0, scale=None, past=None, segment_ids=None):
    """DeepSeek sparse attention: `indexer_scores` rank the keys, `select_top_k` picks, `selected_attention` reads those.

    q `(B, T, H, D)`, k, v `(B, T, Hk, D)`, index_q `(B, T, J, d)`, index_k `(B, T, d)`, index_w `(B, T, J)`; past = (k, v, index_k,
    positions, length) of earlier tokens. Returns out `(B, T, H, D)`, 0 at padding. DeepSeek-V3.2, 2512.02556.
    """
    if past is not None:
        k, v, index_k = (torch.cat([old.to(new.dtype), new], dim=1) for old, new in zip(past[:3], (k, v, index_k), strict=True))
    distance, _ = key_distances(q.shape[:2], q.device, past, segment_ids)
    selected = select_top_k(indexer_scores(index_q, index_k, index_w), distance, top_k, local)
    out = selected_attention(q, k, v, selected, scale=scale)
    return out if segment_ids is None else out * (segment_ids > 0)[..., None, None]


def sparse_attention_step(
    q, k, v, index_q, index_k, index_w, *, k_cache, v_cache, index_cache, length, top_k, local=0, scale=None, longest=None
):
    """One token or a few of `sparse_attention` on caches `(B, S, ...)` of the whole document; as `softmax_attention_step`."""
    past = (k_cache, v_cache, index_cache, cache_positions(length, k_cache.shape[1]), length)
    out = sparse_attention(q, k, v, index_q, index_k, index_w, top_k=top_k, local=local, scale=scale, past=past)
    _keep(((k_cache, k), (v_cache, v), (index_cache, index_k)), length)
    return out


def indexer_kl(q, k, index_q, index_k, index_w, *, top_k=None, local=0, scale=None, segment_ids=None):
    """What the indexer learns from: `KL(p_t || softmax_s I_ts)` of each query, p_t the mean over heads of attention's distribution.

    Both are over the keys that the query sees, or over its selection where there is a `top_k`. Shapes as in `sparse_attention`.
    p is a constant: the gradient `dI_ts = softmax_s(I_t) - p_ts` reaches the indexer alone. Returns `(B, T)` in fp32 or wider, 0 at
    padding. DeepSeek-V3.2, 2512.02556.
    """
    distance, _ = key_distances(q.shape[:2], q.device, None, segment_ids)
    scores = indexer_scores(index_q, index_k, index_w)
    read = distance >= 0 if top_k is None else select_top_k(scores.detach(), distance, top_k, local)
    with torch.no_grad():
        keys, scale = _repeat_heads(k, q.shape[2]), q.shape[-1] ** -0.5 if scale is None else scale
        s = scale * torch.einsum("bthd,bshd->bhts", q, keys)
        p = s.to(scores.dtype).masked_fill(~read[:, None], -torch.inf).softmax(-1).mean(1)
    log_q = scores.masked_fill(~read, -torch.inf).log_softmax(-1).masked_fill(~read, 0.0)
    kl = (torch.xlogy(p, p) - p * log_q).sum(-1)
    return kl if segment_ids is None else kl * (segment_ids > 0)


def rms_norm(x, weight, eps=1e-6, *, unit_offset=False):
    """`x / sqrt(mean(x^2) + eps) * w`, w + 1 where `unit_offset`; in fp32 or wider, cast back. Zhang & Sennrich 1910.07467."""
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    h = h * (h.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (h * (weight.to(h.dtype) + 1.0 if unit_offset else weight.to(h.dtype))).to(x.dtype)


def layer_norm(x, weight, bias=None, eps=1e-5):
    """`(x - mean) / sqrt(var + eps) * w + b`; in fp32 or wider, cast back. Ba et al. 1607.06450."""
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    h = h - h.mean(-1, keepdim=True)
    h = h * (h.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(h.dtype)
    return (h if bias is None else h + bias.to(h.dtype)).to(x.dtype)


def gated_rms_norm(x, z, weight, eps=1e-6, *, activation="silu", gate_first=False):
    """`RMSNorm(x) * w * act(z)` over the last dimension, or `RMSNorm(x * act(z)) * w` with `gate_first` (Mamba-2).

    In fp32 or wider, cast back to x's dtype. activation "silu" or "sigmoid"; the weight broadcasts over leading dimensions.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    gate = {"silu": F.silu, "sigmoid": torch.sigmoid}[activation](z.to(wide))
    h = x.to(wide) * gate if gate_first else x.to(wide)
    h = rms_norm(h, weight, eps)
    return (h if gate_first else h * gate).to(x.dtype)


def l2_norm(x, eps=1e-6):
    """`x / sqrt(sum(x^2) + eps)` over the last dimension, in fp32 or wider, cast back."""
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    return (h * (h.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def l2_norm_heads(x, n, width, eps=1e-6):
    """`l2_norm` of each of the first n heads of `width` channels of x `(..., D)`; the other channels as they are."""
    heads, rest = x[..., : n * width], x[..., n * width :]
    return torch.cat([l2_norm(heads.unflatten(-1, (n, width)), eps).flatten(-2), rest], dim=-1)


def linear_cross_entropy(x, weight, labels):
    """Negative log-likelihood `-log softmax(x W^T)[label]` per token, fp32 or wider; 0 where the label is -1.

    x `(N, d)`, weight `(vocab, d)`, labels `(N,)` int64. Returns `(N,)`.
    """
    logits = x @ weight.to(x.dtype).T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll = logits.logsumexp(-1) - logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels >= 0, nll, 0.0)


def linear_cross_entropy_sum(x, weight, labels):
    """The sum of `linear_cross_entropy` over tokens, to differentiate, and its values `(N,)` without a gradient, to log.

    With one upstream gradient for all tokens the gradient of the weight can be computed together with the loss.
    """
    nll = linear_cross_entropy(x, weight, labels)
    return nll.sum(), nll.detach()
