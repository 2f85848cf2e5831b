"""Ten JSON schemas of the kinds that applications ask for; the first five are the ordinary ones whose speed counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


# A weak model ends neither numbers nor texts by itself.
_COUNT = {"type": "integer", "minimum": 0, "maximum": 9999}
_NAME = {"type": "string", "minLength": 3, "maxLength": 12}
_TEXT = {"type": "string", "minLength": 20, "maxLength": 32}

ORDINARY: Mapping[str, Mapping[str, Any]] = {
    "small object": _object(name=_NAME, age=_COUNT, is_member={"type": "boolean"}, about=_TEXT),
    "tool arguments": _object(
        location=_NAME,
        unit={"enum": ["celsius", "fahrenheit", "kelvin"]},
        detail={"type": "string", "enum": ["current", "hourly", "daily", "none"]},
        days={"type": "integer", "minimum": 1, "maximum": 14},
        question=_TEXT,
    ),
    "formats": _object(
        day={"type": "string", "format": "date"},
        at={"type": "string", "format": "date-time"},
        mail={"type": "string", "format": "email", "maxLength": 40},
        id={"type": "string", "format": "uuid"},
        host={"type": "string", "format": "ipv4"},
    ),
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": _object(name=_NAME, children={"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1})
        },
    },
    "list of objects": _object(
        items={
            "type": "array",
            "items": _object(
                title=_NAME,
                price=_COUNT,
                tags={"type": "array", "items": {"enum": ["new", "used", "sale"]}, "maxItems": 2},
            ),
            "minItems": 2,
            "maxItems": 3,
        }
    ),
}

SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    **ORDINARY,
    "numbers": {"type": "array", "items": _COUNT, "minItems": 8, "maxItems": 10},
    "pattern": {"type": "string", "pattern": "^([A-Z]{3}-[0-9]{4};){4}$"},
    "union": {
        "type": "array",
        "items": {"anyOf": [_COUNT, {"type": "null"}, _object(word={"const": "yes"})]},
        "minItems": 7,
        "maxItems": 9,
    },
    "optional properties": {
        "type": "object",
        "properties": {
            "title": _TEXT,
            "notes": {"type": "array", "items": _NAME, "maxItems": 2},
            "n": {"type": "null"},
        },
        "required": ["title"],
        "additionalProperties": False,
    },
    "tuple": {"type": "array", "prefixItems": [_TEXT, {"type": "boolean"}, _NAME], "items": False, "minItems": 3},
}
