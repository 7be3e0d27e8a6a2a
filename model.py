"""The whole decoder, read top to bottom: states, mixers, block, model.

Each layer is a sequence mixer (chosen by name in the layer pattern) followed by a feed-forward network. Adding a mixer takes one
class here: subclass `Mixer`, decorate it with `@mixer("name")`, declare options as keyword-only arguments of `__init__`.
"""

import difflib
import inspect
import json
import math
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import safe_open
from safetensors.torch import save_file

import kernels
from configurator import ConfigError, LayerSpec, ModelConfig, expand_layers, format_layers

Positive = Annotated[int, Field(ge=1)]


# ----------------------------------------------------------------------------------------------------------------------
# States: what a sequence leaves behind for its next token


class State:
    """What one mixer keeps of a batch of sequences: preallocated tensors, batch first, updated in place.

    `length (B,)` int32 on the device counts the tokens of the current document; `longest` bounds it on the host, so that a cache
    is never read beyond what can be filled. Named tensors are attributes: `state.conv`, `state.recurrent`, `state.k`.
    """

    def __init__(self, batch, device=None, **tensors):
        self.tensors = {"length": torch.zeros(batch, dtype=torch.int32, device=device), **tensors}
        self.longest = 0

    def __getattr__(self, name):
        try:
            return self.__dict__["tensors"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def nbytes(self):
        """Bytes allocated."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())

    def advance(self, T, segment_ids=None):
        """Count T more tokens; with documents only the last one's, which restarts the count unless it is the incoming one."""
        if segment_ids is None:
            self.length += T
        else:
            run, valid = kernels.segment_runs(segment_ids)
            last = run[:, -1:]
            self.length.mul_(last[:, 0] == 0).add_(((run == last) & valid).sum(1))
        self.longest += T

    def fork(self, n):
        """A new state of `n` copies of every sequence: row b becomes rows b*n to b*n + n - 1. Real copies."""
        new = State(0)
        new.tensors = {name: x.repeat_interleave(n, dim=0) for name, x in self.tensors.items()}
        new.longest = self.longest
        return new

    def copy_(self, other):
        """Take over the contents of `other` at this state's addresses (those a CUDA graph captured)."""
        for name, x in self.tensors.items():
            x.copy_(other.tensors[name])
        self.longest = other.longest
        return self


class ModelState:
    """The states of all layers, as one thing to fork, copy, save and load."""

    def __init__(self, layers):
        self.layers = layers

    @property
    def nbytes(self):
        return sum(s.nbytes for s in self.layers)

    @property
    def length(self):
        return self.layers[0].length

    def fork(self, n):
        return ModelState([s.fork(n) for s in self.layers])

    def copy_(self, other):
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.copy_(theirs)
        return self

    def save(self, path, metadata=None):
        """Write all tensors to one safetensors file; `metadata` is a dict of strings."""
        tensors = {f"{i}.{name}": x.contiguous() for i, s in enumerate(self.layers) for name, x in s.tensors.items()}
        save_file(tensors, path, {**(metadata or {}), "longest": json.dumps([s.longest for s in self.layers])})

    def load(self, path):
        """Read a saved state of the same shapes into these tensors; ValueError names the first tensor that differs."""
        with safe_open(path, "pt") as file:
            longest, names = json.loads(file.metadata()["longest"]), set(file.keys())
            for i, s in enumerate(self.layers):
                for name, x in s.tensors.items():
                    key = f"{i}.{name}"
                    saved = tuple(file.get_slice(key).get_shape()) if key in names else None
                    if saved != tuple(x.shape):
                        raise ValueError(f"state {path}: tensor {key} has shape {saved}, this model's is {tuple(x.shape)}")
            for i, s in enumerate(self.layers):
                for name, x in s.tensors.items():
                    x.copy_(file.get_tensor(f"{i}.{name}"))
                s.longest = longest[i]
        return self


# ----------------------------------------------------------------------------------------------------------------------
# Parts that mixers share


def wide(x):
    """x in fp32, or wider if it already is: for gates, norms and angles."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """`kernels.rms_norm` with its weight; `unit_offset` multiplies by 1 + w, with w starting at 0."""

    def __init__(self, dim, eps, unit_offset=False):
        super().__init__()
        self.eps, self.unit_offset = eps, unit_offset
        self.weight = nn.Parameter(torch.zeros(dim) if unit_offset else torch.ones(dim))

    def forward(self, x):
        return kernels.rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset)


def make_norm(config, dim):
    return RMSNorm(dim, config.norm_eps, unit_offset=config.norm == "rmsnorm1p")


def rotary(x, positions, theta, dim):
    """Rotary embedding, half-split, on the first `dim` of x's channels: (x1 cos - x2 sin, x2 cos + x1 sin), the rest unchanged.

    x `(B, T, H, D)`, positions `(B or 1, T)`; angles and product in fp32, cast back. Su et al. 2104.09864.
    """
    x1, x2 = wide(x[..., : dim // 2]), wide(x[..., dim // 2 : dim])
    frequency = theta ** (-torch.arange(0, dim, 2, device=x.device, dtype=x1.dtype) / dim)
    angle = (positions[..., None] * frequency)[:, :, None]  # (B, T, 1, dim/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([(x1 * cos - x2 * sin).to(x.dtype), (x2 * cos + x1 * sin).to(x.dtype), x[..., dim:]], dim=-1)


def recur(op, *args, state, segment_ids, **options):
    """Run the sequence operator `op`, or for one token its step twin, keeping `state` (a tensor or None) up to date in place."""
    if state is None:
        return getattr(kernels, op)(*args, segment_ids=segment_ids, **options)[0]
    if args[0].shape[1] == 1 and segment_ids is None:
        return getattr(kernels, f"{op}_step")(*args, state=state, **options)
    out, new = getattr(kernels, op)(*args, initial_state=state, segment_ids=segment_ids, **options)
    state.copy_(new)
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Mixers

MIXERS = {}


def mixer(name):
    """Class decorator: make a `Mixer` available under `name` in the layer pattern."""

    def register(cls):
        MIXERS[name] = cls
        cls.name = name
        return cls

    return register


class Mixer(nn.Module):
    """One sequence mixer: `y = mixer(x)`, x and y `(B, T, n_embd)`, causal, each document on its own.

    A subclass writes `mix` and `init_state`, lists the operators it calls in `operators`, the parameters that weight decay must
    not touch in `no_decay`, and may override `reset_parameters` (called once, after the model's general initialisation) and
    `flops`. Keyword-only arguments of `__init__` are its options in the layer pattern, checked against their annotations.
    """

    name: str
    operators: tuple = ()
    no_decay: tuple = ()

    def forward(self, x, *, segment_ids=None, positions=None, state=None, aux=None):
        """Without `state`: training. With it: prefill, chunked prefill and decoding, the state updated in place.

        segment_ids `(B, T)` int32, positions `(B or 1, T)` default to those in the document (going on from the state's length);
        losses and health figures go into the dict `aux`. RuntimeError where gradients are asked for together with a state.
        """
        if state is not None and torch.is_grad_enabled():
            raise RuntimeError("a mixer's state is updated in place: call it under torch.no_grad() or torch.inference_mode()")
        if positions is None:
            positions = default_positions(x, segment_ids, state)
        y = self.mix(x, segment_ids=segment_ids, positions=positions, state=state, aux=aux)
        if state is not None:
            state.advance(x.shape[1], segment_ids)
        return y

    def mix(self, x, *, segment_ids, positions, state, aux):
        raise TypeError(f"{type(self).__name__} must define mix(x, *, segment_ids, positions, state, aux)")

    def init_state(self, batch, max_len, device=None, dtype=None):
        """An empty `State` for `batch` sequences of at most `max_len` tokens; caches in `dtype`, recurrent states in fp32."""
        raise TypeError(f"{type(self).__name__} must define init_state(batch, max_len, device=None, dtype=None)")

    def reset_parameters(self):
        pass

    def flops(self, T):
        """Forward FLOPs per token of mixing at training length T, the projections (2 per weight) not counted."""
        return 0

    def state_bytes(self, batch, T, dtype=torch.bfloat16):
        """Bytes of the state of `batch` sequences of T tokens, as `init_state` would allocate them."""
        return self.init_state(batch, T, device="meta", dtype=dtype).nbytes

    def backend(self, device_type):
        """The backend or backends that run this mixer's operators on such a device."""
        return "+".join(sorted({kernels.backend_of(op, device_type) for op in self.operators})) or "torch"


def default_positions(x, segment_ids, state):
    length = None if state is None else state.length
    if segment_ids is not None:
        return kernels.document_positions(segment_ids, length)
    positions = torch.arange(x.shape[1], device=x.device)[None]
    return positions if length is None else positions + length[:, None]


@mixer("attn")
class Attention(Mixer):
    """Causal softmax attention with grouped key/value heads, QK-norm, RoPE on all, part or none of each head, an output gate.

        q, k, v = x W_q, x W_k, x W_v;  q, k <- rope(norm(q)), rope(norm(k));  y = (attention(q, k, v) * sigmoid(x W_g)) W_o

    The gate (Qwen3-Next, 2505.06708) is optional. `rope=partial` rotates the first `rope_fraction` of each head.
    """

    operators = ("softmax_attention",)

    def __init__(
        self,
        config,
        layer,
        *,
        n_head: Positive | None = None,
        n_kv_head: Positive | None = None,
        head_dim: Positive | None = None,
        rope: Literal["full", "partial", "none"] = "full",
        rope_fraction: Annotated[float, Field(gt=0, le=1)] = 0.25,
        rope_theta: Annotated[float, Field(gt=0)] | None = None,
        qk_norm: bool = True,
        gate: bool = False,
    ):
        super().__init__()
        self.H = n_head or config.n_head
        self.Hk = n_kv_head or (config.n_kv_head if n_head is None else None) or self.H
        self.D = head_dim or config.head_dim or config.n_embd // self.H
        if self.H % self.Hk:
            raise ConfigError(f"{self.name}: n_head={self.H} is not a multiple of n_kv_head={self.Hk}")
        self.rope_dim = {"full": self.D, "partial": int(self.D * rope_fraction), "none": 0}[rope]
        if self.rope_dim % 2 or (rope == "partial" and not self.rope_dim):
            raise ConfigError(
                f"{self.name}: RoPE turns pairs of channels, {self.rope_dim} of head_dim={self.D} is not even and positive"
            )
        self.theta, self.dropout = rope_theta or config.rope_theta, config.dropout
        rows = [self.H * self.D, self.Hk * self.D, self.Hk * self.D, self.H * self.D]  # q, k, v, gate
        self.split = rows if gate else rows[:3]
        self.qkv_proj = nn.Linear(config.n_embd, sum(self.split), bias=config.bias)
        self.out_proj = nn.Linear(self.H * self.D, config.n_embd, bias=config.bias)
        self.q_norm, self.k_norm = (make_norm(config, self.D) if qk_norm else nn.Identity() for _ in range(2))

    def mix(self, x, *, segment_ids, positions, state, aux):
        B, T, _ = x.shape
        q, k, v, *gate = self.qkv_proj(x).split(self.split, dim=-1)
        q, k, v = q.view(B, T, self.H, self.D), k.view(B, T, self.Hk, self.D), v.view(B, T, self.Hk, self.D)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_dim:
            q, k = (rotary(u, positions, self.theta, self.rope_dim) for u in (q, k))
        y = self.attend(q, k, v, segment_ids, state).reshape(B, T, -1)
        return self.out_proj(y * gate[0].sigmoid() if gate else y)

    def attend(self, q, k, v, segment_ids, state):
        T = q.shape[1]
        if state is None:
            return kernels.softmax_attention(q, k, v, segment_ids=segment_ids, dropout_p=self.dropout if self.training else 0.0)
        if state.longest + T > state.k.shape[1]:
            raise ValueError(f"the state holds at most {state.k.shape[1]} tokens, {state.longest} + {T} were asked of it")
        if T == 1 and segment_ids is None:
            return kernels.softmax_attention_step(
                q, k, v, k_cache=state.k, v_cache=state.v, length=state.length, longest=state.longest + 1
            )
        past = (state.k[:, : state.longest], state.v[:, : state.longest], state.length) if state.longest else None
        y = kernels.softmax_attention(q, k, v, past=past, segment_ids=segment_ids)
        for cache, new in ((state.k, k), (state.v, v)):
            append(cache, new, state.length, segment_ids)
        return y

    def init_state(self, batch, max_len, device=None, dtype=None):
        shape = (batch, max_len, self.Hk, self.D)
        k, v = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        return State(batch, device, k=k, v=v)

    def flops(self, T):
        return 2 * T * self.H * self.D  # 4 T D per head for scores and values, the causal half


def append(cache, new, length, segment_ids):
    """Write `new (B, T, ...)` into `cache (B, S, ...)` behind `length (B,)`; of packed documents the last one, from 0 if new."""
    T = new.shape[1]
    if segment_ids is None:
        at = length[:, None].long() + torch.arange(T, device=new.device)
        cache.scatter_(1, at[..., None, None].expand_as(new), new.to(cache.dtype))
        return
    run, valid = kernels.segment_runs(segment_ids)
    rows, columns = torch.nonzero((run == run[:, -1:]) & valid, as_tuple=True)
    at = kernels.document_positions(segment_ids, length)
    cache[rows, at[rows, columns]] = new[rows, columns].to(cache.dtype)


@mixer("gdn")
class GatedDeltaNet(Mixer):
    """Gated DeltaNet (2412.06464), as in Qwen3-Next: a matrix state that decays, is corrected by the delta rule, and is read.

        q, k, v = silu(conv(x W_qkv));  q, k <- q / |q|, k / |k|;  beta = sigmoid(x W_b);  g = -exp(A_log) softplus(x W_a + dt_bias)
        S_t = e^{g_t} S_{t-1} + k_t^T beta_t (v_t - k_t e^{g_t} S_{t-1});  o_t = q_t S_t / sqrt(K);  y = (norm(o) * silu(x W_z)) W_o

    `n_head` value heads share `n_key_head` key heads in groups; `neg_eigval` doubles beta, so that a state can flip sign.
    """

    operators = ("causal_conv1d", "delta_rule", "gated_rms_norm", "l2_norm")
    no_decay = ("conv_weight", "A_log", "dt_bias")

    def __init__(
        self,
        config,
        layer,
        *,
        n_head: Positive | None = None,
        n_key_head: Positive | None = None,
        head_dim: Positive | None = None,
        value_head_dim: Positive | None = None,
        conv: Annotated[int, Field(ge=2)] = 4,
        neg_eigval: bool = False,
    ):
        super().__init__()
        self.H = n_head or config.n_head
        self.Hk = n_key_head or self.H
        self.K = head_dim or config.head_dim or config.n_embd // self.H
        self.V = value_head_dim or self.K
        if self.H % self.Hk:
            raise ConfigError(f"gdn: n_head={self.H} value heads are not a multiple of n_key_head={self.Hk}")
        self.beta_max, self.eps = 2.0 if neg_eigval else 1.0, config.norm_eps
        keys, values = self.Hk * self.K, self.H * self.V
        self.split = [keys, keys, values]
        self.qkvz_proj = nn.Linear(config.n_embd, 2 * keys + 2 * values, bias=config.bias)
        self.ba_proj = nn.Linear(config.n_embd, 2 * self.H, bias=config.bias)
        self.conv_weight = nn.Parameter(torch.empty(2 * keys + values, conv))
        self.A_log, self.dt_bias = nn.Parameter(torch.empty(self.H)), nn.Parameter(torch.empty(self.H))
        self.norm = RMSNorm(self.V, config.norm_eps)
        self.out_proj = nn.Linear(values, config.n_embd, bias=config.bias)

    def reset_parameters(self):
        """Mamba's gates: A ~ U(1, 16), softplus(dt_bias) log-uniform in [1e-3, 0.1], so that memories start at 1 to 1000 tokens."""
        nn.init.uniform_(self.conv_weight, -(self.conv_weight.shape[1] ** -0.5), self.conv_weight.shape[1] ** -0.5)
        with torch.no_grad():
            self.A_log.uniform_(1, 16).log_()
            dt = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def mix(self, x, *, segment_ids, positions, state, aux):
        B, T, _ = x.shape
        conv_state, recurrent = (None, None) if state is None else (state.conv, state.recurrent)
        qkv, z = self.qkvz_proj(x).split([sum(self.split), self.H * self.V], dim=-1)
        b, a = wide(self.ba_proj(x)).chunk(2, dim=-1)  # gates in fp32 from here on
        qkv = recur("causal_conv1d", qkv, self.conv_weight, activation="silu", state=conv_state, segment_ids=segment_ids)
        q, k, v = qkv.split(self.split, dim=-1)
        q, k = (kernels.l2_norm(u.view(B, T, self.Hk, self.K)) for u in (q, k))
        beta = self.beta_max * b.sigmoid()
        g = -wide(self.A_log).exp() * F.softplus(a + wide(self.dt_bias))
        o = recur("delta_rule", q, k, v.view(B, T, self.H, self.V), g, beta, state=recurrent, segment_ids=segment_ids)
        o = kernels.gated_rms_norm(o, z.view(B, T, self.H, self.V), self.norm.weight, self.eps)
        return self.out_proj(o.reshape(B, T, -1))

    def init_state(self, batch, max_len, device=None, dtype=None):
        conv = torch.zeros(batch, self.conv_weight.shape[1] - 1, sum(self.split), device=device, dtype=dtype)
        recurrent = torch.zeros(batch, self.H, self.K, self.V, device=device, dtype=torch.promote_types(conv.dtype, torch.float32))
        return State(batch, device, conv=conv, recurrent=recurrent)

    def flops(self, T, chunk=64):
        K, V = self.K, self.V  # chunked form: state products, scores against keys and values, the triangular solve
        return self.H * (6 * K * V + 4 * chunk * (K + V) + chunk**2 / 3) + 2 * self.conv_weight.numel()


# ----------------------------------------------------------------------------------------------------------------------
# Block and model


class SwiGLU(nn.Module):
    """`(silu(x W_gate) * (x W_up)) W_down`. Shazeer 2002.05202."""

    def __init__(self, config):
        super().__init__()
        width = config.n_ffn or 64 * math.ceil(8 * config.n_embd / 3 / 64)
        self.gate_up_proj = nn.Linear(config.n_embd, 2 * width, bias=config.bias)
        self.down_proj = nn.Linear(width, config.n_embd, bias=config.bias)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


FFNS = {"swiglu": SwiGLU}


def build_mixer(spec, config, layer):
    """The mixer a pattern item asks for, its options checked; ConfigError names what is wrong and what is possible."""
    if spec.name not in MIXERS:
        names = sorted([*MIXERS, "mlp"])
        near = difflib.get_close_matches(spec.name, names, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown mixer {spec.name!r} in layers{hint} (possible: {', '.join(names)})")
    cls = MIXERS[spec.name]
    parameters = {n: p for n, p in inspect.signature(cls).parameters.items() if p.kind is p.KEYWORD_ONLY}
    options, problems = {}, []
    for key, value in spec.options.items():
        if key not in parameters:
            problems.append(f"{spec.name}({key}=...): no such option (possible: {', '.join([*parameters, 'ffn'])})")
            continue
        try:
            options[key] = TypeAdapter(parameters[key].annotation).validate_python(value)
        except ValidationError as e:
            problems.append(f"{spec.name}({key}={value}): {e.errors()[0]['msg'][0].lower()}{e.errors()[0]['msg'][1:]}")
    if problems:
        raise ConfigError(problems)
    return cls(config, layer, **options)


class Block(nn.Module):
    """`x += mixer(norm(x)); x += ffn(norm(x))`; either part may be absent (`mlp` has no mixer, `ffn=none` no FFN)."""

    def __init__(self, config, spec, layer):
        super().__init__()
        options = dict(spec.options)
        ffn = options.pop("ffn", config.ffn)
        ffn = "none" if ffn is None else ffn
        if ffn not in (*FFNS, "none"):
            raise ConfigError(f"{spec.name}(ffn={ffn}): choose one of {', '.join([*FFNS, 'none'])}")
        if spec.name == "mlp" and (options or ffn == "none"):
            raise ConfigError(f"layer {layer}: mlp is an FFN alone, it takes no option but ffn=NAME")
        self.mixer = None if spec.name == "mlp" else build_mixer(LayerSpec(spec.name, options), config, layer)
        self.ffn = None if ffn == "none" else FFNS[ffn](config)
        self.mixer_norm = None if self.mixer is None else make_norm(config, config.n_embd)
        self.ffn_norm = None if self.ffn is None else make_norm(config, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, **context):
        if self.mixer is not None:
            x = x + self.dropout(self.mixer(self.mixer_norm(x), **context))
        elif context["state"] is not None:
            context["state"].advance(x.shape[1], context["segment_ids"])
        if self.ffn is not None:
            x = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return x


class Output(NamedTuple):
    logits: torch.Tensor | None  # (B, T, vocab), or (B, 1, vocab) with last_only; None where labels were given
    nll: torch.Tensor | None  # (B, T) fp32, 0 where the label is -1; None where no labels were given
    aux: dict  # losses and health figures of the layers


class Model(nn.Module):
    """Token embedding, `n_layer` blocks after the pattern `config.layers`, final norm, head (tied to the embedding or not)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.vocab_size is None:
            raise ConfigError("vocab_size is not set: a model needs it (train.py takes it from the data's tokenizer)")
        self.config = config
        self.specs = expand_layers(config.layers, config.n_layer)
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, spec, i) for i, spec in enumerate(self.specs))
        self.norm = make_norm(config, config.n_embd)
        self.head = None if config.tie_embeddings else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self):
        """N(0, 0.02) matrices, residual outputs scaled by 1/sqrt(2 n_layer) as GPT-2 does, then what each mixer asks for."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith(("out_proj", "down_proj"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Mixer):
                module.reset_parameters()

    def forward(self, tokens, labels=None, *, segment_ids=None, positions=None, state=None, aux=None, last_only=False):
        """tokens `(B, T)` int64 -> `Output`. Labels `(B, T)` int64 (-1: none) give the NLL per token instead of logits.

        state: a `ModelState` from `init_state`, updated in place (no gradients). last_only: logits of each row's last real token.
        """
        aux = {} if aux is None else aux
        if positions is None:
            positions = default_positions(tokens, segment_ids, None if state is None else state)
        x = self.dropout(self.embedding(tokens))
        for i, block in enumerate(self.blocks):
            x = block(
                x,
                segment_ids=segment_ids,
                positions=positions,
                state=None if state is None else state.layers[i],
                aux=aux,
            )
        x = self.norm(x)
        weight = self.embedding.weight if self.head is None else self.head.weight
        if labels is not None:
            nll = kernels.linear_cross_entropy(x.flatten(0, 1), weight, labels.flatten())
            return Output(None, nll.view(labels.shape), aux)
        if last_only:
            last = x.shape[1] - 1 if segment_ids is None else (segment_ids > 0).sum(1).clamp(min=1) - 1
            x = x[torch.arange(x.shape[0], device=x.device), last][:, None]
        return Output(F.linear(x, weight.to(x.dtype)), None, aux)

    def init_state(self, batch, max_len, device=None, dtype=None):
        """Empty states of all layers for `batch` sequences of up to `max_len` tokens, by default on the weights' device and dtype."""
        device, dtype = device or self.embedding.weight.device, dtype or self.embedding.weight.dtype
        empty = [
            State(batch, device) if b.mixer is None else b.mixer.init_state(batch, max_len, device, dtype) for b in self.blocks
        ]
        return ModelState(empty)

    def state_bytes(self, batch, T, dtype=torch.bfloat16):
        return sum(b.mixer.state_bytes(batch, T, dtype) for b in self.blocks if b.mixer is not None)

    def parameter_groups(self, weight_decay):
        """AdamW groups by name: matrices and embeddings decay; gates, norms, biases and convolutions do not."""
        exempt = {f"{m}.{p}" for m, module in self.named_modules() if isinstance(module, Mixer) for p in module.no_decay}
        named = dict(self.named_parameters())
        decay = [n for n, p in named.items() if p.ndim >= 2 and n not in exempt]
        rest = [n for n in named if n not in set(decay)]
        return [
            {"params": [named[n] for n in decay], "names": decay, "weight_decay": weight_decay},
            {"params": [named[n] for n in rest], "names": rest, "weight_decay": 0.0},
        ]

    def n_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T):
        """Training FLOPs per token at length T: 6 per weight of a matrix product (the head's included), 3 times each mixing."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        weights += self.embedding.weight.numel() if self.head is None else 0
        return 6 * weights + 3 * sum(b.mixer.flops(T) for b in self.blocks if b.mixer is not None)

    def describe(self, device_type):
        """The layer table: what each layer is, what runs it, what it costs and what it remembers."""
        T, sizes = self.config.block_size, (1024, 32768, 1048576)
        rows = [("layer", "mixer", "backend", "parameters", f"MFLOP/token at T={T}", "state at 1k", "at 32k", "at 1M")]
        for i, (spec, block) in enumerate(zip(self.specs, self.blocks, strict=True)):
            weights = sum(m.weight.numel() for m in block.modules() if isinstance(m, nn.Linear))
            flops = 6 * weights + (3 * block.mixer.flops(T) if block.mixer is not None else 0)
            states = [block.mixer.state_bytes(1, n) if block.mixer is not None else 0 for n in sizes]
            backend = block.mixer.backend(device_type) if block.mixer is not None else "torch"
            params = sum(p.numel() for p in block.parameters())
            rows.append(
                (
                    str(i),
                    format_layers([spec]),
                    backend,
                    f"{params:,}",
                    f"{flops / 1e6:.2f}",
                    *map(format_bytes, states),
                )
            )
        total = [format_bytes(self.state_bytes(1, n)) for n in sizes]
        rows.append(("", "all, with embedding", "", f"{self.n_params():,}", f"{self.flops_per_token(T) / 1e6:.2f}", *total))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        left = (1, 2)
        lines = [
            "  ".join(c.ljust(w) if j in left else c.rjust(w) for j, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines)


def format_bytes(n):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
