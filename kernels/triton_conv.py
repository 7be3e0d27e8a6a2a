"""The short convolution in Triton, forward and backward: `causal_conv1d`, with its SiLU and the l2 norm of its first heads.

    p_t = bias + sum_j w_{W-1-j} x_{t-j},  s_t = silu(p_t),  y_t = s_t / |s_t| per head where asked, else s_t
    dx_t = sum_j w_{W-1-j} dp_{t+j},  dw_{W-1-j} = sum_t dp_t x_{t-j}

Memory-bound, if it takes few instructions: 2 bytes in and 2 out an element forward, 4 in and 2 out backward. So a program of one
warp goes along a chunk of tokens, four channels a thread, with the last W - 1 inputs in registers, and in the backward the sums for
the last W - 1 gradients and for dW too: everything is read and converted once. (A tile of tokens that reads its inputs W times,
shifted, out of L1, and its dp back from a scratch tile, took 0.28 ms backward at B8 T4096 D2048 on an H200, bound by its
instructions.) Loads are issued for U tokens at once. Chunks are as long as it takes to fill the GPU once; each but the first reads
W - 1 tokens before it, and in the backward as many behind. dW and dbias are summed over chunks in the same order every time.

y may come in up to three slices of its channels, a tensor each, whose gradients are then read where they are: autograd puts those
of slices of one tensor side by side first (compiled, Mamba-2's two kernels that do so and compute the gates' gradients took 29 of a
step's 204 ms, H200). A program's channels lie within one slice.
"""

import functools
import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from . import launch
from .launch import given
from .reference import l2_norm_heads, segment_runs

WIDEST = 8  # taps
SLICES = 3
HEADS = (16, 32, 64, 128, 256)  # channels of a head that a program can hold whole; others are normalised after the convolution


@triton.jit
def _parameters(weight, bias, o_d, m_d, W: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The weights of x_t, x_{t-1}, .. and the bias, 0 if there is none: a tuple of W + 1."""
    parameters = ()
    for j in tl.static_range(W):
        parameters = parameters + (tl.load(weight + o_d * W + (W - 1 - j), mask=m_d, other=0.0).to(tl.float32),)
    if HAS_BIAS:
        return parameters + (tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32),)
    return parameters + (tl.zeros_like(o_d).to(tl.float32),)


@triton.jit
def _place(ids, t, T, HAS_IDS: tl.constexpr):
    """Of token t: whether it is one, whether the one before is of its document, whether the row's padding begins with it.

    What precedes token 0 belongs to its document; ids points at the row's token 0.
    """
    if not HAS_IDS:
        return t < T, True, False
    here = tl.load(ids + t, mask=(t >= 0) & (t < T), other=0)
    before = tl.load(ids + t - 1, mask=(t > 0) & (t <= T), other=1)
    return (t < T) & (here > 0), (t <= 0) | (here == before), (here <= 0) & (before > 0) & (t >= 0) & (t <= T)


@triton.jit
def _zeros(o_d, N: tl.constexpr):
    """A tuple of N vectors of zeros."""
    zeros = ()
    for _j in tl.static_range(N):
        zeros = zeros + (tl.zeros_like(o_d).to(tl.float32),)
    return zeros


@triton.jit
def _block(i_d, D, s1, s2, BD: tl.constexpr, SPLIT: tl.constexpr):
    """Of block i_d of the channels: its first, the first of its slice and of the next. Slices begin at 0, s1 and s2 (D: none)."""
    if not SPLIT:
        return i_d * BD, 0, D
    n1 = tl.cdiv(s1, BD)
    n2 = n1 + tl.cdiv(s2 - s1, BD)
    start = tl.where(i_d < n1, 0, tl.where(i_d < n2, s1, s2))
    end = tl.where(i_d < n1, s1, tl.where(i_d < n2, s2, D))
    return start + (i_d - tl.where(i_d < n1, 0, tl.where(i_d < n2, n1, n2))) * BD, start, end


@triton.jit
def _of_slice(start, s1, s2, a, b, c, SPLIT: tl.constexpr):
    """What of a, b and c belongs to the slice that begins at `start`."""
    if not SPLIT:
        return a
    return tl.where(start < s1, a, tl.where(start < s2, b, c))


@triton.jit
def _if(condition, o_d, end):
    """The mask of the channels before `end` (None: of all), where a scalar condition holds. (The interpreter cannot `&` a scalar
    and a block.)"""
    if end is None:
        o_d, end = tl.zeros_like(o_d), 1
    return o_d < tl.where(condition, end, 0)


@triton.jit
def _row(x, t, T, o_d, end, x_t):
    """x_t, in its type; x points at the row's token 0."""
    return tl.load(x + tl.cast(t, tl.int64) * x_t + o_d, mask=_if((t >= 0) & (t < T), o_d, end), other=0.0)


@triton.jit
def _pushed(new, rows):
    """The tuple `rows` with `new` before it, without its last."""
    pushed = (new,)
    for j in tl.static_range(len(rows) - 1):
        pushed = pushed + (rows[j],)
    return pushed


@triton.jit
def _kept(rows, same, HAS_IDS: tl.constexpr):
    """The inputs before a token, 0 where its document begins with it."""
    if not HAS_IDS:
        return rows
    kept = ()
    for j in tl.static_range(len(rows)):
        kept = kept + (tl.where(same, rows[j], 0.0),)
    return kept


@triton.jit
def _before(x, state, ids, t0, T, o_d, end, D, x_t, W: tl.constexpr, HAS_STATE: tl.constexpr, HAS_IDS: tl.constexpr):
    """x_{t0-1}, x_{t0-2}, .., of x_{t0-1}'s document, and how many tokens before t0 - 1 belong to it, W - 2 at most."""
    rows, back = _zeros(o_d, W - 1), 0
    for i in tl.static_range(W - 1):
        t = t0 - (W - 1) + i
        b_x = _row(x, t, T, o_d, end, x_t).to(tl.float32)
        if HAS_STATE:
            b_x += tl.load(state + (t + W - 1) * D + o_d, mask=_if(t < 0, o_d, end), other=0.0).to(tl.float32)
        real, same, ends = _place(ids, t, T, HAS_IDS)
        rows = _pushed(b_x, _kept(rows, same, HAS_IDS))
        if HAS_IDS and i > 0:
            back = tl.where(same, back + 1, 0)
    return rows, back


@triton.jit
def _convolved(b_x, rows, parameters, W: tl.constexpr):
    """p of a token from its input and those before it."""
    b_p = parameters[W] + b_x * parameters[0]
    for j in tl.static_range(1, W):
        b_p += rows[j - 1] * parameters[j]
    return b_p


@triton.jit(do_not_specialize=["T", "NT", "L", "n_l2"])
def forward_kernel(
    x, weight, bias, state, ids, y0, y1, y2, final, T, D, s1, s2, ND, NT, L, n_l2, x_b, x_t, eps,
    W: tl.constexpr, BD: tl.constexpr, U: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_IDS: tl.constexpr,
    SILU: tl.constexpr, L2: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """y, whole (B, T, D) or in slices (B, T, n), for L tokens, BD channels; and the final state (B, W-1, D) by the program with the
    row's last real token."""
    i = tl.program_id(0).to(tl.int64)
    i_d, i_t, i_b = (i % ND).to(tl.int32), ((i // ND) % NT).to(tl.int32), i // (ND * NT)
    x, ids, state, final = x + i_b * x_b, ids + i_b * T, state + i_b * (W - 1) * D, final + i_b * (W - 1) * D
    channel, start, end = _block(i_d, D, s1, s2, BD, SPLIT)
    t0, o_d, y_t = i_t * L, channel + tl.arange(0, BD), end - start
    y = _of_slice(start, s1, s2, y0, y1, y2, SPLIT) + (i_b * T * y_t - start)
    m_d, end = o_d < end, None if WHOLE else end
    parameters = _parameters(weight, bias, o_d, m_d, W, HAS_BIAS)
    rows, back = _before(x, state, ids, t0, T, o_d, end, D, x_t, W, HAS_STATE, HAS_IDS)
    n = -1  # real tokens of the row, once its padding begins
    for first in range(t0, t0 + L, U):
        t = tl.cast(first, tl.int32)
        loaded = ()
        for u in tl.static_range(U):
            loaded = loaded + (_row(x, t + u, T, o_d, end, x_t),)
        for u in tl.static_range(U):
            b_x = loaded[u].to(tl.float32)
            real, same, ends = _place(ids, t + u, T, HAS_IDS)
            rows = _kept(rows, same, HAS_IDS)
            b_y = _convolved(b_x, rows, parameters, W)
            rows = _pushed(b_x, rows)
            if SILU:
                b_y *= tl.sigmoid(b_y)
            if L2:  # a program's channels are one head
                b_y *= tl.where(channel < n_l2, tl.rsqrt(tl.sum(b_y * b_y, axis=0) + eps), 1.0)
            if HAS_IDS:
                b_y, n = tl.where(real, b_y, 0.0), tl.where(ends, t + u, n)
            p_y = y + tl.cast(t + u, tl.int64) * y_t + o_d
            tl.store(p_y, b_y.to(y.dtype.element_ty), mask=_if(t + u < T, o_d, end))

    last = i_t == NT - 1
    if HAS_IDS:
        last &= tl.load(ids + T - 1) > 0
        n = tl.where(last, T, n)
        last = n >= 0
    else:
        n = T
    if last:
        same = m_d
        for j in tl.static_range(W - 1):
            t = tl.zeros_like(o_d) + (n - 1 - j)
            if HAS_IDS and j > 0:
                inside = same & (t >= 0)
                same &= (t < 0) | (tl.load(ids + t, mask=inside, other=0) == tl.load(ids + t + 1, mask=inside, other=0))
            b_x = tl.load(x + t.to(tl.int64) * x_t + o_d, mask=same & (t >= 0), other=0.0).to(tl.float32)
            if HAS_STATE:
                b_x += tl.load(state + (t + W - 1) * D + o_d, mask=same & (t < 0), other=0.0).to(tl.float32)
            tl.store(final + (W - 2 - j) * D + o_d, b_x.to(final.dtype.element_ty), mask=m_d)


@triton.jit
def _before_activation(b_p, b_dy, normed, eps, SILU: tl.constexpr, L2: tl.constexpr):
    """dp of a token."""
    b_s = b_p
    if SILU:
        b_sigma = tl.sigmoid(b_p)
        b_s = b_p * b_sigma
    if L2:
        b_rho = tl.where(normed, tl.rsqrt(tl.sum(b_s * b_s, axis=0) + eps), 1.0)
        along = tl.where(normed, tl.sum(b_s * b_dy, axis=0) * b_rho * b_rho, 0.0)
        b_dy = b_rho * (b_dy - b_s * along)
    if SILU:
        b_dy *= b_sigma + b_s * (1.0 - b_sigma)
    return b_dy


@triton.jit
def _spread(b_dp, sums, back, parameters, W: tl.constexpr, HAS_IDS: tl.constexpr):
    """dx of token t - W + 1, and the sums for the dx of tokens t, t - 1, .. with token t's dp in those of `back` before."""
    added = (b_dp * parameters[0],)
    for j in tl.static_range(1, W):
        b_w = parameters[j]
        if HAS_IDS:
            b_w = tl.where(j <= back, b_w, 0.0)
        added = added + (sums[j - 1] + b_dp * b_w,)
    kept = ()
    for j in tl.static_range(W - 1):
        kept = kept + (added[j],)
    return added[W - 1], kept


@triton.jit(do_not_specialize=["T", "NT", "L", "n_l2"])
def backward_kernel(
    x, weight, bias, state, ids, dy0, dy1, dy2, dx, dstate, parts, T, D, s1, s2, ND, NT, L, n_l2, x_b, x_t,
    dy0_b, dy0_t, dy1_b, dy1_t, dy2_b, dy2_t, eps,
    W: tl.constexpr, BD: tl.constexpr, U: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_IDS: tl.constexpr,
    SILU: tl.constexpr, L2: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dx (B, T, D) of L tokens, BD channels; dstate (B, W-1, D); and the chunk's part of dW (D, W) and dbias, one behind the other
    in a row of `parts`. The gradient of a state is that of the inputs before token 0."""
    i = tl.program_id(0).to(tl.int64)
    i_d, i_t, i_b = (i % ND).to(tl.int32), ((i // ND) % NT).to(tl.int32), i // (ND * NT)
    x, ids, state, dx = x + i_b * x_b, ids + i_b * T, state + i_b * (W - 1) * D, dx + i_b * T * D
    channel, start, end = _block(i_d, D, s1, s2, BD, SPLIT)
    t0, o_d, dy_t = i_t * L, channel + tl.arange(0, BD), _of_slice(start, s1, s2, dy0_t, dy1_t, dy2_t, SPLIT)
    dy = _of_slice(start, s1, s2, dy0, dy1, dy2, SPLIT) + (i_b * _of_slice(start, s1, s2, dy0_b, dy1_b, dy2_b, SPLIT) - start)
    m_d, normed, end = o_d < end, channel < n_l2, None if WHOLE else end
    parameters = _parameters(weight, bias, o_d, m_d, W, HAS_BIAS)
    rows, back = _before(x, state, ids, t0, T, o_d, end, D, x_t, W, HAS_STATE, HAS_IDS)
    sums, b_dw = _zeros(o_d, W - 1), _zeros(o_d, W + HAS_BIAS)
    for first in range(t0, t0 + L, U):
        t = tl.cast(first, tl.int32)
        loaded, above = (), ()
        for u in tl.static_range(U):
            loaded = loaded + (_row(x, t + u, T, o_d, end, x_t),)
            above = above + (_row(dy, t + u, T, o_d, end, dy_t),)
        for u in tl.static_range(U):
            b_x, b_dp = loaded[u].to(tl.float32), above[u].to(tl.float32)
            real, same, ends = _place(ids, t + u, T, HAS_IDS)
            rows = _kept(rows, same, HAS_IDS)
            if SILU or L2:
                b_dp = _before_activation(_convolved(b_x, rows, parameters, W), b_dp, normed, eps, SILU, L2)
            if HAS_IDS:
                b_dp, back = tl.where(real, b_dp, 0.0), tl.where(same, back + 1, 0)
            new = (b_dw[0] + b_dp * b_x,)
            for j in tl.static_range(1, W):
                new = new + (b_dw[j] + b_dp * rows[j - 1],)
            if HAS_BIAS:
                new = new + (b_dw[W] + b_dp,)
            b_dw, rows = new, _pushed(b_x, rows)
            b_dx, sums = _spread(b_dp, sums, back, parameters, W, HAS_IDS)
            o = t + u - (W - 1)
            tl.store(dx + tl.cast(o, tl.int64) * D + o_d, b_dx.to(dx.dtype.element_ty), mask=_if((o >= t0) & (o < T), o_d, end))
            if HAS_STATE:
                p_dstate = dstate + (i_b * (W - 1) + o + W - 1) * D + o_d
                tl.store(p_dstate, b_dx.to(dstate.dtype.element_ty), mask=_if(o < 0, o_d, end))
    p_parts = parts + (i_b * NT + i_t) * (W + HAS_BIAS) * D
    for j in tl.static_range(W):
        tl.store(p_parts + o_d * W + (W - 1 - j), b_dw[j], mask=m_d)
    if HAS_BIAS:
        tl.store(p_parts + W * D + o_d, b_dw[W], mask=m_d)
    for i in tl.static_range(W - 1):  # what the tokens behind the chunk add to its last gradients
        t = t0 + L + i
        b_x, b_dp = _row(x, t, T, o_d, end, x_t).to(tl.float32), _row(dy, t, T, o_d, end, dy_t).to(tl.float32)
        real, same, ends = _place(ids, t, T, HAS_IDS)
        rows = _kept(rows, same, HAS_IDS)
        if SILU or L2:
            b_dp = _before_activation(_convolved(b_x, rows, parameters, W), b_dp, normed, eps, SILU, L2)
        if HAS_IDS:
            b_dp, back = tl.where(real, b_dp, 0.0), tl.where(same, back + 1, 0)
        rows = _pushed(b_x, rows)
        b_dx, sums = _spread(b_dp, sums, back, parameters, W, HAS_IDS)
        o = t - (W - 1)
        tl.store(dx + tl.cast(o, tl.int64) * D + o_d, b_dx.to(dx.dtype.element_ty), mask=_if(o < T, o_d, end))


# ----------------------------------------------------------------------------------------------------------------------
# Launches

# Channels, tokens loaded at once, and how many warps should share the work: enough to fill a GPU once, at the 16 an SM holds when
# a thread has 128 registers (20 with 96).
LAUNCH = {
    (architecture, size): {
        "forward": {"BD": 128, "U": 8, "num_warps": 1, "num_stages": 1, "programs": 2640},
        "backward": {"BD": 128, "U": 4, "num_warps": 1, "num_stages": 1, "maxnreg": 128, "programs": 2112},
    }
    for architecture in launch.ARCHITECTURES
    for size in (2, 4)
}
SHORTEST = 32  # tokens of a chunk


class Plan:
    """A launch: L tokens of a chunk, NT chunks of a row, ND blocks of channels, where slices begin, programs and options."""

    def __init__(self, table, kernel, B, T, split, W, flags, l2_width):
        options = dict(table[kernel])
        programs = options.pop("programs")
        if l2_width:  # a program must hold a whole head
            options |= {"BD": l2_width, "num_warps": max(1, l2_width // 128)}
        if W > 4:
            options.pop("maxnreg", None)
        U, self.ND = options["U"], sum(-(-n // options["BD"]) for n in split)
        self.starts = (*itertools.accumulate(split), sum(split))[:2]
        per_row = max(1, programs // (B * self.ND * options["num_warps"]))
        self.L = max(SHORTEST, -(-T // (per_row * U)) * U)
        self.NT = -(-T // self.L)
        self.programs = self.ND * self.NT * B
        whole = all(n % options["BD"] == 0 for n in split)  # blocks of channels, which then need no mask
        self.options = options | flags | {"W": W, "L2": l2_width > 0, "SPLIT": len(split) > 1, "WHOLE": whole}
        self.launch = launch.launch(forward_kernel if kernel == "forward" else backward_kernel, **self.options)


@functools.lru_cache(maxsize=1024)
def _plan(kernel, architecture, size, B, T, split, W, bias, state, ids, silu, l2_width):
    flags = {"HAS_BIAS": bias, "HAS_STATE": state, "HAS_IDS": ids, "SILU": silu}
    return Plan(LAUNCH[architecture, size], kernel, B, T, split, W, flags, l2_width)


def plan(kernel, x, weight, bias, state, ids, split, silu, l2_width):
    sizes = *x.shape[:2], tuple(split), weight.shape[1]
    given = bias is not None, state is not None, ids is not None
    return _plan(kernel, launch.architecture(x), x.element_size(), *sizes, *given, silu, l2_width)


def _three(slices):
    """The slices and, where there are fewer than three, the last of them again."""
    return (*slices, *slices[-1:] * (SLICES - len(slices)))


def _forward_pass(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None, ids: torch.Tensor | None,
    split: Sequence[int], silu: bool, l2_heads: int, l2_width: int, eps: float,
) -> list[torch.Tensor]:  # fmt: skip
    """The final state and the slices of y."""
    B, T, D = x.shape
    ys, final = [x.new_empty(B, T, n) for n in split], x.new_empty(B, weight.shape[1] - 1, D)
    p = plan("forward", x, weight, bias, state, ids, split, silu, l2_width)
    p.launch(
        p.programs, x, weight, given(bias, weight), given(state, weight), given(ids, weight), *_three(ys), final, T, D, *p.starts,
        p.ND, p.NT, p.L, l2_heads * l2_width, x.stride(0), x.stride(1), eps,
    )  # fmt: skip
    return [final, *ys]


def _backward_pass(x, weight, bias, state, ids, dys, split, silu, l2_heads, l2_width, eps):
    """dx, dW, dbias and dstate, the last two None where there is no such input."""
    B, T, D = x.shape
    W = weight.shape[1]
    dys = _three([dy if dy.stride(2) == 1 else dy.contiguous() for dy in dys])
    dx = x.new_empty(B, T, D)
    dstate = None if state is None else torch.empty_like(state)
    p = plan("backward", x, weight, bias, state, ids, split, silu, l2_width)
    parts = x.new_empty(B * p.NT, D * (W if bias is None else W + 1), dtype=torch.float32)
    p.launch(
        p.programs, x, weight, given(bias, weight), given(state, weight), given(ids, weight), *dys, dx, given(dstate, dx), parts, T,
        D, *p.starts, p.ND, p.NT, p.L, l2_heads * l2_width, x.stride(0), x.stride(1), *(n for dy in dys for n in dy.stride()[:2]),
        eps,
    )  # fmt: skip
    total, dbias = parts.sum(0), None
    if bias is not None:
        total, dbias = total[: D * W], total[D * W :].to(bias.dtype, copy=True)
    return dx, total.view(D, W).to(weight.dtype), dbias, dstate


_forward = torch.library.custom_op("hybrid::causal_conv1d", _forward_pass, mutates_args=())


@torch.library.custom_op("hybrid::causal_conv1d_backward", mutates_args=())
def _backward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None, ids: torch.Tensor | None,
    dys: Sequence[torch.Tensor], split: Sequence[int], silu: bool, l2_heads: int, l2_width: int, eps: float,
) -> list[torch.Tensor]:  # fmt: skip
    return launch.all_tensors(_backward_pass(x, weight, bias, state, ids, dys, split, silu, l2_heads, l2_width, eps))


@_forward.register_fake
def _(x, weight, bias, state, ids, split, silu, l2_heads, l2_width, eps):
    B, T, D = x.shape
    return [x.new_empty(B, weight.shape[1] - 1, D), *(x.new_empty(B, T, n) for n in split)]


@_backward.register_fake
def _(x, weight, bias, state, ids, dys, split, silu, l2_heads, l2_width, eps):
    dbias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    dstate = x.new_empty(0) if state is None else torch.empty_like(state)
    return [x.new_empty(x.shape), weight.new_empty(weight.shape), dbias, dstate]


def _save(ctx, inputs, output):
    x, weight, bias, state, ids, *ctx.options = inputs
    ctx.save_for_backward(x, weight, bias, state, ids)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grads, backward=_backward):
    x, weight, bias, state, ids = ctx.saved_tensors
    dfinal, *dys = grads
    dys = [x.new_zeros(*x.shape[:2], n) if dy is None else dy for dy, n in zip(dys, ctx.options[0], strict=True)]
    dx, dweight, dbias, dstate = backward(x, weight, bias, state, ids, dys, *ctx.options)
    dbias, dstate = None if bias is None else dbias, None if state is None else dstate
    if dfinal is not None:
        dx, dstate = _add_final(dx, dstate, dfinal, ids)
    return dx, dweight, dbias, dstate, None, None, None, None, None, None


def _add_final(dx, dstate, dfinal, ids):
    """The gradient of the final state goes to the inputs it is made of: the last ones of the last document, or of the state."""
    B, T, D = dx.shape
    n = dfinal.shape[1]
    before = dx.new_zeros(B, n, D) if dstate is None else dstate.to(dx.dtype)
    inputs = torch.cat([before, dx], dim=1)
    at = torch.arange(T, T + n, device=dx.device).expand(B, n)
    if ids is not None:
        run, valid = segment_runs(ids)
        at = valid.sum(1, keepdim=True) + torch.arange(n, device=dx.device)
        dfinal = dfinal * (torch.nn.functional.pad(run, (n, 0)).gather(1, at) == run[:, -1:])[..., None]
    at = at[..., None].expand(-1, -1, D)
    inputs = inputs.scatter(1, at, inputs.gather(1, at) + dfinal.to(dx.dtype))
    return inputs[:, n:], None if dstate is None else inputs[:, :n].to(dstate.dtype)


_forward.register_autograd(_differentiate, setup_context=_save)
_direct = launch.direct(
    _forward_pass, _save, lambda ctx, *grads: _differentiate(ctx, grads, backward=_backward_pass), outputs=1 + SLICES
)


def supports(x, weight, bias=None, **_):
    """None if these inputs can run here, else the reason why not."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{x.dtype} inputs"
    if not 2 <= weight.shape[1] <= WIDEST:
        return f"a width of {weight.shape[1]}: it must be between 2 and {WIDEST}"
    return None


def _in_one_pass(split, l2_heads):
    """Whether the kernels can write y in these slices: there are few, and none begins within a head that is normalised."""
    n, width = l2_heads or (0, 1)
    starts = itertools.accumulate(split[:-1])
    return len(split) <= SLICES and 0 not in split and all(start >= n * width or start % width == 0 for start in starts)


def causal_conv1d(
    x, weight, bias=None, *, activation=None, l2_heads=None, split=None, initial_state=None, segment_ids=None, eps=1e-6
):
    """`reference.causal_conv1d`; x may be a slice of a wider projection, weight and bias are used in their own precision."""
    if l2_heads is not None and l2_heads[1] not in HEADS:
        options = {"activation": activation, "initial_state": initial_state, "segment_ids": segment_ids}
        y, final = causal_conv1d(x, weight, bias, **options)
        y = l2_norm_heads(y, *l2_heads, eps)
        return y if split is None else y.split(split, dim=-1), final
    slices = split if split is not None and _in_one_pass(split, l2_heads) else [x.shape[2]]
    if sum(slices) != x.shape[2]:
        raise ValueError(f"split={split} adds up to {sum(split)}: x has {x.shape[2]} channels")
    x = x if x.stride(2) == 1 else x.contiguous()
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    state = None if initial_state is None else initial_state.contiguous()
    ids = None if segment_ids is None else segment_ids.contiguous()
    inputs = x, weight, bias, state, ids, slices, activation == "silu", *(l2_heads or (0, 0)), eps
    final, *ys = _forward(*inputs) if launch.traced(x, weight, bias, state, ids) else _direct(*inputs)
    if split is None:
        return ys[0], final
    return tuple(ys) if slices is split else ys[0].split(split, dim=-1), final
