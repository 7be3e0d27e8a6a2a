"""Every entry of the launch tables of kernels/triton_conv.py, four taps, for `aot.py`."""

import itertools

from kernels import triton_conv as conv


def cases(architecture):
    for size, kind in ((2, "bf16"), (4, "fp32")):
        x, integers, strides = f"*{kind}", ("T", "NT", "L", "n_l2", "ND"), ("D", "s1", "s2", "x_b", "x_t")
        shared = dict.fromkeys(("x", "state"), x) | {"weight": "*fp32", "bias": "*fp32", "ids": "*i32", "eps": "fp32"}
        shared |= dict.fromkeys(integers, "i32") | dict.fromkeys(strides, "i32:16")
        forward = shared | dict.fromkeys(("y0", "y1", "y2", "final"), x)
        backward = shared | dict.fromkeys(("dy0", "dy1", "dy2", "dx", "dstate"), x) | {"parts": "*fp32"}
        backward |= dict.fromkeys((f"dy{i}_{n}" for i in range(3) for n in "bt"), "i32:16")
        # SiLU and no more; packed with a bias, as Mamba-2; normalised heads; those packed, with a state, as a row's second part
        flags = ((), ("ids", "bias"), ("l2",), ("l2", "ids", "state"))
        splits = {"": [2048], "slices": [1024, 512, 512], "ragged": [1008, 528, 512]}
        for words, shape in itertools.product(flags if size == 2 else flags[:1], splits):
            given = {f"HAS_{n.upper()}": n in words for n in ("bias", "state", "ids")} | {"SILU": True}
            for name, signature in (("forward", forward), ("backward", backward)):
                sizes = 8, 4096, splits[shape], 4, given, 128 * ("l2" in words)
                options = conv.Plan(conv.LAUNCH[architecture, size], name, *sizes).options
                constants = {n: options.pop(n) for n in ("W", "L2", "SPLIT", "WHOLE", *given)}
                label = " ".join([name, kind, *words, shape]).rstrip()
                yield label, getattr(conv, f"{name}_kernel"), signature, constants, options, 320
