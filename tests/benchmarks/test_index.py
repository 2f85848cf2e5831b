"""The benchmark of the prefix index fills it with what it says, and rebuilds it from real processes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.index import measure_hashing
from benchmarks.index_case import PROMPT_BLOCKS, Workload, measure_case, percentiles
from benchmarks.index_rebuild import measure_rebuild
from quartet.discovery.base import Rank
from quartet.events.kv import Tier
from router.kv_index.index import PrefixIndex


def fill(workload: Workload) -> PrefixIndex:
    index = PrefixIndex()
    for run in workload.runs:
        assert index.store(Rank(str(run.worker)), run.parent_hash, run.hashes.tolist())
    return index


def test_a_workload_has_its_blocks_and_is_the_same_each_time() -> None:
    workload, again, other = Workload(5_000, 7), Workload(5_000, 7), Workload(5_000, 8)
    assert workload.runs == again.runs != other.runs
    assert 5_000 <= fill(workload).num_blocks(Tier.DEVICE) < workload.num_stored
    assert {run.worker for run in workload.runs} == set(range(7))


def test_prompts_follow_a_session_to_any_depth_and_share_their_beginnings() -> None:
    workload = Workload(5_000, 7)
    index = fill(workload)
    prompts = list(workload.prompts(300))
    assert {len(prompt) for prompt in prompts} == {PROMPT_BLOCKS}
    depths = sorted(max((match.num_blocks for match in index.match(prompt).values()), default=0) for prompt in prompts)
    assert depths[0] < 16
    assert depths[-1] > 240
    assert max(after - before for before, after in pairwise(depths)) < 32
    assert sum(len(index.match(prompt)) > 1 for prompt in prompts) > 100


def test_a_case_is_measured_in_full() -> None:
    case = measure_case(3_000, 5)
    assert case.num_blocks >= 3_000
    assert case.num_stored > case.num_blocks
    assert case.num_groups > 1
    assert 0 < case.lookup_us.p50 <= case.lookup_us.p99
    assert min(case.inserts_per_s, case.removes_per_s, case.predict_us, case.longest_store_ms) > 0


async def test_an_index_is_rebuilt_from_snapshots_of_real_processes() -> None:
    rebuild = await measure_rebuild(num_workers=2, num_blocks=40_000, num_runs=2)
    assert len(rebuild.runs_s) == 2
    assert rebuild.router_cpu_s > 0
    assert min(rebuild.runs_s) <= rebuild.median_s <= max(rebuild.runs_s)


def test_hashing_is_measured_for_lists_and_arrays() -> None:
    assert measure_hashing().keys() == {"list", "array"}


@pytest.mark.parametrize(("times_us", "p50", "p99"), [([3.0], 3.0, 3.0), (list(map(float, range(200))), 100.0, 198.0)])
def test_percentiles_are_of_the_times(times_us: list[float], p50: float, p99: float) -> None:
    found = percentiles(times_us[::-1])
    assert (found.p50, found.p99) == (p50, p99)
