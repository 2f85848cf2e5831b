"""An answer whose router is lost goes on at another one, and nobody sees where."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.api.request import Resume, TimeBreakdown, Usage
from quartet.client import (
    Accepted,
    AnswerPart,
    ChoiceFinished,
    Delta,
    FinishReason,
    Placed,
    PromptLogprobs,
    QuartetClient,
    RequestPath,
)
from quartet.client.request import make_start
from quartet.client.resume import AnswerSoFar, Leg, Resumption, Tries
from quartet.client.routers import MADE_UP_DETAILS, ClientClosedError, Router, RouterLostError, Routers
from quartet.client.sync import SyncClient
from quartet.errors import (
    ConfigError,
    DrainingError,
    MessageTooLargeError,
    ProtocolError,
    QueueFullError,
    RequestTimeoutError,
    RouterUnavailableError,
    WorkersLostError,
)
from quartet.text.parsed import ParsedBuilder, ToolCallDelta
from quartet.v1 import router_pb2
from tests.client.breaking_router import (
    REQUEST_ID,
    SEED,
    WORDS,
    BreakingRouter,
    KnownAnswer,
    Script,
    Serving,
    serving,
    with_offsets,
)
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter

WAIT_S = 60.0
BY_ROUTER = (RequestPath.GENERATE, RequestPath.SESSION)
by_router = pytest.mark.parametrize("path", BY_ROUTER)

NUM_MESSAGES = len(WORDS) + 2


@dataclass
class Shown:
    """What a caller has seen of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    parsed: ParsedBuilder = field(default_factory=ParsedBuilder)
    finished: list[ChoiceFinished] = field(default_factory=list)
    is_placed: bool = False

    @property
    def content(self) -> tuple[object, ...]:
        return self.token_ids, self.text, self.parsed.reasoning, self.parsed.tool_calls


@dataclass
class Seen:
    """What a caller has seen of an answer; it checks the order of what comes."""

    choices: defaultdict[int, Shown] = field(default_factory=lambda: defaultdict(Shown))
    accepted: list[Accepted] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    def take(self, part: AnswerPart) -> None:
        match part:
            case Accepted():
                self.accepted.append(part)
                for placement in part.choices:
                    self._place(placement.choice)
            case Placed():
                self._place(part.placement.choice)
            case PromptLogprobs():
                assert not self.choices[0].token_ids
                self.prompt_logprobs.append(part)
            case ChoiceFinished():
                self.choices[part.choice].finished.append(part)
            case Delta():
                choice = self.choices[part.choice]
                assert choice.is_placed and not choice.finished
                assert not part.token_ids or part.token_offset == len(choice.token_ids)
                choice.token_ids += part.token_ids
                choice.text += part.text
                choice.parsed.add(part.reasoning, part.tool_calls)

    def _place(self, choice: int) -> None:
        assert not self.choices[choice].is_placed, "a choice was placed twice"
        self.choices[choice].is_placed = True


async def ask(
    script: Script, path: RequestPath, *, num_choices: int = 1, omit_token_ids: bool = False, seed: int | None = None
) -> tuple[Seen, Sequence[str]]:
    """What the caller of one request sees, of two routers that follow ``script``, and the routers that were lost."""
    seen = Seen()
    async with (
        asyncio.timeout(WAIT_S),
        serving(BreakingRouter(script), BreakingRouter(script)) as served,
        QuartetClient(served.addresses) as client,
        client.generate("Hi", path=path, num_choices=num_choices, omit_token_ids=omit_token_ids, seed=seed) as stream,
    ):
        async for part in stream:
            seen.take(part)
        return seen, stream.lost_routers


def check_whole(seen: Seen, answer: KnownAnswer, *, has_token_ids: bool = True) -> None:
    """The caller saw the whole answer, once."""
    [accepted] = seen.accepted
    assert accepted.seed == SEED
    assert len(seen.prompt_logprobs) == answer.has_prompt_logprobs
    for number, deltas in enumerate(answer.choices):
        shown, parsed = seen.choices[number], ParsedBuilder()
        for delta in deltas:
            calls = [
                ToolCallDelta(call.index, call.id, call.name, call.arguments, call.is_complete)
                for call in delta.tool_calls
            ]
            parsed.add(delta.reasoning, calls)
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        text = "".join(delta.text for delta in deltas)
        shown_ids = token_ids if has_token_ids else []
        assert shown.content == (shown_ids, text, parsed.reasoning, parsed.tool_calls)
        [finished] = shown.finished
        assert finished.reason is FinishReason.LENGTH
        assert finished.usage.num_output_tokens == len(token_ids)
        assert finished.usage.num_prompt_tokens == 4


@by_router
@pytest.mark.parametrize("num_messages", range(NUM_MESSAGES))
async def test_wherever_the_router_is_lost_the_answer_is_whole(path: RequestPath, num_messages: int) -> None:
    answer = KnownAnswer([WORDS])
    script = Script(answer, breaks=[num_messages])
    seen, lost = await ask(script, path)
    check_whole(seen, answer)
    [finished] = seen.choices[0].finished
    assert (script.resumes[0], len(script.resumes)) == (None, 2)
    if not num_messages:  # nothing was there to be lost
        assert (script.resumes[1], finished.usage.num_attempts, lost) == (None, 1, ())
        return
    assert len(lost) == 1
    assert finished.usage.num_attempts == 2, "one at each router"
    assert finished.time.total_s is not None and finished.time.total_s != 0.5, "the whole time, not the last router's"
    assert finished.time.first_token_s is not None, "though the second router did not see it"


@by_router
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_a_router_that_is_lost_after_the_last_choices_end_breaks_nothing(
    path: RequestPath, num_choices: int
) -> None:
    answer = KnownAnswer([with_offsets(WORDS, choice) for choice in range(num_choices)])
    script = Script(answer, breaks=[1 + num_choices * (len(WORDS) + 1)])
    seen, lost = await ask(script, path, num_choices=num_choices)
    check_whole(seen, answer)
    assert (len(script.starts), lost) == (1, ())


@by_router
async def test_a_router_that_goes_on_and_is_lost_after_the_end_breaks_nothing(path: RequestPath) -> None:
    answer = KnownAnswer([WORDS])
    script = Script(answer, breaks=[3, NUM_MESSAGES - 2])
    seen, lost = await ask(script, path)
    check_whole(seen, answer)
    assert (len(script.starts), len(lost)) == (2, 1)


def ended_answer() -> AnswerSoFar:
    """One choice that a router placed, and whose caller has its end."""
    so_far = AnswerSoFar(make_start("Hi"))
    so_far.take(Accepted(request_id=REQUEST_ID, choices=(), num_prompt_tokens=4, seed=SEED))
    so_far.take(end_of_choice())
    return so_far


def end_of_choice() -> ChoiceFinished:
    usage = Usage(num_prompt_tokens=4, num_cached_tokens=0, num_output_tokens=0, num_attempts=1)
    return ChoiceFinished(choice=0, reason=FinishReason.STOP_ID, usage=usage, time=TimeBreakdown(total_s=0.5))


async def resumed(so_far: AnswerSoFar, leg: Leg, address: str) -> list[AnswerPart]:
    """What a caller gets after its router is lost and its connection with it."""
    routers = Routers([address], None)
    try:
        [router] = routers.in_order()
        resumption = Resumption(routers, so_far, timeout_s=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            return [part async for part in resumption.parts(leg, router, RouterLostError("it is gone"))]
    finally:
        await routers.close()


async def test_a_whole_answer_is_never_resumed() -> None:
    async def leg(_router: Router, _resume: Resume) -> AsyncGenerator[AnswerPart, None]:
        raise AssertionError("nothing is left to resume")
        yield

    assert await resumed(ended_answer(), leg, "127.0.0.1:1") == []


async def test_a_choice_whose_end_came_before_its_second_router_was_lost_has_ended() -> None:
    so_far, num_legs = AnswerSoFar(make_start("Hi")), 0
    so_far.take(Accepted(request_id=REQUEST_ID, choices=(), num_prompt_tokens=4, seed=SEED))

    async def leg(_router: Router, _resume: Resume) -> AsyncGenerator[AnswerPart, None]:
        nonlocal num_legs
        num_legs += 1
        yield end_of_choice()
        raise RouterLostError("forgotten, as discovery lists it no more")

    async with serving(BreakingRouter(Script(KnownAnswer([WORDS])))) as served:
        parts = await resumed(so_far, leg, served.addresses[0])
    assert ([type(part) for part in parts], num_legs) == ([ChoiceFinished], 1)


@st.composite
def deltas(draw: st.DrawFn) -> list[router_pb2.Delta]:
    """Parts of one choice, none of them empty."""
    pieces = st.builds(
        router_pb2.Delta,
        token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=3),
        text=st.text(max_size=3),
        reasoning=st.text(max_size=3),
    ).filter(lambda delta: bool(delta.token_ids or delta.text or delta.reasoning))
    drawn, num_calls = draw(st.lists(pieces, min_size=1, max_size=5)), 0
    for delta in drawn:
        for _ in range(draw(st.integers(0, 2))):
            is_new = not num_calls or draw(st.booleans())
            num_calls += is_new
            name, arguments = ("f" if is_new else ""), draw(st.text(min_size=1, max_size=3))
            delta.tool_calls.add(index=num_calls - 1, name=name, arguments=arguments)
    return drawn


@st.composite
def answers(draw: st.DrawFn) -> KnownAnswer:
    choices = draw(st.lists(deltas(), min_size=1, max_size=3))
    later = draw(st.sets(st.integers(1, 2), max_size=2)) & set(range(len(choices)))
    placed = [with_offsets(parts, number) for number, parts in enumerate(choices)]
    return KnownAnswer(placed, placed_later=frozenset(later), has_prompt_logprobs=draw(st.booleans()))


@given(
    answer=answers(),
    # The first two may not be lost before either has shown anything.
    breaks=st.lists(st.integers(0, 20), max_size=2).filter(lambda breaks: breaks != [0, 0]),
    path=st.sampled_from(BY_ROUTER),
    omit_token_ids=st.booleans(),
)
def test_any_answer_is_whole_whatever_it_holds_and_whenever_routers_are_lost(
    answer: KnownAnswer, breaks: list[int], path: RequestPath, omit_token_ids: bool
) -> None:
    script = Script(answer, breaks=breaks)
    seen, _lost = asyncio.run(ask(script, path, num_choices=len(answer.choices), omit_token_ids=omit_token_ids))
    check_whole(seen, answer, has_token_ids=not omit_token_ids)


@by_router
async def test_choices_that_have_ended_stay_so_and_the_others_go_on_alone(path: RequestPath) -> None:
    short, long = WORDS[:1], with_offsets(WORDS, 1)
    # Accepted, the short one's only part and its end, two parts of the long one.
    script = Script(KnownAnswer([short, long]), breaks=[5])
    seen, _lost = await ask(script, path, num_choices=2)
    check_whole(seen, script.answer)
    [_first, resume] = script.resumes
    assert resume is not None and resume.choice == 1


@by_router
async def test_a_third_lost_router_ends_the_answer(path: RequestPath) -> None:
    script = Script(KnownAnswer([WORDS]), breaks=[2, 2, 2])
    with pytest.raises(RouterUnavailableError, match="lost the router"):
        await ask(script, path)
    assert len(script.starts) == 3
    attempts = [resume.attempt for resume in script.resumes if resume is not None]
    assert attempts == [1_000_000, 2_000_000]


@pytest.mark.parametrize(
    ("code", "details", "is_lost"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", True),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", True),
        (grpc.StatusCode.CANCELLED, "Received RST_STREAM with error code 8", True),
        # What gRPC makes up if the call ended while a cancel was written, or another request of the session.
        (grpc.StatusCode.INTERNAL, MADE_UP_DETAILS, True),
        (grpc.StatusCode.INTERNAL, "internal error", False),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max", False),
    ],
)
async def test_what_the_router_did_not_say_itself_counts_as_its_loss(
    code: grpc.StatusCode, details: str, is_lost: bool
) -> None:
    router = Router("127.0.0.1:1", None)
    error = router.error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details), is_begun=True)
    assert isinstance(error, RouterLostError) == is_lost
    await router.close()


@by_router
async def test_a_proxy_that_has_no_router_for_a_moment_is_asked_again(path: RequestPath) -> None:
    """It answers itself, and its connection stays: nothing is lost with it."""
    script = Script(KnownAnswer([WORDS]), breaks=[3, 0, 0, 0, 0])
    async with scene(BreakingRouter(script)) as (_served, client):
        completion = await client.complete("Hi", path=path)
    assert completion.text == "".join(delta.text for delta in WORDS)
    assert len(script.starts) == 6
    assert completion.choices[0].finished.usage.num_attempts == 2


@by_router
async def test_who_wants_it_gets_the_error_at_once(path: RequestPath) -> None:
    script = Script(KnownAnswer([WORDS]), breaks=[3])
    async with scene(BreakingRouter(script), resume_timeout_s=0) as (served, client):
        with pytest.raises(RouterUnavailableError, match=served.addresses[0]):
            await client.complete("Hi", path=path)
    assert len(script.starts) == 1


@pytest.mark.parametrize("timeout_s", [-1.0, 3600.5, float("inf"), float("nan")])
def test_an_impossible_time_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="resume_timeout_s is from 0 to 3600"):
        SyncClient("127.0.0.1:1", resume_timeout_s=timeout_s)


@asynccontextmanager
async def scene(
    *routers: BreakingRouter, resume_timeout_s: float = WAIT_S
) -> AsyncIterator[tuple[Serving, QuartetClient]]:
    """Routers, and a client of them."""
    async with (
        asyncio.timeout(2 * WAIT_S),
        serving(*routers) as served,
        QuartetClient(served.addresses, resume_timeout_s=resume_timeout_s) as client,
    ):
        yield served, client


class Asking:
    """One request that waits at its router, which a test then kills."""

    def __init__(self, script: Script, served: Serving, client: QuartetClient, path: RequestPath, **ask: object):
        self.seen = Seen()
        self.stream = client.generate("Hi", path=path, **ask)  # type: ignore[arg-type]
        self._script = script
        self._served = served
        self._has_shown = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def waits(self) -> None:
        """Wait until it has all that comes before the wait."""
        await self._has_shown.wait()

    async def kill_router(self) -> None:
        """Then kill its router; from now on none waits."""
        await self.waits()
        self._script.holds_after = None
        await self._served.kill(0)

    async def ended(self) -> Seen:
        """Wait for its end."""
        await self._reading
        return self.seen

    async def _read(self) -> None:
        async for part in self.stream:
            self.seen.take(part)
            if len(self.seen.choices[0].token_ids) == NUM_SHOWN:
                self._has_shown.set()


NUM_SHOWN = 2


def holding() -> Script:
    """Its routers stop after the second word."""
    return Script(KnownAnswer([WORDS]), holds_after=NUM_SHOWN + 1)


@by_router
async def test_the_same_router_goes_on_once_it_is_back(path: RequestPath) -> None:
    script = holding()
    async with scene(BreakingRouter(script)) as (served, client):
        asking = Asking(script, served, client, path)
        await asking.kill_router()
        await served.add(BreakingRouter(script), served.addresses[0])
        check_whole(await asking.ended(), script.answer)
        assert asking.stream.router == served.addresses[0]
        assert asking.stream.lost_routers == (served.addresses[0],)


@by_router
async def test_only_routers_that_were_reached_use_up_numbers_of_attempts(
    path: RequestPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, connect, dialled = holding(), Router.connect, asyncio.Semaphore(0)

    async def count(router: Router) -> None:
        dialled.release()
        await connect(router)

    async with scene(BreakingRouter(script)) as (served, client):
        asking = Asking(script, served, client, path)
        await asking.waits()
        monkeypatch.setattr(Router, "connect", count)
        await asking.kill_router()
        for _ in range(6):
            await dialled.acquire()
        await served.add(BreakingRouter(script), served.addresses[0])
        check_whole(await asking.ended(), script.answer)
    [_first, resume] = script.resumes
    # The client may have taken the killed router for connected once.
    assert resume is not None and resume.attempt <= 2_000_000


async def test_an_answer_fails_once_no_number_is_left_for_another_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet.client.resume._MAX_ASKED", 3)
    script = Script(KnownAnswer([WORDS]), breaks=[3], refusals=[QueueFullError("full", retry_delay_s=0.01)] * 9)
    async with scene(BreakingRouter(script), BreakingRouter(script)) as (_served, client):
        with pytest.raises(QueueFullError):
            await client.complete("Hi")
    assert [resume.attempt for resume in script.resumes if resume is not None] == [1_000_000, 2_000_000, 3_000_000]


@by_router
async def test_an_answer_that_makes_its_request_too_long_breaks_no_stream(
    path: RequestPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(KnownAnswer([WORDS]), breaks=[3])
    async with scene(BreakingRouter(script), BreakingRouter(script)) as (_served, client):
        stream = client.generate("Hi", path=path)
        # So that whatever is resumed is too long.
        monkeypatch.setattr("quartet.client.request.MAX_API_MESSAGE_BYTES", 100)
        with pytest.raises(MessageTooLargeError, match="its answer so far makes the request longer"):
            async for _ in stream:
                pass
    assert len(script.starts) == 1


@by_router
async def test_without_a_router_it_fails_after_its_time_and_names_them(path: RequestPath) -> None:
    script = holding()
    async with scene(BreakingRouter(script), resume_timeout_s=0.3) as (served, client):
        asking = Asking(script, served, client, path)
        await asking.kill_router()
        with pytest.raises(RouterUnavailableError, match=rf"lost the router at {served.addresses[0]}.*; since then"):
            await asking.ended()


@by_router
async def test_a_cancel_while_no_router_has_it_ends_each_choice_with_what_was_shown(path: RequestPath) -> None:
    script = holding()
    async with scene(BreakingRouter(script)) as (served, client):
        asking = Asking(script, served, client, path)
        await asking.kill_router()
        await asking.stream.cancel()
        [finished] = (await asking.ended()).choices[0].finished
    assert finished.reason is FinishReason.CANCELLED
    assert (finished.usage.num_output_tokens, finished.usage.num_attempts) == (NUM_SHOWN, 1)


@by_router
async def test_a_cancelled_answer_is_not_resumed(path: RequestPath) -> None:
    script = holding()
    async with scene(BreakingRouter(script), BreakingRouter(script)) as (served, client):
        asking = Asking(script, served, client, path)
        await asking.waits()
        await asking.stream.cancel()  # which this router does not hear
        await asking.kill_router()
        [finished] = (await asking.ended()).choices[0].finished
    assert finished.reason is FinishReason.CANCELLED
    assert len(script.starts) == 1


@by_router
async def test_a_client_that_is_closed_resumes_nothing(path: RequestPath) -> None:
    script = holding()
    async with asyncio.timeout(WAIT_S), serving(BreakingRouter(script)) as served:
        client = QuartetClient(served.addresses, resume_timeout_s=WAIT_S)
        asking = Asking(script, served, client, path)
        await asking.kill_router()
        await client.close()
        with pytest.raises(ClientClosedError):
            await asking.ended()


@by_router
async def test_only_what_is_left_of_its_time_is_asked_for(path: RequestPath) -> None:
    script = holding()
    async with scene(BreakingRouter(script), BreakingRouter(script)) as (served, client):
        asking = Asking(script, served, client, path, timeout_s=500.0)
        await asking.kill_router()
        await asking.ended()
    first, second = [start.timeout.ToTimedelta().total_seconds() for start in script.starts]
    assert first == 500.0
    assert 400.0 < second < 500.0


@by_router
async def test_a_request_whose_time_is_up_waits_for_no_router(path: RequestPath) -> None:
    script = holding()
    async with scene(BreakingRouter(script)) as (served, client):
        asking = Asking(script, served, client, path, timeout_s=2.0)
        await asking.kill_router()
        with pytest.raises(RequestTimeoutError):
            await asking.ended()


#: Nobody listens there, and whoever dials it waits for ever.
SILENT = "127.0.0.1:1"


@asynccontextmanager
async def asking_beside_a_silent_router(
    path: RequestPath, monkeypatch: pytest.MonkeyPatch, *, resume_timeout_s: float = 10 * WAIT_S, **ask: object
) -> AsyncIterator[tuple[Asking, asyncio.Event]]:
    """One whose router is killed, so that the client dials the silent one, and what is set once it does."""
    script, connect, dialled = holding(), Router.connect, asyncio.Event()

    async def dial(router: Router) -> None:
        if router.address == SILENT:
            dialled.set()
            await asyncio.Event().wait()
        await connect(router)

    monkeypatch.setattr(Router, "connect", dial)
    async with (
        asyncio.timeout(2 * WAIT_S),
        serving(BreakingRouter(script)) as served,
        QuartetClient([*served.addresses, SILENT], resume_timeout_s=resume_timeout_s) as client,
    ):
        asking = Asking(script, served, client, path, **ask)
        await asking.kill_router()
        yield asking, dialled


@by_router
async def test_no_router_is_dialled_for_longer_than_the_answer_waits(
    path: RequestPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking_beside_a_silent_router(path, monkeypatch, resume_timeout_s=0.5) as (asking, _dialled):
        with pytest.raises(RouterUnavailableError, match=f"lost the router at .*; since then no router .* {SILENT}"):
            await asking.ended()


@by_router
async def test_no_router_is_dialled_for_longer_than_the_request_has(
    path: RequestPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking_beside_a_silent_router(path, monkeypatch, timeout_s=2.0) as (asking, _dialled):
        with pytest.raises(RequestTimeoutError):
            await asking.ended()


@by_router
async def test_a_cancel_ends_the_answer_while_a_router_is_dialled(
    path: RequestPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking_beside_a_silent_router(path, monkeypatch) as (asking, dialled):
        await dialled.wait()
        await asking.stream.cancel()
        [finished] = (await asking.ended()).choices[0].finished
    assert finished.reason is FinishReason.CANCELLED
    assert finished.usage.num_output_tokens == NUM_SHOWN


def words_router(error_at_end: Exception | None = None) -> FakeRouter:
    router = FakeRouter()
    router.error_at_end = error_at_end  # type: ignore[assignment]
    return router


@by_router
async def test_an_error_that_the_router_gives_is_the_answers(start_router: StartRouter, path: RequestPath) -> None:
    router, other = words_router(WorkersLostError("it lost three")), FakeRouter()
    async with (
        asyncio.timeout(WAIT_S),
        QuartetClient([await start_router(router), await start_router(other)]) as client,
    ):
        with pytest.raises(WorkersLostError):
            await client.complete("Hi", path=path)
    assert other.starts == []


@by_router
@pytest.mark.parametrize("num_messages", range(1, NUM_MESSAGES))
async def test_an_answer_that_a_drain_cuts_goes_on_elsewhere(path: RequestPath, num_messages: int) -> None:
    answer = KnownAnswer([WORDS])
    script = Script(answer, breaks=[num_messages], last_words=DrainingError("cut by the drain"))
    seen, lost = await ask(script, path)
    check_whole(seen, answer)
    [first, resume] = script.resumes
    assert (first, len(lost)) == (None, 1)
    assert resume is not None and resume.seed == SEED, "the seed that the first router drew"
    assert len(resume.generated_token_ids.ids) == num_messages - 1


@by_router
async def test_a_router_that_does_nothing_but_drain_is_asked_a_few_times(
    start_router: StartRouter, path: RequestPath
) -> None:
    router = words_router(DrainingError("as ever"))
    router.words = []
    async with asyncio.timeout(WAIT_S), QuartetClient(await start_router(router)) as client:
        with pytest.raises(DrainingError):
            await client.complete("Hi", path=path)
    assert len(router.starts) == 3


@by_router
async def test_a_full_router_is_asked_again_when_it_says(path: RequestPath) -> None:
    script = Script(KnownAnswer([WORDS]), breaks=[3], refusals=[QueueFullError("full", retry_delay_s=0.2)] * 2)
    async with scene(BreakingRouter(script), BreakingRouter(script)) as (_served, client):
        completion = await client.complete("Hi", path=path)
    assert completion.choices[0].token_ids == tuple(range(100, 106))
    assert len(script.starts) == 4


@pytest.mark.parametrize("retry_delay_s", [None, 2.0])
def test_answers_that_are_lost_together_ask_at_different_times(retry_delay_s: float | None) -> None:
    pauses = []
    for _ in range(64):
        tries = Tries(WAIT_S)
        tries.lost(RouterLostError("it is gone"), 3)
        tries.failed(QueueFullError("full", retry_delay_s=retry_delay_s))
        pauses.append(tries.pause_s())
    assert len(set(pauses)) > 32
    assert min(pauses) >= (retry_delay_s or 0.025)
    assert max(pauses) <= (retry_delay_s or 0.0) + 0.05


@by_router
async def test_a_router_that_stays_full_ends_the_answer_in_time(path: RequestPath) -> None:
    script = Script(KnownAnswer([WORDS]), breaks=[3], refusals=[QueueFullError("full", retry_delay_s=WAIT_S)] * 9)
    async with scene(BreakingRouter(script), BreakingRouter(script), resume_timeout_s=1.0) as (_served, client):
        with pytest.raises(QueueFullError):
            await client.complete("Hi", path=path)
    assert len(script.starts) == 3, "each once"


class Wrong(BreakingRouter):
    """It goes on with the whole answer."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)

    async def Generate(self, requests: Any, context: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
        await anext(requests)
        for message in self.script.answer.messages(None):
            yield message


async def test_a_router_that_goes_on_elsewhere_in_the_answer_is_not_believed() -> None:
    script = Script(KnownAnswer([WORDS]), breaks=[3])
    async with scene(BreakingRouter(script), Wrong(script)) as (_served, client):
        with pytest.raises(ProtocolError, match="token 0, not 2"):
            await client.complete("Hi")


async def test_a_router_that_answers_for_another_choice_is_not_believed() -> None:
    script = Script(KnownAnswer([WORDS, with_offsets(WORDS, 1)]))
    async with scene(BreakingRouter(script)) as (_served, client):
        with pytest.raises(ProtocolError, match="choice 1 of 1"):
            await client.complete("Hi")


async def test_a_client_without_a_loop_goes_on_too() -> None:
    script = Script(KnownAnswer([WORDS]), breaks=[4])

    def use(addresses: Sequence[str]) -> tuple[str, Sequence[str], str | None]:
        with SyncClient(addresses) as client:
            stream = client.generate("Hi")
            text = "".join(part.text for part in stream if isinstance(part, Delta))
            return text, stream.lost_routers, stream.router

    async with asyncio.timeout(WAIT_S), serving(BreakingRouter(script), BreakingRouter(script)) as served:
        text, lost, router = await asyncio.to_thread(use, served.addresses)
    assert text == "".join(delta.text for delta in WORDS)
    assert (list(lost), router) == ([served.addresses[0]], served.addresses[1])


async def test_all_requests_of_a_killed_router_go_on_at_the_next() -> None:
    script = holding()
    async with scene(BreakingRouter(script), BreakingRouter(script)) as (served, client):
        crowd = [Asking(script, served, client, RequestPath.GENERATE) for _ in range(16)]
        for asking in crowd:
            await asking.waits()
        await crowd[0].kill_router()
        for asking in crowd:
            check_whole(await asking.ended(), script.answer)
            assert asking.stream.router == served.addresses[1]
