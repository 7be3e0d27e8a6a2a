"""Settings from defaults, recipes and flags; every problem is one clear line; the layer pattern."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import Field

from configurator import (
    ConfigError,
    LayerSpec,
    ModelConfig,
    Settings,
    TrainConfig,
    describe,
    expand_layers,
    format_layers,
    load,
    parse_layers,
)
from configurator.config import kinds

ROOT = Path(__file__).parent.parent
DEMO = "configurator/recipes/demo.py"


class Sample(Settings):
    """sampling"""

    start: str = Field("\n", description="the prompt")
    top_k: int | None = Field(50, ge=1, description="keep the k likeliest")
    temperature: float = Field(1.0, ge=0, description="0: greedy")
    shots: Literal[0, 5] = Field(0, description="examples")
    _positional: ClassVar[str | None] = "RUN"


def get(*argv, cls=TrainConfig, **options):
    return load(cls, list(argv), **options).config


def problems(*argv, cls=TrainConfig, **options):
    with pytest.raises(ConfigError) as caught:
        load(cls, list(argv), **options)
    return caught.value.problems


def write(tmp_path, text, name="recipe.py"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


# ---- flags


@pytest.mark.parametrize(
    "argv, name, value",
    [
        (["--learning_rate=1"], "learning_rate", 1.0),
        (["--learning_rate", "1e-4"], "learning_rate", 1e-4),
        (["--grad_clip=0"], "grad_clip", 0.0),
        (["--batch_size=1e3"], "batch_size", 1000),
        (["--compile=false"], "compile", False),
        (["--compile", "FALSE"], "compile", False),
        (["--compile"], "compile", True),
        (["--compile", "--n_layer=2"], "compile", True),
        (["--compile", DEMO], "compile", True),
        (["--compile=None"], "compile", None),
        (["--out_dir=2024"], "out_dir", "2024"),
        (["--out_dir=a=b"], "out_dir", "a=b"),
        (["--out_dir", "None"], "out_dir", None),
        (["--vocab_size=NONE"], "vocab_size", None),
        (["--seed", "9007199254740993"], "seed", 9007199254740993),
    ],
)
def test_flags_are_read_as_the_type_of_their_setting(argv, name, value):
    found = getattr(get(*argv), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "argv, name, value",
    [
        (["--start=123"], "start", "123"),
        (["--start=x=1"], "start", "x=1"),
        (["--start", "two words = one text"], "start", "two words = one text"),
        (["--start=--top_k=3"], "start", "--top_k=3"),
        (["--start="], "start", ""),
        (["--start", "- item"], "start", "- item"),
        (["--top_k=None"], "top_k", None),
        (["--top_k", "3"], "top_k", 3),
        (["--shots=5"], "shots", 5),
    ],
)
def test_settings_of_another_script(argv, name, value):
    found = getattr(get(*argv, cls=Sample), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("name", [n for n, f in TrainConfig.model_fields.items() if bool in kinds(f.annotation)])
def test_every_switch_can_be_set_both_ways(name):
    assert getattr(get(f"--{name}=true"), name) is True
    assert getattr(get(f"--{name}=false"), name) is False
    assert getattr(get(f"--{name}"), name) is True


@pytest.mark.parametrize(
    "argv, line",
    [
        (["batch_size=4"], "'batch_size=4': settings start with two dashes: write --batch_size=4"),
        (["-batch_size=4"], "'-batch_size=4': settings start with two dashes: write --batch_size=4"),
        (["--batch-size=4"], "unknown setting 'batch-size': did you mean 'batch_size'?"),
        (["--learning_rte", "-1"], "unknown setting 'learning_rte': did you mean 'learning_rate'?"),
        (["--no-compile"], "unknown setting 'no-compile': did you mean --compile=false?"),
        (["--zzzz=1"], "unknown setting 'zzzz'"),
        (["--out_dir"], "--out_dir needs a value: write --out_dir=TEXT"),
        (["--max_iters", "--compile"], "--max_iters needs a value: write --max_iters=INT"),
        (["--out_dir="], "out_dir='': must not be empty"),
        (["--weight_decay", "-1"], "weight_decay=-1: must be at least 0.0"),
        (["--batch_size=0"], "batch_size=0: must be at least 1"),
        (["--batch_size=1.5"], "batch_size=1.5: must be a whole number: nearest are 1 and 2"),
        (["--batch_size=four"], "batch_size='four': must be a whole number"),
        (["--batch_size=None"], "batch_size='None': must be a whole number"),
        (["--n_ffn=many"], "n_ffn='many': must be a whole number, or none"),
        (["--learning_rate=nan"], "learning_rate=nan: must be a finite number"),
        (["--dtype=bfloat"], "dtype='bfloat': choose one of float32, bfloat16, float16, or none: did you mean 'bfloat16'?"),
        (["--compile=2"], "compile='2': must be true or false, or none"),
        (["--beta2=1"], "beta2=1: must be less than 1.0"),
        (["stray"], "unexpected argument 'stray': settings are written --name=value, recipes end in .py"),
        (
            ["demo"],
            f"unexpected argument 'demo': settings are written --name=value, recipes end in .py: did you mean {DEMO}?",
        ),
        (["dmo.py"], f"recipe dmo.py: no such file: did you mean {DEMO}?"),
        (["zzzz.py"], "recipe zzzz.py: no such file: recipes that come with this are in configurator/recipes"),
    ],
)
def test_a_wrong_argument_is_one_line_with_the_way_out(argv, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert problems(*argv) == [line]


@pytest.mark.parametrize(
    "argv, line",
    [
        (["--n_embd=250"], "n_embd=250 is not divisible by n_head=4: nearest are 248 and 252"),
        (["--n_embd=3"], "n_embd=3 is not divisible by n_head=4: nearest is 4"),
        (
            ["--n_head=12", "--n_embd=144", "--n_kv_head=5"],
            "n_kv_head=5 does not divide n_head=12: nearest are 4 and 6",
        ),
        (["--n_kv_head=9"], "n_kv_head=9 does not divide n_head=4: nearest is 4"),
        (["--min_lr=1"], "min_lr=1.0 is more than learning_rate=0.002: use at most that"),
        (["--lr_decay_iters=5"], "warmup_iters=20 is more than lr_decay_iters=5: use at most 5"),
        (["--layers=gdn("], "layers='gdn(': missing ')' opened at character 3"),
        (
            ["--decay_lr=false", "--min_lr=0"],
            "--min_lr=0 has no effect with decay_lr=false: drop it, or use decay_lr=true",
        ),
        (["--wandb_project=x"], "--wandb_project=x has no effect with wandb_log=false: drop it, or use wandb_log=true"),
    ],
)
def test_settings_that_do_not_go_together(argv, line):
    assert problems(*argv) == [line]


def test_settings_that_go_together():
    assert get("--n_embd=250", "--head_dim=64").head_dim == 64
    assert get("--decay_lr=false", "--warmup_iters=1000").warmup_iters == 1000
    assert get("--wandb_log", "--wandb_project=x").wandb_project == "x"


def test_of_a_flag_given_twice_the_last_counts():
    assert get("--seed=1", "--seed", "2").seed == 2


def test_all_problems_are_reported_at_once():
    found = problems("--n_embd=0", "--n_head=3", "--n_kv_head=2", "--foo", "1", "--seed=a", "--dropout=1")
    assert found == [
        "unknown setting 'foo'",
        "n_embd=0: must be at least 1",  # and nothing about n_embd and n_head
        "dropout=1: must be less than 1.0",
        "seed='a': must be a whole number",
        "n_kv_head=2 does not divide n_head=3: nearest are 1 and 3",
    ]


def test_settings_made_in_python_are_checked_the_same_way():
    with pytest.raises(ConfigError) as caught:
        ModelConfig(n_layer="4", bias=1, n_embd=250, n_head=True, colour="red")
    assert caught.value.problems == [
        "n_layer='4': must be a whole number",
        "n_head=True: must be a whole number",
        "bias=1: must be true or false",
        "unknown setting 'colour'",
    ]
    with pytest.raises(ConfigError, match="n_embd=250 is not divisible"):
        ModelConfig(n_embd=250)
    assert ModelConfig(n_embd=1e3).n_embd == 1000
    saved = TrainConfig(batch_size=7).model_dump()
    assert TrainConfig(**saved).batch_size == 7


def test_the_defaults_and_every_description():
    config = TrainConfig()
    assert (config.layers, config.n_layer, config.n_embd, config.dataset) == ("gdn gdn gdn attn", 4, 256, "sotu")
    assert all(field.description for field in TrainConfig.model_fields.values())


# ---- recipes


def test_the_order_is_defaults_checkpoint_recipes_flags(tmp_path):
    first = write(tmp_path, "n_layer = 1\nbatch_size = 1\nmax_iters = 20\n", "first.py")
    second = write(tmp_path, "batch_size = 2\nmax_iters = 30\n", "second.py")
    resolved = load(TrainConfig, ["--max_iters=40", first, second], base={"n_layer": 9, "n_embd": 64, "n_head": 2.0})
    config, sources = resolved.config, resolved.sources
    assert (config.n_embd, config.n_layer, config.batch_size, config.max_iters) == (64, 1, 2, 40)
    assert (sources["bias"], sources["n_embd"], sources["n_layer"]) == ("default", "checkpoint", f"recipe {first}")
    assert (sources["batch_size"], sources["max_iters"]) == (f"recipe {second}", "flag")
    assert set(sources) == set(TrainConfig.model_fields)


def test_a_recipe_may_compute(tmp_path):
    text = '''"""What this is for."""
_tokens = 2**15  # a helper
block_size = 256
batch_size = _tokens // block_size
max_iters = 1e3
learning_rate = 3e-4 * (batch_size / 64) ** 0.5
min_lr = 0
weight_decay = -(-1)
layers = ("gdn(ffn=none)*2 "
          "attn") + " swa"
vocab_size = None
compile = False
'''
    config = get(write(tmp_path, text))
    assert (config.batch_size, config.max_iters, config.min_lr, config.weight_decay) == (128, 1000, 0.0, 1.0)
    assert config.learning_rate == pytest.approx(3e-4 * 2**0.5)
    assert config.layers == "gdn(ffn=none)*2 attn swa" and config.vocab_size is None and config.compile is False


@pytest.mark.parametrize(
    "text, line",
    [
        ("learning_rte = 1e-3", "1: unknown setting 'learning_rte': did you mean 'learning_rate'?"),
        ("\nbatch_size = '16'", "2: batch_size='16': must be a whole number"),
        ("compile = 1", "1: compile=1: must be true or false, or none"),
        ("n_layer = None", "1: n_layer=None: must be a whole number"),
        ("out_dir = 2024", "1: out_dir=2024: must be text"),
        ("seed = True", "1: seed=True: must be a whole number"),
        ("n_embd = 250", "1: n_embd=250 is not divisible by n_head=4: nearest are 248 and 252"),
        ("import os", "1: a recipe holds only lines `name = value` (found: import)"),
        ("seed += 1", "1: a recipe holds only lines `name = value` (found: augassign)"),
        ("seed = max_iters = 1", "1: a recipe holds only lines `name = value` (found: assign)"),
        ("seed = int('3')", "not `int('3')`"),
        ("seed = 'a'.upper", "not `'a'.upper`"),
        ("out_dir = f'{1}'", "not `f'{1}'`"),
        ("seed = _x", "1: '_x' is not assigned above"),
        ("seed = max_iters", "1: 'max_iters' is not assigned above"),
        ("seed = 10**10**10", "1: `10 ** 10 ** 10`: exponents stay within 64"),
        ("_x = 10**64\nseed = _x * _x", "2: `_x * _x`: numbers stay below 2**64"),
        ("dropout = 1 / 0", "1: `1 / 0`: division by zero"),
        ("dropout = (-1) ** 0.5", "1: `(-1) ** 0.5`: not a real number"),
        ("out_dir = 'a' * 3", "1: `'a' * 3`: arithmetic is for numbers (and + for two texts)"),
        ("seed = = 1", "1: not Python syntax: invalid syntax"),
    ],
)
def test_a_wrong_recipe_is_refused_with_its_line(tmp_path, text, line):
    path = write(tmp_path, text)
    (problem,) = problems(path)
    assert problem.startswith(f"{path}:") and line in problem


def test_all_problems_of_a_recipe_and_of_flags_are_reported_at_once(tmp_path):
    path = write(tmp_path, "import os\nlr = 1\nbatch_size = 0\n")
    assert [problem.removeprefix(path) for problem in problems(path, "--seed=-1")] == [
        ":1: a recipe holds only lines `name = value` (found: import)",
        ":2: unknown setting 'lr' (a helper's name starts with _)",
        ":3: batch_size=0: must be at least 1",
        "seed=-1: must be at least 0",
    ]


def test_unreadable_recipes(tmp_path):
    (tmp_path / "folder.py").mkdir()
    assert problems(str(tmp_path / "folder.py")) == [f"recipe {tmp_path}/folder.py: Is a directory"]
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in problems(str(tmp_path / "binary.py"))[0]


def test_a_checkpoint_is_checked_too():
    assert problems(base={"n_layer": 0, "n_old": 1}) == [
        "checkpoint: unknown setting 'n_old'",
        "checkpoint: n_layer=0: must be at least 1",
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "configurator/recipes").glob("*.py")), ids=lambda path: path.stem)
def test_every_recipe_that_comes_with_this_is_valid(path):
    assert get(str(path)).out_dir or "sweep.py" in path.read_text()  # which gives each run its own folder


def test_a_setting_without_default_is_required():
    class Convert(Settings):
        """conversion"""

        source: str = Field(description="where from")
        steps: int = Field(1, ge=1, description="how many")

    assert problems("--steps=0", cls=Convert) == ["source is required: --source=VALUE", "steps=0: must be at least 1"]
    assert get("--source=x", cls=Convert).source == "x"


# ---- other arguments, help, description


def test_positional_arguments_only_where_they_are_declared():
    resolved = load(Sample, ["out/run=3", "--top_k=4", "second"])
    assert resolved.positional == ["out/run=3", "second"] and resolved.config.top_k == 4
    assert problems("top_k=4", cls=Sample) == ["'top_k=4': settings start with two dashes: write --top_k=4"]


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_setting_with_type_default_and_description(flag, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        load(TrainConfig, ["--n_layer=zero", flag], prog="train.py", description="Trains 100% of it.")
    text = capsys.readouterr().out
    assert caught.value.code == 0 and "train.py [RECIPE.py ...] [--name=value ...]" in text and "100% of it" in text
    for name, field in TrainConfig.model_fields.items():
        assert f"--{name} " in text and field.description in text
    assert "--learning_rate FLOAT" in text and "peak learning rate (default: 0.002)" in text
    assert "--dtype float32|bfloat16" in text and "--compile true|false" in text


def test_help_names_the_positional_argument(capsys):
    with pytest.raises(SystemExit):
        load(Sample, ["-h"], prog="sample.py")
    assert "sample.py [RECIPE.py ...] RUN ... [--name=value ...]" in capsys.readouterr().out


def test_describe_shows_what_was_set_and_where(tmp_path):
    lines = describe(load(TrainConfig, ["--n_layer=2", "--layers=gdn attn", "--bias"])).splitlines()
    assert lines[:3] == ["layers   'gdn attn'  flag", "n_layer  2           flag", "bias     true        flag"]
    rest = "".join(lines[3:])
    assert lines[3].startswith("defaults: n_head=4 n_kv_head=none") and "n_layer" not in rest and "seed=1337" in rest


# ---- the script's frame

SCRIPT = """
import sys
from configurator import ConfigError, TrainConfig, load, run
def main(argv):
    resolved = load(TrainConfig, argv)
    {body}
run(main)
"""


def script(*argv, body="print('fine')", **options):
    command = [sys.executable, "-c", SCRIPT.format(body=body), *argv]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, **options)


def test_a_script_exits_with_2_and_one_line_per_problem():
    done = script("batch_size=4", "--seed=x")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: 'batch_size=4': settings start with two dashes: write --batch_size=4",
        "error: seed='x': must be a whole number",
    ]
    assert script("--seed=1").stdout == "fine\n"


def test_a_script_leaves_quietly_when_interrupted_or_its_reader_went_away():
    assert (done := script(body="raise KeyboardInterrupt")).returncode == 128 + signal.SIGINT and done.stderr == ""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", SCRIPT.format(body="print('x')")]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 1 and done.stderr == ""


def test_config_error_keeps_its_problems():
    error = ConfigError(["one", "two"])
    assert str(error) == "one\ntwo" and ConfigError("one").problems == ["one"]
    assert pickle.loads(pickle.dumps(error)).problems == ["one", "two"]


# ---- the layer pattern


def test_a_pattern_is_read_with_counts_and_options():
    gdn, attn = LayerSpec("gdn"), LayerSpec("attn", {"rope": None})
    assert parse_layers("  gdn*2 attn( rope = none )\n") == [gdn, gdn, attn]
    assert parse_layers("gdn()") == [gdn]
    values = parse_layers("a(i=-3, f=1e4, g=.5, t=True, n=None, w=a/b:1.x, q='b, c)', r=\"it's\")")[0].options
    expected = {"i": -3, "f": 1e4, "g": 0.5, "t": True, "n": None, "w": "a/b:1.x", "q": "b, c)", "r": "it's"}
    assert values == expected and [type(v) for v in values.values()] == [type(v) for v in expected.values()]


def test_a_pattern_is_cycled_and_cut():
    assert [spec.name for spec in expand_layers("a*2 b", 7)] == list("aabaaba")
    assert [spec.name for spec in expand_layers("a*7 b", 3)] == list("aaa")


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "empty"),
        (" \n", "empty"),
        ("gdn(ffn=none", "missing ')' opened at character 3"),
        ("attn gdn(a", "missing ')' opened at character 8"),
        ("gdn(a=", "missing ')' opened at character 3"),
        ("gdn(a=1,", "missing ')' opened at character 3"),
        ("gdn*0", "count 0 is not between 1 and 10000 at character 4"),
        ("gdn*-1", "count -1 is not between 1 and 10000 at character 4"),
        ("gdn*1000000000", "is not between 1 and 10000 at character 4"),
        ("gdn*", "expected a count from 1 to 10000 at character 4 (the end)"),
        ("gdn*x", "expected a count from 1 to 10000 at character 4, found 'x'"),
        ("gdn*2.5", "expected a space between layers at character 5, found '.'"),
        ("gdn,attn", "expected a space between layers at character 3, found ','"),
        ("gdn(a=1)attn", "expected a space between layers at character 8, found 'a'"),
        ("gdn (a=1)", "expected the name of a layer at character 4, found '('"),
        ("gdn(a=1 b=2)", "expected ',' or ')' at character 8, found 'b'"),
        ("gdn(a=1,)", "expected the name of an option at character 8, found ')'"),
        ("gdn(1=2)", "expected the name of an option at character 4, found '1'"),
        ("gdn(a)", "expected '=' after 'a' at character 5, found ')'"),
        ("gdn(a=)", "expected a number, true, false, none, a word or a quoted text at character 6, found ')'"),
        ("gdn(a='x)", "the quote is not closed, opened at character 6"),
        ("gdn(a=1, a=2)", "option 'a' is given twice at character 9"),
        ("gdn(a=1e999)", "number too large at character 6"),
    ],
)
def test_a_wrong_pattern_is_refused_with_its_place(text, problem):
    with pytest.raises(ConfigError) as caught:
        parse_layers(text)
    (line,) = caught.value.problems
    assert line.startswith(f"layers={text!r}: ") and problem in line


def test_format_is_canonical_and_round_trips():
    text = "a*3 b(i=1, f=1.0, t=true, n=none, w=word, q='1', e='', s='two words', r=\"it's\")*2 b(i=true) b(i=1) a"
    assert format_layers(parse_layers(text)) == text  # 1, 1.0 and true are equal in Python, and stay apart
    assert format_layers(parse_layers("a a( x=1 ) a(x=1)  a()*2 a")) == "a a(x=1)*2 a*3"
    for value in (1e-30, 1e22, -0.5, 10**17, "none", "None", "1e3", "+1", ".5", "a b", "(", "*", "~"):
        specs = [LayerSpec("m", {"v": value})]
        (found,) = parse_layers(format_layers(specs))
        assert found.options["v"] == value and type(found.options["v"]) is type(value)
    with pytest.raises(ConfigError, match="both kinds of quotes"):
        format_layers([LayerSpec("m", {"v": "'\""})])
