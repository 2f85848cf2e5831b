r"""One tenant's attacks on a router, each as a process: ``isolation`` starts it, and ends it by closing its input.

Each line that it reads it answers with the number of requests that the router has answered so far.

python -m benchmarks.isolation_attack \
    '{"attack": ..., "router": "host:port", "http": "host:port", "key": KEY, "share": 0.5}'
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TypeAlias

import grpc

from benchmarks.children import answer, argument, orders
from benchmarks.isolation_http import HttpAttack, attack_http
from quartet.v1 import router_pb2, router_pb2_grpc, types_pb2

#: The tenant that attacks.
ATTACKER = "attacker"

#: Of the model that is attacked, in tokens.
MAX_MODEL_LEN = 16_384

_FIRST_TOKEN_ID, _END_TOKEN_ID = 16, 2048
_LETTER_A = 72
# After a refusal: an attacker who only asks again and again spends its time on refusals.
_PAUSE_S = 0.05
_SLICE_S = 0.02
_STARTED_AFTER_S = 3.0


class Attack(StrEnum):
    """What the tenant does."""

    NOTHING = "nothing"  # only burns CPU: what the machine's cores cost the other tenant
    MESSAGES = "messages"  # chats of 500,000 empty messages
    LISTS = "lists"  # tens of MB of token ids, stop ids, stop strings and biases
    TEXTS = "texts"  # six prompts of 12 MB each, given up after three seconds
    CHOICES = "choices"  # sessions with 4,096 starts of 64 choices
    PRIORITY = "priority"  # 64 clients with the highest priority there is
    PLACES = "places"  # placements that no client takes up, 30 at a time
    PROMPTS = "prompts"  # 64 clients with prompts of 8,000 tokens
    REFUSED = "refused"  # 64 clients with prompts that are too long
    SMALL = "small"  # 100 clients with chats of 4,096 tiny messages, 45 KB each, and every other one impossible
    TINY = "tiny"  # 64 clients with prompts of one token and answers of one
    RESUME = "resume"  # eight clients that go on after 15,000 tokens "a", with stop strings that all begin so
    SESSION_MESSAGES = "session_messages"  # three sessions: impossible starts, starts and cancels, cancels of nothing
    IDLE_SESSIONS = "idle_sessions"  # 10,000 sessions with one refused start each
    LONG_MESSAGES = "long_messages"  # eight clients with a session of its own for each start, of 12 MB
    # By HTTP, as `HttpAttack` says.
    HTTP_BOMBS = HttpAttack.BOMBS.value
    HTTP_TEXTS = HttpAttack.TEXTS.value
    HTTP_MALFORMED = HttpAttack.MALFORMED.value
    HTTP_REFUSED = HttpAttack.REFUSED.value
    HTTP_SMALL = HttpAttack.SMALL.value
    HTTP_PROMPTS = HttpAttack.PROMPTS.value
    HTTP_PRIORITY = HttpAttack.PRIORITY.value
    HTTP_CANCELS = HttpAttack.CANCELS.value
    HTTP_CONNECTIONS = HttpAttack.CONNECTIONS.value


_Stub: TypeAlias = "router_pb2_grpc.RouterServiceAsyncStub"

# Requests by Generate that were answered to the end, of this process.
_answered: Counter[str] = Counter()


def main() -> None:
    """Attack until the standard input ends."""
    asyncio.run(_run(**argument()))


async def _run(attack: str, router: str, http: str, key: str, share: float) -> None:
    if attack == Attack.NOTHING:
        work: Awaitable[None] = _burn(share)
    elif attack in set(HttpAttack):
        work = attack_http(HttpAttack(attack), http, key)
    else:
        work = _attack(_ATTACKS[Attack(attack)], router)
    working = asyncio.ensure_future(work)
    answer("begun")
    async for _ in orders():
        answer(_answered.total())
    working.cancel()
    await asyncio.wait([working])


async def _burn(share: float) -> None:
    """Use ``share`` of a core."""
    while True:
        ends_at = time.thread_time() + share * _SLICE_S
        while time.thread_time() < ends_at:
            pass
        await asyncio.sleep((1.0 - min(share, 0.99)) * _SLICE_S)


async def _attack(attack: Callable[[_Stub], Awaitable[None]], router: str) -> None:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(router, options=options) as channel:
        await attack(router_pb2_grpc.RouterServiceStub(channel))


async def _repeat(count: int, ask: Callable[[], Awaitable[None]]) -> None:
    """``count`` clients, each of which asks again and again."""

    async def one() -> None:
        while True:
            try:
                await ask()
            except grpc.aio.AioRpcError:
                await asyncio.sleep(_PAUSE_S)

    await asyncio.gather(*(one() for _ in range(count)))


async def _generate(stub: _Stub, start: router_pb2.GenerateStart, timeout_s: float = 60.0) -> None:
    start.tenant = ATTACKER
    call = stub.Generate(timeout=timeout_s)
    await call.write(router_pb2.GenerateRequest(start=start))
    await call.done_writing()
    async for _ in call:
        pass
    _answered[ATTACKER] += 1


async def _messages(stub: _Stub) -> None:
    message = router_pb2.ChatMessage(role="user")
    start = router_pb2.GenerateStart(chat=router_pb2.ChatPrompt(messages=[message] * 500_000))
    await _repeat(2, lambda: _generate(stub, start))


async def _lists(stub: _Stub) -> None:
    ids = [_FIRST_TOKEN_ID] * 5_000_000
    some = router_pb2.TokenIds(ids=[_FIRST_TOKEN_ID])
    starts = [
        router_pb2.GenerateStart(token_ids=router_pb2.TokenIds(ids=ids)),
        router_pb2.GenerateStart(token_ids=some, sampling=types_pb2.Sampling(stop_token_ids=ids)),
        router_pb2.GenerateStart(token_ids=some, text_options=router_pb2.TextOptions(stop_strings=["ab"] * 3_000_000)),
        router_pb2.GenerateStart(
            token_ids=some, sampling=types_pb2.Sampling(logit_bias=dict.fromkeys(range(1_000_000), 1.0))
        ),
    ]
    turn = iter(range(1 << 60))
    await _repeat(2, lambda: _generate(stub, starts[next(turn) % len(starts)]))


async def _texts(stub: _Stub) -> None:
    start = router_pb2.GenerateStart(text="once upon a time " * (12_000_000 // 17))
    await _repeat(6, lambda: _generate(stub, start, timeout_s=_STARTED_AFTER_S))


async def _choices(stub: _Stub) -> None:
    async def ask() -> None:
        call = stub.Session(timeout=20.0)
        for slot in range(4096):
            start = _short(64, num_tokens=64)
            start.num_choices, start.tenant = 64, ATTACKER
            await call.write(router_pb2.SessionRequest(start=router_pb2.SessionStart(slot=slot, start=start)))
        async for _ in call:
            pass

    await _repeat(1, ask)


async def _priority(stub: _Stub) -> None:
    async def ask() -> None:
        start = _short(128, num_tokens=256)
        start.priority = 2**31 - 1
        await _generate(stub, start)

    await _repeat(64, ask)


async def _places(stub: _Stub) -> None:
    async def ask() -> None:
        start = _short(128, num_tokens=512)
        start.tenant = ATTACKER
        await stub.Place(router_pb2.PlaceRequest(start=start), timeout=30.0)

    await _repeat(30, ask)


async def _prompts(stub: _Stub) -> None:
    await _repeat(64, lambda: _generate(stub, _short(8_000, num_tokens=64)))


async def _refused(stub: _Stub) -> None:
    await _repeat(64, lambda: _generate(stub, _short(MAX_MODEL_LEN + 1, num_tokens=1)))


async def _small(stub: _Stub) -> None:
    chat = router_pb2.ChatPrompt(messages=[router_pb2.ChatMessage(role="user", content="a")] * 4096)
    sampling = types_pb2.Sampling(max_tokens=1, ignore_eos=True)
    starts = [router_pb2.GenerateStart(chat=chat, sampling=sampling, num_choices=number) for number in (1, 65)]
    turn = iter(range(1 << 60))
    await _repeat(100, lambda: _generate(stub, starts[next(turn) % len(starts)]))


async def _tiny(stub: _Stub) -> None:
    await _repeat(64, lambda: _generate(stub, _short(1, num_tokens=1)))


async def _resume(stub: _Stub) -> None:
    start = _short(8, num_tokens=16_000)
    start.tenant = ATTACKER
    # Each token may end the beginning of all of these.
    stop_strings = ["a" * 1023 + "b", *("a" * (256 - number) + "b" + "a" * (256 + number) for number in range(15))]
    start.text_options.CopyFrom(router_pb2.TextOptions(stop_strings=stop_strings))
    resume = router_pb2.Resume(
        request_id="0" * 31 + "1", attempt=1, seed=1, generated_token_ids=router_pb2.TokenIds(ids=[_LETTER_A] * 15_000)
    )
    request = router_pb2.SessionRequest(start=router_pb2.SessionStart(start=start, resume=resume))

    async def ask() -> None:
        call = stub.Session(timeout=20.0)
        await call.write(request)
        await call.read()
        call.cancel()
        await asyncio.sleep(_PAUSE_S)

    await _repeat(8, ask)


async def _session_messages(stub: _Stub) -> None:
    impossible = _short(8, num_tokens=1)
    impossible.num_choices = 65
    possible = _short(64, num_tokens=1)
    nothing = router_pb2.SessionRequest(cancel=types_pb2.Cancel(slot=1 << 20))

    async def flood(make: Callable[[int], Sequence[router_pb2.SessionRequest]]) -> None:
        async def ask() -> None:
            call = stub.Session()
            answers = asyncio.ensure_future(_take_all(call))
            try:
                await call.write(_session_start(0, impossible))
                for slot in itertools.count(1):
                    for message in make(slot % (1 << 20)):
                        await call.write(message)
            finally:
                answers.cancel()
                call.cancel()

        await _repeat(1, ask)

    await asyncio.gather(
        flood(lambda slot: [_session_start(slot, impossible)]),
        flood(lambda slot: [_session_start(slot, possible), _session_cancel(slot)]),
        flood(lambda _slot: [nothing]),
    )


async def _idle_sessions(stub: _Stub) -> None:
    impossible = _short(8, num_tokens=1)
    impossible.num_choices = 65
    kept = []
    for _ in range(10_000):
        call = stub.Session()
        kept.append(call)
        try:
            await call.write(_session_start(1, impossible))
            await call.read()
        except grpc.aio.AioRpcError:
            await asyncio.sleep(_PAUSE_S)
    await asyncio.Event().wait()


async def _long_messages(stub: _Stub) -> None:
    start = _session_start(1, router_pb2.GenerateStart(text="y" * 12_000_000))

    async def ask() -> None:
        call = stub.Session(timeout=20.0)
        try:
            await call.write(start)
            await call.read()
        finally:
            call.cancel()

    await _repeat(8, ask)


async def _take_all(call: grpc.aio.StreamStreamCall[router_pb2.SessionRequest, router_pb2.SessionResponse]) -> None:
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass


def _session_start(slot: int, start: router_pb2.GenerateStart) -> router_pb2.SessionRequest:
    start.tenant = ATTACKER
    return router_pb2.SessionRequest(start=router_pb2.SessionStart(slot=slot, start=start))


def _session_cancel(slot: int) -> router_pb2.SessionRequest:
    return router_pb2.SessionRequest(cancel=types_pb2.Cancel(slot=slot))


def _short(num_prompt_tokens: int, *, num_tokens: int) -> router_pb2.GenerateStart:
    ids = random.choices(range(_FIRST_TOKEN_ID, _END_TOKEN_ID), k=num_prompt_tokens)
    return router_pb2.GenerateStart(
        token_ids=router_pb2.TokenIds(ids=ids),
        sampling=types_pb2.Sampling(max_tokens=num_tokens, ignore_eos=True),
        text_options=router_pb2.TextOptions(omit_text=True),
    )


_ATTACKS: Mapping[Attack, Callable[[_Stub], Awaitable[None]]] = {
    Attack.MESSAGES: _messages,
    Attack.LISTS: _lists,
    Attack.TEXTS: _texts,
    Attack.CHOICES: _choices,
    Attack.PRIORITY: _priority,
    Attack.PLACES: _places,
    Attack.PROMPTS: _prompts,
    Attack.REFUSED: _refused,
    Attack.SMALL: _small,
    Attack.TINY: _tiny,
    Attack.RESUME: _resume,
    Attack.SESSION_MESSAGES: _session_messages,
    Attack.IDLE_SESSIONS: _idle_sessions,
    Attack.LONG_MESSAGES: _long_messages,
}


if __name__ == "__main__":
    main()
