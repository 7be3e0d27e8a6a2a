"""Train and score variants of a model: patterns x learning rates x seeds, then write the report that compares them.

    python sweep.py --patterns="gdn; gdn*3 attn; attn" --learning_rates=1e-3,3e-3 --seeds=1,2,3 --sweep_dir=out/ratio
    python sweep.py RECIPE.py --patterns="..." --match=parameters --tasks=heldout_bpb,recall --jobs=4 --batch_size=32

Every setting of train.py is one here, for all runs alike. With several learning rates the first seed tries them all for each
pattern, and the other seeds are trained with the best (--pilot=false: all of them with all). All patterns take the first seed and
rate before any takes the next. The same command goes on where it was stopped: what is finished is kept, what was interrupted is
resumed. After each run sweep.md has what there is so far. A run that fails is named, and the exit code is 1; others are compared.
"""

import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field

import checkpoint
import configurator
from configurator import ConfigError, ModelConfig, TrainConfig, parse_layers
from data.prepare import prepare_builtin
from data.tokens import Dataset
from model import Model
from preflight import CHANGEABLE

HERE = Path(__file__).resolve().parent
WIDTH_STEP = 8  # the feed-forward width is matched in these
LOGGED = (  # of metrics.jsonl: name, title, which is the best, form
    ("val_bits_per_byte", "bits per byte", min, ".4f"),
    ("val_accuracy", "answers", max, ".2%"),  # of made tasks
)


class SweepConfig(TrainConfig):
    """the sweep"""

    patterns: str = Field(min_length=1, description='layer patterns, separated by ";": "gdn; gdn*3 attn; attn"')
    seeds: str = Field("1,2,3", min_length=1, description="seeds, separated by commas; the first one tries the learning rates")
    learning_rates: str | None = Field(None, min_length=1, description="rates, separated by commas; none: learning_rate alone")
    pilot: bool = Field(True, description="only the first seed tries all rates")
    match: Literal["none", "parameters", "flops"] = Field(
        "none", description="what the feed-forward width is to make equal to the first pattern's"
    )
    tasks: str | None = Field("heldout_bpb", min_length=1, description="what eval.py scores each run on; none: nothing")
    eval_flags: str = Field("", description='further flags of eval.py, such as "--limit=200"')
    jobs: int | None = Field(None, ge=1, description="runs at the same time, spread over the GPUs; none: one a GPU")
    torchrun: int | None = Field(None, ge=1, description="processes of each run, on as many GPUs; none: one, without torchrun")
    sweep_dir: str = Field("out/sweep", min_length=1, description="folder of the runs and the report")

    _own: ClassVar[frozenset] = frozenset(
        ("patterns", "seeds", "learning_rates", "pilot", "match", "tasks", "eval_flags", "jobs", "torchrun", "sweep_dir")
    )
    _set_here: ClassVar[dict[str, str]] = {
        "layers": "patterns", "seed": "seeds", "out_dir": "sweep_dir", "resume": "sweep_dir", "init_from": "sweep_dir",
    }  # fmt: skip

    def conflicts(self):
        yield from super().conflicts()
        for name, kind in (("seeds", int), ("learning_rates", float)):
            try:
                values = numbers(getattr(self, name) or "1", kind)
            except ValueError:
                yield {name}, f"{name}={getattr(self, name)!r}: must be numbers separated by commas"
                continue
            if len(set(values)) < len(values) or not values or min(values) < 0:
                yield {name}, f"{name}={getattr(self, name)!r}: must be different numbers, at least one, none negative"
        if len(set(listed(self.patterns))) < len(listed(self.patterns)):
            yield {"patterns"}, f"patterns={self.patterns!r}: one is given twice"
        for pattern in listed(self.patterns):
            try:
                parse_layers(pattern)
            except ConfigError as error:
                yield {"patterns"}, f"patterns: {error}"


def listed(text, separator=";"):
    return [part.strip() for part in text.split(separator) if part.strip()]


def numbers(text, kind):
    return [kind(part) for part in listed(text, ",")]


# ----------------------------------------------------------------------------------------------------------------------
# Sizes


def matched_widths(config, patterns):
    """{pattern: n_ffn or None} so that all have the parameters, or FLOPs a token, of the first.

    ConfigError where none does, and for a pattern that makes no model: before anything is trained.
    """
    target, widths, problems = None, {}, []
    for pattern in patterns:
        try:
            own = size(config, pattern, config.n_ffn)
        except ConfigError as error:
            problems += [f"patterns: {pattern!r}: {problem}" for problem in error.problems]
            continue
        target, widths[pattern] = target or own, config.n_ffn
        if config.match == "none" or pattern == patterns[0]:
            continue
        if size(config, pattern, WIDTH_STEP) == size(config, pattern, 2 * WIDTH_STEP):
            problems.append(f"match={config.match}: {pattern!r} has no feed-forward layer whose width could be matched")
            continue
        widths[pattern] = _width(config, pattern, target)
        off = size(config, pattern, widths[pattern]) / target - 1
        if abs(off) > 0.02:
            problems.append(f"match={config.match}: {pattern!r} comes no nearer than {off:+.1%} to {patterns[0]!r}")
    if problems:
        raise ConfigError(problems)
    return widths


def _width(config, pattern, target):
    """The feed-forward width, in steps of WIDTH_STEP, that brings a pattern nearest to the size `target`."""
    low, high = WIDTH_STEP, WIDTH_STEP
    while size(config, pattern, high) < target:
        high *= 2
    while high - low > WIDTH_STEP:
        middle = (low + high) // 2 // WIDTH_STEP * WIDTH_STEP
        low, high = (middle, high) if size(config, pattern, middle) < target else (low, middle)
    return min((low, high), key=lambda width: abs(size(config, pattern, width) - target))


def size(config, pattern, n_ffn):
    """Parameters, or with match=flops FLOPs a token, of the model with this pattern and width."""
    values = {name: getattr(config, name) for name in ModelConfig.model_fields}
    values |= {"layers": pattern, "n_ffn": n_ffn, "vocab_size": config.vocab_size or data_of(config.dataset).tokenizer.vocab_size}
    with torch.device("meta"):
        model = Model(ModelConfig(**values))
    return model.flops_per_token(config.block_size) if config.match == "flops" else model.n_params()


@functools.cache
def data_of(dataset):
    prepare_builtin(dataset)
    return Dataset.open(dataset)


# ----------------------------------------------------------------------------------------------------------------------
# Runs


class Job:
    """One run: trained, then scored, each only as far as it has not been yet."""

    def __init__(self, config, flags, pattern, n_ffn, rate, seed):
        self.config, self.pattern, self.n_ffn, self.rate, self.seed = config, pattern, n_ffn, rate, seed
        self.trained, self.read = False, (None, [])
        name = "".join(c if c.isalnum() or c in "*=," else "-" for c in pattern).strip("-")
        self.folder = Path(config.sweep_dir) / f"{name}_lr{rate:g}_seed{seed}"
        self.changed = [flag for flag in flags if flag[2:].partition("=")[0] in CHANGEABLE]  # since it was begun, perhaps
        width = [] if n_ffn is None else [f"--n_ffn={n_ffn}"]
        self.flags = [
            *flags,
            f"--layers={pattern}",
            *width,
            f"--learning_rate={rate}",
            f"--seed={seed}",
            f"--out_dir={self.folder}",
        ]

    def train_command(self):
        """The command that trains it or goes on with it; None if it is done."""
        meta = self.meta()
        if meta is not None:
            self.check(meta)
        self.trained = meta is not None and self.finished(meta)
        if self.trained:
            return None
        launch = [sys.executable]
        if self.config.torchrun is not None:
            launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.config.torchrun}"]
        rest = [f"--resume={self.folder}", *self.changed] if meta is not None else [*self.flags, "--overwrite"]
        return [*launch, str(HERE / "train.py"), *rest]

    def eval_command(self):
        """The command that scores it; None if that was done after its last checkpoint, or is not asked for."""
        scored = self.folder / "scored"
        folder, _ = checkpoint.open_checkpoint(self.folder, ("best", "last"))
        self.mark = f"{folder.name} {checkpoint.weights_sha256(folder)} {self.config.tasks} {self.config.eval_flags}"
        if self.config.tasks is None or (scored.is_file() and scored.read_text() == self.mark):
            return None
        device = [f"--device={self.config.device}"] if self.config.device is not None else []
        flags = [*device, *shlex.split(self.config.eval_flags)]
        return [sys.executable, str(HERE / "eval.py"), str(self.folder), f"--tasks={self.config.tasks}", *flags]

    def scored(self):
        (self.folder / "scored").write_text(self.mark)

    def meta(self):
        """What the last checkpoint says; None if there is none."""
        try:
            return checkpoint.open_checkpoint(self.folder)[1]
        except ConfigError:
            return None

    def check(self, meta):
        """ConfigError if the run in this folder was begun with other settings or data than it would be now."""
        wanted = {name: getattr(self.config, name) for name in TrainConfig.model_fields if name not in CHANGEABLE | {"overwrite"}}
        wanted |= {"layers": self.pattern, "n_ffn": self.n_ffn, "learning_rate": self.rate, "seed": self.seed}
        saved = meta.get("settings", {})  # None: settled when it was begun
        other = [f"{n}={saved[n]}, now {x}" for n, x in wanted.items() if x is not None and saved.get(n, x) != x]
        if "val_sha256" in meta and meta["val_sha256"] != data_of(self.config.dataset).meta.get("val_sha256"):
            other.append(f"dataset={saved.get('dataset')}, now {self.config.dataset}")
        if other:
            raise ConfigError(f"begun with other settings ({'; '.join(other)}): take another sweep_dir, or remove the folder")

    def finished(self, meta):
        """Whether that checkpoint is the end: at max_iters, or validated at a loss of at most stop_loss."""
        low, loss = self.config.stop_loss, meta.get("val_loss")
        reached = low is not None and loss is not None and meta["evaluated"] == meta["step"] and loss <= low
        return reached or meta["step"] == self.config.max_iters

    def logged(self):
        """metrics.jsonl, line by line."""
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return []
        version = (path.stat().st_mtime_ns, path.stat().st_size)
        if self.read[0] != version:
            self.read = version, [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return self.read[1]

    def best(self, name, choose=min):
        """The least (or the most) that was logged under `name`; None if nothing was."""
        return choose((line[name] for line in self.logged() if line.get(name) is not None), default=None)

    def scores(self):
        """{"task metric": value} of eval.py's results: the means over all documents of a task."""
        try:
            folder = checkpoint.resolve(self.folder, ("best", "last"))
        except ConfigError:
            return {}
        by_task = {}
        for task, metrics in ((task, m) for record in records(folder) for task, m in record["results"].items()):
            by_task[task] = {}
            for name, value in metrics.items():
                plain = name.partition(",")[0]
                part = is_part(plain) or plain.endswith(("_stderr", "chance", "byte_perplexity"))
                if "," in name and isinstance(value, int | float) and not part:
                    by_task[task][f"{task} {metric_name(name)}"] = value
        return {name: value for found in by_task.values() for name, value in found.items()}

    def spend(self, seconds):
        """Add to the seconds of training, which are kept beside the run; returns them."""
        kept = self.folder / "seconds"
        total = seconds + (float(kept.read_text()) if kept.is_file() and self.logged() else 0)
        if seconds:
            kept.write_text(f"{total:.1f}")
        return total


def records(folder):
    """What eval.py wrote of the weights in `folder`; what counts more is later: whole tasks, and of them the newest."""
    found, left = [], []
    for file in folder.parent.glob(f"eval-*-{folder.name}.json"):
        record = json.loads(file.read_text())
        if record.get("weights_sha256") == checkpoint.weights_sha256(folder):
            found.append((record["conditions"]["limit"] is None, file.stat().st_mtime, record))
        else:
            left.append(file.name)
    if left:
        warn_once(f"{', '.join(left)} in {folder.parent} are of weights that {folder.name} no longer holds: left out")
    return [record for *_, record in sorted(found, key=lambda entry: entry[:2])]


@functools.cache
def warn_once(line):
    print(f"warning: {line}", file=sys.stderr)


def metric_name(name):
    """A score of lm-eval, "acc,none" or "exact_match,strict-match", as tables name it: with the filter of the answers, if any."""
    metric, _, answers = name.partition(",")
    return metric if answers in ("", "none") else f"{metric} ({answers})"


def is_part(metric):
    """Whether a metric is that of one length or depth alone."""
    return re.search(r"acc_(depth_)?\d+$", metric) is not None


def visible_gpus(config):
    """The GPUs that jobs are spread over, as CUDA_VISIBLE_DEVICES names them; none where all jobs take the same device."""
    if config.torchrun is not None or config.device not in (None, "cuda"):
        return []
    n, given = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(n)] if given is None else listed(given, ",")[:n]
    return names if len(names) > 1 else []


def run_all(jobs, at_once, gpus=(), after=lambda: None):
    """Bring all jobs to their end, some at once, each on the GPU with the fewest; {job: why} of those that failed.

    What they print goes to log.txt of each. `after()` is called when something has ended.
    """
    waiting, running, failed = [(job, "train") for job in jobs], {}, {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job, phase = waiting.pop(0)
                try:
                    command = job.train_command() if phase == "train" else job.eval_command()
                except ConfigError as error:
                    failed[job] = f"{job.folder}: {phase}: {error}"
                    continue
                if command is None:
                    if phase == "train":
                        waiting.insert(0, (job, "eval"))
                    continue
                job.folder.mkdir(parents=True, exist_ok=True)
                log = open(job.folder / "log.txt", "a")
                log.write(f"{shlex.join(command)}\n")
                log.flush()
                taken = [gpu for *_, gpu in running.values()]
                gpu = min(gpus, key=taken.count, default=None)
                print(f"{job.folder.name}: {phase}{'' if gpu is None else f' on GPU {gpu}'}", flush=True)
                env = {**os.environ, **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}
                process = subprocess.Popen(command, stdout=log, stderr=log, cwd=Path.cwd(), env=env)
                running[process] = (job, phase, log, time.monotonic(), gpu)
            time.sleep(0.1)
            for process in [p for p in running if p.poll() is not None]:
                job, phase, log, began, _ = running.pop(process)
                log.close()
                if phase == "train":
                    job.spend(time.monotonic() - began)
                if process.returncode:
                    why = _reason(job.folder / "log.txt", shlex.join(process.args))
                    failed[job] = f"{job.folder}: {phase} ended with {process.returncode}: {why}"
                    print(failed[job], flush=True)
                elif phase == "train":
                    job.trained = True
                    waiting.insert(0, (job, "eval"))
                else:
                    job.scored()
                after()
    finally:
        for process in running:  # of an interrupted sweep: they save and stop
            process.terminate()
        for process, (job, phase, _, began, _) in running.items():
            process.wait()
            if phase == "train":
                job.spend(time.monotonic() - began)
        if running:
            after()
    return failed


def _reason(path, command):
    """Why a command failed, of what it logged: its last error, beneath which torchrun puts a summary, or else its last line."""
    output = path.read_text(errors="replace").rpartition(command)[2]
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error: |(?!.*ChildFailed)[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (errors or lines or ["(it printed nothing)"])[-1]


# ----------------------------------------------------------------------------------------------------------------------
# The command


def main(argv):
    resolved = configurator.load(SweepConfig, argv, prog="sweep.py", description=__doc__.splitlines()[0])
    config = resolved.config
    given = [name for name, source in resolved.sources.items() if source != "default"]
    misplaced = [f"{name} is set by the sweep: use --{config._set_here[name]}" for name in given if name in config._set_here]
    if misplaced:
        raise ConfigError(misplaced)
    skipped = config._own | {"learning_rate", "n_ffn", "overwrite"}
    flags = [f"--{name}={_text(getattr(config, name))}" for name in given if name not in skipped]
    patterns, seeds = listed(config.patterns), numbers(config.seeds, int)
    rates = numbers(config.learning_rates, float) if config.learning_rates else [config.learning_rate]
    widths, gpus = matched_widths(config, patterns), visible_gpus(config)
    at_once = config.jobs or max(1, len(gpus))
    begun = {}  # {(pattern, rate, seed): job} in the order in which they came up

    def bring(pattern_rates, some_seeds):
        """Run these patterns and rates with these seeds; returns (jobs that are done, {job: why} of the others)."""
        jobs = []
        for pattern, rate in pattern_rates:
            for seed in some_seeds:
                job = begun.get((pattern, rate, seed)) or Job(config, flags, pattern, widths[pattern], rate, seed)
                jobs.append(begun.setdefault((pattern, rate, seed), job))
        order = sorted(jobs, key=lambda job: (seeds.index(job.seed), rates.index(job.rate)))  # what is cut off lacks no pattern
        failed = run_all([job for job in order if job not in lost], at_once, gpus, after)
        return [job for job in jobs if job not in failed and job not in lost], failed

    def after():
        Path(config.sweep_dir).mkdir(parents=True, exist_ok=True)
        text = summary(list(begun.values()), patterns, rates, lost)
        beside = Path(config.sweep_dir) / ".sweep.md"
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, beside.with_name("sweep.md"))

    lost = {}  # {job: why} of the jobs that failed
    several = f" on {len(gpus)} GPUs" if gpus else ""
    print(f"{len(patterns)} patterns, {len(rates)} learning rates, {len(seeds)} seeds in {config.sweep_dir}{several}", flush=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the runs are told to stop, too
    try:
        pilot = seeds[:1] if config.pilot and len(rates) > 1 else seeds
        done, failed = bring([(pattern, rate) for pattern in patterns for rate in rates], pilot)
        lost |= failed
        best = {pattern: _best_rate([job for job in done if job.pattern == pattern]) for pattern in patterns}
        done, failed = bring([(pattern, rate) for pattern, rate in best.items() if rate is not None], seeds)
        lost |= failed
    finally:
        signal.signal(signal.SIGTERM, before)
    after()
    print((Path(config.sweep_dir) / "sweep.md").read_text(encoding="utf-8"), flush=True)
    compared = [str(job.folder) for job in done]
    command = [sys.executable, str(HERE / "eval.py"), "--compare", *compared, f"--out_dir={config.sweep_dir}"]
    device = [f"--device={config.device}"] if config.device is not None else []
    if len(compared) > 1 and subprocess.run([*command, *device], check=False, env=os.environ).returncode:
        raise ConfigError(f"the report failed; again by itself: {shlex.join(command)}")
    if lost:
        print("\n".join(f"failed: {why}" for why in lost.values()), file=sys.stderr, flush=True)
        sys.exit(1)


def _best_rate(jobs):
    """The learning rate with the lowest mean of the best validation bits per byte; None if no job is done."""
    scores = {}
    for job in jobs:
        scores.setdefault(job.rate, []).append(job.best("val_bits_per_byte"))
    scores = {rate: sum(s) / len(s) for rate, s in scores.items() if None not in s}
    return min(scores, key=scores.get, default=None)


def summary(jobs, patterns, rates, lost):
    """What there is of a sweep so far, as Markdown: the patterns at each rate, and every run."""
    lines = ["# Sweep", ""]
    logged = [entry for entry in LOGGED if any(job.best(entry[0]) is not None for job in jobs)]
    scores = {job: job.scores() for job in jobs}
    tasks = list(dict.fromkeys(name for found in scores.values() for name in found))
    for entry in logged:
        lines += [*_rate_table(jobs, patterns, rates, *entry), ""]
    rows = [["pattern", "rate", "seed", "steps", "loss", *(title for _, title, *_ in logged), *tasks, "seconds"]]
    for job in jobs:
        steps = job.best("step", max)
        if steps is None and job not in lost:
            continue
        part = "" if job.trained else f" of {job.config.max_iters}"
        state = " (failed)" if job in lost else ""
        figures = [_cell(job.best("val_loss"), ".4f"), *(_cell(job.best(name, choose), form) for name, _, choose, form in logged)]
        figures += [_cell(scores[job].get(task), ".4g") for task in tasks] + [f"{job.spend(0):.0f}"]
        rows.append([f"`{job.pattern}`", f"{job.rate:g}", str(job.seed), f"{steps or 0}{part}{state}", *figures])
    lines += [*table(rows, names=False), ""]
    return "\n".join([*lines, *(f"- failed: {why}" for why in lost.values())]).rstrip() + "\n"


def _rate_table(jobs, patterns, rates, name, title, choose, form):
    """Means over the seeds of the best of what was logged under `name`, at each learning rate."""
    rows = [[f"{title} at learning rate", *(f"{rate:g}" for rate in rates)]]
    for pattern in patterns:
        cells = []
        for rate in rates:
            found = [job.best(name, choose) for job in jobs if (job.pattern, job.rate) == (pattern, rate)]
            found = [value for value in found if value is not None]
            cells.append(_cell(sum(found) / len(found) if found else None, form))
        rows.append([pattern, *cells])
    return table(rows)


def _cell(value, form):
    return "" if value is None else f"{value:{form}}"


def table(rows, names=True):
    """Markdown lines of a table, the first row its head; whose cells are names, of variants say."""
    head, *body = [["`" + c + "`" if names and i and r == 0 else c for i, c in enumerate(row)] for r, row in enumerate(rows)]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]


def _text(value):
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


if __name__ == "__main__":
    configurator.run(main)
