"""Peers that tune themselves: Triton's autotuner made quick, with a compiler that only pretends, and the processes they run in."""

import functools
import multiprocessing
import os
import threading
import time
from types import SimpleNamespace

import pytest

from benchmarks.operators import Job, measure, providers, warm
from benchmarks.peers import Workers, tune_quickly

triton = pytest.importorskip("triton", reason="needs Triton")
from triton.runtime import _async_compile  # noqa: E402
from triton.runtime.autotuner import Autotuner, Config, Heuristics  # noqa: E402


class Kernel:
    """Stands for a JIT function: compiling takes 50 ms of a thread, a launch appends the number of warps to x."""

    def __init__(self, broken=()):
        self.broken, self.compiled, self.threads, self.launched = broken, set(), set(), []
        self.fn = lambda x, n, W: None

    def run(self, x, n, W, num_warps, warmup, even, **options):
        assert even is (n % 2 == 0)  # what the heuristics said

        def compile():
            time.sleep(0.05)
            self.threads.add(threading.get_ident())
            if num_warps in self.broken:
                raise RuntimeError("pass manager failed")
            self.compiled.add(num_warps)

        if warmup:
            mode = _async_compile.active_mode.get()
            ignored = [lambda *_: None] * (mode.submit.__code__.co_argcount - 3)  # one function, two in later versions
            mode.submit(num_warps, compile, *ignored)
            return
        if num_warps not in self.compiled:
            compile()
        self.launched.append(num_warps)
        x.append(num_warps)


class Tensor(list):
    clone = list.copy

    def copy_(self, other):
        self[:] = other


@pytest.fixture
def quick(monkeypatch):
    """Triton's autotuner made quick, with two slots: a function that makes one of 4, 2, 1 and 8 warps, and the event that ends it.

    A launch is said to take as many ms as it has warps.
    """
    for name in ("prune_configs", "_bench", "do_bench"):
        monkeypatch.setattr(Autotuner, name, vars(Autotuner)[name])  # puts it back afterwards
    stop = threading.Event()

    def tuner(kernel, hook=None, **options):
        def bench(call, warmup, rep, quantiles):
            assert (warmup, rep, quantiles[0]) == (3, 15, 0.0)
            call()
            return [float(kernel.launched[-1])] * 3

        monkeypatch.setattr(triton.testing, "do_bench", bench)
        tune_quickly(threading.Semaphore(2), stop)
        names, configs = ["x", "n", "W"], [Config({"W": 8}, num_warps=n, pre_hook=hook) for n in (4, 2, 1, 8)]
        kernel_of = Heuristics(kernel, names, {"even": lambda args: args["n"] % 2 == 0})
        return Autotuner(kernel_of, names, configs, ["n"], None, options.get("restore_value"))

    return tuner, stop


def test_configurations_are_compiled_side_by_side_and_the_fastest_is_kept(quick):
    called, kernel = [], Kernel(broken=(1,))
    tuner = quick[0](kernel, lambda args: called.append(args["num_warps"]))
    tuner.run([], 6, grid=(1,), warmup=False)
    assert kernel.compiled == {2, 4, 8} and tuner.best_config.num_warps == 2  # that of one warp does not compile
    assert kernel.launched == [4, 2, 8, 2]  # compiling launches nothing
    assert called == [4, 2, 1, 8, 2]  # and calls no hooks
    assert len(kernel.threads - {threading.get_ident()}) >= 2
    tuner.run([], 6, grid=(1,), warmup=False)
    assert kernel.launched[4:] == [2]  # the choice is kept


def test_tensors_that_a_kernel_changes_are_restored(quick):
    x = Tensor([0])
    quick[0](Kernel(), restore_value=["x"]).run(x, 6, grid=(1,), warmup=False)
    assert x == [0, 1]  # of all launches the last is left


def test_tuning_ends_when_it_is_told_to(quick):
    tuner, stop = quick
    stop.set()
    kernel = Kernel()
    with pytest.raises(TimeoutError, match="not tuned in time"):
        tuner(kernel).run([], 6, grid=(1,), warmup=False)
    assert not kernel.compiled and not kernel.launched


# Processes: the jobs are expressions and the function is eval, which a new process need import nothing for


DEAD = "print('why', file=__import__('sys').stderr, flush=True) or __import__('os')._exit(3)"
GOOD, STUCK = "globals().get('row')", "globals().get('row') and __import__('time').sleep(60)"
BAD, CRASH, SLOW = "'it fails'", DEAD, "__import__('time').sleep(60)"


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    made = []

    def make(jobs, key):
        made.append(Workers(jobs, key, 8))
        return made[-1]

    yield make
    for x in made:
        x.close()
    assert not multiprocessing.active_children()


def test_a_process_measures_what_it_warmed(workers):
    kinds, told = {GOOD: 0, STUCK: 0, BAD: 1, CRASH: 2}, []
    x = workers(list(kinds), kinds.get)
    x.warm(eval, 100.0, lambda *job_and_error: told.append(job_and_error))
    assert x.said == dict(told) == {GOOD: None, STUCK: None, BAD: "it fails", CRASH: "its process ended with 3: why"}
    assert x.measure(eval, GOOD, {"row": {"ms": 1}}, seconds=30) == ({"ms": 1}, None)
    assert x.measure(eval, BAD, {"row": {"ms": 1}}, seconds=30) == (None, "it fails")
    assert x.measure(eval, STUCK, {"row": {"ms": 1}}, seconds=1.0) == (None, "not measured within 1 s")
    assert x.measure(eval, GOOD, {"row": {"ms": 2}}, seconds=30) == ({"ms": 2}, None)  # in a process started again


def test_what_is_not_ready_in_time_is_ended(workers, monkeypatch):
    monkeypatch.setattr("benchmarks.peers.GRACE", 0.5)
    x = workers([SLOW, GOOD], lambda job: 0)
    start = time.perf_counter()
    x.warm(eval, 1.0)
    assert x.said == dict.fromkeys([SLOW, GOOD], "not compiled within 1 s") and x.workers == {}
    assert time.perf_counter() - start < 30


def test_an_operator_in_a_process(workers):
    ours, missing = (Job("norm", "N64 D16", provider, "float32", "cpu", 0) for provider in ("ours", "nobody"))
    x = workers([ours, missing], lambda job: job.provider)
    x.warm(functools.partial(warm, device="cpu"), 200.0)
    assert x.said[ours] is None and isinstance(x.said[missing], str)
    row, error = x.measure(measure, ours, False, seconds=60)
    assert error is None and 0 < row["forward_ms"] < row["ms"]


@pytest.mark.parametrize(
    "peers, named",
    [(True, ["ours", "fla", "flash_qla"]), (False, ["ours"]), ("flash_qla,flex", ["ours", "flash_qla"])],
)
def test_which_peers_are_measured(peers, named):
    assert providers(SimpleNamespace(peers=peers), "gdn", SimpleNamespace(type="cuda")) == named
