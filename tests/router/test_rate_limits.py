"""How much tenants and keys may ask for in a minute: what is let in, refused, charged and given back, on every path."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from quartet import errors
from quartet.api.openai.requests import ApiKey
from quartet.api.request import Accepted, TextPrompt
from quartet.config import build
from quartet.errors import ConfigError, RateLimitedError
from quartet.rpc.errors import from_failure, from_rpc_error
from quartet.v1 import router_pb2 as pb
from router import rate_limits as module
from router.config import RouterConfig
from router.http.config import HttpConfig
from router.http.keys import ApiKeys
from router.rate_limits import RateLimits
from router.tenants import TenantConfig, Tenants
from tests.router.fakes import Fleet, Plan, collect
from tests.router.http.face import open_face
from tests.router.http.test_server import ACME, CHAT, GLOBEX, write_keys
from tests.router.session_reader import SessionReader
from tests.router.system import TIMEOUT_S, running_system
from tests.router.test_generate import make_start as make_domain_start
from tests.router.test_place import place, take_up
from tests.router.test_servicer import PROMPT, fails, generate, make_start

SIX = TenantConfig(requests_per_minute=6)
HUNDRED = TenantConfig(tokens_per_minute=100)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_limits(**configs: TenantConfig) -> tuple[RateLimits, Clock]:
    clock = Clock()
    return RateLimits(Tenants(configs), clock=clock), clock


def refused_for_s(limits: RateLimits, tenant: str, key: ApiKey | None = None) -> float:
    with pytest.raises(RateLimitedError) as caught:
        limits.admit(tenant, key, 0)
    assert caught.value.retry_delay_s is not None
    return caught.value.retry_delay_s


def test_a_minutes_requests_may_come_at_once_and_the_next_when_it_says() -> None:
    limits, clock = make_limits(acme=SIX)
    for _ in range(6):
        limits.admit("acme", None, 0)
    delay_s = refused_for_s(limits, "acme")
    assert delay_s == pytest.approx(10)
    clock.now = delay_s - 0.01
    assert refused_for_s(limits, "acme") == pytest.approx(0.01)  # being refused costs nothing
    clock.now = delay_s
    limits.admit("acme", None, 0)
    refused_for_s(limits, "acme")
    clock.now = 1e6  # an idle tenant saves up no more than a minute's
    for _ in range(6):
        limits.admit("acme", None, 0)
    refused_for_s(limits, "acme")


def test_tokens_are_charged_as_they_become_known_and_a_debt_is_made_up_for() -> None:
    limits, clock = make_limits(acme=HUNDRED)
    charge = limits.admit("acme", None, 40)
    assert charge is not None and limits.headers("acme")["x-ratelimit-remaining-tokens"] == "60"
    charge.settle(30)  # the prompt
    assert limits.headers("acme")["x-ratelimit-remaining-tokens"] == "70"
    charge.settle(30 + 270)  # with the answer
    assert limits.headers("acme")["x-ratelimit-remaining-tokens"] == "0"
    delay_s = refused_for_s(limits, "acme")
    assert delay_s == pytest.approx(60 * 201 / 100)
    clock.now = delay_s
    limits.admit("acme", None, 0)


def test_what_is_given_back_fills_no_account_beyond_its_minute() -> None:
    limits, clock = make_limits(acme=HUNDRED)
    charge = limits.admit("acme", None, 90)
    assert charge is not None
    clock.now = 60.0
    limits.check("acme")
    charge.settle(0)
    assert limits.headers("acme")["x-ratelimit-remaining-tokens"] == "100"


def test_a_request_that_one_limit_refuses_is_charged_to_no_other() -> None:
    limits, _clock = make_limits(acme=TenantConfig(requests_per_minute=5, tokens_per_minute=10))
    key = ApiKey(tenant="acme", id="k", requests_per_minute=1)
    limits.admit("acme", key, 0)
    assert refused_for_s(limits, "acme", key) == pytest.approx(60)
    assert limits.headers("acme")["x-ratelimit-remaining-requests"] == "4"
    assert limits.headers("acme", key)["x-ratelimit-remaining-requests"] == "0"
    limits.admit("acme", ApiKey(tenant="acme", id="other", requests_per_minute=1), 0)


def test_a_refusal_names_the_limit_that_takes_longest() -> None:
    limits, clock = make_limits(acme=TenantConfig(requests_per_minute=60, tokens_per_minute=100))
    key = ApiKey(tenant="acme", id="k", requests_per_minute=2)
    for _ in range(2):
        limits.admit("acme", key, 0)
    for _ in range(58):
        limits.admit("acme", None, 0)
    assert refused_for_s(limits, "acme") == pytest.approx(1)
    with pytest.raises(RateLimitedError, match=r"API key k .*requests_per_minute \(2\)") as caught:
        limits.check("acme", key)
    assert caught.value.retry_delay_s == pytest.approx(30)
    clock.now = 30.0
    charge = limits.admit("acme", key, 0)
    assert charge is not None
    charge.add(200)
    with pytest.raises(RateLimitedError, match="tokens_per_minute") as caught:
        limits.check("acme", key)
    clock.now += caught.value.retry_delay_s or 0.0
    limits.check("acme", key)  # as it was told


def test_each_tenant_of_a_pattern_has_an_account_of_its_own_and_others_no_limit() -> None:
    limits, _clock = make_limits(**{"team-*": TenantConfig(requests_per_minute=1)})
    for name in ("team-a", "team-b"):
        assert limits.admit(name, None, 0) is not None
        refused_for_s(limits, name)
    for _ in range(3):
        assert limits.admit("acme", None, 10**9) is None
    assert limits.headers("acme") == {}


def test_names_that_clients_make_up_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ACCOUNTS", 3)
    limits, _clock = make_limits(**{"*": TenantConfig(requests_per_minute=1)})
    for number in range(10):
        limits.admit(f"t{number}", None, 0)
    assert len(limits._of_tenants) == 3
    refused_for_s(limits, "t7")  # which makes it the last one that asked
    limits.admit("t10", None, 0)
    refused_for_s(limits, "t7")


def test_who_is_below_nothing_stays_so_whatever_other_names_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ACCOUNTS", 3)
    limits, clock = make_limits(**{"*": HUNDRED})
    limits.admit("in-debt", None, 1000)
    for number in range(50):
        limits.admit(f"t{number}", None, 100)  # all, and no more
    assert len(limits._of_tenants) == 3 + 1
    assert refused_for_s(limits, "in-debt") == pytest.approx(60 * 901 / 100)
    for number in range(50):
        limits.admit(f"owing{number}", None, 101)
    assert len(limits._of_tenants) == 3 + 3, "also of those only so many are kept"
    assert refused_for_s(limits, "owing44") == pytest.approx(60 * 2 / 100)
    clock.now = 600.0
    for number in range(50, 60):
        limits.admit(f"t{number}", None, 0)
    assert len(limits._of_tenants) == 3 + 3
    limits.admit("owing45", None, 100)


@pytest.mark.parametrize(
    "meanwhile", [{}, {"acme": TenantConfig(requests_per_minute=1000)}, {"acme": TenantConfig(weight=2.0)}]
)
def test_a_limit_that_comes_back_finds_what_was_owed(meanwhile: dict[str, TenantConfig]) -> None:
    tenants, clock = Tenants({"acme": HUNDRED}), Clock()
    limits = RateLimits(tenants, clock=clock)
    charge = limits.admit("acme", None, 1000)
    tenants.replace(meanwhile)
    limits.admit("acme", None, 0)
    assert charge is not None
    charge.add(100)  # its answer, which ends meanwhile
    clock.now = 60.0
    tenants.replace({"acme": HUNDRED})
    assert refused_for_s(limits, "acme") == pytest.approx(60 * 901 / 100)


def test_a_limit_that_was_changed_counts_from_the_next_request_on() -> None:
    tenants, clock = Tenants({"acme": TenantConfig(requests_per_minute=1)}), Clock()
    limits = RateLimits(tenants, clock=clock)
    limits.admit("acme", None, 0)
    tenants._known["acme"] = TenantConfig(requests_per_minute=60)
    assert refused_for_s(limits, "acme") == pytest.approx(1)


def test_a_limit_that_was_taken_away_limits_no_more() -> None:
    tenants = Tenants({"acme": TenantConfig(requests_per_minute=1, tokens_per_minute=100)})
    limits = RateLimits(tenants, clock=Clock())
    limits.admit("acme", None, 0)
    refused_for_s(limits, "acme")
    tenants.replace({"acme": HUNDRED})
    for _ in range(3):
        limits.admit("acme", None, 1)
    assert "x-ratelimit-limit-requests" not in limits.headers("acme")


@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute"])
@pytest.mark.parametrize("limit", [0, -1, 10**18, 10**400])
def test_limits_that_no_account_can_hold_are_refused_by_name(name: str, limit: int) -> None:
    assert build(RouterConfig, {"tenants": {"acme": {name: 1}}}).tenants["acme"].is_limited
    with pytest.raises(ConfigError, match=name):
        build(RouterConfig, {"tenants": {"acme": {name: limit}}})


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, "0ms"), (0.0201, "21ms"), (1.5, "1.5s"), (60, "1m0s"), (372.25, "6m12.25s")]
)
def test_times_until_all_is_back_are_written_as_openai_does(seconds: float, shown: str) -> None:
    assert module._duration(seconds) == shown


def left_of(fleet: Fleet, tenant: str = "acme") -> int:
    return int(fleet.pipeline.context.limits.headers(tenant)["x-ratelimit-remaining-tokens"])


async def test_a_request_pays_for_its_prompt_when_it_is_counted_and_for_its_choices_at_the_end() -> None:
    fleet = Fleet("prefill-0", "decode-0", tenants={"acme": HUNDRED})
    fleet.hops.plan("decode", Plan(hang_after=1))
    run = fleet.generate(make_domain_start(tenant="acme", num_choices=2, prompt=TextPrompt("hello")))
    parts = run.parts()
    async with asyncio.timeout(TIMEOUT_S):
        accepted = await anext(parts)
    assert isinstance(accepted, Accepted) and accepted.num_prompt_tokens > 1
    assert left_of(fleet) == 100 - accepted.num_prompt_tokens
    await parts.aclose()
    fleet.assert_nothing_left()
    assert left_of(fleet) < 100 - accepted.num_prompt_tokens
    fleet.now = 600.0
    await collect(fleet.generate(make_domain_start(tenant="acme", num_choices=2)))
    assert left_of(fleet) == 100 - 20 - 2 * 12


def test_a_prompt_that_is_counted_late_is_refused_if_others_have_used_up_all_meanwhile() -> None:
    counted = list[str]()
    clock = Clock()
    limits = RateLimits(Tenants({"acme": HUNDRED}), count=counted.append, clock=clock)
    charges = [limits.admit("acme", None, 0) for _ in range(3)]
    first, second, third = [charge for charge in charges if charge is not None]
    first.pay(1000)
    with pytest.raises(RateLimitedError, match=r"tenant acme has used up its tokens_per_minute \(100\)") as caught:
        second.pay(1000)
    assert counted == ["tokens_per_minute"] and caught.value.retry_delay_s == pytest.approx(60 * 901 / 100)
    clock.now = 60 * 901 / 100
    third.pay(50)
    first.pay(1000)  # no more than was known
    with pytest.raises(RateLimitedError):
        second.pay(1)


def test_prompts_of_one_call_pay_together_or_not_at_all() -> None:
    limits, _clock = make_limits(acme=TenantConfig(requests_per_minute=6, tokens_per_minute=100))
    calls = [[charge for charge in limits.admit_all("acme", None, 3) if charge is not None] for _ in range(2)]
    for charge in calls[0]:
        charge.pay(80)
    for charge in calls[1]:
        with pytest.raises(RateLimitedError):
            charge.pay(1)


async def test_of_many_texts_that_come_at_once_those_are_refused_for_which_no_token_is_left() -> None:
    fleet = Fleet("prefill-0", "decode-0", tenants={"acme": HUNDRED})
    start = make_domain_start(tenant="acme", prompt=TextPrompt("hello " * 400))  # a thread tokenizes it
    runs = [fleet.generate(start) for _ in range(20)]  # all are let in before one is tokenized
    ends = await asyncio.gather(*map(collect, runs), return_exceptions=True)
    refusals = [end for end in ends if isinstance(end, RateLimitedError)]
    assert len(refusals) == 19 and len([end for end in ends if isinstance(end, BaseException)]) == 19
    assert all("tokens_per_minute" in refusal.message and refusal.retry_delay_s for refusal in refusals)
    fleet.assert_nothing_left()


async def test_what_no_worker_has_begun_costs_a_request_and_no_tokens() -> None:
    fleet = Fleet("decode-0", tenants={"acme": TenantConfig(requests_per_minute=3, tokens_per_minute=100)})
    with pytest.raises(errors.ModelNotFoundError):
        await collect(fleet.generate(make_domain_start(tenant="acme", model="none")))
    await fleet.pipeline.explain(make_domain_start(tenant="acme"))
    assert left_of(fleet) == 100
    assert fleet.pipeline.context.limits.headers("acme")["x-ratelimit-remaining-requests"] == "1"


async def test_a_refused_request_does_no_work() -> None:
    fleet = Fleet("decode-0", tenants={"acme": TenantConfig(requests_per_minute=1)})
    await collect(fleet.generate(make_domain_start(tenant="acme")))
    num_calls = len(fleet.hops.calls)
    for call in (
        collect(fleet.generate(make_domain_start(tenant="acme"))),
        fleet.pipeline.place(make_domain_start(tenant="acme")),
    ):
        with pytest.raises(RateLimitedError):
            await call
    assert len(fleet.hops.calls) == num_calls and fleet.pipeline.context.intake.length == 0
    fleet.assert_nothing_left()


async def test_every_call_of_grpc_is_refused_with_the_time_until_it_may_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = {"few": TenantConfig(requests_per_minute=1), "placing": TenantConfig(tokens_per_minute=len(PROMPT) + 2)}
    async with running_system(tmp_path, monkeypatch, "prefill-0", "decode-0", tenants=tenants) as (system, stub):

        async def explain(tenant: str) -> pb.ExplainResponse:
            return await stub.Explain(pb.ExplainRequest(start=make_start(tenant=tenant)), timeout=TIMEOUT_S)

        await generate(stub, make_start(tenant="few"))
        code, error = await fails(stub, make_start(tenant="few"))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and type(error) is RateLimitedError
        assert "requests_per_minute" in error.message and error.retry_delay_s and 0 < error.retry_delay_s <= 60
        session = SessionReader(stub)
        await session.start(0, make_start(tenant="few"))
        await session.read_ends(0)
        failure = session.received[0].failure
        assert failure is not None
        refusals = [from_failure(failure)]
        for call in (place(stub, pb.PlaceRequest(start=make_start(tenant="few"))), explain("few")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            refusals.append(from_rpc_error(caught.value))
        for refusal in refusals:
            assert type(refusal) is RateLimitedError and 0 < (refusal.retry_delay_s or 0.0) <= 60
        assert system.router_metrics is not None
        limited = system.router_metrics.rate_limited
        assert [limited.labels(name).value for name in module.SETTINGS] == [4, 0]
        # Of a placed answer the router hears by its worker's load reports.
        placed = await place(stub, pb.PlaceRequest(start=make_start(tenant="placing")))
        await explain("placing")
        await take_up(placed.choices[0])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    await explain("placing")
                    await asyncio.sleep(0.01)  # until the report has come
        assert "tokens_per_minute" in from_rpc_error(caught.value).message


async def test_http_says_429_with_the_time_and_shows_what_is_left(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", f"acme {ACME} id=first requests_per_minute=2", f"acme {GLOBEX}")
    tenants = {"acme": TenantConfig(requests_per_minute=60, tokens_per_minute=6000)}
    async with open_face(config=HttpConfig(keys_file=keys), tenants=tenants) as face:
        headers = {"Authorization": f"Bearer {ACME}"}
        async with face.session.post("/v1/chat/completions", json=CHAT, headers=headers) as response:
            num_used = (await response.json())["usage"]["total_tokens"]
            assert response.status == 200
            assert (
                response.headers["x-ratelimit-limit-requests"],
                response.headers["x-ratelimit-remaining-requests"],
            ) == ("2", "1")
            assert response.headers["x-ratelimit-reset-requests"] == "30s"
            assert response.headers["x-ratelimit-remaining-tokens"] == str(6000 - num_used)
        async with face.session.post(
            "/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers
        ) as response:
            assert response.headers["x-ratelimit-remaining-requests"] == "0"
            await response.read()
        # The body is not looked at.
        async with face.session.post("/v1/chat/completions", data=b"{", headers=headers) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "30")
            assert response.headers["x-ratelimit-remaining-requests"] == "0"
            error = (await response.json())["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert "API key first" in error["message"] and ACME not in error["message"]
        async with face.session.post("/v1/messages", json={**CHAT, "max_tokens": 2}, headers=headers) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (429, "rate_limit_error")
        status, _ = await face.post("/v1/chat/completions", CHAT, Authorization=f"Bearer {GLOBEX}")
        assert status == 200
        assert (await face.get("/v1/models", **headers))[0] == 200


async def test_prompts_of_one_request_by_http_are_let_in_together_or_not_at_all(tmp_path: Path) -> None:
    tenants = {"*": TenantConfig(requests_per_minute=5, tokens_per_minute=100)}
    async with open_face(tenants=tenants) as face:
        limits = face.fleet.pipeline.context.limits
        prompts = {"model": "tiny", "max_tokens": 2, "prompt": [[1] * 40, [2] * 40, [3] * 40]}
        # The prompts' tokens are more than a minute's: they become a debt.
        status, _ = await face.post("/v1/completions", prompts)
        assert status == 200 and limits.headers("")["x-ratelimit-remaining-requests"] == "2"
        assert limits.headers("")["x-ratelimit-reset-tokens"] == "1m15.6s"  # all of 3 * (40 + 2)
        face.fleet.now = 600.0
        assert (await face.post("/v1/completions", {**prompts, "prompt": [[1], [2], [3]]}))[0] == 200
        for body in (prompts, {**prompts, "stream": True}):
            async with face.session.post("/v1/completions", json=body) as response:
                assert (response.status, response.headers["Retry-After"]) == (429, "12")
        assert limits.headers("")["x-ratelimit-remaining-requests"] == "2"
        status, answer = await face.post("/v1/completions", {**prompts, "prompt": [[1]] * 6})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert "requests_per_minute of 5" in answer["error"]["message"]
        await face.until_nothing_left()


async def test_without_limits_http_shows_none() -> None:
    async with open_face() as face, face.session.post("/v1/chat/completions", json=CHAT) as response:
        assert response.status == 200
        assert not [name for name in response.headers if name.lower().startswith("x-ratelimit")]


@pytest.mark.parametrize(
    "lines",
    [[f"a {ACME} requests_per_minute=0"], [f"a {ACME} id="], [f"a {ACME} id=x", f"b {GLOBEX} id=x"], [f"a {ACME} x"]],
)
def test_impossible_options_of_keys_are_refused_without_a_word_of_the_keys(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"http\.keys_file") as refusal:
        ApiKeys(write_keys(tmp_path / "keys", *lines))
    assert ACME not in str(refusal.value)


def test_a_key_without_a_name_is_named_by_its_digest(tmp_path: Path) -> None:
    keys = ApiKeys(write_keys(tmp_path / "keys", f"acme {ACME} tokens_per_minute=70", f"acme {GLOBEX} id=next"))
    found = keys.find(f"Bearer {ACME}")
    assert found == ApiKey(tenant="acme", id=hashlib.sha256(ACME.encode()).hexdigest()[:12], tokens_per_minute=70)
    assert keys.find(f"Bearer {GLOBEX}") == ApiKey(tenant="acme", id="next")


async def test_what_http_refuses_before_it_runs_has_a_line_and_a_count_like_grpcs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="router.request_log")
    keys = write_keys(tmp_path / "keys", f"acme {ACME} id=first requests_per_minute=1", f"globex {GLOBEX}")
    tenants = {"globex": TenantConfig(requests_per_minute=2)}
    config = HttpConfig(keys_file=keys, max_body_bytes=2000)
    limited, free = {"Authorization": f"Bearer {ACME}"}, {"Authorization": f"Bearer {GLOBEX}"}
    prompts = {"model": "tiny", "max_tokens": 2, "prompt": [[1], [2]]}
    trace = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "X-Request-Id": "mine"}
    async with open_face(config=config, tenants=tenants) as face:
        asked: list[tuple[str, Mapping[str, Any] | bytes, dict[str, str], int, str]] = [
            ("chat/completions", CHAT, limited, 200, "length"),
            ("chat/completions", CHAT, {**limited, **trace}, 429, "rate_limited"),
            ("messages", {**CHAT, "max_tokens": 2}, limited, 429, "rate_limited"),
            ("responses", b"{", free, 400, "invalid_request"),
            ("completions", b" " * 3000, free, 413, "message_too_large"),
            ("completions", {**prompts, "max_tokens": "x"}, free, 400, "invalid_field"),
            ("chat/completions", CHAT, free, 200, "length"),
            ("completions", prompts, free, 429, "rate_limited"),  # in the room of one: all prompts are refused at once
            ("completions", {**prompts, "stream": True}, free, 429, "rate_limited"),
            ("chat/completions", {**CHAT, "model": "none"}, free, 404, "model_not_found"),  # which the pipeline refuses
        ]
        for path, body, headers, status, _ in asked:
            assert (await face.post(f"/v1/{path}", body, **headers))[0] == status, path
        face.server._is_draining = True
        assert (await face.post("/v1/completions", prompts, **free))[0] == 503
        assert (await face.get("/v1/models", **free))[0] == 503  # no request for an answer: no line
        face.server._is_draining = False
        counted = face.fleet.pipeline.context.metrics.requests.by_outcome()
    lines = [vars(record)["quartet_fields"] for record in caplog.records if record.name == "router.request_log"]
    outcomes = [*(outcome for *_, outcome in asked), "draining"]
    assert [line["outcome"] for line in lines] == outcomes
    assert {line["path"] for line in lines} == {"generate"}
    assert counted == Counter(outcomes)
    assert [line["tenant"] for line in lines[:4]] == ["acme", "acme", "acme", "globex"]
    refused = lines[1]
    assert (refused["trace_id"], refused["client_request_id"]) == ("ab" * 16, "mine")
    assert 0 <= refused["total_s"] < TIMEOUT_S
