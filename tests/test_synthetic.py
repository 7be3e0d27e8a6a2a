"""Made tasks: their rows, the files of rows, their way through the loader, and the tasks that score them."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_eval import surroundings, write_run  # noqa: F401  (a fixture)

import checkpoint
import eval as evaluation
from configurator import ConfigError, ModelConfig
from data.loader import Loader, heldout_batches
from data.prepare import write_dataset
from data.synthetic import prepare as synthetic
from data.tokenizer import Tokenizer
from data.tokens import Dataset, TokenFile, check_vocab, write_tokens
from harness import HybridLM
from model import Model
from tasks import made

RNG = np.random.default_rng(0)


def command(*arguments):
    return synthetic.main([str(a) for a in arguments])


# -- rows ------------------------------------------------------------------------------------------------------------


def test_mqar_asks_for_each_key_once():
    tokens, labels = synthetic.mqar(RNG, 200, 63, 8, 100)
    assert tokens.shape == labels.shape == (200, 63) and tokens.min() >= 0 and tokens.max() < 100
    for row, answers in zip(tokens.tolist(), labels.tolist(), strict=True):
        keys, values = row[0:16:2], row[1:16:2]
        assert len(set(keys)) == 8 and all(1 <= k < 50 for k in keys) and all(50 <= v < 100 for v in values)
        asked = [(row[at], answer) for at, answer in enumerate(answers) if answer >= 0]
        assert sorted(asked) == sorted(zip(keys, values, strict=True))
        assert answers[:16] == [-1] * 16
    places = np.flatnonzero(labels[:, 16:] >= 0) % 47
    assert np.median(places) < 47 / 2 - 3  # early places are favoured
    full, _ = synthetic.mqar(RNG, 4, 32, 8, 100)  # as many queries as there is room for
    assert full.shape == (4, 32)
    for size in ((31, 8, 100), (64, 0, 100), (200, 30, 40)):
        with pytest.raises(ConfigError, match="hold 1 to"):
            synthetic.mqar(RNG, 4, *size)


def test_distinct_indices_follow_their_weights():
    drawn = synthetic._distinct(RNG, 4000, 2, np.array([8, 1, 1], np.float32))
    assert all(len(set(row)) == 2 for row in drawn.tolist())
    assert (drawn[:, 0] == 0).mean() == pytest.approx(0.8, abs=0.03)


def test_copying_repeats():
    tokens, labels = synthetic.copying(RNG, 5, 6, 20)
    assert (tokens[:, 6] == 19).all() and (labels[:, 6:] == tokens[:, :6]).all() and (labels[:, :6] == -1).all()
    assert (tokens[:, 7:] == tokens[:, :5]).all()


def test_parity_and_modular_arithmetic_are_right():
    for length in (1, 2, 7, 40):
        bits, answers = synthetic.parity(RNG, length)
        assert answers == [bits[: i + 1].count("1") % 2 for i in range(length)]
        text, value = synthetic.modular(RNG, length)
        assert text.endswith("=") and len(text) == max(2, length // 2 * 2) and value == eval(text[:-1]) % 5


# -- files of rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--task=mqar", "--row=64", "--pairs=4", "--vocab=50"], "mqar-64-4"),
        (["--task=copying", "--row=64", "--vocab=30"], "copying-64"),
        (["--task=parity", "--row=64", "--longest=20"], "parity-64-3-20"),
        (["--task=modular", "--row=64", "--longest=20"], "modular-64-3-20"),
    ],
)
def test_made_sets_are_read_row_by_row(arguments, name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(synthetic, "FOLDER", tmp_path)
    monkeypatch.setattr(synthetic, "CHUNK", 7)
    command(*arguments, "--rows=20", "--val_rows=5")
    dataset = Dataset.open(tmp_path / name)
    first = {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
    command(*arguments, "--rows=20", "--val_rows=5")
    assert {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} == first
    assert f"--dataset={tmp_path / name} --block_size=64" in capsys.readouterr().out

    loader = Loader(dataset.train, 64, seed=3)
    assert loader.windows == 20
    batch = loader.next(20)
    eot = dataset.tokenizer.eot
    assert (batch.tokens[:, 0] == eot).all() and ((batch.labels >= 0).sum(1) > 0).all()
    assert len({tuple(row) for row in batch.tokens.tolist()}) == 20 and batch.tokens.max() <= eot
    assert (batch.labels[batch.tokens == eot] == -1).all() and batch.segment_ids.shape == (20, 64)
    other = Loader(dataset.train, 64, seed=3)
    assert torch.equal(torch.cat([other.next(5, rank=r, world=2).labels for r in (0, 1)][:1]), batch.labels[:5])
    seen = [b for b in heldout_batches(dataset.val, 64, 2)]
    assert len(seen) == 3 and sum(int((b.labels >= 0).any(1).sum()) for b in seen) == 5
    held = {tuple(row) for b in seen for row in b.tokens.tolist()}
    assert not held & {tuple(row) for row in batch.tokens.tolist()}
    with pytest.raises(ConfigError, match="rows of 64 tokens: use --block_size=64"):
        Loader(dataset.train, 32, seed=3)
    with pytest.raises(ConfigError, match="use --block_size=64"):
        heldout_batches(dataset.val, 128, 2)


def test_labels_of_a_file_of_rows(tmp_path):
    about = {"separator": "before", "eot": 9, "vocab_size": 10, "tokenizer_hash": "00" * 32, "row": 4}
    tokens, labels = np.arange(8), np.array([-1, 9, -1, 0, 1, -1, -1, 5])
    path = tmp_path / "rows.bin"
    write_tokens(path, [tokens], labels=[labels[:3], labels[3:]], **about)
    file = TokenFile(path)
    assert (file.count, file.row) == (8, 4) and file.tokens.tolist() == tokens.tolist()
    got, got_labels = file.read_rows([1, 0])
    assert got.tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]] and got_labels.tolist() == [[1, -1, -1, 5], [-1, 9, -1, 0]]
    batch = Loader([file], 4, seed=0, shuffle=False).batch(0, 2)
    assert batch.places.tolist() == [[1, 3], [0, 3]] and batch.scored().tolist() == [[9, 0], [1, 5]]
    labels[7] = -1
    write_tokens(tmp_path / "fewer.bin", [tokens], labels=[labels], **about)
    batch = Loader([TokenFile(tmp_path / "fewer.bin")], 4, seed=0, shuffle=False).batch(0, 2)
    assert batch.places.tolist() == [[1, 3], [0, 1]] and batch.scored().tolist() == [[9, 0], [1, -1]]
    labels[5:] = 1
    write_tokens(tmp_path / "more.bin", [tokens], labels=[labels], **about)
    assert Loader([TokenFile(tmp_path / "more.bin")], 4, seed=0).batch(0, 2).places is None  # nearly all have one
    check_vocab([file], 10)
    with pytest.raises(ConfigError, match="8 tokens need as many labels, found 3"):
        write_tokens(tmp_path / "x.bin", [tokens], labels=[labels[:3]], **about)
    with pytest.raises(ConfigError, match="token id 10 at position 1 is outside the vocabulary"):
        write_tokens(tmp_path / "x.bin", [tokens], labels=[np.array([-1, 10, 0, 0, 0, 0, 0, 0])], **about)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ConfigError, match="is truncated"):
        TokenFile(path)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--task=parity", "--pairs=3"], "--pairs has no effect with task=parity: drop it"),
        (["--task=parity", "--longest=300"], "shortest=3, longest=300: they must be in this order, and below row=256"),
        (["--pairs=100"], "pairs=100: 255 tokens and 8192 symbols hold 1 to 63 pairs"),
        (["--task=sorting"], "task='sorting': choose one of mqar, copying, parity, modular"),
    ],
)
def test_command_errors(argv, line, tmp_path):
    with pytest.raises(ConfigError) as error:
        command(*argv, f"--out={tmp_path / 'set'}")
    assert line in str(error.value)


# -- tasks -----------------------------------------------------------------------------------------------------------


def save(folder, dataset, block_size):
    """A run on a data set, with random weights."""
    config = ModelConfig(layers="gdn attn", n_layer=2, n_embd=16, n_head=1, n_ffn=32, block_size=block_size,
                         vocab_size=dataset.tokenizer.vocab_size)  # fmt: skip
    meta = {
        "step": 1, "model": config.model_dump(), "dataset": "made", "dataset_folder": str(dataset.folder), "separator": "before",
        "tokenizer_hash": dataset.tokenizer.hash, "val_sha256": dataset.meta["val_sha256"],
    }  # fmt: skip
    checkpoint.save(folder, 1, model=Model(config), meta=meta, tokenizer=dataset.tokenizer, keep_last=1)
    return folder


@pytest.fixture(scope="module")
def made_run(tmp_path_factory):
    def make(*arguments):
        folder = tmp_path_factory.mktemp("made")
        command(*arguments, "--rows=4", "--val_rows=4", f"--out={folder / 'data'}")
        dataset = Dataset.open(folder / "data")
        return save(folder / "run", dataset, dataset.train[0].row)

    return make


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    """A run on sentences with many words and names."""
    folder = tmp_path_factory.mktemp("text")
    names = [a + b for a in ("Bar", "Cor", "Del", "Fal") for b in ("ada", "eno", "ilo", "uma")]
    words = ["".join(p) for p in itertools.product(("ta", "re", "mi"), ("no", "lu"), ("sa", "ke", "vo", "da", "pi"), ("", "n"))]
    rng = np.random.default_rng(1)
    texts = [" ".join([*rng.choice(words, 5), rng.choice(names), *rng.choice(words, 3)]) + "." for _ in range(150)]
    tokenizer = Tokenizer.train_bpe([*texts, "The secret word of is 0123456789+-*=\n"], 420)
    write_dataset(folder / "data", tokenizer, texts[:50], texts[50:], name="text", source="", licence="")
    return save(folder / "run", Dataset.open(folder / "data"), 256)


def documents(task, run):
    return getattr(made, task)(str(run))["test"].to_list()


@pytest.mark.parametrize("trained", [True, False])
def test_mqar_documents_have_their_answer(made_run, text_run, trained):
    run = made_run("--task=mqar", "--row=64", "--pairs=4", "--vocab=50") if trained else text_run
    found = documents("mqar", run)
    tokenizer = Tokenizer.load(checkpoint.resolve(run) / "tokenizer.json")
    assert len(found) >= 400
    for doc in found[:50]:
        context = tokenizer.encode(doc["context"])
        (target,) = tokenizer.encode(doc["context"] + doc["target"])[len(context) :]
        pairs = dict(zip(context[0::2], context[1::2], strict=False))
        first = context.index(context[-1])
        assert first % 2 == 0 and context[first + 1] == target and pairs
        assert len(context) < 256
    assert found[0]["chance"] == pytest.approx(1 / 25 if trained else found[0]["chance"])
    assert documents("mqar", run) == found


def test_copying_documents(made_run, text_run):
    for run in (made_run("--task=copying", "--row=64", "--vocab=30"), text_run):
        found = documents("copying", run)
        assert {doc["length"] for doc in found} == ({4, 8, 16} if run is not text_run else {4, 8, 16, 32, 64})
        assert all(doc["context"].startswith(doc["target"]) for doc in found)
        assert found[0]["length"] != found[1]["length"] or found[1]["length"] != found[2]["length"]  # --limit sees all lengths


@pytest.mark.parametrize("task", ["parity", "modular"])
@pytest.mark.parametrize("trained", [True, False])
def test_state_tracking_documents(made_run, text_run, task, trained):
    run = made_run(f"--task={task}", "--row=256", "--longest=40") if trained else text_run
    found = documents(task, run)
    for doc in found:
        question = doc["context"].splitlines()[-1].rstrip("=")
        value = question.count("1") % 2 if task == "parity" else eval(question) % 5
        assert doc["choices"][doc["gold"]] == str(value) and doc["chance"] == 1 / len(doc["choices"])
        for line in doc["context"].splitlines()[:-1]:  # the solved ones
            solved, _, answer = line.rpartition("=")
            assert int(answer) == (solved.count("1") % 2 if task == "parity" else eval(solved) % 5)
    assert len({doc["length"] for doc in found}) >= (5 if trained else 2)
    assert len({doc["gold"] for doc in found}) == len(found[0]["choices"])


@pytest.mark.parametrize(("task", "n"), [("needle_single", 1), ("needle_multi", 4)])
def test_needles_are_where_they_should_be(text_run, task, n):
    found = documents(task, text_run)
    tokenizer = Tokenizer.load(checkpoint.resolve(text_run) / "tokenizer.json")
    assert {doc["depth"] for doc in found} == {0, 25, 50, 75, 100}
    assert {doc["length"] for doc in found} == ({25, 50, 100} if n == 1 else {100})  # four do not fit into less
    for doc in found:
        context, question = doc["context"], doc["context"][doc["context"].rindex("The secret word of") :]
        assert f"{question}{doc['choices'][doc['gold']]}." in context and context.count("The secret word of") == n + 1
        assert len(set(doc["choices"])) == 10
        length = len(tokenizer.encode(context))
        assert 256 * doc["length"] // 100 * 0.6 < length < 256
        place = context.index(f"{question}{doc['choices'][doc['gold']]}.") / len(context)
        if n == 1 and doc["length"] == 100:
            assert abs(place - doc["depth"] / 100) < 0.3


def test_a_model_that_knows_the_answers_scores_one_and_a_random_one_about_chance(made_run, text_run, monkeypatch):
    run = made_run("--task=mqar", "--row=64", "--pairs=4", "--vocab=50")
    lm = HybridLM(run, batch_size=32, device="cpu")
    config = evaluation.EvalConfig(tasks="mqar", limit=300)
    manager, names = evaluation.find_tasks("mqar", run)
    blind = evaluation.evaluate(lm, manager, names, config)["results"]["mqar"]
    assert blind["chance,none"] == pytest.approx(1 / 25) and blind["acc,none"] < 0.2

    def looks_up(tokens, *_, **__):
        logits = torch.zeros(*tokens.shape, 51)
        for row, ids in enumerate(tokens.tolist()):
            for at, token in enumerate(ids):
                first = ids.index(token)
                logits[row, at, ids[first + 1] if first + 1 < len(ids) else 0] = 9.0
        return type("Output", (), {"logits": logits})

    monkeypatch.setattr(lm.model, "forward", looks_up)
    assert evaluation.evaluate(lm, manager, names, config)["results"]["mqar"]["acc,none"] == 1.0


def test_every_task_runs_on_a_run_on_text(text_run, root):
    names = "mqar,copying,parity,modular,needle_single,needle_multi,recall,heldout_bpb"
    lm = HybridLM(text_run, batch_size="auto", device="cpu")
    manager, names = evaluation.find_tasks(names, text_run)
    results = evaluation.evaluate(lm, manager, names, evaluation.EvalConfig(tasks="all", limit=6))
    scores = results["results"]
    assert set(scores) == set(names) and len(names) == 8
    recall = scores["recall"]
    assert 0 <= recall["recalled_share,none"] < 1 < recall["other_perplexity,none"]
    levels = evaluation.chance_levels(results)
    assert levels["needle_multi"] == pytest.approx(0.1) and levels["parity"] == 0.5 and "recall" not in levels
    hashes = evaluation.conditions(lm, evaluation.EvalConfig(), results)["documents"]
    assert len(set(hashes.values())) >= 7


def test_tasks_that_a_run_cannot_take_say_why(made_run):
    run = str(made_run("--task=parity", "--row=64", "--longest=20"))
    for task, line in (
        ("needle_single", "needs held-out text with words to hide"),
        ("modular", r"needs the characters '\\n\*\+-234='"),
        ("mqar", "needs at least 8 symbols that are one token each"),
    ):
        with pytest.raises(ConfigError, match=line):
            documents(task, run)
    with pytest.raises(ConfigError, match="needs to know the checkpoint"):
        made.parity()


@pytest.mark.slow
def test_a_hybrid_learns_to_recall(tmp_path, root):
    """Two layers without FFN learn 2 pairs in 16 tokens, as `train.py` and `eval.py` run by hand."""
    command("--task=mqar", "--row=16", "--pairs=2", "--vocab=16", "--rows=20000", f"--out={tmp_path / 'data'}")
    train = ["--layers=gdn(ffn=none) attn(ffn=none)", "--n_layer=2", "--n_embd=64", "--n_head=1", "--block_size=16"]
    train += ["--batch_size=32", "--max_iters=200", "--eval_interval=100", "--learning_rate=5e-3", "--device=cpu"]
    for arguments in (["train.py", f"--dataset={tmp_path / 'data'}", f"--out_dir={tmp_path / 'run'}", *train],
                      ["eval.py", str(tmp_path / "run"), "--tasks=mqar", "--device=cpu"]):  # fmt: skip
        done = subprocess.run([sys.executable, *arguments], cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "run").glob("eval-mqar-*.json")
    assert json.loads(path.read_text())["results"]["mqar"]["acc,none"] > 0.9
