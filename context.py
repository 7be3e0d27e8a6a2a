"""Rows longer than one GPU: each of N ranks holds T/N consecutive tokens of every row (`--context_parallel=N`).

Mixers do not know of it: what they call in `kernels` is completed on the way. A recurrent operator or a convolution gets the final
state of the rank before as its initial state and hands its own on; softmax attention gets the keys and values of the ranks before
as `past`. Both are exact and differentiable: the states' gradients travel back the way the states came. What this costs, and
what it would take to shorten the chain of states, is in docs/scaling.md.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

import kernels
from data.loader import Batch

# Operators whose state is handed on, and its shape but for the rows.
STATES = {
    "linear_attention": lambda q, k, v, *_: (v.shape[2], k.shape[-1], v.shape[-1]),
    "normalized_linear_attention": lambda q, k, v, *_: (v.shape[2], k.shape[-1], v.shape[-1] + 1),
    "delta_rule": lambda q, k, v, *_: (v.shape[2], k.shape[-1], v.shape[-1]),
    "channel_delta_rule": lambda q, k, v, *_: (v.shape[2], k.shape[-1], v.shape[-1]),
    "causal_conv1d": lambda x, weight, *_: (weight.shape[1] - 1, x.shape[2]),
}
REFUSED = ("sparse_attention",)  # a selection over keys that lie elsewhere


class Context:
    """This rank's part of the rows that it shares with `size` - 1 neighbours."""

    def __init__(self, ranks, size):
        self.size, self.part = size, ranks.rank % size
        groups = [dist.new_group(range(first, first + size)) for first in range(0, ranks.world, size)]  # every rank makes them all
        self.group, self.first = groups[ranks.rank // size], ranks.rank - self.part
        self.sent = []  # sends under way, with what they send

    def take(self, batch):
        """(this rank's columns of a batch of whole rows, the positions of its tokens in their documents)."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()
        tokens, labels, ids = batch[:3]
        B, T = tokens.shape
        n = T // self.size
        start, here = self.part * n, slice(self.part * n, (self.part + 1) * n)
        t = torch.arange(T, device=tokens.device)
        if ids is None:
            run, positions = torch.zeros_like(tokens), t.expand(B, T)
        else:
            run, positions = kernels.segment_runs(ids)[0], kernels.document_positions(ids)
        self.goes_on = (run[:, start - 1] == run[:, start]) if self.part else torch.zeros(B, dtype=torch.bool, device=tokens.device)
        self.length = torch.where(self.goes_on, positions[:, start], 0)
        past = self.goes_on[:, None] & (t < start) & (run == run[:, start : start + 1])
        self.past = torch.where(past, positions, -1)
        return Batch(tokens[:, here], labels[:, here], None if ids is None else ids[:, here].contiguous()), positions[:, here]

    def through(self, op, call, args, kwargs):
        """Make one operator call; see `kernels.route`."""
        if op in STATES:
            x = args[0]
            shape = (x.shape[0], *STATES[op](*args))
            state = _Receive.apply(x, self, shape, torch.promote_types(x.dtype, torch.float32))
            out, final = call(*args, **{**kwargs, "initial_state": state})
            first, *rest = out if isinstance(out, tuple) else (out,)  # one slice leads the gradient to the state
            first = _HandOn.apply(first, final, self)
            return ((first, *rest) if rest else first), final
        if op == "softmax_attention":
            q, k, v = args
            keys, values = _Gather.apply(torch.cat([k, v], dim=-1), self).split([k.shape[-1], v.shape[-1]], dim=-1)
            if not any(kwargs.get(name) is not None for name in ("segment_ids", "window", "sinks")):
                seen = keys.shape[1] // self.size * (self.part + 1)
                return causal_tail(q, keys[:, :seen], values[:, :seen], kwargs.get("scale"), kwargs.get("dropout_p", 0.0))
            return call(q, k, v, **{**kwargs, "past": (keys, values, self.past, self.length)})
        return call(*args, **kwargs)

    def send(self, x, to):
        x = x.contiguous()
        self.sent.append((dist.isend(x, self.first + to, group=self.group), x))

    def receive(self, like, source):
        x = torch.empty_like(like)
        dist.recv(x, self.first + source, group=self.group)
        return x


def causal_tail(q, k, v, scale=None, dropout_p=0.0):
    """Causal attention of the last tokens of a row, q `(B, n, H, D)`, to all of it, k, v `(B, S, Hk, D)`, S >= n.

    PyTorch's flash attention knows this case: no mask of n x S, which 256k tokens do not leave room for.
    """
    bias, gqa = causal_lower_right(q.shape[1], k.shape[1]), q.shape[2] != k.shape[2]
    q, k, v = (x.to(q.dtype).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale, enable_gqa=gqa).transpose(1, 2)


class _Receive(torch.autograd.Function):
    """The state of the rank before, zero for a row whose document begins here; backward: its gradient goes back there."""

    @staticmethod
    def forward(ctx, anchor, context, shape, dtype):
        ctx.context, state = context, torch.zeros(shape, dtype=dtype, device=anchor.device)
        ctx.goes_on = context.goes_on.view(-1, *[1] * (len(shape) - 1))
        return context.receive(state, context.part - 1) * ctx.goes_on if context.part else state

    @staticmethod
    def backward(ctx, gradient):
        if ctx.context.part:
            ctx.context.send(gradient * ctx.goes_on, ctx.context.part - 1)
        return None, None, None, None


class _HandOn(torch.autograd.Function):
    """The output as it is, the state sent to the next rank; backward: the state's gradient comes from there."""

    @staticmethod
    def forward(ctx, out, state, context):
        ctx.context, ctx.last = context, context.part == context.size - 1
        ctx.like, ctx.dtype = state.new_empty(state.shape, dtype=torch.promote_types(state.dtype, torch.float32)), state.dtype
        if not ctx.last:
            context.send(state.to(ctx.like.dtype), context.part + 1)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, gradient):
        state = None if ctx.last else ctx.context.receive(ctx.like, ctx.context.part + 1).to(ctx.dtype)
        return gradient, state, None


class _Gather(torch.autograd.Function):
    """(B, n, ...) of each rank, side by side: (B, size n, ...); backward: the sum over ranks of what is this rank's."""

    @staticmethod
    def forward(ctx, x, context):
        ctx.context, parts = context, [torch.empty_like(x) for _ in range(context.size)]
        dist.all_gather(parts, x.contiguous(), group=context.group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).contiguous()
        dist.all_reduce(total, group=ctx.context.group)
        return total.chunk(ctx.context.size, dim=1)[ctx.context.part].to(gradient.dtype), None
