"""`bench.py tune`: the launch tables of the Triton kernels, measured on the device that is here.

Each kernel that a workload launches is tried with one option changed at a time: warps, stages, and block sizes halved and doubled.
All candidates are compiled and compared with the results of the present table in processes side by side; those that fail, or
differ by more than rounding does, are out. Then the rest are timed alone, at the workload's usual shapes, and the best change of
each kernel is printed as Python text to paste into its file. A change is kept if it gains more than timings vary.
"""

import contextlib
import importlib
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch
from pydantic import Field

import kernels
from benchmarks.measure import BenchConfig, print_table, report, split_list
from benchmarks.operators import milliseconds, one_line, operator_problems, passes, shapes_of, warm_all
from benchmarks.workloads import WORKLOADS
from configurator import ConfigError, TrainConfig
from preflight import resolve_device

SAME = 1e-2  # how far results may be from those of the present table: bf16 sums in another order differ by 1e-3 to 5e-3
GAIN = 0.01  # of the time


class TuneConfig(BenchConfig):
    """launch tables"""

    operators: str = Field("gdn,linear,kda,window,sparse,conv,norm,loss", min_length=1, description="what to tune, by comma")
    shapes: str | None = Field(None, description="sizes to measure at, separated by commas; none: the usual ones")
    only: str | None = Field(None, description="kernels of the tables to tune, separated by commas; none: all")
    most_warps: int = Field(4, ge=1, le=16, description="more may race where there are several dots, before Triton 3.7.1")
    processes: int = Field(16, ge=1, description="processes that compile, at most one per core")
    device: str | None = Field(None, min_length=1, description="cuda, cuda:1; none: the best there is")

    def conflicts(self):
        yield from operator_problems(self)


class Candidate(NamedTuple):
    """One entry of a table with one option changed (`options` is the whole entry), for one workload."""

    name: str
    kernel: str
    options: tuple  # of (option, value), so that it can be a key

    def __str__(self):
        return f"{self.name} {self.kernel} {', '.join(f'{n}={x}' for n, x in self.options)}"


def table_of(name, device):
    """The module of a workload's kernels and the key of its table on this device for 16-bit operands, or fp32 on a CPU."""
    from kernels import launch

    module = importlib.import_module(f"kernels.{kernels.TRITON[WORKLOADS[name].op]}")
    x = torch.empty(0, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    return module, (launch.architecture(x), x.element_size())


@contextlib.contextmanager
def entry(name, device, kernel, options):
    """Within this context the table has other options for one kernel."""
    module, key = table_of(name, device)
    with table(module, key, module.LAUNCH[key] | {kernel: options}):
        yield


@contextlib.contextmanager
def table(module, key, entries):
    """Within this context the module's table for this key is another; what it worked out from its tables is forgotten."""

    def put(entries):
        module.LAUNCH[key] = entries
        for x in list(vars(module).values()):
            if hasattr(x, "cache_clear"):
                x.cache_clear()

    before = module.LAUNCH[key]
    put(entries)
    try:
        yield
    finally:
        put(before)


class Watched(dict):
    """A table that remembers which entries were asked for."""

    def __init__(self, table):
        super().__init__(table)
        self.seen = []

    def __getitem__(self, kernel):
        self.seen.append(kernel)
        return super().__getitem__(kernel)


def used(name, shape, device, seed=0):
    """The entries of the table that a forward and backward pass reads."""
    module, key = table_of(name, device)
    watched = Watched(module.LAUNCH[key])
    with table(module, key, watched), kernels.use_backend("triton"):
        for run in passes(name, shape, "ours", _dtype(device), device, seed):
            run()
    return list(dict.fromkeys(watched.seen))


def _dtype(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def alternatives(options, most_warps=4):
    """The same options with one of them changed, for each change that is tried."""
    warps = options.get("num_warps", 4)
    choices = {"num_warps": [n for n in (1, 2, 4, 8, 16) if n <= max(most_warps, warps)], "num_stages": (1, 2, 3, 4)}
    for option, value in options.items():
        if not isinstance(value, int) or option == "maxnreg":
            continue
        for other in choices.get(option, (value // 2, 2 * value)):
            if other != value and other >= 1:
                yield options | {option: other}


def results(name, shape, device, seed):
    """Output and gradients of the Triton operator."""
    workload = WORKLOADS[name]
    torch.manual_seed(seed)
    s = workload.sizes(shape)
    inputs = workload.inputs(s, device=device, dtype=_dtype(device))
    with kernels.use_backend("triton"):
        out = workload.call(inputs, s)
        out = out[0] if isinstance(out, tuple) else out
        grads = torch.autograd.grad(out, [x for x in inputs.values() if x.requires_grad], torch.randn_like(out), allow_unused=True)
    return [out.detach(), *(x for x in grads if x is not None)]


def differs(candidate, shape, device, seed=0):
    """None if the candidate computes what the present table does, else what is wrong."""
    device = torch.device(device)
    try:
        want = results(candidate.name, shape, device, seed)
        with entry(candidate.name, device, candidate.kernel, dict(candidate.options)):
            got = results(candidate.name, shape, device, seed)
        worst = max(((x - y).float().norm() / y.float().norm().clamp(min=1e-20)).item() for x, y in zip(got, want, strict=True))
        return None if worst <= SAME else f"differs by {worst:.0e}"  # NaN too
    except Exception as error:  # too much shared memory, a tile that the kernel cannot have: a candidate that is out
        return one_line(error)
    finally:
        torch.cuda.empty_cache()


def _differs(job):
    return differs(*job)


def tune(config):
    """Candidates for every entry of the launch tables that the operators use, timed; the best table as Python text."""
    device, _ = resolve_device(TrainConfig(device=config.device))
    if device.type != "cuda":
        raise ConfigError(f"tune measures on a GPU, and the device is {device}: there is nothing to tune on it")
    names, only = split_list(config.operators), split_list(config.only or "")
    if absent := [name for name in names if WORKLOADS[name].op not in kernels.TRITON]:
        raise ConfigError([f"{name}: its operator has no Triton kernel to tune" for name in absent])
    dtype = str(_dtype(device)).removeprefix("torch.")
    shapes = {name: shapes_of(config, name, device) for name in names}
    warm_all(
        [(name, shape, "triton", dtype, str(device), config.seed) for name in names for shape in shapes[name]], config.processes
    )
    candidates = {}  # and the shapes that use their entries
    for name in names:
        module, key = table_of(name, device)
        read = {shape: used(name, shape, device) for shape in shapes[name]}
        for kernel, options in module.LAUNCH[key].items():
            where = [shape for shape in shapes[name] if kernel in read[shape]]
            for other in alternatives(options, config.most_warps) if where and (not only or kernel in only) else ():
                candidates[Candidate(name, kernel, tuple(other.items()))] = where
    jobs = [(c, where[0], str(device), config.seed) for c, where in candidates.items()]
    with ProcessPoolExecutor(min(config.processes, os.cpu_count()), multiprocessing.get_context("spawn")) as pool:
        faults = dict(zip(candidates, pool.map(_differs, jobs), strict=True))
    rows = [row for name in names for row in measured(config, name, candidates, faults, device)]
    print_table(["operator", "kernel", "options", "of the time", "note"], [_cells(row) for row in rows])
    for name in names:
        print(as_text(name, rows, device))
    return report(config, "tune", device, rows)


def measured(config, name, candidates, faults, device):
    """A row for each candidate of one workload: its time over that of the present table, the mean over the shapes that use it. The
    time is that of a forward pass and of one with its backward, so that what only one of them launches counts."""
    rows = []
    with kernels.use_backend("triton"):
        runs = {
            shape: passes(name, shape, "ours", _dtype(device), device, config.seed) for shape in shapes_of(config, name, device)
        }
        before = {shape: sum(milliseconds(run, device) for run in both) for shape, both in runs.items()}
        for candidate, where in candidates.items():
            if candidate.name != name:
                continue
            row = {"operator": name, "kernel": candidate.kernel, "options": dict(candidate.options), "fault": faults[candidate]}
            rows.append(row)
            if row["fault"]:
                continue
            with entry(name, device, candidate.kernel, row["options"]):
                ratios = [sum(milliseconds(run, device) for run in runs[shape]) / before[shape] for shape in where]
            row["ratio"] = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return rows


def _cells(row):
    options = ", ".join(f"{n}={x}" for n, x in row["options"].items())
    return [row["operator"], row["kernel"], options, f"{row['ratio']:.3f}" if "ratio" in row else "", row["fault"] or ""]


def best(rows):
    """{kernel: row} of the fastest candidates that gain more than GAIN."""
    faster = [row for row in rows if row.get("ratio", 1.0) < 1.0 - GAIN]
    return {row["kernel"]: row for row in sorted(faster, key=lambda row: -row["ratio"])}  # the fastest comes last


def as_text(name, rows, device):
    """The table of one workload's module with the best entries, as Python text."""
    module, key = table_of(name, device)
    better = best([row for row in rows if row["operator"] == name])
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device
    lines = [f"# {module.__name__}, by {name} on {where}", f"{key}: {{"]
    for kernel, options in module.LAUNCH[key].items():
        row = better.get(kernel)
        note = f"  # {row['ratio']:.3f} of the time with {options}" if row else ""
        lines.append(f'    "{kernel}": {dict(row["options"] if row else options)},{note}')
    return "\n".join([*lines, "},"]).replace("'", '"')
