"""Everything that reading and writing a model's text needs, from the files that its workers serve."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quartet.errors import ConfigError, InvalidRequestError, ModelFilesError
from quartet.media.media_id import preprocessing_fingerprint
from quartet.text import model_files
from quartet.text.chat_message import ChatMessage, Tool
from quartet.text.chat_template import ChatTemplate
from quartet.text.json_object import JsonObject
from quartet.text.parse import NO_PARSER, choose_format, choose_parsers
from quartet.text.parsed import OutputFormat
from quartet.text.tokenizer import EncodeLimit, Tokenizer

logger = logging.getLogger(__name__)

_ABSURD_VOCAB_SIZE = 10**9

# What begins the reasoning in a prompt has fewer tokens, also where its marker is none.
_END_TOKENS = 24


@dataclass(frozen=True)
class MediaText:
    """How a model that takes media shows them in its text.

    Attributes:
        placeholder_id: the token that stands for an item: once each as prompts come, later once for each of its tokens.
        preprocessing_fingerprint: as ``quartet.media.media_id`` makes it; items are named by it.
    """

    placeholder_id: int
    preprocessing_fingerprint: bytes


@dataclass(frozen=True)
class ModelText:
    """A model's text side.

    Attributes:
        tokenizer: text to ids and back.
        chat_template: ``None`` if the model has none: it then takes no messages.
        eos_token_ids: any of them ends a generation; in the files' order, without repeats.
        vocab_size: number of rows of the model's embedding table: every id below it may be sent.
        media: ``None`` if the model takes text only.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    media: MediaText | None = None
    _formats: dict[tuple[str, str], OutputFormat] = field(default_factory=dict, init=False, repr=False, compare=False)
    _parsers: dict[tuple[str, str], tuple[str, str]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> ModelText:
        """Build from files named as in a Hugging Face checkpoint; see ``model_files.TEXT_FILE_NAMES``.

        Raises:
            ModelFilesError: ``tokenizer.json`` is missing or a file is malformed.
        """
        tokenizer = Tokenizer.from_files(files)
        whole_config = model_files.parse_json_file(files, model_files.CONFIG)
        config = _text_config(whole_config)
        generation = model_files.parse_json_file(files, model_files.GENERATION_CONFIG)
        eos_token_ids = _token_ids(generation.get("eos_token_id", config.get("eos_token_id")))
        if tokenizer.eos_token_id is not None:
            # Chat models often name the turn's end here and only the document's end there.
            eos_token_ids += (tokenizer.eos_token_id,)
        return cls(
            tokenizer=tokenizer,
            chat_template=ChatTemplate.from_files(files, tokenizer.special_tokens),
            eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
            vocab_size=_vocab_size(config) or tokenizer.vocab_size,
            media=_media_text(whole_config, tokenizer, files),
        )

    def parsers(self, reasoning_parser: str = "", tool_call_parser: str = "") -> tuple[str, str]:
        """The parsers of its answers to chats, as workers name them: ``""``: the chat template's, ``none``: none.

        Returns:
            Names that ``output_format`` takes; empty: there is none, or a newer worker named one that is unknown here.
        """
        key = reasoning_parser, tool_call_parser
        known = self._parsers.get(key)
        if known is None:
            template = "" if self.chat_template is None else self.chat_template.sources
            try:
                known = choose_parsers(_as_chosen(key[0]), _as_chosen(key[1]), chat_template=template)
            except ConfigError as error:
                logger.warning("answers are not parsed: %s", error)
                known = "", ""
            self._parsers[key] = known
        return known

    def output_format(self, reasoning_parser: str, tool_call_parser: str) -> OutputFormat:
        """How output is parsed by parsers of these names; empty: such parts stay in the text.

        Raises:
            ConfigError: they are unknown here, or don't go together.
        """
        key = reasoning_parser, tool_call_parser
        known = self._formats.get(key)
        if known is None:
            format = choose_format(reasoning_parser, tool_call_parser)
            known = self._formats[key] = OutputFormat(
                format=format,
                reasoning_parser=reasoning_parser,
                tool_call_parser=tool_call_parser,
                shown=self.tokenizer.special_tokens_where(format.needs),
            )
        return known

    def prompt_end(self, prompt_token_ids: Sequence[int]) -> str:
        """The end of a prompt's text, special tokens included."""
        return self.tokenizer.decode(prompt_token_ids[-_END_TOKENS:], skip_special_tokens=False)

    def encode_text(self, text: str, limit: EncodeLimit | None = None, *, add_special_tokens: bool = True) -> list[int]:
        """Turn a plain prompt into ids, by default with the special tokens that the model wants around it.

        Raises:
            InvalidRequestError: see ``Tokenizer.encode``, also for ``limit``.
        """
        return self.tokenizer.encode(text, add_special_tokens, field="text", limit=limit)

    def encode_messages(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Tool] = (),
        arguments: JsonObject | None = None,
        limit: EncodeLimit | None = None,
    ) -> list[int]:
        """Turn a chat into ids, with placeholders where the template puts its media.

        Raises:
            InvalidRequestError: the model has no chat template, or a placeholder is spelled out in a text; see also
                ``ChatTemplate.render`` and, for ``limit``, ``Tokenizer.encode``.
        """
        if self.chat_template is None:
            raise InvalidRequestError("this model has no chat template; send text or token ids", field="messages")
        self._refuse_spelled_placeholders(messages)
        max_length = None if limit is None else limit.max_tokens * self.tokenizer.longest_token_bytes
        rendered = self.chat_template.render(
            messages,
            add_generation_prompt,
            tools=tools,
            arguments={} if arguments is None else arguments.value("template_arguments"),
            max_length=max_length,
        )
        # The template writes the beginning's token itself.
        return self.tokenizer.encode(rendered, add_special_tokens=False, field="messages", limit=limit)

    def _refuse_spelled_placeholders(self, messages: Sequence[ChatMessage]) -> None:
        """In a chat only the template writes placeholders: one in a text would move the media behind it by one."""
        placeholder = None if self.media is None else self.tokenizer.token_text(self.media.placeholder_id)
        # Pieces of text are written side by side.
        if placeholder and any(placeholder in text for message in messages for text in _texts(message)):
            message = "the text of a message spells out the model's media placeholder"
            raise InvalidRequestError(message, field="messages")


def _as_chosen(name: str) -> str | None:
    return None if not name else "" if name == NO_PARSER else name


def _texts(message: ChatMessage) -> Iterator[str]:
    """All that its client wrote."""
    yield message.text
    if message.reasoning:
        yield message.reasoning
    for call in message.tool_calls:
        yield call.arguments.text


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A multimodal model's config holds its language model's; what that leaves out counts from outside."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _media_text(config: Mapping[str, Any], tokenizer: Tokenizer, files: Mapping[str, bytes]) -> MediaText | None:
    placeholder_id = model_files.placeholder(config, tokenizer.token_to_id)
    if placeholder_id is None:
        return None
    if type(placeholder_id) is not int or placeholder_id < 0:
        raise ModelFilesError("image_token_index must be an id")
    return MediaText(placeholder_id, preprocessing_fingerprint(files))


def _token_ids(value: Any) -> tuple[int, ...]:
    """An id, a list of ids, or nothing."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in values):  # True is an int to isinstance
        raise ModelFilesError("eos_token_id must be an id or a list of ids")
    return tuple(values)


def _vocab_size(config: Mapping[str, Any]) -> int | None:
    """The model's own figure, if it is a possible one."""
    size = config.get("vocab_size")
    return size if isinstance(size, int) and 0 < size < _ABSURD_VOCAB_SIZE else None
