"""Every entry of the launch tables of kernels/triton_norm.py, at three widths of a row, for `aot.py`."""

from kernels import triton_norm as norm


def cases(architecture):
    for size, kind in ((2, "bf16"), (4, "fp32")):
        x = f"*{kind}"
        shared = dict.fromkeys(("x", "z"), x) | {"weight": "*fp32"}
        shared |= dict.fromkeys(("R", "H", "GROUPS"), "i32") | dict.fromkeys(("D", "x_n", "x_h", "z_n", "z_h"), "i32:16")
        shared |= dict.fromkeys(("inverse", "eps", "offset"), "fp32")
        forward = shared | {"bias": "*fp32", "y": x}
        backward = shared | dict.fromkeys(("dy", "dx", "dz"), x) | {"dweight": "*fp32", "dbias": "*fp32"}
        backward |= {"N": "i32", "P": "i32", "dy_n": "i32:16", "dy_h": "i32:16"}
        shapes = ((128, norm.GATE_LAST), (768, norm.NO_GATE), (1536, norm.GATE_FIRST), (8192, norm.NO_GATE))
        for D, gate in shapes if size == 2 else shapes[1:3]:
            for name, signature in (("forward", forward), ("backward", backward)):
                given = {"CENTER": D == 8192, "HAS_WEIGHT": True, "HAS_BIAS": D == 8192, "GATE": gate, "SILU": True}
                options = norm.Plan(norm.LAUNCH[architecture, size], name, 32768, 1, D, 1, given).options
                constants = {n: options.pop(n) for n in given}
                yield f"{name} {kind} {D=} {gate=}", getattr(norm, f"{name}_kernel"), signature, constants, options, 320
