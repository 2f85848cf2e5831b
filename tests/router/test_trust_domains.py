"""What tenants of different trust domains learn of each other's cached prompts and pictures: nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quartet.api.request import GenerateStart
from quartet.media.media_id import in_trust_domain, media_hash
from quartet.v1 import decode_pb2
from router.tenants import TenantConfig, Tenants
from tests.router.fakes import MODEL_TEXT, Fleet, collect
from tests.router.media.test_media_encoded import PROMPT as PICTURE_PROMPT
from tests.router.media.test_media_encoded import A, B, calls_of, join
from tests.router.media_fakes import FINGERPRINT, MEDIA_TEXT, item_of
from tests.router.test_explain import explain
from tests.router.test_generate import make_start

TENANTS = {
    "acme": TenantConfig(trust_domain="acme"),
    "acme-*": TenantConfig(trust_domain="acme"),
    "rival": TenantConfig(trust_domain="rival"),
}
ACME_ID = Tenants(TENANTS).domain_id("acme")

#: Those that try to learn of the prompts of acme.
STRANGERS = [
    {"tenant": "rival"},
    {"tenant": ""},
    {"tenant": "", "cache_salt": ACME_ID},
    {"tenant": "rival", "cache_salt": ACME_ID},
    {"tenant": "", "cache_salt": "0" * 32},
]


async def num_matched(fleet: Fleet, **changes: object) -> int:
    """The most tokens that Explain says to be cached anywhere."""
    explanation = await explain(fleet, make_start(**changes))
    return max(option.num_matched_tokens for option in explanation.options)


async def num_matched_when_placed(fleet: Fleet, **changes: object) -> int:
    answer = await collect(fleet.generate(make_start(**changes)))
    assert answer.accepted is not None
    [placement] = answer.accepted.choices
    return placement.num_matched_tokens


async def test_tenants_share_caches_unless_trust_domains_are_configured() -> None:
    fleet = Fleet("prefill-0", "decode-0")
    await collect(fleet.generate(make_start(tenant="acme")))
    assert await num_matched(fleet, tenant="rival") > 0
    assert await num_matched_when_placed(fleet, tenant="rival") > 0


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_nobody_learns_what_another_domain_has_cached(stranger: dict[str, object]) -> None:
    fleet = Fleet("prefill-0", "decode-0", tenants=TENANTS)
    await collect(fleet.generate(make_start(tenant="acme")))
    assert await num_matched(fleet, **stranger) == 0
    assert await num_matched_when_placed(fleet, **stranger) == 0


async def test_tenants_of_one_domain_share_its_caches_by_salt() -> None:
    fleet = Fleet("prefill-0", "decode-0", tenants=TENANTS)
    await collect(fleet.generate(make_start(tenant="acme", cache_salt="one")))
    assert await num_matched(fleet, tenant="acme-7", cache_salt="one") > 0
    assert await num_matched(fleet, tenant="acme-7") == 0
    assert await num_matched_when_placed(fleet, tenant="acme-7", cache_salt="one") > 0


async def test_both_workers_get_the_domain_in_the_salt() -> None:
    fleet = Fleet("prefill-0", "decode-0", tenants=TENANTS)
    await collect(fleet.generate(make_start(tenant="acme", cache_salt="pepper")))
    await collect(fleet.generate(make_start(tenant="other", cache_salt="pepper")))
    await collect(fleet.generate(make_start(tenant="other")))
    salts = [(call.kind, call.start.generation.cache_salt) for call in fleet.hops.calls]
    expected = [f"{ACME_ID}pepper", f"{'0' * 32}pepper", ""]
    assert salts == [(kind, salt) for salt in expected for kind in ("prefill", "decode")]


async def test_without_domains_workers_get_the_clients_salt() -> None:
    fleet = Fleet("decode-0")
    await collect(fleet.generate(make_start(tenant="acme", cache_salt="pepper")))
    assert [call.start.generation.cache_salt for call in fleet.hops.calls] == ["pepper"] * len(fleet.hops.calls)


async def test_a_signed_start_has_the_domain_in_its_salt() -> None:
    fleet = Fleet("prefill-0", "decode-0", tenants=TENANTS)
    placed = await fleet.pipeline.place(make_start(tenant="acme"))
    signed = decode_pb2.SignedStart.FromString(placed.choices[0].next.signed_start)
    assert signed.start.generation.cache_salt == ACME_ID


def picture_fleet(tenant: str) -> Fleet:
    """A fleet with two encode workers, whose fetcher is asked for names of the tenant's domain."""
    fleet = Fleet(tenants=TENANTS)
    fleet.texts.text = replace(MODEL_TEXT, media=MEDIA_TEXT)
    for worker_id in ("encode-0", "encode-1", "prefill-0", "decode-0"):
        join(fleet, worker_id)
    fleet.media.fingerprint = in_trust_domain(FINGERPRINT, Tenants(TENANTS).domain_id(tenant))
    return fleet


def picture_start(tenant: str) -> GenerateStart:
    return make_start(tenant=tenant, prompt=PICTURE_PROMPT, media=(A, B))


async def test_pictures_of_a_domain_have_names_of_their_own_everywhere() -> None:
    fleet = picture_fleet("acme")
    await collect(fleet.generate(picture_start("acme")))
    plain = [item_of(file) for file in (A, B)]
    named = [item_of(file, fleet.media.fingerprint) for file in (A, B)]
    assert not {item.media_id for item in plain} & {item.media_id for item in named}
    # Their sizes, and where their embeddings are, are known to the domain only.
    assert fleet.sizes.find(named) is not None
    assert fleet.sizes.find(plain[:1]) is fleet.sizes.find(plain[1:]) is None
    [encode] = calls_of(fleet, "encode")
    for item in named:
        assert set(fleet.index.match((media_hash(item.media_id),))) == {encode.rank}
    for item in plain:
        assert not fleet.index.match((media_hash(item.media_id),))
    # Workers are told the domain, which they make the same names with.
    assert {call.start.context.trust_domain for call in fleet.hops.calls} == {ACME_ID}
    assert [item.media_id for item in encode.start.items] == [item.media_id for item in named]


async def test_explain_says_nothing_of_the_size_of_another_domains_picture() -> None:
    fleet = picture_fleet("acme")
    await collect(fleet.generate(picture_start("acme")))
    known = (await explain(fleet, picture_start("acme"))).num_prompt_tokens
    fleet.media.fingerprint = in_trust_domain(FINGERPRINT, Tenants(TENANTS).domain_id("rival"))
    unknown = (await explain(fleet, picture_start("rival"))).num_prompt_tokens
    untouched = picture_fleet("rival")
    assert unknown == (await explain(untouched, picture_start("rival"))).num_prompt_tokens != known
