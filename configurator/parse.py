"""From the command line to checked settings: `load`, `describe`, and the text of `--help`."""

import argparse
import sys
import textwrap
from dataclasses import dataclass, field

from configurator.config import Settings, choices, kinds, unknown_setting
from configurator.errors import ConfigError
from configurator.recipe import nearest_recipe, read_recipe


@dataclass(frozen=True)
class Resolved:
    """Checked settings, the source of each ("default", "checkpoint", "recipe FILE", "flag"), the other arguments."""

    config: Settings
    sources: dict[str, str]
    positional: list[str]


@dataclass
class _Arguments:
    flags: dict[str, str | None] = field(default_factory=dict)  # None: a bare --flag
    recipes: list[str] = field(default_factory=list)
    positional: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def load(
    cls: type[Settings],
    argv: list[str],
    *,
    prog: str | None = None,
    description: str = "",
    base: dict[str, object] | None = None,
) -> Resolved:
    """Settings of type cls: defaults < base (a checkpoint's) < recipe files (*.py arguments, in order) < flags.

    Flags are --key=value, --key value, or a bare --key for a switch. -h and --help print all settings and exit with 0.
    Raises ConfigError with every problem found, one line each.
    """
    if "-h" in argv or "--help" in argv:
        print(_help(cls, prog, description), end="")
        sys.exit(0)
    arguments = _split(cls, argv)
    problems = arguments.problems
    values = {name: value for name, value in (base or {}).items() if name in cls.model_fields}
    problems += [f"checkpoint: {unknown_setting(cls, name)}" for name in base or {} if name not in values]
    sources = dict.fromkeys(cls.model_fields, "default") | dict.fromkeys(values, "checkpoint")
    origins = dict.fromkeys(values, "checkpoint: ")  # what stands before a problem with this setting
    for path in arguments.recipes:
        try:
            recipe, refused = read_recipe(cls, path)
        except ConfigError as error:
            problems += error.problems
            continue
        problems += refused
        for name, (value, line) in recipe.items():
            values[name], sources[name], origins[name] = value, f"recipe {path}", f"{path}:{line}: "
    for name, text in arguments.flags.items():
        values[name] = True if text is None else _from_text(cls.model_fields[name].annotation, text)
        sources[name], origins[name] = "flag", ""
    try:
        config = cls(**values)
        problems += _useless_flags(config, arguments.flags)
    except ConfigError as error:
        problems += [origins.get(line.partition("=")[0], "") + line for line in error.problems]
    if problems:
        raise ConfigError(problems)
    return Resolved(config, sources, arguments.positional)


def describe(resolved: Resolved) -> str:
    """The settings as text: those that were set as a table (name, value, source), then the defaults, compactly."""
    values = {name: _shown(value) for name, value in resolved.config.model_dump().items()}
    changed = [name for name in values if resolved.sources[name] != "default"]
    rows = [(name, values[name], resolved.sources[name]) for name in changed]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    lines = [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows]
    rest = " ".join(f"{name}={value}" for name, value in values.items() if name not in changed)
    return "\n".join(lines + textwrap.wrap(f"defaults: {rest}", 120, subsequent_indent="  ", break_on_hyphens=False))


def _split(cls: type[Settings], argv: list[str]) -> _Arguments:
    """Sort the arguments into flags (still text), recipes and others, by their form alone."""
    found, rest = _Arguments(), list(argv)
    while rest:
        argument = rest.pop(0)
        if argument.startswith("--"):
            _take_flag(cls, argument[2:], rest, found)
        elif problem := _refused(cls, argument):
            found.problems.append(problem)
        elif argument.endswith(".py"):
            found.recipes.append(argument)
        else:
            found.positional.append(argument)
    return found


def _take_flag(cls: type[Settings], text: str, rest: list[str], found: _Arguments) -> None:
    name, equals, value = text.partition("=")
    known = cls.model_fields.get(name)
    follows = rest[0] if rest and not rest[0].startswith("--") else None
    switch = known is not None and bool in kinds(known.annotation)
    if equals:
        pass
    elif switch:
        value = rest.pop(0) if follows is not None and follows.lower() in ("true", "false", "none") else None
    elif follows is not None and (known is not None or not follows.endswith(".py")):
        value = rest.pop(0)
    elif known is not None:
        found.problems.append(f"--{name} needs a value: write --{name}={_kind(known.annotation)}")
        return
    if known is None:
        found.problems.append(unknown_setting(cls, name))
    else:
        found.flags[name] = value  # of a flag given twice the last counts, so that a script's flags can be overridden


def _refused(cls: type[Settings], argument: str) -> str | None:
    """The problem with an argument that is no flag, if it is neither a recipe nor a positional argument."""
    name, equals, _ = argument.lstrip("-").partition("=")
    if argument.startswith("-") or (equals and name in cls.model_fields):
        if name not in cls.model_fields:
            return f"unknown argument '{argument}': settings are written --name=value"
        return f"'{argument}': settings start with two dashes: write --{argument.lstrip('-')}"
    if argument.endswith(".py") or cls._positional is not None:
        return None
    if equals:
        return unknown_setting(cls, name)
    hint = nearest_recipe(argument)
    hint = f": did you mean {hint}?" if hint else ""
    return f"unexpected argument '{argument}': settings are written --name=value, recipes end in .py{hint}"


def _from_text(annotation: object, text: str) -> object:
    """The Python value of a flag's text, or the text itself where it fits no other type (the settings check it)."""
    allowed = kinds(annotation)
    word = text.strip().lower()
    if type(None) in allowed and word == "none":
        return None
    if bool in allowed and word in ("true", "false"):
        return word == "true"
    for kind in (int, float):
        if int in allowed or float in allowed:  # 1e3 may be an int and 1 a float: the settings check which
            try:
                return kind(text)
            except ValueError:
                continue
    return {str(choice): choice for choice in choices(annotation)}.get(text, text)


def _useless_flags(config: Settings, flags: dict[str, str | None]) -> list[str]:
    problems = []
    for name, (switch, needed) in config._needs.items():
        now = getattr(config, switch)
        if name in flags and now != needed:
            instead = f"; {config._instead[name]}" if name in config._instead else ""
            useless = f"{_flag(name, flags[name])} has no effect with {switch}={_shown(now)}"
            problems.append(f"{useless}: drop it, or use {switch}={_shown(needed)}{instead}")
    return problems


def _help(cls: type[Settings], prog: str | None, description: str) -> str:
    others = f" {cls._positional} ..." if cls._positional else ""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"%(prog)s [RECIPE.py ...]{others} [--name=value ...]",
        description=description,
        epilog="A recipe is a file of lines `name = value`; flags win over recipes, later recipes over earlier ones.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=40),
    )
    owners = [base for base in reversed(cls.__mro__) if issubclass(base, Settings) and base is not Settings]
    groups = {owner: parser.add_argument_group((owner.__doc__ or "settings").splitlines()[0]) for owner in owners}
    for name, info in cls.model_fields.items():
        owner = next(owner for owner in owners if name in owner.model_fields)
        default = "required" if info.is_required() else f"default: {_shown(info.default)}"
        text = f"{info.description or ''} ({default})".replace("%", "%%")
        groups[owner].add_argument(f"--{name}", metavar=_kind(info.annotation), help=text.strip())
    return parser.format_help()


def _kind(annotation: object) -> str:
    names = {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT"}
    shown = [names[kind] for kind in kinds(annotation) if kind in names] + [str(value) for value in choices(annotation)]
    return "|".join(shown)


def _flag(name: str, text: str | None) -> str:
    return f"--{name}" if text is None else f"--{name}={text}"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(value) if not value or any(char.isspace() for char in value) else value
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
