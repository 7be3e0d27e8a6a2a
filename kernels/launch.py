"""What every Triton file needs to launch its kernels: launches that cost little of a CPU's time, tensor descriptors, types of dot
operands, and the tables of launch options.

A table `LAUNCH` maps (architecture, bytes of a dot operand) to {kernel: options}, options being the keyword arguments of a launch
that change its speed and not its result: num_warps, num_stages and block sizes. Architectures are 80, 90 and 100, named by compute
capability; a device takes the row of the largest that does not exceed its own. `python bench.py tune` measures the alternatives.
"""

import functools
import threading
import weakref

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

ARCHITECTURES = (80, 90, 100)
UNWATCHED = torch.Tensor, torch.nn.Parameter, type(None)


@functools.cache
def _of_device(index):
    major, minor = torch.cuda.get_device_capability(index)
    return max((a for a in ARCHITECTURES if a <= 10 * major + minor), default=ARCHITECTURES[0])


def architecture(x):
    """The architecture whose table serves tensor x; that of the H200 for tensors on a CPU, where kernels are interpreted."""
    return _of_device(x.device.index) if x.is_cuda else 90


def options(table, kernel, x):
    """The launch options of `kernel` for tensors like x: a dict of keyword arguments, not to be changed."""
    return table[architecture(x), x.element_size()][kernel]


def interpreted(kernel):
    return not isinstance(kernel, triton.JITFunction)


def operand_types(x, kernel, wide="tf32x3"):
    """The type of dot operands for a tensor or dtype x, and the precision of fp32 dots, `wide` if that is the operands' type. The
    interpreter keeps bf16 as bit patterns: fp32 there."""
    dtype = x if isinstance(x, torch.dtype) else x.dtype
    if interpreted(kernel) or dtype == torch.float32:
        return {"DOT": tl.float32, "PREC": wide}  # ieee spills 45 to 81 KB in the scans and compiles for a minute
    return {"DOT": {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype], "PREC": "tf32"}


class _Thread(threading.local):
    device = None


_thread = _Thread()


def _enter(device):
    """Make the device's context current in this thread: encoding a descriptor needs one and, unlike a launch, does not see to it.
    A thread of autograd's whose first use of the GPU is a descriptor has none. Any call of CUDA's runtime makes it current."""
    torch.cuda.mem_get_info(device)
    _thread.device = device


class Tile(TensorDescriptor):
    """A descriptor without Triton's checks in Python, which take 2 us: the driver makes them again when it encodes one."""

    def __post_init__(self):
        pass


def tile(x, block):
    """A descriptor of x `(B, T, H, D)` in the order (B, H, T, D), in tiles `(1, 1, *block)`; zeros beyond the ends."""
    if x.is_cuda and _thread.device != x.device:
        _enter(x.device)
    B, T, H, D = x.shape
    s_b, s_t, s_h, s_d = x.stride()
    return Tile(x, [B, H, T, D], [s_b, s_h, s_t, s_d], [1, 1, *block])


def specialization(args):
    """What Triton may compile a kernel anew for, of its arguments that are no constants: a tuple, or None where it is not known.

    It distinguishes more than Triton does, which leaves out what `do_not_specialize` names: the type of a tensor and whether its
    address is a multiple of 16, whether an integer is one and whether it is 1, the type and block of a descriptor.
    """
    key = []
    for x in args:
        kind = type(x)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            key.append(x.dtype)
            key.append(x.data_ptr() % 16 == 0)
        elif kind is int and -(2**31) <= x < 2**31:
            key.append("1" if x == 1 else x % 16 == 0)
        elif kind is Tile:
            key.append(x.base.dtype)
            key.append(tuple(x.block_shape))
        elif kind is float or x is None:
            key.append(kind)
        else:
            return None
    return tuple(key)


def _heard(hook):
    """Whether anyone listens to a hook of Triton's: a chain of functions, or one."""
    return bool(getattr(hook, "calls", hook is not None))


class Launch:
    """`launch(n, *args)` is `kernel[(n,)](*args, **constants)` in half of its time: the kernel that Triton compiled for such
    arguments is kept and called again, without working out anew which one it is.

    constants are launch options and all of the kernel's compile-time arguments, which are its last ones. A kept kernel is called as
    Triton calls it, on the current device and stream; where a profiler listens to Triton's hooks, as Triton's tutorials call one,
    so that the hooks hear of it. Hooks without listeners are two calls of Python's and a dictionary, 3 us.
    """

    def __init__(self, kernel, **constants):
        self.kernel, self.constants = kernel, constants
        self.last = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self.kept = {}  # of a device and a specialization
        self.keeps = not interpreted(kernel) and not torch.version.hip  # AMD's kernels depend on the sizes of tensors too

    def __call__(self, n, *args):
        key = specialization(args) if self.keeps and torch.cuda.is_initialized() else None
        if key is None:
            self.kernel[(n,)](*args, **self.constants)
            return
        active, runtime = driver.active, knobs.runtime
        device = active.get_current_device()
        compiled = self.kept.get((device, key))
        if compiled is None:
            self.kept[device, key] = self.kernel[(n,)](*args, **self.constants)
            return
        stream = active.get_current_stream(device)
        if _heard(runtime.launch_enter_hook) or _heard(runtime.launch_exit_hook):
            compiled[n, 1, 1](*args, *self.last, stream=stream)
        else:
            compiled.run(n, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *self.last)


launch = functools.lru_cache(maxsize=4096)(Launch)  # the same constants, the same launch


def ready(x):
    """x itself if a descriptor can read it: last stride 1, the others multiples of 16 bytes; else a copy."""
    *outer, last = x.stride()
    unit = 16 // x.element_size()
    fine = last == 1 and x.data_ptr() % 16 == 0
    for s in outer:
        fine = fine and s % unit == 0
    return x if fine else x.clone(memory_format=torch.contiguous_format)  # contiguous() keeps one at an odd address


def traced(*tensors):
    """Whether a compiler or a tensor subclass watches the call: it needs the custom operators."""
    for x in tensors:
        if type(x) not in UNWATCHED:
            return True
    return torch.compiler.is_compiling()


def differentiable(tensors):
    """Whether a gradient of one of these is wanted; what is no tensor has none."""
    if torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                return True
    return False


def given(x, other):
    """What a kernel is handed for x: another tensor, which it leaves alone, where there is none."""
    return other if x is None else x


def all_tensors(results):
    """What a custom operator may return: tensors only, those of no size for results that are None. The first is none of them."""
    return [results[0].new_empty(0) if x is None else x for x in results]


def direct(forward, save, backward, outputs=1):
    """`forward(*inputs)` with a backward, as an autograd function: a custom operator costs some 0.3 ms of a CPU's time each way.

    save(ctx, inputs, output), called where a gradient is wanted, and backward(ctx, *grads) are those of a custom operator. The
    first `outputs` of forward's results are returned, alone if only one.
    """

    once = torch.autograd.function.once_differentiable(backward)

    def returned(output):
        return tuple(output[:outputs]) if outputs > 1 else output[0]

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = forward(*inputs)
            save(ctx, inputs, output)
            return returned(output)

        @staticmethod
        def backward(ctx, *grads):  # gradients are on here only for create_graph, and only then it matters
            return once(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    def call(*inputs):
        if differentiable(inputs):
            return Direct.apply(*inputs)
        return returned(forward(*inputs))

    return call


def shared_by_layers(compute):
    """`compute(x, *rest)`, kept while the tensor x lives and until it is written to: in a model all layers ask for the same of the
    segment ids, in every step for the same of constants, and a dozen small launches take longer than a layer's attention. `rest` is
    hashable, the result no view of x. Nothing is kept where it might be used out of place: under a compiler, in the capture of a
    CUDA graph (whose replay has other ids), in inference mode.
    """
    kept = {}  # by the id of a tensor: a weak reference to it, its version, results

    @functools.wraps(compute)
    def call(x, *rest):
        if traced(x) or torch.is_inference_mode_enabled() or (x is not None and x.is_inference()):
            return compute(x, *rest)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return compute(x, *rest)
        number, version = id(x), None if x is None else x._version
        reference, then, results = kept.get(number, (None, None, None))
        if results is None or then != version or (x is not None and reference() is not x):
            results = {}
            kept[number] = None if x is None else weakref.ref(x, lambda _: kept.pop(number, None)), version, results
        if rest not in results:
            results[rest] = compute(x, *rest)
        return results[rest]

    return call
