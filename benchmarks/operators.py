"""`bench.py kernels`: each operator beside its roofline bound and beside the same operator of every library that is installed.

Everything is compiled first, in processes side by side, each of which runs one operator or peer once: what Triton compiles stays in
its cache on disk. The peers in TUNING compile meanwhile; they choose among all of their own configurations, but by the best of the
runs in 15 ms where Triton takes the median of those in 100 ms, and while other processes use the device: of configurations that are
nearly alike they may miss the fastest. A peer that is not ready after `peer_seconds` is a line that says so. Only when all that has
ended are times taken, one after the other: ours and what PyTorch has in this process, then the peers in TUNING, each by the process
that tuned it. Every row is printed and written when it is known.

`ms` is the time of a call as a program makes it, which is the host's where launching takes longer than the kernels; `graph_ms` is
that of the same kernels replayed from a CUDA graph.
"""

import contextlib
import functools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import Field

import kernels
from benchmarks.measure import (
    BenchConfig,
    kernel_times,
    list_problems,
    median_seconds,
    peak_bytes,
    print_table,
    report,
    split_list,
    synchronize,
    write_report,
)  # fmt: skip
from benchmarks.peers import Workers
from benchmarks.workloads import WORKLOADS, bound_ms, sizes
from configurator import ConfigError, TrainConfig
from model import format_bytes
from preflight import resolve_device

OURS = ("ours", "triton")
TUNING = ("fla", "flash_qla", "mamba_ssm")  # minutes: dozens of configurations of each kernel, or a C++ compiler
PEERS = sorted({name for workload in WORKLOADS.values() for name in workload.peers})
BY_SHAPE = ("flash_qla",)  # keep what they compile on disk: a process for each shape
NOT_CAPTURED = []  # graphs that failed: allocators may still ask them
PRINTED = 12  # kernels of a profile; the file has more
ROW_SECONDS = 60.0  # to measure one shape of a peer that has been compiled
SHORT = {"B": 2, "T": 128, "H": 2, "G": 1, "K": 16, "V": 16, "D": 16, "J": 2, "I": 8, "k": 16, "w": 32, "doc": 40, "N": 64}


class OperatorsConfig(BenchConfig):
    """operators beside bounds and peers"""

    operators: str = Field(",".join(WORKLOADS), min_length=1, description="which to measure, separated by commas")
    shapes: str | None = Field(None, description="their sizes, like 'B8 T4096 H16, B1 T999'; none: the usual, tiny on a CPU")
    peers: bool | str = Field(True, description="measure other libraries too, where they can be imported; or which: fla,mamba_ssm")
    memory: bool = Field(False, description="peak memory of a forward and backward pass too")
    profile: bool = Field(False, description="which kernels take the time of a forward and backward pass of ours")
    dtype: str = Field(
        "bfloat16", pattern="^(bfloat16|float16|float32)$", description="type of inputs other than gates; float32 on a CPU"
    )
    peer_seconds: float = Field(300.0, gt=0, description="how long all peers that tune themselves may take")
    peer_device: str | None = Field(
        None, min_length=1, description="another GPU, to tune them on; none: `device`, which warms up ours meanwhile"
    )
    processes: int = Field(16, ge=1, description="processes that compile, at most one per core")
    device: str | None = Field(None, min_length=1, description="cpu, cuda, cuda:1; none: the best there is")

    def conflicts(self):
        yield from operator_problems(self)
        if isinstance(self.peers, str):
            yield from list_problems(self, "peers", PEERS.__contains__, f"true, false, or some of {', '.join(PEERS)}")


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


class Job(NamedTuple):
    operator: str
    shape: str
    provider: str
    dtype: str
    device: str
    seed: int


def providers(config, name, device):
    """What is measured of a workload: ours as dispatched, Triton's where the dispatch prefers another, and the peers."""
    named = ["ours"]
    if device.type == "cuda" and name in ("attention",):  # SDPA takes the plain causal case
        named.append("triton")
    if device.type != "cuda" or not config.peers:
        return named
    return named + [peer for peer in WORKLOADS[name].peers if config.peers is True or peer in split_list(config.peers)]


def tuning_device(config, device):
    """The name of the GPU that peers tune themselves on."""
    if config.peer_device is None:
        return str(device)
    others = [f"cuda:{i}" for i in range(torch.cuda.device_count()) if device.type == "cuda" and i != device.index]
    if config.peer_device not in others:
        raise ConfigError(f"peer_device={config.peer_device!r} is no GPU beside {device}: there are {', '.join(others) or 'none'}")
    names = [torch.cuda.get_device_name(x) for x in (device, config.peer_device)]
    if names[0] != names[1]:
        raise ConfigError(f"peer_device={config.peer_device!r} is a {names[1]}, {device} a {names[0]}: tune on the same")
    return config.peer_device


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


def replayed(call, device):
    """Milliseconds of a call's kernels, replayed from a CUDA graph; raises where they cannot be captured."""
    if device.type != "cuda":
        return None
    graph, pool, stream = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # which `torch.cuda.graph` would not leave if capturing failed
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                call()
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # else the allocator takes the capture for underway: it empties no cache
                torch._C._cuda_endAllocateToPool(device.index, pool)
                torch._C._cuda_releasePool(device.index, pool)
            NOT_CAPTURED.append(graph)
            raise error.__context__ or error from None  # the end of a capture says only that something went wrong before
    torch.cuda.current_stream().wait_stream(stream)
    return milliseconds(graph.replay, device)


def one_line(error):
    """What went wrong: the first line of the message, or the last where the first is the place in a kernel's source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1 if re.match(r'at [0-9]+:[0-9]+', lines[0]) else 0]}"[:160]


def use(device):
    """Make a GPU the current one: Triton launches there, wherever the tensors are."""
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)


def warm(job, device=None):
    """In a worker: run one job once in both directions, so that its kernels are compiled; None, or what went wrong.

    On `device` where it is given, on the job's otherwise; FlashQLA always on the job's, since TileLang keeps it loaded there.
    """
    name, shape, provider, dtype, where, seed = job
    device = torch.device(where if provider in BY_SHAPE else device or where)
    os.environ.setdefault("FLA_FLASH_QLA", "0")  # fla would take FlashQLA where it is installed, which is a peer of its own
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes are many already
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            use(device)
            _, both = passes(name, shape, provider, getattr(torch, dtype), device, seed)
            both()
        synchronize(device)
        return None
    except Exception as error:  # a peer that is missing or refuses is a line in the table, not the end of it
        return one_line(error)
    finally:
        torch.cuda.empty_cache()


def _say(pipe, job):
    pipe.send(warm(job))


def warm_all(jobs, processes):
    """What each job said in `warm`, run in processes side by side."""
    context, waiting, running, said = multiprocessing.get_context("spawn"), list(jobs), {}, {}
    while waiting or running:
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
    return said


def measure(job, with_memory):
    """One row of the table."""
    name, shape, provider, dtype, device, seed = job
    workload, device = WORKLOADS[name], torch.device(device)
    row = {"operator": name, "shape": shape, "provider": provider}
    if provider == "ours":
        row["backend"] = kernels.backend_of(workload.op, device.type)
    try:
        use(device)
        forward, both = passes(name, shape, provider, getattr(torch, dtype), device, seed)
        row |= {"forward_ms": milliseconds(forward, device), "ms": milliseconds(both, device)}
        if with_memory:
            row["peak_bytes"] = peak_bytes(both, device)
        row |= {"forward_graph_ms": None, "graph_ms": None}
        try:
            row["forward_graph_ms"] = replayed(forward, device)
            row["graph_ms"] = replayed(both, device)
        except Exception as error:  # it waits for the device, or allocates what a graph cannot hold
            row["graph_error"] = one_line(error)
    except Exception as error:
        return row | {"error": one_line(error)}
    finally:
        torch.cuda.empty_cache()
    if device.type == "cuda":
        costs = workload.cost(workload.sizes(shape))
        bounds = [bound_ms(cost, torch.cuda.get_device_name(device)) for cost in costs]
        if None not in bounds:
            row |= {"forward_of_bound": bounds[0] / row["forward_ms"], "of_bound": sum(bounds) / row["ms"]}
    return row


class Rows:
    """The rows known so far, in the order of the jobs: each is printed and all are written whenever there is one more."""

    def __init__(self, config, device, jobs):
        self.config, self.device, self.order, self.rows = config, device, {job[:3]: i for i, job in enumerate(jobs)}, []

    def of(self, job):
        return next(row for row in self.rows if (row["operator"], row["shape"], row["provider"]) == job[:3])

    def add(self, row):
        self.rows.append(row)
        compare(self.rows)
        print("  ".join(_cells(row, self.config.memory)), flush=True)
        self.rows.sort(key=lambda row: self.order[row["operator"], row["shape"], row["provider"]])
        write_report(self.config, "kernels", self.device, self.rows)


def profile(job, row):
    """Add the kernels of a forward and backward pass to the row of a job, and print them."""
    device = torch.device(job.device)
    _, both = passes(job.operator, job.shape, job.provider, getattr(torch, job.dtype), device, job.seed)
    both()
    row["profile"] = kernel_times(both, device)
    print(f"{'  '.join(job[:3])}: {sum(kernel['ms'] for kernel in row['profile']):.3f} ms")
    for kernel in row["profile"][:PRINTED]:
        print(f"{kernel['ms']:9.3f} ms {kernel['share']:6.1%} {kernel['calls']:5} x {kernel['name'][:90]}", flush=True)


def failed(job, error):
    return {"operator": job.operator, "shape": job.shape, "provider": job.provider, "error": error}


def process_of(job):
    """Jobs for which this is the same run in one process, in order."""
    return job.operator, job.provider, job.shape if job.provider in BY_SHAPE else None


def operators(config):
    """Milliseconds, the fraction of the roofline bound, and how many times faster ours is than each peer."""
    device, _ = resolve_device(TrainConfig(device=config.device))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    dtype, tuned_on = config.dtype if device.type == "cuda" else "float32", tuning_device(config, device)
    jobs = [
        Job(name, shape, provider, dtype, str(device), config.seed)
        for name in split_list(config.operators)
        for shape in shapes_of(config, name, device)
        for provider in providers(config, name, device)
    ]
    os.environ.setdefault("FLA_FLASH_QLA", "0")
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    rows, start = Rows(config, device, jobs), time.perf_counter()
    # The first shape of every operator, then the second: a run that is cut off has seen the one that matters most.
    tuning = [job for job in jobs if job.provider in TUNING]
    tuning.sort(key=lambda job: shapes_of(config, job.operator, device).index(job.shape))
    others, said = [job for job in jobs if job not in tuning], {}
    workers = Workers(tuning, process_of, config.processes)

    def ready(job, error):
        print(f"{time.perf_counter() - start:.0f} s  {'  '.join(job[:3])}  {error or 'tuned'}", flush=True)

    with ThreadPoolExecutor(1) as background, contextlib.closing(workers):
        tuned = background.submit(workers.warm, functools.partial(warm, device=tuned_on), config.peer_seconds, ready)
        if device.type == "cuda":
            said = warm_all(others, config.processes)
            good = list(said.values()).count(None)
            print(f"{time.perf_counter() - start:.0f} s  compiled, {good} of {len(others)} run", flush=True)
        tuned.result()
        for job in others:
            rows.add(failed(job, said[job]) if said.get(job) else measure(job, config.memory))
        for job in tuning:
            row, error = workers.measure(measure, job, config.memory, seconds=ROW_SECONDS)
            rows.add(row or failed(job, error))
    for job in others if config.profile else ():  # last: a profiler that has run may slow launches down
        row = rows.of(job)
        if job.provider in OURS and "error" not in row:
            profile(job, row)
    print_table(
        [
            "operator",
            "shape",
            "by",
            "forward ms",
            "in a graph",
            "of bound",
            "fwd+bwd ms",
            "in a graph",
            "of bound",
            "ours is faster by",
            "in a graph",
            *["peak"] * config.memory,
        ],
        [_cells(row, config.memory) for row in rows.rows],
    )
    return report(config, "kernels", device, rows.rows)


TIMES = {"forward_ms": "forward_ratio", "ms": "ratio", "forward_graph_ms": "forward_graph_ratio", "graph_ms": "graph_ratio"}


def compare(rows):
    """Give each peer's row how many times as long it takes as ours at the same shape."""
    ours = {(r["operator"], r["shape"]): r for r in rows if r["provider"] == "ours" and "ms" in r}
    for row in rows:
        mine = ours.get((row["operator"], row["shape"]))
        if mine and row is not mine:
            row |= {ratio: row[n] / mine[n] for n, ratio in TIMES.items() if row.get(n) and mine.get(n)}


def _cells(row, with_memory):
    cells = [row["operator"], row["shape"], row["provider"] if row.get("backend") in (None, "triton") else row["backend"]]
    if row.get("error"):
        return [*cells, row["error"], *[""] * (7 + with_memory)]
    for key in ("forward_", ""):
        alone, share = row.get(f"{key}graph_ms"), row.get(f"{key}of_bound")
        cells += [f"{row[f'{key}ms']:.3f}", f"{alone:.3f}" if alone else "", "" if share is None else f"{share:.0%}"]
    for key in ("", "graph_"):
        both = [row.get(f"{n}{key}ratio") for n in ("forward_", "")]
        cells.append("" if None in both else f"{both[0]:.2f} x, {both[1]:.2f} x")
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
