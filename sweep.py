"""Train and score variants of a model: patterns x learning rates x seeds, then write the report that compares them.

    python sweep.py --patterns="gdn; gdn*3 attn; attn" --learning_rates=1e-3,3e-3 --seeds=1,2,3 --sweep_dir=out/ratio
    python sweep.py RECIPE.py --patterns="..." --match=parameters --tasks=heldout_bpb,recall --jobs=4 --batch_size=32

Every setting of train.py is one here, for all runs alike. With several learning rates the first seed tries them all for each
pattern, and the other seeds are trained with the best (--pilot=false: all of them with all). The same command goes on where it was
stopped: what is finished is kept, what was interrupted is resumed.
"""

import functools
import hashlib
import json
import os
import shlex
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

HERE = Path(__file__).resolve().parent
WIDTH_STEP = 8  # the feed-forward width is matched in these


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
    jobs: int = Field(1, ge=1, description="runs at the same time")
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
    values |= {"layers": pattern, "n_ffn": n_ffn, "vocab_size": config.vocab_size or vocab_of(config.dataset)}
    with torch.device("meta"):
        model = Model(ModelConfig(**values))
    return model.flops_per_token(config.block_size) if config.match == "flops" else model.n_params()


@functools.cache
def vocab_of(dataset):
    prepare_builtin(dataset)
    return Dataset.open(dataset).tokenizer.vocab_size


# ----------------------------------------------------------------------------------------------------------------------
# Runs


def folder_name(pattern):
    """A pattern as part of a path; what no path should hold is a dash, and a hash then tells such patterns apart."""
    name = "".join(c if c.isalnum() or c in " *_" else "-" for c in pattern)
    odd = f"-{hashlib.sha256(pattern.encode()).hexdigest()[:4]}" if name != pattern else ""
    return name.replace(" ", "-") + odd


class Job:
    """One run: trained, then scored, each only as far as it has not been yet."""

    def __init__(self, config, flags, pattern, n_ffn, rate, seed):
        self.config, self.pattern, self.rate, self.seed = config, pattern, rate, seed
        name = "".join(c if c.isalnum() or c in "*=," else "-" for c in pattern).strip("-")
        self.folder = Path(config.sweep_dir) / f"{name}_lr{rate:g}_seed{seed}"
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
        step = self._step()
        if step == self.config.max_iters:
            return None
        launch = [sys.executable]
        if self.config.torchrun is not None:
            launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.config.torchrun}"]
        rest = [f"--resume={self.folder}"] if step is not None else [*self.flags, "--overwrite"]
        return [*launch, str(HERE / "train.py"), *rest]

    def eval_command(self):
        """The command that scores it; None if that was done after its last checkpoint, or is not asked for."""
        scored = self.folder / "scored"
        folder, _ = checkpoint.open_checkpoint(self.folder, ("best", "last"))
        self.mark = f"{folder.name} {self.config.tasks} {self.config.eval_flags}"
        if self.config.tasks is None or (scored.is_file() and scored.read_text() == self.mark):
            return None
        device = [f"--device={self.config.device}"] if self.config.device is not None else []
        flags = [*device, *shlex.split(self.config.eval_flags)]
        return [sys.executable, str(HERE / "eval.py"), str(self.folder), f"--tasks={self.config.tasks}", *flags]

    def scored(self):
        (self.folder / "scored").write_text(self.mark)

    def _step(self):
        try:
            return checkpoint.open_checkpoint(self.folder)[1]["step"]
        except ConfigError:
            return None

    def score(self):
        """Best validation bits per byte."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return min(line["val_bits_per_byte"] for line in lines if "val_bits_per_byte" in line)


def run_all(jobs, at_once):
    """Bring all jobs to their end, some at once; returns a line for each that failed. What they print goes to log.txt of each."""
    waiting, running, failed = [(job, "train") for job in jobs], {}, []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job, phase = waiting.pop(0)
                command = job.train_command() if phase == "train" else job.eval_command()
                if command is None:
                    if phase == "train":
                        waiting.insert(0, (job, "eval"))
                    continue
                job.folder.mkdir(parents=True, exist_ok=True)
                log = open(job.folder / "log.txt", "a")
                log.write(f"{shlex.join(command)}\n")
                log.flush()
                print(f"{job.folder.name}: {phase}", flush=True)
                running[subprocess.Popen(command, stdout=log, stderr=log, cwd=Path.cwd())] = (job, phase, log)
            time.sleep(0.1)
            for process in [p for p in running if p.poll() is not None]:
                job, phase, log = running.pop(process)
                log.close()
                if process.returncode:
                    failed.append(f"{job.folder}: {phase} ended with {process.returncode}: {_last_line(job.folder / 'log.txt')}")
                elif phase == "train":
                    waiting.insert(0, (job, "eval"))
                else:
                    job.scored()
    finally:
        for process in running:  # of an interrupted sweep: they save and stop
            process.terminate()
        for process in running:
            process.wait()
    return failed


def _last_line(path):
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    return lines[-1] if lines else "(it printed nothing)"


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
    widths = matched_widths(config, patterns)

    def jobs_of(pattern, some_rates, some_seeds):
        return [Job(config, flags, pattern, widths[pattern], rate, seed) for rate in some_rates for seed in some_seeds]

    print(f"{len(patterns)} patterns, {len(rates)} learning rates, {len(seeds)} seeds in {config.sweep_dir}", flush=True)
    first = seeds[:1] if config.pilot and len(rates) > 1 else seeds
    jobs = [job for pattern in patterns for job in jobs_of(pattern, rates, first)]
    failed = run_all(jobs, config.jobs)
    if not failed:
        best = {pattern: _best_rate([job for job in jobs if job.pattern == pattern]) for pattern in patterns}
        print("\n".join(_rate_table(jobs, rates, patterns)))
        jobs = [job for pattern in patterns for job in jobs_of(pattern, [best[pattern]], seeds)]
        failed = run_all(jobs, config.jobs)
    if failed:
        raise ConfigError(failed)
    compared = [str(job.folder) for job in jobs]
    command = [sys.executable, str(HERE / "eval.py"), "--compare", *compared, f"--out_dir={config.sweep_dir}"]
    device = [f"--device={config.device}"] if config.device is not None else []
    if len(compared) > 1 and subprocess.run([*command, *device], check=False, env=os.environ).returncode:
        raise ConfigError(f"the report failed; again by itself: {shlex.join(command)}")


def _best_rate(jobs):
    """The learning rate with the lowest mean score."""
    rates = dict.fromkeys(job.rate for job in jobs)
    return min(rates, key=lambda rate: sum(job.score() for job in jobs if job.rate == rate))


def _rate_table(jobs, rates, patterns):
    """Validation bits per byte of the pilot, as Markdown."""
    rows = [["bits per byte at learning rate", *(f"{rate:g}" for rate in rates)]]
    for pattern in patterns:
        scores = {rate: [job.score() for job in jobs if (job.pattern, job.rate) == (pattern, rate)] for rate in rates}
        rows.append([pattern, *(f"{sum(s) / len(s):.4f}" for s in scores.values())])
    return table(rows)


def table(rows):
    """Markdown lines of a table, the first row its head."""
    head, *body = [["`" + c + "`" if i and r == 0 else c for i, c in enumerate(row)] for r, row in enumerate(rows)]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]


def _text(value):
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


if __name__ == "__main__":
    configurator.run(main)
