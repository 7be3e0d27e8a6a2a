"""One token through the whole model in few launches, captured as a CUDA graph: what `sample.py` decodes with on a GPU.

Short prompts are read by a graph too, one for each power of two that prompts are padded to: it holds the model as it is.

A `Decoder` packs a model's weights once: what reads the same input becomes one matrix, matrices in the compute type, norms and
gates in fp32. A layer is then five launches: the norm, the projections and the convolution's update; the recurrence (or attention
over the cache, and one more to join its slices; before sparse attention two that score and choose its keys); the output projection
onto the residual stream, which stays in fp32; two for the feed-forward network. A mixer that has no such form runs as the model has
it, inside the same graph. On a CPU the kernels run in Triton's interpreter: slow, for tests.
"""

import copy
import warnings
import weakref

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import triton_sparse as sparse
from kernels import triton_step as step
from model import FEATURE_MAPS, MLP, Attention, DeltaRule, LinearAttention, Mamba2, RMSNorm, SparseAttention, SwiGLU

# ----------------------------------------------------------------------------------------------------------------------
# Packing


def packed_norm(norm):
    """(`step.Norm`, bias or None) of a norm module; (None, None) of None."""
    if norm is None:
        return None, None
    if isinstance(norm, RMSNorm):
        weight = norm.weight.detach().float()
        return step.Norm("rms", (weight + 1.0 if norm.unit_offset else weight).contiguous(), norm.eps), None
    return step.Norm("layer", norm.weight.detach().float(), norm.eps), None if norm.bias is None else norm.bias.detach().float()


class Product:
    """Linear layers with one input as one: `(x, **options) -> step.linear(x, ...)`, the norm before them included."""

    def __init__(self, layers, dtype, norm=None):
        weight = torch.cat([layer.weight.detach().float() for layer in layers])
        biases = [getattr(layer, "bias", None) for layer in layers]
        given = any(b is not None for b in biases)
        biases = [weight.new_zeros(len(u.weight)) if b is None else b.detach().float() for u, b in zip(layers, biases, strict=True)]
        self.norm, norm_bias = packed_norm(norm)
        bias = torch.cat(biases) if norm_bias is None else torch.cat(biases) + weight @ norm_bias
        self.bias = bias if given or norm_bias is not None else None
        self.weight = weight.to(dtype).contiguous()

    def __call__(self, x, **options):
        return step.linear(x, self.weight, self.bias, norm=self.norm, **options)


class Half:
    """The mixer or the feed-forward network of a block with its norms and residual: x `(B, n_embd)` to the same, in fp32.

    f takes (x, state, **residual) and gives the whole half, `alpha residual + beta f(x)`; it holds the norm before it where one is.
    """

    def __init__(self, block, part, dtype):
        module, norm = getattr(block, part), getattr(block, f"{part}_norm")
        before = norm if block.residual in ("pre", "sandwich") else None
        after = {"post": norm, "sandwich": getattr(block, f"{part}_out_norm", None)}.get(block.residual)
        self.first = packed_norm(norm) if block.residual == "normed" else None
        self.after = None if after is None else packed_norm(after)
        alpha, beta = block.scales[0 if part == "mixer" else 1] if block.residual == "normed" else (1.0, 1.0)
        self.scales = {"alpha": float(alpha), "beta": float(beta)}
        form = next((make for cls, fits, make in FORMS if type(module) is cls and fits(module)), None)
        self.fused = form is not None
        self.f = form(module, before, dtype) if self.fused else AsItIs(module, before, dtype)

    def __call__(self, x, state):
        if self.first is not None:
            x = step.add_norm(None, x, *self.first)
        if self.after is None:
            return self.f(x, state, residual=x, dtype=torch.float32, **self.scales)
        return step.add_norm(x, self.f(x, state, dtype=torch.float32), *self.after)


class AsItIs:
    """A module of the model with its matrices in the compute type, where no shorter form is known."""

    def __init__(self, module, norm, dtype):
        self.module, self.norm, self.dtype = copy.deepcopy(module), packed_norm(norm), dtype
        for layer in self.module.modules():
            if isinstance(layer, nn.Linear):
                layer.to(dtype)

    def __call__(self, x, state, residual=None, alpha=1.0, beta=1.0, dtype=None):
        x = x if self.norm[0] is None else step.add_norm(None, x, *self.norm)
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16, cache_enabled=False):
            if hasattr(self.module, "mix"):
                positions = state.length[:, None].long()
                y = self.module.mix(x[:, None], segment_ids=None, positions=positions, state=state, aux={})[:, 0]
            else:
                y = self.module(x)
        return y.to(dtype) if residual is None else alpha * residual + beta * y.to(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Layers in few launches


def feed_forward(module, norm, dtype, act, up):
    up, down = Product([up], dtype, norm), Product([module.down_proj], dtype)
    return lambda x, state, **residual: down(up(x, act=act), **residual)


def swiglu(module, norm, dtype):
    return feed_forward(module, norm, dtype, "swiglu", module.gate_up_proj)


def mlp(module, norm, dtype):
    return feed_forward(module, norm, dtype, module.activation, module.up_proj)


def heads(x, n, width):
    """(B, n * width) as `step.recurrence` takes it: (B, 1, n, width), on the same memory."""
    return x.unflatten(1, (1, n, width))


def frequencies(m, rope_dim):
    """What `rope_tables` multiplies positions by, from the same operations; None where nothing is rotated."""
    steps = torch.arange(0, rope_dim, 2, device=m.qkv_proj.weight.device, dtype=torch.float32)
    return m.theta ** (-steps / rope_dim) if rope_dim else None


def head_options(m):
    """What `step.attention` does to queries and keys first: norms, their eps, frequency."""
    norms = [packed_norm(u)[0] for u in (m.q_norm, m.k_norm)] if m.qk_norm else None
    options = {"norms": tuple(u.weight for u in norms), "eps": norms[0].eps} if norms else {"norms": None, "eps": 0.0}
    return options | {"frequency": frequencies(m, m.rope_dim)}


def attention(m, norm, dtype):
    project, out, prepare = Product([m.qkv_proj], dtype, norm), Product([m.out_proj], dtype), head_options(m)

    def run(x, state, **residual):
        q, k, v, *gate = project(x).split(m.split, dim=1)
        y = step.attention(
            q.unflatten(1, (m.H, m.D)), k.unflatten(1, (m.Hk, m.D)), v.unflatten(1, (m.Hk, m.D)), k_cache=state.k, v_cache=state.v,
            length=state.length, scale=m.D**-0.5, window=m.window, keep_first=m.keep_first, sinks=m.sinks, **prepare,
            gate=gate[0] if gate else None,
        )  # fmt: skip
        return out(y.flatten(1), **residual)

    return run


def sparse_attention(m, norm, dtype):
    project = Product([m.qkv_proj, m.index_q_proj, m.index_k_proj, m.index_w_proj], dtype, norm)
    out, split, u = Product([m.out_proj], dtype), [*m.split, m.J * m.d, m.d, m.J], m.index_k_norm
    options = head_options(m) | {"index_frequency": frequencies(m, m.index_rope_dim), "scale": m.D**-0.5, "local": m.local}
    options |= {"index_norm": (u.weight.detach().float(), u.bias.detach().float(), u.eps), "index_scale": (m.J * m.d) ** -0.5}

    def run(x, state, **residual):
        q, k, v, *gate, index_q, index_k, index_w = project(x).split(split, dim=1)
        q, k, v = q.unflatten(1, (m.H, m.D)), k.unflatten(1, (m.Hk, m.D)), v.unflatten(1, (m.Hk, m.D))
        y = sparse.decode(
            q, k, v, index_q.unflatten(1, (m.J, m.d)), index_k, index_w,
            k_cache=state.k, v_cache=state.v, index_cache=state.index_k, length=state.length,
            top_k=state.k.shape[1] if m.mode == "dense" else m.top_k, gate=gate[0] if gate else None, **options,
        )  # fmt: skip
        return out(y.flatten(1), **residual)

    return run


def delta_rule(m, norm, dtype):
    low_rank_gate = m.low_rank and m.gate != "none"
    layers = [m.in_proj, m.ba_proj, *([m.f_a_proj] if m.decay == "channel" else []), *([m.g_a_proj] if low_rank_gate else [])]
    project, out = Product(layers, dtype, norm), Product([m.out_proj], dtype)
    f_b = Product([m.f_b_proj], dtype) if m.decay == "channel" and m.low_rank else None
    g_b = Product([m.g_b_proj], dtype) if low_rank_gate else None
    inner = sum(m.split)
    split = [*m.split, m.in_proj.out_features - inner, m.H, m.ba_proj.out_features - m.H, *(len(u.weight) for u in layers[2:])]
    conv_weight = m.conv_weight.detach().float().contiguous()
    options = {"A_log": m.A_log.detach().float(), "dt_bias": m.dt_bias.detach().float()} if m.decay != "none" else {}
    options |= {"gates": "delta", "decay": m.decay, "delta": True, "l2": True, "scale": m.K**-0.5, "beta_max": m.beta_max}
    options |= {"norm_w": packed_norm(m.norm)[0].weight, "z_act": m.gate, "eps": m.eps}

    def run(x, state, **residual):
        q, k, v, z, b, a, *rest = project(x, conv=step.Conv(conv_weight, None, state.conv)).split(split, dim=1)
        if m.decay == "channel":
            a = rest.pop(0)
            a = a if f_b is None else f_b(a)
        z = g_b(rest[0]) if low_rank_gate else z
        q, k, v = heads(q, m.Hk, m.K), heads(k, m.Hk, m.K), heads(v, m.H, m.V)
        g = None if m.decay == "none" else a[:, None]
        y = step.recurrence(q, k, v, g, b[:, None], state=state.recurrent, z=None if m.gate == "none" else z, **options)
        return out(y.flatten(1), **residual)

    return run


FEATURES = {id(f): name for name, f in FEATURE_MAPS.items()}


def linear_attention(m, norm, dtype):
    project = Product([m.in_proj], dtype, norm)
    whole = m.norm_all and m.norm is not None  # all heads' norm goes into the output projection
    out = Product([m.out_proj], dtype, m.norm if whole else None)
    options = {"feature": FEATURES[id(m.f)], "value": FEATURES[id(m.f_v)], "normalize": m.normalize}
    options |= {"decay": "none" if m.g is None else "head"}
    options |= {"scale": 1.0, "eps": 1e-6} if m.normalize else {"scale": m.K**-0.5 if m.scale is None else m.scale, "eps": m.eps}
    if m.norm is not None and not whole:
        options["norm_w"] = packed_norm(m.norm)[0].weight

    def run(x, state, **residual):
        q, k, v, *gate = project(x).split(m.split, dim=1)
        late = {"gate": gate[0], "gate_act": m.gate} if whole and gate else {}
        early = {"z": gate[0], "z_act": m.gate} if gate and not whole else {}
        q, k, v = heads(q, m.H, m.K), heads(k, m.H, m.K), heads(v, m.H, m.V)
        y = step.recurrence(q, k, v, m.g, state=state.recurrent, **options, **early)
        return out(y.flatten(1), **late, **residual)

    return run


def mamba2(m, norm, dtype):
    inner = m.split[0]
    project, out = Product([m.in_proj], dtype, norm), Product([m.out_proj], dtype, m.norm)
    # The convolution's channels come first: x, B, C, then z and dt.
    order = torch.cat(
        [torch.arange(inner, inner + sum(m.split)), torch.arange(inner), torch.arange(inner + sum(m.split), len(project.weight))]
    )
    project.weight = project.weight[order]
    project.bias = None if project.bias is None else project.bias[order]
    conv_weight, conv_bias = (None if u is None else u.detach().float().contiguous() for u in (m.conv_weight, m.conv_bias))
    options = {"A_log": m.A_log.detach().float(), "dt_bias": m.dt_bias.detach().float(), "skip": m.D.detach().float()}
    options |= {"gates": "mamba", "decay": "head", "scale": 1.0}
    options["dt_range"] = m.dt_limit[0], 1e30 if m.dt_limit[1] is None else m.dt_limit[1]

    def run(x, state, **residual):
        y = project(x, conv=step.Conv(conv_weight, conv_bias, state.conv))
        u, k, q, z, dt = y.split([*m.split, inner, m.H], dim=1)
        q, k, v = heads(q, m.G, m.N), heads(k, m.G, m.N), heads(u, m.H, m.P)
        y = step.recurrence(q, k, v, dt[:, None], state=state.recurrent, **options)
        return out(y.flatten(1), gate=z, gate_first=True, **residual)

    return run


def per_head_norms(m):
    return not m.qk_norm or (m.qk_norm is True and isinstance(m.q_norm, RMSNorm))


FORMS = [  # class, whether a module of it has this form, the form
    (SwiGLU, lambda m: True, swiglu),
    (MLP, lambda m: m.activation != "gelu_exact", mlp),
    (Attention, lambda m: per_head_norms(m) and m.D <= 256, attention),
    (SparseAttention, lambda m: per_head_norms(m) and max(m.D, m.d) <= 256, sparse_attention),
    (DeltaRule, lambda m: m.steps == 1 and m.conv_weight is not None and max(m.K, m.V) <= 256, delta_rule),
    (LinearAttention, lambda m: not m.rope_dim and m.conv_weight is None and max(m.K, m.V) <= 256, linear_attention),
    (Mamba2, lambda m: m.norm_groups == 1 and max(m.N, m.P) <= 256, mamba2),
]


# ----------------------------------------------------------------------------------------------------------------------
# The model


class Decoder:
    """A model packed for decoding, and the steps that were captured with it, the latest few of them."""

    KEPT = 6  # captured steps, each with its state

    def __init__(self, engine):
        model, dtype = engine.model, engine.dtype
        self.engine, self.captured, self.sizes, self.graphs = engine, {}, {}, weakref.WeakSet()
        self.layers = [
            [Half(block, part, dtype) for part in ("mixer", "ffn") if getattr(block, part) is not None] for block in model.blocks
        ]
        self.embedding = model.embedding.weight.detach().to(dtype).contiguous()
        self.positions = None if model.position_embedding is None else model.position_embedding.weight.detach().float()
        self.head = Product([model.embedding if model.head is None else model.head], dtype, model.norm)
        if model.head is None and self.head.weight.dtype == dtype:
            self.head.weight = self.embedding  # one copy of a tied matrix
        self.head.weight = self.head.weight[: engine.vocab]  # ids from there on are never drawn
        self.head.bias = None if self.head.bias is None else self.head.bias[: engine.vocab]

    def forward(self, tokens, state):
        """tokens `(B,)` -> logits `(B, vocab)` in fp32, the layers' states brought up to date, but for their lengths."""
        x = F.embedding(tokens, self.embedding)
        if self.positions is not None:
            x = x + F.embedding(state.length.clamp(max=len(self.positions) - 1), self.positions)
        for halves, mine in zip(self.layers, state.layers, strict=True):
            for half in halves:
                x = half(x, mine)
        return self.head(x, dtype=torch.float32)

    def steps(self, rows, capacity, sampling, logprobs):
        """`CapturedSteps` for at least so many rows and tokens: batch sizes and capacities are rounded up, so that few differ."""
        bucket, capacity = bucket_of(rows), capacity_of(capacity)
        if capacity not in self.sizes:
            self.sizes[capacity] = self.engine.model.state_bytes(1, capacity)
        key = bucket, self.sizes[capacity], sampling, logprobs  # a size is the same for any capacity where nothing grows with it
        if key not in self.captured:
            while len(self.captured) >= self.KEPT:
                del self.captured[next(iter(self.captured))]
            self.captured[key] = CapturedSteps(self, bucket, capacity, sampling, logprobs)
        self.captured[key] = self.captured.pop(key)  # the latest used last
        return self.captured[key]

    @torch.inference_mode()
    def record(self, run, what):
        """`run()` as a CUDA graph, after running it twice; None, with a warning, where it cannot be captured."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):  # twice before: the first run compiles
            for _ in range(2):
                run()
        current.wait_stream(side)
        # All graphs share one pool: none leaves in it what another's replay may not overwrite. A pool ends with its last graph.
        graph, pool = torch.cuda.CUDAGraph(), next((other.pool() for other in self.graphs), None)
        try:
            with torch.cuda.graph(graph, pool=pool):
                run()
        except RuntimeError as e:  # a mixer registered by a user may ask the host
            torch.cuda.set_stream(current)  # a capture that fails stays on its own
            warnings.warn(f"{what} without a CUDA graph, it cannot be captured: {str(e).splitlines()[0]}", stacklevel=2)
            return None
        self.graphs.add(graph)
        return graph


def bucket_of(rows):
    """1, 2, 4, ..., 64, then multiples of 32."""
    return 1 << (rows - 1).bit_length() if rows <= 64 else -(-rows // 32) * 32


def capacity_of(tokens):
    """Powers of two from 1024 on, so that short requests share one graph, then multiples of 16,384."""
    return max(1024, 1 << (tokens - 1).bit_length()) if tokens <= 16384 else -(-tokens // 16384) * 16384


def shared_lengths(state, rows, device):
    """Let the layers count in one tensor, so that one launch counts for all; returns it."""
    lengths = torch.zeros(len(state.layers), rows, dtype=torch.int32, device=device)
    for layer, length in zip(state.layers, lengths, strict=True):
        layer.tensors["length"] = length
    return lengths


class Reading:
    """Reading prompts into the first rows of an empty state as one CUDA graph: the model as it is, but started at once (124M, 512
    tokens: its launches take a host 24 ms and a GPU 2 to 3). Prompts are padded to `width`, which reaches no state.
    """

    LONGEST = 2048  # at 4.4 us a token (long prompts, H200) padding more to 4096 would cost about what the launches take a host

    def __init__(self, decoder, state, rows, width):
        self.engine, self.state = decoder.engine, state.rows(rows)
        device, vocab = self.engine.device, self.engine.model.config.vocab_size
        self.tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.logits = torch.zeros(rows, vocab, device=device)
        self.graph = decoder.record(self.run, "reading prompts")  # all rows are empty meanwhile: the state stays what it is

    @classmethod
    def width_of(cls, prompts, engine):
        """A power of two from 64 on, or as many as there are learned positions; None for what no graph is made for."""
        longest, model = max(map(len, prompts)), engine.model
        most = cls.LONGEST if model.position_embedding is None else min(cls.LONGEST, model.config.block_size)
        return min(max(64, 1 << (longest - 1).bit_length()), most) if 0 < longest <= most else None

    def run(self):
        for layer in self.state.layers:
            layer.longest = 0  # no mixer looks at what was before
        ids = torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths
        self.logits.copy_(self.engine.forward(self.tokens, self.state, ids.to(torch.int32)))

    def __call__(self, prompts):
        """Logits `(len(prompts), vocab)` after the last token of each."""
        (rows, width), n = self.tokens.shape, len(prompts)
        self.tokens[:n].copy_(torch.tensor([ids + [0] * (width - len(ids)) for ids in prompts]))
        self.lengths.copy_(torch.tensor([[len(ids)] for ids in prompts] + [[0]] * (rows - n)))
        self.run() if self.graph is None else self.graph.replay()
        return self.logits[:n].clone()


class CapturedSteps:
    """`sample.Steps` as one CUDA graph: the whole model, drawing included. The host only starts it and reads what it drew."""

    owner, ahead = None, True

    def __init__(self, decoder, rows, capacity, sampling, logprobs):
        engine = decoder.engine
        self.decoder, self.state = decoder, engine.model.init_state(rows, capacity, dtype=engine.dtype)
        self.sampler, self.lengths = engine.sampler(rows, sampling, logprobs), shared_lengths(self.state, rows, engine.device)
        self.host = [[torch.zeros(rows, dtype=d).pin_memory() for d in (torch.int64, torch.float32)] for _ in range(2)]
        self.events, self.turn, self.readings = [torch.cuda.Event() for _ in range(2)], 0, {}
        for layer in self.state.layers:  # what an operator takes as bound of the lengths must hold for every later one
            layer.longest = capacity - 1
        self.graph = decoder.record(self.step, "decoding")
        with torch.inference_mode():
            self.state.clear_()

    def step(self):
        self.sampler(self.decoder.forward(self.sampler.tokens, self.state))
        self.lengths += 1

    def reading(self, prompts):
        """The `Reading` for these prompts, made at its first use; None if they are too many or too long for one."""
        rows, width = bucket_of(len(prompts)), Reading.width_of(prompts, self.decoder.engine)
        if width is None or rows * width > self.decoder.engine.chunk:
            return None
        if (rows, width) not in self.readings:
            self.readings[rows, width] = Reading(self.decoder, self.state, rows, width)
        return self.readings[rows, width]

    @torch.inference_mode()
    def read(self, prompts, state, logits=None, progress=None):
        """As in `sample.Steps`; what goes on from an earlier reading, and what is too long for a graph, launch by launch."""
        reading = None if state.longest else self.reading(prompts)
        if reading is None:
            return self.decoder.engine.read(prompts, state, logits, progress)
        logits, longest = reading(prompts), max(map(len, prompts))
        for layer in state.layers:
            layer.longest = longest
        if progress is not None:
            progress(longest)
        return logits

    def first(self, logits):
        """As in `sample.Steps`; logits may have fewer rows than the graph."""
        self.sampler.refill()
        self.sampler(F.pad(logits, (0, 0, 0, len(self.sampler.tokens) - len(logits))))

    def next(self):
        """As in `sample.Steps`."""
        self.sampler.refill()
        self.step() if self.graph is None else self.graph.replay()
        for layer in self.state.layers:
            layer.longest += 1

    def fetch(self):
        """Start the copy to the host now; the call waits for it. What is started in between runs meanwhile."""
        (tokens, logprobs), event = self.host[self.turn], self.events[self.turn]
        tokens.copy_(self.sampler.tokens, non_blocking=True)
        if self.sampler.logprobs is not None:
            logprobs.copy_(self.sampler.logprobs, non_blocking=True)
        event.record()
        self.turn = 1 - self.turn

        def wait():
            event.synchronize()
            return tokens.clone(), None if self.sampler.logprobs is None else logprobs.clone()

        return wait
