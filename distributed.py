"""Several processes as one run: `torchrun --nproc_per_node=N train.py ...`, on PyTorch's own engines.

DDP keeps the whole model on every rank and averages the gradients. FSDP2 (`--parallel=fsdp`) keeps on each rank 1/N of every
parameter, gradient and moment, and gathers a layer's parameters when it runs. Either way a rank's loss is its sum over labels times
N over the number of labels of all ranks, so that the average is the gradient of the mean over the global batch.

What the ranks must agree on (labels, a stop, the end of an evaluation) are a few numbers a step, summed on the host over gloo: no
GPU waits for them.
"""

import contextlib
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from configurator import ConfigError


class Ranks:
    """The processes of this run as torchrun set them up: `rank` of `world`, the `local` one of this host; alone: 0 of 1."""

    def __init__(self):
        self.rank, self.local = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")

    def sum(self, *numbers):
        """Each number summed over the ranks, as floats in double precision, the same on every rank."""
        if self.world == 1:
            return numbers
        box = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(box)
        return tuple(box.tolist())

    def first(self, function, *args):
        """What function(*args) returns on rank 0, on every rank. A ConfigError it raises ends them all, told once."""
        if self.world == 1:
            return function(*args)
        box = [None]
        if self.rank == 0:
            try:
                box = [(function(*args), None)]
            except ConfigError as e:
                box = [(None, e)]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        value, error = box[0]
        if error is not None:
            if self.rank == 0:
                raise error
            sys.exit(2)
        return value

    def union(self, problems):
        """The problems of all ranks, each once, on every rank."""
        if self.world == 1:
            return problems
        box = [None] * self.world
        dist.all_gather_object(box, problems)
        return list(dict.fromkeys(problem for found in box for problem in found))

    def leave(self):
        if self.world > 1:
            self.sum(0)  # until the first one has written what it has to write
            dist.destroy_process_group()


def spread(model, called, parallel, dtype, ranks, device):
    """The module to call in training. `called` is the model, or the compiled form of it that DDP is to wrap."""
    if ranks.world == 1:
        return called
    if parallel == "fsdp":
        shard(model, dtype, init_device_mesh(device.type, (ranks.world,)))
        return called
    unused = any("sparse_attention" in getattr(m, "operators", ()) for m in model.modules())  # the loss does not reach its indexer
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # 2.11 has no other name for it
        return DistributedDataParallel(called, gradient_as_bucket_view=True, broadcast_buffers=False, find_unused_parameters=unused)


def shard(model, dtype, mesh):
    """FSDP2 in place: a group per layer, and in 16-bit training a group of its own for the layer's matrices.

    A group is gathered in one type. Matrices are gathered in `dtype`, as autocast would cast them anyway; decays, step sizes,
    convolutions and norms stay fp32, since a bf16 `A_log` or `dt_bias` moves a gate near 1 by a percent of its distance from 1 and
    a state of thousands of tokens by much more. The embedding (and the head) belong to the model's own group, in fp32.
    """
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")  # which nothing writes to
    half = dtype in (torch.bfloat16, torch.float16)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        matrices = [m for m in block.modules() if isinstance(m, nn.Linear)]
        if half and matrices:
            fully_shard(matrices, mesh=mesh, mp_policy=policy)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def syncing(training, on):
    """The context of one micro-batch, forward and backward: DDP exchanges gradients in the last one of a step only."""
    return training.no_sync() if isinstance(training, DistributedDataParallel) and not on else contextlib.nullcontext()


def reshard(model):
    """Give up what an evaluation left gathered: FSDP's own parameters, those the optimizer knows, are in place again."""
    if isinstance(model, FSDPModule):
        model.reshard()


def whole(x):
    """The tensor that is spread over the ranks, whole; collective. Others as they are."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def part(x, p):
    """Of a whole tensor, which every rank has, what belongs beside parameter p, on its device."""
    x = x.to(p.device)
    return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else x
