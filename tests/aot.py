"""Compile the Triton kernels for sm_90 without a GPU; print registers, spills and shared memory; fail on what is out of bounds.

python tests/aot.py
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, compile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels import triton_recurrence as recurrence  # noqa: E402

SHARED_LIMIT = 232448  # bytes a CTA can have on sm_90
K = V = 128


def tile(*block):
    return f"tensordesc<bf16[1,1,{','.join(map(str, block))}]>"


def compiled(kernel, signature, constants, warps, stages):
    """(registers, bytes of spill stores, bytes of shared memory) of one kernel on sm_90."""
    names = kernel.arg_names
    signature = {n: signature.get(n, "constexpr") for n in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()}, attributes)
    binary = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    ptxas = get_ptxas(90)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(binary.asm["ptx"])
        file.flush()
        command = [getattr(ptxas, "path", ptxas), "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spill = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes spill stores", text)
    return int(registers[1]), int(spill[1]), binary.metadata.shared


def main():
    scalars = {"scale": "fp32", "T": "i32", "H": "i32", "N": "i32", "G": "*fp32"}
    whole, half, square, state = tile(64, K), tile(64, 64), tile(64, 64), tile(K, 64)
    scan = {"q": whole, "k": whole, "v": half, "A": square, **scalars}
    forward = scan | {"o": "*bf16", "h": state, "vn": half, "h0": "*fp32", "hT": "*fp32"}
    reverse = scan | {"do": half, "dv": half, "dh": state, "dhT": "*fp32", "dh0": "*fp32"}
    reverse.pop("v")
    prepare = {"k": whole, "g": "*fp32", "beta": "*fp32", "starts": "*i8", "A": "*bf16", "L": "*fp32", **scalars}
    prepare.pop("scale")
    inputs = dict.fromkeys(("q", "k", "v", "do", "vn", "dv", "h", "dh", "dq", "dk"), half)
    inputs |= {"beta": "*fp32", "dbeta": "*fp32", "dG": "*fp32", "s_part": "i32", **scalars}
    types = {"R": 1, "DOT": tl.bfloat16, "PREC": "tf32"}
    failed = False
    for decays, delta in ((True, True), (False, True), (True, False), (False, False)):
        shared = types | {"V": V, "BV": 64, "NV": 2, "DECAYS": decays, "DELTA": delta}
        scans = shared | {"K": K, "BK": K}
        cases = {
            "prepare": (
                recurrence.prepare_kernel,
                prepare,
                types | {"BK": K, "HAS_G": decays, "HAS_STARTS": False, "DELTA": delta},
                320,
            ),
            "forward": (recurrence.forward_kernel, forward, scans | {"HAS_H0": False, "OUT": True, "STATES": False}, 64),
            "states": (recurrence.forward_kernel, forward, scans | {"HAS_H0": False, "OUT": False, "STATES": True}, 64),
            "reverse": (recurrence.reverse_kernel, reverse, scans | {"HAS_DHT": False}, 64),
            "inputs": (recurrence.inputs_kernel, inputs, shared | {"BKB": 64, "NK": 2}, 320),
        }
        for name, (kernel, signature, constants, most) in cases.items():
            registers, spill, memory = compiled(kernel, signature, constants, *recurrence.LAUNCH[2][name])
            bad = spill > most or memory > SHARED_LIMIT
            failed |= bad
            figures = f"registers {registers:3}  spill {spill:3} B (at most {most})  shared {memory:6} B"
            print(f"sm_90 {name:8} delta={delta!s:5} decays={decays!s:5} {figures}{'  FAILED' if bad else ''}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
