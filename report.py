"""The report of `python eval.py --compare RUN RUN ...`: report.md and report.png, of what the runs logged and were scored at.

Runs whose settings differ in the seed alone are one variant. Figures are means over seeds with their standard error; each variant
is tested against the best one, paired by seed, and what is within noise is called so. Scores are only put side by side if they were
made under the same conditions: policy, limits, versions, and the very same documents; scores of weights that have been overwritten
since are left out.
"""

import datetime
import json
import math
import os
import platform
import re
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats

import checkpoint
from configurator import ConfigError, ModelConfig
from data.tokens import Dataset
from harness import HybridLM
from model import Model, format_bytes
from sample import Engine, Generator
from sweep import is_part, metric_name, records, table

NOT_OF_THE_VARIANT = {  # settings that say where and how a run was made, not what it is
    "seed", "out_dir", "overwrite", "resume", "device", "compile", "wandb_log", "wandb_project", "wandb_run_name", "log_interval",
    "save_interval", "keep_last", "eval_only",
}  # fmt: skip
LOWER_IS_BETTER = ("bits_per_byte", "perplexity")  # ends of names, where a task does not say
VALIDATED_WITH = ("block_size", "batch_size", "eval_iters", "document_mask")  # what validation in training depends on
SIGNIFICANT = 0.05
PROMPTS = 128  # held-out documents that the loss by position is a mean of, at most
BEYOND = 4  # times block_size: how far the loss by position goes


class Run(NamedTuple):
    folder: Path  # of the checkpoint
    meta: dict
    curves: list[dict]  # metrics.jsonl
    scores: dict[str, float]  # "task metric" -> value
    lower: frozenset[str]  # the scores that are better the lower they are
    chance: dict[str, float]  # task -> value
    conditions: dict[str, dict]  # task -> what its scores were made under

    @property
    def seed(self):
        return self.meta.get("settings", {}).get("seed", 0)


class Variant(NamedTuple):
    name: str
    runs: list[Run]

    def values(self, metric):
        """{seed: value} of the runs that have it."""
        return {run.seed: run.scores[metric] for run in self.runs if metric in run.scores}


# ----------------------------------------------------------------------------------------------------------------------
# Reading


def read_run(path):
    folder, meta = checkpoint.open_checkpoint(path, ("best", "last"))
    curves, starts = (_lines(folder.parent / name) for name in ("metrics.jsonl", "starts.jsonl"))
    meta["commit"] = starts[-1].get("commit") if starts else None
    validation = [line["val_bits_per_byte"] for line in curves if "val_bits_per_byte" in line]
    scores = {"validation bits_per_byte": min(validation)} if validation else {}
    answers = [line["val_accuracy"] for line in curves if "val_accuracy" in line]  # of a made task
    scores |= {"validation accuracy": max(answers)} if answers else {}
    lower, chance, conditions = {"validation bits_per_byte"}, {}, {}
    for record in records(folder):
        chance |= record.get("chance", {})
        for task, found in record["results"].items():
            of_all, higher = record["conditions"], record.get("higher_is_better", {}).get(task, {})
            own = {name: of_all.get(name, {}).get(task) for name in ("n-shot", "versions", "documents", "tokenizer")}
            conditions[task] = {name: x for name, x in of_all.items() if name not in own} | own
            kept = {name: x for name, x in found.items() if "," in name and "_stderr," not in name and isinstance(x, int | float)}
            scores = {name: value for name, value in scores.items() if name.partition(" ")[0] != task}
            scores |= {f"{task} {metric_name(name)}": value for name, value in kept.items()}
            for name in kept:
                plain = name.partition(",")[0]
                if not higher.get(plain, not plain.endswith(LOWER_IS_BETTER)):
                    lower.add(f"{task} {metric_name(name)}")
    return Run(folder, meta, curves, scores, frozenset(lower), chance, conditions)


def _lines(path):
    """The records of a .jsonl file, but for a line that a killed process half wrote; none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.is_file() else []


def check_conditions(runs):
    """ConfigError for each task whose scores were not made alike."""
    problems = []
    for task in sorted({task for run in runs for task in run.conditions}):
        having = [run for run in runs if task in run.conditions]
        first = having[0]
        for run in having[1:]:
            mine, theirs = run.conditions[task], first.conditions[task]
            differing = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
            if differing:
                shown = ", ".join(f"{name} {_short(theirs.get(name))} and {_short(mine.get(name))}" for name in differing)
                which = f"{first.folder.parent} and {run.folder.parent}"
                problems.append(f"{task}: the scores of {which} cannot be compared ({shown}): score both in the same way")
    if problems:
        raise ConfigError(problems)


def _short(value):
    return str(value)[:12]


def unlike_validation(runs):
    """What differs of how the runs were validated while they were trained, in words; "" if it cannot be told or nothing does."""
    settings = [run.meta.get("settings", {}) for run in runs]
    values = {name: {str(own[name]) for own in settings if name in own} for name in VALIDATED_WITH}
    values["val_sha256"] = {_short(run.meta.get("val_sha256")) for run in runs}
    return "; ".join(f"{name} {' and '.join(sorted(found))}" for name, found in values.items() if len(found) > 1)


def variants_of(runs):
    """Runs that differ in the seed alone, together; named by the settings in which the variants differ."""
    settings = {id(run): {n: x for n, x in run.meta.get("settings", {}).items() if n not in NOT_OF_THE_VARIANT} for run in runs}
    groups = {}
    for run in runs:
        groups.setdefault(json.dumps(settings[id(run)] or str(run.folder), sort_keys=True, default=str), []).append(run)
    several = [settings[id(members[0])] for members in groups.values()]
    differing = [name for name in several[0] if any(s.get(name) != several[0][name] for s in several[1:])]
    if len({own.get("layers") for own in several}) == len(several):
        differing = ["layers"]  # which says it; a width that goes with it, to match sizes, need not be told
    found = []
    for members, own in zip(groups.values(), several, strict=True):
        seeds = [run.seed for run in members]
        twice = [seed for seed in seeds if seeds.count(seed) > 1]
        if twice:
            raise ConfigError(f"seed {twice[0]} was given twice: {', '.join(str(run.folder.parent) for run in members)}")
        parts = [str(own.get(name)) if name == "layers" else f"{name}={own.get(name)}" for name in differing]
        name = " ".join(parts) or members[0].folder.parent.name
        found.append(Variant(name, sorted(members, key=lambda run: run.seed)))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Statistics


def mean_and_error(values):
    """(mean, standard error over seeds or None for one)."""
    values = list(values)
    if len(values) < 2:
        return statistics.fmean(values), None
    finite = all(map(math.isfinite, values))  # statistics fails where they are not
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)) if finite else math.nan


class Test(NamedTuple):
    difference: float
    error: float | None
    p: float | None

    @property
    def verdict(self):
        if self.p is None:
            return "fewer than two seeds in common: no noise to compare with"
        if math.isnan(self.p):
            return "not a number in some seed: not tested"
        if self.p >= SIGNIFICANT:
            return f"within noise (p = {self.p:.2f})"
        return f"different (p = {self.p:.3f})" if self.p >= 0.001 else "different (p < 0.001)"


def paired(first, second):
    """Student's t test on the differences `second - first` of two {seed: value}, over the seeds that both have."""
    common = sorted(first.keys() & second.keys())
    differences = [second[seed] - first[seed] for seed in common]
    if len(differences) < 2:
        mine, theirs = (statistics.fmean(values.values()) for values in (second, first))
        return Test(mine - theirs, None, None)
    mean, error = mean_and_error(differences)
    if error == 0:
        return Test(mean, 0.0, 1.0 if mean == 0 else 0.0)
    return Test(mean, error, float(2 * stats.t.sf(abs(mean / error), len(differences) - 1)))


def better_first(variants, metric):
    """The variants that have a metric, the best first, those whose mean is not a number last."""
    means = [(variant, statistics.fmean(variant.values(metric).values())) for variant in variants if variant.values(metric)]
    sign = 1 if any(metric in run.lower for variant in variants for run in variant.runs) else -1
    return [variant for variant, _ in sorted(means, key=lambda pair: (math.isnan(pair[1]), sign * pair[1]))]


# ----------------------------------------------------------------------------------------------------------------------
# What is measured here: loss by position, speed


def loss_by_position(run, device, dtype):
    """[(first position, end, bits per token)] along held-out documents, up to BEYOND times block_size; None without a text.

    Kept beside the run, and read from there the next time, as long as it holds the same weights.
    """
    kept, weights = run.folder.parent / f"positions-{run.folder.name}.json", checkpoint.weights_sha256(run.folder)
    before = json.loads(kept.read_text()) if kept.is_file() else {}
    if isinstance(before, dict) and before.get("weights_sha256") == weights:
        return before["bits"]
    where = run.meta.get("dataset_folder")
    dataset = Dataset.open(where) if where is not None and Path(where).is_dir() else None
    if dataset is None or dataset.val.row or dataset.meta.get("val_sha256") != run.meta["val_sha256"]:
        return None
    lm = HybridLM(run.folder, batch_size=1, device=device, dtype=dtype)
    longest = lm.model.config.block_size * (1 if lm.model.position_embedding is not None else BEYOND)
    tokens = dataset.val.read(0, min(dataset.val.count, PROMPTS * longest * 4))
    documents = [d.tolist()[:longest] for d in _split(tokens, dataset.val.eot) if len(d) > 16][:PROMPTS]
    if not documents:
        return None
    edges = [0, *(2**i for i in range(longest.bit_length()) if 2**i < longest), longest]
    sums, counts = [0.0] * (len(edges) - 1), [0] * (len(edges) - 1)
    with torch.inference_mode():
        for document in documents:
            (nll,) = lm._nll([(0, [lm.eot_token_id], document)])
            for i in range(len(edges) - 1):
                part = nll[edges[i] : edges[i + 1]]
                sums[i], counts[i] = sums[i] + float(part.sum()), counts[i] + len(part)
    found = [(edges[i], edges[i + 1], sums[i] / counts[i] / math.log(2)) for i in range(len(sums)) if counts[i]]
    beside = kept.with_name(f".{kept.name}.{os.getpid()}")
    beside.write_text(json.dumps({"weights_sha256": weights, "bits": found}))
    os.replace(beside, kept)
    return found


def _split(tokens, eot):
    """The documents in a stream of tokens, without their separators."""
    pieces = np.split(tokens, np.flatnonzero(tokens == eot))
    return [piece[piece != eot] for piece in pieces]


def speed(run, device, dtype, tokens=64):
    """(seconds to the first token of a prompt of half a block, seconds per further token), one sequence, after a warm-up."""
    lm = HybridLM(run.folder, device=device, dtype=dtype)
    engine = Engine(lm.model, vocab=lm.codec.vocab_size, eot=lm.eot_token_id, dtype=lm.dtype)
    half = max(1, lm.model.config.block_size // 2)
    prompt, n = [lm.eot_token_id] * half, min(tokens, half)
    for _ in range(2):
        began = time.perf_counter()
        times = [time.perf_counter() for _ in Generator(engine, prompt, max_new_tokens=n, temperature=0)]
    return times[0] - began, (times[-1] - times[0]) / max(1, len(times) - 1)


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def main(paths, config):
    if len(paths) < 2:
        raise ConfigError(f"--compare needs at least two runs, got {len(paths)}: python eval.py --compare out/a out/b")
    runs = [read_run(path) for path in paths]
    check_conditions(runs)
    unlike = unlike_validation(runs)
    if unlike:
        runs = [_without_validation(run) for run in runs]
    variants = variants_of(runs)
    out = Path(config.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    of_one_text = "val_sha256" not in unlike
    positions = {v.name: loss_by_position(v.runs[0], config.device, config.dtype) if of_one_text else None for v in variants}
    speeds = {v.name: speed(v.runs[0], config.device, config.dtype) for v in variants} if config.speed else {}
    text = markdown(variants, positions, speeds, paths, unlike)
    (out / "report.md").write_text(text, encoding="utf-8")
    figure(variants, positions, out / "report.png")
    print(text)
    print(f"written to {out / 'report.md'} and {out / 'report.png'}")


def _without_validation(run):
    curves = [{name: x for name, x in line.items() if not name.startswith("val_")} for line in run.curves]
    return run._replace(curves=curves, scores={n: x for n, x in run.scores.items() if not n.startswith("validation ")})


def markdown(variants, positions, speeds, paths, unlike=""):
    metrics = list(dict.fromkeys(name for v in variants for run in v.runs for name in run.scores))
    main_metrics = [m for m in metrics if not _detail(m) and not m.endswith("byte_perplexity")]  # which is 2^bits_per_byte
    details = sorted((m for m in metrics if _detail(m) and not m.endswith(" chance")), key=_by_number)
    today = datetime.date.today().isoformat()
    lines = ["# Comparison", "", f"`python eval.py --compare {' '.join(map(str, paths))}`", ""]
    lines += [f"{today}, report made on {_machine()}, torch {torch.__version__}. Means over seeds ± standard error.", ""]
    lines += table([["", *(v.name for v in variants)], *_facts(variants, speeds), *_rows(variants, main_metrics)])
    lines += ["", "States: what attention keeps in bfloat16, recurrent matrices in float32."]
    if speeds:
        lines += ["", "First token: after a prompt of half a block, one sequence; ms a token: of those that follow."]
    if unlike:
        lines += ["", f"Validation in training is left out, it was not alike: {unlike}."]
    lines += ["", "## Against the best", ""]
    for metric in main_metrics:
        ordered = better_first(variants, metric)
        if len(ordered) > 1 and len({value for variant in ordered for value in variant.values(metric).values()}) == 1:
            lines.append(f"- **{metric}**: the same in all runs")
        elif len(ordered) > 1:
            best = ordered[0]
            lines.append(f"- **{metric}**: best is `{best.name}`")
            for other in ordered[1:]:
                test = paired(best.values(metric), other.values(metric))
                error = "" if test.error is None else f" ± {test.error:.2g}"
                lines.append(f"  - `{other.name}`: {test.difference:+.4g}{error}, {test.verdict}")
    if details:
        lines += ["", "## By length and depth", "", *table([["", *(v.name for v in variants)], *_rows(variants, details)])]
    if any(positions.values()):
        lines += ["", "## Loss by position in held-out documents, bits per token", ""]
        edges = list(dict.fromkeys((a, b) for found in positions.values() for a, b, _ in found or []))
        rows = [["tokens", *(f"{a} to {b - 1}" for a, b in edges)]]
        for variant in variants:
            found = {(a, b): bits for a, b, bits in positions[variant.name] or []}
            rows.append([f"`{variant.name}`", *(f"{found[e]:.3f}" if e in found else "" for e in edges)])
        lines += table(rows) + ["", "Of the first seed; trained lengths end where the figure has a line."]
    lines += ["", "![curves, loss by position, recall against state](report.png)", "", "## Runs", ""]
    for variant in variants:
        for run in variant.runs:
            lines.append(f"- `{variant.name}`, seed {run.seed}: {run.folder}, commit {str(run.meta.get('commit'))[:10]}")
    return "\n".join(lines) + "\n"


def _machine():
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _detail(metric):
    """Whether a metric is one of the parts of another: by length or depth; and chance, which stands beside its task."""
    return is_part(metric) or metric.endswith(" chance")


def _by_number(metric):
    """Sorts `parity acc_64` before `parity acc_128`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", metric)]


def _facts(variants, speeds):
    models = [_skeleton(v.runs[0].meta["model"]) for v in variants]
    blocks = [m.config.block_size for m in models]
    rows = [
        ["seeds", *(str(len(v.runs)) for v in variants)],
        ["parameters", *(f"{m.n_params():,}" for m in models)],
        ["MFLOP a token", *(f"{m.flops_per_token(b) / 1e6:.2f}" for m, b in zip(models, blocks, strict=True))],
        ["state at block_size", *(format_bytes(m.state_bytes(1, b)) for m, b in zip(models, blocks, strict=True))],
        ["state at 32k", *(format_bytes(m.state_bytes(1, 32768)) for m in models)],
    ]
    rates = [[line["tokens_per_second"] for run in v.runs for line in run.curves if "tokens_per_second" in line] for v in variants]
    if all(rates):
        rows.append(["training tokens/s", *(f"{statistics.median(r):,.0f}" for r in rates)])
    if speeds:
        rows.append(["first token, ms", *(f"{1e3 * speeds[v.name][0]:.2f}" for v in variants)])
        rows.append(["ms a token", *(f"{1e3 * speeds[v.name][1]:.2f}" for v in variants)])
    return rows


def _skeleton(settings):
    with torch.device("meta"):
        return Model(ModelConfig(**settings))


def _rows(variants, metrics):
    rows = []
    for metric in metrics:
        cells = []
        for variant in variants:
            values = variant.values(metric).values()
            mean, error = mean_and_error(values) if values else (None, None)
            cells.append("" if mean is None else f"{mean:.4g}" + (f" ± {error:.2g}" if error is not None else ""))
        task = metric.partition(" ")[0]
        level = next((run.chance[task] for v in variants for run in v.runs if task in run.chance), None)
        rows.append([metric + (f" (chance {level:.3g})" if level is not None and not _detail(metric) else ""), *cells])
    return rows


def figure(variants, positions, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plot, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    colors = [f"C{i % 10}" for i in range(len(variants))]
    for variant, color in zip(variants, colors, strict=True):
        for axis, key in ((axes[0, 0], "loss"), (axes[0, 1], "val_bits_per_byte")):
            _curve(axis, variant, key, color)
        found = positions[variant.name]
        if found:
            middles, bits = [(a + b) / 2 for a, b, _ in found], [x for *_, x in found]
            axes[1, 0].plot(middles, bits, "o-", ms=3, color=color, label=variant.name)
    block = variants[0].runs[0].meta["model"]["block_size"]
    axes[1, 0].axvline(block, color="grey", lw=0.8, ls="--")
    titles = ("training loss", "validation, bits per byte", "loss by position in the document, bits per token")
    for axis, title, label in zip(axes.flat, titles, ("tokens", "tokens", f"position (trained: {block})"), strict=False):
        axis.set(title=title, xlabel=label)
    axes[1, 0].set_xscale("log", base=2)
    if not any(positions.values()):
        axes[1, 0].clear()
        _by_length(axes[1, 0], variants, colors)
    _pareto(axes[1, 1], variants, colors)
    home = axes[0, 0] if axes[1, 0].axison else axes[1, 0]
    home.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=7, loc="best" if home is axes[0, 0] else "center")
    plot.savefig(path, dpi=90)
    plt.close(plot)


def _curve(axis, variant, key, color):
    """The mean over seeds against tokens, and the range of the seeds."""
    by_step = {}
    for run in variant.runs:
        per_step = next((line["tokens"] / line["step"] for line in run.curves if "tokens" in line), 1)
        for line in run.curves:
            if key in line:
                by_step.setdefault(line["step"] * per_step, []).append(line[key])
    steps = sorted(step for step, values in by_step.items() if len(values) == len(variant.runs))
    if steps:
        axis.plot(steps, [statistics.fmean(by_step[s]) for s in steps], color=color, lw=1.2, label=variant.name)
        axis.fill_between(steps, [min(by_step[s]) for s in steps], [max(by_step[s]) for s in steps], color=color, alpha=0.15, lw=0)


def _by_length(axis, variants, colors):
    """A made task's score at each length it was asked at; nothing without one."""
    lengths = {}  # task -> {length: metric}
    for metric in sorted({name for v in variants for run in v.runs for name in run.scores}):
        if found := re.fullmatch(r"(\S+) acc_(\d+)", metric):
            lengths.setdefault(found[1], {})[int(found[2])] = metric
    task = next((task for task, found in lengths.items() if all(v.values(m) for v in variants for m in found.values())), None)
    if task is None:
        axis.set_axis_off()
        return
    for variant, color in zip(variants, colors, strict=True):
        points = [(length, *mean_and_error(variant.values(metric).values())) for length, metric in sorted(lengths[task].items())]
        where, means, errors = zip(*points, strict=True)
        axis.errorbar(where, means, None if None in errors else errors, fmt="o-", ms=3, color=color, capsize=3)
    level = next((run.chance[task] for v in variants for run in v.runs if task in run.chance), None)
    if level is not None:
        axis.axhline(level, color="grey", lw=0.8, ls="--")
    axis.set(title=f"{task} acc by length (dashed: chance)", xlabel="length", xscale="log")
    axis.set_xticks(sorted(lengths[task]), sorted(lengths[task]), fontsize=7)
    axis.minorticks_off()


def _pareto(axis, variants, colors):
    """The best measure of recall there is, against the bytes of state at block_size."""
    measures = ("mqar acc", "needle_multi acc", "needle_single acc", "recall recalled_perplexity")
    measures += ("parity acc", "validation accuracy", "validation bits_per_byte")  # where nothing asks for recall
    metric = next((m for m in measures if all(v.values(m) for v in variants)), None)
    if metric is None:
        axis.set_axis_off()
        return
    points = []
    for variant, color in zip(variants, colors, strict=True):
        model = _skeleton(variant.runs[0].meta["model"])
        mean, error = mean_and_error(variant.values(metric).values())
        points.append((model.state_bytes(1, model.config.block_size), mean, variant.name, color))
        axis.errorbar(*points[-1][:2], yerr=error, fmt="o", color=color, capsize=3)
    axis.set(title=f"{metric} against state", xlabel="bytes of state at block_size", xscale="log")
    axis.margins(0.15)  # for the names
    for name, color, place, side, lines in _names(points):
        offset, to = (5 * side, 4 - 9 * lines), "left" if side > 0 else "right"
        axis.annotate(name, place, xytext=offset, textcoords="offset points", ha=to, fontsize=6, color=color)
    if metric.endswith(LOWER_IS_BETTER):
        axis.invert_yaxis()


def _names(points):
    """(name, color, place, side, lines) of points (state, mean, name, color): where their names go.

    side: 1 right of the point, -1 left of it, whichever runs into the picture; lines: how many lines lower than it stands alone, as
    the names of neighbours stand below each other.
    """
    states, means = [math.log(state) for state, *_ in points], [mean for _, mean, *_ in points]
    wide, high = max(states) - min(states) or 1.0, max(means) - min(means) or 1.0
    placed = []
    for state, mean, name, color in sorted(points, key=lambda point: -point[1]):
        x, y = (math.log(state) - min(states)) / wide, (mean - min(means)) / high
        lines = sum(abs(x - u) < 0.25 and abs(y - v) < 0.06 for u, v in placed)
        placed.append((x, y))
        yield name, color, (state, mean), 1 if x <= 0.5 else -1, lines
