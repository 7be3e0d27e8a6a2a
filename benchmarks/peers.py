"""Processes for peers that tune themselves, that is compile tens of configurations of each kernel and keep the fastest.

What a peer has chosen lives in the memory of its process: of configurations with hooks (mamba_ssm's), Triton stores no choice on
disk. So the process that tuned a peer measures it too, later and on another device if need be. One that has ended meanwhile is
started again: what its libraries keep on disk is there.
"""

import contextlib
import functools
import multiprocessing
import os
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from pathlib import Path

THREADS = 8  # compilers of one process: an eighth of a compilation is Python, which only one thread at a time runs
LINES = 3  # the last of what a process printed that ended by itself
GRACE = 10.0  # seconds to end what cannot be told to stop: a compiler that runs outside Python


def tune_quickly(slots, stop):
    """Make Triton's autotuner compile the configurations of a kernel side by side, then time each for 15 ms and take its best run.

    Triton compiles one after the other and takes the median of 100 ms. The best run is the one that no other process on the device
    interrupted. A configuration that fails in whatever way is never chosen. `slots` is a semaphore with a slot for each core that
    may compile, `stop` an event after which tuning is an error.
    """
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    prune, bench = Autotuner.prune_configs, Autotuner._bench

    def prune_configs(self, kwargs):
        configs = prune(self, kwargs)
        self.not_compiled = list(configs)  # what `run` times next, unless its choice is on disk
        return configs

    def timed(self, *args, config, **meta):
        configs, self.not_compiled = getattr(self, "not_compiled", []), []
        if len(configs) > 1:
            compile_side_by_side(self.fn, args, meta, configs, slots, stop)
        if stop.is_set():
            raise TimeoutError("not tuned in time")
        try:
            return bench(self, *args, config=config, **meta)
        except Exception:  # the compiler's own errors have no class in common; if all fail, running the kernel says why
            return [float("inf")] * 3

    Autotuner.prune_configs, Autotuner._bench = prune_configs, timed
    quick = functools.partial(triton.testing.do_bench, warmup=3, rep=15)
    Autotuner.do_bench = staticmethod(lambda call, quantiles: quick(call, quantiles=(0.0, 0.5, 1.0)))


def compile_side_by_side(kernel, args, meta, configs, slots, stop):
    """Compile a kernel for every configuration, in threads; those that fail are left to whoever runs them.

    `kernel.run(*args, **meta)` is the launch that is to come. Hooks of configurations are not called: they change tensors.
    """
    import triton

    def in_turn(compile):
        held = slots.acquire(timeout=60)  # a process that crashed keeps its slots
        try:
            if stop.is_set():
                raise TimeoutError("not compiled in time")
            return compile()
        finally:
            if held:
                slots.release()

    with ThreadPoolExecutor(min(THREADS, os.cpu_count())) as pool:
        executor = types.SimpleNamespace(submit=lambda compile: pool.submit(in_turn, compile))
        with contextlib.suppress(Exception), triton.AsyncCompileMode(executor, ignore_errors=True):
            for config in configs:
                with contextlib.suppress(Exception):
                    kernel.run(*args, **meta | config.all_kwargs() | {"warmup": True})


def serve(pipe, slots, stop, log):
    """In a worker: call (function, *arguments) from the pipe and send what it returns, until the pipe is closed.

    What compilers print, such as the code of a kernel that ptxas refuses, goes into the file `log`.
    """
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with contextlib.suppress(ImportError):
        tune_quickly(slots, stop)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            function, *arguments = pipe.recv()
            pipe.send(function(*arguments))


class Workers:
    """A process for each value of `key(job)`. `said` is what `warm` returned for each job, or why there is none."""

    def __init__(self, jobs, key, processes):
        context = multiprocessing.get_context("spawn")
        self.jobs, self.key, self.processes, self.said = jobs, key, processes, {}
        # Two cores are left to whoever waits for them, and compiles too.
        self.slots, self.stop = context.Semaphore(max(1, os.cpu_count() - 2)), context.Event()
        self.workers, self.context, self.started, self.logs = {}, context, 0, tempfile.TemporaryDirectory()

    def _worker(self, key):
        """(process, pipe, file of what it prints), started if there is none."""
        if key in self.workers and not self.workers[key][0].is_alive():
            self._end(key)
        if key not in self.workers:
            mine, theirs = self.context.Pipe()
            log, self.started = Path(self.logs.name) / str(self.started), self.started + 1
            process = self.context.Process(target=serve, args=(theirs, self.slots, self.stop, log), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self.workers[key] = process, mine, log
        return self.workers[key]

    def _end(self, key):
        process, pipe, _ = self.workers.pop(key)
        process.kill()
        process.join()
        pipe.close()

    def _receive(self, key):
        try:
            return self.workers[key][1].recv()
        except (EOFError, OSError):
            process, _, log = self.workers[key]
            process.join()
            self._end(key)
            lines = [line.strip()[:120] for line in log.read_text(errors="replace").splitlines() if line.strip()]
            return ": ".join([f"its process ended with {process.exitcode}", *[" | ".join(lines[-LINES:])] * bool(lines)])

    def warm(self, function, seconds, ready=lambda job, error: None):
        """Call function(job) for every job in the workers, as many at once as may be, each key's one after the other and in order.

        What is not done after `seconds` is stopped. `ready` is called with each job and what the function returned.
        """
        end, waiting, busy = time.perf_counter() + seconds, list(self.jobs), {}
        late = f"not compiled within {seconds:.0f} s"
        while (waiting and not self.stop.is_set()) or busy:
            left = end - time.perf_counter()
            if left <= 0:
                self.stop.set()
            if left <= -GRACE:
                break
            for job in waiting if left > 0 else ():
                if len(busy) < min(self.processes, os.cpu_count()) and self.key(job) not in busy:
                    self._worker(self.key(job))[1].send((function, job))
                    busy[self.key(job)] = job
            waiting = [job for job in waiting if job not in busy.values()]
            pipes = {self.workers[key][1]: key for key in busy}
            for pipe in connection.wait(list(pipes), max(0.0, left if left > 0 else left + GRACE)):
                job = busy.pop(pipes[pipe])
                said = self._receive(pipes[pipe])
                self.said[job] = late if said and self.stop.is_set() else said
                ready(job, self.said[job])
        self.stop.set()
        for key in busy:
            self._end(key)
        for job in [*busy.values(), *waiting]:
            self.said[job] = late
            ready(job, late)

    def measure(self, function, job, *arguments, seconds):
        """(what function(job, *arguments) returns in the worker that warmed the job, None), or (None, an error).

        A worker that was ended by another job of its key is started again.
        """
        key = self.key(job)
        if self.said.get(job):
            return None, self.said[job]
        try:
            self._worker(key)[1].send((function, job, *arguments))
        except OSError:
            return None, self._receive(key)
        if not self.workers[key][1].poll(seconds):
            self._end(key)
            return None, f"not measured within {seconds:.0f} s"
        said = self._receive(key)
        return (None, said) if isinstance(said, str) else (said, None)

    def close(self):
        self.stop.set()
        for key in list(self.workers):
            self._end(key)
        self.logs.cleanup()
