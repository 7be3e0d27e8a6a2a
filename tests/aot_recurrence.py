"""The launches of `delta_rule` and `linear_attention`, forward and backward, at head widths of 128, for `aot.py`."""

import itertools

import torch
from aot import launches

from kernels import triton_recurrence as recurrence

SCANS = ("forward_kernel", "reverse_kernel")
GROUPED = ("grouped_inputs_kernel", "gates_kernel")


def calls(dtype, gate, delta, T, starts):
    """A function that runs a forward without and one with a backward on CPU tensors of no meaning."""
    q, k, v = (torch.zeros(1, T, 1, 128, dtype=dtype, requires_grad=True) for _ in range(3))
    g = {"no decay": None, "one decay": torch.zeros(1), "decays": torch.zeros(1, T, 1, requires_grad=True)}[gate]
    options = {"segment_ids": torch.ones(1, T, dtype=torch.int32) if starts else None}

    def forward():
        if delta:
            return recurrence.delta_rule(q, k, v, g, torch.zeros(1, T, 1), **options)[0]
        return recurrence.linear_attention(q, k, v, g, **options)[0]

    def call():
        with torch.no_grad():
            forward()
        forward().sum().backward()

    return call


def grouped_call(dtype):
    """A function that runs forward and backward of Mamba-2's heads, which share keys and have 64 values."""
    q, k = (torch.zeros(1, 64, 1, 128, dtype=dtype, requires_grad=True) for _ in range(2))
    v, g = torch.zeros(1, 64, 24, 64, dtype=dtype, requires_grad=True), torch.zeros(1, 64, 24, requires_grad=True)
    return lambda: recurrence.linear_attention(q, k, v, g)[0].sum().backward()


def cases(architecture):
    """Both rules with each kind of decay; the shorter of the lengths is one slice, the longer several."""
    seen = []
    for dtype, delta in itertools.product((torch.bfloat16, torch.float32), (True, False)):
        for gate, T, starts in (("decays", 64, False), ("no decay", 64, False), ("one decay", 64, False), ("decays", 2048, True)):
            if delta and gate == "one decay":
                continue
            for case in launches(calls(dtype, gate, delta, T, starts), architecture):
                if case in seen:
                    continue
                seen.append(case)
                kernel = case[0].__name__
                flags = [n.lower() for n in ("OUT", "STATES", "LOCAL", "NM", "REVERSE", "HAS_STARTS", "HAS_DHT") if case[2].get(n)]
                rule = "delta" if delta else "linear"
                name = " ".join((kernel.removesuffix("_kernel"), str(dtype).removeprefix("torch."), rule, gate, *flags))
                # With Triton 3.6, by which they are timed, 184 B and 792 B at most; with 3.9 as many as 292 B and 620 B.
                yield name, *case, 300 if kernel in SCANS else 800
    for dtype, most in ((torch.bfloat16, 520), (torch.float32, 2800)):
        for case in launches(grouped_call(dtype), architecture):
            if (kernel := case[0].__name__) in GROUPED and case not in seen:
                seen.append(case)
                yield f"{kernel.removesuffix('_kernel')} {str(dtype).removeprefix('torch.')}", *case, most
