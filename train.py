"""Train a model: `python train.py [recipe.py ...] [--setting=value ...]`, continue a run: `python train.py --resume=RUN`.

python train.py                                                        # a small hybrid on sotu, on whatever device there is
python train.py configurator/recipes/demo.py --layers="gdn attn" --learning_rate=1e-3
python train.py --resume=out/demo --max_iters=2000                     # goes on exactly where it stopped
"""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import checkpoint
import configurator
import data.loader as loading
from configurator import ConfigError, ModelConfig, TrainConfig
from data.prepare import prepare_builtin
from data.tokens import Dataset, check_vocab
from model import Model

# What a resumed run may change; everything else would make it another run.
CHANGEABLE = {
    "max_iters",
    "eval_interval",
    "eval_iters",
    "eval_only",
    "log_interval",
    "save_interval",
    "keep_last",
    "device",
    "compile",
    "wandb_log",
    "wandb_project",
    "wandb_run_name",
    "out_dir",
    "resume",
}


# ----------------------------------------------------------------------------------------------------------------------
# Settings, resolved


def settings(argv):
    """Checked settings and, for a resumed run, its checkpoint folder and meta (else None, None)."""
    resumed = None
    for argument, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if argument == "--resume" or argument.startswith("--resume="):
            resumed = following if argument == "--resume" else argument.partition("=")[2]
    if not resumed or {"-h", "--help"} & set(argv):
        resolved = configurator.load(TrainConfig, argv, prog="train.py", description=__doc__)
        return start_from(resolved, argv), None, None
    folder = checkpoint.resolve(resumed)
    meta = checkpoint.read_meta(folder)
    if meta["loader"] is None:
        raise ConfigError(f"{folder} holds weights alone, no run to continue: start one from it with --init_from={resumed}")
    saved = {**meta["settings"], "out_dir": str(folder.parent), "resume": None}
    resolved = configurator.load(TrainConfig, argv, prog="train.py", base=saved)
    new = resolved.config.model_dump()
    problems = [
        f"{name}={new[name]!r} differs from the run's {saved[name]!r}: a resumed run keeps it "
        f"(it may change {', '.join(sorted(CHANGEABLE - {'resume', 'out_dir'}))})"
        for name in saved
        if new[name] != saved[name] and name not in CHANGEABLE
    ]
    if new["out_dir"] != saved["out_dir"]:
        problems.append(f"out_dir={new['out_dir']!r}: a resumed run goes on in its own folder, {saved['out_dir']!r}")
    if new["max_iters"] < meta["step"]:
        problems.append(f"max_iters={new['max_iters']}: the run has done {meta['step']} steps already")
    if problems:
        raise ConfigError(problems)
    return resolved, folder, meta


def start_from(resolved, argv):
    """The settings once more, the model's taken from the checkpoint `init_from` names; ConfigError for those that contradict it."""
    source = resolved.config.init_from
    if source == "scratch":
        return resolved
    if not Path(source).is_dir():
        if not source.startswith("gpt2"):
            raise ConfigError(f"init_from={source!r}: expected scratch, gpt2 or gpt2-medium, -large, -xl, or the folder of a run")
        source = download(source)
    saved = checkpoint.read_meta(checkpoint.resolve(source, ("best", "last")))["model"]
    free = {"dropout", "document_mask"} | (set() if saved["learned_positions"] else {"block_size"})
    values = resolved.config.model_dump()
    problems = [
        f"{name}={values[name]!r} contradicts {source}, which was made with {saved[name]!r}: leave it out "
        f"(of the model's settings {', '.join(sorted(free))} may change)"
        for name in saved
        if resolved.sources[name] != "default" and values[name] != saved[name] and name not in free
    ]
    if problems:
        raise ConfigError(problems)
    again = configurator.load(TrainConfig, argv, prog="train.py", base=saved)
    return configurator.Resolved(again.config.model_copy(update={"init_from": str(source)}), again.sources, again.positional)


def download(name):
    """out/NAME, made from the published GPT-2 unless it is there."""
    import convert  # which few runs need

    folder = Path("out") / name
    if not (folder / "last").is_file():
        print("\n".join(convert.from_hf(f"openai-community/{name}", folder)))
    return folder


def resolve_device(config):
    """(device, autocast dtype or None): the best there is where the settings say none; ConfigError for what is not there."""
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(config.device or best)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        reason = str(e).splitlines()[0]
        raise ConfigError(f"device={config.device!r} cannot be used ({reason}); the best device here is {best!r}") from e
    dtype = config.dtype or ("bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32")
    return device, dtype


def free_folder():
    """out/run-1, or the first such folder that does not exist yet."""
    return next(folder for n in itertools.count(1) if not (folder := Path(f"out/run-{n}")).exists())


def claim(run, overwrite):
    """Make `run` the folder of a new run; ConfigError if another one lives there and `overwrite` is not set."""
    old = [p for p in run.glob("step-*") if p.is_dir()] if run.is_dir() else []
    if old and not overwrite:
        raise ConfigError(
            f"out_dir={str(run)!r} already holds a run: continue it with --resume={run}, replace it with --overwrite, "
            "or choose another --out_dir"
        )
    checkpoint.remove_run(run)
    run.mkdir(parents=True, exist_ok=True)


def learning_rate(step, config):
    """Linear warm-up to `learning_rate`, then half a cosine down to `min_lr` at `lr_decay_iters`."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if not config.decay_lr:
        return config.learning_rate
    if step >= config.lr_decay_iters:
        return config.min_lr
    ratio = (step - config.warmup_iters) / (config.lr_decay_iters - config.warmup_iters)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (config.learning_rate - config.min_lr)


# ----------------------------------------------------------------------------------------------------------------------
# What a step needs


class Tally:
    """Sums over labels: NLL of all valid ones (the loss), and NLL and bytes of those that are text (bits per byte)."""

    def __init__(self, tokenizer, device):
        self.bytes_of = torch.from_numpy(tokenizer.token_bytes()).to(device)
        self.eot, self.device = tokenizer.eot, device
        self.reset()

    def reset(self):
        wide = torch.float32 if self.device.type == "mps" else torch.float64  # MPS has no float64
        self.sums = torch.zeros(4, dtype=wide, device=self.device)  # NLL, labels, NLL of text, its bytes

    def add(self, nll, labels):
        text = loading.score_mask(labels, self.eot)
        n_bytes = loading.label_bytes(labels, self.bytes_of).sum()
        parts = [nll.sum(), (labels >= 0).sum(), torch.where(text, nll, 0.0).sum(), n_bytes]
        self.sums += torch.stack([p.detach().to(self.sums.dtype) for p in parts])

    def read(self):
        """(loss in nats per label, bits per byte)."""
        nll, labels, text, n_bytes = self.sums.tolist()
        return nll / max(labels, 1.0), loading.bits_per_byte(text, int(n_bytes))


@torch.no_grad()
def evaluate(model, dataset, config, forward, tally):
    """(loss, bits per byte) of `eval_iters` batches spread evenly over the held-out split: always the same ones, no randomness."""
    model.eval()
    tally.reset()
    batches = loading.heldout_batches(
        dataset.val, config.block_size, config.batch_size, config.document_mask, max_batches=config.eval_iters
    )
    for batch in batches:
        nll, labels = forward(batch)
        tally.add(nll, labels)
    model.train()
    return tally.read()


class Log:
    """metrics.jsonl always, Weights & Biases where asked for and possible: its failures are warnings."""

    def __init__(self, run, config, step, wandb_id):
        self.path, self.wandb, self.wandb_id = run / "metrics.jsonl", None, wandb_id
        if step and self.path.is_file():  # drop what a killed run logged beyond its last checkpoint
            lines = [line for line in self.path.read_text().splitlines() if json.loads(line)["step"] <= step]
            self.path.write_text("".join(line + "\n" for line in lines))
        self.file = open(self.path, "a" if step else "w", buffering=1)
        if config.wandb_log:
            self._start_wandb(run, config)

    def _start_wandb(self, run, config):
        try:
            import wandb  # takes over a second: only where it is asked for

            known = "WANDB_API_KEY" in os.environ or "WANDB_MODE" in os.environ or (Path.home() / ".netrc").is_file()
            self.wandb = wandb.init(
                project=config.wandb_project,
                name=config.wandb_run_name,
                dir=str(run),
                id=self.wandb_id,
                resume="allow" if self.wandb_id else None,
                mode=None if known else "offline",
                config=config.model_dump(),
            )
            self.wandb_id = self.wandb.id
            if not known:
                print(f"W&B: no API key, logging offline; upload later with: wandb sync {run}/wandb/offline-run-*")
        except Exception as e:  # whatever W&B raises must not cost the run
            print(f"warning: W&B is off, it could not start ({type(e).__name__}: {e})", file=sys.stderr)

    def write(self, **record):
        self.file.write(json.dumps(record) + "\n")
        if self.wandb is not None:
            try:
                self.wandb.log(record, step=record["step"])
            except Exception as e:  # as above
                print(f"warning: W&B is off from here on ({type(e).__name__}: {e})", file=sys.stderr)
                self.wandb = None

    def close(self):
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish()


class Progress:
    """One line a log interval; on a terminal a bar that is rewritten in place."""

    def __init__(self, total):
        self.total, self.live = total, sys.stdout.isatty()

    def show(self, step, text):
        if not self.live:
            print(text, flush=True)
            return
        filled = 20 * step // self.total
        print(f"\r\033[K[{'#' * filled}{'.' * (20 - filled)}] {text}", end="", flush=True)

    def say(self, text):
        print(f"{chr(10) if self.live else ''}{text}", flush=True)


class Stop:
    """SIGINT and SIGTERM ask for a stop at the next step boundary; a second SIGINT leaves at once."""

    def __init__(self):
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number, frame):
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        print("\nstopping after this step (Ctrl-C again: at once, unsaved)", flush=True)


def generators(device):
    """The random generators a run draws from (dropout), as tensors to save."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states, device):
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def git_commit():
    """The commit of this code, None outside a checkout."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


# ----------------------------------------------------------------------------------------------------------------------
# The run


def start(config, dataset, device):
    """Model and optimizer of a new run, on the device."""
    torch.manual_seed(config.seed)
    model = Model(ModelConfig(**{name: getattr(config, name) for name in ModelConfig.model_fields}))
    model.to(device)
    groups = model.parameter_groups(config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=device.type != "mps")
    return model, optimizer


def complete(config, dataset, device, dtype):
    """The settings with everything that was left to the data, the device or other settings."""
    values = {
        "vocab_size": config.vocab_size or dataset.tokenizer.vocab_size,
        "lr_decay_iters": config.lr_decay_iters or config.max_iters,
        "min_lr": config.learning_rate / 10 if config.min_lr is None else config.min_lr,
        "dtype": dtype,
        "save_interval": config.save_interval or config.eval_interval,
        "compile": device.type == "cuda" if config.compile is None else config.compile,
        "out_dir": config.out_dir or str(free_folder()),
    }
    return config.model_copy(update=values)


def announce(resolved, config, model, device, dataset, train_data):
    """Print what is about to be trained, on what, and for how long."""
    print(configurator.describe(configurator.Resolved(config, resolved.sources, resolved.positional)))
    print(f"\n{model.describe(device.type)}\n")
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    compiled = "compiled" if config.compile else "not compiled"
    versions = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    print(f"device {device}{name}, {config.dtype}, {compiled}, {versions}")
    per_step = config.gradient_accumulation_steps * config.batch_size * config.block_size
    epochs = config.max_iters * per_step / train_data.total_tokens
    print(
        f"data {dataset.folder}: {train_data.total_tokens:,} training tokens; {config.max_iters} steps of {per_step:,} tokens are "
        f"{epochs:.2f} epochs"
    )


def main(argv):
    resolved, folder, meta = settings(argv)
    device, dtype = resolve_device(resolved.config)
    prepare_builtin(resolved.config.dataset)
    dataset = Dataset.open(resolved.config.dataset)
    config = complete(resolved.config, dataset, device, dtype)
    for file in (*dataset.train, dataset.val):
        check_vocab(file, config.vocab_size)
    train_data = loading.Loader(dataset.train, config.block_size, seed=config.seed, document_mask=config.document_mask)
    next(loading.heldout_batches(dataset.val, config.block_size, 1))  # an empty held-out split is found now, not at step 500
    model, optimizer = start(config, dataset, device)
    run = Path(config.out_dir)

    step, tokens_seen, best, wandb_id = 0, 0, None, None
    if folder is not None:
        if meta["tokenizer_hash"] != dataset.tokenizer.hash:
            raise ConfigError(
                f"the tokenizer of {dataset.folder} is not the one this run was trained with: prepare the data as before"
            )
        train_data.load_state_dict(meta["loader"])
        checkpoint.load_weights(model, folder)
        checkpoint.load_optimizer(model, optimizer, folder)
        restore_generators(checkpoint.load_generators(folder), device)
        step, tokens_seen, best, wandb_id = meta["step"], meta["tokens"], meta["best_bits_per_byte"], meta["wandb_id"]
    else:
        if config.init_from != "scratch":
            source = checkpoint.resolve(config.init_from, ("best", "last"))
            if checkpoint.read_meta(source)["tokenizer_hash"] != dataset.tokenizer.hash:
                raise ConfigError(
                    f"the tokenizer of {dataset.folder} is not that of {source}: prepare the data with {source}/tokenizer.json"
                )
            checkpoint.load_weights(model, source)
        if not config.eval_only:
            claim(run, config.overwrite)

    announce(resolved, config, model, device, dataset, train_data)
    per_step = config.gradient_accumulation_steps * config.batch_size * config.block_size
    compiled = torch.compile(model) if config.compile else model

    def forward(batch):
        batch = [None if x is None else x.to(device, non_blocking=True) for x in batch]
        tokens, labels, segment_ids = batch
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.dtype == "bfloat16"):
            return compiled(tokens, labels, segment_ids=segment_ids).nll, labels

    tally = Tally(dataset.tokenizer, device)
    if config.eval_only:
        loss, bpb = evaluate(model, dataset, config, forward, tally)
        print(f"step {step}: validation loss {loss:.4f}, {bpb:.4f} bits per byte")
        return

    log, progress, stop = Log(run, config, step, wandb_id), Progress(config.max_iters), Stop()

    def save(best_now):
        contents = {
            "step": step,
            "tokens": tokens_seen,
            "best_bits_per_byte": best,
            "settings": config.model_dump(),
            "sources": resolved.sources,
            "model": model.config.model_dump(),
            "loader": train_data.state_dict(),
            "dataset": config.dataset,
            "dataset_folder": str(dataset.folder.resolve()),
            "separator": train_data.separator,
            "tokenizer_hash": dataset.tokenizer.hash,
            "val_sha256": dataset.meta.get("val_sha256"),
            "wandb_id": log.wandb_id,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "commit": git_commit(),
        }
        return checkpoint.save(
            run,
            step,
            model=model,
            optimizer=optimizer,
            generators=generators(device),
            meta=contents,
            tokenizer=dataset.tokenizer,
            keep_last=config.keep_last,
            best=best_now,
        )

    model.train()
    tally.reset()
    started, counted, spent_evaluating = time.perf_counter(), 0, 0.0
    while step < config.max_iters:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        batches = [train_data.next(config.batch_size) for _ in range(config.gradient_accumulation_steps)]
        n_labels = sum(int((b.labels >= 0).sum()) for b in batches)
        for batch in batches:
            nll, labels = forward(batch)
            (nll.sum() / n_labels).backward()
            tally.add(nll, labels)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens_seen, counted = step + 1, tokens_seen + per_step, counted + per_step

        stopping = stop.asked  # read once: a signal that comes later is for the next step
        ending = step == config.max_iters or stopping
        if step % config.log_interval == 0 or ending:
            loss, bpb = tally.read()  # means over the steps since the last log
            if not math.isfinite(loss):
                raise ConfigError(
                    f"the loss is {loss} at step {step}: try a lower --learning_rate; the last checkpoint is in {run}"
                )
            rate = counted / (time.perf_counter() - started - spent_evaluating)
            left = (config.max_iters - step) * per_step / rate
            progress.show(
                step,
                f"step {step:>5}/{config.max_iters}  loss {loss:.4f}  bits/byte {bpb:.3f}  lr {group['lr']:.2e}  "
                f"{rate:,.0f} tok/s  ETA {int(left // 60)}:{int(left % 60):02d}",
            )
            log.write(
                step=step,
                loss=loss,
                bits_per_byte=bpb,
                lr=group["lr"],
                grad_norm=norm.item(),
                tokens=tokens_seen,
                tokens_per_second=rate,
                epoch=train_data.epoch,
            )
            tally.reset()
        improved = False
        if step % config.eval_interval == 0 or step == config.max_iters:
            began = time.perf_counter()
            sums = tally.sums
            loss, bpb = evaluate(model, dataset, config, forward, tally)
            tally.sums = sums
            improved = best is None or bpb < best
            best = bpb if improved else best
            progress.say(
                f"step {step:>5}: validation loss {loss:.4f}, {bpb:.4f} bits per byte{' (best so far)' if improved else ''}"
            )
            log.write(step=step, val_loss=loss, val_bits_per_byte=bpb)
            spent_evaluating += time.perf_counter() - began
        if improved or step % config.save_interval == 0 or ending:
            began = time.perf_counter()
            if not math.isfinite(norm.item()):  # its step has spoilt the weights: the checkpoint before is the last good one
                raise ConfigError(f"the gradient is {norm.item()} at step {step}: not saved; the last checkpoint is in {run}")
            saved = save(improved)
            spent_evaluating += time.perf_counter() - began
        if stopping and step < config.max_iters:
            log.close()
            print(f"\nstopped at step {step}, saved {saved}; continue with:\npython train.py --resume={run}")
            sys.exit(130)
    log.close()
    print(f"done: {step} steps, best {best:.4f} bits per byte; see what it writes with:\npython sample.py {run}")


if __name__ == "__main__":
    configurator.run(main)
