"""bench.py at tiny sizes, the growth of memory in bytes, and docs/mixers.md: its code runs, its figures are those of the model."""

import json
import multiprocessing
import re
import time
import types
from pathlib import Path

import pytest
import torch

import bench
from benchmarks import operators as peered
from benchmarks import training, tuning
from benchmarks.measure import PeakMemory
from benchmarks.operators import compare, failed, milliseconds, one_line, replayed, warm_all
from benchmarks.workloads import WORKLOADS, bound_ms
from configurator import ConfigError, ModelConfig
from model import Model, format_bytes


def run(tmp_path, command, *flags):
    content = bench.main([command, f"--out_dir={tmp_path}", *flags])
    assert json.loads((tmp_path / f"{command}.json").read_text()) == content
    assert {"settings", "device", "torch", "threads", "load_before", "rows"} <= set(content)
    return content["rows"]


def test_forms(tmp_path, capsys):
    flags = ("--lengths=16,80", "--batch_size=1", "--n_head=2", "--head_dim=8", "--repeats=1", "--device=cpu")
    rows = run(tmp_path, "forms", *flags)
    assert {(r["family"], r["form"]) for r in rows} == {
        (family, form) for family in bench.FAMILIES for form in bench.forms_of(bench.FAMILIES[family])
    }
    assert all(r["ms"] > 0 and r["forward_ms"] > 0 and r["peak_bytes"] > 0 for r in rows)
    steps = {(r["form"], r["T"]): r["sequential_steps"] for r in rows if r["family"] == "gdn"}
    assert steps[("recurrent", 80)] == 80 and steps[("parallel", 80)] == 1 and steps[("chunkwise", 80)] == 2
    assert 0 < (tmp_path / "forms.png").stat().st_size < 100_000
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 2


def test_forms_leave_out_what_would_not_fit(tmp_path, capsys):
    flags = ("--lengths=64", "--families=kda", "--head_dim=8", "--n_head=1", "--repeats=1", "--max_gib=1e-4", "--plot=false")
    rows = {r["form"]: r for r in run(tmp_path, "forms", *flags, "--device=cpu")}
    assert rows["parallel"]["ms"] is None and rows["chunkwise"]["ms"] > 0
    assert "over max_gib" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(bench.FAMILIES))
def test_forms_are_one_function(name):
    family = bench.FAMILIES[name]
    torch.manual_seed(0)
    inputs = [x.detach().double().requires_grad_() for x in bench.family_inputs(family, 2, 70, 2, 8, torch.device("cpu"))]
    results = []
    for form in bench.forms_of(family).values():
        out = form(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_memory_is_linear_for_recurrent_layers_and_quadratic_for_attention(tmp_path):
    rows = run(tmp_path, "memory", "--lengths=256,512,1024", "--n_embd=32", "--layers=gdn kda mamba2 lightning", "--device=cpu")
    growth = {}
    for row in rows:
        growth.setdefault(row["layer"], []).append(row["growth"])
    dense = growth.pop("attn, T x T")
    assert dense[0] is None and all(3.7 < x <= 4.0 for x in dense[1:])
    assert set(growth) == {"gdn", "kda", "mamba2", "lightning"}
    assert all(1.9 < x < 2.05 for ratios in growth.values() for x in ratios[1:])


def test_peak_memory_counts_what_is_alive():
    x = torch.randn(1000, requires_grad=True)
    with PeakMemory() as memory:
        y = x.exp().exp()  # two results, both kept for the backward pass
        assert memory.live == memory.peak == 8000
        y.view(10, 100).add_(1)  # a view and an in-place operation: nothing new
        assert memory.live == 8000
        z = y.detach().sum()
        del y, z
        assert memory.live == 0 and memory.peak == 8004


def test_kernels(tmp_path, capsys):
    rows = run(tmp_path, "kernels", "--operators=gdn,conv,loss", "--shapes=B1 T70 D16 H2 K8 V8 N20", "--device=cpu", "--profile")
    assert all(sum(kernel["share"] for kernel in r["profile"]) > 0.5 for r in rows)
    assert [(r["operator"], r["backend"]) for r in rows] == [("gdn", "eager"), ("conv", "eager"), ("loss", "eager")]
    assert all(0 < r["forward_ms"] < r["ms"] and r["graph_ms"] is None for r in rows)  # no graphs on a CPU
    assert "of bound" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_workloads_run_and_cost_something(name):
    workload = WORKLOADS[name]
    s = workload.sizes("B1 T66 H2 G1 K8 V8 D16 N20")
    inputs = workload.inputs(s, workload.kinds[-1])
    out = workload.call(inputs, s)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    assert any(x.grad is not None for x in inputs.values())
    assert all(bound_ms(cost, "NVIDIA H200") > 0 for cost in workload.cost(s))
    assert bound_ms(workload.cost(s)[0], "a device nobody knows") is None


@pytest.mark.parametrize(
    "name, shape, forward, both",  # milliseconds on an H200, from counts made by hand
    [
        ("gdn", "B8 T4096 H16", 0.126, 0.45),
        ("linear", "B8 T4096 H16", 0.125, 0.34),
        ("mamba2", "B8 T4096 H32", 0.067, 0.22),
        ("attention", "B8 T4096 H16", 0.70, 2.4),
        ("window", "B8 T4096 H16 w512", 0.17, 0.5),
        ("conv", "B8 T4096 D2048", 0.062, 0.16),
        ("loss", "N32768 D768 V50304", 3.2, 9.6),
    ],
)
def test_bounds(name, shape, forward, both):
    workload = WORKLOADS[name]
    bounds = [bound_ms(cost, "NVIDIA H200") for cost in workload.cost(workload.sizes(shape))]
    assert bounds[0] == pytest.approx(forward, rel=0.06) and sum(bounds) == pytest.approx(both, rel=0.2)


def test_a_first_call(tmp_path):
    (row,) = run(tmp_path, "first", "--operators=norm", "--device=cpu")
    assert row["error"] is None and 0 < row["seconds"] < 60


def test_ours_beside_peers():
    rows = [
        {"operator": "gdn", "shape": "T1", "provider": p, "forward_ms": x, "ms": 3 * x} for p, x in (("ours", 1.0), ("fla", 2.0))
    ]
    compare(rows := [*rows, {"operator": "gdn", "shape": "T1", "provider": "flash_qla", "error": "No module"}])
    assert "ratio" not in rows[0] and rows[1]["forward_ratio"] == rows[1]["ratio"] == 2.0 and "ratio" not in rows[2]
    assert "graph_ratio" not in rows[1]
    for row, graph_ms in zip(rows, (0.5, 2.0), strict=False):
        row["graph_ms"] = graph_ms
    compare(rows)
    assert rows[1]["graph_ratio"] == 4.0


def test_times_are_taken_when_nothing_else_runs(tmp_path, monkeypatch):
    """Ours only after all peers have been tuned, and what did not compile not at all."""
    events = []

    class Workers:
        def __init__(self, jobs, key, processes):
            events.append(([(job.shape, job.provider) for job in jobs], len({key(job) for job in jobs})))

        def warm(self, function, seconds, ready):
            time.sleep(0.3)
            events.append("tuned")

        def measure(self, function, job, memory, seconds):
            events.append(job.provider)
            return None, "late"

        def close(self):
            events.append("closed")

    monkeypatch.setattr(peered, "Workers", Workers)
    monkeypatch.setattr(peered, "resolve_device", lambda config: (torch.device("cuda:0"), None))
    monkeypatch.setattr(peered, "warm_all", lambda jobs, n: {jobs[0]: None, jobs[1]: "it fails"})
    monkeypatch.setattr(peered, "measure", lambda job, memory: events.append(job.provider) or failed(job, "measured"))
    around = dict.fromkeys(("device", "torch", "threads", "load_before"))
    monkeypatch.setattr("benchmarks.measure.surroundings", lambda device: around)
    rows = run(tmp_path, "kernels", "--operators=gdn", "--shapes=B1,B2", "--device=cuda:0")
    tuned = [(shape, provider) for shape in ("B1", "B2") for provider in ("fla", "flash_qla")]
    # fla's shapes one after the other in one process, FlashQLA's side by side
    assert events == [(tuned, 3), "tuned", "ours", *(provider for _, provider in tuned), "closed"]
    assert [row["error"] for row in rows if row["provider"] == "ours"] == ["measured", "it fails"]


@pytest.mark.parametrize(
    "message, says",
    [
        ("no descriptor: invalid context\nblockSize=[64, 64]", "no descriptor: invalid context"),
        ("at 12:4:\n    x = tl.dot(a, b)\n    ^\nshapes differ", "shapes differ"),
        ("", ""),
    ],
)
def test_an_error_in_one_line(message, says):
    assert one_line(ValueError(message)) == f"ValueError: {says}"


@pytest.mark.gpu
def test_a_call_replayed_from_a_graph():
    """Of 20 products of small matrices the host's launches take longer than the kernels."""
    x, device = torch.randn(64, 64, device="cuda", requires_grad=True), torch.device("cuda", 0)

    def call():
        y = x
        for _ in range(20):
            y = y @ x
        return torch.autograd.grad(y, x, torch.ones_like(y))

    assert 0 < replayed(call, device) < milliseconds(call, device)
    with pytest.raises(RuntimeError, match="synchronizing"):
        replayed(lambda: x.sum().item(), device)
    with pytest.raises(RuntimeError):
        replayed(torch.cuda.synchronize, device)  # which is not seen before capturing
    torch.cuda.empty_cache()
    assert 0 < replayed(call, device)  # failures leave nothing behind


def test_tuning_finds_what_is_used_and_refuses_what_differs(monkeypatch):
    pytest.importorskip("triton", reason="needs Triton")
    device, shape = torch.device("cpu"), "B1 T70 H1 G1 K16 V16"
    assert {"prepare", "forward", "keep", "reverse", "inputs"} <= set(tuning.used("gdn", shape, device))
    module, key = tuning.table_of("gdn", device)
    present = module.LAUNCH[key]["reverse"]
    wider = tuning.Candidate("gdn", "reverse", tuple((present | {"num_warps": 8}).items()))
    assert tuning.differs(wider, shape, device) is None
    assert tuning.differs(wider._replace(options=(("num_warps", 4),)), shape, device) == "KeyError: 'BV'"
    monkeypatch.setattr(tuning, "SAME", -1.0)
    assert tuning.differs(wider, shape, device).startswith("differs by")
    assert module.LAUNCH[key]["reverse"] is present


def test_tuning_prints_the_best_table():
    changed = list(tuning.alternatives({"BV": 32, "num_warps": 4, "num_stages": 1}, most_warps=8))
    assert {"BV": 16, "num_warps": 4, "num_stages": 1} in changed and {"BV": 32, "num_warps": 8, "num_stages": 1} in changed
    assert len(changed) == 8
    rows = [{"operator": "gdn", "kernel": "reverse", "options": {"num_warps": n}, "ratio": x} for n, x in ((2, 0.9), (8, 0.8))]
    rows += [{"operator": "gdn", "kernel": "inputs", "options": {"num_warps": 8}, "ratio": 0.99}]
    text = tuning.as_text("gdn", rows, torch.device("cpu"))
    assert '"reverse": {"num_warps": 8},  # 0.800 of the time' in text and text.count("of the time") == 1


NANOGPT = """
import torch
from dataclasses import dataclass

@dataclass
class GPTConfig:
    block_size: int = 8
    vocab_size: int = 8
    n_layer: int = 1
    n_head: int = 1
    n_embd: int = 8
    dropout: float = 0.0
    bias: bool = True

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(config.vocab_size, 8), torch.nn.Linear(8, config.vocab_size, bias=config.bias)

    def forward(self, tokens, targets):
        logits = self.head(self.embed(tokens))
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate)
"""


def test_train(tmp_path, capsys):
    (tmp_path / "model.py").write_text(NANOGPT)
    flags = (
        "--layers=gdn attn; gpt2",
        "--block_size=16,32",
        "--batch_tokens=64",
        "--steps=1",
        f"--nanogpt={tmp_path}",
        "--device=cpu",
        "--profile",
    )
    rows = run(tmp_path, "train", *flags)
    assert [(r["model"], r["T"], r["batch_size"]) for r in rows] == [
        (model, T, 64 // T) for T in (16, 32) for model in ("nanogpt", "gdn attn", "gpt2")
    ]
    assert all(r["ms"] > 0 and r["first_step_s"] > 0 and r["tokens_per_s"] == pytest.approx(64e3 / r["ms"]) for r in rows)
    assert all(r["mfu"] is None for r in rows)
    for row in rows:
        times = [kernel["ms"] for kernel in row["profile"]]
        assert 1 < len(times) <= 25 and times == sorted(times, reverse=True)
        assert sum(kernel["share"] for kernel in row["profile"]) <= 1 + 1e-9 and all(k["calls"] > 0 for k in row["profile"])
    assert (tmp_path / "train.png").stat().st_size > 0
    said = capsys.readouterr().out
    assert said.index("nanogpt, T=16: ") < said.index("gpt2, T=32: ") < said.index("model     T ")
    assert f" x {rows[0]['profile'][0]['name'][:90]}\n" in said and said.count(" tokens/s, kernels ") == len(rows)


def test_train_on_several_devices(tmp_path, capsys):
    """Each row in a process of its own, on its device; each is written down as soon as it is known."""
    flags = ("--layers=lightning(head_dim=16)", "--block_size=8,16", "--batch_tokens=32", "--steps=1", "--devices=cpu,cpu")
    rows = run(tmp_path, "train", *flags, "--cold=first", "--plot=false")
    assert [r["T"] for r in rows] == [8, 16] and all(r["ms"] > 0 for r in rows)
    assert rows[0]["first_step_s"] > 0 and rows[1]["first_step_s"] is None  # that one had what the first compiled
    said = capsys.readouterr().out
    assert "T=8: first step " in said and "T=16: compiled" in said and said.count("tokens/s\n") == 2


def job(**settings):
    return training.Job("gdn", 16, 1, "tiny", "cpu", False, False, None, 1, 0)._replace(**settings)


def test_biases_on_both_sides(tmp_path):
    (tmp_path / "model.py").write_text(NANOGPT)
    few, many = (
        {item: training.measure(job(item=item, bias=bias, nanogpt=tmp_path))["parameters"] for item in ("gpt2", "nanogpt")}
        for bias in (False, True)
    )
    assert many["nanogpt"] - few["nanogpt"] == 64  # of the head
    assert many["gpt2"] - few["gpt2"] == 4 * (3 * 32 + 32 + 3072 + 32) + 9 * 32  # of layers, of norms


def test_a_model_that_fails_is_a_line_of_the_table(monkeypatch):
    monkeypatch.setattr(training, "start", lambda *_: 1 / 0)
    row = training.measure(job())
    assert row["error"] == "ZeroDivisionError: division by zero" and training._cells(row)[-1] == row["error"]
    assert training.progress(row) == "gdn, T=16: ZeroDivisionError: division by zero"


class Pipe:
    """One end of a pipe, for `serve` in this process."""

    def __init__(self):
        self.sent = []

    def send(self, x):
        self.sent.append(x)

    def recv(self):
        return True


def test_what_had_no_memory_beside_others_is_tried_again_alone(monkeypatch):
    failures = [torch.OutOfMemoryError("CUDA out of memory"), None, ValueError("no such layer"), ValueError("no such layer")]

    def start(*arguments):
        if (failure := failures.pop(0)) is not None:
            raise failure
        return training_start(*arguments)

    training_start = training.start
    monkeypatch.setattr(training, "start", start)
    training.serve(pipe := Pipe(), job())
    assert pipe.sent[0]["again"] and "OutOfMemoryError" in pipe.sent[0]["error"] and pipe.sent[1]["ms"] > 0
    training.serve(pipe := Pipe(), job())
    assert [row["error"] for row in pipe.sent] == ["ValueError: no such layer"] * 2 and "again" not in pipe.sent[0]


def test_a_process_that_ends_is_a_line_of_the_table(monkeypatch):
    known = []
    broken = job(cache="\0")  # no such name for a folder
    training.on_device([broken], 1, None, None, lambda job, figures: known.append(figures))
    assert known == [{"error": "its process ended"}]


def test_what_takes_no_first_step_in_time_is_left_out():
    known = {}
    training.on_device([job(T=8), job(T=16)], 1, None, 0.1, lambda job, figures: known.update({job.T: figures["error"]}))
    assert known == dict.fromkeys((8, 16), "no first step within limit=0.1 s")


def test_what_is_ready_is_measured_before_the_rest(tmp_path):
    """One model takes no first step until the other is measured, and is stopped meanwhile."""
    measured, events, states = tmp_path / "measured", [], []
    until = f"import pathlib, time\nwhile not pathlib.Path({str(measured)!r}).exists():\n    time.sleep(0.05)\n"
    (tmp_path / "model.py").write_text(until + NANOGPT)

    def known(job, figures):
        events.append((job.item, next(iter(figures))))
        if "ms" in figures:
            measured.touch()
            pids = [child.pid for child in multiprocessing.active_children()]
            states.append([Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids])

    training.on_device([job(item="nanogpt", nanogpt=tmp_path), job()], 2, 0.1, None, known)
    assert events == [(item, what) for item in ("gdn", "nanogpt") for what in ("first_step_s", "ms")]
    assert "T" in states[0] and "T" not in states[1]


def test_caches_of_cold_starts():
    names = [training.with_cache(job(T=T, item=item), cold, 16, "f") for cold in ("all", "first", "none")
             for item in ("gdn", "attn") for T in (16, 32)]  # fmt: skip
    caches, cold = [j.cache for j in names], [j.cold for j in names]
    assert len(set(caches[:4])) == 4 and cold[:4] == [True] * 4
    assert caches[4] == caches[5] != caches[6] == caches[7] and cold[4:8] == [True, False] * 2
    assert caches[8:] == [None] * 4 and cold[8:] == [False] * 4


def test_what_another_compiles_is_waited_for(monkeypatch):
    """A model's other lengths start when the first, which fills their cache, has taken its first step; others do not wait."""
    jobs = [job(item=item, T=T, cache=item, cold=T == 8) for T in (8, 16) for item in ("gdn", "attn")]
    events = fake_processes(monkeypatch)
    training.on_device(jobs, 3, None, None, lambda job, figures: events.append(("known", *job[:2])))
    first = events.index(("known", "gdn", 8))
    assert events[:2] == [("start", "gdn", 8), ("start", "attn", 8)] and first == 2
    assert events[3] == ("start", "gdn", 16) and events.index(("start", "attn", 16)) > events.index(("known", "attn", 8))


def fake_processes(monkeypatch):
    """Children that are done one after the other, while somebody waits. Returns the starts."""
    events, started = [], []

    class Pipe:
        def close(self):
            pass

        def send(self, x):
            pass

        def recv(self):
            return {"first_step_s": 1.0}

    class Child:
        def __init__(self, target, args):
            events.append(("start", *args[1][:2]))

        def start(self):
            pass

        kill = join = start

        def is_alive(self):
            return False

    def pair():
        started.append(Pipe())
        return started[-1], Pipe()

    context = types.SimpleNamespace(Pipe=pair, Process=Child)
    monkeypatch.setattr(training.multiprocessing, "get_context", lambda kind: context)
    monkeypatch.setattr(training, "wait", lambda pipes, timeout: [p for p in started if p in pipes and timeout != 0][:1])
    return events


def test_time_stopped_is_not_time_to_the_first_step(monkeypatch):
    """With one model measured, for a second, before the other is ready."""
    fake_processes(monkeypatch)
    known, clock = [], iter([0.0, *(x for x in range(100) for _ in range(2))])
    monkeypatch.setattr(training, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    training.on_device([job(T=8), job(T=16)], 2, 1e-9, None, lambda job, figures: known.append(figures["first_step_s"]))
    assert known[0] == known[1] == 1.0 and known[2] < 1.0 and len(known) == 4


def test_a_step_that_found_no_memory_is_taken_later(monkeypatch):
    """With the model that is there."""
    steps, clip = training.Steps(job()), training.Optimizers.clip
    failing = [torch.OutOfMemoryError("CUDA out of memory")]
    monkeypatch.setattr(training.Optimizers, "clip", lambda *a: failing and (_ for _ in ()).throw(failing.pop()) or clip(*a))
    assert training.started(steps)["again"] and steps.first is None
    model = steps.model
    assert all(p.grad is None for p in model.parameters())
    assert training.measured(steps)["ms"] > 0 and steps.model is model and steps.first > 0


def test_steps_that_take_seconds_are_few(monkeypatch):
    steps = training.Steps(job(steps=20))
    assert training.started(steps) is None
    monkeypatch.setattr(training, "timed", lambda call, device: 0.5)
    assert steps.measure()["steps"] == 8
    monkeypatch.setattr(training, "timed", lambda call, device: 50.0)
    assert steps.measure()["steps"] == training.LEAST


def test_an_equal_share_for_each_device(monkeypatch):
    done = []
    monkeypatch.setattr(training, "on_device", lambda jobs, *rest: done.append(jobs))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    jobs = [job(T=T, item=item) for T in (1, 2) for item in ("a", "b", "c")]
    training.side_by_side(jobs, ["cuda:0", "cuda:1"], 2, None, None, None)
    done.sort(key=lambda part: part[0].device)
    assert [[(j.item, j.T, j.device) for j in part] for part in done] == [
        [("a", 1, "cuda:0"), ("b", 1, "cuda:0"), ("a", 2, "cuda:0")], [("c", 1, "cuda:1"), ("b", 2, "cuda:1"), ("c", 2, "cuda:1")],
    ]  # fmt: skip


def test_cpu_beside_transformers(tmp_path):
    flags = ("--length=70", "--batch_size=2", "--n_embd=32", "--n_head=2", "--vocab_size=50", "--repeats=1")
    operator, step = run(tmp_path, "cpu", *flags)
    assert operator["largest_difference"] < 1e-5
    assert step["parameters"][0] == step["parameters"][1]  # the same model on both sides
    for row in (operator, step):
        assert set(row["ms"]) == {"ours", "transformers"} and row["ratio"] == row["ms"]["transformers"] / row["ms"]["ours"]


@pytest.mark.parametrize(
    "argv, line",
    [
        ([], "no command: write `python bench.py COMMAND"),
        (["form"], "unknown command 'form'"),
        (["forms", "--lengths=256,x"], "'x' is not possible: whole numbers"),
        (["forms", "--families=gdm"], "known are attn, linear"),
        (["memory", "--layers=gdm"], "did you mean 'gdn'"),
        (["kernels", "--operators=gdm"], "known are gdn"),
        (["kernels", "--peers=flo"], "true, false, or some of compiled, cudnn, fla"),
        (["kernels", "--peer_device=cuda:1", "--device=cpu"], "peer_device='cuda:1' is no GPU beside cpu: there are none"),
        (["train", "--layers=gdm"], "did you mean 'gdn'"),
        (["train", "--nanogpt=/nowhere"], "no model.py"),
        (["train", "--context_parallel=2"], "context_parallel=2 has no effect without torchrun"),
        (["train", "--device=cpu", "--devices=cpu,cpu"], "leave it out"),
        (["train", "--patience=9", "--limit=9"], "patience=9 has no effect beside limit=9"),
        (["train", "--devices=cpu,cuda:77"], "device='cuda:77' cannot be used"),
        (["tune", "--device=cpu"], "tune measures on a GPU"),
        (["kernels", "--shapes=B8 T"], "'B8 T' is no size"),
        (["cpu", "--n_embd=50"], "nearest is 64"),
        (["cpu", "--repeat=3"], "did you mean 'repeats'"),
    ],
)
def test_errors_are_one_line(argv, line):
    with pytest.raises(ConfigError) as error:
        bench.main(argv)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_code_in_the_document_runs(root, monkeypatch):
    monkeypatch.chdir(root)
    blocks = re.findall(r"^```python\n(.*?)^```", (root / "docs/mixers.md").read_text(), re.M | re.S)
    assert len(blocks) >= 5
    session = {}
    for block in blocks:
        exec(compile(block, "docs/mixers.md", "exec"), session)


def test_figures_in_the_document_are_those_of_the_model(root):
    text = (root / "docs/mixers.md").read_text().partition("| 1k tokens |")[2]
    for item, label in [
        ("attn", "attn"), ("attn(n_kv_head=1)", "attn(n_kv_head=1)"), ("swa", "swa (512)"), ("dsa", "dsa (256 of all)"),
        ("mla", "mla (latent 64 + 16)"),
        ("retnet", "retnet (V = 2 K)"), ("gdn", "deltanet, gdn, kda"), ("kda", "deltanet, gdn, kda"),
        ("deltanet", "deltanet, gdn, kda"), ("mamba2", "mamba2 (8 heads, K 128)"), ("linear", "linear, lightning"),
    ]:  # fmt: skip
        mixer = Model(ModelConfig(layers=item, n_layer=1, n_embd=256, n_head=4, vocab_size=2)).blocks[0].mixer
        row = re.search(rf"^\| {re.escape(label)} \| (.*) \|$", text, re.M).group(1).split(" | ")
        short, long = (format_bytes(mixer.state_bytes(1, T)).replace(".0 K", " K") for T in (1024, 32768))
        assert row[0].split(", ")[0] == short and row[1] in (long, "the same" if long == short else long), (item, row, short, long)
        assert row[2:] == [f"{mixer.flops(T) / 1e6:.2f}" for T in (1024, 32768)], (item, row)


def test_every_job_says_what_became_of_it():
    job, missing = (("norm", "N64 D16", provider, "float32", "cpu", 0) for provider in ("ours", "fla"))
    said = warm_all([job, missing], 2)
    assert said[job] is None and isinstance(said[missing], str)
