"""Every command of the README runs, in the order it stands there, at tiny size, in a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys

import pytest

TINY_MODEL = "--block_size=32 --batch_size=1 --warmup_iters=1"
TINY = {
    "train.py": f"{TINY_MODEL} --max_iters=2 --eval_iters=1 --log_interval=1 --device=cpu",
    "resume": "--max_iters=4 --eval_iters=1 --device=cpu",
    "init_from": "--max_iters=2 --batch_size=1 --eval_iters=1 --device=cpu",
    "sample.py": "--max_new_tokens=8 --device=cpu",
    "eval.py": "--limit=1 --device=cpu",
    "check.py": "",
    "bench.py": "",
    "convert.py": "",
}


def blocks(root, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (root / "README.md").read_text(), re.M | re.S)


def commands(root):
    lines = "".join(blocks(root, "sh")).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The files of the repository that git would have, and nothing that a run left."""
    from conftest import ROOT

    here = tmp_path_factory.mktemp("readme") / "repo"
    left = shutil.ignore_patterns(".*", "__pycache__", "out", "wandb", "*.bin", "tokenizer.json", "meta.json")
    shutil.copytree(ROOT, here, ignore=left)
    return here


def shell(command, where):
    outside = {
        n: x for n, x in os.environ.items() if n not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }  # of a make that runs the tests
    env = {**outside, "HF_HUB_OFFLINE": "1", "PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", command], cwd=where, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def tiny(command):
    script = re.search(r"python (\S+)", command)[1]
    kind = next((kind for kind in ("resume", "init_from") if f"--{kind}" in command), script)
    return f"{command} {TINY[kind]}"


def test_the_readme_has_the_commands_one_expects(root):
    text = "\n".join(commands(root))
    for word in ("make setup", "make demo", "python train.py", "--resume", "python sample.py", "python eval.py", "python check.py"):
        assert word in text


def test_every_python_command(copy, root):
    (mixer,) = [b for b in blocks(root, "python") if "@mixer" in b]
    (copy / "my_mixer.py").write_text(mixer)
    run = [c for c in commands(root) if c.startswith("python ")]
    assert len(run) > 8
    for command in run:
        out = shell(tiny(command), copy)
        if "sample.py" in command:
            assert "ms/token" in out
        if "eval.py" in command:
            assert "bits_per_byte" in out
    assert (copy / "out/two/step-000004").is_dir()


def test_make_demo_does_what_it_says(copy, root):
    """The three commands of `make demo`, and what `make` does before them, as a dry run: no environment with PYTHON=."""
    lines = shell(f"make -n demo PYTHON={sys.executable}", copy).strip().splitlines()
    scripts = [re.search(r"(\w+)\.py", line)[1] for line in lines]
    assert scripts == ["train", "sample", "eval"]
    for line in lines:
        shell(tiny(line.replace(sys.executable, "python")), copy)
    fresh = shell("env -u PYTHON make -n demo", copy)
    assert "-m venv .venv" in fresh and "install --quiet --disable-pip-version-check torch==2.13.0" in fresh
    index = shell("env -u PYTHON TORCH_INDEX=https://example.org/cpu make -n setup", copy)
    assert "torch==2.13.0 --index-url https://example.org/cpu" in index


def test_the_table_of_recipes_is_what_the_command_prints(root):
    printed = shell("python bench.py recipes", root)
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(rows) >= 13 and "\n".join(rows) in (root / "README.md").read_text()


def test_links_and_files_exist(root):
    text = (root / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (root / target).exists(), target
    for name in re.findall(r"^\| `([\w./]+)`", text.split("## Where things are")[1].split("\n## ")[0], re.M):
        assert (root / name).exists(), name
