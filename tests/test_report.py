"""eval.py --compare and sweep.py: what is put side by side, what is refused, what is done again and what is not."""

import json
import math
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from test_eval import surroundings, write_run  # noqa: F401  (a fixture)

import checkpoint
import eval as evaluation
import report
import sweep
from configurator import ConfigError
from model import Model

SCORED = {"bos": True, "truncation": "left", "max_length": 32, "limit": None, "gen_kwargs": None, "seed": 1234, "lm_eval": "0.4"}


def trained_run(tmp_path, name, layers, seed, loss, *, scores=None, limit=None, **settings):
    """A run as train.py and eval.py leave it, its curves and scores made up."""
    folder = write_run(tmp_path / name, layers=layers)
    step = checkpoint.resolve(folder)
    meta = json.loads((step / "meta.json").read_text())
    meta["settings"] = {"layers": layers, "seed": seed, "out_dir": str(folder), "learning_rate": 1e-3, **settings}
    (step / "meta.json").write_text(json.dumps(meta))
    marker = json.loads((step / checkpoint.MARKER).read_text())
    marker["meta.json"] = {"bytes": (step / "meta.json").stat().st_size, "sha256": checkpoint._sha256(step / "meta.json")}
    (step / checkpoint.MARKER).write_text(json.dumps(marker))
    lines = [{"step": s, "loss": loss + 1 / s, "tokens": 64 * s, "tokens_per_second": 1000.0} for s in (1, 2, 4)]
    lines += [{"step": s, "val_bits_per_byte": loss + 1 / s} for s in (2, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "starts.jsonl").write_text('{"commit": "0"}\n{"commit": "abcdef0123456"}\n')
    for task, value in (scores or {}).items():
        record = {
            "results": {task: {"alias": task, "acc,none": value, "acc_stderr,none": 0.1, "acc_8,none": value, "sample_len": 9}},
            "chance": {task: 0.04}, "tasks": [task], "weights_sha256": checkpoint.weights_sha256(step),
            "conditions": {**SCORED, "limit": limit, "n-shot": {task: 0}, "versions": {task: 1}, "documents": {task: "abc"}},
        }  # fmt: skip
        (folder / f"eval-{task}-{step.name}.json").write_text(json.dumps(record))
    return folder


def compare(tmp_path, *runs, flags=()):
    evaluation.main(["--compare", *map(str, runs), f"--out_dir={tmp_path / 'report'}", "--device=cpu", *flags])
    return (tmp_path / "report" / "report.md").read_text()


def test_lengths_are_in_their_order():
    names = ["parity acc_128", "needle acc_25", "parity acc_64", "parity acc_8", "needle acc_100"]
    assert sorted(names, key=report._by_number) == [names[i] for i in (1, 4, 3, 2, 0)]


def test_report_of_three_seeds(tmp_path, capsys):
    runs = []
    for seed, noise in ((1, 0.0), (2, 0.1), (3, 0.19)):
        runs.append(trained_run(tmp_path, f"a{seed}", "gdn attn", seed, 1.0 + noise, scores={"mqar": 0.9 - noise}))
        runs.append(trained_run(tmp_path, f"b{seed}", "attn", seed, 1.5 + noise * 1.1, scores={"mqar": 0.89 - 2 * noise + 0.1}))
    text = compare(tmp_path, *runs, flags=["--speed"])
    assert "| seeds | 3 | 3 |" in text and "|  | `gdn attn` | `attn` |" in text
    assert "| validation bits_per_byte | 1.347 ± 0.055 | 1.856 ± 0.06 |" in text
    assert "mqar acc (chance 0.04) | 0.8033 ± 0.055 | 0.7967 ± 0.11 |" in text
    assert "**validation bits_per_byte**: best is `gdn attn`\n  - `attn`: +0.5097 ± 0.0055, different (p < 0.001)" in text
    assert "**mqar acc**: best is `gdn attn`\n  - `attn`: -0.006667 ± 0.055, within noise (p = 0.91)" in text
    assert "## By length and depth" in text and "| mqar acc_8 |" in text and "sample_len" not in text and "acc_stderr" not in text
    assert "| first token, ms |" in text and "| ms a token |" in text and "training tokens/s | 1,000 | 1,000" in text
    assert "after a prompt of half a block" in text and ", seed 1: " in text and ", commit abcdef0123\n" in text
    assert (tmp_path / "report" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert text in capsys.readouterr().out


def test_names_in_the_picture_stay_apart_and_inside():
    points = [(100, 1.0, "a", "C0"), (101, 0.99, "b", "C1"), (1000, 0.995, "c", "C2"), (100, 0.0, "d", "C3")]
    placed = {name: (side, lines) for name, _, _, side, lines in report._names(points)}
    assert placed == {"a": (1, 0), "b": (1, 1), "c": (-1, 0), "d": (1, 0)}
    assert [lines for *_, lines in report._names([(9, 0.5, "a", "C0"), (9, 0.5, "b", "C1")])] == [0, 1]


def test_scores_by_length_where_there_is_no_text(tmp_path):
    from matplotlib import pyplot

    runs = [trained_run(tmp_path, f"a{seed}", "gdn", seed, 1.0, scores={"parity": 0.5 + seed / 10}) for seed in (1, 2)]
    (variant,) = report.variants_of([report.read_run(run) for run in runs])
    _, axis = pyplot.subplots()
    report._by_length(axis, [variant], ["C0"])
    assert axis.get_title().startswith("parity acc by length") and list(axis.get_xticks()) == [8]
    assert axis.lines[0].get_ydata() == pytest.approx([0.65]) and list(axis.lines[-1].get_ydata()) == [0.04, 0.04]
    report._by_length(axis, [report.Variant("none", [report.read_run(trained_run(tmp_path, "b", "gdn", 1, 1.0))])], ["C0"])
    assert not axis.axison
    pyplot.close()


def test_loss_by_position_is_measured_once_and_goes_beyond_the_block(tmp_path):
    run = report.read_run(trained_run(tmp_path, "a", "gdn attn", 1, 1.0))
    found = report.loss_by_position(run, "cpu", None)
    assert [end for _, end, _ in found][:4] == [1, 2, 4, 8] and found[-1][1] > 64
    lm = report.HybridLM(run.folder, device="cpu")
    first = [d[0] for d in ("It", "na")]
    nll = [-lm._loglikelihood_tokens([(("", ""), [256], [ord(c)])], disable_tqdm=True)[0][0] for c in first]
    assert found[0][2] == pytest.approx(sum(nll) / 2 / math.log(2), abs=1e-3)  # the two longest documents of the held-out four
    kept = run.folder.parent / f"positions-{run.folder.name}.json"
    record = json.loads(kept.read_text())
    kept.write_text(json.dumps({**record, "bits": [[0, 1, 9.0]]}))
    assert report.loss_by_position(run, "cpu", None) == [[0, 1, 9.0]]
    kept.write_text(json.dumps({"weights_sha256": "of others", "bits": [[0, 1, 9.0]]}))
    assert report.loss_by_position(run, "cpu", None) == found


def test_scores_made_differently_are_refused(tmp_path):
    first = trained_run(tmp_path, "a", "gdn", 1, 1.0, scores={"mqar": 0.5})
    other = trained_run(tmp_path, "b", "attn", 1, 1.0, scores={"mqar": 0.6}, limit=10)
    with pytest.raises(ConfigError) as error:
        compare(tmp_path, first, other)
    (problem,) = error.value.problems
    assert problem.startswith("mqar: the scores of") and "(limit None and 10): score both in the same way" in problem


def rescore(folder, task, name, results, **changes):
    """One more file of scores, as of the run's first one."""
    (first,) = folder.glob(f"eval-{task}-step*.json")
    record = json.loads(first.read_text())
    conditions = {**record["conditions"], **changes.pop("conditions", {})}
    record |= {"results": {task: results}, "conditions": conditions, **changes}
    (folder / f"eval-{name}-{checkpoint.resolve(folder).name}.json").write_text(json.dumps(record))


def test_a_quick_look_and_scores_of_other_weights_do_not_count(tmp_path, capsys):
    folder = trained_run(tmp_path, "a", "gdn", 1, 1.0, scores={"mqar": 0.5})
    rescore(folder, "mqar", "mqar-limit3", {"acc,none": 0.9}, conditions={"limit": 3.0})
    assert report.read_run(folder).scores["mqar acc"] == 0.5 and not capsys.readouterr().err
    rescore(folder, "mqar", "mqar-2shot", {"acc,none": 0.7})
    assert report.read_run(folder).scores["mqar acc"] == 0.7
    rescore(folder, "mqar", "mqar-2shot", {"acc,none": 0.8}, weights_sha256="of others")
    assert report.read_run(folder).scores["mqar acc"] == 0.5
    assert "are of weights that step-000007 no longer holds: left out" in capsys.readouterr().err


def test_filters_names_and_directions_of_scores(tmp_path):
    found = {
        "acc_norm,none": 0.4,
        "acc,strict": 0.2,
        "acc,loose": 0.3,
        "acc_stderr,loose": 0.1,
        "brier,none": 0.5,
        "acc_8,none": 0.6,
    }
    runs = []
    for i in range(2):
        runs.append(trained_run(tmp_path, f"r{i}", "gdn" if i else "attn", 1, 1.0, scores={"x": 0.5}))
        found = {**found, "brier,none": 0.5 + i}
        rescore(runs[-1], "x", "y", found, higher_is_better={"x": {"acc_norm": True, "acc": True, "brier": False}})
    names = {"x acc_norm", "x acc (strict)", "x acc (loose)", "x brier", "x acc_8"}
    assert {name for name in report.read_run(runs[0]).scores if name.startswith("x")} == names
    text = compare(tmp_path, *runs)
    assert "- **x acc_norm**: the same in all runs" in text and "- **x brier**: best is `attn`" in text
    assert "x acc_norm" in text.split("## Against")[0] and "x acc_8" not in text.split("## By length")[0]
    config = sweep.SweepConfig(patterns="gdn", sweep_dir=str(tmp_path))
    job = sweep.Job(config, [], "gdn", None, 1e-3, 1)
    job.folder = runs[0]
    assert set(job.scores()) == names - {"x acc_8"}


def test_what_is_not_a_number_is_neither_best_nor_different(tmp_path):
    runs = []
    for seed in (1, 2):
        runs.append(trained_run(tmp_path, f"a{seed}", "gdn", seed, 1.0, scores={"mqar": math.nan if seed == 2 else 0.9}))
        runs.append(trained_run(tmp_path, f"b{seed}", "attn", seed, 1.0, scores={"mqar": 0.1 * seed}))
    text = compare(tmp_path, *runs)
    assert "**mqar acc**: best is `attn`\n  - `gdn`: +nan ± nan, not a number in some seed: not tested" in text
    assert "| nan ± nan | 0.15 ± 0.05 |" in text


def test_validation_of_unlike_runs_is_left_out(tmp_path):
    runs = [trained_run(tmp_path, f"r{i}", layers, 1, 1.0, block_size=32 * i) for i, layers in enumerate(("gdn", "attn"), 1)]
    text = compare(tmp_path, *runs)
    assert "left out, it was not alike: block_size 32 and 64." in text and "validation bits_per_byte" not in text
    assert "## Loss by position" in text
    alike = [trained_run(tmp_path, f"s{layers}", layers, 1, 1.0) for layers in ("gdn", "attn")]
    assert "validation bits_per_byte" in compare(tmp_path, *alike)


def test_the_picture_of_recall_prefers_what_asks_for_it(tmp_path):
    from matplotlib import pyplot

    runs = [trained_run(tmp_path, n, n, 1, 1.0, scores={"parity": 0.5, "needle_multi": 0.2}) for n in ("gdn", "attn")]
    _, axis = pyplot.subplots()
    report._pareto(axis, report.variants_of([report.read_run(run) for run in runs]), ["C0", "C1"])
    assert axis.get_title() == "needle_multi acc against state"
    pyplot.close()


def test_variants_are_told_apart_by_what_differs(tmp_path):
    runs = [trained_run(tmp_path, f"r{i}", "gdn", 1, 1.0, learning_rate=rate, n_ffn=8) for i, rate in enumerate((1e-3, 2e-3))]
    assert [v.name for v in report.variants_of([report.read_run(r) for r in runs])] == [
        "learning_rate=0.001",
        "learning_rate=0.002",
    ]
    matched = [trained_run(tmp_path, f"m{i}", layers, 1, 1.0, n_ffn=8 * i) for i, layers in enumerate(("gdn", "attn"), 1)]
    assert [v.name for v in report.variants_of([report.read_run(r) for r in matched])] == ["gdn", "attn"]
    twice = [trained_run(tmp_path, f"t{i}", "gdn", 5, 1.0) for i in range(2)]
    with pytest.raises(ConfigError, match="seed 5 was given twice"):
        report.variants_of([report.read_run(r) for r in twice])
    with pytest.raises(ConfigError, match="needs at least two runs, got 1"):
        evaluation.main(["--compare", str(twice[0])])


def test_one_seed_has_no_noise(tmp_path):
    text = compare(tmp_path, trained_run(tmp_path, "a", "gdn", 1, 1.0), trained_run(tmp_path, "b", "attn", 1, 1.2))
    assert "fewer than two seeds in common: no noise to compare with" in text and "±" not in text.split("##")[0].split("error.")[1]


def test_paired_tests():
    test = report.paired({1: 1.0, 2: 2.0, 3: 3.0}, {1: 1.1, 2: 2.2, 3: 3.3, 4: 9.0})
    assert test.difference == pytest.approx(0.2) and test.error == pytest.approx(0.1 / math.sqrt(3))
    assert test.p == pytest.approx(0.0742, abs=1e-4)  # t = 3.464, 2 degrees of freedom
    assert report.paired({1: 1.0, 2: 1.0}, {1: 1.0, 2: 1.0}).p == 1.0


# -- sweep -----------------------------------------------------------------------------------------------------------


BASE = ["--patterns=gdn; attn", "--max_iters=4", "--n_layer=2", "--n_embd=32", "--n_head=2", "--block_size=16", "--device=cpu"]
BASE += ["--vocab_size=4096"]


def at_step(step, val_loss=1.0, evaluated=None):
    return {"step": step, "val_loss": val_loss, "evaluated": step if evaluated is None else evaluated}


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """Runs that take no time: instead of train.py and eval.py something that leaves what they would leave."""
    commands = []

    class Fake:
        def __init__(self, command, **_):
            commands.append(command)
            self.args, self.returncode = command, 0
            flags = dict(flag[2:].split("=", 1) for flag in command if flag.startswith("--") and "=" in flag)
            if "train.py" in command[1]:
                folder = Path(flags.get("out_dir") or flags["resume"])
                if any(word in str(folder) for word in self.failing):
                    (folder / "log.txt").write_text("error: the loss is nan\n\n")
                    self.returncode = 2
                    return
                rate, seed = float(flags.get("learning_rate", 1e-3)), int(flags.get("seed", 1))
                made = trained_run(
                    tmp_path / "made" / folder.name, "x", flags.get("layers", "gdn"), seed, abs(math.log10(rate) + 2.5)
                )
                for path in made.rglob("*"):
                    target = folder / path.relative_to(made)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    if path.is_file():
                        target.write_bytes(path.read_bytes())

        failing = ()

        def poll(self):
            return self.returncode

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(sweep.subprocess, "Popen", Fake)
    monkeypatch.setattr(sweep.subprocess, "run", run)
    monkeypatch.setattr(sweep.time, "sleep", lambda _: None)
    monkeypatch.setattr(sweep.Job, "meta", lambda job: at_step(4) if (job.folder / "last").is_file() else None)
    return commands, Fake


def test_a_pilot_finds_the_rate_and_the_report_gets_its_runs(processes, tmp_path, capsys):
    commands, _ = processes
    arguments = [*BASE, "--learning_rates=1e-3,3e-3,1e-2", "--seeds=7,8", f"--sweep_dir={tmp_path / 'sweep'}", "--jobs=3"]
    sweep.main(arguments)
    trained = [c for c in commands if "train.py" in c[1]]
    assert len(trained) == 2 * 3 + 2 and len([c for c in commands if "--tasks=heldout_bpb" in c]) == 8
    assert all("--max_iters=4" in c and "--device=cpu" in c and "--overwrite" in c for c in trained)
    assert [c for c in trained if "--seed=8" in c] == [c for c in trained[6:] if "--learning_rate=0.003" in c]
    tried = [(rate, f"--layers={layers}") for rate in ("0.001", "0.003", "0.01") for layers in ("gdn", "attn")]
    assert all(f"--learning_rate={rate}" in c and layers in c for c, (rate, layers) in zip(trained[:6], tried, strict=True))
    names = [f"{layers}_lr0.003_seed{seed}" for layers in ("gdn", "attn") for seed in (7, 8)]
    assert commands[-1][2:7] == ["--compare", *(str(tmp_path / "sweep" / name) for name in names)]
    assert "| gdn | 0.7500 | 0.2729 | 0.7500 |" in capsys.readouterr().out
    commands.clear()
    sweep.main(arguments)  # all is finished: the report alone
    assert len(commands) == 1 and "--compare" in commands[0]
    sweep.main([*arguments, "--eval_flags=--limit=3"])  # scored in another way
    assert len([c for c in commands if "--limit=3" in c]) == 8 and not [c for c in commands if "train.py" in c[1]]


def test_failures_are_told_and_the_others_compared(processes, tmp_path, capsys):
    commands, fake = processes
    fake.failing = ("attn_lr0.003", "linear")
    arguments = ["--patterns=attn; linear; gdn", *BASE[1:], "--learning_rates=1e-3,3e-3,1e-2", "--seeds=7,8", "--tasks=none"]
    with pytest.raises(SystemExit) as ended:
        sweep.main([*arguments, f"--sweep_dir={tmp_path / 'sweep'}"])
    assert ended.value.code == 1
    printed = capsys.readouterr()
    wrong = [f"{run}_seed7" for run in ("linear_lr0.001", "attn_lr0.003", "linear_lr0.003", "linear_lr0.01")]
    assert [line for line in printed.err.splitlines() if line.startswith("failed: ")] == [
        f"failed: {tmp_path / 'sweep' / name}: train ended with 2: error: the loss is nan" for name in wrong
    ]
    trained = [c for c in commands if "train.py" in c[1]]
    assert len(trained) == 9 + 2  # what failed is not tried again, and a pattern of which nothing is left gets no seeds
    names = [f"{name}_seed{seed}" for name in ("attn_lr0.001", "gdn_lr0.003") for seed in (7, 8)]
    assert commands[-1][2:7] == ["--compare", *(str(tmp_path / "sweep" / name) for name in names)]
    text = (tmp_path / "sweep" / "sweep.md").read_text()
    assert text in printed.out and "| attn | 0.7500 |  | 0.7500 |" in text and "| linear |  |  |  |" in text
    assert "| `attn` | 0.003 | 7 | 0 of 4 (failed) |" in text and text.count("- failed: ") == 4


def test_why_a_run_failed_is_not_what_torchrun_says(tmp_path):
    def reason(*lines):
        (tmp_path / "log.txt").write_text("\n".join(["train --a", "error: of the time before", "train --a", *lines]))
        return sweep._reason(tmp_path / "log.txt", "train --a")

    summary = ["Traceback (most recent call last):", "torch.distributed.elastic.ChildFailedError: ", "train.py FAILED", "====="]
    assert reason("error: too large", *summary) == "error: too large"
    assert reason("[rank1]: Traceback:", "[rank1]: torch.OutOfMemoryError: no room", *summary) == "torch.OutOfMemoryError: no room"
    assert reason("step 3", "Killed") == "Killed" and reason("", " ") == "(it printed nothing)"


def test_runs_are_spread_over_the_gpus(monkeypatch, tmp_path):
    """Each on the one with the fewest, of those that are visible; and all as they are without GPUs, or under torchrun."""
    ends, given = iter([3, 1, 4, 2, 9, 9]), []  # polls until each is done

    class Fake:
        returncode = 0

        def __init__(self, command, env, **_):
            self.args, self.left, self.name = command, next(ends), Path(command[-2].split("=")[1]).name
            given.append((self.name, env["CUDA_VISIBLE_DEVICES"]))

        def poll(self):
            self.left -= 1
            return 0 if self.left <= 0 else None

    monkeypatch.setattr(sweep.subprocess, "Popen", Fake)
    monkeypatch.setattr(sweep.time, "sleep", lambda _: None)
    monkeypatch.setattr(sweep.Job, "eval_command", lambda job: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    config = sweep.SweepConfig(patterns="gdn", sweep_dir=str(tmp_path))
    jobs = [sweep.Job(config, [], "gdn", None, 1e-3, seed) for seed in range(6)]
    assert sweep.visible_gpus(config) == ["5", "7"]
    assert sweep.run_all(jobs, 4, sweep.visible_gpus(config)) == {}
    # 0: 5, 1: 7, 2: 5, 3: 7; 1 is done first, then 3: both of their successors go where it is empty; 0 is done: 5
    assert [gpu for _, gpu in given] == ["5", "7", "5", "7", "7", "7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert sweep.visible_gpus(config) == ["0", "1"]
    for other in ({"torchrun": 2}, {"device": "cpu"}, {"device": "cuda:1"}):
        assert sweep.visible_gpus(config.model_copy(update=other)) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert sweep.visible_gpus(config) == []


def test_a_run_that_reached_its_loss_is_finished(processes, tmp_path, monkeypatch):
    def command(meta, *flags, **settings):
        monkeypatch.setattr(sweep.Job, "meta", lambda job: meta)
        config = sweep.SweepConfig(patterns="gdn", max_iters=9, sweep_dir=str(tmp_path), **settings)
        return sweep.Job(config, list(flags), "gdn", None, 0.002, 1).train_command()

    assert command(at_step(4, 0.5), stop_loss=0.5) is None and command(at_step(9)) is None
    for meta, low in ((at_step(4, 0.5), 0.4), (at_step(4, 0.5), None), (at_step(4, 0.5, 2), 0.5), (at_step(4, None), 0.5)):
        assert command(meta, stop_loss=low) is not None
    resumed = command(at_step(4, 0.5), "--stop_loss=0.4", "--n_embd=64", "--max_iters=9", stop_loss=0.4)
    assert resumed[2:] == [f"--resume={tmp_path / 'gdn_lr0.002_seed1'}", "--stop_loss=0.4", "--max_iters=9"]


def test_a_folder_of_other_settings_is_no_run_of_this_sweep(processes, tmp_path, monkeypatch):
    def command(settings, **meta):
        monkeypatch.setattr(sweep.Job, "meta", lambda job: at_step(4) | {"settings": settings, **meta})
        config = sweep.SweepConfig(patterns="gdn", max_iters=4, n_embd=64, sweep_dir=str(tmp_path))
        return sweep.Job(config, [], "gdn", None, 0.002, 1).train_command()

    same = {"layers": "gdn", "n_embd": 64, "learning_rate": 0.002, "min_lr": 2e-4, "seed": 1, "log_interval": 7}
    assert command(same) is None  # finished
    for other, line in (({"n_embd": 32}, "n_embd=32, now 64"), ({"layers": "attn"}, "layers=attn, now gdn")):
        with pytest.raises(ConfigError, match=line):
            command(same | other)
    monkeypatch.setattr(sweep, "data_of", lambda _: types.SimpleNamespace(meta={"val_sha256": "b"}))
    assert command(same, val_sha256="b") is None
    with pytest.raises(ConfigError, match="dataset=x, now "):
        command(same | {"dataset": "x"}, val_sha256="a")


@pytest.mark.slow
def test_a_sweep_that_is_cut_off_leaves_a_table(root, tmp_path):
    command = [sys.executable, "sweep.py", *BASE, "--seeds=1", "--tasks=none", f"--sweep_dir={tmp_path}", "--patterns=attn; gdn"]
    command += ["--batch_size=1", "--eval_iters=1", "--warmup_iters=1", "--log_interval=1", "--eval_interval=100"]
    command += ["--max_iters=200", "--learning_rate=1e-2"]
    with subprocess.Popen(command, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        second = tmp_path / "gdn_lr0.01_seed1" / "metrics.jsonl"
        while process.poll() is None and not (second.is_file() and second.stat().st_size):
            time.sleep(0.1)
        process.terminate()
    assert process.returncode == 128 + 15
    first, cut = (tmp_path / "sweep.md").read_text().splitlines()[-2:]
    assert first.startswith("| `attn` | 0.01 | 1 |") and " of " not in first
    assert cut.startswith("| `gdn` | 0.01 | 1 |") and " of 200 |" in cut


def test_an_interrupted_run_is_resumed(processes, tmp_path, monkeypatch):
    commands, _ = processes
    monkeypatch.setattr(sweep.Job, "meta", lambda job: at_step(2))
    config = sweep.SweepConfig(patterns="gdn", max_iters=4, sweep_dir=str(tmp_path))
    job = sweep.Job(config, [], "gdn", None, 0.002, 1)
    assert job.train_command()[-1] == f"--resume={tmp_path / 'gdn_lr0.002_seed1'}"
    monkeypatch.setattr(sweep.Job, "meta", lambda job: at_step(4))
    assert job.train_command() is None
    three = sweep.SweepConfig(patterns="gdn", max_iters=5, torchrun=3, sweep_dir=str(tmp_path))
    command = sweep.Job(three, ["--x=1"], "gdn", 64, 0.002, 1).train_command()
    assert "--nproc_per_node=3" in command and command[-1].startswith("--resume")


@pytest.mark.parametrize("match", ["parameters", "flops"])
def test_sizes_are_matched(match):
    config = sweep.SweepConfig(patterns="gdn; attn; linear", match=match, vocab_size=300, n_embd=64, n_head=2, block_size=64)
    widths = sweep.matched_widths(config, sweep.listed(config.patterns))
    sizes = []
    for pattern, n_ffn in widths.items():
        settings = {n: getattr(config, n) for n in sweep.ModelConfig.model_fields} | {"layers": pattern, "n_ffn": n_ffn}
        with torch.device("meta"):
            model = Model(sweep.ModelConfig(**settings))
        sizes.append(model.n_params() if match == "parameters" else model.flops_per_token(64))
    assert max(sizes) / min(sizes) < 1.02 and len(sizes) == 3
    with pytest.raises(ConfigError, match="has no feed-forward layer"):
        sweep.matched_widths(config, ["gdn", "attn(ffn=none)"])


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--max_iters=3"], "patterns is required"),
        (["--patterns=gdn; atn", "--vocab_size=99"], "patterns: 'atn': "),
        (["--patterns=gdn; attn; gdn"], "patterns='gdn; attn; gdn': one is given twice"),
        (["--patterns=gdn", "--seeds=1,x"], "seeds='1,x': must be numbers separated by commas"),
        (["--patterns=gdn", "--seeds=1,1"], "seeds='1,1': must be different numbers"),
        (["--patterns=gdn", "--learning_rates="], "learning_rates='': must not be empty"),
        (["--patterns=gdn", "--seed=3"], "seed is set by the sweep: use --seeds"),
        (["--patterns=gdn", "--layers=attn"], "layers is set by the sweep: use --patterns"),
        (["--patterns=gdn", "--pattern=attn"], "unknown setting 'pattern': did you mean 'patterns'?"),
    ],
)
def test_sweep_errors(argv, line, monkeypatch):
    monkeypatch.setattr(sweep, "run_all", lambda *_: pytest.fail("nothing should be trained"))
    with pytest.raises(ConfigError) as error:
        sweep.main(argv)
    assert line in str(error.value)


@pytest.mark.slow
def test_sweep_from_beginning_to_end(root, tmp_path):
    command = [sys.executable, "sweep.py", *BASE, "--seeds=1,2", "--batch_size=1", "--eval_iters=1", "--eval_interval=2"]
    command += ["--warmup_iters=1", "--match=parameters", "--eval_flags=--limit=1", f"--sweep_dir={tmp_path / 'sweep'}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for trained in (4, 0):  # the second time nothing is left to do
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(": train\n") == trained
        assert "**heldout_bpb bits_per_byte**: best is" in done.stdout
    assert (tmp_path / "sweep" / "report.png").is_file()
