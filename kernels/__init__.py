"""The public operators, and the only place that decides which implementation runs.

Backends: `reference` (the definition, token by token), `eager` (chunked PyTorch, any device), `triton` (CUDA). The choice is made
per call from the device of the first tensor; `use_backend("reference")` overrides it for tests and benchmarks. Operators and their
shapes are documented in `reference.py`; every backend has functions of the same names and signatures, and may lack some. What a
Triton operator cannot take (a `supports` beside it says why) runs in eager, announced once.
"""

import contextlib
import functools
import importlib
import importlib.util
import sys
import warnings

import torch

from . import eager, reference
from .reference import cache_positions, cache_slots, document_positions, segment_runs

MODULES = {"reference": reference, "eager": eager}
# Operator: module, imported at first use.
TRITON = dict.fromkeys(("delta_rule", "linear_attention", "normalized_linear_attention"), "triton_recurrence")
_steps = ("linear_attention", "normalized_linear_attention", "delta_rule", "channel_delta_rule", "softmax_attention")
TRITON |= dict.fromkeys((f"{op}_step" for op in _steps), "triton_step")
TRITON |= {"causal_conv1d": "triton_conv"} | dict.fromkeys(("rms_norm", "layer_norm", "l2_norm", "gated_rms_norm"), "triton_norm")
TRITON |= dict.fromkeys(("linear_cross_entropy", "linear_cross_entropy_sum"), "triton_loss")
TRITON["softmax_attention"], TRITON["channel_delta_rule"] = "triton_attention", "triton_channel_delta"
TRITON |= dict.fromkeys(("indexer_scores", "select_top_k"), "triton_selection") | {"indexer_kl": "triton_indexer"}
TRITON |= dict.fromkeys(("selected_attention", "sparse_attention", "sparse_attention_step"), "triton_sparse")
PREFERENCE = {"cuda": ("triton", "eager")}  # per device type, best first; elsewhere eager

_forced, _through, _package = None, None, sys.modules[__name__]
__all__ = ["backend_of", "cache_positions", "cache_slots", "document_positions", "observe", "route", "segment_runs", "use_backend"]


@functools.cache
def _find_triton():
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _import(name):
    importlib.import_module(f".{name}", __name__)
    return name


# Imports cannot be traced: under torch.compile they happen beside the graph, which would else break at every operator.
@torch.compiler.assume_constant_result
def _has_triton():
    return _find_triton()


@torch.compiler.assume_constant_result
def _imported(name):
    return _import(name)


def _has(backend, op):
    return op in TRITON and _has_triton() if backend == "triton" else hasattr(MODULES[backend], op)


def _triton(op):
    return getattr(_package, _imported(TRITON[op]))


def backend_of(op, device_type, **options):
    """Name of the backend that runs operator `op`, called with these options, on this device type: what the layer table prints.

    Where a Triton module says so (`prefers_eager`), eager is the faster and runs unless Triton is asked for by name.
    """
    wanted = (_forced,) if _forced else PREFERENCE.get(device_type, ())
    backend = next((name for name in wanted if _has(name, op)), "eager")
    if backend == "triton" and _forced is None:
        prefers_eager = getattr(_triton(op), "prefers_eager", None)
        return "eager" if prefers_eager is not None and prefers_eager(**options) else backend
    return backend


@contextlib.contextmanager
def use_backend(name):
    """Within this context every operator that backend `name` has runs there."""
    global _forced
    if name not in (*MODULES, "triton"):
        raise ValueError(f"backend {name!r}: choose one of {', '.join([*MODULES, 'triton'])}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


@contextlib.contextmanager
def route(through):
    """Within this context every operator call is made by `through(op, call, args, kwargs)`, `call` being the operator itself."""
    global _through
    before, _through = _through, through
    try:
        yield
    finally:
        _through = before


def observe(see):
    """Within this context `see(op, args, kwargs, result)` is told of every operator call: for health figures and tests."""

    def through(op, call, args, kwargs):
        result = call(*args, **kwargs)
        see(op, args, kwargs, result)
        return result

    return route(through)


@functools.cache
def _announce(op, reason):
    warnings.warn(f"{op} runs in eager PyTorch, not in Triton: {reason}", stacklevel=5)


def _dispatched(op):
    def call(*args, **kwargs):
        x = args[0] if args else next(iter(kwargs.values()))
        backend = backend_of(op, x.device.type, **kwargs)
        if backend == "triton":
            module = _triton(op)
            supports = getattr(module, f"supports_{op}", None) or module.supports  # of one operator, or of all in the module
            reason = supports(*args, **kwargs)
            if reason is None:
                return getattr(module, op)(*args, **kwargs)
            _announce(op, reason)
            backend = "eager"
        return getattr(MODULES[backend], op)(*args, **kwargs)

    def routed(*args, **kwargs):
        return call(*args, **kwargs) if _through is None else _through(op, call, args, kwargs)

    routed.__name__ = routed.__qualname__ = op
    routed.__doc__ = getattr(reference, op).__doc__
    return routed


# Sequence operators and their step twins.
linear_attention, linear_attention_step = _dispatched("linear_attention"), _dispatched("linear_attention_step")
normalized_linear_attention = _dispatched("normalized_linear_attention")
normalized_linear_attention_step = _dispatched("normalized_linear_attention_step")
delta_rule, delta_rule_step = _dispatched("delta_rule"), _dispatched("delta_rule_step")
channel_delta_rule, channel_delta_rule_step = _dispatched("channel_delta_rule"), _dispatched("channel_delta_rule_step")
causal_conv1d, causal_conv1d_step = _dispatched("causal_conv1d"), _dispatched("causal_conv1d_step")
softmax_attention, softmax_attention_step = _dispatched("softmax_attention"), _dispatched("softmax_attention_step")
sparse_attention, sparse_attention_step = _dispatched("sparse_attention"), _dispatched("sparse_attention_step")

# Token by token, without state.
indexer_scores, select_top_k = _dispatched("indexer_scores"), _dispatched("select_top_k")
selected_attention, indexer_kl = _dispatched("selected_attention"), _dispatched("indexer_kl")
rms_norm, layer_norm, l2_norm = _dispatched("rms_norm"), _dispatched("layer_norm"), _dispatched("l2_norm")
gated_rms_norm = _dispatched("gated_rms_norm")
linear_cross_entropy, linear_cross_entropy_sum = _dispatched("linear_cross_entropy"), _dispatched("linear_cross_entropy_sum")
