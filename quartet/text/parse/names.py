"""The parsers by name, and which of them a chat template calls for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from quartet.errors import ConfigError
from quartet.text.parse import formats
from quartet.text.parse.formats import CallTable, ReasoningTable, join_tables
from quartet.text.parse.states import Format

REASONING_PARSERS: Mapping[str, ReasoningTable | Callable[..., Format]] = {
    **dict.fromkeys(("deepseek_r1", "glm45", "qwen3"), formats.SPACED_REASONING),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), formats.PLAIN_REASONING),
    "gemma4": formats.GEMMA4_REASONING,
    "gpt_oss": formats.harmony,
    "kimi_k3": formats.kimi_k3,
    "mistral": formats.MISTRAL_REASONING,
}
TOOL_CALL_PARSERS: Mapping[str, CallTable | Callable[..., Format]] = {
    "deepseek_v3": formats.DEEPSEEK_V3,
    "deepseek_v3_1": formats.DEEPSEEK_V31,
    "deepseek_v3_2": formats.DEEPSEEK_DSML,
    "gemma4": formats.GEMMA4,
    "glm45": formats.GLM,
    "harmony": formats.harmony,
    "hermes": formats.HERMES,
    "kimi_k2": formats.KIMI_K2,
    "kimi_k3": formats.kimi_k3,
    "llama3_json": formats.LLAMA3_JSON,
    "mistral": formats.MISTRAL,
    "pythonic": formats.PYTHONIC,
    "qwen3_coder": formats.QWEN3_XML,
}
#: As the name of a parser in configurations: such parts stay in the text.
NO_PARSER = "none"
_ALIASES: Mapping[str, str] = {
    "deepseek_v31": "deepseek_v3_1",
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "deepseek_v41"), "deepseek_v3_2"),
    "glm47": "glm45",
    "llama4_pythonic": "pythonic",
    "openai": "harmony",
    "openai_gptoss": "gpt_oss",
    "qwen3_xml": "qwen3_coder",
}
# Texts in a template, its reasoning parser, a text without which there is no reasoning, its tool-call parser.
_TEMPLATES: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (("<|channel|>", "<|message|>"), "gpt_oss", "", "harmony"),
    (("<|open|>", "<|sep|>"), "kimi_k3", "", "kimi_k3"),
    (("｜DSML｜",), "deepseek_v3", "</think>", "deepseek_v3_2"),
    (("<｜tool▁sep｜>", "```json"), "deepseek_r1", "</think>", "deepseek_v3"),
    (("<｜tool▁sep｜>",), "deepseek_v3", "</think>", "deepseek_v3_1"),
    (("<|tool_calls_section_begin|>",), "kimi_k2", "</think>", "kimi_k2"),
    (("<|tool_call>",), "gemma4", "<|channel>", "gemma4"),
    (("<arg_key>",), "glm45", "</think>", "glm45"),
    (("<function=",), "qwen3", "</think>", "qwen3_coder"),
    (("<tool_call>",), "qwen3", "</think>", "hermes"),
    (("[TOOL_CALLS]",), "mistral", "[THINK]", "mistral"),
    (('{"name": function name, "parameters"',), "", "", "llama3_json"),  # Llama 4's own template asks for it, too
    (("<|header_start|>",), "", "", "pythonic"),
    (("</think>",), "qwen3", "", ""),
)


def choose_parsers(
    reasoning_parser: str | None = None, tool_call_parser: str | None = None, *, chat_template: str = ""
) -> tuple[str, str]:
    """Names of ``REASONING_PARSERS`` and ``TOOL_CALL_PARSERS`` for a model; ``""``: such parts stay in the content.

    ``None``: the one that ``chat_template``, a source, calls for, if any, and if it goes with the one that is named.

    Raises:
        ConfigError: a name is unknown, or the two that are named don't go together.
    """
    fitting = (row[1:] for row in _TEMPLATES if all(text in chat_template for text in row[0]))
    reasoning, text, calls = next(fitting, ("", "", ""))
    reasoning = reasoning if text in chat_template else ""
    reasoning = _known(reasoning if reasoning_parser is None else reasoning_parser, REASONING_PARSERS)
    calls = _known(calls if tool_call_parser is None else tool_call_parser, TOOL_CALL_PARSERS)
    made = [REASONING_PARSERS.get(reasoning), TOOL_CALL_PARSERS.get(calls)]
    if not any(map(callable, made)) or None in made or made[0] is made[1]:
        return reasoning, calls
    if reasoning_parser is not None and tool_call_parser is not None:
        raise ConfigError(f"the parsers {reasoning} and {calls} don't go together")
    return ("", calls) if reasoning_parser is None else (reasoning, "")


@cache
def choose_format(reasoning_parser: str = "", tool_call_parser: str = "") -> Format:
    """The format that two parsers read, named as by ``choose_parsers``. Raises ``ConfigError`` as that does."""
    names = choose_parsers(reasoning_parser, tool_call_parser)
    reasoning, calls = REASONING_PARSERS.get(names[0]), TOOL_CALL_PARSERS.get(names[1])
    if callable(reasoning):
        return reasoning(has_reasoning=True, has_calls=calls is not None)
    if callable(calls):
        return calls(has_reasoning=False, has_calls=True)
    return join_tables(reasoning, calls)


def _known(name: str, parsers: Mapping[str, object]) -> str:
    name = name if name in parsers else _ALIASES.get(name, name)
    if name and name not in parsers:
        raise ConfigError(f"no parser is called {name}; there are {', '.join(parsers)}")
    return name
