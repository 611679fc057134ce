"""The calculator tool: exact arithmetic, without running other code.

Numbers are fractions, so integers and decimals are exact. Their size is bounded, so no expression takes long or has a
page of digits as its answer.
"""

import ast
import operator
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

from slimrl.agent.tools import ToolError

MAX_CHARACTERS = 400
MAX_BITS = 4096
"""Limit of the numerator and the denominator of every intermediate value; 1234 decimal digits."""
DECIMALS = Context(prec=15)
"""Significant digits of an answer that is not an integer."""


def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: Arithmetic.
    """
    value = exact_value(expression)
    if value.denominator == 1:
        return str(value.numerator)
    return str(DECIMALS.divide(Decimal(value.numerator), Decimal(value.denominator)))


def exact_value(expression: str) -> Fraction:
    """Raises ToolError: it is no arithmetic, or too large."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression is longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ToolError("invalid expression") from error
    return _evaluate(tree.body, expression)


def _evaluate(node: ast.expr, expression: str) -> Fraction:
    match node:
        case ast.Constant(value=bool() | complex()):
            raise ToolError("invalid expression")
        case ast.Constant(value=int() | float()):
            return _number(ast.get_source_segment(expression.strip(), node))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand, expression)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, expression)
        case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in _OPERATIONS:
            return _apply(_OPERATIONS[type(symbol)], _evaluate(left, expression), _evaluate(right, expression))
        case _:
            raise ToolError("invalid expression")


def _number(text: str | None) -> Fraction:
    try:
        decimal = Decimal(text or "")
    except ArithmeticError as error:
        raise ToolError("invalid expression") from error
    if decimal.adjusted() > MAX_CHARACTERS or decimal.adjusted() < -MAX_CHARACTERS:
        raise ToolError("the numbers are too large")
    return Fraction(decimal)


def _apply(operation: Callable[[Fraction, Fraction], Fraction | int], left: Fraction, right: Fraction) -> Fraction:
    try:
        value = Fraction(operation(left, right))
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError("the numbers are too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError("an exponent must be an integer")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent.numerator) > MAX_BITS:
        raise ToolError("the numbers are too large")
    return base**exponent.numerator


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
