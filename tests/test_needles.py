"""Documents with sentences to find again, and the data set that has a share of them."""

import re

import numpy as np
import pytest

from configurator import ConfigError
from data.english import prepare as english
from data.needles import MOST, needle_documents, vocabulary
from data.tokenizer import Tokenizer
from data.tokens import Dataset

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [f"{a}{b}ster" for a in LETTERS for b in "aeiou"]
NAMES = [f"{a.upper()}lara" for a in LETTERS]
TEXTS = [" ".join(f"{WORDS[(i * 7 + j) % 130]} {NAMES[(i + j) % 26]}" for j in range(400)) for i in range(24)]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_bytes()


def test_the_vocabulary_leaves_out_what_begins_a_sentence():
    assert vocabulary("the Bible said. Moses went Home to rivers of oil") == (["rivers", "said", "went"], ["Bible", "Home"])


def test_each_needle_is_hidden_and_asked_for_once(tokenizer):
    documents = needle_documents(TEXTS, tokenizer, 400_000, 2048, seed=3)
    size = sum(map(len, documents))
    assert 400_000 <= size < 403_000
    depths, counts = [], []
    for text in documents:
        found = re.findall(r"The secret word of (\w+) is (\w+)\.", text)
        n = len(found) // 2
        hidden, asked = found[:n], found[n:]
        assert sorted(hidden) == sorted(asked) and len({name for name, _ in hidden}) == n == len({word for _, word in hidden})
        assert text.endswith(f" The secret word of {asked[-1][0]} is {asked[-1][1]}.")
        assert set(re.sub(r"The secret word of \w+ is \w+\.", "", text).split()[1:-1]) <= set(" ".join(TEXTS).split())
        depths.append(text.index("The secret") / len(text))
        counts.append(n)
    lengths = np.array([len(tokenizer.encode(text)) for text in documents])
    assert lengths.max() <= 2049 and np.mean(lengths < 362) == pytest.approx(0.5, abs=0.1)  # the geometric mean of 64 and 2048
    assert set(counts) == set(range(1, MOST + 1)) and min(depths) < 0.05 and max(depths) > 0.5
    assert documents == needle_documents(TEXTS, tokenizer, 400_000, 2048, seed=3)


def test_a_text_with_nothing_to_hide_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="too little to hide"):
        needle_documents(["one and one is two"], tokenizer, 100, 64)


def test_needles_are_added_to_the_training_text_alone(tmp_path):
    english.prepare(tmp_path / "plain", vocab_size=300, parts=[TEXTS])
    english.prepare(tmp_path / "a", vocab_size=300, parts=[TEXTS], needles=0.2, longest=256)
    english.main([f"--source={tmp_path / 'plain'}", "--needles=0.2", "--longest=256", f"--out={tmp_path / 'b'}"])
    plain, a, b = (Dataset.open(tmp_path / name) for name in ("plain", "a", "b"))
    assert a.tokenizer.hash == b.tokenizer.hash == plain.tokenizer.hash
    assert a.meta["val_sha256"] == b.meta["val_sha256"] == plain.meta["val_sha256"] and a.meta["sha256"] == b.meta["sha256"]
    before, after = (d.meta["splits"]["train"] for d in (plain, a))
    assert 1 - before["utf8_bytes"] / after["utf8_bytes"] == pytest.approx(0.2, abs=0.01)
    tokens = [np.asarray(d.train[0].tokens) for d in (plain, a)]
    assert np.array_equal(tokens[0], tokens[1][: len(tokens[0])])


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--longest=100"], "longest=100 has no effect without --needles"),
        (["--source=sotu"], "nothing to do"),
        (["--needles=0.1"], "name its folder"),
        (["--needles=1.0", "--out=x"], "must be less than 1"),
        (["--source=sotu", "--needles=0.1", "--vocab_size=300", "--out=x"], "vocab_size"),
    ],
)
def test_settings_that_do_nothing_are_refused(flags, says):
    with pytest.raises(ConfigError, match=says):
        english.main(flags)
