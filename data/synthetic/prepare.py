"""Made tasks that a sequence mixer can or cannot learn: associative recall, copying, parity, modular arithmetic.

    python data/synthetic/prepare.py --task=mqar --row=256 --pairs=32        # then train.py --dataset=data/synthetic/mqar-256-32
    python data/synthetic/prepare.py --task=copying --row=128
    python data/synthetic/prepare.py --task=parity --row=256 --longest=40    # documents of 3 to 40 bits
    python data/synthetic/prepare.py --task=modular --row=256 --longest=40

Rows are as long as training's block_size and begin with the separator. Only the answers have labels: the loss counts nothing else.
`eval.py RUN --tasks=mqar` (copying, parity, modular) makes its own documents, with other seeds than the ones here.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

if not __package__:  # run as a script: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from pydantic import Field

from configurator import ConfigError, Settings, load, run
from data.tokenizer import Tokenizer
from data.tokens import file_sha256, tokenizer_meta, write_json, write_tokens

FOLDER = Path(__file__).resolve().parent
FIRST_SYMBOL = 0x4E00  # thousands of printable characters of equal size begin here
MODULUS = 5
POWER = 0.01  # of the law by which queries are placed (Zoology's)
CHUNK = 4096  # rows made at once


def symbols(n: int) -> str:
    """n distinct characters in the order of their ids."""
    return "".join(chr(FIRST_SYMBOL + i) for i in range(n))


# ----------------------------------------------------------------------------------------------------------------------
# The tasks. Each gives (tokens, labels) of equal shape; a label is what is to be predicted at its position, -1: nothing is


def mqar(rng: np.random.Generator, rows: int, length: int, pairs: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Multi-query associative recall (Zoology, 2312.04927), int64 [rows, length].

    `pairs` keys from [1, vocab/2), each followed by its value from [vocab/2, vocab); then every key once more, at places drawn by a
    power law that favours early ones; what is left is random. The label of a repeated key is its value.
    """
    slots = (length - 2 * pairs) // 2
    if pairs < 1 or slots < pairs or vocab // 2 - 1 < pairs:
        most = min(length // 4, vocab // 2 - 1)
        raise ConfigError(f"pairs={pairs}: {length} tokens and {vocab} symbols hold 1 to {most} pairs and their queries")
    half = vocab // 2
    keys = 1 + _distinct(rng, rows, pairs, np.ones(half - 1, np.float32))
    values = half + rng.integers(0, vocab - half, (rows, pairs))
    tokens, labels = rng.integers(0, vocab, (rows, length)), np.full((rows, length), -1)
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    law = np.arange(1, slots + 1, dtype=np.float32) ** (POWER - 1)
    places = 2 * pairs + 2 * _distinct(rng, rows, pairs, law)
    np.put_along_axis(tokens, places, keys, 1)
    np.put_along_axis(labels, places, values, 1)
    return tokens, labels


def _distinct(rng, rows, n, weights):
    """n distinct indices a row, int64 [rows, n], drawn one after the other with these weights: the n shortest waiting times."""
    times = rng.standard_exponential((rows, len(weights)), dtype=np.float32) / weights
    first = np.argpartition(times, n - 1, axis=1)[:, :n]
    return np.take_along_axis(first, np.take_along_axis(times, first, 1).argsort(1), 1)


def copying(rng: np.random.Generator, rows: int, length: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """`length` random symbols, the last symbol of the vocabulary as a sign, and the same again: int64 [rows, 2 length]."""
    text = rng.integers(0, vocab - 1, (rows, length))
    tokens = np.concatenate([text, np.full((rows, 1), vocab - 1), text[:, :-1]], 1)
    return tokens, np.concatenate([np.full((rows, length), -1), text], 1)


def parity(rng: np.random.Generator, length: int) -> tuple[str, list[int]]:
    """Bits, and at each the parity of all so far."""
    bits = rng.integers(0, 2, length)
    return "".join(map(str, bits)), (bits.cumsum() % 2).tolist()


def modular(rng: np.random.Generator, length: int) -> tuple[str, int]:
    """An expression in +, -, * without brackets, of an even number of characters with its "=", and its value modulo 5."""
    numbers = rng.integers(0, MODULUS, max(1, length // 2))
    signs = rng.choice(list("+-*"), len(numbers) - 1)
    text = "".join(f"{sign}{number}" for sign, number in zip(["", *signs], numbers, strict=True))
    terms = [eval_product(term) for term in text.replace("-", "+-").split("+")]
    return text + "=", sum(terms) % MODULUS


def eval_product(term: str) -> int:
    """The value of numbers and "*", the first possibly negative: -2*3 is -6."""
    value = -1 if term.startswith("-") else 1
    for number in term.removeprefix("-").split("*"):
        value *= int(number)
    return value


# ----------------------------------------------------------------------------------------------------------------------
# Rows


class SyntheticConfig(Settings):
    """making a task"""

    task: Literal["mqar", "copying", "parity", "modular"] = Field("mqar", description="what is to be learned")
    row: int = Field(256, ge=8, description="tokens of a row, the separator included: the block_size to train with")
    rows: int = Field(100_000, ge=1, description="rows to train on")
    val_rows: int = Field(1000, ge=1, description="rows held out")
    pairs: int = Field(32, ge=1, description="mqar: keys with a value, each asked for once")
    vocab: int = Field(8192, ge=4, le=20_000, description="mqar, copying: number of symbols")
    shortest: int = Field(3, ge=1, description="parity, modular: shortest document, in characters")
    longest: int = Field(40, ge=1, description="parity, modular: longest document")
    seed: int = Field(0, ge=0, le=2**31, description="seed of the rows")
    out: str | None = Field(None, min_length=1, description="folder to write; none: after the task and its size")

    def conflicts(self):
        if self.task in ("parity", "modular") and not self.shortest <= self.longest < self.row:
            problem = f"shortest={self.shortest}, longest={self.longest}: they must be in this order, and below row={self.row}"
            yield {"shortest", "longest", "row"}, problem


def _mqar_rows(config, rng, rows, tokenizer):
    return mqar(rng, rows, config.row - 1, config.pairs, config.vocab)


def _copying_rows(config, rng, rows, tokenizer):
    return copying(rng, rows, (config.row - 1) // 2, config.vocab)


def _packed(config, rng, rows, tokenizer, make):
    """Rows of whole documents of random lengths, filled up with separators: (tokens, labels), without the first separator."""
    tokens, labels = np.full((rows, config.row), tokenizer.eot), np.full((rows, config.row), -1)
    for i in range(rows):
        at = 0
        while True:
            text, answers = make(rng, int(rng.integers(config.shortest, config.longest + 1)))
            if at + 1 + len(text) > config.row:
                break
            tokens[i, at + 1 : at + 1 + len(text)] = tokenizer.encode(text)
            labels[i, at + 1 + len(text) - len(answers) : at + 1 + len(text)] = answers
            at += 1 + len(text)
    return tokens[:, 1:], labels[:, 1:]


def _parity_rows(config, rng, rows, tokenizer):
    return _packed(config, rng, rows, tokenizer, parity)  # the ids of "0" and "1" are 0 and 1


def _modular_rows(config, rng, rows, tokenizer):
    digit = tokenizer.encode("0")[0]

    def make(rng, length):
        text, value = modular(rng, length)
        return text, [digit + value]

    return _packed(config, rng, rows, tokenizer, make)


TASKS: dict[str, tuple[Callable, Callable]] = {  # the rows of a task, and its characters
    "mqar": (_mqar_rows, lambda config: symbols(config.vocab)),
    "copying": (_copying_rows, lambda config: symbols(config.vocab)),
    "parity": (_parity_rows, lambda config: "01"),
    "modular": (_modular_rows, lambda config: "+-*=" + "".join(map(str, range(MODULUS)))),
}
USED = {
    "mqar": ("row", "pairs", "vocab"),
    "copying": ("row", "vocab"),
    "parity": ("row", "shortest", "longest"),
    "modular": ("row", "shortest", "longest"),
}  # the settings that decide what a row is


def _chunks(config, split, rows, tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(tokens, labels) with the separator in front, flat, CHUNK rows at a time: the same at every call."""
    make = TASKS[config.task][0]
    for number, first in enumerate(range(0, rows, CHUNK)):
        rng = np.random.default_rng([config.seed, split == "val", number])
        tokens, labels = make(config, rng, min(CHUNK, rows - first), tokenizer)
        odd = config.row - 1 - tokens.shape[1]  # a copying row may be one short
        tokens = np.pad(tokens, ((0, 0), (1, odd)), constant_values=tokenizer.eot)
        labels = np.pad(labels, ((0, 0), (1, odd)), constant_values=-1)
        yield tokens.ravel(), labels.ravel()


def prepare(config: SyntheticConfig) -> dict:
    """Write the data set and return its meta. The same settings give the same bytes."""
    used = {name: getattr(config, name) for name in USED[config.task]}
    name = "-".join([config.task, *(str(x) for key, x in used.items() if key != "vocab")])
    folder = Path(config.out) if config.out else FOLDER / name
    tokenizer = Tokenizer.from_characters(TASKS[config.task][1](config))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").unlink(missing_ok=True)
    tokenizer.save(folder / "tokenizer.json")
    meta = {
        "name": name,
        "source": "made by data/synthetic/prepare.py",
        "licence": "none needed",
        "made": {"task": config.task, **used},
        **tokenizer_meta(tokenizer),
    }
    for split, rows in (("train", config.rows), ("val", config.val_rows)):
        started, path = time.perf_counter(), folder / f"{split}.bin"
        tokens = (chunk for chunk, _ in _chunks(config, split, rows, tokenizer))
        labels = (chunk for _, chunk in _chunks(config, split, rows, tokenizer))
        about = {"separator": "before", "eot": tokenizer.eot, "vocab_size": tokenizer.vocab_size}
        count = write_tokens(path, tokens, labels=labels, row=config.row, tokenizer_hash=tokenizer.hash, **about)
        print(f"{path}: {rows:,} rows of {config.row} tokens, {count:,} tokens ({time.perf_counter() - started:.1f} s)", flush=True)
    meta["sha256"] = {"train.bin": file_sha256(folder / "train.bin")}
    meta["val_sha256"] = file_sha256(folder / "val.bin")
    write_json(folder / "meta.json", meta)
    print(f"train with --dataset={folder} --block_size={config.row}; then eval.py RUN --tasks={config.task}")
    return meta


def main(argv: list[str]) -> None:
    prog = "python data/synthetic/prepare.py"
    resolved = load(SyntheticConfig, argv, prog=prog, description=__doc__.splitlines()[0])
    used = {"task", "rows", "val_rows", "seed", "out", *USED[resolved.config.task]}
    useless = [name for name, source in resolved.sources.items() if source != "default" and name not in used]
    if useless:
        raise ConfigError([f"--{name} has no effect with task={resolved.config.task}: drop it" for name in useless])
    prepare(resolved.config)


if __name__ == "__main__":
    run(main)
