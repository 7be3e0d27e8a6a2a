"""Cross-entropy of a linear head without all its logits: `linear_cross_entropy` and `linear_cross_entropy_sum`.

    p = softmax(x W^T);  nll_i = -log p_i[label_i];  G_i = p_i - onehot(label_i), 0 without a label
    dx_i = g_i G_i W;  dW = sum_i g_i G_i^T x_i

The gradient is computed in the forward pass, for upstream gradients g of 1: three products, where recomputing the logits in the
backward would take four. Tokens go through in chunks: logits of a chunk into one buffer (cuBLAS), nll and G in place of the logits
(one kernel, a row a program), G W and G^T x (cuBLAS, the latter added up in fp32). A chunk is as long as memory allows, as each one
but the first reads and writes the whole of dW once more: at 50304 x 768 that costs 0.07 ms.

The logits come from memory once and G goes there once. `KEPT` blocks of a row stay in registers between the two, as exp(logit - the
thread's largest), so that they cost one exponential each: with two, those of a row of 50304 take 3.6 us of an SM of the H200, whose
share of the memory traffic takes 6.2. The rest of a row is read and exponentiated again, out of L1 or L2.

dx scales with g token by token. dW does not unless all g are equal, as they are for a mean or a sum: `linear_cross_entropy_sum`,
whose upstream gradient is one number, knows. `linear_cross_entropy` looks: an expanded number shows in the strides; otherwise it
reads back two numbers, and where they differ, or in a CUDA graph, which cannot read back, the logits are computed again and G
scaled before the product.
"""

import functools
import math

import torch
import triton
import triton.language as tl

from . import launch

MEMORY_SHARE = 128  # the logits of a chunk take at most one part in 128 of a GPU's memory: 1.1 GiB of an H200


@triton.jit
def cross_entropy_kernel(
    logits, labels, nll, scale, width, V,
    GRADIENT: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """nll of one row; with GRADIENT its logits become p - onehot, times `scale` of the row where SCALED; 0 without a label.

    The first KEPT blocks stay in registers. Each thread has its own maximum and sum until the end of the row, which is `width`
    elements long: those after the V logits are -inf and become 0.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    VECTOR: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth  # elements that a thread reads at once
    i = tl.program_id(0).to(tl.int64)
    logits += i * width
    label = tl.load(labels + i)
    labelled = label >= 0
    # A label that is no token gives NaN, not another row's logit. Read here: the reductions below have the barriers that keep other
    # threads from writing G in its place first.
    of_label = tl.load(logits + label, mask=labelled & (label < V), other=float("nan")).to(tl.float32) * LOG2E
    o = VECTOR * tl.arange(0, BLOCK // VECTOR)[:, None] + tl.arange(0, VECTOR)[None, :]
    kept, powers = (), ()
    for j in tl.static_range(KEPT):
        kept += (tl.load(logits + j * BLOCK + o, mask=j * BLOCK + o < width, other=-float("inf")),)
    most = tl.full([BLOCK // VECTOR], -1e30, tl.float32)  # finite, as a thread may have no logit
    for j in tl.static_range(KEPT):
        most = tl.maximum(most, tl.max(kept[j].to(tl.float32), axis=1) * LOG2E)
    base, total = most, tl.zeros_like(most)
    for j in tl.static_range(KEPT):
        powers += (tl.exp2(kept[j].to(tl.float32) * LOG2E - base[:, None]),)
        total += tl.sum(powers[j], axis=1)
    for start in range(KEPT * BLOCK, width, BLOCK):
        b_l = tl.load(logits + start + o, mask=start + o < width, other=-float("inf")).to(tl.float32)
        new = tl.maximum(most, tl.max(b_l, axis=1) * LOG2E)
        total = total * tl.exp2(most - new) + tl.sum(tl.exp2(b_l * LOG2E - new[:, None]), axis=1)
        most = new
    top = tl.max(most, axis=0)
    lse = top + tl.log2(tl.sum(total * tl.exp2(most - top), axis=0))
    tl.store(nll + i, tl.where(labelled, (lse - of_label) / LOG2E, 0.0))
    if GRADIENT:
        factor = 1.0
        if SCALED:
            factor = tl.load(scale + i).to(tl.float32)
        lse = tl.where(labelled, lse, float("inf"))
        down = (tl.exp2(base - lse) * factor)[:, None]
        for j in tl.static_range(KEPT):
            tl.store(logits + j * BLOCK + o, (powers[j] * down).to(logits.dtype.element_ty), mask=j * BLOCK + o < width)
        for start in range(KEPT * BLOCK, width, BLOCK):
            p_l = logits + start + o
            b_p = tl.exp2(tl.load(p_l, mask=start + o < width, other=0.0).to(tl.float32) * LOG2E - lse)
            if SCALED:
                b_p *= factor
            tl.store(p_l, b_p.to(logits.dtype.element_ty), mask=start + o < width)
        tl.debug_barrier()  # the label's place is written once more, by one thread
        tl.store(
            logits + label, ((tl.exp2(of_label - lse) - 1.0) * factor).to(logits.dtype.element_ty), mask=labelled & (label < V)
        )


LAUNCH = {
    (architecture, size): {"cross_entropy": {"BLOCK": 4096, "KEPT": kept, "num_warps": 16, "num_stages": 1}}
    for architecture in launch.ARCHITECTURES
    for size, kept in ((2, 12), (4, 8))
}


def row_options(options, width, gradient):
    """The launch options for rows so wide: no more blocks are kept than there are, and none that is not needed again."""
    return options | {"KEPT": min(options["KEPT"], triton.cdiv(width, options["BLOCK"])) if gradient else 0}


def _memory(device):
    """Bytes for the logits of a chunk: a part of all the memory, not of what is free, so that chunks are the same every time."""
    return torch.cuda.get_device_properties(device).total_memory // MEMORY_SHARE if device.type == "cuda" else 2**30


def chunk_length(N, row, memory):
    """Tokens a chunk: N in equal chunks, as few as fit `memory` at `row` bytes a token; a multiple of 256; 1024 always fit."""
    most = max(1024, memory // row // 256 * 256)
    return min(N, triton.cdiv(triton.cdiv(N, triton.cdiv(N, most)), 256) * 256)


def _add_product(out, a, b, first):
    """out (fp32) = a b, or out + a b after the first, in fp32 throughout."""
    beta = 0 if first else 1
    if a.is_cuda and a.dtype != torch.float32:
        torch.ops.aten.addmm.dtype_out(out, a, b, torch.float32, beta=beta, alpha=1, out=out)
    else:
        out.addmm_(a.float(), b.float(), beta=beta)


def _pass(x, weight, labels, *, dx=None, dw=None, scale=None):
    """nll `(N,)`, chunk by chunk; fills dx `(N, d)` and dw `(V, d)` fp32 where given, G scaled by `scale (N,)` where given."""
    N, V = x.shape[0], weight.shape[0]
    weight, gradient = weight.to(x.dtype), dx is not None or dw is not None
    nll = x.new_empty(N, dtype=torch.float32)
    width = triton.cdiv(V, 64) * 64  # whole vectors of 16 bytes, whatever the vocabulary
    n = chunk_length(N, width * x.element_size(), _memory(x.device))
    buffer = x.new_empty(n, width)
    options = row_options(launch.options(LAUNCH, "cross_entropy", x), width, gradient)
    for i in range(0, N, n):
        rows = slice(i, min(N, i + n))
        wide = buffer[: rows.stop - i]
        logits = wide[:, :V]
        torch.mm(x[rows], weight.t(), out=logits)
        wide[:, V:] = -math.inf
        cross_entropy_kernel[(rows.stop - i,)](
            wide, labels[rows], nll[rows], nll[rows] if scale is None else scale[rows], width, V,
            GRADIENT=gradient, SCALED=scale is not None, **options,
        )  # fmt: skip
        if dx is not None:
            torch.mm(logits, weight, out=dx[rows])
        if dw is not None:
            _add_product(dw, logits.t(), x[rows], first=i == 0)
    return nll


def _gradients(x, weight, with_grad):
    dx = x.new_empty(x.shape if with_grad else 0)
    return dx, x.new_empty(weight.shape if with_grad else 0, dtype=torch.float32)


def _forward_pass(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, with_grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """nll, and its gradients dx and dW (fp32) for upstream gradients of 1, of no size without `with_grad`."""
    dx, dw = _gradients(x, weight, with_grad)
    if not x.shape[0]:
        return x.new_empty(0, dtype=torch.float32), dx, dw.zero_()
    filled = {"dx": dx, "dw": dw} if with_grad else {}
    return _pass(x, weight, labels, **filled), dx, dw


_forward = torch.library.custom_op("hybrid::linear_cross_entropy", _forward_pass, mutates_args=())


@_forward.register_fake
def _(x, weight, labels, with_grad):
    return x.new_empty(x.shape[0], dtype=torch.float32), *_gradients(x, weight, with_grad)


def _backward_pass(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, dx: torch.Tensor, dw: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients for upstream gradients g `(N,)`, from those for 1."""
    dx, c = dx * g[:, None].to(dx.dtype), _same_for_all(g, labels)
    if c is None:
        dw = torch.empty_like(dw)
        _pass(x, weight, labels, dw=dw, scale=g.contiguous())
        return dx, dw.to(weight.dtype)
    return dx, (dw * c).to(weight.dtype)


_backward = torch.library.custom_op("hybrid::linear_cross_entropy_backward", _backward_pass, mutates_args=())


@_backward.register_fake
def _(x, weight, labels, dx, dw, g):
    return torch.empty_like(dx), torch.empty_like(dw, dtype=weight.dtype)


def _same_for_all(g, labels):
    """The one value of g at all labels, as a number or a tensor of one; None if there are several, or one cannot tell here."""
    if g.shape[0] <= 1 or g.stride(0) == 0:
        return g[:1]
    if g.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    valid = labels >= 0
    least, most = torch.stack([torch.where(valid, g, math.inf).amin(), torch.where(valid, g, -math.inf).amax()]).tolist()
    return 0.0 if least > most else least if least == most else None


def _save(ctx, inputs, output):
    x, weight, labels, _ = inputs
    ctx.save_for_backward(x, weight, labels, *output[-2:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, g, *_, backward=_backward):
    if g is None:
        return None, None, None, None
    return *backward(*ctx.saved_tensors, g), None, None


_forward.register_autograd(_differentiate, setup_context=_save)
_direct = launch.direct(_forward_pass, _save, functools.partial(_differentiate, backward=_backward_pass))


def _forward_sum_pass(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, with_grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of nll, and what `_forward` returns."""
    nll, dx, dw = _forward_pass(x, weight, labels, with_grad)
    return nll.sum(), nll, dx, dw


_forward_sum = torch.library.custom_op("hybrid::linear_cross_entropy_sum", _forward_sum_pass, mutates_args=())


@_forward_sum.register_fake
def _(x, weight, labels, with_grad):
    nll = x.new_empty(x.shape[0], dtype=torch.float32)
    return nll.new_empty(()), nll, *_gradients(x, weight, with_grad)


def _differentiate_sum(ctx, g, *_):
    if g is None:
        return None, None, None, None
    _, weight, _, dx, dw = ctx.saved_tensors
    return dx * g.to(dx.dtype), (dw * g).to(weight.dtype), None, None


_forward_sum.register_autograd(_differentiate_sum, setup_context=_save)
_direct_sum = launch.direct(_forward_sum_pass, _save, _differentiate_sum, outputs=2)


def supports(x, weight, labels):
    """None if these inputs can run here, else the reason why not."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{x.dtype} inputs"
    return None


def _ready(x, weight, labels):
    if torch.is_autocast_enabled(x.device.type):  # as for the product it stands for; custom operators are not cast
        x = x.to(torch.get_autocast_dtype(x.device.type))
    with_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return x.contiguous(), weight.contiguous(), labels.contiguous(), with_grad


def linear_cross_entropy(x, weight, labels):
    """`reference.linear_cross_entropy`; logits are rounded to the type of x, dW is summed in fp32."""
    inputs = _ready(x, weight, labels)
    return _forward(*inputs)[0] if launch.traced(*inputs[:3]) else _direct(*inputs)


def linear_cross_entropy_sum(x, weight, labels):
    """`reference.linear_cross_entropy_sum`."""
    inputs = _ready(x, weight, labels)
    total, nll = _forward_sum(*inputs)[:2] if launch.traced(*inputs[:3]) else _direct_sum(*inputs)
    return total, nll.detach()
