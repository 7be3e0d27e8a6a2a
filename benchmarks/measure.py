"""What every benchmark shares: settings, clocks, memory, a table on the screen and the same as JSON."""

import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import time
import weakref
from pathlib import Path

import torch
from pydantic import Field
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configurator import Settings


class BenchConfig(Settings):
    """measuring"""

    out_dir: str = Field("out/bench", min_length=1, description="folder of the results")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="seed of inputs and weights")


def whole_number(text):
    return text.isdecimal() and int(text) > 0


def list_problems(config, name, allowed, hint="whole numbers from 1 on"):
    """A line for every item of a comma-separated setting that is not allowed."""
    for item in split_list(getattr(config, name)) or [""]:
        if not allowed(item):
            yield {name}, f"{name}={getattr(config, name)}: {item!r} is not possible: {hint}"


def split_list(text):
    return [item.strip() for item in text.split(",") if item.strip()]


class PeakMemory(TorchDispatchMode):
    """Within this context, count the bytes of every tensor storage that PyTorch's operators make, until it is freed.

    `peak` is the largest sum at any moment, the backward pass included. It is exact and repeatable, unlike the resident set; it
    does not see what an operator's own C++ code allocates and frees inside one call.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before:  # not a view, not in place
                self._count(x.untyped_storage())
        return out

    def _count(self, storage):
        if storage in self.known:
            return
        self.known.add(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, size)

    def _free(self, size):
        self.live -= size


def synchronize(device):
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def timed(call, device):
    """Seconds of one call."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def median_seconds(call, device, repeats, budget=10.0):
    """Median of up to `repeats` calls after one that warms up; fewer where they take more than `budget` seconds in all."""
    first, times = timed(call, device), []
    while len(times) < repeats and (not times or sum(times) + first < budget):
        times.append(timed(call, device))
    return statistics.median(times)


def peak_bytes(call, device):
    """Most bytes alive at once during the call, beyond those alive before it."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with PeakMemory() as memory:
        call()
    return memory.peak


def kernel_times(call, device, most=25):
    """What takes the time of a call: name, calls, ms and share of the `most` costliest kernels, or operations on a CPU."""
    on_gpu = device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        call()
        synchronize(device)
    figures = {}
    for event in profile.key_averages():
        if on_gpu and (event.device_type == torch.autograd.DeviceType.CPU or getattr(event, "is_user_annotation", False)):
            continue  # launches, and spans that hold kernels
        ms = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3
        if ms > 0:
            calls, before = figures.get(event.key, (0, 0.0))
            figures[event.key] = calls + event.count, before + ms
    total = sum(ms for _, ms in figures.values())
    rows = [{"name": name, "calls": calls, "ms": ms, "share": ms / total} for name, (calls, ms) in figures.items()]
    return sorted(rows, key=lambda row: -row["ms"])[:most]


def surroundings(device):
    """What a figure depends on besides the code."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None
    return {"device": name, "torch": torch.__version__, "triton": triton, "threads": torch.get_num_threads(), "load_before": load}


def write_report(config, name, device, rows, **more):
    """Write the rows and what they depend on to out_dir/name.json; returns the file's content and its path."""
    content = {"settings": config.model_dump(), **surroundings(device), "rows": rows, **more}
    path = Path(config.out_dir) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return content, path


def report(config, name, device, rows, **more):
    """`write_report`, and a line on the screen that says where; returns the file's content."""
    content, path = write_report(config, name, device, rows, **more)
    print(f"{', '.join(f'{k} {v}' for k, v in surroundings(device).items())}; written to {path}")
    return content


def print_table(head, rows):
    """Columns aligned to the right, the first two to the left."""
    table = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        print("  ".join(cells).rstrip())
    sys.stdout.flush()
