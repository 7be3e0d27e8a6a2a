"""What can be set: `ModelConfig` (what the model is) and `TrainConfig` (how it is trained), typed and checked.

Every setting has a type, a default, a range and one line of description, which `--help` prints.
"""

import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from configurator.errors import ConfigError
from configurator.layers import parse_layers


class Settings(BaseModel):
    """Base of every script's settings. Construction raises ConfigError with one line per problem, all at once.

    Python values are taken by their exact type ('16' is no int, True is no int) with two exceptions: an int may be
    written as a whole float (1e3), a float as an int. A subclass adds fields, and overrides:
      conflicts()  checks between settings;
      _needs       {"a": ("b", value)}: the flag --a has an effect only while b == value, and is refused otherwise;
      _positional  name of the other arguments in the usage line, such as "RUN"; None: there are none;
      _instead     {"a": line}: what to write in place of the flag --a, which other programs have or which rarely is what is meant.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, strict=True, allow_inf_nan=False)
    _needs: ClassVar[dict[str, tuple[str, object]]] = {}
    _positional: ClassVar[str | None] = None
    _instead: ClassVar[dict[str, str]] = {}

    def conflicts(self) -> Iterator[tuple[set[str], str]]:
        """Yield (settings involved, one line) for each clash between settings that are fine by themselves."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, values, handler):
        if not isinstance(values, dict):  # settings that were checked when they were made
            return handler(values)
        values = {name: _whole(cls, name, value) for name, value in values.items()}
        try:
            settings, bad, problems = handler(values), set(), []
        except ValidationError as error:
            found = {e["loc"][0]: e for e in reversed(error.errors())}  # one per setting: the first
            problems = [_one_line(cls, name, e) for name, e in reversed(found.items())]
            bad = set(found)
            missing = {name for name, e in found.items() if e["type"] == "missing"}
            # A stand-in for conflicts(): defaults replace the bad values, and clashes that involve those are dropped.
            good = {name: value for name, value in values.items() if name not in bad}
            settings = None if missing else cls.model_construct(**good)
        if settings is not None:
            problems += [line for names, line in settings.conflicts() if not names & bad]
        if problems:
            raise ConfigError(problems)
        return settings


class ModelConfig(Settings):
    """the model (stored in its checkpoints)"""

    layers: str = Field("gdn gdn gdn attn", description='layer pattern, cycled over the depth: "gdn*3 attn(rope=none)"')
    n_layer: int = Field(4, ge=1, description="number of layers")
    n_head: int = Field(4, ge=1, description="number of (query) heads")
    n_kv_head: int | None = Field(None, ge=1, description="number of key/value heads; none: n_head")
    head_dim: int | None = Field(None, ge=1, description="width of a head; none: n_embd / n_head")
    n_embd: int = Field(256, ge=1, description="width of the residual stream")
    block_size: int = Field(256, ge=1, description="training context length in tokens")
    vocab_size: int | None = Field(None, ge=1, description="number of token ids; none: the tokenizer's")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability")
    bias: bool = Field(False, description="biases in the linear layers")
    ffn: Literal["swiglu", "gelu", "gelu_exact", "relu2"] = Field(
        "swiglu", description="feed-forward network of a layer; gelu: its tanh form, as in GPT-2"
    )
    residual: Literal["pre", "post", "sandwich", "normed"] = Field(
        "pre", description="where the norms are: before, after, on both sides, or on the residual stream itself"
    )
    n_ffn: int | None = Field(None, ge=1, description="FFN width; none: 4 n_embd, swiglu 8/3 n_embd up to a multiple of 64")
    norm: Literal["rmsnorm", "rmsnorm1p", "layernorm"] = Field(
        "rmsnorm", description="normalisation; rmsnorm1p multiplies by 1 + w"
    )
    norm_eps: float = Field(1e-6, gt=0, lt=1, description="epsilon of the normalisation")
    rope_theta: float = Field(10000.0, gt=0, description="base wavelength of the rotary embedding")
    learned_positions: bool = Field(False, description="add a learned embedding of each position, up to block_size")
    tie_embeddings: bool = Field(True, description="the output layer shares the token embedding")
    document_mask: bool = Field(True, description="tokens see only their own document")
    mixers: str | None = Field(None, min_length=1, description="Python file that registers further mixers")

    def conflicts(self) -> Iterator[tuple[set[str], str]]:
        try:
            parse_layers(self.layers)
        except ConfigError as error:
            yield {"layers"}, str(error)
        if self.head_dim is None and self.n_embd % self.n_head:
            below = self.n_embd // self.n_head * self.n_head
            near = _nearest([below, below + self.n_head])
            yield (
                {"n_embd", "n_head", "head_dim"},
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: {near}",
            )
        if self.n_kv_head is not None and self.n_head % self.n_kv_head:
            divisors = [d for d in range(1, self.n_head + 1) if self.n_head % d == 0]
            near = [d for d in divisors if d < self.n_kv_head][-1:] + [d for d in divisors if d > self.n_kv_head][:1]
            yield (
                {"n_head", "n_kv_head"},
                f"n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}: {_nearest(near)}",
            )


class TrainConfig(ModelConfig):
    """training"""

    out_dir: str | None = Field(None, min_length=1, description="run folder; none: out/run-1, or the next number free")
    overwrite: bool = Field(False, description="replace the run that out_dir holds")
    dataset: str = Field("sotu", min_length=1, description="folder under data/ that holds the token files")
    init_from: str = Field("scratch", min_length=1, description="scratch, gpt2*, or a checkpoint folder to start from")
    resume: str | None = Field(None, min_length=1, description="run or checkpoint folder to continue")
    batch_size: int = Field(8, ge=1, description="sequences per micro-batch")
    gradient_accumulation_steps: int = Field(1, ge=1, description="micro-batches per step, over all ranks")
    parallel: Literal["ddp", "fsdp"] | None = Field(
        None, description="how the processes of torchrun share the model; none: ddp, the whole of it on each"
    )
    context_parallel: int = Field(1, ge=1, description="processes that share each row, a part of its tokens each")
    max_iters: int = Field(300, ge=1, description="training steps")
    eval_interval: int = Field(100, ge=1, description="steps between evaluations")
    eval_iters: int = Field(10, ge=1, description="batches per evaluation")
    eval_only: bool = Field(False, description="evaluate once and stop")
    stop_loss: float | None = Field(
        None, gt=0, description="end at the first validation whose loss is at most this, in nats per label; none: at max_iters"
    )
    log_interval: int = Field(10, ge=1, description="steps between log lines")
    save_interval: int | None = Field(None, ge=1, description="steps between checkpoints; none: eval_interval")
    keep_last: int = Field(2, ge=1, description="checkpoints kept besides the best one")
    async_save: bool = Field(True, description="write checkpoints while training goes on (a copy on the host)")
    dry_run: bool = Field(False, description="check everything, print what it would cost, train nothing")
    indexer: Literal["off", "joint", "only"] = Field(
        "off", description="train the indexers of dsa layers, by their KL to attention: beside the rest, or alone, the rest frozen"
    )
    distill: str | None = Field(
        None, min_length=1, description="a run whose mixers' outputs the layers that differ learn, one by one, the rest frozen"
    )
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="muon: the layers' matrices by Muon, the rest by AdamW")
    learning_rate: float = Field(2e-3, gt=0, description="peak learning rate")
    min_lr: float | None = Field(None, ge=0, description="final learning rate; none: learning_rate / 10")
    warmup_iters: int = Field(20, ge=0, description="steps of linear warm-up")
    lr_decay_iters: int | None = Field(None, ge=1, description="step at which min_lr is reached; none: max_iters")
    decay_lr: bool = Field(True, description="decay the learning rate after the warm-up")
    lr_schedule: Literal["cosine", "wsd"] = Field(
        "cosine",
        description="how it decays: half a cosine, or flat and then a line over the last decay_fraction (warmup-stable-decay)",
    )
    decay_fraction: float = Field(0.2, gt=0, le=1, description="share of lr_decay_iters in which wsd decays")
    weight_decay: float = Field(0.1, ge=0, description="AdamW's weight decay")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first beta")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's second beta")
    grad_clip: float = Field(1.0, ge=0, description="largest gradient norm; 0: off")
    non_finite: Literal["stop", "skip"] = Field(
        "stop", description="at a gradient that is inf or nan: stop, or skip the step (counted; ten in a row stop)"
    )
    activation_checkpointing: bool = Field(False, description="recompute each layer in the backward pass: less memory, more time")
    seed: int = Field(1337, ge=0, le=2**63 - 1, description="seed of initialisation, data order and dropout")
    device: str | None = Field(None, min_length=1, description="cpu, cuda, cuda:1, mps; none: the best there is")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="compute type; none: bfloat16 on CUDA (float16 on cards without it), else float32"
    )
    compile: bool | None = Field(None, description="torch.compile the model; none: where it pays")
    backend: Literal["auto", "triton", "eager", "reference"] = Field(
        "auto", description="what runs the operators, to tell kernels from everything else; auto: the fastest there is here"
    )
    deterministic: bool = Field(False, description="the same bits again on the same GPU, slower; a CPU gives them anyway")
    cuda_graph: bool = Field(False, description="replay the whole step as one CUDA graph (static shapes, one GPU)")
    wandb_log: bool = Field(False, description="log to Weights & Biases as well")
    wandb_project: str = Field("hybrid-llm", min_length=1, description="W&B project")
    wandb_run_name: str | None = Field(None, min_length=1, description="W&B run name; none: W&B's choice")

    _needs: ClassVar[dict[str, tuple[str, object]]] = {
        "init_from": ("resume", None),
        "overwrite": ("resume", None),
        "min_lr": ("decay_lr", True),
        "lr_decay_iters": ("decay_lr", True),
        "lr_schedule": ("decay_lr", True),
        "decay_fraction": ("lr_schedule", "wsd"),
        "wandb_project": ("wandb_log", True),
        "wandb_run_name": ("wandb_log", True),
    }

    def conflicts(self) -> Iterator[tuple[set[str], str]]:
        yield from super().conflicts()
        if self.stop_loss is not None and self.indexer == "only":
            line = f"stop_loss={self.stop_loss} has no effect with indexer='only', which leaves the loss as it is: drop it"
            yield {"stop_loss", "indexer"}, line
        if not self.decay_lr:
            return
        if self.min_lr is not None and self.min_lr > self.learning_rate:
            yield (
                {"min_lr", "learning_rate"},
                f"min_lr={self.min_lr} is more than learning_rate={self.learning_rate}: use at most that",
            )
        if self.lr_decay_iters is not None and self.warmup_iters > self.lr_decay_iters:
            most = self.lr_decay_iters
            line = f"warmup_iters={self.warmup_iters} is more than lr_decay_iters={most}: use at most {most}"
            yield {"warmup_iters", "lr_decay_iters"}, line


def kinds(annotation: object) -> tuple[object, ...]:
    """The alternatives of a setting's type: `int | None` -> (int, NoneType), `str` -> (str,)."""
    union = typing.get_origin(annotation) in (Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def choices(annotation: object) -> list[object]:
    """The values of the Literal in a setting's type; empty if it has none."""
    return [value for kind in kinds(annotation) if typing.get_origin(kind) is Literal for value in typing.get_args(kind)]


def unknown_setting(cls: type[Settings], name: str) -> str:
    """The line for a name that is no setting of cls, with the nearest one that is."""
    plain = name.lower().replace("-", "_")
    if plain in cls._instead:
        return f"unknown setting '{name}': {cls._instead[plain]}"
    switch = plain.removeprefix("no_")
    if switch != plain and switch in cls.model_fields and bool in kinds(cls.model_fields[switch].annotation):
        return f"unknown setting '{name}': did you mean --{switch}=false?"
    return f"unknown setting '{name}'" + _did_you_mean(plain, cls.model_fields)


def _whole(cls: type[Settings], name: str, value: object) -> object:
    field = cls.model_fields.get(name)
    is_int = field is not None and int in kinds(field.annotation) and float not in kinds(field.annotation)
    return int(value) if is_int and isinstance(value, float) and value.is_integer() else value


def _one_line(cls: type[Settings], name: str, error: dict) -> str:
    """A pydantic error as one line that names the setting, the value and what is allowed."""
    if error["type"] == "extra_forbidden":
        return unknown_setting(cls, name)
    if error["type"] == "missing":
        return f"{name} is required: --{name}=VALUE"
    value, ctx, annotation = error["input"], error.get("ctx", {}), cls.model_fields[name].annotation
    allowed = choices(annotation)
    must = {
        "greater_than_equal": f"must be at least {ctx.get('ge')}",
        "greater_than": f"must be greater than {ctx.get('gt')}",
        "less_than_equal": f"must be at most {ctx.get('le')}",
        "less_than": f"must be less than {ctx.get('lt')}",
        "int_type": "must be a whole number",
        "float_type": "must be a number",
        "bool_type": "must be true or false",
        "string_type": "must be text",
        "string_too_short": "must not be empty",
        "finite_number": "must be a finite number",
        "literal_error": f"choose one of {', '.join(map(str, allowed))}",
        "value_error": str(ctx.get("error")),
    }.get(error["type"], error["msg"])
    if isinstance(value, float) and error["type"] == "int_type" and abs(value) < 1e15:
        must += f": {_nearest([int(value // 1), int(value // 1) + 1])}"
    if type(None) in kinds(annotation) and error["type"].endswith(("_type", "literal_error")):
        must += ", or none"
    hint = _did_you_mean(value, map(str, allowed)) if isinstance(value, str) else ""
    return f"{name}={value!r}: {must}{hint}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean '{close[0]}'?" if close else ""


def _nearest(numbers: list[int]) -> str:
    legal = [str(number) for number in numbers if number > 0]
    return f"nearest {'are' if len(legal) > 1 else 'is'} {' and '.join(legal)}"
