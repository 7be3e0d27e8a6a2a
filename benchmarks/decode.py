"""Decoding against the context: time and memory of a token, what a million cost, and where each mixer lies under the roof.

What a step takes depends on how long the context is, not on what it says: states are set to a length, not read into. Reading is
measured by itself, up to `max_prefill` tokens.
"""

import math
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

import configurator
from benchmarks.measure import BenchConfig, list_problems, median_seconds, print_table, report, split_list, timed, whole_number
from configurator import ModelConfig, TrainConfig
from model import Model, format_bytes
from preflight import resolve_device
from sample import Engine, Sampling, bytes_per_step

RECIPES = Path(__file__).resolve().parent.parent / "configurator" / "recipes"


class DecodeConfig(BenchConfig):
    """decoding"""

    size: Literal["124m", "tiny"] = Field("124m", description="which folder of configurator/recipes")
    recipes: str = Field("all", min_length=1, description="recipes, separated by commas; all of the folder")
    batch_sizes: str = Field("1,32", min_length=1, description="sequences decoded together, separated by commas")
    contexts: str = Field("1024,8192,65536,262144,1048576", min_length=1, description="tokens before, separated by commas")
    tokens: int = Field(64, ge=2, description="tokens that are timed")
    max_prefill: int = Field(131072, ge=1, description="longest context that is also read")
    max_gib: float = Field(100.0, gt=0, description="leave out states that are larger than this")
    price: float = Field(3.0, ge=0, description="dollars for an hour of the device")
    plot: bool = Field(True, description="draw the results (decode.png, decode_cost.png, roofline.png)")
    device: str | None = Field(None, min_length=1, description="cpu, cuda, cuda:1, mps; none: the best there is")
    dtype: Literal["float32", "bfloat16"] | None = Field(None, description="compute type; none: bfloat16 on CUDA, else float32")

    def conflicts(self):
        yield from list_problems(self, "batch_sizes", whole_number)
        yield from list_problems(self, "contexts", whole_number)
        if self.recipes != "all":
            known = names(self.size)
            yield from list_problems(self, "recipes", lambda name: name in known, f"known are {', '.join(known)}, or all")


def names(size):
    return sorted(path.stem for path in (RECIPES / size).glob("*.py"))


def model_of(config, name, device):
    """The recipe's model with random weights."""
    settings = configurator.load(TrainConfig, [str(RECIPES / config.size / f"{name}.py")]).config
    own = {field: getattr(settings, field) for field in ModelConfig.model_fields}
    torch.manual_seed(config.seed)
    with device:
        return Model(ModelConfig(**own | {"vocab_size": settings.vocab_size or 4096})).eval()


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


def step_seconds(engine, batch, context, tokens):
    """(seconds of one step, the steps) with `batch` sequences of `context` tokens each."""
    steps = engine.steps(batch, context + tokens + 2, Sampling(temperature=0))
    steps.state.clear_()
    for layer in steps.state.layers:
        layer.length.fill_(context)
        layer.longest = context

    def run():
        for _ in range(tokens):
            steps.next()

    with torch.inference_mode():
        steps.next()
        steps.next()
        return timed(run, engine.device) / tokens, steps


def prefill_seconds(engine, context):
    """Seconds to read one prompt of `context` tokens and know the logits of the next."""
    prompt = [torch.randint(engine.vocab, (context,)).tolist()]
    return median_seconds(
        lambda: engine.read(prompt, engine.model.init_state(1, context, dtype=engine.dtype)), engine.device, 3, 5.0
    )


def measure(config, name, engine, batch, context):
    """One row."""
    model, row = engine.model, {"recipe": name, "batch": batch, "context": context}
    size = torch.finfo(engine.dtype).bits // 8
    row["state_bytes"] = model.state_bytes(batch, context, engine.dtype)
    if model.position_embedding is not None and context + config.tokens + 2 > model.config.block_size:
        return row | {"ms": None, "why": f"{model.config.block_size} learned positions"}
    if row["state_bytes"] > config.max_gib * 2**30:
        return row | {"ms": None, "why": f"state over max_gib={config.max_gib:g}"}
    seconds, steps = step_seconds(engine, batch, context, config.tokens)
    moved = bytes_per_step(model, steps.state, engine.dtype)
    row |= {"ms": 1e3 * seconds, "tokens_per_second": batch / seconds, "bytes": moved, "allocated_bytes": steps.state.nbytes}
    row |= {"flops": batch * step_flops(model, context), "dollars_per_million": dollars(config, seconds / batch)}
    if batch == 1 and context <= config.max_prefill:
        seconds = prefill_seconds(engine, context)
        flops, moved = prefill_work(model, context, size)
        row["prefill"] = {
            "ms": 1e3 * seconds,
            "flops": flops,
            "bytes": moved,
            "dollars_per_million": dollars(config, seconds / context),
        }
    return row


def dollars(config, seconds_per_token):
    return 1e6 * seconds_per_token / 3600 * config.price


def decode(config):
    """Time, memory and cost of a token against the context, for every recipe; three pictures and a table."""
    device, dtype = resolve_device(TrainConfig(device=config.device, dtype=config.dtype))
    rows, kinds = [], {}
    contexts = [int(n) for n in split_list(config.contexts)]
    for name in names(config.size) if config.recipes == "all" else split_list(config.recipes):
        engine = Engine(model_of(config, name, device), dtype=dtype)
        for context in contexts:
            kinds |= {f"{kind} {context}": x for kind, x in mixer_intensities(engine.model, context).items()}
            for batch in split_list(config.batch_sizes):
                rows.append(measure(config, name, engine, int(batch), context))
                engine.forget()
        del engine
    print_table(
        ("recipe", "batch", "context", "ms/token", "tok/s", "GB/s", "state", "prefill ms", "$/M out", "$/M in"), map(cells, rows)
    )
    flops, bandwidth = roof(device, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    content = report(config, "decode", device, rows, roof={"flops": flops, "bytes": bandwidth}, intensities=kinds)
    if config.plot:
        draw(content, Path(config.out_dir))
    return content


def cells(row):
    start = [row["recipe"], row["batch"], row["context"]]
    if row["ms"] is None:
        return [*start, "-", "-", "-", format_bytes(row["state_bytes"]), row["why"], "-", "-"]
    prefill = row.get("prefill", {})
    read = [f"{prefill['ms']:.1f}" if prefill else "-", f"{row['dollars_per_million']:.3f}"]
    read.append(f"{prefill['dollars_per_million']:.4f}" if prefill else "-")
    pace = [f"{row['ms']:.3f}", f"{row['tokens_per_second']:.0f}", f"{row['bytes'] / row['ms'] / 1e6:.1f}"]
    return [*start, *pace, format_bytes(row["allocated_bytes"]), *read]


# ----------------------------------------------------------------------------------------------------------------------
# Pictures


def draw(content, folder):
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [row for row in content["rows"] if row["ms"] is not None]
    least = min((row["batch"] for row in rows), default=1)
    single = [row for row in rows if row["batch"] == least]
    reads = [row | row["prefill"] for row in rows if "prefill" in row]
    title = f"{content['device']}, {content['settings']['size']}"
    lines(
        pyplot,
        folder / "decode.png",
        f"{title}, batch {least}",
        [("ms/token", single, "ms"), ("state, bytes", single, "allocated_bytes")],
    )
    price = f"{title}, {content['settings']['price']:g} dollars an hour"
    most = [row for row in rows if row["batch"] == max(r["batch"] for r in rows)]
    panels = [("dollars per million generated", most, "dollars_per_million"), ("per million read", reads, "dollars_per_million")]
    lines(pyplot, folder / "decode_cost.png", price, panels)
    roofline(pyplot, folder / "roofline.png", title, content, rows, reads)


def lines(pyplot, path, title, panels):
    """A panel each of a column of rows against the context, a line per recipe."""
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4), layout="constrained")
    recipes = list(dict.fromkeys(row["recipe"] for _, rows, _ in panels for row in rows))
    for axis, (label, rows, key) in zip(axes, panels, strict=True):
        for i, recipe in enumerate(recipes):
            mine = [row for row in rows if row["recipe"] == recipe]
            axis.loglog([r["context"] for r in mine], [r[key] for r in mine], "o-", color=f"C{i}", label=recipe, markersize=3)
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
    x = [2.0**i for i in range(-4, 13)]
    axis.loglog(x, [min(flops, i * bandwidth) for i in x], "k-", linewidth=1)
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    for i, recipe in enumerate(recipes):
        for points, marker in ((rows, "o"), (reads, "s")):
            mine = [(r["flops"] / r["bytes"], r["flops"] / r["ms"] * 1e3) for r in points if r["recipe"] == recipe]
            axis.plot(
                *zip(*mine, strict=True), marker, color=f"C{i}", markersize=4, label=recipe if marker == "o" else None
            ) if mine else None
    longest = {name.split()[0]: found for name, found in content["intensities"].items()}
    for phase, marker in (("decode", "o"), ("prefill", "s")):
        near = {}  # mixers that would lie on each other share a label
        for kind, found in longest.items():
            near.setdefault(round(2 * math.log2(found[phase])), []).append((kind, found[phase]))
        for group in near.values():
            at = [(i, min(flops, i * bandwidth)) for _, i in group]
            axis.plot(*zip(*at, strict=True), marker, color="k", fillstyle="none", markersize=7)
            axis.annotate("\n".join(kind for kind, _ in group), at[0], (-4, 8), textcoords="offset points", fontsize=6)
    axis.set_ylim(top=3 * flops)
    axis.set_xlabel("FLOP per byte")
    axis.set_ylabel("FLOP/s")
    axis.set_title(f"{title}: circles decode, squares prefill; hollow: a mixer alone, at the roof", fontsize=9)
    figure.legend(loc="outside right center", frameon=False, fontsize=7)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
