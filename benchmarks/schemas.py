"""The JSON Schema test suite as the referee of guided decoding: what compiles, what is refused, and what is wrong.

Each schema of draft 2020-12, which llguidance follows, is compiled as an engine does. Of those that compile, an
instance counts as accepted if the grammar accepts one of its texts: compact, on one line, indented, its properties in
any order (outputs have the schema's), a whole number with or without ".0". An invalid one must have no such text.

    tools/schema_suite.sh
    python -m benchmarks.schemas --json FILE [--suite DIRECTORY]
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llguidance

from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from quartet.engine.guided.compiler import Compiled, GrammarCompiler
from quartet.engine.guided.grammar import check_grammar
from quartet.engine.guided.masks import Guide
from quartet.engine.sampling import GrammarKind, GuidedDecoding
from quartet.errors import ServingError

_REPOSITORY = Path(__file__).resolve().parents[1]
_MODEL = _REPOSITORY / "models/tiny/checkpoint"
#: Where ``tools/schema_suite.sh`` puts the suite.
SUITE = _REPOSITORY / ".tools/schema-suite"
DRAFT = "draft2020-12"

_MAX_ORDERS = 2_000
_WAIT_S = 60.0
_KEYWORDS = re.compile(r"a keyword that can't be followed: (.*)")
_NOTHING = "nothing satisfies it"
# Refusals that name no keyword, by what they say.
_OTHER_REFUSALS: Mapping[str, str] = {
    r"is not present in a registry|does not fetch|Pointer .* does not exist": "reference to another document",
    r"Unsatisfiable schema": _NOTHING,
    r"Unknown format: (?P<name>.*)": "unknown format",
    r"Expected positive integer": "count written as 2.0",
    r"float range|too many digits": "number of more than 64 bits",
    r"are not disjoint": "patterns of properties that overlap",
    r"regex": "pattern with an escape that Rust's regular expressions lack",
}


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """An instance about which the grammar and the suite differ.

    Attributes:
        reason: why, if that is known of a whole class of instances; else empty.
    """

    file: str
    schema: str
    instance: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the suite.

    Attributes:
        refused_by_keyword: schemas whose refusal names the keyword; a schema may have several.
        refused_otherwise: schemas by what their refusal says; if it says that nothing satisfies them, each valid
            instance is wrong.
        num_valid, num_invalid: instances of the schemas that compiled.
        num_reordered: valid instances accepted only with properties in another order than the suite's.
        num_whole: valid instances accepted only with 1 for 1.0.
    """

    num_schemas: int
    num_compiled: int
    num_refused_by_keyword: int
    refused_by_keyword: Mapping[str, int]
    refused_otherwise: Mapping[str, int]
    num_valid: int
    num_invalid: int
    num_reordered: int
    num_whole: int
    accepted_though_invalid: Sequence[Wrong]
    refused_though_valid: Sequence[Wrong]


@dataclass(frozen=True, kw_only=True)
class Results:
    """The suite's main part and its optional one."""

    draft: str
    suite: str
    main: Part
    optional: Part


def main() -> int:
    """Run the command line; the exit code is 1 without a suite, and if an invalid instance is accepted."""
    parser = make_parser("schemas", __doc__)
    parser.add_argument(
        "--suite", type=Path, default=SUITE, metavar="DIRECTORY", help="with a directory for each draft"
    )
    arguments = parser.parse_args()
    if not (arguments.suite / DRAFT).is_dir():
        print(f"no suite in {arguments.suite}: run tools/schema_suite.sh", file=sys.stderr)
        return 1
    report = Report("schemas", packages=("jsonschema", "llguidance"), revision=arguments.commit)
    with LiveLine() as line:
        results = judge(arguments.suite, line.say)
    report.write(results, arguments.json)
    return int(any(part.accepted_though_invalid for part in (results.main, results.optional)))


def judge(suite: Path, say: Callable[[str], None]) -> Results:
    """Judge both parts of the draft in ``suite``; ``say`` is given a line for each, and for each wrong."""
    judging = Grammars()
    directory, source = suite / DRAFT, suite / ".from"
    try:
        parts = {
            "main": _judge_part(judging, sorted(directory.glob("*.json")), directory),
            "optional": _judge_part(judging, sorted((directory / "optional").rglob("*.json")), directory),
        }
    finally:
        judging.close()
    for name, part in parts.items():
        say(_describe(name, part))
        for wrong in part.accepted_though_invalid:
            say(f"accepted though invalid: {wrong.file}: {wrong.schema}: {wrong.instance} {wrong.reason}")
        for wrong in part.refused_though_valid:
            why = wrong.reason or "unexplained"
            say(f"refused though valid: {wrong.file}: {wrong.schema}: {wrong.instance} ({why})")
    return Results(draft=DRAFT, suite=source.read_text().strip() if source.exists() else "unknown", **parts)


class Grammars:
    """Compiles schemas for the tiny model as an engine does, and says what their grammars accept."""

    def __init__(self) -> None:
        """Read the model's tokenizer."""
        source = (_MODEL / "tokenizer.json").read_text(encoding="utf-8")
        config = json.loads((_MODEL / "config.json").read_text(encoding="utf-8"))
        vocab_size, eos_id = config["text_config"]["vocab_size"], config["eos_token_id"]
        self._compiler = GrammarCompiler(source, vocab_size, [eos_id])
        self._tokenizer = llguidance.LLTokenizer(source, n_vocab=vocab_size, eos_token=[eos_id])

    def compile(self, schema: Any) -> Compiled:
        """What an engine makes of ``schema``.

        Raises:
            RuntimeError: a router would say something else.
        """
        guided = GuidedDecoding(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        compiled, refused = self._compile(guided), None
        try:
            check_grammar(guided)
        except ServingError as error:
            refused = error
        if isinstance(compiled, Guide) != (refused is None):
            raise RuntimeError(f"the router says {refused!r} of {schema!r}, the engine {compiled!r}")
        return compiled

    def accepts(self, guide: Guide, text: str) -> bool:
        """Whether ``text`` is a whole output under a guide that has taken nothing."""
        matcher = guide.matcher.deep_copy()
        return bool(matcher.consume_tokens(self._tokenizer.tokenize_str(text)) and matcher.is_accepting())

    def close(self) -> None:
        """Compile nothing more."""
        self._compiler.close()

    def _compile(self, guided: GuidedDecoding) -> Compiled:
        found, ended = list[Compiled](), threading.Event()

        def end(compiled: Compiled) -> None:
            found.append(compiled)
            ended.set()

        self._compiler.compile(guided, end, lambda: True)
        if not ended.wait(_WAIT_S):
            raise RuntimeError(f"not compiled in {_WAIT_S:g} s: {guided.text}")
        return found[0]


def texts_of(value: Any, *, is_whole: bool, is_ordered: bool) -> Iterator[str]:
    """JSON texts of ``value`` in the layouts that outputs may have.

    Args:
        value: the value.
        is_whole: write 1.0 as 1.
        is_ordered: keep the order of properties; else in many orders.
    """
    for ordered in [value] if is_ordered else itertools.islice(_orders(value), _MAX_ORDERS):
        item = _whole(ordered) if is_whole else ordered
        yield json.dumps(item, ensure_ascii=False, separators=(",", ":"))
        yield json.dumps(item, ensure_ascii=False)
        yield json.dumps(item, ensure_ascii=False, indent=2)
        yield json.dumps(item, indent=4)


def _judge_part(grammars: Grammars, files: Sequence[Path], directory: Path) -> Part:
    keywords, others, counts = Counter[str](), Counter[str](), Counter[str]()
    accepted, refused = list[Wrong](), list[Wrong]()
    for file in files:
        name = str(file.relative_to(directory))
        for case in json.loads(file.read_text(encoding="utf-8")):
            counts["schemas"] += 1
            guide = grammars.compile(case["schema"])
            if isinstance(guide, ServingError):
                named = _KEYWORDS.search(guide.message)
                counts["by keyword"] += named is not None
                keywords.update(named[1].split(", where ")[0].split(", ") if named else ())
                others.update(() if named else [other := _other_refusal(guide.message)])
                if not named and other == _NOTHING:
                    refused += [
                        Wrong(file=name, schema=case["description"], instance=test["description"], reason="")
                        for test in case["tests"]
                        if test["valid"]
                    ]
                continue
            counts["compiled"] += 1
            for test in case["tests"]:
                way = _way_of(grammars, guide, test["data"])
                counts[f"valid {test['valid']}"] += 1
                counts[way or ""] += test["valid"]
                if (way is not None) != test["valid"]:
                    reason = _reason(name, case["schema"], test["data"]) if test["valid"] else ""
                    wrong = Wrong(file=name, schema=case["description"], instance=test["description"], reason=reason)
                    (refused if test["valid"] else accepted).append(wrong)
    return Part(
        num_schemas=counts["schemas"],
        num_compiled=counts["compiled"],
        num_refused_by_keyword=counts["by keyword"],
        refused_by_keyword=dict(keywords.most_common()),
        refused_otherwise=dict(others.most_common()),
        num_valid=counts["valid True"],
        num_invalid=counts["valid False"],
        num_reordered=counts["reordered"],
        num_whole=counts["whole"],
        accepted_though_invalid=accepted,
        refused_though_valid=refused,
    )


def _way_of(grammars: Grammars, guide: Guide, value: Any) -> str | None:
    """How ``value`` must be written to be accepted; ``None``: it is not."""
    ways = {"as it is": (False, True), "whole": (True, True), "reordered": (True, False)}
    for way, (is_whole, is_ordered) in ways.items():
        texts = texts_of(value, is_whole=is_whole, is_ordered=is_ordered)
        if any(grammars.accepts(guide, text) for text in texts):
            return way
    return None


def _orders(value: Any) -> Iterator[Any]:
    """``value`` with properties in all orders, the given one first."""
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for parts in itertools.product(*(list(itertools.islice(_orders(value[name]), 6)) for name in names)):
                yield dict(zip(names, parts, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(itertools.islice(_orders(item), 6)) for item in value)))
    else:
        yield value


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _other_refusal(message: str) -> str:
    for pattern, reason in _OTHER_REFUSALS.items():
        if found := re.search(pattern, message):
            name = found.groupdict().get("name")
            return f"{reason}: {name}" if name else reason
    return message


def _reason(file: str, schema: Any, value: Any) -> str:
    """Why a valid instance is refused, as far as that is known."""
    text = value if isinstance(value, str) else ""
    if file == "format.json":
        return "formats are asserted, as the suite's optional part asks; its main part takes them for annotations"
    if file == "optional/format/email.json" and (text.startswith('"') or "@[IPv6:" in text):
        return "e-mail addresses have no quoted name and no IPv6 address"
    if ":60" in text and schema.get("format") in ("time", "date-time"):
        return "a leap second is written in UTC"
    if re.fullmatch(r"[\x00-\x1f\x7f]", text) and text not in "\b\t\n\f\r":
        return "a control character without a short escape is not written"
    return ""


def _describe(name: str, part: Part) -> str:
    reasons = Counter(wrong.reason for wrong in part.refused_though_valid)
    return (
        f"{name}: {part.num_compiled} of {part.num_schemas} schemas compiled, {part.num_refused_by_keyword} refused by "
        f"keyword; {len(part.accepted_though_invalid)} of {part.num_invalid} invalid instances accepted, "
        f"{len(part.refused_though_valid)} of {part.num_valid} valid ones refused, {reasons['']} of them unexplained"
    )


if __name__ == "__main__":
    sys.exit(main())
