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
    whole, parts = tile(64, K), {"A": tile(64, 64, "fp16"), "P": tile(64, 64)}
    tokens = {"R": 1, "K": K, "BK": 64, "NK": K // 64, "WIDE": tl.bfloat16, **types}
    scaled, square = ("qe", "ke", "kr"), {"A": "*fp16", "P": "*bf16"}

    given, sums = {"scale": "fp32", "s_q": "i32:16", "s_k": "i32:16", "s_g": "i32:16", **sizes}, {"documents": "*i32", "E": "*fp32"}
    scale = dict.fromkeys(("q", "k", *scaled), "*bf16") | {"g": "*fp32"} | sums | given
    for name, packed in (("prepare", False), ("prepare", True), ("rescale", True)):
        BK = table[name]["BK"]
        constants = tokens | {"BK": BK, "NK": K // BK, "HAS_DOCUMENTS": packed}
        if name == "prepare":
            kernel, signature = module.prepare_kernel, scale | square | {"beta": "*fp32"}
        else:
            kernel, signature = module.rescale_kernel, scale | {"G": "*fp32"}
        options = {n: x for n, x in table[name].items() if n != "BK"}
        yield f"{name}{' packed' if packed else ''}", kernel, signature, constants, options, 320

    for name in ("forward", "keep", "reverse"):
        BV = table[name]["BV"]
        columns, state = tile(64, BV), tile(K, BV)
        shared = dict.fromkeys(scaled, whole) | parts | {"E": "*fp32"} | sizes
        constants = {"K": K, "V": V, "BK": K, "NV": V // BV, **types}
        if name == "reverse":
            signature = shared | {"do": columns, "dv": columns, "dh": state, "dhT": "*fp32", "dh0": "*fp32"}
            yield name, module.reverse_kernel, signature, constants | {"HAS_DHT": False}, table[name], 64
        else:
            signature = shared | {"v": columns, "o": "*bf16", "h": state, "vn": columns, "h0": "*fp32", "hT": "*fp32"}
            yield name, module.forward_kernel, signature, constants | {"HAS_H0": False, "STATES": name == "keep"}, table[name], 64

    BV = table["scores"]["BV"]
    signature = dict.fromkeys(("do", "vn", "dv", "dP", "dL"), "*bf16") | sizes | {"s_do": "i32:16"}
    signature |= {"documents": "*i32", "scale": "fp32", "beta": "*fp32", "dbeta": "*fp32"}
    constants = {"V": V, "NV": V // BV, "HAS_DOCUMENTS": True, **types}
    yield "scores", module.scores_kernel, signature, constants, table["scores"], 320

    names = ("q", "k", "do", "vn", "dv", "h", "dh", "dP", "dL", "dq", "dk")
    signature = dict.fromkeys(names, "*bf16") | {"G": "*fp32", "dg": "*fp32", "s_do": "i32:16"} | sums | given
    for packed in (False, True):
        constants = tokens | {"V": V, "NV": V // table["inputs"]["BV"], "HAS_DOCUMENTS": packed}
        case = module.inputs_kernel, signature, constants, table["inputs"]
        yield f"inputs{' packed' if packed else ''}", *case, 720  # on sm_90 336 and 432 with Triton 3.6, 632 and 708 with 3.9
