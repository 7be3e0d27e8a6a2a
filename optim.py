"""What turns gradients into steps: the schedule, the optimizers, the scale of fp16's loss, gradients that are not finite."""

import math

import torch
from torch import nn

import distributed
from model import SparseAttention


def learning_rate(step, config):
    """Linear warm-up to `learning_rate`, then down to `min_lr` at `lr_decay_iters`.

    cosine: half a cosine (nanoGPT's). wsd (warmup-stable-decay, 2404.06395): flat, then a line over the last `decay_fraction` of
    `lr_decay_iters`; any step of the flat part can be branched from.
    """
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if not config.decay_lr:
        return config.learning_rate
    if step >= config.lr_decay_iters:
        return config.min_lr
    span = config.learning_rate - config.min_lr
    if config.lr_schedule == "wsd":
        begins = max(config.warmup_iters, config.lr_decay_iters * (1 - config.decay_fraction))
        return config.learning_rate - span * max(0.0, (step - begins) / (config.lr_decay_iters - begins))
    ratio = (step - config.warmup_iters) / (config.lr_decay_iters - config.warmup_iters)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * span


class Optimizers:
    """AdamW, or Muon for the layers' matrices and AdamW for the rest, as one.

    Muon (Jordan et al. 2024) orthogonalises the momentum of a matrix. Its step is scaled to AdamW's root mean square
    (Liu et al. 2502.16982), so that one learning rate and one weight decay serve both.
    """

    def __init__(self, model, config, device):
        groups, matrices = model.parameter_groups(config.weight_decay), []
        if config.optimizer == "muon":
            linear = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "head"}
            groups, matrices = split(groups, linear)
        sharded = any(isinstance(p, distributed.DTensor) for p in model.parameters())
        options = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2)}
        if config.cuda_graph:  # a graph reads its rate from the device
            options |= {"lr": torch.tensor(config.learning_rate, device=device), "capturable": True}
        fused = device.type == "cuda" or (device.type == "cpu" and not sharded)
        self.each = [torch.optim.AdamW(groups, **options, fused=fused)]
        if matrices:
            muon = {"lr": config.learning_rate, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
            self.each.append(torch.optim.Muon(matrices, **muon))
        self.parameters = [p for o in self.each for group in o.param_groups for p in group["params"]]
        self.clipped = [self.parameters]
        if config.indexer == "joint":  # two losses: the norm of one must not shorten the steps of the other
            own = {p for m in model.modules() if isinstance(m, SparseAttention) for p in m.indexer_parameters()}
            self.clipped = [[p for p in self.parameters if (p in own) == mine] for mine in (False, True)]

    def set_learning_rate(self, value):
        for o in self.each:
            for group in o.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(value)
                else:
                    group["lr"] = value

    def clip(self, most, scale):
        """Undo the loss's `scale`, clip the gradient's norm to `most` (0: no limit); returns the norm before, over all ranks.

        Where the indexers learn beside the rest, theirs and the rest's are clipped each by itself.
        """
        if scale != 1:
            for p in self.parameters:
                if p.grad is not None:
                    p.grad.div_(scale)
        norms = [distributed.whole(nn.utils.clip_grad_norm_(part, most or math.inf)) for part in self.clipped]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def step(self):
        for o in self.each:
            o.step()

    def zero_grad(self):
        for o in self.each:
            o.zero_grad(set_to_none=True)


def split(groups, names):
    """Parameter groups without the parameters called `names`, and groups of those alone; empty ones left out."""

    def some(wanted):
        for group in groups:
            chosen = [(p, n) for p, n in zip(group["params"], group["names"], strict=True) if (n in names) == wanted]
            if chosen:
                yield {**group, "params": [p for p, _ in chosen], "names": [n for _, n in chosen]}

    return list(some(False)), list(some(True))


class LossScale:
    """fp16 has no gradients below 6e-8: the loss is multiplied by `scale`, halved where a gradient overflows, doubled after 2,000
    steps without one. In other types it is 1 and stays so."""

    PATIENCE = 2000

    def __init__(self, dtype):
        self.enabled = dtype == "float16"
        self.scale, self.good = (2.0**16 if self.enabled else 1.0), 0

    def update(self, finite):
        if not self.enabled:
            return
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good == self.PATIENCE:
            self.scale, self.good = self.scale * 2, 0

    def state_dict(self):
        return {"scale": self.scale, "good": self.good}

    def load_state_dict(self, state):
        self.scale, self.good = state["scale"], state["good"]


class Finite:
    """Whether gradients are finite, asked step by step without making the GPU wait where that is possible.

    `late`: the answer to `ask` is about the step before, whose norm has reached the host by now, and `settle` waits for the newest.
    That is enough to stop a run, since nothing is saved unsettled. Otherwise the answer is about this step, in time to skip it.
    """

    def __init__(self, device, late):
        self.late = late and device.type == "cuda"
        self.waiting = None  # (step, norm on the host, event)

    def ask(self, step, norm):
        """(step, norm) of a gradient that is not finite, or None."""
        if not self.late:
            value = norm.item()
            return None if math.isfinite(value) else (step, value)
        before = self.settle()
        host = torch.empty((), pin_memory=True).copy_(norm, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.waiting = step, host, event
        return before

    def settle(self):
        if self.waiting is None:
            return None
        (step, host, event), self.waiting = self.waiting, None
        event.synchronize()
        return None if math.isfinite(host.item()) else (step, host.item())
