"""The layer pattern: one string that says what each layer of the model is.

    pattern = item (whitespace item)*
    item    = name [ "(" key=value ("," key=value)* ")" ] [ "*" count ]
    value   = int | float | true | false | none | word | 'quoted' | "quoted"

For example "swa(window=1024)*5 attn(rope=none)". The pattern is cycled over the depth and cut at it. Which names and
options exist is the model's business, not the grammar's.
"""

import math
import re
from dataclasses import dataclass, field
from itertools import groupby
from typing import NoReturn

from configurator.errors import ConfigError

MAX_COUNT = 10_000  # a longer run is a slip of the finger, and would only fill the memory

_SPACES = re.compile(r"\s+")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_WORD = re.compile(r"[\w.+:/-]+", re.ASCII)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_INT = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_CONSTANTS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class LayerSpec:
    """One layer: the name of its kind and the options that differ from the defaults."""

    name: str
    options: dict[str, object] = field(default_factory=dict)


def parse_layers(text: str) -> list[LayerSpec]:
    """One period of the pattern, counts expanded. Raises ConfigError naming the place (characters count from 0)."""
    scan, specs = _Scanner(text), []
    scan.skip_spaces()
    while not scan.at_end():
        name = scan.expect(_NAME, "the name of a layer")
        options = _options(scan)
        specs += [LayerSpec(name, dict(options)) for _ in range(_count(scan))]
        if not scan.skip_spaces() and not scan.at_end():
            scan.fail("expected a space between layers")
    if not specs:
        raise ConfigError(f"layers={text!r}: empty: name at least one layer, such as 'attn'")
    return specs


def expand_layers(text: str, n_layer: int) -> list[LayerSpec]:
    """The n_layer layers of a model: the pattern, cycled over the depth and cut at it."""
    period = parse_layers(text)
    return [period[i % len(period)] for i in range(n_layer)]


def format_layers(specs: list[LayerSpec]) -> str:
    """The canonical pattern of specs: equal neighbours as a count. parse_layers(format_layers(specs)) == specs."""
    runs = [(item, len(list(run))) for item, run in groupby(map(_format_item, specs))]
    return " ".join(item if count == 1 else f"{item}*{count}" for item, count in runs)


class _Scanner:
    """A position in the pattern."""

    def __init__(self, text: str):
        self.text, self.position = text, 0

    def at_end(self) -> bool:
        return self.position == len(self.text)

    def take(self, pattern: re.Pattern) -> str | None:
        """The match at the position, which moves behind it; None if there is none."""
        match = pattern.match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return match.group()

    def take_char(self, char: str) -> bool:
        found = self.text.startswith(char, self.position)
        self.position += found
        return found

    def skip_spaces(self) -> bool:
        return self.take(_SPACES) is not None

    def expect(self, pattern: re.Pattern, what: str) -> str:
        found = self.take(pattern)
        if found is None:
            self.fail(f"expected {what}")
        return found

    def fail(self, problem: str, position: int | None = None) -> NoReturn:
        position = self.position if position is None else position
        found = f", found {self.text[position]!r}" if position < len(self.text) else " (the end)"
        raise ConfigError(f"layers={self.text!r}: {problem} at character {position}{found}")


def _options(scan: _Scanner) -> dict[str, object]:
    opened, options = scan.position, {}
    if not scan.take_char("("):
        return options
    scan.skip_spaces()
    while not scan.take_char(")"):
        if options and not scan.take_char(","):
            _fail_if_open(scan, opened)
            scan.fail("expected ',' or ')'")
        scan.skip_spaces()
        _fail_if_open(scan, opened)
        start = scan.position
        key = scan.expect(_NAME, "the name of an option")
        if key in options:
            scan.fail(f"option '{key}' is given twice", start)
        scan.skip_spaces()
        _fail_if_open(scan, opened)
        if not scan.take_char("="):
            scan.fail(f"expected '=' after '{key}'")
        scan.skip_spaces()
        _fail_if_open(scan, opened)
        options[key] = _value(scan)
        scan.skip_spaces()
    return options


def _fail_if_open(scan: _Scanner, opened: int) -> None:
    if scan.at_end():
        raise ConfigError(f"layers={scan.text!r}: missing ')' opened at character {opened}")


def _value(scan: _Scanner) -> object:
    quoted = scan.take(_QUOTED)
    if quoted is not None:
        return quoted[1:-1]
    start = scan.position
    if scan.text[start] in "'\"":
        scan.fail("the quote is not closed, opened")
    value = _typed(scan.expect(_WORD, "a number, true, false, none, a word or a quoted text"))
    if isinstance(value, float) and not math.isfinite(value):
        scan.fail("number too large", start)
    return value


def _typed(word: str) -> object:
    if word.lower() in _CONSTANTS:
        return _CONSTANTS[word.lower()]
    if _INT.fullmatch(word):
        return int(word)
    return float(word) if _FLOAT.fullmatch(word) else word


def _count(scan: _Scanner) -> int:
    if not scan.take_char("*"):
        return 1
    start = scan.position
    count = scan.expect(_INT, f"a count from 1 to {MAX_COUNT}")
    if not 1 <= int(count) <= MAX_COUNT:
        scan.fail(f"count {count} is not between 1 and {MAX_COUNT}", start)
    return int(count)


def _format_item(spec: LayerSpec) -> str:
    options = ", ".join(f"{key}={_format_value(value)}" for key, value in spec.options.items())
    return f"{spec.name}({options})" if options else spec.name


def _format_value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    if _WORD.fullmatch(value) and isinstance(_typed(value), str):
        return value
    quote = '"' if "'" in value else "'"
    if quote in value:
        raise ConfigError(f"layer option {value!r}: a text with both kinds of quotes cannot be written in a pattern")
    return f"{quote}{value}{quote}"
