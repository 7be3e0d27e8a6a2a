"""The exam: every mixer passes it, and mixers that are wrong in one way fail the check that looks there."""

import multiprocessing
import subprocess
import sys
import time

import pytest
import torch
import torch.nn as nn

import check
import kernels
import model
from benchmarks import accuracy
from configurator import ConfigError
from model import Mixer, State, recur

TOY = '''
import torch
import torch.nn as nn
from model import Mixer, State, mixer


@mixer("running_mean")
class RunningMean(Mixer):
    """y_t = W mean(x_1 .. x_t), of all documents alike."""

    def __init__(self, config, layer):
        super().__init__()
        self.proj = nn.Linear(config.n_embd, config.n_embd)

    def mix(self, x, *, segment_ids, positions, state, aux):
        return self.proj(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])

    def init_state(self, batch, max_len, device=None, dtype=None):
        return State(batch, device)
'''


class Toy(Mixer):
    """A sound mixer to spoil: a convolution, linear attention with a gate, and their states."""

    operators = ("causal_conv1d", "linear_attention")

    def __init__(self, config, layer):
        super().__init__()
        self.d = config.n_embd
        self.proj = nn.Linear(self.d, 4 * self.d)
        self.conv_weight = nn.Parameter(torch.randn(3 * self.d, 3))

    def mix(self, x, *, segment_ids, positions, state, aux):
        x, gate = self.proj(x).split([3 * self.d, self.d], -1)
        x = recur("causal_conv1d", x, self.conv_weight, state=self.conv_state(state), segment_ids=segment_ids)
        q, k, v = (u.unflatten(-1, (4, -1)) for u in x.chunk(3, -1))
        g = torch.linspace(-0.5, -0.01, 4, device=x.device)
        y = recur("linear_attention", q, k, v, g, state=None if state is None else state.recurrent, segment_ids=segment_ids)
        return y.flatten(-2) * self.activate(gate)

    def conv_state(self, state):
        return None if state is None else state.conv

    def activate(self, gate):
        return gate.sigmoid()

    def init_state(self, batch, max_len, device=None, dtype=None):
        conv = torch.zeros(batch, 2, 3 * self.d, device=device, dtype=dtype)
        return State(batch, device, conv=conv, recurrent=model.zeros_wide(batch, 4, 16, 16, device=device, dtype=dtype))


class LooksAhead(Toy):
    def mix(self, x, **context):
        return super().mix(x, **context) + torch.roll(x, -1, 1)


class AddsTheMeanOfItsChunk(Toy):
    def mix(self, x, **context):
        means = torch.cat([c.mean(1, keepdim=True).expand_as(c) for c in x.split(16, 1)], 1)
        return super().mix(x, **context) + means


class NormalisesOverTime(Toy):
    def mix(self, x, **context):
        y = super().mix(x, **context)
        return y / y.norm(dim=1, keepdim=True)


class IgnoresItsInput(Toy):
    def mix(self, x, *, positions, **context):
        return positions[..., None].to(x.dtype).expand_as(x) + 0 * x


class LeaksAcrossDocuments(Toy):
    def mix(self, x, *, segment_ids, state, **context):
        return super().mix(x, segment_ids=None if state is None else segment_ids, state=state, **context)


class LeaksAFewMillionths(Toy):
    def mix(self, x, *, segment_ids, state, **context):
        y = super().mix(x, segment_ids=segment_ids, state=state, **context)
        if state is not None or segment_ids is None:
            return y
        return y + 1e-6 * super().mix(x, segment_ids=(segment_ids > 0).int(), state=None, **context)


class ForgetsItsConvolution(Toy):
    def conv_state(self, state):
        return None if state is None else state.conv.clone()


class ReadsPadding(Toy):
    def mix(self, x, *, segment_ids, state, **context):
        if state is not None and segment_ids is not None:
            segment_ids = torch.where(segment_ids > 0, segment_ids, segment_ids.amax(1, keepdim=True).clamp(min=1))
        return super().mix(x, segment_ids=segment_ids, state=state, **context)


class MixesRows(Toy):
    def mix(self, x, **context):
        y = super().mix(x, **context)
        return y + 1e-3 * y.mean(0, keepdim=True)


class Overflows(Toy):
    def activate(self, gate):
        return gate.exp() / (1 + gate.exp())


class LosesPrecision(Toy):
    def activate(self, gate):
        return (gate.bfloat16().float() if gate.dtype == torch.float32 else gate).sigmoid()


class DisagreesWithTheReference(Toy):
    def mix(self, x, **context):
        y = super().mix(x, **context)
        return y if kernels.backend_of("linear_attention", "cpu") == "reference" else y * (1 + 1e-6)


class TakesGradientsWithAState(Toy):
    def forward(self, x, *, state=None, **context):
        with torch.set_grad_enabled(state is None and torch.is_grad_enabled()):
            return super().forward(x, state=state, **context)


class CountsWrongly(Toy):
    def flops(self, T):
        return 1e6 / T

    def state_bytes(self, batch, T, dtype=torch.bfloat16):
        return 0


class Crashes(Toy):
    def flops(self, T):
        return [][T]


# for each the groups that have to fail, and no others
ANY_STATE = {"splits", "ragged", "state", "cache"}
BROKEN = {
    LooksAhead: {"causal", "packed"} | ANY_STATE,
    AddsTheMeanOfItsChunk: {"causal", "packed"} | ANY_STATE,
    NormalisesOverTime: {"causal", "packed"} | ANY_STATE,
    IgnoresItsInput: {"causal"},
    LeaksAcrossDocuments: {"packed"},
    LeaksAFewMillionths: {"packed"},
    ForgetsItsConvolution: ANY_STATE,
    ReadsPadding: {"ragged"},
    MixesRows: {"splits", "packed", "ragged", "state"},
    Overflows: {"packed", "stress"},  # of large inputs, and large padding
    LosesPrecision: {"fp32", "stress"},
    DisagreesWithTheReference: {"lengths", "gradient"},
    TakesGradientsWithAState: {"state"},
    CountsWrongly: {"costs"},
    Crashes: {"costs"},
}


@pytest.fixture
def toy(monkeypatch):
    """A function that registers a class as `toy`, for the length of a test."""
    monkeypatch.setattr(model, "MIXERS", dict(model.MIXERS))
    return model.mixer("toy")


@pytest.mark.parametrize("item", check.all_items())
def test_every_mixer_passes(item):
    report = check.examine(item, small=True)
    assert report.ok, "\n".join(report.failures)
    assert set(report.errors) == set(check.LIMITS)


@pytest.mark.slow
@pytest.mark.parametrize("item", check.all_items())
def test_every_mixer_passes_in_full(item):
    report = check.examine(item)
    assert report.ok, "\n".join(report.failures)


def test_the_sound_toy_passes(toy):
    toy(Toy)
    assert check.examine("toy", small=True).failures == []


@pytest.mark.parametrize("cls, groups", BROKEN.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_broken_mixer_fails(toy, cls, groups):
    toy(cls)
    report = check.examine("toy", small=True)
    assert {line.partition(":")[0] for line in report.failures} == groups, "\n".join(report.failures)


def test_a_failure_names_place_error_and_limit(toy):
    toy(LooksAhead)
    first = check.examine("toy", small=True).failures[0]
    assert first.startswith("causal: outputs up to t=0 when later inputs change: error ") and first.endswith("limit 0e+00")
    toy(Crashes)
    (line,) = check.examine("toy", small=True).failures
    assert line.startswith("costs: IndexError at test_check.py:")


def test_the_exam_leaves_the_generator_alone():
    before = torch.random.get_rng_state()
    check.examine("linear", small=True)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    "argv, says",
    [
        (["gdm"], "did you mean 'gdn'"),
        (["gdn(window=3)"], "no such option"),
        (["gdn("], "missing"),
        (["mlp"], "the exam is of mixers alone"),
        (["nowhere.py"], "no such file"),
        (["--small"], "--small: the flags are --device=cpu, --device=cuda, --beside=fla and --seconds=N"),
        (["--seconds=0", "--device=cuda"], "--seconds=0: the flags are"),
        (["--beside=fla", "gdn"], "add --device=cuda"),
        (["--device=cuda", "gdm"], "no CUDA device" if not torch.cuda.is_available() else "known are gdn"),
    ],
)
def test_bad_arguments(argv, says):
    with pytest.raises(ConfigError, match=says):
        check.main(argv)


def run(root, *argv):
    return subprocess.run([sys.executable, "check.py", *map(str, argv)], cwd=root, capture_output=True, text=True)


def test_command_line(root, tmp_path):
    done = run(root, "linear*2 swa(window=5)")
    head, *rows, limits = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == ""
    assert head.split() == ["result", *check.LIMITS, "seconds"]
    assert [row.split()[:2] for row in rows] == [["linear", "ok"], ["swa(window=5)", "ok"]]
    assert limits.split() == ["limit", *(f"{limit:.0e}" for limit in check.LIMITS.values())]


def test_command_line_with_a_file(root, tmp_path):
    path, empty = tmp_path / "mine.py", tmp_path / "empty.py"
    path.write_text(TOY)
    empty.write_text("")
    done = run(root, path)
    assert done.returncode == 1
    assert "running_mean   FAILED" in done.stdout
    assert "running_mean: packed: gates as they are: error " in done.stdout
    done = run(root, path, "runing_mean")
    assert done.returncode == 2 and done.stdout == ""
    assert "error: unknown mixer 'runing_mean': did you mean 'running_mean'?" in done.stderr
    with pytest.raises(ConfigError, match="nothing to examine"):
        check.main([str(empty)])


# ----------------------------------------------------------------------------------------------------------------------
# The operators' exam: in the interpreter for one, on a GPU for all

SMALL = {"gdn": "B2 H2 G1 K16 V16", "conv": "B1 D24 W4"}


def examined(name, packed=True):
    pytest.importorskip("triton", reason="needs Triton")
    return accuracy.examine(accuracy.Job(name, SMALL[name], packed=packed), "cpu", torch.float32, lengths=(65,), repeats=2)


@pytest.mark.parametrize("name", SMALL)
def test_an_operator_passes(name):
    result = examined(name)
    assert result.failures == []
    assert {"out", "final", "initial_state"} < set(result.errors)


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda out: out * 1.001, "out is off by 1.0e-03"),
        (lambda out: torch.cat([out[:, :64], torch.empty_like(out[:, 64:])], 1), "out is off by inf"),  # not written
        (lambda out: out + 1e-7 * torch.randn_like(out), "out is not the same bits in 2 runs"),
    ],
)
def test_an_operator_that_is_wrong_fails(monkeypatch, spoil, says):
    pytest.importorskip("triton", reason="needs Triton")
    from kernels import triton_recurrence

    rule = triton_recurrence.delta_rule

    def wrong(*args, **kwargs):
        out, state = rule(*args, **kwargs)
        return spoil(out), state

    monkeypatch.setattr(triton_recurrence, "delta_rule", wrong)
    assert any(says in line for line in examined("gdn", packed=False).failures)


def test_jobs_cover_every_operator_and_hard_input():
    jobs = accuracy.jobs_of(list(accuracy.SHAPES))
    same = {"packed", "sparse_unalike"}  # as attention and sparse, which are examined
    assert {job.name for job in jobs} == set(accuracy.WORKLOADS) - same
    assert {job.kind for job in jobs if job.name == "gdn"} == {"random", "correlated", "zero", "extreme"}
    assert accuracy.table({jobs[0]: accuracy.Result({"out": (0.5, 3e-3, 65), "q": (0.2, 2e-3, 1)}, [])})[0][-1] == "ok"


def test_jobs_beside_fla_are_last_or_alone(monkeypatch):
    monkeypatch.setattr(accuracy.importlib.util, "find_spec", lambda name: name == "fla")
    jobs = accuracy.jobs_of(["gdn", "norm", "linear"])
    beside = [(job.name, job.kind) for job in jobs if job.beside_fla]
    assert beside == [("gdn", "random"), ("gdn", "correlated"), ("linear", "random")] and jobs[-4].name == "linear"
    assert accuracy.jobs_of(["gdn", "norm", "linear"], beside_only=True) == jobs[-3:]


def test_errors_of_tokens_have_a_floor():
    """With a single key the gradient of q is 0 but for rounding."""
    want = torch.zeros(1, 4, 2, 8, dtype=torch.float64)
    got = want.float() + 1e-8
    assert accuracy.error_of("q", got, want, floor=1e-2, by_token=True) == pytest.approx(1e-8 * 8**0.5 / (1e-2 / 8**0.5))
    assert accuracy.error_of("q", got + 1, want + 1, floor=1e-2, by_token=True) < 1e-6
    one = (want + 1).index_fill(1, torch.tensor([2]), 5.0)  # a token of four that is wrong
    assert accuracy.error_of("q", one, want + 1, floor=1e-2, by_token=True) == 0 < accuracy.error_of("q", one, want + 1, floor=1e-2)


def beside(monkeypatch, theirs):
    """Ours, in Triton's interpreter, beside something that stands for fla."""
    pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.setitem(accuracy.WORKLOADS["gdn"].peers, "fla", theirs)
    job = accuracy.Job("gdn", "B1 H2 K16 V16", "correlated", beside_fla=True)
    return accuracy.examine_beside_fla(job, "cpu", torch.float32, lengths=(65,))


def test_ours_beside_fla(monkeypatch):
    worse = beside(monkeypatch, lambda x, s: 1.1 * kernels.eager.delta_rule(**x)[0])
    assert worse.failures == [] and 0 < worse.fla_ratio < 0.01
    assert "beside fla, T=65: out " in worse.notes[0] and worse.notes[0].count("(1.0e-01)") == 6  # out and five gradients
    better = beside(monkeypatch, lambda x, s: kernels.eager.delta_rule(**x)[0])
    assert better.failures == [] and 0 < better.fla_ratio < 1.1  # both at rounding
    monkeypatch.setattr(accuracy, "BESIDE_FLA", 1e-6)
    assert "out is off by" in beside(monkeypatch, lambda x, s: kernels.eager.delta_rule(**x)[0]).failures[0]


def test_what_fla_refuses_is_a_note(monkeypatch):
    def refuses(inputs, s):
        raise RuntimeError("not on this GPU\nat all")

    result = beside(monkeypatch, refuses)
    assert result.failures == [] and result.notes[0].endswith("fla: RuntimeError: not on this GPU")


def test_an_exam_ends_in_time():
    start = time.perf_counter()
    assert accuracy.run_all(["__import__('time').sleep(100)"], eval, 1) == {} and time.perf_counter() - start < 50
    assert not multiprocessing.active_children()
    said = []
    assert accuracy.run_all(["1 + 1"], eval, 100, lambda *of: said.append(of)) == {"1 + 1": 2} and said == [("1 + 1", 2)]


def test_what_was_not_done_is_named(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def run_all(jobs, seconds, said):
        result = accuracy.Result({"out": (0.5, 3e-3, 65)}, ["it is off"], None, ("a note",))
        said(jobs[0], result)
        return {jobs[0]: result}

    monkeypatch.setattr(accuracy, "run_all", run_all)
    assert accuracy.main(["norm"], seconds=7) == ["it is off"]
    first, note, failure, *_, total, left = capsys.readouterr().out.splitlines()
    assert first == "1/2 norm D768, random: FAILED" and note == "a note" and failure == "it is off"
    assert total.startswith("1 jobs, 1 failures") and left == "not done within 7 s, 1 jobs: norm D2048, random"
    with pytest.raises(ConfigError, match="--beside=fla: norm: fla cannot be imported, or has none"):
        accuracy.main(["norm"], beside_only=True)


def test_flags():
    flags, names = check.flags_of(["gdn", "--device=cuda", "--seconds=60", "--beside=fla"])
    assert flags == {"--device": "cuda", "seconds": 60, "beside_only": True} and names == ["gdn"]


def test_a_process_of_the_exam_that_ends_is_a_failure():
    (result,) = accuracy.run_all(["__import__('os')._exit(1)"], eval).values()
    assert "a process of the exam ended" in result.failures[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", accuracy.SHAPES)
def test_operators_on_a_gpu(name):
    assert accuracy.main([name]) == []
