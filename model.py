"""The whole decoder, read top to bottom: states, mixers, block, model.

Each layer is a sequence mixer (chosen by name in the layer pattern) followed by a feed-forward network. Adding a mixer takes one
class here: subclass `Mixer`, decorate it with `@mixer("name")`, declare options as keyword-only arguments of `__init__`.
"""

import difflib
import functools
import inspect
import json
import math
import runpy
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

import torch
import torch.nn as nn
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import safe_open
from safetensors.torch import save_file

import kernels
from configurator import ConfigError, LayerSpec, ModelConfig, expand_layers, format_layers

Positive = Annotated[int, Field(ge=1)]


# ----------------------------------------------------------------------------------------------------------------------
# States: what a sequence leaves behind for its next token


CACHES = ("k", "v", "index_k")  # tensors of a state whose second dimension is slots, filled from the first on


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

    def rows(self, n):
        """The first n sequences as a state of their own on the same memory; its `longest` is its own."""
        view = State(0)
        view.tensors = {name: x[:n] for name, x in self.tensors.items()}
        view.longest = self.longest
        return view

    def copy_(self, other):
        """Take over the contents of `other` at this state's addresses (those a CUDA graph captured); caches may differ in size."""
        for name, x in self.tensors.items():
            mine, theirs = (t[:, : other.longest] if name in CACHES else t for t in (x, other.tensors[name]))
            mine.copy_(theirs)
        self.longest = other.longest
        return self

    def clear_(self):
        """Empty, as `init_state` made it."""
        for x in self.tensors.values():
            x.zero_()
        self.longest = 0
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

    @property
    def longest(self):
        return self.layers[0].longest

    def fork(self, n):
        return ModelState([s.fork(n) for s in self.layers])

    def rows(self, n):
        """The first n sequences of every layer, as `State.rows`."""
        return ModelState([s.rows(n) for s in self.layers])

    def copy_(self, other):
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.copy_(theirs)
        return self

    def clear_(self):
        for s in self.layers:
            s.clear_()
        return self

    def spread_(self, first, n):
        """Fork in place: each row of `first`, which is `rows(...)` of this state, becomes n neighbouring rows."""
        for mine, theirs in zip(self.layers, first.layers, strict=True):
            for name, x in theirs.tensors.items():
                for row in reversed(range(len(x) if n > 1 else 0)):  # the last first: nothing is overwritten before it is copied
                    mine.tensors[name][row * n : (row + 1) * n] = x[row].clone()
            mine.longest = theirs.longest
        return self

    def save(self, path, metadata=None, **extra):
        """Write the tensors (of caches the filled slots) and `extra` ones to a safetensors file; `metadata`: a dict of strings."""
        tensors = {
            f"{i}.{name}": (x[:, : s.longest] if name in CACHES else x).to("cpu", copy=True).contiguous()
            for i, s in enumerate(self.layers)
            for name, x in s.tensors.items()
        }
        save_file(tensors | extra, path, {**(metadata or {}), "longest": json.dumps([s.longest for s in self.layers])})

    def load(self, path):
        """Read a saved state into these tensors; caches may have more slots than were filled. ValueError names what differs."""
        with safe_open(path, "pt") as file:
            longest, names = json.loads(file.metadata()["longest"]), set(file.keys())
            places = {f"{i}.{name}": (name, x) for i, s in enumerate(self.layers) for name, x in s.tensors.items()}
            for key, (name, x) in places.items():
                saved = tuple(file.get_slice(key).get_shape()) if key in names else None
                mine, there = (list(shape or ()) for shape in (x.shape, saved))
                if name in CACHES and saved and there[1] <= mine[1]:
                    there[1] = mine[1]
                if mine != there:
                    raise ValueError(f"state {path}: tensor {key} has shape {saved}, this model's is {tuple(x.shape)}")
            for key, (name, x) in places.items():
                saved = file.get_tensor(key)
                (x[:, : saved.shape[1]] if name in CACHES else x).copy_(saved)
            for s, n in zip(self.layers, longest, strict=True):
                s.longest = n
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


class LayerNorm(nn.Module):
    """`kernels.layer_norm` with its weight and bias."""

    def __init__(self, dim, eps, bias=True):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x):
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)


class SplitLinear(nn.Linear):
    """A linear layer whose output comes in slices of `split` channels, in training a product each.

    The gradients of slices of one product are put side by side before the products of its backward can read them, in a kernel of 7
    of a step's 139 ms for SwiGLU's two (H200). A module of its own, because FSDP gathers the weight when a module is called.
    """

    def __init__(self, in_features, split, bias=True):
        super().__init__(in_features, sum(split), bias=bias)
        self.split = split

    def forward(self, x):
        if not torch.is_grad_enabled():
            return super().forward(x).split(self.split, dim=-1)
        biases = [None] * len(self.split) if self.bias is None else self.bias.split(self.split)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(self.weight.split(self.split), biases, strict=True))


def make_norm(config, dim):
    if config.norm == "layernorm":
        return LayerNorm(dim, config.norm_eps, config.bias)
    return RMSNorm(dim, config.norm_eps, unit_offset=config.norm == "rmsnorm1p")


def activate(x, name):
    return {"silu": F.silu, "sigmoid": torch.sigmoid}[name](x)


def zeros_wide(*shape, device, dtype):
    """An empty recurrent state: fp32, whatever the caches are in (fp64 for fp64)."""
    return torch.zeros(shape, device=device, dtype=torch.promote_types(dtype or torch.float32, torch.float32))


def init_conv(weight, bias=None):
    """PyTorch's default for a depthwise convolution: uniform within 1 / sqrt(width)."""
    for p in (weight, bias):
        if p is not None:
            nn.init.uniform_(p, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)


def check_conv(width):
    if width == 1:
        raise ConfigError("conv=1 sees the current token only: use at least 2, or 0 for no convolution")


@torch.no_grad()
def init_decay(A_log, dt_bias, dt_min=1e-3, dt_max=0.1):
    """Mamba's gates: A ~ U(1, 16), softplus(dt_bias) log-uniform in [dt_min, dt_max], memories of 1 to 1000 tokens."""
    A_log.uniform_(1, 16).log_()
    dt = torch.empty_like(dt_bias).uniform_(math.log(dt_min), math.log(dt_max)).exp()
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus


def _rope_tables(positions: torch.Tensor, theta: float, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angle = positions[..., None] * theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=dtype) / dim)
    return angle.cos(), angle.sin()


_rope_tables_op = torch.library.custom_op("hybrid::rope_tables", _rope_tables, mutates_args=())
_rope_tables_op.register_fake(_rope_tables)


def rope_tables(positions, theta, dim, dtype):
    """cos and sin of `position * theta^(-2i / dim)`, each `(B or 1, T, dim / 2)`, in fp32 or wider.

    One operator to a compiler, which would compute them anew for every element of q and k, forward and backward.
    """
    tables = _rope_tables_op if torch.compiler.is_compiling() else _rope_tables
    return tables(positions, theta, dim, torch.promote_types(dtype, torch.float32))


def rotary(*xs, positions, theta, dim):
    """Rotary embedding, half-split, on the first `dim` channels of each x: (x1 cos - x2 sin, x2 cos + x1 sin), the rest unchanged.

    xs `(B, T, H, D)`, positions `(B or 1, T)`; angles and product in fp32, cast back. Su et al. 2104.09864.
    """
    cos, sin = (u[:, :, None] for u in rope_tables(positions, theta, dim, xs[0].dtype))
    turned = []
    for x in xs:
        x1, x2 = wide(x[..., : dim // 2]), wide(x[..., dim // 2 : dim])
        turned.append(torch.cat([(x1 * cos - x2 * sin).to(x.dtype), (x2 * cos + x1 * sin).to(x.dtype), x[..., dim:]], dim=-1))
    return turned


def recur(op, *args, state, segment_ids, per_token=1, **options):
    """Run the sequence operator `op`, or for one token its step twin, keeping `state` (a tensor or None) up to date in place."""
    if state is None:
        return getattr(kernels, op)(*args, segment_ids=segment_ids, **options)[0]
    if args[0].shape[1] == per_token and segment_ids is None:
        return getattr(kernels, f"{op}_step")(*args, state=state, **options)
    out, new = getattr(kernels, op)(*args, initial_state=state, segment_ids=segment_ids, **options)
    state.copy_(new)
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Mixers

MIXERS = {}


def mixer(name, **preset):
    """Class decorator: make a `Mixer` available under `name` in the layer pattern, with other defaults for some of its options."""

    def register(cls):
        MIXERS[name] = cls, preset
        return cls

    return register


class Mixer(nn.Module):
    """One sequence mixer: `y = mixer(x)`, x and y `(B, T, n_embd)`, causal, each document on its own.

    A subclass writes `mix` and `init_state`, lists the operators it calls in `operators`, the parameters that weight decay must
    not touch in `no_decay`, and may override `reset_parameters` (called once, after the model's general initialisation) and
    `flops`. Keyword-only arguments of `__init__` are its options in the layer pattern, checked against their annotations.
    """

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
        """What a subclass defines: the mixing itself."""
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
@mixer("swa", window=512)
class Attention(Mixer):
    """Causal softmax attention with grouped key/value heads, QK-norm, RoPE on all, part or none of each head, an output gate.

        q, k, v = x W_q, x W_k, x W_v;  q, k <- rope(norm(q)), rope(norm(k));  y = (attention(q, k, v) * sigmoid(x W_g)) W_o

    `swa` is the same with a window: token i reads j with 0 <= i - j < window, and the document's first `keep_first` tokens. `sinks`
    adds a learned logit per head that takes attention and gives nothing (GPT-OSS); `gate` is Qwen3-Next's (2505.06708).
    `rope=partial` rotates the first `rope_fraction` of each head; `qk_norm=full` normalises all heads together (OLMo).
    """

    operators = ("softmax_attention",)
    no_decay = ("sinks",)

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
        qk_norm: bool | Literal["full"] = True,
        gate: bool = False,
        window: Positive | None = None,
        keep_first: Annotated[int, Field(ge=0)] = 0,
        sinks: bool = False,
    ):
        super().__init__()
        self.H = n_head or config.n_head
        self.Hk = n_kv_head or (config.n_kv_head if n_head is None else None) or self.H
        self.D = head_dim or config.head_dim or config.n_embd // self.H
        if self.H % self.Hk:
            raise ConfigError(f"n_head={self.H} is not a multiple of n_kv_head={self.Hk}")
        self.rope_dim = {"full": self.D, "partial": int(self.D * rope_fraction), "none": 0}[rope]
        if self.rope_dim % 2 or (rope == "partial" and not self.rope_dim):
            raise ConfigError(f"RoPE turns pairs of channels: {self.rope_dim} of head_dim={self.D} is not even and positive")
        if keep_first and window is None:
            raise ConfigError(f"keep_first={keep_first} has no effect without a window")
        self.theta, self.dropout = rope_theta or config.rope_theta, config.dropout
        rows = [self.H * self.D, self.Hk * self.D, self.Hk * self.D, self.H * self.D]  # q, k, v, gate
        self.split = rows if gate else rows[:3]
        self.qkv_proj = nn.Linear(config.n_embd, sum(self.split), bias=config.bias)
        self.out_proj = nn.Linear(self.H * self.D, config.n_embd, bias=config.bias)
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm, self.k_norm = (make_norm(config, self.D * (h if qk_norm == "full" else 1)) for h in (self.H, self.Hk))
        self.sinks = nn.Parameter(torch.zeros(self.H)) if sinks else None
        self.window, self.keep_first = window, keep_first

    def mix(self, x, *, segment_ids, positions, state, aux):
        B, T, _ = x.shape
        q, k, v, *gate = self.qkv_proj(x).split(self.split, dim=-1)
        q, k = (self.q_norm(q), self.k_norm(k)) if self.qk_norm == "full" else (q, k)
        q, k, v = q.view(B, T, self.H, self.D), k.view(B, T, self.Hk, self.D), v.view(B, T, self.Hk, self.D)
        q, k = (self.q_norm(q), self.k_norm(k)) if self.qk_norm is True else (q, k)
        if self.rope_dim:
            q, k = rotary(q, k, positions=positions, theta=self.theta, dim=self.rope_dim)
        y = self.attend(x, q, k, v, positions, segment_ids, state, aux).reshape(B, T, -1)
        return self.out_proj(y * gate[0].sigmoid() if gate else y)

    def attend(self, x, q, k, v, positions, segment_ids, state, aux):
        options = {"window": self.window, "keep_first": self.keep_first, "sinks": self.sinks}
        if state is None:
            dropout_p = self.dropout if self.training else 0.0
            return kernels.softmax_attention(q, k, v, segment_ids=segment_ids, dropout_p=dropout_p, **options)
        self.reserve(state, x.shape[1])
        if x.shape[1] == 1 and segment_ids is None:
            caches = {"k_cache": state.k, "v_cache": state.v, "length": state.length, "longest": state.longest + 1}
            return kernels.softmax_attention_step(q, k, v, **caches, **options)
        past = self.past(state, "k", "v")
        y = kernels.softmax_attention(q, k, v, past=past, segment_ids=segment_ids, **options)
        self.append(state, segment_ids, k=k, v=v)
        return y

    def backend(self, device_type):
        """As of any mixer; for plain causal attention it depends on whether a row holds packed documents, so both are named."""
        masks = {"window": self.window, "sinks": getattr(self, "sinks", None)}
        calls = [(op, masks | {"segment_ids": ids}) for op in self.operators for ids in (None, "packed")]
        return "+".join(sorted({kernels.backend_of(op, device_type, **options) for op, options in calls}))

    def init_state(self, batch, max_len, device=None, dtype=None):
        slots = max_len if self.window is None else min(max_len, self.keep_first + self.window)
        k, v = (torch.zeros(batch, slots, self.Hk, self.D, device=device, dtype=dtype) for _ in range(2))
        return State(batch, device, k=k, v=v)

    def reserve(self, state, T):
        if self.window is None and state.longest + T > state.k.shape[1]:
            raise ValueError(f"the state holds at most {state.k.shape[1]} tokens, {state.longest} + {T} were asked of it")

    def past(self, state, *names):
        """What the operators take as `past`: the filled part of the caches, the position in each slot, and the length."""
        if not state.longest:
            return None
        size = state.k.shape[1]
        positions = kernels.cache_positions(state.length, size, self.keep_first)
        return *(state.tensors[n][:, : state.longest] for n in names), positions[:, : state.longest], state.length

    def append(self, state, segment_ids, **new):
        """Write the tokens that later ones may read into their slots: of packed documents the last one's, of a window its own."""
        B, T = next(iter(new.values())).shape[:2]
        size = state.k.shape[1]
        ids = torch.ones(B, T, dtype=torch.int32, device=state.length.device) if segment_ids is None else segment_ids
        run, valid = kernels.segment_runs(ids)
        position = kernels.document_positions(ids, state.length)
        kept = (run == run[:, -1:]) & valid
        end = torch.where(kept, position + 1, 0).amax(1, keepdim=True)  # later tokens replace those a ring's length before them
        kept &= (position >= end - (size - self.keep_first)) | (position < self.keep_first)
        # Nothing here waits for the device, and no shape depends on what is kept, so that a CUDA graph can hold it: other tokens
        # write once more what the row's last one writes, and a row without tokens what its first slot has.
        rows, any_token = torch.arange(B, device=run.device)[:, None], valid.any(1, keepdim=True)
        source = torch.where(kept, torch.arange(T, device=run.device), valid.sum(1, keepdim=True) - 1).clamp(min=0)
        slots = kernels.cache_slots(position, size, self.keep_first).gather(1, source) * any_token
        for name, x in new.items():
            cache = state.tensors[name]
            written = any_token.view(B, *[1] * (x.ndim - 1))
            cache[rows, slots] = torch.where(written, x[rows, source].to(cache.dtype), cache[:, :1])

    def flops(self, T):
        """4 D per head and pair for scores and values, over the pairs that are seen."""
        w = T if self.window is None else min(T, self.window + self.keep_first)
        return 4 * self.H * self.D * (w * (T - w) + w * (w + 1) / 2) / T


@mixer("dsa")
class SparseAttention(Attention):
    """DeepSeek sparse attention (2512.02556) over grouped-query attention: an indexer ranks the keys, each query reads the best.

        I_ts = sum_j w_tj relu(q^I_tj k^I_s / sqrt(index_dim));  q^I = x W_q, k^I = layernorm(x W_k), w = x W_w / sqrt(index_heads)

    Each query reads its `local` nearest keys and the highest-scored others, `top_k` in all, one set for all heads, without dropout.
    `mode=dense` reads all keys: for training before the indexer is of use. Half of its channels are rotated unless `rope=none`.

    Where `learns` is set, training adds to `aux["indexer_kl"]` the sum over tokens of KL(attention || softmax(I)) over what each
    query reads. The indexer's input is detached and attention a constant there: that loss reaches the indexer alone, and the
    language model's all but the indexer.
    """

    operators = ("sparse_attention",)
    learns = False  # train.py's setting `indexer`

    def __init__(
        self,
        config,
        layer,
        *,
        top_k: Positive = 256,
        local: Annotated[int, Field(ge=0)] = 16,
        mode: Literal["sparse", "dense"] = "sparse",
        index_heads: Positive = 8,
        index_dim: Annotated[int, Field(ge=4, multiple_of=4)] = 32,
        **attention,
    ):
        super().__init__(config, layer, **attention)
        if self.window is not None or self.keep_first or self.sinks is not None:
            raise ConfigError("window, keep_first and sinks have no effect: a selection takes the place of a window")
        if local > top_k:
            raise ConfigError(f"local={local} is more than top_k={top_k}, which counts it: use at most {top_k}")
        self.top_k, self.local, self.mode, self.J, self.d = top_k, local, mode, index_heads, index_dim
        self.index_rope_dim = index_dim // 2 if self.rope_dim else 0
        self.index_q_proj = nn.Linear(config.n_embd, index_heads * index_dim, bias=False)
        self.index_k_proj = nn.Linear(config.n_embd, index_dim, bias=False)
        self.index_k_norm = LayerNorm(index_dim, 1e-6)
        self.index_w_proj = nn.Linear(config.n_embd, index_heads, bias=False)

    def index(self, x, positions):
        """The indexer's queries `(B, T, J, d)`, keys `(B, T, d)` and weights `(B, T, J)`."""
        x = x.detach()
        q = self.index_q_proj(x).unflatten(-1, (self.J, self.d))
        k = self.index_k_norm(self.index_k_proj(x))[:, :, None]
        if self.index_rope_dim:
            q, k = rotary(q, k, positions=positions, theta=self.theta, dim=self.index_rope_dim)
        return q, k[:, :, 0], wide(self.index_w_proj(x)) * self.J**-0.5

    def indexer_parameters(self):
        return [p for name, p in self.named_parameters() if name.startswith("index_")]

    def attend(self, x, q, k, v, positions, segment_ids, state, aux):
        learns = self.learns and self.training and state is None
        if self.mode == "dense" and state is None and not learns:
            return kernels.softmax_attention(q, k, v, segment_ids=segment_ids)
        index, options = self.index(x, positions), {"top_k": self.top_k, "local": self.local}
        if learns:
            read = {"top_k": None} if self.mode == "dense" else options
            kl = kernels.indexer_kl(q.detach(), k.detach(), *index, segment_ids=segment_ids, **read)
            aux["indexer_kl"] = aux.get("indexer_kl", 0.0) + kl.sum()
        if self.mode == "dense":
            if state is None:
                return kernels.softmax_attention(q, k, v, segment_ids=segment_ids)
            options["top_k"] = state.k.shape[1] + x.shape[1]
        if state is None:
            return kernels.sparse_attention(q, k, v, *index, segment_ids=segment_ids, **options)
        self.reserve(state, x.shape[1])
        if x.shape[1] == 1 and segment_ids is None:
            caches = {"k_cache": state.k, "v_cache": state.v, "index_cache": state.index_k}
            return kernels.sparse_attention_step(
                q, k, v, *index, **caches, length=state.length, longest=state.longest + 1, **options
            )
        past = self.past(state, "k", "v", "index_k")
        y = kernels.sparse_attention(q, k, v, *index, past=past, segment_ids=segment_ids, **options)
        self.append(state, segment_ids, k=k, v=v, index_k=index[1])
        return y

    def init_state(self, batch, max_len, device=None, dtype=None):
        state = super().init_state(batch, max_len, device, dtype)
        state.tensors["index_k"] = torch.zeros(batch, max_len, self.d, device=device, dtype=dtype)
        return state

    def flops(self, T):
        k = min(T, self.top_k) if self.mode == "sparse" else T
        reads = 4 * self.H * self.D * (k * (T - k) + k * (k + 1) / 2) / T
        return reads + (T * self.J * self.d if self.mode == "sparse" else 0)  # the indexer scores every pair


@mixer("mla")
class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2 2405.04434): keys and values of all heads come from one small latent per token.

        c = norm(x W_c);  k_h = [c W_k,h | rope(x W_r)];  v_h = c W_v,h;  q_h = [x W_q,h | rope(x W_q',h)]

    `q_rank` gives the queries a latent of their own; `rope=none` leaves the shared part unrotated (Kimi Linear). The cache holds
    the latents, `kv_rank + rope_dim` per token: one token reads it with W_k applied to its queries and W_v to what they read.
    """

    no_decay = ()
    at_once = 2**29  # bytes of keys and values that are made of a cache at once: 6 heads of 192 and 128 for 131,072 tokens

    def __init__(
        self,
        config,
        layer,
        *,
        n_head: Positive | None = None,
        kv_rank: Positive = 64,
        q_rank: Positive | None = None,
        nope_dim: Positive = 32,
        rope_dim: Annotated[int, Field(ge=2, multiple_of=2)] = 16,
        v_dim: Positive = 32,
        rope: Literal["full", "none"] = "full",
        rope_theta: Annotated[float, Field(gt=0)] | None = None,
        norm_eps: Annotated[float, Field(gt=0)] | None = None,
    ):
        Mixer.__init__(self)
        self.H, self.R, self.nope, self.V = n_head or config.n_head, kv_rank, nope_dim, v_dim
        self.split, self.rope, self.theta = [kv_rank, rope_dim], rope == "full", rope_theta or config.rope_theta
        self.window, self.keep_first, self.dropout, eps = None, 0, config.dropout, norm_eps or config.norm_eps
        queries = self.H * (nope_dim + rope_dim)
        self.q_a_proj = nn.Linear(config.n_embd, q_rank, bias=config.bias) if q_rank else None
        self.q_a_norm = RMSNorm(q_rank, eps) if q_rank else None
        self.q_proj = nn.Linear(q_rank or config.n_embd, queries, bias=False)
        self.kv_a_proj = nn.Linear(config.n_embd, kv_rank + rope_dim, bias=config.bias)
        self.kv_a_norm = RMSNorm(kv_rank, eps)
        self.kv_b_proj = nn.Linear(kv_rank, self.H * (nope_dim + v_dim), bias=False)  # per head: W_k, W_v
        self.out_proj = nn.Linear(self.H * v_dim, config.n_embd, bias=config.bias)

    def mix(self, x, *, segment_ids, positions, state, aux):
        B, T, _ = x.shape
        q = self.q_proj(x if self.q_a_proj is None else self.q_a_norm(self.q_a_proj(x))).view(B, T, self.H, -1)
        latent, shared = self.kv_a_proj(x).split(self.split, dim=-1)
        latent, shared = self.kv_a_norm(latent), shared[:, :, None]
        q, q_shared = q.split([self.nope, self.split[1]], dim=-1)
        if self.rope:
            q_shared, shared = rotary(q_shared, shared, positions=positions, theta=self.theta, dim=self.split[1])
        scale = (self.nope + self.split[1]) ** -0.5
        if state is None:
            k, v = self.expand(self.kv_b_proj(latent), shared)
            options = {"segment_ids": segment_ids, "dropout_p": self.dropout if self.training else 0.0}
            o = kernels.softmax_attention(torch.cat([q, q_shared], -1), k, v, scale=scale, **options)
            return self.out_proj(o.reshape(B, T, -1))
        self.reserve(state, T)
        new = torch.cat([latent[:, :, None], shared], -1)
        if T == 1 and segment_ids is None:
            o = self.step(q, q_shared, new, scale, state)
        else:
            o = self.read(torch.cat([q, q_shared], -1), new, self.past(state, "k"), scale, segment_ids)
            self.append(state, segment_ids, k=new)
        return self.out_proj(o.reshape(B, T, -1))

    def expand(self, kv, shared):
        """Keys and values `(B, T, heads, .)` of what W_k and W_v make of the latents, kv `(B, T, heads (nope + V))`."""
        k, v = kv.unflatten(-1, (-1, self.nope + self.V)).split([self.nope, self.V], dim=-1)
        return torch.cat([k, shared.expand(*k.shape[:3], -1)], -1), v

    def read(self, q, new, past, scale, segment_ids):
        """Several tokens: latents, new and cached `(B, ., 1, R + rope)`, become keys and values, a few heads at a time.

        Against the latents heads would be too wide for the kernels; keys of all heads of a long cache are tens of times its size.
        """
        latents, weight = [x.to(q.dtype) for x in ((new,) if past is None else (new, past[0]))], self.kv_b_proj.weight
        size = sum(x[..., 0].numel() for x in latents) * (self.nope + self.split[1] + self.V) * q.element_size()  # of one head
        heads, outs = min(self.H, max(1, self.at_once // size)), []
        for q_part, w in zip(q.split(heads, dim=2), weight.split(heads * (self.nope + self.V)), strict=True):
            (k, v), *cached = (self.expand(F.linear(x[:, :, 0, : self.R], w.to(q.dtype)), x[..., self.R :]) for x in latents)
            there = (*cached[0], *past[1:]) if cached else None
            outs.append(kernels.softmax_attention(q_part, k, v, scale=scale, past=there, segment_ids=segment_ids))
        return torch.cat(outs, dim=2)

    def step(self, q, q_shared, new, scale, state):
        """One token: W_k goes to its queries and W_v to what they read, so that the cache is read as is, as one key head."""
        w_k, w_v = self.kv_b_proj.weight.to(q.dtype).view(self.H, -1, self.R).split([self.nope, self.V], dim=1)
        q = torch.cat([torch.einsum("bthn,hnr->bthr", q, w_k), q_shared], -1)
        caches = {"k_cache": state.k, "v_cache": state.k[..., : self.R], "length": state.length, "longest": state.longest + 1}
        o = kernels.softmax_attention_step(q, new, new[..., : self.R], scale=scale, **caches)
        return torch.einsum("bthr,hvr->bthv", o, w_v)

    def init_state(self, batch, max_len, device=None, dtype=None):
        return State(batch, device, k=torch.zeros(batch, max_len, 1, sum(self.split), device=device, dtype=dtype))

    def flops(self, T):
        return (T + 1) * self.H * (self.nope + self.split[1] + self.V)


FEATURE_MAPS = {"elu1": lambda x: F.elu(x) + 1, "relu": F.relu, "silu": F.silu, "identity": lambda x: x}


@mixer("linear")
@mixer("retnet", feature_map="identity", normalize=False, decay="retnet", rope=True, gate="silu", expand_v=2)
@mixer("lightning", feature_map="silu", value_map="silu", normalize=False, decay="lightning", norm="all", gate="sigmoid", scale=1)
class LinearAttention(Mixer):
    """Linear attention: `S_t = e^g S_{t-1} + f(k_t)^T v_t`, `o_t = scale f(q_t) S_t`, its scale kept in check in one of two ways.

    `normalize` divides by f(q_t) z_t, z the running sum of f(k) (Katharopoulos 2006.16236); otherwise each head's output is
    RMS-normalised (`norm=head`), or all heads' together (`norm=all`). `decay` is a constant per head: none, RetNet's 1 - 2^(-5-h)
    (2307.08621, with rotary q and k and a swish gate), or lightning's e^-slope, which forgets less in later layers (2501.08313).
    `feature_map` f applies to q and k, `value_map` to v. `conv` taps of a short convolution over q, k and v come before all of it.
    """

    operators = ("linear_attention",)
    no_decay = ("conv_weight",)

    def __init__(
        self,
        config,
        layer,
        *,
        n_head: Positive | None = None,
        head_dim: Positive | None = None,
        expand_v: Positive = 1,
        feature_map: Literal["elu1", "relu", "silu", "identity"] = "elu1",
        value_map: Literal["silu", "identity"] = "identity",
        normalize: bool = True,
        decay: Literal["none", "retnet", "lightning"] = "none",
        rope: bool = False,
        norm: Literal["head", "all"] = "head",
        gate: Literal["none", "silu", "sigmoid"] = "none",
        conv: Annotated[int, Field(ge=0)] = 0,
        scale: Annotated[float, Field(gt=0)] | None = None,
        norm_eps: Annotated[float, Field(gt=0)] | None = None,
    ):
        super().__init__()
        self.H = n_head or config.n_head
        self.K = head_dim or config.head_dim or config.n_embd // self.H
        self.V, self.normalize, self.scale, self.eps = expand_v * self.K, normalize, scale, norm_eps or config.norm_eps
        self.f, self.f_v = FEATURE_MAPS[feature_map], FEATURE_MAPS[value_map]
        if normalize and feature_map in ("silu", "identity"):
            raise ConfigError(
                f"normalize divides by a sum of features, which {feature_map} lets be 0: use elu1 or relu, or normalize=false"
            )
        if normalize and decay != "none":
            raise ConfigError(f"decay={decay} goes with normalize=false: the published forms normalise the output instead")
        if rope and self.K % 2:
            raise ConfigError(f"RoPE turns pairs of channels: head_dim={self.K} is not even")
        check_conv(conv)
        self.theta, self.rope_dim = config.rope_theta, self.K if rope else 0
        operator = "normalized_linear_attention" if normalize else "linear_attention"
        self.operators = ("causal_conv1d", operator) if conv else (operator,)
        keys, values = self.H * self.K, self.H * self.V
        self.split = [keys, keys, values, values] if gate != "none" else [keys, keys, values]  # q, k, v, gate
        together = [sum(self.split[:3]), *self.split[3:]]  # those of the convolution
        self.in_proj = SplitLinear(config.n_embd, together if conv else self.split, bias=config.bias)
        self.conv_weight = nn.Parameter(torch.empty(sum(self.split[:3]), conv)) if conv else None
        self.out_proj = nn.Linear(values, config.n_embd, bias=config.bias)
        self.norm = None if normalize else RMSNorm(self.V if norm == "head" else values, self.eps)
        self.norm_all, self.gate = norm == "all", gate
        h = torch.arange(self.H, dtype=torch.float64)
        g = {
            "none": None,
            "retnet": torch.log1p(-(2.0 ** (-5 - h))),
            "lightning": -(2.0 ** (-8 * (h + 1) / self.H)) * (1 - layer / (config.n_layer - 1 + 1e-5) + 1e-5),
        }[decay]
        self.register_buffer("g", None if g is None else g.float(), persistent=False)

    def reset_parameters(self):
        if self.conv_weight is not None:
            init_conv(self.conv_weight)

    def mix(self, x, *, segment_ids, positions, state, aux):
        B, T, _ = x.shape
        if self.conv_weight is not None:
            qkv, *gate = self.in_proj(x)
            options = {"split": self.split[:3], "state": None if state is None else state.conv, "segment_ids": segment_ids}
            q, k, v = recur("causal_conv1d", qkv, self.conv_weight, **options)
        else:
            q, k, v, *gate = self.in_proj(x)
        q, k, v = q.view(B, T, self.H, self.K), k.view(B, T, self.H, self.K), self.f_v(v.view(B, T, self.H, self.V))
        if self.rope_dim:
            q, k = rotary(q, k, positions=positions, theta=self.theta, dim=self.rope_dim)
        q, k = self.f(q), self.f(k)
        context = {"state": None if state is None else state.recurrent, "segment_ids": segment_ids}
        if self.normalize:
            o = recur("normalized_linear_attention", q, k, v, **context).flatten(-2)
            return self.out_proj(o * activate(gate[0], self.gate) if gate else o)
        o = recur("linear_attention", q, k, v, self.g, scale=self.scale, **context)
        o = o.flatten(-2) if self.norm_all else o
        if gate:
            o = kernels.gated_rms_norm(o, gate[0].view(o.shape), self.norm.weight, self.eps, activation=self.gate)
        else:
            o = self.norm(o)
        return self.out_proj(o.reshape(B, T, -1))

    def init_state(self, batch, max_len, device=None, dtype=None):
        recurrent = zeros_wide(batch, self.H, self.K, self.V + self.normalize, device=device, dtype=dtype)
        if self.conv_weight is None:
            return State(batch, device, recurrent=recurrent)
        conv = torch.zeros(batch, self.conv_weight.shape[1] - 1, sum(self.split[:3]), device=device, dtype=dtype)
        return State(batch, device, conv=conv, recurrent=recurrent)

    def flops(self, T, chunk=64):
        conv = 0 if self.conv_weight is None else 2 * self.conv_weight.numel()
        return self.H * (4 * self.K * self.V + 2 * chunk * (self.K + self.V)) + conv


@mixer("deltanet", decay="none", gate="none")
@mixer("gdn")
@mixer("kda", decay="channel", gate="sigmoid", low_rank=True)
class DeltaRule(Mixer):
    """DeltaNet (2406.06484), Gated DeltaNet (2412.06464, as in Qwen3-Next) and Kimi Delta Attention (2510.26692).

        q, k, v = silu(conv(x W));  q, k <- q / |q|, k / |k|;  beta = sigmoid(x W_b);  g = -exp(A_log) softplus(f(x) + dt_bias)
        S_t = e^{g_t} S_{t-1} + k_t^T beta_t (v_t - k_t e^{g_t} S_{t-1});  o_t = q_t S_t / sqrt(K);  y = (norm(o) * act(z)) W_o

    `decay`: none (deltanet), per head and token (gdn), per key channel too (kda). `n_head` value heads share `n_key_head` key heads
    in groups. `neg_eigval` doubles beta, so that a state can flip sign (2411.12537). `steps` writes several key/value pairs per
    token (DeltaProduct, 2502.10297). `low_rank` computes decay and gate through `head_dim` channels. `conv=0` leaves it out.
    """

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
        conv: Annotated[int, Field(ge=0)] = 4,
        decay: Literal["none", "head", "channel"] = "head",
        gate: Literal["none", "silu", "sigmoid"] = "silu",
        low_rank: bool = False,
        neg_eigval: bool = False,
        steps: Positive = 1,
        norm_eps: Annotated[float, Field(gt=0)] | None = None,
    ):
        super().__init__()
        self.H = n_head or config.n_head
        self.Hk = n_key_head or self.H
        self.K = head_dim or config.head_dim or config.n_embd // self.H
        self.V = value_head_dim or self.K
        if self.H % self.Hk:
            raise ConfigError(f"n_head={self.H} value heads are not a multiple of n_key_head={self.Hk}")
        check_conv(conv)
        if low_rank and decay == "head":
            raise ConfigError("low_rank=true goes with decay=channel or none: a decay per head is as small as it can be")
        self.beta_max, self.eps, self.steps = 2.0 if neg_eigval else 1.0, norm_eps or config.norm_eps, steps
        self.decay, self.gate, self.low_rank = decay, gate, low_rank
        self.operator = "channel_delta_rule" if decay == "channel" else "delta_rule"
        self.operators = (self.operator,) if conv == 0 else ("causal_conv1d", self.operator)
        keys, values = self.Hk * self.K, self.H * self.V
        self.split = [keys, steps * keys, steps * values]  # q, k, v
        full_gate = gate != "none" and not low_rank
        rows = [*([sum(self.split)] if conv else self.split), *([values] if full_gate else [])]
        self.in_proj = SplitLinear(config.n_embd, rows, bias=config.bias)
        self.ba_proj = nn.Linear(config.n_embd, self.H * (steps + (decay == "head")), bias=config.bias)  # beta, decay
        self.conv_weight = nn.Parameter(torch.empty(sum(self.split), conv)) if conv else None
        decays = {"none": 0, "head": self.H, "channel": self.H * self.K}[decay]
        self.A_log = nn.Parameter(torch.empty(self.H)) if decays else None
        self.dt_bias = nn.Parameter(torch.empty(decays)) if decays else None
        if decay == "channel":
            self.f_a_proj = nn.Linear(config.n_embd, self.K if low_rank else decays, bias=False)
            self.f_b_proj = nn.Linear(self.K, decays, bias=False) if low_rank else nn.Identity()
        if low_rank and gate != "none":
            self.g_a_proj, self.g_b_proj = nn.Linear(config.n_embd, self.K, bias=False), nn.Linear(self.K, values, bias=False)
        self.norm = RMSNorm(self.V, self.eps)
        self.out_proj = nn.Linear(values, config.n_embd, bias=config.bias)

    def reset_parameters(self):
        if self.conv_weight is not None:
            init_conv(self.conv_weight)
        if self.A_log is not None:
            init_decay(self.A_log, self.dt_bias)

    def mix(self, x, *, segment_ids, positions, state, aux):
        B, T, _ = x.shape
        n, ids = self.steps, segment_ids
        if self.conv_weight is not None:
            qkv, *z = self.in_proj(x)
            conv, heads = None if state is None else state.conv, ((1 + n) * self.Hk, self.K)  # those of q and k
            options = {"activation": "silu", "l2_heads": heads, "split": self.split, "state": conv, "segment_ids": ids}
            q, k, v = recur("causal_conv1d", qkv, self.conv_weight, **options)
        else:
            q, k, v, *z = self.in_proj(x)
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        q, k = (u.reshape(B, -1, self.Hk, self.K) for u in (q, k))  # k (B, n T, Hk, K)
        if self.conv_weight is None:
            q, k = kernels.l2_norm(q), kernels.l2_norm(k)
        b, a = wide(self.ba_proj(x)).split([n * self.H, self.ba_proj.out_features - n * self.H], dim=-1)
        beta, g = self.beta_max * b.reshape(B, -1, self.H).sigmoid(), self.log_decay(x, a)
        if n > 1:  # n writes a token: the first decays, the last is followed by the read
            q = q.repeat_interleave(n, dim=1)
            g = None if g is None else F.pad(g[:, :, None], (0, 0) * (g.ndim - 2) + (0, n - 1)).flatten(1, 2)
            ids = None if ids is None else ids.repeat_interleave(n, dim=1)
        recurrent = None if state is None else state.recurrent
        v = v.reshape(B, -1, self.H, self.V)
        o = recur(self.operator, q, k, v, g, beta, state=recurrent, segment_ids=ids, per_token=n)
        o = o[:, n - 1 :: n]
        if self.gate == "none":
            return self.out_proj(self.norm(o).reshape(B, T, -1))
        z = self.g_b_proj(self.g_a_proj(x)) if self.low_rank else z[0]
        o = kernels.gated_rms_norm(o, z.view(B, T, self.H, self.V), self.norm.weight, self.eps, activation=self.gate)
        return self.out_proj(o.reshape(B, T, -1))

    def log_decay(self, x, a):
        """g `(B, T, H)`, or `(B, T, H, K)` per key channel, in fp32; None without decay."""
        if self.decay == "none":
            return None
        if self.decay == "head":
            return -wide(self.A_log).exp() * F.softplus(a + wide(self.dt_bias))
        f = wide(self.f_b_proj(self.f_a_proj(x))) + wide(self.dt_bias)
        return -wide(self.A_log).exp()[:, None] * F.softplus(f.unflatten(-1, (self.H, self.K)))

    def init_state(self, batch, max_len, device=None, dtype=None):
        recurrent = zeros_wide(batch, self.H, self.K, self.V, device=device, dtype=dtype)
        if self.conv_weight is None:
            return State(batch, device, recurrent=recurrent)
        conv = torch.zeros(batch, self.conv_weight.shape[1] - 1, sum(self.split), device=device, dtype=dtype)
        return State(batch, device, conv=conv, recurrent=recurrent)

    def flops(self, T, chunk=64):
        K, V = self.K, self.V  # chunked form: state products, scores against keys and values, the triangular solve
        conv = 0 if self.conv_weight is None else 2 * self.conv_weight.numel()
        return self.steps * self.H * (6 * K * V + 4 * chunk * (K + V) + chunk**2 / 3) + conv


@mixer("mamba2")
class Mamba2(Mixer):
    """Mamba-2 (2405.21060): linear attention whose keys B, queries C and decay come from the input, grouped as in GQA.

        z, xBC, dt = x W_in;  x, B, C = silu(conv(xBC));  dt = clamp(softplus(dt + dt_bias));  a = exp(-exp(A_log) dt)
        S_t = a_t S_{t-1} + B_t^T (dt_t x_t);  y_t = C_t S_t + D x_t;  out = RMSNorm(y * silu(z)) W_out

    `expand * n_embd / head_dim` heads share `groups` pairs B, C of width `d_state`; the norm runs over `norm_groups` groups of
    channels (default: `groups`).
    """

    operators = ("causal_conv1d", "linear_attention")
    no_decay = ("conv_weight", "conv_bias", "A_log", "dt_bias", "D")

    def __init__(
        self,
        config,
        layer,
        *,
        expand: Positive = 2,
        head_dim: Positive = 64,
        d_state: Positive = 128,
        groups: Positive = 1,
        norm_groups: Positive | None = None,
        conv: Annotated[int, Field(ge=2)] = 4,
        conv_bias: bool = True,
        dt_min: Annotated[float, Field(gt=0)] = 1e-3,
        dt_max: Annotated[float, Field(gt=0)] = 0.1,
        dt_limit_min: Annotated[float, Field(ge=0)] = 0.0,
        dt_limit_max: Annotated[float, Field(gt=0)] | None = None,
    ):
        super().__init__()
        inner = expand * config.n_embd
        self.G, self.N, self.P, self.H = groups, d_state, head_dim, inner // head_dim
        if inner % head_dim or self.H % groups:
            raise ConfigError(
                f"expand * n_embd = {inner} channels must be a whole number of heads of head_dim={head_dim}, "
                f"and the heads a multiple of groups={groups}"
            )
        self.norm_groups = norm_groups or groups
        if inner % self.norm_groups:
            raise ConfigError(f"norm_groups={self.norm_groups} does not divide {inner} channels")
        if dt_min > dt_max or (dt_limit_max is not None and dt_limit_min > dt_limit_max):
            raise ConfigError("dt_min must not be above dt_max, nor dt_limit_min above dt_limit_max")
        self.dt_range, self.dt_limit, self.eps = (dt_min, dt_max), (dt_limit_min, dt_limit_max), config.norm_eps
        self.split = [inner, groups * d_state, groups * d_state]  # x, B, C
        self.in_proj = SplitLinear(config.n_embd, [inner, sum(self.split), self.H], bias=config.bias)  # z, xBC, dt
        self.conv_weight = nn.Parameter(torch.empty(sum(self.split), conv))
        self.conv_bias = nn.Parameter(torch.empty(sum(self.split))) if conv_bias else None
        self.A_log, self.dt_bias, self.D = (nn.Parameter(torch.empty(self.H)) for _ in range(3))
        self.norm = RMSNorm(inner, config.norm_eps)
        self.out_proj = nn.Linear(inner, config.n_embd, bias=config.bias)

    def reset_parameters(self):
        init_conv(self.conv_weight, self.conv_bias)
        init_decay(self.A_log, self.dt_bias, *self.dt_range)
        nn.init.ones_(self.D)

    def mix(self, x, *, segment_ids, positions, state, aux):
        B, T, _ = x.shape
        conv_state, recurrent = (None, None) if state is None else (state.conv, state.recurrent)
        z, xbc, dt = self.in_proj(x)
        options = {"activation": "silu", "split": self.split, "state": conv_state, "segment_ids": segment_ids}
        u, k, q = recur("causal_conv1d", xbc, self.conv_weight, self.conv_bias, **options)
        u, k, q = u.view(B, T, self.H, self.P), k.view(B, T, self.G, self.N), q.view(B, T, self.G, self.N)
        dt = F.softplus(wide(dt) + wide(self.dt_bias)).clamp(*self.dt_limit)
        g, v = -wide(self.A_log).exp() * dt, dt[..., None] * wide(u)
        y = recur("linear_attention", q, k, v, g, scale=1.0, state=recurrent, segment_ids=segment_ids)
        y = (y + wide(self.D)[:, None] * wide(u)).to(x.dtype).reshape(B, T, self.norm_groups, -1)
        weight = self.norm.weight.view(self.norm_groups, -1)
        y = kernels.gated_rms_norm(y, z.reshape(y.shape), weight, self.eps, gate_first=True)
        return self.out_proj(y.reshape(B, T, -1))

    def init_state(self, batch, max_len, device=None, dtype=None):
        conv = torch.zeros(batch, self.conv_weight.shape[1] - 1, sum(self.split), device=device, dtype=dtype)
        return State(batch, device, conv=conv, recurrent=zeros_wide(batch, self.H, self.N, self.P, device=device, dtype=dtype))

    def flops(self, T, chunk=64):
        scores = 2 * chunk * self.N * self.G / self.H  # once per group
        return self.H * (4 * self.N * self.P + 2 * chunk * self.P + scores) + 2 * self.conv_weight.numel()


# ----------------------------------------------------------------------------------------------------------------------
# Block and model


class SwiGLU(nn.Module):
    """`(silu(x W_gate) * (x W_up)) W_down`. Shazeer 2002.05202."""

    def __init__(self, config):
        super().__init__()
        width = config.n_ffn or 64 * math.ceil(8 * config.n_embd / 3 / 64)
        self.gate_up_proj = SplitLinear(config.n_embd, [width, width], bias=config.bias)
        self.down_proj = nn.Linear(width, config.n_embd, bias=config.bias)

    def forward(self, x):
        gate, up = self.gate_up_proj(x)
        return self.down_proj(F.silu(gate) * up)


def gelu(x):
    """GELU's tanh form, x (1 + tanh u) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), which is x sigmoid(2 u)."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    # Compiled as written: 19 and 30 instructions an element forward and backward (sm_90), with the tanh 28 and 37.
    h, c = x.to(torch.promote_types(x.dtype, torch.float32)), 2 * math.sqrt(2 / math.pi)
    return (h * torch.sigmoid(h * (c + 0.044715 * c * h * h))).to(x.dtype)


class MLP(nn.Module):
    """`act(x W_up) W_down`: GELU in its tanh form (GPT-2), GELU itself, x Phi(x) (nanoGPT), or relu(x)^2 (Nemotron)."""

    def __init__(self, config, activation):
        super().__init__()
        width = config.n_ffn or 4 * config.n_embd
        self.activation = activation
        self.up_proj = nn.Linear(config.n_embd, width, bias=config.bias)
        self.down_proj = nn.Linear(width, config.n_embd, bias=config.bias)

    def forward(self, x):
        return self.down_proj(ACTIVATIONS[self.activation](self.up_proj(x)))


ACTIVATIONS = {"gelu": gelu, "gelu_exact": F.gelu, "relu2": lambda x: F.relu(x).square()}
FFNS = {"swiglu": SwiGLU} | {name: functools.partial(MLP, activation=name) for name in ACTIVATIONS}


def options_of(cls):
    """The options of a mixer class by name: its keyword-only arguments, and its base's where it passes `**others` on to it."""
    own = inspect.signature(cls).parameters.values()
    inherited = options_of(cls.__base__) if any(p.kind is p.VAR_KEYWORD for p in own) else {}
    return inherited | {p.name: p for p in own if p.kind is p.KEYWORD_ONLY}


def unknown_mixer(name):
    """The line for a name in the layer pattern that is no mixer's, with the nearest one that is."""
    names = sorted([*MIXERS, "mlp"])
    near = difflib.get_close_matches(name, names, n=1)
    hint = f": did you mean {near[0]!r}?" if near else ""
    return f"unknown mixer {name!r}{hint} (possible: {', '.join(names)})"


def build_mixer(spec, config, layer):
    """The mixer a pattern item asks for, its options checked; ConfigError names what is wrong and what is possible."""
    if spec.name not in MIXERS:
        raise ConfigError(unknown_mixer(spec.name))
    cls, preset = MIXERS[spec.name]
    known, options, problems = options_of(cls), dict(preset), []
    for key, value in spec.options.items():
        if key not in known:
            problems.append(f"{spec.name}({key}=...): no such option (possible: {', '.join([*known, *BlockOptions.model_fields])})")
            continue
        if value is None and "none" in get_args(known[key].annotation):
            value = "none"  # the grammar reads the word as None
        try:
            options[key] = TypeAdapter(known[key].annotation).validate_python(value, strict=True)
        except ValidationError as e:
            problems.append(f"{spec.name}({key}={value}): {e.errors()[0]['msg'][0].lower()}{e.errors()[0]['msg'][1:]}")
    if problems:
        raise ConfigError(problems)
    try:
        return cls(config, layer, **options)
    except ConfigError as e:
        raise ConfigError([f"{spec.name}: {problem}" for problem in e.problems]) from e


def register_from(path):
    """Run a Python file that registers further mixers; ConfigError if it is not there."""
    if not Path(path).is_file():
        raise ConfigError(f'mixers={path!r}: no such file; it should be a Python file with a class under @mixer("name")')
    runpy.run_path(path)


class BlockOptions(BaseModel):
    """What any pattern item may say beside its mixer's own options."""

    model_config = ConfigDict(extra="forbid", strict=True)
    ffn: Literal["swiglu", "gelu", "gelu_exact", "relu2", "none"]
    residual: Literal["pre", "post", "sandwich", "normed"]
    alpha: float = 1.0
    beta: float = 1.0
    ffn_alpha: float = 1.0
    ffn_beta: float = 1.0


class Block(nn.Module):
    """A mixer and a feed-forward network f, each with its residual; either may be absent (`mlp` has no mixer, `ffn=none` no FFN).

    pre: `x + f(norm(x))`; post (OLMo 2): `x + norm(f(x))`; sandwich (Gemma): `x + norm(f(norm(x)))`; normed (MiniMax-01, DeepNorm):
    `alpha h + beta f(h)` with `h = norm(x)`.
    """

    def __init__(self, config, spec, layer):
        super().__init__()
        mine = {n: "none" if v is None else v for n, v in spec.options.items() if n in BlockOptions.model_fields}
        try:
            o = BlockOptions(**{"ffn": config.ffn, "residual": config.residual, **mine})
        except ValidationError as e:
            raise ConfigError([f"{spec.name}({p['loc'][0]}={p['input']}): {p['msg'].lower()}" for p in e.errors()]) from e
        rest = {n: v for n, v in spec.options.items() if n not in mine}
        if spec.name == "mlp" and (rest or o.ffn == "none"):
            raise ConfigError(f"layer {layer}: mlp is an FFN alone, it takes no option but {', '.join(BlockOptions.model_fields)}")
        if o.residual != "normed" and (scaled := {"alpha", "beta", "ffn_alpha", "ffn_beta"} & set(mine)):
            raise ConfigError(f"{spec.name}: {', '.join(sorted(scaled))} has no effect without residual=normed")
        self.residual, self.scales = o.residual, ((o.alpha, o.beta), (o.ffn_alpha, o.ffn_beta))
        self.mixer = None if spec.name == "mlp" else build_mixer(LayerSpec(spec.name, rest), config, layer)
        self.ffn = None if o.ffn == "none" else FFNS[o.ffn](config)
        self.mixer_norm = None if self.mixer is None else make_norm(config, config.n_embd)
        self.ffn_norm = None if self.ffn is None else make_norm(config, config.n_embd)
        if o.residual == "sandwich":
            self.mixer_out_norm = None if self.mixer is None else make_norm(config, config.n_embd)
            self.ffn_out_norm = None if self.ffn is None else make_norm(config, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, **context):
        if self.mixer is not None:
            x = self.add(x, self.mixer, self.mixer_norm, getattr(self, "mixer_out_norm", None), self.scales[0], context)
        elif context["state"] is not None:
            context["state"].advance(x.shape[1], context["segment_ids"])
        if self.ffn is not None:
            x = self.add(x, self.ffn, self.ffn_norm, getattr(self, "ffn_out_norm", None), self.scales[1], {})
        return x

    def add(self, x, f, norm, out_norm, scales, context):
        if self.residual == "post":
            return x + self.dropout(norm(f(x, **context)))
        h = norm(x)
        y = f(h, **context)
        if self.residual == "normed":
            return scales[0] * h + scales[1] * self.dropout(y)
        return x + self.dropout(y if out_norm is None else out_norm(y))


class Output(NamedTuple):
    logits: torch.Tensor | None  # (B, T, vocab), or (B, 1, vocab) with last_only; None where labels were given
    nll: torch.Tensor | None  # (B, T) fp32, 0 where the label is -1; None where no labels were given
    aux: dict  # losses of the layers, sums over tokens under names that begin with "loss"; "indexer_kl"; and figures
    loss: torch.Tensor | None = None  # with `total`: the sum of nll, which then has no gradient of its own, and of those losses


class Model(nn.Module):
    """Token embedding, `n_layer` blocks after the pattern `config.layers`, final norm, head (tied to the embedding or not)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.vocab_size is None:
            raise ConfigError("vocab_size is not set: a model needs it (train.py takes it from the data's tokenizer)")
        if config.mixers is not None:
            register_from(config.mixers)
        self.config = config
        self.specs = expand_layers(config.layers, config.n_layer)
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.position_embedding = nn.Embedding(config.block_size, config.n_embd) if config.learned_positions else None
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

    def forward(
        self, tokens, labels=None, *, segment_ids=None, positions=None, state=None, aux=None, last_only=False, total=False,
        places=None,
    ):  # fmt: skip
        """tokens `(B, T)` int64 -> `Output`. Labels `(B, T)` int64 (-1: none) give the NLL per token instead of logits.

        total: their sum as the loss to differentiate, whose gradient can be computed together with it.
        state: a `ModelState` from `init_state`, updated in place (no gradients). last_only: logits of each row's last real token.
        places `(B, n)` int64: positions of which alone something is predicted; labels, if any, are then `(B, n)`.
        """
        aux = {} if aux is None else aux
        if positions is None:
            positions = default_positions(tokens, segment_ids, None if state is None else state)
        x = self.embedding(tokens)
        if self.position_embedding is not None:
            last = tokens.shape[1] + (0 if state is None else state.longest)
            if last > self.config.block_size:
                raise ValueError(f"position {last} of a model with {self.config.block_size} learned positions")
            x = x + self.position_embedding(positions)
        x = self.dropout(x)
        for i, block in enumerate(self.blocks):
            x = block(
                x,
                segment_ids=segment_ids,
                positions=positions,
                state=None if state is None else state.layers[i],
                aux=aux,
            )
        x = self.norm(x)
        if places is not None:
            x = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        weight = self.embedding.weight if self.head is None else self.head.weight
        if labels is not None and total:
            loss, nll = kernels.linear_cross_entropy_sum(x.flatten(0, 1), weight, labels.flatten())
            loss = loss + sum(value for name, value in aux.items() if name.startswith("loss"))
            return Output(None, nll.view(labels.shape), aux, loss)
        if labels is not None:
            nll = kernels.linear_cross_entropy(x.flatten(0, 1), weight, labels.flatten())
            return Output(None, nll.view(labels.shape), aux)
        if last_only:
            last = x.shape[1] - 1 if segment_ids is None else (segment_ids > 0).sum(1).clamp(min=1) - 1
            x = x[torch.arange(x.shape[0], device=x.device), last][:, None]
        return Output(F.linear(x, weight.to(x.dtype)), None, aux)

    def init_state(self, batch, max_len, device=None, dtype=None):
        """Empty states of all layers for `batch` sequences of up to `max_len` tokens, by default as the weights are."""
        device, dtype = device or self.embedding.weight.device, dtype or self.embedding.weight.dtype
        empty = [
            State(batch, device) if b.mixer is None else b.mixer.init_state(batch, max_len, device, dtype) for b in self.blocks
        ]
        return ModelState(empty)

    def generate(self, tokens, max_new_tokens, **options):
        """Continue each row of tokens `(B, T)`: returns `(B n, T + max_new_tokens)` or less, -1 after a row's `stop_tokens`.

        The options are those of `sample.Generator`: temperature, top_k, top_p, min_p, repetition_penalty, seed, stop_tokens, ...
        """
        from sample import Generator  # which imports this module

        prompts = torch.as_tensor(tokens)
        drawn = list(Generator(self, prompts.tolist(), max_new_tokens=max_new_tokens, **options))
        rows = prompts.cpu().repeat_interleave(options.get("n", 1), 0)
        return torch.cat([rows, *(new[:, None] for new in drawn)], 1).to(prompts.device)

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
