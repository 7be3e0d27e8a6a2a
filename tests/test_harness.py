"""harness.py: what requests share is read once, batches of any size, several processes, the peer implementation of lm-eval."""

import json
import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from test_eval import EOT, T, ask, direct, same, surroundings, write_run  # noqa: F401  (a fixture)

import convert
import harness
from configurator import ConfigError
from data.hf_tokenizer import write_tokenizer
from data.tokenizer import Tokenizer
from harness import HybridLM


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def lm(run):
    return HybridLM(run, batch_size=4, device="cpu")


def requests(pairs):
    return [(("", ""), list(context), list(targets)) for context, targets in pairs]


class Reads:
    """The shapes of every forward pass of a model."""

    def __init__(self, lm, monkeypatch):
        self.shapes, real = [], lm.model.forward

        def forward(tokens, *args, **kwargs):
            self.shapes.append(tuple(tokens.shape))
            return real(tokens, *args, **kwargs)

        monkeypatch.setattr(lm.model, "forward", forward)


# -- sharing ---------------------------------------------------------------------------------------------------------


def test_what_begins_another_request_is_read_off_it(lm, monkeypatch):
    stream = [EOT, *b"the ship lay at anchor"]
    pairs = [(stream[:n], [stream[n]]) for n in (1, 5, 9, 20)]  # nested contexts, each followed by its own continuation
    pairs += [(stream[:5], [99]), (stream[:9], stream[9:14])]  # another last token; several targets
    expected = [direct(lm, context, targets) for context, targets in pairs]
    reads = Reads(lm, monkeypatch)
    random.Random(0).shuffle(order := list(range(len(pairs))))
    got = lm._loglikelihood_tokens(requests([pairs[i] for i in order]), disable_tqdm=True)
    same(got, [expected[i] for i in order])
    assert reads.shapes == [(1, 20)]


def test_a_context_of_several_continuations_is_read_once(lm, monkeypatch):
    context = [EOT, *b"nobody slept that night"]
    groups = [(context, list(text)) for text in (b" on ship", b" but", b" at all", b"x")]
    groups += [(context[:18], list(text)) for text in (b"ab", b"cde")]
    expected = [direct(lm, *pair) for pair in groups]
    reads = Reads(lm, monkeypatch)
    same(lm._loglikelihood_tokens(requests(groups), disable_tqdm=True), expected)
    # Both contexts; then three rests each ("x" is read off another; one is there twice, to fill up) without their last token.
    assert reads.shapes == [(2, 24), (6, 7)]


def test_short_contexts_are_not_worth_a_state(lm, monkeypatch):
    pairs = [([EOT, 97], [98, 99]), ([EOT, 97], [100, 99])]
    expected = [direct(lm, *pair) for pair in pairs]
    reads = Reads(lm, monkeypatch)
    same(lm._loglikelihood_tokens(requests(pairs), disable_tqdm=True), expected)
    assert reads.shapes == [(2, 3)]


@pytest.mark.parametrize("layers", ["gdn attn", "mamba2 swa(window=8)", "kda", "deltanet lightning", "attn"])
def test_random_requests_score_as_alone(tmp_path, layers):
    lm = HybridLM(write_run(tmp_path, layers=layers), batch_size=3, device="cpu")
    draw = random.Random(1)
    stems = [[EOT, *draw.choices(range(97, 101), k=draw.randint(0, 25))] for _ in range(6)]
    pairs = [(s, draw.choices(range(97, 101), k=draw.randint(1, 5))) for s in stems for _ in range(4)]
    same(lm._loglikelihood_tokens(requests(pairs), disable_tqdm=True), [direct(lm, *pair) for pair in pairs])


# -- batches ---------------------------------------------------------------------------------------------------------


def test_automatic_batches_fit_a_number_of_tokens_and_shrink_when_memory_runs_out(run, monkeypatch):
    lm = HybridLM(run, batch_size="auto", max_batch_size="6", device="cpu")
    texts = ["x" * n for n in (5, 9, 20, 30, 31, 31, 31, 31, 3, 2)]
    expected = ask(HybridLM(run, batch_size=1, device="cpu"), "loglikelihood_rolling", *[(text,) for text in texts])
    widths, real = [], lm._nll

    def little_memory(items):
        if sum(len(context) + len(targets) for _, context, targets in items) > 70:
            raise torch.OutOfMemoryError("pretended")
        widths.append(len(items))
        return real(items)

    monkeypatch.setattr(lm, "_nll", little_memory)
    assert ask(lm, "loglikelihood_rolling", *[(text,) for text in texts]) == pytest.approx(expected, abs=1e-4)
    assert sum(widths) == 10 and widths[0] == 1 and max(widths) <= 6
    lm.batch_size = 8
    with pytest.raises(torch.OutOfMemoryError):
        ask(lm, "loglikelihood_rolling", *[(text,) for text in texts])


def test_generation_does_not_depend_on_the_batch(run, lm):
    one = HybridLM(run, batch_size=1, device="cpu")
    sampled = {"until": ["zz"], "max_gen_toks": 10, "do_sample": True, "temperature": 1.5, "top_p": 0.9}
    calls = [
        (text, kwargs) for text in ("a", "the ship", "nobody", "") for kwargs in (sampled, {"until": ["q"], "max_gen_toks": 7})
    ]
    assert ask(one, "generate_until", *calls) == ask(lm, "generate_until", *calls)


# -- policy ----------------------------------------------------------------------------------------------------------


def test_what_generates_in_another_type_than_it_scores_says_so(run, caplog):
    half = HybridLM(run, device="cpu", dtype="float16")
    assert ask(half, "loglikelihood", ("The ship", " lay"))[0][0] < 0 and not caplog.records
    ask(half, "generate_until", ("The ship", {"until": [], "max_gen_toks": 2}))
    assert "generated in float32" in caplog.text


def test_policy_can_be_set_and_is_recorded(run):
    lm = HybridLM(run, device="cpu", max_length="16", add_bos_token="false")
    assert lm.policy == {"bos": False, "truncation": "left", "max_length": 16} == lm.get_model_info()["policy"]
    same(ask(lm, "loglikelihood", ("ab", "c"), ("", "c")), [direct(lm, [97, 98], [99]), direct(lm, [EOT], [99])])
    long = "0123456789" * 3
    same(ask(lm, "loglikelihood", (long, "!")), [direct(lm, list(long.encode())[-16:], [33])])
    learned = write_run(Path(run).parent / "learned", learned_positions=True)
    with pytest.raises(ConfigError, match="learned positions, use at most that"):
        HybridLM(learned, device="cpu", max_length=2 * T)


# -- recalled tokens -------------------------------------------------------------------------------------------------


def test_recalled_tokens_are_told_from_others(lm):
    text = "ab ab ab cd"
    ids = [EOT, *text.encode()]
    nll = [-direct(lm, ids[:i], ids[i : i + 1])[0] for i in range(1, len(ids))]
    again = [pair in list(zip(ids, ids[1:], strict=False))[:i] for i, pair in enumerate(zip(ids, ids[1:], strict=False))]
    ((recalled, n, other, m),) = ask(lm, "recall", (text,))
    assert (n, m) == (sum(again), len(nll) - sum(again)) and n == 5
    assert recalled == pytest.approx(sum(x for x, a in zip(nll, again, strict=True) if a), abs=1e-3)
    assert recalled + other == pytest.approx(-ask(lm, "loglikelihood_rolling", (text,))[0], abs=1e-4)
    assert ask(lm, "recall", ("",)) == [(0.0, 0.0, 0.0, 0.0)]
    ((_, n, _, m),) = ask(lm, "recall", ("ab" * T,))  # a window begins anew: what was before it cannot be recalled
    assert n + m == 2 * T and n < 2 * T - 2


# -- several processes and lm-eval's command line --------------------------------------------------------------------


def outputs(command, root, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 1, 3])  # with 1 a process has no document, with 3 none of some length
def test_two_processes_give_the_scores_of_one(limit, run, root, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29713"]
    tasks = ["eval.py", str(run), "--tasks=heldout_bpb,copying", "--device=cpu"]
    tasks += [] if limit is None else [f"--limit={limit}"]
    partial = "" if limit is None else f"-limit{limit}"
    scores = []
    for launcher in ([sys.executable], torchrun):
        out = outputs([*launcher, *tasks], root, tmp_path)
        assert out.count("|heldout_bpb|") == 1
        record = json.loads((run / f"eval-copying+heldout_bpb{partial}-step-000007.json").read_text())
        scores.append({name: record["results"][name] for name in ("heldout_bpb", "copying")})
        assert record["processes"] == (1 if launcher == [sys.executable] else 2)
    for task in scores[0]:
        for metric, value in scores[0][task].items():
            assert scores[1][task][metric] == (pytest.approx(value) if isinstance(value, float) else value)


def test_the_command_line_of_lm_eval(run, root, tmp_path):
    command = [sys.executable, "harness.py", "run", "--model", "hybrid", "--model_args", f"pretrained={run},dtype=float32"]
    command += ["--tasks", "heldout_bpb", "--batch_size", "4", "--device", "cpu", "--output_path", str(tmp_path / "results")]
    out = outputs(command, root, tmp_path)
    assert "|heldout_bpb|" in out
    (path,) = (tmp_path / "results").rglob("results_*.json")
    written = json.loads(path.read_text())
    assert written["config"]["policy"]["max_length"] == T and written["config"]["val_sha256"]


@pytest.mark.parametrize("given, added", [
    (["run", "--model=hybrid", "--tasks=recall"], {"--include_path", "--device"}),
    (["run", "-M", "hybrid", "-t", "recall", "--device=cpu"], {"--include_path"}),
    (["validate", "--tasks", "recall", "--include_path=x"], set()),
])  # fmt: skip
def test_the_command_line_is_told_our_tasks_and_a_device_that_is_there(monkeypatch, given, added):
    seen = []
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: seen.extend(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["harness.py", *given])
    harness.main()
    assert seen[: len(given)] == given and set(seen[len(given) :: 2]) == added


# -- lm-eval's class for transformers --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A small random GPT-2 with sharp predictions: (our run, transformers' folder)."""
    pytest.importorskip("accelerate", reason="lm-eval's class for transformers needs it")
    from conftest import from_transformers

    config_class, model_class = from_transformers("GPT2Config", "GPT2LMHeadModel")
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(5)
    model = model_class(config_class(n_embd=32, n_layer=2, n_head=2, n_positions=64))
    with torch.no_grad():
        model.transformer.wte.weight.mul_(20)
    model.save_pretrained(folder / "hf")
    write_tokenizer(Tokenizer.from_tiktoken("gpt2"), folder / "hf")
    convert.from_hf(folder / "hf", folder / "run")
    return folder / "run", folder / "hf"


def both(gpt2):
    import transformers
    from lm_eval.models.huggingface import HFLM

    run, hf = gpt2
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(hf)
    theirs = HFLM(transformers.AutoModelForCausalLM.from_pretrained(hf), tokenizer=tokenizer, batch_size=4, device="cpu",
                  max_length=64)  # fmt: skip
    return HybridLM(run, batch_size=4, device="cpu", add_bos_token=False), theirs


CALLS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a city that nobody knows"),
    ("", "An empty context"),
    ("trailing spaces  ", "here"),
    ("long " * 100, "is cut"),
    ("日本語", " 🙂"),
]


def test_log_likelihoods_are_those_of_lm_evals_own_class(gpt2):
    ours, theirs = both(gpt2)
    same(ask(ours, "loglikelihood", *CALLS), ask(theirs, "loglikelihood", *CALLS))
    texts = [(text,) for text in ("A short text.", "A long one. " * 60)]
    mine, other = (ask(lm, "loglikelihood_rolling", *texts) for lm in (ours, theirs))
    assert mine == pytest.approx(other, abs=1e-3)


@pytest.mark.slow
@pytest.mark.skipif("BLIMP" not in os.environ, reason="BLIMP names no archive of blimp/*.jsonl")
def test_blimp_is_scored_as_by_lm_evals_own_class(gpt2):
    pairs = []
    with tarfile.open(os.environ["BLIMP"]) as archive:
        for member in sorted(archive.getnames()):
            if member.endswith(".jsonl"):
                lines = archive.extractfile(member).read().splitlines()[:5]
                pairs += [("", json.loads(line)[kind]) for line in lines for kind in ("sentence_good", "sentence_bad")]
    ours, theirs = both(gpt2)
    got, want = (np.array([x for x, _ in ask(lm, "loglikelihood", *pairs)]) for lm in (ours, theirs))
    assert len(got) == 670 and np.abs(got - want).max() < 1e-3
    assert ((got[::2] > got[1::2]) == (want[::2] > want[1::2])).all()
