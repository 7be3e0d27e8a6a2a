"""The launches of `delta_rule` and `linear_attention`, forward and backward, at head widths of 128, for `aot.py`."""

import itertools

import torch
from aot import launches

from kernels import triton_recurrence as recurrence

SCANS = ("forward_kernel", "reverse_kernel")


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
                flags = [n.lower() for n in ("OUT", "STATES", "EYE", "HAS_STARTS", "HAS_DHT") if case[2].get(n)]
                rule = "delta" if delta else "linear"
                name = " ".join((kernel.removesuffix("_kernel"), str(dtype).removeprefix("torch."), rule, gate, *flags))
                # With Triton 3.6, by which they are timed, 144 B and 792 B at most; with 3.9 as many as 268 B and 620 B.
                yield name, *case, 270 if kernel in SCANS else 800
