"""The norms in Triton, forward and backward, in one pair of kernels: `rms_norm`, `layer_norm`, `l2_norm`, `gated_rms_norm`.

    h = x, or x * act(z) where the gate comes first;  h <- h - mean(h) for layer_norm
    n = h / sqrt(mean(h^2) + eps)  (sum for l2_norm);  y = n * w + b, then * act(z) where the gate comes last
    dh = (dn - n mean(dn * n) - mean(dn)) / sqrt(..), with sums for l2_norm, and mean(dn) for layer_norm only

Memory-bound: each element is read and written once, forward and backward; what the backward needs of a row it computes again from
the row, which it must read anyway. A row `(..., D)` is held whole. Tensors are taken as (N, H, D) with any strides of the first
two, so that a slice of a fused projection is not copied. dw and db are summed in registers over all rows of a program, then over
programs: in the same order every time. Zhang and Sennrich 1910.07467; Ba et al. 1607.06450.
"""

import functools

import torch
import triton
import triton.language as tl

from . import launch
from .launch import given

WIDEST = 16384  # channels of a row
NO_GATE, GATE_LAST, GATE_FIRST = 0, 1, 2


@triton.jit
def _gate(z, SILU: tl.constexpr):
    """act(z) and its derivative."""
    sigma = tl.sigmoid(z)
    if SILU:
        return z * sigma, sigma * (1.0 + z * (1.0 - sigma))
    return sigma, sigma * (1.0 - sigma)


@triton.jit
def _normalised(b_h, m, inverse, eps, D, CENTER: tl.constexpr):
    """n and 1 / sqrt(..) of rows that are 0 beyond their D channels."""
    if CENTER:
        b_h = tl.where(m, b_h - (tl.sum(b_h, axis=1) / D)[:, None], 0.0)
    b_rho = tl.rsqrt(tl.sum(b_h * b_h, axis=1) * inverse + eps)
    return b_h * b_rho[:, None], b_rho


@triton.jit(do_not_specialize=["R", "H", "GROUPS"])
def forward_kernel(
    x, z, weight, bias, y, R, H, GROUPS, D, x_n, x_h, z_n, z_h, inverse, eps, offset,
    BR: tl.constexpr, BD: tl.constexpr, CENTER: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """y of BR rows. Row r is (r // H, r % H) of the strided inputs; a program's rows share r % GROUPS, which picks the weight."""
    i_g = tl.program_id(0) % GROUPS
    r = ((tl.program_id(0) // GROUPS).to(tl.int64) * BR + tl.arange(0, BR)) * GROUPS + i_g
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    m = (r < R)[:, None] & m_d[None, :]
    b_y = tl.load(x + ((r // H) * x_n + (r % H) * x_h)[:, None] + o_d[None, :], mask=m, other=0.0).to(tl.float32)
    if GATE != 0:
        b_z = tl.load(z + ((r // H) * z_n + (r % H) * z_h)[:, None] + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        b_a, _ = _gate(b_z, SILU)
    if GATE == 2:
        b_y *= b_a
    b_y, _ = _normalised(b_y, m, inverse, eps, D, CENTER)
    if HAS_WEIGHT:
        b_y *= (tl.load(weight + i_g * D + o_d, mask=m_d, other=0.0).to(tl.float32) + offset)[None, :]
    if HAS_BIAS:
        b_y += tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    if GATE == 1:
        b_y *= b_a
    tl.store(y + r[:, None] * D + o_d[None, :], b_y.to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["R", "H", "GROUPS", "N", "P"])
def backward_kernel(
    x, z, weight, dy, dx, dz, dweight, dbias, R, H, GROUPS, N, P, D, x_n, x_h, z_n, z_h, dy_n, dy_h, inverse, eps, offset,
    BR: tl.constexpr, BD: tl.constexpr, CENTER: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """dx, dz, and this program's parts of dweight (P, GROUPS, D) and dbias; P programs share the N tiles of each group."""
    i_p, i_g = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    if HAS_WEIGHT:
        b_w = tl.load(weight + i_g * D + o_d, mask=m_d, other=0.0).to(tl.float32) + offset
        b_dw = tl.zeros([BR, BD], dtype=tl.float32)
    if HAS_BIAS:
        b_db = tl.zeros([BR, BD], dtype=tl.float32)
    for i in range(i_p, N, P):
        r = (tl.cast(i, tl.int64) * BR + tl.arange(0, BR)) * GROUPS + i_g
        m = (r < R)[:, None] & m_d[None, :]
        b_x = tl.load(x + ((r // H) * x_n + (r % H) * x_h)[:, None] + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        b_dn = tl.load(dy + ((r // H) * dy_n + (r % H) * dy_h)[:, None] + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        b_h = b_x
        if GATE != 0:
            b_z = tl.load(z + ((r // H) * z_n + (r % H) * z_h)[:, None] + o_d[None, :], mask=m, other=0.0).to(tl.float32)
            b_a, b_da = _gate(b_z, SILU)
        if GATE == 2:
            b_h = b_x * b_a
        b_n, b_rho = _normalised(b_h, m, inverse, eps, D, CENTER)
        if GATE == 1:
            b_dz = b_dn * b_n * b_da
            if HAS_WEIGHT:
                b_dz *= b_w[None, :]
            b_dn *= b_a
        if HAS_BIAS:
            b_db += b_dn
        if HAS_WEIGHT:
            b_dw += b_dn * b_n
            b_dn *= b_w[None, :]
        b_dh = b_dn - b_n * (tl.sum(b_dn * b_n, axis=1) * inverse)[:, None]
        if CENTER:
            b_dh -= (tl.sum(b_dn, axis=1) / D)[:, None]
        b_dh *= b_rho[:, None]
        if GATE == 2:
            b_dz = b_dh * b_x * b_da
            b_dh *= b_a
        tl.store(dx + r[:, None] * D + o_d[None, :], b_dh.to(dx.dtype.element_ty), mask=m)
        if GATE != 0:
            tl.store(dz + r[:, None] * D + o_d[None, :], b_dz.to(dz.dtype.element_ty), mask=m)
    p = tl.program_id(0).to(tl.int64) * D + o_d
    if HAS_WEIGHT:
        tl.store(dweight + p, tl.sum(b_dw, axis=0), mask=m_d)
    if HAS_BIAS:
        tl.store(dbias + p, tl.sum(b_db, axis=0), mask=m_d)


# ----------------------------------------------------------------------------------------------------------------------
# Launches

# Elements of a program's tile (rows beyond that get more warps), and for the backward how many programs share the rows; narrow rows
# are those of a head.
LAUNCH = {
    (architecture, size): {
        "forward": {"elements": 4096, "num_warps": 4, "num_stages": 1},
        "forward_narrow": {"elements": 2048, "num_warps": 4, "num_stages": 1},
        "backward": {"elements": 2048, "num_warps": 4, "num_stages": 1, "programs": 528},
        "backward_narrow": {"elements": 4096, "num_warps": 4, "num_stages": 1, "programs": 264},
    }
    for architecture in launch.ARCHITECTURES
    for size in (2, 4)
}
NARROW = 256


class Plan:
    """A launch: R rows, H a token, in groups with a weight each; N tiles a group, P programs each (backward), options."""

    def __init__(self, table, kernel, N, H, D, groups, constants):
        options = dict(table[f"{kernel}_narrow" if D <= NARROW else kernel])
        elements, programs, BD = options.pop("elements"), options.pop("programs", None), max(16, triton.next_power_of_2(D))
        options["num_warps"] = min(32, options["num_warps"] * max(1, BD // elements))
        self.R, self.H, self.D, self.groups = N * H, H, D, groups
        self.N = -(-self.R // groups // max(1, elements // BD))
        self.P = self.N if programs is None else max(1, min(self.N, programs // groups))
        self.programs = self.P * groups
        self.options = options | constants | {"BR": max(1, elements // BD), "BD": BD}
        self.launch = launch.launch(forward_kernel if kernel == "forward" else backward_kernel, **self.options)


@functools.lru_cache(maxsize=1024)
def _plan(kernel, architecture, size, N, H, D, groups, weight, bias, center, gate, silu):
    constants = {"CENTER": center, "HAS_WEIGHT": weight, "HAS_BIAS": bias, "GATE": gate, "SILU": silu}
    return Plan(LAUNCH[architecture, size], kernel, N, H, D, groups, constants)


def plan(kernel, x, weight, bias, center, gate, silu):
    """Of rows x (N, H, D)."""
    groups = 1 if weight is None else weight.numel() // x.shape[2]
    flags = weight is not None, bias is not None, center, gate, silu
    return _plan(kernel, launch.architecture(x), x.element_size(), *x.shape, groups, *flags)


def _rows(x):
    """x `(..., D)` as (N, H, D), a view wherever there is one, with channels side by side."""
    x = x.reshape(-1, x.shape[-2] if x.ndim > 1 else 1, x.shape[-1])
    return x if x.stride(2) == 1 else x.contiguous()


def _forward_pass(
    x: torch.Tensor, z: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, offset: float,
    mean: bool, center: bool, gate: int, silu: bool,
) -> torch.Tensor:  # fmt: skip
    y = x.new_empty(x.shape)
    x = _rows(x)
    z = x if z is None else _rows(z)
    p = plan("forward", x, weight, bias, center, gate, silu)
    p.launch(
        p.programs, x, z, given(weight, x), given(bias, x), y, p.R, p.H, p.groups, p.D,
        x.stride(0), x.stride(1), z.stride(0), z.stride(1), 1.0 / p.D if mean else 1.0, eps, offset,
    )  # fmt: skip
    return y


def _backward_pass(x, z, weight, bias, dy, eps, offset, mean, center, gate, silu):
    """dx, dz, dweight, dbias; None where there is no such input."""
    dx, dz = x.new_empty(x.shape), None if z is None else z.new_empty(z.shape)
    x, dy = _rows(x), _rows(dy)
    z = x if z is None else _rows(z)
    p = plan("backward", x, weight, bias, center, gate, silu)
    dweight, dbias = (None if w is None else x.new_empty(p.P, p.groups * p.D, dtype=torch.float32) for w in (weight, bias))
    p.launch(
        p.programs, x, z, given(weight, x), dy, dx, given(dz, dx), given(dweight, dx), given(dbias, dx), p.R, p.H, p.groups,
        p.N, p.P, p.D, x.stride(0), x.stride(1), z.stride(0), z.stride(1), dy.stride(0), dy.stride(1),
        1.0 / p.D if mean else 1.0, eps, offset,
    )  # fmt: skip
    dweight = None if weight is None else dweight.sum(0).view(weight.shape).to(weight.dtype)
    dbias = None if bias is None else dbias.sum(0).view(bias.shape).to(bias.dtype)
    return dx, dz, dweight, dbias


_forward = torch.library.custom_op("hybrid::norm", _forward_pass, mutates_args=())


@torch.library.custom_op("hybrid::norm_backward", mutates_args=())
def _backward(
    x: torch.Tensor, z: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, dy: torch.Tensor, eps: float,
    offset: float, mean: bool, center: bool, gate: int, silu: bool,
) -> list[torch.Tensor]:  # fmt: skip
    return launch.all_tensors(_backward_pass(x, z, weight, bias, dy, eps, offset, mean, center, gate, silu))


@_forward.register_fake
def _(x, z, weight, bias, eps, offset, mean, center, gate, silu):
    return x.new_empty(x.shape)


@_backward.register_fake
def _(x, z, weight, bias, dy, eps, offset, mean, center, gate, silu):
    return [x.new_empty(0) if u is None else u.new_empty(u.shape) for u in (x, z, weight, bias)]


def _save(ctx, inputs, output):
    x, z, weight, bias, *ctx.options = inputs
    ctx.save_for_backward(x, z, weight, bias)


def _differentiate(ctx, dy, backward=_backward):
    inputs = ctx.saved_tensors
    grads = backward(*inputs, dy, *ctx.options)
    return *(None if x is None else g for x, g in zip(inputs, grads, strict=True)), None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
_direct = launch.direct(
    lambda *inputs: (_forward_pass(*inputs),), _save, functools.partial(_differentiate, backward=_backward_pass)
)


def _norm(x, z, weight, bias, *options):
    return (_forward if launch.traced(x, z, weight, bias) else _direct)(x, z, weight, bias, *options)


def supports(x, weight=None):
    """None if rows x can be normalised here with this weight, else the reason why not."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{x.dtype} inputs"
    if x.shape[-1] > WIDEST:
        return f"rows of {x.shape[-1]} channels: at most {WIDEST}"
    if weight is not None and weight.ndim > 1 and (x.ndim < 2 or tuple(weight.shape) != tuple(x.shape[-2:])):
        return f"a weight {tuple(weight.shape)} for rows of {tuple(x.shape)}: it must be (D,) or (H, D)"
    return None


def supports_rms_norm(x, weight, *_, **__):
    return supports(x, weight)


def supports_layer_norm(x, weight, *_, **__):
    return supports(x, weight)


def supports_l2_norm(x, *_, **__):
    return supports(x)


def supports_gated_rms_norm(x, z, weight, *_, **__):
    return f"a gate {tuple(z.shape)} for rows of {tuple(x.shape)}" if z.shape != x.shape else supports(x, weight)


def prefers_eager(**_):
    """Whether eager is the faster: under a compiler, which fuses a norm with what is around it. The norm of a residual sum, forward
    and backward, 65536 x 768 on an H200: 0.74 ms fused, 1.26 with these kernels; 0.45 and 1.17 with a bf16 stream."""
    return torch.compiler.is_compiling()


def rms_norm(x, weight, eps=1e-6, *, unit_offset=False):
    """`reference.rms_norm`; x in any strides, the weight in its own precision."""
    return _norm(x, None, weight.contiguous(), None, eps, float(unit_offset), True, False, NO_GATE, False)


def layer_norm(x, weight, bias=None, eps=1e-5):
    """`reference.layer_norm`."""
    bias = None if bias is None else bias.contiguous()
    return _norm(x, None, weight.contiguous(), bias, eps, 0.0, True, True, NO_GATE, False)


def l2_norm(x, eps=1e-6):
    """`reference.l2_norm`."""
    return _norm(x, None, None, None, eps, 0.0, False, False, NO_GATE, False)


def gated_rms_norm(x, z, weight, eps=1e-6, *, activation="silu", gate_first=False):
    """`reference.gated_rms_norm`."""
    gate = GATE_FIRST if gate_first else GATE_LAST
    return _norm(x, z, weight.contiguous(), None, eps, 0.0, True, False, gate, activation == "silu")
