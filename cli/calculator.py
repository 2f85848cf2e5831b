"""Arithmetic for the tool ``calculator`` of ``quartet chat``: the expressions come from models, so all is bounded."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import TypeAlias

Number: TypeAlias = int | float

#: Characters of an expression.
MAX_LENGTH = 256
#: Bits of each whole number on the way: 308 digits, about as far as floats reach.
MAX_BITS = 1024

_ALLOWED = re.compile(r"[0-9eE.+\-*/%() ]*")
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorError(Exception):
    """There is no result; the message says why, for the model as well."""


def calculate(expression: str) -> str:
    """The value of ``expression``: numbers, ``+ - * / // % **`` and parentheses, with Python's meaning.

    Whole numbers are exact; others have 15 digits.

    Raises:
        CalculatorError: it is something else, too long or too large, or has no value.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(f"the expression is longer than {MAX_LENGTH} characters")
    if not _ALLOWED.fullmatch(expression):
        raise CalculatorError("an expression has only numbers, + - * / // % ** and parentheses")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError as error:
        raise CalculatorError("division by zero") from error
    except OverflowError as error:
        raise CalculatorError("the result is too large") from error
    except (SyntaxError, MemoryError, RecursionError) as error:  # Python's parser raises the last two for deep nesting
        raise CalculatorError("the expression is malformed") from error
    return str(value) if isinstance(value, int) else format(value, ".15g")


def _evaluate(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value):
            return _bounded(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_evaluate(left), _evaluate(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_evaluate(left), _evaluate(right)))
    raise CalculatorError("the expression is malformed")


def _power(base: Number, exponent: Number) -> Number:
    # Before it is computed: 9**9**9 has 370 million digits.
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > 2 * MAX_BITS:
        raise CalculatorError("the result is too large")
    power: Number | complex = base**exponent
    if isinstance(power, complex):
        raise CalculatorError("the result is no real number")
    return power


def _bounded(value: Number) -> Number:
    if (isinstance(value, int) and value.bit_length() > MAX_BITS) or not math.isfinite(value):
        raise CalculatorError("the result is too large")
    return value
