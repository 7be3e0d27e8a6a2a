"""data/prepare.py: every input format, the split, processes, interruption, damage, and the scripts of the hub's data sets."""

import errno
import gzip
import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import data.corpus as corpus
import data.hub as hub
from configurator import ConfigError
from data import prepare
from data.documents import Reading, documents, pieces
from data.english import prepare as english
from data.fineweb_edu.prepare import SOURCE as FINEWEB
from data.openwebtext.prepare import SOURCE as OPENWEBTEXT
from data.tokenizer import Tokenizer
from data.tokens import Dataset, TokenFile, file_sha256

ROOT = Path(__file__).resolve().parents[1]
FRACTION = "--val_fraction=0.2"
ONE = ["--tokenizer=bytes", "--processes=1"]
TEXTS = [f"document {i}: " + "the union of the states, é 🙂; " * (i % 4) + f"and {i * i}" for i in range(60)]


def command(*arguments):
    return prepare.main([str(a) for a in arguments])


def files(folder):
    """{name: sha256} of what a data set consists of, without the records of its making."""
    return {p.name: file_sha256(p) for p in folder.iterdir() if p.is_file()}


def texts_of(file: TokenFile, tokenizer) -> list[str]:
    tokens = file.tokens
    starts = [*np.flatnonzero(tokens == file.eot).tolist(), file.count]
    return [tokenizer.decode(tokens[a + 1 : b]) for a, b in itertools.pairwise(starts)]


def contents(folder):
    """(training documents, held-out ones) of a data set."""
    dataset = Dataset.open(folder)
    train = [text for file in dataset.train for text in texts_of(file, dataset.tokenizer)]
    return train, texts_of(dataset.val, dataset.tokenizer)


@pytest.fixture
def inputs(tmp_path):
    """The same documents in every form that is read."""
    folder = tmp_path / "inputs"
    (folder / "many").mkdir(parents=True)
    for i, text in enumerate(TEXTS):
        (folder / "many" / f"{i:02d}.txt").write_text(text)
    (folder / "lines.txt").write_text("\n".join(TEXTS) + "\n\n")
    (folder / "paragraphs.txt").write_bytes("\r\n\r\n".join(TEXTS).encode())
    (folder / "blank.txt").write_text("\n\n\n".join(TEXTS))
    lines = "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(TEXTS))
    (folder / "all.jsonl").write_text(lines)
    (folder / "all.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = pyarrow.table({"id": range(60), "body": [*TEXTS[:-1], None]})
    pyarrow.parquet.write_table(table, folder / "all.parquet", row_group_size=7)
    return folder


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reading"),
    [
        ("lines.txt", Reading(split="line")),
        ("paragraphs.txt", Reading(split="blank")),
        ("blank.txt", Reading(split="blank")),
        ("all.jsonl", Reading("body")),
        ("all.jsonl.gz", Reading("body")),
        ("all.parquet", Reading("body")),
    ],
)
@pytest.mark.parametrize("size", [1, 100, 1000, 10**6])
def test_every_document_is_read_once_whatever_the_size_of_a_piece(inputs, name, reading, size):
    cut = pieces([inputs / name], None, reading, size)
    expected = TEXTS[:-1] if name == "all.parquet" else TEXTS
    assert [text for piece in cut for text in documents(piece, reading)] == expected
    whole = name in ("all.jsonl.gz", "paragraphs.txt")  # neither can be cut: compressed, and no "\\n\\n" in it
    assert (len(cut) == 1) == (whole or size == 10**6)
    assert len({piece.key for piece in cut}) == len(cut)


def test_small_files_share_a_piece(inputs):
    paths = sorted((inputs / "many").iterdir())
    cut = pieces(paths, None, Reading(), 1000)
    assert 1 < len(cut) < 10 and sum(len(piece.paths) for piece in cut) == 60
    assert [text for piece in cut for text in documents(piece, Reading())] == TEXTS


def test_what_cannot_be_read_is_named(inputs, tmp_path):
    def error(*arguments):
        with pytest.raises(ConfigError) as raised:
            command("--tokenizer=bytes", *arguments, f"--out={tmp_path / 'set'}", "--overwrite")
        return str(raised.value)

    assert "no text in field 'text' (found: 'id', 'body'): give --text_key" in error(f"--input={inputs / 'all.jsonl'}")
    assert "no column 'text': give --text_key, one of id, body" in error(f"--input={inputs / 'all.parquet'}")
    assert "column 'id' holds int, not text" in error(f"--input={inputs / 'all.parquet'}", "--text_key=id")
    (inputs / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    assert "bad.jsonl: the line at byte 14 is not JSON" in error(f"--input={inputs / 'bad.jsonl'}")
    (inputs / "latin.txt").write_bytes(b"one\ntwo caf\xe9\n")
    problem = error(f"--input={inputs / 'latin.txt'}", "--split=line")
    assert "latin.txt is not UTF-8 text: unexpected end of data at byte 11" in problem
    (inputs / "fake.parquet").write_text("no parquet")
    assert "cannot be read as parquet" in error(f"--input={inputs / 'fake.parquet'}")
    (inputs / "fake.txt.gz").write_text("no gzip")
    assert "cannot be read" in error(f"--input={inputs / 'fake.txt.gz'}")
    (inputs / "data.csv").write_text("a,b")
    assert "its type cannot be told from its name" in error(f"--input={inputs / 'data.csv'}")
    assert "no such file, folder or pattern" in error(f"--input={inputs / 'nothing*.txt'}")
    assert "unknown encoding 'gpt5': choose one of gpt2" in error(f"--input={inputs / 'lines.txt'}", "--tokenizer=gpt5")
    assert "--split=blank or --split=line makes more documents" in error(f"--input={inputs / 'lines.txt'}")
    (inputs / "empty.txt").write_text("")
    assert "no text at all" in error(f"--input={inputs / 'empty.txt'}")


def test_half_a_surrogate_pair_becomes_a_replacement_character(inputs):
    (inputs / "odd.jsonl").write_text('{"text": "a\\ud83d b"}\n')
    (piece,) = pieces([inputs / "odd.jsonl"], None, Reading(), 100)
    assert list(documents(piece, Reading())) == ["a\ufffd b"]


# -- the split -------------------------------------------------------------------------------------------------------


def test_the_split_depends_on_the_text_alone(inputs, tmp_path):
    command(f"--input={inputs / 'lines.txt'}", "--split=line", FRACTION, f"--out={tmp_path / 'one'}", "--tokenizer=bytes")
    train, val = contents(tmp_path / "one")
    assert sorted(train + val) == sorted(TEXTS) and 3 < len(val) < 25 and not set(train) & set(val)
    assert val == [text for text in TEXTS if corpus.held_out(text, 0.2)]

    (inputs / "other.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in reversed([*TEXTS, *TEXTS[:9], "more"])))
    command(f"--input={inputs / 'other.jsonl'}", FRACTION, f"--out={tmp_path / 'two'}", "--tokenizer=bytes")
    again, val_again = contents(tmp_path / "two")
    assert set(val) == set(val_again) - ({"more"} if corpus.held_out("more", 0.2) else set())
    assert not set(again) & set(val_again)
    share = sum(corpus.held_out(str(i), 0.05) for i in range(4000)) / 4000
    assert share == pytest.approx(0.05, abs=0.011)  # 3 standard deviations


def test_more_inputs_leave_the_held_out_split_as_it_is(inputs, tmp_path):
    for i in range(3):
        (inputs / f"part-{i}.txt").write_text("\n".join(TEXTS[20 * i : 20 * i + 20]))
    digests = set()
    for n in (1, 3):
        names = [inputs / f"part-{i}.txt" for i in range(n)]
        out = tmp_path / "grown"
        command(f"--input={names[0]}", *names[1:], "--split=line", "--val_inputs=1", FRACTION, f"--out={out}", *ONE)
        dataset = Dataset.open(out)
        digests.add(dataset.meta["val_sha256"])
        assert len(dataset.train) == n
    assert len(digests) == 1
    assert dataset.meta["splits"]["left_out"]["documents"] == sum(corpus.held_out(t, 0.2) for t in TEXTS[20:])
    assert sum(s["documents"] for s in dataset.meta["splits"].values()) == 60


def test_files_that_share_a_piece_hold_out_by_their_own_place(inputs, tmp_path):
    digests = set()
    for n in (20, 60):
        names = sorted((inputs / "many").iterdir())[:n]
        command(f"--input={names[0]}", *names[1:], "--val_inputs=20", FRACTION, f"--out={tmp_path / str(n)}", *ONE)
        digests.add(Dataset.open(tmp_path / str(n)).meta["val_sha256"])
    assert len(digests) == 1


# -- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "kind"), [("bpe", "bpe"), ("char", "char"), ("bytes", "bytes"), ("gpt2", "tiktoken")])
def test_every_tokenizer(inputs, tmp_path, given, kind, capsys):
    extra = ["--vocab_size=300"] if given == "bpe" else []
    size = {"bpe": 300, "char": len(set("".join(TEXTS))) + 1, "bytes": 257, "gpt2": 50257}[given]
    command(f"--input={inputs / 'many'}", f"--tokenizer={given}", FRACTION, f"--out={tmp_path}/set", *extra)
    dataset = Dataset.open(tmp_path / "set")
    assert dataset.tokenizer.kind == kind and dataset.tokenizer.vocab_size == size
    train, val = contents(tmp_path / "set")
    assert sorted(train + val) == sorted(TEXTS)
    if given == "bpe":  # trained on the training split alone
        assert dataset.tokenizer.hash == Tokenizer.train_bpe([t for t in TEXTS if not corpus.held_out(t, 0.2)], 300).hash
    counts = dataset.meta["splits"]
    assert counts["train"]["documents"] == len(train) and counts["val"]["utf8_bytes"] == sum(len(t.encode()) for t in val)
    assert counts["train"]["tokens"] == dataset.train[0].count
    assert f"train with --dataset={tmp_path}/set" in capsys.readouterr().out


# -- processes, interruption, damage ---------------------------------------------------------------------------------


@pytest.fixture
def several(inputs, monkeypatch):
    """Arguments that make several pieces of little text."""
    monkeypatch.setattr(prepare, "MEGABYTE", 500)
    return [f"--input={inputs / 'lines.txt'}", "--split=line", FRACTION, "--shard_mb=1", "--tokenizer=bytes", "--processes=1"]


def test_processes_change_nothing(several, tmp_path):
    command(*several, f"--out={tmp_path / 'one'}/set")
    command(*several, f"--out={tmp_path / 'two'}/set", "--processes=2")
    assert files(tmp_path / "one" / "set") == files(tmp_path / "two" / "set")
    assert len(Dataset.open(tmp_path / "one" / "set").train) > 4


def test_an_interrupted_preparation_goes_on(several, tmp_path, monkeypatch, capsys):
    command(*several, f"--out={tmp_path / 'whole'}/set")
    real, done = corpus._encode_piece, []

    def interrupted(index, piece):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(index)
        return real(index, piece)

    out = tmp_path / "cut" / "set"
    monkeypatch.setattr(corpus, "_encode_piece", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command(*several, f"--out={out}")
    with pytest.raises(ConfigError, match="not finished; the same command goes on"):
        Dataset.open(out)
    done.clear()
    monkeypatch.setattr(corpus, "_encode_piece", lambda *a: done.append(a[0]) or real(*a))
    command(*several, f"--out={out}")
    assert done == list(range(3, done[-1] + 1)) and "3 of " in capsys.readouterr().out
    assert files(out) == files(tmp_path / "whole" / "set")
    with pytest.raises(ConfigError, match="val_fraction=0.1 differs from 0.2, with which"):
        command(*several[:2], "--val_fraction=0.1", *several[3:], f"--out={out}")


def test_a_full_disk_is_one_clear_line_and_the_same_command_goes_on(several, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"out='.*file' cannot be written to \(Not a directory\)"):
        command(*several, f"--out={tmp_path / 'file'}")
    command(*several, f"--out={tmp_path / 'whole'}/set")
    real, left, out = corpus.write_tokens, [3], tmp_path / "full" / "set"

    def full(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"\(No space left on device\): .* goes on"):
        patch.setattr(corpus, "write_tokens", full)
        command(*several, f"--out={out}")
    command(*several, f"--out={out}")
    assert files(out) == files(tmp_path / "whole" / "set")


def flip(path, at=-3):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_is_found_and_the_same_command_repairs_it(several, tmp_path, monkeypatch, capsys):
    out = tmp_path / "set"
    command(*several, f"--out={out}")
    before, shards = files(out), sorted(out.glob("train-*.bin"))
    flip(shards[1])
    with pytest.raises(
        ConfigError, match=r"train-00001.bin is damaged: its sha256 is \w{12}..., meta.json says .*prepare the data"
    ):
        Dataset.open(out)
    monkeypatch.setattr("data.tokens.HASHED_AT_OPENING", 0)  # as for data that is too large to be read at every start
    assert len(Dataset.open(out).train) == len(shards)
    capsys.readouterr()
    with pytest.raises(ConfigError, match="train-00001.bin is damaged"):
        command("--show", out)
    assert "train-00001.bin" in capsys.readouterr().out
    shards[2].unlink()
    with pytest.raises(ConfigError, match="train-00002.bin is missing"):
        Dataset.open(out)
    flip(out / "val.bin")
    with pytest.raises(ConfigError, match="val.bin is not the file that meta.json describes"):
        Dataset.open(out)
    command(*several, f"--out={out}")
    assert files(out) == before
    assert f"{len(shards) - 2} of {len(shards)} pieces are finished" in capsys.readouterr().out
    command("--show", out)
    assert "every file is as meta.json says" in capsys.readouterr().out


def test_changed_input_is_prepared_anew(several, inputs, tmp_path):
    out = tmp_path / "set"
    command(*several, f"--out={out}")
    (inputs / "lines.txt").write_text("\n".join(TEXTS[:40]))
    os.utime(inputs / "lines.txt", (1, 1))
    command(*several, f"--out={out}")
    train, val = contents(out)
    assert sorted(train + val) == sorted(TEXTS[:40])


def test_another_data_set_is_not_overwritten_unasked(inputs, tmp_path):
    prepare.write_dataset(tmp_path, Tokenizer.from_bytes(), ["a"], ["b"], name="x", source="", licence="")
    arguments = [f"--input={inputs / 'lines.txt'}", "--split=line", f"--out={tmp_path}", "--tokenizer=bytes", FRACTION]
    with pytest.raises(ConfigError, match="prepared in another way: choose another --out, or replace it with --overwrite"):
        command(*arguments)
    command(*arguments, "--overwrite")
    assert len(contents(tmp_path)[0]) > 30


# -- the command -----------------------------------------------------------------------------------------------------


def test_standard_input(inputs, tmp_path, monkeypatch):
    class Stdin:
        buffer = io.BytesIO((inputs / "all.jsonl").read_bytes())

    monkeypatch.setattr(sys, "stdin", Stdin)
    arguments = ["--input=-", "--format=jsonl", "--text_key=body", FRACTION, f"--out={tmp_path / 'set'}", "--vocab_size=300"]
    command(*arguments)
    train, val = contents(tmp_path / "set")
    assert sorted(train + val) == sorted(TEXTS)
    assert Dataset.open(tmp_path / "set").meta["source"] == "standard input"
    assert not list((tmp_path / "set" / "parts").glob("stdin*"))
    with pytest.raises(ConfigError, match="standard input is empty"):
        command(*arguments)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "--input is missing"),
        (["--input=x"], "--out is missing"),
        (["--input=-", "x", "--out=y"], "cannot be combined with files"),
        (["--show"], "--show needs one data set or folder, got 0"),
        (["--show", "nowhere"], "no data set 'nowhere'"),
        (["--input=x", "--out=y", "--tokenizer=gpt2", "--vocab_size=300"], "--vocab_size=300 has no effect with tokenizer=gpt2"),
        (["--input=x", "--out=y", "--val_fraction=1"], "val_fraction=1: must be less than 1"),
        (["--input=x", "--out=y", "--format=csv"], "format='csv': choose one of text, jsonl, parquet"),
    ],
)
def test_command_errors(argv, line):
    with pytest.raises(ConfigError) as error:
        command(*argv)
    assert line in str(error.value)


def test_the_script_runs(inputs, tmp_path):
    script = [sys.executable, str(ROOT / "data" / "prepare.py")]
    made = subprocess.run(
        [*script, "--input", *sorted((inputs / "many").glob("*.txt")), "--vocab_size=300", FRACTION, "--out=set"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    shown = subprocess.run([*script, "--show", "set"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert shown.returncode == 0 and "begins: '<|endoftext|>document" in shown.stdout, shown.stderr


def test_show_of_files_from_elsewhere(tmp_path, capsys):
    Tokenizer.from_bytes().save(tmp_path / "tokenizer.json")
    (tmp_path / "meta.json").write_text('{"eot": 256}')
    for name in ("train", "val"):
        np.array([*b"hello", 256], dtype="<u2").tofile(tmp_path / f"{name}.bin")
    command("--show", tmp_path)
    assert "begins: 'hello<|endoftext|>'" in capsys.readouterr().out


# -- data sets of the hub --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [FINEWEB, OPENWEBTEXT])
def test_hub_sets_say_what_they_need_without_a_network(source, tmp_path, monkeypatch):
    class Offline:
        def list_repo_files(self, *_, **__):
            raise ConnectionError("Name or service not known\nmore")

    monkeypatch.setattr("huggingface_hub.HfApi", Offline)
    with pytest.raises(ConfigError) as error:
        hub.prepare_hub_set(source, [], tmp_path / "set", "")
    (problem,) = error.value.problems
    assert source.repository in problem and "Name or service not known; run the command again" in problem and "--input" in problem
    assert not (tmp_path / "set").exists()


def test_hub_sets_from_files(tmp_path, monkeypatch):
    for i in range(3):
        table = pyarrow.table({"text": TEXTS[20 * i : 20 * i + 20], "score": range(20)})
        pyarrow.parquet.write_table(table, tmp_path / f"00{i}_00000.parquet")

    class Hub:
        def list_repo_files(self, *_, **__):
            return ["README.md", "sample/100BT/0.parquet", *(f"sample/10BT/00{i}_00000.parquet" for i in (2, 0, 1))]

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda _, name, **__: str(tmp_path / Path(name).name))
    source = FINEWEB._replace(val_fraction=0.2)
    hub.prepare_hub_set(source, [*ONE, "--files=2"], tmp_path / "two", "")
    hub.prepare_hub_set(source, [*ONE, f"--input={tmp_path}/*.parquet"], tmp_path / "three", "")
    two, three = Dataset.open(tmp_path / "two"), Dataset.open(tmp_path / "three")
    assert two.meta["val_sha256"] == three.meta["val_sha256"] and two.meta["name"] == "fineweb_edu"
    assert len(two.train) == 2 and len(three.train) == 3
    with pytest.raises(ConfigError, match="files=1 has no effect with input"):
        hub.prepare_hub_set(source, [*ONE, "--files=1", f"--input={tmp_path}/*.parquet"], tmp_path / "one", "")


# -- English of three packages ---------------------------------------------------------------------------------------


def test_english_takes_its_parts_from_packages(tmp_path, monkeypatch):
    verses = [("Genesis", 1, "In the beginning."), ("Genesis", 2, "Thus."), ("Exodus", 1, "Now these.")]
    (tmp_path / "bible" / "data").mkdir(parents=True)
    lines = (json.dumps({"book": book, "chapter": chapter, "text": text}) for book, chapter, text in verses)
    (tmp_path / "bible" / "data" / "kjv.jsonl").write_text("\n".join(lines))
    assert english.books(tmp_path / "bible") == ["Genesis\n\nIn the beginning.\n\nThus.", "Exodus\n\nNow these."]

    monkeypatch.setattr(english, "SHORTEST", 10)
    for service, said in (("a", "<p>Shared &amp; said.</p>"), ("b", "<p>Shared &amp; said.</p>")):
        old, new = (tmp_path / "botocore" / "data" / service / version for version in ("2014", "2020"))
        old.mkdir(parents=True)
        new.mkdir()
        (old / "service-2.json").write_text(json.dumps({"documentation": "<p>Outdated.</p>"}))
        shape = {"documentation": f"<ul><li>One of <b>{service}</b></li><li>two</li></ul>"}
        model = {"documentation": said, "shapes": {"S": shape, "documentation": {"documentation": None}}}
        (new / "service-2.json.gz").write_bytes(gzip.compress(json.dumps(model).encode()))
    assert english.manuals(tmp_path / "botocore") == ["Shared & said.\nOne of a\ntwo", "One of b\ntwo"]

    english.prepare(tmp_path / "set", vocab_size=300, parts=[TEXTS[:30], TEXTS[30:]])
    train, val = contents(tmp_path / "set")
    assert val == [TEXTS[5], TEXTS[25], TEXTS[35], TEXTS[55]] and len(train) == 56
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="which is not installed: `pip install"):
        english.prepare(tmp_path / "none")
