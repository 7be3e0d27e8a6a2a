"""Commands in docs/data.md and docs/evaluation.md: every setting in them exists and is accepted together with the others."""

import importlib
import re
import shlex

import pytest

import configurator
import eval as evaluation
import sweep
from data.hub import HubConfig
from data.prepare import PrepareConfig
from data.synthetic.prepare import SyntheticConfig

CONFIGS = {
    "eval.py": evaluation.EvalConfig,
    "sweep.py": sweep.SweepConfig,
    "data/prepare.py": PrepareConfig,
    "data/synthetic/prepare.py": SyntheticConfig,
    "data/openwebtext/prepare.py": HubConfig,
}


def commands(root):
    text = "".join((root / "docs" / name).read_text() for name in ("data.md", "evaluation.md"))
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)).splitlines()
    listed = [command for line in lines if (command := line.split("  #")[0].strip())]
    return listed + [command for command in re.findall(r"`(python [^`\n]+)`", text) if "--" in command]


def test_every_command_is_accepted(root, monkeypatch):
    monkeypatch.chdir(root)
    found = commands(root)
    assert len(found) >= 14
    for command in found:
        script, *arguments = shlex.split(command)[1:]
        assert (root / script).is_file(), command
        if script in CONFIGS:
            configurator.load(CONFIGS[script], arguments)


@pytest.mark.parametrize("name", ["english", "openwebtext", "fineweb_edu", "shakespeare_char", "sotu", "synthetic"])
def test_scripts_of_the_data_sets_have_a_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"data.{name}.prepare").main(["--help"])
    assert ended.value.code == 0 and "--out" in capsys.readouterr().out
