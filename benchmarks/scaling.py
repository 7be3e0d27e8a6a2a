"""`torchrun --nproc_per_node=N bench.py train`: train.py's own steps on N processes, beside the same on one.

What is timed is all that a step of a run does: micro-batches from the loader's thread, forward and backward as DDP, FSDP2 or shared
rows have it, labels counted over the ranks, clipping, AdamW. The tokens are synthetic, frequencies after Zipf, without documents.
They are the same samples at any number of processes, so that the losses of the first steps are to be the same too.
"""

import contextlib
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import distributed
import preflight
import train
from benchmarks.measure import print_table, report, timed
from configurator import ConfigError
from data.tokenizer import Tokenizer
from data.tokens import write_tokens
from model import format_bytes

RATE = 1e-4  # at train.py's 2e-3 a rounding error grows: two GPUs were 4e-2 nats from one after 20 steps, 2e-3 after 5
PIECE = 5  # steps timed as one: within them the host runs ahead of the GPU, as it does in a run


@contextlib.contextmanager
def processes():
    """The ranks of torchrun; the first one speaks for all."""
    ranks = distributed.Ranks()
    if ranks.rank:
        sys.stdout = open(os.devnull, "w")
    try:
        yield ranks
    except ConfigError:
        if ranks.rank:  # rank 0 has the same problems
            sys.exit(2)
        raise
    ranks.leave()


def single_rows(path):
    """{what was measured: row} of the JSON that one process wrote; ConfigError where it did not."""
    if path is None:
        return {}
    try:
        rows = json.loads(Path(path).read_text())["rows"]
        alone = {_key(row): row for row in rows if row["processes"] == 1}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(
            f"single={path} is not what `torchrun --nproc_per_node=1 bench.py train` writes ({type(e).__name__}: {e})"
        ) from e
    if not alone:
        raise ConfigError(f"single={path} holds {rows[0]['processes'] if rows else 'no'} processes: it must be a run of one")
    return alone


def _key(row):
    return row["model"], row["T"]


def write_tokens_of(folder, n, longest):
    """A data set of n training tokens, rows of `longest` tokens to cut from it."""
    tokenizer, rng = Tokenizer.from_bytes(), np.random.default_rng(0)
    tokenizer.save(folder / "tokenizer.json")
    header = {"separator": "before", "eot": tokenizer.eot, "vocab_size": tokenizer.vocab_size, "tokenizer_hash": tokenizer.hash}
    for split, count in (("train", max(n, 4 * longest)), ("val", 2 * longest)):
        write_tokens(folder / f"{split}.bin", [np.minimum(rng.zipf(1.3, count), 63)], **header)


def scaling(config, ranks, jobs):
    """Measure `jobs`, each (model, T, rows of a micro-batch, arguments of train.py); the report, on rank 0."""
    alone = ranks.first(single_rows, config.single)
    steps = config.losses + 1 + config.steps
    micro = config.gradient_accumulation_steps or max(1, ranks.world // config.context_parallel)
    longest, tokens = max(T for _, T, _, _ in jobs), max(steps * micro * batch * T for _, T, batch, _ in jobs)
    folder = Path(ranks.first(tempfile.mkdtemp, "-scaling"))
    settings = {name: getattr(config, name) for name in ("seed", "context_parallel", "activation_checkpointing")}
    settings |= {name: value for name in ("parallel", "device") if (value := getattr(config, name)) is not None}
    settings |= {"dataset": folder, "out_dir": folder / "run", "overwrite": True, "gradient_accumulation_steps": micro}
    settings |= {"max_iters": steps, "learning_rate": RATE, "warmup_iters": 10, "lr_decay_iters": max(10, steps)}
    flags, rows, content = [f"--{name}={value}" for name, value in settings.items()], [], None
    try:
        ranks.first(write_tokens_of, folder, min(tokens, 2**23), longest)
        for item, T, batch, argv in jobs:
            row = {"model": item, "T": T, "batch_size": batch} | measure([*argv, *flags], config, ranks)
            rows.append(row | beside(row, alone.get(_key(row))))
            gc.collect()  # a model's modules and hooks hold each other
            torch.compiler.reset()
            if ranks.rank == 0:  # written as it grows: a later model may not fit
                print_table(HEAD, [_cells(r) for r in rows])
                content = report(config, f"train-{ranks.world}", torch.device(row["device"]), rows)
        ranks.sum(0)  # until all have read what is removed now
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return content


def measure(argv, config, ranks):
    """One model: losses of the first steps, norm of the first gradient, median time of a step over pieces of `PIECE`, memory."""
    began = time.perf_counter()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        plan = preflight.plan(argv, ranks, "")
        trainer = train.Trainer(plan, argv, ranks)
    device, losses, on_gpu = plan.device, [], plan.device.type == "cuda"
    trainer.signals.restore()  # one ends this at once
    trainer.model.train()
    norm = trainer.do_step()["grad_norm"].item()
    losses.append(loss_of(trainer))
    first = time.perf_counter() - began
    for _ in range(config.losses):
        trainer.do_step()
        losses.append(loss_of(trainer))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    pieces = [min(PIECE, config.steps - done) for done in range(0, config.steps, PIECE)]
    seconds = statistics.median(timed(lambda n=n: [trainer.do_step() for _ in range(n)], device) / n for n in pieces)
    trainer.stop_if(trainer.finite.settle())
    memory = [torch.cuda.max_memory_allocated(device) if on_gpu else None] * ranks.world
    if ranks.world > 1:
        dist.all_gather_object(memory, memory[0])
    rate, settings = plan.tokens_per_step / seconds, plan.config
    row = {
        "processes": ranks.world,
        "parallel": (settings.parallel or "ddp") if ranks.world > 1 else None,
        "context_parallel": settings.context_parallel,
        "compile": settings.compile,
        "device": str(device),
        "parameters": trainer.model.n_params(),
        "tokens_per_step": plan.tokens_per_step,
        "first_step_s": first,
        "ms": 1e3 * seconds,
        "tokens_per_s": rate,
        "tokens_per_s_per_process": rate / ranks.world,
        "mfu": None if trainer.peak is None else rate * trainer.flops / (trainer.peak * ranks.world),
        "peak_bytes": memory,
        "losses": losses,
        "gradient_norm": norm,
    }
    trainer.close()
    return row


def loss_of(trainer):
    """The loss of the steps since the last call, over all ranks."""
    loss, _ = trainer.tally.read(trainer.ranks)
    trainer.tally.sums.zero_()
    return loss


def beside(row, single):
    """Scaling efficiency, and how far the losses of the first steps are from one process's if its steps are as large.

    AdamW hides a gradient of the wrong size from the losses: its norm in the first step, where the weights are the same, does not.
    """
    if single is None:
        return {}
    facts = {"efficiency": row["tokens_per_s"] / (row["processes"] * single["tokens_per_s"])}
    if single["tokens_per_step"] == row["tokens_per_step"]:
        pairs = zip(row["losses"], single["losses"], strict=False)
        facts["loss_difference"] = max(abs(a - b) for a, b in pairs)
        if "gradient_norm" in single:  # an older file has none
            facts["gradient_difference"] = abs(row["gradient_norm"] / single["gradient_norm"] - 1)
    return facts


HEAD = ["model", "T", "processes", "tokens/step", "ms", "tokens/s", "per process", "MFU", "memory", "first step, s", "loss",
        "efficiency", "loss differs", "first gradient"]  # fmt: skip


def _cells(row):
    how = row["parallel"] or ""
    how += f", {row['context_parallel']} share rows" if row["context_parallel"] > 1 else ""
    cells = [row["model"], row["T"], f"{row['processes']}{' ' * bool(how)}{how}", f"{row['tokens_per_step']:,}"]
    cells += [f"{row['ms']:.1f}", f"{row['tokens_per_s']:,.0f}", f"{row['tokens_per_s_per_process']:,.0f}"]
    cells.append("" if row["mfu"] is None else f"{row['mfu']:.1%}")
    cells.append("" if row["peak_bytes"][0] is None else format_bytes(max(row["peak_bytes"])))
    cells += [f"{row['first_step_s']:.1f}", f"{row['losses'][-1]:.4f}"]
    cells.append(f"{row['efficiency']:.1%}" if "efficiency" in row else "")
    return cells + [f"{row[name]:.1e}" if name in row else "" for name in ("loss_difference", "gradient_difference")]
