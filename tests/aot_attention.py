"""Softmax attention ahead of time at head widths of 64, 128 and 256, 2 query heads a key head (see aot.py)."""

import torch
from aot import launches

from kernels import triton_attention as attention


def calls(width, mask):
    """A function that runs attention, forward and without earlier keys backward, on CPU tensors of no meaning."""
    T = 64
    q, k, v = (torch.zeros(1, T, h, width, dtype=torch.bfloat16, requires_grad=mask != "past") for h in (2, 1, 1))
    masks = {"segment_ids": torch.ones(1, T, dtype=torch.int32), "window": 8, "keep_first": 2, "sinks": torch.zeros(2)}
    past = {"past": (k, v, torch.arange(T)[None], torch.tensor([T]))}
    options = {"causal": {}, "masked": masks, "past": masks | past}[mask]

    def call():
        out = attention.softmax_attention(q, k, v, **options)
        if out.requires_grad:
            out.sum().backward()

    return call


def cases(architecture):
    for width in (64, 128, 256):
        for mask in ("causal", "masked", "past"):
            for case in launches(calls(width, mask), architecture):
                part = "" if case[2].get("DK", True) and case[2].get("DV", True) else " dk" if case[2]["DK"] else " dv"
                yield f"{case[0].__name__.removesuffix('_kernel')} {width} {mask}{part}", *case, 320
