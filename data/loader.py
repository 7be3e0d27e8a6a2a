"""From token files to batches: seeded windows for training, disjoint windows for held-out scores.

Training takes windows of `block_size` inputs (and one more token, the last label) from the stream of all shards, cut at
an offset drawn anew for each epoch. An epoch visits each window once in a seeded order. A window depends on (seed, its
global sample index) and nothing else: not on the number of processes, nor on when evaluation runs. So the loader's
whole state is one integer.
"""

import bisect
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from configurator import ConfigError
from data.tokens import TokenFile

IGNORED = -1  # the label that no loss counts


class Batch(NamedTuple):
    """tokens int64 [B, T]; labels int64 [B, T], -1 = not scored; segment_ids int32 [B, T], None without masking.

    places int64 [B, n], None for all: positions among which a row has all its labels, so that nothing is predicted elsewhere.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    segment_ids: torch.Tensor | None
    places: torch.Tensor | None = None

    def scored(self):
        """Labels at the places."""
        return self.labels if self.places is None or self.labels is None else self.labels.gather(1, self.places)


# -- documents -------------------------------------------------------------------------------------------------------


def segments(tokens: torch.Tensor, eot: int, separator: str) -> torch.Tensor:
    """Document of each token: int32 [B, T], 1, 2, 3, ... along a row.

    With the separator `before`, EOT opens its document; with `after` it ends it. A row that starts inside a document
    starts with segment 1 all the same.
    """
    is_eot = tokens == eot  # (B, T)
    opens = torch.zeros_like(is_eot)
    opens[:, 1:] = is_eot[:, 1:] if separator == "before" else is_eot[:, :-1]
    return 1 + opens.cumsum(dim=1, dtype=torch.int32)


def labels_of(windows: torch.Tensor, eot: int, separator: str) -> torch.Tensor:
    """Next-token labels of windows [B, T + 1]: int64 [B, T].

    `before`: the label of a document's last token is the next EOT and is kept; nothing else crosses documents.
    `after`: the label of EOT would be another document's first token: -1. This holds with and without document masking.
    """
    labels = windows[:, 1:].to(torch.int64, copy=True)
    if separator == "after":
        labels[windows[:, :-1] == eot] = IGNORED
    return labels


def _batch(windows: np.ndarray, eot: int, separator: str, document_mask: bool) -> Batch:
    stream = torch.from_numpy(windows)  # (B, T + 1)
    tokens = stream[:, :-1].contiguous()
    return Batch(tokens, labels_of(stream, eot, separator), segments(tokens, eot, separator) if document_mask else None)


def _row_batch(file: TokenFile, rows: Sequence[int], document_mask: bool) -> Batch:
    """Whole rows [B, row] with the labels that the file holds for them, and their places if most tokens of any row have none.

    There are as many places in every row and batch: for fewer labels than the most of a row, some of their places have none.
    """
    tokens, labels = file.read_rows(rows)
    places = None
    if 2 * file.most_labels <= file.row:
        places = torch.from_numpy(np.argsort(labels < 0, axis=1, kind="stable")[:, : file.most_labels].copy())
    tokens, labels = map(torch.from_numpy, (tokens, labels))
    return Batch(tokens, labels, segments(tokens, file.eot, file.separator) if document_mask else None, places)


def _check_rows(file: TokenFile, block_size: int) -> None:
    if file.row and block_size != file.row:
        raise ConfigError(f"block_size={block_size}: {file.path} has rows of {file.row} tokens: use --block_size={file.row}")


# -- training --------------------------------------------------------------------------------------------------------


class Permutation:
    """A pseudo-random bijection of [0, n) without a table: four Feistel rounds, keyed by (seed, epoch).

    The rounds permute [0, 4^k), the smallest such range that covers n; a value that falls outside [0, n) is sent
    through them again until it falls inside ("cycle walking", fewer than four passes on average).
    """

    ROUNDS = 4

    def __init__(self, n: int, seed: int, epoch: int):
        self.n = n
        self._half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits of each half
        digest = hashlib.blake2b(f"order {seed} {epoch}".encode(), digest_size=8 * self.ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(self.ROUNDS)]

    def __call__(self, index: int) -> int:
        """Where `index` goes; it must lie in [0, n)."""
        while True:
            index = self._pass(index)
            if index < self.n:
                return index

    def _pass(self, value: int) -> int:
        mask = (1 << self._half) - 1
        left, right = value >> self._half, value & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << self._half | right


def _mix(x: int) -> int:
    """The 64-bit finaliser of splitmix64: every output bit depends on every input bit."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


class Loader:
    """Endless training batches from `files`, taken as one stream in the given order.

    Every epoch has `windows` = max(1, (total - block_size) // block_size) windows, the number that fits at every offset
    in [0, min(block_size, total - block_size)); an epoch leaves out fewer than two windows of tokens, and the offset
    decides which. With `shuffle=False` the offset is 0 and the order that of the stream. A file of rows (one alone) has a window
    a row, with the labels it holds.

    Raises ConfigError if the files hold fewer than block_size + 1 tokens or differ in their separator, or if rows are of another
    length than block_size.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        block_size: int,
        *,
        seed: int,
        document_mask: bool = True,
        shuffle: bool = True,
    ):
        self.files = list(files)
        self.block_size = block_size
        self.seed = seed
        self.document_mask = document_mask
        self.shuffle = shuffle
        self.sample = 0  # the next sample to give out: the whole state
        self.total_tokens = sum(file.count for file in self.files)
        self._ends = np.cumsum([file.count for file in self.files]).tolist()
        kinds = sorted({(file.separator, file.eot) for file in self.files})
        if len(kinds) != 1:
            raise ConfigError(f"training files differ in separator and EOT, found {kinds}: expected one kind")
        self.separator, self.eot = kinds[0]
        self.rows = self.files[0] if self.files[0].row else None
        if self.rows is not None and len(self.files) > 1:
            raise ConfigError(f"{self.rows.path.parent} has {len(self.files)} training files: a file of rows must be the only one")
        _check_rows(self.files[0], block_size)
        if self.total_tokens < block_size + 1 and self.rows is None:
            raise ConfigError(
                f"block_size={block_size} needs at least {block_size + 1} training tokens, found {self.total_tokens} in "
                f"{self.files[0].path.parent}: the largest block_size possible is {self.total_tokens - 1}"
            )
        stream = max(1, (self.total_tokens - block_size) // block_size)
        self.windows = stream if self.rows is None else self.total_tokens // block_size
        self.fingerprint = _fingerprint(self.files)

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0."""
        return self.sample // self.windows

    def window(self, sample: int) -> np.ndarray:
        """Tokens of a global sample index: int64 [block_size + 1], a pure function of (seed, sample)."""
        epoch, index = self._place(sample)
        start = index * self.block_size + (self._offset(epoch) if self.shuffle else 0)
        return self._read(start, start + self.block_size + 1)

    def _place(self, sample: int) -> tuple[int, int]:
        """(epoch, which of its windows) of a global sample index."""
        epoch, index = divmod(sample, self.windows)
        return epoch, Permutation(self.windows, self.seed, epoch)(index) if self.shuffle else index

    def batch(self, first_sample: int, n: int) -> Batch:
        """Samples first_sample to first_sample + n as CPU tensors."""
        if self.rows is not None:
            rows = [self._place(sample)[1] for sample in range(first_sample, first_sample + n)]
            return _row_batch(self.rows, rows, self.document_mask)
        windows = np.stack([self.window(sample) for sample in range(first_sample, first_sample + n)])
        return _batch(windows, self.eot, self.separator, self.document_mask)

    def next(self, n: int, rank: int = 0, world: int = 1) -> Batch:
        """The next n samples of this rank; every rank must call it alike, since all advance by n * world."""
        batch = self.batch(self.sample + rank * n, n)
        self.sample += n * world
        return batch

    def state_dict(self) -> dict[str, int | str]:
        return {
            "sample": self.sample,
            "seed": self.seed,
            "block_size": self.block_size,
            "total_tokens": self.total_tokens,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continue where `state` was taken. Raises ConfigError, naming each field, if the samples would be others."""
        mine = self.state_dict()
        differing = [name for name in mine if name != "sample" and state.get(name) != mine[name]]
        if differing:
            raise ConfigError(
                [f"cannot continue this data order: {name} was {state.get(name)!r}, is now {mine[name]!r}" for name in differing]
            )
        self.sample = int(state["sample"])

    def _offset(self, epoch: int) -> int:
        digest = hashlib.blake2b(f"offset {self.seed} {epoch}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % min(self.block_size, self.total_tokens - self.block_size)

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Tokens of the joined stream; a window may span files."""
        pieces = []
        shard = bisect.bisect_right(self._ends, start)
        while start < stop:
            first = self._ends[shard] - self.files[shard].count
            end = min(stop, self._ends[shard])
            pieces.append(self.files[shard].read(start - first, end - first))
            start, shard = end, shard + 1
        return np.concatenate(pieces).astype(np.int64)


def _fingerprint(files: Sequence[TokenFile]) -> str:
    """Identity of the training data: counts, and up to 32,768 tokens from both ends of each file."""
    digest = hashlib.sha256()
    for file in files:
        some = min(file.count, 2**15)
        digest.update(f"{file.count} {file.separator} {file.eot} {file.tokenizer_hash}".encode())
        digest.update(file.read(0, some).tobytes() + file.read(file.count - some, file.count).tobytes())
    return digest.hexdigest()


# -- held-out text ---------------------------------------------------------------------------------------------------


def heldout(file: TokenFile, block_size: int, document_mask: bool = True) -> Iterator[Batch]:
    """The whole file in disjoint windows, one row [1, block_size] each: every token but the first is a label once.

    The last row is padded with EOT, label -1 and segment 0. The last token of the file has no label: it counts as
    padding.
    """
    return heldout_batches(file, block_size, 1, document_mask)


def heldout_batches(
    file: TokenFile,
    block_size: int,
    batch_size: int,
    document_mask: bool = True,
    *,
    max_batches: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Batch]:
    """The windows of `heldout` in batches [batch_size, block_size]; the last is filled up with rows of padding.

    All batches have one shape, so that a compiled model compiles once. `max_batches` takes that many windows *
    batch_size, spread evenly over the file and always the same ones. Ranks take batches in turn; sums over the ranks
    are those of one process. Raises ConfigError at the call if there is nothing to score.
    """
    if file.count < 2:
        raise ConfigError(f"{file.path} has {file.count} token: a held-out file needs at least 2")
    _check_rows(file, block_size)
    windows = np.arange(math.ceil((file.count - (file.row == 0)) / block_size))
    if max_batches is not None and max_batches * batch_size < len(windows):
        windows = windows[np.arange(max_batches * batch_size) * len(windows) // (max_batches * batch_size)]
    firsts = range(rank * batch_size, len(windows), world * batch_size)
    groups = [windows[first : first + batch_size] * block_size for first in firsts]
    return (_heldout_batch(file, starts, block_size, batch_size, document_mask) for starts in groups)


def _heldout_batch(file: TokenFile, starts: np.ndarray, block_size: int, batch_size: int, document_mask: bool) -> Batch:
    if file.row:
        batch = _row_batch(file, [*(starts // block_size).tolist(), *[0] * (batch_size - len(starts))], document_mask)
        batch.labels[len(starts) :] = IGNORED  # rows that only fill up the batch
        return batch
    stream = np.full((batch_size, block_size + 1), file.eot, dtype=np.int64)
    real = np.zeros((batch_size, block_size), dtype=bool)  # positions whose label lies in the file
    for row, start in enumerate(starts.tolist()):
        piece = file.read(start, min(start + block_size + 1, file.count))
        stream[row, : len(piece)] = piece
        real[row, : len(piece) - 1] = True
    padding = torch.from_numpy(~real)
    batch = _batch(stream, file.eot, file.separator, document_mask)
    batch.labels[padding] = IGNORED
    if batch.segment_ids is not None:
        batch.segment_ids[padding] = 0
    return batch


def score_mask(labels: torch.Tensor, eot: int) -> torch.Tensor:
    """Labels that count in bits per byte: neither ignored nor the separator. Bool, the shape of `labels`."""
    return (labels != IGNORED) & (labels != eot)


def label_bytes(labels: torch.Tensor, token_bytes: torch.Tensor) -> torch.Tensor:
    """UTF-8 bytes of each label, 0 where ignored; `token_bytes` [vocab_size] is 0 for EOT. The shape of `labels`."""
    return torch.where(labels == IGNORED, 0, token_bytes[labels.clamp(min=0)])


def bits_per_byte(nll_sum_without_separators: float, n_bytes: int) -> float:
    """sum NLL / (ln 2 * bytes), over the labels of `score_mask`; nan for no bytes."""
    return nll_sum_without_separators / (math.log(2) * n_bytes) if n_bytes else math.nan
