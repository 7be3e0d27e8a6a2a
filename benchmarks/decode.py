"""Decoding against the context: time and memory of a token, what a million cost, and where each mixer lies under the roof.

What a step takes depends on how long the context is, not on what it says: states are set to a length, not read into. Prompts are
read by themselves, as `sample.py` reads them: from ids on the host to the first token there. On CUDA everything is compiled first,
a process for each model. Every row is printed when it is known and the results are written after every model, so that a run that
is cut off leaves what it has: first the prompts of all models, then the steps.
"""

import gc
import json
import math
import multiprocessing
import os
import statistics
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

import configurator
from benchmarks.measure import BenchConfig, list_problems, median_seconds, report, split_list, timed, whole_number, write_report
from benchmarks.operators import one_line
from benchmarks.training import SIZES
from configurator import ConfigError, ModelConfig, TrainConfig
from model import Model, format_bytes
from preflight import resolve_device
from sample import Engine, Generator, Sampling, bytes_per_step

RECIPES = Path(__file__).resolve().parent.parent / "configurator" / "recipes"
COLUMNS = {  # of the rows as they are printed: width
    "layers": 24, "batch": 6, "context": 8, "ms": 9, "tok/s": 8, "GB/s": 7, "state": 10, "device": 10, "$/million": 9,
}  # fmt: skip


class DecodeConfig(BenchConfig):
    """decoding"""

    size: Literal["124m", "tiny"] = Field("124m", description="which folder of configurator/recipes, and the size of patterns")
    layers: str = Field(
        "gdn; gdn gdn gdn attn; all",
        min_length=1,
        description="recipes of the folder or layer patterns, separated by semicolons; all: every recipe",
    )
    batch_sizes: str = Field("1,32", min_length=1, description="sequences decoded together, separated by commas")
    contexts: str = Field("512,1024,8192,65536,262144,1048576", min_length=1, description="tokens before, separated by commas")
    prompts: str = Field("512,8192,65536,131072,1048576", min_length=1, description="tokens of prompts, separated by commas")
    tokens: int = Field(64, ge=2, description="tokens that are timed, three times")
    max_prompt: int = Field(131072, ge=1, description="longest prompt for models whose state grows with it")
    max_gib: float = Field(100.0, gt=0, description="leave out states that are larger than this")
    price: float = Field(3.0, ge=0, description="dollars for an hour of the device")
    processes: int = Field(16, ge=0, description="models compiled side by side before, at most one per core; 0: none")
    plot: bool = Field(True, description="draw the results (decode.png, decode_cost.png, roofline.png)")
    results: str | None = Field(None, min_length=1, description="decode.json of an earlier run: draw it, measure nothing")
    device: str | None = Field(None, min_length=1, description="cpu, cuda, cuda:1, mps; none: the best there is")
    dtype: Literal["float32", "bfloat16"] | None = Field(None, description="compute type; none: bfloat16 on CUDA, else float32")

    def conflicts(self):
        for name in ("batch_sizes", "contexts", "prompts"):
            yield from list_problems(self, name, whole_number)
        for item in models(self):
            try:
                with torch.device("meta"):
                    Model(settings_of(self, item))
            except ConfigError as e:
                known = ", ".join(recipes(self.size))
                yield {"layers"}, f"layers: {item!r} is neither a recipe ({known}, all) nor a layer pattern: {e.problems[0]}"
        if self.results is not None and not Path(self.results).is_file():
            yield {"results"}, f"results={self.results}: no such file"


def recipes(size):
    return sorted(path.stem for path in (RECIPES / size).glob("*.py"))


def models(config):
    """The recipes and patterns to measure, each once."""
    items = [item.strip() for item in config.layers.split(";") if item.strip()]
    return list(dict.fromkeys(name for item in items for name in (recipes(config.size) if item == "all" else [item])))


def settings_of(config, item):
    """The `ModelConfig` of a recipe or a pattern."""
    sizes = [f"--{name}={value}" for name, value in SIZES[config.size].items()]
    arguments = [str(RECIPES / config.size / f"{item}.py")] if item in recipes(config.size) else [*sizes, f"--layers={item}"]
    settings = configurator.load(TrainConfig, arguments).config
    own = {field: getattr(settings, field) for field in ModelConfig.model_fields}
    return ModelConfig(**own | {"vocab_size": settings.vocab_size or 4096})


def engine_of(config, item, device, dtype):
    """An engine of this model with random weights."""
    torch.manual_seed(config.seed)
    with device:
        model = Model(settings_of(config, item)).eval()
    return Engine(model, dtype=dtype)


# ----------------------------------------------------------------------------------------------------------------------
# What has to be done


def matrix_weights(model):
    """Weights of matrix products that every token goes through, the head's included."""
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return weights + (model.embedding.weight.numel() if model.head is None else 0)


def mixing_flops(mixer, n):
    """FLOPs that one mixer spends on n tokens; a recurrent one without the chunks, which a single token does not have."""
    try:
        return n * mixer.flops(n, chunk=0)
    except TypeError:
        return n * mixer.flops(n) if n else 0.0


def step_flops(model, context):
    """FLOPs of one more token after `context` tokens."""
    mixers = [b.mixer for b in model.blocks if b.mixer is not None]
    return 2 * matrix_weights(model) + sum(mixing_flops(m, context + 1) - mixing_flops(m, context) for m in mixers)


def prefill_work(model, n, size):
    """(FLOPs, bytes) of reading n tokens at once: weights once, what goes in and out of every matrix product, the states."""
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    moved = matrix_weights(model) + n * sum(m.in_features + m.out_features for m in linears)
    flops = n * (2 * matrix_weights(model) + sum(b.mixer.flops(n) for b in model.blocks if b.mixer is not None))
    return flops, moved * size + model.state_bytes(1, n)


def mixer_intensities(model, context):
    """FLOP per byte of each kind of mixer alone: of one decoded token over its state, of a prefill over inputs, outputs, state."""
    found = {}
    for spec, block in zip(model.specs, model.blocks, strict=True):
        if block.mixer is None or spec.name in found:
            continue
        m, width = block.mixer, model.config.n_embd
        tensors = m.init_state(1, context, device="meta", dtype=torch.bfloat16).tensors
        traffic = sum((2 if x.dtype == torch.float32 else 1) * x.numel() * x.element_size() for x in tensors.values())
        decode = (mixing_flops(m, context + 1) - mixing_flops(m, context)) / traffic
        found[spec.name] = {"decode": decode, "prefill": context * m.flops(context) / (4 * 2 * width * context + traffic)}
    return found


def roof(device, dtype):
    """(FLOP/s, bytes/s) that this device reaches: a large product and a large copy, measured."""
    n, m = (8192, 2**28) if device.type == "cuda" else (1024, 2**24)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    x, y = torch.zeros(m, device=device), torch.zeros(m, device=device)
    product, copy = (median_seconds(call, device, 10, 2.0) for call in (lambda: a @ b, lambda: y.copy_(x)))
    return 2 * n**3 / product, 2 * 4 * m / copy


# ----------------------------------------------------------------------------------------------------------------------
# Measuring


def empty(device):
    """Give back what earlier measurements held, and count the device's memory anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def device_bytes(engine):
    """The most that the device has held since `empty`, weights included; None on a CPU.

    Reserved, not allocated: what a CUDA graph writes in between belongs to nobody when it is not running.
    """
    return torch.cuda.max_memory_reserved(engine.device) if engine.device.type == "cuda" else None


def step_seconds(engine, batch, context, tokens, repeats=3):
    """(seconds of one step, the steps): `batch` sequences of `context` tokens each go on, the host reads every token."""
    steps, times = engine.steps(batch, context + tokens + 2, Sampling(temperature=0)), []
    steps.state.clear_()

    def run(n=tokens):
        for _ in range(n):
            fetch = steps.fetch()
            steps.next()
            fetch()

    with torch.inference_mode():
        for _ in range(repeats):
            for layer in steps.state.layers:
                layer.length.fill_(context)
                layer.longest = context
            run(2)
            times.append(timed(run, engine.device) / tokens)
    return statistics.median(times), steps


def first_token_seconds(engine, n):
    """Seconds from a prompt of n ids on the host to the first token there, where a request like it came before."""
    prompt = torch.randint(engine.vocab, (n,)).tolist()

    def run():
        next(iter(Generator(engine, prompt, max_new_tokens=1, temperature=0)))

    engine.steps(1, n + 1, Sampling(temperature=0))
    first = timed(run, engine.device)
    return first if first > 2.0 else median_seconds(run, engine.device, 5, 1.5)  # what takes seconds is not repeated


def problem(config, model, batch, tokens, dtype):
    """Why so many tokens are not tried with this model; None if they are."""
    if model.position_embedding is not None and tokens > model.config.block_size:
        return f"{model.config.block_size} learned positions"
    if model.state_bytes(batch, tokens, dtype) > config.max_gib * 2**30:
        return f"state over max_gib={config.max_gib:g}"
    return None


def measure_prompt(config, engine, row):
    """Complete the row of one prompt: time to the first token, memory, work."""
    model, n = engine.model, row["prompt"]
    row["why"] = problem(config, model, 1, n + 1, engine.dtype)
    if n > config.max_prompt and row["state_bytes"] > model.state_bytes(1, 1, engine.dtype):
        row["why"] = row["why"] or f"its state grows: max_prompt={config.max_prompt}"
    if row["why"]:
        return
    engine.forget()
    empty(engine.device)
    seconds = first_token_seconds(engine, n)
    flops, moved = prefill_work(model, n, torch.finfo(engine.dtype).bits // 8)
    row |= {"ms": 1e3 * seconds, "device_bytes": device_bytes(engine), "flops": flops, "bytes": moved}
    row["dollars_per_million"] = dollars(config, seconds / n)


def measure_steps(config, engine, row):
    """Complete the row of decoding at one batch size and context."""
    model, batch, context = engine.model, row["batch"], row["context"]
    row["why"] = problem(config, model, batch, context + config.tokens + 2, engine.dtype)
    if row["why"]:
        return
    engine.forget()
    empty(engine.device)
    seconds, steps = step_seconds(engine, batch, context, config.tokens)
    moved = bytes_per_step(model, steps.state, engine.dtype)
    row |= {"ms": 1e3 * seconds, "tokens_per_second": batch / seconds, "bytes": moved, "allocated_bytes": steps.state.nbytes}
    row |= {"device_bytes": device_bytes(engine), "flops": batch * step_flops(model, context)}
    row["dollars_per_million"] = dollars(config, seconds / batch)


def dollars(config, seconds_per_token):
    return 1e6 * seconds_per_token / 3600 * config.price


def compile_model(config, item, device, dtype):
    """In a worker: everything that will be measured of one model, at lengths and for times that only compile it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = engine_of(config, item, torch.device(device), dtype)
            for batch in numbers(config.batch_sizes):  # beyond these lengths nothing else is compiled
                for context in dict.fromkeys(min(n, 4096) for n in numbers(config.contexts)):
                    if problem(config, engine.model, batch, context + 4, engine.dtype) is None:
                        step_seconds(engine, batch, context, 2, repeats=1)
                        engine.forget()
            for n in dict.fromkeys(min(n, 2 * engine.chunk + n % engine.chunk) for n in numbers(config.prompts)):
                if problem(config, engine.model, 1, n + 1, engine.dtype) is None:
                    next(iter(Generator(engine, [1] * n, max_new_tokens=1, temperature=0)))
                    engine.forget()
        return None
    except Exception as error:
        return one_line(error)


def compile_all(config, device, dtype):
    """Fill Triton's cache, a process for each model, side by side."""
    start, count = time.perf_counter(), min(config.processes, os.cpu_count(), len(models(config)))
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {item: pool.submit(compile_model, config, item, str(device), dtype) for item in models(config)}
        for item, job in jobs.items():
            if error := job.exception() or job.result():
                print(f"{item}: not compiled: {error}")
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)


def decode(config):
    """Time, memory and cost of a token against the context, for every model; three pictures and a table."""
    if config.results:
        content = json.loads(Path(config.results).read_text())
        draw(content, Path(config.out_dir))
        return content
    device, dtype = resolve_device(TrainConfig(device=config.device, dtype=config.dtype))
    if device.type == "cuda" and config.processes:
        compile_all(config, device, dtype)
    flops, bandwidth = roof(device, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    content = {"rows": [], "prompts": [], "intensities": {}, "roof": {"flops": flops, "bytes": bandwidth}}
    print("  ".join(name.ljust(w) if name == "layers" else name.rjust(w) for name, w in COLUMNS.items()))
    for part in (prompts_of, steps_of):
        for item in models(config):
            empty(device)  # weights within a block of gigabytes that is only cached would keep all of it
            engine = engine_of(config, item, device, dtype)
            part(config, item, engine, content)
            write_report(config, "decode", device, **content)
            engine.forget()
            del engine
    content = report(config, "decode", device, **content)
    print("\n".join(summary(content)), flush=True)
    if config.plot:
        draw(content, Path(config.out_dir))
    return content


def tried(measure, row, *arguments):
    """The row that `measure` completes, printed; what goes wrong is in it."""
    try:
        measure(*arguments, row)
    except Exception as error:  # the other rows are worth having
        row |= {"ms": None, "why": one_line(error)}
    print(line(row), flush=True)
    return row


def prompts_of(config, item, engine, content):
    for n in numbers(config.prompts):
        row = {"layers": item, "prompt": n, "ms": None, "state_bytes": engine.model.state_bytes(1, n, engine.dtype)}
        content["prompts"].append(tried(measure_prompt, row, config, engine))


def steps_of(config, item, engine, content):
    for context in numbers(config.contexts):
        content["intensities"] |= {f"{kind} {context}": x for kind, x in mixer_intensities(engine.model, context).items()}
        for batch in numbers(config.batch_sizes):
            row = {"layers": item, "batch": batch, "context": context, "ms": None}
            row["state_bytes"] = engine.model.state_bytes(batch, context, engine.dtype)
            content["rows"].append(tried(measure_steps, row, config, engine))


def numbers(text):
    return [int(n) for n in split_list(text)]


def line(row):
    """A row as it is printed; prompts have the word in place of the batch size."""
    cells = [row["layers"][: COLUMNS["layers"]], row.get("batch", "prompt"), row.get("context", row.get("prompt"))]
    if row["ms"] is None:
        cells += ["-", "-", "-", format_bytes(row["state_bytes"]), row["why"]]
    else:
        pace = row.get("tokens_per_second", 1e3 * row.get("prompt", 0) / row["ms"])
        cells += [f"{row['ms']:.3f}", f"{pace:.0f}", f"{row['bytes'] / row['ms'] / 1e6:.1f}"]
        cells.append(format_bytes(row.get("allocated_bytes", row["state_bytes"])))
        cells += ["-" if row["device_bytes"] is None else format_bytes(row["device_bytes"]), f"{row['dollars_per_million']:.4f}"]
    first, *rest = zip(cells, COLUMNS.values(), strict=False)
    return "  ".join([first[0].ljust(first[1]), *(str(cell).rjust(width) for cell, width in rest)])


def summary(content):
    """How much a step's time, and the memory that reading and decoding take, vary from the shortest length of at least 1024 on."""
    lines, found = [], {}
    for row in content["rows"]:
        if row["ms"] is not None and row["context"] >= 1024:
            found.setdefault((row["layers"], row["batch"]), []).append(row)
    for (item, batch), rows in found.items():
        if len(rows) > 1:
            least, most = min(r["ms"] for r in rows), max(r["ms"] for r in rows)
            lines.append(f"{item}, batch {batch}: {most / least - 1:.1%} between the fastest and the slowest context")
    for name, word in (("rows", "context"), ("prompts", "prompt")):
        grown = {}
        for row in content[name]:
            if row.get("device_bytes") and row[word] >= 65536:
                grown.setdefault((row["layers"], row.get("batch", 1)), []).append(row)
        for (item, batch), rows in grown.items():
            if len(rows) > 1:
                first, last = min(rows, key=lambda r: r[word]), max(rows, key=lambda r: r[word])
                change = last["device_bytes"] / first["device_bytes"] - 1
                lines.append(
                    f"{item}, batch {batch}: device memory {change:+.1%} from {first[word]} to {last[word]} tokens of {word}"
                )
    return lines


# ----------------------------------------------------------------------------------------------------------------------
# Pictures


def draw(content, folder):
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for row in content["rows"] if row["ms"] is not None]
    least = min((row["batch"] for row in rows), default=1)
    single = [row for row in rows if row["batch"] == least]
    reads = [row | {"context": row["prompt"]} for row in content["prompts"] if row["ms"] is not None]
    title = f"{content['device']}, {content['settings']['size']}"
    lines(
        pyplot,
        folder / "decode.png",
        f"{title}, batch {least}",
        [
            ("ms/token", single, "ms"),
            ("state, bytes", single, "allocated_bytes"),
            *([("device memory, bytes", single, "device_bytes")] if content["device"] != "cpu" else []),
        ],
    )
    price = f"{title}, {content['settings']['price']:g} dollars an hour"
    most = [row for row in rows if row["batch"] == max(r["batch"] for r in rows)]
    panels = [("dollars per million generated", most, "dollars_per_million"), ("per million read", reads, "dollars_per_million")]
    lines(pyplot, folder / "decode_cost.png", price, panels)
    roofline(pyplot, folder / "roofline.png", title, content, rows, reads)


def color(pyplot, i):
    """The ten usual ones, then their lighter twins."""
    return pyplot.get_cmap("tab20")(2 * i % 20 + i // 10 % 2)


def lines(pyplot, path, title, panels):
    """A panel each of a column of rows against the context, a line per model."""
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4), layout="constrained")
    items = list(dict.fromkeys(row["layers"] for _, rows, _ in panels for row in rows))
    for axis, (label, rows, key) in zip(axes, panels, strict=True):
        for i, item in enumerate(items):
            mine = [row for row in rows if row["layers"] == item]
            axis.loglog(
                [r["context"] for r in mine], [r[key] for r in mine], "o-", color=color(pyplot, i), label=item, markersize=3
            )
        axis.set_xlabel("tokens of context")
        axis.set_ylabel(label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def roofline(pyplot, path, title, content, rows, reads):
    """FLOP/s against FLOP per byte: measured steps and prefills of whole models, and (hollow, on the roof) each mixer alone."""
    flops, bandwidth = content["roof"]["flops"], content["roof"]["bytes"]
    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    x = [2.0**i for i in range(-4, 20)]
    axis.loglog(x, [min(flops, i * bandwidth) for i in x], "k-", linewidth=1)
    items = list(dict.fromkeys(row["layers"] for row in rows))
    for i, item in enumerate(items):
        for points, marker in ((rows, "o"), (reads, "s")):
            mine = [(r["flops"] / r["bytes"], r["flops"] / r["ms"] * 1e3) for r in points if r["layers"] == item]
            axis.plot(
                *zip(*mine, strict=True), marker, color=color(pyplot, i), markersize=4, label=item if marker == "o" else None
            ) if mine else None
    longest = {name.split()[0]: found for name, found in content["intensities"].items()}
    for phase, marker in (("decode", "o"), ("prefill", "s")):
        near = {}  # mixers that would lie on each other share a label
        for kind, found in longest.items():
            near.setdefault(round(math.log2(found[phase])), []).append((kind, found[phase]))
        for i in sorted(near):
            group = near[i]
            at = [(i, min(flops, i * bandwidth)) for _, i in group]
            axis.plot(*zip(*at, strict=True), marker, color="k", fillstyle="none", markersize=7)
            names = ", ".join(kind for kind, _ in group)
            axis.annotate(names, at[0], (-8, 6 + 9 * (i % 3)), textcoords="offset points", fontsize=6)
    axis.set_ylim(top=6 * flops)
    axis.set_xlabel("FLOP per byte")
    axis.set_ylabel("FLOP/s")
    axis.set_title(f"{title}: circles decode, squares prefill; hollow: a mixer alone, at the roof", fontsize=9)
    figure.legend(loc="outside right center", frameon=False, fontsize=7)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
