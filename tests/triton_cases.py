"""What tests of Triton kernels share: inputs that are hard in one way each, packed documents, outputs with all gradients."""

import torch
from test_kernels import relative_error, unit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATES = ("none", "zero", "mild", "wide", "extreme")
LENGTHS = (1, 15, 63, 64, 65, 127, 1000, 4096)  # around a chunk's edges, ragged, and long

__all__ = ["DEVICE", "GATES", "LENGTHS", "delta_inputs", "documents", "outputs", "poison", "relative_error", "unit"]


def log_decay(gate, *shape):
    """Log decays <= 0: None, all 0, mild, over many orders of magnitude, or 0 with some tokens that forget everything."""
    return {
        "none": lambda: None,
        "zero": lambda: torch.zeros(shape),
        "mild": lambda: -0.2 * torch.rand(shape),
        "wide": lambda: torch.log(torch.rand(shape) ** 8),
        "extreme": lambda: -1000.0 * (torch.rand(shape) < 0.05),
    }[gate]()


def delta_inputs(B, T, Hk, H, K, V, gate, correlated=False, beta_max=2.0, channel=False):
    """q, k, v, g, beta of the delta rule in fp32, unit keys, decays per head or (`channel`) per key channel."""
    q, k = torch.randn(B, T, Hk, K), torch.randn(B, T, Hk, K)
    if correlated:
        k = 0.9 * torch.randn(1, 1, Hk, K) + 0.1 * k
    g = log_decay(gate, B, T, H, *([K] if channel else []))
    inputs = dict(q=unit(q), k=unit(k), v=torch.randn(B, T, H, V), g=g, beta=beta_max * torch.rand(B, T, H))
    return {n: None if x is None else x.to(DEVICE) for n, x in inputs.items()}


def documents(B, T):
    """Ids of documents of 1 token and more, across chunk edges, the last row with padding."""
    ids = torch.ones(B, T, dtype=torch.int32)
    for i, cut in enumerate((1, 2, 60, 64, 65, 100)):
        ids[:, cut:] = i + 2
    ids[-1, max(1, T - 9) :] = 0
    return ids.to(DEVICE)


def outputs(op, dtype, inputs, state, ids, low=None):
    """Output, final state and every gradient of a fixed random functional, inputs as `dtype` (q, k, v as `low`)."""
    leaves = {n: x.to(low if low and n in "qkv" else dtype).requires_grad_() for n, x in inputs.items() if x is not None}
    state = state.to(dtype).clone().requires_grad_()
    out, final = op(**{n: leaves.get(n) for n in inputs}, initial_state=state, segment_ids=ids)
    generator = torch.Generator(DEVICE).manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, device=DEVICE, dtype=torch.float64).to(x.dtype) for x in (out, final)]
    loss = (out * weights[0]).sum() + (final * weights[1]).sum()
    grads = torch.autograd.grad(loss, [*leaves.values(), state])
    return {"out": out, "final": final, **dict(zip([*leaves, "state"], grads, strict=True))}


def poison(monkeypatch):
    """From now on floating-point tensors of `new_empty` are full of NaN: an output that is not written everywhere shows."""
    empty = torch.Tensor.new_empty

    def poisoned(x, *args, **kwargs):
        new = empty(x, *args, **kwargs)
        return new.fill_(float("nan")) if new.is_floating_point() else new

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
