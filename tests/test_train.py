"""One training run: what it computes, what it prints, what it refuses."""

import errno
import functools
import json
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny import TINY, curve, fails, flags, metrics, prepare, prepare_tiny, runner, same, weights, words

import checkpoint
import configurator
import kernels
import monitor
import optim
import preflight
import sample
import train
from configurator import ConfigError, ModelConfig, TrainConfig
from data.loader import Loader, heldout_batches
from data.synthetic import prepare as synthetic
from data.tokens import Dataset, TokenFile
from model import Model


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return prepare_tiny(tmp_path_factory.mktemp("data"))


@pytest.fixture
def run(dataset, tmp_path):
    return runner(dataset, tmp_path)


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


def test_answers_of_a_made_task_are_counted(tmp_path, capsys):
    """The accuracy that is logged is that of the most likely tokens, over the rows of the validation."""
    data = tmp_path / "mqar"
    synthetic.main(["--task=mqar", "--row=32", "--pairs=4", "--vocab=16", "--rows=64", "--val_rows=24", f"--out={data}"])
    common = [f"--dataset={data}", "--batch_size=20", "--eval_iters=9", "--max_iters=30", "--eval_interval=30"]
    train.main([*TINY, *common, f"--out_dir={tmp_path / 'run'}"])
    model, _, _ = checkpoint.load_model(tmp_path / "run")
    tokens, labels = map(torch.from_numpy, Dataset.open(data).val.read_rows(range(24)))
    with torch.no_grad():
        likely = model(tokens, segment_ids=torch.ones_like(tokens, dtype=torch.int32)).logits.argmax(-1)
    known = labels >= 0
    assert known.sum() == 24 * 4 and curve(tmp_path / "run", "val_accuracy") == {30: (likely == labels)[known].double().mean()}
    assert "% of the answers" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--gradient_accumulation_steps=3", pytest.param("--compile", marks=pytest.mark.slow)])
def test_only_what_has_a_label_is_predicted(tmp_path, monkeypatch, flag):
    """The head and the loss of a made task see the places of its labels, and the run is that which predicts everywhere."""
    data, seen, losses = tmp_path / "mqar", [], []
    synthetic.main(["--task=mqar", "--row=32", "--pairs=4", "--vocab=16", "--rows=64", "--val_rows=8", f"--out={data}"])
    loss = kernels.linear_cross_entropy_sum
    monkeypatch.setattr(kernels, "linear_cross_entropy_sum", lambda x, *rest: (seen.append(len(x)), loss(x, *rest))[1])
    for most in (4, 32):
        monkeypatch.setattr(TokenFile, "most_labels", most)
        argv = [*TINY, f"--dataset={data}", "--batch_size=6", "--eval_iters=2", "--max_iters=5", "--log_interval=1", flag]
        train.main([*argv, f"--out_dir={tmp_path / str(most)}"])
        losses.append(curve(tmp_path / str(most), "loss") | curve(tmp_path / str(most), "val_accuracy"))
    assert set(seen) == {6 * 4, 6 * 32} and losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_learning_rate_is_never_negative_and_warms_up():
    for warmup, total in ((0, 1), (5, 1), (1, 1), (3, 10), (10, 3), (0, 10)):
        config = TrainConfig(warmup_iters=warmup, max_iters=total, min_lr=1e-4).model_copy(update={"lr_decay_iters": total})
        for schedule in ("cosine", "wsd"):
            one = config.model_copy(update={"lr_schedule": schedule})
            rates = [optim.learning_rate(step, one) for step in range(max(warmup, total) + 3)]
            assert all(0 < r <= config.learning_rate for r in rates) and rates[-1] == 1e-4


def test_warmup_stable_decay_is_flat_and_then_a_line():
    config = TrainConfig(warmup_iters=10, lr_schedule="wsd", learning_rate=1.0, min_lr=0.0, lr_decay_iters=100)
    rates = [optim.learning_rate(step, config) for step in range(101)]
    assert set(rates[10:81]) == {1.0} and rates[90] == pytest.approx(0.5) and rates[100] == 0.0


def test_checkpoints_best_last_and_the_final_one(run):
    out = run("--max_iters=7", "--eval_interval=5", "--keep_last=1")
    assert (out / "last").read_text() == "step-000007\n"
    assert {p.name for p in out.glob("step-*")} == {(out / link).read_text().strip() for link in ("last", "best")}
    assert not list(out.glob(".*"))
    assert not any("head" in n for n in weights(out))


def test_last_does_not_replace_best(run, monkeypatch):
    """Nor does a split without a byte of text, whose bits per byte are nan, count as the best."""
    scores = iter([math.nan, 3.0, 2.0, 2.5])
    monkeypatch.setattr(train.Trainer, "evaluate", lambda self: (1.0, next(scores)))
    out = run("--max_iters=4", "--eval_interval=1", "--keep_last=1")
    assert [(out / link).read_text() for link in ("best", "last")] == ["step-000003\n", "step-000004\n"]
    assert checkpoint.open_checkpoint(out)[1]["best_bits_per_byte"] == 2.0
    assert checkpoint.load_model(out)[2]["step"] == 3


def test_init_from_takes_the_weights(run):
    first = run("--max_iters=3", name="first")
    second = run("--max_iters=1", "--learning_rate=1e-12", f"--init_from={first}", "--weight_decay=0", name="second")
    for n, x in weights(first).items():
        assert torch.allclose(x, weights(second)[n], atol=1e-9), n


def test_backend_runs_the_operators(run, capsys):
    plain = curve(run("--max_iters=3", name="plain"))
    capsys.readouterr()
    defined = curve(run("--max_iters=3", "--backend=reference", name="defined"))
    assert re.search(r"\d  gdn +reference ", capsys.readouterr().out)
    assert kernels.backend_of("delta_rule", "cpu") == "eager"  # it was for that run only
    assert defined == pytest.approx(plain, rel=1e-4)


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


def test_wandb_that_fails_later_costs_a_warning(run, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **k: SimpleNamespace(id="a", log=fail, finish=fail)))
    out = run("--max_iters=3", "--wandb_log", "--log_interval=1")
    assert capsys.readouterr().err.count("W&B is off from here on") == 1 and len(curve(out)) == 3


def test_out_of_memory_says_what_to_do(run, monkeypatch, capsys, tmp_path):
    def full(self, batches, weight):
        if self.step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB.")
        return gradient(self, batches, weight)

    gradient = train.Trainer.gradient
    monkeypatch.setattr(train.Trainer, "gradient", full)
    with pytest.raises(ConfigError, match="batch_size=2.*Tried to allocate.*--batch_size=1 --gradient_accumulation_steps=2"):
        run("--max_iters=3", "--save_interval=1")
    assert capsys.readouterr().out.splitlines()[-1] == f"python train.py --resume={tmp_path / 'run'}"
    for part in ("evaluate", "__init__"):  # before the first step, too
        monkeypatch.setattr(train.Trainer, part, lambda self, *_: full(SimpleNamespace(step=2), None, None))
        with pytest.raises(ConfigError, match="batch_size=2.*Tried to allocate"):
            run("--eval_only")


def test_cuda_graphs_do_not_go_with_float16_where_the_device_chose_it():
    resolved, alone = configurator.load(TrainConfig, ["--cuda_graph"]), SimpleNamespace(world=1)
    assert list(preflight._conflicts(resolved, alone, "bfloat16")) == []
    [line] = preflight._conflicts(resolved, alone, "float16")
    assert line.startswith("cuda_graph=True does not go with dtype='float16'")


def test_a_used_folder_is_not_overwritten_unasked(run, tmp_path):
    out = run("--max_iters=2")
    with pytest.raises(ConfigError, match=re.escape(f"--resume={out}")):
        run("--max_iters=1")
    run("--max_iters=1", "--overwrite")
    assert [p.name for p in out.glob("step-*")] == ["step-000001"]


def test_a_folder_that_another_process_trains_in_is_left_alone(run, dataset, tmp_path, root):
    out = tmp_path / "run"
    out.mkdir()
    hold = f"import sys, checkpoint; held = checkpoint.hold({str(out)!r}); print(flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", hold], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    (line,) = fails(train.main, *flags(dataset, out, "--max_iters=1"))
    assert "run' cannot be written to (another process trains there)" in line and not list(out.iterdir())
    other.kill()
    other.communicate()
    run("--max_iters=1")
    run("--resume", str(out), "--max_iters=2")  # a run that ended has let go of it


@pytest.mark.parametrize("flag, says", [("--n_layer=3", "n_layer=3 differs from the run's 2"), ("--batch_size=3", "batch_size"),
                                        ("--layers=attn", "layers"), ("--max_iters=1", "has done 2 steps"),
                                        ("--block_size=16", "block_size=16 differs"), ("--vocab_size=99", "vocab_size=99 differs"),
                                        ("--out_dir=elsewhere", "own folder")])  # fmt: skip
def test_a_resumed_run_stays_the_same_run(run, flag, says):
    out = run("--max_iters=2")
    assert says in fails(train.main, f"--resume={out}", flag)[0]


def test_a_run_is_continued_by_the_flag_alone(run, tmp_path):
    """A recipe that names it would train a new one."""
    out = run("--max_iters=2")
    (tmp_path / "again.py").write_text(f"resume = '{out}'\nmax_iters = 4\n")
    (line,) = fails(train.main, tmp_path / "again.py")
    assert f"in a recipe {tmp_path / 'again.py'}" in line and line.endswith(f"--resume={out}")


def test_a_folder_that_cannot_be_written_is_named(run, dataset, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        assert f"{tmp_path / 'file'} is a file" in fails(train.main, *flags(dataset, out, "--dry_run"))[0]
    with monkeypatch.context() as patch:
        patch.setattr(preflight.os, "access", lambda path, mode: False)
        assert f"{tmp_path} cannot be written to" in fails(train.main, *flags(dataset, tmp_path / "run"))[0]

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(monitor, "record_start", full)
    assert "run' cannot be written to (No space left on device)" in fails(train.main, *flags(dataset, tmp_path / "run"))[0]


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


def test_mistakes_are_one_clear_line(run, dataset, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "train.bin" in fails(train.main, f"--dataset={tmp_path / 'empty'}")[0]
    assert "data sets here" in fails(train.main, "--dataset=nothing")[0]
    base = [*TINY, f"--dataset={dataset}", f"--out_dir={tmp_path / 'x'}"]
    [line] = fails(train.main, *base, "--block_size=100000")
    assert "largest block_size possible" in line
    assert "largest block_size possible" in fails(train.main, *base, "--block_size=1e14")[0]  # nothing of that size is made
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
    [line] = fails(sample.main, f"--out_dir={out}")  # as nanoGPT has it
    assert line == "unknown setting 'out_dir': the run to write with stands by itself: python sample.py out/demo"


def test_an_id_that_the_start_did_not_read_is_named_before_a_model_gets_it(run, monkeypatch, capsys):
    def loader_of(*args):
        made = real(*args)
        for file in made.files:
            file.bound = 5
        return made

    real = preflight._loader
    monkeypatch.setattr(preflight, "_loader", loader_of)
    with pytest.raises(ConfigError, match=r"train.bin: token id \d+ at position \d+ is outside the vocabulary of 5"):
        run("--max_iters=3")
    assert "stopped by an error; nothing is saved yet" in capsys.readouterr().out


def test_unknown_mixers_are_told_with_other_mistakes(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text('n_head = 3\nlayers = "gdn attm(window=3) gdm"\n')
    a, b, c, d = fails(train.main, "--learning_rte", "3", "--compile", recipe)
    assert "'learning_rte'" in a and "n_head=3" in b
    assert all(f"{recipe}:2: layers=" in line and f"unknown mixer '{name}'" in line for line, name in ((c, "attm"), (d, "gdm")))
    a, b = fails(train.main, "--layers", "gdn(n_key_head=7) gdnn", "--n_layer=0")
    assert a == "n_layer=0: must be at least 1" and "'gdn(n_key_head=7) gdnn': unknown mixer 'gdnn': did you mean 'gdn'?" in b
    assert len(fails(train.main, "--n_layer=0", "--layers=gdn mlp")) == 1


def test_exit_code_2_without_a_traceback(root, tmp_path):
    command = [sys.executable, "sample.py", str(tmp_path / "none")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not done.stdout


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
    assert "first token after" in capsys.readouterr().out
    for wrong in (["--temperature=-1"], ["--top_k=0"], ["--num_samples=0"]):
        assert "at least" in fails(sample.main, out, *wrong)[0]
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

    def stop(config, device, source):
        seen.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "start", stop)
    with pytest.raises(KeyboardInterrupt):
        train.main([])
    assert seen[0].dataset == "sotu" and seen[0].vocab_size == 4096 and re.fullmatch(r"out/run-\d+", seen[0].out_dir)


# -- checked before it starts ----------------------------------------------------------------------------------------


def test_dry_run_prints_the_costs_and_makes_nothing(run, capsys, tmp_path):
    out = run("--dry_run", "--max_iters=50")
    printed = capsys.readouterr().out
    assert not out.exists()
    assert "9,036 parameters" in printed and "2.20 epochs" in printed and "activations" in printed and "free" in printed
    assert "activations" in printed and "n/a" not in printed
    run("--max_iters=3")
    capsys.readouterr()
    train.main([f"--resume={out}", "--dry_run", "--max_iters=9"])
    assert "step-000003: step 3, settings, data and tokenizer agree" in capsys.readouterr().out
    assert len((out / "starts.jsonl").read_text().splitlines()) == 1
    train.main([f"--resume={out}", "--max_iters=4"])  # it is not remembered


def test_dry_run_reports_every_problem_at_once(run, tmp_path):
    out = run("--max_iters=1")
    wrong = ["--n_layer", "0", "--dataset=nowhere", "--layers=gdm", "--device=cuda:99", f"--out_dir={out}", "--batch_sise=4"]
    lines = fails(train.main, "--dry_run", *wrong)
    for says in ("n_layer=0", "no data set 'nowhere'", "did you mean 'gdn'", "cuda:99", "already holds a run", "'batch_size'"):
        assert sum(says in line for line in lines) == 1, (says, lines)


def test_memory_and_disk_that_are_not_there(run, monkeypatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**17))
    with pytest.raises(ConfigError, match="keep_last=2: 4 checkpoints of 105.9 KiB at once do not fit"):
        run("--dry_run")


def test_the_activation_estimate_counts_what_autograd_keeps():
    config = TrainConfig(
        layers="gdn attn", n_layer=2, n_embd=32, n_head=2, block_size=64, batch_size=3, vocab_size=40, dtype="float32"
    )
    model, tokens, kept = Model(preflight.model_config(config)), torch.zeros(3, 64, dtype=torch.long), {}
    weights = {p.data_ptr() for p in model.parameters()}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = model(tokens, tokens, segment_ids=torch.ones_like(tokens, dtype=torch.int32))
    real = sum(size for address, size in kept.items() if address not in weights)
    assert output.nll is not None and preflight.activation_bytes(config) == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("flag, says", [("--parallel=fsdp", "no effect in one process"), ("--cuda_graph", "needs a CUDA device"),
                                        ("--backend=triton", "needs a CUDA device"),
                                        ("--decay_fraction=0.5", "lr_schedule"),
                                        ("--stop_loss=1", "no effect with indexer='only'")])  # fmt: skip
def test_flags_that_would_do_nothing_are_refused(dataset, tmp_path, flag, says):
    more = ["--indexer=only"] if "indexer" in says else []
    assert any(says in line for line in fails(train.main, *flags(dataset, tmp_path / "x", flag, *more)))


# A value of each setting that leaves its trace in a run of four steps; another test has what leaves none there.
TRACES = {
    "layers": "attn gdn", "n_layer": 3, "n_head": 1, "n_kv_head": 1, "head_dim": 4, "n_embd": 32, "block_size": 16,
    "vocab_size": 20, "dropout": 0.2, "bias": True, "ffn": "gelu", "residual": "post", "n_ffn": 24, "norm": "layernorm",
    "norm_eps": 1e-2, "rope_theta": 100, "learned_positions": True, "tie_embeddings": False, "document_mask": False,
    "batch_size": 1, "gradient_accumulation_steps": 2, "max_iters": 5, "eval_interval": 3, "eval_iters": 1, "log_interval": 1,
    "save_interval": 3, "keep_last": 1, "optimizer": "muon", "learning_rate": 2e-2, "min_lr": 9e-3, "warmup_iters": 0,
    "lr_decay_iters": 9, "decay_lr": False, "lr_schedule": "wsd", "weight_decay": 0.5, "beta1": 0.5, "beta2": 0.5,
    "grad_clip": 1e-3, "seed": 7, "dtype": "bfloat16",
}  # fmt: skip
ELSEWHERE = {
    "out_dir", "overwrite", "dataset", "init_from", "resume", "indexer", "distill", "parallel", "context_parallel", "eval_only",
    "stop_loss", "async_save", "dry_run", "non_finite", "activation_checkpointing", "device", "compile", "deterministic",
    "cuda_graph", "backend",
    "decay_fraction", "mixers", "wandb_log", "wandb_project", "wandb_run_name",
}  # fmt: skip


def test_no_setting_does_nothing(run):
    def traces(*args, name):
        """What a run leaves: its weights, its checkpoints, and what it logged at which step."""
        out = run("--max_iters=4", "--eval_interval=2", "--log_interval=2", *args, name=name)
        logged = [(m["step"], m.get("loss"), m.get("val_loss")) for m in metrics(out)]
        return weights(out), sorted(p.name for p in out.glob("step-*")), logged

    assert TRACES.keys() | ELSEWHERE == TrainConfig.model_fields.keys()
    (plain, *rest), (again, *same_rest) = traces(name="plain"), traces(name="again")
    assert same(plain, again) and rest == same_rest
    for name, value in TRACES.items():
        changed, *others = traces(f"--{name}={value}", name=name)
        assert not same(plain, changed) or rest != others, name


# -- what a step takes -----------------------------------------------------------------------------------------------


def test_batches_and_draws_depend_on_the_step_alone(dataset):
    """Whatever the number of ranks, a step takes the same samples, and each micro-batch draws from its own seed."""
    loader = Loader(Dataset.open(dataset).train, 32, seed=1)
    config = TrainConfig(batch_size=2, gradient_accumulation_steps=4)
    alone, two = [], []
    for world, taken in ((1, alone), (2, two)):
        feeds = [train.Feed(loader, config, SimpleNamespace(rank=r, world=world), torch.device("cpu"), 5) for r in range(world)]
        for step in (5, 6):
            batches = {}
            for feed in feeds:
                rows, labels, waited = feed.next()
                assert labels == sum(int((b.labels >= 0).sum()) for b in rows) and waited >= 0
                batches |= dict(zip(feed.samples(step), rows, strict=True))
            taken += [(first, batches[first].tokens.tolist()) for first in sorted(batches)]
        for feed in feeds:
            feed.close()
    assert alone == two and [first for first, _ in alone] == list(range(40, 56, 2))
    assert len({train.seed_of(1, first) for first, _ in alone} | {train.seed_of(2, 40)}) == 9


def test_recomputing_layers_changes_nothing(run):
    a = run("--max_iters=4", "--dropout=0.1", name="a")
    b = run("--max_iters=4", "--dropout=0.1", "--activation_checkpointing", name="b")
    for n, x in weights(a).items():
        assert torch.allclose(x, weights(b)[n], atol=1e-6), n


def test_compiling_breaks_the_graph_of_no_mixer():
    layers = "gdn attn(sinks=true) swa(window=8) mamba2(d_state=16,head_dim=16) kda lightning linear deltanet(steps=2) mla "
    layers += "dsa(top_k=8,local=4)"
    model = Model(ModelConfig(layers=layers, n_layer=10, n_head=2, n_embd=32, block_size=32, vocab_size=50))
    tokens = torch.randint(0, 50, (2, 32))
    ids = torch.ones_like(tokens, dtype=torch.int32)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    loss = compiled(tokens, tokens, segment_ids=ids, total=True).loss
    assert torch.allclose(loss, model(tokens, tokens, segment_ids=ids).nll.sum(), rtol=1e-5)


def test_a_compiled_model_is_saved_under_its_own_names(run, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    out = run("--max_iters=2", "--compile")
    model = checkpoint.load_model(out)[0]
    assert weights(out).keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("layers", ["gdn(ffn=none)", "mamba2(head_dim=8, d_state=8, ffn=none)", "kda(ffn=none)"])
def test_a_compiled_backward_runs_outside_autocast(layers, monkeypatch):
    torch.manual_seed(0)
    model = Model(ModelConfig(layers=layers, n_layer=1, n_head=2, n_embd=32, block_size=70, vocab_size=65))
    tokens, grads = torch.randint(65, (2, 70)), []
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for run in (train.compiled(model), model):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(tokens, tokens, total=True).loss
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_compiler_that_fails_is_one_clear_line(run, monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no compiler found")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    with pytest.raises(ConfigError, match="compile=true fails here .*no compiler found.*--compile=false"):
        run("--max_iters=2", "--compile")


@pytest.mark.parametrize("triton", [None, "there"])
def test_without_triton_a_gpu_is_used_uncompiled(monkeypatch, triton):
    monkeypatch.setattr(preflight, "find_spec", lambda name: triton)
    config = preflight._complete(TrainConfig(), None, torch.device("cuda"), "bfloat16", SimpleNamespace(world=1))
    assert config.compile is (triton is not None)


@pytest.mark.slow
def test_compiled_training_is_the_same_training(run):
    """A minute or more of compiling; a signal during it is kept for the step boundary, as tests/test_resume.py has it."""
    plain = run("--max_iters=6", "--log_interval=1", name="plain")
    compiled = run("--max_iters=6", "--log_interval=1", "--compile", name="compiled")
    assert all(abs(loss - curve(compiled)[step]) < 1e-4 for step, loss in curve(plain).items())
    assert weights(plain).keys() == weights(compiled).keys()


def test_muon_takes_the_matrices_of_the_layers(run):
    model = Model(ModelConfig(layers="gdn attn", n_layer=2, n_head=2, n_embd=16, vocab_size=20, tie_embeddings=False))
    adamw, muon = optim.Optimizers(model, TrainConfig(optimizer="muon"), torch.device("cpu")).each
    names = {n for group in muon.param_groups for n in group["names"]}
    assert "blocks.0.mixer.in_proj.weight" in names and "blocks.1.ffn.down_proj.weight" in names
    assert not any(word in n for n in names for word in ("embedding", "head", "conv", "norm", "A_log"))
    assert len(names) + sum(len(group["params"]) for group in adamw.param_groups) == len(list(model.parameters()))
    out = run("--max_iters=60", "--optimizer=muon", "--eval_interval=60")
    assert curve(out, "val_bits_per_byte")[60] < 2.6


def test_fp16_scales_its_loss_and_skips_what_overflows(run, monkeypatch):
    monkeypatch.setattr(optim.LossScale, "PATIENCE", 2)
    out = run("--max_iters=40", "--dtype=float16", "--log_interval=1")
    scales, meta = curve(out, "loss_scale"), checkpoint.open_checkpoint(out)[1]
    assert max(scales.values()) > 2**16 and meta["skipped"] == curve(out, "skipped")[40] > 0  # raised until it overflows
    assert meta["loss_scale"]["scale"] == scales[40]
    taken = [loss for loss in curve(out).values() if loss is not None]
    assert len(taken) == 40 - meta["skipped"] and taken[-1] < taken[0] - 0.8
    run(f"--resume={out}", "--max_iters=41")
    assert curve(out, "loss_scale")[41] in (scales[40], scales[40] * 2, scales[40] / 2)


# -- what it tells ---------------------------------------------------------------------------------------------------


def test_the_health_of_gates_and_states_is_logged(run):
    out = run("--max_iters=2", "--layers=gdn lightning attn kda", "--n_layer=4")
    (health,) = curve(out, "health").values()
    assert set(health) == {"0", "1", "3"}
    for figures in health.values():
        assert sum(figures["decay"]) == pytest.approx(1) and len(figures["decay"]) == 5
        least, median, most = figures["memory"]
        assert 0 < least <= median <= most and 0 < figures["state_norm"][0] <= figures["state_norm"][1]
    first, second = (1 / (slope * (1 - 1 / 3)) for slope in (2**-4, 2**-8))  # lightning's slopes of 2 heads, in layer 1 of 0 to 3
    assert health["1"]["memory"] == pytest.approx([first, second, second], rel=1e-3)


def test_the_health_of_long_rows_is_that_of_their_beginning(dataset, monkeypatch):
    config = TrainConfig(layers="gdn dsa(top_k=4, local=1)", n_layer=2, n_embd=16, n_head=2, vocab_size=30, block_size=32)
    torch.manual_seed(0)
    model = Model(preflight.model_config(config))
    batch = next(heldout_batches(Dataset.open(dataset).val, 32, 2))
    part = type(batch)(*(x[:, :12] for x in batch[:3]))
    whole, beginning = (monitor.health(model, x, None) for x in (batch, part))
    monkeypatch.setattr(monitor, "HEALTH_TOKENS", 12)
    assert monitor.health(model, batch, None) == beginning != whole


def test_the_command_that_continues_is_that_of_the_working_directory(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, script, flag = monitor.command("--resume=a b").split(" ", 2)
    assert (tmp_path / script).resolve() == root / "train.py" and flag == "'--resume=a b'"


def test_what_it_ran_on_is_kept(run):
    out = run("--max_iters=1")
    (line,) = map(json.loads, (out / "starts.jsonl").read_text().splitlines())
    assert line["command"].startswith("python train.py") and line["settings"]["n_embd"] == 16
    assert line["versions"]["torch"] and line["threads"] == torch.get_num_threads() and line["world"] == 1
    assert {"commit", "changed", "python", "device"} <= set(line)
    assert checkpoint.open_checkpoint(out)[1]["environment"]["versions"] == line["versions"]


def test_peaks_are_of_the_device_or_not_given():
    known = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA A100-SXM4-80GB": 312e12,
             "NVIDIA L4": 121e12, "NVIDIA L40S": 362e12, "Tesla T4": 65e12}  # fmt: skip
    assert {name: monitor.peak_of(name) for name in known} == known
    for name in (
        "NVIDIA H20",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "Quadro T400",
        "something",
    ):
        assert monitor.peak_of(name) is None
    assert monitor.peak_flops(torch.device("cpu"), "bfloat16") is None


def test_throughput_is_that_since_the_last_reading_and_time_left_that_of_all(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(monitor.time, "perf_counter", lambda: now[0])
    clock = monitor.Clock()
    now[0] = 130.0
    clock.add(60, 0.0, torch.device("cpu"))  # the first step compiles for half a minute
    assert clock.first_step == 30.0 and clock.read() == (2.0, 0.0) and clock.left(60) == 30.0
    now[0] = 138.0
    clock.pause(135.0)  # three seconds of evaluation
    clock.add(1000, 2.0, torch.device("cpu"))
    assert clock.read() == (200.0, 0.4) and clock.left(1000) == 5.0
    now[0] = 143.0
    clock.add(3000, 0.0, torch.device("cpu"))
    assert clock.read() == (600.0, 0.0) and clock.left(4000) == 10.0
    assert clock.read() == (600.0, 0.0)


@pytest.mark.parametrize(
    "columns, shown", [(40, f"[{'#' * 5}{'.' * 15}] step 1/4  loss 2"), (30, "step 1/4  loss 2"), (9, "step 1/4")]
)
def test_progress_fits_the_terminal(monkeypatch, capsys, columns, shown):
    monkeypatch.setattr(monitor.shutil, "get_terminal_size", lambda: SimpleNamespace(columns=columns))
    progress = monitor.Progress(4)
    progress.live = True
    progress.show(1, "step 1/4  loss 2")
    assert capsys.readouterr().out == f"\r\033[K{shown}"


def test_wandb_goes_on_in_the_same_run(run, monkeypatch):
    seen = []
    fake = SimpleNamespace(
        init=lambda **k: seen.append(k) or SimpleNamespace(id="abc", log=lambda *a, **k: None, finish=lambda: None)
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    out = run("--max_iters=1", "--wandb_log")
    run(f"--resume={out}", "--max_iters=2")
    assert [(k["id"], k["resume"]) for k in seen] == [(None, None), ("abc", "allow")]
