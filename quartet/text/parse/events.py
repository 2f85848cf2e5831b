"""What a parser makes of a model's output."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Content:
    """A part of the answer that the user reads."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """A part of what the model thought before it answered."""

    text: str


@dataclass(slots=True)
class CallBegin:
    """Tool call ``index``, from 0, begins. ``id`` names it in later messages; the model's own if it writes one."""

    index: int
    id: str
    name: str


@dataclass(slots=True)
class CallArguments:
    """A part of the arguments of the call that began last; all parts are one JSON object."""

    index: int
    text: str


@dataclass(slots=True)
class CallEnd:
    """The call that began last is complete. A call without an end was cut, or proved malformed: don't run it."""

    index: int


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd
