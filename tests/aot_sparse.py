"""Sparse attention ahead of time: 4 query heads a key head of 128, 8 index heads of 64 (see aot.py)."""

import torch

from kernels import triton_indexer, triton_selection, triton_sparse

INTEGERS = "t0 T S R W NR NC NT NS NH CAP H B F J local top_k i_0 most KF VF"
TYPES = dict.fromkeys(INTEGERS.split(), "i32") | {"scale": "fp32", "index_scale": "fp32"}
TYPES |= dict.fromkeys("lows past length keys maxima parts groups index bits count ends order starts".split(), "*i32")
TYPES["marks"] = "*i16"
TYPES |= dict.fromkeys("lse delta total w index_w kl lse_index d_kl d_scores dw".split(), "*fp32")
VALUES = {"BJ": 16, "Q": 16, "G": 4, "HB": 4, "NH": 1, "V": 128, "BV": 128, "NF": 1, "KEYS": "bits", "OUT": True, "BF": 512}
VALUES |= {"HAS_LOWS": False, "HAS_PAST": False, "HAS_ENDS": False, "LIST": False, "RAW": False, "GRAD": False, "COUNT": False}
VALUES |= {"JB": 4, "NJ": 2, "DI": 64, "BDI": 64}
DENSE = {"KEYS": "dense"}
VARIANTS = {
    "scores": {"": {}, " documents": {"HAS_LOWS": True}, " past": {"HAS_PAST": True}},
    "decode_threshold": {"": {"HAS_ENDS": True, "LIST": True}},
    "union": {"": {}, " counting": {"COUNT": True}},
    "decode": {"": {"Q": 1, "HB": 16, "KEYS": "list"}},
    "attend": {"": {}, " dense lse": {"OUT": False} | DENSE},
    "divergence": {"": {}, " dense": DENSE, " gradient": {"GRAD": True}, " dense gradient": {"GRAD": True} | DENSE},
    "index_dq": {"": {}, " dense": DENSE},
    "index_dk": {"": {}, " dense": DENSE},
}


def cases(architecture):
    for module in (triton_selection, triton_sparse, triton_indexer):
        for bytes_, dtype, kind in ((2, torch.bfloat16, "bf16"), (4, torch.float32, "fp32")):
            for name, options in module.LAUNCH[architecture, bytes_].items():
                kernel = getattr(module, {"decode": "attend", "decode_threshold": "threshold"}.get(name, name) + "_kernel")
                width = 64 if "scores" in name else 128  # of index heads, of attention's
                values = VALUES | {"D": width, "BD": width} | triton_selection.operands(dtype, kernel)
                types = TYPES | ({"dk": "*fp32"} if name == "index_dk" else {})
                if "scores" in name:
                    values |= {"J": 8}
                if name == "scores":
                    rows, N = options["ROWS"], options["N"]
                    types |= {x: f"tensordesc<{kind}[1,1,{n},64]>" for x, n in (("q", rows), ("k", N))}
                    types |= {"keys": f"tensordesc<i32[1,1,{rows},{N}]>"}
                spill = 320 if bytes_ == 2 else 640
                names = [n for n in kernel.arg_names if n not in options]
                variants = VARIANTS.get(name, {"": {}})
                few = 1 if name == "scores" and bytes_ == 4 else None  # fp32 is for comparisons: others spill 2 KB on sm_100
                for variant, changed in list(variants.items())[:few]:
                    constants = {n: x for n, x in (values | changed).items() if n in names}
                    signature = {n: types.get(n, f"*{kind}") for n in names if n not in constants}
                    yield f"{name}{variant} {kind}", kernel, signature, constants, options, spill
