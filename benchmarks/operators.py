"""`bench.py kernels`: each operator beside its roofline bound and beside the same operator of every library that is installed.

Everything is compiled first, in processes side by side, each of which runs one operator or peer once: what Triton compiles stays in
its cache on disk. Then one process measures, alone on the device, ours first; a peer that is not ready after `peer_seconds` (those
that tune themselves take minutes) is a line that says so. What a peer chose beside the other processes is kept: choosing again
alone would take the minutes once more. Every row is printed when it is known.
"""

import contextlib
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from pydantic import Field

import kernels
from benchmarks.measure import (
    BenchConfig,
    list_problems,
    median_seconds,
    peak_bytes,
    print_table,
    report,
    split_list,
    synchronize,
)  # fmt: skip
from benchmarks.workloads import WORKLOADS, bound_ms, sizes
from configurator import TrainConfig
from model import format_bytes
from preflight import resolve_device

OURS = ("ours", "triton")
SHORT = {"B": 2, "T": 128, "H": 2, "G": 1, "K": 16, "V": 16, "D": 16, "J": 2, "I": 8, "k": 16, "w": 32, "doc": 40, "N": 64}


class OperatorsConfig(BenchConfig):
    """operators beside bounds and peers"""

    operators: str = Field(",".join(WORKLOADS), min_length=1, description="which to measure, separated by commas")
    shapes: str | None = Field(None, description="their sizes, like 'B8 T4096 H16, B1 T999'; none: the usual, tiny on a CPU")
    peers: bool = Field(True, description="measure other libraries too, where they can be imported")
    memory: bool = Field(False, description="peak memory of a forward and backward pass too")
    dtype: str = Field(
        "bfloat16", pattern="^(bfloat16|float16|float32)$", description="type of inputs other than gates; float32 on a CPU"
    )
    peer_seconds: float = Field(300.0, gt=0, description="how long all peers together may compile")
    processes: int = Field(16, ge=1, description="processes that compile, at most one per core")
    device: str | None = Field(None, min_length=1, description="cpu, cuda, cuda:1; none: the best there is")

    def conflicts(self):
        yield from operator_problems(self)


class FirstConfig(BenchConfig):
    """first call with nothing compiled"""

    operators: str = Field(",".join(WORKLOADS), min_length=1, description="which to call, separated by commas")
    shapes: str | None = Field(None, description="their sizes; none: the first of the usual ones, tiny on a CPU")
    limit: float = Field(12.0, gt=0, description="seconds a first call may take")
    device: str | None = Field(None, min_length=1, description="cpu, cuda, cuda:1; none: the best there is")

    def conflicts(self):
        yield from operator_problems(self)


def operator_problems(config):
    yield from list_problems(config, "operators", lambda name: name in WORKLOADS, f"known are {', '.join(WORKLOADS)}")
    try:
        for shape in split_list(config.shapes or ""):
            sizes(shape)
    except ValueError as error:
        yield {"shapes"}, f"shapes={config.shapes}: {error}"


def shapes_of(config, name, device):
    """The sizes to measure one workload at, as text."""
    workload = WORKLOADS[name]
    if config.shapes:
        return split_list(config.shapes)
    if device.type == "cpu":
        small = {n: min(x, SHORT.get(n, x)) for n, x in workload.sizes().items()}
        return [" ".join(f"{n}{x}" for n, x in small.items())]
    return split_list(workload.shapes)


# ----------------------------------------------------------------------------------------------------------------------
# One operator or peer


def providers(config, name, device):
    """What is measured of a workload: ours as dispatched, Triton's where the dispatch prefers another, and the peers."""
    named = ["ours"]
    if device.type == "cuda" and name in ("attention",):  # SDPA takes the plain causal case
        named.append("triton")
    return named + (list(WORKLOADS[name].peers) if config.peers and device.type == "cuda" else [])


def passes(name, shape, provider, dtype, device, seed):
    """Two functions, the forward pass and forward with backward, of one provider at one shape."""
    torch.manual_seed(seed)
    workload = WORKLOADS[name]
    s = workload.sizes(shape)
    inputs = workload.inputs(s, device=device, dtype=dtype)

    def run():
        with kernels.use_backend("triton") if provider == "triton" else contextlib.nullcontext():
            out = workload.call(inputs, s) if provider in ("ours", "triton") else workload.peers[provider](inputs, s)
        return out[0] if isinstance(out, tuple) else out

    def forward():
        with torch.no_grad():
            return run()

    leaves = [x for x in inputs.values() if x.requires_grad]
    gradient = torch.randn_like(forward())

    def both():
        return torch.autograd.grad(run(), leaves, gradient, allow_unused=True)

    return forward, both


def milliseconds(call, device):
    if device.type == "cuda":
        import triton

        return triton.testing.do_bench(call, warmup=10, rep=50, return_mode="median")
    return 1e3 * median_seconds(call, device, repeats=3, budget=1.0)


def last_line(error):
    """One line that says what went wrong."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1].strip()}"[:100]


def warm(job):
    """In a worker: run one job once in both directions, so that its kernels are compiled; None, or what went wrong."""
    name, shape, provider, dtype, device, seed = job
    os.environ.setdefault("FLA_FLASH_QLA", "0")  # fla would take FlashQLA where it is installed, which is a peer of its own
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes are many already
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, both = passes(name, shape, provider, getattr(torch, dtype), torch.device(device), seed)
            both()
        synchronize(torch.device(device))
        return None
    except Exception as error:  # a peer that is missing or refuses is a line in the table, not the end of it
        return last_line(error)
    finally:
        torch.cuda.empty_cache()


def _say(pipe, job):
    pipe.send(warm(job))


def warm_all(jobs, processes, seconds=math.inf):
    """What each job said in `warm`, run in processes side by side; those still at it after `seconds` are ended."""
    context, end = multiprocessing.get_context("spawn"), time.perf_counter() + seconds
    waiting, running, said = list(jobs), {}, {}
    while (waiting or running) and time.perf_counter() < end:
        while waiting and len(running) < min(processes, os.cpu_count()):
            job, (mine, theirs) = waiting.pop(0), context.Pipe(duplex=False)
            running[job] = (context.Process(target=_say, args=(theirs, job), daemon=True), mine)
            running[job][0].start()
        for job, (process, pipe) in list(running.items()):
            if pipe.poll():
                said[job] = pipe.recv()
            elif process.is_alive():
                continue
            else:
                said[job] = f"its process ended with {process.exitcode}"
            process.join()
            del running[job]
        time.sleep(0.05)
    for process, _ in running.values():
        process.kill()
    return said | dict.fromkeys([*waiting, *running], f"not compiled within {seconds:.0f} s")


def measure(job, with_memory):
    """One row of the table."""
    name, shape, provider, dtype, device, seed = job
    workload, device = WORKLOADS[name], torch.device(device)
    row = {"operator": name, "shape": shape, "provider": provider}
    if provider == "ours":
        row["backend"] = kernels.backend_of(workload.op, device.type)
    try:
        forward, both = passes(name, shape, provider, getattr(torch, dtype), device, seed)
        row |= {"forward_ms": milliseconds(forward, device), "ms": milliseconds(both, device)}
        if with_memory:
            row["peak_bytes"] = peak_bytes(both, device)
    except Exception as error:
        return row | {"error": last_line(error)}
    if device.type == "cuda":
        costs = workload.cost(workload.sizes(shape))
        bounds = [bound_ms(cost, torch.cuda.get_device_name(device)) for cost in costs]
        if None not in bounds:
            row |= {"forward_of_bound": bounds[0] / row["forward_ms"], "of_bound": sum(bounds) / row["ms"]}
    return row


def operators(config):
    """Milliseconds, the fraction of the roofline bound, and how many times faster ours is than each peer."""
    device, _ = resolve_device(TrainConfig(device=config.device))
    dtype = config.dtype if device.type == "cuda" else "float32"
    jobs = [
        (name, shape, provider, dtype, str(device), config.seed)
        for name in split_list(config.operators)
        for shape in shapes_of(config, name, device)
        for provider in providers(config, name, device)
    ]
    os.environ.setdefault("FLA_FLASH_QLA", "0")
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    rows = []
    for part in ([job for job in jobs if job[2] in OURS], [job for job in jobs if job[2] not in OURS]):
        failed, start = {}, time.perf_counter()
        if device.type == "cuda" and part:
            limit = math.inf if part[0][2] in OURS else config.peer_seconds
            failed = {job: error for job, error in warm_all(part, config.processes, limit).items() if error}
            print(f"compiled in {time.perf_counter() - start:.0f} s, {len(part) - len(failed)} of {len(part)} run", flush=True)
        for job in part:
            row = dict(zip(("operator", "shape", "provider"), job, strict=False)) | {"error": failed.get(job)}
            rows.append(row if job in failed else measure(job, config.memory))
            compare(rows)
            print("  ".join(_cells(rows[-1], config.memory)), flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    rows.sort(key=lambda row: jobs.index(next(job for job in jobs if job[:3] == (row["operator"], row["shape"], row["provider"]))))
    compare(rows)
    print_table(
        [
            "operator",
            "shape",
            "by",
            "forward ms",
            "of bound",
            "fwd+bwd ms",
            "of bound",
            "ours is faster by",
            *["peak"] * config.memory,
        ],
        [_cells(row, config.memory) for row in rows],
    )
    return report(config, "kernels", device, rows)


def compare(rows):
    """Give each peer's row how many times as long it takes as ours at the same shape."""
    ours = {(r["operator"], r["shape"]): r for r in rows if r["provider"] == "ours" and "ms" in r}
    for row in rows:
        mine = ours.get((row["operator"], row["shape"]))
        if mine and row is not mine and "ms" in row:
            row |= {"forward_ratio": row["forward_ms"] / mine["forward_ms"], "ratio": row["ms"] / mine["ms"]}


def _cells(row, with_memory):
    cells = [row["operator"], row["shape"], row["provider"] if row.get("backend") in (None, "triton") else row["backend"]]
    if row.get("error"):
        return [*cells, row["error"], *[""] * (4 + with_memory)]
    for key in ("forward_", ""):
        share = row.get(f"{key}of_bound")
        cells += [f"{row[f'{key}ms']:.3f}", "" if share is None else f"{share:.0%}"]
    cells.append(f"{row['forward_ratio']:.2f} x, {row['ratio']:.2f} x" if "ratio" in row else "")
    return cells + ([format_bytes(row["peak_bytes"])] if with_memory else [])


# ----------------------------------------------------------------------------------------------------------------------
# first: nothing compiled yet


FIRST_CALL = """
import sys, time, torch
from benchmarks.operators import passes
name, shape, dtype, device = sys.argv[1:]
torch.zeros(1, device=device)
start = time.perf_counter()
passes(name, shape, "ours", getattr(torch, dtype), torch.device(device), 0)[1]()
if device != "cpu": torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def first_call(name, shape, dtype, device):
    """Seconds of the first forward and backward pass in a new process with an empty cache, and what went wrong."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, "-W", "ignore", "-c", FIRST_CALL, name, shape, dtype, device]
        root = Path(__file__).resolve().parent.parent
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or [""])[-1][:100]
    return float(done.stdout.split()[-1]), None


def first(config):
    """Seconds of the first forward and backward pass of each operator in a new process, nothing in Triton's cache."""
    device, _ = resolve_device(TrainConfig(device=config.device))
    dtype, rows = "bfloat16" if device.type == "cuda" else "float32", []
    for name in split_list(config.operators):
        shape = shapes_of(config, name, device)[0]
        seconds, error = first_call(name, shape, dtype, str(device))
        rows.append({"operator": name, "shape": shape, "seconds": seconds, "error": error})
    cells = [
        [r["operator"], r["shape"], r["error"] or f"{r['seconds']:.1f}{' TOO LONG' if r['seconds'] > config.limit else ''}"]
        for r in rows
    ]
    print_table(["operator", "shape", "seconds"], cells)
    return report(config, "first", device, rows)
