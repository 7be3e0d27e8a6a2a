"""Measure: `python bench.py COMMAND [--name=value ...]`; each command prints a table and writes it as JSON under out/bench.

    python bench.py forms      # one mixer of each family in its recurrent, parallel and chunkwise form, against the length
    python bench.py memory     # how the memory of training one layer grows with the length
    python bench.py cpu        # this model beside transformers' Qwen3-Next of the same size, on a CPU
    python bench.py decode     # time, memory and cost of a token against the context, every recipe; the roofline picture
    python bench.py recipes    # the published architectures: parameters, FLOPs and state, as the README lists them
    python bench.py kernels    # the operators beside their roofline bounds and beside other libraries
    python bench.py first      # seconds of an operator's first call, when nothing has been compiled
    python bench.py tune       # launch options of the Triton kernels, tried on this device
    python bench.py train      # tokens per second of whole training steps, beside nanoGPT's model and fla's; on N GPUs by torchrun

Times are medians of wall-clock seconds, devices synchronised. Peak memory is what is alive at the worst moment of a forward and a
backward pass beyond the inputs: CUDA's own count on a GPU, elsewhere that of `PeakMemory`.
"""

import statistics
import sys
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import Field

import configurator
import kernels
from benchmarks.decode import DecodeConfig, decode
from benchmarks.measure import (
    BenchConfig,
    list_problems,
    median_seconds,
    peak_bytes,
    print_table,
    report,
    split_list,
    timed,
    whole_number,
)  # fmt: skip
from benchmarks.operators import FirstConfig, OperatorsConfig, first, operators
from benchmarks.training import TrainBenchConfig, training
from benchmarks.tuning import TuneConfig, tune
from configurator import ConfigError, ModelConfig, TrainConfig, format_layers, parse_layers
from kernels import eager, reference
from model import Model, format_bytes
from preflight import resolve_device


class FormsConfig(BenchConfig):
    """three forms of one recurrence"""

    lengths: str = Field("256,512,1024,2048", min_length=1, description="sequence lengths, separated by commas")
    families: str = Field("attn,linear,lightning,mamba2,gdn,kda", min_length=1, description="families, separated by commas")
    repeats: int = Field(5, ge=1, description="timed repeats, fewer where they take over 10 s; the median counts")
    batch_size: int = Field(1, ge=1, description="sequences")
    n_head: int = Field(4, ge=1, description="heads")
    head_dim: int = Field(64, ge=1, description="width of keys and values")
    max_gib: float = Field(4.0, gt=0, description="leave out parallel forms that would take more memory than this")
    plot: bool = Field(True, description="draw the results (forms.png)")
    device: str | None = Field(None, min_length=1, description="cpu, cuda, cuda:1, mps; none: the best there is")

    def conflicts(self):
        yield from list_problems(self, "lengths", whole_number)
        yield from list_problems(self, "families", lambda name: name in FAMILIES, f"known are {', '.join(FAMILIES)}")


class MemoryConfig(BenchConfig):
    """memory against length"""

    lengths: str = Field("1024,2048,4096,8192", min_length=1, description="sequence lengths, separated by commas")
    layers: str = Field("gdn kda mamba2 lightning", description="mixers to measure, as in a layer pattern")
    batch_size: int = Field(1, ge=1, description="sequences")
    n_embd: int = Field(128, ge=1, description="width of the layer")
    n_head: int = Field(2, ge=1, description="heads")
    device: str | None = Field(None, min_length=1, description="cpu, cuda, cuda:1, mps; none: the best there is")

    def conflicts(self):
        yield from list_problems(self, "lengths", whole_number)


class CpuConfig(BenchConfig):
    """beside transformers on a CPU"""

    repeats: int = Field(10, ge=1, description="timed repeats of each side, taken in turns; the median counts")
    batch_size: int = Field(4, ge=1, description="sequences")
    length: int = Field(1024, ge=2, description="tokens of a sequence")
    n_layer: int = Field(4, ge=1, description="layers, three of Gated DeltaNet to one of gated attention")
    n_embd: int = Field(256, ge=8, description="width; the heads divide it")
    n_head: int = Field(4, ge=1, description="heads of both kinds of layers")
    vocab_size: int = Field(4096, ge=2, description="token ids")
    profile: bool = Field(False, description="print which torch operations take the time of the delta rule")

    def conflicts(self):
        if self.n_embd % (8 * self.n_head):  # a quarter of each head is rotated, in pairs of channels
            step = 8 * self.n_head
            near = max(step, round(self.n_embd / step) * step)
            yield {"n_embd", "n_head"}, f"n_embd={self.n_embd} is not a multiple of 8 n_head = {step}: nearest is {near}"


# ----------------------------------------------------------------------------------------------------------------------
# forms: the same function three ways


class Family(NamedTuple):
    """One operator with its gates: `decay` None, "constant" per head, "head" per token, "channel" per token and key channel."""

    op: str
    decay: str | None = None
    beta: bool = False


FAMILIES = {
    "attn": Family("softmax_attention"),
    "linear": Family("linear_attention"),
    "lightning": Family("linear_attention", "constant"),
    "mamba2": Family("linear_attention", "head"),
    "gdn": Family("delta_rule", "head", beta=True),
    "kda": Family("delta_rule", "channel", beta=True),
}


def family_inputs(family, B, T, H, D, device):
    """Arguments of the family's operator, gradients wanted: q, k, v `(B, T, H, D)`, then decay and beta where it has them."""
    q, k, v = (torch.randn(B, T, H, D, device=device) for _ in range(3))
    shape = {None: None, "constant": (H,), "head": (B, T, H), "channel": (B, T, H, D)}[family.decay]
    g = None if shape is None else -0.1 * torch.rand(shape, device=device)
    inputs = [q, kernels.l2_norm(k) if family.beta else k, v, g, torch.rand(B, T, H, device=device) if family.beta else None]
    inputs = [x for x in inputs if x is not None]
    return [x.requires_grad_() for x in inputs]


def token_loop(op, q, k, v, *gates):
    """The recurrent form: `op` of the reference on one token at a time, the state carried. One split per input, so that the
    backward pass costs the same for every token (a slice per token would fill a gradient of the whole length each time).
    """
    outs, state = [], None
    columns = [x.split(1, dim=1) if x.ndim > 1 else [x] * q.shape[1] for x in (q, k, v, *gates)]
    for token in zip(*columns, strict=True):
        out, state = op(*token, initial_state=state)
        outs.append(out)
    return torch.cat(outs, dim=1)


def forms_of(family):
    """The forms by name: functions of the family's inputs. Attention has no state of constant size, so no recurrent form."""
    if family.op == "softmax_attention":
        return {"parallel": masked_softmax, "chunkwise": eager.softmax_attention}
    chunked, token = getattr(eager, family.op), getattr(reference, family.op)
    return {
        "recurrent": lambda *inputs: token_loop(token, *inputs),
        "parallel": getattr(reference, f"{family.op}_parallel"),
        "chunkwise": lambda *inputs: chunked(*inputs)[0],
    }


def masked_softmax(q, k, v):
    """Softmax attention as it is written down: the whole T x T matrix of scores."""
    T = q.shape[1]
    past = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    return reference.selected_attention(q, k, v, past.expand(q.shape[0], T, T))


def sequential_steps(form, T, chunk=64):
    """Updates of the state that must come one after the other."""
    return {"recurrent": T, "parallel": 1, "chunkwise": -(-T // chunk)}[form]


def measure_form(config, name, form, T, device):
    """One row: milliseconds of the forward and of both passes, peak bytes; None where it would exceed max_gib."""
    family, (B, H, D) = FAMILIES[name], (config.batch_size, config.n_head, config.head_dim)
    matrices = 8 * B * H * T * T * 4 * (D if family.decay == "channel" else 1)  # about eight of T x T at once in fp32
    row = {"family": name, "form": form, "T": T, "sequential_steps": sequential_steps(form, T)}
    if name == "attn":
        row["sequential_steps"] = 1
    if form == "parallel" and matrices > config.max_gib * 2**30:
        return {**row, "forward_ms": None, "ms": None, "peak_bytes": None}
    torch.manual_seed(config.seed)
    inputs = family_inputs(family, B, T, H, D, device)
    run, dout = forms_of(family)[form], torch.randn(B, T, H, D, device=device)

    def forward():
        with torch.no_grad():
            run(*inputs)

    def both():
        torch.autograd.grad(run(*inputs), inputs, dout)

    return {
        **row,
        "forward_ms": 1e3 * median_seconds(forward, device, config.repeats),
        "ms": 1e3 * median_seconds(both, device, config.repeats),
        "peak_bytes": peak_bytes(both, device),
    }


def forms(config):
    """Time and memory of the recurrent, parallel and chunkwise form of one mixer of each family."""
    device, _ = resolve_device(TrainConfig(device=config.device))
    rows = []
    for name in split_list(config.families):
        for form in forms_of(FAMILIES[name]):
            for T in map(int, split_list(config.lengths)):
                rows.append(measure_form(config, name, form, T, device))
    head = ["family", "form", "T", "steps", "forward ms", "forward + backward ms", "us/token", "peak memory"]
    print_table(head, [_form_cells(row) for row in rows])
    content = report(config, "forms", device, rows)
    if config.plot:
        plot_forms(content, Path(config.out_dir) / "forms.png")
    return content


def _form_cells(row):
    cells = [row["family"], row["form"], row["T"], row["sequential_steps"]]
    if row["ms"] is None:
        return [*cells, "-", "-", "-", "over max_gib"]
    per_token = 1e3 * row["ms"] / row["T"]
    return [*cells, f"{row['forward_ms']:.2f}", f"{row['ms']:.2f}", f"{per_token:.1f}", format_bytes(row["peak_bytes"])]


def plot_forms(content, path):
    """Time (above) and peak memory (below) against the length, a column per family."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    families = list(dict.fromkeys(row["family"] for row in content["rows"]))
    colors = {"recurrent": "tab:red", "parallel": "tab:blue", "chunkwise": "tab:green"}
    figure, axes = pyplot.subplots(
        2, len(families), figsize=(2.1 * len(families) + 0.6, 4), sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for column, family in zip(axes.T, families, strict=True):
        for form, color in colors.items():
            rows = [r for r in content["rows"] if (r["family"], r["form"]) == (family, form) and r["ms"] is not None]
            lengths = [r["T"] for r in rows]
            column[0].loglog(lengths, [r["ms"] for r in rows], "o-", color=color, label=form, markersize=3)
            column[1].loglog(lengths, [r["peak_bytes"] / 2**20 for r in rows], "o-", color=color, markersize=3)
        column[0].set_title(family)
        column[1].set_xscale("log", base=2)
        column[1].set_xlabel("tokens")
    axes[0, 0].set_ylabel("ms")
    axes[1, 0].set_ylabel("peak MiB")
    figure.legend(*axes[0, -1].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"one forward and backward pass, fp32, {content['device']}, threads: {content['threads']}")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


# ----------------------------------------------------------------------------------------------------------------------
# memory: linear or quadratic in the length


def memory(config):
    """Peak memory of a forward and backward pass of one layer, beside attention that keeps its T x T matrix."""
    device, _ = resolve_device(TrainConfig(device=config.device))
    layers = {}
    for spec in parse_layers(config.layers):
        torch.manual_seed(config.seed)
        item = format_layers([spec])
        model = Model(ModelConfig(layers=item, n_layer=1, n_embd=config.n_embd, n_head=config.n_head, vocab_size=1))
        layers[item] = layer_pass(model.blocks[0].mixer.to(device), config, device)
    layers["attn, T x T"] = lambda T: _dense_pass(T, config, device)
    lengths = [int(T) for T in split_list(config.lengths)]
    rows = [{"layer": name, "T": T, "peak_bytes": peak_bytes(run(T), device)} for name, run in layers.items() for T in lengths]
    cells = []
    for before, row in zip([None, *rows], rows, strict=False):
        first = before is None or before["layer"] != row["layer"]
        row["growth"] = None if first else row["peak_bytes"] / before["peak_bytes"]
        growth = "" if first else f"x {row['growth']:.2f}"
        cells.append([row["layer"], row["T"], format_bytes(row["peak_bytes"]), f"{row['peak_bytes'] / row['T']:,.0f}", growth])
    print_table(["layer", "T", "peak memory", "bytes/token", "growth"], cells)
    return report(config, "memory", device, rows)


def layer_pass(mixer, config, device):
    """For a length: a forward and a backward pass of the mixer, to call."""

    def prepare(T):
        x, dout = (torch.randn(config.batch_size, T, config.n_embd, device=device) for _ in range(2))
        inputs = [x.requires_grad_(), *mixer.parameters()]
        return lambda: torch.autograd.grad(mixer(x), inputs, dout)

    return prepare


def _dense_pass(T, config, device):
    shape = (config.batch_size, T, config.n_head, config.n_embd // config.n_head)
    q, k, v, dout = (torch.randn(shape, device=device, requires_grad=True) for _ in range(4))
    return lambda: torch.autograd.grad(masked_softmax(q, k, v), [q, k, v], dout)


# ----------------------------------------------------------------------------------------------------------------------
# cpu: beside transformers


def peers(*names):
    """Classes and functions of transformers' Qwen3-Next on its own PyTorch code, also where packages for GPUs are installed."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("cpu measures against transformers, which is missing: pip install -r requirements-dev.txt") from error
    transformers.logging.set_verbosity_error()
    hidden = [name for name in ("fla", "mamba_ssm", "causal_conv1d") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # None: importing them fails, and transformers falls back
    try:
        import transformers.models.qwen3_next.modeling_qwen3_next as module

        return [getattr(module, name) for name in names]
    finally:
        for name in hidden:
            del sys.modules[name]


def operator_sides(config):
    """The gated delta rule with normalised keys, forward and backward, ours and theirs, on the same inputs; their difference."""
    (theirs,) = peers("torch_chunk_gated_delta_rule")
    torch.manual_seed(config.seed)
    shape = (config.batch_size, config.length, config.n_head, config.n_embd // config.n_head)
    inputs = family_inputs(FAMILIES["gdn"], *shape, torch.device("cpu"))
    dout = torch.randn(shape)

    def run_ours(q, k, v, g, beta):
        return kernels.delta_rule(kernels.l2_norm(q), kernels.l2_norm(k), v, g, beta)[0]

    def run_theirs(q, k, v, g, beta):
        return theirs(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    with torch.no_grad():
        difference = (run_ours(*inputs) - run_theirs(*inputs)).abs().max().item()
    sides = {name: lambda run=run: torch.autograd.grad(run(*inputs), inputs, dout) for name, run in
             (("ours", run_ours), ("transformers", run_theirs))}  # fmt: skip
    return sides, {"largest_difference": difference}


def training_sides(config):
    """A training step of both models: loss of the same tokens, backward, clipping, fused AdamW; their parameter counts."""
    Config, Peer = peers("Qwen3NextConfig", "Qwen3NextForCausalLM")
    H, D, d, V = config.n_head, config.n_embd // config.n_head, config.n_embd, config.vocab_size
    torch.manual_seed(config.seed)
    attention = "attn(gate=true, rope=partial)"
    ours = Model(
        ModelConfig(
            layers=f"gdn gdn gdn {attention}",
            n_layer=config.n_layer,
            n_head=H,
            n_embd=d,
            vocab_size=V,
            block_size=config.length,
            norm="rmsnorm1p",
        )  # fmt: skip
    )
    theirs = Peer(
        Config(
            vocab_size=V,
            hidden_size=d,
            intermediate_size=ours.blocks[0].ffn.down_proj.in_features,
            num_hidden_layers=config.n_layer,
            num_attention_heads=H,
            num_key_value_heads=H,
            head_dim=D,
            linear_num_key_heads=H,
            linear_num_value_heads=H,
            linear_key_head_dim=D,
            linear_value_head_dim=D,
            num_experts=0,
            layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(config.n_layer)],
            tie_word_embeddings=True,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        )  # fmt: skip
    )
    tokens = torch.randint(V, (config.batch_size, config.length))
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-1)

    def step(model, loss):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def run():
            optimizer.zero_grad(set_to_none=True)
            loss().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return run

    sides = {
        "ours": step(ours, lambda: ours(tokens, labels).nll.sum() / (labels >= 0).sum()),
        "transformers": step(theirs.train(), lambda: theirs(tokens, labels=tokens).loss),
    }
    return sides, {"parameters": [sum(p.numel() for p in m.parameters()) for m in (ours, theirs)]}


def alternate(sides, repeats):
    """Median milliseconds of each side, the sides taken in turns so that a busy moment meets both."""
    times = {name: [] for name in sides}
    for i in range(repeats + 1):
        for name, call in sides.items():
            seconds = timed(call, torch.device("cpu"))
            if i:  # the first round warms up
                times[name].append(1e3 * seconds)
    return {name: statistics.median(ms) for name, ms in times.items()}


def cpu(config):
    """The delta rule alone and a whole training step, ours beside transformers' Qwen3-Next on the same sizes."""
    rows = []
    for what, make in (("delta rule, forward + backward", operator_sides), ("training step", training_sides)):
        sides, facts = make(config)
        times = alternate(sides, config.repeats)
        rows.append({"what": what, "ms": times, "ratio": times["transformers"] / times["ours"], **facts})
        if config.profile and make is operator_sides:
            print_profile(sides["ours"])
    cells = [[r["what"], "", *(f"{r['ms'][n]:.1f}" for n in ("ours", "transformers")), f"{r['ratio']:.2f} x"] for r in rows]
    print_table(["", "", "ours, ms", "transformers, ms", "faster by"], cells)
    return report(config, "cpu", torch.device("cpu"), rows)


def print_profile(call, repeats=5):
    """The torch operations by the time they take themselves."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(repeats):
            call()
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=50))


# ----------------------------------------------------------------------------------------------------------------------


class RecipesConfig(BenchConfig):
    """published architectures"""

    size: Literal["124m", "tiny"] = Field("124m", description="which folder of configurator/recipes")


def recipes(config):
    """Parameters, training FLOPs per token and state of every recipe of one size, as a Markdown table."""
    rows = []
    for path in sorted((Path(__file__).parent / "configurator" / "recipes" / config.size).glob("*.py")):
        settings = configurator.load(TrainConfig, [str(path)]).config
        own = {name: getattr(settings, name) for name in ModelConfig.model_fields}
        with torch.device("meta"):
            model = Model(ModelConfig(**own | {"vocab_size": settings.vocab_size or 4096}))
        states = {n: model.state_bytes(1, n) for n in (1024, 32768, 1048576)}
        flops = model.flops_per_token(settings.block_size)
        kinds = [spec.name for spec in model.specs]
        mix = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        counts = {"parameters": model.n_params(), "flops_per_token": flops, "state": states}
        rows.append({"recipe": path.stem, "layers": mix, **counts})
    head = ("recipe", "layers", "parameters", f"MFLOP/token, T={settings.block_size}", "state at 1k", "at 32k", "at 1M")
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for row in rows:
        sizes = " | ".join(format_bytes(n) for n in row["state"].values())
        print(f"| `{row['recipe']}` | {row['layers']} | {row['parameters']:,} | {row['flops_per_token'] / 1e6:.0f} | {sizes} |")
    return {"rows": rows}


COMMANDS = {
    "forms": (forms, FormsConfig),
    "memory": (memory, MemoryConfig),
    "cpu": (cpu, CpuConfig),
    "recipes": (recipes, RecipesConfig),
    "decode": (decode, DecodeConfig),
    "kernels": (operators, OperatorsConfig),
    "first": (first, FirstConfig),
    "tune": (tune, TuneConfig),
    "train": (training, TrainBenchConfig),
}


def main(argv):
    """Run one command; returns what it wrote."""
    names = ", ".join(COMMANDS)
    if argv and argv[0] in ("-h", "--help"):
        print(f"{__doc__}\nCommands: {names}; `python bench.py COMMAND --help` lists the settings of one.")
        return None
    if not argv or argv[0] not in COMMANDS:
        given = f"unknown command {argv[0]!r}" if argv else "no command"
        raise ConfigError(f"{given}: write `python bench.py COMMAND [--name=value ...]` with one of {names}")
    command, settings = COMMANDS[argv[0]]
    config = configurator.load(settings, argv[1:], prog=f"bench.py {argv[0]}", description=command.__doc__).config
    return command(config)


if __name__ == "__main__":
    configurator.run(main)
