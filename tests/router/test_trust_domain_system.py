"""Trust domains over real engines, block pools, hand-offs and KV events; only the model is a fake."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from quartet.discovery.base import SALTED_BLOCKS
from quartet.discovery.create import create_registry
from quartet.v1 import router_pb2 as pb
from router.config import AdmissionConfig
from router.tenants import TenantConfig
from tests.router.records import make_record
from tests.router.system import TIMEOUT_S, Stub, expected, running_system
from tests.router.test_servicer import PROMPT, generate, make_start, token_ids_of


async def cached_tokens(stub: Stub, tenant: str) -> tuple[int, int]:
    """What the placement and the usage of an answer say of it."""
    responses = await generate(stub, make_start(tenant=tenant))
    assert token_ids_of(responses) == expected(PROMPT, 12)
    matched = responses[0].accepted.choices[0].num_matched_tokens
    return matched, responses[-1].finished.usage.num_cached_tokens


async def explained_tokens(stub: Stub, tenant: str) -> int:
    response = await stub.Explain(pb.ExplainRequest(start=make_start(tenant=tenant)), timeout=TIMEOUT_S)
    return max(option.num_matched_tokens for option in response.options)


async def test_a_prompt_is_cached_for_its_own_domain_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = {"acme*": TenantConfig(trust_domain="acme"), "*": TenantConfig(isolated=True)}
    settings = {"tenants": tenants, "admission": AdmissionConfig(prediction_life_s=1e-6)}
    async with running_system(tmp_path, monkeypatch, "prefill-0", "decode-0", **settings) as (system, stub):
        assert await cached_tokens(stub, "acme") == (0, 0)
        async with asyncio.timeout(TIMEOUT_S):
            while await explained_tokens(stub, "acme") == 0:  # until the workers' events have come
                pass  # each look is a call that takes its time
        for stranger in ("rival", "other", ""):
            assert await explained_tokens(stub, stranger) == 0
            assert await cached_tokens(stub, stranger) == (0, 0)
        matched, cached = await cached_tokens(stub, "acme-2")
        assert matched > 0 and cached > 0
        await system.wait_idle()


async def test_a_router_with_trust_domains_says_what_they_cannot_do_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="router")
    tenants = {"acme": TenantConfig(trust_domain="acme")}
    async with running_system(tmp_path, monkeypatch, tenants=tenants) as (system, _stub):
        # Without certificates, whoever is on this host may be acme.
        assert [record.name for record in caplog.records] == ["router.process"]
        registry = create_registry(system.discovery)
        try:
            for worker_id in ("decode-0", "decode-1"):
                await registry.register(make_record(worker_id, unannounced_blocks=(SALTED_BLOCKS,)))
            await system.wait_workers(lambda known: len(known) == 2)
        finally:
            await registry.close()
    named = [record.args for record in caplog.records if record.name == "router.tenants"]
    assert len(named) == 1 and named[0][0] == "tiny"


@pytest.mark.parametrize("tenants", [{}, {"acme": TenantConfig()}])
async def test_a_router_without_trust_domains_says_nothing_of_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tenants: dict[str, TenantConfig],
) -> None:
    caplog.set_level(logging.WARNING, logger="router")
    async with running_system(tmp_path, monkeypatch, tenants=tenants) as (system, _stub):
        registry = create_registry(system.discovery)
        try:
            await registry.register(make_record("decode-0", unannounced_blocks=(SALTED_BLOCKS,)))
            await system.wait_workers(lambda known: len(known) == 1)
        finally:
            await registry.close()
    assert not [record for record in caplog.records if record.name in ("router.process", "router.tenants")]
