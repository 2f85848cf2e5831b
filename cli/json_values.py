"""Domain values as JSON has them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any


def json_value(value: object) -> Any:
    """``value`` with every dataclass and named tuple in it as a mapping."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: json_value(item) for name, item in value._asdict().items()}
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value
