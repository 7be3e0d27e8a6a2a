"""Triton's interpreter with every address checked: what on a GPU would be an illegal access, or a silent one to another tensor.

    with bounds.checked():
        kernel[grid](...)      # AssertionError: union_kernel stores 4 bytes 8 bytes after the end of `index`, int32 (2, 3, 48)

Each storage is moved to a slot of its own in a sparsely used mapping, a gigabyte from the next, so that an address that has left
one argument does not happen to lie within another; it must fall within the extent of some tensor passed to the launch. A view is as
large as the view, not as its storage. Masked-off lanes are free to point anywhere, as on a GPU. Not seen: what overflows only at
sizes too large to interpret, races, and shared memory.
"""

import contextlib
import functools
import mmap

import numpy as np
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

SLOTS, APART = 256, 2**30


@functools.cache
def _arena():
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return mmap.mmap(-1, SLOTS * APART, flags=flags)


class _Launch:
    """Copies of one launch's arguments, and the extents of those that are tensors: first address, end, description."""

    def __init__(self, name):
        self.name, self.storages, self.extents = name, {}, []

    def moved(self, x, name):
        if isinstance(x, TensorDescriptor):
            rest = {f: getattr(x, f) for f in ("padding", "round_f32_to_tf32") if hasattr(x, f)}  # the latter since Triton 3.7
            return TensorDescriptor(self.moved(x.base, name), x.shape, x.strides, x.block_shape, **rest)
        if not isinstance(x, torch.Tensor):
            return x
        old = x.untyped_storage()
        if not old.nbytes():
            return x  # at address 0: no address is within it
        if old.data_ptr() not in self.storages:
            at = len(self.storages) * APART + APART // 2
            assert len(self.storages) < SLOTS and old.nbytes() < APART // 2, "more, or larger, tensors than bounds.py has room for"
            new = torch.frombuffer(_arena(), dtype=torch.uint8, count=old.nbytes(), offset=at).untyped_storage()
            self.storages[old.data_ptr()] = new.copy_(old)
        y = x.new_empty(0).set_(self.storages[old.data_ptr()], x.storage_offset(), x.size(), x.stride())
        if y.numel():
            bytes_ = (1 + sum((n - 1) * s for n, s in zip(y.shape, y.stride(), strict=True))) * y.element_size()
            what = f"`{name}`, {str(y.dtype).removeprefix('torch.')} {tuple(y.shape)}"
            self.extents.append((y.data_ptr(), y.data_ptr() + bytes_, what))
        return y

    def check(self, pointers, mask, bytes_, verb):
        p = np.asarray(pointers)[np.asarray(mask, dtype=bool)].astype(np.int64)
        if not p.size:
            return
        inside = np.zeros(p.shape, dtype=bool)
        for first, end, _ in self.extents:
            if p.min() >= first and p.max() + bytes_ <= end:
                return
            inside |= (p >= first) & (p + bytes_ <= end)
        if inside.all():
            return
        bad = int(p[~inside][0])
        if not self.extents:
            raise AssertionError(f"{self.name} {verb} {bytes_} bytes at {bad:#x}, and has no tensor")
        first, end, what = min(self.extents, key=lambda e: max(e[0] - bad, bad - e[1], 0))
        where = f"{first - bad} bytes before the start" if bad < first else f"{max(bad - end, 0)} bytes after the end"
        raise AssertionError(f"{self.name} {verb} {bytes_} bytes {where} of {what}; {(~inside).sum()} of {p.size} lanes")


@contextlib.contextmanager
def checked():
    """Check all launches of interpreted kernels within. Triton wraps the AssertionError in an InterpreterError."""
    from triton.runtime import interpreter

    executor, builder, now = interpreter.GridExecutor, interpreter.InterpreterBuilder, None
    kept = {(c, n): getattr(c, n) for c, n in ((executor, "_init_args_hst"), *((builder, n) for n in _ACCESSES))}

    def init(self, args, kwargs):
        nonlocal now
        args, kwargs = kept[executor, "_init_args_hst"](self, args, kwargs)
        now = _Launch(self.fn.__name__)
        named = {n: now.moved(x, n) for n, x in kwargs.items()}
        return [now.moved(x, n) for n, x in zip(self.arg_names, args, strict=False)], named

    def access(method, verb, mask_at):
        def call(self, *args, **kwargs):
            pointers = args[0]
            mask = np.broadcast_to(True if mask_at is None else args[mask_at].data, pointers.data.shape)
            now.check(pointers.data, mask, max(1, pointers.get_element_ty().primitive_bitwidth // 8), verb)
            return kept[builder, method](self, *args, **kwargs)

        return call

    try:
        executor._init_args_hst = init
        for method, of in _ACCESSES.items():
            setattr(builder, method, access(method, *of))
        yield
    finally:
        for (owner, name), function in kept.items():
            setattr(owner, name, function)


# of the interpreter's builder: what each does, and where its mask stands; plain and descriptor accesses end in the first two
_ACCESSES = {
    "create_masked_load": ("loads", 1),
    "create_masked_store": ("stores", 2),
    "create_atomic_rmw": ("updates", 3),
    "create_atomic_cas": ("updates", None),
}
