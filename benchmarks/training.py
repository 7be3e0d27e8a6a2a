"""`bench.py train`: tokens per second of whole training steps, beside nanoGPT's model and flash-linear-attention's.

A step is train.py's: forward under autocast, backward, clipping, fused AdamW, on tokens that are already on the device; as there,
the host does not wait for a GPU between steps. On GPUs each model and length has a process of its own: several a GPU compile side
by side and take the first step, then wait and are measured one at a time, with nothing else running on their GPU. Where time is
short, `--patience` measures what is ready before all are, `--limit` leaves out what is not, and `--cold=first` lets a model's other
lengths find what its first has compiled. What is known is printed and written at once. Ours are named by recipes or layer patterns;
nanoGPT's is the model.py in the folder `--nanogpt`. Under torchrun ours alone are measured, on all its processes: see scaling.py.
"""

import contextlib
import gc
import importlib.util
import math
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import Field

import configurator
import monitor
import preflight
from benchmarks.measure import (
    BenchConfig,
    kernel_times,
    list_problems,
    print_table,
    report,
    split_list,
    synchronize,
    timed,
    whole_number,
    write_report,
)  # fmt: skip
from benchmarks.operators import one_line
from benchmarks.peers import THREADS, tune_quickly
from benchmarks.scaling import processes, scaling
from configurator import ConfigError, TrainConfig
from model import Model, format_bytes
from optim import Optimizers
from train import compiled, start

RECIPES = Path(__file__).resolve().parent.parent / "configurator" / "recipes"
SIZES = {  # of a layer pattern, and of the peers
    "124m": {"n_layer": 12, "n_embd": 768, "n_head": 6, "vocab_size": 50304},
    "tiny": {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": 64},
}
NANOGPT, FLA = "nanogpt", "fla"
PRINTED = 8  # kernels of a profile; the file has more
LONGEST = 4.0  # seconds of timed steps, if that leaves at least LEAST
LEAST = 5
ALONE = ("nanogpt", "fla", "devices", "processes", "patience", "limit", "cold", "profile", "plot")  # settings without torchrun
SEVERAL = (
    "parallel",
    "context_parallel",
    "gradient_accumulation_steps",
    "activation_checkpointing",
    "losses",
    "single",
)  # of torchrun


class TrainBenchConfig(BenchConfig):
    """whole training steps"""

    layers: str = Field(
        "gpt2; gdn gdn gdn attn(n_head=12); gdn; deltanet; lightning; mamba2",
        description="recipes of configurator/recipes or its 124m, or layer patterns, separated by semicolons",
    )
    block_size: str = Field("1024,4096,16384", min_length=1, description="sequence lengths, separated by commas")
    batch_tokens: int | None = Field(None, ge=1, description="tokens of a micro-batch at every length; none: 65536, 256 on a CPU")
    batch_size: int | None = Field(None, ge=1, description="sequences of a micro-batch, instead of batch_tokens")
    size: Literal["124m", "tiny"] | None = Field(None, description="of layer patterns and peers; none: tiny on a CPU")
    steps: int = Field(20, ge=1, description="timed steps, fewer where they take seconds; the median counts")
    compile: bool | None = Field(None, description="torch.compile; none: on a GPU, where nothing but DDP is between its layers")
    bias: bool = Field(False, description="biases in the linear layers, ours and nanoGPT's, whose speed runs have none")
    nanogpt: str | None = Field(None, description="folder of a nanoGPT checkout, to measure its model too")
    fla: bool = Field(True, description="measure flash-linear-attention's GatedDeltaNet too, if it can be imported")
    devices: str | None = Field(None, min_length=1, description="share the work: cuda:0,cuda:1; none: device, or else every GPU")
    processes: int = Field(4, ge=1, description="models that compile side by side on each GPU")
    patience: float | None = Field(
        None,
        gt=0,
        description="seconds until models are measured as they get ready, the others held up meanwhile; none: when all are",
    )
    limit: float | None = Field(None, gt=0, description="seconds until models that have not taken a first step are left out")
    cold: Literal["all", "first", "none"] = Field(
        "all",
        description="compile from nothing, for the time to the first step: each, those of the first length, which the same model's "
        "other lengths wait for, or none",
    )
    profile: bool = Field(False, description="which kernels take the time of a step")
    plot: bool = Field(True, description="draw time per token against the length (train.png) if there are several")
    device: str | None = Field(None, min_length=1, description="cpu, cuda, cuda:1; none: the best there is, or devices")
    parallel: Literal["ddp", "fsdp"] | None = Field(None, description="under torchrun: as in train.py")
    context_parallel: int = Field(1, ge=1, description="under torchrun: processes that share each row")
    gradient_accumulation_steps: int | None = Field(
        None, ge=1, description="under torchrun: micro-batches of a step, over all processes; none: one each"
    )
    activation_checkpointing: bool = Field(False, description="under torchrun: recompute each layer in the backward pass")
    losses: int = Field(4, ge=0, description="under torchrun: steps, after the first, whose loss is kept and that are not timed")
    single: str | None = Field(
        None, min_length=1, description="under torchrun: JSON of the same on one process (train-1.json), to compare with"
    )

    def conflicts(self):
        yield from list_problems(self, "block_size", whole_number)
        if self.nanogpt and not (Path(self.nanogpt) / "model.py").is_file():
            yield {"nanogpt"}, f"nanogpt={self.nanogpt}: there is no model.py in this folder"
        if self.patience and self.limit and self.patience >= self.limit:
            problem = f"patience={self.patience:g} has no effect beside limit={self.limit:g}: less than that, or leave it out"
            yield {"patience", "limit"}, problem
        if self.device and self.devices:
            yield {"device", "devices"}, f"device={self.device} has no effect beside devices={self.devices}: leave it out"


def patterns(config):
    return [item.strip() for item in config.layers.split(";") if item.strip()]


def arguments_of(item, T, batch, size, compiled, bias):
    """The arguments of train.py for a recipe or a layer pattern at this length. Rows have no documents in them."""
    flags = {"block_size": T, "batch_size": batch, "compile": compiled, "dropout": 0.0, "document_mask": False, "bias": bias}
    recipe = [str(p) for p in (RECIPES / "124m" / f"{item}.py", RECIPES / f"{item}.py") if p.is_file()][:1]
    flags |= {} if recipe and size == "124m" else SIZES[size] | ({} if recipe else {"layers": item})
    return [*recipe, *(f"--{name}={value}" for name, value in flags.items())]


def settings_of(*what):
    """The `TrainConfig` of those arguments."""
    return configurator.load(TrainConfig, arguments_of(*what)).config


class Job(NamedTuple):
    """One row to measure, and where."""

    item: str
    T: int
    batch: int
    size: str
    device: str
    compiled: bool
    bias: bool
    nanogpt: str | None
    steps: int
    seed: int
    profile: bool = False
    cache: str | None = None  # folder of what is compiled
    cold: bool = False  # whether nothing is in it

    @property
    def row(self):
        return {"model": self.item, "T": self.T, "batch_size": self.batch, "device": self.device}


def ours(job, device):
    """The model, a function for the loss of tokens and labels, what comes after the backward pass, training FLOPs a token."""
    config = settings_of(job.item, job.T, job.batch, job.size, job.compiled, job.bias)
    model = start(config, device)
    run, optimizer = compiled(model) if job.compiled else model, Optimizers(model, config, device)

    def loss(tokens, labels):
        return run(tokens, labels, total=True).loss / labels.numel()

    return model, loss, lambda: (optimizer.clip(1.0, 1.0), optimizer.step(), optimizer.zero_grad()), model.flops_per_token(job.T)


def _peer(model, run, optimizer, job, alike):
    """The same of a peer, whose layers mix as ours of the pattern `alike`."""

    def finish():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with torch.device("meta"):
        same = Model(preflight.model_config(settings_of(alike, job.T, 1, job.size, False, job.bias)))
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return model, run, finish, 6 * weights + 3 * sum(block.mixer.flops(job.T) for block in same.blocks)


def nanogpt(job, device):
    """GPT of nanoGPT's model.py: the same maths as our gpt2 recipe, with biases or without."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(job.nanogpt) / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = SIZES[job.size] | {"n_head": 12 if job.size == "124m" else 2}
    with contextlib.redirect_stdout(None):  # its own count of parameters
        model = module.GPT(module.GPTConfig(block_size=job.T, dropout=0.0, bias=job.bias, **sizes)).to(device)
        optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    run = torch.compile(model) if job.compiled else model
    return _peer(model, lambda tokens, labels: run(tokens, labels)[1], optimizer, job, "attn")


def fla(job, device):
    os.environ.setdefault("FLA_FLASH_QLA", "0")  # its own kernels, not FlashQLA's, which take minutes to compile
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # another length finds its choices on disk
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    s = SIZES[job.size]
    tune_quickly(threading.Semaphore(THREADS), threading.Event())
    torch._dynamo.config.suppress_errors = True  # what of it cannot be compiled runs as it is
    model = GatedDeltaNetForCausalLM(
        GatedDeltaNetConfig(
            hidden_size=s["n_embd"], num_hidden_layers=s["n_layer"], num_heads=s["n_head"], head_dim=s["n_embd"] // s["n_head"],
            expand_v=1, vocab_size=s["vocab_size"], tie_word_embeddings=True, use_cache=False,
        )
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    run = torch.compile(model) if job.compiled else model
    return _peer(model, lambda tokens, labels: run(input_ids=tokens, labels=tokens).loss, optimizer, job, "gdn")


def step_seconds(call, steps, device):
    """Seconds of each of several calls. On a GPU they follow one another without the host waiting, as in training."""
    if device.type != "cuda":
        return [timed(call, device) for _ in range(steps)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in zip(events, events[1:], strict=False)]


class Steps:
    """The training steps of a job. `start` makes the model and takes the first; how long that took is `first`."""

    def __init__(self, job):
        self.job, self.device, self.model, self.first = job, torch.device(job.device), None, None
        self.half = torch.bfloat16 if self.device.type == "cuda" else None

    def start(self):
        began = time.perf_counter()
        if self.model is None:
            self._build()
        self()
        synchronize(self.device)
        self.first = time.perf_counter() - began

    def _build(self):
        job = self.job
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.manual_seed(job.seed)
        torch.set_float32_matmul_precision("high")  # as nanoGPT does; ours has no fp32 products of size
        model, self.loss, self.finish, self.flops = {NANOGPT: nanogpt, FLA: fla}.get(job.item, ours)(job, self.device)
        tokens = torch.randint(SIZES[job.size]["vocab_size"], (job.batch, job.T + 1), device=self.device)
        self.tokens, self.labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.model = model

    def __call__(self):
        with torch.autocast(self.device.type, dtype=self.half, enabled=self.half is not None):
            value = self.loss(self.tokens, self.labels)
        value.backward()
        self.finish()

    def measure(self):
        """Median over the steps, peak memory, parameters, MFU; with `profile` its kernels."""
        job, on_gpu = self.job, self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        usual = min([timed(self, self.device) for _ in range(min(3, job.steps - 1))], default=0.0)
        steps = job.steps if usual * job.steps <= LONGEST else min(job.steps, max(LEAST, int(LONGEST / usual)))
        seconds = statistics.median(step_seconds(self, steps, self.device))
        row = {"ms": 1e3 * seconds, "tokens_per_s": job.batch * job.T / seconds, "steps": steps}
        row["parameters"] = sum(p.numel() for p in self.model.parameters())
        if on_gpu:
            row["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        peak = monitor.peak_flops(self.device, "bfloat16" if self.half else "float32")
        row["mfu"] = None if peak is None else row["tokens_per_s"] * self.flops / peak
        return row | ({"profile": kernel_times(self, self.device)} if job.profile else {})


def attempt(work, *arguments):
    """(work(*arguments), None), or (None, {"error": a line}): out of memory, a peer that is missing."""
    try:
        return work(*arguments), None
    except Exception as e:
        again = {"again": True} if isinstance(e, torch.OutOfMemoryError) else {}  # others were on the GPU
        failure = {"error": one_line(e)} | again
    gc.collect()  # the traceback holds tensors
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return None, failure


def started(steps):
    """None, or why the first step could not be taken."""
    _, failure = attempt(steps.start)
    if failure is not None and steps.model is not None:
        steps.model.zero_grad()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # for the others
    return failure


def measured(steps):
    """What is known of steps that have been taken, or may be: the rest of their row."""
    failure = None if steps.first is not None else started(steps)
    figures, failure = attempt(steps.measure) if failure is None else (None, failure)
    return figures if failure is None else {"error": failure["error"]}


def measure(job):
    """The row of a job, at once."""
    steps = Steps(job)
    figures = measured(steps)
    return job.row | ({} if steps.first is None else {"first_step_s": steps.first}) | figures


def serve(pipe, job):
    """In a process of its own: the first step, and what it took; when asked, the rest of the row."""
    if job.cache is not None:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": job.cache, "TRITON_CACHE_DIR": os.path.join(job.cache, "triton")}
    steps = Steps(job)
    failure = started(steps)
    early = {"first_step_s": steps.first if job.cold else None} if failure is None else failure
    with contextlib.suppress(EOFError, OSError):  # the parent ended
        pipe.send(early)
        pipe.recv()
        pipe.send(measured(steps))


def on_device(jobs, processes, patience, limit, known):
    """Do one GPU's jobs: `known(job, figures)` is told of the first steps, taken side by side, then of each row, measured alone.

    Rows are measured when all have taken their first step; after `patience` seconds as they are ready, the other processes stopped
    meanwhile, which does not count as time to their first step. What has taken none after `limit` seconds is left out. Either may
    be None. What finds in its cache what another job compiles starts after that one's first step.
    """
    spawn, busy, ready, children = multiprocessing.get_context("spawn"), {}, [], []
    waiting = sorted(jobs, key=lambda job: job.item != FLA)  # fla tunes too, so begin with it
    began, stopped = time.monotonic(), 0.0

    def left(seconds):
        return math.inf if seconds is None else began + seconds - time.monotonic()

    def start_next():
        """Whether there was one to start."""
        filled = {job.cache for job, *_ in busy.values() if job.cold}
        job = next((job for job in waiting if job.cold or job.cache not in filled), None)
        if job is None:
            return False
        waiting.remove(job)
        mine, theirs = spawn.Pipe()
        child = spawn.Process(target=serve, args=(theirs, job))
        child.start()
        theirs.close()
        children.append(child)
        busy[mine] = job, child, stopped
        return True

    def receive(pipe, job, halted=0.0):
        try:
            figures = pipe.recv()
        except (EOFError, OSError):
            figures = {"error": "its process ended"}
        if figures.get("first_step_s"):
            figures["first_step_s"] -= halted
        known(job, {name: value for name, value in figures.items() if name != "again"})
        return "error" not in figures or "again" in figures

    def tell_others(name):
        for _, child, _ in busy.values():
            if child.is_alive():
                os.kill(child.pid, getattr(signal, name))  # not on Windows

    def measure_first():
        """Of those that are ready; returns for how many seconds the others were stopped."""
        ready.sort(key=lambda entry: entry[0])
        i, pipe, child = ready.pop(0)
        since = time.monotonic()
        tell_others("SIGSTOP")
        with contextlib.suppress(OSError):
            pipe.send(True)
        receive(pipe, jobs[i])
        child.kill()  # which is the quickest way to give its memory back
        child.join()
        tell_others("SIGCONT")
        return time.monotonic() - since

    try:
        while waiting or busy or ready:
            while len(busy) < processes and start_next():
                pass
            now = bool(ready) and (not busy or left(patience) <= 0)
            until = 0.0 if now else min(left(limit), left(patience) if left(patience) > 0 else math.inf)
            for pipe in wait(list(busy), None if until == math.inf else max(0.0, until)):
                job, child, before = busy.pop(pipe)
                if receive(pipe, job, stopped - before):
                    ready.append((jobs.index(job), pipe, child))
            if left(limit) <= 0:
                for job in [*waiting, *(job for job, *_ in busy.values())]:
                    known(job, {"error": f"no first step within limit={limit:g} s"})
                for _, child, _ in busy.values():
                    child.kill()
                waiting.clear()
                busy.clear()
            if now:
                stopped += measure_first()
    finally:
        for child in children:
            child.kill()


def shares(jobs, n):
    """The jobs in n parts of nearly equal size, each in the order of the whole; those of one model mostly are in one part."""
    models = list(dict.fromkeys(job.item for job in jobs))
    together, size = sorted(jobs, key=lambda job: models.index(job.item)), math.ceil(len(jobs) / n)
    parts = [together[i : i + size] for i in range(0, len(jobs), size)]
    return [sorted(part, key=jobs.index) for part in parts]


def side_by_side(jobs, devices, processes, patience, limit, known):
    """Every device's share of the jobs at the same time: models beside each other in the list are mostly measured on one GPU."""
    parts = [
        [job._replace(device=str(device)) for job in part]
        for part, device in zip(shares(jobs, len(devices)), devices, strict=False)
    ]  # fmt: skip
    threads = str(max(1, (os.cpu_count() or 1) // (processes * len(devices))))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", threads)  # which by default takes all cores, each time
    with ThreadPoolExecutor(len(devices)) as pool:
        for done in [pool.submit(on_device, part, processes, patience, limit, known) for part in parts]:
            done.result()


def without_effect(config, several):
    """A line for each setting that has no effect under torchrun, or without it."""
    where = "under torchrun: ours alone are measured" if several else "without torchrun --nproc_per_node=N bench.py train"
    for name in ALONE if several else SEVERAL:
        if (value := getattr(config, name)) != TrainBenchConfig.model_fields[name].default:
            yield f"{name}={value} has no effect {where}"


def training(config):
    """Tokens per second of whole training steps, MFU, memory and the time to the first step, beside nanoGPT and fla."""
    if "RANK" not in os.environ:
        return _training(config, None)
    with processes() as ranks:
        return _training(config, ranks)


def devices_of(config, ranks):
    """The devices to measure on."""
    names = split_list(config.devices or config.device or "") or [None]
    if names == [None] and ranks is None and torch.cuda.is_available():
        names = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    local = None if ranks is None else ranks.local
    return [preflight.resolve_device(TrainConfig(device=name), local)[0] for name in names]


def _training(config, ranks):
    several = ranks is not None
    if problems := list(without_effect(config, several)):
        raise ConfigError(problems)
    devices = devices_of(config, ranks)
    on_gpu = devices[0].type == "cuda"
    size, compiled = config.size or ("124m" if on_gpu else "tiny"), on_gpu if config.compile is None else config.compile
    models = [*[NANOGPT] * bool(config.nanogpt), *patterns(config)]  # on one GPU with the first, which should be its equal
    models += [FLA] * (config.fla and not several and on_gpu and importlib.util.find_spec("fla") is not None)
    for item in patterns(config):  # what is wrong with a pattern comes before any measuring
        with torch.device("meta"):
            Model(preflight.model_config(settings_of(item, 8, 1, size, compiled, config.bias)))
    lengths, cases = [int(T) for T in split_list(config.block_size)], []
    for T in lengths:
        batch = config.batch_size or max(1, (config.batch_tokens or (65536 if on_gpu else 256)) // T)
        cases += [(item, T, batch) for item in models]
    if several:
        return scaling(config, ranks, [(*case, arguments_of(*case, size, config.compile, config.bias)) for case in cases])
    common = size, str(devices[0]), compiled, config.bias, config.nanogpt, config.steps, config.seed, config.profile
    jobs, table, lock = [Job(*case, *common) for case in cases], {}, threading.Lock()
    table = {(job.item, job.T): job.row for job in jobs}

    def known(job, figures):
        with lock:
            before = {name: value for name, value in table[job.item, job.T].items() if name != "error"}  # which was tried again
            row = table[job.item, job.T] = before | job.row | figures
            print(progress(row), flush=True)
            write_report(config, "train", devices[0], list(table.values()))

    if not on_gpu and len(devices) == 1:  # nothing is compiled, and one process is as good as many
        for job in jobs:
            known(job, measure(job))
    else:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            jobs = [with_cache(job, config.cold, lengths[0], folder) for job in jobs]
            side_by_side(jobs, devices, config.processes, config.patience, config.limit, known)
    rows = list(table.values())
    head = ["model", "T", "batch", "parameters", "ms", "tokens/s", "MFU", "memory", "first step, s"]
    print_table(head, [_cells(row) for row in rows])
    content = report(config, "train", devices[0], rows)
    if config.plot and "," in config.block_size:
        plot(content, Path(config.out_dir) / "train.png")
    return content


def with_cache(job, cold, first, folder):
    """The job with a folder for what it compiles: an empty one, that of its model's first length, or the user's."""
    if cold == "none":
        return job
    name = job.item if cold == "first" else f"{job.item} {job.T}"
    return job._replace(cache=os.path.join(folder, name.encode().hex()), cold=cold == "all" or job.T == first)


def progress(row):
    """A line about what has become known of a row, how long its kernels took together, and the costliest of them."""
    model, T, batch, _, ms, rate, mfu, memory, last = _cells(row)
    if "ms" not in row:
        what = last if "error" in row else f"first step {last} s" if last else "compiled"
        return f"{model}, T={T}: {what}"
    lines = [f"{model}, T={T}: {ms} ms, {rate} tokens/s" + (f", MFU {mfu}" if mfu else "") + (f", {memory}" if memory else "")]
    profile = row.get("profile", [])
    if profile:
        lines[0] += f", kernels {profile[0]['ms'] / profile[0]['share']:.1f} ms"
    for kernel in profile[:PRINTED]:
        lines.append(f"{kernel['ms']:9.2f} ms {kernel['share']:6.1%} {kernel['calls']:5} x {kernel['name'][:90]}")
    return "\n".join(lines)


def _cells(row):
    cells = [row["model"], row["T"], row["batch_size"]]
    if "error" in row:
        return [*cells, "", "", "", "", "", row["error"]]
    first, memory, share = row.get("first_step_s"), row.get("peak_bytes"), row.get("mfu")
    cells += [f"{row['parameters'] / 1e6:.1f}M", f"{row['ms']:.1f}", f"{row['tokens_per_s']:,.0f}"] if "ms" in row else [""] * 3
    cells += ["" if share is None else f"{share:.1%}", "" if memory is None else format_bytes(memory)]
    return [*cells, "" if first is None else f"{first:.1f}"]


def plot(content, path):
    """Microseconds per token against the length, a line per model."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for model in dict.fromkeys(row["model"] for row in content["rows"]):
        rows = [row for row in content["rows"] if row["model"] == model and "ms" in row]
        axis.loglog([row["T"] for row in rows], [1e6 / row["tokens_per_s"] for row in rows], "o-", base=2, label=model)
    axis.set(xlabel="tokens of a sequence", ylabel="us per token", title=f"a training step, {content['device']}")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
