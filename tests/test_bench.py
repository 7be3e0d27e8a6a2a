"""bench.py at tiny sizes, the growth of memory in bytes, and docs/mixers.md: its code runs, its figures are those of the model."""

import json
import re

import pytest
import torch

import bench
from configurator import ConfigError, ModelConfig
from model import Model, format_bytes


def run(tmp_path, command, *flags):
    content = bench.main([command, f"--out_dir={tmp_path}", *flags])
    assert json.loads((tmp_path / f"{command}.json").read_text()) == content
    assert {"settings", "device", "torch", "threads", "load_before", "rows"} <= set(content)
    return content["rows"]


def test_forms(tmp_path, capsys):
    flags = ("--lengths=16,80", "--batch_size=1", "--n_head=2", "--head_dim=8", "--repeats=1", "--device=cpu")
    rows = run(tmp_path, "forms", *flags)
    assert {(r["family"], r["form"]) for r in rows} == {
        (family, form) for family in bench.FAMILIES for form in bench.forms_of(bench.FAMILIES[family])
    }
    assert all(r["ms"] > 0 and r["forward_ms"] > 0 and r["peak_bytes"] > 0 for r in rows)
    steps = {(r["form"], r["T"]): r["sequential_steps"] for r in rows if r["family"] == "gdn"}
    assert steps[("recurrent", 80)] == 80 and steps[("parallel", 80)] == 1 and steps[("chunkwise", 80)] == 2
    assert 0 < (tmp_path / "forms.png").stat().st_size < 100_000
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 2


def test_forms_leave_out_what_would_not_fit(tmp_path, capsys):
    flags = ("--lengths=64", "--families=kda", "--head_dim=8", "--n_head=1", "--repeats=1", "--max_gib=1e-4", "--plot=false")
    rows = {r["form"]: r for r in run(tmp_path, "forms", *flags, "--device=cpu")}
    assert rows["parallel"]["ms"] is None and rows["chunkwise"]["ms"] > 0
    assert "over max_gib" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(bench.FAMILIES))
def test_forms_are_one_function(name):
    family = bench.FAMILIES[name]
    torch.manual_seed(0)
    inputs = [x.detach().double().requires_grad_() for x in bench.family_inputs(family, 2, 70, 2, 8, torch.device("cpu"))]
    results = []
    for form in bench.forms_of(family).values():
        out = form(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_memory_is_linear_for_recurrent_layers_and_quadratic_for_attention(tmp_path):
    rows = run(tmp_path, "memory", "--lengths=256,512,1024", "--n_embd=32", "--layers=gdn kda mamba2 lightning", "--device=cpu")
    growth = {}
    for row in rows:
        growth.setdefault(row["layer"], []).append(row["growth"])
    dense = growth.pop("attn, T x T")
    assert dense[0] is None and all(3.7 < x <= 4.0 for x in dense[1:])
    assert set(growth) == {"gdn", "kda", "mamba2", "lightning"}
    assert all(1.9 < x < 2.05 for ratios in growth.values() for x in ratios[1:])


def test_peak_memory_counts_what_is_alive():
    x = torch.randn(1000, requires_grad=True)
    with bench.PeakMemory() as memory:
        y = x.exp().exp()  # two results, both kept for the backward pass
        assert memory.live == memory.peak == 8000
        y.view(10, 100).add_(1)  # a view and an in-place operation: nothing new
        assert memory.live == 8000
        z = y.detach().sum()
        del y, z
        assert memory.live == 0 and memory.peak == 8004


def test_cpu_beside_transformers(tmp_path):
    flags = ("--length=70", "--batch_size=2", "--n_embd=32", "--n_head=2", "--vocab_size=50", "--repeats=1")
    operator, step = run(tmp_path, "cpu", *flags)
    assert operator["largest_difference"] < 1e-5
    assert step["parameters"][0] == step["parameters"][1]  # the same model on both sides
    for row in (operator, step):
        assert set(row["ms"]) == {"ours", "transformers"} and row["ratio"] == row["ms"]["transformers"] / row["ms"]["ours"]


@pytest.mark.parametrize(
    "argv, line",
    [
        ([], "no command: write `python bench.py COMMAND"),
        (["form"], "unknown command 'form'"),
        (["forms", "--lengths=256,x"], "'x' is not possible: whole numbers"),
        (["forms", "--families=gdm"], "known are attn, linear"),
        (["memory", "--layers=gdm"], "did you mean 'gdn'"),
        (["cpu", "--n_embd=50"], "nearest is 64"),
        (["cpu", "--repeat=3"], "did you mean 'repeats'"),
    ],
)
def test_errors_are_one_line(argv, line):
    with pytest.raises(ConfigError) as error:
        bench.main(argv)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_code_in_the_document_runs(root, monkeypatch):
    monkeypatch.chdir(root)
    blocks = re.findall(r"^```python\n(.*?)^```", (root / "docs/mixers.md").read_text(), re.M | re.S)
    assert len(blocks) >= 5
    session = {}
    for block in blocks:
        exec(compile(block, "docs/mixers.md", "exec"), session)


def test_figures_in_the_document_are_those_of_the_model(root):
    text = (root / "docs/mixers.md").read_text().partition("| 1k tokens |")[2]
    for item, label in [
        ("attn", "attn"), ("attn(n_kv_head=1)", "attn(n_kv_head=1)"), ("swa", "swa (512)"), ("dsa", "dsa (256 of all)"),
        ("mla", "mla (latent 64 + 16)"),
        ("retnet", "retnet (V = 2 K)"), ("gdn", "deltanet, gdn, kda"), ("kda", "deltanet, gdn, kda"),
        ("deltanet", "deltanet, gdn, kda"), ("mamba2", "mamba2 (8 heads, K 128)"), ("linear", "linear, lightning"),
    ]:  # fmt: skip
        mixer = Model(ModelConfig(layers=item, n_layer=1, n_embd=256, n_head=4, vocab_size=2)).blocks[0].mixer
        row = re.search(rf"^\| {re.escape(label)} \| (.*) \|$", text, re.M).group(1).split(" | ")
        short, long = (format_bytes(mixer.state_bytes(1, T)).replace(".0 K", " K") for T in (1024, 32768))
        assert row[0].split(", ")[0] == short and row[1] in (long, "the same" if long == short else long), (item, row, short, long)
        assert row[2:] == [f"{mixer.flops(T) / 1e6:.2f}" for T in (1024, 32768)], (item, row)
