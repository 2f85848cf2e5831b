"""Guided answers while their worker is killed: does each one follow its schema, with the bytes of an undisturbed run?

Ten schemas are answered by one Prefill and two Decode workers. Once all answers have begun, the Decode worker with most
of them is killed (SIGKILL), and started again a second later. Each answer is validated with ``jsonschema`` and
compared with the same request without the kill.

    python -m benchmarks.guided_kill --json FILE [--plot FILE.png]
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.chaos_fleet import Fleet, FleetConfig
from benchmarks.report import Report, make_parser
from quartet.api.request import Accepted, ChoiceFinished, Delta, Placed
from quartet.client import GrammarKind, GuidedDecoding, QuartetClient, Sampling
from quartet.engine.settings import EngineKind

_RESTART_S = 1.0
_TIMEOUT_S = 60.0
_MAX_TOKENS = 400


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_WORDS = {"type": "string", "minLength": 30, "maxLength": 60}
_COUNT = {"type": "integer", "minimum": -999, "maximum": 99_999}
_SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "person": _object(name=_WORDS, age=_COUNT, is_member={"type": "boolean"}, about=_WORDS),
    "numbers": {"type": "array", "items": _COUNT, "minItems": 12, "maxItems": 14},
    "enums": {"type": "array", "items": {"enum": ["north", "east", "south"]}, "minItems": 14, "maxItems": 16},
    "nested": _object(place=_object(city=_WORDS, position=_object(x=_COUNT, y=_COUNT), note=_WORDS)),
    "dates": {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 6, "maxItems": 7},
    "pattern": {"type": "string", "pattern": "^([A-Z]{3}-[0-9]{4};){8}$"},
    "union": {"type": "array", "items": {"anyOf": [_COUNT, _object(word=_WORDS)]}, "minItems": 8, "maxItems": 9},
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": _object(name=_WORDS, children={"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1})
        },
    },
    "optional": {**_object(title=_WORDS, notes=_WORDS, more=_COUNT), "required": ["title", "notes"]},
    "tuple": {"type": "array", "prefixItems": [_WORDS, {"type": "boolean"}, _WORDS], "items": False, "minItems": 3},
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One guided answer beside the kill.

    Attributes:
        attempts: 2 or more: its worker was killed.
        pause_s: its longest time without a token.
        valid: it follows its schema.
        same: its text and tokens are those of the undisturbed run.
    """

    schema: str
    tokens: int
    tokens_at_kill: int
    attempts: int
    pause_s: float
    valid: bool
    same: bool
    text: str


@dataclass(frozen=True, kw_only=True)
class Results:
    """All answers. ``hit`` lost their worker; ``invalid`` and ``changed`` must be 0."""

    answers: list[Answer]
    hit: int
    invalid: int
    changed: int


@dataclass
class _Stream:
    """One answer as it comes; ``times`` has the arrival of each token, in seconds of the run."""

    name: str
    schema: Mapping[str, Any]
    number: int
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    decode: str = ""
    end: ChoiceFinished | None = None

    async def follow(self, client: QuartetClient, began: float) -> None:
        guided = GuidedDecoding(GrammarKind.JSON_SCHEMA, json.dumps(self.schema))
        sampling = Sampling(temperature=1.0, max_tokens=_MAX_TOKENS, guided=guided)
        async with client.generate(
            f"Story {self.number}:", sampling=sampling, seed=self.number, timeout_s=_TIMEOUT_S
        ) as parts:
            async for part in parts:
                if isinstance(part, Accepted) and part.choices:
                    self.decode = part.choices[0].decode.worker_id
                elif isinstance(part, Placed):
                    self.decode = part.placement.decode.worker_id
                elif isinstance(part, Delta):
                    self.token_ids += part.token_ids
                    self.times += [time.monotonic() - began] * len(part.token_ids)
                    self.text += part.text
                elif isinstance(part, ChoiceFinished):
                    self.end = part

    @property
    def is_valid(self) -> bool:
        try:
            jsonschema.validate(json.loads(self.text), self.schema)
        except (ValueError, jsonschema.ValidationError):
            return False
        return True


@dataclass(frozen=True)
class _Kill:
    worker: str
    at_s: float
    tokens: Sequence[int]


def main() -> None:
    """Run the command line; the exit code is 1 if an answer broke or changed."""
    parser = make_parser("guided_kill", __doc__ or "")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the answers' tokens over time")
    arguments = parser.parse_args()
    report = Report("guided_kill", packages=("llguidance", "jsonschema"), revision=arguments.commit)
    undisturbed, disturbed, kill = asyncio.run(_run())
    results = _results(undisturbed, disturbed, kill)
    report.write(results, arguments.json)
    if arguments.plot is not None:
        _plot(disturbed, kill, arguments.plot)
    sys.exit(bool(results.invalid or results.changed or not results.hit))


async def _run() -> tuple[list[_Stream], list[_Stream], _Kill]:
    settings = {"engine": {"num_blocks": 4096}}
    config = FleetConfig(engine=EngineKind.TORCH, num_prefill=1, num_decode=2, num_routers=1, worker_settings=settings)
    with tempfile.TemporaryDirectory(prefix="quartet-guided-") as directory:
        async with (
            Fleet(config, Path(directory), os.environ) as fleet,
            QuartetClient(fleet.router_addresses) as client,
        ):
            undisturbed = _streams()
            began = time.monotonic()
            await asyncio.gather(*(stream.follow(client, began) for stream in undisturbed))
            disturbed = _streams()
            began = time.monotonic()
            following = [asyncio.create_task(stream.follow(client, began)) for stream in disturbed]
            kill = await _kill(fleet, disturbed, began)
            await asyncio.gather(*following)
            return undisturbed, disturbed, kill


def _streams() -> list[_Stream]:
    return [_Stream(name, schema, number) for number, (name, schema) in enumerate(_SCHEMAS.items())]


async def _kill(fleet: Fleet, streams: Sequence[_Stream], began: float) -> _Kill:
    """Once all have begun, kill the worker that decodes most of them; start it again."""
    async with asyncio.timeout(_TIMEOUT_S):
        while any(len(stream.token_ids) < 3 for stream in streams):  # noqa: ASYNC110 - tokens set no event
            await asyncio.sleep(0.005)
    [(worker, _)] = Counter(stream.decode for stream in streams if stream.end is None).most_common(1)
    kill = _Kill(worker, time.monotonic() - began, [len(stream.token_ids) for stream in streams])
    await fleet.kill(worker)
    await asyncio.sleep(_RESTART_S)
    await fleet.start(worker)
    return kill


def _results(undisturbed: Sequence[_Stream], disturbed: Sequence[_Stream], kill: _Kill) -> Results:
    answers = [
        Answer(
            schema=stream.name,
            tokens=len(stream.token_ids),
            tokens_at_kill=at_kill,
            attempts=0 if stream.end is None else stream.end.usage.num_attempts,
            pause_s=round(max(later - earlier for earlier, later in pairwise(stream.times)), 3),
            valid=stream.is_valid,
            same=(stream.text, stream.token_ids) == (expected.text, expected.token_ids),
            text=stream.text,
        )
        for expected, stream, at_kill in zip(undisturbed, disturbed, kill.tokens, strict=True)
    ]
    return Results(
        answers=answers,
        hit=sum(answer.attempts > 1 for answer in answers),
        invalid=sum(not answer.valid for answer in answers),
        changed=sum(not answer.same for answer in answers),
    )


def _plot(streams: Sequence[_Stream], kill: _Kill, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.6), layout="constrained")
    for row, stream in enumerate(reversed(streams)):
        is_hit = stream.end is not None and stream.end.usage.num_attempts > 1
        colour = "#c2410c" if is_hit else "#94a3b8"
        axes.plot(stream.times, [row] * len(stream.times), "|", color=colour, markersize=13, markeredgewidth=1.1)
    axes.axvline(kill.at_s, color="black", linewidth=1)
    axes.annotate(
        f"{kill.worker} killed",
        (kill.at_s, len(streams) - 0.35),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
    )
    axes.set_yticks(range(len(streams)), [stream.name for stream in reversed(streams)])
    axes.set_ylim(-0.6, len(streams))
    axes.set_xlabel("seconds; each mark is a token at the client")
    axes.set_title("Ten guided answers, and the worker of those in red killed: all end with the same bytes", loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
