"""What an API calls the fields of a request that failed."""

from __future__ import annotations

import pytest

from quartet.api.field_names import FieldNames
from quartet.errors import InvalidRequestError, QueueFullError

NAMES = FieldNames(
    {
        "chat.messages": "input",
        "chat.messages[1]": "input[4]",
        "chat.messages[1].tool_calls[0]": "input[5]",
        "chat.messages[2].parts[1].media": "input[6].content[1].image_url",
        "sampling.max_tokens": "max_output_tokens",
    },
    {"arguments": "input"},
)


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("chat.messages", "input"),
        ("chat.messages[1]", "input[4]"),
        ("chat.messages[1].name", "input[4].name"),
        ("chat.messages[1].tool_calls[0].arguments", "input[5].input"),
        ("chat.messages[1].tool_calls[3].id", "input[4].tool_calls[3].id"),
        ("chat.messages[2].parts[1].media", "input[6].content[1].image_url"),
        ("chat.messages[11].content", "input[11].content"),
        ("chat.tool_name", "tool_choice"),
        ("chat.tools[3].name", "tools[3].name"),
        ("sampling.max_tokens", "max_output_tokens"),
        ("sampling.temperature", "temperature"),
        ("client_request_id", "request_id"),
        ("adapter", "model"),
        ("output_config.format", "output_config.format"),
        ("input[4].output[0].text", "input[4].output[0].text"),
    ],
)
def test_a_field_is_called_by_the_longest_path_that_is_known(field: str, name: str) -> None:
    assert NAMES.of(field) == name
    error = InvalidRequestError("why", field=field)
    NAMES.rename(error)
    assert error.field == name
    NAMES.rename(nameless := QueueFullError("full"))
    assert nameless.field is None


def test_a_request_that_runs_keeps_the_names_of_its_pictures_and_of_what_is_no_message() -> None:
    paths = {f"chat.messages[{number}]": f"input[{number}]" for number in range(100)}
    kept = FieldNames({**paths, **NAMES.paths, "chat.messages": "input"}, {}).of_media()
    assert set(kept.paths) == {"chat.messages", "chat.messages[2].parts[1].media", "sampling.max_tokens"}
    assert NAMES.of_media() is NAMES
