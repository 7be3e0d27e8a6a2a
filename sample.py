"""Write text with a trained model: `python sample.py RUN [--start="The state of the union"]`.

    python sample.py RUN --start=FILE:letter.txt --num_samples=4 --top_p=0.9     # a prompt from a file; --start=-: from stdin
    python sample.py RUN --start=FILE:book.txt --max_new_tokens=0 --save_state=book.state    # read a long text once ...
    python sample.py RUN --load_state=book.state --start=" And then"             # ... and go on from it at once
    python sample.py RUN --interactive=true                                      # a line is read, continued, and so on

The prompt is read in chunks through the parallel kernels, then one token at a time on a state that was allocated before the first:
recurrent layers keep a matrix of constant size, attention layers their keys and values. `Engine` and `Generator` do the same
from Python.
"""

import contextlib
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open

import checkpoint
import configurator
from configurator import ConfigError, Settings
from data.tokenizer import StreamDecoder
from model import CACHES, Attention, ModelState, format_bytes
from preflight import resolve_device

# ----------------------------------------------------------------------------------------------------------------------
# Drawing


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits; ConfigError for values that mean nothing.

    Logits of tokens that occurred are divided (where positive, else multiplied) by `repetition_penalty` (1909.05858); then
    temperature 0 takes the largest. Otherwise they are divided by it, and only these may be drawn: the `top_k` largest (None, or
    more than there are: all), of them the fewest that hold `top_p` of the probability (1904.09751), of them those of at least
    `min_p` times the largest probability (2407.01082).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        allowed = {
            "temperature": (0 <= self.temperature < math.inf, "at least 0 (0: always the most likely token)"),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1, or none for all tokens"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "greater than 0 and at most 1, or none"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "at least 0 and at most 1, or none"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "greater than 0 (1: none)"),
        }
        problems = [f"{name}={getattr(self, name)}: must be {what}" for name, (fine, what) in allowed.items() if not fine]
        if problems:
            raise ConfigError(problems)


def draw(logits, sampling, uniform=None, seen=None):
    """(B, vocab) fp32 logits -> (B,) token ids; uniform `(B, 1)` in [0, 1) decides unless greedy; seen `(B, vocab)` bool."""
    if seen is not None:
        p = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / p, logits * p), logits)
    if sampling.temperature == 0:
        return logits.argmax(-1)
    k = logits.shape[-1] if sampling.top_k is None else min(sampling.top_k, logits.shape[-1])
    values, ids = logits.topk(k, dim=-1) if k < logits.shape[-1] else logits.sort(dim=-1, descending=True)
    p = ((values - values[:, :1]) / sampling.temperature).softmax(-1)  # the largest is 0: no overflow at tiny temperatures
    kept = torch.ones_like(p, dtype=torch.bool)
    if sampling.top_p is not None:
        kept &= p.cumsum(-1) - p < sampling.top_p
    if sampling.min_p is not None:
        kept &= p >= sampling.min_p * p[:, :1]
    total = (p * kept).cumsum(-1)
    place = (total <= uniform * total[:, -1:]).sum(-1, keepdim=True)
    place = torch.minimum(place, kept.sum(-1, keepdim=True) - 1)  # kept are the first ones; rounding must not lead beyond them
    return ids.gather(1, place)[:, 0]


class Sampler:
    """`draw` for rows of a batch, each from random numbers of its own: a row's text does not depend on the rows beside it.

    Whatever a step reads or changes lies in tensors of fixed address, so that a CUDA graph can hold the step.
    """

    AHEAD = 1024  # random numbers a row that are drawn at once

    def __init__(self, rows, sampling, vocab, device, logprobs=False):
        self.sampling, self.vocab = sampling, vocab
        self.uniforms = torch.zeros(rows, self.AHEAD, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.seen = torch.zeros(rows, vocab, dtype=torch.bool, device=device) if sampling.repetition_penalty != 1 else None
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, device=device) if logprobs else None
        self.generators, self.drawn = [], 0

    def reset(self, seeds, occurred):
        """For new sequences: the seed of each row, and the ids that occurred in it so far."""
        self.generators, self.drawn = [torch.Generator().manual_seed(seed) for seed in seeds], 0
        if self.seen is not None:
            self.seen.zero_()
            for row, ids in enumerate(occurred):
                ids = [i for i in ids if i < self.vocab]
                self.seen[row, torch.tensor(ids, dtype=torch.int64, device=self.seen.device)] = True

    def refill(self):
        """Before every draw, on the host: random numbers for the next ones, where they have run out."""
        if self.drawn % self.AHEAD == 0 and self.sampling.temperature > 0:
            fresh = torch.stack([torch.rand(self.AHEAD, generator=g) for g in self.generators])
            self.uniforms[: len(fresh)].copy_(fresh)
            self.step.zero_()
        self.drawn += 1

    def __call__(self, logits):
        """Draw into `tokens`; `logprobs` gets the model's own log-probability of what was drawn, before any of the settings."""
        logits = logits[:, : self.vocab].float()  # ids from there on are padding
        uniform = None
        if self.sampling.temperature > 0:
            uniform = self.uniforms.gather(1, self.step.expand(len(logits), 1))
            self.step += 1
        self.tokens.copy_(draw(logits, self.sampling, uniform, self.seen))
        if self.seen is not None:
            self.seen.scatter_(1, self.tokens[:, None], True)
        if self.logprobs is not None:
            self.logprobs.copy_(logits.log_softmax(-1).gather(1, self.tokens[:, None])[:, 0])


# ----------------------------------------------------------------------------------------------------------------------
# The engine


class Steps:
    """A state, and the one-token step on it in plain eager PyTorch."""

    owner = None  # the request that uses them
    ahead = False  # whether a step may be started before the one before it has been looked at: a GPU then never waits

    def __init__(self, engine, rows, capacity, sampling, logprobs):
        self.engine = engine
        self.state = engine.model.init_state(rows, capacity, dtype=engine.dtype)
        self.sampler = engine.sampler(rows, sampling, logprobs)

    def first(self, logits):
        """Draw the first token of each row."""
        self.sampler.refill()
        self.sampler(logits)

    def next(self):
        """Feed the tokens drawn last, draw the next."""
        self.first(self.engine.forward(self.sampler.tokens[:, None], self.state))

    def read(self, prompts, state, logits=None, progress=None):
        """`Engine.read` into the first rows of this state."""
        return self.engine.read(prompts, state, logits, progress)

    def fetch(self):
        """A call that gives what was drawn last as tensors on the host: tokens, log-probabilities (or None)."""
        tokens, logprobs = self.sampler.tokens.cpu(), self.sampler.logprobs
        return lambda: (tokens.clone(), None if logprobs is None else logprobs.cpu().clone())


class Read(NamedTuple):
    """What reading left behind of one sequence: enough to go on from.

    The state is the engine's own on CUDA: another request that fits the same graph takes it over, unless this one was forked.
    """

    state: ModelState
    logits: torch.Tensor | None  # (1, vocab) of the next token; None: something must be read first
    unfed: tuple = ()  # ids that were drawn and not yet fed
    occurred: frozenset = frozenset()  # ids in the text so far, for repetition_penalty


class Engine:
    """A model ready to write. Keep one for many requests: on CUDA it holds bf16 weights packed for decoding and captured graphs.

    model: in evaluation mode; vocab: ids from here on are never drawn, and but for eot not allowed in prompts; eot: the id that an
    empty prompt stands for; dtype: float32 or bfloat16; chunk: tokens read at once, over all prompts.
    """

    def __init__(self, model, *, vocab=None, eot=None, dtype="float32", chunk=8192):
        self.model, self.eot, self.chunk = model, eot, chunk
        self.vocab = model.config.vocab_size if vocab is None else vocab
        self.device = model.embedding.weight.device
        self.dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self.decoder = None

    def forward(self, tokens, state, segment_ids=None):
        """Logits (B, vocab) in fp32 after the last token of each row, the state brought up to it."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return self.model(tokens, segment_ids=segment_ids, state=state, last_only=True).logits[:, 0].float()

    @torch.inference_mode()
    def read(self, prompts, state, logits=None, progress=None):
        """Take in one prompt a row, chunk by chunk: shorter ones end in padding, which reaches no state. Returns logits (B, vocab).

        logits: those of rows whose prompt is empty; progress: called with the number of tokens read so far.
        """
        size, longest = max(64, self.chunk // len(prompts) // 64 * 64), max(map(len, prompts))
        for start in range(0, longest, size):
            part = [ids[start : start + size] for ids in prompts]  # ids stay on the host until here
            width = max(map(len, part))
            tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in part], device=self.device)
            lengths = torch.tensor([len(ids) for ids in part], device=self.device)
            ragged = min(map(len, part)) < width
            ids = (torch.arange(width, device=self.device) < lengths[:, None]).to(torch.int32) if ragged else None
            new = self.forward(tokens, state, ids)
            logits = new if logits is None or not ragged else torch.where(lengths[:, None] > 0, new, logits)
            if progress is not None:
                progress(min(start + size, longest))
        return logits

    def forget(self):
        """Free the captured steps and their states."""
        if self.decoder is not None:
            self.decoder.captured.clear()

    def sampler(self, rows, sampling, logprobs=False):
        return Sampler(rows, sampling, self.vocab, self.device, logprobs)

    def warm_up(self, generator):
        """On CUDA: compile the kernels and capture what `generator` needs, so that its times are those of later ones."""
        if self.device.type == "cuda":
            self.read([generator.prompts[0][:65]], self.model.init_state(1, 65, dtype=self.dtype))
            steps = self.steps(generator.rows, generator.capacity, generator.sampling, generator.with_logprobs)
            if generator.after is None:
                steps.reading(generator.prompts)
            torch.cuda.synchronize(self.device)

    def steps(self, rows, capacity, sampling, logprobs=False):
        """Where `rows` sequences of up to `capacity` tokens are continued: on CUDA a captured graph, kept for the next request."""
        with torch.inference_mode(False):  # tensors made inside that mode could not be changed outside it later
            if self.device.type != "cuda":
                return Steps(self, rows, capacity, sampling, logprobs)
            if self.decoder is None:
                from decode import Decoder  # needs Triton

                self.decoder = Decoder(self)
            return self.decoder.steps(rows, capacity, sampling, logprobs)


class Generator:
    """Continue prompts: iterating yields the ids drawn at each step, `(rows,)` on the host, -1 where a row has ended.

    model: an `Engine`, or a model (`vocab`, `eot`, `dtype` then as for the engine); prompts: the ids of one prompt, or of several
    of any lengths; n: continuations of each, forked from one reading, rows b n to b n + n - 1 are those of prompt b. The seed of
    row i is seed + i, or seed[i]. A row ends after one of `stop_tokens`, or where the caller sets `ended[row]`. `after` goes on
    from a `Read` in place of an empty state. With `logprobs` the attribute of that name has those of the step's tokens.
    """

    def __init__(
        self, model, prompts, *, n=1, max_new_tokens=200, temperature=1.0, top_k=None, top_p=None, min_p=None,
        repetition_penalty=1.0, seed=0, stop_tokens=(), logprobs=False, after=None, progress=None, vocab=None, eot=None,
        dtype="float32",
    ):  # fmt: skip
        self.engine = model if isinstance(model, Engine) else Engine(model, vocab=vocab, eot=eot, dtype=dtype)
        self.sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        one = not prompts or isinstance(prompts[0], int)
        self.prompts = [self._checked(list(ids), after) for ids in ([prompts] if one else prompts)]
        if n < 1 or max_new_tokens < 0:
            raise ConfigError(f"n={n} must be at least 1, max_new_tokens={max_new_tokens} at least 0")
        if after is not None and len(self.prompts) > 1:
            raise ConfigError(f"{len(self.prompts)} prompts: one sequence goes on from a state, use n for several continuations")
        self.n, self.rows, self.max_new_tokens = n, n * len(self.prompts), max_new_tokens
        self.seeds = [seed + i for i in range(self.rows)] if isinstance(seed, int) else list(seed)
        if len(self.seeds) != self.rows:
            raise ConfigError(f"{len(self.seeds)} seeds for {self.rows} rows: one each, or one number")
        self.stop_tokens = torch.tensor(sorted(stop_tokens), dtype=torch.int64)
        self.after, self.progress, self.with_logprobs, self.logprobs = after, progress, logprobs, None
        past, before = (0, frozenset()) if after is None else (after.state.longest, after.occurred)
        self.occurred = [before.union(ids) for ids in self.prompts]
        self.capacity = past + max(map(len, self.prompts)) + max_new_tokens
        self._check_positions(past)
        self.ended = torch.zeros(self.rows, dtype=torch.bool)
        self.state = None  # made when the first token is asked for

    def _checked(self, ids, after):
        vocab, eot = self.engine.vocab, self.engine.eot
        ids = [*(after.unfed if after is not None else ()), *ids]
        if not ids and (after is None or after.logits is None):
            if eot is None:
                raise ConfigError("the prompt is empty: it needs at least one token, such as the one that opens a document")
            ids = [eot]
        if ids and (min(ids) < 0 or max(ids) >= vocab) and set(ids) - {*range(vocab), eot}:
            wrong = next(i for i in ids if not 0 <= i < vocab and i != eot)
            raise ConfigError(f"the prompt has token id {wrong}: allowed are 0 to {vocab - 1}")
        return ids

    def _check_positions(self, past):
        most = self.engine.model.config.block_size - past - max(map(len, self.prompts)) + 1  # the last one drawn is not fed
        if self.engine.model.position_embedding is not None and self.max_new_tokens > most:
            learned = f"the model has {self.engine.model.config.block_size} learned positions"
            raise ConfigError(f"max_new_tokens={self.max_new_tokens} after this prompt: {learned}, use at most {max(most, 0)}")

    def start(self):
        """Read the prompts, if that has not been done: afterwards `first` is the `Read` of them. Iterating does this by itself."""
        if self.state is not None:
            return
        self.steps = self.engine.steps(self.rows, self.capacity, self.sampling, self.with_logprobs)
        self.steps.owner, self.state = self, self.steps.state
        if self.after is None or self.after.state.length.data_ptr() != self.state.length.data_ptr():
            self.state.clear_()  # of the last request that was here
        first, logits = self.state.rows(len(self.prompts)), None
        if self.after is not None:
            first.copy_(self.after.state)
            logits = self.after.logits
        for layer in self.state.layers:
            layer.length[self.rows :] = 0  # rows that fill up a bucket
        self.steps.sampler.reset(self.seeds, [ids for ids in self.occurred for _ in range(self.n)])
        self.first = Read(first, self.steps.read(self.prompts, first, logits, self.progress), occurred=self.occurred[0])
        self.fed, self.taken, self.written = 0, 0, set()

    def __iter__(self):
        self.start()
        if self.taken:
            raise ConfigError("this generator has been iterated: go on from its read() by `after`, or make another")
        self._draw_first()
        for i in range(self.max_new_tokens):
            fetch, last = self.steps.fetch(), i + 1 == self.max_new_tokens
            if self.steps.ahead and not last:
                self._next()
            tokens, self.logprobs = fetch()
            self.drawn, self.taken = torch.where(self.ended, -1, tokens[: self.rows]), self.taken + 1
            self.written.update(self.drawn.tolist())
            yield self.drawn
            self.ended |= torch.isin(self.drawn, self.stop_tokens)
            if self.ended.all():
                return
            if not self.steps.ahead and not last:
                self._next()

    @torch.inference_mode()
    def _draw_first(self):
        self.state.spread_(self.first.state, self.n)
        if self.max_new_tokens:
            self.steps.first(self.first.logits.repeat_interleave(self.n, 0))

    @torch.inference_mode()
    def _next(self):
        if self.steps.owner is not self:
            raise ConfigError(
                "another request of this engine has taken over the state: finish one before the next, or use two engines"
            )
        self.steps.next()
        self.fed += 1

    def read(self):
        """After the last step of a single row: the `Read` to go on from."""
        if self.rows > 1:
            raise ConfigError(f"{self.rows} rows: a single one can be gone on from")
        if not self.taken:
            return self.first
        return Read(self.state.rows(1), None, () if self.fed == self.taken else (int(self.drawn),), self.occurred[0] | self.written)


class TextStream:
    """Text of one row as it grows: whole characters only, held back while it may begin a stop string, cut before the first one."""

    def __init__(self, tokenizer, stop=()):
        self.decoder, self.stop, self.held, self.ended = StreamDecoder(tokenizer), [s for s in stop if s], "", False

    def push(self, token):
        """The text that is certain now."""
        return "" if self.ended else self._give(self.decoder.push(token))

    def flush(self):
        """What is left at the end."""
        text = "" if self.ended else self._give(self.decoder.flush())
        text, self.held, self.ended = text + self.held, "", True
        return text

    def _give(self, text):
        text = self.held + text
        found = [place for place in map(text.find, self.stop) if place >= 0]
        if found:
            self.held, self.ended = "", True
            return text[: min(found)]
        lengths = range(1, max(map(len, self.stop), default=0))
        held = max((n for n in lengths if any(s.startswith(text[-n:]) for s in self.stop if n < len(s))), default=0)
        cut = len(text) - min(held, len(text))
        self.held = text[cut:]
        return text[:cut]


def stream(generator, tokenizer, stop=()):
    """Yield the new text of every row at each step ("" where none is certain yet), to the end of all rows.

    A row ends where a new document would begin or a stop string appears; neither is part of the text.
    """
    streams = [TextStream(tokenizer, stop) for _ in range(generator.rows)]
    for tokens in generator:
        pieces = [""] * generator.rows
        for row, token in enumerate(tokens.tolist()):
            if token == tokenizer.eot:
                pieces[row] = streams[row].flush()
            elif token >= 0:
                pieces[row] = streams[row].push(token)
            generator.ended[row] |= streams[row].ended
        yield pieces
    yield [one.flush() for one in streams]


def complete(generator, tokenizer, stop=()):
    """The text of every row, as a list."""
    return ["".join(pieces) for pieces in zip(*stream(generator, tokenizer, stop), strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# A prompt that is put away and taken up again


def identity(meta, tokenizer):
    """What a state belongs to: the weights and the tokenizer, by their hashes."""
    files = json.loads((Path(meta["folder"]) / checkpoint.MARKER).read_text())
    return {"weights": files["model.safetensors"]["sha256"], "tokenizer": tokenizer.hash}


def save_state(path, read, belongs):
    """Write a `Read` that has logits to `path`, with the identity of its model; whole or not at all."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        occurred = torch.tensor(sorted(read.occurred), dtype=torch.int64)
        read.state.save(beside, belongs, logits=read.logits.float().cpu(), occurred=occurred)
        os.replace(beside, path)
    except (OSError, SafetensorError) as e:  # the latter is how safetensors reports a full disk
        with contextlib.suppress(OSError):
            beside.unlink()
        raise ConfigError(f"save_state={str(path)!r}: cannot be written ({e})") from e


def load_state(path, engine, belongs):
    """The `Read` that `save_state` wrote; ConfigError says why, if it does not belong to this model."""
    try:
        with safe_open(path, "pt") as file:
            saved, names = file.metadata() or {}, set(file.keys())
            logits, occurred = (file.get_tensor(name) if name in names else None for name in ("logits", "occurred"))
    except (OSError, SafetensorError) as e:
        raise ConfigError(f"load_state={str(path)!r}: cannot be read as a saved state ({e})") from e
    if logits is None or occurred is None or "longest" not in saved:
        raise ConfigError(f"load_state={str(path)!r}: is no state that --save_state wrote")
    for name, mine in belongs.items():
        if saved.get(name) != mine:
            given = f"{name} {str(saved.get(name))[:16]}, this model has {mine[:16]}"
            raise ConfigError(
                f"load_state={str(path)!r}: saved with another model: its {given}: read the prompt again with this one"
            )
    longest = max(json.loads(saved["longest"]))
    state = engine.model.init_state(1, longest, dtype=engine.dtype)
    return Read(state.load(path), logits.to(engine.device), occurred=frozenset(occurred.tolist()))


# ----------------------------------------------------------------------------------------------------------------------
# The command


class SampleConfig(Settings):
    """sampling"""

    start: str = Field("", description="prompt; FILE:path reads it from a file, - from stdin; empty: the beginning of a document")
    num_samples: int = Field(1, ge=1, description="continuations of the prompt, forked from one reading of it")
    max_new_tokens: int = Field(200, ge=0, description="tokens to write")
    temperature: float = Field(0.8, ge=0, description="0: always the most likely token; 1: the model's own distribution")
    top_k: int | None = Field(200, ge=1, description="only the k most likely tokens are drawn; none or more than there are: all")
    top_p: float | None = Field(None, gt=0, le=1, description="of those the fewest that hold this much probability; none: all")
    min_p: float | None = Field(None, ge=0, le=1, description="of those the ones at least this times as likely as the likeliest")
    repetition_penalty: float = Field(1.0, gt=0, description="above 1: tokens of the text so far become less likely")
    stop: str | None = Field(None, min_length=1, description="a sample ends before this text; \\n: a new line; several: a|b")
    seed: int = Field(1337, ge=0, le=2**62, description="seed of the first sample's draws; the others have the numbers after it")
    logprobs: bool = Field(False, description="print the model's log-probability of each token that was drawn")
    save_state: str | None = Field(None, min_length=1, description="file to write the state to that reading the prompt leaves")
    load_state: str | None = Field(None, min_length=1, description="file of such a state, from which the prompt goes on")
    interactive: bool = Field(False, description="read a line, continue it, and so on with the state kept; an empty line: go on")
    prefill_chunk: int = Field(8192, ge=64, description="tokens of the prompt that are read at once")
    device: str | None = Field(None, min_length=1, description="cpu, cuda, cuda:1, mps; none: the best there is")
    dtype: Literal["float32", "bfloat16"] | None = Field(None, description="compute type; none: bfloat16 on CUDA, else float32")

    _positional: ClassVar[str | None] = "RUN"
    _instead: ClassVar[dict[str, str]] = {
        "out_dir": "the run to write with stands by itself: python sample.py out/demo",
        "init_from": "the model to write with stands by itself: python sample.py out/demo (GPT-2: python convert.py from_hf "
        "openai-community/gpt2 out/gpt2 makes a run of it)",
    }

    def conflicts(self):
        if self.interactive:
            for name in ("save_state", "logprobs"):
                if getattr(self, name):
                    yield {"interactive", name}, f"{name} has no effect with interactive=true: drop one of them"
            if self.num_samples > 1:
                yield {"interactive", "num_samples"}, f"num_samples={self.num_samples}: interactive=true writes one, use 1"


def prompt_text(start):
    """The text of a prompt: itself, of FILE:path, or of stdin (-)."""
    if start == "-":
        return sys.stdin.read()
    if not start.startswith("FILE:"):
        return start
    path = Path(start.removeprefix("FILE:"))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--start={str(path)!r}: cannot be read as UTF-8 text ({e})") from e


def drawable(tokenizer, meta):
    """The ids below this number may be drawn: all, or all but the separator, where the model has not learned it (its last id)."""
    return tokenizer.eot if meta["separator"] == "none" else tokenizer.vocab_size


def opening(ids, tokenizer, separator):
    """Ids of the beginning of a document: where documents begin with the separator, so does the prompt; never empty."""
    return [tokenizer.eot, *ids] if separator == "before" or not ids else ids


def attention_cache_bytes(model, tokens, dtype):
    """Bytes of keys and values for `tokens` tokens if every mixer were full attention, with heads as the model's attention has."""
    c, mixers = model.config, [b.mixer for b in model.blocks if b.mixer is not None]
    own = next((m for m in mixers if type(m) is Attention), None)
    width = (c.n_kv_head or c.n_head) * (c.head_dim or c.n_embd // c.n_head) if own is None else own.Hk * own.D
    return 2 * len(mixers) * tokens * width * torch.finfo(dtype).bits // 8


def bytes_per_step(model, state, dtype):
    """Bytes that one decoding step must move: the weights once, recurrent states in and out, the filled part of the caches."""
    unused = 0 if model.head is None else model.embedding.weight.numel()
    total = (model.n_params() - unused) * torch.finfo(dtype).bits // 8
    for layer in state.layers:
        for name, x in layer.tensors.items():
            filled = min(1.0, layer.longest / max(1, x.shape[1])) if name in CACHES else 2
            total += filled * x.numel() * x.element_size() if name != "length" else 0
    return total


def peak_bandwidth(device):
    """Bytes a second that the device's memory can move, from its clock and bus; None where it does not say."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    return 2e3 * clock * width / 8 or None  # kHz, two transfers a cycle


def progress_bar(total, chunk):
    """A callback that shows on a terminal how much of a long prompt has been read; None elsewhere."""
    if total <= chunk or not sys.stderr.isatty():
        return None
    return lambda done: print(f"\rread {done:,} of {total:,} tokens", end="" if done < total else "\n", file=sys.stderr, flush=True)


def note_length(generator):
    """Say so where positions will occur that a rotary embedding has not seen in training; returns whether it did."""
    model, total = generator.engine.model, generator.capacity
    rotated = any(getattr(b.mixer, "rope_dim", 0) or getattr(b.mixer, "rope", False) for b in model.blocks)
    if beyond := rotated and total > model.config.block_size:
        print(
            f"note: {total} tokens with the prompt, more than the {model.config.block_size} the model was trained on",
            file=sys.stderr,
        )
    return beyond


class Timer:
    """When the prompt was given and when each token came."""

    def __init__(self):
        self.times = [time.perf_counter()]

    def tick(self):
        self.times.append(time.perf_counter())

    def summary(self, generator, prompt_tokens):
        """The last line: time to first token, pace, bandwidth, state."""
        engine, steps, times = generator.engine, len(self.times) - 1, self.times
        line = f"{generator.rows} x {steps} tokens on {engine.device} in {str(engine.dtype).removeprefix('torch.')}: "
        line += f"first token after {1e3 * (times[1] - times[0]):.1f} ms ({prompt_tokens} tokens of prompt)"
        if steps > 1:
            pace = (times[-1] - times[1]) / (steps - 1)
            moved = bytes_per_step(engine.model, generator.state, engine.dtype) / pace / 1e9
            peak = peak_bandwidth(engine.device)
            of = f" ({1e11 * moved / peak:.0f}% of {peak / 1e9:.0f})" if peak else ""
            line += f", then {1e3 * pace:.2f} ms/token, {generator.rows / pace:.0f} tok/s, {moved:.1f} GB/s{of}"
        cache = generator.rows * attention_cache_bytes(engine.model, generator.state.longest, engine.dtype)
        kept = f"state {format_bytes(generator.state.nbytes)}"
        return f"{line}; {kept} (full attention would keep {format_bytes(cache)} of keys and values)"


def options_of(config):
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "logprobs")
    return {name: getattr(config, name) for name in names} | {"n": config.num_samples}


def stops_of(config):
    return [] if config.stop is None else [text for text in config.stop.replace("\\n", "\n").split("|") if text]


def write(generator, tokenizer, prompt, stop, timer):
    """Print the samples, the first as it is drawn, the others when they are done."""
    texts, drawn = [prompt] * generator.rows, []
    print(prompt, end="", flush=True)
    for pieces in stream(generator, tokenizer, stop):
        if len(drawn) < generator.taken:
            timer.tick()
            drawn.append((generator.drawn, generator.logprobs))
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        print(pieces[0], end="", flush=True)
    print()
    for row, text in enumerate(texts):
        if row:
            print(f"{'-' * 80}\n{text}")
        if generator.with_logprobs:
            told = [f"{tokenizer.decode([ids[row]])!r} {lp[row]:.3f}" for ids, lp in drawn if ids[row] >= 0]
            print("log-probabilities: " + "  ".join(told))


def converse(engine, tokenizer, after, config, separator):
    """Read a line, continue it, and so on: the text so far stays in the state. A document's end begins a new one."""
    lines, seed, noted = iter([config.start] if config.start else []), config.seed, False
    while True:
        try:
            line = next(lines, None)
            line = input("> " if sys.stdin.isatty() else "") if line is None else prompt_text(line)
        except EOFError:
            return
        ids = tokenizer.encode(line)
        ids = ids if after is not None else opening(ids, tokenizer, separator)
        generator, timer = Generator(engine, ids, after=after, **options_of(config) | {"seed": seed}), Timer()
        noted = noted or note_length(generator)
        write(generator, tokenizer, "" if sys.stdin.isatty() else line, stops_of(config), timer)
        if generator.taken:
            print(timer.summary(generator, len(ids)), file=sys.stderr)
        closed = generator.taken and int(generator.drawn) == tokenizer.eot
        after, seed = None if closed else generator.read(), seed + 1


def main(argv):
    resolved = configurator.load(SampleConfig, argv, prog="sample.py", description=__doc__)
    config = resolved.config
    if len(resolved.positional) != 1:
        raise ConfigError(f"one run or checkpoint folder is needed, got {len(resolved.positional)}: python sample.py out/demo")
    device, dtype = resolve_device(config)
    model, tokenizer, meta = checkpoint.load_model(resolved.positional[0], device)
    vocab = drawable(tokenizer, meta)
    engine = Engine(model, vocab=vocab, eot=tokenizer.eot, dtype=dtype, chunk=config.prefill_chunk)
    after = load_state(config.load_state, engine, identity(meta, tokenizer)) if config.load_state else None
    if config.interactive:
        converse(engine, tokenizer, after, config, meta["separator"])
        return
    text = prompt_text(config.start)
    ids = tokenizer.encode(text)
    ids = ids if after is not None else opening(ids, tokenizer, meta["separator"])
    bar = progress_bar(len(ids), config.prefill_chunk)
    generator = Generator(engine, ids, after=after, progress=bar, **options_of(config))
    note_length(generator)
    engine.warm_up(generator)
    timer = Timer()
    generator.start()
    if config.save_state:
        save_state(config.save_state, generator.first, identity(meta, tokenizer))
        print(f"state after {generator.first.state.longest} tokens written to {config.save_state}", file=sys.stderr)
        timer = Timer()
    write(generator, tokenizer, text, stops_of(config), timer)
    if generator.taken:
        print(f"{'-' * 80}\n{timer.summary(generator, len(ids))}")


if __name__ == "__main__":
    configurator.run(main)
