"""Several processes are one run: the same losses, the same weights, checkpoints that any number of them can continue."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT
from tiny import curve, flags, prepare_tiny, weights
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import context
import distributed
import kernels
import model as modelling
import preflight
from configurator import ModelConfig, TrainConfig
from model import Model


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return prepare_tiny(tmp_path_factory.mktemp("data"), shards=2)


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def launch(root, *jobs):
    """Run jobs (processes, arguments) one after the other: what they printed, and the exit status of the first that failed."""
    text = json.dumps([[world, [str(a) for a in argv]] for world, argv in jobs])
    done = subprocess.run(
        [sys.executable, "tests/ranks.py", text], cwd=root, capture_output=True, text=True, check=False, timeout=600
    )
    return done.returncode, done.stdout, done.stderr


def assert_close(a, b):
    """Losses within 1e-5 at every step, and what they lead to."""
    for name, atol in (("loss", 1e-5), ("bits_per_byte", 1e-5), ("val_loss", 1e-5), ("grad_norm", 1e-4)):
        x, y = curve(a, name), curve(b, name)
        assert x.keys() == y.keys() and x
        assert max(abs(x[step] - y[step]) for step in x) < atol, name
    for n, x in weights(a).items():
        assert torch.allclose(x, weights(b)[n], atol=1e-4), n


HYBRID = "--layers=gdn swa(window=8) mamba2(d_state=16,head_dim=16) kda"
FULL = [(2, "ddp"), (4, "ddp"), (2, "fsdp"), (4, "fsdp")]


@pytest.mark.parametrize(
    "layers, spread",
    [(["--layers=gdn attn"], [(2, "ddp"), (4, "fsdp")]), pytest.param([HYBRID, "--n_layer=4"], FULL, marks=pytest.mark.slow)],
)
def test_they_are_one_process(root, dataset, tmp_path, layers, spread):
    """20 steps with dropout and accumulation, evaluated on fewer batches than ranks; saved by 4, continued by 1 and 2."""
    common = [
        *layers,
        "--gradient_accumulation_steps=4",
        "--dropout=0.1",
        "--log_interval=1",
        "--eval_interval=20",
        "--max_iters=20",
    ]
    runs = {f"{parallel}{world}": (world, parallel) for world, parallel in spread}
    jobs = [(1, flags(dataset, tmp_path / "one", *common, "--lr_decay_iters=23"))]
    for name, (world, parallel) in runs.items():
        jobs.append((world, flags(dataset, tmp_path / name, *common, "--lr_decay_iters=23", f"--parallel={parallel}")))
    status, _, err = launch(root, *jobs)
    assert status == 0, err
    for name in runs:
        assert_close(tmp_path / "one", tmp_path / name)
    from_four = [name for name in runs if name.endswith("4")]
    for name in from_four:
        shutil.copytree(tmp_path / name, tmp_path / f"{name}-again")
    jobs = [(world, [f"--resume={tmp_path / name}", "--max_iters=23"])
            for four in from_four for world, name in ((1, four), (2, f"{four}-again"))]  # fmt: skip
    status, _, err = launch(root, (1, [f"--resume={tmp_path / 'one'}", "--max_iters=23"]), *jobs)
    assert status == 0, err
    for _, (argument, _) in jobs:
        assert_close(tmp_path / "one", checkpoint.resolve(argument.removeprefix("--resume=")).parent)


ALL = [HYBRID + " lightning linear attn(sinks=true) retnet deltanet(steps=2) mla", "--n_layer=10"]


@pytest.mark.parametrize(
    "layers, shares",
    [
        ([HYBRID, "--n_layer=4"], [(4, 2, [])]),
        pytest.param(
            ALL,
            [(2, 2, []), (4, 4, []), (4, 2, ["--parallel=fsdp"]), (2, 2, ["--activation_checkpointing"])],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_rows_shared_by_ranks_are_whole_rows(root, dataset, tmp_path, layers, shares):
    """Each rank has 8 or 16 of a row's 32 tokens, documents and windows reach over several: losses, gradients, validation."""
    common = [*layers, "--gradient_accumulation_steps=2", "--log_interval=1", "--eval_interval=10", "--max_iters=10"]
    jobs = [(1, flags(dataset, tmp_path / "one", *common))]
    for i, (world, share, more) in enumerate(shares):
        jobs.append((world, flags(dataset, tmp_path / str(i), *common, f"--context_parallel={share}", *more)))
    status, _, err = launch(root, *jobs)
    assert status == 0, err
    for i in range(len(shares)):
        assert_close(tmp_path / "one", tmp_path / str(i))


MEDDLER = """
import os, signal, train
if os.environ.get("RANK") == "1" and not hasattr(train, "meddled"):
    train.meddled, ahead, calls = True, train.Feed.next, []
    def meddle(self):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return ahead(self)
    train.Feed.next = meddle
"""


def test_a_signal_to_one_rank_stops_all_at_the_same_step(root, dataset, tmp_path):
    (tmp_path / "meddler.py").write_text(MEDDLER)
    out = tmp_path / "run"
    argv = flags(dataset, out, "--gradient_accumulation_steps=2", "--max_iters=9", f"--mixers={tmp_path / 'meddler.py'}")
    status, printed, err = launch(root, (2, argv))
    assert status == 128 + signal.SIGTERM, err
    assert printed.splitlines()[-1] == f"torchrun --nproc_per_node=2 train.py --resume={out}"
    assert checkpoint.resolve(out).name == "step-000003"


def test_speed_of_several_processes_beside_one(root, tmp_path):
    """`bench.py train` under torchrun: the same losses whatever the processes share; figures of one to compare with."""
    common = ["bench.py", "train", "--layers=gdn attn", "--block_size=32", "--batch_size=2", "--steps=6", "--device=cpu"]
    common += ["--gradient_accumulation_steps=2", "--losses=2"]
    single = f"--single={tmp_path / 'train-1.json'}"
    jobs = [(1, [*common, f"--out_dir={tmp_path}"])]
    for how in ("parallel=fsdp", "context_parallel=2"):
        jobs.append((2, [*common, f"--{how}", single, f"--out_dir={tmp_path / how}"]))
    status, printed, err = launch(root, *jobs)
    assert status == 0 and printed.count("efficiency") == 3, err  # rank 0 alone prints
    (one,) = json.loads((tmp_path / "train-1.json").read_text())["rows"]
    assert len(one["losses"]) == 3 and one["tokens_per_step"] == 128 and one["tokens_per_s"] == pytest.approx(128e3 / one["ms"])
    for _, argv in jobs[1:]:
        (row,) = json.loads((Path(argv[-1].partition("=")[2]) / "train-2.json").read_text())["rows"]
        assert row["loss_difference"] < 1e-5 and row["gradient_difference"] < 1e-5
        assert row["processes"] == len(row["peak_bytes"]) == 2
        assert row["efficiency"] == pytest.approx(row["tokens_per_s_per_process"] / one["tokens_per_s"])


def test_mistakes_are_told_once(root, dataset, tmp_path):
    argv = flags(dataset, tmp_path / "run", "--gradient_accumulation_steps=5", "--parallel=fsdp", "--optimizer=muon")
    status, _, err = launch(root, (2, argv))
    assert status == 2 and err.count("error:") == 2
    assert "gradient_accumulation_steps=5" in err and "nearest are 4 and 6" in err and "needs whole matrices" in err


def test_rows_that_cannot_be_shared_are_refused(dataset, tmp_path):
    ranks = SimpleNamespace(world=4)
    for options, says in (
        ({"context_parallel": 3}, "choose one of 1, 2, 4"),
        ({"context_parallel": 4, "block_size": 30}, "28 and 32"),
    ):
        config = TrainConfig(gradient_accumulation_steps=4, **options)
        resolved = SimpleNamespace(config=config, sources=dict.fromkeys(TrainConfig.model_fields, "default"))
        assert any(says in line for line in preflight._conflicts(resolved, ranks))


@pytest.mark.slow
def test_torchrun_itself(root, dataset, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train.py"]
    argv = flags(dataset, tmp_path / "run", "--gradient_accumulation_steps=2", "--max_iters=3")
    done = subprocess.run([*command, *argv], cwd=root, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"torchrun --nproc_per_node=2 train.py --resume={tmp_path / 'run'} --max_iters=6"


def tiny_model(layers="gdn kda mamba2(d_state=16,head_dim=16) attn"):
    torch.manual_seed(0)
    return Model(ModelConfig(layers=layers, n_layer=4, n_head=2, n_embd=32, block_size=32, vocab_size=50))


def loss_of(model, call=None):
    tokens = torch.randint(0, 50, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (call or model)(tokens, tokens, segment_ids=torch.ones_like(tokens, dtype=torch.int32)).nll.sum()


def test_the_last_tokens_of_a_row_attend_to_all_of_it():
    q, k, v = (torch.randn(2, 12, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    for n in (1, 5, 12):
        results = []
        for out in (kernels.reference.softmax_attention(q, k, v)[:, -n:], context.causal_tail(q[:, -n:], k, v)):
            results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


def test_gates_stay_fp32_under_fsdp_mixed_precision(alone, monkeypatch):
    """Matrices are gathered in bf16, what makes the gates in fp32: every operator sees the types it sees in one process."""
    seen, matrices, decays = [], set(), set()

    def see(op, args, kwargs, result):
        seen.append((op, [x.dtype for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]))

    def linear(x, weight, bias=None, function=F.linear):
        if weight.shape[0] != 50:  # the embedding as the head: it is not of a layer
            matrices.add(weight.dtype)
        return function(x, weight, bias)

    def log_decay(self, *args, function=modelling.DeltaRule.log_decay):
        decays.update((self.A_log.dtype, self.dt_bias.dtype))
        return function(self, *args)

    monkeypatch.setattr(F, "linear", linear)
    monkeypatch.setattr(modelling.DeltaRule, "log_decay", log_decay)
    plain, sharded = tiny_model(), tiny_model()
    with kernels.observe(see):
        expected = loss_of(plain)
        in_one_process, seen[:] = list(seen), []
        matrices.clear()
        distributed.shard(sharded, torch.bfloat16, alone)
        loss = loss_of(sharded)
    assert seen == in_one_process and torch.equal(loss, expected)
    assert matrices == {torch.bfloat16} and decays == {torch.float32}
    gates = [kinds[3:5] for op, kinds in seen if op in ("delta_rule", "channel_delta_rule")]
    assert gates == [[torch.float32, torch.float32]] * 2
    expected.backward()
    loss.backward()
    for (n, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert q.dtype == q.grad.dtype == torch.float32 and torch.allclose(p.grad, q.grad.full_tensor(), rtol=2e-2, atol=1e-3), n


@pytest.mark.parametrize("ffn", ["swiglu", "gelu"])
def test_a_layer_that_is_an_ffn_alone_is_gathered(alone, ffn):
    """Its first matrix is the first module of its group: what is not called is not gathered."""
    model = tiny_model(f"mlp(ffn={ffn}) gdn")
    expected = loss_of(model)
    distributed.shard(model, torch.bfloat16, alone)
    for _ in range(2):
        loss = loss_of(model)
        loss.backward()
        assert torch.equal(loss, expected)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_layer_without_gradient_hangs_nobody(alone, parallel):
    """The loss does not reach the indexer of sparse attention."""
    model = tiny_model("dsa(top_k=8,local=4) gdn")
    if parallel == "fsdp":
        distributed.shard(model, None, alone)
        loss_of(model).backward()
    else:
        training = DistributedDataParallel(model, find_unused_parameters=True)
        for _ in range(2):
            loss_of(model, training).backward()


def test_gradients_are_exchanged_once_a_step(alone):
    model = tiny_model("gdn attn")
    training, exchanged = DistributedDataParallel(model), []

    def hook(state, bucket):
        exchanged.append(step)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    training.register_comm_hook(None, hook)
    for step in range(3):
        with distributed.syncing(training, step == 2):
            loss_of(model, training).backward()
    assert set(exchanged) == {2}


@pytest.mark.slow
def test_the_scaling_script_at_tiny_sizes(tmp_path):
    environment = os.environ | {"DRY": "1", "OUT": str(tmp_path), "PY": sys.executable, "OMP_NUM_THREADS": "1"}
    subprocess.run(["bash", "benchmarks/scaling.sh"], cwd=ROOT, env=environment, capture_output=True, check=True)
    text = (tmp_path / "scaling.txt").read_text()
    parts = [line for line in text.splitlines() if ": rc " in line]
    assert len(parts) >= 9 and all(": rc 0 " in line for line in parts), text
    assert "resume 2 GPUs, then 1" in text and "FAILED" not in text
