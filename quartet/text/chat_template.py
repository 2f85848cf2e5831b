"""Chat templates: messages to the text that the model was trained on.

Same environment as huggingface/transformers, ``utils/chat_template_utils.py``, so that published templates
give the same text. They are code from a model's files: the sandbox keeps them from everything but their
inputs, bounds ``range`` (jinja2's ``MAX_RANGE``), and the length of what they write is bounded here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quartet.errors import InvalidRequestError, ModelFilesError, PromptTooLongError
from quartet.media.items import MediaPart
from quartet.text import model_files
from quartet.text.chat_message import ChatMessage
from quartet.text.tokenizer import SpecialTokens

#: Characters: far above any context window's text, far below what would hurt the process.
MAX_RENDERED_LENGTH = 32 * 1024 * 1024

# Words that no template writes by itself.
_PROBE_TEXT, _PROBE_KEY = "QZTEXTQZ", "QZKEYQZ"

#: What Python raises in a template's expressions on messages that it was not written for.
_EXPRESSION_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


class ChatTemplate:
    """A model's chat template, compiled once; may be shared by threads."""

    def __init__(
        self, source: str, special_tokens: SpecialTokens, *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Compile ``source``; ``now`` is the clock for templates that write the date.

        Raises:
            ModelFilesError: ``source`` is no valid template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: now().strftime(format)
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelFilesError(f"the chat template is no valid Jinja: {error}") from error

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], special_tokens: SpecialTokens) -> ChatTemplate | None:
        """Take the template of ``chat_template.jinja``, else of ``tokenizer_config.json``; ``None``: there is none.

        Raises:
            ModelFilesError: a file is malformed, or of several templates none is called ``default``.
        """
        if model_files.CHAT_TEMPLATE in files:
            return cls(model_files.decode_utf8_file(files, model_files.CHAT_TEMPLATE), special_tokens)
        config = model_files.parse_json_file(files, model_files.TOKENIZER_CONFIG)
        source = _default_template(config.get("chat_template"))
        return None if source is None else cls(source, special_tokens)

    def render(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        *,
        max_length: int | None = None,
        **extra: Any,
    ) -> str:
        """Write ``messages`` as the model's text.

        Args:
            messages: at least one, oldest first.
            add_generation_prompt: end with what begins the model's answer.
            max_length: characters of the text at most, if that is less than ``MAX_RENDERED_LENGTH``.
            extra: further variables of the template (``enable_thinking``); plain JSON values.

        Raises:
            InvalidRequestError: no messages, or the template refuses them or takes no media.
            PromptTooLongError: the text is too long.
        """
        if not messages:
            raise InvalidRequestError("there must be at least one message", field="messages")
        variables = [_to_variable(message, self._content_form) for message in messages]
        bound = MAX_RENDERED_LENGTH if max_length is None else min(max_length, MAX_RENDERED_LENGTH)
        return self._write(variables, bound, add_generation_prompt=add_generation_prompt, **extra)

    @cached_property
    def _content_form(self) -> ContentForm:
        """Found at the first messages: a model whose template is never used must not wait for it."""
        return ContentForm.of(
            lambda content: self._write(
                [{"role": "user", "content": content}], MAX_RENDERED_LENGTH, add_generation_prompt=False
            )
        )

    def _write(self, messages: Sequence[Mapping[str, object]], max_length: int, **extra: Any) -> str:
        variables = {
            # Templates recognise "no tools" by a variable that is none, as transformers passes it.
            **{"tools": None, "documents": None},
            **self._special_tokens.named,
            **extra,
            "messages": messages,
        }
        try:
            return _join_bounded(self._template.generate(variables), max_length)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the model's chat template refuses: {error}", field="messages") from error
        except _EXPRESSION_ERRORS as error:
            # Only the type: the text of such an error may quote the messages.
            reason = type(error).__name__
            raise InvalidRequestError(f"the model's chat template fails with {reason}", field="messages") from error


def read_template_file(file: Path) -> str:
    """The Jinja source in ``file``. Raises ``ModelFilesError``: it can't be read, or is none."""
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"cannot read the chat template: {error}") from error
    ChatTemplate(source, SpecialTokens())
    return source


@dataclass(frozen=True)
class ContentForm:
    """What a template takes as a message's content; neither: it refuses the probes and is given strings.

    Templates of text models know strings, those of many models with media know only lists of pieces and give an empty
    turn for a string; some know both. Nothing in a model's files says which, so a template is asked by probes, as in
    google/minja, ``include/minja/chat-template.hpp`` (``requires_typed_content``).

    Attributes:
        strings: all of the text in one.
        pieces: a list of what each piece is, as transformers has it.
    """

    strings: bool
    pieces: bool

    @classmethod
    def of(cls, render: Callable[[object], str]) -> ContentForm:
        """Find out by ``render``, which writes a user's message of this content, or raises ``InvalidRequestError``."""
        string = _written(render, _PROBE_TEXT)
        pieces = _written(render, [{"type": "text", "text": _PROBE_TEXT, _PROBE_KEY: ""}])
        # A template that knows only strings may write the list as Python or JSON has it, keys included.
        return cls(strings=_PROBE_TEXT in string, pieces=_PROBE_TEXT in pieces and _PROBE_KEY not in pieces)

    def variable(self, message: ChatMessage) -> object:
        """The content of ``message`` as templates of this form take it.

        Raises:
            InvalidRequestError: there are media in it, and the template takes none.
        """
        if isinstance(message.content, str) and (self.strings or not self.pieces):
            return message.content
        has_media = any(not isinstance(piece, str) for piece in message.pieces)
        if has_media and not self.pieces:
            raise InvalidRequestError("the model's chat template takes text only, no media", field="messages")
        if has_media or (self.pieces and not self.strings):
            return [_piece(piece) for piece in message.pieces]
        return message.text


class _GenerationBlock(Extension):
    """``{% generation %}``: marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance's variable

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block as a call with its body, which so has a scope of its own, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Macro) -> str:
        return caller()


def _default_template(value: Any) -> str | None:
    """A model has one template, or a list of named ones."""
    if value is None or isinstance(value, str):
        return value
    try:
        named = value if isinstance(value, dict) else {entry["name"]: entry["template"] for entry in value}
        return str(named["default"])
    except (TypeError, LookupError) as error:
        raise ModelFilesError("chat_template must be text, or named templates with a default") from error


def _to_variable(message: ChatMessage, form: ContentForm) -> dict[str, object]:
    variable: dict[str, object] = {"role": message.role, "content": form.variable(message)}
    return variable if message.name is None else {**variable, "name": message.name}


def _written(render: Callable[[object], str], content: object) -> str:
    try:
        return render(content)
    except InvalidRequestError:
        return ""


def _piece(piece: str | MediaPart) -> dict[str, str]:
    return {"type": "text", "text": piece} if isinstance(piece, str) else {"type": "image"}


def _join_bounded(pieces: Iterator[str], max_length: int) -> str:
    """Join what the template writes, and stop it when that gets too long."""
    kept: list[str] = []
    length = 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece)
        if length > max_length:
            raise PromptTooLongError(
                f"the rendered messages are too long: they have more than {max_length} characters", field="messages"
            )
    return "".join(kept)


def _raise_exception(message: str) -> NoReturn:
    """For templates to refuse messages."""
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own ``tojson`` escapes HTML characters, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
