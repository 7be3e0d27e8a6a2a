"""Hugging Face checkpoints in and out, and nanoGPT's in.

python convert.py from_hf SRC OUT         # a folder with config.json and weights, or a hub id; OUT is a run folder
python convert.py to_hf RUN DST           # a folder that AutoModelForCausalLM.from_pretrained and AutoTokenizer read
python convert.py from_nanogpt CKPT OUT --tokenizer=gpt2

OUT holds weights only, in the types of the source: sample from it, evaluate it, train on with `train.py --init_from=OUT`.

Each architecture is described once, in architectures.py, for both directions. An export is checked by importing its config.json
again: the model that comes out must be the same, module by module. Every tensor must be used and every parameter filled. Not taken
over: dropout, buffers that are computed, and the router of a single expert, which has no effect.

The tokenizer must have as many ids as the model. With --pad_vocab the model may have more: those ids are never drawn. nanoGPT's
character models have no separator: they are given one, see `add_separator`.
"""

import difflib
import json
import math
from collections import Counter
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.nn as nn
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import checkpoint
import configurator
from architectures import ARCHITECTURES, INERT, Fields, NanoGPT
from configurator import ConfigError, ModelConfig, Settings
from data.hf_tokenizer import read_tokenizer, write_tokenizer
from data.tokenizer import Tokenizer
from model import Model


class ConvertConfig(Settings):
    """conversion"""

    tokenizer: str | None = Field(
        None, min_length=1, description="bytes, gpt2, cl100k_base, o200k_base, or a tokenizer.json of ours; none: the source's"
    )
    pad_vocab: bool = Field(False, description="allow a model with more ids than its tokenizer")
    architecture: str | None = Field(None, min_length=1, description="class to export to; none: the first that can hold the model")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(None, description="type to export; none: as it is stored")
    overwrite: bool = Field(False, description="replace what OUT or DST holds")

    _positional: ClassVar[str | None] = "from_hf|to_hf|from_nanogpt SOURCE TARGET"


# ----------------------------------------------------------------------------------------------------------------------
# What two models have in common

IGNORED = ("training", "dropout", "dt_range")  # decide nothing about what a trained model computes


def facts(model):
    """Everything that decides what a model computes but its weights: shapes, classes, and plain attributes of its modules."""
    found = {}
    for path, module in model.named_modules():
        if not path or isinstance(module, nn.Dropout):
            continue
        found[f"{path}.class"] = type(module).__name__
        plain = {
            k: tuple(v) if isinstance(v, list) else v
            for k, v in vars(module).items()
            if k[0] != "_" and k not in IGNORED and (callable(v) or isinstance(v, bool | int | float | str | tuple | list | None))
        }
        if plain.get("rope_dim") == 0 or plain.get("rope") is False:
            plain.pop("theta", None)  # nothing is rotated
        found |= {f"{path}.{k}": v for k, v in plain.items()}
    return found | {name: tuple(p.shape) for name, p in model.named_parameters()}


def skeleton(settings):
    """A model without memory for its weights."""
    config = settings if isinstance(settings, ModelConfig) else ModelConfig(**settings)
    with torch.device("meta"):
        return Model(config)


def nearest(name, names, what):
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f": did you mean {close[0]}?" if close else ""
    return ConfigError(f"unknown {what} {name!r}{hint} (possible: {', '.join(names)})")


# ----------------------------------------------------------------------------------------------------------------------
# In


def read_source(path):
    """The folder that `path` means: a local one, or a snapshot of a hub id."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists() or path.startswith((".", "/")) or path.count("/") > 1:
        raise ConfigError(f"{path} is no folder: give one with config.json and weights, or a hub id such as openai-community/gpt2")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(f"{path} is no folder here; to read it from the hub: pip install huggingface_hub") from None
    try:
        wanted = ["*.json", "*.safetensors", "merges.txt"]
        return Path(snapshot_download(path, allow_patterns=wanted))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as e:
        raise ConfigError(f"{path} is no folder here and cannot be had from the hub ({type(e).__name__})") from None


def read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} has no {path.name}: is it a folder of transformers?") from None
    except ValueError as e:
        raise ConfigError(f"{path} is not JSON ({e})") from None


def read_tensors(folder):
    """All tensors of a folder, by name: one safetensors file, shards with an index, or a pickle read as plain tensors."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    elif index.is_file():
        files = sorted(set(read_json(index)["weight_map"].values()))
    elif (folder / "pytorch_model.bin").is_file():
        return torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    else:
        raise ConfigError(f"{folder} has no weights: expected model.safetensors, or {index.name} with its shards")
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise ConfigError(f"{folder} lacks {', '.join(missing)} of its {len(files)} shards: download it again")
    tensors = {}
    for name in files:
        try:
            tensors |= load_file(folder / name)
        except SafetensorError as e:
            raise ConfigError(f"{folder / name} cannot be read ({e})") from None
    return tensors


def fill(model, architecture, source, tied):
    """Our tensors by name, from theirs; ConfigError lists what is missing, left over, or does not fit."""
    source, problems, ours = dict(source), [], {}
    entries = architecture.entries(model)
    known = {name for entry in entries for name in entry.theirs}
    for old, new in architecture.renames:
        for name in [n for n in source if old in n and n not in known]:
            renamed = name.replace(old, new, 1) if "." == old[0] or name.startswith(old) else name
            source[renamed] = source.pop(name)
    for name in [n for n in source if n.endswith(architecture.skip) and n not in known]:
        del source[name]
    if tied and "lm_head.weight" in source:
        embedding = next(e.theirs[0] for e in entries if e.ours == "embedding.weight")
        if not torch.equal(source.pop("lm_head.weight"), source.get(embedding, torch.empty(0))):
            problems.append("the settings tie the head to the embedding, but lm_head.weight differs from it")
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for entry in entries:
        pieces = [source.pop(name, None) for name in entry.theirs]
        if absent := [name for name, piece in zip(entry.theirs, pieces, strict=True) if piece is None]:
            problems += [f"{name} is missing" for name in absent]
        elif len(kinds := {piece.dtype for piece in pieces}) > 1:
            problems.append(f"{', '.join(entry.theirs)} are one tensor here, but of types {', '.join(sorted(map(str, kinds)))}")
        else:
            try:
                ours[entry.ours] = entry.join(pieces).contiguous()
                problem = None if ours[entry.ours].shape == shapes[entry.ours] else f"expected {tuple(shapes[entry.ours])} as ours"
            except (ValueError, RuntimeError, IndexError) as e:
                problem = str(e)
            if problem:
                has = ", ".join(f"{n} {tuple(x.shape)}" for n, x in zip(entry.theirs, pieces, strict=True))
                problems.append(f"{has}: {problem}")
    problems += [f"{name} is left over" for name in source]
    if problems:
        raise ConfigError([f"the weights do not fit the settings: {p}" for p in problems])
    return ours


def choose_tokenizer(name, folder=None, eot_id=None):
    """(Tokenizer, notes): the one asked for, or the source's."""
    if name is None:
        found, notes = read_tokenizer(folder, eot_id) if folder is not None else (None, [])
        if found is None:
            raise ConfigError("the source has no tokenizer: say --tokenizer=gpt2, --tokenizer=bytes, or that of a data set here")
        return found, notes
    return Tokenizer.from_name(name), []


def check_vocab(model_size, tokenizer, pad_vocab):
    size = tokenizer.vocab_size
    if size > model_size:
        raise ConfigError(f"the tokenizer has {size} ids, the model {model_size}: choose the tokenizer the model was trained with")
    if size < model_size and not pad_vocab:
        raise ConfigError(
            f"the model has {model_size} ids, more than the {size} of its tokenizer: if the other {model_size - size} are padding, "
            "which is never drawn, say --pad_vocab"
        )


def add_separator(tensors):
    """Give a model without a separator one, as its last id: a row of the embedding that is the mean of the others.

    Its logit is then the mean of the n others: it is never the most likely token, and the loss is larger by at most log(1 + 1 / n).
    Sampling leaves it out; training that goes on can learn it.
    """
    for name in {"transformer.wte.weight", "lm_head.weight"} & tensors.keys():
        rows = tensors[name]
        tensors[name] = torch.cat([rows, rows.float().mean(0, keepdim=True).to(rows.dtype)])


def claim(target, overwrite):
    """Make `target` an empty folder, or one that may be replaced."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())) and not overwrite:
        raise ConfigError(f"{target} is not empty: choose another, or replace what it holds with --overwrite")
    checkpoint.remove_run(target)
    target.mkdir(parents=True, exist_ok=True)


def save_run(out, model, tensors, tokenizer, separator, source):
    """A run folder with one checkpoint, step 0, of weights alone."""
    model.load_state_dict(tensors, assign=True)
    meta = {
        "step": 0,
        "tokens": 0,
        "best_bits_per_byte": None,
        "settings": {},
        "sources": {},
        "model": model.config.model_dump(),
        "loader": None,
        "dataset": None,
        "dataset_folder": None,
        "separator": separator,
        "tokenizer_hash": tokenizer.hash,
        "val_sha256": None,
        "wandb_id": None,
        "torch": torch.__version__,
        "source": source,
    }
    return checkpoint.save(out, 0, model=model, meta=meta, tokenizer=tokenizer, keep_last=1)


def from_hf(source, out, *, tokenizer=None, pad_vocab=False, overwrite=False):
    """Write the run folder `out` from a folder of transformers or a hub id; returns the lines to tell."""
    folder = read_source(source)
    h = Fields(read_json(folder / "config.json"))
    name = (h.values.get("architectures") or [None])[0]
    if name is None:
        by_type = {a.model_type: n for n, a in ARCHITECTURES.items()}
        name = by_type.get(h.values.get("model_type"), str(h.values.get("model_type")))
    if name not in ARCHITECTURES:
        raise nearest(name, list(ARCHITECTURES), "architecture")
    architecture = ARCHITECTURES[name]
    for key in ("quantization_config", "final_logit_softcapping", "logits_scaling", "logit_scale", "embedding_multiplier"):
        h.only(key, None)
    settings = architecture.settings(h)
    if h.problems:
        raise ConfigError([f"{name}: {problem}" for problem in h.problems])
    bos, eos = (ids[0] if isinstance(ids, list) else ids for ids in (h.values.get("bos_token_id"), h.values.get("eos_token_id")))
    codec, notes = choose_tokenizer(tokenizer, folder, eos)
    check_vocab(settings["vocab_size"], codec, pad_vocab)
    model = skeleton(settings)
    tensors = fill(model, architecture, read_tensors(folder), model.head is None)
    claim(Path(out), overwrite)
    separator = "before" if bos is not None and bos == eos else "after"
    if bos is not None and bos != eos:
        notes.append(f"the source puts id {bos} before each text; ours does not: its separator is the end of a document")
    saved = save_run(out, model, tensors, codec, separator, {"architecture": name, "folder": str(source)})
    unread = {k: v for k, v in h.values.items() if k not in h.seen and k not in INERT and k[:8] != "summary_" and v}
    if unread:
        notes.append(f"config.json also says {', '.join(f'{k}={v!r}' for k, v in unread.items())}, which nothing here reads")
    return [*notes, f"{saved}: {name}, {settings['layers']}, {model.n_params():,} parameters in {main_dtype(tensors)}"]


def main_dtype(tensors):
    """The type that most numbers are in, without `torch.`."""
    count = Counter()
    for x in tensors.values():
        count[str(x.dtype).removeprefix("torch.")] += x.numel()
    return count.most_common(1)[0][0]


def from_nanogpt(source, out, *, tokenizer=None, pad_vocab=False, overwrite=False):
    """Write the run folder `out` from a ckpt.pt of nanoGPT; returns the lines to tell."""
    try:
        saved = torch.load(source, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {source}") from None
    except Exception as e:  # a pickle can fail in any way; what it would run is never run
        reason = str(e).splitlines()[0].partition(". ")[0]  # torch goes on to advise running it
        raise ConfigError(f"{source} cannot be read as plain tensors ({type(e).__name__}: {reason})") from None
    if not isinstance(saved, dict) or not {"model", "model_args"} <= set(saved):
        raise ConfigError(f"{source} is no checkpoint of nanoGPT: expected the keys model and model_args")
    a = {"bias": True, **saved["model_args"]}  # before it was a setting, all had biases
    settings = {
        "layers": "attn(rope=none, qk_norm=false)", "ffn": "gelu_exact", "norm": "layernorm", "norm_eps": 1e-5,
        "learned_positions": True, "n_ffn": 4 * a["n_embd"],
        **{k: a[k] for k in ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")},
    }  # fmt: skip
    codec, notes = choose_tokenizer(tokenizer)
    tensors, separator = {k.removeprefix("_orig_mod."): x for k, x in saved["model"].items()}, "after"
    if codec.eot == settings["vocab_size"] == codec.vocab_size - 1:  # the characters of shakespeare_char
        add_separator(tensors)
        settings["vocab_size"], separator = codec.vocab_size, "none"
        cost = f"it is never drawn, and costs at most {math.log1p(1 / codec.eot):.3f} nats a token where text is scored"
        notes.append(f"the source has no separator: id {codec.eot} is one that it has not learned; {cost}")
    check_vocab(settings["vocab_size"], codec, pad_vocab)
    model = skeleton(settings)
    tensors = fill(model, NanoGPT(), tensors, tied=True)
    claim(Path(out), overwrite)
    folder = save_run(out, model, tensors, codec, separator, {"architecture": "nanoGPT", "folder": str(source)})
    return [*notes, f"{folder}: {settings['layers']}, {model.n_params():,} parameters in {main_dtype(tensors)}"]


# ----------------------------------------------------------------------------------------------------------------------
# Out


def export_config(model, name):
    """(their config.json for our model, what `name` cannot express of it: a line for each difference)"""
    architecture = ARCHITECTURES[name]
    try:
        config = architecture.config(model)
        h = Fields(json.loads(json.dumps(config)))
        mine, theirs = facts(model), facts(skeleton(architecture.settings(h)))
    except ConfigError as e:
        return None, e.problems
    differ = [k for k in {**mine, **theirs} if mine.get(k, ...) != theirs.get(k, ...)]
    return config, h.problems + [f"{k} is {mine.get(k, 'absent')}, there {theirs.get(k, 'absent')}" for k in differ]


def choose_architecture(model, name):
    """(name, config.json) of the architecture asked for, or of the first that can hold the model; ConfigError names the nearest."""
    if name is not None and name not in ARCHITECTURES:
        raise nearest(name, list(ARCHITECTURES), "architecture")
    tried = []
    for candidate in [name] if name else ARCHITECTURES:
        config, problems = export_config(model, candidate)
        if not problems:
            return candidate, config
        tried.append((config is None, len(problems), candidate, problems))
    *_, near, problems = min(tried)
    none = f"none of the {len(tried)} architectures can hold this model; the nearest, {near}, cannot"
    more = f", and {len(problems) - 2} more differences" if len(problems) > 2 else ""
    raise ConfigError(f"{f'{near} cannot hold this model' if name else none}: {'; '.join(problems[:2])}{more}")


def to_hf(run, target, *, architecture=None, dtype=None, overwrite=False):
    """Write the folder `target` for transformers from a run or checkpoint folder; returns the lines to tell."""
    folder = checkpoint.resolve(run, ("best", "last"))
    meta = checkpoint.read_meta(folder)
    model, tokenizer = skeleton(meta["model"]), Tokenizer.load(folder / "tokenizer.json")
    made_from = meta.get("source", {}).get("architecture")
    name, config = choose_architecture(model, architecture or (made_from if made_from in ARCHITECTURES else None))
    ours = checkpoint.read_weights(model, folder)
    theirs = {}
    for entry in ARCHITECTURES[name].entries(model):
        theirs |= dict(zip(entry.theirs, entry.split(ours[entry.ours]), strict=True))
    kind = dtype or main_dtype(ours)
    theirs |= {n: x.to(getattr(torch, kind)) for n, x in ARCHITECTURES[name].extra(model).items()}
    if dtype is not None:
        theirs = {n: x.to(getattr(torch, dtype)) for n, x in theirs.items()}
    bos = tokenizer.eot if meta["separator"] == "before" else None
    about = {"architectures": [name], "model_type": ARCHITECTURES[name].model_type, "dtype": kind}
    config = about | config | {"bos_token_id": bos, "eos_token_id": tokenizer.eot, "pad_token_id": None}
    target = Path(target)
    claim(target, overwrite)
    save_file(theirs, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    lines = [f"{target}: {name}, {len(theirs)} tensors in {kind}"]
    if not write_tokenizer(tokenizer, target):
        lines.append(f"no tokenizer was written: transformers has none like ours of kind {tokenizer.kind!r}")
    return lines


# ----------------------------------------------------------------------------------------------------------------------

COMMANDS = {
    "from_hf": (from_hf, ("tokenizer", "pad_vocab", "overwrite")),
    "to_hf": (to_hf, ("architecture", "dtype", "overwrite")),
    "from_nanogpt": (from_nanogpt, ("tokenizer", "pad_vocab", "overwrite")),
}


def main(argv):
    resolved = configurator.load(ConvertConfig, argv, prog="convert.py", description=__doc__)
    command, *paths = resolved.positional or ["(none)"]
    if command not in COMMANDS:
        raise nearest(command, list(COMMANDS), "command")
    if len(paths) != 2:
        raise ConfigError(f"{command} takes a source and a target, got {len(paths)}: python convert.py {command} SOURCE TARGET")
    function, takes = COMMANDS[command]
    given = [name for name, source in resolved.sources.items() if source != "default"]
    if useless := [name for name in given if name not in takes]:
        raise ConfigError([f"--{name} has no effect with {command}, which takes {', '.join(takes)}" for name in useless])
    for line in function(*paths, **{name: getattr(resolved.config, name) for name in takes}):
        print(line)


if __name__ == "__main__":
    configurator.run(main)
