"""What the configuration says of tenants."""

from __future__ import annotations

import pytest

from quartet.config import build
from quartet.errors import ConfigError
from router import tenants
from router.config import RouterConfig
from router.tenants import UNNAMED, TenantConfig, Tenants


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
    monkeypatch.setattr(tenants, "_MAX_KNOWN", 3)
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
