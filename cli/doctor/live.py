"""``quartet doctor trtllm --live``: serves a model in each way that there is, and compares the answers.

All are real: workers of every role, a router, hand-offs. Workers are small, on the GPUs that are named, and each way
ends before the next one begins.
"""

from __future__ import annotations

import asyncio
import os
import platform
import struct
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from cli.doctor.finding import Finding, ok, warning, wrong
from cli.up import wait_ready
from quartet.client import ChatMessage, Completion, MediaFile, MediaKind, QuartetClient, Sampling
from quartet.config import build
from quartet.discovery.base import Role
from quartet.engine.settings import EngineKind, Modality
from quartet.errors import ConfigError, ServingError
from quartet.media.items import TAKES_HAND_OFF
from quartet.telemetry.provenance import count_usable_cores, read_commit, read_machine, usable_cpus
from services.topology.launch import Environment, LaunchError, LocalTopology, while_running
from services.topology.topology import Topology

# Of the memory that is free when a worker starts. Two or three share a GPU here.
_GPU_SHARE = 0.2
_ENGINE = {"max_batch_size": 4, "max_num_tokens": 1024}
_NUM_TOKENS = 24
_ANSWER_TIMEOUT_S = 120.0
# What a process said last, of which its end is explained.
_NUM_LAST_LINES = 6
_STOP_TIMEOUT_S = 60.0

# The second and third have a long beginning in common, which the third finds in the cache.
_STORY = "The keeper of the lighthouse wrote down the weather of each day, and the ships that passed. " * 12
_PROMPTS = ("The capital of France is", f"{_STORY}On Monday", f"{_STORY}On Tuesday")
_QUESTION = "What is in this picture?"
_PICTURE_SIZE = 64


@dataclass(frozen=True)
class Way:
    """A way to serve a model: the roles of its workers, and what those take besides tokens."""

    name: str
    roles: Sequence[Role]
    modality: Modality | None = None

    @property
    def hands_off(self) -> bool:
        """Whether prompts are computed by other workers than answers."""
        return Role.PREFILL in self.roles


AGGREGATED = Way("aggregated", (Role.DECODE,))
DISAGGREGATED = Way("disaggregated", (Role.PREFILL, Role.DECODE))
#: For models that take pictures.
WITH_PICTURES = Way("with pictures", (Role.DECODE,), Modality.MULTIMODAL)
WITH_ENCODE = Way("with Encode", (Role.ENCODE, Role.PREFILL, Role.DECODE))


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What one way gave.

    Attributes:
        ready_s: from the start of its processes until it served.
        token_ids: of each prompt, greedy.
        look: the same of a picture; ``None``: this way takes none.
        takes_embeddings: whether Encode workers could hand it embeddings of pictures.
        num_handed_off: answers whose prompt a Prefill worker computed.
        first_token_s: the longest wait for a first token but the first one's.
    """

    ready_s: float
    token_ids: Sequence[tuple[int, ...]]
    look: tuple[int, ...] | None
    takes_embeddings: bool
    num_handed_off: int
    first_token_s: float


@dataclass(frozen=True, kw_only=True)
class LivePlan:
    """What is tried.

    Attributes:
        model: a folder or a repository.
        gpus: of the workers of a way, in turn; fewer are shared.
        start_timeout_s: for each way, until it serves.
        kind: of the engine.
    """

    model: Path
    gpus: Sequence[int]
    start_timeout_s: float
    kind: EngineKind = EngineKind.TRTLLM


def about_this() -> list[Finding]:
    """What a reader of the report asks first: which Quartet, on what."""
    machine, commit = read_machine(), read_commit()
    version = f"{metadata.version('quartet')}{f', commit {commit.revision[:12]}' if commit.revision else ''}"
    return [
        ok(
            "Quartet",
            f"{version}; Python {platform.python_version()} on {machine.system}, {machine.num_usable_cores} cores",
        )
    ]


async def check_live(plan: LivePlan, on_progress: Callable[[str], None]) -> list[Finding]:
    """Serve in each way, and compare. A way that fails is a finding, and the others are tried."""
    findings, served = list[Finding](), dict[Way, Answers]()
    ways = [AGGREGATED, DISAGGREGATED]
    while ways:
        way = ways.pop(0)
        observer = _Observer(way, on_progress)
        try:
            answers = await _serve(plan, way, observer)
        except (ConfigError, LaunchError, ServingError, TimeoutError) as error:
            findings.append(_failure(way, error, observer))
            continue
        served[way] = answers
        findings.append(_served(way, answers))
        if way is AGGREGATED and answers.takes_embeddings:
            ways += [WITH_PICTURES, WITH_ENCODE]
    return [*findings, *judge_answers(served)]


def judge_answers(served: Mapping[Way, Answers]) -> list[Finding]:
    """Whether all ways gave the answers of aggregated serving, as far as there are some."""
    expected = served.get(AGGREGATED)
    looked = served.get(WITH_PICTURES)
    findings = []
    for way, found in served.items():
        name = f"tokens {way.name}"
        if expected is not None and way is not AGGREGATED:
            findings.append(_judge(name, found.token_ids, expected.token_ids))
        if looked is not None and way is not WITH_PICTURES and found.look is not None:
            findings.append(_judge_look(name, found.look, looked.look or ()))
    return findings


def _judge(name: str, found: Sequence[tuple[int, ...]], expected: Sequence[tuple[int, ...]]) -> Finding:
    pairs = list(zip(found, expected, strict=True))
    different = [number for number, (here, there) in enumerate(pairs) if here != there]
    if not different:
        return ok(name, f"all {len(pairs)} answers are those of aggregated serving")
    here, there = pairs[different[0]]
    at = _first_difference(here, there)
    return wrong(
        name,
        f"{len(different)} of {len(pairs)} answers differ; answer {different[0]} from token {at} on: "
        f"{here[at : at + 4]}, and aggregated {there[at : at + 4]}",
        "a near tie in 16 bits may part greedy answers, seldom within the first tokens; at token 1 the hand-off is at "
        "fault: report it with this page",
    )


def _judge_look(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> Finding:
    if found == expected:
        return ok(name, "the answer about a picture, too")
    at = _first_difference(found, expected)
    return warning(
        name,
        f"the answer about a picture differs from token {at} on",
        "its embeddings are computed in another process, so a near tie may part the answers; at token 0 report it",
    )


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _served(way: Way, answers: Answers) -> Finding:
    num_answers = len(answers.token_ids) + (answers.look is not None)
    said = f"ready in {answers.ready_s:.0f} s; {num_answers} answers"
    said += f", their first tokens after {answers.first_token_s:.2f} s at most"
    if not way.hands_off:
        return ok(way.name, said)
    said = f"{said}; {answers.num_handed_off} prompts handed off"
    if answers.num_handed_off < num_answers:
        return warning(way.name, said, "Decode computed the others itself: look for hand-offs that failed in the logs")
    return ok(way.name, said)


def _failure(way: Way, error: Exception, observer: _Observer) -> Finding:
    said = f"{error}" if str(error) else f"it did not serve in time; {observer.last_progress}"
    words = " | ".join(observer.last_lines)
    return wrong(
        way.name,
        f"{said}{f'; the last that was said: {words}' if words else ''}",
        "`quartet up configs/trtllm/... --model MODEL` shows all of the logs",
    )


async def _serve(plan: LivePlan, way: Way, observer: _Observer) -> Answers:
    with tempfile.TemporaryDirectory(prefix="quartet-doctor-") as directory:
        topology = build(Topology, _settings(plan, way, Path(directory)))
        environment = Environment(
            variables={"GRPC_VERBOSITY": "ERROR", **os.environ},
            num_cores=count_usable_cores(),
            run_dir=_made(Path(directory, "run")),
            cpus=usable_cpus(),
        )
        local = LocalTopology(topology, environment, observer)
        began = time.monotonic()
        try:
            async with asyncio.timeout(plan.start_timeout_s):
                await local.start()
                ready = wait_ready(local.router_address, local.worker_ids, observer.progress)
                workers = await while_running(local.children, ready)
            ready_s = time.monotonic() - began
            media = {kind for worker in workers for kind in worker.record.media}
            async with QuartetClient(local.router_address) as client:
                observer.progress("asking")
                answered = await while_running(local.children, _ask(client, looks=MediaKind.IMAGE in media))
        finally:
            observer.progress("stopping")
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await local.stop()
    return _answers(ready_s, answered, media)


async def _ask(client: QuartetClient, *, looks: bool) -> list[Completion]:
    sampling = Sampling(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    answered = [await client.complete(prompt, sampling=sampling, timeout_s=_ANSWER_TIMEOUT_S) for prompt in _PROMPTS]
    if looks:
        picture = MediaFile(MediaKind.IMAGE, _picture())
        message = ChatMessage("user", (picture, _QUESTION))
        answered.append(await client.complete(messages=[message], sampling=sampling, timeout_s=_ANSWER_TIMEOUT_S))
    return answered


def _answers(ready_s: float, answered: Sequence[Completion], media: Collection[str]) -> Answers:
    ids = [completion.choices[0].token_ids for completion in answered]
    # The very first request may have to compile kernels.
    waits = [completion.choices[0].finished.time.first_token_s or 0.0 for completion in answered[1:]]
    return Answers(
        ready_s=ready_s,
        token_ids=ids[: len(_PROMPTS)],
        look=ids[-1] if len(ids) > len(_PROMPTS) else None,
        takes_embeddings=TAKES_HAND_OFF in media,
        num_handed_off=sum(
            placement.prefill is not None for completion in answered for placement in completion.accepted.choices
        ),
        first_token_s=max(waits),
    )


def _settings(plan: LivePlan, way: Way, directory: Path) -> dict[str, Any]:
    share = {"free_gpu_memory_fraction": _GPU_SHARE} if plan.gpus else {}
    gpus = [plan.gpus[number % len(plan.gpus)] for number in range(len(way.roles))] if plan.gpus else []
    return {
        "namespace": "quartet-doctor",
        "model": {"path": str(plan.model), "name": "doctor"},
        "engine": {"kind": plan.kind, **_ENGINE, **share},
        "discovery": {"kind": "file", "file": {"directory": str(_made(directory / "records"))}},
        "router": {"port": 0, "overrides": {"policy": {"name": "round_robin"}}},
        "workers": [
            {
                "role": role,
                **({"gpus": [[gpus[number]]]} if gpus else {}),
                **({"overrides": {"engine": {"modality": way.modality}}} if way.modality else {}),
            }
            for number, role in enumerate(way.roles)
        ],
        "share_gpus": len(set(gpus)) < len(gpus),
        "start_timeout_s": plan.start_timeout_s,
    }


def _made(directory: Path) -> Path:
    directory.mkdir(mode=0o700)
    return directory


def _picture() -> bytes:
    """A PNG: a red square on white."""
    size, inner = _PICTURE_SIZE, range(_PICTURE_SIZE // 4, 3 * _PICTURE_SIZE // 4)
    white, red = b"\xff\xff\xff", b"\xd0\x10\x10"
    rows = (b"".join(red if x in inner and y in inner else white for x in range(size)) for y in range(size))
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0),
        b"IDAT": zlib.compress(b"".join(b"\0" + row for row in rows)),
        b"IEND": b"",
    }
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


class _Observer:
    """Passes progress on, and keeps the last lines of the logs."""

    def __init__(self, way: Way, on_progress: Callable[[str], None]) -> None:
        self.last_progress = ""
        self.last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._way = way
        self._on_progress = on_progress

    def log_line(self, process: str, line: str) -> None:
        if line.strip():
            self.last_lines.append(f"{process}: {line.strip()}")

    def progress(self, message: str) -> None:
        self.last_progress = message
        self._on_progress(f"{self._way.name}: {message}")
