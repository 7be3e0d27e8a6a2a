"""A run that was stopped, killed or damaged goes on as if nothing had happened; what cannot be saved costs a warning."""

import errno
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file
from tiny import curve, fails, flags, metrics, prepare_tiny, runner, same, weights

import checkpoint
import data.loader as loading
import sample
import train
from configurator import ConfigError, ModelConfig
from data.tokenizer import Tokenizer
from model import Model


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return prepare_tiny(tmp_path_factory.mktemp("data"), shards=3)


@pytest.fixture
def run(dataset, tmp_path):
    return runner(dataset, tmp_path)


def moments(out):
    return load_file(checkpoint.resolve(out) / "optimizer.safetensors")


def assert_equal_runs(a, b):
    assert same(weights(a), weights(b)) and same(moments(a), moments(b))
    for name in ("loss", "grad_norm", "val_loss"):
        assert curve(a, name) == curve(b, name)


# -- stopped and continued -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--optimizer=muon", "--lr_schedule=wsd", "--activation_checkpointing", "--deterministic"]])
def test_resumed_equals_uninterrupted(run, more):
    """Bit for bit: dropout, accumulation, three shards, three epochs, two resumes, saves between log lines."""
    common = ["--dropout=0.1", "--gradient_accumulation_steps=2", "--eval_interval=10", *more]
    whole = run(*common, "--max_iters=36", "--log_interval=4", name="whole")
    parts = run(*common, "--max_iters=8", "--lr_decay_iters=36", "--log_interval=4", name="parts")
    run(f"--resume={parts}", "--max_iters=20", "--save_interval=3")
    run("--resume", str(parts), "--max_iters=36")
    assert same(weights(whole), weights(parts)) and same(moments(whole), moments(parts))
    assert curve(whole) == curve(parts) and len(curve(whole)) == 9
    assert curve(whole, "epoch")[36] >= 3


def test_a_run_does_not_depend_on_what_was_drawn_before(run):
    """Evaluation, logging and whatever else draws random numbers leave dropout and data alone."""
    a = run("--max_iters=12", "--dropout=0.1", "--eval_interval=3", "--log_interval=1", name="a")
    torch.rand(7)
    b = run("--max_iters=12", "--dropout=0.1", "--eval_interval=100", "--eval_iters=1", "--async_save=false", name="b")
    assert same(weights(a), weights(b))


def test_a_finished_run_resumes_to_nothing_and_says_what_continues_it(run, capsys):
    out = run("--max_iters=4", "--eval_interval=3")
    before, lines = weights(out), metrics(out)
    capsys.readouterr()
    run(f"--resume={out}")
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"python train.py --resume={out} --max_iters=8"
    assert same(before, weights(out)) and metrics(out) == lines
    train.main(printed[-1].split()[2:])
    assert checkpoint.resolve(out).name == "step-000008"


def test_a_run_ends_at_the_loss_it_was_to_reach(run, capsys):
    common = ["--max_iters=40", "--eval_interval=5", "--save_interval=40", "--lr_decay_iters=40", "--log_interval=1"]
    whole = run(*common, name="whole")
    losses = curve(whole, "val_loss")
    wanted = losses[10]
    assert losses[5] > wanted > losses[40]
    out = run(*common, f"--stop_loss={wanted}", name="out")
    meta = checkpoint.open_checkpoint(out)[1]
    assert (meta["step"], meta["ended"], meta["val_loss"]) == (10, "stop_loss", wanted)
    lines, printed = metrics(out), capsys.readouterr().out.splitlines()
    assert printed[-1] == f"python train.py --resume={out} --stop_loss=none" and any("is at most stop_loss=" in p for p in printed)
    run(f"--resume={out}")  # ends at once
    assert checkpoint.open_checkpoint(out)[1]["step"] == 10 and metrics(out) == lines
    assert "is at most stop_loss=" in capsys.readouterr().out
    run(f"--resume={out}", f"--stop_loss={min(losses.values()) / 2}")  # goes on, to the end
    assert checkpoint.open_checkpoint(out)[1]["ended"] == "max_iters"
    assert_equal_runs(whole, out)
    assert checkpoint.open_checkpoint(whole)[1]["ended"] == "max_iters"


def test_a_signal_in_the_validation_that_would_end_a_run_leaves_it_open(run, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        at_call(patch, loading, "score_mask", 5, send(signal.SIGTERM))  # the first four calls are those of the steps before
        with pytest.raises(SystemExit):
            run("--max_iters=8", "--eval_interval=4", "--stop_loss=99", name="cut")
    cut = tmp_path / "cut"
    meta = checkpoint.open_checkpoint(cut)[1]
    assert (meta["step"], meta["evaluated"], meta["ended"]) == (4, 0, None)
    run(f"--resume={cut}")
    meta = checkpoint.open_checkpoint(cut)[1]
    assert (meta["step"], meta["evaluated"], meta["ended"]) == (4, 4, "stop_loss")


def test_from_an_older_checkpoint_the_newer_ones_are_set_aside(run, capsys):
    whole = run("--max_iters=9", "--save_interval=3", "--keep_last=3", "--log_interval=1", name="whole")
    out = run("--max_iters=9", "--save_interval=3", "--keep_last=3", "--log_interval=1", name="out")
    run(f"--resume={out / 'step-000003'}", "--max_iters=6")
    assert "step-000009 in" in capsys.readouterr().out
    assert {p.name for p in out.glob("*step-*")} == {"step-000003", "step-000006", "aside-step-000006", "aside-step-000009"}
    run(f"--resume={out}", "--max_iters=9")
    assert same(weights(whole), weights(out)) and same(moments(whole), moments(out)) and curve(whole) == curve(out)


# -- signals ---------------------------------------------------------------------------------------------------------


def at_call(monkeypatch, owner, name, n, action):
    """Have the n-th call of owner.name begin with `action()`."""
    function, calls = getattr(owner, name), [0]

    def wrapped(*args, **kwargs):
        calls[0] += 1
        if calls[0] == n:
            action()
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def send(*signals):
    return lambda: [os.kill(os.getpid(), number) for number in signals]


@pytest.mark.parametrize("where", ["the first forward pass", "a step", "an evaluation", "the last evaluation", "a save"])
def test_a_signal_stops_at_the_next_boundary_and_nothing_is_lost(run, monkeypatch, capsys, where):
    common = ["--max_iters=8", "--dropout=0.1", "--log_interval=1", "--eval_interval=4"]
    whole = run(*common, name="whole")
    owner, name, n, step = {
        "the first forward pass": (Model, "forward", 1, 1),  # where compilation warms up
        "a step": (train.Feed, "next", 3, 3),
        "an evaluation": (loading, "score_mask", 5, 4),  # the first four calls are those of the steps before
        "the last evaluation": (loading, "score_mask", 12, 8),
        "a save": (checkpoint, "_write", 1, 5),
    }[where]
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, n, send(signal.SIGTERM))
        with pytest.raises(SystemExit) as e:
            run(*common, "--async_save=false", name="cut")
    assert e.value.code == 128 + signal.SIGTERM
    cut = whole.parent / "cut"
    assert capsys.readouterr().out.splitlines()[-1] == f"python train.py --resume={cut}"
    assert checkpoint.open_checkpoint(cut)[1]["step"] == step
    run(f"--resume={cut}")
    assert_equal_runs(whole, cut)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sigint_in_another_process(run, dataset, tmp_path, root):
    """As a person does it: Ctrl-C, status 130, the command that continues as the last line. Without a GPU, without Triton."""
    start = "import sys; sys.modules['triton'] = None; import configurator, train; configurator.run(train.main)"
    argv = flags(dataset, tmp_path / "cut", "--max_iters=9999", "--log_interval=1")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen([sys.executable, "-c", start, *argv], stdout=subprocess.PIPE, text=True, cwd=root, env=environment)
    out = []
    for line in process.stdout:
        out.append(line)
        if re.match(r"step +3/", line):
            process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert out[-1].strip() == f"python train.py --resume={tmp_path / 'cut'}"
    step = checkpoint.open_checkpoint(tmp_path / "cut")[1]["step"]
    run(f"--resume={tmp_path / 'cut'}", f"--max_iters={step + 1}")


def test_a_second_sigint_leaves_at_once(run, monkeypatch, capsys, tmp_path):
    at_call(monkeypatch, train.Feed, "next", 6, send(signal.SIGINT, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run("--max_iters=9", "--save_interval=4")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"python train.py --resume={tmp_path / 'run'}" and "left at once" in lines[-2]
    assert checkpoint.resolve(tmp_path / "run").name == "step-000004"


def test_an_interrupted_evaluation_reports_nothing(run, monkeypatch, capsys):
    out = run("--max_iters=2")
    capsys.readouterr()
    at_call(monkeypatch, loading, "score_mask", 1, send(signal.SIGTERM))
    with pytest.raises(SystemExit) as e:
        run(f"--resume={out}", "--eval_only")
    assert e.value.code == 128 + signal.SIGTERM and "validation loss" not in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no SIGUSR1")
def test_sigusr1_saves_and_goes_on(run, monkeypatch):
    at_call(monkeypatch, train.Feed, "next", 3, send(signal.SIGUSR1))
    out = run("--max_iters=9", "--keep_last=9")
    assert [p.name for p in sorted(out.glob("step-*"))] == ["step-000003", "step-000009"]


# -- killed, damaged, disk full --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_kills(root, kills):
    """kill -9 at random moments, many of them in a save: the end is that of a run nobody killed, bit for bit."""
    done = subprocess.run([sys.executable, "tests/kill.py", str(kills)], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{kills} kills" in done.stdout, done.stdout + done.stderr


def damage(path, how):
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-10] if how == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    "how, file, says",
    [
        ("truncated", "optimizer.safetensors", "bytes"),
        ("flipped", "model.safetensors", "SHA-256"),
        ("missing", "meta.json", "is missing"),
        ("truncated", "COMPLETE", "cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run, capsys, how, file, says):
    whole = run("--max_iters=9", "--save_interval=3", "--log_interval=1", name="whole")
    out = whole.with_name("out")
    shutil.copytree(whole, out)
    damage(out / "step-000009" / file, how)
    sample.main([str(out), "--max_new_tokens=1"])
    assert says in capsys.readouterr().err
    run(f"--resume={out}")
    printed = capsys.readouterr()
    assert says in printed.err and "step-000009 is damaged" in printed.err and "step-000006 is used instead" in printed.err
    assert (out / "aside-step-000009").is_dir()
    assert_equal_runs(whole, out)
    assert not any("step-000009" in line for line in fails(sample.main, out / "step-000006", "--top_k=0"))


def test_a_run_starts_from_the_sound_checkpoint_that_it_names(run, capsys):
    """The warning and the weights are about the same folder: without a step, the start's weights are those of step 2."""
    out = run("--max_iters=4", "--save_interval=2", "--eval_interval=4")
    kept = load_file(out / "step-000002" / "model.safetensors")
    damage(out / "step-000004" / "model.safetensors", "flipped")
    second = run(f"--init_from={out}", "--max_iters=1", "--learning_rate=1e-12", "--weight_decay=0", name="second")
    assert "step-000002 is used instead" in capsys.readouterr().err
    for name, x in weights(second).items():
        torch.testing.assert_close(x, kept[name], atol=1e-9, rtol=0)


def test_a_damaged_checkpoint_without_another_is_an_error(run):
    out = run("--max_iters=2")
    folder = checkpoint.resolve(out)
    damage(folder / "model.safetensors", "flipped")
    assert "SHA-256" in fails(sample.main, out)[0] and "SHA-256" in fails(train.main, f"--resume={out}")[0]
    (folder / checkpoint.MARKER).write_text("[]")
    assert "names no files" in fails(sample.main, out)[0]
    (folder / checkpoint.MARKER).unlink()
    assert "no finished save" in fails(sample.main, out)[0]
    assert "incomplete" in fails(sample.main, folder)[0]


def test_weights_of_another_model_are_listed(run):
    folder, meta = checkpoint.open_checkpoint(run("--max_iters=1"))
    changes = {"n_layer": 3}, {"n_layer": 1}, {"n_ffn": 8}
    for change, says in zip(changes, ("blocks.2.* is missing", "blocks.1.* is left over", "has shape"), strict=True):
        with pytest.raises(ConfigError, match=says):
            checkpoint.load_weights(Model(ModelConfig(**{**meta["model"], **change})), folder)


@pytest.mark.parametrize("call, n", [("replace", 1), ("rename", 1), ("replace", 2)])
def test_a_kill_within_a_save_leaves_best_as_good_as_last(tmp_path, monkeypatch, call, n):
    class Kill(BaseException):
        pass

    def kill():
        raise Kill

    rest = {"meta": {}, "tokenizer": Tokenizer.from_bytes(), "keep_last": 1, "best": True}
    model = Model(ModelConfig(n_layer=1, n_embd=16, n_head=2, vocab_size=20))
    checkpoint.save(tmp_path, 1, model=model, **rest)
    with monkeypatch.context() as patch, pytest.raises(Kill):
        at_call(patch, os, call, n, kill)
        checkpoint.save(tmp_path, 2, model=model, **rest)
    assert checkpoint.resolve(tmp_path, ("best", "last")) == checkpoint.resolve(tmp_path)
    checkpoint.save(tmp_path, 2, model=model, **rest)
    assert [p.name for p in tmp_path.glob("*step*")] == ["step-000002"]


@pytest.fixture
def disk(tmp_path):
    """A file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs takes root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_costs_a_warning(disk, dataset, tmp_path, capsys):
    common = ["--save_interval=3", "--keep_last=1", "--eval_interval=100"]
    train.main(flags(dataset, tmp_path / "whole", *common, "--max_iters=12"))
    out = disk / "run"
    train.main(flags(dataset, out, *common, "--max_iters=3", "--lr_decay_iters=12"))
    (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - 100 * 1024))  # a checkpoint takes 180 KiB
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        train.main([f"--resume={out}", "--max_iters=12"])
    printed = capsys.readouterr()
    assert e.value.code == 1
    assert printed.err.count("could not be saved") == 2 and "training goes on" in printed.err  # at first, and at the end
    assert "step-000003" in printed.err
    assert not list(out.glob(".*")) and checkpoint.resolve(out).name == "step-000003"
    (disk / "ballast").unlink()
    train.main([f"--resume={out}", "--max_iters=12"])
    assert same(weights(tmp_path / "whole"), weights(out))


def test_a_disk_that_recovers(run, monkeypatch, capsys):
    """The same by a failing write, wherever a tmpfs cannot be mounted."""

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    at_call(monkeypatch, checkpoint, "save_file", 4, full)
    out = run("--max_iters=9", "--save_interval=3")
    printed = capsys.readouterr()
    assert "step 6 could not be saved" in printed.err and "No space left" in printed.err and "saving works again" in printed.out
    assert [p.name for p in sorted(out.glob("step-*"))] == ["step-000003", "step-000009"] and not list(out.glob(".*"))


def test_training_goes_on_while_a_save_is_written(run, monkeypatch):
    """The file of step 2 is written after step 4 has begun, and holds step 2."""
    begun, waited = threading.Event(), []
    short = run("--max_iters=2", "--lr_decay_iters=6", "--save_interval=2", name="short")
    with monkeypatch.context() as patch:
        at_call(patch, train.Feed, "next", 4, begun.set)
        at_call(patch, checkpoint, "_write", 1, lambda: waited.append(begun.wait(timeout=60)))
        long = run("--max_iters=6", "--save_interval=2", "--keep_last=9", name="long")
    assert waited == [True]
    assert same(load_file(short / "step-000002" / "model.safetensors"), load_file(long / "step-000002" / "model.safetensors"))
    assert same(moments(short / "step-000002"), moments(long / "step-000002"))


def test_what_a_kill_leaves_in_the_log_is_dropped(run):
    whole = run("--max_iters=6", "--save_interval=3", "--log_interval=1", name="whole")
    out = run("--max_iters=3", "--lr_decay_iters=6", "--save_interval=3", "--log_interval=1", name="out")
    log = out / "metrics.jsonl"
    log.write_bytes(log.read_bytes() + b'{"step": 4, "loss": 9.0}\n\0\xff\n12\n{}\n{"step": 5, "lo')  # a power cut leaves any bytes
    run(f"--resume={out}", "--max_iters=6")
    assert curve(whole) == curve(out)
    assert len((out / "starts.jsonl").read_text().splitlines()) == 2
    log.write_bytes(log.read_bytes().rstrip())
    run(f"--resume={out}", "--max_iters=7")
    assert curve(out).keys() == set(range(1, 8))


def test_a_kill_between_the_save_and_its_link_loses_nothing(run):
    out = run("--max_iters=6", "--save_interval=3")
    (out / "last").write_text("step-000003\n")
    assert checkpoint.resolve(out).name == "step-000006"
    many = out / "step-1000000"
    shutil.copytree(out / "step-000006", many)
    assert checkpoint.resolve(out) == many


# -- other data, other settings --------------------------------------------------------------------------------------


def test_changed_data_is_refused(run, dataset, tmp_path):
    copy = tmp_path / "data"
    shutil.copytree(dataset, copy)
    out = run(f"--dataset={copy}", "--max_iters=2")
    moved = copy.rename(tmp_path / "moved")
    run(f"--resume={out}", f"--dataset={moved}", "--max_iters=3")  # the same tokens elsewhere
    shard = moved / "train-001.bin"
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.write_bytes(content)
    (line, *_) = fails(train.main, f"--resume={out}", f"--dataset={moved}")
    assert "train-001.bin" in line or "fingerprint" in line


# -- gradients that are not finite -----------------------------------------------------------------------------------


def spoil(monkeypatch, *steps):
    """Have the gradient of these steps be infinite."""
    gradient = train.Trainer.gradient

    def wrapped(self, batches, weight):
        norm = gradient(self, batches, weight)
        if self.step + 1 in steps:
            self.optimizer.parameters[0].grad[0] = torch.inf
            norm = norm * torch.inf
        return norm

    monkeypatch.setattr(train.Trainer, "gradient", wrapped)


def test_non_finite_stops_with_step_batch_and_checkpoint(run, monkeypatch, capsys, tmp_path):
    spoil(monkeypatch, 5)
    with pytest.raises(ConfigError) as e:
        run("--max_iters=9", "--save_interval=2", "--log_interval=100")
    out = tmp_path / "run"
    text = str(e.value)
    assert "gradient is inf at step 5 (samples 8 to 9, batch hash " in text and str(out / "step-000004") in text
    assert capsys.readouterr().out.splitlines()[-1] == f"python train.py --resume={out}"
    assert checkpoint.resolve(out).name == "step-000004"
    spoil(monkeypatch)
    monkeypatch.undo()
    run(f"--resume={out}")


def test_an_infinite_weight_stops_too(run, monkeypatch):
    start = train.start

    def broken(*args):
        model = start(*args)
        with torch.no_grad():
            model.embedding.weight[0].fill_(torch.inf)
        return model

    monkeypatch.setattr(train, "start", broken)
    with pytest.raises(ConfigError, match="the gradient is nan at step 1 .* there is no checkpoint"):
        run("--max_iters=4")


def test_a_validation_loss_that_is_not_finite_stops_before_the_save(run, monkeypatch, tmp_path):
    monkeypatch.setattr(train.Trainer, "evaluate", lambda self: (math.nan, math.nan))
    with pytest.raises(ConfigError, match=f"validation loss is nan at step 2: .* not saved, .*{tmp_path}/run/step-000001"):
        run("--max_iters=4", "--eval_interval=2", "--save_interval=1")
    out = run("--max_iters=2", "--non_finite=skip", name="b")
    assert checkpoint.open_checkpoint(out)[1]["best_bits_per_byte"] is None


def test_what_goes_wrong_on_another_rank_is_told(run, monkeypatch):
    """It may be that rank's alone: a file it cannot read, its memory."""
    spoil(monkeypatch, 2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which all ranks but the first give up
    with pytest.raises(ConfigError, match="^rank 1: the gradient is inf at step 2 "):
        run("--max_iters=3", "--gradient_accumulation_steps=2")


def test_non_finite_steps_are_skipped_and_counted_where_asked(run, monkeypatch):
    spoil(monkeypatch, 3, 5)
    out = run("--max_iters=6", "--non_finite=skip", "--log_interval=1")
    meta = checkpoint.open_checkpoint(out)[1]
    assert meta["skipped"] == 2 and curve(out, "skipped")[6] == 2
    assert all(torch.isfinite(x).all() for x in weights(out).values())
    spoil(monkeypatch, *range(2, 99))
    with pytest.raises(ConfigError, match="at step 12 "):
        run("--max_iters=99", "--non_finite=skip", name="b")


# -- on a GPU --------------------------------------------------------------------------------------------------------

GPU = ["--device=cuda", "--compile=false", "--layers=gdn attn mamba2 lightning", "--n_layer=4", "--n_embd=128", "--head_dim=64",
       "--gradient_accumulation_steps=2", "--dropout=0.1", "--log_interval=1"]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("more", [["--deterministic"], ["--deterministic", "--cuda_graph"]])
def test_resumed_equals_uninterrupted_on_a_gpu(run, more):
    """In deterministic mode bit for bit, also where the steps are replayed as a graph."""
    whole = run(*GPU, *more, "--max_iters=14", name="whole")
    parts = run(*GPU, *more, "--max_iters=7", "--lr_decay_iters=14", name="parts")
    run(f"--resume={parts}", "--max_iters=14")
    assert curve(whole) == curve(parts)
    assert same(weights(whole), weights(parts)) and same(moments(whole), moments(parts))


@pytest.mark.gpu
def test_a_graph_takes_the_same_steps(run):
    plain = run(*GPU, "--dropout=0", "--max_iters=10", "--eval_interval=5", name="plain")
    graph = run(*GPU, "--dropout=0", "--max_iters=10", "--eval_interval=5", "--cuda_graph", name="graph")
    for name in ("loss", "val_loss", "grad_norm"):
        a, b = curve(plain, name), curve(graph, name)
        assert a.keys() == b.keys() and all(abs(a[step] - b[step]) < 1e-2 * max(1, a[step]) for step in a), name
