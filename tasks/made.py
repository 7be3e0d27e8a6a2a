"""Documents of the tasks that are made, not downloaded: associative recall, copying, needles, parity, modular arithmetic.

They are made inside the tokenizer of the checkpoint, whose run lm-eval passes as the task's metadata `pretrained`: for a run on
data/synthetic from that set's own symbols and sizes, for a run on text from words that are one token each. Every document says in
`chance` what guessing scores. Nothing depends on anything but the checkpoint's tokenizer, its block_size and SEED.
"""

import re
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np

import checkpoint
from configurator import ConfigError
from data.needles import NEEDLE, QUESTION, vocabulary
from data.synthetic import prepare as synthetic
from data.tokenizer import Tokenizer
from data.tokens import Dataset

SEED = 20_240_520
LENGTHS = {"copying": (4, 8, 16, 32, 64, 128), "parity": (8, 16, 40, 64, 128, 255), "modular": (6, 12, 20, 40, 80, 160)}
DOCUMENTS = 100  # of each length


class Run(NamedTuple):
    """What a task needs to know of a checkpoint."""

    name: str
    tokenizer: Tokenizer
    block_size: int
    made: dict  # of the data set: task and sizes; empty for text
    heldout: str  # some held-out text; empty for a made set

    @property
    def rng(self):
        return np.random.default_rng(SEED)


def run_of(pretrained, task) -> Run:
    if pretrained is None:
        how = "pass model_args='pretrained=RUN' or metadata={'pretrained': RUN}"
        raise ConfigError(f"task {task} needs to know the checkpoint: {how}")
    folder = checkpoint.resolve(pretrained, ("best", "last"))
    meta = checkpoint.read_meta(folder)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    made, heldout = {}, ""
    if meta["dataset_folder"] is not None and Path(meta["dataset_folder"]).is_dir():
        dataset = Dataset.open(meta["dataset_folder"])
        made = dataset.meta.get("made", {})
        tokens = np.asarray(dataset.val.tokens[:200_000])
        heldout = "" if made else tokenizer.decode(tokens[tokens != dataset.val.eot])
    return Run(str(pretrained), tokenizer, meta["model"]["block_size"], made, heldout)


def alphabet(run: Run, task: str) -> list[str]:
    """Strings that are one token each, and stay so side by side: a made set's symbols, else words or letters."""
    tokenizer = run.tokenizer
    if tokenizer.kind == "char":
        found = [piece.decode() for piece in tokenizer.table if piece and not piece.isspace()]
    elif tokenizer.kind == "bytes":
        found = [chr(i) for i in range(33, 127)]
    else:
        words = [piece.decode() for piece in tokenizer.table if re.fullmatch(rb" [A-Za-z]{2,}", piece)]
        found = [word for word in words if len(tokenizer.encode(word)) == 1]
    if len(found) < 8:
        raise ConfigError(
            f"task {task} needs at least 8 symbols that are one token each, the tokenizer of {run.name} has {len(found)}"
        )
    return found


def _test(rows):
    if not rows:
        raise ConfigError("no document of this task fits into the checkpoint's block_size: it is too short")
    order = np.random.default_rng(SEED).permutation(len(rows))  # so that the first ones are of every length
    return {"test": datasets.Dataset.from_list([rows[i] for i in order])}


# ----------------------------------------------------------------------------------------------------------------------


def mqar(pretrained=None, **_):
    """One document a query: all before its answer, and the answer. Sizes of the run's data set, else the most that fits."""
    run = run_of(pretrained, "mqar")
    letters = alphabet(run, "mqar")
    if run.made.get("task") == "mqar":
        length, pairs, rows = run.made["row"] - 1, run.made["pairs"], 100
    else:
        length, rows = min(run.block_size - 1, 511), 20
        pairs = max(1, min(length // 8, len(letters) // 2 - 1, 64))
    tokens, labels = synthetic.mqar(run.rng, rows, length, pairs, len(letters))
    chance = 1 / (len(letters) - len(letters) // 2)
    found = []
    for row, answers in zip(tokens, labels, strict=True):
        text = [letters[i] for i in row]
        for at in np.flatnonzero(answers >= 0).tolist():
            found.append({"context": "".join(text[: at + 1]), "target": letters[answers[at]], "chance": chance})
    return _test(found)


def copying(pretrained=None, **_):
    """Symbols, a sign, and the symbols again as the target; right if every token of it is the most likely one."""
    run = run_of(pretrained, "copying")
    letters, rng, rows = alphabet(run, "copying"), run.rng, []
    for length in LENGTHS["copying"]:
        if 2 * length + 1 > run.block_size:
            break
        tokens, labels = synthetic.copying(rng, DOCUMENTS, length, len(letters))
        for row, answers in zip(tokens, labels, strict=True):
            context, target = ("".join(letters[i] for i in ids) for ids in (row[: length + 1], answers[length:]))
            rows.append({"context": context, "target": target, "length": length, "chance": (len(letters) - 1.0) ** -length})
    return _test(rows)


def parity(pretrained=None, **_):
    """Bits, and the parity of them; a run on text is shown three solved ones first."""
    run = run_of(pretrained, "parity")
    trained = run.made.get("task") == "parity"

    def one(rng, length):
        bits, answers = synthetic.parity(rng, length)
        return bits, str(answers[-1])

    return _choices(run, "parity", one, ["0", "1"], trained, "=")


def modular(pretrained=None, **_):
    """An expression and its value modulo 5; a run on text is shown three solved ones first."""
    run = run_of(pretrained, "modular")

    def one(rng, length):
        text, value = synthetic.modular(rng, length)
        return text, str(value)

    return _choices(run, "modular", one, list("01234"), run.made.get("task") == "modular", "")


def _choices(run, task, one, choices, trained, sign):
    rng, rows = run.rng, []
    _check_characters(run, task, "".join(choices) + ("" if trained else "\n" + sign) + one(run.rng, 40)[0])
    for length in LENGTHS[task]:
        for _ in range(DOCUMENTS):
            shown = "" if trained else "".join("{}{}{}\n".format(*_solved(one, rng, length, sign)) for _ in range(3))
            question, _, answer = _solved(one, rng, length, "" if trained else sign)
            context = shown + question + ("" if trained else sign)
            if 1 + len(run.tokenizer.encode(context)) > run.block_size:
                continue
            gold = choices.index(answer)
            rows.append({"context": context, "choices": choices, "gold": gold, "length": length, "chance": 1 / len(choices)})
    return _test(rows)


def _solved(one, rng, length, sign):
    question, answer = one(rng, length)
    return question, sign, answer


def _check_characters(run, task, characters):
    known = {piece.decode() for piece in run.tokenizer.table} if run.tokenizer.kind == "char" else set(characters)
    missing = "".join(sorted(set(characters) - known))
    if missing:
        raise ConfigError(f"task {task} needs the characters {missing!r}, which the tokenizer of {run.name} has not")


# ----------------------------------------------------------------------------------------------------------------------


FRACTIONS = (25, 50, 100)  # per cent of block_size
DEPTHS = (0, 25, 50, 75, 100)  # per cent of the text before the needle
CANDIDATES = 10  # answers to choose from


def needle_single(pretrained=None, **_):
    """One sentence with a secret, at five depths of held-out text of three lengths; then its beginning again."""
    return _needles(run_of(pretrained, "needle_single"), 1)


def needle_multi(pretrained=None, **_):
    """The same with four secrets, of which one is asked for: the others are among the answers."""
    return _needles(run_of(pretrained, "needle_multi"), 4)


def _needles(run, n):
    words, names = vocabulary(run.heldout)
    if len(words) < 50 or len(names) < 10:
        raise ConfigError(f"task needle needs held-out text with words to hide, the data set of {run.name} has too few")
    rng, rows = run.rng, []
    for fraction in FRACTIONS:
        for depth in DEPTHS:
            for _ in range(DOCUMENTS // len(DEPTHS)):
                document = _needle(run, rng, n, fraction, depth, words, names)
                if document is not None:
                    rows.append(document)
    return _test(rows)


def _needle(run, rng, n, fraction, depth, words, names):
    """A document whose context has about `fraction` per cent of block_size tokens, the secret asked for at `depth` per cent."""
    picked = rng.choice(len(words), CANDIDATES, replace=False)
    answers = [words[i] for i in picked]
    owners = [names[i] for i in rng.choice(len(names), n, replace=False)]
    needles = [NEEDLE.format(owner, answer) for owner, answer in zip(owners, answers, strict=False)]
    question = QUESTION.format(owners[0])
    room = run.block_size * fraction // 100 - 8 - sum(len(run.tokenizer.encode(text)) for text in [*needles, question])
    if room < 8:
        return None
    start = int(rng.integers(0, max(1, len(run.heldout) - 8 * room)))
    filler = run.tokenizer.decode(run.tokenizer.encode(run.heldout[start : start + 8 * room])[:room]).split(" ")
    places = [len(filler) * depth // 100, *rng.integers(0, len(filler) + 1, n - 1).tolist()]
    parts = sorted(zip(places, needles, strict=True), reverse=True)
    for place, needle in parts:
        filler.insert(place, needle.strip())
    order = rng.permutation(CANDIDATES)
    choices = [f" {answers[i]}" for i in order]
    gold = int(np.flatnonzero(order == 0)[0])
    context = " ".join(filler) + question
    return {"context": context, "choices": choices, "gold": gold, "length": fraction, "depth": depth, "chance": 1 / CANDIDATES}


# ----------------------------------------------------------------------------------------------------------------------
# Results


def exact(doc, results):
    """acc: whether every token of the target is the most likely one; of all documents, and of those of one length."""
    ((_, likely),) = results
    return _by(doc, float(likely))


def chosen(doc, results):
    """acc: whether the right choice has the highest probability; of all documents, of one length, of one depth."""
    scores = [loglikelihood for loglikelihood, _ in results]
    return _by(doc, float(int(np.argmax(scores)) == doc["gold"]))


def _by(doc, score):
    found = {"acc": score, "chance": doc["chance"]}
    found |= {f"acc_{doc['length']}": score} if "length" in doc else {}
    return found | ({f"acc_depth_{doc['depth']}": score} if "depth" in doc else {})
