"""An engine that computes nothing and keeps a pace: one token every 20 ms on each stream.

It steps every 2 ms. Each step emits one token for a tenth of its requests, those whose turn it is, so each request gets
one every 20 ms. A step's message has the same content as a real engine's. It is an ``Engine`` in the real worker
process, with a thread of its own whose CPU time is counted separately.

    QUARTET_BENCHMARK_CLOCK=FILE python -m benchmarks.paced_engine --config FILE     (a Decode worker)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from benchmarks.paced_clock import CLOCK_VARIABLE, PacedClock
from quartet.discovery.base import Role
from quartet.engine.base import (
    EngineCapabilities,
    EngineRequest,
    EngineStats,
    Failed,
    Finished,
    FinishReason,
    RequestKind,
    Started,
    StepOutput,
    Turn,
)
from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.step_engine import ALL_SAMPLING_FIELDS
from quartet.errors import RequestCancelledError, WorkerUnavailableError
from quartet.text.model_files import read_text_files
from quartet.text.model_text import ModelText
from quartet.transfer.base import PoolMemory, Puller
from services.workers.config import WorkerConfig
from services.workers.process import main as run_worker

#: Seconds between two steps, and the steps in which each request has one turn, unless the clock says otherwise.
STEP_S, PERIOD = 0.002, 10
#: Ids that are emitted in turn: words of the tiny model's vocabulary, after its special tokens and single bytes.
FIRST_TOKEN_ID, END_TOKEN_ID = 300, 600

_MAX_MODEL_LEN = 1 << 20
# Nothing is computed, so only the clients limit these.
_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Submit:
    """Begin ``request``, which was submitted at ``at``, in monotonic seconds."""

    request: EngineRequest
    at: float


_Message: TypeAlias = Submit | int  # an int: cancel the request with that id


@dataclass
class _Group:
    """Requests whose turn comes in the same step; aligned columns."""

    ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def remove(self, id: int) -> None:
        index = self.ids.index(id)
        for column in (self.ids, self.offsets, self.ends):
            del column[index]


class PacedSteps:
    """The engine's pure half: which request gets a token in which step."""

    def __init__(self, clock: PacedClock) -> None:
        """Give each request its turn every ``clock.period`` steps; note in ``clock`` the step at which it begins."""
        self._clock = clock
        self._period = clock.period
        self._groups = [_Group() for _ in range(self._period)]
        self._group_of: dict[int, _Group] = {}
        self._num_submits = 0

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len(self._group_of)

    def take(self, step: int, now: float, messages: Sequence[_Message]) -> StepOutput | None:
        """Take ``messages`` before step ``step``; ``None``: they need no output."""
        started: list[Started] = []
        failed: list[Failed] = []
        for message in messages:
            if isinstance(message, Submit):
                started.append(self._start(message, step, now))
            elif message in self._group_of:
                self._group_of.pop(message).remove(message)
                failed.append(Failed(message, RequestCancelledError("cancelled by the caller")))
        return StepOutput(started=started, failed=failed) if started or failed else None

    def step(self, step: int, now: float, messages: Sequence[_Message]) -> StepOutput | None:
        """Take ``messages``, then emit step ``step``; ``None``: it has no output."""
        taken = self.take(step, now, messages)
        group = self._groups[step % self._period]
        if not group.ids:
            return taken
        ids, offsets = list(group.ids), list(group.offsets)
        token_id = FIRST_TOKEN_ID + (step // self._period) % (END_TOKEN_ID - FIRST_TOKEN_ID)
        return StepOutput(
            ids=ids,
            num_tokens=[1] * len(ids),
            token_offsets=offsets,
            token_ids=[token_id] * len(ids),
            started=taken.started if taken is not None else (),
            finished=self._advance(group),
            failed=taken.failed if taken is not None else (),
        )

    def _start(self, message: Submit, step: int, now: float) -> Started:
        request = message.request
        turn = self._num_submits % self._period
        self._num_submits += 1
        group = self._groups[turn]
        offset = len(request.generation.generated_token_ids)
        group.ids.append(request.id)
        group.offsets.append(offset)
        group.ends.append(request.generation.sampling.max_tokens or _NO_LIMIT)
        self._group_of[request.id] = group
        self._clock.begin(request.generation.seed, step + (turn - step) % self._period, offset)
        return Started(request.id, 0, now - message.at)

    def _advance(self, group: _Group) -> list[Finished]:
        """Count the tokens just emitted, and remove the requests that got their last one."""
        group.offsets = [offset + 1 for offset in group.offsets]
        columns = zip(group.ids, group.offsets, group.ends, strict=True)
        finished = [Finished(id, FinishReason.LENGTH, offset) for id, offset, end in columns if offset >= end]
        for item in finished:
            self._group_of.pop(item.id).remove(item.id)
        return finished


class PacedEngine:
    """The ``Engine`` around ``PacedSteps``. Later steps don't make up for a late one, as in a real engine."""

    def __init__(self, config: WorkerConfig, kind: RequestKind, clock: PacedClock) -> None:
        """Take the identity of the model that ``config`` names, so that its tokenizer fits."""
        self._config = config
        self._kind = kind
        self._clock = clock
        self._capabilities: EngineCapabilities | None = None
        self._inbox: deque[_Message] = deque()
        self._outputs: asyncio.Queue[StepOutput | None] = asyncio.Queue()
        self._is_closed = False
        self._num_running = self._num_steps = 0
        self._thread: threading.Thread | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        """The engine's capabilities; valid after ``start``."""
        assert self._capabilities is not None, "the engine was not started"
        return self._capabilities

    @property
    def memory(self) -> PoolMemory | None:
        """``None``: it holds no KV."""
        return None

    @property
    def embeddings(self) -> None:
        """``None``: it accepts text only."""
        return None

    @property
    def is_alive(self) -> bool:
        """True until it is closed."""
        return not self._is_closed

    async def start(self) -> None:
        """Start stepping."""
        path, engine = Path(self._config.model_path), self._config.engine
        self._capabilities = EngineCapabilities(
            kinds=frozenset({self._kind}),
            sampling_fields=ALL_SAMPLING_FIELDS,
            model_fingerprint=model_fingerprint(path, "none"),
            vocab_size=ModelText.from_files(read_text_files(path)).vocab_size,
            max_model_len=engine.max_model_len or _MAX_MODEL_LEN,
            block_size=engine.block_size,
            num_blocks=engine.num_pool_blocks,
        )
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="paced-engine", daemon=True)
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        """Begin ``request`` with the next step. Raises ``WorkerUnavailableError`` after ``close``."""
        if self._is_closed:
            raise WorkerUnavailableError("the engine was closed")
        self._inbox.append(Submit(request, time.monotonic()))

    def cancel(self, id: int) -> None:
        """End a request at the next step."""
        self._inbox.append(id)

    def release(self, id: int) -> None:
        """Do nothing: the engine holds nothing."""

    def request_kv_snapshot(self) -> None:
        """Do nothing: the engine stores no blocks."""
        self._outputs.put_nowait(StepOutput(kv_snapshot=()))

    def turns(self) -> Sequence[Turn]:
        """None: it has no thread."""
        return ()

    async def outputs(self) -> AsyncIterator[StepOutput]:
        """The steps' outputs, until it is closed."""
        while (output := await self._outputs.get()) is not None:
            yield output

    def stats(self) -> Sequence[EngineStats]:
        """The running requests; all blocks are free, because the engine keeps nothing."""
        num_blocks = self._config.engine.num_pool_blocks
        stats = EngineStats(
            num_running=self._num_running,
            num_waiting=len(self._inbox),
            num_free_blocks=num_blocks,
            num_total_blocks=num_blocks,
            num_steps=self._num_steps,
            num_output_tokens=self._clock.num_tokens,
        )
        return (stats,)

    async def close(self) -> None:
        """Stop stepping."""
        if not self._is_closed:
            self._is_closed = True
            self._outputs.put_nowait(None)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        steps = PacedSteps(self._clock)
        due_at = time.monotonic()
        # RuntimeError: the loop is closed, so no task listens any more.
        with contextlib.suppress(RuntimeError):
            while not self._is_closed:
                due_at = max(due_at + STEP_S, time.monotonic())
                time.sleep(max(0.0, due_at - time.monotonic()))
                self._step(steps, loop)

    def _step(self, steps: PacedSteps, loop: asyncio.AbstractEventLoop) -> None:
        messages = [self._inbox.popleft() for _ in range(len(self._inbox))]
        if self._clock.is_held:
            output = steps.take(self._num_steps, time.monotonic(), messages)
        else:
            output = steps.step(self._num_steps, time.monotonic(), messages)
            num_tokens = 0 if output is None else len(output.token_ids)
            self._clock.note_step(self._num_steps, time.monotonic_ns(), num_tokens, time.thread_time_ns())
            self._num_steps += 1
        self._num_running = steps.num_running
        if output is not None:
            loop.call_soon_threadsafe(self._outputs.put_nowait, output)


def main() -> None:
    """Run a Decode worker on a paced engine."""
    clock = PacedClock(Path(os.environ[CLOCK_VARIABLE]))

    def create_engine(config: WorkerConfig, kind: RequestKind, _puller: Puller) -> PacedEngine:
        return PacedEngine(config, kind, clock)

    run_worker(Role.DECODE, create_engine)


if __name__ == "__main__":
    main()
