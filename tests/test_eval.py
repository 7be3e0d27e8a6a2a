"""eval.py: scores against a direct computation from full logits, windows, generation, the task, the command."""

import json
import math
import random
import re
import subprocess
import sys

import lm_eval
import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

import checkpoint
import eval as evaluation
from configurator import ConfigError, ModelConfig
from data.prepare import write_dataset
from data.tokenizer import Tokenizer
from data.tokens import Dataset
from model import Model

T, VOCAB, EOT = 32, 264, 256  # block_size; ids from 257 on are padding of the vocabulary
DOCUMENTS = [
    "It was a dark night, and {i} ships lay at anchor; nobody slept. " * 3,
    "Short {i}.",
    "naïve café {i} 日本 🙂",
    "{{ {i} }}",
]


def write_run(folder, separator="before", layers="gdn attn", **settings):
    """A run of one checkpoint: random weights that make confident, varied predictions, and a data set of bytes."""
    tokenizer = Tokenizer.from_bytes()
    train, val = ([d.replace("{i}", str(i)) for d in DOCUMENTS] for i in (1, 2))
    data = write_dataset(folder / "data", tokenizer, train, val, name="tiny", source="test", licence="none")
    torch.manual_seed(3)
    config = ModelConfig(layers=layers, n_layer=2, n_embd=32, n_head=2, n_ffn=64, block_size=T, vocab_size=VOCAB,
                         tie_embeddings=False, **settings)  # fmt: skip
    model = Model(config)
    with torch.no_grad():
        model.embedding.weight.mul_(25)
        model.head.weight.mul_(25)
        model.head.weight[257:].mul_(2)  # padding ids would often win
    meta = {
        "step": 7, "model": config.model_dump(), "dataset": "tiny", "dataset_folder": str(folder / "data"), "separator": separator,
        "tokenizer_hash": tokenizer.hash, "val_sha256": data["val_sha256"],
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64)).nll.sum().backward()
    optimizer.step()
    checkpoint.save(folder / "run", 7, model=model, optimizer=optimizer, meta=meta,
                    tokenizer=tokenizer, keep_last=1, best=True)  # fmt: skip
    return folder / "run"


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only lose by waiting for each other's threads
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def lm(run):
    return evaluation.HybridLM(run, batch_size=8, device="cpu")


def ask(lm, method, *calls):
    return getattr(lm, method)([Instance(method, {}, call, i) for i, call in enumerate(calls)], disable_tqdm=True)


def direct(lm, context, targets):
    """(log-probability, greedy) of token ids from the logits of one sequence, without padding."""
    with torch.no_grad():
        logits = lm.model(torch.tensor([(context + targets)[:-1]])).logits[0, len(context) - 1 :]  # (targets, vocab)
    logprob = logits.double().log_softmax(-1)[torch.arange(len(targets)), targets].sum().item()
    return logprob, logits[:, : lm.codec.vocab_size].argmax(-1).tolist() == targets


def greedy_ids(lm, prompt, n):
    ids = list(prompt)
    for _ in range(n):
        with torch.no_grad():
            ids.append(lm.model(torch.tensor([ids])).logits[0, -1, : lm.codec.vocab_size].argmax().item())
    return ids[len(prompt) :]


def same(results, expected):
    for (got, got_greedy), (want, want_greedy) in zip(results, expected, strict=True):
        assert got == pytest.approx(want, abs=1e-3)
        assert got_greedy == want_greedy


# -- log-likelihood --------------------------------------------------------------------------------------------------


PAIRS = [
    ("The ship", " lay"),
    ("a", "b"),
    ("", "nothing before"),
    ("trailing  ", "spaces"),
    ("naïve", " café 🙂"),
    (" ", "only a space"),
]


def test_loglikelihood_is_that_of_the_full_logits(lm):
    def ids(context, continuation):
        kept = context.rstrip()
        return [EOT, *kept.encode()], list((context[len(kept) :] + continuation).encode())

    same(ask(lm, "loglikelihood", *PAIRS), [direct(lm, *ids(*pair)) for pair in PAIRS])


def test_batch_size_changes_nothing(run, lm):
    one = evaluation.HybridLM(run, batch_size="1", device="cpu")  # lm-eval's command line passes text
    texts = [(d,) for d in DOCUMENTS]
    for method, calls in (("loglikelihood", PAIRS), ("loglikelihood_rolling", texts)):
        assert np.allclose(ask(one, method, *calls), ask(lm, method, *calls), atol=1e-4, rtol=0)
    prompts = [(context, {"until": [], "max_gen_toks": 12}) for context, _ in PAIRS]
    assert ask(one, "generate_until", *prompts) == ask(lm, "generate_until", *prompts)


def test_greedy_flag(lm):
    start = [EOT, *b"The ship"]
    likely = greedy_ids(lm, start, 6)
    other = [*likely[:5], (likely[5] + 1) % 256]
    got = lm._loglikelihood_tokens([(("", ""), start, likely), (("", ""), start, other)], disable_tqdm=True)
    assert [flag for _, flag in got] == [True, False]
    same(got, [direct(lm, start, likely), direct(lm, start, other)])


def test_greedy_flag_knows_no_padding_ids(lm):
    with torch.no_grad():
        logits = lm.model(torch.tensor([[EOT, byte] for byte in range(256)])).logits[:, 1]
    padded = (logits.argmax(-1) >= 257).nonzero()[:, 0].tolist()  # where the model would rather say what is no token
    assert padded
    requests = [(("", ""), [EOT, byte], [logits[byte, :257].argmax().item()]) for byte in padded]
    assert all(flag for _, flag in lm._loglikelihood_tokens(requests, disable_tqdm=True))


def test_long_context_is_cut_on_the_left(lm):
    context, continuation = "0123456789" * 9, " end"
    whole = list((context + continuation).encode())
    same(ask(lm, "loglikelihood", (context, continuation)), [direct(lm, whole[-T - 1 : -4], whole[-4:])])
    fits = "x" * (T - 4)  # EOT, context and 3 of the 4 targets are T inputs
    same(ask(lm, "loglikelihood", (fits, continuation)), [direct(lm, [EOT, *fits.encode()], whole[-4:])])


def expected_rolling(lm, first, ids):
    """Windows written out by hand: T targets each, from the token before them; the last window is filled up on the left."""
    total, stream = 0.0, [first, *ids]
    for start in range(0, len(ids), T):
        stop = min(start + T, len(ids))
        begin = max(0, stop - T) if start else 0
        total += direct(lm, stream[begin : start + 1], ids[start:stop])[0]
    return total


@pytest.mark.parametrize("length", [1, T - 1, T, T + 1, 2 * T, 2 * T + 5])
def test_rolling_scores_each_token_once(lm, length):
    text = ("The quick brown fox jumps over the lazy dog; " * 3)[:length]
    expected = expected_rolling(lm, EOT, list(text.encode()))
    assert ask(lm, "loglikelihood_rolling", (text,)) == [pytest.approx(expected, abs=1e-3)]
    ((scored, _),) = ask(lm, "loglikelihood", ("a", text))  # a continuation longer than a window is scored alike
    assert scored == pytest.approx(
        direct(lm, [EOT, 97], list(text.encode()))[0] if length < T else expected_rolling(lm, 97, list(text.encode())), abs=1e-3
    )


def test_nothing_to_score(lm):
    assert ask(lm, "loglikelihood", ("some context", "")) == [(0.0, True)]
    assert ask(lm, "loglikelihood_rolling", ("",)) == [0.0]


def test_markers_in_text_are_text(lm):
    assert EOT not in lm.tok_encode("<|endoftext|>")


def test_continuation_swallowed_by_a_token_of_the_context(tmp_path):
    tokenizer = Tokenizer.from_ranks([*(bytes([i]) for i in range(256)), b"ab"], r"\w+|\W+")
    lm = evaluation.HybridLM.__new__(evaluation.HybridLM)
    lm.codec, lm.policy = tokenizer, {"bos": False}
    assert tokenizer.encode("ab") == [256]
    assert lm._encode_pair("a", "b") == ([97], [98])


def test_separator_after(tmp_path):
    lm = evaluation.HybridLM(write_run(tmp_path, separator="after"), device="cpu")
    assert not lm.policy["bos"]
    same(ask(lm, "loglikelihood", ("ab", "c"), ("", "c")), [direct(lm, [97, 98], [99]), direct(lm, [EOT], [99])])


def test_bfloat16_is_close(run, lm):
    half = evaluation.HybridLM(run, device="cpu", dtype="bfloat16")
    for (got, _), (want, _) in zip(ask(half, "loglikelihood", *PAIRS), ask(lm, "loglikelihood", *PAIRS), strict=True):
        assert got == pytest.approx(want, rel=0.03, abs=0.3)
    assert isinstance(ask(half, "generate_until", ("abc", {"until": [], "max_gen_toks": 4}))[0], str)


def test_results_reach_the_response_cache(lm):
    seen = {}

    class Hook:
        def add_partial(self, method, call, result):
            seen[method, str(call)] = result

    before, lm.cache_hook = lm.cache_hook, Hook()
    try:
        generation = ("abc", {"until": ["x"], "max_gen_toks": 3})
        results = [
            ask(lm, "loglikelihood", PAIRS[0]),
            ask(lm, "loglikelihood_rolling", ("q" * 50,)),
            ask(lm, "generate_until", generation),
        ]
    finally:
        lm.cache_hook = before
    assert list(seen) == [
        ("loglikelihood", str(PAIRS[0])),
        ("loglikelihood_rolling", "('" + "q" * 50 + "',)"),
        ("generate_until", str(generation)),
    ]
    assert list(seen.values()) == [result for (result,) in results]


# -- generation ------------------------------------------------------------------------------------------------------


def test_greedy_generation_is_the_argmax_of_full_passes(lm):
    prompts = ["The ship", "a", "", "nobody slept at"]
    got = ask(lm, "generate_until", *[(p, {"until": [], "max_gen_toks": 14}) for p in prompts])
    for prompt, text in zip(prompts, got, strict=True):
        ids = greedy_ids(lm, [EOT, *prompt.encode()], 14)
        ids = ids[: ids.index(EOT)] if EOT in ids else ids
        assert max(ids, default=0) < 257
        assert text == bytes(ids).decode(errors="replace")
    with torch.no_grad():  # the test means something: unmasked, padding would have been chosen somewhere
        assert lm.model(torch.tensor([[EOT, *prompts[3].encode()]])).logits[0].argmax(-1).max() >= 257


def test_stop_strings_and_limits(lm):
    def write(until, n, **more):
        return ask(lm, "generate_until", ("The ship", {"until": until, "max_gen_toks": n, **more}))[0]

    whole = write([], 12)
    assert len(whole) >= 6
    assert write(["", whole[3:5]], 12) == whole[: whole.index(whole[3:5])]
    assert write(whole[3], 12) == whole[: whole.index(whole[3])]
    assert write([], 0) == ""
    assert write([], 12, do_sample=True, temperature=1e-6) == whole
    hot = ("The ship", {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 3.0})
    sampled = ask(lm, "generate_until", *[hot] * 4)
    assert len(set(sampled)) > 1 and ask(lm, "generate_until", hot, hot) == sampled[:2]  # of seed and place, not of the batch


def test_long_prompts_are_cut_on_the_left(lm):
    prompt = list(range(33, 123))
    text = bytes(prompt).decode()
    assert lm._prompt(text, 4) == prompt[-(T - 4) :]
    assert lm._prompt(text, 3 * T) == prompt[-T // 2 :]
    (got,) = ask(lm, "generate_until", (text, {"until": [], "max_gen_toks": 4}))
    ids = greedy_ids(lm, prompt[-(T - 4) :], 4)
    assert got == bytes(ids[: ids.index(EOT)] if EOT in ids else ids).decode(errors="replace")
    ask(lm, "generate_until", (text, {"until": [], "max_gen_toks": 3 * T}))  # goes on beyond block_size


# -- the task and lm-eval --------------------------------------------------------------------------------------------


def generators():
    return random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2], torch.get_rng_state().tolist()


def test_heldout_bpb_is_bits_per_byte_of_the_documents(run, lm):
    before = generators()
    manager, names = evaluation.find_tasks("heldout_bpb", checkpoint.resolve(run))
    results = evaluation.evaluate(lm, manager, names, evaluation.EvalConfig())
    assert generators() == before
    texts = [d.replace("{i}", "2") for d in DOCUMENTS]
    nll = -sum(expected_rolling(lm, EOT, list(text.encode())) for text in texts)
    got = results["results"]["heldout_bpb"]
    assert got["bits_per_byte,none"] == pytest.approx(nll / math.log(2) / sum(len(t.encode()) for t in texts), rel=1e-4)
    assert math.log2(got["byte_perplexity,none"]) == pytest.approx(got["bits_per_byte,none"])
    assert results["n-samples"]["heldout_bpb"] == {"original": 4, "effective": 4}
    assert results["config"]["policy"] == {"bos": True, "truncation": "left", "max_length": T}


def test_generators_are_restored_after_an_error(lm):
    before = generators()
    with pytest.raises(KeyError), evaluation.preserved_generators():
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(5)
        raise KeyError
    assert generators() == before


def test_simple_evaluate_by_name(run):
    manager = TaskManager(include_path=str(evaluation.TASKS), include_defaults=False, metadata={"pretrained": str(run)})
    with evaluation.preserved_generators():
        results = lm_eval.simple_evaluate(
            "hybrid", f"pretrained={run},dtype=float32", ["heldout_bpb"], task_manager=manager, limit=1, batch_size=2, device="cpu",
            log_samples=False,
        )  # fmt: skip
    assert results["n-samples"]["heldout_bpb"]["effective"] == 1
    assert results["config"]["tokenizer_hash"] == Tokenizer.from_bytes().hash


def test_multiple_choice_and_generation_tasks(lm, tmp_path):
    (tmp_path / "made.py").write_text(
        "import datasets\n"
        "def docs(**_):\n"
        "    rows = [{'q': 'The ship', 'c': [' lay', ' slept'], 'a': i % 2} for i in range(4)]\n"
        "    return {'test': datasets.Dataset.from_list(rows)}\n"
    )
    shared = "custom_dataset: !function made.docs\ntest_split: test\nfewshot_split: test\n"
    shared += "doc_to_text: '{{q}}'\nmetadata: {version: 1.0}\n"
    choice = "task: made_choice\noutput_type: multiple_choice\ndoc_to_choice: '{{c}}'\ndoc_to_target: a\n"
    write = "task: made_write\noutput_type: generate_until\ndoc_to_target: '{{c[0]}}'\n"
    write += "generation_kwargs: {until: ['.'], max_gen_toks: 5}\n"
    (tmp_path / "choice.yaml").write_text(shared + choice)
    (tmp_path / "write.yaml").write_text(shared + write)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = evaluation.evaluate(
        lm, manager, ["made_choice", "made_write"], evaluation.EvalConfig(num_fewshot=2, limit=3, tasks="made")
    )
    assert results["n-shot"] == {"made_choice": 2, "made_write": 2}
    assert 0 <= results["results"]["made_choice"]["acc,none"] <= 1
    assert results["n-samples"]["made_write"]["effective"] == 3


def test_another_heldout_split_is_refused(tmp_path):
    run = write_run(tmp_path)
    write_dataset(tmp_path / "data", Tokenizer.from_bytes(), ["x"], ["y"], name="tiny", source="", licence="")
    assert Dataset.open(tmp_path / "data").val.count == 2
    manager, names = evaluation.find_tasks("heldout_bpb", checkpoint.resolve(run))
    with pytest.raises(ConfigError, match="not the held-out split of this run"):
        manager.load(names)


# -- the command -----------------------------------------------------------------------------------------------------


def check_unknown_task(run):
    with pytest.raises(ConfigError) as error:
        evaluation.find_tasks("heldout_bpb,heldout_bbp", run)
    (problem,) = error.value.problems
    assert problem.startswith("unknown task 'heldout_bbp': this repository has copying, heldout_bpb, ")
    assert "nearest: heldout_bpb" in problem
    return problem


def test_unknown_task(run, tmp_path, monkeypatch):
    (tmp_path / "arc.yaml").write_text("task: arc_easy\n")

    def with_one_builtin(include_path, include_defaults=True, metadata=None):
        paths = [*include_path, str(tmp_path)] if include_defaults else include_path
        return TaskManager(include_path=paths, include_defaults=False, metadata=metadata)

    monkeypatch.setattr(evaluation, "TaskManager", with_one_builtin)
    assert "lm-eval 1 more" in check_unknown_task(run)
    assert evaluation.find_tasks("heldout_bpb, arc_*", run)[1] == ["arc_easy", "heldout_bpb"]


def test_tasks_of_another_folder(run, tmp_path):
    (tmp_path / "own.yaml").write_text("task: own_task\n")
    assert evaluation.find_tasks("own_task,recall", run, str(tmp_path))[1] == ["own_task", "recall"]
    with pytest.raises(ConfigError, match="no such folder"):
        evaluation.find_tasks("recall", run, str(tmp_path / "missing"))


@pytest.mark.slow
def test_unknown_task_in_the_whole_index(run):
    assert re.search(r"lm-eval \d+,\d{3} more", check_unknown_task(run))


@pytest.mark.parametrize(
    "given",
    [{"batch_size": "many"}, {"batch_size": 0}, {"max_batch_size": 0}, {"max_length": 0}, {"device": "tpu9"}, {"dtype": "float8"}],
)
def test_arguments_of_the_model_are_checked(run, given):
    with pytest.raises(ConfigError, match=str(next(iter(given)))):
        evaluation.HybridLM(run, **{"device": "cpu", **given})


def test_command(run, root):
    done = subprocess.run(
        [sys.executable, "eval.py", str(run), "--limit=1", "--device=cpu"], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "|heldout_bpb|" in done.stdout and "|bits_per_byte" in done.stdout
    record = json.loads((run / "eval-heldout_bpb-limit1-step-000007.json").read_text())
    assert record["checkpoint"].endswith("step-000007") and record["step"] == 7 and record["limit"] == 1 and record["seconds"] > 0
    assert record["tokenizer_hash"] == Tokenizer.from_bytes().hash and record["policy"]["bos"] is True
    assert len(record["weights_sha256"]) == 64 and record["val_sha256"] == Dataset.open(run.parent / "data").meta["val_sha256"]
    assert record["conditions"]["max_length"] == T and len(record["conditions"]["documents"]["heldout_bpb"]) == 64
    assert math.isfinite(record["results"]["heldout_bpb"]["bits_per_byte,none"])
    assert not list(run.glob(".eval*"))


def test_scores_that_cannot_be_written_are_one_line(tmp_path):
    (tmp_path / "eval.json").mkdir()
    with pytest.raises(ConfigError, match=r"could not be written to .*eval.json \(Is a directory\)"):
        evaluation._write(tmp_path / "eval.json", "{}")
    assert [p.name for p in tmp_path.iterdir()] == ["eval.json"]


def test_samples_and_a_table_are_written_where_asked_for(run, monkeypatch, capsys):
    logged, finished = {}, []

    class Page:
        log, finish = logged.update, lambda self: finished.append(True)

    class Wandb:
        Table = staticmethod(lambda columns, data: (columns, data))
        init = staticmethod(lambda **settings: logged.update(settings=settings) or Page())

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    flags = ["--tasks=copying", "--limit=3", "--device=cpu", "--log_samples", "--wandb_log", "--wandb_project=p"]
    evaluation.main([str(run), *flags])
    lines = (run / "eval-copying-limit3-step-000007.samples.jsonl").read_text().splitlines()
    assert len(lines) == 3 and json.loads(lines[0])["task"] == "copying" and len(json.loads(lines[0])["resps"]) == 1
    columns, rows = logged["eval/step-000007"]
    assert columns == ["task", "metric", "value", "stderr"] and ["copying", "acc"] in [row[:2] for row in rows]
    assert logged["settings"]["project"] == "p" and logged["eval/copying/acc"] == rows[0][2] and finished
    assert "copying: chance is" in capsys.readouterr().out

    monkeypatch.setattr(Wandb, "init", staticmethod(lambda **_: 1 / 0))
    evaluation.main([str(run), *flags])  # whatever W&B does, the scores are there
    assert "warning: the scores were not logged to W&B (ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "one run or checkpoint folder is needed, got 0"),
        (["a", "b"], "got 2"),
        (["no/such/run"], "no checkpoint at no/such/run"),
        (["x", "--limit=0"], "limit=0: must be greater than 0"),
        (["x", "--limit=2.5"], "limit=2.5: a number of documents (2 or 3), or a share below 1"),
        (["x", "--batch_size=0"], "batch_size=0: must be at least 1, or auto"),
        (["x", "--max_batch_size=4"], "--max_batch_size=4 has no effect with batch_size=16"),
        (["--out_dir=y"], "has no effect with compare=false: drop it, or use compare=true; the run to score stands by itself"),
        (["--model_args=pretrained=y"], "unknown setting 'model_args': the run to score stands by itself: python eval.py out/demo"),
        (["x", "--num_fewshot=5"], "num_fewshot=5 has no effect on heldout_bpb"),
        (["x", "--num_fewshot=5", "--tasks=recall, heldout_bpb"], "num_fewshot=5 has no effect on recall, heldout_bpb"),
        (["x", "--gen_kwargs=top_k=1"], "gen_kwargs=top_k=1 has no effect on heldout_bpb"),
        (["x", "--task=heldout_bpb"], "unknown setting 'task': did you mean 'tasks'?"),
    ],
)
def test_command_errors(argv, line):
    with pytest.raises(ConfigError) as error:
        evaluation.main(argv)
    assert line in str(error.value)


def test_no_name_of_ours_hides_a_library(root):
    """transformers looks for a package `kernels`, lm-eval imports `evaluate`: from the repository's root both must work."""
    code = (
        "import transformers, lm_eval.evaluator, evaluate, kernels, pathlib\n"
        "assert transformers.LlamaConfig().hidden_size and hasattr(kernels, 'softmax_attention')\n"
        "assert pathlib.Path(evaluate.__file__).parent != pathlib.Path.cwd(), evaluate.__file__\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours = {p.stem for p in root.glob("*.py")} | {p.parent.name for p in root.glob("*/__init__.py")}
    assert not ours & (set(sys.stdlib_module_names) | {"evaluate", "datasets", "transformers", "lm_eval"})
