"""Prepare any amount of text: pieces of it are tokenized by several processes into shards, and what is finished is kept.

    out/train-00000.bin, ...     one token file a piece (none where a piece has no training document)
    out/val.bin                  the held-out documents of all pieces
    out/parts/plan.json          the settings that decide the content
    out/parts/00000.json, .bin   what a finished piece holds, with hashes, and its held-out documents
    out/tokenizer.json, meta.json

A document is held out if the first 8 bytes of its sha256, as a fraction, lie below `val_fraction`: this depends on its text alone,
so that no document can be in both splits, and neither order, number of processes nor further inputs move one.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from configurator import ConfigError
from data.documents import Piece, Reading, documents
from data.tokenizer import Tokenizer
from data.tokens import TokenFile, file_sha256, read_meta, tokenizer_meta, write_json, write_tokens

BPE_BYTES = 200 * 10**6  # text that a byte-pair tokenizer is trained on, at most: more changes few merges


class Plan(NamedTuple):
    """What decides the content of a prepared folder beside the inputs themselves; compared by name when work is continued."""

    tokenizer: str
    vocab_size: int | None
    text_key: str
    split: str
    val_fraction: float
    val_inputs: int | None
    shard_mb: int

    @property
    def reading(self) -> Reading:
        return Reading(self.text_key, self.split)


def held_out(text: str, fraction: float) -> bool:
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


# ----------------------------------------------------------------------------------------------------------------------
# The tokenizer


def make_tokenizer(plan: Plan, pieces: Sequence[Piece]) -> Tokenizer:
    """The tokenizer that the plan names; `bpe` is trained on training documents, `char` takes the characters of all."""
    if plan.tokenizer == "char":
        return Tokenizer.from_characters(set().union(*(text for piece in pieces for text in documents(piece, plan.reading))))
    if plan.tokenizer != "bpe":
        return Tokenizer.from_name(plan.tokenizer)
    return Tokenizer.train_bpe(_training_texts(plan, pieces), plan.vocab_size)


def _training_texts(plan: Plan, pieces: Sequence[Piece]) -> Iterator[str]:
    """Training documents from the start of every piece, BPE_BYTES in all."""
    for piece in pieces:
        left = BPE_BYTES // len(pieces)
        for text in documents(piece, plan.reading):
            if left <= 0:
                break
            if not held_out(text, plan.val_fraction):
                yield text
                left -= len(text)


# ----------------------------------------------------------------------------------------------------------------------
# One piece


class _Work:
    """What a worker process needs, set once when it starts; `done` counts bytes of all workers, for the progress line."""

    tokenizer: Tokenizer
    plan: Plan
    folder: Path
    done = None

    @classmethod
    def start(cls, folder, plan, done):
        if done is not None:  # a process of a pool: Ctrl-C is for the parent, pieces that were begun are finished
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        cls.tokenizer, cls.plan, cls.folder, cls.done = Tokenizer.load(folder / "tokenizer.json"), plan, folder, done


def _encode_piece(index: int, piece: Piece) -> dict:
    """Write a piece's shard and its held-out documents, then its record: whichever of them is missing, the piece is not done."""
    tokenizer, plan, folder = _Work.tokenizer, _Work.plan, _Work.folder
    may_hold_out = plan.val_inputs is None or piece.source < plan.val_inputs
    sizes = {split: {"documents": 0, "utf8_bytes": 0, "tokens": 0} for split in ("train", "val", "left_out")}
    kept = []  # held-out documents: few

    def training() -> Iterator[np.ndarray]:
        for text in documents(piece, plan.reading):
            out = held_out(text, plan.val_fraction)
            split = "train" if not out else "val" if may_hold_out else "left_out"
            n_bytes = len(text.encode("utf-8", "replace"))
            ids = np.array([tokenizer.eot, *tokenizer.encode(text)]) if split != "left_out" else np.zeros(0, int)
            for name, n in (("documents", 1), ("utf8_bytes", n_bytes), ("tokens", len(ids))):
                sizes[split][name] += n
            if _Work.done is not None:
                with _Work.done.get_lock():
                    _Work.done.value += n_bytes
            if split == "train":
                yield ids
            elif split == "val":
                kept.append(ids)

    record = {"key": piece.key, "tokenizer_hash": tokenizer.hash, "splits": sizes}
    for split, arrays in (("train", training()), ("val", kept)):
        path = _files(folder, index)[split]
        if write_tokens(path, arrays, **_form(tokenizer)):
            record[f"{split}_sha256"] = file_sha256(path)
        else:
            path.unlink()
    write_json(folder / "parts" / f"{index:05d}.json", record)
    return record


def _files(folder: Path, index: int) -> dict[str, Path]:
    return {"train": folder / f"train-{index:05d}.bin", "val": folder / "parts" / f"{index:05d}.bin"}


def _form(tokenizer: Tokenizer) -> dict:
    return {"separator": "before", "eot": tokenizer.eot, "vocab_size": tokenizer.vocab_size, "tokenizer_hash": tokenizer.hash}


def _finished(folder: Path, index: int, piece: Piece, tokenizer: Tokenizer) -> dict | None:
    """The record of a piece whose files are what was written, None where there is work to do."""
    try:
        record = json.loads((folder / "parts" / f"{index:05d}.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if (record.get("key"), record.get("tokenizer_hash")) != (piece.key, tokenizer.hash):
        return None
    for split, path in _files(folder, index).items():
        expected = record.get(f"{split}_sha256")
        if expected is not None and not (path.is_file() and file_sha256(path) == expected):
            return None
    return record


# ----------------------------------------------------------------------------------------------------------------------
# All pieces


def prepare_corpus(folder: Path, pieces: Sequence[Piece], plan: Plan, *, processes: int, about: dict, overwrite=False) -> dict:
    """Write the data set of these pieces into `folder`, keeping what an earlier, interrupted call has finished; returns its meta.

    `about` holds name, source and licence. ConfigError if the folder holds something else (unless `overwrite`), if a document
    cannot be read, or if one of the splits would be empty.
    """
    _claim(folder, plan, overwrite)
    tokenizer = _tokenizer(folder, plan, pieces)
    records = {i: record for i, piece in enumerate(pieces) if (record := _finished(folder, i, piece, tokenizer)) is not None}
    missing = [i for i in range(len(pieces)) if i not in records]
    if records:
        print(f"{len(records)} of {len(pieces)} pieces are finished already and unchanged", flush=True)
    (folder / "meta.json").unlink(missing_ok=True)  # what it says is not true while the files change
    records |= _encode_all(folder, plan, {i: pieces[i] for i in missing}, processes)
    for path in folder.glob("train-*.bin"):  # of inputs that are no longer given
        if path not in {_files(folder, i)["train"] for i in records}:
            path.unlink()
    splits = {split: _sum(records, split) for split in ("train", "val", "left_out")}
    for split, other in (("train", "val"), ("val", "train")):
        if not splits[split]["documents"]:
            _clear(folder)  # other settings are needed, for which nothing of this can be used
            raise ConfigError(_empty(split, splits[other]["documents"] + splits["left_out"]["documents"], plan))
    parts = [TokenFile(path) for i in sorted(records) if (path := _files(folder, i)["val"]).is_file()]
    write_tokens(folder / "val.bin", (np.asarray(part.tokens) for part in parts), **_form(tokenizer))
    if not splits["left_out"]["documents"]:
        del splits["left_out"]
    meta = {
        **about,
        **tokenizer_meta(tokenizer),
        "plan": plan._asdict(),
        "splits": splits,
        "sha256": {_files(folder, i)["train"].name: r["train_sha256"] for i, r in sorted(records.items()) if "train_sha256" in r},
        "val_sha256": file_sha256(folder / "val.bin"),
    }
    write_json(folder / "meta.json", meta)
    return meta


def _claim(folder: Path, plan: Plan, overwrite: bool) -> None:
    """Make `folder` the place of this plan; ConfigError if it holds another one's work or a data set made in another way."""
    path, instead = folder / "parts" / "plan.json", "choose another --out, or replace it with --overwrite"
    if overwrite:
        _clear(folder)
    if path.is_file():
        before, now = json.loads(path.read_text(encoding="utf-8")), plan._asdict()
        differing = [name for name in now if now[name] != before.get(name)]
        if differing:
            begun = f"with which {folder} was begun: {instead}"
            raise ConfigError([f"{name}={now[name]!r} differs from {before.get(name)!r}, {begun}" for name in differing])
    elif read_meta(folder) or any(folder.glob("train*.bin")):
        raise ConfigError(f"{folder} holds a data set that was prepared in another way: {instead}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, plan._asdict())


def _clear(folder: Path) -> None:
    """Remove a data set, and nothing else that lies in its folder."""
    parts = [path for path in folder.glob("parts/*") if path.suffix in (".json", ".bin")]
    for path in (*folder.glob("train*.bin"), *parts, *(folder / name for name in ("val.bin", "tokenizer.json", "meta.json"))):
        path.unlink(missing_ok=True)


def _tokenizer(folder: Path, plan: Plan, pieces: Sequence[Piece]) -> Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        return Tokenizer.load(path)
    tokenizer = make_tokenizer(plan, pieces)
    tokenizer.save(path)
    return tokenizer


def _encode_all(folder: Path, plan: Plan, pieces: dict[int, Piece], processes: int) -> dict[int, dict]:
    """The records of `pieces`, encoded by up to `processes` at once; what is finished when one fails stays finished."""
    records, total = {}, sum(piece.size for piece in pieces.values())
    bar = tqdm(total=total, desc=f"{len(pieces)} pieces", unit="B", unit_scale=True, disable=None if pieces else True)
    with bar:
        if min(processes, len(pieces)) <= 1:
            _Work.start(folder, plan, None)
            for i, piece in pieces.items():
                records[i] = _encode_piece(i, piece)
                bar.update(piece.size)
            return records
        context = multiprocessing.get_context("spawn")  # forking a process with threads can hang
        done = context.Value("q", 0)
        pool = ProcessPoolExecutor(min(processes, len(pieces)), context, initializer=_Work.start, initargs=(folder, plan, done))
        try:
            waiting = {pool.submit(_encode_piece, i, piece): i for i, piece in pieces.items()}
            while waiting:
                finished, _ = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                records |= {waiting.pop(future): future.result() for future in finished}
                bar.update(min(done.value, total) - bar.n)
        except KeyboardInterrupt:
            print("\nstopping after the pieces that were begun; the same command goes on from there", file=sys.stderr, flush=True)
            raise
        finally:
            with contextlib.suppress(KeyboardInterrupt):
                pool.shutdown(cancel_futures=True)
    return records


def _sum(records: dict[int, dict], split: str) -> dict:
    names = ("documents", "utf8_bytes", "tokens")
    return {name: sum(record["splits"][split][name] for record in records.values()) for name in names}


def _empty(split: str, others: int, plan: Plan) -> str:
    if not others:
        return "the input has no text at all"
    if split == "train":
        return f"val_fraction={plan.val_fraction} holds out all {others} documents: use a smaller one"
    more = "--split=blank or --split=line makes more documents of a text file, a larger --val_fraction holds out more of them"
    return f"none of {others} documents falls into the held-out split at val_fraction={plan.val_fraction}: {more}"


def default_processes() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
