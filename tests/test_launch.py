"""Launches of kept kernels: never one that Triton compiled for other arguments."""

import itertools
import weakref

import pytest
import torch
from triton import JITFunction, knobs
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.knobs import HookChain
from triton_cases import DEVICE, delta_inputs, relative_error

import kernels
from kernels import launch


def add(x, y, n, scale, tile, SIZE, FLAG):
    """A kernel by its arguments only."""


class Compiled:
    """Of one specialization and device, as Triton makes it; `calls` is what it was launched with since, `heard` those of them that
    Triton's hooks heard of."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.calls, self.heard = [], []

    def run(self, x, y, z, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook, *args):
        assert (function, packed_metadata, launch_metadata, enter_hook, exit_hook) == ("function", "metadata", None, None, None)
        self.calls.append(((x, y, z), args, stream))

    def __getitem__(self, grid):
        def run(*args, stream):
            self.calls.append((grid, args, stream))
            self.heard.append(self.calls[-1])

        return run


class Driver:
    device = 0

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 10 * device


@pytest.fixture
def triton_runs(monkeypatch):
    """What Triton is asked to run itself, as (args, keyword arguments, what it compiled), on a machine that seems to have a GPU."""
    runs, active = [], Driver()

    def run(self, *args, **kwargs):
        runs.append((args, kwargs, Compiled()))
        return runs[-1][2]

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launch.driver, "_active", active)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return runs, active


def new_launch(**constants):
    return launch.Launch(JITFunction(add), **{"FLAG": True, "SIZE": 64, "num_warps": 4} | constants)


def arguments(**changed):
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    return list(
        ({"x": x, "y": x[1:], "n": 7, "scale": 0.5, "tile": launch.Tile(x, [64, 64], [64, 1], [16, 64])} | changed).values()
    )


def test_a_kept_kernel_gets_the_same_arguments(triton_runs):
    runs, _ = triton_runs
    one, args = new_launch(), arguments()
    one(5, *args)
    one(6, *args)
    assert len(runs) == 1 and runs[0][1] == {"grid": (5,), "warmup": False, "FLAG": True, "SIZE": 64, "num_warps": 4}
    ((grid, given, stream),) = runs[0][2].calls
    assert grid == (6, 1, 1) and stream == 0 and all(a is b for a, b in zip(given, [*args, 64, True], strict=True))


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_hear_of_launches(name, triton_runs, monkeypatch):
    runs, _ = triton_runs
    one, args = new_launch(), arguments()
    for _ in range(2):
        one(1, *args)
    chain = HookChain()
    for hook in (chain, lambda metadata: None, None):
        monkeypatch.setattr(knobs.runtime, name, hook)
        one(1, *args)
    chain.add(print)
    monkeypatch.setattr(knobs.runtime, name, chain)
    one(1, *args)
    assert len(runs) == 1 and len(runs[0][2].calls) == 5 and len(runs[0][2].heard) == 2


def test_a_direct_operator_is_differentiated_once():
    """As with a custom operator, a gradient for create_graph is given, and differentiating it is refused."""
    square = launch.direct(
        lambda x: (x * x,),
        lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        lambda ctx, dy: 2 * ctx.saved_tensors[0] * dy,
    )
    x, w = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    (dx,) = torch.autograd.grad((square(x) * w).sum(), x)
    assert torch.equal(dx, 2 * torch.ones(3)) and not dx.requires_grad
    (dx,) = torch.autograd.grad((square(x) * w).sum(), x, create_graph=True)
    assert torch.equal(dx, 2 * torch.ones(3)) and dx.requires_grad
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


def test_results_live_as_long_as_their_tensor():
    """Of several tensors in turn, as layers have constants of their own; nothing is left of one that died, or was written to."""
    seen = []

    @launch.shared_by_layers
    def double(x):
        seen.append(x[0].item())
        return 2 * x

    first, second = torch.ones(2), torch.full((2,), 3.0)
    results = [double(x) for x in (first, second) * 3]
    assert seen == [1, 3] and all(a is b for a, b in zip(results, results[:2] * 3, strict=True))
    first.mul_(5)
    assert double(first)[0] == 10 and double(first)[0] == 10 and double(second) is results[1] and seen == [1, 3, 5]
    ghosts = [weakref.ref(double(x)) for x in (first, second)]
    del first, second, results
    assert [ghost() for ghost in ghosts] == [None, None]


CHANGES = {
    "alignment": {"x": torch.zeros(65, dtype=torch.bfloat16)[1:]},
    "type": {"x": torch.zeros(64)},
    "no tensor": {"y": None},
    "integer 1": {"n": 1},
    "multiple of 16": {"n": 32},
    "64 bits": {"n": 2**31},
    "block": {"tile": launch.Tile(torch.zeros(64, 64, dtype=torch.bfloat16), [64, 64], [64, 1], [32, 64])},
    "type of a descriptor": {"tile": launch.Tile(torch.zeros(64, 64), [64, 64], [64, 1], [16, 64])},
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_arguments_are_triton_s_to_specialize(change, triton_runs):
    runs, _ = triton_runs
    one = new_launch()
    one(1, *arguments())
    one(1, *arguments(**CHANGES[change]))
    assert len(runs) == 2 and not runs[0][2].calls
    one(1, *arguments())
    assert len(runs) == 2 and len(runs[0][2].calls) == 1


def test_another_device(triton_runs):
    runs, active = triton_runs
    one = new_launch()
    one(1, *arguments())
    active.device = 1
    one(1, *arguments())
    one(1, *arguments())
    assert len(runs) == 2 and not runs[0][2].calls and runs[1][2].calls[0][2] == 10


def test_unknown_arguments_are_never_kept(triton_runs):
    runs, _ = triton_runs
    one = new_launch()
    for n in (2**31, 2**31, True, True, (1, 2), (1, 2)):
        one(1, *arguments(n=n))
    assert len(runs) == 6


def test_other_constants_are_another_launch():
    kernel = JITFunction(add)
    assert launch.launch(kernel, SIZE=64, FLAG=True) is launch.launch(kernel, SIZE=64, FLAG=True)
    assert launch.launch(kernel, SIZE=64, FLAG=True) is not launch.launch(kernel, SIZE=64, FLAG=False)
    assert launch.launch(kernel, SIZE=64, FLAG=True, num_warps=8) is not launch.launch(kernel, SIZE=64, FLAG=True, num_warps=4)


def test_the_key_tells_apart_what_triton_does():
    """Whatever two arguments have one key in common, Triton compiles the same kernel for both."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    types = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int8, torch.bool, torch.float64
    whole = [torch.zeros(64, dtype=dtype) for dtype in types]
    values = [x[i:] for x in whole for i in (0, 1, 2, 4, 8, 16)] + [torch.nn.Parameter(whole[0]), torch.empty(0)]
    values += [0, 1, -1, 2, 15, 16, 17, -16, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 2**40, 2**63, True, False, 0.0, 1.0, None]
    values += [launch.Tile(x.view(4, 16), [4, 16], [16, 1], [4, n]) for x in whole[:3] for n in (8, 16)]
    for x, y in itertools.combinations(values, 2):
        key = launch.specialization((x,))
        if key is not None and key == launch.specialization((y,)):
            assert native_specialize_impl(backend, x, False, True, True) == native_specialize_impl(backend, y, False, True, True)


def shifted(x):
    """x at an address that is no multiple of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("T", [48, 49])
def test_aligned_and_unaligned_inputs_in_turn(T):
    """Of the same shapes, twice each: on a GPU a kernel compiled for aligned ones would read the others wrong."""
    inputs = delta_inputs(1, T, 2, 2, 16, 16, "mild")
    x, weight = torch.randn(1, T, 24, device=DEVICE), torch.randn(24, 4, device=DEVICE)
    cases = [
        ("delta_rule", list(inputs.values())),
        ("causal_conv1d", [x, weight]),
        ("gated_rms_norm", [x, x.flip(1), weight[:, 0].contiguous()]),
    ]
    for op, args in cases:
        want = getattr(kernels.eager, op)(*args)
        for moved in (False, True, False, True):
            with kernels.use_backend("triton"):
                got = getattr(kernels, op)(*(shifted(a) if moved else a for a in args))
            for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
                assert relative_error(a, b) < 2e-3, (op, moved)
