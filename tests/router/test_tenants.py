"""Which configuration is a tenant's, which caches it shares, and which tenants an identity may use."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quartet.config import build
from quartet.errors import ConfigError, InvalidRequestError, PermissionDeniedError
from router import tenants as module
from router.config import RouterConfig
from router.tenants import UNNAMED, TenantConfig, TenantNames, Tenants, UnannouncedSalts, salt_in_domain
from tests.router.records import make_record

TLS = {"ca_file": "ca.pem", "cert_file": "router.pem", "key_file": "router.key"}


def in_domain(name: str) -> TenantConfig:
    return TenantConfig(trust_domain=name)


def test_a_name_counts_before_patterns_and_the_first_pattern_before_others() -> None:
    first, second, exact = in_domain("first"), in_domain("second"), in_domain("exact")
    tenants = Tenants({"acme-*": first, "a*": second, "acme-7": exact})
    assert [tenants.config(name) for name in ("acme-7", "acme-8", "abc")] == [exact, first, second]
    assert tenants.config("Acme-8") == tenants.config("xacme-8") == tenants.config("") == TenantConfig()


def test_a_tenant_that_is_named_like_a_pattern_gets_no_more_than_the_pattern_gives() -> None:
    everyone, wide = in_domain("everyone"), in_domain("wide")
    assert Tenants({"*": everyone, "a*": wide}).config("a*") == everyone


def test_tenants_of_one_domain_have_its_id_and_others_have_not() -> None:
    tenants = Tenants({"acme": in_domain("acme"), "acme-*": in_domain("acme"), "own-*": TenantConfig(isolated=True)})
    ids = [tenants.domain_id(name) for name in ("acme", "acme-7", "own-1", "own-2", "else", "")]
    assert ids[0] == ids[1]
    assert ids[4:] == ["", ""]
    assert len(set(ids[1:5])) == 4
    assert all(re.fullmatch("[0-9a-f]{32}", id) for id in ids[:4])


def test_a_tenant_of_its_own_domain_cannot_take_the_name_of_a_domain_to_be_in_it() -> None:
    for own in (TenantConfig(isolated=True), TenantConfig(isolated=True, trust_domain="gold")):
        tenants = Tenants({"acme": in_domain("gold"), "*": own})
        assert len({tenants.domain_id(name) for name in ("acme", "gold", "", "null", '", "')}) == 5


def test_domains_of_isolated_tenants_depend_on_the_configured_name() -> None:
    named, other, unnamed = (TenantConfig(isolated=True, trust_domain=name) for name in ("a", "b", None))
    assert len({config.domain_id("acme") for config in (named, other, unnamed)}) == 3


_IDS = ["", *(in_domain(name).domain_id("") for name in "abc")]


@example("", _IDS[1], f"{_IDS[1]}x", "x")  # a salt that begins with a domain's id
@given(
    st.sampled_from(_IDS),
    st.sampled_from(_IDS),
    *[st.text(max_size=5) | st.sampled_from([*_IDS, *(f"{id}x" for id in _IDS), "0" * 32])] * 2,
)
def test_different_domains_or_salts_give_different_salts_for_workers(
    domain: str, other_domain: str, salt: str, other_salt: str
) -> None:
    is_equal = (domain, salt) == (other_domain, other_salt)
    assert (salt_in_domain(domain, salt) == salt_in_domain(other_domain, other_salt)) is is_equal


def test_without_domain_and_salt_workers_get_no_salt() -> None:
    assert salt_in_domain("", "") == ""


def test_made_up_names_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_KNOWN", 10)
    tenants = Tenants({"*": TenantConfig(isolated=True)})
    ids = {tenants.domain_id(f"tenant-{number}") for number in range(100)}
    assert len(ids) == 100
    assert len(tenants._domain_ids) <= 10


def test_a_configuration_without_domains_separates_nothing() -> None:
    assert not Tenants().has_domains
    assert not Tenants({"acme": TenantConfig()}).has_domains
    assert Tenants({"acme": in_domain("acme")}).has_domains
    assert Tenants({"*": TenantConfig(isolated=True)}).has_domains


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tenants": {"acme": {"trust_domain": ""}}}, "tenants.acme.trust_domain: must not be empty"),
        ({"tenants": {"acme": {"trust_domains": "a"}}}, "tenants.acme.trust_domains: unknown"),
        ({"tenants": {"acme": "gold"}}, "tenants.acme: must be a mapping"),
        (
            {"tenants": {"acme": {"isolated": True}}, "server": {"address": "0.0.0.0:0", "insecure": True}},
            "tenants: beyond loopback",
        ),
        (
            {
                "tenants": {"acme": {"isolated": True}},
                "server": {"address": "0.0.0.0:0", "tls": {**TLS, "require_client_cert": False}},
            },
            "tenants: beyond loopback",
        ),
        ({"identity_tenants": {"front": ["acme"]}}, "identity_tenants: takes server.tls"),
        ({"identity_tenants": {"front": []}, "server": {"tls": TLS}}, "identity_tenants.front: must list"),
        ({"identity_tenants": {"front": [""]}, "server": {"tls": TLS}}, "identity_tenants.front: must list"),
        (
            {"identity_tenants": {"front": ["acme"]}, "trusted_gateways": ["front"], "server": {"tls": TLS}},
            "identity_tenants.front: also in trusted_gateways",
        ),
    ],
)
def test_an_impossible_configuration_is_refused_by_its_setting(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        build(RouterConfig, {"events_key_file": "events.key", **settings})


def test_a_configuration_with_certificates_may_separate_tenants_beyond_loopback() -> None:
    settings = {
        "tenants": {"acme-*": {"trust_domain": "acme"}, "*": {"isolated": True}},
        "identity_tenants": {"front": ["acme-1", "acme-*"]},
        "server": {"address": "0.0.0.0:0", "tls": TLS},
        "events_key_file": "events.key",
    }
    config = build(RouterConfig, settings)
    assert config.tenants == {"acme-*": in_domain("acme"), "*": TenantConfig(isolated=True)}
    assert config.identity_tenants == {"front": ("acme-1", "acme-*")}
    assert config.server.tls is not None and config.server.tls.ca_file == Path("ca.pem")


_NAMES = TenantNames(("any",), {"eu": ("eu-1", "eu-*"), "many": ("a-*", "b")})


@pytest.mark.parametrize(
    ("identity", "named", "tenant"),
    [
        ("acme", "", "acme"),
        ("acme", "eu-1", "acme"),  # one that is bound to nothing is its own tenant
        ("any", "", "any"),
        ("any", "eu-1", "eu-1"),
        ("eu", "", "eu-1"),
        ("eu", "eu-7", "eu-7"),
        ("many", "a-1", "a-1"),
        ("many", "b", "b"),
    ],
)
def test_a_request_is_accounted_to_a_tenant_that_its_identity_may_use(identity: str, named: str, tenant: str) -> None:
    assert _NAMES.tenant(identity, named) == tenant


def test_who_names_a_tenant_is_remembered_unless_it_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.tenants._MAX_NAMED", 3)
    tenants = Tenants()
    names = TenantNames(("any",), {"eu": ("eu-1", "eu-*")}, tenants)
    names.tenant("acme", "")
    names.tenant("any", "")
    assert [tenants.identity(name) for name in ("acme", "any")] == [None, None]
    names.tenant("eu", "")
    names.tenant("eu", "eu-2")
    names.tenant("any", "eu-1")
    assert [tenants.identity(name) for name in ("eu-1", "eu-2")] == ["any", "eu"]
    names.tenant("any", "a")
    names.tenant("any", "b")
    assert [tenants.identity(name) for name in ("eu-2", "eu-1", "a", "b")] == [None, "any", "any", "any"]


@pytest.mark.parametrize(
    ("identity", "named"),
    [("eu", "us-1"), ("eu", "eu"), ("eu", "xeu-1"), ("eu", "eu-" + "x" * 300), ("many", ""), ("many", "bb")],
)
def test_a_tenant_that_its_identity_may_not_use_is_refused(identity: str, named: str) -> None:
    with pytest.raises(PermissionDeniedError) as caught:
        _NAMES.tenant(identity, named)
    assert caught.value.field == "tenant"


def test_nothing_is_kept_by_a_name_that_is_too_long() -> None:
    tenants = Tenants()
    names = TenantNames(["gateway"], tenants=tenants)
    with pytest.raises(InvalidRequestError) as caught:
        names.tenant("gateway", "x" * 257)
    assert caught.value.field == "tenant"
    assert tenants.identity("x" * 257) is None
    assert tenants.identity(names.tenant("gateway", "x" * 256)) == "gateway"


def test_workers_that_announce_no_salted_blocks_are_named_once_for_each_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="router")
    salts = UnannouncedSalts()
    salts.note(make_record("decode-0"))
    salts.note(make_record("decode-1", unannounced_blocks=("adapter",)))
    assert not caplog.records
    for number in range(3):
        salts.note(make_record(f"prefill-{number}", unannounced_blocks=("salted", "adapter", "media")))
    salts.note(make_record("prefill-9", model_name="large", unannounced_blocks=("salted",)))
    assert [record.args for record in caplog.records] == [("tiny", "prefill-0"), ("large", "prefill-9")]


def test_a_tenant_has_the_settings_of_its_name_else_of_the_first_pattern_that_fits() -> None:
    mapping = {
        "tenants": {
            "team-*": {"weight": 2},
            "team-a": {"weight": 3, "max_priority": 5},
            "team-[xyz]": {"weight": 4},
            "*": {"weight": 0.5},
        }
    }
    found = Tenants(build(RouterConfig, mapping).tenants)
    weights = {name: found.config(name).weight for name in ("team-a", "team-b", "team-x", "Team-a", "")}
    assert weights == {"team-a": 3.0, "team-b": 2.0, "team-x": 2.0, "Team-a": 0.5, "": 0.5}
    assert found.config("team-a").max_priority == 5
    assert Tenants().config("anybody") is UNNAMED


def test_many_names_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_KNOWN", 3)
    found = Tenants({"a*": TenantConfig(weight=2.0)})
    for _ in range(2):
        assert [found.config(f"a{number}").weight for number in range(10)] == [2.0] * 10
    assert len(found._known) <= 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"weight": 0}, "tenants.a.weight: must be above 0"),
        ({"weight": -1.0}, "tenants.a.weight: must be above 0"),
        ({"weight": float("inf")}, "tenants.a.weight"),
        ({"weight": float("nan")}, "tenants.a.weight"),
        ({"max_priority": 2**31}, "tenants.a.max_priority: must be a signed 32-bit number"),
        ({"wait": 1}, "tenants.a.wait: unknown"),
    ],
)
def test_impossible_settings_are_refused_by_name(setting: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        build(RouterConfig, {"tenants": {"a": setting}})


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_weights_are_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight: must be above 0"):
        TenantConfig(weight=weight)
