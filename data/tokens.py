"""The token-file format, and a data set as a folder of such files.

A token file is a header of 256 little-endian int32 and then the tokens, uint16 (version 1) or uint32 (version 2):

    word 0      magic 20240520                       word 4      bytes per token, 2 or 4
    word 1      version                              word 5      separator: 1 before, 2 after
    word 2      number of tokens (low 32 bits)       word 6      id of the separator (EOT)
    word 3      1 if words 4 to 17 are filled        word 7      vocab_size
                                                     words 8-15  sha256 of the tokenizer
    word 18     tokens per row, 0: no rows           words 16-17 number of tokens, 64 bits

Plain files are one stream of documents, and every token is the label of the one before. A file of rows, which made tasks use,
is read in whole rows, and its labels, as many, follow the tokens: the largest integer of the type is "no label".
Words 0 to 2 are those of llm.c and modded-nanogpt, whose files have zeros from word 3 on and are read too (each document
begins with EOT 50256), as are nanoGPT's headerless uint16 files (each document ends with EOT).
"""

import functools
import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configurator import ConfigError
from data.tokenizer import Tokenizer

MAGIC = 20240520
HEADER_WORDS = 256
HEADER_BYTES = 4 * HEADER_WORDS
SEPARATORS = {1: "before", 2: "after"}
GPT2_EOT = 50256
HASHED_AT_OPENING = 2**28  # bytes of training files that are hashed, and read for their ids, at every start: half a second
DATA_DIR = Path(__file__).resolve().parent


class TokenFile:
    """One file of tokens, opened for reading.

    `count` tokens of `dtype`; `separator` ("before" or "after") says where a document has its EOT, whose id is `eot`;
    `vocab_size` and `tokenizer_hash` are None where the format does not say; `row` is 0 without rows; ids from `bound` on, which
    `check_vocab` sets, are refused when they are read. Raises ConfigError if the file is missing, empty, truncated or of an unknown
    version.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError(f"no token file at {self.path}")
        self.vocab_size: int | None = None
        self.tokenizer_hash: str | None = None
        self.row = 0
        self.bound: int | None = None
        self._start = 0
        size = self.path.stat().st_size
        # As uint16 the magic begins with 55432, which no GPT-2 vocabulary has: headerless files cannot look like it.
        header = np.fromfile(self.path, dtype="<i4", count=HEADER_WORDS)
        if len(header) and header[0] == MAGIC:
            self._read_header(header, size)
        else:
            self._read_headerless(size)
        if self.count == 0:
            raise ConfigError(f"{self.path} is empty: it holds no tokens")

    def _read_header(self, header: np.ndarray, size: int) -> None:
        if len(header) < HEADER_WORDS:
            raise ConfigError(f"{self.path} is truncated: expected a header of {HEADER_BYTES} bytes, found {size}")
        version = int(header[1])
        if version not in (1, 2):
            raise ConfigError(f"{self.path} has version {version}: allowed are 1 (uint16) and 2 (uint32)")
        self.dtype = np.dtype("<u2" if version == 1 else "<u4")
        self._start = HEADER_BYTES
        self.count = int(header[2:3].view("<u4")[0])
        self.separator, self.eot = "before", GPT2_EOT
        if header[3] == 1:
            if int(header[5]) not in SEPARATORS:
                raise ConfigError(f"{self.path}: separator code {header[5]}: allowed are 1 (before) and 2 (after)")
            self.count = int(header[16:18].view("<i8")[0])
            self.separator, self.eot = SEPARATORS[int(header[5])], int(header[6])
            self.vocab_size = int(header[7])
            self.tokenizer_hash = header[8:16].tobytes().hex()
            self.row = int(header[18])
        expected = HEADER_BYTES + self.count * self.dtype.itemsize * (2 if self.row else 1)
        if self.row < 0 or (self.row and self.count % self.row):
            raise ConfigError(f"{self.path}: {self.count} tokens are no whole number of rows of {self.row}")
        if size != expected:
            what = "is truncated" if size < expected else "is longer than its header says"
            found = max(0, size - HEADER_BYTES) // self.dtype.itemsize
            raise ConfigError(f"{self.path} {what}: expected {self.count} tokens ({expected} bytes), found {found} ({size} bytes)")

    def _read_headerless(self, size: int) -> None:
        if size % 2:
            raise ConfigError(
                f"{self.path} is truncated or no token file: without a header it must hold uint16 tokens, "
                f"expected {size - 1} or {size + 1} bytes, found {size}"
            )
        self.dtype = np.dtype("<u2")
        self.count = size // 2
        self.separator = "after"
        self.eot = int(read_meta(self.path.parent).get("eot", GPT2_EOT))

    @property
    def tokens(self) -> np.memmap:
        """All tokens, read-only and mapped anew at each use: a mapping that is kept makes resident memory grow."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", offset=self._start, shape=(self.count,))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Copy of the tokens `start` to `stop`, of the file's dtype. An ordinary read: nothing stays mapped."""
        wanted = stop - start
        offset = self._start + start * self.dtype.itemsize
        piece = np.fromfile(self.path, dtype=self.dtype, count=wanted, offset=offset)
        if len(piece) != wanted:
            raise ConfigError(f"{self.path} changed: expected tokens {start} to {stop}, found {len(piece)}")
        if self.bound is not None:
            _check_ids(piece, self.bound, self.path, start)
        return piece

    @functools.cached_property
    def most_labels(self) -> int:
        """The most labels that a row of the file has, at least 1."""
        labels, none = self._rows()[1], np.iinfo(self.dtype).max
        return max(1, *(int((labels[i : i + 4096] != none).sum(1).max()) for i in range(0, len(labels), 4096)))

    def read_rows(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Copies of some rows and of their labels, both int64 [len(rows), row]; -1 where there is no label."""
        tokens, labels = self._rows()[:, rows].astype(np.int64)  # one opening for all rows
        labels[labels == np.iinfo(self.dtype).max] = -1
        if self.bound is not None:
            for row, ids in zip(rows, np.maximum(tokens, labels), strict=True):
                _check_ids(ids, self.bound, self.path, int(row) * self.row)
        return tokens, labels

    def _rows(self) -> np.memmap:
        """Tokens and labels of all rows, [2, rows, row], mapped as `tokens` is."""
        shape = (2, self.count // self.row, self.row)
        return np.memmap(self.path, dtype=self.dtype, mode="r", offset=self._start, shape=shape)


def write_tokens(
    path: str | os.PathLike,
    arrays: Iterable[np.ndarray],
    *,
    separator: str,
    eot: int,
    vocab_size: int,
    tokenizer_hash: str,
    row: int = 0,
    labels: Iterable[np.ndarray] = (),
) -> int:
    """Write a token file from a stream of 1-d integer arrays; returns the number of tokens.

    uint16 up to a vocabulary of 65,536, else uint32. With `row`, a file of rows of so many tokens and as many `labels` (-1: none).
    The file appears under its name only when it is complete. Raises ConfigError for an id outside [0, vocab_size), naming it and
    its position.
    """
    codes = {name: code for code, name in SEPARATORS.items()}
    if separator not in codes:
        raise ConfigError(f"separator={separator!r}: choose one of {', '.join(codes)}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    dtype = np.dtype("<u2" if vocab_size + (row > 0) <= 2**16 else "<u4")
    header = np.zeros(HEADER_WORDS, dtype="<i4")
    header[:2] = MAGIC, 1 if dtype.itemsize == 2 else 2
    header[3:8] = 1, dtype.itemsize, codes[separator], eot, vocab_size
    header[8:16] = np.frombuffer(bytes.fromhex(tokenizer_hash), dtype="<i4")
    header[18] = row
    count = 0
    try:
        with open(beside, "wb") as file:
            file.write(header.tobytes())
            for array in arrays:
                array = np.asarray(array)
                _check_ids(array, vocab_size, path, count)
                file.write(array.astype(dtype).tobytes())
                count += len(array)
            if row:
                _write_labels(file, labels, dtype, vocab_size, path, count)
            header[2:3].view("<u4")[0] = count % 2**32
            header[16:18].view("<i8")[0] = count
            file.seek(0)
            file.write(header.tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return count


def _write_labels(file, labels: Iterable[np.ndarray], dtype: np.dtype, vocab_size: int, path: Path, expected: int) -> None:
    count = 0
    for array in labels:
        array = np.asarray(array)
        _check_ids(np.maximum(array, 0), vocab_size, path, count)
        file.write(np.where(array < 0, np.iinfo(dtype).max, array).astype(dtype).tobytes())
        count += len(array)
    if count != expected:
        raise ConfigError(f"{path}: {expected} tokens need as many labels, found {count}")


def check_vocab(files: Sequence[TokenFile], vocab_size: int, most: int = HASHED_AT_OPENING) -> None:
    """Refuse ids that a model of `vocab_size` does not have: on a GPU such an id is a device assertion far from its cause.

    About `most` bytes are read now: all of the files, or evenly spread pieces of them. Every later read is checked as well.
    Raises ConfigError naming the first such id.
    """
    step = 2**16
    every = math.ceil(sum(file.count * file.dtype.itemsize for file in files) / most)
    for file in files:
        file.bound = vocab_size
        for start in range(0, file.count, every * step):
            file.read(start, min(start + step, file.count))


def _check_ids(array: np.ndarray, vocab_size: int, path: Path, start: int) -> None:
    if len(array) and not (0 <= int(array.min()) and int(array.max()) < vocab_size):
        first = int(np.argmax((array < 0) | (array >= vocab_size)))
        raise ConfigError(
            f"{path}: token id {int(array[first])} at position {start + first} is outside the vocabulary of "
            f"{vocab_size}: allowed are 0 to {vocab_size - 1}"
        )


def read_meta(folder: Path) -> dict:
    """`meta.json` of a data-set folder, {} if there is none."""
    path = folder / "meta.json"
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(meta, dict):
        raise ConfigError(f"{path} must hold one JSON object, found {type(meta).__name__}")
    return meta


def tokenizer_meta(tokenizer: Tokenizer) -> dict:
    """What meta.json says of the tokenizer of a set whose documents begin with the separator."""
    return {
        "tokenizer": tokenizer.kind,
        "tokenizer_hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "separator": "before",
    }


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file, whole or not at all."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)


def file_sha256(path: str | os.PathLike) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Dataset:
    """A prepared data set: training shards, the held-out file, their tokenizer, and what meta.json says of them."""

    folder: Path
    train: list[TokenFile]
    val: TokenFile
    tokenizer: Tokenizer
    meta: dict

    @classmethod
    def open(cls, name: str | os.PathLike, root: Path = DATA_DIR) -> "Dataset":
        """Open `root/name`, or the folder `name` as it is.

        Raises ConfigError if it is missing (saying which command prepares it and which sets there are), if its files
        are damaged, or if tokens, tokenizer and meta.json do not belong together.
        """
        folder = find_folder(name, root)
        train_paths, val_paths = _shards(folder, "train"), _shards(folder, "val")
        for split, paths in (("train", train_paths), ("val", val_paths)):
            if not paths:
                raise ConfigError(_not_prepared(folder, f"{folder} has no {split}.bin", root))
        if len(val_paths) > 1:
            raise ConfigError(f"{folder} has {len(val_paths)} held-out files ({val_paths[0].name}, ...): keep one")
        train, val = [TokenFile(path) for path in train_paths], TokenFile(val_paths[0])
        meta = read_meta(folder)
        dataset = cls(folder, train, val, _tokenizer_of(folder, train[0]), meta)
        dataset._check()
        return dataset

    def damage(self, max_bytes: int | None = None) -> list[str]:
        """One line for each file that is not what meta.json says of it: missing, or with another sha256.

        The held-out file is always read. The training files are only if they have at most `max_bytes` together (none: always):
        a start need not read them all, `python data/prepare.py --show` does.
        """
        recorded = dict(self.meta.get("sha256", {}))
        missing = sorted(recorded.keys() - {file.path.name for file in self.train})
        again = "prepare the data set again (the same command makes only what is missing or damaged)"
        problems = [f"{self.folder / name} is missing: meta.json lists it; {again}" for name in missing]
        if max_bytes is not None and sum(file.path.stat().st_size for file in self.train) > max_bytes:
            recorded = {}
        for path, expected in [(file.path, recorded.get(file.path.name)) for file in self.train]:
            if expected is not None and (found := file_sha256(path)) != expected:
                problems.append(f"{path} is damaged: its sha256 is {found[:12]}..., meta.json says {expected[:12]}...; {again}")
        val_sha256 = self.meta.get("val_sha256")
        if val_sha256 is not None and file_sha256(self.val.path) != val_sha256:
            problems.append(
                f"{self.val.path} is not the file that meta.json describes (another sha256): scores on it would not "
                f"be comparable; {again}"
            )
        return problems

    def _check(self) -> None:
        problems = self.damage(HASHED_AT_OPENING)
        for file in [*self.train, self.val]:
            if file.tokenizer_hash not in (None, self.tokenizer.hash):
                problems.append(
                    f"{file.path} was written with tokenizer {file.tokenizer_hash[:12]}, "
                    f"{self.folder / 'tokenizer.json'} is {self.tokenizer.hash[:12]}: prepare the data set again"
                )
            if file.eot != self.tokenizer.eot or file.separator != self.train[0].separator:
                problems.append(
                    f"{file.path} has EOT {file.eot} {file.separator} each document, expected {self.tokenizer.eot} "
                    f"{self.train[0].separator} as in the tokenizer and {self.train[0].path.name}"
                )
        if problems:
            raise ConfigError(problems)


def find_folder(name: str | os.PathLike, root: Path = DATA_DIR) -> Path:
    """`root/name` for a bare name if there is such a folder, else the folder `name` as it is; else ConfigError."""
    bare = Path(name).name == str(name)
    for folder in (root / name, Path(name)) if bare else (Path(name),):
        if str(name) and folder.is_dir():
            return folder
    raise ConfigError(_not_prepared(Path(name), f"no data set {str(name)!r} in {root} and no folder of that name", root))


def _shards(folder: Path, split: str) -> list[Path]:
    """`train.bin`, or the sorted `train-*.bin` (modded-nanogpt: `*_train_*.bin`)."""
    single = folder / f"{split}.bin"
    several = sorted({*folder.glob(f"{split}-*.bin"), *folder.glob(f"*_{split}_*.bin")})
    if single.is_file() and several:
        raise ConfigError(f"{folder} has both {single.name} and {several[0].name}: keep one of the two forms")
    return [single] if single.is_file() else several


def _tokenizer_of(folder: Path, first: TokenFile) -> Tokenizer:
    """tokenizer.json; a foreign file with GPT-2's separator needs none."""
    path = folder / "tokenizer.json"
    foreign = first.tokenizer_hash is None and first.eot == GPT2_EOT
    if path.is_file() or not foreign:
        return Tokenizer.load(path)
    if (folder / "meta.pkl").is_file():  # nanoGPT's character sets; a pickle can run any code
        raise ConfigError(f"{folder} has nanoGPT's meta.pkl, which is not read: prepare it here, to get tokenizer.json")
    return Tokenizer.from_tiktoken("gpt2")


def _not_prepared(folder: Path, problem: str, root: Path) -> str:
    sets = sorted(path.parent.name for path in root.glob("*/prepare.py"))
    listed = ", ".join(name if _shards(root / name, "train") else f"{name} (not prepared)" for name in sets)
    if (folder / "parts" / "plan.json").is_file():
        return f"{problem}: its preparation was not finished; the same command goes on where it stopped"
    if folder.name in sets and (root / folder.name).resolve() == folder.resolve():
        return f"{problem}: run `python data/{folder.name}/prepare.py`"
    return f"{problem}; data sets here: {listed or 'none'}; prepare one by `python data/NAME/prepare.py`"
