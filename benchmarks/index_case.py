"""One size of the prefix index: how fast it stores, removes and looks up, and the sessions that fill it.

The workload's sessions share system prompts. A system prompt has 16 to 64 blocks, and some are far more popular than
others. A session goes on for up to 256 blocks in all (8 k tokens in blocks of 32). One rank served it, and in three
of ten cases a second rank served it too, up to some block.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import getpagesize
from typing import TypeVarTuple

from quartet.discovery.base import Rank, Role, WorkerRecord
from quartet.discovery.host import host_identity
from quartet.events.kv import Tier
from router.kv_index.index import Matches, PrefixIndex

_Given = TypeVarTuple("_Given")
_NUM_LOOKUPS = 10_000
_NUM_LOOKUPS_AT_ONCE = 1_000
_NUM_PREDICTED = 100
_NUM_REMOVED_RUNS = 2_000
#: Blocks of one prompt, and tokens of a block.
PROMPT_BLOCKS, BLOCK_SIZE = 256, 32
_NUM_SYSTEM_PROMPTS = 100
_SYSTEM_PROMPT_BLOCKS = (16, 64)
_SECOND_PLACE_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Percentiles, in microseconds of wall time."""

    p50: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """One size.

    Attributes:
        num_blocks: distinct blocks in the index.
        num_stored: the same, counting a block once for each rank that has it.
        num_groups: mean number of different matches of a prompt.
        lookup_us: of ``PrefixIndex.match``, each prompt looked up once.
        predicted_lookup_us: the same while the index also holds predictions for 100 prompts, each made for the rank
            with the longest match.
        predict_us: CPU time to predict one of these.
        inserts_per_s: blocks stored in a second of CPU time, in runs of up to 240.
        removes_per_s: blocks removed in a second of CPU time, in the same runs.
        longest_store_ms: most CPU time that storing one run took: now and then the index rebuilds its map.
        bytes_per_block: growth of resident memory over ``num_blocks``, the hashes themselves included.
    """

    num_blocks: int
    num_workers: int
    num_stored: int
    num_groups: float
    lookup_us: Percentiles
    predicted_lookup_us: Percentiles
    predict_us: float
    inserts_per_s: float
    removes_per_s: float
    longest_store_ms: float
    bytes_per_block: float


def measure_case(num_blocks: int, num_workers: int) -> Case:
    """Measure one size in this process. Use a new process: an old one would reuse memory that it has freed."""
    workload = Workload(num_blocks, num_workers)
    ranks = [Rank(f"worker-{number}") for number in range(num_workers)]
    before_bytes = _resident_bytes()
    index = PrefixIndex()
    stored_s = [
        _cpu_s(lambda run, hashes: index.store(ranks[run.worker], run.parent_hash, hashes), run, run.hashes.tolist())
        for run in workload.runs
    ]
    size_bytes = _resident_bytes() - before_bytes
    lookup_us, num_groups = _look_up(index, workload)
    predicted_s = []
    for prompt in workload.prompts(_NUM_PREDICTED):
        rank = next(iter(index.match(prompt)), ranks[0])
        predicted_s.append(_cpu_s(lambda rank, prompt: index.predict(rank, prompt, 1.0), rank, prompt))
    predicted_lookup_us, _ = _look_up(index, workload)
    num_stored_blocks = index.num_blocks(Tier.DEVICE)
    removed = workload.runs[-_NUM_REMOVED_RUNS:]
    removed_s = [
        _cpu_s(lambda run, hashes: index.remove(ranks[run.worker], hashes), run, run.hashes[::-1].tolist())
        for run in removed
    ]
    return Case(
        num_blocks=num_stored_blocks,
        num_workers=num_workers,
        num_stored=workload.num_stored,
        num_groups=num_groups,
        lookup_us=lookup_us,
        predicted_lookup_us=predicted_lookup_us,
        predict_us=1e6 * sum(predicted_s) / len(predicted_s),
        inserts_per_s=workload.num_stored / sum(stored_s),
        removes_per_s=sum(len(run.hashes) for run in removed) / sum(removed_s),
        longest_store_ms=1e3 * max(stored_s),
        bytes_per_block=size_bytes / num_stored_blocks,
    )


def percentiles(times_us: Sequence[float]) -> Percentiles:
    """The percentiles of at least one time."""
    ordered = sorted(times_us)
    return Percentiles(p50=ordered[len(ordered) // 2], p99=ordered[len(ordered) * 99 // 100])


def make_record(worker_id: str, role: Role, num_blocks: int) -> WorkerRecord:
    """A worker whose blocks hold 32 tokens; it can't be reached."""
    return WorkerRecord(
        worker_id=worker_id,
        role=role,
        epoch=1,
        grpc_address="127.0.0.1:1",
        events_address="",
        model_name="model",
        model_fingerprint="0" * 64,
        host=host_identity(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=131_072,
        transfer_ways=(),
        sampling_fields=(),
        contract_version="quartet.v1",
    )


@dataclass(frozen=True)
class StoredRun:
    """Blocks that one rank stores at once.

    Attributes:
        worker: its number.
        parent_hash: hash of the block before them.
        hashes: packed; ``tolist()`` makes new integers, as reading a message does.
    """

    worker: int
    parent_hash: int | None
    hashes: array[int]


class Workload:
    """At least ``num_blocks`` distinct blocks at ``num_workers`` ranks; the same numbers give the same workload."""

    def __init__(self, num_blocks: int, num_workers: int) -> None:
        self._rng = random.Random(f"{num_blocks} {num_workers}")
        self._system_prompts = [
            self._hashes(self._rng.randint(*_SYSTEM_PROMPT_BLOCKS)) for _ in range(_NUM_SYSTEM_PROMPTS)
        ]
        self._sessions: list[_Session] = []
        self.runs: list[StoredRun] = []
        self._fill(num_blocks, num_workers)

    @property
    def num_stored(self) -> int:
        """Blocks of all runs: a block counts once for each rank."""
        return sum(len(run.hashes) for run in self.runs)

    def prompts(self, count: int) -> Iterator[list[int]]:
        """Prompts that each follow some session for none, some or all of its blocks, and then have their own."""
        for _ in range(count):
            session = self._rng.choice(self._sessions)
            prompt = (session.system_prompt + session.own)[: self._rng.randint(0, PROMPT_BLOCKS)]
            yield (prompt + self._hashes(PROMPT_BLOCKS - len(prompt))).tolist()

    def _fill(self, num_blocks: int, num_workers: int) -> None:
        weights = [1 / rank for rank in range(1, _NUM_SYSTEM_PROMPTS + 1)]
        at_rank: set[tuple[int, int]] = set()

        def serve(worker: int, which: int, own: array[int]) -> None:
            system_prompt = self._system_prompts[which]
            if (worker, which) not in at_rank:
                at_rank.add((worker, which))
                self.runs.append(StoredRun(worker, None, system_prompt))
            self.runs.append(StoredRun(worker, system_prompt[-1], own))

        num_made = 0
        while num_made < num_blocks:
            [which] = self._rng.choices(range(_NUM_SYSTEM_PROMPTS), weights)
            own = self._hashes(PROMPT_BLOCKS - len(self._system_prompts[which]))
            self._sessions.append(_Session(self._system_prompts[which], own))
            num_made += len(own)
            serve(self._rng.randrange(num_workers), which, own)
            if self._rng.random() < _SECOND_PLACE_SHARE:
                serve(self._rng.randrange(num_workers), which, own[: self._rng.randint(1, len(own))])

    def _hashes(self, count: int) -> array[int]:
        return array("Q", self._rng.randbytes(8 * count))


def _look_up(index: PrefixIndex, workload: Workload) -> tuple[Percentiles, float]:
    """Times, and the mean number of different matches of a prompt."""
    times_us: list[float] = []
    num_groups = 0
    for _ in range(_NUM_LOOKUPS // _NUM_LOOKUPS_AT_ONCE):
        prompts = list(workload.prompts(_NUM_LOOKUPS_AT_ONCE))
        found: list[Matches] = []
        for prompt in prompts:
            began = time.perf_counter_ns()
            matches = index.match(prompt)
            times_us.append((time.perf_counter_ns() - began) / 1e3)
            found.append(matches)
        num_groups += sum(len({match for _, match in matches.items()}) for matches in found)
    return percentiles(times_us), num_groups / len(times_us)


def _cpu_s(call: Callable[[*_Given], object], *arguments: *_Given) -> float:
    began = time.thread_time()
    call(*arguments)
    return time.thread_time() - began


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * getpagesize()


@dataclass(frozen=True)
class _Session:
    system_prompt: array[int]
    own: array[int]
