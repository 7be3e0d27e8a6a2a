"""Training: exact resume, nothing depends on what should not matter, every mistake one clear line."""

import json
import math
import re
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import checkpoint
import sample
import train
from configurator import ConfigError, TrainConfig
from data.loader import heldout_batches
from data.prepare import write_dataset
from data.tokenizer import Tokenizer
from data.tokens import Dataset

TINY = ["--layers=gdn attn", "--n_layer=2", "--n_embd=16", "--n_head=2", "--block_size=32", "--batch_size=2", "--warmup_iters=2",
        "--eval_iters=2", "--learning_rate=1e-2", "--device=cpu"]  # fmt: skip


def words(seed, n):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(["red", "green", "blue", "one", "two", "three"][i] for i in torch.randint(0, 6, (n,), generator=generator))


def prepare(folder, texts, held_out):
    tokenizer = Tokenizer.from_characters("".join(texts))
    write_dataset(folder, tokenizer, texts[:-held_out], texts[-held_out:], name="tiny", source="test", licence="none")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    texts = [words(i, 5 + 7 * i) for i in range(11)]
    prepare(folder, texts, 2)
    return folder


@pytest.fixture
def run(dataset, tmp_path):
    """Train in this process; returns the run folder."""

    def call(*args, name="run"):
        out = tmp_path / name
        resumed = any(a.startswith("--resume") for a in args)
        train.main([*args] if resumed else [*TINY, f"--dataset={dataset}", f"--out_dir={out}", *args])
        return out

    return call


def fails(main, *argv):
    """The problems `main` reports; fails the test if it does not."""
    with pytest.raises(ConfigError) as e:
        main([str(a) for a in argv])
    assert all("\n" not in line and line for line in e.value.problems)
    return e.value.problems


def weights(out):
    return load_file(checkpoint.resolve(out) / "model.safetensors")


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_resumed_equals_uninterrupted(run):
    """Bit for bit, with dropout, accumulation, more than an epoch, two resumes, and evaluation at other steps."""
    common = ["--dropout=0.1", "--gradient_accumulation_steps=2", "--log_interval=1"]
    whole = run(*common, "--max_iters=41", "--eval_interval=10", name="whole")
    parts = run(*common, "--max_iters=7", "--lr_decay_iters=41", "--eval_interval=4", name="parts")
    run(f"--resume={parts}", "--max_iters=23", "--eval_interval=5")
    run("--resume", str(parts), "--max_iters=41")
    assert same(weights(whole), weights(parts))
    a, b = ([m["loss"] for m in metrics(out) if "loss" in m] for out in (whole, parts))
    assert a == b and len(a) == 41
    assert metrics(whole)[-2]["epoch"] >= 2


def test_interrupted_equals_uninterrupted(run, dataset, tmp_path, root):
    """SIGINT at whatever step it hits: saved, the command that continues printed, the end the same as without it."""
    whole = run("--max_iters=60", "--dropout=0.1", name="whole")
    cut = tmp_path / "cut"
    flags = [f"--dataset={dataset}", f"--out_dir={cut}", "--max_iters=60", "--dropout=0.1", "--log_interval=1"]
    process = subprocess.Popen([sys.executable, "train.py", *TINY, *flags], stdout=subprocess.PIPE, text=True, cwd=root)
    out = []
    for line in process.stdout:
        out.append(line)
        if re.match(r"step +9/", line):
            process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert out[-1].strip() == f"python train.py --resume={cut}"
    stopped = checkpoint.read_meta(checkpoint.resolve(cut))["step"]
    assert 9 <= stopped < 60
    train.main([f"--resume={cut}"])
    assert same(weights(whole), weights(cut))


def test_evaluation_and_logging_do_not_change_training(run):
    a = run("--max_iters=12", "--dropout=0.1", "--eval_interval=3", "--log_interval=1", name="a")
    b = run("--max_iters=12", "--dropout=0.1", "--eval_interval=100", "--eval_iters=1", name="b")
    assert same(weights(a), weights(b))


def test_accumulation_is_one_larger_batch(run):
    """Same tokens, same loss, gradient norm and weights, although the micro-batches hold different numbers of labels."""
    a = run("--max_iters=5", "--log_interval=1", "--batch_size=8", name="a")
    b = run("--max_iters=5", "--log_interval=1", "--batch_size=2", "--gradient_accumulation_steps=4", name="b")
    for x, y in zip(metrics(a), metrics(b), strict=True):
        assert x.keys() == y.keys()
        if "loss" in x:
            assert math.isclose(x["loss"], y["loss"], rel_tol=1e-6) and math.isclose(x["grad_norm"], y["grad_norm"], rel_tol=1e-4)
    for n, x in weights(a).items():
        assert torch.allclose(x, weights(b)[n], atol=1e-4), n


def test_it_learns_and_bits_per_byte_are_what_they_say(run, dataset):
    out = run("--max_iters=120", "--eval_interval=60", "--eval_iters=1000")
    records = metrics(out)
    assert records[-1]["val_bits_per_byte"] < 2.0  # six words in random order: 0.6 if all is learned, letters alone give 3.2
    model, tokenizer, meta = checkpoint.load_model(out, prefer=("last",))
    nll = n_bytes = 0.0
    data = Dataset.open(dataset)
    for batch in heldout_batches(data.val, 32, 1):
        with torch.no_grad():
            logp = model(batch.tokens, segment_ids=batch.segment_ids).logits.log_softmax(-1)
        for t, label in enumerate(batch.labels[0].tolist()):
            if label not in (-1, tokenizer.eot):
                nll -= logp[0, t, label].item()
                n_bytes += len(tokenizer.decode_bytes([label]))
    assert math.isclose(nll / math.log(2) / n_bytes, records[-1]["val_bits_per_byte"], rel_tol=1e-5)
    assert meta["step"] == 120 and meta["tokens"] == 120 * 2 * 32


def test_learning_rate_is_never_negative_and_warms_up():
    for warmup, total in ((0, 1), (5, 1), (1, 1), (3, 10), (10, 3), (0, 10)):
        config = TrainConfig(warmup_iters=warmup, max_iters=total, min_lr=1e-4).model_copy(update={"lr_decay_iters": total})
        rates = [train.learning_rate(step, config) for step in range(max(warmup, total) + 3)]
        assert all(0 < r <= config.learning_rate for r in rates) and rates[-1] == 1e-4


def test_checkpoints_best_last_and_the_final_one(run):
    out = run("--max_iters=7", "--eval_interval=5", "--keep_last=1")
    assert (out / "last").read_text() == "step-000007\n"
    assert {p.name for p in out.glob("step-*")} == {(out / link).read_text().strip() for link in ("last", "best")}
    assert not list(out.glob(".*"))
    assert not any("head" in n for n in weights(out))


def test_init_from_takes_the_weights(run):
    first = run("--max_iters=3", name="first")
    second = run("--max_iters=1", "--learning_rate=1e-12", f"--init_from={first}", "--weight_decay=0", name="second")
    for n, x in weights(first).items():
        assert torch.allclose(x, weights(second)[n], atol=1e-9), n


def test_eval_only(run, capsys):
    out = run("--max_iters=3")
    capsys.readouterr()
    run(f"--resume={out}", "--eval_only")
    assert re.search(r"step 3: validation loss \d", capsys.readouterr().out)


def test_wandb_offline(run, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    out = run("--max_iters=2", "--wandb_log", "--wandb_run_name=x")
    assert list(out.glob("wandb/offline-run-*/*.wandb"))
    assert checkpoint.read_meta(checkpoint.resolve(out))["wandb_id"]


def test_wandb_that_fails_costs_a_warning(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run("--max_iters=2", "--wandb_log")
    assert "W&B is off" in capsys.readouterr().err


def test_a_used_folder_is_not_overwritten_unasked(run, tmp_path):
    out = run("--max_iters=2")
    with pytest.raises(ConfigError, match=re.escape(f"--resume={out}")):
        run("--max_iters=1")
    run("--max_iters=1", "--overwrite")
    assert [p.name for p in out.glob("step-*")] == ["step-000001"]


@pytest.mark.parametrize("flag, says", [("--n_layer=3", "n_layer=3 differs from the run's 2"), ("--batch_size=3", "batch_size"),
                                        ("--layers=attn", "layers"), ("--max_iters=1", "has done 2 steps"),
                                        ("--out_dir=elsewhere", "own folder")])  # fmt: skip
def test_a_resumed_run_stays_the_same_run(run, flag, says):
    out = run("--max_iters=2")
    assert says in fails(train.main, f"--resume={out}", flag)[0]


def test_other_data_or_tokenizer_is_refused(run, dataset, tmp_path):
    folder = tmp_path / "data"
    texts = [words(100 + i, 60) for i in range(4)]
    prepare(folder, texts, 1)
    out = run(f"--dataset={folder}", "--max_iters=2")
    texts[0] += " red"
    prepare(folder, texts, 1)
    assert "total_tokens" in fails(train.main, f"--resume={out}")[0]
    prepare(folder, [text.replace("w", "W") for text in texts], 1)  # a tokenizer of equal size
    assert "not the one this run was trained with" in fails(train.main, f"--resume={out}")[0]


def test_damaged_checkpoints_are_named(run):
    out = run("--max_iters=2")
    folder = checkpoint.resolve(out)
    weights_file = folder / "model.safetensors"
    content = weights_file.read_bytes()
    for damaged, says in ((content[:-10], "bytes"), (content[:-1] + bytes([content[-1] ^ 1]), "SHA-256")):
        weights_file.write_bytes(damaged)
        assert says in fails(sample.main, out)[0]
    weights_file.unlink()
    assert "model.safetensors is missing" in fails(train.main, f"--resume={out}")[0]
    (folder / checkpoint.MARKER).unlink()
    assert "no finished save" in fails(sample.main, out)[0]
    assert "incomplete" in fails(sample.main, folder)[0]


def test_mistakes_are_one_clear_line(run, dataset, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "train.bin" in fails(train.main, f"--dataset={tmp_path / 'empty'}")[0]
    assert "data sets here" in fails(train.main, "--dataset=nothing")[0]
    base = [*TINY, f"--dataset={dataset}", f"--out_dir={tmp_path / 'x'}"]
    [line] = fails(train.main, *base, "--block_size=100000")
    assert "largest block_size possible" in line
    assert "did you mean 'gdn'" in fails(train.main, *base, "--layers=gdm")[0]
    assert "vocabulary of 10" in fails(train.main, *base, "--vocab_size=10")[0]
    assert "best device here" in fails(train.main, *base, "--device=cuda:99")[0]
    assert "expected scratch" in fails(train.main, *base, "--init_from=nowhere")[0]
    assert "no such folder" in fails(train.main, f"--resume={tmp_path / 'none'}")[0]
    assert "no such folder" in fails(sample.main, tmp_path / "none")[0]
    assert not (tmp_path / "x").exists()
    out = run("--max_iters=1")
    assert "'é'" in fails(sample.main, out, "--start=red é")[0]
    assert "cannot be read" in fails(sample.main, out, f"--start=FILE:{tmp_path / 'none'}")[0]
    assert "one run or checkpoint folder" in fails(sample.main)[0]


def test_exit_code_2_without_a_traceback(root, tmp_path):
    command = [sys.executable, "sample.py", str(tmp_path / "none")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not done.stdout


def test_non_finite_loss_stops(run, monkeypatch, tmp_path):
    start = train.start

    def broken(*args):
        model, optimizer = start(*args)
        with torch.no_grad():
            model.embedding.weight[0].fill_(math.inf)
        return model, optimizer

    monkeypatch.setattr(train, "start", broken)
    with pytest.raises(ConfigError, match="the loss is nan"):
        run("--max_iters=4", "--log_interval=1")
    with pytest.raises(ConfigError, match="not saved"):  # between two log lines, where the loss has not been looked at
        run("--max_iters=4", "--log_interval=100", "--save_interval=2", "--eval_interval=100", name="saved")
    assert not list((tmp_path / "saved").glob("step-*"))


def test_sampling(run, capsys, tmp_path):
    out = run("--max_iters=2")
    (tmp_path / "prompt").write_text("red green")
    capsys.readouterr()
    texts = []
    for _ in range(2):
        sample.main([str(out), f"--start=FILE:{tmp_path / 'prompt'}", "--num_samples=3", "--max_new_tokens=12", "--seed=7"])
        texts.append(capsys.readouterr().out.rsplit("\n", 2)[0])
    assert texts[0] == texts[1] and texts[0].count("red green") == 3
    sample.main([str(out), "--max_new_tokens=5", "--temperature=1e-9", "--top_k=none"])
    a = capsys.readouterr().out.rsplit("\n", 2)[0]
    sample.main([str(out), "--max_new_tokens=5", "--temperature=0"])
    assert capsys.readouterr().out.rsplit("\n", 2)[0] == a
    sample.main([str(out), "--max_new_tokens=3"])
    assert "ms/token" in capsys.readouterr().out
    for flags in (["--temperature=-1"], ["--top_k=0"], ["--num_samples=0"]):
        assert "at least" in fails(sample.main, out, *flags)[0]
    sample.main([str(out), "--max_new_tokens=40"])
    assert "trained on" in capsys.readouterr().err


def test_help_lists_settings(capsys):
    for main in (train.main, sample.main):
        with pytest.raises(SystemExit) as e:
            main(["--help"])
        assert e.value.code == 0 and "--seed" in capsys.readouterr().out


def test_without_arguments_it_trains_the_defaults(monkeypatch):
    """`python train.py`, up to the first step: there must be nothing that a person has to set."""
    seen = []

    def stop(config, dataset, device):
        seen.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "start", stop)
    with pytest.raises(KeyboardInterrupt):
        train.main([])
    assert seen[0].dataset == "sotu" and seen[0].vocab_size == 4096 and re.fullmatch(r"out/run-\d+", seen[0].out_dir)
