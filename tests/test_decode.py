"""The packed one-token step against the model's own, for every mixer: in the interpreter on a CPU, captured on a GPU."""

import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import triton
from test_model import tokens_of
from test_sample import EOT, PROMPTS, RECIPES, columns, greedy, model_of
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from triton_cases import DEVICE

import kernels
from benchmarks.decode import DecodeConfig, engine_of
from benchmarks.decode import recipes as names
from decode import AsItIs, Decoder, Reading, bucket_of, capacity_of, shared_lengths
from sample import Engine, Generator

FUSED = {  # how many halves of the pattern's four layers run as the model has them; all others in few launches
    "deltanet(steps=2, gate=silu)": 4,
    "kda mla(rope=none)": 2,
    "linear retnet": 2,
    "dsa(top_k=12, local=4, index_heads=2, index_dim=8) mla": 2,
    "mamba2(head_dim=16, d_state=16) mlp mamba2(head_dim=16, d_state=16, groups=2) attn(rope=none)": 1,
    "gdn(n_key_head=1, neg_eigval=true) attn(residual=post, qk_norm=full, gate=true)": 2,
    "attn(ffn=gelu_exact, gate=true)": 4,
}


FEW = "index_heads=3, index_dim=12, n_kv_head=1"
MORE = [
    "attn(gate=true, rope=partial, n_kv_head=1) kda(low_rank=false, gate=none)",
    f"dsa(top_k=4, local=2, {FEW}, rope=partial, gate=true) dsa(top_k=3, local=0, {FEW}, rope=none, qk_norm=false)",
    f"dsa(top_k=4, local=2, {FEW}, mode=dense) attn(qk_norm=false)",
    "attn(ffn=gelu_exact, gate=true)",
]


@pytest.mark.parametrize("pattern", [*RECIPES, *MORE])
def test_a_packed_step_is_the_models_step(pattern, tmp_path):
    model = model_of(pattern).to(DEVICE)
    engine = Engine(model)
    decoder, tokens = Decoder(engine), tokens_of(3, 11).to(DEVICE)
    state, want_state = model.init_state(3, 40), model.init_state(3, 40)
    lengths = shared_lengths(state, 3, DEVICE)
    with torch.inference_mode():
        ids = (torch.arange(9, device=DEVICE) < torch.tensor([[2], [9], [5]], device=DEVICE)).to(torch.int32)
        for s in (state, want_state):
            model(tokens[:, :9], segment_ids=ids, state=s)
        for t in (9, 10):
            got = decoder.forward(tokens[:, t], state)
            lengths += 1
            for layer in state.layers:
                layer.longest += 1
            want = model(tokens[:, t : t + 1], state=want_state).logits[:, 0]
            assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    for mine, theirs in zip(state.layers, want_state.layers, strict=True):
        for name, x in theirs.tensors.items():
            assert torch.allclose(mine.tensors[name].float(), x.float(), rtol=1e-4, atol=1e-4 * x.abs().max().item()), name
    state.save(tmp_path / "state")  # although the layers count in one tensor
    assert model.init_state(3, 50).load(tmp_path / "state").length.tolist() == want_state.length.tolist()
    plain = sum(isinstance(half.f, AsItIs) for halves in decoder.layers for half in halves)
    assert plain == FUSED.get(pattern, 0)


@pytest.mark.parametrize("pattern", RECIPES)
@torch.inference_mode()
def test_reading_padded_prompts_is_reading_each(pattern):
    """What a graph holds, run launch by launch: three prompts in the first rows of four, against each prompt alone."""
    model = model_of(pattern)
    engine, state = Engine(model, chunk=512), model.init_state(4, 256)

    def record(run, _):
        run()
        assert not any(x.any() for layer in state.layers for x in layer.tensors.values())  # rows without tokens write nothing

    for lengths, width in (((5, 64, 33), 64), ((65, 3, 128), 128)):
        prompts = [tokens_of(1, n)[0].tolist() for n in lengths]
        assert Reading.width_of(prompts, engine) == width
        logits = Reading(SimpleNamespace(engine=engine, record=record), state, 4, width)(prompts)
        for row, ids in enumerate(prompts):
            alone = model.init_state(1, 256)
            want = engine.read([ids], alone)
            assert (logits[row] - want[0]).abs().max() <= 1e-5 * want.abs().max()
            for mine, theirs in zip(state.layers, alone.layers, strict=True):
                for name, x in theirs.tensors.items():
                    limit = 1e-5 * x.abs().max().item()
                    assert (mine.tensors[name][row] - x[0]).abs().max() <= limit, (name, len(ids))
        assert not any(x[3].any() for layer in state.layers for x in layer.tensors.values())
        state.clear_()


@pytest.mark.parametrize("pattern", RECIPES)
def test_reading_asks_the_host_for_nothing(pattern):
    """With tensors that have no values, where a shape or a branch that depends on one is an error: so a graph can hold it."""
    model = model_of(pattern)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        state, ids = model.init_state(2, 128), torch.ones(2, 64, dtype=torch.int32)
        assert model(tokens_of(2, 64), segment_ids=ids, state=state, last_only=True).logits.shape == (2, 1, 61)
        with pytest.raises(DynamicOutputShapeException):
            torch.nonzero(ids)


def test_what_is_read_by_a_graph():
    engine = Engine(model_of("attn(rope=none, qk_norm=false)"))  # 300 learned positions
    widths = [Reading.width_of([[1] * n, [1]], engine) for n in (1, 64, 65, 256, 257, 300, 301)]
    assert widths == [64, 64, 128, 256, 300, 300, None]
    engine = Engine(model_of("gdn"))
    assert [Reading.width_of([[1] * n], engine) for n in (1500, 2048, 2049)] == [2048, 2048, None]


@pytest.mark.parametrize("window, keep_first", [(None, 0), (24, 0), (7, 3)])
def test_caches_hold_the_last_tokens_of_the_last_document(window, keep_first):
    """`append` against writing token by token, with documents, padding and rows without tokens, in several pieces."""
    options = f"window={window}, keep_first={keep_first}" if window else ""
    mixer = model_of(f"swa({options})" if window else "attn").blocks[0].mixer
    state = mixer.init_state(4, 64, dtype=torch.float32)
    want, count = torch.zeros_like(state.k), [0] * 4
    for T in (9, 30, 1, 20):
        ids, k = torch.randint(0, 2, (4, T)).cumsum(1).clamp(min=1), torch.randn(4, T, mixer.Hk, mixer.D)
        ids[torch.arange(T) >= torch.tensor([[T], [T // 2], [0], [T - 1]])] = 0
        ids[3] = (ids[3] > 0).int()
        mixer.append(state, ids, k=k, v=k)
        for row in range(4):
            for t in range(int((ids[row] > 0).sum())):
                count[row] = 0 if t and ids[row, t] != ids[row, t - 1] else count[row]
                slots, at = want.shape[1] - keep_first, count[row]
                want[row, at if at < keep_first else keep_first + (at - keep_first) % slots] = k[row, t]
                count[row] += 1
        state.advance(T, ids)
        assert state.length.tolist() == count
        for row, n in enumerate(count):  # slots beyond hold what earlier documents left
            assert torch.equal(state.k[row, :n], want[row, :n]) and torch.equal(state.v[row, :n], want[row, :n])


def test_buckets():
    assert [bucket_of(n) for n in (1, 2, 3, 5, 33, 64, 65, 97)] == [1, 2, 4, 8, 64, 64, 96, 128]
    assert [capacity_of(n) for n in (1, 1024, 1025, 16384, 16385, 1_000_000)] == [1024, 1024, 2048, 16384, 32768, 1_015_808]


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", RECIPES)
def test_captured_steps_write_what_full_evaluation_writes(pattern):
    model = model_of(pattern).to("cuda")
    engine = Engine(model, eot=EOT, chunk=64)
    prompts = [tokens_of(1, length)[0].tolist() if length else [] for length in PROMPTS]
    rows = columns(Generator(engine, prompts, n=2, max_new_tokens=40, temperature=0))
    cpu = model_of(pattern)
    for row, ids in enumerate(rows):
        assert ids == greedy(cpu, prompts[row // 2] or [EOT], 40)[0]
    assert len(engine.decoder.captured) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", RECIPES)
def test_a_captured_reading_is_used_again(pattern):
    """Shorter, longer, ragged and forked prompts, through few graphs; going on from what was read; a prompt too long for one."""
    model = model_of(pattern).to("cuda")
    engine, cpu = Engine(model), model_of(pattern)
    for lengths in ((40,), (7,), (64,), (3, 60, 1), (100,), (5, 5, 5), (64,)):
        prompts = [tokens_of(1, length)[0].tolist() for length in lengths]
        rows = columns(Generator(engine, prompts, n=4 // len(prompts), max_new_tokens=6, temperature=0))
        for row, ids in enumerate(rows):
            assert ids == greedy(cpu, prompts[row // (4 // len(prompts))], 6)[0]
    made = [reading for steps in engine.decoder.captured.values() for reading in steps.readings.values()]
    assert len(made) == 3 and all(reading.graph is not None for reading in made)
    first = Generator(engine, tokens_of(1, 30)[0].tolist(), max_new_tokens=0)
    assert list(first) == []
    after = first.read()
    turn = Generator(engine, [1, 2, 3], max_new_tokens=5, temperature=0, after=after)
    assert columns(turn)[0] == greedy(cpu, [*first.prompts[0], 1, 2, 3], 5)[0]


KERNELS = """
import contextlib, os
from unittest import mock
import torch
from test_sample import RECIPES, model_of
os.environ.pop("TRITON_INTERPRET", None)  # which conftest.py sets
import kernels
from kernels import launch
from sample import Engine
from triton import JITFunction

def compiled_for(kernel, x, p):
    if p.is_constexpr or x is None or isinstance(x, bool):
        return str(x)
    if isinstance(x, torch.Tensor):
        return str(x.dtype)
    if hasattr(x, "block_shape"):
        return str((x.base.dtype, *x.block_shape))
    return "float" if isinstance(x, float) else str((abs(x) < 2**31, None if p.do_not_specialize else (x == 1, x % 16 == 0)))

def record(kernel, *args, grid, warmup, **given):
    given |= zip(kernel.arg_names, args, strict=False)
    named = [compiled_for(kernel, given.pop(p.name, p.default), p) for p in kernel.params]
    seen.add((kernel.__name__, *named, *map(str, sorted(given.items()))))

with contextlib.ExitStack() as context:
    context.enter_context(mock.patch.object(JITFunction, "run", record))
    context.enter_context(mock.patch.object(launch, "driver", mock.MagicMock()))  # there is no device
    context.enter_context(kernels.use_backend("triton"))
    context.enter_context(torch.inference_mode())
    for name in set(kernels.TRITON.values()):
        file = getattr(kernels, kernels._imported(name))
        if hasattr(file, "architecture"):
            context.enter_context(mock.patch.object(file, "architecture", lambda x: 90))
    for pattern in RECIPES:
        model, seen, counts = model_of(pattern), set(), []
        engine = Engine(model, dtype="bfloat16")
        for width in (64, 128, 256):  # from 1024 on a recurrence is cut into slices, with one more kernel
            state, ids = model.init_state(1, 512, dtype=engine.dtype), torch.ones(1, width, dtype=torch.int32)
            engine.forward(torch.zeros(1, width, dtype=torch.int64), state, ids)
            counts.append(len(seen))
        print(*counts, pattern)
"""


def test_prompts_of_other_lengths_compile_nothing(root):
    """The launches of readings at several widths, recorded with all that Triton compiles a kernel anew for."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": f"{root}:{root / 'tests'}"}
    command = [sys.executable, "-W", "ignore", "-c", KERNELS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(RECIPES)
    for line in lines:
        first, *others = [int(x) for x in line.split() if x.isdecimal()]
        assert first > 1 and set(others) == {first}, line


@pytest.mark.parametrize("name", names("tiny"))
def test_bytes_of_a_state_are_those_allocated(name):
    """What is printed of every recipe is what its tensors take; on a GPU also what the device gave for them."""
    model = engine_of(DecodeConfig(size="tiny"), name, torch.device(DEVICE), "float32").model
    before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    state = model.init_state(3, 700, dtype=torch.bfloat16)
    storages = [x.untyped_storage().nbytes() for layer in state.layers for x in layer.tensors.values()]
    without_mixer = sum(layer.nbytes for layer, block in zip(state.layers, model.blocks, strict=True) if block.mixer is None)
    assert sum(storages) == state.nbytes == model.state_bytes(3, 700, torch.bfloat16) + without_mixer
    if DEVICE == "cuda":
        assert 0 <= torch.cuda.memory_allocated() - before - state.nbytes < 512 * len(storages)


def hybrid(name="gdn gdn gdn attn"):
    return engine_of(DecodeConfig(), name, torch.device("cuda"), "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gdn gdn gdn attn", *names("124m")])
def test_two_hundred_tokens_of_every_recipe(name):
    """The graphs against the same launch by launch, token for token; each token is what full evaluation in fp32 finds likeliest,
    or one whose logit is so near the largest, relative to the range of logits, that rounding to bf16 decides."""
    engine, prompt = hybrid(name), tokens_of(1, 50)[0].tolist()
    written = columns(Generator(engine, prompt, max_new_tokens=200, temperature=0))[0]
    (steps,) = engine.decoder.captured.values()
    assert steps.graph is not None and len(steps.readings) == 1 and all(r.graph is not None for r in steps.readings.values())
    steps.graph, steps.readings = None, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.decoder, "record", lambda run, what: None)
        assert columns(Generator(engine, prompt, max_new_tokens=200, temperature=0))[0] == written
    with torch.no_grad(), kernels.use_backend("eager"):
        logits = engine.model(torch.tensor([prompt + written], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
    short = logits.amax(-1) - logits.gather(1, torch.tensor(written, device="cuda")[:, None])[:, 0]
    assert (short / (logits.amax(-1) - logits.amin(-1))).max() <= 0.03


@pytest.mark.gpu
def test_twenty_prompt_lengths_compile_nothing_after_the_first(monkeypatch):
    """And they share one captured step, and a captured reading for each power of two."""
    engine, compiled = hybrid(), []

    def requested(length):
        generator = Generator(engine, tokens_of(1, length)[0].tolist(), max_new_tokens=5, seed=length)
        assert len(columns(generator)[0]) == 5

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **told: compiled.append(told.get("repr")))
    requested(40)
    assert compiled  # the hook is told
    compiled.clear()
    for length in range(3, 503, 25):
        requested(length)
    assert compiled == [] and len(engine.decoder.captured) == 1
    (steps,) = engine.decoder.captured.values()
    assert steps.graph is not None and sorted(width for _, width in steps.readings) == [64, 128, 256, 512]


@pytest.mark.gpu
def test_graphs_are_made_anew_after_all_were_freed():
    engine, prompt, written = hybrid(), tokens_of(1, 40)[0].tolist(), []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a graph that cannot be captured is one
        for _ in range(3):
            written.append(columns(Generator(engine, prompt, max_new_tokens=5, temperature=0)))
            engine.forget()
    assert written[0] == written[1] == written[2]
