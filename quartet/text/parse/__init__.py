"""Reasoning and tool calls in a model's output: one incremental machine that reads tables.

``choose_format`` takes the names of a reasoning parser and a tool-call parser, or guesses them from the chat template:

- reasoning: ``deepseek_r1``, ``deepseek_v3``, ``gemma4``, ``glm45``, ``gpt_oss``, ``kimi_k2``, ``kimi_k3``,
  ``mistral``, ``qwen3``
- tool calls: ``deepseek_v3``, ``deepseek_v3_1``, ``deepseek_v3_2`` (also V4), ``gemma4``, ``glm45`` (and later ones),
  ``harmony``, ``hermes``, ``kimi_k2``, ``kimi_k3``, ``llama3_json``, ``mistral``, ``pythonic``, ``qwen3_coder``; and
  other engines' names for these

An ``OutputParser`` then turns one output into events. It must see the special tokens that ``Format.needs``, also those
that end a generation, and no others.

To add a family, write its table in ``formats``: a ``CallTable`` for calls between content, a ``ReasoningTable``, or a
``Format`` if its messages have parts; and name it in ``names``. All of it is pure.
"""

from quartet.text.parse.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from quartet.text.parse.machine import OutputParser
from quartet.text.parse.names import NO_PARSER, choose_format, choose_parsers

__all__ = [
    "NO_PARSER",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "Content",
    "Event",
    "OutputParser",
    "Reasoning",
    "choose_format",
    "choose_parsers",
]
