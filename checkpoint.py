"""How a run is kept on disk: one folder `step-NNNNNN` a save, complete or absent, never half.

    out/run/metrics.jsonl                 one JSON line per log and evaluation
    out/run/last, out/run/best            one line each: the name of a checkpoint folder
    out/run/step-000400/model.safetensors       weights by parameter name (a tied head is the embedding, not stored)
                        optimizer.safetensors   moments as state.<parameter>.<moment>; not where a model was converted
                        generators.safetensors  random generators; likewise
                        meta.json               settings and where each came from, counters, loader, hashes
                        tokenizer.json
                        COMPLETE                size and SHA-256 of each file above: the checkpoint is valid when this exists

A save is written beside, synced, and renamed once; `last` and `best` are replaced by `os.replace`. Every command takes a run folder
or a checkpoint folder.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from configurator import ConfigError, ModelConfig
from data.tokenizer import Tokenizer
from model import Model

MARKER = "COMPLETE"


def is_valid(folder):
    return (folder / MARKER).is_file()


def resolve(path, prefer=("last",)):
    """The checkpoint folder that `path` (a checkpoint or a run folder) means; `prefer` names the links to try, in order."""
    path = Path(path)
    if is_valid(path):
        return path
    if path.name.startswith("step-") and path.is_dir():
        raise ConfigError(f"checkpoint {path} is incomplete: it has no {MARKER} marker; use another of {_names(path.parent)}")
    for link in prefer:
        if (path / link).is_file():
            folder = path / (path / link).read_text().strip()
            if is_valid(folder):
                return folder
    found = _valid(path)
    if found:
        return found[-1]
    if not path.exists():
        runs = sorted({str(p.parent) for p in Path("out").glob("**/last")})
        known = f"runs here: {', '.join(runs)}" if runs else "no run here yet: python train.py makes one"
        raise ConfigError(f"no checkpoint at {path}: there is no such folder ({known})")
    raise ConfigError(f"no checkpoint in {path}: the folder holds no finished save (step-NNNNNN with a {MARKER} file)")


def _valid(run):
    return sorted(p for p in run.glob("step-*") if is_valid(p))


def _names(run):
    return ", ".join(p.name for p in _valid(run)) or "(none)"


def save(run, step, *, model, optimizer=None, generators=None, meta, tokenizer, keep_last, best=False):
    """Write a checkpoint, point `last` (and `best`) at it, drop older ones beyond `keep_last`. Returns its folder.

    Without optimizer and generators it holds weights alone: a model to start from, not a run to resume.
    """
    run = Path(run)
    folder = run / f"step-{step:06d}"
    if not is_valid(folder):
        beside = run / f".{folder.name}.{os.getpid()}"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        save_file({n: p.detach().contiguous() for n, p in model.named_parameters()}, beside / "model.safetensors")
        if optimizer is not None:
            save_file(_moments(model, optimizer), beside / "optimizer.safetensors")
            save_file(generators, beside / "generators.safetensors")
        (beside / "meta.json").write_text(json.dumps(meta, indent=1))
        tokenizer.save(beside / "tokenizer.json")
        files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(beside.iterdir())}
        (beside / MARKER).write_text(json.dumps(files, indent=1))
        for path in (*beside.iterdir(), beside):
            _sync(path)
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete one of an older, killed process
        os.rename(beside, folder)
        _sync(run)
    _point(run / "last", folder.name)
    if best:
        _point(run / "best", folder.name)
    kept = {(run / link).read_text().strip() for link in ("last", "best") if (run / link).is_file()}
    for old in _valid(run)[: -keep_last or None]:
        if old.name not in kept:
            (old / MARKER).unlink()  # invalid first: a kill in between leaves no folder that looks complete
            shutil.rmtree(old)
    for stale in run.glob(".step-*"):
        shutil.rmtree(stale, ignore_errors=True)
    return folder


def remove_run(run):
    """Delete the checkpoints, links and metrics of `run`, and nothing else that lies there."""
    for old in run.glob("step-*"):
        (old / MARKER).unlink(missing_ok=True)
        shutil.rmtree(old)
    for name in ("last", "best", "metrics.jsonl"):
        (run / name).unlink(missing_ok=True)


def _moments(model, optimizer):
    return {f"state.{n}.{key}": value for n, p in model.named_parameters() for key, value in optimizer.state[p].items()}


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _point(link, name):
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.write_text(name + "\n")
    _sync(beside)
    os.replace(beside, link)


def read_meta(folder):
    """The checkpoint's meta.json, after checking that every file is there with its size and hash."""
    for name, want in json.loads((folder / MARKER).read_text()).items():
        path = folder / name
        if not path.is_file():
            raise ConfigError(f"checkpoint {folder} is damaged: {name} is missing")
        if path.stat().st_size != want["bytes"]:
            raise ConfigError(
                f"checkpoint {folder} is damaged: {name} has {path.stat().st_size} bytes, {want['bytes']} were written"
            )
        if _sha256(path) != want["sha256"]:
            raise ConfigError(f"checkpoint {folder} is damaged: {name} differs from what was written (SHA-256)")
    return json.loads((folder / "meta.json").read_text())


def read_weights(model, folder):
    """The saved weights by name, as stored; ConfigError lists what is missing for `model`, left over or of another shape."""
    try:
        saved = load_file(folder / "model.safetensors")
    except SafetensorError as e:
        raise ConfigError(f"checkpoint {folder}: model.safetensors cannot be read ({e})") from e
    own = dict(model.named_parameters())
    problems = [f"{n} is missing" for n in own if n not in saved] + [f"{n} is left over" for n in saved if n not in own]
    problems += [
        f"{n} has shape {tuple(saved[n].shape)}, the model's is {tuple(p.shape)}"
        for n, p in own.items()
        if n in saved and saved[n].shape != p.shape
    ]
    if problems:
        raise ConfigError([f"checkpoint {folder} does not fit the model: {p}" for p in problems])
    return saved


@torch.no_grad()
def load_weights(model, folder):
    """Copy the saved weights into `model`, whatever type they are stored in; ConfigError as `read_weights`."""
    saved = read_weights(model, folder)
    for name, p in model.named_parameters():
        p.copy_(saved[name])


def load_optimizer(model, optimizer, folder):
    """Put the saved moments back, each beside its parameter."""
    saved = load_file(folder / "optimizer.safetensors")
    for name, p in model.named_parameters():
        prefix = f"state.{name}."
        moments = {key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)}
        fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        optimizer.state[p] = {k: v.to(p.device if k != "step" or fused else "cpu") for k, v in moments.items()}


def load_generators(folder):
    return load_file(folder / "generators.safetensors")


def load_model(path, device="cpu", prefer=("best", "last")):
    """Model in evaluation mode, tokenizer and meta of a run or checkpoint folder; `best` before `last` unless told otherwise."""
    folder = resolve(path, prefer)
    meta = read_meta(folder)
    model = Model(ModelConfig(**meta["model"]))
    load_weights(model, folder)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    return model.to(device).eval(), tokenizer, {**meta, "folder": str(folder)}
