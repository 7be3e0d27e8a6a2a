"""The packed one-token step against the model's own, for every mixer: in the interpreter on a CPU, captured on a GPU."""

import pytest
import torch
from test_model import tokens_of
from test_sample import EOT, PROMPTS, RECIPES, columns, greedy, model_of
from triton_cases import DEVICE

from decode import AsItIs, Decoder, bucket_of, capacity_of, shared_lengths
from sample import Engine, Generator

FUSED = {  # how many halves of the pattern's four layers run as the model has them; all others in few launches
    "deltanet(steps=2, gate=silu)": 4,
    "kda mla(rope=none)": 2,
    "linear retnet": 2,
    "dsa(top_k=12, local=4, index_heads=2, index_dim=8) mla": 4,
    "mamba2(head_dim=16, d_state=16) mlp mamba2(head_dim=16, d_state=16, groups=2) attn(rope=none)": 1,
    "gdn(n_key_head=1, neg_eigval=true) attn(residual=post, qk_norm=full, gate=true)": 2,
}


@pytest.mark.parametrize("pattern", [*RECIPES, "attn(gate=true, rope=partial, n_kv_head=1) kda(low_rank=false, gate=none)"])
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


def test_buckets():
    assert [bucket_of(n) for n in (1, 2, 3, 5, 33, 64, 65, 97)] == [1, 2, 4, 8, 64, 64, 96, 128]
    assert [capacity_of(n) for n in (1, 256, 257, 16384, 16385, 1_000_000)] == [256, 256, 512, 16384, 32768, 1_015_808]


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
def test_twenty_prompt_lengths_capture_once():
    engine = Engine(model_of("gdn gdn gdn attn").to("cuda"))
    for length in range(3, 23):
        generator = Generator(engine, tokens_of(1, length)[0].tolist(), max_new_tokens=5, seed=length)
        assert len(columns(generator)[0]) == 5
    assert len(engine.decoder.captured) == 1
