"""One size of ``benchmarks.index``: the prefix index is filled, looked up in, and partly emptied."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import getpagesize
from typing import TypeVarTuple

from benchmarks.index_work import Workload
from quartet.discovery.base import Rank
from quartet.events.kv import Tier
from router.kv_index.index import Matches, PrefixIndex

_Given = TypeVarTuple("_Given")

_NUM_LOOKUPS = 10_000
_NUM_LOOKUPS_AT_ONCE = 1_000
_NUM_PREDICTED = 100
_NUM_REMOVED_RUNS = 2_000


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """In microseconds of wall time."""

    p50: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """One size.

    Attributes:
        num_blocks: different ones in the index.
        num_stored: counting a block once for each rank that has it.
        num_groups: mean number of different matches of a prompt.
        lookup_us: of ``PrefixIndex.match``, each prompt looked up once.
        predicted_lookup_us: the same while predictions of 100 prompts are there, each made for the rank with the
            longest match.
        predict_us: time to predict one of these, in CPU time.
        inserts_per_s: blocks stored a second of CPU time, in runs of up to 240.
        removes_per_s: blocks removed a second of CPU time, in the same runs.
        longest_store_ms: most CPU time that one run took to store: now and then the map is made anew.
        bytes_per_block: growth of resident memory over ``num_blocks``; the hashes themselves are part of it.
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
    """Measure it in this process, which is best a new one: memory that was given back would be used again."""
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
    """Of at least one time."""
    ordered = sorted(times_us)
    return Percentiles(p50=ordered[len(ordered) // 2], p99=ordered[len(ordered) * 99 // 100])


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
