"""What a compiler believes of the custom operators: sizes, types, strides and devices of all results, in every case that changes
them, forward and backward. A stride that differs fails an assertion in a compiled model, and nothing anywhere else.

PyTorch's `opcheck` compares the same for the call it is given, but not for the operator of its backward.
"""

import importlib

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.interpreter import GridExecutor
from triton_cases import DEVICE, documents

from kernels import launch

NAMES = "recurrence", "channel_delta", "attention", "sparse", "selection", "indexer", "conv", "norm", "loss"
MODULES = {name: importlib.import_module(f"kernels.triton_{name}") for name in NAMES}
BF16 = torch.bfloat16


def described(x):
    """Size, type, device and strides of x; the stride of a dimension of one element means nothing, as to a compiler."""
    return tuple(x.shape), x.dtype, x.device.type, tuple(s for n, s in zip(x.shape, x.stride(), strict=True) if n != 1)


def storages(tree):
    return {x.untyped_storage().data_ptr() for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.numel()}


class Compared(TorchDispatchMode):
    """Within this mode the results of every custom operator are compared with those of its fake; `seen` are the names of those."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "hybrid":
            return func(*args, **kwargs or {})
        with FakeTensorMode() as mode:
            fakes = tree_leaves(func(*tree_map_only(torch.Tensor, mode.from_tensor, args)))
        results, name = func(*args), func._schema.name
        for i, (fake, real) in enumerate(zip(fakes, tree_leaves(results), strict=True)):
            assert described(fake) == described(real), f"{name}, result {i}"
        assert not storages(results) & storages(args), f"{name} returns an argument"
        self.seen.add(name)
        return results


@pytest.fixture
def compared(monkeypatch):
    """Every operator by way of its custom operators, each of them compared. Where kernels would be interpreted none runs: what is
    compared does not depend on what they compute."""
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: None)
    for module in (launch, *MODULES.values()):
        if hasattr(module, "traced"):
            monkeypatch.setattr(module, "traced", lambda *_: True)
    with Compared() as mode:
        yield mode


def laid(how, *tensors):
    """Leaves (B, T, H, D), and the same numbers as a projection's chunks, or transposed, or as they are."""
    leaves = [x.to(DEVICE, BF16).requires_grad_() for x in tensors]
    if how == "chunks":
        joined = torch.cat([x.flatten(2) for x in leaves], -1).split([x[0, 0].numel() for x in leaves], -1)
        return leaves, [part.unflatten(2, x.shape[2:]) for part, x in zip(joined, leaves, strict=True)]
    return leaves, [x.transpose(1, 2).contiguous().transpose(1, 2) if how == "transposed" else x for x in leaves]


def differentiate(how, outputs, leaves):
    """Gradients of some function of the outputs: expanded from one number, or transposed as the inputs are."""
    leaves = [x for x in leaves if x is not None and x.requires_grad]
    total = sum((x.transpose(1, 2) * torch.ones_like(x.transpose(1, 2)) if how == "transposed" else x).sum() for x in outputs)
    torch.autograd.grad(total, leaves, allow_unused=True)


# Sizes and the rest of a call: B, T, key heads and heads, their widths, how q, k and v lie in memory, whether there are documents
# and a state, how many slices a sequence has, what is differentiated.
PLAIN = {"B": 2, "T": 33, "Hk": 2, "H": 2, "K": 16, "V": 24, "how": None, "packed": False, "state": False, "slices": 1}
CASES = {
    "one token": {"B": 1, "T": 1},
    "chunks": {"Hk": 1, "how": "chunks", "state": True},
    "transposed": {"how": "transposed", "packed": True},
    "padded": {"T": 65, "K": 10, "V": 3, "state": True, "packed": True},
    "output alone": {"state": True, "of": "output"},
    "state alone": {"state": True, "of": "final"},
    "no gradients": {"how": "chunks", "state": True, "of": None},
    "slices": {"T": 130, "slices": 3, "state": True},
    "slices, grouped": {"T": 130, "slices": 3, "Hk": 1, "packed": True, "how": "chunks"},
    "slices, no gradients": {"B": 1, "T": 100, "slices": 2, "of": None},
}
RULES = {"delta_rule": None, "delta_rule decay": "token", "linear_attention": None, "linear_attention decay": "token",
         "linear_attention constant": "head", "normalized_linear_attention": None, "channel_delta_rule": "channel"}  # fmt: skip


@pytest.mark.parametrize(
    "rule, case",
    [(rule, case) for rule in RULES for case in CASES if "slices" not in case or "channel" not in rule],  # which has no slices
)
def test_recurrences(rule, case, compared, monkeypatch):
    c, op, module = PLAIN | CASES[case], rule.split()[0], MODULES["channel_delta" if "channel" in rule else "recurrence"]
    B, T, H, K, V = (c[n] for n in ("B", "T", "H", "K", "V"))
    monkeypatch.setattr(MODULES["recurrence"], "SLICES", {"programs": B * H * c["slices"], "chunks": 1})
    MODULES["recurrence"]._plan.cache_clear()
    leaves, inputs = laid(c["how"], *(torch.randn(B, T, h, d) for h, d in ((c["Hk"], K), (c["Hk"], K), (H, V))))
    shape = {None: (), "token": (B, T, H), "head": (H,), "channel": (B, T, H, K)}[RULES[rule]]
    options = {"g": -torch.rand(shape, device=DEVICE).requires_grad_(RULES[rule] != "head")} if shape else {}
    if "delta" in rule:
        options["beta"] = torch.rand(B, T, H, device=DEVICE, dtype=BF16, requires_grad=True)
    if c["state"]:
        options["initial_state"] = torch.rand(B, H, K, V + (op == "normalized_linear_attention"), device=DEVICE, requires_grad=True)
    of = c.get("of", "both")
    with torch.set_grad_enabled(of is not None):
        out, final = getattr(module, op)(*inputs, **options, segment_ids=documents(B, T) if c["packed"] else None)
    if of:
        outputs = {"both": (out, final), "output": (out,), "final": (final,)}[of]
        differentiate(c["how"], outputs, [*leaves, *options.values()])
    MODULES["recurrence"]._plan.cache_clear()
    kind = "channel_delta" if "channel" in rule else "recurrence"
    assert compared.seen == {f"hybrid::{kind}_{part}" for part in (["forward", "backward"] if of else ["forward"])}


@pytest.mark.parametrize("how", [None, "chunks", "transposed"])
@pytest.mark.parametrize("options", [{}, {"window": 7, "keep_first": 2, "sinks": True}, {"packed": True}])
def test_attention(options, how, compared):
    B, T, H, width = 2, 37, 4, 20 if how is None else 16
    leaves, inputs = laid(how, *(torch.randn(B, T, h, width) for h in (H, 2, 2)))
    options = dict(options)
    ids = documents(B, T) if options.pop("packed", False) else None
    if options.get("sinks"):
        options["sinks"] = torch.zeros(H, device=DEVICE, requires_grad=True)
    out = MODULES["attention"].softmax_attention(*inputs, **options, segment_ids=ids)
    differentiate(how, [out], [*leaves, options.get("sinks")])
    assert compared.seen == {"hybrid::attention_forward", "hybrid::attention_backward"}


def test_attention_with_earlier_keys(compared):
    _, (q, k, v) = laid("chunks", *(torch.randn(2, 5, h, 16) for h in (4, 2, 2)))
    past = [torch.zeros(2, 9, 2, 16, device=DEVICE, dtype=BF16) for _ in "kv"]
    past += [torch.arange(9, device=DEVICE).expand(2, 9), torch.full((2,), 9, device=DEVICE)]
    with torch.no_grad():
        MODULES["attention"].softmax_attention(q, k, v, window=6, keep_first=2, past=past)
    assert compared.seen == {"hybrid::attention_forward"}


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("how, T", [(None, 21), ("chunks", 32), ("transposed", 21), (None, 1)])
def test_sparse_attention(how, T, top_k, compared):
    B, packed = 2, how == "transposed"
    leaves, (q, k, v, index_q) = laid(how, *(torch.randn(B, T, *s) for s in ((6, 20), (2, 20), (2, 24), (3, 12))))
    more, (index_k, index_w) = laid(None, torch.randn(B, T, 12), torch.randn(B, T, 3))
    ids = documents(B, T) if packed else None
    index = {"top_k": top_k, "local": 2, "segment_ids": ids}
    outputs = [MODULES["indexer"].indexer_kl(q, k, index_q, index_k, index_w, **index)]
    names = ["indexer_kl_forward", "indexer_kl_backward"]
    if top_k:
        outputs.append(MODULES["sparse"].sparse_attention(q, k, v, index_q, index_k, index_w, **index))
        outputs.append(MODULES["sparse"].selected_attention(q, k, v, torch.ones(T, T, dtype=torch.bool, device=DEVICE).tril()))
        names += ["sparse_select", "sparse_lists", "sparse_forward", "sparse_backward"]
    differentiate(None, outputs, [*leaves, *more])
    MODULES["selection"].indexer_scores(*(x.detach() for x in (index_q, index_k, index_w)))
    assert compared.seen == {f"hybrid::{name}" for name in [*names, "indexer_scores"]}


@pytest.mark.parametrize("how", [None, "chunks", "transposed"])
def test_sparse_decoding(how, compared):
    B, S = 2, 24
    _, (q, k, v, index_q) = laid(how, *(torch.randn(B, 1, *s) for s in ((6, 20), (2, 20), (2, 24), (3, 16))))
    index_k, index_w = (torch.randn(B, 1, n, device=DEVICE, dtype=BF16) for n in (16, 3))
    caches = {n: torch.zeros(B, S, *x.shape[2:], device=DEVICE, dtype=BF16) for n, x in (("k", k), ("v", v), ("index", index_k))}
    options = {f"{n}_cache": x for n, x in caches.items()} | {"length": torch.tensor([3, 9], device=DEVICE), "top_k": 4}
    with torch.no_grad():
        MODULES["sparse"].sparse_attention_step(q, k, v, index_q, index_k, index_w, **options)
    assert compared.seen == {"hybrid::sparse_decode"}


@pytest.mark.parametrize("given", [(), ("bias",), ("bias", "initial_state"), ("bias", "initial_state", "segment_ids")])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("split", [None, [16, 10, 6]])
def test_convolution(split, strided, given, compared):
    B, T, D, W = 2, 37, 32, 4
    leaf = torch.randn(B, T, 3 * D, device=DEVICE, dtype=BF16, requires_grad=True)
    x = leaf[..., D : 2 * D] if strided else leaf[..., :D].transpose(1, 2).contiguous().transpose(1, 2)
    weight, bias = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((D, W), (D,)))
    state = torch.randn(B, D, W - 1, device=DEVICE, dtype=BF16, requires_grad=True)
    options = {"bias": bias, "initial_state": state.transpose(1, 2), "segment_ids": documents(B, T)}
    options = {name: options[name] for name in given}
    y, final = MODULES["conv"].causal_conv1d(x, weight, **options, activation="silu", l2_heads=(1, 16), split=split)
    outputs = [y, final] if split is None else [*y, final]
    differentiate("transposed" if strided else None, outputs, [leaf, weight, bias, state])
    assert compared.seen == {"hybrid::causal_conv1d", "hybrid::causal_conv1d_backward"}


@pytest.mark.parametrize("how", [None, "chunks", "transposed"])
@pytest.mark.parametrize("norm", ["rms_norm", "rms_norm of heads", "layer_norm", "l2_norm", "gated_rms_norm"])
def test_norms(norm, how, compared):
    leaves, (x, z) = laid(how, torch.randn(2, 7, 3, 20), torch.randn(2, 7, 3, 20))
    weight, bias = (torch.randn(3, 20, device=DEVICE, requires_grad=True) for _ in range(2))
    weight, bias = (weight, bias) if "heads" in norm else (weight[0], bias[0])
    arguments = {"layer_norm": (x, weight, bias), "l2_norm": (x,), "gated_rms_norm": (x, z, weight)}.get(norm, (x, weight))
    differentiate(how, [getattr(MODULES["norm"], norm.split()[0])(*arguments)], [*leaves, weight, bias])
    assert compared.seen == {"hybrid::norm", "hybrid::norm_backward"}


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_loss(gradients, strided, compared):
    x, weight = torch.randn(9, 16, device=DEVICE, dtype=BF16), torch.randn(50, 16, device=DEVICE)
    if strided:
        x, weight = x.T.contiguous().T, weight.T.contiguous().T
    x, weight, labels = x.requires_grad_(gradients), weight.requires_grad_(gradients), torch.randint(50, (9,), device=DEVICE)
    each = MODULES["loss"].linear_cross_entropy(x, weight, labels)
    total = MODULES["loss"].linear_cross_entropy_sum(x, weight, labels)[0]
    names = ["linear_cross_entropy", "linear_cross_entropy_sum"]
    if gradients:
        differentiate(None, [total, each * torch.rand(9, device=DEVICE)], [x, weight])
        names.append("linear_cross_entropy_backward")
    assert compared.seen == {f"hybrid::{name}" for name in names}


def test_no_operator_is_left_out():
    """An operator that is new here needs a test above."""
    pairs = "recurrence", "channel_delta", "attention", "sparse", "indexer_kl"
    tested = {f"{name}_{part}" for name in pairs for part in ("forward", "backward")}
    tested |= {name + part for name in ("causal_conv1d", "norm", "linear_cross_entropy") for part in ("", "_backward")}
    tested |= {"linear_cross_entropy_sum", "sparse_select", "sparse_lists", "sparse_decode", "indexer_scores"}
    kind = type(MODULES["norm"]._forward)
    there = {x._qualname for module in MODULES.values() for x in vars(module).values() if isinstance(x, kind)}
    assert there == {f"hybrid::{name}" for name in tested}
