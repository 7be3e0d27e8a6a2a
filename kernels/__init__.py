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
import warnings

from . import eager, reference
from .reference import cache_positions, cache_slots, document_positions, segment_runs

MODULES = {"reference": reference, "eager": eager}
TRITON = dict.fromkeys(("delta_rule", "linear_attention"), "triton_recurrence")  # operator: module, imported at first use
PREFERENCE = {"cuda": ("triton", "eager")}  # per device type, best first; elsewhere eager

_forced = None
__all__ = ["backend_of", "cache_positions", "cache_slots", "document_positions", "segment_runs", "use_backend"]


@functools.cache
def _has_triton():
    return importlib.util.find_spec("triton") is not None


def _has(backend, op):
    return op in TRITON and _has_triton() if backend == "triton" else hasattr(MODULES[backend], op)


def backend_of(op, device_type):
    """Name of the backend that runs operator `op` on this device type: what the layer table prints."""
    wanted = (_forced,) if _forced else PREFERENCE.get(device_type, ())
    return next((name for name in wanted if _has(name, op)), "eager")


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


@functools.cache
def _announce(op, reason):
    warnings.warn(f"{op} runs in eager PyTorch, not in Triton: {reason}", stacklevel=4)


def _dispatched(op):
    def call(*args, **kwargs):
        x = args[0] if args else next(iter(kwargs.values()))
        backend = backend_of(op, x.device.type)
        if backend == "triton":
            module = importlib.import_module(f".{TRITON[op]}", __name__)
            reason = module.supports(*args, **kwargs)
            if reason is None:
                return getattr(module, op)(*args, **kwargs)
            _announce(op, reason)
            backend = "eager"
        return getattr(MODULES[backend], op)(*args, **kwargs)

    call.__name__ = call.__qualname__ = op
    call.__doc__ = getattr(reference, op).__doc__
    return call


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
selected_attention = _dispatched("selected_attention")
rms_norm, layer_norm, l2_norm = _dispatched("rms_norm"), _dispatched("layer_norm"), _dispatched("l2_norm")
gated_rms_norm = _dispatched("gated_rms_norm")
linear_cross_entropy = _dispatched("linear_cross_entropy")
