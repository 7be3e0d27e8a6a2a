"""How a run is kept on disk: one folder `step-NNNNNN` a save, complete or absent, never half.

    out/run/metrics.jsonl                 one JSON line per log and evaluation
    out/run/starts.jsonl                  one JSON line per start: command, settings, versions, devices, commit
    out/run/last, out/run/best            one line each: the name of a checkpoint folder
    out/run/step-000400/model.safetensors       weights by parameter name (a tied head is the embedding, not stored)
                        optimizer.safetensors   moments as state.<parameter>.<moment>; not where a model was converted
                        meta.json               settings and where each came from, counters, loader, hashes
                        tokenizer.json
                        COMPLETE                size and SHA-256 of each file above: the checkpoint is valid when this exists
    out/run/aside-step-000400             a save that a resumed run did not go on from: damaged, or a future it left

A save is written beside, synced, and renamed once; `last` and `best` are replaced by `os.replace`. The newest valid folder is the
last save even where a kill came before `last` was replaced. Random generators are not kept: train.py seeds them anew for each
micro-batch. Every command takes a run folder or a checkpoint folder.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import threading
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import distributed
from configurator import ConfigError, ModelConfig
from data.tokenizer import Tokenizer
from model import Model

MARKER = "COMPLETE"


def is_valid(folder):
    return (folder / MARKER).is_file()


def resolve(path, prefer=("last",)):
    """The checkpoint folder that `path` (a checkpoint or a run folder) means; `prefer` names what to try, in order: best, last."""
    path = Path(path)
    if is_valid(path):
        return path
    if path.name.startswith("step-") and path.is_dir():
        raise ConfigError(f"checkpoint {path} is incomplete: it has no {MARKER} marker; use another of {_names(path.parent)}")
    found = _valid(path)
    best = path / (path / "best").read_text().strip() if "best" in prefer and (path / "best").is_file() else None
    if best in found:
        return best
    if found:
        return found[-1]
    if not path.exists():
        runs = sorted({str(p.parent) for p in Path("out").glob("**/last")})
        known = f"runs here: {', '.join(runs)}" if runs else "no run here yet: python train.py makes one"
        raise ConfigError(f"no checkpoint at {path}: there is no such folder ({known})")
    raise ConfigError(f"no checkpoint in {path}: the folder holds no finished save (step-NNNNNN with a {MARKER} file)")


def open_checkpoint(path, prefer=("last",)):
    """(folder, meta) of the checkpoint that `path` means, every file checked.

    If `path` is a run folder whose save is damaged, the newest sound one takes its place, with a warning on stderr.
    """
    first = resolve(path, prefer)
    rest = [] if first == Path(path) else [folder for folder in reversed(_valid(Path(path))) if folder != first]
    problems = []
    for folder in (first, *rest):
        try:
            meta = read_meta(folder)
        except ConfigError as e:
            problems += e.problems
            continue
        for problem in problems:
            print(f"warning: {problem}; {folder.name} is used instead", file=sys.stderr)
        return folder, meta
    raise ConfigError(problems)


def _valid(run):
    return sorted((p for p in run.glob("step-*") if is_valid(p)), key=step_of)


def step_of(folder):
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else -1


def weights_sha256(folder):
    """The SHA-256 of a complete checkpoint's weights."""
    return json.loads((folder / MARKER).read_text())["model.safetensors"]["sha256"]


def _names(run):
    return ", ".join(p.name for p in _valid(run)) or "(none)"


def save(run, step, *, model, optimizer=None, meta, tokenizer, keep_last, best=False):
    """Write a checkpoint, point `last` (and `best`) at it, drop older ones beyond `keep_last`. Returns its folder.

    Without an optimizer it holds weights alone: a model to start from, not a run to resume. OSError if it cannot be written.
    """
    files = _tensors(model, optimizer)
    files = {name: {n: x.detach().contiguous() for n, x in tensors.items()} for name, tensors in files.items()}
    return _write(Path(run), step, files, meta, tokenizer, keep_last, best)


class Saver:
    """Checkpoints written by a thread while training goes on: `save` takes a copy on the host and returns.

    One is on its way at a time. What cannot be written (a full disk) costs a warning, nothing half-written stays, and training goes
    on; `failure` is then the reason until a later save succeeds. Every rank calls `save`, since gathering shards takes all; the
    first writes.
    """

    def __init__(self, run, *, keep_last, rank=0, background=True):
        self.run, self.keep_last, self.rank, self.background = Path(run), keep_last, rank, background
        self.copies, self.thread, self.failure = {}, None, None  # the host copies are kept for the next save

    def save(self, step, *, model, optimizer, meta, tokenizer, best):
        self.wait()
        distributed.reshard(model)
        files = {}
        for file, tensors in _tensors(model, optimizer).items():
            files[file] = {name: self._copy(f"{file} {name}", distributed.whole(x.detach())) for name, x in tensors.items()}
        if self.rank != 0:
            return
        copied = torch.cuda.Event() if torch.cuda.is_initialized() else None
        if copied is not None:
            copied.record()
        rest = (step, files, meta, tokenizer, self.keep_last, best)
        self.thread = threading.Thread(target=self._write, args=(copied, *rest), name="checkpoint")
        self.thread.start()
        if not self.background:
            self.wait()

    def wait(self):
        """Until what was given to `save` is on disk, or has failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _copy(self, key, x):
        if self.rank != 0:
            return None
        if key not in self.copies:
            self.copies[key] = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type == "cuda")
        return self.copies[key].copy_(x, non_blocking=x.device.type == "cuda")

    def _write(self, copied, *contents):
        if copied is not None:
            copied.synchronize()
        try:
            _write(self.run, *contents)
        except Exception as e:  # in a thread nobody else would hear of it
            if self.failure is None:  # once: a full disk stays full for many saves
                warning = f"warning: step {contents[0]} could not be saved ({e}); training goes on, {self.last()}"
                print(warning, file=sys.stderr, flush=True)
            self.failure = e
        else:
            if self.failure is not None:
                print(f"saving works again: step {contents[0]} is saved", flush=True)
            self.failure = None

    def last_folder(self):
        return next(reversed(_valid(self.run)), None)

    def last(self):
        folder = self.last_folder()
        return f"the last checkpoint is {folder}" if folder else f"there is no checkpoint in {self.run} yet"


def _tensors(model, optimizer):
    """The tensors of a checkpoint by file and name."""
    files = {"model.safetensors": dict(model.named_parameters())}
    if optimizer is not None:
        files["optimizer.safetensors"] = {
            f"state.{n}.{key}": value for n, p in model.named_parameters() for key, value in _moments(optimizer, p).items()
        }
    return files


def _moments(optimizer, p):
    """The moments of parameter p, {} if it has none yet; `optimizer` may be several (see optim.Optimizers)."""
    return next((o.state[p] for o in getattr(optimizer, "each", [optimizer]) if p in o.state), {})


def _write(run, step, files, meta, tokenizer, keep_last, best):
    folder = run / f"step-{step:06d}"
    beside = run / f".{folder.name}.{os.getpid()}"
    _sweep(run)
    try:
        beside.mkdir(parents=True)
        for name, tensors in files.items():
            try:
                save_file(tensors, beside / name)
            except SafetensorError as e:  # how it reports a full disk
                raise OSError(errno.EIO, f"{name}: {e}") from e
        (beside / "meta.json").write_text(json.dumps(meta, indent=1))
        tokenizer.save(beside / "tokenizer.json")
        written = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(beside.iterdir())}
        (beside / MARKER).write_text(json.dumps(written, indent=1))
        for path in (*beside.iterdir(), beside):
            _sync(path)
        if best:  # before it is there: after a kill in between, the run makes the same best once more
            _point(run / "best", folder.name)
        if folder.exists():  # incomplete, of a killed process, or saved once more because it turned out to be the best
            os.rename(folder, run / f".{folder.name}.old")
        os.rename(beside, folder)
        _sync(run)
        _point(run / "last", folder.name)
        _sweep(run)
    except OSError:
        _sweep(run)
        raise
    kept = {(run / link).read_text().strip() for link in ("last", "best") if (run / link).is_file()}
    for old in _valid(run)[:-keep_last]:
        if old.name not in kept:
            _remove(old)
    return folder


def _remove(folder):
    (folder / MARKER).unlink(missing_ok=True)  # invalid first: a kill in between leaves no folder that looks complete
    shutil.rmtree(folder, ignore_errors=True)


def _sweep(run):
    """Remove what a killed or failed save left half-written."""
    for stale in (*run.glob(".step-*"), *run.glob(".last.*"), *run.glob(".best.*")):
        shutil.rmtree(stale) if stale.is_dir() else stale.unlink()


def leave(run, step):
    """Set aside, as `aside-step-NNNNNN`, the saves after `step`, which the run goes on from; returns their names."""
    left = [p for p in run.glob("step-*") if p.is_dir() and step_of(p) > step]
    for folder in left:
        target = run / f"aside-{folder.name}"
        if target.exists():
            _remove(target)
        os.rename(folder, target)
    if left:
        _point(run / "last", f"step-{step:06d}")
    best = run / "best"
    if best.is_file() and not is_valid(run / best.read_text().strip()):
        best.unlink()
    return [p.name for p in left]


def hold(run):
    """Keep `run` for this process: a descriptor that holds it until it is closed. BlockingIOError if another process has it."""
    handle = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise BlockingIOError(errno.EWOULDBLOCK, "another process trains there") from None
    except OSError:  # a file system without locks
        pass
    return handle


def remove_run(run):
    """Delete the checkpoints, links and logs of `run`, and nothing else that lies there."""
    for old in (*run.glob("step-*"), *run.glob("aside-step-*")):
        _remove(old)
    for name in ("last", "best", "metrics.jsonl", "starts.jsonl"):
        (run / name).unlink(missing_ok=True)


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
    try:
        written = json.loads((folder / MARKER).read_text())
    except ValueError as e:
        raise ConfigError(f"checkpoint {folder} is damaged: its {MARKER} marker cannot be read ({e})") from e
    if not isinstance(written, dict):
        raise ConfigError(f"checkpoint {folder} is damaged: its {MARKER} marker names no files")
    for name, want in written.items():
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
    """Put the saved moments back, each beside its parameter, in this rank's part if the parameter is spread over ranks."""
    saved = load_file(folder / "optimizer.safetensors")
    for one in getattr(optimizer, "each", [optimizer]):
        mine = {p for group in one.param_groups for p in group["params"]}
        on_device = any(group.get("fused") or group.get("capturable") for group in one.param_groups)
        for name, p in model.named_parameters():
            prefix = f"state.{name}."
            moments = {key.removeprefix(prefix): value.clone() for key, value in saved.items() if key.startswith(prefix)}
            if p in mine and moments:  # clones: what is loaded is a view of the file
                step = {k: v.to(p.device if on_device else "cpu") for k, v in moments.items() if k == "step"}
                one.state[p] = step | {k: distributed.part(v, p) for k, v in moments.items() if k != "step"}


def load_model(path, device="cpu", prefer=("best", "last")):
    """Model in evaluation mode, tokenizer and meta of a run or checkpoint folder; `best` before `last` unless told otherwise."""
    folder, meta = open_checkpoint(path, prefer)
    model = Model(ModelConfig(**meta["model"]))
    load_weights(model, folder)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    return model.to(device).eval(), tokenizer, {**meta, "folder": str(folder)}
