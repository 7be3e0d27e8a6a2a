"""benchmarks/stages: what the curves say, and the whole chain of commands at tiny size."""

import json
import os
import subprocess
import sys

import pytest
from test_needles import TEXTS

import configurator
from benchmarks import stages
from configurator import ConfigError, TrainConfig
from data.english import prepare as english
from model import Model
from preflight import model_config


def test_the_recipe_has_thirty_million_parameters(root):
    config = configurator.load(TrainConfig, [str(root / "configurator" / "recipes" / "sparse.py")]).config
    model = Model(model_config(config.model_copy(update={"vocab_size": 8192})))
    assert abs(model.n_params() / 30e6 - 1) < 0.01
    assert config.max_iters * config.batch_size * config.block_size < 4 * 11_014_871  # four epochs of the text with needles


def test_where_a_curve_reaches_a_loss():
    points = [(100, 5.0), (200, 4.0), (400, 3.0)]
    assert stages.reached(points, 4.5) == 150 and stages.reached(points, 3.5) == 300 and stages.reached(points, 3.0) == 400
    assert stages.reached(points, 2.9) is None
    assert stages.reached([(100, 5.0), (200, 6.0), (300, 4.0)], 5.5) == 100  # it had been there before it rose


def test_conclusions():
    curves = {
        "sparse": [(10, 3.3), (20, 3.03)],
        "continued": [(10, 3.2), (20, 3.0), (30, 2.9)],
        "distilled": [(5, 4.0), (10, 3.8)],
        "converted": [(10, 3.6), (30, 3.5)],
        "scratch": [(40, 5.0), (120, 4.0), (160, 3.0)],
    }
    first, second = stages.conclude(curves)
    assert first == "after 20 tokens: sparse 3.0300, dense 3.0000: +1.00%"  # at the last point of both
    assert second == "converted, 3.5000 after 40 tokens; from scratch is there after 140, 3.5 times as many (3.0000 after 160)"
    curves["scratch"] = [(40, 5.0), (80, 4.0)]
    assert "from scratch does not get there (4.0000 after 80)" in list(stages.conclude(curves))[1]
    assert list(stages.conclude({"dense": [(1, 2.0)]})) == []


def test_no_runs_no_table(tmp_path):
    with pytest.raises(ConfigError, match="holds none of the runs dense, continued,"):
        stages.main([str(tmp_path), f"--out_dir={tmp_path}"])
    with pytest.raises(ConfigError, match="one folder of runs is needed"):
        stages.main([])


def test_a_half_that_was_not_made_has_no_picture(tmp_path):
    from matplotlib import pyplot

    curves = {"sparse": [(1, 2.0), (2, 1.0)], "swapped": [(1, 3.0), (2, 2.0)]}
    for name, kept in (("both", curves), ("one", {"sparse": curves["sparse"]}), ("none", {"dense": [(1, 2.0)]})):
        stages.draw(kept, tmp_path / f"{name}.png")
    wide = [pyplot.imread(tmp_path / f"{name}.png").shape[1] for name in ("both", "one")]
    assert wide[0] == 2 * wide[1] and not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(("cards", "second"), [("3", "3"), ("3,5", "5"), ("", "")])
def test_which_gpu_takes_what(tmp_path, root, cards, second):
    """A stand-in for Python writes down what it is asked for: one GPU has it all, a second one the hybrids."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES: $*" >> "$ASKED"\n')
    python.chmod(0o755)
    (tmp_path / "meta.json").touch()
    where = {
        "OUT": str(tmp_path),
        "DATA": str(tmp_path),
        "PY": str(python),
        "CUDA_VISIBLE_DEVICES": cards,
        "ASKED": str(tmp_path / "asked"),
    }
    script = ["bash", str(root / "benchmarks" / "stages.sh")]
    subprocess.run(script, cwd=root, env={**os.environ, **where}, check=True, timeout=60, capture_output=True)
    lines = (tmp_path / "asked").read_text().splitlines()
    runs = {line.split("--out_dir=")[1].split()[0].rpartition("/")[2]: line for line in lines if " train.py " in line}
    first, hybrids = cards[:1], {"scratch", "distilled", "converted", "swapped", "short"}
    assert set(runs) == set(stages.WHAT)
    assert {name for name, line in runs.items() if line.startswith(f"{first}: ")} == set(stages.WHAT) - (
        hybrids if second != first else set()
    )
    assert all(runs[name].startswith(f"{second}: ") for name in hybrids)
    order = list(runs)
    assert order.index("scratch") > order.index("continued") if second == first else set(order[:2]) == {"dense", "scratch"}
    assert lines[-1].startswith(f"{first}: -m benchmarks.stages") and sum(" eval.py " in line for line in lines) == 3
    limit = 400 if second != first else 520
    assert f"{limit} s" in (tmp_path / "stages.txt").read_text().splitlines()[0]


@pytest.mark.slow
def test_the_whole_chain(tmp_path, root):
    """Every command of benchmarks/stages.sh runs, and each run is in the table, the conclusions and the picture."""
    english.prepare(tmp_path / "data", vocab_size=300, parts=[TEXTS], needles=0.1, longest=128)
    where = {"DRY": "1", "OUT": str(tmp_path / "out"), "DATA": str(tmp_path / "data"), "PY": sys.executable, "LIMIT": "1800"}
    script = ["bash", str(root / "benchmarks" / "stages.sh")]
    subprocess.run(script, cwd=root, env={**os.environ, **where}, check=True, timeout=2000, capture_output=True)
    said = (tmp_path / "out" / "stages.txt").read_text()
    assert said.count(": rc 0 after") == len(stages.WHAT) + 4, said  # three scores, and the table
    content = json.loads((tmp_path / "out" / "stages.json").read_text())
    runs = content["runs"]
    assert set(runs) == set(stages.WHAT) and len(content["conclusions"]) == 2 and len(content["rows"]) == 4
    assert {name for name, run in runs.items() if run["selection"]} == set(stages.INDEXED)
    assert {name for name, run in runs.items() if run["needles"]} == {"dense", "unadapted", "sparse"}
    assert (tmp_path / "out" / "stages.png").stat().st_size > 1000
    assert all(0 <= runs["sparse"]["selection"][name] <= 1 for name in ("recall", "most", "overlap"))
    same = {name: run["selection"]["recall"] for name, run in runs.items() if name in ("warm", "unadapted")}
    assert same["warm"] == pytest.approx(same["unadapted"], abs=0.05)  # the same indexer, in another network from layer 1 on
