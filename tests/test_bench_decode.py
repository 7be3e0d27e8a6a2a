"""bench.py decode at tiny size: every row counted or with its reason, the arithmetic of FLOPs, bytes and dollars, the pictures."""

import json

import pytest
import torch
from test_model import make

import bench
from benchmarks import decode
from configurator import ConfigError
from sample import Engine

TINY = ["decode", "--size=tiny", "--tokens=2", "--device=cpu"]


def test_decode(tmp_path, capsys):
    flags = ["--layers=gpt2; gdn attn", "--batch_sizes=1,2", "--contexts=32,1024,2048", "--prompts=32,40,300", "--max_prompt=32"]
    content = bench.main([*TINY, f"--out_dir={tmp_path}", *flags, "--price=2"])
    assert json.loads((tmp_path / "decode.json").read_text()) == content
    rows = {(r["layers"], r["batch"], r["context"]): r for r in content["rows"]}
    assert len(rows) == 12 and "learned positions" in rows["gpt2", 1, 1024]["why"] and rows["gpt2", 1, 1024]["ms"] is None
    two = rows["gdn attn", 2, 1024]
    assert two["dollars_per_million"] == pytest.approx(two["ms"] / 2 * 1e6 / 3.6e6 * 2)
    assert 2 * rows["gdn attn", 1, 1024]["state_bytes"] == two["state_bytes"] <= two["allocated_bytes"]
    prompts = {(r["layers"], r["prompt"]): r for r in content["prompts"]}
    one = prompts["gdn attn", 32]
    assert len(prompts) == 6 and one["ms"] > 0
    assert one["dollars_per_million"] == pytest.approx(one["ms"] / 32 * 1e6 / 3.6e6 * 2)
    assert prompts["gdn attn", 40]["why"] == "its state grows: max_prompt=32"
    assert prompts["gpt2", 300]["why"] == "256 learned positions"
    pictures = ("decode", "decode_cost", "roofline")
    for name in pictures:
        assert 0 < (tmp_path / f"{name}.png").stat().st_size < 100_000
        (tmp_path / f"{name}.png").unlink()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 6 + 12 + 1 + 2 and sum("between the fastest and the slowest context" in x for x in lines) == 2
    assert bench.main(["decode", f"--results={tmp_path / 'decode.json'}", f"--out_dir={tmp_path / 'again'}"]) == content
    assert all((tmp_path / "again" / f"{name}.png").is_file() for name in pictures)


def test_a_model_that_fails_is_a_row(tmp_path, monkeypatch):
    """And what came before it is in the file already."""
    prefill_work, seen = decode.prefill_work, []

    def fails(model, n, size):
        if n == 16:
            raise RuntimeError("the device\nran out of it")
        seen.append((tmp_path / "decode.json").is_file() and json.loads((tmp_path / "decode.json").read_text())["prompts"])
        return prefill_work(model, n, size)

    monkeypatch.setattr(decode, "prefill_work", fails)
    flags = [f"--out_dir={tmp_path}", "--batch_sizes=1", "--contexts=8", "--prompts=8,16", "--plot=false", "--max_prompt=8"]
    content = bench.main([*TINY, "--layers=gdn; mamba2(head_dim=16, d_state=16)", *flags])
    assert [row["why"] for row in content["prompts"]] == [None, "RuntimeError: the device"] * 2
    assert seen[0] is False and seen[1] == content["prompts"][:2]  # a recurrent model reads beyond max_prompt
    assert all(row["ms"] > 0 for row in content["rows"])


def test_what_varies_with_the_length():
    rows = [
        {"layers": "gdn", "batch": 1, "context": n, "ms": ms} for n, ms in ((512, 9.0), (1024, 1.0), (65536, 1.04), (2**20, 0.8))
    ]
    assert decode.summary({"rows": rows, "prompts": []}) == ["gdn, batch 1: 30.0% between the fastest and the slowest context"]
    prompts = [
        {"layers": "gdn", "prompt": n, "device_bytes": b} for n, b in ((512, 1), (65536, 1000), (131072, 1100), (2**20, 1010))
    ]
    assert decode.summary({"rows": [], "prompts": prompts}) == [
        "gdn, batch 1: device memory +1.0% from 65536 to 1048576 tokens of prompt"
    ]


def test_everything_is_compiled_before(capsys):
    """What a worker runs on a GPU: the same calls at lengths that only compile; a model that cannot is a line."""
    config = decode.DecodeConfig(size="tiny", layers="gdn; gpt2", contexts="8,1000000", prompts="8,1048576", batch_sizes="1")
    for item in decode.models(config):
        assert decode.compile_model(config, item, "cpu", "float32") is None
    assert "cannot" not in capsys.readouterr().out
    assert "Error" in decode.compile_model(config, "gpt3", "cpu", "float32")


def test_what_a_step_costs():
    model = make("gdn attn swa(window=8) mamba2(head_dim=16, d_state=16)", torch.float32)
    weights = decode.matrix_weights(model)
    H, D, inner = 2, 16, 64
    recurrent = 6 * H * D * D + 2 * 4 * 96 + 4 * inner * 16 + 2 * 4 * (inner + 32)
    assert decode.step_flops(model, 100) == pytest.approx(2 * weights + recurrent + 4 * H * D * (101 + 8))
    kinds = decode.mixer_intensities(model, 1000)
    assert kinds["gdn"]["decode"] == pytest.approx((6 * H * D * D + 768) / (2 * 4 * H * D * D + 2 * 3 * 96 + 8), rel=1e-3)
    assert kinds["attn"]["decode"] == pytest.approx(1.0, rel=1e-2)  # each key head serves one query head, in bf16


def test_a_step_is_timed_at_its_context():
    engine = Engine(make("gdn attn", torch.float32))
    _, steps = decode.step_seconds(engine, 2, 50, 3)
    assert all(layer.length.tolist() == [55, 55] and layer.longest == 55 for layer in steps.state.layers)


def test_unknown_models():
    with pytest.raises(
        ConfigError, match=r"'gpt3' is neither a recipe \(deltanet, .*all\) nor a layer pattern: unknown mixer 'gpt3'"
    ):
        bench.main(["decode", "--layers=gdn; gpt3"])
    with pytest.raises(ConfigError, match="results=nowhere.json: no such file"):
        bench.main(["decode", "--results=nowhere.json"])
