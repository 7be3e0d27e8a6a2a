"""Train a model: `python train.py [recipe.py ...] [--setting=value ...]`, continue a run: `python train.py --resume=RUN`.

python train.py                                                        # a small hybrid on sotu, on whatever device there is
python train.py configurator/recipes/demo.py --layers="gdn attn" --learning_rate=1e-3
python train.py --resume=out/demo --max_iters=2000                     # goes on exactly where it stopped
torchrun --nproc_per_node=4 train.py --gradient_accumulation_steps=8   # the same run on four GPUs
"""

import contextlib
import functools
import hashlib
import math
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.checkpoint import checkpoint as recompute

import checkpoint
import configurator
import data.loader as loading
import distributed
import kernels
import monitor
import preflight
import swap
from configurator import ConfigError
from context import Context
from model import Model, SparseAttention, format_bytes
from optim import Finite, LossScale, Optimizers, learning_rate

MOST_SKIPS = 10  # steps in a row that non_finite=skip skips before it stops


# ----------------------------------------------------------------------------------------------------------------------
# What a step needs


class Feed:
    """The micro-batches of each step, made a step ahead by a thread; pinned for a GPU, and copied there without waiting.

    Micro-batch i of a step is that of rank i % world (`context_parallel` neighbours count as one): which samples a step takes
    depends neither on the number of ranks nor on anything before it. `seed_of` makes a micro-batch's random draws (dropout) as
    independent of those as its samples are.
    """

    def __init__(self, loader, config, ranks, device, step):
        self.loader, self.rows, self.device, self.step = loader, config.batch_size, device, step
        self.per_step = config.gradient_accumulation_steps * self.rows
        share = config.context_parallel  # ranks that take the same rows
        self.mine = range(ranks.rank // share, config.gradient_accumulation_steps, ranks.world // share)
        self.pool = ThreadPoolExecutor(1, "feed")
        self.ahead = self.pool.submit(self._make, step)

    def samples(self, step):
        """First sample of each of this rank's micro-batches of a step."""
        return [step * self.per_step + i * self.rows for i in self.mine]

    def _make(self, step):
        batches = [self.loader.batch(first, self.rows) for first in self.samples(step)]
        labels = sum(int((batch.labels >= 0).sum()) for batch in batches)
        if self.device.type == "cuda":
            batches = [loading.Batch(*(None if x is None else x.pin_memory() for x in batch)) for batch in batches]
        return batches, labels

    def next(self):
        """(micro-batches on the device, their number of labels, seconds waited)."""
        began = time.perf_counter()
        batches, labels = self.ahead.result()
        waited = time.perf_counter() - began
        self.step += 1
        self.loader.sample = self.step * self.per_step
        self.ahead = self.pool.submit(self._make, self.step)
        return [move(batch, self.device) for batch in batches], labels, waited

    def hash(self, step):
        """What to look for in the data if this step went wrong: the hash of this rank's tokens."""
        digest = hashlib.sha256()
        for first in self.samples(step):
            digest.update(self.loader.batch(first, self.rows).tokens.numpy().tobytes())
        return digest.hexdigest()[:16]

    def close(self):
        self.pool.shutdown(wait=True, cancel_futures=True)


def move(batch, device):
    return loading.Batch(*(None if x is None else x.to(device, non_blocking=True) for x in batch))


def seed_of(seed, sample, part=0):
    """A seed for the random draws of the micro-batch whose first sample is `sample`; `part`: which of a shared row's parts."""
    return int.from_bytes(hashlib.blake2b(f"draws {seed} {sample} {part}".encode(), digest_size=7).digest(), "little")


class Tally:
    """Sums over labels: NLL of all valid ones (the loss), and NLL and bytes of those that are text (bits per byte)."""

    def __init__(self, tokenizer, device):
        self.bytes_of = torch.from_numpy(tokenizer.token_bytes()).to(device)
        wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self.eot, self.sums = tokenizer.eot, torch.zeros(4, dtype=wide, device=device)  # NLL, labels, NLL of text, its bytes

    def add(self, nll, labels):
        text = loading.score_mask(labels, self.eot)
        n_bytes = loading.label_bytes(labels, self.bytes_of).sum()
        parts = [nll.sum(), (labels >= 0).sum(), torch.where(text, nll, 0.0).sum(), n_bytes]
        self.sums += torch.stack([p.detach().to(self.sums.dtype) for p in parts])

    def read(self, ranks):
        """(loss in nats per label, bits per byte) over all ranks; nan where every step was skipped."""
        nll, labels, text, n_bytes = ranks.sum(*self.sums.tolist())
        return nll / labels if labels else math.nan, loading.bits_per_byte(text, int(n_bytes))


class Graphed:
    """A step of static shapes as one CUDA graph: thousands of launches become one.

    The first steps run as they are, on a stream of their own, which is what capturing needs to have seen. All draws of a step then
    come from the seed of its first micro-batch.
    """

    WARM_UP = 3

    def __init__(self, step):
        self.step, self.calls, self.graph = step, 0, None

    def __call__(self, batches, weight):
        self.calls += 1
        if self.calls <= self.WARM_UP:
            here, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(here)
            with torch.cuda.stream(side):
                norm = self.step(batches, weight)
            here.wait_stream(side)
            return norm
        if self.graph is None:
            self.capture(batches)
        for mine, new in zip(self.batches, batches, strict=True):
            for x, y in zip(mine, new, strict=True):
                if x is not None:
                    x.copy_(y)
        self.weight.fill_(weight)
        self.graph.replay()
        return self.norm

    def capture(self, batches):
        self.batches = [loading.Batch(*(None if x is None else x.clone() for x in batch)) for batch in batches]
        self.weight = torch.ones((), device=batches[0].tokens.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # the feed pins memory meanwhile
            self.norm = self.step(self.batches, self.weight)


@torch.no_grad()
def evaluate(model, dataset, config, forward, tally, ranks, signals):
    """(loss, bits per byte) of `eval_iters` batches spread evenly over the held-out split: always the same ones, no randomness.

    None if a signal came. Ranks take batches in turn; one that has none left takes an empty one: all must call the model alike.
    """
    model.eval()
    tally.sums.zero_()
    batches = loading.heldout_batches(
        dataset.val, config.block_size, config.batch_size, config.document_mask,
        max_batches=config.eval_iters, rank=ranks.rank // config.context_parallel, world=ranks.world // config.context_parallel,
    )  # fmt: skip
    while True:
        batch = next(batches, None)
        more, stopped = ranks.sum(batch is not None, signals.asked > 0)
        if stopped or not more:
            break
        batch = empty_batch(config) if batch is None else batch
        output, labels = forward(move(batch, tally.sums.device))
        tally.add(output.nll, labels)
    model.train()
    return None if stopped else tally.read(ranks)


@torch.no_grad()
def exact_answers(model, dataset, config, forward, device, rows=16):
    """Share of the labels that are the most likely token, over the batches of `evaluate`; every rank takes all of them."""
    model.eval()
    hits, labels = torch.zeros((), dtype=torch.long, device=device), 0
    batches = loading.heldout_batches(
        dataset.val, config.block_size, config.batch_size, config.document_mask, max_batches=config.eval_iters
    )
    for batch in batches:
        for i in range(0, config.batch_size, rows):  # the logits of all rows at once are large
            part = move(loading.Batch(*(None if x is None else x[i : i + rows] for x in batch)), device)
            output, _ = forward(part._replace(labels=None), model)
            hits += ((output.logits.argmax(-1) == part.scored()) & (part.scored() >= 0)).sum()
        labels += int((batch.labels >= 0).sum())
    model.train()
    return hits.item() / labels


def empty_batch(config):
    """A batch of padding."""
    tokens = torch.zeros(config.batch_size, config.block_size, dtype=torch.long)
    return loading.Batch(tokens, tokens - 1, tokens.int() if config.document_mask else None)


# ----------------------------------------------------------------------------------------------------------------------
# The run


def start(config, device, source=None):
    """The model of a run, on the device: of the seed, or with the weights of the checkpoint folder `source`."""
    torch.manual_seed(config.seed)
    model = Model(preflight.model_config(config))
    if source is not None:
        for line in swap.load_weights(model, source):
            print(line)
    if config.indexer == "only":
        model.requires_grad_(False)
    for layer in indexed(model) if config.indexer != "off" else ():
        layer.learns = True
        for p in layer.indexer_parameters():
            p.requires_grad_(True)
    if config.activation_checkpointing:
        for block in model.blocks:
            block.forward = functools.partial(recompute, block.forward, use_reentrant=False)
    return model.to(device)


def compiled(model):
    """`torch.compile(model)` whose backward pass runs outside autocast, as it does uncompiled. By default it would be compiled for
    the autocast of the forward: gradients of fp32 states and gates would be products in bf16 (1% off, 8% of KDA's decay).
    """
    torch._functorch.config.backward_pass_autocast = "off"  # read when the first call compiles
    return torch.compile(model)


def indexed(model):
    """The layers with an indexer."""
    return [m for m in model.modules() if isinstance(m, SparseAttention)]


def announce(plan, model, ranks):
    """Print what is about to be trained, on what, and for how long."""
    config, device = plan.config, plan.device
    print(configurator.describe(plan.resolved))
    print(f"\n{model.describe(device.type)}\n")
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    several = f", {ranks.world} processes ({config.parallel or 'ddp'})" if ranks.world > 1 else ""
    compiled = "compiled" if config.compile else "not compiled"
    versions = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    print(f"device {device}{name}{several}, {config.dtype}, {compiled}, {versions}")
    print(preflight.tokens_line(plan))


class Trainer:
    """One run: what it is made of, what it has done, and what it does at each step."""

    def __init__(self, plan, argv, ranks):
        self.plan, self.ranks, self.config, self.device, self.run = plan, ranks, plan.config, plan.device, plan.run
        config, device = self.config, self.device
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(config.deterministic, warn_only=True)
        source = plan.folder
        if source is None and config.init_from != "scratch":
            source = checkpoint.resolve(config.init_from, ("best", "last"))
        self.model = start(config, device, source)
        self.teacher = (
            None if config.distill is None else swap.Teacher(checkpoint.load_model(config.distill, device)[0], self.model)
        )
        announce(plan, self.model, ranks)
        self.half = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]
        self.compiled = compiled(self.model) if config.compile else self.model
        self.training = distributed.spread(self.model, self.compiled, config.parallel, self.half, ranks, device)
        self.context = Context(ranks, config.context_parallel) if config.context_parallel > 1 else None
        self.optimizer, self.scaler = Optimizers(self.model, config, device), LossScale(config.dtype)
        self.tally, self.held_out = (Tally(plan.dataset.tokenizer, device) for _ in range(2))
        self.finite = Finite(device, late=config.non_finite == "stop" and not self.scaler.enabled)
        self.step, self.evaluated, self.skipped, self.skips_in_a_row, self.best, self.wandb_id = 0, 0, 0, 0, None, None
        self.val_loss = None  # of the last validation, at step `evaluated`
        self.held = None  # the run folder, on rank 0
        if plan.meta is not None:
            self.restore(plan.folder, plan.meta)
        self.saved = self.step
        self.signals = monitor.Signals(ranks.rank)
        if config.eval_only:
            return
        self.facts = monitor.environment(device, ranks)
        ranks.first(self.claim, argv)
        self.log = monitor.Log(self.run, config, self.step, self.wandb_id, ranks.rank)
        self.progress, self.clock = monitor.Progress(config.max_iters), monitor.Clock()
        self.saver = checkpoint.Saver(self.run, keep_last=config.keep_last, rank=ranks.rank, background=config.async_save)
        self.feed = Feed(plan.loader, config, ranks, device, self.step)
        self.work = Graphed(self.whole_step) if config.cuda_graph else self.whole_step
        self.peak, self.flops = monitor.peak_flops(device, config.dtype), self.model.flops_per_token(config.block_size)

    def restore(self, folder, meta):
        """Go on from a checkpoint; its weights are in the model, its data position in the loader already."""
        checkpoint.load_optimizer(self.model, self.optimizer, folder)
        self.scaler.load_state_dict(meta["loss_scale"])
        self.step, self.evaluated, self.skipped = meta["step"], meta["evaluated"], meta["skipped"]
        self.best, self.wandb_id, self.val_loss = meta["best_bits_per_byte"], meta["wandb_id"], meta.get("val_loss")
        if self.ranks.rank == 0:
            self.tally.sums += torch.tensor(meta["tally"], dtype=self.tally.sums.dtype, device=self.device)

    def claim(self, argv):
        """Make the folder this run's: empty for a new one, without what came after the checkpoint for a resumed one."""
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            self.held = checkpoint.hold(self.run)
            if self.plan.meta is None:
                checkpoint.remove_run(self.run)  # an older one, which --overwrite gave up
            else:
                for name in checkpoint.leave(self.run, self.step):
                    print(f"{name} in {self.run} is not continued: it is kept as aside-{name}")
            monitor.record_start(self.run, argv, self.config, self.step, self.facts)
        except OSError as e:
            self.release()
            self.signals.restore()
            raise ConfigError(f"out_dir={str(self.run)!r} cannot be written to ({e.strerror})") from e

    def forward(self, batch, module=None, **options):
        """(the model's output, the labels at its places) of a batch, of this rank's part of it where ranks share rows."""
        module, positions = self.compiled if module is None else module, None
        if self.context is not None:
            batch, positions = self.context.take(batch)
        with torch.autocast(self.device.type, dtype=self.half, enabled=self.half is not None), self.routed():
            where = {"segment_ids": batch.segment_ids, "positions": positions, "places": batch.places}
            output = module(batch.tokens, labels := batch.scored(), **where, **options)
        return output, labels

    def routed(self):
        """The context of a forward pass and of a backward pass, which may recompute it: operators reach over to other ranks."""
        return contextlib.nullcontext() if self.context is None else kernels.route(self.context.through)

    def gradient(self, batches, weight):
        """Forward and backward over the step's micro-batches; the gradient's norm, which is clipped then.

        `weight`, a number or a tensor, is what a label counts: one over all ranks' labels, times their number, times fp16's scale.
        """
        self.optimizer.zero_grad()
        for i, (batch, first) in enumerate(zip(batches, self.feed.samples(self.step), strict=True)):
            if not self.config.cuda_graph:
                torch.manual_seed(seed_of(self.config.seed, first, 0 if self.context is None else self.context.part))
            with distributed.syncing(self.training, i == len(batches) - 1):
                with torch.set_grad_enabled(self.teacher is None):
                    output, labels = self.forward(batch, self.training, total=self.config.indexer != "only")
                with self.routed():
                    self.objective(batch, output, weight).backward()
            self.tally.add(output.nll, labels)
        return self.optimizer.clip(self.config.grad_clip, self.scaler.scale)

    def objective(self, batch, output, weight):
        """What is differentiated: the language model's loss, the indexers' or both, or distillation's.

        The latter two are means over the step's tokens, all of which are real, and over the layers that they are about.
        """
        share = self.scaler.scale * self.ranks.world / self.plan.tokens_per_step
        if self.teacher is not None:
            with torch.autocast(self.device.type, dtype=self.half, enabled=self.half is not None):
                return self.teacher.loss(self.model, batch) * share
        if self.config.indexer == "off":
            return output.loss * weight
        kl = output.aux["indexer_kl"] * (share / len(indexed(self.model)))
        return kl if self.config.indexer == "only" else output.loss * weight + kl

    def whole_step(self, batches, weight):
        norm = self.gradient(batches, weight)
        self.optimizer.step()
        return norm

    def do_step(self):
        """One step; returns what there is to log of it."""
        rate = learning_rate(self.step, self.config)
        self.optimizer.set_learning_rate(rate)
        batches, n_labels, waited = self.feed.next()
        n_labels = self.ranks.sum(n_labels)[0] / self.config.context_parallel  # ranks that share rows counted the same ones
        weight = self.scaler.scale * self.ranks.world / max(n_labels, 1)
        if self.config.cuda_graph:
            torch.manual_seed(seed_of(self.config.seed, self.feed.samples(self.step)[0]))
        norm = self.late_step(batches, weight) if self.finite.late else self.checked_step(batches, weight)
        self.step += 1
        self.clock.add(self.plan.tokens_per_step, waited, self.device)
        return {"lr": rate, "grad_norm": norm}

    def late_step(self, batches, weight):
        """The step as the GPU likes it, nothing asked in between: a gradient that is not finite shows a step later."""
        norm = self.work(batches, weight)
        self.stop_if(self.finite.ask(self.step + 1, norm))
        return norm

    def checked_step(self, batches, weight):
        """The step that is left out if its gradient is not finite."""
        before = self.tally.sums.clone()
        norm = self.gradient(batches, weight)
        bad = self.finite.ask(self.step + 1, norm)
        if bad is None:
            self.optimizer.step()
            self.skips_in_a_row = 0
        else:
            self.skips_in_a_row += 1
            if self.skips_in_a_row > MOST_SKIPS or not (self.scaler.enabled or self.config.non_finite == "skip"):
                self.stop_if(bad)
            self.skipped += 1
            self.tally.sums.copy_(before)
        self.scaler.update(bad is None)
        return norm

    def stop_if(self, bad):
        """End the run at a gradient that is not finite: `bad` is its (step, norm), or None."""
        if bad is None:
            return
        step, norm = bad
        self.saver.wait()
        per_step = self.feed.per_step
        raise ConfigError(
            f"the gradient is {norm} at step {step} (samples {(step - 1) * per_step} to {step * per_step - 1}, batch hash "
            f"{self.feed.hash(step - 1)}): this step is not saved, {self.saver.last()}; try a lower --learning_rate, "
            "or --non_finite=skip"
        )

    def evaluate(self):
        """(loss, bits per byte) on the held-out text; None if a signal came."""
        return evaluate(self.model, self.plan.dataset, self.config, self.forward, self.held_out, self.ranks, self.signals)

    def validate(self):
        """Evaluate and log; True if it is the best so far."""
        self.stop_if(self.finite.settle())
        scores = self.evaluate()
        if scores is None:
            return False
        loss, bpb = scores
        if self.config.non_finite == "stop" and not math.isfinite(loss):
            self.saver.wait()
            raise ConfigError(
                f"the validation loss is {loss} at step {self.step}: this step is not saved, {self.saver.last()}; "
                "try a lower --learning_rate"
            )
        self.evaluated, self.val_loss = self.step, loss if math.isfinite(loss) else None  # JSON has no nan
        improved = math.isfinite(bpb) and (self.best is None or bpb < self.best)
        improved &= self.config.indexer != "only"  # these scores do not measure it: the last save is what to go on from
        self.best = bpb if improved else self.best
        answers = None
        if self.plan.dataset.val.row and self.context is None:  # a made task, of whose tokens only the answers have labels
            answers = exact_answers(self.model, self.plan.dataset, self.config, self.forward, self.device)
        mark = ("" if answers is None else f", {answers:.2%} of the answers") + (" (best so far)" if improved else "")
        self.progress.say(f"step {self.step:>5}: validation loss {loss:.4f}, {bpb:.4f} bits per byte{mark}")
        sample = next(loading.heldout_batches(self.plan.dataset.val, self.config.block_size, 1, self.config.document_mask))
        health = monitor.health(self.model, move(sample, self.device), self.half)
        if (line := monitor.selection_line(health)) is not None:
            self.progress.say(line)
        scored = {} if answers is None else {"val_accuracy": answers}
        self.log.write(step=self.step, val_loss=loss, val_bits_per_byte=bpb, **scored, health=health)
        return improved

    def save(self, best):
        self.stop_if(self.finite.settle())
        dataset, sums = self.plan.dataset, self.ranks.sum(*self.tally.sums.tolist())
        contents = {
            "step": self.step,
            "tokens": self.step * self.plan.tokens_per_step,
            "evaluated": self.evaluated,
            "val_loss": self.val_loss,
            "ended": "stop_loss" if self.low_enough() else "max_iters" if self.step == self.config.max_iters else None,
            "skipped": self.skipped,
            "best_bits_per_byte": self.best,
            "tally": sums,
            "loss_scale": self.scaler.state_dict(),
            "settings": self.config.model_dump(),
            "sources": self.plan.resolved.sources,
            "model": self.model.config.model_dump(),
            "loader": self.plan.loader.state_dict(),
            "dataset": self.config.dataset,
            "dataset_folder": str(dataset.folder.resolve()),
            "separator": self.plan.loader.separator,
            "tokenizer_hash": dataset.tokenizer.hash,
            "val_sha256": dataset.meta.get("val_sha256"),
            "wandb_id": self.log.wandb_id,
            "environment": self.facts,
        }
        self.saver.save(
            self.step, model=self.model, optimizer=self.optimizer, meta=contents, tokenizer=dataset.tokenizer, best=best
        )
        self.saved = self.step

    def report(self, lr, grad_norm):
        """The log line: losses and tokens per second since the last one."""
        loss, bpb = self.tally.read(self.ranks)
        self.tally.sums.zero_()
        rate, waited = self.clock.read()
        left = self.clock.left((self.config.max_iters - self.step) * self.plan.tokens_per_step)
        mfu = None if self.peak is None else rate * self.flops / (self.peak * self.ranks.world)
        memory = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        used = "" if memory is None else f"  MFU {'n/a' if mfu is None else f'{mfu:.1%}'}  {format_bytes(memory)}"
        self.progress.show(
            self.step,
            f"step {self.step:>5}/{self.config.max_iters}  loss {loss:.4f}  bits/byte {bpb:.3f}  lr {lr:.2e}  "
            f"{rate:,.0f} tok/s{used}  ETA {int(left // 60)}:{int(left % 60):02d}",
        )
        self.log.write(
            step=self.step,
            loss=loss,
            bits_per_byte=bpb,
            lr=lr,
            grad_norm=grad_norm.item(),
            tokens=self.step * self.plan.tokens_per_step,
            tokens_per_second=rate,
            mfu=mfu,
            peak_memory=memory,
            data_wait=waited,
            first_step_seconds=self.clock.first_step,
            skipped=self.skipped,
            loss_scale=self.scaler.scale,
            epoch=self.plan.loader.epoch,
        )

    def low_enough(self):
        """Whether this step was validated, at a loss of at most `stop_loss`."""
        wanted = self.config.stop_loss
        return wanted is not None and self.evaluated == self.step > 0 and self.val_loss is not None and self.val_loss <= wanted

    def due(self, interval):
        return self.step % interval == 0 or self.step == self.config.max_iters

    def loop(self):
        """Evaluate and save when due, then one step, until `max_iters`, `stop_loss` or a signal. True if a signal ended it."""
        config = self.config
        self.model.train()
        while True:
            began, improved = time.perf_counter(), False
            fresh = self.due(config.eval_interval) and self.evaluated < self.step
            if fresh:
                improved = self.validate()
            save, self.signals.save = self.signals.save, False
            stop, save = self.ranks.sum(self.signals.asked > 0, save)
            enough = self.low_enough()
            finished = enough or self.step == config.max_iters
            ending = stop or finished
            due = save or ending or self.due(config.save_interval)
            if improved or fresh and enough or due and self.saved < self.step:
                self.save(improved)
            if ending:
                return not finished or self.evaluated < self.step
            self.clock.pause(began)
            done = self.do_step()
            if self.due(config.log_interval):
                self.report(**done)

    def release(self):
        if self.held is not None:
            os.close(self.held)
            self.held = None

    def close(self):
        self.feed.close()
        self.saver.wait()
        self.log.close()
        self.release()


def main(argv):
    ranks = distributed.Ranks()
    if ranks.rank != 0:
        sys.stdout = open(os.devnull, "w")
    try:
        plan = preflight.plan(argv, ranks, __doc__)
    except ConfigError:
        if ranks.rank != 0:  # all have the same problems, and rank 0 tells them
            sys.exit(2)
        raise
    if not plan.config.dry_run:
        try:
            train(plan, argv, ranks)
        except ConfigError as e:
            if ranks.rank == 0:
                raise
            raise ConfigError([f"rank {ranks.rank}: {problem}" for problem in e.problems]) from e
    ranks.leave()


def train(plan, argv, ranks):
    """Train, and end with the command that continues, whatever the end is."""
    try:
        with contextlib.nullcontext() if plan.config.backend == "auto" else kernels.use_backend(plan.config.backend):
            _train(plan, argv, ranks)
    except Exception as e:
        if isinstance(e, torch.OutOfMemoryError) or "can't allocate memory" in str(e):
            raise ConfigError(out_of_memory(plan.config, e)) from e
        if type(e).__module__.startswith(("torch._dynamo", "torch._inductor")):
            reason = " ".join(line for line in str(e).splitlines()[:2] if line)
            raise ConfigError(f"compile=true fails here ({reason}): --compile=false trains without it") from e
        raise


def _train(plan, argv, ranks):
    trainer = Trainer(plan, argv, ranks)
    if plan.config.eval_only:
        scores = trainer.evaluate()
        trainer.signals.restore()
        if scores is None:
            ranks.leave()
            sys.exit(128 + (trainer.signals.asked or signal.SIGTERM))
        loss, bpb = scores
        print(f"step {trainer.step}: validation loss {loss:.4f}, {bpb:.4f} bits per byte")
        return
    again = f"--resume={plan.run}"
    try:
        stopped = trainer.loop()
    except BaseException as e:
        trainer.saver.wait()
        what = "left at once" if isinstance(e, KeyboardInterrupt) else "stopped by an error"
        if trainer.saver.last_folder() is None:
            print(f"\n{what}; nothing is saved yet, start again with:\n{monitor.command(*argv)}", flush=True)
        else:
            print(f"\n{what}; {trainer.saver.last()}, continue with:\n{monitor.command(again)}", flush=True)
        raise
    finally:
        trainer.close()
        trainer.signals.restore()
    if trainer.saver.failure is not None:
        print(f"step {trainer.step} could not be saved ({trainer.saver.failure}); {trainer.saver.last()}", file=sys.stderr)
    if stopped:
        print(f"\nstopped at step {trainer.step}, {trainer.saver.last()}; continue with:\n{monitor.command(again)}", flush=True)
        ranks.leave()
        sys.exit(128 + (trainer.signals.asked or signal.SIGTERM))
    best = "" if trainer.best is None else f", best {trainer.best:.4f} bits per byte"
    on = f"--max_iters={2 * trainer.step}"
    if trainer.low_enough():
        print(f"the validation loss {trainer.val_loss:.4f} is at most stop_loss={plan.config.stop_loss}")
        on = "--stop_loss=none"
    print(f"done: {trainer.step} steps{best}; see what it writes with:\npython {monitor.script('sample.py')} {plan.run}")
    print(f"or train on with:\n{monitor.command(again, on)}", flush=True)
    if trainer.saver.failure is not None:
        sys.exit(1)


def out_of_memory(config, error):
    """What to do about it, instead of a traceback."""
    first = str(error).splitlines()[0]
    less = [f"--batch_size={max(1, config.batch_size // 2)} --gradient_accumulation_steps={2 * config.gradient_accumulation_steps}"]
    less += [] if config.activation_checkpointing else ["--activation_checkpointing"]
    return f"out of memory at batch_size={config.batch_size}, block_size={config.block_size} ({first}): try {', or '.join(less)}"


if __name__ == "__main__":
    configurator.run(main)
