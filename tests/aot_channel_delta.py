"""Every entry of the launch tables of kernels/triton_channel_delta.py, at head widths of 128, for `aot.py`."""

import triton.language as tl

from kernels import triton_channel_delta as module

K = V = 128


def tile(rows, columns, kind="bf16"):
    return f"tensordesc<{kind}[1,1,{rows},{columns}]>"


def cases(architecture):
    """bf16 only: fp32 is for the interpreter."""
    table = module.LAUNCH[architecture, 2]
    types, sizes = {"DOT": tl.bfloat16, "PREC": "tf32"}, {"T": "i32", "H": "i32", "N": "i32"}
    whole, part = tile(64, K), tile(64, 64)
    tokens = {"R": 1, "K": K, "BK": 64, "NK": K // 64, "WIDE": tl.bfloat16, **types}
    scaled, decays, square = ("qe", "ke", "kr"), ("ah", "al"), ("A", "P")

    given, sums = {"scale": "fp32", "s_q": "i32:16", "s_k": "i32:16", "s_g": "i32:16", **sizes}, {"documents": "*i32", "E": "*fp32"}
    scale = dict.fromkeys(("q", "k", *scaled), "*bf16") | {"g": "*fp32"} | sums | given
    for name, packed in (("prepare", False), ("prepare", True), ("rescale", True)):
        BK = table[name]["BK"]
        constants = tokens | {"BK": BK, "NK": K // BK, "HAS_DOCUMENTS": packed}
        if name == "prepare":
            kernel, signature = module.prepare_kernel, scale | dict.fromkeys(square, "*bf16") | {"beta": "*fp32"}
            constants |= {"MERGE": module.MERGE}
        else:
            kernel, signature = module.rescale_kernel, scale | dict.fromkeys(decays, "*bf16")
        options = {n: x for n, x in table[name].items() if n != "BK"}
        yield f"{name}{' packed' if packed else ''}", kernel, signature, constants, options, 320

    for name in ("forward", "keep", "reverse"):
        BV = table[name]["BV"]
        columns, state = tile(64, BV), tile(K, BV)
        shared = dict.fromkeys(scaled, whole) | dict.fromkeys(square, part) | {"E": "*fp32"} | sizes
        constants = {"K": K, "V": V, "BK": K, "NV": V // BV, **types}
        if name == "reverse":
            signature = shared | {"do": columns, "dv": columns, "dh": state, "dhT": "*fp32", "dh0": "*fp32"}
            yield name, module.reverse_kernel, signature, constants | {"HAS_DHT": False}, table[name], 64
        else:
            signature = shared | {"v": columns, "o": "*bf16", "h": state, "vn": columns, "h0": "*fp32", "hT": "*fp32"}
            yield name, module.forward_kernel, signature, constants | {"HAS_H0": False, "STATES": name == "keep"}, table[name], 64

    for name in ("scores", "inputs"):
        BV = table[name]["BV"]
        shared = dict.fromkeys(("do", "vn", "dv"), tile(64, BV)) | dict.fromkeys(("dP", "dL"), part) | sizes
        shared |= {"documents": "*i32", "scale": "fp32"}
        constants = {"NV": V // BV, "HAS_DOCUMENTS": True, **types}
        if name == "scores":
            yield name, module.scores_kernel, shared | {"beta": "*fp32", "dbeta": "*fp32"}, constants, table[name], 320
        else:
            signature = shared | dict.fromkeys(("q", "k", *decays, "dq", "dk"), part) | dict.fromkeys(("h", "dh"), tile(64, BV))
            signature |= {"dg": tile(64, 64, "fp32"), "E": "*fp32"}
            yield name, module.inputs_kernel, signature, tokens | constants, table[name], 400  # 388: see the file
