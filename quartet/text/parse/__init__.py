"""Reasoning and tool calls in a model's output: one incremental machine that reads tables. All of it is pure.

``choose_format`` takes the names of a reasoning parser and a tool-call parser, those of ``names`` and other engines'
names for these, or guesses them from the chat template. An ``OutputParser`` then turns one output into events. It must
see the special tokens that ``Format.needs``, also those that end a generation, and no others.

To add a family, write its table in ``formats``: a ``CallTable`` for calls between content, a ``ReasoningTable``, or a
``Format`` if its messages have parts; and name it in ``names``.
"""

from quartet.text.parse.events import CallArguments as CallArguments
from quartet.text.parse.events import CallBegin as CallBegin
from quartet.text.parse.events import CallEnd as CallEnd
from quartet.text.parse.events import Content as Content
from quartet.text.parse.events import Event as Event
from quartet.text.parse.events import Reasoning as Reasoning
from quartet.text.parse.machine import OutputParser as OutputParser
from quartet.text.parse.names import NO_PARSER as NO_PARSER
from quartet.text.parse.names import choose_format as choose_format
from quartet.text.parse.names import choose_parsers as choose_parsers
