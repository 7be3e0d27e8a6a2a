"""Compile every Triton kernel ahead of time, without a GPU, and report what ptxas says; exit code 1 if anything is out of bounds.

    python tests/aot.py                      # all kernels for sm_80, sm_90 and sm_100: tens of minutes
    python tests/aot.py recurrence sm_90     # those of tests/aot_recurrence.py for sm_90
    python tests/aot.py quick                # what CI runs: no fp32 products, which take a minute each, and on sm_80 and sm_100
                                             # one case of each kernel and launch options

Each tests/aot_*.py has `cases(architecture)`, which yields for every entry of its launch tables a tuple

    name, kernel, signature, constants, options, most_spill

of a name, the jitted function, the types of its runtime arguments ("*bf16", "i32", "i32:16" for a multiple of 16,
"tensordesc<bf16[1,1,64,128]>"), the values of its constexpr arguments, the launch options (block sizes among them are constexpr
arguments too) and the spill stores in bytes a thread that are acceptable; `launches` makes them from a call of an operator. Out of
bounds are: more spills than that (on sm_80, whose tables are not tuned, eight times as many), more shared memory than a CTA can
have, wgmma that ptxas serialises, a kernel without a case, a dot that takes the transpose of another dot's result, which Triton
before 3.7.1 miscompiles on Hopper, and wgmma of 8 columns, which reads memory behind its tile (Triton #10629). Not to be run with
TRITON_INTERPRET set.
"""

import contextlib
import importlib
import io
import multiprocessing
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import triton.language as tl
from triton import JITFunction, knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from kernels import launch  # noqa: E402


class Part(NamedTuple):
    """Shared memory in bytes, of one CTA at most and of an SM; each CTA takes 1 KB besides its own."""

    cta: int
    sm: int


PARTS = {80: Part(166912, 167936), 90: Part(232448, 233472), 100: Part(232448, 233472)}


class Figures(NamedTuple):
    registers: int
    spill: int  # bytes of spill stores a thread
    shared: int  # bytes a CTA
    ctas: int  # CTAs that an SM holds
    faults: tuple[str, ...]


POINTERS = {
    getattr(torch, torch_name): name
    for torch_name, name in (
        ("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"), ("float64", "fp64"), ("int8", "i8"), ("uint8", "u8"),
        ("bool", "i1"), ("int16", "i16"), ("int32", "i32"), ("int64", "i64"),
    )
}  # fmt: skip


def modules():
    return sorted(path.stem.removeprefix("aot_") for path in HERE.glob("aot_*.py"))


def cases_of(module, architecture):
    return list(importlib.import_module(f"aot_{module}").cases(architecture))


def chosen(module, architecture, quick):
    """The indices of the cases to compile."""
    indices, seen = [], []
    for i, (_, kernel, _, constants, options, _) in enumerate(cases_of(module, architecture)):
        if quick and constants.get("DOT") == tl.float32:
            continue
        alike = kernel, options
        if not quick or architecture == 90 or alike not in seen:
            indices.append(i)
        seen.append(alike)
    return indices


def without_a_case():
    """The kernels, functions named ..._kernel in kernels/triton_*.py, that no case compiles."""
    files = [path.stem for path in (HERE.parent / "kernels").glob("triton_*.py")]
    there = {x for file in files for n, x in vars(importlib.import_module(f"kernels.{file}")).items() if n.endswith("_kernel")}
    return sorted(x.__name__ for x in there - {kernel for m in modules() for _, kernel, *_ in cases_of(m, 90)})


def launches(call, architecture):
    """(kernel, signature, constants, options) of every launch that `call()` makes on CPU tensors; nothing is run."""
    recorded = []

    def type_of(x):
        if isinstance(x, torch.Tensor):
            return f"*{POINTERS[x.dtype]}"
        if hasattr(x, "block_shape"):
            return f"tensordesc<{POINTERS[x.base.dtype]}[{','.join(map(str, x.block_shape))}]>"
        if isinstance(x, bool | float):
            return "i1" if isinstance(x, bool) else "fp32"
        return "i32" if abs(x) < 2**31 else "i64"

    def record(kernel, *args, grid, warmup, **given):
        given |= zip(kernel.arg_names, args, strict=False)
        named = {p.name: given.pop(p.name, p.default) for p in kernel.params}
        constants = {p.name: named[p.name] for p in kernel.params if p.is_constexpr or named[p.name] is None}
        signature = {n: type_of(x) for n, x in named.items() if n not in constants}
        recorded.append((kernel, signature, constants, given))

    found, files = launch.architecture, [m for n, m in sys.modules.items() if n.startswith("kernels.")]
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", record))
        for file in files:
            if getattr(file, "architecture", None) is found:
                patches.enter_context(mock.patch.object(file, "architecture", lambda x: architecture))
        call()
    return recorded


def compiled(kernel, signature, constants, options, architecture=90):
    """The `Figures` of one kernel on one architecture. Pointers are aligned to 16 bytes; integers only where typed "i32:16"."""
    names = kernel.arg_names
    constants = {n: x for n, x in (constants | options).items() if n in names}
    options = {n: x for n, x in options.items() if n not in names}
    if missing := [n for n in names if n not in signature and n not in constants]:
        raise ValueError(f"{kernel.__name__}: no type and no value for {', '.join(missing)}")
    signature = {n: "constexpr" if n in constants else signature[n] for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*") or ":16" in signature[n]
    }
    signature = {n: x.removesuffix(":16") for n, x in signature.items()}
    source = ASTSource(kernel, signature, {(names.index(n),): x for n, x in constants.items()}, aligned)
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(io.StringIO()) as log:
        binary = compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    log, shared = log.getvalue(), binary.metadata.shared
    registers, spill = (int(re.search(pattern, log)[1]) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    faults = ["wgmma serialised"] if "serialized" in log.lower() else []
    if architecture == 90:
        faults += [f"a dot of the transpose of a dot's result: {line}" for line in transposed_results(binary.asm["ttir"])]
        if "m64n8k" in binary.asm["ptx"]:
            faults.append("wgmma of 8 columns: more of them to a warp, or fewer warps")
    if shared > PARTS[architecture].cta:
        faults.append(f"more shared memory than {PARTS[architecture].cta} B")
    per_warp = -(-registers * 32 // 256) * 256  # registers are given to warps in units of 256
    warps = options.get("num_warps", 4)
    ctas = min(65536 // (per_warp * warps), PARTS[architecture].sm // (shared + 1024), 64 // warps, 32)
    return Figures(registers, spill, shared, ctas, tuple(faults))


# ----------------------------------------------------------------------------------------------------------------------
# What flows where in Triton's IR

VALUE = re.compile(r"(%[\w-]+)(#\d+)?")
ENDS = ("tt.load", "tt.descriptor_load", "tt.descriptor_gather", "tt.reduce", "tt.scan", "tt.gather", "tt.histogram")  # a new tile


def flows(ttir):
    """The edges (from, to, operation) between the values of an IR module, through loops and branches too.

    A name may stand for another value in another branch: each is told apart by how often its name was defined so far.
    """
    edges, regions, version = [], [], {}  # of each open loop or branch: its results and its carried arguments

    def values(text):
        return [f"{name}.{version.get(name, 0)}{part or ''}" for name, part in VALUE.findall(text)]

    def define(name):
        version[name] = version.get(name, 0) + 1
        return f"{name}.{version[name]}"

    for line in ttir.splitlines():
        line = line.split(" loc(")[0].strip()
        target, _, right = line.partition(" = ") if line.startswith("%") else ("", "", line)
        operation = re.match(r'"?([\w.]*)', right)[1]
        if operation in ("scf.for", "scf.while", "scf.if"):
            carried = re.search(r"iter_args\((.*?)\)|scf\.while \((.*?)\)", right)
            pairs = [x.split(" = ") for x in (carried[1] or carried[2]).split(", ")] if carried else []
            initial = [values(x)[0] for _, x in pairs]
            name, _, count = target.partition(":")
            results = [define(name)] if name else []
            if count:
                results = [f"{results[0]}#{i}" for i in range(int(count))]
            regions.append((results, [define(x) for x, _ in pairs]))
            edges += [(x, y, "scf") for group in regions[-1] for x, y in zip(initial, group, strict=False)]
        elif operation in ("scf.yield", "scf.condition"):
            given = values(right.split(" : ")[0])[operation == "scf.condition" :]
            edges += [(x, y, "scf") for group in regions[-1] for x, y in zip(given, group, strict=False)]
        elif target:
            operands = values(right.split(" : ")[0])
            result = define(target.partition(":")[0])
            edges += [(x, result, operation) for x in operands]
        elif line == "}" and regions:
            regions.pop()
    return edges


def transposed_results(ttir):
    """The values, of a Triton IR module, that are dots with an operand that is the transpose of a dot's result."""
    edges = flows(ttir)
    operands = {}
    for x, y, operation in edges:
        if operation == "tt.dot":
            operands.setdefault(y, []).append(x)
    products, transposes, size = set(operands), set(), -1
    while size != len(products) + len(transposes):
        size = len(products) + len(transposes)
        for x, y, operation in edges:
            if operation.startswith(ENDS) or operation == "tt.dot":
                continue
            if x in products:
                (transposes if operation == "tt.trans" else products).add(y)
            if x in transposes:
                (products if operation == "tt.trans" else transposes).add(y)
    return [y for y, inputs in operands.items() if transposes & set(inputs[:2])]


# ----------------------------------------------------------------------------------------------------------------------


def cpu_seconds():
    """Of this process and of its children, ptxas among them: what a compilation costs however busy the machine is."""
    return sum(os.times()[:4])


def examine(module, architecture, index):
    """One case in a worker: its line of the table and whether it is within bounds."""
    name, *case, most = cases_of(module, architecture)[index]
    head, start = f"sm_{architecture:<3} {module + ' ' + name:<46}", cpu_seconds()
    try:
        figures = compiled(*case, architecture)
    except Exception as error:  # whatever the compiler raises is this case's result; the others go on
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return f"{head} {type(error).__name__}: {lines[-1][:160]}  FAILED", False
    faults, most = list(figures.faults), most * (8 if architecture == 80 else 1)
    if figures.spill > most:
        faults.append(f"spills more than {most} B")
    row = f"{figures.registers:>5} {figures.spill:>6} {figures.shared:>7} {figures.ctas:>5} {cpu_seconds() - start:>7.1f}"
    return f"{head}{row}{'  FAILED: ' + '; '.join(faults) if faults else ''}", not faults


def main(words):
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        sys.exit("error: TRITON_INTERPRET is set: nothing is compiled in the interpreter; unset it")
    known = ["quick", *modules(), *(f"sm_{architecture}" for architecture in PARTS)]
    if unknown := [word for word in words if word not in known]:
        sys.exit(f"error: {', '.join(unknown)}: known are {', '.join(known)}")
    families = [m for m in modules() if m in words] or modules()
    architectures = [a for a in PARTS if f"sm_{a}" in words] or list(PARTS)
    jobs = [(m, a, i) for m in families for a in architectures for i in chosen(m, a, "quick" in words)]
    print(f"{'part':<6} {'kernel':<46}{'regs':>5} {'spill':>6} {'shared':>7} {'CTAs':>5} {'seconds':>7}", flush=True)
    bad = 0
    with ProcessPoolExecutor(min(2, os.cpu_count()), multiprocessing.get_context("spawn")) as pool:
        for line, fine in pool.map(examine, *zip(*jobs, strict=True)):
            print(line, flush=True)
            bad += not fine
    missing = [] if families != modules() else without_a_case()
    print(f"{len(jobs)} compiled, {bad} out of bounds{', no case of ' if missing else ''}{', '.join(missing)}")
    sys.exit(bad > 0 or missing != [])


if __name__ == "__main__":
    main(sys.argv[1:])
