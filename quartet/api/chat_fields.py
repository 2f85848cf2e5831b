"""Fields that other APIs lay out otherwise than OpenAI's chats do, read as those of chats."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from quartet.api.chat import MAX_TOOLS
from quartet.api.openai.fields import Reader, anything, list_of, objects, only, read_fields
from quartet.api.openai.requests import CHAT_FIELDS, read_functions
from quartet.api.openai.steps import Work
from quartet.engine.sampling import GuidedDecoding
from quartet.errors import InvalidRequestError
from quartet.text.chat_message import Tool


def read_format(kind: str, schema: Mapping[str, Any], path: str) -> GuidedDecoding | None:
    """The grammar of a format of this ``kind``; a chat's has the fields of a ``schema`` one level deeper.

    Raises:
        InvalidRequestError: naming the field below ``path``.
    """
    if kind == "json_schema" and schema.get("schema") is None:
        raise InvalidRequestError(f"{path}.schema: is missing", field=f"{path}.schema")
    fields = {"type": kind, "json_schema": schema} if kind == "json_schema" else {"type": kind, **schema}
    try:
        grammar: GuidedDecoding | None = CHAT_FIELDS["response_format"](fields, path)
    except InvalidRequestError as error:
        nested = f"{path}.json_schema"
        error.message = error.message.replace(nested, path)
        error.field = (error.field or path).replace(nested, path)
        raise
    return grammar


def read_tools(
    value: Any, table: Mapping[str, Reader], *, kind: str, parameters: str, work: Work
) -> Generator[int, None, tuple[Tool, ...]]:
    """The functions of the field ``tools``, in steps.

    Args:
        value: the list.
        table: reads the fields of a tool.
        kind: the ``type`` of a tool that is a function.
        parameters: the field with its schema.
        work: counts what it takes.

    Raises:
        InvalidRequestError: naming the field; also for a tool of another type.
    """

    def read(tool: Any, path: str) -> Tool:
        if objects(tool, path).get("type") is not None:
            only(kind)(tool["type"], f"{path}.type")  # before its fields, which are those of another kind of tool
        found = read_fields(tool, table, f"{path}.")
        if "name" not in found:
            raise InvalidRequestError(f"{path}.name: is missing", field=f"{path}.name")
        known = {name: found[name] for name in ("name", "description", "strict") if name in found}
        return Tool(**known, **({"parameters": found[parameters]} if parameters in found else {}))

    items = list_of(anything, max_length=MAX_TOOLS)(value, "tools")
    pairs = [(f"tools[{index}]", item) for index, item in enumerate(items)]
    return (yield from read_functions(pairs, read, path="tools", json_at=(parameters,), work=work))
