"""Recipe files: Python syntax in an empty namespace, of which only `name = value` lines are read; nothing is executed.

Values are literals, arithmetic, and names assigned above. Names are settings, or start with `_`.
"""

import ast
import difflib
import operator
import os
from pathlib import Path

from configurator.config import Settings, unknown_setting
from configurator.errors import ConfigError

RECIPES = Path(__file__).parent / "recipes"
MAX_EXPONENT = 64  # with operands below 2**64 no slip such as 10**10**10 can hang the start

_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip


def read_recipe(cls: type[Settings], path: str) -> tuple[dict[str, tuple[object, int]], list[str]]:
    """The settings in a recipe as {name: (value, line)}, and a line for each statement that was refused.

    Raises ConfigError if the file cannot be read as Python syntax at all.
    """
    names: dict[str, object] = {}
    found: dict[str, tuple[object, int]] = {}
    problems = []
    for statement in _statements(path):
        try:
            name = _target(cls, statement)
            names[name] = _evaluate(statement.value, names)
        except ConfigError as error:
            problems += [f"{path}:{statement.lineno}: {problem}" for problem in error.problems]
            continue
        if not name.startswith("_"):
            found[name] = (names[name], statement.lineno)
    return found, problems


def nearest_recipe(path: str) -> str | None:
    """The shipped recipe whose name is nearest to path's, as one would type it here; None if none is near."""
    shipped = {file.stem: file for file in RECIPES.glob("*.py")}
    close = difflib.get_close_matches(Path(path).stem, shipped, n=1)
    return os.path.relpath(shipped[close[0]]) if close else None


def _statements(path: str) -> list[ast.stmt]:
    try:
        body = ast.parse(Path(path).read_text(encoding="utf-8-sig"), filename=path).body
    except FileNotFoundError:
        near = nearest_recipe(path)
        hint = f"did you mean {near}?" if near else f"recipes that come with this are in {os.path.relpath(RECIPES)}"
        raise ConfigError(f"recipe {path}: no such file: {hint}") from None
    except OSError as error:
        raise ConfigError(f"recipe {path}: {error.strerror}") from None
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: not Python syntax: {error.msg}") from None
    except ValueError as error:  # not UTF-8, or null bytes
        raise ConfigError(f"recipe {path}: not a text file: {error}") from None
    has_docstring = body and isinstance(body[0], ast.Expr) and isinstance(getattr(body[0].value, "value", None), str)
    return body[1:] if has_docstring else body


def _target(cls: type[Settings], statement: ast.stmt) -> str:
    simple = isinstance(statement, ast.Assign) and [type(target) for target in statement.targets] == [ast.Name]
    if not simple:
        raise ConfigError(f"a recipe holds only lines `name = value` (found: {type(statement).__name__.lower()})")
    name = statement.targets[0].id
    if name not in cls.model_fields and not name.startswith("_"):
        raise ConfigError(unknown_setting(cls, name) + " (a helper's name starts with _)")
    return name


def _evaluate(node: ast.expr, names: dict[str, object]) -> object:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name):
            raise ConfigError(f"'{name}' is not assigned above")
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _apply(node, _evaluate(operand, names))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATORS:
            return _apply(node, _evaluate(left, names), _evaluate(right, names))
    raise ConfigError(f"values are literals, arithmetic and names assigned above, not `{ast.unparse(node)}`")


def _apply(node: ast.BinOp | ast.UnaryOp, *operands: object) -> object:
    shown, op = f"`{ast.unparse(node)}`", type(node.op)
    texts = op is ast.Add and len(operands) == 2 and all(isinstance(operand, str) for operand in operands)
    if not texts and not all(isinstance(operand, int | float) for operand in operands):
        raise ConfigError(f"{shown}: arithmetic is for numbers (and + for two texts)")
    if not texts and any(isinstance(operand, int) and abs(operand) >= 2**64 for operand in operands):
        raise ConfigError(f"{shown}: numbers stay below 2**64")
    if op is ast.Pow and abs(operands[1]) > MAX_EXPONENT:
        raise ConfigError(f"{shown}: exponents stay within {MAX_EXPONENT}")
    try:
        result = _OPERATORS[op](*operands)
    except ArithmeticError as error:
        raise ConfigError(f"{shown}: {error}") from None
    if isinstance(result, complex):
        raise ConfigError(f"{shown}: not a real number")
    return result
