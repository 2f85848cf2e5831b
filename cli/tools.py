"""Tools of ``quartet chat``: which ones a file offers to the model, and the one that the chat runs itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from cli.calculator import CalculatorError, calculate
from quartet.client import JsonObject, Tool, ToolCall
from quartet.errors import InvalidRequestError
from quartet.shipped import find_shipped

ToolsOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--tools",
        metavar="FILE",
        help="Functions that the model may call: a JSON list of OpenAI's tools. The chat runs one, calculator;"
        " calls of others are answered with an error.",
    ),
]

_CALCULATOR, _EXPRESSION = "calculator", "expression"
_FIELDS = frozenset({"description", "parameters", "strict"})


@dataclass(frozen=True)
class ToolResult:
    """What the model is told after its call."""

    text: str
    is_error: bool = False


def read_tools(file: Path | None) -> tuple[Tool, ...]:
    """The tools in ``file``; none without one. Raises ``typer.BadParameter``."""
    if file is None:
        return ()
    try:
        return _to_tools(json.loads(Path(find_shipped(str(file))).read_text(encoding="utf-8")))
    except OSError as error:
        raise typer.BadParameter(f"--tools {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"--tools {file}: {error}") from error


def run_tool(call: ToolCall) -> ToolResult:
    """Run ``call`` here. What fails becomes a result, too: the model may do better next time."""
    if call.name != _CALCULATOR:
        return _failed(f"there is nobody here to run {call.name}")
    try:
        match call.arguments.value("arguments"):
            case {"expression": str() as expression, **others} if not others:
                return ToolResult(calculate(expression))
    except InvalidRequestError as error:
        return _failed(f"bad arguments: {error.message}")
    except CalculatorError as error:
        return _failed(str(error))
    return _failed(f"{_CALCULATOR} takes one argument, {_EXPRESSION}, a string")


def _failed(reason: str) -> ToolResult:
    return ToolResult(f"error: {reason}", is_error=True)


def _to_tools(value: Any) -> tuple[Tool, ...]:
    """Raises ``ValueError``."""
    if not isinstance(value, list) or not value:
        raise ValueError("it must hold a list of tools")
    return tuple(_to_tool(item, number) for number, item in enumerate(value))


def _to_tool(item: Any, number: int) -> Tool:
    match item:
        case {"type": "function", "function": {"name": str() as name, **fields}}:
            pass
        case _:
            raise ValueError(f'[{number}] must be {{"type": "function", "function": {{"name": ...}}}}')
    if unknown := [name for name in fields if name not in _FIELDS]:
        raise ValueError(f"[{number}].function.{unknown[0]} is unknown")
    description, strict = fields.get("description", ""), fields.get("strict")
    parameters = fields.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(description, str) or not isinstance(parameters, dict) or not isinstance(strict, bool | None):
        raise ValueError(f"[{number}].function has a field of a wrong type")
    return Tool(name, description, JsonObject.of_text(json.dumps(parameters, ensure_ascii=False)), strict)
