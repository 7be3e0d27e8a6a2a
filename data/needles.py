"""Sentences hidden in text and asked for at its end: how evaluation asks (tasks/made.py), and documents to learn it from.

A document is a stretch of real text in which one to eight sentences `The secret word of NAME is WORD.` stand at random places
between its words, and at its end once more, in another order. Names and words are drawn from the text, so that nothing but the
document tells which belong together.
"""

import re
from collections.abc import Sequence

import numpy as np

from configurator import ConfigError
from data.tokenizer import Tokenizer

QUESTION = " The secret word of {} is"
NEEDLE = QUESTION + " {}."
SHORTEST = 64  # tokens of a document
MOST = 8  # needles in one


def vocabulary(text: str) -> tuple[list[str], list[str]]:
    """(words, names) of a text: of four to eight small letters, and with a capital in the middle of a sentence."""
    words = sorted(set(re.findall(r"\b[a-z]{4,8}\b", text)))
    names = sorted(set(re.findall(r"(?<=[a-z] )[A-Z][a-z]{3,7}\b", text)))
    return words, names


def needle_documents(texts: Sequence[str], tokenizer: Tokenizer, size: int, longest: int, *, seed: int = 1) -> list[str]:
    """Documents that have `size` characters together or a little more, each of 64 to `longest` tokens (as often 64 to 128 as
    1024 to 2048). ConfigError if the texts have too few words and names to hide.
    """
    words, names = vocabulary("\n".join(texts))
    if len(words) < 50 or len(names) < 10:
        raise ConfigError(f"the training text has too little to hide ({len(words)} words and {len(names)} names, needed 50 and 10)")
    rng, lengths = np.random.default_rng(seed), np.array([len(text) for text in texts], dtype=float)
    documents: list[str] = []
    while size > 0:
        room = int(np.exp(rng.uniform(np.log(SHORTEST), np.log(longest + 1))))
        text = texts[rng.choice(len(texts), p=lengths / lengths.sum())]
        documents.append(_document(text, tokenizer, room, words, names, rng))
        size -= len(documents[-1])
    return documents


def _document(text, tokenizer, room, words, names, rng) -> str:
    """A document of about `room` tokens with a stretch of `text`."""
    n = int(rng.integers(1, min(MOST, room // 32) + 1))
    pairs = [(names[i], words[j]) for i, j in zip(_draw(rng, names, n), _draw(rng, words, n), strict=True)]
    needles = [NEEDLE.format(*pair) for pair in pairs]
    room = max(0, room - 2 * sum(len(tokenizer.encode(needle)) for needle in needles))
    start = int(rng.integers(0, max(1, len(text) - 8 * room)))
    filler = tokenizer.decode(tokenizer.encode(text[start : start + 8 * room])[:room]).split(" ")
    for place, needle in sorted(zip(rng.integers(0, len(filler) + 1, n).tolist(), needles, strict=True), reverse=True):
        filler.insert(place, needle.strip())
    return " ".join(filler) + "".join(needles[i] for i in rng.permutation(n))


def _draw(rng, choices, n):
    return rng.choice(len(choices), n, replace=False)
