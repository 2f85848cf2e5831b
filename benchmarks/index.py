"""How fast and how large the router's prefix index is, and how soon it is complete again after a restart.

Each size is measured in a process of its own.

    python -m benchmarks.index --json FILE [--short]
"""

from __future__ import annotations

import multiprocessing
import random
import time
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import uvloop

from benchmarks.index_case import Case, Percentiles, measure_case, percentiles
from benchmarks.index_rebuild import Rebuild, measure_rebuild
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from quartet.kvcache.block_hash import sequence_hashes

_WORKERS = (10, 100, 1000)
_SHORT_BLOCKS, _LONG_BLOCKS = (1_000_000,), (1_000_000, 10_000_000)
_REBUILD_WORKERS, _REBUILD_BLOCKS = 8, 2_200_000
_REBUILD_RUNS = 5
_PROMPT_TOKENS, _BLOCK_SIZE, _VOCABULARY = 8192, 32, 128_000
_NUM_HASHED = 500


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured.

    Attributes:
        hash_us: time to hash the blocks of a prompt of 8192 tokens, by the container of its tokens.
        cases: by blocks and workers.
        rebuild_s: median wall time of ``rebuild``.
    """

    hash_us: Mapping[str, Percentiles]
    cases: Sequence[Case]
    rebuild_s: float
    rebuild: Rebuild


def main() -> None:
    """Run the command line."""
    parser = make_parser("index", __doc__)
    parser.add_argument("--short", action="store_true", help="leave out the index of 10 million blocks")
    arguments = parser.parse_args()
    report = Report("index", packages=("xxhash",), revision=arguments.commit)
    report.write(_run(_SHORT_BLOCKS if arguments.short else _LONG_BLOCKS), arguments.json)


def _run(sizes: Sequence[int]) -> Results:
    with LiveLine() as line:
        hash_us = measure_hashing()
        line.say(f"hashing: {', '.join(f'{kind} {us.p50:.0f} us' for kind, us in hash_us.items())}")
        rebuild = uvloop.run(measure_rebuild(_REBUILD_WORKERS, _REBUILD_BLOCKS, _REBUILD_RUNS))
        line.say(f"rebuild: {', '.join(f'{run_s:.2f}' for run_s in rebuild.runs_s)} s")
        cases: list[Case] = []
        for num_blocks in sizes:
            for num_workers in _WORKERS:
                cases.append(_in_new_process(num_blocks, num_workers))
                line.say(_describe(cases[-1]))
    return Results(hash_us=hash_us, cases=cases, rebuild_s=rebuild.median_s, rebuild=rebuild)


def measure_hashing() -> dict[str, Percentiles]:
    """Times of ``sequence_hashes`` for one prompt, as a list and as an array in turn."""
    rng = random.Random(1)
    token_ids = [rng.randrange(_VOCABULARY) for _ in range(_PROMPT_TOKENS)]
    prompts: dict[str, Sequence[int]] = {"list": token_ids, "array": array("I", token_ids)}
    times_us: dict[str, list[float]] = {kind: [] for kind in prompts}
    for _ in range(_NUM_HASHED):
        for kind, prompt in prompts.items():
            began = time.perf_counter_ns()
            sequence_hashes(prompt, _BLOCK_SIZE)
            times_us[kind].append((time.perf_counter_ns() - began) / 1e3)
    return {kind: percentiles(times) for kind, times in times_us.items()}


def _in_new_process(num_blocks: int, num_workers: int) -> Case:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_case, num_blocks, num_workers).result()


def _describe(case: Case) -> str:
    return (
        f"{case.num_blocks / 1e6:.0f} M blocks, {case.num_workers} workers: lookup {case.lookup_us.p50:.1f} us "
        f"(p99 {case.lookup_us.p99:.1f}), {case.inserts_per_s / 1e6:.1f} M inserts/s, "
        f"{case.removes_per_s / 1e6:.1f} M removes/s, {case.bytes_per_block:.0f} bytes a block"
    )


if __name__ == "__main__":
    main()
