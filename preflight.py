"""What a run is, settled and checked before it starts: settings, device, data, checkpoint, and what they cost.

`plan` is the first thing train.py does. All problems come at once, as one ConfigError; `--dry_run` stops here and prints the costs.
"""

import itertools
import os
import re
import shutil
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import checkpoint
import configurator
import data.loader as loading
from configurator import ConfigError, ModelConfig, TrainConfig, expand_layers, parse_layers
from context import REFUSED
from data.prepare import prepare_builtin
from data.tokens import Dataset, check_vocab
from model import MIXERS, Model, SparseAttention, format_bytes, register_from, unknown_mixer
from swap import swapped

# What a resumed run may change; everything else would make it another run.
CHANGEABLE = {
    "max_iters",
    "eval_interval",
    "eval_iters",
    "eval_only",
    "stop_loss",
    "log_interval",
    "save_interval",
    "keep_last",
    "async_save",
    "dry_run",
    "non_finite",
    "parallel",
    "context_parallel",
    "activation_checkpointing",
    "cuda_graph",
    "backend",
    "deterministic",
    "dataset",  # where it lies; that it holds the same tokens is checked
    "device",
    "compile",
    "wandb_log",
    "wandb_project",
    "wandb_run_name",
    "out_dir",
    "resume",
}


@dataclass(frozen=True)
class Plan:
    """What a run needs. `folder` and `meta` are those of the checkpoint to continue, None for a new run."""

    resolved: configurator.Resolved
    config: TrainConfig  # with everything filled in that was left to the data or the device
    device: torch.device
    dataset: Dataset
    loader: loading.Loader
    folder: Path | None
    meta: dict | None

    @property
    def run(self):
        return Path(self.config.out_dir)

    @property
    def tokens_per_step(self):
        return self.config.gradient_accumulation_steps * self.config.batch_size * self.config.block_size


def plan(argv, ranks, description):
    """The `Plan` of this command line; ConfigError holds everything that is wrong with it."""
    problems = []

    def attempt(function, *args):
        try:
            return function(*args)
        except ConfigError as e:
            problems.extend(e.problems)
            return None

    resolved, folder, meta = _settings(argv, ranks, description, problems)
    config, loader = resolved.config, None
    device, dtype = attempt(resolve_device, config, ranks.local if ranks.world > 1 else None) or (torch.device("cpu"), "float32")
    problems += _conflicts(resolved, ranks, dtype)
    if config.cuda_graph and device.type != "cuda":
        problems.append(f"cuda_graph=True needs a CUDA device, device is {device.type!r}")
    if config.backend == "triton" and device.type != "cuda":
        problems.append(f"backend='triton' needs a CUDA device, device is {device.type!r}: 'eager' is what runs here")
    ranks.first(prepare_builtin, config.dataset)
    dataset = attempt(Dataset.open, config.dataset)
    if not config.eval_only:
        attempt(_check_folder, config, folder is not None)
    here = ranks.union([] if dataset is not None else ["-"]) == []
    config = ranks.first(_complete, config, dataset if here else None, device, dtype, ranks)
    if here:
        attempt(_check_data, dataset, config)
        loader = attempt(_loader, dataset, config)
        attempt(_check_origin, config, dataset, loader, folder, meta)
    model = attempt(_on_paper, config)
    if config.context_parallel > 1 and model is not None:
        refused = [i for i, b in enumerate(model.blocks) if set(getattr(b.mixer, "operators", ())) & set(REFUSED)]
        problems += [
            f"context_parallel={config.context_parallel}: layer {i} selects keys, which cannot be split yet" for i in refused
        ]
    if config.indexer != "off" and model is not None and not any(isinstance(m, SparseAttention) for m in model.modules()):
        problems.append(f"indexer={config.indexer!r} has no effect without a dsa layer, layers is {config.layers!r}")
    if config.distill is not None and dataset is not None:
        attempt(_check_teacher, config, dataset, ranks)
    if config.dry_run and loader is not None and model is not None:
        problems += _print_costs(Plan(resolved, config, device, dataset, loader, folder, meta), model, ranks)
    problems = ranks.union(problems)
    if problems:
        raise ConfigError(problems)
    return Plan(replace(resolved, config=config), config, device, dataset, loader, folder, meta)


# ----------------------------------------------------------------------------------------------------------------------
# Settings


class RunConfig(TrainConfig):
    """The settings with a check that the configurator cannot make, which knows no mixers."""

    def conflicts(self):
        yield from super().conflicts()
        try:
            if self.mixers is not None:
                register_from(self.mixers)
            names = dict.fromkeys(spec.name for spec in parse_layers(self.layers))
        except ConfigError:  # of the pattern that is said above, of the file where the model is made
            return
        for name in names:
            if name not in MIXERS and name != "mlp":
                yield {"layers"}, f"layers={self.layers!r}: {unknown_mixer(name)}"


def _settings(argv, ranks, description, problems):
    """Checked settings and, for a resumed run, its checkpoint folder and meta (else None, None).

    Settings that are wrong are fatal, but a dry run goes on without them, the problems noted, to find what else is.
    """
    while True:
        try:
            return _resolve(argv, ranks, description)
        except ConfigError as e:
            left = _without(argv, e.problems)
            if not any(a.startswith("--dry_run") for a in argv) or left == argv:
                raise ConfigError(list(dict.fromkeys(problems + e.problems))) from e
            problems += e.problems
            argv = left


def _without(argv, problems):
    """The arguments but for the flags that these problems are about."""
    named = (re.match(r"(?:unknown setting ')?(\w+)(?:'|=)", line) for line in problems)
    wrong = {found[1] for found in named if found}
    left, rest = [], list(argv)
    while rest:
        argument = rest.pop(0)
        if argument.removeprefix("--").partition("=")[0] not in wrong:
            left.append(argument)
        elif "=" not in argument and rest and not rest[0].startswith("--"):
            rest.pop(0)  # its value
    return left


def _resolve(argv, ranks, description):
    resumed = None
    for argument, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if argument == "--resume" or argument.startswith("--resume="):
            resumed = following if argument == "--resume" else argument.partition("=")[2]
    if not resumed or {"-h", "--help"} & set(argv):
        resolved = configurator.load(RunConfig, argv, prog="train.py", description=description)
        if (named := resolved.config.resume) is not None:
            raise ConfigError(
                f"resume={named!r} in a {resolved.sources['resume']}: a run is continued by the flag, --resume={named}"
            )
        return ranks.first(_start_from, resolved, argv), None, None
    folder, meta = ranks.first(checkpoint.open_checkpoint, resumed)
    if meta["loader"] is None:
        raise ConfigError(f"{folder} holds weights alone, no run to continue: start one from it with --init_from={resumed}")
    saved = {**meta["settings"], "out_dir": str(folder.parent), "resume": None, "dry_run": False, "eval_only": False}
    resolved = configurator.load(RunConfig, argv, prog="train.py", base=saved)
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


def _start_from(resolved, argv):
    """The settings once more, the model's taken from the checkpoint `init_from` names; ConfigError for those that contradict it."""
    source = resolved.config.init_from
    if source == "scratch":
        return resolved
    if not Path(source).is_dir():
        if not source.startswith("gpt2"):
            expected = "scratch, gpt2 or gpt2-medium, -large, -xl, or the folder of a run (--resume=RUN goes on with one)"
            raise ConfigError(f"init_from={source!r}: expected {expected}")
        source = _download(source)
    folder, meta = checkpoint.open_checkpoint(source, ("best", "last"))
    saved = meta["model"]
    free = {"layers", "dropout", "document_mask"} | (set() if saved["learned_positions"] else {"block_size"})
    values = resolved.config.model_dump()
    problems = [
        f"{name}={values[name]!r} contradicts {source}, which was made with {saved[name]!r}: leave it out "
        f"(of the model's settings {', '.join(sorted(free))} may change)"
        for name in saved
        if resolved.sources[name] != "default" and values[name] != saved[name] and name not in free
    ]
    if problems:
        raise ConfigError(problems)
    again = configurator.load(RunConfig, argv, prog="train.py", base=saved)
    return configurator.Resolved(again.config.model_copy(update={"init_from": str(folder)}), again.sources, again.positional)


def _download(name):
    """out/NAME, made from the published GPT-2 unless it is there."""
    import convert  # which few runs need

    folder = Path("out") / name
    if not (folder / "last").is_file():
        print("\n".join(convert.from_hf(f"openai-community/{name}", folder)))
    return folder


def _conflicts(resolved, ranks, dtype=None):
    """Clashes between settings, and of settings with the number of processes and the device's own compute type."""
    config, share = resolved.config, resolved.config.context_parallel
    if ranks.world % share:
        near = [n for n in range(1, ranks.world + 1) if ranks.world % n == 0]
        yield f"context_parallel={share} does not divide {ranks.world} processes: choose one of {', '.join(map(str, near))}"
    elif config.gradient_accumulation_steps % (ranks.world // share):
        n, each = config.gradient_accumulation_steps, ranks.world // share
        near = sorted({max(1, n // each) * each, (n // each + 1) * each})
        yield (
            f"gradient_accumulation_steps={n} counts the micro-batches of all {ranks.world} processes and must be a multiple of "
            f"{each}: nearest {'is' if len(near) == 1 else 'are'} {' and '.join(map(str, near))}"
        )
    if config.block_size % share:
        below = config.block_size // share * share
        near = f"nearest are {below} and {below + share}" if below else f"nearest is {share}"
        yield f"block_size={config.block_size} cannot be cut into context_parallel={share} equal parts: {near}"
    asked = resolved.sources["parallel"] in ("default", "checkpoint")
    if config.parallel is not None and ranks.world == 1 and not asked:
        yield f"parallel={config.parallel!r} has no effect in one process: torchrun --nproc_per_node=N train.py ..."
    if config.parallel == "fsdp" and ranks.world > 1 and config.optimizer == "muon":
        yield "optimizer='muon' needs whole matrices, parallel='fsdp' splits them: use --parallel=ddp or --optimizer=adamw"
    if config.parallel == "fsdp" and ranks.world > 1 and config.indexer != "off":
        yield (
            f"indexer={config.indexer!r} is a loss beside the layers' outputs, for which parallel='fsdp' does not gather weights: "
            "use --parallel=ddp"
        )
    if config.cuda_graph:
        against = {
            "several processes": ranks.world > 1,
            "dtype='float16' (its loss scale is decided on the host)": (config.dtype or dtype) == "float16",
            "non_finite='skip' (decided on the host)": config.non_finite == "skip",
            "optimizer='muon' (torch.optim.Muon reads its rate on the host)": config.optimizer == "muon",
        }
        yield from (f"cuda_graph=True does not go with {what}" for what, there in against.items() if there)


def resolve_device(config, local=None):
    """(device, compute type): the best there is where the settings say none; ConfigError for what is not there.

    `local` is the process's number on this host where there are several: each takes a GPU of its own.
    """
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    name = config.device or best
    try:
        device = torch.device(f"cuda:{local}" if name == "cuda" and local is not None else name)
        torch.empty(1, device=device)
        if device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as e:
        reason = str(e).splitlines()[0].partition(". ")[0]  # a sentence of what may be a page
        raise ConfigError(f"device={config.device!r} cannot be used ({reason}); the best device here is {best!r}") from e
    half = "float32"
    if device.type == "cuda":  # compute capability 8.0 has bf16 in hardware; before that PyTorch emulates it, slowly
        half = "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    return device, config.dtype or half


def _complete(config, dataset, device, dtype, ranks):
    """The settings with everything that was left to the data, the device or other settings."""
    breaks = ranks.world > 1 and (config.parallel == "fsdp" or config.context_parallel > 1)  # hooks and messages within the graph
    compile_it = device.type == "cuda" and not breaks and find_spec("triton") is not None  # which its kernels are written in
    values = {
        "vocab_size": config.vocab_size or (1 if dataset is None else dataset.tokenizer.vocab_size),
        "lr_decay_iters": config.lr_decay_iters or max(config.max_iters, config.warmup_iters),
        "min_lr": config.learning_rate / 10 if config.min_lr is None else config.min_lr,
        "dtype": dtype,
        "save_interval": config.save_interval or config.eval_interval,
        "compile": compile_it if config.compile is None else config.compile,
        "out_dir": config.out_dir or str(_free_folder()),
    }
    return config.model_copy(update=values)


def _free_folder():
    """out/run-1, or the first such folder that does not exist yet."""
    return next(folder for n in itertools.count(1) if not (folder := Path(f"out/run-{n}")).exists())


# ----------------------------------------------------------------------------------------------------------------------
# Data, checkpoint, folder


def _check_data(dataset, config):
    check_vocab([*dataset.train, dataset.val], config.vocab_size)
    loading.heldout_batches(dataset.val, config.block_size, 1)  # an empty held-out split is found now, not at step 500


def _loader(dataset, config):
    return loading.Loader(dataset.train, config.block_size, seed=config.seed, document_mask=config.document_mask)


def _check_origin(config, dataset, loader, folder, meta):
    """The checkpoint that the run continues, or starts from, belongs to this data and its tokenizer."""
    if folder is not None:
        if meta["tokenizer_hash"] != dataset.tokenizer.hash:
            raise ConfigError(
                f"the tokenizer of {dataset.folder} is not the one this run was trained with: prepare the data as before"
            )
        if loader is not None:
            loader.load_state_dict(meta["loader"])
    elif config.init_from != "scratch":
        source, meta = checkpoint.open_checkpoint(config.init_from, ("best", "last"))
        if meta["tokenizer_hash"] != dataset.tokenizer.hash:
            raise ConfigError(
                f"the tokenizer of {dataset.folder} is not that of {source}: prepare the data with {source}/tokenizer.json"
            )


def _check_teacher(config, dataset, ranks):
    source, meta = checkpoint.open_checkpoint(config.distill, ("best", "last"))
    saved, problems = meta["model"], []
    for name in ("n_layer", "n_embd"):
        if saved[name] != getattr(config, name):
            problems.append(f"distill: {name}={getattr(config, name)} differs from the {saved[name]} of {source}")
    if meta["tokenizer_hash"] != dataset.tokenizer.hash:
        problems.append(f"distill: the tokenizer of {dataset.folder} is not that of {source}")
    if not problems and not swapped(*(expand_layers(layers, config.n_layer) for layers in (saved["layers"], config.layers))):
        problems.append(f"distill: no layer differs from those of {source}, layers={saved['layers']!r}: there is nothing to learn")
    against = {
        "several processes": ranks.world > 1,
        "cuda_graph=True": config.cuda_graph,
        f"indexer={config.indexer!r}": config.indexer != "off",
    }
    problems += [f"distill does not go with {what}" for what, there in against.items() if there]
    if problems:
        raise ConfigError(problems)


def _check_folder(config, resumed):
    if config.out_dir is None:
        return
    run = Path(config.out_dir)
    there = next(p for p in (run, *run.absolute().parents) if os.path.exists(p))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "cannot be written to" if there.is_dir() else "is a file"
        raise ConfigError(f"out_dir={str(run)!r}: {there} {what}; choose another --out_dir")
    if not resumed and run.is_dir() and any(p.is_dir() for p in run.glob("step-*")) and not config.overwrite:
        raise ConfigError(
            f"out_dir={str(run)!r} already holds a run: continue it with --resume={run}, replace it with --overwrite, "
            "or choose another --out_dir"
        )


def model_config(config):
    return ModelConfig(**{name: getattr(config, name) for name in ModelConfig.model_fields})


def _on_paper(config):
    """The model without its numbers: what is wrong with the layers shows, and what they would cost."""
    with torch.device("meta"):
        return Model(model_config(config))


# ----------------------------------------------------------------------------------------------------------------------
# Costs


def activation_bytes(config):
    """Bytes that autograd keeps of one micro-batch, in eager PyTorch (kernels keep less): counted on tensors without contents.

    None where a layer cannot be run without its numbers.
    """
    try:
        two, three = _kept_of(config, 2), _kept_of(config, 3)  # copies of weights in 16 bits do not grow with the rows
    except Exception:  # whatever an operator does that needs numbers
        return None
    total = two + (config.batch_size - 2) * (three - two)
    if config.activation_checkpointing:  # the layers' inputs, and one layer at a time
        total = total // config.n_layer + 4 * config.batch_size * config.block_size * config.n_embd * config.n_layer
    return total


def _kept_of(config, rows):
    kept, half = {}, config.dtype != "float32"
    with FakeTensorMode():
        model, tokens = Model(model_config(config)), torch.zeros(rows, config.block_size, dtype=torch.long)
        ids = torch.ones_like(tokens, dtype=torch.int32) if config.document_mask else None
        weights = {p.untyped_storage()._cdata for p in model.parameters()}

        def keep(x):
            storage = x.untyped_storage()
            if storage._cdata not in weights:
                kept[storage._cdata] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", torch.bfloat16, half):
            output = model(tokens, tokens, segment_ids=ids)  # held until all is counted: a freed address would be used again
    del output
    return sum(kept.values())


def _print_costs(plan, model, ranks):
    """Print what the run would take; returns what it would take too much of."""
    config, n = plan.config, model.n_params()
    shards = ranks.world if config.parallel == "fsdp" else 1
    print(configurator.describe(configurator.Resolved(config, plan.resolved.sources, plan.resolved.positional)))
    print(f"\n{model.describe(plan.device.type)}\n")
    print(tokens_line(plan))
    flops = model.flops_per_token(config.block_size)
    done = 0 if plan.meta is None else plan.meta["step"]
    total = flops * plan.tokens_per_step * (config.max_iters - done)
    print(f"model     {n:,} parameters, {flops / 1e6:,.1f} MFLOP a token, {total:.3g} FLOP for {config.max_iters - done} steps")
    problems = []
    moments = 4 if config.optimizer == "muon" else 8
    fixed, moving = (8 + moments) * n // shards, activation_bytes(config)
    known = "n/a" if moving is None else format_bytes(moving)
    print(f"memory    {format_bytes(fixed)} weights, gradients and moments a process, about {known} activations (eager PyTorch's)")
    if plan.device.type == "cuda":
        there = torch.cuda.get_device_properties(plan.device).total_memory
        print(f"          {format_bytes(there)} on the device")
        if fixed > there:
            problems.append(f"{format_bytes(fixed)} of weights, gradients and moments do not fit {format_bytes(there)}: use fsdp")
        elif moving is not None and fixed + moving > there:
            print("          the estimate is more than that: a smaller --batch_size or --activation_checkpointing may be needed")
    size = (4 + moments) * n
    most = config.keep_last + 2  # the best one, and the one being written
    free = shutil.disk_usage(next(p for p in (plan.run, *plan.run.absolute().parents) if p.is_dir())).free
    print(f"disk      {format_bytes(size)} a checkpoint, at most {most} at once; {format_bytes(free)} free")
    if size * most > free:
        problems.append(
            f"keep_last={config.keep_last}: {most} checkpoints of {format_bytes(size)} at once do not fit {plan.run}, where "
            f"{format_bytes(free)} are free"
        )
    if plan.meta is not None:
        print(f"resume    {plan.folder}: step {plan.meta['step']}, settings, data and tokenizer agree")
    return problems


def tokens_line(plan):
    config, total = plan.config, plan.loader.total_tokens
    epochs = config.max_iters * plan.tokens_per_step / total
    return (
        f"data {plan.dataset.folder}: {total:,} training tokens; {config.max_iters} steps of {plan.tokens_per_step:,} tokens are "
        f"{epochs:.2f} epochs"
    )
