"""What a client calls each item of its media, so that a refusal names the one at fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quartet.errors import InvalidRequestError
from quartet.kvcache.media_spans import check_placeholders
from quartet.media.items import MediaFile, MediaKind, MediaPart, MediaUrl
from quartet.rpc.edge import ChatPrompt, GenerateStart
from quartet.text.model_text import MediaText


def named_parts(start: GenerateStart) -> tuple[Sequence[MediaPart], Sequence[str]]:
    """The items of a request, and the field of each: ``media[1].url``, ``chat.messages[0].parts[1].media.data``.

    Raises:
        InvalidRequestError: a chat has media beside its messages.
    """
    if not isinstance(start.prompt, ChatPrompt):
        return start.media, [f"media[{number}].{_source(part)}" for number, part in enumerate(start.media)]
    if start.media:
        raise InvalidRequestError("the media of a chat are in its messages", field="media")
    named = list(_chat_parts(start.prompt))
    return [part for part, _field in named], [field for _part, field in named]


def item_field(field: str) -> str:
    """The item itself, whose source ``field`` is."""
    return field.rpartition(".")[0]


def check_items(start: GenerateStart, token_ids: Sequence[int], media: MediaText, fields: Sequence[str]) -> None:
    """Refuse a prompt without exactly one placeholder for each item, of which ``fields`` are.

    Raises:
        InvalidRequestError: naming the first item that has no place, where that can be told.
    """
    try:
        check_placeholders(token_ids, media.placeholder_id, len(fields))
    except InvalidRequestError as error:
        num_places, is_chat = token_ids.count(media.placeholder_id), isinstance(start.prompt, ChatPrompt)
        # Which of its items a chat's template left out can't be told, unless it is all of them.
        if num_places < len(fields) and not (is_chat and num_places):
            field = item_field(fields[num_places])
        else:
            field = "chat.messages" if is_chat else "media"
        raise InvalidRequestError(error.message, field=field) from error


def _chat_parts(prompt: ChatPrompt) -> Iterator[tuple[MediaPart, str]]:
    for message_number, message in enumerate(prompt.messages):
        for number, part in enumerate(message.pieces):
            if isinstance(part, MediaFile | MediaUrl):
                yield part, f"chat.messages[{message_number}].parts[{number}].media.{_source(part)}"


def _source(part: MediaPart) -> str:
    if isinstance(part, MediaUrl):
        return "url"
    return "data" if isinstance(part, MediaFile) and part.kind is MediaKind.IMAGE else "embeddings"
