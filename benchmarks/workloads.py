"""The operators as they are measured and examined: inputs, costs, and the same operator in other libraries.

A size is written as letters with numbers, "B8 T4096 H16 K128 V128": B rows, T tokens, H heads of width K or D for keys and V for
values, G key heads (H where it is not given), w the window, k the keys a query selects, J index heads of width I, doc the length of
documents packed in a row, N tokens of width D against a vocabulary of V. Costs are the floating-point operations and the bytes of
memory traffic that a fused kernel on chunks of 64 tokens cannot do without, forward and backward; bytes are those of bf16 tensors
with fp32 gates. A peer is called with the tensors that ours is called with.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import kernels

C = 64  # tokens of a chunk
# What a device has been measured to do: bf16 TFLOP/s of a large matrix product, TB/s of a large copy.
DEVICES = {"H200": (790.0, 4.3)}


def sizes(text):
    """ "B8 T4096" -> {"B": 8, "T": 4096}; ValueError for anything else."""
    parts = [re.fullmatch(r"([A-Za-z]+)(\d+)", part) for part in text.split()]
    if not parts or None in parts or any(int(part[2]) < 1 for part in parts):
        raise ValueError(f"{text!r} is no size: letters with numbers from 1 on, like 'B8 T4096 H16'")
    return {part[1]: int(part[2]) for part in parts}


@dataclass(frozen=True)
class Workload:
    """One operator with one kind of gates. `make(s, kind)` gives its arguments in fp32, those in `wide` staying so, by name;
    `cost(s)` the FLOPs and bytes (forward, backward); `default` the sizes that a shape need not repeat."""

    op: str
    default: str
    shapes: str  # separated by commas
    make: Callable
    cost: Callable
    options: dict = field(default_factory=dict)
    wide: tuple = ("g", "beta", "weight", "bias", "index_w")
    fixed: tuple = ()  # arguments that no model trains
    peers: dict = field(default_factory=dict)
    kinds: tuple = ("random",)

    def sizes(self, text=""):
        s = sizes(self.default) | (sizes(text) if text else {})
        if "H" in s:
            s.setdefault("G", s["H"])
        return s

    def inputs(self, s, kind="random", device="cpu", dtype=torch.float32, fixed=None):
        """Arguments by name, gradients wanted from all that are floating and not fixed; others (labels, ids) as they are."""
        fixed = self.fixed if fixed is None else fixed
        with torch.device(device):
            made = self.make(s, kind)
        out = {n: x.to(dtype) if x.is_floating_point() and n not in self.wide else x for n, x in made.items()}
        return {n: x.requires_grad_(x.is_floating_point() and n not in fixed) for n, x in out.items()}

    def call(self, inputs, s):
        """What the operator returns: its output, or a tuple that begins with it."""
        given = {n: s[letter] for n, letter in (("window", "w"), ("top_k", "k")) if letter in s}
        return getattr(kernels, self.op)(**inputs, **self.options, **given)


# ----------------------------------------------------------------------------------------------------------------------
# Inputs


def gates(kind, *shape):
    """Log decays: mild, all zero, or zero with some tokens that forget everything."""
    if kind == "zero":
        return torch.zeros(shape)
    return -1000.0 * (torch.rand(shape) < 0.05) if kind == "extreme" else -0.2 * torch.rand(shape)


def make_recurrent(decay, delta=False):
    """q, k (B, T, G, K), v (B, T, H, V), g, beta; `decay`: None or the axes of g; "correlated": keys of cosine 0.9, beta to 2."""

    def make(s, kind):
        B, T, G, H, K, V = (s[n] for n in "BTGHKV")
        k = torch.randn(B, T, G, K)
        if kind == "correlated":
            k = 0.9 * torch.randn(1, 1, G, K) + 0.1 * k
        q = torch.randn(B, T, G, K)
        inputs = {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": torch.randn(B, T, H, V)}
        if decay:
            inputs["g"] = gates("zero" if kind == "correlated" else kind, *(s[n] for n in decay))
        elif delta:
            inputs["g"] = None
        if delta:
            inputs["beta"] = (2.0 if kind == "correlated" else 1.0) * torch.rand(B, T, H)
        return {n: x for n, x in inputs.items() if x is not None}

    return make


def documents(s):
    """Ids (B, T) int32 of documents of `doc` tokens on average, from half to one and a half times as long."""
    cuts = torch.zeros(s["B"], s["T"], dtype=torch.int32)
    for row in cuts:
        lengths = torch.randint(max(1, s["doc"] // 2), s["doc"] * 3 // 2 + 1, (2 * s["T"] // s["doc"] + 2,)).cumsum(0)
        row[lengths[lengths < s["T"]]] = 1
    return cuts.cumsum(1).int() + 1


def make_attention(s, kind):
    q, k, v = (torch.randn(s["B"], s["T"], s[heads], s["D"]) for heads in "HGG")
    return {"q": q, "k": k, "v": v} | ({"segment_ids": documents(s)} if "doc" in s else {})


def make_sparse(s, kind, alike=True):
    """Index vectors of neighbouring queries of cosine 0.95, so that most of what they select is the same; or of cosine 0."""
    B, T, J, I = (s[n] for n in "BTJI")  # noqa: E741
    index_q = torch.randn(B, T, J, I)
    if alike:
        index_q = torch.randn(B, -(-T // 64), J, I).repeat_interleave(64, 1)[:, :T] + 0.3 * index_q
    index = {"index_q": index_q, "index_k": torch.randn(B, T, I), "index_w": torch.rand(B, T, J)}
    return make_attention(s, kind) | index


def make_conv(s, kind):
    return {"x": torch.randn(s["B"], s["T"], s["D"]), "weight": torch.randn(s["D"], s["W"]) / s["W"] ** 0.5}


def make_norm(*names):
    shapes = {"x": "ND", "z": "ND", "weight": "D"}
    return lambda s, kind: {n: torch.randn([s[letter] for letter in shapes[n]]) for n in names}


def make_loss(s, kind):
    labels = torch.randint(s["V"], (s["N"],))
    return {"x": torch.randn(s["N"], s["D"]), "weight": s["D"] ** -0.5 * torch.randn(s["V"], s["D"]), "labels": labels}


# ----------------------------------------------------------------------------------------------------------------------
# Costs: (FLOPs, bytes) forward, (FLOPs, bytes) backward


def cost_recurrent(delta, gate_bytes):
    """Per token and head; `gate_bytes` of decays and beta are read, and their gradients written."""

    def cost(s):
        n, K, V, r = s["B"] * s["T"] * s["H"], s["K"], s["V"], s["G"] / s["H"]
        gate = gate_bytes(s)
        if delta:
            forward, backward = 6 * K * V + 4 * C * (K + V) + C * C / 3, 18 * K * V + 12 * C * K + 10 * C * V + 4 * C * C
        else:
            forward, backward = 4 * K * V + 2 * C * (K * r + V), 10 * K * V + 6 * C * K * r + 4 * C * V
        return (n * forward, n * (4 * K * r + 4 * V + gate)), (n * backward, n * (8 * K * r + 6 * V + 2 * gate))

    return cost


def cost_attention(s):
    n, T, r = s["B"] * s["T"] * s["H"], s["T"], s["G"] / s["H"]
    seen = min(s.get("k", T), s.get("w", T), s.get("doc", T))
    keys = seen - seen * seen / (2 * T) if "doc" not in s else seen / 2  # the mean over queries
    forward, backward = 4 * keys * s["D"], 10 * keys * s["D"]
    index = s["B"] * T * T * s["J"] * s["I"] if "J" in s else 0  # queries by keys before them, all index heads
    return (n * forward + index, n * s["D"] * (4 + 4 * r)), (n * backward, n * s["D"] * (8 + 8 * r) + 8 * n)


def cost_elementwise(forward, backward, letters):
    """Bytes an element, forward and backward; no FLOPs to speak of."""

    def cost(s):
        n = functools.reduce(lambda x, letter: x * s[letter], letters, 1)
        return (0, forward * n), (0, backward * n)

    return cost


def cost_loss(s):
    product, read = 2 * s["N"] * s["D"] * s["V"], 2 * s["D"] * (s["N"] + s["V"])
    return (product, read), (2 * product, 2 * read + 2 * s["D"] * s["V"])


def bound_ms(cost, device_name):
    """The least time of the (FLOPs, bytes), None on a device that nobody has measured."""
    peaks = next((peaks for name, peaks in DEVICES.items() if name in device_name), None)
    return None if peaks is None else 1e3 * max(cost[0] / (1e12 * peaks[0]), cost[1] / (1e12 * peaks[1]))


# ----------------------------------------------------------------------------------------------------------------------
# Peers: functions of (inputs, sizes) that return the output; an import that fails is the result


def fla(function, *names, **options):
    """`fla.ops.function` on the inputs of these names."""

    def call(inputs, s):
        import fla.ops

        given = {name: inputs[name] for name in names}
        return getattr(fla.ops, function)(**given, output_final_state=False, **options)[0]

    return call


def fla_simple(decay):
    """fla's linear attention with a decay: `g_gamma` per head, `g` per token."""

    def call(inputs, s):
        import fla.ops

        return fla.ops.chunk_simple_gla(inputs["q"], inputs["k"], inputs["v"], **{decay: inputs["g"]})[0]

    return call


def flash_qla(inputs, s):
    from flash_qla import chunk_gated_delta_rule

    return chunk_gated_delta_rule(*(inputs[n] for n in ("q", "k", "v", "g", "beta")))[0]


def mamba_ssm(inputs, s):
    """Mamba-2's scan reads x and a step dt, and decays by e^{A dt}: with A = -1, dt is the log decay."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    A = -torch.ones(s["H"], device=inputs["v"].device)
    return mamba_chunk_scan_combined(inputs["v"], -inputs["g"], A, inputs["k"], inputs["q"], chunk_size=256)


def sdpa(backend):
    def call(inputs, s):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (inputs[n].transpose(1, 2) for n in "qkv")
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s["G"] != s["H"]).transpose(1, 2)

    return call


@functools.cache
def _flex(T, window, device):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def near(b, h, i, j):
        return (i >= j) & (i - j < window)

    return torch.compile(flex_attention, dynamic=False), create_block_mask(near, None, None, T, T, device=device)


def flex(inputs, s):
    attend, mask = _flex(s["T"], s.get("w", s["T"]), inputs["q"].device)
    q, k, v = (inputs[n].transpose(1, 2) for n in "qkv")
    return attend(q, k, v, block_mask=mask, enable_gqa=s["G"] != s["H"]).transpose(1, 2)


def fla_conv(inputs, s):
    from fla.modules.convolution import causal_conv1d

    return causal_conv1d(inputs["x"], inputs["weight"], activation="silu")[0]


def fla_norm(inputs, s):
    from fla.modules.layernorm import rms_norm

    return rms_norm(inputs["x"], inputs["weight"], None)


def fla_gated_norm(inputs, s):
    from fla.modules.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(inputs["x"], inputs["z"], inputs["weight"], None)


@functools.cache
def _compiled(op):
    return torch.compile(getattr(kernels.eager, op), dynamic=False)


def compiled(op, **options):
    """torch.compile of our eager operator."""

    def call(inputs, s):
        out = _compiled(op)(*inputs.values(), **options)
        return out[0] if isinstance(out, tuple) else out

    return call


# ----------------------------------------------------------------------------------------------------------------------

LARGE, LONG, SMALL = "B8 T4096 H16", "B1 T32768 H16", "B16 T2048 H6"  # a billion parameters or more, long, 124M
ALL = f"{LARGE}, {LONG}, {SMALL}"
HEADS = f"{LARGE} K128 V128"
HARD = ("random", "correlated", "zero", "extreme")
DELTA = {"op": "delta_rule", "default": HEADS, "shapes": ALL}
LINEAR = {"op": "linear_attention", "default": HEADS, "shapes": ALL}
ATTENTION = {"op": "softmax_attention", "default": f"{LARGE} D128", "make": make_attention, "cost": cost_attention}
SPARSE = {"op": "sparse_attention", "default": "B1 T4096 H16 G4 D128 J8 I64 k512", "cost": cost_attention}
GATED = ("q", "k", "v", "g", "beta")

WORKLOADS = {
    "gdn": Workload(
        **DELTA, make=make_recurrent("BTH", delta=True), cost=cost_recurrent(True, lambda s: 8), kinds=HARD,
        peers={"fla": fla("chunk_gated_delta_rule", *GATED), "flash_qla": flash_qla},
    ),
    "deltanet": Workload(
        **DELTA, make=make_recurrent(None, delta=True), cost=cost_recurrent(True, lambda s: 4), kinds=("random", "correlated"),
        peers={"fla": fla("chunk_delta_rule", "q", "k", "v", "beta")},
    ),
    "kda": Workload(
        **DELTA | {"op": "channel_delta_rule"}, make=make_recurrent("BTHK", delta=True), kinds=HARD,
        cost=cost_recurrent(True, lambda s: 4 + 4 * s["K"]), peers={"fla": fla("chunk_kda", *GATED)},
    ),
    "lightning": Workload(
        **LINEAR, make=make_recurrent("H"), cost=cost_recurrent(False, lambda s: 0), fixed=("g",),
        peers={"fla": fla_simple("g_gamma")},
    ),
    "linear": Workload(
        **LINEAR, make=make_recurrent(None), cost=cost_recurrent(False, lambda s: 0),
        peers={"fla": fla("chunk_linear_attn", "q", "k", "v", normalize=False)},
    ),
    "gated_linear": Workload(
        **LINEAR, make=make_recurrent("BTH"), cost=cost_recurrent(False, lambda s: 4), kinds=("random", "zero", "extreme"),
        peers={"fla": fla_simple("g")},
    ),
    "mamba2": Workload(
        **LINEAR | {"default": "B8 T4096 H32 G1 K128 V64", "shapes": "B8 T4096 H32, B1 T32768 H32"}, make=make_recurrent("BTH"),
        cost=cost_recurrent(False, lambda s: 4), kinds=("random", "zero", "extreme"), peers={"mamba_ssm": mamba_ssm},
    ),
    "attention": Workload(
        **ATTENTION, shapes=f"{LARGE}, {LONG}, B16 T2048 H12 D64, B32 T1024 H12 D64",
        peers={"cudnn": sdpa("CUDNN_ATTENTION"), "flash": sdpa("FLASH_ATTENTION")},
    ),
    "window": Workload(**ATTENTION, shapes=f"{LARGE} w512, {LONG} w1024", peers={"flex": flex}),
    "packed": Workload(**ATTENTION, shapes=f"{LARGE} doc512"),
    "sparse": Workload(
        **SPARSE, make=make_sparse, shapes="T4096, T8192, T16384, T32768, T65536", peers={"cudnn": sdpa("CUDNN_ATTENTION")},
    ),
    "sparse_unalike": Workload(**SPARSE, make=functools.partial(make_sparse, alike=False), shapes="T4096, T32768, T65536"),
    "conv": Workload(
        "causal_conv1d", "B8 T4096 D2048 W4", "B8 T4096 D2048", make_conv, cost_elementwise(4, 6, "BTD"), {"activation": "silu"},
        peers={"fla": fla_conv, "compiled": compiled("causal_conv1d", activation="silu")},
    ),
    "norm": Workload(
        "rms_norm", "N32768 D2048", "N32768 D2048, N65536 D768", make_norm("x", "weight"), cost_elementwise(4, 6, "ND"),
        peers={"fla": fla_norm, "compiled": compiled("rms_norm")},
    ),
    "gated_norm": Workload(
        "gated_rms_norm", "N524288 D128", "N524288 D128", make_norm("x", "z", "weight"), cost_elementwise(6, 10, "ND"),
        peers={"fla": fla_gated_norm, "compiled": compiled("gated_rms_norm")},
    ),
    "loss": Workload(
        "linear_cross_entropy_sum", "N32768 D768 V50304", "N32768 D768 V50304", make_loss, cost_loss,
        peers={"compiled": compiled("linear_cross_entropy_sum")},
    ),
}  # fmt: skip
