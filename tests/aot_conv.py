"""Every entry of the launch tables of kernels/triton_conv.py, four taps, for `aot.py`."""

from kernels import triton_conv as conv


def cases(architecture):
    for size, kind in ((2, "bf16"), (4, "fp32")):
        x, integers, strides = f"*{kind}", ("T", "NT", "L", "n_l2", "ND"), ("D", "x_b", "x_t")
        shared = dict.fromkeys(("x", "state"), x) | {"weight": "*fp32", "bias": "*fp32", "ids": "*i32", "eps": "fp32"}
        shared |= dict.fromkeys(integers, "i32") | dict.fromkeys(strides, "i32:16")
        forward = shared | {"y": x, "final": x}
        backward = shared | {"dy": x, "dx": x, "dstate": x, "parts": "*fp32", "dy_b": "i32:16", "dy_t": "i32:16"}
        # SiLU and no more; packed with a bias, as Mamba-2; normalised heads, and packed; a state, as the second part of a row
        flags = ((0, False, False, False), (0, True, True, False), (128, False, False, False), (128, True, False, True))
        for l2, ids, bias, state in flags if size == 2 else flags[:1]:
            given = {"HAS_BIAS": bias, "HAS_STATE": state, "HAS_IDS": ids, "SILU": True}
            for name, signature in (("forward", forward), ("backward", backward)):
                options = conv.Plan(conv.LAUNCH[architecture, size], name, 8, 4096, 2048, 4, given, l2).options
                constants = {n: options.pop(n) for n in ("W", "L2", *given)}
                yield f"{name} {kind} {l2=} {ids=} {bias=}", getattr(conv, f"{name}_kernel"), signature, constants, options, 320
