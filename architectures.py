"""How each Hugging Face architecture corresponds to our model: settings both ways, and the list of tensors.

Used by convert.py. A list of `Entry` serves both directions: `join` makes our tensor from theirs, `split` theirs from ours.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter as at
from typing import ClassVar, NamedTuple

import torch

from configurator import ConfigError, LayerSpec, format_layers
from model import Attention, DeltaRule, LatentAttention, LinearAttention, Mamba2

# ----------------------------------------------------------------------------------------------------------------------
# One tensor of ours, some of theirs

FORMS = {  # their layout to ours, and back
    "same": (lambda x: x, lambda x: x),
    "transposed": (lambda x: x.mT, lambda x: x.mT),  # GPT-2 multiplies from the right
    "conv": (lambda x: x.flatten(1), lambda x: x[:, None]),  # (C, 1, width)
    "per head": (lambda x: x.flatten(), lambda x: x[None, None, :, None]),  # (1, 1, H, 1)
}


@dataclass(frozen=True)
class Entry:
    """`ours = cat(form(x) for x in theirs)[order]`: rows of theirs, one after the other, in another order."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()  # of each of theirs, where there are several
    order: torch.Tensor | None = None
    form: str = "same"

    def join(self, pieces):
        pieces = [FORMS[self.form][0](x) for x in pieces]
        if self.rows and [x.shape[0] for x in pieces] != list(self.rows) and self.form != "conv":
            raise ValueError(f"rows {[x.shape[0] for x in pieces]}, expected {list(self.rows)}")
        x = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        if self.order is None:
            return x
        if len(x) != len(self.order):
            raise ValueError(f"{len(x)} rows, expected {len(self.order)}")
        return x[self.order]

    def split(self, x):
        if self.order is not None:
            x = x[self.order.argsort()]
        pieces = x.split(list(self.rows)) if self.rows else [x]
        return [FORMS[self.form][1](piece).contiguous() for piece in pieces]


def one(ours, theirs, form="same"):
    return Entry(ours, (theirs,), form=form)


def same(ours, theirs, *names):
    """The same tensors under two prefixes."""
    return [one(f"{ours}{name}", f"{theirs}{name}") for name in names]


def per_head(heads, sizes, start=0):
    """Row numbers of each part, where every head has its parts side by side: `[part 1 | part 2 | ...] * heads`."""
    parts = (start + torch.arange(heads * sum(sizes))).view(heads, -1).split(sizes, dim=1)
    return [part.flatten() for part in parts]


def linear(ours, theirs, rows, order=None, bias=False):
    """A linear layer of ours from several of theirs."""
    rows = tuple(rows) if len(theirs) > 1 else ()
    kinds = ["weight", "bias"] if bias else ["weight"]
    return [Entry(f"{ours}.{kind}", tuple(f"{t}.{kind}" for t in theirs), rows, order) for kind in kinds]


def attention(x, ours, theirs):
    """Entries of an `Attention`: q_proj, k_proj, v_proj, o_proj; with a gate, q_proj holds query and gate of each head."""
    rows, order = x.split[:3], None
    if len(x.split) == 4:
        q, gate = per_head(x.H, [x.D, x.D])
        rows = [2 * x.H * x.D, *x.split[1:3]]
        order = torch.cat([q, torch.arange(rows[0], sum(rows)), gate])
    bias = x.qkv_proj.bias is not None
    entries = linear(f"{ours}qkv_proj", [f"{theirs}{n}_proj" for n in "qkv"], rows, order, bias)
    entries += linear(f"{ours}out_proj", [f"{theirs}o_proj"], (), bias=bias)
    return entries + (same(ours, theirs, "q_norm.weight", "k_norm.weight") if x.qk_norm else [])


def mamba(x, ours, theirs):
    names = ["in_proj.weight", "A_log", "dt_bias", "D", "norm.weight", "out_proj.weight"]
    names += ["in_proj.bias", "out_proj.bias"] if x.in_proj.bias is not None else []
    bias = [one(f"{ours}conv_bias", f"{theirs}conv1d.bias")] if x.conv_bias is not None else []
    return [*same(ours, theirs, *names), one(f"{ours}conv_weight", f"{theirs}conv1d.weight", "conv"), *bias]


def swiglu(m, ours, theirs, gate="gate_proj", up="up_proj", down="down_proj"):
    width, bias = ffn_width(m), m.config.bias
    entries = linear(f"{ours}gate_up_proj", [f"{theirs}{gate}", f"{theirs}{up}"], [width, width], bias=bias)
    return entries + linear(f"{ours}down_proj", [f"{theirs}{down}"], (), bias=bias)


def norms(ours, theirs, mixer="input_layernorm", ffn="post_attention_layernorm"):
    return [one(f"{ours}mixer_norm.weight", f"{theirs}{mixer}.weight"), one(f"{ours}ffn_norm.weight", f"{theirs}{ffn}.weight")]


def ends(m, embedding="model.embed_tokens", norm="model.norm"):
    """Embedding, last norm, and the head unless it is tied."""
    head = [] if m.head is None else [one("head.weight", "lm_head.weight")]
    return [one("embedding.weight", f"{embedding}.weight"), one("norm.weight", f"{norm}.weight"), *head]


def each(m, layer):
    """`layer(mixer, "blocks.0.", "model.layers.0.")` for all layers."""
    return [e for i, b in enumerate(m.blocks) for e in layer(b.mixer, f"blocks.{i}.", f"model.layers.{i}.")]


# ----------------------------------------------------------------------------------------------------------------------
# One setting of ours, one of theirs


class Fields:
    """Their config.json; remembers what was read and collects what our model cannot do."""

    def __init__(self, values):
        self.values, self.seen, self.problems = values, set(), []

    def __call__(self, key, default=...):
        self.seen.add(key)
        value = self.values.get(key, default)
        if value is ...:
            raise ConfigError(f"config.json does not say {key}")
        return value

    def only(self, key, *allowed):
        """Refuse other values than these, the first of which is the default."""
        value = self(key, allowed[0])
        if value not in allowed:
            self.problems.append(f"{key}={value!r} is not supported (supported: {', '.join(map(repr, allowed))})")

    def refuse(self, problem):
        self.problems.append(problem)

    def ignore(self, *keys):
        """These are of no effect in this architecture."""
        self.seen |= set(keys)

    def rope(self, theta=10000.0, fraction=1.0):
        """(theta, fraction of the head that is rotated), by default those given; scaled frequencies are refused."""
        new, scaling = self("rope_parameters", None) or {}, self("rope_scaling", None) or {}
        kind = new.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
        if kind != "default":
            self.refuse(f"rope scaling (rope_type={kind!r}) is not supported: only plain rotary embeddings are")
        fraction = new.get("partial_rotary_factor", self("partial_rotary_factor", fraction))
        self.ignore("rope_theta")
        return new["rope_theta"] if "rope_theta" in new else self("rope_theta", theta), fraction

    def layers(self, **items):
        """Our pattern from their layer_types, given our item for each type."""
        n, kinds = self("num_hidden_layers"), self("layer_types", None)
        if kinds is None and "full_attention_interval" in self.values:
            every = self("full_attention_interval")
            kinds = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(n)]
        if kinds is None:
            raise ConfigError("config.json does not say layer_types")
        if wrong := sorted(set(kinds) - set(items)):
            raise ConfigError(f"layer_types has {', '.join(wrong)}: supported are {', '.join(items)}")
        return format_layers([items[kind] for kind in kinds])


class Key(NamedTuple):
    """One setting or mixer option of ours, its name in their config.json, and how to read it off a built model or mixer."""

    ours: str
    theirs: str
    get: Callable
    default: object = ...


def setting(ours, theirs, default=...):
    return Key(ours, theirs, at(f"config.{ours}"), default)


def take(h, keys):
    """Ours, from their config."""
    return {k.ours: h(k.theirs, k.default) for k in keys}


def give(x, keys):
    """Theirs, from a model or mixer of ours."""
    return {k.theirs: k.get(x) for k in keys}


def ffn_width(m):
    return next((b.ffn.down_proj.in_features for b in m.blocks if b.ffn is not None), 4 * m.config.n_embd)


def conv_width(x):
    if x.conv_weight is None:
        raise ConfigError("it needs a convolution in every recurrent layer")
    return x.conv_weight.shape[1]


def first(m, cls):
    """The first mixer of class `cls`; ConfigError if there is none."""
    for b in m.blocks:
        if type(b.mixer) is cls:
            return b.mixer
    raise ConfigError(f"it needs at least one layer of {cls.__name__}")


def expect(m, *classes):
    """ConfigError if a layer is of none of these mixer classes."""
    for i, (spec, b) in enumerate(zip(m.specs, m.blocks, strict=True)):
        if type(b.mixer) not in classes:
            raise ConfigError(f"it cannot hold layer {i}, {format_layers([spec])}")


def layer_types(m, recurrent):
    return {"layer_types": ["linear_attention" if type(b.mixer) is recurrent else "full_attention" for b in m.blocks]}


def rope_config(theta, fraction):
    both = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": fraction}
    return {"rope_parameters": both, "rope_theta": theta}  # the latter for transformers 4


DECODER = [
    setting("n_layer", "num_hidden_layers"),
    setting("n_embd", "hidden_size"),
    Key("n_ffn", "intermediate_size", ffn_width),
    setting("vocab_size", "vocab_size"),
    setting("block_size", "max_position_embeddings", 2048),
    setting("norm_eps", "rms_norm_eps", 1e-6),
    setting("tie_embeddings", "tie_word_embeddings", False),
]
HEADS = [
    Key("n_head", "num_attention_heads", at("H")),
    Key("n_kv_head", "num_key_value_heads", at("Hk"), None),
    Key("head_dim", "head_dim", at("D"), None),
]
GDN = [
    Key("n_head", "linear_num_value_heads", at("H")),
    Key("n_key_head", "linear_num_key_heads", at("Hk")),
    Key("head_dim", "linear_key_head_dim", at("K")),
    Key("value_head_dim", "linear_value_head_dim", at("V")),
    Key("conv", "linear_conv_kernel_dim", conv_width, 4),
]

# Keys that decide nothing about what a trained model computes.
INERT = """
architectures attention_dropout attn_pdrop auto_map block_size bos_token_id chunk_size dtype embd_pdrop eos_token_id
hidden_dropout initializer_range linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min
mamba_ssm_cache_dtype max_window_layers mlp_only_layers model_type moe_intermediate_size moe_latent_size mtp_layers_block_type
n_ctx n_group n_routed_experts n_shared_experts norm_topk_prob num_logits_to_keep output_router_logits pad_token_id pretraining_tp
rescale_prenorm_residual resid_pdrop residual_in_fp32 routed_scaling_factor router_aux_loss_coef router_jitter_noise
moe_shared_expert_intermediate_size moe_shared_expert_overlap shared_expert_intermediate_size task_specific_params
time_step_floor time_step_rank topk_group torch_dtype transformers_version use_cache use_mamba_kernels num_experts_per_tok
decoder_sparse_step reorder_and_upcast_attn mamba_proj_bias num_nextn_predict_layers
""".split()


# ----------------------------------------------------------------------------------------------------------------------
# Architectures


class Architecture:
    """`settings(h)`: our ModelConfig's, from their config; `config(m)`: theirs, from our model; `entries(m)`: the tensors.

    `skip`: ends of names of tensors that hold nothing learned, or nothing with an effect; `renames`: other spellings on disk.
    """

    model_type: str
    skip: tuple = ("rotary_emb.inv_freq",)
    renames: tuple = ()

    def extra(self, m):
        """Tensors that they need and we have not."""
        return {}


class GPT2LMHeadModel(Architecture):
    model_type = "gpt2"
    skip = (".attn.bias", ".attn.masked_bias")
    renames = tuple((f"{n}.", f"transformer.{n}.") for n in ("wte", "wpe", "h", "ln_f"))  # files of the bare GPT2Model
    form = "transposed"
    KEYS: ClassVar = [
        setting("n_layer", "n_layer"),
        setting("n_embd", "n_embd"),
        Key("n_ffn", "n_inner", ffn_width, None),
        setting("n_head", "n_head"),
        setting("vocab_size", "vocab_size"),
        setting("block_size", "n_positions", 1024),
        setting("norm_eps", "layer_norm_epsilon", 1e-5),
        setting("tie_embeddings", "tie_word_embeddings", True),
    ]
    FIXED: ClassVar = {"layers": "attn(rope=none, qk_norm=false)", "norm": "layernorm", "learned_positions": True}

    def settings(self, h):
        h.only("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu")
        ffn = "gelu_exact" if h("activation_function", "gelu_new") == "gelu" else "gelu"
        h.only("scale_attn_weights", True)
        h.only("scale_attn_by_inverse_layer_idx", False)
        h.only("add_cross_attention", False)
        return self.FIXED | {"bias": True, "ffn": ffn} | take(h, self.KEYS)

    def config(self, m):
        expect(m, Attention)
        activation = "gelu" if m.config.ffn == "gelu_exact" else "gelu_new"
        dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), m.config.dropout)
        return {"activation_function": activation, **give(m, self.KEYS), **dropout, "n_head": first(m, Attention).H}

    def entries(self, m):
        kinds = ["weight", "bias"] if m.config.bias else ["weight"]
        pairs = {"mixer.qkv_proj": "attn.c_attn", "mixer.out_proj": "attn.c_proj", "ffn.up_proj": "mlp.c_fc"}
        pairs |= {"ffn.down_proj": "mlp.c_proj", "mixer_norm": "ln_1", "ffn_norm": "ln_2"}
        entries = [one("embedding.weight", "transformer.wte.weight"), one("position_embedding.weight", "transformer.wpe.weight")]
        entries += [one(f"norm.{k}", f"transformer.ln_f.{k}") for k in kinds]
        for i in range(m.config.n_layer):
            for ours, theirs in pairs.items():
                form = {"weight": self.form if ours.endswith("_proj") else "same", "bias": "same"}
                entries += [one(f"blocks.{i}.{ours}.{k}", f"transformer.h.{i}.{theirs}.{k}", form[k]) for k in kinds]
        return entries + ([] if m.head is None else [one("head.weight", "lm_head.weight")])


class NanoGPT(GPT2LMHeadModel):
    """nanoGPT's own checkpoints: GPT-2's names on nn.Linear weights, biases optional."""

    form = "same"


class LlamaForCausalLM(Architecture):
    model_type = "llama"
    OPTIONS: ClassVar = {"qk_norm": False}

    def settings(self, h):
        h.only("hidden_act", "silu")
        bias = h("attention_bias", False)
        h.only("mlp_bias", bias)
        shared = {"layers": format_layers([LayerSpec("attn", self.OPTIONS)]), "rope_theta": h.rope()[0], "bias": bias}
        return shared | take(h, DECODER + HEADS)

    def config(self, m):
        expect(m, Attention)
        a, bias = first(m, Attention), dict.fromkeys(("attention_bias", "mlp_bias"), m.config.bias)
        return {"hidden_act": "silu", **bias, **give(m, DECODER), **give(a, HEADS), **rope_config(a.theta, 1.0)}

    def entries(self, m):
        def layer(x, ours, theirs):
            ffn = swiglu(m, f"{ours}ffn.", f"{theirs}mlp.")
            return attention(x, f"{ours}mixer.", f"{theirs}self_attn.") + ffn + norms(ours, theirs)

        return ends(m) + each(m, layer)


class Qwen3ForCausalLM(LlamaForCausalLM):
    model_type = "qwen3"
    OPTIONS: ClassVar = {}

    def settings(self, h):
        h.only("attention_bias", False)
        if h("use_sliding_window", False) or "sliding_attention" in (h("layer_types", None) or []):
            h.refuse(f"sliding_window={h('sliding_window', None)} is not supported: use_sliding_window must be false")
        h.ignore("sliding_window")
        return super().settings(h)


class Qwen3NextForCausalLM(Architecture):
    model_type = "qwen3_next"
    OWN: ClassVar = {"num_experts": 0}

    def settings(self, h):
        h.only("hidden_act", "silu")
        h.only("attention_bias", False)
        self.refuse_experts(h)
        theta, fraction = h.rope(fraction=0.25)
        attn = {"gate": True} | ({} if fraction == 1 else {"rope": "partial", "rope_fraction": fraction})
        gdn = LayerSpec("gdn", take(h, GDN))
        layers = h.layers(linear_attention=gdn, full_attention=LayerSpec("attn", attn))
        return {"layers": layers, "rope_theta": theta, "norm": "rmsnorm1p", **take(h, DECODER + HEADS)}

    def refuse_experts(self, h):
        experts, dense, step = h("num_experts", 512), h("mlp_only_layers", None) or [], h("decoder_sparse_step", 1)
        sparse = [i for i in range(h("num_hidden_layers")) if i not in dense and (i + 1) % step == 0]
        if experts and sparse:
            h.refuse(f"mixture of experts (num_experts={experts} in {len(sparse)} layers) is not supported: only dense MLPs are")

    def config(self, m):
        expect(m, Attention, DeltaRule)
        a, x = first(m, Attention), first(m, DeltaRule)
        shared = {"hidden_act": "silu", **layer_types(m, DeltaRule), **rope_config(a.theta, a.rope_dim / a.D)}
        return shared | give(m, DECODER) | give(a, HEADS) | give(x, GDN) | self.OWN

    def entries(self, m):
        def layer(x, ours, theirs):
            entries = norms(ours, theirs) + swiglu(m, f"{ours}ffn.", f"{theirs}mlp.")
            if type(x) is Attention:
                return entries + attention(x, f"{ours}mixer.", f"{theirs}self_attn.")
            a, b = f"{ours}mixer.", f"{theirs}linear_attn."
            entries += [one(f"{a}conv_weight", f"{b}conv1d.weight", "conv")]
            return entries + same(a, b, "A_log", "dt_bias", "norm.weight", "out_proj.weight") + self.projections(x, a, b)

        return ends(m) + each(m, layer)

    def projections(self, x, a, b):
        r = x.H // x.Hk
        qkvz = torch.cat(per_head(x.Hk, [x.K, x.K, r * x.V, r * x.V]))
        ba = torch.cat(per_head(x.Hk, [r, r]))
        return linear(f"{a}in_proj", [f"{b}in_proj_qkvz"], (), qkvz) + linear(f"{a}ba_proj", [f"{b}in_proj_ba"], (), ba)


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):  # noqa: N801 (their name)
    model_type = "qwen3_5_text"
    renames = (("model.language_model.", "model."),)
    OWN: ClassVar = {}

    def refuse_experts(self, h):
        """It has none."""

    def projections(self, x, a, b):
        qkvz = linear(f"{a}in_proj", [f"{b}in_proj_qkv", f"{b}in_proj_z"], [sum(x.split), x.H * x.V])
        return qkvz + linear(f"{a}ba_proj", [f"{b}in_proj_b", f"{b}in_proj_a"], [x.H, x.H])


class Mamba2ForCausalLM(Architecture):
    model_type = "mamba2"
    KEYS: ClassVar = [
        setting("n_layer", "num_hidden_layers"),
        setting("n_embd", "hidden_size"),
        setting("vocab_size", "vocab_size"),
        setting("block_size", "max_position_embeddings", 1024),  # not a key of theirs: a state has no length
        setting("norm_eps", "layer_norm_epsilon", 1e-5),
        setting("tie_embeddings", "tie_word_embeddings", False),
        setting("bias", "use_bias", False),
    ]
    SSM: ClassVar = [
        Key("expand", "expand", lambda x: x.H * x.P // x.in_proj.in_features, 2),
        Key("head_dim", "head_dim", at("P"), 64),
        Key("d_state", "state_size", at("N"), 128),
        Key("groups", "n_groups", at("G"), 8),
        Key("conv", "conv_kernel", conv_width, 4),
        Key("conv_bias", "use_conv_bias", lambda x: x.conv_bias is not None, True),
        Key("dt_min", "time_step_min", lambda x: x.dt_range[0], 1e-3),
        Key("dt_max", "time_step_max", lambda x: x.dt_range[1], 0.1),
    ]

    def settings(self, h):
        h.only("hidden_act", "silu")
        mixer = {"ffn": "none", **take(h, self.SSM)}
        # infinity is written in more than one way
        limits = h("time_step_limit", None) or (0.0, math.inf)
        low, high = (float(v["__float__"] if isinstance(v, dict) else v) for v in limits)
        mixer |= ({"dt_limit_min": low} if low else {}) | ({"dt_limit_max": high} if high != math.inf else {})
        if h("num_heads") * mixer["head_dim"] != mixer["expand"] * h("hidden_size"):
            h.refuse(f"num_heads={h('num_heads')} times head_dim={mixer['head_dim']} is not expand times hidden_size")
        return {"layers": format_layers([LayerSpec("mamba2", mixer)]), "n_head": 1, **take(h, self.KEYS)}

    def config(self, m):
        expect(m, Mamba2)
        x = first(m, Mamba2)
        low, high = x.dt_limit
        limit = {} if x.dt_limit == (0.0, None) else {"time_step_limit": [low, math.inf if high is None else high]}
        return {"hidden_act": "silu", "num_heads": x.H, **give(m, self.KEYS), **give(x, self.SSM), **limit}

    def entries(self, m):
        entries = ends(m, "backbone.embeddings", "backbone.norm_f")
        for i, b in enumerate(m.blocks):
            entries += mamba(b.mixer, f"blocks.{i}.mixer.", f"backbone.layers.{i}.mixer.")
            entries += [one(f"blocks.{i}.mixer_norm.weight", f"backbone.layers.{i}.norm.weight")]
        return entries


class MiniMaxForCausalLM(Architecture):
    """One expert: the router gives it everything, so that its weight has no effect."""

    model_type = "minimax"
    skip = ("slope_rate", "query_decay", "key_decay", "diagonal_decay", "block_sparse_moe.gate.weight", "rotary_emb.inv_freq")
    FACTORS: ClassVar = {"linear_attn": LinearAttention, "full_attn": Attention}

    def settings(self, h):
        h.only("hidden_act", "silu")
        h.only("sliding_window", None)
        if h("num_local_experts", 8) != 1:
            h.refuse(f"mixture of experts (num_local_experts={h('num_local_experts', 8)}) is not supported: only one expert is")
        ffn = {f"ffn_{s}": h(f"mlp_{s}_factor", 1) for s in ("alpha", "beta")}
        linear, full = ({s: h(f"{kind}_{s}_factor", 1) for s in ("alpha", "beta")} | ffn for kind in self.FACTORS)
        lightning = LayerSpec("lightning", {"norm_eps": 1e-6} | linear)
        layers = h.layers(linear_attention=lightning, full_attention=LayerSpec("attn", {"qk_norm": False} | full))
        eps = {"norm_eps": h("rms_norm_eps", 1e-5)}
        return {"layers": layers, "rope_theta": h.rope(1e6)[0], "residual": "normed", **take(h, DECODER + HEADS), **eps}

    def config(self, m):
        expect(m, Attention, LinearAttention)
        if any(spec.name not in ("attn", "lightning") for spec in m.specs):
            raise ConfigError("it holds layers of attn and lightning only")
        x, a = first(m, LinearAttention), first(m, Attention)
        if (x.H, x.K) != (a.H, a.D):
            raise ConfigError(f"its lightning and attn layers have the same heads, here {x.H} of {x.K} and {a.H} of {a.D}")
        factors = {}
        for kind, cls in self.FACTORS.items():
            mixer, ffn = next(b.scales for b in m.blocks if type(b.mixer) is cls)
            factors |= {f"{kind}_alpha_factor": mixer[0], f"{kind}_beta_factor": mixer[1]}
            factors |= {"mlp_alpha_factor": ffn[0], "mlp_beta_factor": ffn[1]}
        shared = {"hidden_act": "silu", "num_local_experts": 1, "num_experts_per_tok": 1, **layer_types(m, LinearAttention)}
        return shared | factors | give(m, DECODER) | give(a, HEADS) | rope_config(a.theta, 1.0)

    def entries(self, m):
        def layer(x, ours, theirs):
            entries = norms(ours, theirs)
            entries += swiglu(m, f"{ours}ffn.", f"{theirs}block_sparse_moe.experts.0.", "w1", "w3", "w2")
            a, b = f"{ours}mixer.", f"{theirs}self_attn."
            if type(x) is Attention:
                return entries + attention(x, a, b)
            rows = [3 * x.H * x.K, x.H * x.K]
            order = torch.cat([*per_head(x.H, [x.K] * 3), torch.arange(rows[0], sum(rows))])
            entries += linear(f"{a}in_proj", [f"{b}qkv_proj", f"{b}output_gate"], rows, order)
            return entries + same(a, b, "norm.weight", "out_proj.weight")

        return ends(m) + each(m, layer)

    def extra(self, m):
        return {f"model.layers.{i}.block_sparse_moe.gate.weight": torch.zeros(1, m.config.n_embd) for i in range(len(m.blocks))}


class NemotronHForCausalLM(Architecture):
    model_type = "nemotron_h"
    renames = (("model.", "backbone."),)
    KEYS: ClassVar = [
        setting("n_embd", "hidden_size"),
        Key("n_ffn", "intermediate_size", ffn_width),
        setting("vocab_size", "vocab_size"),
        setting("block_size", "max_position_embeddings", 4096),
        setting("norm_eps", "layer_norm_epsilon", 1e-5),
    ]
    SSM: ClassVar = [
        Key("head_dim", "mamba_head_dim", at("P"), 64),
        Key("d_state", "ssm_state_size", at("N"), 128),
        Key("groups", "n_groups", at("G"), 8),
        Key("conv", "conv_kernel", conv_width, 4),
        Key("conv_bias", "use_conv_bias", lambda x: x.conv_bias is not None, True),
        Key("dt_limit_min", "time_step_min", lambda x: x.dt_limit[0], 1e-3),
        Key("dt_max", "time_step_max", lambda x: x.dt_range[1], 0.1),
    ]
    KINDS: ClassVar = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe",
                       "mamba": "linear_attention", "attention": "full_attention"}  # fmt: skip

    def settings(self, h):
        for key in ("attention_bias", "mlp_bias", "use_bias", "tie_word_embeddings"):
            h.only(key, False)
        h.only("sliding_window", None)
        h.only("mlp_hidden_act", "relu2")
        h.only("mamba_hidden_act", "silu")
        h.ignore("num_hidden_layers", "expand", "time_step_limit")
        kinds = h("layers_block_type", None) or h("layer_types", None) or list(h("hybrid_override_pattern"))
        kinds = [self.KINDS.get(kind, kind) for kind in kinds]
        if "moe" in kinds:
            raise ConfigError(f"mixture of experts ({kinds.count('moe')} layers E) is not supported: only M, * and - layers are")
        inner, d = h("mamba_num_heads", 128) * h("mamba_head_dim", 64), h("hidden_size")
        if inner % d:
            raise ConfigError(f"mamba_num_heads * mamba_head_dim = {inner} is not a multiple of hidden_size={d}")
        items = {
            "linear_attention": LayerSpec("mamba2", {"ffn": "none", "expand": inner // d, **take(h, self.SSM)}),
            "full_attention": LayerSpec("attn", {"rope": "none", "qk_norm": False, "ffn": "none"}),
            "mlp": LayerSpec("mlp"),
        }
        own = {"layers": format_layers([items[k] for k in kinds]), "n_layer": len(kinds), "tie_embeddings": False, "ffn": "relu2"}
        return own | take(h, self.KEYS + HEADS)

    def config(self, m):
        expect(m, Mamba2, Attention, type(None))
        x, a = first(m, Mamba2), first(m, Attention)
        kinds = {Mamba2: "linear_attention", Attention: "full_attention", type(None): "mlp"}
        own = {"layers_block_type": [kinds[type(b.mixer)] for b in m.blocks], "mlp_hidden_act": "relu2", "mamba_num_heads": x.H}
        return own | give(m, self.KEYS) | give(a, HEADS) | give(x, self.SSM)

    def entries(self, m):
        entries = ends(m, "backbone.embeddings", "backbone.norm_f")
        for i, b in enumerate(m.blocks):
            ours, theirs = f"blocks.{i}.", f"backbone.layers.{i}."
            if b.mixer is None:
                entries += same(f"{ours}ffn.", f"{theirs}mixer.", "up_proj.weight", "down_proj.weight")
            else:
                part = mamba if type(b.mixer) is Mamba2 else attention
                entries += part(b.mixer, f"{ours}mixer.", f"{theirs}mixer.")
            entries += [one(f"{ours}{'ffn' if b.mixer is None else 'mixer'}_norm.weight", f"{theirs}norm.weight")]
        return entries


class OlmoHybridForCausalLM(Architecture):
    model_type = "olmo_hybrid"
    renames = ((".attention_layer_norm.", ".input_layernorm."), (".feedforward_layer_norm.", ".post_attention_layernorm."))

    def settings(self, h):
        h.only("hidden_act", "silu")
        h.only("attention_bias", False)
        theta, _ = h.rope(None)
        H = h("num_attention_heads")
        Hk = h("linear_num_key_heads", None) or H
        K = h("linear_key_head_dim", None) or int(0.75 * h("hidden_size") / Hk)
        V, Hv = h("linear_value_head_dim", None) or 2 * K, h("linear_num_value_heads", None) or H
        gdn = {"n_head": Hv, "n_key_head": Hk, "head_dim": K, "value_head_dim": V, "conv": h("linear_conv_kernel_dim", 4)}
        gdn |= {"neg_eigval": h("linear_allow_neg_eigval", True), "norm_eps": 1e-5}
        attn = {"residual": "post", "qk_norm": "full"} | ({"rope": "none"} if theta is None else {})
        layers = h.layers(linear_attention=LayerSpec("gdn", gdn), full_attention=LayerSpec("attn", attn))
        rope = {} if theta is None else {"rope_theta": theta}
        return {"layers": layers, **rope, **take(h, DECODER + HEADS[:2])}

    def config(self, m):
        expect(m, Attention, DeltaRule)
        a, x = first(m, Attention), first(m, DeltaRule)
        rope = rope_config(a.theta if a.rope_dim else None, 1.0)
        own = {"hidden_act": "silu", "linear_allow_neg_eigval": x.beta_max == 2.0, **layer_types(m, DeltaRule), **rope}
        return own | give(m, DECODER) | give(a, HEADS[:2]) | give(x, GDN)

    def entries(self, m):
        def layer(x, ours, theirs):
            ffn = swiglu(m, f"{ours}ffn.", f"{theirs}mlp.")
            if type(x) is Attention:
                post = norms(ours, theirs, "post_attention_layernorm", "post_feedforward_layernorm")
                return ffn + post + attention(x, f"{ours}mixer.", f"{theirs}self_attn.")
            a, b = f"{ours}mixer.", f"{theirs}linear_attn."
            entries = norms(ours, theirs) + linear(f"{a}in_proj", [f"{b}{n}_proj" for n in "qkvg"], [*x.split, x.H * x.V])
            entries += linear(f"{a}ba_proj", [f"{b}b_proj", f"{b}a_proj"], [x.H, x.H])
            entries += [Entry(f"{a}conv_weight", tuple(f"{b}{n}_conv1d.weight" for n in "qkv"), tuple(x.split), form="conv")]
            entries += [one(f"{a}norm.weight", f"{b}o_norm.weight"), one(f"{a}out_proj.weight", f"{b}o_proj.weight")]
            return ffn + entries + same(a, b, "A_log", "dt_bias")

        return ends(m) + each(m, layer)


class KimiLinearForCausalLM(Architecture):
    model_type = "kimi_linear"
    renames = ((".self_attn.forget_gate.", ".self_attn."), (".block_sparse_moe.", ".mlp."))  # transformers writes the latter
    KDA: ClassVar = [
        Key("n_head", "linear_num_heads", at("H"), 32),
        Key("head_dim", "linear_head_dim", at("K"), 128),
        Key("conv", "linear_conv_kernel_dim", conv_width, 4),
    ]
    MLA: ClassVar = [
        Key("n_head", "num_attention_heads", at("H")),
        Key("kv_rank", "kv_lora_rank", at("R"), 512),
        Key("q_rank", "q_lora_rank", lambda x: None if x.q_a_proj is None else x.q_a_proj.out_features, None),
        Key("nope_dim", "qk_nope_head_dim", at("nope"), 128),
        Key("rope_dim", "qk_rope_head_dim", lambda x: x.split[1], 64),
        Key("v_dim", "v_head_dim", at("V"), 128),
    ]

    def settings(self, h):
        h.only("hidden_act", "silu")
        h.only("attention_bias", False)
        h.only("tie_word_embeddings", False)
        h.only("num_key_value_heads", h("num_attention_heads"), None)
        h.ignore("head_dim", "num_local_experts", "num_experts", "rope_theta", "rope_scaling", "rope_parameters")
        self.flatten(h)
        ffns = h("mlp_layer_types")
        if "sparse" in ffns:
            sparse = ffns.count("sparse")
            h.refuse(f"mixture of experts ({sparse} sparse layers in mlp_layer_types) is not supported: only dense MLPs are")
        kda, mla = take(h, self.KDA), {**take(h, self.MLA), "rope": "none", "norm_eps": 1e-6}
        layers = h.layers(linear_attention=LayerSpec("kda", kda), full_attention=LayerSpec("mla", mla))
        own = {"layers": layers, "n_head": mla["n_head"], "head_dim": kda["head_dim"], "tie_embeddings": False}
        return take(h, DECODER) | own | {"norm_eps": h("rms_norm_eps", 1e-5)}

    def flatten(self, h):
        """Fill in what the published config.json says in a sub-dictionary, or by other names."""
        n, inner = h("num_hidden_layers"), h("linear_attn_config", None) or {}
        names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim"}
        h.values |= {theirs: inner[key] for key, theirs in names.items() if key in inner}
        full = {i - 1 for i in inner.get("full_attn_layers", [])}  # counted from 1
        if full and h("layer_types", None) is None:
            h.values["layer_types"] = ["full_attention" if i in full else "linear_attention" for i in range(n)]
        if h("mlp_layer_types", None) is None:
            dense = h("first_k_dense_replace", 1)
            h.values["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(n)]
        h.values.setdefault("max_position_embeddings", h("model_max_length", 1048576))

    def config(self, m):
        expect(m, LatentAttention, DeltaRule)
        x, a = first(m, DeltaRule), first(m, LatentAttention)
        own = {"hidden_act": "silu", "num_key_value_heads": a.H, "mlp_layer_types": ["dense"] * m.config.n_layer}
        return own | layer_types(m, DeltaRule) | give(m, DECODER) | give(x, self.KDA) | give(a, self.MLA)

    def entries(self, m):
        def layer(x, ours, theirs):
            entries = norms(ours, theirs) + swiglu(m, f"{ours}ffn.", f"{theirs}mlp.")
            a, b = f"{ours}mixer.", f"{theirs}self_attn."
            entries += [one(f"{a}out_proj.weight", f"{b}o_proj.weight")]
            if type(x) is LatentAttention:
                pairs = {"kv_a_proj": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "kv_b_proj": "kv_b_proj"}
                low = {"q_a_proj": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_proj": "q_b_proj"}
                pairs |= {"q_proj": "q_proj"} if x.q_a_proj is None else low
                return entries + [one(f"{a}{p}.weight", f"{b}{q}.weight") for p, q in pairs.items()]
            entries += linear(f"{a}in_proj", [f"{b}{n}_proj" for n in "qkv"], x.split)
            entries += [Entry(f"{a}conv_weight", tuple(f"{b}{n}_conv1d.weight" for n in "qkv"), tuple(x.split), form="conv")]
            entries += [one(f"{a}A_log", f"{b}A_log", "per head"), one(f"{a}ba_proj.weight", f"{b}b_proj.weight")]
            low = [f"{n}_proj.weight" for n in ("f_a", "f_b", "g_a", "g_b")]
            return entries + [one(f"{a}norm.weight", f"{b}o_norm.weight")] + same(a, b, "dt_bias", *low)

        return ends(m) + each(m, layer)


ARCHITECTURES = {
    cls.__name__: cls()
    for cls in (
        GPT2LMHeadModel, LlamaForCausalLM, Qwen3ForCausalLM, Qwen3NextForCausalLM, Qwen3_5ForCausalLM, Mamba2ForCausalLM,
        MiniMaxForCausalLM, NemotronHForCausalLM, OlmoHybridForCausalLM, KimiLinearForCausalLM,
    )
}  # fmt: skip
