"""The memory of prompts that wait."""

from __future__ import annotations

import asyncio
import gc
import platform
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.api.request import ChatPrompt, Resume, TextPrompt, TokenPrompt
from quartet.errors import DrainingError, InvalidRequestError, QueueFullError, ServingError
from quartet.text.chat_message import ChatMessage
from quartet.text.tokenizer import EncodeLimit
from router.config import AdmissionConfig
from router.prompt_memory import HeldPrompt, PromptMemory, request_bytes
from router.tenants import TenantConfig, Tenants
from tests.router.fakes import MODEL_TEXT, Fleet, Request, collect
from tests.router.test_generate import make_start

# Of a request besides its prompt.
REQUEST_BYTES = 16 << 10


class Timeout(asyncio.Timeout):
    """Notes that its request was refused."""

    def __init__(self) -> None:
        super().__init__(None)
        self.is_refused = False

    def reschedule(self, when: float | None) -> None:
        self.is_refused = True


class Scene:
    """A memory of 100 bytes."""

    def __init__(self, **tenants: TenantConfig) -> None:
        self.memory = PromptMemory(AdmissionConfig(max_queued_prompt_bytes=100, retry_delay_s=3.0), Tenants(tenants))
        self.timeouts: dict[HeldPrompt, Timeout] = {}

    def hold(self, tenant: str, num_bytes: int, priority: int = 0) -> HeldPrompt:
        timeout = Timeout()
        held = self.memory.hold(tenant, priority, num_bytes, timeout)
        self.timeouts[held] = timeout
        return held

    def refused(self, *held: HeldPrompt) -> list[bool]:
        assert [self.timeouts[one].is_refused for one in held] == [one.is_refused for one in held]
        return [one.is_refused for one in held]


async def test_the_last_request_of_the_tenant_that_has_most_is_refused() -> None:
    scene = Scene()
    first, second, other = scene.hold("a", 40), scene.hold("a", 30), scene.hold("b", 30)
    third = scene.hold("b", 20)
    assert scene.refused(first, second, other, third) == [False, True, False, False]
    assert scene.memory.num_bytes == 90
    assert scene.memory.usage == 0.9


async def test_a_newcomer_of_the_tenant_that_has_most_is_refused_and_told_when_to_come_back() -> None:
    scene = Scene()
    first, other = scene.hold("a", 60), scene.hold("b", 40)
    with pytest.raises(QueueFullError) as caught:
        scene.hold("a", 1)
    assert caught.value.retry_delay_s == 3.0
    assert scene.refused(first, other) == [False, False]
    first.leave()
    scene.hold("a", 60)


async def test_a_request_that_waits_alone_is_taken_however_long_it_is() -> None:
    scene = Scene()
    held = scene.hold("a", 1000)
    assert scene.memory.num_bytes == 1000
    held.leave()
    held.leave()
    assert scene.memory.num_bytes == 0


async def test_the_request_of_lowest_priority_goes_first_and_of_these_the_last() -> None:
    scene = Scene()
    low, high, later = scene.hold("a", 30, -1), scene.hold("a", 30, 5), scene.hold("a", 40, -1)
    newest = scene.hold("a", 30, 5)
    assert scene.refused(low, high, later, newest) == [False, False, True, False]


async def test_a_tenant_of_more_weight_may_have_more() -> None:
    scene = Scene(a=TenantConfig(weight=4.0))
    heavy, light = scene.hold("a", 70), scene.hold("b", 30)
    scene.hold("c", 20)
    assert scene.refused(heavy, light) == [False, True]


async def test_a_prompt_that_grows_can_be_too_much() -> None:
    scene = Scene()
    held, other = scene.hold("a", 50), scene.hold("b", 40)
    with pytest.raises(QueueFullError):
        held.tokenized(2)
    assert scene.refused(other) == [False]
    assert scene.memory.num_bytes == 40


async def test_a_prompt_counts_as_much_as_it_had_when_it_was_read() -> None:
    scene = Scene()
    longer, shorter = scene.hold("a", 30), scene.hold("b", 40)
    longer.read(40)
    shorter.read(20)
    assert scene.memory.num_bytes == 60
    scene.hold("c", 40)
    assert scene.refused(longer, shorter) == [False, False]
    longer.leave()
    shorter.leave()
    assert scene.memory.num_bytes == 40


def survivors(waiting: list[HeldPrompt]) -> list[HeldPrompt]:
    """What is left of those that wait, in the order of arrival, by the rule in its simplest form."""
    left = list(waiting)
    while sum(one.num_bytes for one in left) > 100 and len(left) > 1:
        has = {name: sum(one.num_bytes for one in left if one.tenant == name) for name in "abc"}
        fullest = min(has, key=lambda name: (-has[name], name))
        own = [one for one in left if one.tenant == fullest]
        lowest = min(one.priority for one in own)
        left.remove([one for one in own if one.priority == lowest][-1])
    return left


ARRIVALS = st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 60), st.integers(0, 99))


@given(st.lists(ARRIVALS, max_size=60))
def test_it_refuses_those_that_the_rule_says_and_no_others(arrivals: list[tuple[str, int, int, int]]) -> None:
    async def run() -> None:
        scene = Scene()
        waiting: list[HeldPrompt] = []
        for tenant, priority, num_bytes, leaves in arrivals:
            if leaves < len(waiting):
                waiting.pop(leaves).leave()
            newcomer = HeldPrompt(scene.memory, tenant, priority, num_bytes, Timeout())
            expected = survivors([*waiting, newcomer])
            try:
                held = scene.hold(tenant, num_bytes, priority)
                expected = [held if one is newcomer else one for one in expected]
                waiting.append(held)
            except QueueFullError:
                assert newcomer not in expected
            assert [one for one in waiting if not one.is_refused] == expected
            assert scene.memory.num_bytes == sum(one.num_bytes for one in expected)
            waiting = expected
        for one in waiting:
            one.leave()
        assert scene.memory.num_bytes == 0

    asyncio.run(run())


# Requests of a pipeline. Nothing has room: the fleet's one decode worker is away.


def make_fleet(num_requests: float) -> Fleet:
    """It keeps prompts of so many requests of 1,000 tokens."""
    max_bytes = int(num_requests * (REQUEST_BYTES + 8_000))
    return Fleet("prefill-0", admission=AdmissionConfig(max_queued_prompt_bytes=max_bytes))


def ask(fleet: Fleet, tenant: str) -> asyncio.Task[object]:
    start = make_start(prompt=TokenPrompt([5] * 900), tenant=tenant)
    return asyncio.create_task(collect(fleet.generate(start)))


async def settle() -> None:
    for _ in range(200):  # one begins in sixteen turns
        await asyncio.sleep(0)


async def ended(fleet: Fleet, *requests: asyncio.Task[object]) -> None:
    for request in requests:
        request.cancel()
    await asyncio.wait(requests)
    fleet.assert_nothing_left()


@pytest.mark.parametrize("waits_for", ["room", "the model's text"])
async def test_a_flood_of_long_prompts_refuses_its_own_tenant(waits_for: str) -> None:
    fleet = make_fleet(3)
    fleet.join("decode-0")
    fleet.break_worker("decode-0")
    if waits_for == "the model's text":
        fleet.texts.gate.clear()
    flood = [ask(fleet, "flooder") for _ in range(3)]
    await settle()
    other = ask(fleet, "other")
    await settle()
    assert [request.done() for request in flood] == [False, False, True]
    with pytest.raises(QueueFullError, match="memory"):
        await flood[2]
    assert not other.done()
    if waits_for == "room":
        assert fleet.admission.length == 3
        assert fleet.registry.get_sample_value("quartet_router_admissions_total", {"outcome": "refused"}) == 1
    fleet.texts.gate.set()
    await ended(fleet, *flood[:2], other)


async def test_a_placed_request_counts_no_more() -> None:
    fleet = Fleet("prefill-0", "decode-0", admission=AdmissionConfig(max_queued_prompt_bytes=1))
    await asyncio.gather(*(collect(fleet.generate(make_start())) for _ in range(1)))
    fleet.assert_nothing_left()


async def test_a_text_counts_and_its_tokens_too() -> None:
    fleet = make_fleet(10)
    fleet.join("decode-0")
    fleet.break_worker("decode-0")
    request = asyncio.create_task(collect(fleet.generate(make_start(prompt=TextPrompt("a" * 900)))))
    await settle()
    assert fleet.admission.length == 1
    num_tokens = len(MODEL_TEXT.encode_text("a" * 900, limit=EncodeLimit(1000)))
    assert fleet.prompts.num_bytes >= REQUEST_BYTES + 900 + 8 * num_tokens
    await ended(fleet, request)


def test_all_that_a_request_brings_counts() -> None:
    long = "a" * 100_000
    chat = ChatPrompt((ChatMessage("user", long), ChatMessage(long, ("b", long))))
    resume = Resume(request_id="", attempt=1, seed=1, generated_token_ids=range(100_000))
    for start, resumed in (
        (make_start(prompt=TextPrompt(long)), None),
        (make_start(prompt=ChatPrompt(chat.messages[:1])), None),
        (make_start(model=long), None),
        (make_start(adapter=long), None),
        (make_start(), resume),
    ):
        assert 100_000 < request_bytes(start, resumed) < 900_000
    assert request_bytes(make_start(prompt=chat), None) > 300_000


# What has ended keeps no prompt, also before the garbage collector comes.


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


ENDS: dict[str, Callable[[Request], None]] = {
    "cancelled": lambda request: request.cancel(),
    "aborted": lambda request: request.abort(DrainingError("going away")),
}


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("how", ["served", "refused", *ENDS])
async def test_the_prompt_of_an_ended_request_is_freed(how: str) -> None:
    fleet = Fleet("prefill-0", "decode-0")
    if how in ENDS:
        fleet.break_worker("decode-0")
    prompt = TokenPrompt([5] * (900 if how != "refused" else 9_000))
    known = weakref.ref(prompt)
    request = fleet.generate(make_start(prompt=prompt))
    del prompt
    await settle()
    if how in ENDS:
        assert fleet.admission.length == 1
        ENDS[how](request)
    try:
        await collect(request)
    except ServingError:
        assert how in ("aborted", "refused")
    await settle()
    assert known() is None


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("tenant", ["", "t" * 1000])
async def test_the_prompt_of_an_ended_placement_is_freed(tenant: str) -> None:
    fleet = Fleet("prefill-0", "decode-0")
    prompt = TokenPrompt([5] * 900)
    known = weakref.ref(prompt)
    placing = asyncio.create_task(fleet.pipeline.place(make_start(prompt=prompt, tenant=tenant)))
    del prompt
    await asyncio.wait([placing])
    if tenant:
        assert isinstance(placing.exception(), InvalidRequestError)
    del placing
    await settle()
    assert known() is None


_PROGRAM = """
import re
from router.__main__ import return_freed_prompts

def resident_bytes():
    return 1024 * int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])

if {returns}:
    return_freed_prompts()
_ = b"x" * (8 << 20)  # once a block of this size was freed, glibc keeps all smaller ones
before = resident_bytes()
prompts, others = [], []
for _ in range(200):
    prompts.append(b"x" * (512 << 10))
    others.append(b"x" * (64 << 10))
prompts.clear()
print((resident_bytes() - before) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's allocator")
def test_the_memory_of_freed_prompts_goes_back() -> None:
    kept = []
    for returns in (False, True):
        program = _PROGRAM.format(returns=returns)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
        kept.append(int(done.stdout))
    assert kept[0] > 80  # the test would show it
    assert kept[1] < 40  # of which others are 13
