"""Sparse attention ahead of time: 4 query heads a key head of 128, 8 index heads of 64 (see aot.py)."""

import torch

from kernels import triton_indexer, triton_selection, triton_sparse

INTEGERS = "t0 T S R W NR NC NT NS NH HK CAP H B F J local top_k i_0 most"
TYPES = dict.fromkeys(INTEGERS.split(), "i32") | {"scale": "fp32", "index_scale": "fp32"}
TYPES |= dict.fromkeys("lows past length keys maxima tops groups index bits count order starts".split(), "*i32")
TYPES |= {"marks": "*i16", "index_eps": "fp32", "eps": "fp32"}
TYPES |= dict.fromkeys("q_b k_b v_b index_q_b index_k_b index_w_b".split(), "i32:16")
TYPES |= dict.fromkeys("lse delta total w index_w kl lse_index d_kl d_scores dw".split(), "*fp32")
TYPES |= dict.fromkeys("index_norm index_bias index_frequency k_norm q_norm frequency stats".split(), "*fp32")
OWN_TYPES = {"index_dk": {"dk": "*fp32"}, "decode": {"parts": "*fp32"}, "union": {"parts": "*i32"}}
VALUES = {"BJ": 16, "Q": 16, "G": 4, "HB": 4, "NH": 1, "V": 128, "BV": 128, "NF": 1, "KEYS": "bits", "OUT": True, "BF": 512}
VALUES |= {"HAS_LOWS": False, "HAS_PAST": False, "RAW": False, "GRAD": False, "COUNT": False}
VALUES |= {"JB": 4, "NJ": 2, "DI": 64, "BDI": 64, "BH": 4, "R": 4, "BR": 16}
VALUES |= {"INDEX_NORM": False, "INDEX_ROPE": 0, "QK_NORM": False, "ROPE": 0}
PREPARED = {"INDEX_NORM": True, "INDEX_ROPE": 32, "QK_NORM": True, "ROPE": 128}
DENSE = {"KEYS": "dense"}
VARIANTS = {
    "scores": {"": {}, " documents": {"HAS_LOWS": True}, " past": {"HAS_PAST": True}},
    "union": {"": {}, " counting": {"COUNT": True}},
    "decode_scores": {"": {}, " prepared": PREPARED},
    "decode": {"": {}, " prepared": PREPARED},
    "attend": {"": {}, " dense lse": {"OUT": False} | DENSE},
    "divergence": {"": {}, " dense": DENSE, " gradient": {"GRAD": True}, " dense gradient": {"GRAD": True} | DENSE},
    "index_dq": {"": {}, " dense": DENSE},
    "index_dk": {"": {}, " dense": DENSE},
}


def cases(architecture):
    for module in (triton_selection, triton_sparse, triton_indexer):
        for bytes_, dtype, kind in ((2, torch.bfloat16, "bf16"), (4, torch.float32, "fp32")):
            for name, options in module.LAUNCH[architecture, bytes_].items():
                kernel = getattr(module, f"{name}_kernel")
                width = 64 if name == "scores" else 128  # of index heads, of attention's
                values = VALUES | {"D": width, "BD": width} | triton_selection.operands(dtype, kernel)
                types = TYPES | OWN_TYPES.get(name, {})
                if "scores" in name:
                    values |= {"J": 8}
                if name == "scores":
                    rows, N = options["ROWS"], options["N"]
                    types |= {x: f"tensordesc<{kind}[1,1,{n},64]>" for x, n in (("q", rows), ("k", N))}
                    types |= {"keys": f"tensordesc<i32[1,1,{rows},{N}]>"}
                spill = 320 if bytes_ == 2 else 640
                names = [n for n in kernel.arg_names if n not in options]
                variants = VARIANTS.get(name, {"": {}})
                if name == "choose":
                    variants = {f" {top_k}": module.choose_options({name: options}, top_k) for top_k in (64, 512, 2048)}
                few = 1 if name == "scores" and bytes_ == 4 else None  # fp32 is for comparisons: others spill 2 KB on sm_100
                for variant, changed in list(variants.items())[:few]:
                    constants = {n: x for n, x in (values | changed).items() if n in names}
                    signature = {n: types.get(n, f"*{kind}") for n in names if n not in constants}
                    mine = {n: changed.get(n, x) for n, x in options.items()}
                    yield f"{name}{variant} {kind}", kernel, signature, constants, mine, spill
