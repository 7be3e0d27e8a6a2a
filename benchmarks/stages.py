"""What became of the runs of benchmarks/stages.sh: `python -m benchmarks.stages RUNS [--out_dir=FOLDER]`.

Prints the losses, how much attention the indexers recall, needle scores, what a token costs against the context, and two curves of
a converted and a new hybrid; writes them as stages.json and stages.png. Runs that are not there are left out.
"""

import json
import statistics
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field

import checkpoint
import configurator
import monitor
from benchmarks.decode import step_seconds
from benchmarks.measure import BenchConfig, list_problems, print_table, report, split_list, whole_number
from configurator import ConfigError, TrainConfig
from data.loader import Batch, heldout_batches
from data.tokens import Dataset
from model import format_bytes
from preflight import resolve_device
from sample import Engine

WHAT = {
    "dense": "attention, from scratch",
    "continued": "the same, trained on",
    "random": "selecting with a random indexer",
    "warm": "indexer warmed up, reading everything",
    "unadapted": "warmed up, then selecting, not trained on",
    "sparse": "warmed up, then trained selecting",
    "distilled": "three of four layers distilled to gdn",
    "converted": "distilled, then trained whole",
    "swapped": "trained whole without distillation",
    "scratch": "hybrid from scratch",
    "short": "hybrid from scratch, the converted one's schedule",
}
INDEXED = ("random", "warm", "unadapted", "sparse")
FIGURES = ("recall", "most", "overlap", "kl")
UNTRAINED = ("random", "unadapted")  # one step of no size


class StagesConfig(BenchConfig):
    """the stages"""

    rows: int = Field(16, ge=1, description="held-out rows on which the selections are measured")
    contexts: str = Field("2048,8192,32768,131072", min_length=1, description="tokens before, separated by commas, or none")
    batch_sizes: str = Field("1,16", min_length=1, description="sequences decoded together, separated by commas")
    tokens: int = Field(64, ge=2, description="tokens that are timed")
    device: str | None = Field(None, min_length=1, description="cpu, cuda, cuda:1, mps; none: the best there is")

    _positional: ClassVar[str | None] = "RUNS"

    def conflicts(self):
        if self.contexts != "none":
            yield from list_problems(self, "contexts", whole_number)
        yield from list_problems(self, "batch_sizes", whole_number)


def curve(run):
    """[(tokens, validation loss)] of a run, in its order; empty if it has none."""
    try:
        settings = checkpoint.read_meta(checkpoint.resolve(run, ("last",)))["settings"]
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except (ConfigError, OSError):
        return []
    per_step = settings["gradient_accumulation_steps"] * settings["batch_size"] * settings["block_size"]
    return [(line["step"] * per_step, line["val_loss"]) for line in lines if "val_loss" in line]


def selection(run, rows, device, dtype):
    """{recall, most, overlap, kl}: means over dsa layers and held-out rows, each row its own batch; None if no layer selects."""
    model, _, meta = checkpoint.load_model(run, device)
    dataset, found = Dataset.open(meta["dataset_folder"]), {name: [] for name in FIGURES}
    half = torch.bfloat16 if dtype == "bfloat16" else None
    config = model.config
    with torch.no_grad():
        for batch in heldout_batches(dataset.val, config.block_size, 1, config.document_mask, max_batches=rows):
            batch = Batch(*(None if x is None else x.to(device) for x in batch))
            for layer in monitor.health(model, batch, half).values():
                for name in FIGURES:
                    if layer.get(name) is not None:
                        found[name].append(layer[name])
    return {name: statistics.fmean(values) for name, values in found.items() if values} or None


def needles(run):
    """{of: share of the answers that are right} in eval.py's newest result; None where it was not asked."""
    newest = max(run.glob("eval-*needle_single*.json"), key=lambda path: path.stat().st_mtime, default=None)
    scores = {} if newest is None else json.loads(newest.read_text())["results"]["needle_single"]
    return {name.removesuffix(",none"): x for name, x in scores.items() if name.startswith("acc") and "stderr" not in name} or None


def decoding(run, config, device, dtype):
    """[{batch, context, ms, state_bytes}] of a run's model, its weights trained for less context than that."""
    engine, rows = Engine(checkpoint.load_model(run, device)[0], dtype=dtype), []
    for batch in map(int, split_list(config.batch_sizes)):
        for context in map(int, split_list(config.contexts)):
            seconds, steps = step_seconds(engine, batch, context, config.tokens)
            rows.append({"batch": batch, "context": context, "ms": 1e3 * seconds, "state_bytes": steps.state.nbytes})
            del steps
            engine.forget()
    return rows


def common(a, b):
    """(tokens, loss of a, loss of b) at the last point that both curves have; None if there is none."""
    both = sorted(dict(a).keys() & dict(b).keys())
    return (both[-1], dict(a)[both[-1]], dict(b)[both[-1]]) if both else None


def reached(points, loss):
    """Tokens after which a curve is at most at `loss`, on straight lines between its points; None if it never is."""
    if points[0][1] <= loss:
        return points[0][0]
    for (t, a), (u, b) in zip(points, points[1:], strict=False):
        if b <= loss:
            return t + (u - t) * (a - loss) / (a - b)
    return None


def conclude(curves):
    """What the curves {run: points} say, a sentence each."""
    if (found := common(curves.get("sparse", []), curves.get("continued", []))) is not None:
        tokens, sparse, dense = found
        yield f"after {tokens:,} tokens: sparse {sparse:.4f}, dense {dense:.4f}: {sparse / dense - 1:+.2%}"
    if curves.get("converted") and curves.get("scratch"):
        spent, loss = joined(curves)[-1]
        needed = reached(curves["scratch"], loss)
        than = f"is there after {needed:,.0f}, {needed / spent:.1f} times as many" if needed else "does not get there"
        ends, last = curves["scratch"][-1]
        yield f"converted, {loss:.4f} after {spent:,} tokens; from scratch {than} ({last:.4f} after {ends:,})"


def joined(curves):
    """The curve of distillation and of training after it as one."""
    first = curves.get("distilled", [])
    spent = first[-1][0] if first else 0
    return first + [(spent + tokens, loss) for tokens, loss in curves["converted"]]


def draw(curves, path):
    """Loss against tokens: of the sparse model beside the dense one, of the converted hybrid beside those from scratch."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    hybrid = {name: curves[name] for name in ("scratch", "short", "swapped") if curves.get(name)}
    if curves.get("converted"):
        hybrid["converted"] = joined(curves)
    sparse = {name: curves[name] for name in ("continued", "sparse") if curves.get(name)}
    panels = [lines for lines in (sparse, hybrid) if lines]
    if not panels:
        return
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.4), layout="constrained", squeeze=False)
    for axis, lines in zip(axes[0], panels, strict=True):
        for i, (name, points) in enumerate(lines.items()):
            tokens, losses = zip(*points, strict=True)
            axis.plot([t / 1e6 for t in tokens], losses, ".-", color=f"C{i}", label=f"{name}: {WHAT[name]}", linewidth=1)
        axis.set_xlabel("million tokens")
        axis.set_ylabel("validation loss")
        axis.legend(frameon=False, fontsize=7)
        if lines is hybrid:
            axis.set_xscale("log")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def cells(name, found):
    """A run as a line of the table."""
    tokens, loss = found["curve"][-1]
    chosen, asked = found["selection"] or {}, found["needles"] or {}
    figures = [f"{chosen[key]:.3f}" if key in chosen else "-" for key in FIGURES]
    answers = [f"{asked[key]:.2f}" if key in asked else "-" for key in ("acc", "acc_25", "acc_50", "acc_100")]
    return [name, WHAT[name], f"{0 if name in UNTRAINED else tokens:,}", f"{loss:.4f}", *figures, *answers]


def stages(config, folder):
    device, dtype = resolve_device(TrainConfig(device=config.device))
    found = {}
    for name in WHAT:
        if points := curve(folder / name):
            chosen = selection(folder / name, config.rows, device, dtype) if name in INDEXED else None
            found[name] = {"curve": points, "needles": needles(folder / name), "selection": chosen}
    if not found:
        raise ConfigError(f"{folder} holds none of the runs {', '.join(WHAT)}: bash benchmarks/stages.sh makes them")
    head = ("run", "", "tokens", "loss", "recall", "at most", "overlap", "KL", "needle", "at 1/4", "at 1/2", "at 1")
    print_table(head, [cells(name, run) for name, run in found.items()])
    conclusions = list(conclude({name: run["curve"] for name, run in found.items()}))
    print("\n".join(["", *conclusions]), flush=True)
    out = Path(config.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    draw({name: run["curve"] for name, run in found.items()}, out / "stages.png")
    rows = []
    for name in ("dense", "sparse") if config.contexts != "none" else ():
        if name in found:
            rows += [{"run": name, **row} for row in decoding(folder / name, config, device, dtype)]
    if rows:
        table = ([r["run"], r["batch"], r["context"], f"{r['ms']:.3f}", format_bytes(r["state_bytes"])] for r in rows)
        print_table(("run", "batch", "context", "ms/token", "state"), table)
    return report(config, "stages", device, rows, runs=found, conclusions=conclusions)


def main(argv):
    resolved = configurator.load(StagesConfig, argv, prog="python -m benchmarks.stages", description=__doc__.splitlines()[0])
    if len(resolved.positional) != 1 or not Path(resolved.positional[0]).is_dir():
        raise ConfigError(f"one folder of runs is needed, got {resolved.positional}: python -m benchmarks.stages out/stages/runs")
    return stages(resolved.config, Path(resolved.positional[0]))


if __name__ == "__main__":
    configurator.run(main)
