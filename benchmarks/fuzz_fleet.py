"""The processes under fuzz, one of each role with an etcd, and what must hold of them after each batch of inputs."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import struct
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.fuzz_messages import Known
from benchmarks.processes import Metrics
from benchmarks.stack import Stack
from quartet.config import build
from quartet.discovery.etcd_client import EtcdConfig
from quartet.errors import ConfigError
from quartet.kvcache.layout import DTYPE_SIZE_BYTES
from quartet.rpc.channels import create_channel
from quartet.v1 import (
    decode_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from services.topology.child import start_child
from services.topology.launch import etcd_answers, etcd_command, find_etcd, own_etcd
from services.topology.topology import Topology

#: The name of the router's process.
ROUTER = "router"
#: Names of the workers' processes, which are their ids.
ENCODE, PREFILL, DECODE = "encode-0", "prefill-0", "decode-0"
MODEL = "mock"
NAMESPACE = "fuzz"
#: An event loop that used more CPU time than this while a timer waited has stalled.
MAX_STALL_S = 0.2

_PROBE_BOUND_S = 30.0
_SETTLE_BOUND_S = 60.0
_ETCD_BOUND_S = 30.0
_POLL_S = 0.1
# Workers refresh the figures of their metrics once a second.
_FRESH_S = 1.3
_NUM_PROBE_TOKENS = 6

_STALL = "quartet_process_event_loop_longest_stall_seconds"
_STALLS = "quartet_process_event_loop_stall_seconds"
_ENTRY = re.compile(r"[\w-]+: \d{4}-\S+Z (?P<level>[A-Z]+) (?P<logger>[\w.]+): ")
# gRPC logs messages that do not parse and answers to clients that have gone; it ends these calls as it should.
_OTHERS = "grpc."
# Everything that must be at nought when nothing is asked.
_HELD: Sequence[tuple[str, Mapping[str, str]]] = (
    ("quartet_worker_blocks", {"state": "used"}),
    ("quartet_worker_blocks", {"state": "held"}),
    ("quartet_encode_blocks", {"state": "used"}),
    ("quartet_encode_blocks", {"state": "held"}),
    ("quartet_encode_running_items", {}),
    ("quartet_encode_waiting_items", {}),
    ("quartet_router_queued_requests", {}),
    ("quartet_router_running_requests", {}),
)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One process at one time.

    Attributes:
        private_mb: its memory that no file and no shared pool backs.
        num_files: open file descriptors.
        num_threads: its threads.
    """

    private_mb: float
    num_files: int
    num_threads: int


@dataclass(frozen=True, kw_only=True)
class MadeHandOff:
    """A hand-off that the prefill worker has made.

    Attributes:
        hand_off, start: the messages ``HandOff`` and ``DecodeStart``, as bytes; the start continues it.
        piece_size_bytes: of its blocks.
    """

    hand_off: bytes
    start: bytes
    piece_size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """The event loop of one process since its start.

    Attributes:
        longest_s: most CPU time that its thread used while a timer waited.
        num_over: how often that was more than the limit.
    """

    longest_s: float
    num_over: int


class Fleet:
    """A running fleet; ``start_fleet`` makes it.

    Attributes:
        known: what messages can name.
        etcd: where the workers' records are.
        addresses: gRPC ``host:port`` by process.
        records: the workers' own, by process.
        hand_offs: those that ``make_hand_offs`` had made; they expire soon.
    """

    def __init__(self, stack: Stack, etcd: EtcdConfig, log: Path) -> None:
        self.known = Known(model=MODEL)
        self.etcd = etcd
        self.addresses: dict[str, str] = {}
        self.records: dict[str, worker_pb2.WorkerRecord] = {}
        self.hand_offs: list[MadeHandOff] = []
        self._stack = stack
        self._log, self._log_at = log, 0

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by name."""
        return self._stack.pids

    @property
    def ended(self) -> Sequence[str]:
        """How each process that should run has ended, with the last lines of its log."""
        return self._stack.ended

    async def learn(self) -> None:
        """Fill ``known``, ``addresses`` and ``records``."""
        self.addresses = {ROUTER: self._stack.router_address, **self._stack.worker_addresses}
        for name, address in self._stack.worker_addresses.items():
            async with create_channel(address, None) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                answer = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=_PROBE_BOUND_S)
            self.records[name] = answer.record
        records = self.records.values()
        self.known.fingerprint = next(iter(records)).model_fingerprint
        self.known.worker_ids = sorted(self.records)
        self.known.epochs = [self.records[name].epoch for name in self.known.worker_ids]
        self.known.addresses = [self.records[name].grpc_address for name in self.known.worker_ids]

    async def make_hand_offs(self, number: int) -> None:
        """Have the prefill worker make so many hand-offs, which ``known`` then names too."""
        prompt = struct.pack("<70I", *range(100, 170))
        generation = types_pb2.Generation(prompt_token_ids=prompt, sampling=types_pb2.Sampling(max_tokens=8))
        generation.sampling.ignore_eos = True
        made = []
        async with create_channel(self.addresses[PREFILL], None) as channel:
            call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(timeout=_PROBE_BOUND_S)
            for slot in range(number):
                generation.cache_salt = f"made-{slot}"
                start = prefill_pb2.PrefillStart(slot=slot, generation=generation)
                await call.write(prefill_pb2.PrefillRequest(start=start))
            await call.done_writing()
            async for message in call:
                made += [_made(generation, output.result) for output in message.outputs if output.result.token_id]
        self.hand_offs = made
        hand_offs = [types_pb2.HandOff.FromString(item.hand_off) for item in made]
        self.known.tickets = [(item.hand_off_id, item.secret, item.epoch) for item in hand_offs]

    async def make_signed_starts(self, number: int) -> None:
        """Have the router place so many requests, whose signed starts ``known`` then names."""
        start = router_pb2.GenerateStart(
            model=MODEL,
            token_ids=router_pb2.TokenIds(ids=range(100, 140)),
            sampling=types_pb2.Sampling(max_tokens=4, ignore_eos=True),
        )
        self.known.signed = []
        async with create_channel(self.addresses[ROUTER], None) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            for _ in range(number):
                answer = await stub.Place(router_pb2.PlaceRequest(start=start), timeout=_PROBE_BOUND_S)
                signed = [choice.stream for choice in answer.choices if choice.HasField("stream")]
                self.known.signed += [(item.signed_start, item.key_id, item.mac) for item in signed]

    async def probe(self) -> str | None:
        """Ask every process for something ordinary; what went wrong, if anything did."""
        try:
            async with asyncio.timeout(_PROBE_BOUND_S):
                await self._answer()
                for name, address in self.addresses.items():
                    await _check_health(name, address)
        except TimeoutError:
            return f"not answered in {_PROBE_BOUND_S:g} s"
        except (grpc.aio.AioRpcError, _ProbeError) as error:
            code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else ""
            return f"{code} {error.details() if isinstance(error, grpc.aio.AioRpcError) else error}"
        return None

    async def stalls(self) -> dict[str, Stalls]:
        """By process."""
        return {name: _stalls(metrics) for name, metrics in (await self._stack.metrics()).items()}

    def new_errors(self) -> list[str]:
        """What processes have logged as errors since the last call, tracebacks included: nothing foresaw these."""
        with self._log.open(encoding="utf-8", errors="replace") as log:
            log.seek(self._log_at)
            lines = log.read().splitlines()
            self._log_at = log.tell()
        return _errors(lines)

    async def settle(self) -> list[str]:
        """Wait until nothing is held; what still is after a minute."""
        deadline = time.monotonic() + _SETTLE_BOUND_S
        num_clean, held = 0, list[str]()
        while num_clean < 2:
            held = self._held(await self._stack.metrics())
            num_clean = 0 if held else num_clean + 1
            if held and time.monotonic() > deadline:
                break
            if num_clean < 2:
                await asyncio.sleep(_FRESH_S)
        return held

    def memory(self) -> dict[str, Memory]:
        """By process."""
        return {name: _memory(pid) for name, pid in self.pids.items() if Path(f"/proc/{pid}").exists()}

    def _held(self, by_name: Mapping[str, Metrics]) -> list[str]:
        found = []
        for name, metrics in by_name.items():
            for metric, labels in _HELD:
                if value := metrics.total(metric, **labels):
                    found.append(f"{name}: {metric} {'/'.join(labels.values())} {value:g}")
        return found

    async def _answer(self) -> None:
        start = router_pb2.GenerateStart(
            model=MODEL,
            token_ids=router_pb2.TokenIds(ids=range(100, 170)),
            sampling=types_pb2.Sampling(max_tokens=_NUM_PROBE_TOKENS, ignore_eos=True),
            timeout=Duration(seconds=int(_PROBE_BOUND_S)),
        )
        num_tokens = 0
        async with create_channel(self.addresses[ROUTER], None) as channel:
            call = router_pb2_grpc.RouterServiceStub(channel).Generate()
            await call.write(router_pb2.GenerateRequest(start=start))
            await call.done_writing()
            async for message in call:
                num_tokens += len(message.delta.token_ids)
        if num_tokens != _NUM_PROBE_TOKENS:
            raise _ProbeError(f"{num_tokens} tokens came, not {_NUM_PROBE_TOKENS}")


class _ProbeError(Exception):
    """A probe was answered, but wrongly."""


def _errors(lines: Sequence[str]) -> list[str]:
    """The first and the last line of each entry of level ERROR and above."""
    found, is_error = list[list[str]](), False
    for line in lines:
        if entry := _ENTRY.match(line):
            is_error = entry["level"] in ("ERROR", "CRITICAL") and not entry["logger"].startswith(_OTHERS)
            if is_error:
                found.append([line])
        elif is_error:
            found[-1][1:] = [line]
    return [" ... ".join(entry) for entry in found]


def _made(generation: types_pb2.Generation, result: prefill_pb2.PrefillResult) -> MadeHandOff:
    continued = types_pb2.Generation()
    continued.CopyFrom(generation)
    continued.generated_token_ids = struct.pack("<I", result.token_id)
    layout = result.hand_off.blocks.layout
    num_values = layout.num_layers * 2 * layout.block_size * layout.num_kv_heads * layout.head_dim
    return MadeHandOff(
        hand_off=result.hand_off.SerializeToString(),
        start=decode_pb2.DecodeStart(generation=continued).SerializeToString(),
        piece_size_bytes=num_values * DTYPE_SIZE_BYTES[layout.dtype],
    )


@asynccontextmanager
async def start_fleet(directory: Path, on_progress: Callable[[str], None]) -> AsyncIterator[Fleet]:
    """Start etcd, a router and one worker of each role; their output goes to files in ``directory``.

    Raises:
        ConfigError: this machine has no etcd.
        RuntimeError: a process ended at its start.
    """
    binary = find_etcd()
    if binary is None:
        raise ConfigError("this machine has no etcd: run `make tools`, or install etcd-server")
    etcd = own_etcd(EtcdConfig(namespace=NAMESPACE))
    shutil.rmtree(directory / "etcd", ignore_errors=True)
    child = await start_child("etcd", etcd_command(binary, etcd, directory / "etcd"), os.environ, lambda _line: None)
    try:
        await _wait_etcd(etcd)
        log = directory / "fuzz.log"
        async with Stack(build(Topology, _settings(etcd)), log, on_progress) as stack:
            fleet = Fleet(stack, etcd, log)
            await fleet.learn()
            yield fleet
    finally:
        child.send(signal.SIGKILL)
        await child.wait()
        child.kill_rest()


def _settings(etcd: EtcdConfig) -> dict[str, object]:
    log = {"log": {"level": "warning"}}
    # Short limits, so that what waits for a client that is gone ends within a batch.
    worker = {
        **log,
        "transfer": {"hand_off_ttl_s": 3.0, "max_pull_s": 6.0, "stall_timeout_s": 3.0},
        "streams": {"stall_timeout_s": 5.0, "chunks_timeout_s": 5.0},
    }
    router = {
        **log,
        "admission": {"queue_timeout_s": 8.0, "unavailable_timeout_s": 8.0},
        "max_request_timeout_s": 12.0,
        "stall_timeout_s": 5.0,
        "policy": {"local_prefill_max_tokens": 0},
        "media": {"allowed_schemes": ["http"], "allowed_hosts": ["*:1"], "fetch_timeout_s": 2.0},
    }
    engine = {"kind": "mock", "num_blocks": 2048, "max_model_len": 1024, "mock": {"speed_up": 1000}}
    encode = {**worker, "engine": {"kind": "torch", "dtype": "float32", "num_threads": 1}}
    return {
        "namespace": NAMESPACE,
        "model": {"path": "models/tiny/checkpoint", "name": MODEL},
        "discovery": {"kind": "etcd", "etcd": {"endpoints": list(etcd.endpoints)}},
        "engine": engine,
        "router": {"overrides": router},
        "workers": [
            {"role": "encode", "overrides": encode},
            {"role": "prefill", "overrides": worker},
            {"role": "decode", "overrides": worker},
        ],
        "drain_timeout_s": 0.5,
    }


async def _wait_etcd(etcd: EtcdConfig) -> None:
    async with asyncio.timeout(_ETCD_BOUND_S):
        while not await etcd_answers(etcd):  # noqa: ASYNC110 - another process has no event to wait for
            await asyncio.sleep(_POLL_S)


async def _check_health(name: str, address: str) -> None:
    async with create_channel(address, None) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise _ProbeError(f"{name} is {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")


def _stalls(metrics: Metrics) -> Stalls:
    count = metrics.total(f"{_STALLS}_count") - metrics.total(f"{_STALLS}_bucket", le=f"{MAX_STALL_S:g}")
    return Stalls(longest_s=metrics.total(_STALL), num_over=round(count))


def _memory(pid: int) -> Memory:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    found = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith(("RssAnon", "Threads"))}
    return Memory(
        private_mb=int(found["RssAnon"]) / 1000,
        num_files=len(os.listdir(f"/proc/{pid}/fd")),
        num_threads=int(found["Threads"]),
    )
