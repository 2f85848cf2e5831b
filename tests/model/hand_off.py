"""Every course that the hand-off of one request can take, up to a number of disturbances.

One Prefill worker, two Decode workers, a router and a client run in one process: the product's own router pipeline,
fleet, worker streams, dispatchers, schedulers, block pools, offers, pullers and signed starts. Only gRPC, the engine's
thread, discovery and the model are replaced (see ``tests.model.simulation``). ``explore`` runs one request again and
again, in each ``Scenario``. Whenever all wait, it may disturb what would come next: a process dies and is back, or is
paused; a connection breaks or stalls; a message overtakes others, or somebody repeats it; an engine is busy; the client
cancels, dies, or brings its start twice. It tries every disturbance at every such moment.

    python -m tests.model.hand_off --depth 2

A trace that breaks a promise is printed, and the exit status is 1. The promises are in ``World.check`` and
``World.check_end``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import logging
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeAlias, cast
from unittest import mock

import grpc
from prometheus_client import CollectorRegistry

import quartet.engine.step_engine
import quartet.transfer.grpc.puller
import quartet.transfer.grpc.servicer
import quartet.transfer.source
import router.fleet
import services.workers.parts
import services.workers.process
import services.workers.requests
from quartet.api.answer import Answer
from quartet.api.fleet import WorkerState
from quartet.api.request import ChoiceFinished, Delta, GenerateStart, TextOptions, TokenPrompt
from quartet.discovery.base import HostIdentity, Role, WorkerRecord
from quartet.engine.base import Generation, RequestKind, StepOutput
from quartet.engine.runner import RequestState
from quartet.engine.sampling import Sampling
from quartet.engine.scheduler import Scheduler, SchedulerConfig
from quartet.engine.step_engine import StepEngine
from quartet.engine.step_loop import Message, Snapshot, StepLoop, StepReport
from quartet.errors import ServingError
from quartet.kvcache.hand_off import HandOffTicket, Offers
from quartet.kvcache.layout import HandOff
from quartet.rpc.channels import Dialer
from quartet.streams.client import DecodeClient, outcome_in_time
from quartet.streams.messages import DecodeFinished, SignedPlacement
from quartet.streams.signed_start import SignedStartVerifier
from quartet.telemetry.metrics import RouterMetrics, WorkerMetrics
from quartet.text.model_text import ModelText
from quartet.transfer.base import PieceCopy, Puller, TransferWay
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.messages import ticket_from_pb
from quartet.v1 import decode_pb2, prefill_pb2, transfer_pb2
from router.admission import Admission
from router.config import AdmissionConfig, AttemptConfig, TokenizeConfig
from router.context import RouterContext
from router.fair_queue import FairShare
from router.fleet import Fleet
from router.generate import Pipeline
from router.intake import Intake
from router.kv_index.index import PrefixIndex
from router.media.config import MediaConfig
from router.media.encode import EncodeTools, EncodeWaits
from router.media.encode_queue import EncodeQueue
from router.media.queue import MediaQueue, MediaQueueConfig
from router.media.request import MediaTools
from router.policy.greedy import RoundRobinPolicy
from router.signing import Signer
from router.thread_queue import TokenizeQueue
from router.untaken import UntakenBudgets
from router.workers import WorkerTable
from services.workers.config import WorkerConfig
from services.workers.engine_parts import EngineParts
from services.workers.process import PoolServers, WorkerProcess
from services.workers.requests import CountedPlacements, CountedStarts
from services.workers.worker import Worker
from tests.engine.fakes import FakeRunner, expected_output
from tests.model.simulation import (
    Life,
    SimChannel,
    SimLoop,
    SimNet,
    SimServer,
    SimStream,
    Way,
    current_life,
    run_in,
    spawn_in,
)
from tests.router.fakes import FakeTexts, OneKey
from tests.router.records import make_load, make_record
from tests.text.builders import byte_level_tokenizer

PREFILL, DECODES, ROUTER = "prefill-0", ("decode-0", "decode-1"), "router"
CLIENT, SOMEBODY = "client", "somebody"
WORKERS = (PREFILL, *DECODES)

TRANSFER = TransferConfig(hand_off_ttl_s=6.0, max_pull_s=4.0, stall_timeout_s=2.0, ways=(TransferWay.GRPC,))
ATTEMPTS = AttemptConfig(prefill_timeout_s=10.0, decode_start_timeout_s=40.0, decode_stall_timeout_s=40.0)
#: Longer than a hand-off lives unrenewed.
DISTURBED_S = 8.0
PROBED_S = 0.5
REQUEST_TIMEOUT_S = 120.0
SIGNED_S = 4.0
#: When the last one who knows of a hand-off has fallen silent, its blocks are free after this.
BOUND_S = max(TRANSFER.hand_off_ttl_s, TRANSFER.max_pull_s) + 1.5

NUM_BLOCKS = 12
PROMPTS = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 7, 8))  # each of two blocks, of which they share the first
SAMPLING = Sampling(max_tokens=3, temperature=0)
EXPECTED = [expected_output(Generation(prompt_token_ids=prompt, sampling=SAMPLING)) for prompt in PROMPTS]

MakeRunner: TypeAlias = Callable[..., FakeRunner]

_HOST = HostIdentity(boot_id="boot", ipc_namespace="ipc")
_TOKENIZER = byte_level_tokenizer()


class BrokenPromiseError(Exception):
    """Something happened that must not."""


class InlineThread:
    """Stands for ``EngineThread``: steps when the world says so."""

    def __init__(self, runner_factory: Callable[[], FakeRunner], config: SchedulerConfig, listener: Any) -> None:
        self._runner_factory, self._config, self._listener = runner_factory, config, listener
        self._inbox: list[Message] = []
        self.steps: StepLoop | None = None
        self.wants_step_since: int | None = None
        self.has_stepped = False
        self.reports: deque[tuple[int, StepReport]] = deque()  # that the event loop has not heard, each with its number
        self.copies: dict[int, Sequence[PieceCopy]] = {}  # of all fetches that were begun
        self.loop = asyncio.get_running_loop()
        self.next_number: Callable[[], int] = lambda: 0

    @property
    def snapshot(self) -> Snapshot:
        assert self.steps is not None, "started"
        return self.steps.snapshot

    @property
    def scheduler(self) -> Scheduler:
        assert self.steps is not None, "started"
        return self.steps._scheduler

    @property
    def is_settled(self) -> bool:
        """Whether it has taken in all that it was told, and the event loop all that it reported."""
        return self.wants_step_since is None and not self.reports

    def start(self) -> None:
        runner = self._runner = self._runner_factory()
        self.steps = StepLoop(runner, self._config, clock=self.loop.time, on_begin=self._report)
        self.loop.call_soon(self._listener.on_ready, runner)

    def post(self, message: Message) -> None:
        self._inbox.append(message)
        self._want()

    def step(self) -> None:
        """One step of the engine."""
        assert self.steps is not None, "started"
        self.wants_step_since, self.has_stepped = None, True
        messages, self._inbox = self._inbox, []
        report = self.steps.step(messages)
        if report:
            self._report(report)
        if not self.steps.is_idle or self._inbox:
            self._want()

    def be_heard(self) -> None:
        """The event loop hears the next report."""
        _, report = self.reports.popleft()
        self.copies |= {pull.id: pull.copies for pull in report.pulls}
        self._listener.on_report(report)

    def stop(self) -> None:
        return

    def join(self) -> None:
        return

    def close(self) -> None:
        """Free what it has of the machine."""
        self._runner.memory.close()

    def _report(self, report: StepReport) -> None:
        self.reports.append((self.next_number(), report))

    def _want(self) -> None:
        if self.wants_step_since is None:
            self.wants_step_since = self.next_number()


@dataclass
class WorkerLife:
    """One life of one worker."""

    life: Life
    record: WorkerRecord
    thread: InlineThread
    engine: StepEngine
    source: Any

    @property
    def blocks(self) -> Any:
        assert self.thread.steps is not None
        return self.thread.steps._blocks

    @property
    def offers(self) -> Any:
        return self.source._offers


class Scenario(StrEnum):
    """What is so from the beginning."""

    PLAIN = "plain"
    QUEUED = "queued"  # the Decode worker is busy at first: the hand-off is renewed while the request waits there
    PLACED = "placed"  # the client brings a signed start to the Decode worker; no router watches over that
    UNHEARD = "unheard"  # no source hears that a hand-off is not wanted: the connection breaks instead


@dataclass
class Asked:
    """One request, as its client sees it."""

    expected: list[int]
    run: Any = None
    call: Any = None
    token_ids: list[int] = field(default_factory=list)
    end: ChoiceFinished | DecodeFinished | BaseException | None = None
    ended_at: float | None = None
    is_cancelled: bool = False
    placement: Any = None


@dataclass
class Sink:
    """Takes the tokens of a decode without a router."""

    asked: Asked

    def started(self, _started: object) -> None:
        return

    def take(self, _offset: int, token_ids: Sequence[int], _logprobs: object, _now: float) -> bool:
        self.asked.token_ids += token_ids
        return True


class NotingVerifier(SignedStartVerifier):
    """Says what it opened."""

    on_opened: Callable[[decode_pb2.SignedDecodeStart], None]

    def open(self, message: decode_pb2.SignedDecodeStart) -> decode_pb2.DecodeStart:
        start = super().open(message)
        self.on_opened(message)
        return start


@dataclass(frozen=True)
class Opened:
    """A signed start that a worker opened."""

    life: Life
    request_id: str


@dataclass
class KnownHandOff:
    """What is known of a hand-off besides what its source does."""

    deadline: float
    is_pulled: bool = False
    is_taken: bool = False

    def note(self, kind: str, now: float) -> None:
        """Its source answered that."""
        if kind == "granted":
            self.is_pulled, self.deadline = True, now + TRANSFER.max_pull_s
        elif kind == "finished":
            self.is_taken = True
        elif kind == "renewed" and not self.is_pulled:
            self.deadline = now + TRANSFER.hand_off_ttl_s


@dataclass(frozen=True)
class Step:
    """Something that can happen next.

    Attributes:
        is_disturbance: it does not happen by itself.
        is_housekeeping: it changes nothing.
    """

    name: str
    act: Callable[[], None]
    is_disturbance: bool = False
    is_housekeeping: bool = False


class World:
    """All processes, once."""

    def __init__(
        self, scenario: Scenario, metrics: tuple[WorkerMetrics, RouterMetrics], make_runner: MakeRunner
    ) -> None:
        self.scenario = scenario
        self._make_runner = make_runner
        self.loop = SimLoop()
        self.net = SimNet(self.loop)
        self.net.on_server_write = self._note_answer
        self.trace: list[str] = []
        self.workers: dict[str, WorkerLife] = {}
        self.lives: Counter[str] = Counter()
        self._all_lives: list[Life] = []
        self._threads: list[InlineThread] = []
        self.slow_until: dict[str, float] = {}
        self.requests: list[Asked] = []
        self.opened: dict[bytes, Opened] = {}  # by the MAC
        self.num_faults = 0
        self.last_disturbed_at = self.loop.now
        self.hand_offs: dict[tuple[Life, bytes], KnownHandOff] = {}
        self.problems: list[str] = []
        self.may_expire = scenario is Scenario.UNHEARD
        self._probing: set[Any] = set()
        self._has_changed = True
        self._metrics = metrics
        self._mocks = contextlib.ExitStack()

    def __enter__(self) -> World:
        try:
            self._enter()
        except BaseException:
            self._mocks.close()
            raise
        return self

    def _enter(self) -> None:
        enter = self._mocks.enter_context
        enter(self.loop.running())
        enter(mock.patch.object(time, "monotonic", lambda: self.loop.now))
        enter(mock.patch.object(time, "time", lambda: self.loop.now))
        enter(mock.patch.object(Dialer, "open", self._open_channel))
        enter(mock.patch.object(router.fleet, "watch_connection", _never))
        enter(mock.patch.object(router.fleet, "EventSubscriber", _NoEvents))
        for module in (quartet.transfer.grpc.puller, quartet.transfer.grpc.servicer):
            enter(mock.patch.object(module, "keep_freed_memory", lambda: None))
        enter(mock.patch.object(router.fleet, "host_identity", lambda: _HOST))
        enter(mock.patch.object(services.workers.process, "host_identity", lambda: _HOST))
        enter(mock.patch.object(services.workers.process, "WorkerMetrics", lambda _registry: self._metrics[0]))
        enter(
            mock.patch.object(WorkerMetrics, "watch_engine", lambda _metrics, _read: None)
        )  # it would keep the engine
        enter(mock.patch.object(quartet.engine.step_engine, "EngineThread", self._make_thread))
        enter(mock.patch.object(quartet.transfer.source, "Offers", _repeating_offers))
        for counted in (CountedStarts, CountedPlacements):
            timed = functools.partial(counted, self.loop.time)
            enter(mock.patch.object(services.workers.requests, counted.__name__, timed))
        self._router_life, self._client_life = self._new_life(ROUTER), self._new_life(CLIENT)
        run_in(self._router_life, self._build_router)
        for name in WORKERS:
            self._start_worker(name)
        self.loop.run_ready()
        if self.scenario is Scenario.QUEUED:
            self._slow_down(self.workers[DECODES[0]].life)
        run_in(self._router_life, self._ask)
        self.loop.run_ready()

    @property
    def ended_at(self) -> float | None:
        """When all requests have ended."""
        ends = [asked.ended_at for asked in self.requests]
        return None if None in ends else max(at for at in ends if at is not None)

    def __exit__(self, *_details: object) -> None:
        self.loop.bury(self._all_lives)
        for thread in self._threads:
            thread.close()
        self._mocks.close()

    # Building.

    def _open_channel(self, address: str, **_more: object) -> SimChannel:
        return SimChannel(self.net, current_life(), address)

    def _new_life(self, name: str) -> Life:
        self.lives[name] += 1
        life = Life(name, self.lives[name])
        self._all_lives.append(life)
        return life

    def _make_thread(
        self,
        runner_factory: Any,
        config: Any,
        listener: Any,
        tiers_factory: None,
        *,
        tells_contents: bool,
        retention: None,
    ) -> InlineThread:
        assert tiers_factory is None and not tells_contents, "there are no tiers here, and nobody reads contents"
        assert retention is None, "no session retains blocks here"
        thread = InlineThread(runner_factory, config, listener)
        thread.next_number = functools.partial(next, self.net.numbers)
        self._threads.append(thread)
        return thread

    def _start_worker(self, name: str) -> None:
        life = self._new_life(name)
        started = spawn_in(self.loop, life, self._run_worker(life), f"start {name}")
        self.loop.run_ready()
        worker: WorkerLife = started.result()
        self.workers[name] = worker
        run_in(self._router_life, self._adopt, worker.record)

    async def _run_worker(self, life: Life) -> WorkerLife:
        """As ``WorkerProcess._serve`` wires it."""
        role = Role(life.name.partition("-")[0])
        config = WorkerConfig(worker_id=life.name, model_path="none", transfer=TRANSFER)
        process = WorkerProcess(config, role, self._make_engine)
        process._surroundings = replace(process._surroundings, epoch=life.number)
        parts = process._make_parts()
        assert isinstance(parts, EngineParts)
        await parts.start()
        source = process._source(parts)
        source.advertise(life.name)
        verifier = parts._verifier = NotingVerifier(
            OneKey(),
            worker_id=life.name,
            epoch=life.number,
            clock=asyncio.get_running_loop().time,
        )
        verifier.on_opened = functools.partial(self._note_opened, life)
        serving = parts.serve(source)
        server = SimServer(life)
        for service in (serving.service, process._transfer_service(source, PoolServers())):
            service.register(server)  # type: ignore[arg-type]
        self.net.serve(server)
        engine: Any = parts._engine
        record = make_record(
            life.name,
            epoch=life.number,
            grpc_address=f"{life.name}:1",
            events_address="",
            num_blocks=NUM_BLOCKS,
            block_size=4,
            max_model_len=256,
        )
        no_events: Any = _NoEvents()
        worker = Worker(
            record, engine, serving.requests, source, no_events, no_events, drain_timeout_s=1.0, stall_timeout_s=60.0
        )
        pacer = Pacer(functools.partial(self._report_load, worker))
        asyncio.get_running_loop().create_task(worker.consume(pacer), name="outputs")
        return WorkerLife(life, record, engine._thread, engine, source)

    def _report_load(self, worker: Worker) -> None:
        """The router hears how far a worker is."""
        if not self._router_life.is_dead:
            load = worker.next_load()
            worker.load_sent()
            run_in(self._router_life, self.loop.call_soon, self.table.report, load, self.loop.now)

    def _build_router(self) -> None:
        metrics = self._metrics[1]
        table = self.table = WorkerTable("router", heartbeat_timeout_s=10**9)
        table.is_synchronised = True
        self.fleet = Fleet(table, metrics, None)
        index, rng = PrefixIndex(), random.Random(0)
        admission = self.admission = Admission(table, RoundRobinPolicy(0), AdmissionConfig(), index, metrics)
        table.listen(admission.wake)
        table.listen(self._note_change)
        encode = EncodeTools(
            table=table,
            index=index,
            hops=self.fleet,
            waits=EncodeWaits(table, max_length=1, retry_delay_s=1.0),
            queue=EncodeQueue(table, index, FairShare(), rng, max_length=1, retry_delay_s=1.0),
            timeout_s=1.0,
            max_attempts=1,
        )
        untaken = self.untaken = UntakenBudgets(
            lambda pool: table.decode_capacity(pool, self.loop.now),
            share=1.0,
            max_waiting=1,
            timeout_s=REQUEST_TIMEOUT_S,
            clock=self.loop.time,
        )
        bounds = MediaQueueConfig(max_bytes=1, max_length=1, timeout_s=1.0, retry_delay_s=1.0)
        media = MediaTools(mock.Mock(), encode, MediaQueue(bounds, FairShare(), lambda _pool: 0), MediaConfig())
        self.pipeline = Pipeline(
            RouterContext(
                router_id="router",
                table=table,
                texts=FakeTexts(text=ModelText(_TOKENIZER, None, (), 64)),
                intake=Intake(FairShare()),
                admission=admission,
                hops=self.fleet,
                media=media,
                metrics=metrics,
                config=ATTEMPTS,
                max_timeout_s=REQUEST_TIMEOUT_S,
                tokenizing=TokenizeQueue(TokenizeConfig(), FairShare()),
                untaken=untaken,
                signer=Signer(OneKey(), table, ttl_s=SIGNED_S, clock=self.loop.time),
            )
        )

    def _adopt(self, record: WorkerRecord) -> None:
        """Discovery lists a worker, and the router's probe reaches it."""
        self.fleet._adopt(record)
        self.table.connected(record.key, make_load(record), self.loop.now)

    def _ask(self) -> None:
        """A client asks the router."""
        number = len(self.requests)
        start = GenerateStart(
            prompt=TokenPrompt(PROMPTS[number]),
            sampling=SAMPLING,
            seed=1,
            text_options=TextOptions(omit_text=True),
        )
        asked = Asked(EXPECTED[number])
        self.requests.append(asked)
        if self.scenario is Scenario.PLACED:
            asked.run = asyncio.get_running_loop().create_task(self._place(asked, start), name="place")
            return
        answer = Answer()
        asked.run = self.pipeline.generate(start, answer)
        asyncio.get_running_loop().create_task(self._read(asked, answer), name="client")

    async def _place(self, asked: Asked, start: GenerateStart) -> None:
        """The router places a request; its client goes on alone."""
        try:
            placed = await self.pipeline.place(start)
        except (ServingError, asyncio.CancelledError) as error:
            asked.end, asked.ended_at = error, self.loop.now
            return
        [choice] = placed.choices
        asked.token_ids += choice.token_ids
        assert isinstance(choice.next, SignedPlacement), "more than one token is wanted"
        if self._client_life.is_dead:  # it died while another request of it was placed
            asked.placement, asked.ended_at = choice.next, self.loop.now
            return
        spawn_in(self.loop, self._client_life, self._bring(asked, choice.next), "client")

    async def _bring(self, asked: Asked, placement: SignedPlacement) -> None:
        """The client brings a signed start to its worker, and takes the tokens."""
        channel: Any = SimChannel(self.net, self._client_life, placement.address)
        client = DecodeClient(placement.address, channel, lambda _error: None)
        asked.placement, asked.call = placement, client.start_signed(placement, Sink(asked))
        try:
            asked.end = await outcome_in_time(asked.call, start_timeout_s=40.0, stall_timeout_s=40.0)
        except (ServingError, TimeoutError) as error:
            asked.end = error
        finally:
            asked.call.cancel()
            asked.ended_at = self.loop.now

    async def _bring_again(self, asked: Asked) -> None:
        """Somebody brings the same signed start once more."""
        channel: Any = SimChannel(self.net, self._client_life, asked.placement.address)
        client = DecodeClient(asked.placement.address, channel, lambda _error: None)
        with contextlib.suppress(ServingError):
            await client.start_signed(asked.placement, Sink(Asked(asked.expected))).outcome()

    async def _read(self, asked: Asked, answer: Answer) -> None:
        try:
            async for part in answer.parts():
                if isinstance(part, Delta):
                    asked.token_ids += part.token_ids
                elif isinstance(part, ChoiceFinished):
                    asked.end = part
        except ServingError as error:
            asked.end = error
        asked.ended_at = self.loop.now

    # What can happen.

    def steps(self) -> list[Step]:
        """What can happen now; the first is what happens undisturbed. None: all wait for ever."""
        natural: list[tuple[int, Step]] = []
        for way in self.net.ways():
            natural.append((way.sent[0].number, Step(_describe(way), functools.partial(self._deliver, way))))
        for worker in self.workers.values():
            thread, life = worker.thread, worker.life
            if life.is_dead or life.is_paused:
                continue
            if thread.reports:
                hear = functools.partial(run_in, life, thread.be_heard)
                natural.append((thread.reports[0][0], Step(f"{life} hears from its engine", hear)))
            if thread.wants_step_since is not None and self.slow_until.get(life.name, 0.0) <= self.loop.now:
                compute = functools.partial(self._compute, worker)
                natural.append((thread.wants_step_since, Step(f"{life} computes a step", compute)))
        found = [step for _, step in sorted(natural, key=lambda entry: entry[0])]
        when = self.loop.next_timer()
        if when is not None:
            is_idle = getattr(self.loop.next_callback, "__qualname__", "") == "StalledCalls._poll" and not natural
            advance = functools.partial(self.loop.advance, when)
            found.append(Step(f"{when - self.loop.now:g} s pass", advance, is_housekeeping=is_idle))
        return found

    def disturbances(self) -> list[Step]:
        """What may happen now, too."""
        ways = self.net.ways()
        is_quiet = not ways and all(worker.thread.is_settled for worker in self.workers.values())
        if is_quiet and self.ended_at is not None:
            return []
        found = [*self._worker_disturbances(), *self._connection_disturbances(), *self._replays()]
        if not self._router_life.is_dead and self.ended_at is None:
            found += [
                self._step("the router dies", self._kill_router),
                self._step("the router is paused", functools.partial(self._pause, self._router_life)),
                self._step("the client cancels", self._cancel, is_fault=False, may_expire=False),
            ]
        if self.requests[0].placement is not None and self.requests[0].ended_at is None:
            again = functools.partial(self._bring_again, self.requests[0])
            found.append(self._step("the client brings its start again", lambda: self._spawn_client(again())))
            found.append(self._step("the client dies", self._kill_client))
        for way in ways[1:]:
            deliver = functools.partial(self._deliver, way)
            found.append(self._step(f"first: {_describe(way)}", deliver, is_fault=False, may_expire=False))
        return found

    def _make_engine(self, _config: WorkerConfig, kind: RequestKind, puller: Puller) -> StepEngine:
        return StepEngine(
            lambda: self._make_runner(num_blocks=NUM_BLOCKS),
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
            puller=puller,
            kinds=frozenset({kind}),
        )

    def _compute(self, worker: WorkerLife) -> None:
        steps = worker.thread.steps
        assert steps is not None, "started"
        is_over = self.ended_at is not None and not self.net.has_requests(worker.life)
        runner = cast(FakeRunner, steps._runner)
        before = runner.num_steps
        run_in(worker.life, worker.thread.step)
        if is_over and runner.num_steps > before:
            self.problems.append(f"{worker.life} computes for a request that has ended")

    def _deliver(self, way: Way) -> None:
        if self.scenario is Scenario.UNHEARD and way.is_to_server and _is_release(way):
            way.stream.lose()
        else:
            self.net.deliver(way)

    def _worker_disturbances(self) -> Iterator[Step]:
        used = {name for stream in self.net.streams for name in (stream.client.name, stream.server.name)}
        for worker in self.workers.values():
            life = worker.life
            if life.is_dead or (life.name not in used and life.name != DECODES[0]):
                continue
            # A router that lives drops the hand-offs that a dead taker leaves, or that it has not signed away.
            is_signed = self.scenario is Scenario.PLACED and self.requests[0].placement is not None
            is_watched = life.name != PREFILL and not is_signed
            yield self._step(f"{life} dies", functools.partial(self._kill, worker), may_expire=not is_watched)
            if life.name not in used:
                continue
            yield self._step(f"{life} is paused for {DISTURBED_S:g} s", functools.partial(self._pause, life))
            if worker.thread.wants_step_since is not None:
                slow_down = functools.partial(self._slow_down, life)
                # Busy twice, it is so for longer than the router waits for a prompt.
                is_late = life.name == PREFILL and life.name in self.slow_until
                name = f"{life} is busy for {DISTURBED_S:g} s"
                yield self._step(name, slow_down, is_fault=is_late, may_expire=False)

    def _connection_disturbances(self) -> Iterator[Step]:
        for one, other in self._connected():
            # A renewal that is lost is repeated; what ends a hand-off is not.
            lose = functools.partial(self.net.lose_connection, one, other)
            is_lost = CLIENT in (one, other) or ({one, other} == {PREFILL, ROUTER} and self._is_dropping())
            yield self._step(f"{one} and {other} lose their connection", lose, may_expire=is_lost)
            freeze = functools.partial(self._freeze, one, other)
            yield self._step(f"{one} and {other} do not hear each other for {DISTURBED_S:g} s", freeze)

    def _is_dropping(self) -> bool:
        """Whether the router tells the source that no worker will take a hand-off."""
        pulls = (stream for stream in self.net.streams if stream.method.endswith("/Pull"))
        return any(stream.client is self._router_life and not stream.done() for stream in pulls)

    def _replays(self) -> Iterator[Step]:
        """Somebody who has seen the latest messages of a pull, or of a renewal, sends them again."""
        latest: dict[str, Any] = {}
        for stream in self.net.streams:
            if stream.messages_up and stream.method.endswith("/Pull") and stream.client.name != SOMEBODY:
                kinds = [_kind(transfer_pb2.PullRequest.FromString(data)) for data in stream.messages_up]
                latest["+".join(kinds)] = stream
        for kinds, stream in latest.items():
            yield self._step(f"somebody repeats {kinds} of {stream.client}", functools.partial(self._replay, stream))

    def _step(self, name: str, act: Callable[[], None], *, is_fault: bool = True, may_expire: bool = True) -> Step:
        """A disturbance.

        Args:
            name: what happens.
            act: makes it happen.
            is_fault: a request may need another attempt for it.
            may_expire: a hand-off may be ended by its time for it.
        """
        disturb = functools.partial(self._disturb, act, is_fault=is_fault, may_expire=may_expire)
        return Step(name, disturb, is_disturbance=True)

    def _disturb(self, act: Callable[[], None], *, is_fault: bool, may_expire: bool) -> None:
        self.num_faults += is_fault
        self.may_expire |= may_expire
        self._disturbed_until(self.loop.now)
        act()

    def _disturbed_until(self, at: float) -> None:
        self.last_disturbed_at = max(self.last_disturbed_at, at)

    def _kill(self, worker: WorkerLife) -> None:
        """It is back at once, at the same address. Another client asks, so that the new life has hand-offs as well."""
        self.loop.kill(worker.life)
        self.net.drop_life(worker.life)
        self._start_worker(worker.life.name)
        if len(self.requests) < len(PROMPTS) and not self._router_life.is_dead:
            if self._client_life.is_dead:
                self._client_life = self._new_life(CLIENT)
            run_in(self._router_life, self._ask)
        placement = self.requests[0].placement
        if placement is not None and placement.address.partition(":")[0] == worker.life.name:
            self._spawn_client(self._bring_again(self.requests[0]))

    def _kill_router(self) -> None:
        self.loop.kill(self._router_life)
        self.net.drop_life(self._router_life)
        for asked in self.requests:
            if asked.placement is None:
                asked.ended_at = asked.ended_at or self.loop.now

    def _pause(self, life: Life) -> None:
        life.is_paused = True
        self._disturbed_until(self.loop.now + DISTURBED_S)
        self.loop.call_later(DISTURBED_S, self.loop.resume, life)

    def _slow_down(self, life: Life) -> None:
        until = self.slow_until[life.name] = self.loop.now + DISTURBED_S
        self._disturbed_until(until)
        self.loop.call_at(until, lambda: None)

    def _freeze(self, one: str, other: str) -> None:
        until = self.net.frozen[frozenset((one, other))] = self.loop.now + DISTURBED_S
        self._disturbed_until(until)
        self.loop.call_at(until, lambda: None)

    def _cancel(self) -> None:
        asked = self.requests[0]
        asked.is_cancelled = True
        if asked.call is None:
            run_in(self._router_life, asked.run.cancel)
        else:
            run_in(self._client_life, asked.call.cancel)

    def _spawn_client(self, work: Any) -> None:
        spawn_in(self.loop, self._client_life, work, "client")

    def _kill_client(self) -> None:
        self.loop.kill(self._client_life)
        self.net.drop_life(self._client_life)
        for asked in self.requests:
            if asked.placement is not None:
                asked.ended_at = asked.ended_at or self.loop.now

    def _connected(self) -> list[tuple[str, str]]:
        pairs = {
            tuple(sorted((stream.client.name, stream.server.name)))
            for stream in self.net.streams
            if not stream.done() and not stream.client.is_dead and not stream.server.is_dead
        }
        return sorted(pairs)  # type: ignore[arg-type]

    def _replay(self, stream: SimStream) -> None:
        seen, life = tuple(stream.messages_up), Life(SOMEBODY, 1)

        async def replay() -> None:
            codec = (bytes, bytes)
            again = self.net.open(life, stream.server.name, stream.method, codec, None)
            with contextlib.suppress(grpc.aio.AioRpcError):
                for data in seen:
                    await again.write(data)
                while await again.read() is not grpc.aio.EOF:
                    pass

        self._all_lives.append(life)
        spawn_in(self.loop, life, replay(), "replay")

    # What must hold.

    def check(self) -> None:
        """Raise ``BrokenPromiseError`` unless all promises hold at this moment, at which everybody waits."""
        if self.loop.errors:
            raise BrokenPromiseError(f"an unhandled error: {self.loop.errors[0]}")
        if self.problems:
            raise BrokenPromiseError(self.problems[0])
        for worker in self.workers.values():
            if not worker.life.is_dead:
                if worker.thread.has_stepped:
                    worker.thread.has_stepped = False
                    _check_pool(worker)
                _check_held(worker)
                self._check_hand_offs(worker)
                self._check_taker(worker)
        for asked in self.requests:
            if asked.token_ids != asked.expected[: len(asked.token_ids)]:
                raise BrokenPromiseError(f"the client got {asked.token_ids}, not {asked.expected}")
        self._probe()

    def check_end(self) -> None:
        """The same, when nothing happens any more: the request has ended, and nothing is held for it."""
        self.check()
        for worker in self.workers.values():
            counts = worker.blocks.counts
            if counts.held or counts.in_use:
                raise BrokenPromiseError(f"{worker.life} still has {counts.held} held and {counts.in_use} used blocks")
            if worker.engine._live:
                raise BrokenPromiseError(f"{worker.life} still has a request")
        if not self._router_life.is_dead:
            self._check_router()
            for asked in self.requests:
                self._check_answer(asked)

    def check_bound(self) -> None:
        """Long enough after the end of the request and of all disturbances nothing is held any more."""
        counts = {worker.life: worker.blocks.counts for worker in self.workers.values()}
        held = [str(life) for life, count in counts.items() if count.held]
        if held:
            raise BrokenPromiseError(f"{BOUND_S:g} s after the last sign of a taker {', '.join(held)} holds blocks")

    def _check_router(self) -> None:
        """Nothing is left of the requests in the router, which lives."""
        if self.pipeline.num_running or self.admission.length:
            raise BrokenPromiseError("the request has not ended")
        for opened in self.opened.values():
            if not opened.life.is_dead and opened.life.name in self.table.placed_at(opened.request_id, 0):
                raise BrokenPromiseError(f"the router keeps room at {opened.life} for a placed request that ended")
        self.table.tick(self.loop.now + REQUEST_TIMEOUT_S + SIGNED_S + 10.0)  # what was placed has lapsed
        for status in self.table.statuses(self.loop.now):
            if status.num_requests:
                raise BrokenPromiseError(f"the router still has room booked at {status.record.worker_id}")
        if any(account.num_placements for account in self.untaken._accounts.values()):
            raise BrokenPromiseError("a placement that lapsed, or whose worker died, still counts as untaken")

    def _check_answer(self, asked: Asked) -> None:
        if self.scenario is Scenario.PLACED:
            if not (self.num_faults or asked.is_cancelled) and asked.token_ids != asked.expected:
                raise BrokenPromiseError(f"the client got {asked.token_ids}, and {asked.end!r}")
            return  # else the client asks a router again
        if isinstance(asked.end, BaseException):
            raise BrokenPromiseError(f"the request failed: {asked.end!r}")
        if asked.end is None:
            raise BrokenPromiseError("the client got no end")
        if not asked.is_cancelled and asked.token_ids != asked.expected:
            raise BrokenPromiseError(f"the client got {asked.token_ids} and an end")
        num_attempts = asked.end.usage.num_attempts
        if num_attempts > 1 + 2 * self.num_faults:
            raise BrokenPromiseError(f"{num_attempts} attempts after {self.num_faults} faults")

    def _check_hand_offs(self, worker: WorkerLife) -> None:
        """Of one source: who pulls what, and that nothing expired that somebody should have ended."""
        offers, life = worker.offers, worker.life
        for offer in (*offers._held.values(), *offers._pulling.values()):
            key = (life, offer.ticket.hand_off_id)
            known = self.hand_offs.setdefault(key, KnownHandOff(offer.deadline))
            if offer.deadline > known.deadline:
                raise BrokenPromiseError(f"{life} keeps a hand-off for longer than it may")
        if offers._pulling and not life.is_paused:
            pulled = Counter(
                ticket.hand_off_id
                for stream in self.net.streams
                if stream.server is life and (ticket := _begun(stream.server_task)) is not None
            )
            for hand_off_id in offers._pulling:
                if pulled[hand_off_id] != 1:
                    raise BrokenPromiseError(f"{pulled[hand_off_id]} streams pull one hand-off of {life}")
        if offers.counts.expired and not self.may_expire:
            raise BrokenPromiseError(f"a hand-off of {life} expired, although a process that knew of it could end it")

    def _check_taker(self, worker: WorkerLife) -> None:
        """Of one taker: it uses no block too early, and gives none back too early."""
        scheduler, engine = worker.thread.scheduler, worker.engine
        for running in scheduler.live.values():
            hand_off = running.request.hand_off
            if hand_off is not None and not running.needs_pull and not self._is_taken(hand_off):
                raise BrokenPromiseError(f"{worker.life} uses blocks before their source said that they are right")
        for id in engine._pulls._fetches if engine._pulls is not None else ():
            pulling, num_users = scheduler.live.get(id), worker.blocks._num_users
            is_given_back = not all(num_users[copy.block_id] for copy in worker.thread.copies[id])
            if pulling is None or pulling.state is not RequestState.PULLING or is_given_back:
                raise BrokenPromiseError(f"{worker.life} gave blocks back that a fetch still writes")
            if pulling.is_cancelled and not worker.thread.reports and not worker.life.is_paused:
                raise BrokenPromiseError(f"{worker.life} still fetches for a request that was cancelled")

    def _is_taken(self, hand_off: HandOff) -> bool:
        return any(
            known.is_taken
            for (life, hand_off_id), known in self.hand_offs.items()
            if hand_off_id == hand_off.hand_off_id and life.number == hand_off.epoch
        )

    def _note_opened(self, life: Life, message: decode_pb2.SignedDecodeStart) -> None:
        """A worker opened a signed start."""
        signed = decode_pb2.SignedStart.FromString(message.signed_start)
        late_s = self.loop.now - signed.expires_at_unix_ms / 1000
        if message.mac in self.opened:
            self.problems.append("a signed start was opened twice")
        if signed.epoch != life.number:
            self.problems.append(f"{life} opened a start that was signed for another life")
        if late_s > 0:
            self.problems.append(f"{life} opened a signed start {late_s:g} s too late")
        self.opened[message.mac] = Opened(life, signed.start.context.request_id)

    def _note_answer(self, stream: SimStream, data: bytes) -> None:
        """A source answers a puller: only what the ticket allows, and only as long as it holds the blocks."""
        if not stream.method.endswith("/Pull"):
            return
        worker, ticket = self.workers[stream.server.name], _ticket(stream.messages_up[0])
        if ticket is None or worker.life is not stream.server:
            return
        kind = _kind(transfer_pb2.PullResponse.FromString(data))
        if kind == "piece":
            offer = worker.offers._pulling.get(ticket.hand_off_id)
            if offer is None or offer.holder not in worker.blocks._held:
                self.problems.append(f"{worker.life} sends blocks that it does not hold")
        known = self.hand_offs.get((worker.life, ticket.hand_off_id))
        if ticket.epoch != worker.life.number:
            self.problems.append(f"{worker.life} answered `{kind}` to a ticket of another life")
        elif known is not None:
            if known.deadline <= self.loop.now:
                self.problems.append(f"{worker.life} answered `{kind}` {self.loop.now - known.deadline:g} s too late")
            known.note(kind, self.loop.now)

    def _probe(self) -> None:
        """The router's probes reach a worker whose stream broke, a little later."""
        if self._router_life.is_dead or not self._has_changed:
            return
        self._has_changed = False
        for status in self.table.statuses(self.loop.now):
            worker, key = self.workers[status.record.worker_id], status.record.key
            is_there = not worker.life.is_dead and worker.record == status.record
            if status.state is WorkerState.SUSPECT and is_there and key not in self._probing:
                self._probing.add(key)
                run_in(self._router_life, self.loop.call_later, PROBED_S, self._connect, worker.record)

    def _note_change(self) -> None:
        self._has_changed = True

    def _connect(self, record: WorkerRecord) -> None:
        self._probing.discard(record.key)
        self.table.connected(record.key, make_load(record), self.loop.now)


class _NoEvents:
    """Nothing is published."""

    def __init__(self, *_arguments: object, **_more: object) -> None:
        return

    def disconnect(self, _address: str) -> None:
        return

    def take(self, _step: StepOutput) -> None:
        return

    def close(self) -> None:
        return


@dataclass
class Pacer:
    """Reports the load at once when it may have changed."""

    poke: Callable[[], None]


async def _never(_channel: object, _on_lost: object) -> None:
    """A connection that is never lost without a stream that breaks."""
    await asyncio.get_running_loop().create_future()


def _repeating_offers(epoch: int, ttl_s: float, max_pull_s: float) -> Offers:
    """Offers that draw the same ids and secrets in each life: then only the epoch distinguishes their tickets."""
    numbers = itertools.count(1)
    return Offers(epoch, ttl_s, max_pull_s, draw=lambda size: next(numbers).to_bytes(size, "big"))


def _begun(task: Any) -> Any:
    """The ticket of the pull that runs in ``task``, a handler of Pull."""
    coroutine = None if task is None else task.get_coro()
    while coroutine is not None and coroutine.cr_frame is not None:
        own = coroutine.cr_frame.f_locals.get("self")
        if type(own).__name__ == "_PullStream":
            return own._begun
        coroutine = coroutine.cr_await
        if not hasattr(coroutine, "cr_frame"):
            return None
    return None


def _ticket(request: bytes) -> HandOffTicket | None:
    """The ticket in a request of Pull."""
    message = transfer_pb2.PullRequest.FromString(request)
    part = getattr(message, message.WhichOneof("message"))
    return ticket_from_pb(part.ticket) if hasattr(part, "ticket") else None


def _check_pool(worker: WorkerLife) -> None:
    """Each block is in one state."""
    blocks, life = worker.blocks, worker.life
    counts = blocks.counts
    if counts.free + counts.cached + counts.held + counts.in_use != counts.total:
        raise BrokenPromiseError(f"{life} lost or doubled a block: {counts}")
    free = [*blocks._free, *blocks._cached]
    taken = [block for block in range(NUM_BLOCKS) if blocks._num_users[block] or blocks._num_holders[block]]
    if len(set(free)) < len(free) or sorted(free + taken) != list(range(NUM_BLOCKS)):
        raise BrokenPromiseError(f"{life} has a block that is free twice, or free and taken: {free}, {taken}")
    if min((*blocks._num_users, *blocks._num_holders)) < 0:
        raise BrokenPromiseError(f"{life} freed a block twice")


def _check_held(worker: WorkerLife) -> None:
    """Held blocks are those of living hand-offs."""
    if worker.thread.is_settled and not worker.life.is_paused:
        blocks, life = worker.blocks, worker.life
        holders, offered = set(blocks._held), set(worker.offers._by_holder)
        if offered - holders:
            raise BrokenPromiseError(f"{life} offers blocks that it does not hold")
        if holders - offered:
            raise BrokenPromiseError(f"{life} holds blocks that it does not offer")


def _describe(way: Way) -> str:
    content = way.sent[0].content
    if isinstance(content, bytes):
        name = way.stream.method.rpartition("/")[2]
        content = f"{name} {_fields(way.stream.method, way.is_to_server, content)}"
    source, target = way.stream.client, way.stream.server
    if not way.is_to_server:
        source, target = target, source
    return f"{source} -> {target}: {content} (stream {way.stream.number})"


def _fields(method: str, is_to_server: bool, data: bytes) -> str:
    module = {"Decode": decode_pb2, "Prefill": prefill_pb2, "Pull": transfer_pb2}[method.rpartition("/")[2]]
    name = method.rpartition("/")[2] + ("Request" if is_to_server else "Response")
    message = getattr(module, name).FromString(data)
    return ", ".join(field.name for field, _ in message.ListFields()) or "nothing"


def _is_release(way: Way) -> bool:
    """Whether somebody tells the source that a hand-off is not wanted."""
    content = way.sent[0].content
    is_message = isinstance(content, bytes) and way.stream.method.endswith("/Pull")
    return is_message and _kind(transfer_pb2.PullRequest.FromString(content)) == "abort"


def _kind(message: Any) -> str:
    return message.WhichOneof("message") or "nothing"


# The exploration.


@dataclass
class Found:
    """What an exploration came to."""

    num_runs: int = 0
    num_moments: int = 0
    duration_s: float = 0.0
    broken: list[tuple[str, list[str]]] = field(default_factory=list)


#: A disturbance: at which moment, and which of those possible there.
Choice = tuple[int, int]


def explore(
    depth: int,
    scenarios: Sequence[Scenario] = tuple(Scenario),
    *,
    make_runner: MakeRunner = FakeRunner,
    one_in: int = 1,
    max_broken: int = 1,
    on_run: Callable[[Found], None] = lambda _found: None,
) -> Found:
    """Run each scenario with every combination of at most ``depth`` disturbances, until ``max_broken`` runs broke.

    ``make_runner``: makes the runners of all workers. ``one_in``: of the disturbances that each moment has, try one in
    so many, other ones at the next moment. ``on_run`` is called after each run.
    """
    logging.disable(logging.CRITICAL)
    metrics = (WorkerMetrics(CollectorRegistry()), RouterMetrics(CollectorRegistry()))
    found, began = Found(), time.perf_counter()
    pending: list[tuple[Scenario, tuple[Choice, ...]]] = [(scenario, ()) for scenario in scenarios]
    try:
        while pending and len(found.broken) < max_broken:
            scenario, choices = pending.pop()
            widths, problem, trace = run_once(scenario, choices, depth, metrics, make_runner)
            found.num_runs += 1
            found.num_moments += len(widths)
            on_run(found)
            if problem is not None:
                found.broken.append((problem, trace))
                continue
            if len(choices) < depth:
                first = choices[-1][0] + 1 if choices else 0
                for moment in range(first, len(widths)):
                    numbers = range(-moment % one_in, widths[moment], one_in)
                    more = [(*choices, (moment, number)) for number in numbers]
                    pending.extend((scenario, one) for one in more)
    finally:
        logging.disable(logging.NOTSET)
        found.duration_s = time.perf_counter() - began
    return found


_MAX_MOMENTS = 2000


def run_once(
    scenario: Scenario,
    choices: Sequence[Choice],
    depth: int,
    metrics: tuple[WorkerMetrics, RouterMetrics],
    make_runner: MakeRunner,
) -> tuple[list[int], str | None, list[str]]:
    """One run. Returns how many disturbances each moment had, the promise that was broken, and what happened."""
    widths: list[int] = []
    disturbed = dict(choices)
    is_leaf = len(choices) >= depth
    with World(scenario, metrics, make_runner) as world:
        try:
            _play(world, disturbed, widths, is_leaf=is_leaf)
        except BrokenPromiseError as error:
            return widths, str(error), world.trace
        except Exception as error:  # noqa: BLE001 - whatever the product raises breaks a promise
            return widths, f"an exception of the product: {error!r}", world.trace
    return widths, None, world.trace


def _play(world: World, disturbed: dict[int, int], widths: list[int], *, is_leaf: bool) -> None:
    last = max(disturbed, default=-1)
    forever_at = world.loop.now + 10 * REQUEST_TIMEOUT_S
    while True:
        world.loop.run_ready()
        world.check()
        world.loop.run_ready()
        is_over = world.ended_at is not None and len(widths) > last
        steps = world.steps()
        deadline = None if world.ended_at is None else max(world.ended_at, world.last_disturbed_at) + BOUND_S
        when = world.loop.next_timer()
        if is_over and deadline is not None and len(steps) <= (when is not None) and (when is None or when > deadline):
            world.check_bound()
            break
        if world.loop.now > forever_at:
            raise BrokenPromiseError("it goes on for ever")
        if steps and steps[0].is_housekeeping:
            steps[0].act()
            continue
        number = disturbed.get(len(widths))
        disturbances = world.disturbances() if number is not None or not is_leaf else []
        widths.append(len(disturbances))
        if len(widths) > _MAX_MOMENTS:
            raise BrokenPromiseError("it goes on for ever")
        if number is not None:
            step = disturbances[number]
        elif steps:
            step = steps[0]
        else:
            break
        world.trace.append(f"{world.loop.now - 1000:7.2f} s  {'** ' if step.is_disturbance else ''}{step.name}")
        step.act()
    world.check_end()


class _Progress:
    """Says every minute how many runs were made."""

    def __init__(self) -> None:
        self._began = self._said_at = time.perf_counter()

    def __call__(self, found: Found) -> None:
        now = time.perf_counter()
        if now - self._said_at >= 60.0:
            self._said_at = now
            print(f"{found.num_runs} runs so far, {now - self._began:.0f} s", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.hand_off", description=__doc__)
    parser.add_argument("--depth", type=int, default=1, help="disturbances in one run at most")
    options = parser.parse_args(arguments)
    found = explore(options.depth, on_run=_Progress())
    print(f"{found.num_runs} runs, {found.num_moments} states, {found.duration_s:.1f} s")
    for problem, trace in found.broken:
        print(f"\nBROKEN: {problem}")
        print("\n".join(trace))
    return 1 if found.broken else 0


if __name__ == "__main__":
    sys.exit(main())
