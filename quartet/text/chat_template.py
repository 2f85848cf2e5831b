"""Chat templates: messages to the text that the model was trained on.

Same environment as huggingface/transformers, ``utils/chat_template_utils.py``, so that published templates
give the same text. They are code from a model's files: the sandbox keeps them from everything but their
inputs, bounds ``range`` (jinja2's ``MAX_RANGE``), and the length of what they write is bounded here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quartet.errors import InvalidRequestError, ModelFilesError, PromptTooLongError
from quartet.text import model_files
from quartet.text.chat_message import ChatMessage, Tool
from quartet.text.template_forms import CallForm, ContentForm, Render, to_tool_variable, to_variable
from quartet.text.tokenizer import SpecialTokens

#: Characters: far above any context window's text, far below what would hurt the process.
MAX_RENDERED_LENGTH = 32 * 1024 * 1024

# Variables that the chat itself gives.
_MESSAGES, _TOOLS, _ADDS_PROMPT = "messages", "tools", "add_generation_prompt"
_OWN_VARIABLES = frozenset({_MESSAGES, _TOOLS, _ADDS_PROMPT})

_NO_ARGUMENTS: Mapping[str, Any] = {}

#: What Python raises in a template's expressions on messages that it was not written for.
_EXPRESSION_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


class ChatTemplate:
    """A model's chat template, compiled once; may be shared by threads.

    Attributes:
        sources: its Jinja source; that for chats with tools, if it is another, is joined to it.
        takes_tools: whether it reads them; otherwise they would be lost.
        arguments: sorted names of the further variables that it reads.
    """

    def __init__(
        self,
        source: str,
        special_tokens: SpecialTokens,
        *,
        source_for_tools: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile ``source``; ``now`` is the clock for templates that write the date.

        ``source_for_tools`` writes chats with tools; ``None``: ``source`` does.

        Raises:
            ModelFilesError: a source is no valid template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: now().strftime(format)
        self._special_tokens = special_tokens
        self.sources = source if source_for_tools is None else f"{source}\n{source_for_tools}"
        try:
            self._template = self._template_for_tools = environment.from_string(source)
            variables = meta.find_undeclared_variables(environment.parse(source))
            if source_for_tools is not None:
                self._template_for_tools = environment.from_string(source_for_tools)
                variables |= meta.find_undeclared_variables(environment.parse(source_for_tools))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelFilesError(f"the chat template is no valid Jinja: {error}") from error
        self.takes_tools = _TOOLS in variables
        known = _OWN_VARIABLES.union(environment.globals, special_tokens.named)
        self.arguments = tuple(sorted(variables - known))

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], special_tokens: SpecialTokens) -> ChatTemplate | None:
        """Take the template of ``chat_template.jinja``, else of ``tokenizer_config.json``; ``None``: there is none.

        Raises:
            ModelFilesError: a file is malformed, or of several templates none is called ``default``.
        """
        if model_files.CHAT_TEMPLATE in files:
            return cls(model_files.decode_utf8_file(files, model_files.CHAT_TEMPLATE), special_tokens)
        config = model_files.parse_json_file(files, model_files.TOKENIZER_CONFIG)
        source, for_tools = _named_templates(config.get("chat_template"))
        return None if source is None else cls(source, special_tokens, source_for_tools=for_tools)

    def render(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Tool] = (),
        arguments: Mapping[str, Any] = _NO_ARGUMENTS,
        max_length: int | None = None,
    ) -> str:
        """Write ``messages`` as the model's text.

        Args:
            messages: at least one, oldest first.
            add_generation_prompt: end with what begins the model's answer.
            tools: that the answer may call.
            arguments: further variables of the template (``enable_thinking``); plain JSON values.
            max_length: characters of the text at most, if that is less than ``MAX_RENDERED_LENGTH``.

        Raises:
            InvalidRequestError: no messages, or the template refuses them or takes no media; or tools, calls or
                ``arguments`` are impossible. Names ``messages``, ``tools`` or ``template_arguments``, or what in them.
            PromptTooLongError: the text is too long.
        """
        if not messages:
            raise InvalidRequestError("there must be at least one message", field="messages")
        if not _OWN_VARIABLES.isdisjoint(arguments):
            name = min(_OWN_VARIABLES.intersection(arguments))
            raise InvalidRequestError(f"{name} has a field of its own", field="template_arguments")
        content, calls = self._content_form, lambda: self._call_form
        variables = [to_variable(message, number, content, calls) for number, message in enumerate(messages)]
        extra = {**arguments, _ADDS_PROMPT: add_generation_prompt}
        if tools:
            extra[_TOOLS] = [to_tool_variable(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
        bound = MAX_RENDERED_LENGTH if max_length is None else min(max_length, MAX_RENDERED_LENGTH)
        return self._write(variables, bound, extra)

    @cached_property
    def _content_form(self) -> ContentForm:
        """Found at the first messages: a model whose template is never used must not wait for it."""
        return ContentForm.of(self._probe)

    @cached_property
    def _call_form(self) -> CallForm:
        """Found at the first tool call."""
        return CallForm.of(self._probe, self._content_form)

    @property
    def _probe(self) -> Render:
        return lambda messages: self._write(messages, MAX_RENDERED_LENGTH, {_ADDS_PROMPT: False})

    def _write(self, messages: Sequence[object], max_length: int, extra: Mapping[str, Any]) -> str:
        variables = {
            # Templates recognise "no tools" by a variable that is none, as transformers passes it.
            **{_TOOLS: None, "documents": None},
            **self._special_tokens.named,
            **extra,
            _MESSAGES: messages,
        }
        template = self._template_for_tools if extra.get(_TOOLS) else self._template
        try:
            return _join_bounded(template.generate(variables), max_length)
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


def _named_templates(value: Any) -> tuple[str | None, str | None]:
    """The template, and that for tools. A model has one template, or a list of named ones."""
    if value is None or isinstance(value, str):
        return value, None
    try:
        named = value if isinstance(value, dict) else {entry["name"]: entry["template"] for entry in value}
        return str(named["default"]), str(named["tool_use"]) if "tool_use" in named else None
    except (TypeError, LookupError) as error:
        raise ModelFilesError("chat_template must be text, or named templates with a default") from error


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
