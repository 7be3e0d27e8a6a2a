"""`python check.py --device=cuda`: the exam of the Triton operators, on the device that they are for.

Each operator runs in bf16 on inputs that are hard in one way: random ones; keys of cosine 0.9 with beta up to 2; gates that are all
zero; gates that forget everything here and there. Lengths are around the chunk's, ragged and long; rows hold one document, or
several and padding; memory that nobody has written is NaN. The output, the final state and every gradient of a random functional
are compared with fp64, the token loop up to 127 tokens and the chunked eager operator beyond, by ||got - want|| / ||want||; 30
repeats have to agree bit for bit. Where flash-linear-attention can be imported, its error on the same inputs is the other measure:
ours is at most 1.1 times that; `--beside=fla` compares the two and does nothing else. Jobs run in processes side by side, since
compiling takes most of the time. `--seconds=N` ends the exam after that time, with the table of what is done by then.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import time
import warnings
from concurrent import futures
from typing import NamedTuple

import torch

import kernels
from benchmarks.measure import print_table
from benchmarks.operators import one_line
from benchmarks.peers import tune_quickly
from benchmarks.workloads import WORKLOADS, documents
from configurator import ConfigError

LENGTHS = (1, 15, 63, 64, 65, 127, 1000, 4096)
LOOP = 127  # tokens up to which the truth is the token loop
REPEATED, REPEATS = (65, 1000, 4096), 30
RECURRENT = "B2 H4 G2 K128 V128, B2 H2 K64 V64, B1 H2 K96 V80"
SHAPES = dict.fromkeys(("gdn", "deltanet", "kda", "lightning", "linear", "gated_linear"), RECURRENT) | {
    "mamba2": "B2 H8 G1 K128 V64",
    "attention": "B2 H4 G2 D128, B2 H2 D64, B1 H2 D80",
    "window": "B2 H4 G2 D128 w200, B1 H2 D64 w64",
    "sparse": "B1 H8 G2 D128 J4 I64 k64",
    "conv": "B2 D384 W4, B1 D200 W3",
    "norm": "D768, D2048",
    "gated_norm": "D128",
    "loss": "D256 V50304",
}
UNPACKED = ("norm", "gated_norm", "loss")  # have no sequences
PADDED = 9  # tokens at the end of the last row of packed documents
# Relative RMS errors in bf16. fp32 (in Triton's interpreter, or for an H200's own fp32) is held to a hundredth.
LIMITS = {"out": 6e-3, "g": 2e-2, "beta": 2e-2}
LIMIT, CORRELATED = 1e-2, {"beta": 3e-2}
CORRELATED_LIMIT, BESIDE_FLA = 2e-2, 1.1
# Beside fla: heads as `bench.py kernels` measures, so that what fla has chosen there is on disk; errors below ROUNDING are alike.
BESIDE_SHAPE, BESIDE_LENGTHS, ROUNDING = "B2 H16 K128 V128", (127, 1000), 1e-3


class Job(NamedTuple):
    """One operator at one size on one kind of inputs, over all lengths; or beside fla, over BESIDE_LENGTHS."""

    name: str
    shape: str
    kind: str = "random"
    packed: bool = False
    beside_fla: bool = False

    def __str__(self):
        return (
            f"{self.name} {self.shape}, {self.kind}{', packed' if self.packed else ''}{', beside fla' if self.beside_fla else ''}"
        )


class Result(NamedTuple):
    errors: dict  # of each tensor: (error / limit, error, length)
    failures: list
    fla_ratio: float | None = None
    notes: tuple = ()  # printed, whatever the result


def limit_of(kind, tensor, dtype=torch.bfloat16):
    limit = CORRELATED.get(tensor, CORRELATED_LIMIT) if kind == "correlated" else LIMITS.get(tensor, LIMIT)
    return limit / 100 if dtype == torch.float32 else limit


def inputs_of(job, T, device, dtype):
    """Sizes and inputs: those of the workload, an incoming state where the operator takes one, packed documents if asked for."""
    workload = WORKLOADS[job.name]
    s = workload.sizes(job.shape) | {"T": T, "N": T}
    torch.manual_seed(T)
    inputs = workload.inputs(s, job.kind, device, dtype, fixed=None if job.beside_fla else ())
    if job.beside_fla:
        return s, inputs
    with torch.device(device):
        if "K" in s:
            inputs["initial_state"] = torch.randn(s["B"], s["H"], s["K"], s["V"]).requires_grad_()
        elif job.name == "conv":
            inputs["initial_state"] = torch.randn(s["B"], s["W"] - 1, s["D"]).to(dtype).requires_grad_()
        if job.packed:
            ids = documents(s | {"doc": max(2, T // 4)})
            ids[-1, max(1, T - PADDED) :] = 0
            inputs["segment_ids"] = ids
    return s, inputs


def results(call, inputs, weights):
    """Output, final state and gradients by name, of a functional with these weights (made at the first use)."""
    out = call(inputs)
    out = dict(zip(("out", "final"), out if isinstance(out, tuple) else (out,), strict=False))
    out = {n: x for n, x in out.items() if x.requires_grad}
    if not weights:
        weights.update({n: torch.randn_like(x) for n, x in out.items()})
    names = [n for n, x in inputs.items() if x.requires_grad]
    grads = torch.autograd.grad(
        list(out.values()), [inputs[n] for n in names], [weights[n].to(x.dtype) for n, x in out.items()], allow_unused=True
    )
    return {n: x.detach() for n, x in out.items()} | {n: x for n, x in zip(names, grads, strict=True) if x is not None}


def error_of(name, got, want, floor=0.0, by_token=False):
    """||got - want|| / max(||want||, floor), or the median token's, of which each has its share of the floor; infinite where not
    finite. A gradient of decays is a difference of terms of order 1, however small it is."""
    if got.shape != want.shape or not got.isfinite().all():
        return float("inf")
    dim = -1 if by_token else None
    if name == "g":
        floor = 0.01 * want.numel() ** 0.5
    elif by_token:
        floor /= (want.numel() / want.shape[-1]) ** 0.5
    return ((got.double() - want).norm(dim=dim) / want.norm(dim=dim).clamp(min=max(1e-30, floor))).median().item()


def floor_of(want):
    """Gradients a hundred times smaller than the largest are measured against that: of queries that see one key they are 0."""
    return 1e-2 * max(x.norm().item() for n, x in want.items() if n not in ("out", "final"))


@contextlib.contextmanager
def unwritten_memory_is_nan():
    """torch fills what `torch.empty` returns with NaN while it is asked for deterministic results."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def truth(job, s, inputs, weights):
    """The same in fp64: token by token up to LOOP tokens, unless the definition goes through all keys in Python."""
    double = {n: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for n, x in inputs.items()}
    backend = "reference" if s["T"] <= LOOP and job.name != "sparse" else "eager"
    with kernels.use_backend(backend):
        return results(lambda x: output(job, s, x), double, weights)


def output(job, s, inputs):
    """What the operator returns; beside fla, whose final state has other conventions, its output alone."""
    out = WORKLOADS[job.name].call(inputs, s)
    return out[0] if job.beside_fla else out


def examine(job, device="cuda", dtype=torch.bfloat16, lengths=LENGTHS, repeats=REPEATS):
    """The `Result` of one job."""
    errors, failures = {}, []
    for T in lengths:
        s, inputs = inputs_of(job, T, device, dtype)
        weights = {}
        want = truth(job, s, inputs, weights)
        with kernels.use_backend("triton"), unwritten_memory_is_nan():
            runs = [results(lambda x, s=s: output(job, s, x), inputs, weights) for _ in range(repeats if T in REPEATED else 1)]
        for name, x in want.items():
            error = error_of(name, runs[0][name], x, floor_of(want), by_token=job.name == "sparse" and name in ("out", "q"))
            limit = limit_of(job.kind, name, dtype)
            errors[name] = max(errors.get(name, (0.0, 0.0, 0)), (error / limit, error, T))
            if not error <= limit:
                failures.append(f"{job}, T={T}: {name} is off by {error:.1e}, at most {limit:.0e} is allowed")
            if not all(torch.equal(runs[0][name], other[name]) for other in runs[1:]):
                failures.append(f"{job}, T={T}: {name} is not the same bits in {repeats} runs")
    return Result(errors, failures)


def examine_beside_fla(job, device="cuda", dtype=torch.bfloat16, lengths=BESIDE_LENGTHS):
    """Ours and fla's error on the same inputs; what is at rounding in both is not compared."""
    ratio, failures, notes = 0.0, [], []
    for T in lengths:
        s, inputs = inputs_of(job, T, device, dtype)
        weights = {}
        want = truth(job, s, inputs, weights)
        with kernels.use_backend("triton"):
            ours = results(lambda x, s=s: output(job, s, x), inputs, weights)
        try:
            theirs = results(lambda x, s=s: WORKLOADS[job.name].peers["fla"](x, s), inputs, weights)
        except Exception as error:  # fla refuses some operators on some GPUs, which is no fault of ours
            return Result({}, [], None, (f"{job}: fla: {one_line(error)}",))
        errors = []
        for name in [name for name in want if name in ours and name in theirs]:
            mine, other = (error_of(name, x[name], want[name], floor_of(want)) for x in (ours, theirs))
            errors.append(f"{name} {mine:.1e} ({other:.1e})")
            ratio = max(ratio, mine / max(other, ROUNDING))
            if not mine <= BESIDE_FLA * max(other, ROUNDING):
                failures.append(f"{job}, T={T}: {name} is off by {mine:.1e}, fla's by {other:.1e}")
        notes.append(f"{job}, T={T}: {', '.join(errors)}")
    return Result({}, failures, ratio, tuple(notes))


def start_worker(*tuning):
    """In a worker, which may run fla: make its tuning quick, as hundreds of configurations in turn take minutes, and silent."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Triton prints the code of a kernel that ptxas refuses
    os.environ |= {"FLA_FLASH_QLA": "0", "TRITON_CACHE_AUTOTUNING": "1"}  # fla's own kernels, and its choices kept on disk
    with contextlib.suppress(ImportError):
        tune_quickly(*tuning)


def run(job):
    """In a worker: the result of a job; whatever the operator raises is a failure of the job."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=".* runs in eager PyTorch")
            return examine_beside_fla(job) if job.beside_fla else examine(job)
    except Exception as error:
        return Result({}, [f"{job}: {one_line(error)}"])
    finally:
        torch.cuda.empty_cache()


def run_all(jobs, function=run, seconds=None, said=lambda job, result: None):
    """{job: function(job)} of the jobs done within `seconds`, in processes that start them in this order; `said` hears of each."""
    context, before, done = multiprocessing.get_context("spawn"), set(multiprocessing.active_children()), {}
    cores = os.cpu_count()
    tuning = context.Semaphore(cores), context.Event()
    pool = futures.ProcessPoolExecutor(min(cores, 16), context, start_worker, tuning)
    try:
        pending = {pool.submit(function, job): job for job in jobs}
        for future in futures.as_completed(pending, seconds):
            job = pending[future]
            try:
                done[job] = future.result()
            except futures.BrokenExecutor:  # a process was killed: which job it ran is not known
                done[job] = Result({}, [f"{job}: a process of the exam ended while this was not done"])
            said(job, done[job])
    except futures.TimeoutError:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
    finally:
        pool.shutdown(cancel_futures=True)
    return {job: done[job] for job in jobs if job in done}


def jobs_of(names, beside_only=False):
    """All jobs of these operators, those beside fla, which compiles for minutes, last; or those alone."""
    jobs = []
    for name in names:
        workload, shapes = WORKLOADS[name], SHAPES[name].split(", ")
        for packed in (False, True)[: 1 if name in UNPACKED else 2]:
            jobs += [Job(name, shape, kind, packed) for shape in shapes for kind in workload.kinds]
        if importlib.util.find_spec("fla") and "fla" in workload.peers and "K" in workload.sizes():
            kinds = [kind for kind in workload.kinds if kind in ("random", "correlated")]
            jobs += [Job(name, BESIDE_SHAPE, kind, beside_fla=True) for kind in kinds]
    return sorted([job for job in jobs if job.beside_fla or not beside_only], key=lambda job: job.beside_fla)


def main(names, seconds=None, beside_only=False):
    """Examine the operators of these names, all without any; prints the table and returns what failed."""
    if not torch.cuda.is_available():
        raise ConfigError("--device=cuda: there is no CUDA device here; without the flag the mixers are examined on the CPU")
    if unknown := [name for name in names if name not in SHAPES]:
        raise ConfigError([f"unknown operator {name!r}: known are {', '.join(SHAPES)}" for name in unknown])
    start, names = time.perf_counter(), names or list(SHAPES)
    absent = [name for name in names if WORKLOADS[name].op not in kernels.TRITON]
    jobs = jobs_of([name for name in names if name not in absent], beside_only)
    if not jobs:
        raise ConfigError(f"--beside=fla: {', '.join(names)}: fla cannot be imported, or has none of these recurrent operators")
    count = iter(range(1, len(jobs) + 1))

    def said(job, result):  # at once: an exam that is cut short has said something
        lines = f"{next(count)}/{len(jobs)} {job}: {'FAILED' if result.failures else 'ok'}", *result.notes, *result.failures
        print("\n".join(lines), flush=True)

    done = run_all(jobs, seconds=seconds, said=said)
    head = ["operator", "inputs", "jobs", "out", "worst gradient", "of", "at T", "of its limit", "beside fla", "result"]
    print_table(head, table(done))
    for name in absent:
        print(f"{name}: no Triton kernel, skipped")
    failures = [line for result in done.values() for line in result.failures]
    print(f"{len(done)} jobs, {len(failures)} failures, {time.perf_counter() - start:.0f} s")
    if left := [str(job) for job in jobs if job not in done]:
        print(f"not done within {seconds:g} s, {len(left)} jobs: {'; '.join(left)}")
    return failures


def table(done):
    """One line for each operator and kind of inputs: the worst of its jobs."""
    groups = {}
    for job, result in done.items():
        groups.setdefault((job.name, job.kind), []).append(result)
    rows = []
    for (name, kind), of_jobs in groups.items():
        outs = [r.errors["out"][1] for r in of_jobs if "out" in r.errors]
        (share, error, T), tensor = max(
            ((x, n) for r in of_jobs for n, x in r.errors.items() if n != "out"), default=((0, 0, 0), "-")
        )
        ratios = [r.fla_ratio for r in of_jobs if r.fla_ratio is not None]
        failed = sum(bool(r.failures) for r in of_jobs)
        cells = [name, kind, len(of_jobs), f"{max(outs):.1e}" if outs else "-", f"{error:.1e}", tensor, T, f"{share:.0%}"]
        rows.append([*cells, f"{max(ratios):.2f} x" if ratios else "", f"{failed} FAILED" if failed else "ok"])
    return rows
