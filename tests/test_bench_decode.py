"""bench.py decode at tiny size: every row counted or with its reason, the arithmetic of FLOPs, bytes and dollars, the pictures."""

import json

import pytest
import torch
from test_model import make

import bench
from benchmarks import decode
from configurator import ConfigError
from sample import Engine


def test_decode(tmp_path, capsys):
    flags = ["--size=tiny", "--recipes=gpt2,qwen3_next", "--batch_sizes=1,2", "--contexts=32,512", "--tokens=2", "--max_prefill=32"]
    content = bench.main(["decode", f"--out_dir={tmp_path}", *flags, "--device=cpu", "--price=2"])
    assert json.loads((tmp_path / "decode.json").read_text()) == content
    rows = {(r["recipe"], r["batch"], r["context"]): r for r in content["rows"]}
    assert len(rows) == 8 and "learned positions" in rows["gpt2", 1, 512]["why"] and rows["gpt2", 1, 512]["ms"] is None
    one, two = rows["qwen3_next", 1, 32], rows["qwen3_next", 2, 512]
    assert one["prefill"]["ms"] > 0 and "prefill" not in two
    assert two["dollars_per_million"] == pytest.approx(two["ms"] / 2 * 1e6 / 3.6e6 * 2)
    assert 2 * rows["qwen3_next", 1, 512]["state_bytes"] == two["state_bytes"] <= two["allocated_bytes"]
    for name in ("decode", "decode_cost", "roofline"):
        assert 0 < (tmp_path / f"{name}.png").stat().st_size < 100_000
    assert len(capsys.readouterr().out.splitlines()) == 8 + 2


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


def test_unknown_recipes():
    with pytest.raises(ConfigError, match="known are deltanet"):
        bench.main(["decode", "--recipes=gpt3"])
