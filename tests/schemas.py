"""JSON schemas of ordinary answers, each long enough to be disturbed in the middle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quartet.engine.sampling import GrammarKind, GuidedDecoding


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


# A weak model does not end a number by itself.
_COUNT = {"type": "integer", "minimum": -999, "maximum": 99999}
_WORDS = {"type": "string", "minLength": 20, "maxLength": 40}

SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "person": _object(
        name=_WORDS, age={"type": "integer", "minimum": 0, "maximum": 120}, is_member={"type": "boolean"}
    ),
    "numbers": {"type": "array", "items": _COUNT, "minItems": 8, "maxItems": 10},
    "enums": {
        "type": "array",
        "items": {"enum": ["north", "east", "south", "west"]},
        "minItems": 9,
        "maxItems": 12,
    },
    "nested": _object(place=_object(city=_WORDS, position=_object(x=_COUNT, y=_COUNT))),
    "dates": {
        "type": "array",
        "items": {"type": "string", "format": "date"},
        "minItems": 3,
        "maxItems": 4,
    },
    "pattern": {"type": "string", "pattern": "^([A-Z]{3}-[0-9]{4};){4}$"},
    "union": {
        "type": "array",
        "items": {"anyOf": [_COUNT, {"type": "null"}, _object(word={"const": "yes"})]},
        "minItems": 7,
        "maxItems": 9,
    },
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": _object(
                name={"type": "string", "minLength": 12, "maxLength": 20},
                children={"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
            )
        },
    },
    "optional parts": {
        "type": "object",
        "properties": {
            "title": _WORDS,
            "notes": {"type": "array", "items": _WORDS, "maxItems": 2},
            "n": {"type": "null"},
        },
        "required": ["title"],
        "additionalProperties": False,
    },
    "tuple": {"type": "array", "prefixItems": [_WORDS, {"type": "boolean"}, _WORDS], "items": False, "minItems": 3},
}


def guided(schema: Mapping[str, Any]) -> GuidedDecoding:
    return GuidedDecoding(GrammarKind.JSON_SCHEMA, json.dumps(schema))
