"""What a run tells: one line a log interval, metrics.jsonl, W&B, the health of gates and states, and what it all ran on."""

import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import kernels
from kernels.reference import key_distances
from model import SparseAttention

# Dense 16-bit matrix products with fp32 sums, TFLOP/s, as the makers state them. An unknown device is n/a, never another one's.
PEAKS = {
    "GB200": 2500, "B200": 2250, "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L40": 181,
    "L4": 121, "A40": 150, "A30": 165, "A10": 125, "RTX 6000 Ada": 364, "RTX A6000": 155, "RTX 5090": 209, "RTX 4090": 165,
    "RTX 3090": 71, "V100": 125, "T4": 65, "MI300X": 1307,
}  # fmt: skip
PARTS = r"\b(Laptop|Mobile|Max-Q|MIG)\b"  # of a card with such a name the figure does not hold

# Where the decays of a layer fall: a state forgets half of itself within 1, 7, 69, 693 tokens at these.
DECAY_BINS = (0.5, 0.9, 0.99, 0.999)

HEALTH_TOKENS = 8192  # of each row that `health` reads, at most: some of its figures are about all pairs of them


def peak_flops(device, dtype):
    """FLOP/s that `device` can do in 16-bit products, None where it is not known."""
    if device.type != "cuda" or dtype == "float32":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name):
    if re.search(PARTS, name):
        return None
    return next((1e12 * tera for known, tera in PEAKS.items() if re.search(rf"\b{known}\b", name)), None)


# ----------------------------------------------------------------------------------------------------------------------
# While it runs


class Log:
    """metrics.jsonl always, Weights & Biases where asked for and possible: its failures are warnings. Only rank 0 writes."""

    def __init__(self, run, config, step, wandb_id, rank=0):
        self.file, self.wandb, self.wandb_id = None, None, wandb_id
        if rank != 0:
            return
        path = run / "metrics.jsonl"
        if step and path.is_file():  # drop what a killed run logged beyond its last checkpoint, and a line it half wrote
            beside = path.with_name(f".{path.name}")
            with open(path, errors="replace") as lines:
                beside.write_text("".join(line.rstrip("\n") + "\n" for line in lines if _step_of(line) <= step))
            os.replace(beside, path)
        self.file = open(path, "a" if step else "w", buffering=1)
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
        if self.file is None:
            return
        record = {
            name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in record.items()
        }  # JSON has no nan
        try:
            self.file.write(json.dumps(record) + "\n")
        except OSError as e:  # a full disk
            print(f"warning: step {record['step']} is missing in metrics.jsonl ({e})", file=sys.stderr)
        if self.wandb is not None:
            try:
                self.wandb.log(record, step=record["step"])
            except Exception as e:  # as above
                print(f"warning: W&B is off from here on ({type(e).__name__}: {e})", file=sys.stderr)
                self.wandb = None

    def close(self):
        try:
            if self.file is not None:
                self.file.close()
            if self.wandb is not None:
                self.wandb.finish()
        except Exception as e:  # as above; a full disk shows at closing, too
            print(f"warning: the log could not be closed ({type(e).__name__}: {e})", file=sys.stderr)


def _step_of(line):
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return float("inf")


class Progress:
    """One line a log interval; on a terminal a line that is rewritten in place, with a bar where that fits."""

    def __init__(self, total):
        self.total, self.live = total, sys.stdout.isatty()

    def show(self, step, text):
        if not self.live:
            print(text, flush=True)
            return
        filled, room = 20 * step // self.total, shutil.get_terminal_size().columns - 1  # a line that wraps cannot be taken back
        bar = f"[{'#' * filled}{'.' * (20 - filled)}] "
        print(f"\r\033[K{(bar + text if len(bar + text) <= room else text)[:room]}", end="", flush=True)

    def say(self, text):
        print(f"{chr(10) if self.live else ''}{text}", flush=True)


class Signals:
    """SIGINT and SIGTERM ask for a stop at the next step boundary, SIGUSR1 for a save there; a second SIGINT leaves at once.

    `asked` is the number of the signal that asked to stop (0: none), `save` whether SIGUSR1 came.
    """

    def __init__(self, rank=0):
        self.asked, self.save, self.rank = 0, False, rank
        self.before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        if hasattr(signal, "SIGUSR1"):  # not on Windows
            self.before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._save)

    def _stop(self, number, frame):
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = int(number)
        if self.rank == 0:
            os.write(1, b"\nstopping after this step (Ctrl-C again: at once, unsaved)\n")  # print may be at work already

    def _save(self, number, frame):
        self.save = True

    def restore(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Clock:
    """Tokens per second of training, evaluation and saving not counted, and the share of time spent waiting for data.

    The first step of a process, which compiles, is timed by itself: `first_step` seconds since the start.
    """

    def __init__(self):
        self.first_step, self.all_tokens, self.all_seconds = None, 0, 0.0  # the latter two of what was read, without that step
        self._restart()

    def _restart(self):
        self.started, self.excluded, self.waited, self.tokens = time.perf_counter(), 0.0, 0.0, 0

    def add(self, tokens, waited, device):
        """A step is done."""
        self.tokens, self.waited = self.tokens + tokens, self.waited + waited
        if self.first_step is None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self.first_step = time.perf_counter() - self.started
            self.last = self._rates(self.first_step)
            self._restart()

    def _rates(self, seconds):
        return self.tokens / max(seconds, 1e-9), self.waited / max(seconds, 1e-9)

    def read(self):
        """(tokens per second, share of the time waited) since the last reading, or of the first step if nothing came after it."""
        if self.tokens:
            seconds = time.perf_counter() - self.started - self.excluded
            self.last = self._rates(seconds)
            self.all_tokens, self.all_seconds = self.all_tokens + self.tokens, self.all_seconds + seconds
            self._restart()
        return self.last

    def left(self, tokens):
        """Seconds that so many more tokens will take, at the mean pace of all that was read."""
        return tokens * self.all_seconds / self.all_tokens if self.all_tokens else tokens / self.last[0]

    def pause(self, began):
        """What happened since `began` (time.perf_counter()) was not training."""
        self.excluded += time.perf_counter() - began


# ----------------------------------------------------------------------------------------------------------------------
# The health of gates and states


@torch.no_grad()
def health(model, batch, dtype):
    """What the recurrent layers and the indexers do on the first HEALTH_TOKENS tokens of a batch's rows, {layer: figures}; an empty
    dict without such layers.

    decay       share of decays e^g below 0.5, in 0.5 to 0.9, 0.9 to 0.99, 0.99 to 0.999, and above
    memory      tokens after which a head's state has shrunk by e, at its mean decay: least, median and most of the heads
    state_norm  Frobenius norm of the heads' states after the batch: mean and most
    recall      attention that a query would give, reading all keys, to those its indexer selects; mean over heads and queries
    most        the same of the most attended keys, as many: what an indexer could reach
    overlap     share of the selected keys that are among as many most attended ones
    kl          the indexer's training loss, mean over tokens

    recall, most and overlap count the queries that see more than `top_k` keys, and are null where none does.
    """
    figures, layer, entered, training = {}, None, None, model.training
    tokens, labels, segment_ids = (None if x is None else x[:, :HEALTH_TOKENS] for x in batch[:3])

    def enter(index):
        def hook(_, args, kwargs):
            nonlocal layer, entered
            layer, entered = index, (args[0], kwargs["positions"])

        return hook

    def see(op, args, kwargs, result):
        if op in ("softmax_attention", "sparse_attention") and isinstance(mixer := model.blocks[layer].mixer, SparseAttention):
            index = mixer.index(*entered)
            with torch.autocast(args[0].device.type, enabled=False):
                figures[str(layer)] = _selection_figures(mixer, *args[:2], index, segment_ids)
        if op in ("delta_rule", "channel_delta_rule", "linear_attention", "normalized_linear_attention"):
            g = args[3] if len(args) > 3 else kwargs.get("g")
            figures[str(layer)] = _recurrent_figures(None if op.startswith("normalized") else g, result[1])

    mixers = [(i, b.mixer) for i, b in enumerate(model.blocks) if b.mixer is not None]
    hooks = [mixer.register_forward_pre_hook(enter(i), with_kwargs=True) for i, mixer in mixers]
    model.eval()
    try:
        with kernels.observe(see), torch.autocast(tokens.device.type, dtype=dtype, enabled=dtype is not None):
            model(tokens, labels, segment_ids=segment_ids)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return figures


def _selection_figures(mixer, q, k, index, segment_ids):
    """Of one `dsa` layer; q and k as attention reads them. A head at a time: scores of all pairs are large."""
    (B, T, H, D), limits = q.shape, {"top_k": mixer.top_k, "local": mixer.local}
    distance, _ = key_distances((B, T), q.device, None, segment_ids)
    seen = distance >= 0
    selected = kernels.select_top_k(kernels.indexer_scores(*index), distance, **limits)
    p = 0
    for h in range(H):
        scores = (q[:, :, h].float() @ k[:, :, h * k.shape[2] // H].float().mT) * D**-0.5
        p = p + scores.masked_fill(~seen, -torch.inf).softmax(-1) / H
    oracle = kernels.select_top_k(p, distance, mixer.top_k)
    real = torch.ones_like(seen[..., 0]) if segment_ids is None else segment_ids > 0
    counted = (seen.sum(-1) > mixer.top_k) & real
    recall, most = ((p * keys).sum(-1)[counted] for keys in (selected, oracle))
    overlap = (oracle & selected).sum(-1)[counted] / mixer.top_k
    read = {} if mixer.mode == "dense" else limits
    kl = kernels.indexer_kl(q, k, *index, segment_ids=segment_ids, **read)
    means = {name: x.mean().item() if len(x) else None for name, x in (("recall", recall), ("most", most), ("overlap", overlap))}
    return {**means, "kl": (kl.sum() / real.sum().clamp(min=1)).item()}


def selection_line(health):
    """What an evaluation prints of the indexers: means over the `dsa` layers; None without such layers."""
    layers, shown = [f for f in health.values() if "recall" in f], []
    for name, what in (("recall", "attention recalled"), ("overlap", "overlap with the most attended"), ("kl", "KL")):
        known = [f[name] for f in layers if f[name] is not None]
        if known:
            shown.append(f"{what} {sum(known) / len(known):.4f}")
    return f"            indexers: {', '.join(shown)}" if shown else None


def _recurrent_figures(g, state):
    norms = state.float().flatten(2).norm(dim=-1)  # (B, H)
    figures = {"state_norm": [norms.mean().item(), norms.max().item()]}
    if g is not None:  # (H,), (B, T, H) or (B, T, H, K)
        g = g.float()
        edges = torch.tensor(DECAY_BINS, device=g.device).log()
        counts = torch.bincount(torch.bucketize(g.flatten(), edges), minlength=len(edges) + 1)
        mean = g if g.ndim == 1 else g.mean((0, 1)).flatten()
        memory = (-1 / mean.clamp(max=-1e-12)).sort().values  # a decay of e^-1e-12 is none
        figures["decay"] = (counts / g.numel()).tolist()
        figures["memory"] = [memory[0].item(), memory[len(memory) // 2].item(), memory[-1].item()]
    return figures


# ----------------------------------------------------------------------------------------------------------------------
# What it ran on


def git(*args):
    """What git says of this code's checkout; "" outside one."""
    try:
        done = subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def environment(device, ranks):
    """Versions, devices and the state of the code, for whoever asks later what made this run."""
    versions = {}
    for name in ("torch", "triton", "numpy", "safetensors", "tiktoken"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    gpu = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "versions": versions,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if gpu else platform.processor() or platform.machine(),
        "cuda": torch.version.cuda if gpu else None,
        "world": ranks.world,
        "threads": torch.get_num_threads(),
        "commit": git("rev-parse", "HEAD") or None,
        "changed": git("status", "--porcelain").splitlines(),
    }


def record_start(run, argv, config, step, facts):
    """One line in starts.jsonl, and what is not committed as uncommitted.diff."""
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(["python", "train.py", *argv]),
        "step": step,
        "settings": config.model_dump(),
        **facts,
    }
    with open(run / "starts.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    if facts["changed"]:
        (run / "uncommitted.diff").write_text(git("diff", "HEAD") + "\n")


def command(*arguments):
    """The command line that runs train.py with these arguments, in as many processes as now."""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    start = ["torchrun", f"--nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE')}"] if several else ["python"]
    return shlex.join([*start, script("train.py"), *map(str, arguments)])


def script(name):
    """The path of one of the scripts beside this file, from the working directory."""
    return os.path.relpath(Path(__file__).with_name(name))
