"""Byte-level BPE tokenizers as Hugging Face stores them (tokenizer.json), from and to ours.

Their format names a token by a character per byte and lists the merges; ours gives the bytes of each id, a lower id merging first.
The two agree when later merges make higher ids, as in GPT-2, Llama 3 and Qwen; others are refused.
"""

import json
import re
from pathlib import Path

from configurator import ConfigError
from data.tokenizer import EOT_TEXT, Tokenizer

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_characters():
    """The printable character that stands for each byte: itself where Latin-1 can show it, else one from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(shown)]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def read_tokenizer(folder, eot_id=None):
    """(Tokenizer, notes) from a model's folder, None where it has no tokenizer; `eot_id` is the id that ends a document.

    ConfigError where its encoding is another than ours would be.
    """
    content = _read(Path(folder))
    if content is None:
        return None, []
    notes = []
    model = content["model"]
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback") or model.get("continuing_subword_prefix"):
        raise ConfigError(f"the tokenizer is of type {model.get('type')!r} without byte-level BPE: use --tokenizer=...")
    if content.get("normalizer"):
        notes.append(f"the source's tokenizer normalises text first ({content['normalizer'].get('type')}); ours takes it as it is")
    pattern = _pattern(content)
    bytes_of = {c: b for b, c in byte_characters().items()}
    added = {t["content"]: t["id"] for t in content.get("added_tokens", [])}
    vocab = {t: i for t, i in model["vocab"].items() if t not in added}
    try:
        table = {i: bytes(bytes_of[c] for c in t) for t, i in vocab.items()}
    except KeyError as e:
        raise ConfigError(f"the tokenizer is not byte-level: the character {e.args[0]!r} stands for no byte") from None
    size = max([*table, *added.values()]) + 1
    _check_merges(model, vocab, table)
    if eot_id is None:
        eot_id = added.get(EOT_TEXT, added.get("</s>"))
    if eot_id not in added.values():
        raise ConfigError(f"eos_token_id={eot_id} of the model is no special token of its tokenizer: use --tokenizer=...")
    if len(added) > 1:
        notes.append(f"{len(added) - 1} special tokens beside the end of a document are kept as ids that text never gives")
    ranks = [table.get(i, b"") for i in range(size)]
    ours = Tokenizer.from_ranks(ranks, pattern, eot_id)
    return _known(ours), notes


def _known(ours):
    """The tokenizer of bytes or tiktoken's encoding that `ours` is, if any: data prepared with it then fits the model."""
    name = {257: "bytes", 50257: "gpt2", 100277: "cl100k_base", 200019: "o200k_base"}.get(ours.vocab_size)
    if name is None:
        return ours
    try:
        known = Tokenizer.from_name(name)
    except ConfigError:  # its files are not on this machine
        return ours
    return known if (known.eot, known.table) == (ours.eot, ours.table) else ours


def _read(folder):
    path = folder / "tokenizer.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not (vocab.is_file() and merges.is_file()):
        return None
    ids = json.loads(vocab.read_text(encoding="utf-8"))
    lines = [line for line in merges.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#version")]
    special = [{"content": EOT_TEXT, "id": ids[EOT_TEXT]}] if EOT_TEXT in ids else []
    return {"model": {"vocab": ids, "merges": lines}, "added_tokens": special, "pre_tokenizer": {"type": "ByteLevel"}}


def _pattern(content):
    """The splitting pattern of a ByteLevel pre-tokenizer, alone or after one Split."""
    pre = content.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    split, level = ([None] + steps)[-2:] if len(steps) in (1, 2) else (None, {})
    if level.get("type") != "ByteLevel" or level.get("add_prefix_space"):
        raise ConfigError(f"the tokenizer's pre_tokenizer ({pre.get('type')}) is not byte-level BPE's: use --tokenizer=...")
    if split is None:
        return GPT2_PATTERN if level.get("use_regex", True) else r"[\s\S]+"
    pattern = split.get("pattern", {}).get("Regex")
    if split.get("type") != "Split" or pattern is None or split.get("behavior") != "Isolated" or level.get("use_regex", True):
        raise ConfigError("the tokenizer splits text in a way that has no pattern of ours: use --tokenizer=...")
    return pattern


def _check_merges(model, vocab, table):
    """ConfigError unless merging by lowest id gives what merging by the list gives."""
    made, last = set(), -1
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        if left + right not in vocab or vocab[left + right] < last:
            raise ConfigError(f"the tokenizer's merges are not ordered by id (at {left + right!r}): use --tokenizer=...")
        last = vocab[left + right]
        made.add(last)
    single = {piece for piece in table.values() if len(piece) == 1}
    if len(single) != 256:
        raise ConfigError(f"the tokenizer has {len(single)} of the 256 bytes: use --tokenizer=...")
    if odd := [i for i, piece in table.items() if len(piece) > 1 and i not in made]:
        raise ConfigError(f"the tokenizer has {len(odd)} tokens that no merge makes, such as id {odd[0]}: use --tokenizer=...")


def write_tokenizer(tokenizer, folder):
    """Write tokenizer.json and tokenizer_config.json; False, and nothing written, for characters, which their BPE has not."""
    if tokenizer.kind == "char":
        return False
    character = byte_characters()
    names = ["".join(character[b] for b in piece) for piece in tokenizer.table]
    ids = {piece: i for i, piece in enumerate(tokenizer.table) if piece}
    merges = [[names[ids[part]] for part in _parts(piece, ids)] for piece in tokenizer.table if len(piece) > 1]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = [level]
    if tokenizer.pattern:
        split = {"type": "Split", "pattern": {"Regex": _oniguruma(tokenizer.pattern)}, "behavior": "Isolated", "invert": False}
        steps = [split, level]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    unused = [i for i, piece in enumerate(tokenizer.table) if not piece and i != tokenizer.eot]
    added = {tokenizer.eot: EOT_TEXT} | {i: f"<|unused_{i}|>" for i in unused}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text} | special for i, text in sorted(added.items())],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": {names[i]: i for i in ids.values()} | {text: i for i, text in added.items()},
            "merges": merges,
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": EOT_TEXT, "eos_token": EOT_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))
    return True


def _parts(piece, ids):
    """The two tokens whose merge makes `piece`: merge its bytes by lowest id until two are left."""
    parts, limit = [piece[i : i + 1] for i in range(len(piece))], ids[piece]
    while len(parts) > 2:
        pairs = [(ids.get(a + b, limit), i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))]
        best, i = min(pairs)
        if best >= limit:
            raise ConfigError(f"token {limit} ({piece!r}) cannot be made by merging two others: this tokenizer cannot be exported")
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _oniguruma(pattern):
    """The same pattern for their regular expressions, where `{1,3}+` is a repeated count, not a possessive one."""
    return re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", pattern)
