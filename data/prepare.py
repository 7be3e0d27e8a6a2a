"""What the prepare scripts of the data sets share: splitting documents, and writing a data-set folder."""

import importlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from configurator import ConfigError
from data.tokenizer import Tokenizer
from data.tokens import DATA_DIR, file_sha256, write_tokens

ENCODE_BATCH = 64  # documents encoded at once: enough for tiktoken's threads, little memory


def split_documents(documents: Sequence[str], every: int = 20, held_out: int = 0) -> tuple[list[str], list[str]]:
    """(train, val): the documents whose index % every == held_out are held out.

    Empty documents and exact repeats are dropped first, so that no document can be in both splits. Raises ConfigError
    if either split would be empty.
    """
    kept = list(dict.fromkeys(document for document in documents if document))
    val = kept[held_out::every]
    train = [document for index, document in enumerate(kept) if index % every != held_out]
    if not train or not val:
        raise ConfigError(f"{len(kept)} distinct documents cannot be split: at least {max(2, held_out + 1)} are needed")
    return train, val


def write_dataset(
    folder: str | os.PathLike,
    tokenizer: Tokenizer,
    train: Sequence[str],
    val: Sequence[str],
    *,
    name: str,
    source: str,
    licence: str,
) -> dict:
    """Write train.bin, val.bin, tokenizer.json and meta.json; returns what meta.json holds.

    Each document is written as EOT and its tokens. The same documents and tokenizer give the same bytes. meta.json
    comes last. Raises ConfigError for an empty split or a document that is in both.
    """
    folder = Path(folder)
    if not any(train) or not any(val):
        raise ConfigError(f"data set {name!r}: the {'training' if not any(train) else 'held-out'} text is empty")
    if not set(train).isdisjoint(val):
        raise ConfigError(f"data set {name!r}: a document is in both splits: {min(set(train) & set(val))[:60]!r}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").unlink(missing_ok=True)  # what it says is not true while the files change
    tokenizer.save(folder / "tokenizer.json")
    meta: dict = {
        "name": name,
        "source": source,
        "licence": licence,
        "tokenizer": tokenizer.kind,
        "tokenizer_hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "separator": "before",
        "splits": {},
    }
    for split, documents in (("train", train), ("val", val)):
        started = time.perf_counter()
        path = folder / f"{split}.bin"
        tokens = write_tokens(
            path,
            _encoded(documents, tokenizer),
            separator="before",
            eot=tokenizer.eot,
            vocab_size=tokenizer.vocab_size,
            tokenizer_hash=tokenizer.hash,
        )
        size = sum(len(document.encode()) for document in documents)
        meta["splits"][split] = {"documents": len(documents), "utf8_bytes": size, "tokens": tokens}
        print(
            f"{path}: {len(documents):,} documents, {size:,} bytes, {tokens:,} tokens "
            f"({size / tokens:.2f} bytes a token, {time.perf_counter() - started:.1f} s)",
            flush=True,
        )
    meta["val_sha256"] = file_sha256(folder / "val.bin")
    beside = folder / f"meta.json.{os.getpid()}.tmp"
    beside.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, folder / "meta.json")
    return meta


def _encoded(documents: Sequence[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    for first in range(0, len(documents), ENCODE_BATCH):
        for ids in tokenizer.encode_batch(documents[first : first + ENCODE_BATCH]):
            yield np.array([tokenizer.eot, *ids], dtype=np.int64)


def prepare_builtin(name: str, out: str | os.PathLike | None = None) -> bool:
    """Prepare a built-in set that needs no download (sotu) if its folder has no meta.json; True if it did so.

    `out` is the folder to write, data/NAME by default. Other names are left alone: opening them says what to do.
    """
    folder = Path(out) if out is not None else DATA_DIR / name
    if name != "sotu" or (folder / "meta.json").is_file():
        return False
    print(f"data set {name!r} is not prepared yet: preparing it in {folder}", flush=True)
    importlib.import_module(f"data.{name}.prepare").prepare(folder)
    return True
