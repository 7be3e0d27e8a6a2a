"""`bench.py train`: tokens per second of whole training steps, beside nanoGPT's model and flash-linear-attention's.

A step is train.py's: forward under autocast, backward, clipping, fused AdamW, on tokens that are already on the device. On GPUs
each model and length has a process of its own: several a GPU compile side by side and take the first step, then wait and are
measured one at a time, with nothing else running on their GPU. Where time is short, `--patience` measures what is ready before all
are, and `--limit` leaves out what is not. What is known is printed and written at once. Ours are named by
recipes or layer patterns; nanoGPT's is the model.py in the folder `--nanogpt`. Under torchrun ours alone are measured, on all its
processes: see scaling.py.
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
from benchmarks.scaling import processes, scaling
from configurator import ConfigError, TrainConfig
from model import Model, format_bytes
from optim import Optimizers
from train import start

RECIPES = Path(__file__).resolve().parent.parent / "configurator" / "recipes"
SIZES = {  # of a layer pattern, and of the peers
    "124m": {"n_layer": 12, "n_embd": 768, "n_head": 6, "vocab_size": 50304},
    "tiny": {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": 64},
}
NANOGPT, FLA = "nanogpt", "fla"
PRINTED = 8  # kernels of a profile; the file has more
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
    steps: int = Field(20, ge=1, description="timed steps; the median counts")
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
        "all", description="compile from nothing, for the time to the first step: each, those of the first length, or none"
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
    run, optimizer = torch.compile(model) if job.compiled else model, Optimizers(model, config, device)

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
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    s = SIZES[job.size]
    model = GatedDeltaNetForCausalLM(
        GatedDeltaNetConfig(
            hidden_size=s["n_embd"], num_hidden_layers=s["n_layer"], num_heads=s["n_head"], head_dim=s["n_embd"] // s["n_head"],
            expand_v=1, vocab_size=s["vocab_size"], tie_word_embeddings=True, use_cache=False,
        )
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    run = torch.compile(model) if job.compiled else model
    return _peer(model, lambda tokens, labels: run(input_ids=tokens, labels=tokens).loss, optimizer, job, "gdn")


class Steps:
    """The training steps of a job: the first is taken when they are made, and how long that took is `first`."""

    def __init__(self, job):
        self.job, self.device = job, torch.device(job.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.manual_seed(job.seed)
        torch.set_float32_matmul_precision("high")  # as nanoGPT does; ours has no fp32 products of size
        self.half = torch.bfloat16 if self.device.type == "cuda" else None
        began = time.perf_counter()
        self.model, self.loss, self.finish, self.flops = {NANOGPT: nanogpt, FLA: fla}.get(job.item, ours)(job, self.device)
        tokens = torch.randint(SIZES[job.size]["vocab_size"], (job.batch, job.T + 1), device=self.device)
        self.tokens, self.labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self()
        synchronize(self.device)
        self.first = time.perf_counter() - began

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
        for _ in range(min(3, job.steps - 1)):
            self()
        seconds = statistics.median(timed(self, self.device) for _ in range(job.steps))
        row = {"ms": 1e3 * seconds, "tokens_per_s": job.batch * job.T / seconds}
        row["parameters"] = sum(p.numel() for p in self.model.parameters())
        if on_gpu:
            row["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        peak = monitor.peak_flops(self.device, "bfloat16" if self.half else "float32")
        row["mfu"] = None if peak is None else row["tokens_per_s"] * self.flops / peak
        return row | ({"profile": kernel_times(self, self.device)} if job.profile else {})


def attempt(work, job):
    """(work(job), None), or (None, {"error": a line}): out of memory, a peer that is missing."""
    try:
        return work(job), None
    except Exception as e:
        again = {"again": True} if isinstance(e, torch.OutOfMemoryError) else {}  # others were on the GPU
        failure = {"error": one_line(e)} | again
    gc.collect()  # the traceback holds tensors
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return None, failure


def measure(job):
    """The row of a job, at once."""
    steps, failure = attempt(Steps, job)
    figures, failure = attempt(Steps.measure, steps) if failure is None else (None, failure)
    return job.row | ({"first_step_s": steps.first} | figures if failure is None else {"error": failure["error"]})


def serve(pipe, job):
    """In a process of its own: the first step, and what it took; when asked, the rest of the row."""
    if job.cache is not None:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": job.cache, "TRITON_CACHE_DIR": os.path.join(job.cache, "triton")}
    steps, failure = attempt(Steps, job)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # for the others
    early = {"first_step_s": steps.first if job.cold else None} if failure is None else failure
    with contextlib.suppress(EOFError, OSError):  # the parent ended
        pipe.send(early)
        pipe.recv()
        if failure is not None:
            steps, failure = attempt(Steps, job)
        figures, failure = attempt(Steps.measure, steps) if failure is None else (None, failure)
        pipe.send(figures if failure is None else {"error": failure["error"]})


def on_device(jobs, processes, patience, limit, known):
    """Do one GPU's jobs: `known(job, figures)` is told of the first steps, taken side by side, then of each row, measured alone.

    Rows are measured when all have taken their first step; after `patience` seconds as they are ready, the other processes stopped
    meanwhile. What has taken none after `limit` seconds is left out. Either may be None.
    """
    spawn, busy, ready, children = multiprocessing.get_context("spawn"), {}, [], []
    waiting = sorted(reversed(jobs), key=lambda job: job.item == FLA)  # the last is the next; fla tunes too, so begin with it
    began = time.monotonic()

    def left(seconds):
        return math.inf if seconds is None else began + seconds - time.monotonic()

    def start(job):
        mine, theirs = spawn.Pipe()
        child = spawn.Process(target=serve, args=(theirs, job))
        child.start()
        theirs.close()
        children.append(child)
        busy[mine] = job, child

    def receive(pipe, job):
        try:
            figures = pipe.recv()
        except (EOFError, OSError):
            figures = {"error": "its process ended"}
        known(job, {name: value for name, value in figures.items() if name != "again"})
        return "error" not in figures or "again" in figures

    def tell_others(name):
        for _, child in busy.values():
            if child.is_alive():
                os.kill(child.pid, getattr(signal, name))  # not on Windows

    def measure_first():
        """Of those that are ready."""
        ready.sort(key=lambda entry: entry[0])
        i, pipe, child = ready.pop(0)
        tell_others("SIGSTOP")
        with contextlib.suppress(OSError):
            pipe.send(True)
        receive(pipe, jobs[i])
        child.kill()  # which is the quickest way to give its memory back
        child.join()
        tell_others("SIGCONT")

    try:
        while waiting or busy or ready:
            while waiting and len(busy) < processes:
                start(waiting.pop())
            if ready and (not busy or left(patience) <= 0):
                measure_first()
                continue
            until = min(left(limit), left(patience) if left(patience) > 0 else math.inf)
            for pipe in wait(list(busy), None if until == math.inf else max(0.0, until)):
                job, child = busy.pop(pipe)
                if receive(pipe, job):
                    ready.append((jobs.index(job), pipe, child))
            if left(limit) <= 0:
                for job in [*waiting, *(job for job, _ in busy.values())]:
                    known(job, {"error": f"no first step within limit={limit:g} s"})
                for _, child in busy.values():
                    child.kill()
                waiting.clear()
                busy.clear()
    finally:
        for child in children:
            child.kill()


def side_by_side(jobs, devices, processes, patience, limit, known):
    """Jobs in order, an equal share to each device: those of one length mostly meet on one GPU."""
    share = math.ceil(len(jobs) / len(devices))
    parts = [[job._replace(device=str(device)) for job in jobs[i * share : (i + 1) * share]] for i, device in enumerate(devices)]
    threads = str(max(1, (os.cpu_count() or 1) // (processes * len(devices))))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", threads)  # which by default takes all cores, each time
    with ThreadPoolExecutor(len(devices)) as pool:
        for done in [pool.submit(on_device, part, processes, patience, limit, known) for part in parts if part]:
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
    models = [*patterns(config), *[NANOGPT] * bool(config.nanogpt)]
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
    """A line about what has become known of a row, and the costliest kernels of its step."""
    model, T, batch, _, ms, rate, mfu, memory, last = _cells(row)
    if "ms" not in row:
        what = last if "error" in row else f"first step {last} s" if last else "compiled"
        return f"{model}, T={T}: {what}"
    lines = [f"{model}, T={T}: {ms} ms, {rate} tokens/s" + (f", MFU {mfu}" if mfu else "") + (f", {memory}" if memory else "")]
    for kernel in row.get("profile", [])[:PRINTED]:
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
