"""Every entry of the launch tables of kernels/triton_step.py, at the shapes of the 124M recipes, for `aot.py`."""

import triton.language as tl

from kernels import triton_step as step

IN_FP32 = ("linear project", "linear swiglu", "linear head", "add_norm", "recurrence gdn", "attention", "merge")


def cases(architecture):
    for size, kind, dot in ((2, "bf16", tl.bfloat16), (4, "fp32", tl.float32)):
        table, types = step.LAUNCH[architecture, size], {"DOT": dot, "PREC": "tf32" if size == 2 else "ieee"}
        everything = [*linears(table, f"*{kind}", types, kind), *recurrences(table, f"*{kind}", kind)]
        everything += attentions(table, f"*{kind}", types, kind)
        yield from (case for case in everything if size == 2 or case[0].split(" fp32")[0] in IN_FP32)


def linears(table, x, types, kind):
    signature = dict.fromkeys(("bias", "norm_w", "conv_w", "conv_b"), "*fp32") | dict.fromkeys(("w", "gate", "conv_state"), x)
    signature |= {"x": "*fp32", "residual": "*fp32", "y": x} | dict.fromkeys(("alpha", "beta", "eps"), "fp32")
    signature |= dict.fromkeys(("M", "N"), "i32") | dict.fromkeys(("D", "n_conv", "x_b", "gate_b"), "i32:16")
    off = {"NORM": "none", "GATE": "none", "GATE_ACT": "silu", "ACT": "none", "HAS_BIAS": False, "RESIDUAL": False, "W": 0}
    off |= {"HAS_CONV_BIAS": False, **types}
    forms = {
        "project": {"NORM": "rms", "W": 4}, "swiglu": {"NORM": "rms", "ACT": "swiglu"}, "gelu": {"NORM": "layer", "ACT": "gelu"},
        "down": {"RESIDUAL": True}, "mamba out": {"RESIDUAL": True, "NORM": "rms", "GATE": "before"},
        "lightning out": {"RESIDUAL": True, "NORM": "rms", "GATE": "after", "GATE_ACT": "sigmoid"},
    }  # fmt: skip
    for name, flags in forms.items():
        for BM in (16, 32) if name in ("project", "swiglu") else (16,):
            yield f"linear {name} {kind} {BM=}", step.linear_kernel, signature, off | flags | {"BM": BM}, table["linear"], 320
    yield f"linear head {kind}", step.linear_kernel, signature, off | {"NORM": "rms", "BM": 32}, table["linear_wide"], 320
    norm = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "weight": "*fp32", "bias": "*fp32", "eps": "fp32", "D": "i32:16"}
    constants = {"ADD": True, "LAYER": False, "HAS_BIAS": False, "BD": 1024}
    yield f"add_norm {kind}", step.add_norm_kernel, norm, constants, table["add_norm"], 0


def recurrences(table, x, kind):
    signature = dict.fromkeys(("q", "k", "v", "g", "beta", "z", "out"), x)
    signature |= dict.fromkeys(("state", "A_log", "dt_bias", "skip", "norm_w"), "*fp32")
    signature |= dict.fromkeys(("scale", "beta_max", "dt_low", "dt_high", "eps"), "fp32") | {"T": "i32", "H": "i32"}
    signature |= dict.fromkeys([f"{n}_{d}" for n in ("q", "k", "v", "g", "beta") for d in "bt"] + ["z_b"], "i32")
    off = {"R": 1, "NV": 1, "GATES": "given", "DECAY": "none", "DELTA": False, "HAS_BETA": False, "NORMALIZE": False, "L2": False}
    off |= {"FEATURE": "identity", "VALUE": "identity", "NORM": False, "Z_ACT": "none"}
    delta = {"GATES": "delta", "DELTA": True, "HAS_BETA": True, "L2": True, "NORM": True, "Z_ACT": "silu"}
    forms = {
        "gdn": (128, 128, delta | {"DECAY": "head"}), "kda": (128, 128, delta | {"DECAY": "channel"}),
        "olmo": (96, 192, delta | {"DECAY": "head"}), "mamba2": (128, 64, {"GATES": "mamba", "DECAY": "head"}),
        "lightning": (64, 64, {"DECAY": "head", "FEATURE": "silu", "VALUE": "silu"}),
        "normalised": (128, 128, {"NORMALIZE": True, "FEATURE": "elu1"}),
    }  # fmt: skip
    for name, (K, V, flags) in forms.items():
        BK, BV = 1 << (K - 1).bit_length(), 1 << (V - 1).bit_length()
        constants, options = off | flags | {"K": K, "V": V, "BK": BK, "BV": BV}, step.recurrence_options(table, BK, BV)
        yield f"recurrence {name} {kind}", step.recurrence_kernel, signature, constants, options, 128


def attentions(table, x, types, kind):
    signature = dict.fromkeys(("q", "k", "v", "k_cache", "v_cache"), x) | {"length": "*i32", "scale": "fp32", "eps": "fp32"}
    signature |= dict.fromkeys(("q_norm", "k_norm", "frequency", "parts", "stats"), "*fp32")
    signature |= dict.fromkeys(("S", "window", "keep_first", "Hk"), "i32")
    signature |= dict.fromkeys(("q_b", "k_b", "v_b", "kc_b", "kc_s", "kc_h", "vc_b", "vc_s", "vc_h"), "i32:16")
    for D, V, R, window in ((64, 64, 4, False), (128, 128, 1, True), (256, 256, 6, False), (320, 256, 6, False)):
        constants = {"D": D, "V": V, "R": R, "BR": 16, "BD": 1 << (D - 1).bit_length(), "BV": V, "NS": 8, "WINDOW": window, **types}
        constants |= {"QK_NORM": D == 128, "ROPE": D if D < 256 else 0}
        options = step.attention_options(table, constants["BD"])
        yield f"attention {kind} {D=} {V=} {R=} {window=}", step.attention_kernel, signature, constants, options, 64
    merge = {"parts": "*fp32", "stats": "*fp32", "sinks": "*fp32", "gate": x, "out": x, "gate_b": "i32:16", "H": "i32"}
    for NS in (8, 64):
        constants = {"V": 128, "BV": 128, "NS": NS, "SINKS": False, "GATE": True}
        yield f"merge {kind} {NS=}", step.merge_kernel, merge, constants, table["merge"], 64
