"""`bench.py train`: tokens per second of whole training steps, beside nanoGPT's model and flash-linear-attention's.

A step is train.py's: forward under autocast, backward, clipping, fused AdamW, on tokens that are already on the device. Each model
runs in a process of its own, twice: first several side by side, with nothing compiled, for the seconds to the first step; then
alone, with what was compiled, for its speed and memory. Ours are named by recipes or layer patterns; nanoGPT's is the model.py in
the folder `--nanogpt`. Under torchrun ours alone are measured, on all its processes: see scaling.py.
"""

import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

import configurator
import monitor
import preflight
from benchmarks.measure import BenchConfig, list_problems, print_table, report, split_list, synchronize, timed, whole_number
from benchmarks.operators import last_line
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
PEERS = ("nanogpt", "fla", "processes", "plot")  # settings of one process
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
    nanogpt: str | None = Field(None, description="folder of a nanoGPT checkout, to measure its model too")
    fla: bool = Field(True, description="measure flash-linear-attention's GatedDeltaNet too, if it can be imported")
    processes: int = Field(4, ge=0, description="models side by side for the first step; 0 leaves that out")
    plot: bool = Field(True, description="draw time per token against the length (train.png) if there are several")
    device: str | None = Field(None, min_length=1, description="cpu, cuda, cuda:1; none: the best there is")
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


def patterns(config):
    return [item.strip() for item in config.layers.split(";") if item.strip()]


def arguments_of(item, T, batch, size, compiled):
    """The arguments of train.py for a recipe or a layer pattern at this length. Rows have no documents in them."""
    flags = {"block_size": T, "batch_size": batch, "compile": compiled, "dropout": 0.0, "document_mask": False}
    recipe = [str(p) for p in (RECIPES / "124m" / f"{item}.py", RECIPES / f"{item}.py") if p.is_file()][:1]
    flags |= {} if recipe and size == "124m" else SIZES[size] | ({} if recipe else {"layers": item})
    return [*recipe, *(f"--{name}={value}" for name, value in flags.items())]


def settings_of(*what):
    """The `TrainConfig` of those arguments."""
    return configurator.load(TrainConfig, arguments_of(*what)).config


def ours(item, T, batch, size, device, half, compiled, path):
    """The model, a function for the loss of tokens and labels, and its optimizer."""
    config = settings_of(item, T, batch, size, compiled)
    model = start(config, device)
    run, optimizer = torch.compile(model) if compiled else model, Optimizers(model, config, device)

    def loss(tokens, labels):
        return run(tokens, labels).nll.sum() / labels.numel()

    return model, loss, lambda: (optimizer.clip(1.0, 1.0), optimizer.step(), optimizer.zero_grad())


def _peer(model, run, optimizer):
    def finish():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, run, finish


def nanogpt(item, T, batch, size, device, half, compiled, path):
    """GPT of nanoGPT's model.py: the same maths as our gpt2 recipe, without biases and dropout as in its own speed runs."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(path) / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = SIZES[size] | {"n_head": 12 if size == "124m" else 2}
    model = module.GPT(module.GPTConfig(block_size=T, dropout=0.0, bias=False, **sizes)).to(device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    run = torch.compile(model) if compiled else model
    return _peer(model, lambda tokens, labels: run(tokens, labels)[1], optimizer)


def fla(item, T, batch, size, device, half, compiled, path):
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    s = SIZES[size]
    model = GatedDeltaNetForCausalLM(
        GatedDeltaNetConfig(
            hidden_size=s["n_embd"], num_hidden_layers=s["n_layer"], num_heads=s["n_head"], head_dim=s["n_embd"] // s["n_head"],
            expand_v=1, vocab_size=s["vocab_size"], tie_word_embeddings=True, use_cache=False,
        )
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    run = torch.compile(model) if compiled else model
    return _peer(model, lambda tokens, labels: run(input_ids=tokens, labels=tokens).loss, optimizer)


def measure(job):
    """In a process of its own: one row."""
    item, T, batch, size, device, compiled, path, steps, seed, *cache = job
    row = {"model": item, "T": T, "batch_size": batch}
    if cache:  # of its own
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache[0], "TRITON_CACHE_DIR": os.path.join(cache[0], "triton")}
    try:
        return row | steps_of(item, T, batch, size, torch.device(device), compiled, path, steps, seed)
    except Exception as error:  # out of memory, a peer that is missing: a line of the table
        return row | {"error": last_line(error)}


def steps_of(item, T, batch, size, device, compiled, path, steps, seed):
    """Seconds to the first step, then the median over the others, peak memory, parameters and, of ours, MFU."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")  # as nanoGPT does; ours has no fp32 products of size
    half = torch.bfloat16 if device.type == "cuda" else None
    began = time.perf_counter()
    make = {NANOGPT: nanogpt, FLA: fla}.get(item, ours)
    model, loss, finish = make(item, T, batch, size, device, half, compiled, path)
    tokens = torch.randint(SIZES[size]["vocab_size"], (batch, T + 1), device=device)
    tokens, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step():
        with torch.autocast(device.type, dtype=half, enabled=half is not None):
            value = loss(tokens, labels)
        value.backward()
        finish()

    step()
    synchronize(device)
    first = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(min(3, steps - 1)):
        step()
    seconds = statistics.median(timed(step, device) for _ in range(steps))
    row = {"first_step_s": first, "ms": 1e3 * seconds, "tokens_per_s": batch * T / seconds}
    row["parameters"] = sum(p.numel() for p in model.parameters())
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    if make is ours:
        peak = monitor.peak_flops(device, "bfloat16" if half else "float32")
        row["mfu"] = None if peak is None else row["tokens_per_s"] * model.flops_per_token(T) / peak
    return row


def run_alone(jobs, processes):
    """The rows of jobs, each in a process that ends with it."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        return list(pool.map(measure, jobs))


def without_effect(config, several):
    """A line for each setting that has no effect under torchrun, or without it."""
    where = "under torchrun: ours alone are measured" if several else "without torchrun --nproc_per_node=N bench.py train"
    for name in PEERS if several else SEVERAL:
        if (value := getattr(config, name)) != TrainBenchConfig.model_fields[name].default:
            yield f"{name}={value} has no effect {where}"


def training(config):
    """Tokens per second of whole training steps, MFU, memory and the time to the first step, beside nanoGPT and fla."""
    if "RANK" not in os.environ:
        return _training(config, None)
    with processes() as ranks:
        return _training(config, ranks)


def _training(config, ranks):
    several = ranks is not None
    if problems := list(without_effect(config, several)):
        raise ConfigError(problems)
    device, _ = preflight.resolve_device(TrainConfig(device=config.device), ranks.local if several else None)
    on_gpu = device.type == "cuda"
    size, compiled = config.size or ("124m" if on_gpu else "tiny"), on_gpu if config.compile is None else config.compile
    models = [*patterns(config), *[NANOGPT] * bool(config.nanogpt)]
    models += [FLA] * (config.fla and not several and on_gpu and importlib.util.find_spec("fla") is not None)
    for item in patterns(config):  # what is wrong with a pattern comes before any measuring
        with torch.device("meta"):
            Model(preflight.model_config(settings_of(item, 8, 1, size, compiled)))
    cases = []
    for T in map(int, split_list(config.block_size)):
        batch = config.batch_size or max(1, (config.batch_tokens or (65536 if on_gpu else 256)) // T)
        cases += [(item, T, batch) for item in models]
    if several:
        return scaling(config, ranks, [(*case, arguments_of(*case, size, config.compile)) for case in cases])
    jobs = [(*case, size, str(device), compiled, config.nanogpt, config.steps, config.seed) for case in cases]
    if not on_gpu:  # nothing is compiled, and one process is as good as many
        rows = [measure(job) for job in jobs]
    else:
        with tempfile.TemporaryDirectory() as folder:
            jobs = [(*job, os.path.join(folder, str(i))) for i, job in enumerate(jobs)]
            first = run_alone([(*job[:7], 1, *job[8:]) for job in jobs], config.processes) if config.processes else [{}] * len(jobs)
            rows = [row | {"first_step_s": early.get("first_step_s")} for row, early in zip(run_alone(jobs, 1), first, strict=True)]
    head = ["model", "T", "batch", "parameters", "ms", "tokens/s", "MFU", "memory", "first step, s"]
    print_table(head, [_cells(row) for row in rows])
    content = report(config, "train", device, rows)
    if config.plot and "," in config.block_size:
        plot(content, Path(config.out_dir) / "train.png")
    return content


def _cells(row):
    cells = [row["model"], row["T"], row["batch_size"]]
    if "error" in row:
        return [*cells, "", "", "", "", "", row["error"]]
    share, memory, first = row.get("mfu"), row.get("peak_bytes"), row["first_step_s"]
    cells += [f"{row['parameters'] / 1e6:.1f}M", f"{row['ms']:.1f}", f"{row['tokens_per_s']:,.0f}"]
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
