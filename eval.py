"""Score a checkpoint with the LM Evaluation Harness: `python eval.py RUN [--tasks=NAME,NAME] [--limit=N]`.

    python eval.py out/demo                              # heldout_bpb: bits per byte of the held-out split, needs no network
    python eval.py out/demo --tasks=mqar,needle_single   # more that need none: copying, parity, modular, needle_multi, recall
    python eval.py out/demo --tasks=arc_easy,piqa        # any task of lm-eval; it downloads its data
    torchrun --nproc_per_node=8 eval.py out/demo --tasks=hellaswag --batch_size=auto
    python eval.py --compare out/a out/b out/c           # a report of runs that were trained and scored

The figures are lm-eval's own; the model it sees is `HybridLM` in harness.py.
"""

import contextlib
import difflib
import hashlib
import json
import logging
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import ClassVar, Literal

import lm_eval
import numpy as np
import torch
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table, simple_parse_args_string
from pydantic import Field

import checkpoint
import configurator
from configurator import ConfigError, Settings
from harness import TASKS, HybridLM
from sweep import metric_name


class EvalConfig(Settings):
    """evaluation"""

    tasks: str = Field("heldout_bpb", min_length=1, description="names of tasks, groups, tags or patterns, separated by commas")
    include_path: str | None = Field(None, min_length=1, description="folder with further tasks (YAML files), such as local data")
    limit: float | None = Field(None, gt=0, description="only so many documents of each task, or below 1 a share of them")
    num_fewshot: int | None = Field(None, ge=0, description="examples in each prompt; none: what the task says")
    batch_size: int | Literal["auto"] = Field(16, description="sequences at once; auto: as many as memory holds")
    max_batch_size: int | None = Field(None, ge=1, description="most sequences that auto takes")
    max_length: int | None = Field(None, ge=1, description="longest window in tokens; none: the block_size of training")
    add_bos_token: bool | None = Field(None, description="begin contexts with the separator; none: as documents in training did")
    gen_kwargs: str | None = Field(None, min_length=1, description="of generation, such as temperature=0.8,max_gen_toks=64")
    log_samples: bool = Field(False, description="write every document, answer and score beside the results")
    seed: int = Field(1234, ge=0, le=2**32 - 1, description="seed of few-shot choice and sampled generation")
    device: str | None = Field(None, min_length=1, description="cpu, cuda, cuda:1, mps; none: the best there is")
    dtype: Literal["float32", "bfloat16"] | None = Field(None, description="compute type; none: bfloat16 on CUDA, else float32")
    wandb_log: bool = Field(False, description="log a table of the scores to Weights & Biases, into the run's own page")
    wandb_project: str = Field("hybrid-llm", min_length=1, description="W&B project")
    compare: bool = Field(False, description="write a report of the runs given, from what was logged and scored")
    speed: bool = Field(False, description="measure the time to the first token and a token for the report")
    out_dir: str = Field("out/report", min_length=1, description="folder of that report")

    _positional: ClassVar[str | None] = "RUN"
    _needs: ClassVar[dict[str, tuple[str, object]]] = {
        "wandb_project": ("wandb_log", True),
        "max_batch_size": ("batch_size", "auto"),
        "out_dir": ("compare", True),
        "speed": ("compare", True),
        "tasks": ("compare", False),
        "include_path": ("compare", False),
        "limit": ("compare", False),
        "num_fewshot": ("compare", False),
        "gen_kwargs": ("compare", False),
        "log_samples": ("compare", False),
        "wandb_log": ("compare", False),
        "seed": ("compare", False),
        "batch_size": ("compare", False),
        "max_length": ("compare", False),
        "add_bos_token": ("compare", False),
    }
    _instead: ClassVar[dict[str, str]] = {
        name: "the run to score stands by itself: python eval.py out/demo"
        for name in ("out_dir", "init_from", "pretrained", "model_args")
    }

    def conflicts(self):
        own = {path.stem for path in TASKS.glob("*.yaml")}
        for name in ("num_fewshot", "gen_kwargs"):
            value = getattr(self, name)
            if value and {task.strip() for task in self.tasks.split(",")} <= own:
                yield {name, "tasks"}, f"{name}={value} has no effect on {self.tasks}, whose prompts are fixed: drop it"
        if self.limit is not None and self.limit > 1 and not self.limit.is_integer():
            below = int(self.limit)
            problem = f"limit={self.limit}: a number of documents ({below} or {below + 1}), or a share below 1"
            yield {"limit"}, problem
        if self.batch_size != "auto" and self.batch_size < 1:
            yield {"batch_size"}, f"batch_size={self.batch_size}: must be at least 1, or auto"


# ----------------------------------------------------------------------------------------------------------------------
# Tasks


def find_tasks(text, folder, include_path=None):
    """(TaskManager, names) of the tasks `text` lists; ConfigError names what is unknown, with the nearest that exist.

    The tasks in tasks/ and in `include_path` need no search; lm-eval's own index takes some ten seconds, and is read only if asked
    for.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise ConfigError(f"include_path={include_path!r}: no such folder")
    paths = [str(TASKS)] if include_path is None else [str(TASKS), include_path]
    wanted = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    metadata = {"pretrained": str(folder)}  # lm-eval hands it to functions that make a data set: they find the run by it
    manager = own = TaskManager(include_path=paths, include_defaults=False, metadata=metadata)
    if not all(own.match_tasks([name]) for name in wanted):
        manager = TaskManager(include_path=paths, metadata=metadata)
    unknown = [name for name in wanted if not manager.match_tasks([name])]
    if unknown or not wanted:
        known = f"this repository has {', '.join(own.all_tasks)}, lm-eval {len(manager.all_tasks) - len(own.all_tasks):,} more"
        raise ConfigError([f"unknown task {name!r}: {known}{nearest(name, manager.all_tasks)}" for name in unknown or [text]])
    return manager, manager.match_tasks(wanted)


def nearest(name, known):
    close = difflib.get_close_matches(name, known, n=3)
    return f"; nearest: {', '.join(close)}" if close else ""


@contextlib.contextmanager
def preserved_generators():
    """Give the random generators of Python, NumPy and torch back as they were: lm-eval reseeds all of them."""
    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)


def quiet():
    """Only warnings of lm-eval, and none about how a task is written: its author has seen those."""
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    for name in ("lm_eval.api.task", "lm_eval.evaluator", "lm_eval.evaluator_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)


def evaluate(lm, manager, names, config):
    """lm-eval's results of `names`, with its samples, the same on all processes; no generator is changed.

    ConfigError where a task's data cannot be had.
    """
    limit = int(config.limit) if config.limit is not None and config.limit >= 1 else config.limit
    gen_kwargs = simple_parse_args_string(config.gen_kwargs) if config.gen_kwargs else None
    try:
        with preserved_generators():
            return lm_eval.simple_evaluate(
                model=lm, tasks=names, task_manager=manager, num_fewshot=config.num_fewshot, limit=limit, gen_kwargs=gen_kwargs,
                batch_size=lm.batch_size, device=str(lm.device), log_samples=True, random_seed=config.seed,
                numpy_random_seed=config.seed, torch_random_seed=config.seed, fewshot_random_seed=config.seed,
                bootstrap_iters=100_000 if lm.process == 0 else 0,
            )  # fmt: skip
    except OSError as e:  # Hugging Face's errors of network and missing data sets are all OSErrors
        reason = (str(e) or type(e).__name__).splitlines()[0]
        own = TaskManager(include_path=str(TASKS), include_defaults=False).all_tasks
        hint = f"lm-eval downloads it at first use, only those of this repository need no network: {', '.join(own)}"
        raise ConfigError(f"tasks {', '.join(names)}: their data could not be loaded ({reason}); {hint}") from e


# ----------------------------------------------------------------------------------------------------------------------
# Results


def without_effect(config, results):
    """A line for each setting that some tasks have left aside, without a word of lm-eval's."""
    fixed = [f"{task} ({n})" for task, n in results["n-shot"].items() if config.num_fewshot not in (None, n)]
    if fixed:
        yield f"num_fewshot={config.num_fewshot} has no effect on tasks that say themselves: {', '.join(fixed)}"
    kinds = {task: results["configs"][task].get("output_type") for task in results["samples"]}
    if config.gen_kwargs and "generate_until" not in kinds.values():
        yield f"gen_kwargs={config.gen_kwargs} has no effect: none of {', '.join(kinds)} lets the model write"


def chance_levels(results):
    """{task: what guessing scores}: as the documents of our tasks say, elsewhere one of the choices of multiple choice."""
    levels = {}
    for task, samples in results["samples"].items():
        if samples and "chance" in samples[0]["doc"]:
            levels[task] = statistics.fmean(sample["doc"]["chance"] for sample in samples)
        elif samples and results["configs"][task].get("output_type") == "multiple_choice":
            levels[task] = statistics.fmean(1 / len(sample["arguments"]) for sample in samples)
    return levels


def conditions(lm, config, results):
    """What must be equal for scores to be comparable: policy, settings, versions, and the documents with their prompts."""
    settings = {name: getattr(config, name) for name in ("limit", "gen_kwargs", "seed")}
    per_token = {task: lm.meta["tokenizer_hash"] for task in results["samples"] if task == "recall"}  # not per byte
    return {
        **lm.policy, **settings, "tokenizer": per_token, "n-shot": results["n-shot"], "versions": results["versions"],
        "lm_eval": results["lm_eval_version"],
        "documents": {task: documents_hash(samples) for task, samples in results["samples"].items()},
    }  # fmt: skip


def documents_hash(samples):
    """sha256 (hex) of a task's documents, prompts and targets, in their order."""
    ordered = sorted(samples, key=lambda sample: (sample["doc_id"], sample["filter"]))
    parts = [sample[name] for sample in ordered for name in ("doc_hash", "prompt_hash", "target_hash")]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def write_results(lm, names, config, results, seconds):
    """Write `eval-<tasks>-<checkpoint>.json` into the run folder, whole or not at all; returns its path."""
    folder = Path(lm.meta["folder"])
    listed = "+".join(names)
    if len(names) > 4:
        listed = f"{names[0]}+{len(names) - 1}more-{hashlib.sha256(listed.encode()).hexdigest()[:6]}"
    partial = "" if config.limit is None else f"-limit{config.limit:g}"  # a quick look must not replace a result
    shots = "" if config.num_fewshot is None else f"-{config.num_fewshot}shot"
    longest = "" if config.max_length is None else f"-{config.max_length}tokens"
    longest += "" if config.add_bos_token is None else f"-bos_{config.add_bos_token}".lower()
    path = folder.parent / f"eval-{listed}{shots}{partial}{longest}-{folder.name}.json"
    kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better", "lm_eval_version")
    record = {**config.model_dump(), **lm.get_model_info(), "tasks": names, "seconds": round(seconds, 2),
              "chance": chance_levels(results), "conditions": conditions(lm, config, results),
              **{name: results[name] for name in kept if name in results}}  # fmt: skip
    _write(path, json.dumps(record, indent=1, default=str) + "\n")
    if config.log_samples:
        samples = ({"task": task, **sample} for task, of_task in results["samples"].items() for sample in of_task)
        _write(path.with_suffix(".samples.jsonl"), "".join(json.dumps(sample, default=str) + "\n" for sample in samples))
    return path


def _write(path, text):
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        os.replace(beside, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise ConfigError(f"the scores could not be written to {path} ({e.strerror})") from e


def log_to_wandb(lm, config, results):
    """A table of the scores on the run's page, or a page of its own; whatever W&B raises is a warning."""
    try:
        import wandb  # takes over a second: only where it is asked for

        known = "WANDB_API_KEY" in os.environ or "WANDB_MODE" in os.environ or (Path.home() / ".netrc").is_file()
        mode = None if known else "offline"
        folder, run_id = Path(lm.meta["folder"]), lm.meta.get("wandb_id")
        page = wandb.init(project=config.wandb_project, dir=str(folder.parent), id=run_id, resume="allow", mode=mode)
        rows = [
            [task, metric_name(name), value, str(scores.get(name.replace(",", "_stderr,", 1), ""))]
            for task, scores in results["results"].items()
            for name, value in scores.items()
            if isinstance(value, float) and "_stderr" not in name
        ]
        page.log({f"eval/{folder.name}": wandb.Table(columns=["task", "metric", "value", "stderr"], data=rows)})
        page.log({f"eval/{task}/{metric}": value for task, metric, value, _ in rows})
        page.finish()
    except Exception as e:
        print(f"warning: the scores were not logged to W&B ({type(e).__name__}: {e})", file=sys.stderr)


def main(argv):
    resolved = configurator.load(EvalConfig, argv, prog="eval.py", description=__doc__.splitlines()[0])
    config, runs = resolved.config, resolved.positional
    if config.compare:
        import report  # plots: needed here alone

        return report.main(runs, config)
    if len(runs) != 1:
        raise ConfigError(f"one run or checkpoint folder is needed, got {len(runs)}: python eval.py out/demo (several: --compare)")
    quiet()
    folder, _ = checkpoint.open_checkpoint(runs[0], ("best", "last"))
    manager, names = find_tasks(config.tasks, folder, config.include_path)
    batch = {"batch_size": config.batch_size, "max_batch_size": config.max_batch_size}
    window = {"max_length": config.max_length, "add_bos_token": config.add_bos_token}
    lm = HybridLM(folder, **batch, **window, device=config.device, dtype=config.dtype)
    bos = "each context begins with the separator" if lm.policy["bos"] else "only an empty context begins with the separator"
    if lm.process == 0:
        print(f"{folder}: {lm.model.config.layers}, {lm.model.n_params():,} parameters, on {lm.device}, {lm.dtype}")
        print(f"windows of at most {lm.max_length} tokens, cut on the left; {bos}", flush=True)
    began = time.perf_counter()
    results = evaluate(lm, manager, names, config)
    seconds = time.perf_counter() - began
    if lm.process != 0:  # it has the same results
        return
    for line in without_effect(config, results):
        print(f"warning: {line}", file=sys.stderr)
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    for task, level in chance_levels(results).items():
        print(f"{task}: chance is {level:.4g}")
    print(f"{seconds:.1f} s; written to {write_results(lm, names, config, results, seconds)}")
    if config.wandb_log:
        log_to_wandb(lm, config, results)


if __name__ == "__main__":
    configurator.run(main)
