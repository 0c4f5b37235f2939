"""Parse Python literals that exporters write as text. Nothing is evaluated."""

from __future__ import annotations

import ast
import warnings
from typing import Any

from edgeq.errors import DataError

# ImageNet-21k's names take less than 700 kB.
_LONGEST = 1 << 20
_DEEPEST = 4
# A number with thousands of digits takes long to print, and Python refuses to.
_LARGEST = 1 << 128


def parse_literal(text: str, subject: str) -> Any:
    """Return the value of a literal made of dicts, lists, tuples, text, numbers, True, False and None.

    Args:
        subject: what the text is, for messages.

    Raises:
        DataError: the text is longer than 1 MiB, is nested more than four deep, or is no such literal.
    """
    if len(text) > _LONGEST:
        raise DataError(f"{subject} has {len(text)} characters, more than {_LONGEST}")
    # A parser's own limits end in errors of another kind, so deep nesting is refused before.
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    # Brackets inside quotes count too; names of classes hardly contain more than a few open ones.
    if deepest > 10 * _DEEPEST:
        raise DataError(f"{subject} is nested too deeply")
    try:
        # The parser warns of odd text such as "0x1for x in y", which is no user's code here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval")
        return _value(tree.body, subject, 0)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise DataError(f"{subject} is not a Python literal ({type(error).__name__})") from error


def _value(node: ast.expr, subject: str, depth: int) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        if isinstance(node.value, int) and node.value > _LARGEST:
            raise DataError(f"{subject} contains a number of too many digits")
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = _value(node.operand, subject, depth + 1)
        if isinstance(operand, int | float) and not isinstance(operand, bool):
            return -operand
    if depth == _DEEPEST:
        raise DataError(f"{subject} is nested too deeply, or contains {type(node).__name__}")
    if isinstance(node, ast.List | ast.Tuple):
        items = [_value(item, subject, depth + 1) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [_value(key, subject, depth + 1) for key in node.keys if key is not None]
        if not any(isinstance(key, list | dict | tuple) for key in keys):
            return dict(zip(keys, (_value(item, subject, depth + 1) for item in node.values), strict=True))
    raise DataError(f"{subject} contains {type(node).__name__}, which is not a plain value")
