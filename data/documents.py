"""From input files to documents: text, JSON lines and parquet, cut into pieces that can be read independently of each other.

A piece is a range of one file (bytes that begin and end between documents, or row groups), or several small files. Which pieces
there are depends on the files and the piece size alone, so that work on them can be shared out, stopped and continued.
"""

import glob
import gzip
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from configurator import ConfigError

SUFFIXES = {
    ".txt": "text", ".text": "text", ".md": "text",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".parquet": "parquet",
}  # fmt: skip
DELIMITERS = {"line": b"\n", "blank": b"\n\n"}  # what ends a document inside a text file


class Piece(NamedTuple):
    """`paths` read from `start` to `stop`: bytes of one file, row groups of one parquet file; stop 0: all of every path.

    `key` identifies the content: names, sizes and times of change of the files, and the range. `source` is the index of the first
    of its files among all inputs, `size` the bytes to read (for progress; compressed ones count as they lie on disk).
    """

    paths: tuple[str, ...]
    format: str
    start: int
    stop: int
    source: int
    size: int
    key: str


class Reading(NamedTuple):
    """How documents lie in a file: `text_key` is the field of JSON lines or column of parquet; `split` what ends one in text."""

    text_key: str = "text"
    split: str = "file"


# ----------------------------------------------------------------------------------------------------------------------
# Inputs


def find_inputs(given: Sequence[str]) -> list[Path]:
    """The files that paths, folders and patterns mean, each once, those of a folder or pattern in sorted order."""
    found, problems = {}, []
    for text in given:
        path = Path(text)
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.is_file() and format_of(p) is not None)
            problems += [] if files else [f"--input={text}: the folder has no file of a known type ({', '.join(SUFFIXES)})"]
        elif path.is_file():
            files = [path]
        else:
            files = sorted(Path(name) for name in glob.glob(text, recursive=True) if os.path.isfile(name))
            problems += [] if files else [f"--input={text}: no such file, folder or pattern (from {Path.cwd()})"]
        found |= dict.fromkeys(files)
    if problems:
        raise ConfigError(problems)
    return list(found)


def format_of(path: Path) -> str | None:
    """text, jsonl or parquet after the file's name; `.gz` may follow the first two."""
    name = path.name.removesuffix(".gz")
    return SUFFIXES.get(Path(name).suffix)


def spool(folder: Path, format: str, stream=None) -> tuple[Path, str]:
    """Write standard input to a file in `folder`: (path, sha256). Pieces can then be read twice, in parallel, and again."""
    path, digest = folder / f"stdin.{format}", hashlib.sha256()
    folder.mkdir(parents=True, exist_ok=True)
    stream = stream or sys.stdin.buffer
    with open(path, "wb") as file:
        while block := stream.read(2**20):
            digest.update(block)
            file.write(block)
    if not path.stat().st_size:
        raise ConfigError("--input=-: standard input is empty")
    return path, digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Pieces


def pieces(
    paths: Sequence[Path],
    format: str | None,
    reading: Reading,
    size: int,
    identity: str | None = None,
    val_inputs: int | None = None,
) -> list[Piece]:
    """Cut the files into pieces of about `size` bytes. `identity` stands for what is known of a spooled input.

    No piece has files from both sides of `val_inputs`.
    """
    found, small = [], []
    for source, path in enumerate(paths):
        kind = format or format_of(path)
        if kind is None:
            raise ConfigError(f"{path}: its type cannot be told from its name ({', '.join(SUFFIXES)}): give --format")
        if kind == "text" and reading.split == "file":
            full = sum(os.path.getsize(p) for _, p in small) + os.path.getsize(path) > size
            if small and (full or source == val_inputs):
                found.append(_whole(small, kind, identity))
                small = []
            small.append((source, path))
            continue
        if small:
            found.append(_whole(small, kind="text", identity=identity))
            small = []
        if path.suffix == ".gz":
            found.append(_whole([(source, path)], kind, identity))
        elif kind == "parquet":
            found += [_piece(path, kind, a, b, source, n, identity) for a, b, n in _row_groups(path, reading.text_key, size)]
        else:
            cuts = _cuts(path, DELIMITERS["line" if kind == "jsonl" else reading.split], size)
            found += [_piece(path, kind, a, b, source, b - a, identity) for a, b in zip(cuts, cuts[1:], strict=False)]
    return found + ([_whole(small, "text", identity)] if small else [])


def _identity(path: Path) -> list:
    about = path.stat()
    return [path.name, about.st_size, about.st_mtime_ns]


def _piece(path, kind, start, stop, source, size, identity) -> Piece:
    about = json.dumps([identity or _identity(path), kind, start, stop])
    return Piece((str(path),), kind, start, stop, source, size, hashlib.sha256(about.encode()).hexdigest()[:32])


def _whole(files, kind, identity) -> Piece:
    paths = [path for _, path in files]
    about = json.dumps([identity or [_identity(path) for path in paths], kind])
    size = sum(os.path.getsize(path) for path in paths)
    return Piece(tuple(map(str, paths)), kind, 0, 0, files[0][0], size, hashlib.sha256(about.encode()).hexdigest()[:32])


def _cuts(path: Path, delimiter: bytes, size: int) -> list[int]:
    """Offsets 0, ..., file size with a delimiter before each inner one, about `size` apart."""
    end, cuts = path.stat().st_size, [0]
    with open(path, "rb") as file:
        while cuts[-1] + size < end:
            at, block = cuts[-1] + size, b""
            file.seek(at)
            while (where := block.find(delimiter)) < 0 and (more := file.read(2**16)):
                block += more
            if where < 0:
                break
            cuts.append(at + where + len(delimiter))
    return cuts if cuts[-1] == end else [*cuts, end]


def _parquet(path: str | Path):
    try:
        import pyarrow.parquet as parquet  # comes with lm-eval; needed for this format alone

        return parquet.ParquetFile(path)
    except ImportError:
        raise ConfigError(f"{path}: parquet files need pyarrow: `pip install pyarrow`") from None
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise ConfigError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from None


def _row_groups(path: Path, text_key: str, size: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of row groups whose bytes come to about `size`: (first, last + 1, bytes)."""
    with _parquet(path) as file:
        if text_key not in file.schema_arrow.names:
            raise ConfigError(f"{path} has no column {text_key!r}: give --text_key, one of {', '.join(file.schema_arrow.names)}")
        sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
    first, total = 0, 0
    for i, n in enumerate(sizes):
        if total and total + n > size:
            yield first, i, total
            first, total = i, 0
        total += n
    if first < len(sizes):
        yield first, len(sizes), total


# ----------------------------------------------------------------------------------------------------------------------
# Documents


def documents(piece: Piece, reading: Reading) -> Iterator[str]:
    """The documents of a piece in their order, without empty ones. ConfigError names file and place of what cannot be read."""
    for path in piece.paths:
        if piece.format == "parquet":
            texts = _from_parquet(path, piece, reading.text_key)
        elif piece.format == "jsonl":
            texts = (_from_json(line, path, at, reading.text_key) for at, line in _lines(path, piece) if line.strip())
        elif reading.split == "file":
            texts = (_decode(b"".join(line for _, line in _lines(path, piece)), path, 0) for _ in range(1))
        else:
            texts = _from_text(path, piece, reading.split)
        yield from (text for text in texts if text)


def _lines(path: str, piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(offset, line with its end) of the piece's lines."""
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            at = file.seek(piece.start)
            for line in file:
                yield at, line
                at += len(line)
                if piece.stop and at >= piece.stop:
                    return
    except (OSError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _decode(raw: bytes, path: str, at: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {at + error.start}") from None


def _from_text(path: str, piece: Piece, split: str) -> Iterator[str]:
    paragraph, began = [], 0
    for at, line in _lines(path, piece):
        if split == "line":
            yield _decode(line.rstrip(b"\r\n"), path, at)
        elif line.strip():
            began = began if paragraph else at
            paragraph.append(line)
        elif paragraph:
            yield _decode(b"".join(paragraph), path, began).rstrip("\r\n")
            paragraph = []
    if paragraph:
        yield _decode(b"".join(paragraph), path, began).rstrip("\r\n")


def _from_json(line: bytes, path: str, at: int, text_key: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}: the line at byte {at} is not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
        found = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(f"{path}: the line at byte {at} has no text in field {text_key!r} (found: {found}): give --text_key")
    return _without_surrogates(record[text_key])


def _from_parquet(path: str, piece: Piece, text_key: str) -> Iterator[str]:
    with _parquet(path) as file:
        for batch in file.iter_batches(256, row_groups=range(piece.start, piece.stop), columns=[text_key]):
            for text in batch.column(0).to_pylist():
                if text is not None and not isinstance(text, str):
                    raise ConfigError(f"{path}: column {text_key!r} holds {type(text).__name__}, not text: give --text_key")
                yield text or ""


def _without_surrogates(text: str) -> str:
    """JSON can escape half a surrogate pair, which has no UTF-8: it becomes U+FFFD."""
    if text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def remove_spool(folder: Path) -> None:
    for path in folder.glob("stdin.*"):
        path.unlink()
