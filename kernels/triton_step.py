"""One token in Triton: the step operators, and the parts that a decoder builds a layer from in few launches.

    linear      y = act(norm(x * gate) W^T + b), with a residual, or with the update of a short convolution behind it
    recurrence  S <- e^g S + k^T u, o = scale q S with their gates before, the gated norm behind: every recurrent mixer
    attention   the new key and value into the cache, softmax(q K^T) V over slices of it; merge joins the slices
    add_norm    x + norm(y)

At batch 1 a step is a chain of small kernels, so their number decides (a launch inside a CUDA graph costs about as much as reading
5 MB): a recurrent layer is linear, recurrence, linear, and its feed-forward network two more. Products run on tensor cores with
the batch padded to 16 rows: the weights are read once, which is what takes the time. A norm needs no pass of its own: with r its
factor, norm(x) W^T = r (x * w) W^T, and the sum of squares comes along with the product.

The definitions are those of `reference.py`; states are updated in place, in fp32, and every program owns what it writes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import launch

LOG2_E = tl.constexpr(1.4426950408889634)
LINEAR = {"BN": 16, "BK": 128, "num_warps": 2, "num_stages": 4}  # 32 and 4 warps: 0.494 instead of 0.468 ms a token, batch 1
STEP = {
    "linear": LINEAR,
    "linear_wide": LINEAR | {"BN": 128, "BK": 64, "num_warps": 4},  # N beyond 8192: the vocabulary
    "recurrence": {"num_warps": 8, "num_stages": 1},
    "attention": {"BN": 64, "num_warps": 4, "num_stages": 2},
    "merge": {"num_warps": 4, "num_stages": 1},
    "add_norm": {"num_warps": 4, "num_stages": 1},
}
FULL = STEP | {name: STEP[name] | {"BK": 64, "num_stages": 3} for name in ("linear", "linear_wide")}
FULL |= {"attention": STEP["attention"] | {"BN": 32}}
LAUNCH = {(architecture, size): table for architecture in launch.ARCHITECTURES for size, table in ((2, STEP), (4, FULL))}


@triton.jit
def _activated(x, NAME: tl.constexpr):
    """An activation or feature map by its name, in fp32."""
    if NAME == "silu":
        x = x * tl.sigmoid(x)
    elif NAME == "sigmoid":
        x = tl.sigmoid(x)
    elif NAME == "relu":
        x = tl.maximum(x, 0.0)
    elif NAME == "relu2":
        x = tl.maximum(x, 0.0)
        x = x * x
    elif NAME == "elu1":
        x = tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    elif NAME == "gelu":  # the tanh form; 1 + tanh(u) = 2 sigmoid(2 u)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


# ----------------------------------------------------------------------------------------------------------------------
# Products


@triton.jit
def linear_kernel(
    x, w, bias, y, norm_w, gate, residual, conv_w, conv_b, conv_state, alpha, beta, eps, M, N, D, n_conv, x_b, gate_b,
    NORM: tl.constexpr, GATE: tl.constexpr, GATE_ACT: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, W: tl.constexpr, HAS_CONV_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """BM rows of x by BN rows of w. NORM none, rms, layer; GATE none, before, after the norm; ACT swiglu takes rows n and N + n."""
    i = tl.program_id(0)
    i_n, i_m = i % tl.cdiv(N, BN), i // tl.cdiv(N, BN)
    o_m, o_n = (i_m * BM + tl.arange(0, BM)).to(tl.int64), i_n * BN + tl.arange(0, BN)
    m_m, m_n = o_m < M, o_n < N
    p_x, p_w = x + o_m[:, None] * x_b, w + o_n[:, None].to(tl.int64) * D
    mean = tl.zeros([BM], dtype=tl.float32)
    if NORM == "layer":
        for k in range(0, D, BK):
            o_k = k + tl.arange(0, BK)
            mean += tl.sum(tl.load(p_x + o_k[None, :], mask=m_m[:, None] & (o_k < D)[None, :], other=0.0).to(tl.float32), 1)
        mean /= D
    b_y = tl.zeros([BM, BN], dtype=tl.float32)
    b_up = tl.zeros([BM, BN], dtype=tl.float32)
    squares = tl.zeros([BM], dtype=tl.float32)
    for k in range(0, D, BK):
        o_k = k + tl.arange(0, BK)
        m_x, m_w = m_m[:, None] & (o_k < D)[None, :], m_n[:, None] & (o_k < D)[None, :]
        b_w = tl.load(p_w + o_k[None, :], mask=m_w, other=0.0).to(DOT)
        b_x = tl.load(p_x + o_k[None, :], mask=m_x, other=0.0).to(tl.float32)
        if GATE != "none":
            b_z = _activated(tl.load(gate + o_m[:, None] * gate_b + o_k[None, :], mask=m_x, other=0.0).to(tl.float32), GATE_ACT)
        if GATE == "before":
            b_x *= b_z
        if NORM == "layer":
            b_x = tl.where(m_x, b_x - mean[:, None], 0.0)
        if NORM != "none":
            squares += tl.sum(b_x * b_x, 1)
            b_x *= tl.load(norm_w + o_k, mask=o_k < D, other=0.0)[None, :]
        if GATE == "after":
            b_x *= b_z
        b_x = b_x.to(DOT)
        b_y = tl.dot(b_x, tl.trans(b_w), b_y, input_precision=PREC)
        if ACT == "swiglu":
            b_w = tl.load(p_w + N.to(tl.int64) * D + o_k[None, :], mask=m_w, other=0.0).to(DOT)
            b_up = tl.dot(b_x, tl.trans(b_w), b_up, input_precision=PREC)
    if NORM != "none":
        r = tl.rsqrt(squares / D + eps)
        b_y, b_up = b_y * r[:, None], b_up * r[:, None]
    if HAS_BIAS:
        b_y += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
        if ACT == "swiglu":
            b_up += tl.load(bias + N + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    b_y = _activated(b_y, "silu") * b_up if ACT == "swiglu" else _activated(b_y, ACT)
    if W > 0:  # the first n_conv columns go through a convolution of W taps whose past lies in conv_state (M, W - 1, n_conv)
        m_c = m_n & (o_n < n_conv)
        m = m_m[:, None] & m_c[None, :]
        p_s, p_c = conv_state + o_m[:, None] * ((W - 1) * n_conv) + o_n[None, :], conv_w + o_n * W
        b_c = b_y * tl.load(p_c + W - 1, mask=m_c, other=0.0).to(tl.float32)[None, :]
        if HAS_CONV_BIAS:
            b_c += tl.load(conv_b + o_n, mask=m_c, other=0.0).to(tl.float32)[None, :]
        for j in tl.static_range(W - 1):
            past = tl.load(p_s + j * n_conv, mask=m, other=0.0)
            b_c += past.to(tl.float32) * tl.load(p_c + j, mask=m_c, other=0.0).to(tl.float32)[None, :]
            tl.debug_barrier()  # several threads may hold one element: all have read it before one moves it up
            if j > 0:
                tl.store(p_s + (j - 1) * n_conv, past, mask=m)
        tl.store(p_s + (W - 2) * n_conv, b_y.to(conv_state.dtype.element_ty), mask=m)
        b_y = tl.where(m_c[None, :], _activated(b_c, "silu"), b_y)
    o_y, m_y = o_m[:, None] * N + o_n[None, :], m_m[:, None] & m_n[None, :]
    if RESIDUAL:
        b_y = alpha * tl.load(residual + o_y, mask=m_y, other=0.0).to(tl.float32) + beta * b_y
    tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=m_y)


class Norm(NamedTuple):
    """A norm that goes into the product behind it; a layer norm's bias is part of that product's bias."""

    kind: str  # rms or layer
    weight: torch.Tensor  # fp32
    eps: float


class Conv(NamedTuple):
    """A short convolution with SiLU behind a product: weight `(n, W)`, bias `(n,)` or None; state `(B, W-1, n)`, in place."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    state: torch.Tensor


def linear(
    x, w, bias=None, *, norm=None, gate=None, gate_act="silu", gate_first=False, act="none", residual=None, alpha=1.0, beta=1.0,
    conv=None, dtype=None,
):  # fmt: skip
    """x `(B, D)` by w `(N, D)`, or `(2 N, D)` with act swiglu, to `(B, N)` in `dtype` (default: w's).

    `alpha residual + beta act(norm(x) w^T + bias)`; gate `(B, D)` multiplies x by gate_act(gate), before the norm or behind it.
    """
    (B, D), N = x.shape, w.shape[0] // (2 if act == "swiglu" else 1)
    options = launch.options(LAUNCH, "linear_wide" if N > 8192 else "linear", w)
    y = torch.empty(B, N, dtype=dtype or w.dtype, device=x.device)
    BM = 16 if B <= 16 else 32
    some_bias = w if conv is None or conv.bias is None else conv.bias
    grid = (triton.cdiv(N, options["BN"]) * triton.cdiv(B, BM),)
    linear_kernel[grid](
        x, w, w if bias is None else bias, y, w if norm is None else norm.weight, x if gate is None else gate,
        x if residual is None else residual, *((w, w, w) if conv is None else (conv.weight, some_bias, conv.state)),
        alpha, beta, 0.0 if norm is None else norm.eps, B, N, D, 0 if conv is None else conv.weight.shape[0], x.stride(0),
        0 if gate is None else gate.stride(0), NORM="none" if norm is None else norm.kind,
        GATE="none" if gate is None else "before" if gate_first else "after", GATE_ACT=gate_act, ACT=act,
        HAS_BIAS=bias is not None, RESIDUAL=residual is not None, W=0 if conv is None else conv.weight.shape[1],
        HAS_CONV_BIAS=conv is not None and conv.bias is not None, BM=BM,
        **launch.operand_types(w, linear_kernel, wide="ieee"), **options,
    )  # fmt: skip
    return y


@triton.jit
def add_norm_kernel(
    x, y, out, weight, bias, eps, D, ADD: tl.constexpr, LAYER: tl.constexpr, HAS_BIAS: tl.constexpr, BD: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BD)
    m = o < D
    b_y = tl.load(y + i * D + o, mask=m, other=0.0).to(tl.float32)
    if LAYER:
        b_y = tl.where(m, b_y - tl.sum(b_y, 0) / D, 0.0)
    b_y *= tl.rsqrt(tl.sum(b_y * b_y, 0) / D + eps)
    b_y *= tl.load(weight + o, mask=m, other=0.0)
    if HAS_BIAS:
        b_y += tl.load(bias + o, mask=m, other=0.0).to(tl.float32)
    if ADD:
        b_y += tl.load(x + i * D + o, mask=m, other=0.0).to(tl.float32)
    tl.store(out + i * D + o, b_y.to(out.dtype.element_ty), mask=m)


def add_norm(x, y, norm, bias=None):
    """`x + norm(y)` in fp32, rows `(B, D)`; x None: the norm alone."""
    B, D = y.shape
    out = torch.empty(B, D, dtype=torch.float32, device=y.device)
    add_norm_kernel[(B,)](
        y if x is None else x, y, out, norm.weight, norm.weight if bias is None else bias, norm.eps, D, ADD=x is not None,
        LAYER=norm.kind == "layer", HAS_BIAS=bias is not None, BD=triton.next_power_of_2(D),
        **launch.options(LAUNCH, "add_norm", out),
    )  # fmt: skip
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Recurrent states


@triton.jit
def recurrence_kernel(
    q, k, v, g, beta, state, out, A_log, dt_bias, skip, z, norm_w, scale, beta_max, dt_low, dt_high, eps, T, H,
    q_b, q_t, k_b, k_t, v_b, v_t, g_b, g_t, beta_b, beta_t, z_b,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, GATES: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, HAS_BETA: tl.constexpr, NORMALIZE: tl.constexpr, L2: tl.constexpr,
    FEATURE: tl.constexpr, VALUE: tl.constexpr, NORM: tl.constexpr, Z_ACT: tl.constexpr,
):  # fmt: skip
    """T tokens of one head and BV columns of its state. GATES given: g and beta as the operators take them; delta, mamba: raw."""
    i = tl.program_id(0).to(tl.int64)
    i_v, i_h, i_b = i % NV, (i // NV) % H, i // (NV * H)
    o_k, o_v = tl.arange(0, BK), (i_v * BV + tl.arange(0, BV)).to(tl.int32)
    m_k, m_v = o_k < K, o_v < V
    WIDTH: tl.constexpr = V + 1 if NORMALIZE else V
    state += (i_b * H + i_h) * K * WIDTH
    p_S, m_S = state + o_k[:, None] * WIDTH + o_v[None, :], m_k[:, None] & m_v[None, :]
    b_S = tl.load(p_S, mask=m_S, other=0.0)
    if NORMALIZE:
        b_sum = tl.load(state + o_k * WIDTH + V, mask=m_k, other=0.0)
    q, k, v = q + i_b * q_b + (i_h // R) * K, k + i_b * k_b + (i_h // R) * K, v + i_b * v_b + i_h * V
    g, beta = g + i_b * g_b + i_h * (K if DECAY == "channel" else 1), beta + i_b * beta_b + i_h
    for t in range(T):
        b_q = _activated(tl.load(q + t * q_t + o_k, mask=m_k, other=0.0).to(tl.float32), FEATURE)
        b_k = _activated(tl.load(k + t * k_t + o_k, mask=m_k, other=0.0).to(tl.float32), FEATURE)
        b_v = _activated(tl.load(v + t * v_t + o_v, mask=m_v, other=0.0).to(tl.float32), VALUE)
        if FEATURE == "elu1":
            b_q, b_k = tl.where(m_k, b_q, 0.0), tl.where(m_k, b_k, 0.0)  # elu(0) + 1 is 1
        if L2:
            b_q, b_k = b_q * tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6), b_k * tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
        b_u = b_v
        if DECAY == "channel":
            b_g = tl.load(g + t * g_t + o_k, mask=m_k, other=0.0).to(tl.float32)
            if GATES == "delta":
                b_g = -tl.exp(tl.load(A_log + i_h)) * _softplus(b_g + tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0))
            b_S *= tl.exp(b_g)[:, None]
        elif DECAY == "head":
            b_g = tl.load(g + t * g_t).to(tl.float32)
            if GATES != "given":
                b_g = _softplus(b_g + tl.load(dt_bias + i_h))
                if GATES == "mamba":
                    b_g = tl.minimum(tl.maximum(b_g, dt_low), dt_high)
                    b_u = b_v * b_g
                b_g = -tl.exp(tl.load(A_log + i_h)) * b_g
            b_S *= tl.exp(b_g)
        if DELTA:
            b_u -= tl.sum(b_k[:, None] * b_S, 0)
        if HAS_BETA:
            b_beta = tl.load(beta + t * beta_t).to(tl.float32)
            if GATES == "delta":
                b_beta = beta_max * tl.sigmoid(b_beta)
            b_u *= b_beta
        b_S += b_k[:, None] * b_u[None, :]
        b_o = tl.sum(b_q[:, None] * b_S, 0) * scale
        if NORMALIZE:
            b_sum += b_k
            b_o /= tl.sum(b_q * b_sum, 0) * scale + eps
        if GATES == "mamba":
            b_o += tl.load(skip + i_h) * b_v
        if NORM:
            b_o *= tl.rsqrt(tl.sum(b_o * b_o, 0) / V + eps) * tl.load(norm_w + o_v, mask=m_v, other=0.0)
        if Z_ACT != "none":
            b_o *= _activated(tl.load(z + i_b * z_b + i_h * V + o_v, mask=m_v, other=0.0).to(tl.float32), Z_ACT)
        tl.store(out + ((i_b * T + t) * H + i_h) * V + o_v, b_o.to(out.dtype.element_ty), mask=m_v)
    if NORMALIZE:
        tl.store(state + o_k * WIDTH + V, b_sum, mask=m_k)
    tl.store(p_S, b_S, mask=m_S)


def recurrence_options(table, BK, BV):
    """A state larger than 128 x 128 is spread over more threads, so that it stays in registers."""
    return table["recurrence"] | ({"num_warps": 16} if BK * BV > 128 * 128 else {})


def recurrence(
    q, k, v, g=None, beta=None, *, state, scale, gates="given", decay="none", delta=False, normalize=False, l2=False,
    feature="identity", value="identity", A_log=None, dt_bias=None, skip=None, dt_range=(0.0, 1e30), beta_max=1.0, norm_w=None,
    z=None, z_act="none", eps=1e-6, dtype=None,
):  # fmt: skip
    """T tokens of any recurrent mixer: q, k `(B, T, Hk, K)`, v `(B, T, H, V)`, each head contiguous; returns `(B, T, H, V)`.

    g and beta as the operators take them, or (gates delta, mamba) as the projections give them, `(B, T, H)` or `(B, T, H K)`, with
    A_log, dt_bias, skip. norm_w `(V,)` normalises each head's output, z `(B, H V)` then gates it by z_act.
    """
    (B, T, Hk, K), (H, V) = q.shape, v.shape[2:]
    BK = max(16, triton.next_power_of_2(K))
    whole = norm_w is not None or normalize  # the columns of a head are needed together
    BV = max(16, triton.next_power_of_2(V) if whole else min(triton.next_power_of_2(V), 64))
    NV = triton.cdiv(V, BV)
    out = torch.empty(B, T, H, V, dtype=dtype or v.dtype, device=v.device)
    options = recurrence_options(LAUNCH[launch.architecture(state), 4], BK, BV)
    constant = g is not None and g.ndim == 1

    def strides(x):
        return (0, 0) if x is None or x.ndim == 1 else (x.stride(0), x.stride(1))

    some = state  # in place of what is not there
    recurrence_kernel[(B * H * NV,)](
        q, k, v, some if g is None else g, some if beta is None else beta, state, out,
        *(some if x is None else x for x in (A_log, dt_bias, skip, z, norm_w)), scale, beta_max, *dt_range, eps, T, H,
        *strides(q), *strides(k), *strides(v), *strides(g), *strides(beta), 0 if z is None else z.stride(0),
        R=H // Hk, K=K, V=V, BK=BK, BV=BV, NV=NV, GATES=gates, DECAY="head" if constant else decay, DELTA=delta,
        HAS_BETA=beta is not None, NORMALIZE=normalize, L2=l2, FEATURE=feature, VALUE=value, NORM=norm_w is not None, Z_ACT=z_act,
        **options,
    )  # fmt: skip
    return out


def _heads(x):
    """x `(B, T, H, D)` with each token's heads side by side, as a projection gives them; else a copy."""
    return x if x.stride(3) == 1 and (x.shape[2] == 1 or x.stride(2) == x.shape[3]) else x.contiguous()


def _step(q, k, v, g, beta, state, scale, delta, **options):
    decay = "none" if g is None else "channel" if g.ndim == 4 else "head"
    g = g.contiguous() if g is not None else None
    beta = beta.contiguous() if beta is not None else None
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    q, k, v = _heads(q), _heads(k), _heads(v)
    return recurrence(q, k, v, g, beta, state=state, scale=scale, decay=decay, delta=delta, **options)


def delta_rule_step(q, k, v, g=None, beta=None, *, state, scale=None):
    """`reference.delta_rule_step`."""
    return _step(q, k, v, g, beta, state, scale, True)


channel_delta_rule_step = delta_rule_step


def linear_attention_step(q, k, v, g=None, *, state, scale=None):
    """`reference.linear_attention_step`."""
    return _step(q, k, v, g, None, state, scale, False)


def normalized_linear_attention_step(q, k, v, *, state, eps=1e-6):
    """`reference.normalized_linear_attention_step`."""
    return _step(q, k, v, None, None, state, 1.0, False, normalize=True, eps=eps)


# ----------------------------------------------------------------------------------------------------------------------
# Attention over a cache


@triton.jit
def _prepared(p, p_pair, w, o_d, m, sign, cos, sin, eps, D, QK_NORM: tl.constexpr, ROPE: tl.constexpr):
    """Rows of queries or keys `(n, BD)`, normalised and rotated; p_pair points at the other channel of each rotated pair."""
    x = tl.load(p, mask=m, other=0.0).to(tl.float32)
    if QK_NORM:
        r = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x *= r * tl.load(w + o_d, mask=o_d < D, other=0.0)[None, :]
    if ROPE > 0:
        pair = tl.where(o_d < ROPE // 2, o_d + ROPE // 2, o_d - ROPE // 2)
        rotated = m & (o_d < ROPE)[None, :]
        y = tl.load(p_pair, mask=rotated, other=0.0).to(tl.float32)
        if QK_NORM:
            y *= r * tl.load(w + pair, mask=o_d < ROPE, other=0.0)[None, :]
        x = x * cos[None, :] + y * (sign * sin)[None, :]
    return x


@triton.jit(do_not_specialize=["S", "window", "keep_first"])
def attention_kernel(
    q, k, v, k_cache, v_cache, length, q_norm, k_norm, frequency, parts, stats, scale, eps, S, window, keep_first, Hk,
    q_b, k_b, v_b, kc_b, kc_s, kc_h, vc_b, vc_s, vc_h,
    R: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr,
    WINDOW: tl.constexpr, QK_NORM: tl.constexpr, ROPE: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One slice of the cache for the R query heads of a key head: the unnormalised output, its maximum and its sum.

    The first slice's program has the new token too, and writes it into its slot: nobody else reads that slot, which is unfilled or
    holds a token that has left the window.
    """
    i = tl.program_id(0).to(tl.int64)
    i_s, i_h, i_b = (i % NS).to(tl.int32), (i // NS) % Hk, i // (NS * Hk)
    n = tl.load(length + i_b)  # of the tokens before this one, which is its position
    o_r, o_d, o_v, o_n = tl.arange(0, BR), tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, BN)
    cos, sin, sign = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    pair = o_d
    if ROPE > 0:
        first = o_d < ROPE // 2
        pair, sign = tl.where(first, o_d + ROPE // 2, o_d - ROPE // 2), tl.where(first, -1.0, 1.0)
        angle = n.to(tl.float32) * tl.load(frequency + tl.where(first, o_d, pair), mask=o_d < ROPE, other=0.0)
        cos, sin = tl.cos(angle), tl.sin(angle)  # beyond ROPE: the angle is 0
    p_q = q + i_b * q_b + (i_h * R + o_r)[:, None] * D
    m_q = (o_r < R)[:, None] & (o_d < D)[None, :]
    b_q = _prepared(p_q + o_d[None, :], p_q + pair[None, :], q_norm, o_d, m_q, sign, cos, sin, eps, D, QK_NORM, ROPE)
    b_q = b_q * (scale * LOG2_E)
    b_qd = b_q.to(DOT)
    b_m = tl.full([BR], float("-inf"), tl.float32)
    b_l = tl.zeros([BR], tl.float32)
    b_o = tl.zeros([BR, BV], tl.float32)
    ring = tl.maximum(S - keep_first, 1)
    if i_s == 0:
        one = tl.zeros([1], tl.int32)
        p_k = k + i_b * k_b + i_h * D + one[:, None]
        m_k = (o_d < D)[None, :]
        b_k = _prepared(p_k + o_d[None, :], p_k + pair[None, :], k_norm, o_d, m_k, sign, cos, sin, eps, D, QK_NORM, ROPE)
        b_k = b_k.to(k_cache.dtype.element_ty)
        b_v = tl.load(v + i_b * v_b + i_h * V + o_v, mask=o_v < V, other=0.0).to(tl.float32).to(v_cache.dtype.element_ty)
        slot = tl.where(n < keep_first, n, keep_first + (n - keep_first) % ring).to(tl.int64)
        tl.store(k_cache + i_b * kc_b + slot * kc_s + i_h * kc_h + o_d[None, :], b_k, mask=m_k)
        tl.store(v_cache + i_b * vc_b + slot * vc_s + i_h * vc_h + o_v, b_v, mask=o_v < V)
        b_m = tl.sum(b_qd.to(tl.float32) * b_k.to(tl.float32), 1)
        b_l += 1.0
        b_o += b_v.to(tl.float32)[None, :]
    filled = tl.minimum(n, S)
    size = tl.cdiv(tl.cdiv(filled, BN), NS) * BN
    for s in range(i_s * size, tl.minimum(i_s * size + size, filled), BN):
        o_s = s + o_n
        seen = o_s < filled
        if WINDOW:
            position = tl.where(o_s < keep_first, o_s, n - 1 - (n - 1 - o_s) % ring)
            seen &= (n - position < window) | (position < keep_first)
        p_k = k_cache + i_b * kc_b + o_s[:, None].to(tl.int64) * kc_s + i_h * kc_h + o_d[None, :]
        b_k = tl.load(p_k, mask=seen[:, None] & (o_d < D)[None, :], other=0.0).to(DOT)
        b_s = tl.dot(b_qd, tl.trans(b_k), input_precision=PREC)
        b_s = tl.where(seen[None, :], b_s, float("-inf"))
        m_new = tl.maximum(b_m, tl.max(b_s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: 2^(-inf - 0) is 0
        b_p, a = tl.exp2(b_s - base[:, None]), tl.exp2(b_m - base)
        p_v = v_cache + i_b * vc_b + o_s[:, None].to(tl.int64) * vc_s + i_h * vc_h + o_v[None, :]
        b_v = tl.load(p_v, mask=seen[:, None] & (o_v < V)[None, :], other=0.0).to(DOT)
        b_o = tl.dot(b_p.to(DOT), b_v, b_o * a[:, None], input_precision=PREC)
        b_l = b_l * a + tl.sum(b_p, 1)
        b_m = m_new
    row = ((i_b * Hk + i_h) * R + o_r) * NS + i_s
    tl.store(parts + row[:, None] * V + o_v[None, :], b_o, mask=(o_r < R)[:, None] & (o_v < V)[None, :])
    tl.store(stats + row * 2, b_m, mask=o_r < R)
    tl.store(stats + row * 2 + 1, b_l, mask=o_r < R)


@triton.jit
def merge_kernel(
    parts, stats, sinks, gate, out, gate_b, H,
    V: tl.constexpr, BV: tl.constexpr, NS: tl.constexpr, SINKS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """The slices of one head joined: `o = sum_s 2^(m_s - m) o_s / sum_s 2^(m_s - m) l_s`, gated by sigmoid."""
    i = tl.program_id(0).to(tl.int64)
    o_s, o_v = tl.arange(0, NS), tl.arange(0, BV)
    b_m, b_l = tl.load(stats + (i * NS + o_s) * 2), tl.load(stats + (i * NS + o_s) * 2 + 1)
    m = tl.max(b_m, 0)
    if SINKS:
        sink = tl.load(sinks + i % H).to(tl.float32) * LOG2_E
        m = tl.maximum(m, sink)
    a = tl.exp2(b_m - m)
    total = tl.sum(a * b_l, 0)
    if SINKS:
        total += tl.exp2(sink - m)
    b_o = tl.load(parts + (i * NS + o_s)[:, None] * V + o_v[None, :], mask=(o_v < V)[None, :], other=0.0)
    b_o = tl.sum(b_o * a[:, None], 0) / total
    if GATE:
        b_o *= tl.sigmoid(tl.load(gate + (i // H) * gate_b + (i % H) * V + o_v, mask=o_v < V, other=0.0).to(tl.float32))
    tl.store(out + i * V + o_v, b_o.to(out.dtype.element_ty), mask=o_v < V)


def attention_options(table, BD):
    """Fewer slots at once where heads are wide."""
    return table["attention"] | ({"BN": table["attention"]["BN"] // 2} if BD > 128 else {})


def attention(
    q, k, v, *, k_cache, v_cache, length, scale, window=None, keep_first=0, sinks=None, norms=None, eps=1e-6, frequency=None,
    gate=None,
):  # fmt: skip
    """One token: q `(B, H, D)`, k `(B, Hk, D)`, v `(B, Hk, V)`, each row's heads contiguous; returns `(B, H, V)`.

    norms = (q's, k's weight, fp32) RMS-normalises each head; frequency `(rope_dim / 2,)` rotates by length * frequency; gate
    `(B, H V)` multiplies the output by its sigmoid. Attention over the cache is cut into slices of at least 64 slots, as many as
    give every multiprocessor some.
    """
    (B, H, D), Hk, V, S = q.shape, k.shape[1], v.shape[-1], k_cache.shape[1]
    types = launch.operand_types(k_cache, attention_kernel, wide="ieee")
    NS = 1
    while NS < 64 and NS * 128 <= S and 2 * NS * B * Hk <= 512:
        NS *= 2
    parts = torch.empty(B, H, NS, V, dtype=torch.float32, device=q.device)
    stats = torch.empty(B, H, NS, 2, dtype=torch.float32, device=q.device)
    BD, BV = max(16, triton.next_power_of_2(D)), max(16, triton.next_power_of_2(V))
    options = attention_options(LAUNCH[launch.architecture(q), k_cache.element_size()], BD)
    attention_kernel[(B * Hk * NS,)](
        q, k, v, k_cache, v_cache, length, *((q, q) if norms is None else norms), q if frequency is None else frequency, parts,
        stats, scale, eps, S, 2**30 if window is None else window, keep_first, Hk, q.stride(0), k.stride(0), v.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3], R=H // Hk, D=D, V=V, BR=max(16, triton.next_power_of_2(H // Hk)), BD=BD,
        BV=BV, NS=NS, WINDOW=window is not None, QK_NORM=norms is not None,
        ROPE=0 if frequency is None else 2 * len(frequency), **types, **options,
    )  # fmt: skip
    out = torch.empty(B, H, V, dtype=q.dtype, device=q.device)
    merge_kernel[(B * H,)](
        parts, stats, q if sinks is None else sinks, q if gate is None else gate, out, 0 if gate is None else gate.stride(0), H,
        V=V, BV=BV, NS=NS, SINKS=sinks is not None, GATE=gate is not None, **launch.options(LAUNCH, "merge", out),
    )  # fmt: skip
    return out


def softmax_attention_step(q, k, v, *, k_cache, v_cache, length, window=None, keep_first=0, sinks=None, scale=None, longest=None):
    """`reference.softmax_attention_step` for one token."""
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    q, k, v = (_heads(x)[:, 0] for x in (q, k, v))
    caches = {"k_cache": k_cache, "v_cache": v_cache, "length": length}
    return attention(q, k, v, scale=scale, window=window, keep_first=keep_first, sinks=sinks, **caches)[:, None]


# ----------------------------------------------------------------------------------------------------------------------
# What the operators take

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def supports(q, k, v, g=None, beta=None, *, state, **_):
    """None if a recurrent step can run here, else the reason why not."""
    if q.dtype not in FLOATS or state.dtype != torch.float32 or not state.is_contiguous():
        return f"{q.dtype} inputs and a state in {state.dtype}: states are contiguous and in fp32"
    if q.shape[-1] > 256 or v.shape[-1] > 256:
        return f"head widths K={q.shape[-1]} and V={v.shape[-1]}: at most 256"
    return None


def supports_softmax_attention_step(q, k, v, *, k_cache, **_):
    """None if this step of attention can run here, else the reason why not."""
    if q.dtype not in FLOATS or k_cache.dtype not in FLOATS:
        return f"{q.dtype} inputs and a cache in {k_cache.dtype}"
    if q.shape[1] > 1:
        return f"{q.shape[1]} tokens in one step of attention"
    if q.shape[-1] > 512 or q.shape[2] // k.shape[2] > 64:
        return f"head width {q.shape[-1]}, {q.shape[2] // k.shape[2]} query heads a key head: at most 512 and 64"
    return None
