"""What llguidance makes of a request's grammar: its own notation, bounds, and refusals that name the keyword."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from quartet.engine.sampling import GrammarKind, GuidedDecoding, check_encodable
from quartet.errors import InvalidRequestError, UnsupportedFieldError
from quartet.text.json_schema import exact, unfollowable
from quartet.text.lark import ANY_TEXT, JSON_OPTIONS, SpecialToken, json_rule, literals, quoted, text_until

#: The field that refusals name.
FIELD = "sampling.guided"

#: What a grammar may take while it is followed: 30 MB of states; what a mask may take, ``masks`` bounds by time. They
#: don't bound what reading it takes: ``checker`` does.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=150_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    # An error would otherwise show thousands of characters of the parser's state.
    verbose_errors=False,
)

# Several times the stack that a router's check has for the same grammar.
_STACK_SIZE, _STACK_LOCK = 16 << 20, threading.Lock()
_MAX_TAGS = 1024
_MAX_MESSAGE_LENGTH = 300
# llguidance names what it lacks so.
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")
_LAST_ESCAPE = re.compile(r"(?<!\\)(\\\\)*\\\Z")
_ONE_OF = re.compile(r"oneOf constraints are not supported")


def llguidance_grammar(guided: GuidedDecoding, special_token: SpecialToken) -> str:
    """``guided`` in llguidance's notation, which a compiler still may refuse.

    Raises:
        InvalidRequestError: it is not even of its kind.
        UnsupportedFieldError: it has a part that can't be followed here.
    """
    match guided.kind:
        case GrammarKind.JSON_SCHEMA:
            return _of_schema(guided.text)
        case GrammarKind.REGEX:
            if _LAST_ESCAPE.search(guided.text):  # what follows the expression would be escaped
                raise InvalidRequestError("the grammar (regex) ends with a lone backslash", field=FIELD)
            return llguidance.LLMatcher.grammar_from_regex(guided.text)
        case GrammarKind.EBNF:
            return _of_ebnf(guided.text)
        case GrammarKind.LARK:
            return llguidance.LLMatcher.grammar_from_lark(guided.text)
        case GrammarKind.CHOICE:
            lark = "start: " + " | ".join(map(quoted, choices_of(guided.text)))
        case GrammarKind.STRUCTURAL_TAG:
            lark = _of_structural_tag(guided.text, special_token)
    check_encodable(lark)  # the texts in it were JSON
    return llguidance.LLMatcher.grammar_from_lark(lark)


@contextmanager
def deep_stacks() -> Iterator[None]:
    """Threads that begin meanwhile have stacks on which any grammar can be read that routers let pass."""
    with _STACK_LOCK:  # the size is the whole process's
        usual = threading.stack_size(_STACK_SIZE)
        try:
            yield
        finally:
            threading.stack_size(usual)


def check_grammar(guided: GuidedDecoding, special_token: SpecialToken = lambda _text: None) -> None:
    """Refuse a grammar that no tokenizer could make followable. Takes milliseconds, a large one hundreds of them.

    Raises:
        InvalidRequestError: it is malformed, or too large.
        UnsupportedFieldError: it has a part that can't be followed; names the keyword.
    """
    grammar = llguidance_grammar(guided, special_token)
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, None, limits=LIMITS)
    if is_error:
        raise refusal(guided.kind, messages[0])


def refusal(kind: GrammarKind, message: str) -> InvalidRequestError:
    """The error for what llguidance says of a grammar that it can't compile."""
    what = "the JSON schema" if kind is GrammarKind.JSON_SCHEMA else f"the grammar ({kind})"
    if found := _UNIMPLEMENTED.search(message):
        names = ", ".join(json.loads(found[1]))
        return UnsupportedFieldError(f"{what} has a keyword that can't be followed: {names}", field=FIELD)
    if _ONE_OF.search(message):
        return UnsupportedFieldError(
            f"{what} has a keyword that can't be followed: oneOf, where more than one part may hold", field=FIELD
        )
    return InvalidRequestError(f"{what} can't be followed: {_shortened(message)}", field=FIELD)


def choices_of(text: str) -> list[str]:
    """The texts of a grammar of the kind ``CHOICE``, as ``guided_choice`` makes them."""
    choices: list[str] = json.loads(text)
    return choices


def _of_schema(text: str) -> str:
    schema = _parsed(text, "the JSON schema is no JSON")
    if isinstance(schema, dict):
        check_followable(schema)
        try:
            return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(exact(schema)), JSON_OPTIONS)
        except (ValueError, RecursionError) as error:  # it is nested deeper than llguidance reads
            raise refusal(GrammarKind.JSON_SCHEMA, str(error)) from error
    if isinstance(schema, bool):  # llguidance takes objects only
        return llguidance.LLMatcher.grammar_from_lark(f'start: %json {{"allOf": [{text}]}}')
    raise InvalidRequestError("a JSON schema is an object", field=FIELD)


def check_followable(schema: Any) -> None:
    """Refuse a JSON schema of which the compiler would take more than it allows. Raises ``UnsupportedFieldError``."""
    if keyword := unfollowable(schema):
        raise UnsupportedFieldError(f"the JSON schema has a keyword that can't be followed: {keyword}", field=FIELD)


def _of_ebnf(text: str) -> str:
    try:
        lark = any_to_lark(text)
    except Exception as error:  # it raises plain Exception, whatever is wrong
        raise InvalidRequestError(f"the grammar is no EBNF: {_shortened(str(error))}", field=FIELD) from error
    return llguidance.LLMatcher.grammar_from_lark(lark)


def _of_structural_tag(text: str, special_token: SpecialToken) -> str:
    """Text with tags in it: after a trigger, one of the tags that begin with it, with JSON up to its end."""
    triggers, tags, is_needed = _read_tags(_parsed(text, "the structural tag is no JSON"))
    rules, names = [], []
    for number, (begin, schema, end) in enumerate(tags):
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise InvalidRequestError(f"no trigger begins the tag {_shortened(begin)!r}", field=FIELD)
        names.append(f"tag_{number}")
        before, line = text_until(f"text_{number}", trigger, special_token)
        rest = literals(begin[len(trigger) :], special_token)
        rules += [f"tag_{number}: {before} {rest} {schema} {literals(end, special_token)}", line]
    repeat = "+" if is_needed else "*"
    return "\n".join([f"start: ({' | '.join(names)}){repeat} TEXT", *rules, f"TEXT: {ANY_TEXT}"])


def _read_tags(value: Any) -> tuple[list[str], list[tuple[str, str, str]], bool]:
    """Triggers, the tags' begins, grammars and ends, and whether there must be one."""
    if not isinstance(value, dict) or value.get("type") != "structural_tag":
        raise InvalidRequestError('a structural tag is an object with "type": "structural_tag"', field=FIELD)
    is_needed = False
    if "format" in value:
        form = value["format"]
        if not isinstance(form, dict) or form.get("type") != "triggered_tags":
            kind = form.get("type") if isinstance(form, dict) else form
            raise UnsupportedFieldError(f"the format {kind!r} of a structural tag can't be followed", field=FIELD)
        if form.get("stop_after_first") or form.get("excludes"):
            raise UnsupportedFieldError("stop_after_first and excludes of tags can't be followed", field=FIELD)
        triggers, tags = form.get("triggers"), form.get("tags")
        is_needed = bool(form.get("at_least_one"))
        tags = [_with_schema(tag) for tag in tags] if isinstance(tags, list) else None
    else:
        triggers, tags = value.get("triggers"), value.get("structures")
    if not _is_list_of(triggers, str) or not _is_list_of(tags, dict):
        raise InvalidRequestError("a structural tag needs lists of triggers and of structures", field=FIELD)
    assert isinstance(triggers, list) and isinstance(tags, list)
    if len(tags) > _MAX_TAGS or len(triggers) > _MAX_TAGS:
        raise InvalidRequestError(f"a structural tag may have {_MAX_TAGS} structures", field=FIELD)
    return triggers, [_read_tag(tag) for tag in tags], is_needed


def _with_schema(tag: Any) -> Any:
    content = tag.get("content") if isinstance(tag, dict) else None
    if not isinstance(content, dict) or content.get("type") != "json_schema":
        kind = content.get("type") if isinstance(content, dict) else content
        raise UnsupportedFieldError(f"the content {kind!r} of a tag can't be followed: json_schema can", field=FIELD)
    return {"begin": tag.get("begin"), "end": tag.get("end"), "schema": content.get("json_schema")}


def _read_tag(tag: Mapping[str, Any]) -> tuple[str, str, str]:
    begin, end, schema = tag.get("begin"), tag.get("end", ""), tag.get("schema", {})
    end = end[0] if isinstance(end, list) and len(end) == 1 else end
    if not isinstance(begin, str) or not begin or not isinstance(end, str) or not isinstance(schema, dict):
        raise InvalidRequestError("a structure has a begin, a schema and an end", field=FIELD)
    check_followable(schema)
    return begin, json_rule(schema), end


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, kind) and one for one in value)


def _parsed(text: str, message: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(message, field=FIELD) from error


def _shortened(message: str) -> str:
    message = " ".join(message.split())
    return message if len(message) <= _MAX_MESSAGE_LENGTH else f"{message[:_MAX_MESSAGE_LENGTH]} ..."
