"""A worker that traces what its engine computes, for ``benchmarks.cancel_storm`` and ``gpu_hand_off``.

It is the product's own, with hooks. Each submit, each cancel and each step of the engine, or of the vision tower,
becomes a line of JSON in a file of the folder that the environment variable names. Requests are known by their seeds,
items of media by their content.

    QUARTET_BENCHMARK_TRACE=FOLDER python -m benchmarks.traced_worker ROLE --config FILE

``QUARTET_BENCHMARK_ROLE`` may say the role instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.children import ROLE_VARIABLE
from quartet.discovery.base import Role
from quartet.engine.base import Engine, EngineRequest, RequestKind
from quartet.engine.mock.runner import MockRunner
from quartet.engine.runner import LaunchedStep, SampledToken, ScheduledChunk
from quartet.engine.settings import EngineKind
from quartet.engine.step_engine import StepEngine
from quartet.media.items import MediaFile
from quartet.transfer.base import Puller
from services.workers.config import WorkerConfig
from services.workers.parts import create_engine
from services.workers.process import main as run_worker

#: Names the folder for traces.
TRACE_VARIABLE = "QUARTET_BENCHMARK_TRACE"


@dataclass(frozen=True, kw_only=True)
class Traced:
    """One line of a trace. Times are in monotonic seconds, which all processes of a host share.

    Attributes:
        worker: role and process id.
        what: ``submit``, ``cancel`` or ``step``.
        began_at: of a step; else when it happened.
        num_tokens: by request, the tokens that the step computed; 1 for an item of media.
    """

    worker: str
    what: str
    began_at: float
    ended_at: float
    num_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def role(self) -> Role:
        """Of the worker."""
        return Role(self.worker.partition("-")[0])


def media_key(file: MediaFile) -> str:
    """The name of an item in traces."""
    return hashlib.sha256(file.data).hexdigest()[:16]


def read_traces(folder: Path) -> list[Traced]:
    """Everything that workers have traced so far, in the order of its beginning."""
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted((Traced(**json.loads(line)) for line in lines), key=lambda traced: traced.began_at)


class Tracer:
    """Writes lines; any thread may call it."""

    def __init__(self, folder: Path, role: Role) -> None:
        """Open a new file in ``folder``."""
        self._worker = f"{role.value}-{os.getpid()}"
        self._file = os.open(folder / f"{self._worker}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(self, what: str, num_tokens: dict[str, int], began_at: float | None = None) -> None:
        """``what`` has just happened, or a step that began at ``began_at`` has just ended."""
        now = time.monotonic()
        traced = Traced(
            worker=self._worker,
            what=what,
            began_at=now if began_at is None else began_at,
            ended_at=now,
            num_tokens=num_tokens,
        )
        os.write(self._file, f"{json.dumps(asdict(traced))}\n".encode())


def hook_engine(tracer: Tracer, runner: type[Any]) -> None:
    """Trace all engines of this process, whose runners are of the class ``runner``."""
    keys: dict[int, str] = {}
    submit, cancel = StepEngine.submit, StepEngine.cancel

    def traced_submit(self: StepEngine, request: EngineRequest) -> None:
        key = keys[request.id] = str(request.generation.seed)
        tracer.note("submit", {key: 0})
        submit(self, request)

    def traced_cancel(self: StepEngine, id: int) -> None:
        cancel(self, id)
        tracer.note("cancel", {keys[id]: 0})

    def ended(chunks: Sequence[ScheduledChunk]) -> Callable[[], None]:
        """What notes the end of a step of ``chunks`` that begins now."""
        counts = {str(chunk.running.request.generation.seed): chunk.num_tokens for chunk in chunks}
        return functools.partial(tracer.note, "step", counts, time.monotonic())

    _replace(StepEngine, "submit", traced_submit)
    _replace(StepEngine, "cancel", traced_cancel)
    if hasattr(runner, "launch"):  # by which it runs steps that are waited for, too
        launch = runner.launch
        _replace(runner, "launch", lambda self, chunks: _TracedStep(ended(chunks), launch(self, chunks)))
        return
    run = runner.run

    def traced_run(self: Any, chunks: Sequence[ScheduledChunk]) -> Any:
        note = ended(chunks)
        try:
            return run(self, chunks)
        finally:
            note()

    _replace(runner, "run", traced_run)


class _TracedStep:
    """A ``LaunchedStep`` that notes its end, which is when its tokens are read."""

    def __init__(self, ended: Callable[[], None], step: LaunchedStep) -> None:
        self._ended = ended
        self._step = step

    @property
    def can_follow(self) -> bool:
        return self._step.can_follow

    def read(self) -> list[SampledToken]:
        try:
            return self._step.read()
        finally:
            self._ended()


def hook_encoder(tracer: Tracer) -> None:
    """Trace the vision tower of this process."""
    from quartet.engine.torch.encoder import TorchEncoder
    from quartet.engine.torch.encoder_tower import Tower

    keys: dict[tuple[int, ...], str] = {}
    encode, run = TorchEncoder.encode, Tower.run

    async def traced_encode(self: TorchEncoder, file: MediaFile, block_ids: Sequence[int]) -> Any:
        key = keys[tuple(block_ids)] = media_key(file)
        tracer.note("submit", {key: 0})
        encoding = asyncio.ensure_future(encode(self, file, block_ids))
        try:
            return await asyncio.shield(encoding)
        except asyncio.CancelledError:
            tracer.note("cancel", {key: 0})
            encoding.cancel()
            while not encoding.done():  # as the encoder itself: the tower may still write
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([encoding])
            raise

    def traced_run(self: Tower, batch: Sequence[Any]) -> Any:
        began_at = time.monotonic()
        try:
            return run(self, batch)
        finally:
            names: Iterable[str | None] = (keys.get(tuple(item.block_ids)) for item in batch)
            tracer.note("step", {name: 1 for name in names if name is not None}, began_at)

    _replace(TorchEncoder, "encode", traced_encode)
    _replace(Tower, "run", traced_run)


def _replace(owner: type[Any], name: str, by: Callable[..., Any]) -> None:
    setattr(owner, name, functools.wraps(getattr(owner, name))(by))


def main() -> None:
    """Run a worker of the role that the environment or the first argument names."""
    role = Role(os.environ.get(ROLE_VARIABLE) or sys.argv.pop(1))
    tracer = Tracer(Path(os.environ[TRACE_VARIABLE]), role)

    def create(config: WorkerConfig, kind: RequestKind, puller: Puller) -> Engine:
        hook_engine(tracer, _runner_of(config.engine.kind))
        return create_engine(config, kind, puller)

    if role is Role.ENCODE:
        hook_encoder(tracer)
    run_worker(role, create)


def _runner_of(kind: EngineKind) -> type[Any]:
    if kind is EngineKind.MOCK:
        return MockRunner
    from quartet.engine.torch.runner import TorchRunner

    return TorchRunner


if __name__ == "__main__":
    main()
