"""What Prometheus is told of models and processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from quartet.api.fleet import WorkerState, WorkerStatus
from quartet.discovery.base import Role, WorkerRecord
from quartet.telemetry.targets import Target
from quartet.telemetry.vllm_names import AdapterFigures, ModelFigures
from router.observed import ObservedModels, RequiredRoles, adapter_figures, scrape_targets
from router.workers import PoolKey
from tests.discovery.records import make_router
from tests.router.http.face import until
from tests.router.records import make_load, make_record
from tests.router.system import running_system


def status(
    record: WorkerRecord, num_requests: int = 0, state: WorkerState = WorkerState.READY, **load: object
) -> WorkerStatus:
    return WorkerStatus(
        record=record,
        state=state,
        load=make_load(record, **load) if load else None,
        load_age_s=None,
        num_requests=num_requests,
    )


def num_lines(page: CollectorRegistry) -> int:
    return len([line for line in generate_latest(page).splitlines() if line.startswith(b"vllm:")])


def test_a_models_figures_are_those_of_its_decode_ranks() -> None:
    old, new = "ab" * 32, "cd" * 32
    statuses = [
        status(make_record("decode-0", data_parallel_size=2), 3, num_in_use_blocks=10, num_held_blocks=5),
        status(
            make_record("decode-1", model_fingerprint=new, max_model_len=3000),
            4,
            num_in_use_blocks=1,
            num_cached_blocks=50,
        ),
        status(make_record("prefill-0"), 9, num_in_use_blocks=70),
        status(make_record("decode-9", model_name="other", block_size=32)),
    ]
    waiting = {PoolKey("tiny", old): 2, PoolKey("tiny", new): 5}
    tiny, other = (
        ModelFigures(
            model="tiny",
            num_waiting=7,
            num_running=7,
            num_used_blocks=31,
            num_total_blocks=300,
            block_size=10,
            max_model_len=3000,
        ),
        ModelFigures(
            model="other",
            num_waiting=0,
            num_running=0,
            num_used_blocks=0,
            num_total_blocks=0,
            block_size=32,
            max_model_len=2000,
        ),
    )
    assert ObservedModels().read(statuses, lambda pool: waiting.get(pool, 0)) == [other, tiny]


def test_a_model_whose_workers_left_keeps_its_line_and_its_longest_sequence() -> None:
    models, waiting = ObservedModels(), {PoolKey("tiny", "ab" * 32): 2}
    long, short = (status(make_record(f"decode-{length}", max_model_len=length)) for length in (4000, 2000))

    def read(*statuses: WorkerStatus) -> list[tuple[int, int, int, bool]]:
        found = models.read(statuses, lambda pool: waiting.get(pool, 0))
        return [(one.max_model_len, one.num_waiting, one.block_size, one.has_workers) for one in found]

    assert read() == []
    assert read(long, short) == [(4000, 2, 10, True)]
    assert read(short) == [(4000, 2, 10, True)]
    assert read() == [(4000, 2, 10, False)], "what waits for a worker still does"
    assert read(short) == [(4000, 2, 10, True)]


async def test_a_routers_page_keeps_a_model_whose_workers_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = {"model_name": "tiny", "engine": "0"}
    async with running_system(tmp_path, monkeypatch, "prefill-0", "decode-0") as (system, _stub):
        assert system.router_metrics is not None
        page = system.router_metrics._registry
        await until(lambda: page.get_sample_value("vllm:kv_cache_usage_perc", labels) == 0)  # it has reported
        lines = num_lines(page)
        assert page.get_sample_value("vllm:num_requests_running", labels) == 0
        required = {"model": "tiny", "role": "decode"}
        assert page.get_sample_value("quartet_router_missing_roles", required) == 0
        await system.workers["decode-0"].end()
        await until(lambda: page.get_sample_value("vllm:kv_cache_usage_perc", labels) == 1)
        assert page.get_sample_value("vllm:num_requests_running", labels) == 0
        assert num_lines(page) == lines
        assert page.get_sample_value("quartet_router_missing_roles", required) == 1


def test_a_required_role_without_a_ready_worker_is_missing_for_as_long_as_that_lasts() -> None:
    required = RequiredRoles([Role.DECODE, Role.PREFILL])
    prefill, other = status(make_record("prefill-0")), status(make_record("decode-9", model_name="other"))
    lost = status(make_record("decode-0"), state=WorkerState.SUSPECT)
    assert required.read([]) == {("", "decode"): True, ("", "prefill"): True}
    only_prefill = {("tiny", "decode"): True, ("tiny", "prefill"): False}
    assert required.read([prefill]) == only_prefill
    assert required.read([prefill, lost, other]) == {
        ("other", "decode"): False,
        ("other", "prefill"): True,
        **only_prefill,
    }
    assert required.read([]) == {(model, role): True for model in ("other", "tiny") for role in ("decode", "prefill")}


def test_a_role_that_is_not_required_is_not_missed() -> None:
    required = RequiredRoles([Role.DECODE])
    assert required.read([status(make_record("encode-0", model_name="other"))]) == {("", "decode"): True}
    assert required.read([status(make_record("decode-0"))]) == {("tiny", "decode"): False}


def test_adapters_of_all_workers_are_counted_once() -> None:
    statuses = [status(make_record(f"decode-{number}", adapters=("a", f"b{number}"))) for number in range(2)]
    assert adapter_figures(statuses, {"a"}, ["b1"]) == AdapterFigures(num_served=3, waiting={"a"}, running=["b1"])


def test_processes_that_say_where_their_metrics_are_can_be_scraped() -> None:
    statuses = [status(make_record("decode-0", http_address="10.0.0.2:9000")), status(make_record("prefill-0"))]
    routers = [make_router("router-0"), make_router("router-1", metrics_address="")]
    assert scrape_targets(statuses, routers, "here", host="127.0.0.1", is_near=True) == [
        Target(address="127.0.0.1:9090", role="router", worker_id="router-0", namespace="here"),
        Target(address="10.0.0.2:9000", role="decode", worker_id="decode-0", namespace="here", model="tiny"),
    ]


def test_metrics_on_loopback_are_for_who_asks_on_that_host() -> None:
    statuses = [
        status(make_record("decode-0", grpc_address="10.0.0.1:50103", http_address="127.0.0.1:50105")),
        status(make_record("decode-1", grpc_address="10.0.0.2:50103", http_address="127.0.0.1:50105")),
        status(make_record("decode-2", grpc_address="10.0.0.3:50103", http_address="10.0.0.3:50105")),
        status(make_record("decode-3", grpc_address="127.0.0.1:50203", http_address="[::1]:50205")),
    ]
    routers = [
        make_router("left", grpc_address="10.0.0.1:50050", metrics_address="127.0.0.1:50102"),
        make_router("right", grpc_address="10.0.0.2:50050", metrics_address="127.0.0.1:50102"),
    ]

    def names(host: str, *, is_near: bool) -> list[str]:
        return [target.worker_id for target in scrape_targets(statuses, routers, "here", host=host, is_near=is_near)]

    assert names("10.0.0.1", is_near=True) == ["left", "decode-0", "decode-2", "decode-3"]
    assert names("10.0.0.2", is_near=True) == ["right", "decode-1", "decode-2", "decode-3"]
    assert names("", is_near=True) == ["decode-2", "decode-3"], "a router that nobody can dial has no host"
    assert names("10.0.0.1", is_near=False) == ["decode-2"]
