"""The exam every mixer takes: `python check.py`, `python check.py gdn "swa(window=5)"`, `python check.py mine.py toy`.
On a GPU `python check.py --device=cuda` examines the Triton operators instead (benchmarks/accuracy.py), some of them if named;
with `--beside=fla` only beside flash-linear-attention, with `--seconds=N` as far as it comes in that time.

Arguments are layer-pattern items; without any, all registered mixers and the variants below are examined. A *.py
argument registers further mixers first; with no item beside it, these are examined. A mixer stands alone, small, all
its parameters random, in fp64 unless said otherwise:

    causal    inputs behind t do not change outputs up to t, bit for bit, and do change later ones
    splits    the full result = prefill in pieces = prefill and token by token, however it is cut; rows do not meet
    packed    documents in one row = the same documents apart, gradients included, also where nothing is forgotten;
              what stands in the padding does not matter
    ragged    rows of different lengths, with several documents, read into a state twice and decoded = each document
    state     fork, copy_, save and load go on as the original; gradients together with a state are refused
    cache     caches in bfloat16 under an fp32 mixer stay near the full result
    lengths   eager = reference at lengths around the chunks'
    gradient  of a random functional in the input and every parameter: eager = reference
    fp32      the same functional in fp32 against the fp64 reference
    stress    fp32 on hard inputs and gates: finite, gradients too, and outputs near fp64
    costs     flops and state_bytes are what they say (no figure)

A figure is the worst ||got - want|| / ||want||; the table's last line says how large it may be. A mixer that selects
keys is discontinuous: rounding may swap two nearly equal ones, which is no fault. On fp64 and random fp32 inputs it is
too rare to matter; under `cache` and `stress` only the median token counts if `operators` has `sparse_attention`.
"""

import copy
import math
import re
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch

import configurator
import kernels
from configurator import ConfigError, ModelConfig, format_layers, parse_layers
from model import MIXERS, ModelState, build_mixer, register_from

VARIANTS = """
    attn(n_kv_head=1, gate=true, rope=partial) attn(qk_norm=false, rope=none)
    swa(window=5) swa(window=7, keep_first=2, sinks=true)
    dsa(top_k=8, local=2) dsa(top_k=8, local=0, index_heads=16, n_kv_head=2) dsa(mode=dense)
    linear(feature_map=relu) linear(normalize=false) linear(normalize=false, decay=retnet, gate=silu)
    linear(conv=4) retnet(conv=3)
    deltanet(neg_eigval=true) gdn(n_key_head=1, neg_eigval=true) gdn(steps=2) gdn(conv=0)
    kda(n_key_head=2, low_rank=false, neg_eigval=true) mla(q_rank=24) mla(rope=none) mamba2(groups=2) mamba2(dt_limit_min=0.001)
"""
N_EMBD = 64
CUTS = (0, 1, 2, 3, 15, 16, 17, 63, 64, 65)  # where a sequence is cut: around 1, the convolution, chunks of 16 and 64
F64 = 1e-9
# The others leave room over the worst of the mixers here: 1e-3 to 2e-3 with bfloat16 caches; 2e-5 in fp32, for mamba2
# where products of queries and keys nearly cancel (the token loop is as far off), in stress too with other seeds.
LIMITS = {
    "causal": 0.0, "splits": F64, "packed": F64, "ragged": F64, "state": F64, "cache": 5e-3, "lengths": F64,
    "gradient": F64, "fp32": 1e-4, "stress": 1e-4,
}  # fmt: skip


@dataclass
class Report:
    """What an exam found: the worst error of each group of checks, one line per failure, the time it took."""

    item: str
    errors: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self):
        return not self.failures


class Exam:
    """One mixer under examination, in fp32 and with the same weights in fp64, and its growing report."""

    def __init__(self, item, small):
        self.report, self.T, self.stress_T = Report(item), *((70, 130) if small else (150, 300))
        self.single = randomise(build(item))
        self.double = copy.deepcopy(self.single).double()
        self.selects = "sparse_attention" in self.single.operators
        self.gated = any(n.split(".")[-1] in ("A_log", "dt_bias") for n, _ in self.single.named_parameters())

    def close(self, group, case, got, want, **options):
        error = relative(got, want, **options)
        self.report.errors[group] = max(self.report.errors.get(group, 0.0), error)
        if not error <= LIMITS[group]:
            self.report.failures.append(f"{group}: {case}: error {error:.1e}, limit {LIMITS[group]:.0e}")

    def gradients(self, group, case, got, want):
        """Compare gradients by name; those far smaller than the largest are measured against a millionth of that."""
        floor = 1e-6 * max(x.norm().item() for x in want.values())
        for name in want:
            self.close(group, f"{case}, gradient of {name}", got[name], want[name], floor=floor)

    def holds(self, group, fact, otherwise):
        if not fact:
            self.report.failures.append(f"{group}: {otherwise}")


def relative(got, want, floor=0.0, median=False):
    """||got - want|| / max(||want||, floor), or the median token's; infinite for other shapes and non-finite values."""
    if got.shape != want.shape or not (got.isfinite() & want.isfinite()).all():
        return math.inf
    dim = -1 if median else None
    error = (got.to(want.dtype) - want).norm(dim=dim) / want.norm(dim=dim).clamp(min=max(floor, 1e-30))
    return error.median().item()


def build(item):
    """The small mixer that a pattern item asks for; ConfigError as the model would raise it."""
    spec = parse_layers(item)[0]
    if spec.name == "mlp" or "ffn" in spec.options:
        raise ConfigError(f"{item}: the exam is of mixers alone: drop mlp and ffn=...")
    return build_mixer(spec, ModelConfig(n_embd=N_EMBD, n_head=4, n_layer=4, block_size=512), layer=1)


@torch.no_grad()
def randomise(mixer):
    """Matrices that about keep a vector's length, everything else off its initial value, so that every path shows."""
    for module in mixer.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.normal_(std=module.in_features**-0.5)
    mixer.reset_parameters()
    for p in mixer.parameters():
        p.add_(0.3 * torch.randn_like(p) / (p.shape[-1] ** 0.5 if p.ndim >= 2 else 1.0))
    return mixer.eval()


@torch.no_grad()
def with_gates(mixer, **values):
    """A copy whose parameters `A_log` and `dt_bias` hold these values; a pair alternates along the last dimension."""
    mixer = copy.deepcopy(mixer)
    for name, p in mixer.named_parameters():
        if (value := values.get(name.split(".")[-1])) is not None:
            p.copy_(torch.tensor(value).expand(2).repeat(p.shape[-1])[: p.shape[-1]].expand_as(p))
    return mixer


def inputs(B, T, dtype=torch.float64):
    return torch.randn(B, T, N_EMBD, dtype=torch.float32).to(dtype)  # fp32 and fp64 see the same values


def gradients_of(loss, mixer, x):
    """The gradients of a scalar in x and all parameters, by name; zero where it does not depend on one."""
    names, leaves = zip(("the input", x), *mixer.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True), strict=True))


@torch.no_grad()
def causal(exam):
    T, mixer = exam.T, exam.double
    x, other = inputs(1, T), 3 * inputs(1, T)
    want = mixer(x)
    for t in (*CUTS, T - 2):
        got = mixer(torch.cat([x[:, : t + 1], other[:, t + 1 :]], 1))
        exam.close("causal", f"outputs up to t={t} when later inputs change", got[:, : t + 1], want[:, : t + 1])
        moved = relative(got[:, t + 1 :], want[:, t + 1 :]) > 1e-3
        exam.holds("causal", moved, f"outputs after t={t} do not depend on the inputs there")


@torch.no_grad()
def splits(exam):
    T, mixer = exam.T, exam.double
    x = inputs(2, T)
    want = mixer(x)

    def compare(case, pieces):
        state = mixer.init_state(2, T, dtype=torch.float64)
        got = torch.cat([mixer(piece, state=state) for piece in x.split(pieces, 1)], 1)
        exam.close("splits", case, got, want)
        counted = state.length.tolist()
        exam.holds("splits", counted == [T, T], f"{case}: the state counts {counted} tokens")

    for cut in (*CUTS, T - 1):
        compare(f"{cut} tokens, then one by one", [cut] * (cut > 0) + [1] * (T - cut))
        compare(f"{cut} tokens, then {T - cut}", [cut] * (cut > 0) + [T - cut])
    compare(f"pieces of 5, 1, 60 and {T - 66}", [5, 1, 60, T - 66])
    exam.close("splits", "a row alone", mixer(x[:1]), want[:1])
    exam.close("splits", "a row when the other changes", mixer(torch.cat([x[:1], 3 * inputs(1, T)]))[:1], want[:1])


def pack(rows, T):
    """Segment ids (B, T) int32 of rows of documents, given by their lengths; the ids have gaps."""
    ids = [torch.tensor([2 * i + 1 for i, n in enumerate(row) for _ in range(n)], dtype=torch.int32) for row in rows]
    return torch.stack([torch.nn.functional.pad(row, (0, T - len(row))) for row in ids])


def packed(exam):
    T = exam.T
    # tiny documents, ends on and beside the edges of chunks of 16 and 64, padding, and a row of padding alone
    rows = [[1, 2, 61, 1, T - 68], [16, 1, 31, 15, T - 63], [2, 64, max(1, T - 80)], []]
    ids = pack(rows, T)
    x, w = inputs(4, T), inputs(4, T)
    other_padding = torch.where((ids > 0)[..., None], x, 1e3 * inputs(4, T))
    cases = {"gates as they are": exam.double}
    if exam.gated:
        cases["gates near 0"] = with_gates(exam.double, A_log=-30.0, dt_bias=0.5)
    for case, mixer in cases.items():
        leaf = x.clone().requires_grad_()
        apart = [doc for row, n in zip(leaf, rows, strict=True) for doc in row[None, : sum(n)].split(n, 1)]
        want = torch.cat([mixer(doc)[0] for doc in apart])  # (real tokens, C), as got[ids > 0] has them
        want_gradients = gradients_of((want * w[ids > 0]).sum(), mixer, leaf)
        for name, x_in in ((case, x), (f"{case}, other padding", other_padding)):
            leaf = x_in.clone().requires_grad_()
            got = mixer(leaf, segment_ids=ids)
            exam.holds("packed", got.isfinite().all(), f"{name}: outputs are not finite")
            exam.close("packed", name, got[ids > 0], want)
            exam.gradients("packed", name, gradients_of((got * w)[ids > 0].sum(), mixer, leaf), want_gradients)


@torch.no_grad()
def ragged(exam):
    mixer = exam.double
    first = pack([[17], [30, 10], [40], [1]], 40)
    second = pack([[20], [5, 12], [], [2]], 20)  # the first document of a row is the one that is open
    calls = [(40, first), (20, second), *[(1, None)] * 5, (3, None)]
    state = mixer.init_state(4, sum(n for n, _ in calls), dtype=torch.float64)
    documents = [[[]] for _ in range(4)]  # per row, per document: (input, output) of each token
    for n, ids in calls:
        x = inputs(4, n)
        y = mixer(x, segment_ids=ids, state=state)
        ids = torch.ones(4, n) if ids is None else ids
        for row, t in ids.nonzero().tolist():
            if t and ids[row, t] != ids[row, t - 1]:
                documents[row].append([])
            documents[row][-1].append((x[row, t], y[row, t]))
    for row, docs in enumerate(documents):
        for i, doc in enumerate(docs):
            x, y = (torch.stack(z)[None] for z in zip(*doc, strict=True))
            exam.close("ragged", f"row {row}, document {i} of {len(docs)}, {len(doc)} tokens", y, mixer(x))
    counted, is_so = state.length.tolist(), [len(docs[-1]) for docs in documents]
    exam.holds("ragged", counted == is_so, f"the state counts {counted} tokens, not {is_so}")


def states(exam):
    mixer, n, T = exam.double, 10, 24

    def empty():
        return mixer.init_state(2, T, dtype=torch.float64)

    x = inputs(6, T)
    x[:, :n] = x[:2, :n].repeat_interleave(3, 0)  # two beginnings, each with three continuations
    with torch.no_grad():
        full, state, copied = mixer(x), empty(), empty()
        mixer(x[::3, :n], state=state)
        forked = state.fork(3)
        addresses = [z.data_ptr() for z in copied.tensors.values()]
        copied.copy_(state)
        with tempfile.TemporaryDirectory() as folder:
            ModelState([state]).save(Path(folder) / "state.safetensors")
            loaded = ModelState([empty()]).load(Path(folder) / "state.safetensors").layers[0]
        exam.close("state", "three continuations of a fork", mixer(x[:, n:], state=forked), full[:, n:])
        for name, one in (("a copy", copied), ("saved and loaded", loaded), ("the original, after these", state)):
            exam.close("state", name, mixer(x[::3, n:], state=one), full[::3, n:])
        exam.holds("state", addresses == [z.data_ptr() for z in copied.tensors.values()], "copy_ moved a tensor")
        exam.holds("state", forked.nbytes == 3 * state.nbytes, "fork(3) is not three times as large")
    try:
        mixer(x[::3, n:], state=empty())
    except RuntimeError as error:
        exam.holds("state", "no_grad" in str(error), f"the error under gradients does not name no_grad: {error}")
    else:
        exam.holds("state", False, "gradients together with a state are not refused")


@torch.no_grad()
def caches(exam):
    mixer, x = exam.single, inputs(2, 40, torch.float32)
    want = mixer(x)
    for dtype in (torch.float32, torch.bfloat16):
        state = mixer.init_state(2, 40, dtype=dtype)
        got = torch.cat([mixer(piece, state=state) for piece in x.split([5, 1, 1, 1, 32], 1)], 1)
        exam.holds("cache", got.dtype == x.dtype, f"outputs are {got.dtype} for {x.dtype} inputs and {dtype} caches")
        exam.close("cache", f"caches in {dtype}", got, want, median=exam.selects)


@torch.no_grad()
def lengths(exam):
    for T in (1, 2, 3, 15, 17, 63, 65, 100):
        x = inputs(2, T)
        with kernels.use_backend("reference"):
            want = exam.double(x)
        exam.close("lengths", f"T={T}", exam.double(x), want)


def gradients(exam):
    T = 70  # past a chunk, and no more: the reference goes token by token
    x, w = inputs(1, T), inputs(1, T)

    def run(mixer, dtype):
        leaf = x.to(dtype).requires_grad_()
        y = mixer(leaf)
        return y.detach(), gradients_of((y * w.to(dtype)).sum(), mixer, leaf)

    with kernels.use_backend("reference"):
        want, want_gradients = run(exam.double, torch.float64)
    for group, mixer, dtype in (("gradient", exam.double, torch.float64), ("fp32", exam.single, torch.float32)):
        got, got_gradients = run(mixer, dtype)
        exam.close(group, "output", got, want)
        exam.gradients(group, "random functional", got_gradients, want_gradients)


def stress(exam):
    mixer, x = exam.single, inputs(2, exam.stress_T, torch.float32)
    correlated = inputs(1, 1, torch.float32) + 0.01 * x
    cases = {"correlated inputs": (mixer, correlated), "inputs x 30": (mixer, 30 * x)}
    if exam.gated:
        never = with_gates(mixer, A_log=-10.0, dt_bias=0.0)
        both = with_gates(mixer, A_log=(-10.0, 4.0), dt_bias=(-8.0, 8.0))
        cases["gates that forget at once"] = with_gates(mixer, A_log=4.0, dt_bias=8.0), x
        cases["gates that never forget"] = never, x
        cases["gates that never forget, correlated inputs"] = never, correlated
        cases["gates of both kinds"] = both, x
        cases["gates of both kinds, inputs x 30"] = both, 30 * x
    for case, (one, x) in cases.items():
        leaf = x.clone().requires_grad_()
        got = one(leaf)
        with torch.no_grad():
            want = copy.deepcopy(one).double()(x.double())
        exam.close("stress", case, got.detach(), want, median=exam.selects)
        for name, gradient in gradients_of(got.square().mean(), one, leaf).items():
            exam.holds("stress", gradient.isfinite().all(), f"{case}: gradient of {name} is not finite")


def costs(exam):
    mixer = exam.single
    flops = [mixer.flops(T) for T in (1, 64, 1024, 32768)]
    fine = 0 <= flops[0] and flops == sorted(flops) and math.isfinite(sum(flops))
    exam.holds("costs", fine, f"flops(T) at T=1, 64, 1024, 32768 are {flops}: they should be finite, >= 0, not falling")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        said, is_so = mixer.state_bytes(3, 77, dtype), mixer.init_state(3, 77, dtype=dtype).nbytes
        exam.holds("costs", said == is_so, f"state_bytes says {said} bytes in {dtype}, {is_so} are allocated")


CHECKS = (causal, splits, packed, ragged, states, caches, lengths, gradients, stress, costs)


def examine(item, small=False):
    """The `Report` of all checks on one pattern item, on shorter sequences if `small`; ConfigError as from `build`."""
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        exam = Exam(item, small)
        for check in CHECKS:
            try:
                check(exam)
            except Exception as error:  # of the mixer's own code: whatever it raises is a result, and the exam goes on
                at = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename][-1]
                what = f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno}: {error}"
                exam.holds(check.__name__, False, what)
    exam.report.seconds = time.perf_counter() - start
    return exam.report


def all_items():
    """Every registered mixer with its preset, each followed by its variants."""
    variants = [(spec.name, format_layers([spec])) for spec in parse_layers(VARIANTS)]
    return [item for name in MIXERS for item in (name, *(text for of, text in variants if of == name))]


def items_of(argv):
    """The pattern items that the command line asks for, once each, with its files registered."""
    before, files = dict(MIXERS), [argument for argument in argv if argument.endswith(".py")]
    for path in files:
        register_from(path)
    items = [format_layers([spec]) for text in argv if text not in files for spec in parse_layers(text)]
    if not items:
        items = [n for n, entry in MIXERS.items() if entry is not before.get(n)] if files else all_items()
    if not items:
        raise ConfigError(f'{", ".join(files)}: no class under @mixer("name"), so there is nothing to examine')
    for item in items:
        build(item)  # a ConfigError comes before the table
    return list(dict.fromkeys(items))


def flags_of(argv):
    """The flags of a command line, and its other arguments."""
    flags, rest = {"--device": "cpu"}, [argument for argument in argv if not argument.startswith("-")]
    for argument in [argument for argument in argv if argument not in rest]:
        name, _, value = argument.partition("=")
        if argument in ("--device=cpu", "--device=cuda"):
            flags[name] = value
        elif argument == "--beside=fla":
            flags["beside_only"] = True
        elif name == "--seconds" and re.fullmatch(r"[0-9]+", value) and int(value):
            flags["seconds"] = int(value)
        else:
            allowed = "--device=cpu, --device=cuda, --beside=fla and --seconds=N, a whole number from 1 on"
            raise ConfigError(f"{argument}: the flags are {allowed}")
    if flags["--device"] == "cpu" and len(flags) > 1:
        raise ConfigError("--beside and --seconds are for the operators' exam: add --device=cuda")
    return flags, rest


def main(argv):
    if "-h" in argv or "--help" in argv:
        return print(__doc__, end="")
    flags, argv = flags_of(argv)
    if flags.pop("--device") == "cuda":
        from benchmarks import accuracy

        if failures := accuracy.main(argv, **flags):
            print("\n" + "\n".join(failures))
            sys.exit(1)
        return None
    items, reports = items_of(argv), []
    width = max(map(len, items))
    torch.set_num_threads(1)  # matrices this small: a second thread on a busy core makes it all ten times slower
    print(" " * width + "".join(f"{title:>9}" for title in ("result", *LIMITS, "seconds")))
    for item in items:
        print(f"{item:<{width}}", end="", flush=True)
        reports.append(report := examine(item))
        figures = [f"{report.errors[group]:.0e}" if group in report.errors else "-" for group in LIMITS]
        row = ("ok" if report.ok else "FAILED", *figures, f"{report.seconds:.1f}")
        print("".join(f"{entry:>9}" for entry in row), flush=True)
    print(f"{'limit':<{width + 9}}" + "".join(f"{limit:>9.0e}" for limit in LIMITS.values()))
    failures = [f"{report.item}: {line}" for report in reports for line in report.failures]
    if failures:
        print("\n" + "\n".join(failures))
        sys.exit(1)


if __name__ == "__main__":
    configurator.run(main)
