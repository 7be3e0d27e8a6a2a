"""The public operators, and the only place that decides which implementation runs.

Backends: `reference` (the definition, token by token), `eager` (chunked PyTorch, any device). The choice is made per call from
the device of the first tensor; `use_backend("reference")` overrides it for tests and benchmarks. Operators and their shapes
are documented in `reference.py`; every backend module has functions of the same names and signatures, and may lack some.
"""

import contextlib

from . import eager, reference
from .reference import cache_positions, cache_slots, document_positions, segment_runs

BACKENDS = {"reference": reference, "eager": eager}
PREFERENCE = {"cuda": ("eager",), "cpu": ("eager",)}  # per device type, best first; other devices as the CPU

_forced = None
__all__ = ["BACKENDS", "backend_of", "cache_positions", "cache_slots", "document_positions", "segment_runs", "use_backend"]


def backend_of(op, device_type):
    """Name of the backend that runs operator `op` on this device type: what the layer table prints."""
    names = (
        (_forced, *PREFERENCE.get(device_type, PREFERENCE["cpu"])) if _forced else PREFERENCE.get(device_type, PREFERENCE["cpu"])
    )
    return next((name for name in names if hasattr(BACKENDS[name], op)), "eager")


@contextlib.contextmanager
def use_backend(name):
    """Within this context every operator that backend `name` has runs there."""
    global _forced
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r}: choose one of {', '.join(BACKENDS)}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def _dispatched(op):
    def call(*args, **kwargs):
        x = args[0] if args else next(iter(kwargs.values()))
        return getattr(BACKENDS[backend_of(op, x.device.type)], op)(*args, **kwargs)

    call.__name__ = call.__qualname__ = op
    call.__doc__ = getattr(reference, op).__doc__
    return call


# Sequence operators and their step twins.
linear_attention, linear_attention_step = _dispatched("linear_attention"), _dispatched("linear_attention_step")
normalized_linear_attention = _dispatched("normalized_linear_attention")
normalized_linear_attention_step = _dispatched("normalized_linear_attention_step")
delta_rule, delta_rule_step = _dispatched("delta_rule"), _dispatched("delta_rule_step")
causal_conv1d, causal_conv1d_step = _dispatched("causal_conv1d"), _dispatched("causal_conv1d_step")
softmax_attention, softmax_attention_step = _dispatched("softmax_attention"), _dispatched("softmax_attention_step")
sparse_attention, sparse_attention_step = _dispatched("sparse_attention"), _dispatched("sparse_attention_step")

# Token by token, without state.
indexer_scores, select_top_k = _dispatched("indexer_scores"), _dispatched("select_top_k")
selected_attention = _dispatched("selected_attention")
rms_norm, layer_norm, l2_norm = _dispatched("rms_norm"), _dispatched("layer_norm"), _dispatched("l2_norm")
gated_rms_norm = _dispatched("gated_rms_norm")
linear_cross_entropy = _dispatched("linear_cross_entropy")
