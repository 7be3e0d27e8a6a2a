"""Write text with a trained model: `python sample.py RUN [--start="The state of the union"]`.

The prompt is read in parallel, once; then one token at a time on a state that was allocated before the first. Recurrent layers
keep a matrix of constant size, attention layers keep their keys and values.
"""

import math
import sys
import time
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field

import checkpoint
import configurator
from configurator import ConfigError, Settings
from data.tokenizer import StreamDecoder
from model import format_bytes
from train import resolve_device


class SampleConfig(Settings):
    """sampling"""

    start: str = Field("", description="prompt; FILE:path reads it from a file; empty: the beginning of a document")
    num_samples: int = Field(1, ge=1, description="continuations of the prompt, forked from one reading of it")
    max_new_tokens: int = Field(200, ge=0, description="tokens to write")
    temperature: float = Field(0.8, ge=0, description="0: always the most likely token; 1: the model's own distribution")
    top_k: int | None = Field(200, ge=1, description="only the k most likely tokens are drawn; none: all")
    seed: int = Field(1337, ge=0, le=2**63 - 1, description="seed of the draws")
    device: str | None = Field(None, min_length=1, description="cpu, cuda, cuda:1, mps; none: the best there is")
    dtype: Literal["float32", "bfloat16"] | None = Field(None, description="compute type; none: bfloat16 on CUDA, else float32")

    _positional: ClassVar[str | None] = "RUN"


class Generator:
    """Continue a prompt: parallel prefill into a preallocated state, then one token a step. Iterating yields the ids `(n,)` drawn.

    model: in evaluation mode; prompt: token ids (not empty); n: continuations, forked from one prefill; vocab: ids from here on
    are padding and never drawn. temperature 0 takes the most likely token; top_k None draws from all.
    """

    def __init__(
        self,
        model,
        prompt,
        *,
        n=1,
        max_new_tokens=200,
        temperature=1.0,
        top_k=None,
        seed=0,
        vocab=None,
        dtype="float32",
    ):
        if not prompt:
            raise ConfigError("the prompt is empty: it needs at least one token, such as the one that opens a document")
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ConfigError(f"temperature={temperature} must be at least 0, top_k={top_k} at least 1 or none")
        self.model, self.prompt, self.n, self.max_new_tokens = model, prompt, n, max_new_tokens
        self.temperature, self.top_k, self.vocab = temperature, top_k, vocab
        self.device = model.embedding.weight.device
        self.dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self.random = torch.Generator(self.device).manual_seed(seed)
        self.state = None

    def _forward(self, tokens, state):
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return self.model(tokens, state=state, last_only=True).logits[:, 0].float()

    def _draw(self, logits):
        """(n, vocab) logits -> (n,) token ids."""
        if self.vocab is not None:
            logits = logits[:, : self.vocab]
        if self.temperature == 0:
            return logits.argmax(-1)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # the largest is 0: no overflow at tiny temperatures
        return torch.multinomial(logits.softmax(-1), 1, generator=self.random)[:, 0]

    def __iter__(self):
        with torch.inference_mode():
            tokens = torch.tensor([self.prompt], device=self.device)
            self.state = self.model.init_state(1, len(self.prompt) + self.max_new_tokens, dtype=self.dtype)
            logits = self._forward(tokens, self.state)
            if self.n > 1:
                self.state, logits = self.state.fork(self.n), logits.expand(self.n, -1)
            for i in range(self.max_new_tokens):
                drawn = self._draw(logits)
                yield drawn
                if i + 1 < self.max_new_tokens:
                    logits = self._forward(drawn[:, None], self.state)


def encode_prompt(start, tokenizer, separator):
    """Token ids of a prompt: text, or FILE:path. Where documents begin with the separator, so does the prompt."""
    if start.startswith("FILE:"):
        path = Path(start.removeprefix("FILE:"))
        try:
            start = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"--start={str(path)!r}: cannot be read as UTF-8 text ({e})") from e
    ids = tokenizer.encode(start)
    return [tokenizer.eot, *ids] if separator == "before" or not ids else ids


def attention_cache_bytes(model, tokens, dtype):
    """Bytes of keys and values that this model would keep for `tokens` tokens if every mixer were full attention."""
    c = model.config
    layers = sum(b.mixer is not None for b in model.blocks)
    return 2 * layers * tokens * (c.n_kv_head or c.n_head) * (c.head_dim or c.n_embd // c.n_head) * torch.finfo(dtype).bits // 8


def write(generator, tokenizer, prompt):
    """Print the samples, the first as it is drawn, the others when they are done; returns the time of each step, the start first.

    A sample ends where a new document begins.
    """
    n, times = generator.n, [time.perf_counter()]
    streams, texts, ended = [StreamDecoder(tokenizer) for _ in range(n)], [prompt] * n, [False] * n
    print(prompt, end="", flush=True)
    for tokens in generator:
        drawn = tokens.tolist()  # waits for the device
        times.append(time.perf_counter())
        for i, token in enumerate(drawn):
            ended[i] = ended[i] or token == tokenizer.eot
            piece = "" if ended[i] else streams[i].push(token)
            texts[i] += piece
            if i == 0:
                print(piece, end="", flush=True)
        if all(ended):
            break
    print(streams[0].flush())
    for text, stream in zip(texts[1:], streams[1:], strict=True):
        print(f"{'-' * 80}\n{text}{stream.flush()}")
    return times


def main(argv):
    resolved = configurator.load(SampleConfig, argv, prog="sample.py", description=__doc__)
    config = resolved.config
    if len(resolved.positional) != 1:
        raise ConfigError(f"one run or checkpoint folder is needed, got {len(resolved.positional)}: python sample.py out/demo")
    device, dtype = resolve_device(config)
    model, tokenizer, meta = checkpoint.load_model(resolved.positional[0], device)
    prompt = encode_prompt(config.start, tokenizer, meta["separator"])
    total, trained = len(prompt) + config.max_new_tokens, model.config.block_size
    if total > trained:
        print(f"note: {total} tokens with the prompt, more than the {trained} the model was trained on", file=sys.stderr)
    generator = Generator(
        model,
        prompt,
        n=config.num_samples,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        seed=config.seed,
        vocab=tokenizer.vocab_size,
        dtype=dtype,
    )
    times = write(generator, tokenizer, tokenizer.decode([t for t in prompt if t != tokenizer.eot]))
    steps = len(times) - 1
    if steps == 0:
        return
    ms_per_token = 1e3 * (times[-1] - times[1]) / (steps - 1) if steps > 1 else float("nan")
    cache = config.num_samples * attention_cache_bytes(model, len(prompt) + steps - 1, generator.dtype)
    print(
        f"{'-' * 80}\n{config.num_samples} x {steps} tokens on {device} in {dtype}: first token after "
        f"{1e3 * (times[1] - times[0]):.1f} ms ({len(prompt)} tokens of prompt), then {ms_per_token:.2f} ms/token; "
        f"state {format_bytes(generator.state.nbytes)} (full attention would keep {format_bytes(cache)} of keys and values)"
    )


if __name__ == "__main__":
    configurator.run(main)
