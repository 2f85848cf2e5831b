"""A router before real workers of the tiny model: the answer is about the picture, whichever worker encodes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from quartet.config import build
from quartet.discovery.base import Role
from quartet.discovery.create import DiscoveryConfig, DiscoveryKind
from quartet.discovery.file import FileConfig
from quartet.errors import InvalidMediaError, UnsupportedFieldError
from quartet.rpc.errors import from_rpc_error
from quartet.v1 import router_pb2 as pb
from quartet.v1 import types_pb2
from services.workers.config import WorkerConfig
from services.workers.process import WorkerProcess
from tests import tiny
from tests.pictures import Look, make_look
from tests.router.system import Running, Stub, System
from tests.router.test_place import take_up

ENGINE = {"dtype": "float32", "num_blocks": 64, "num_threads": 1}
TOWER = {**ENGINE, "modality": "multimodal"}
LOOKS = [make_look(number) for number in (1, 2, 4)]
WAIT_S = 60.0


class TinySystem(System):
    """Its workers serve the tiny model, each with an engine of its own settings."""

    @property
    def discovery(self) -> DiscoveryConfig:
        files = FileConfig(directory=self.directory / "discovery", poll_interval_s=0.02, ttl_s=60)
        return DiscoveryConfig(kind=DiscoveryKind.FILE, file=files)

    def start_tiny(self, worker_id: str, engine: dict[str, object]) -> None:
        settings = {"worker_id": worker_id, "model_path": str(tiny.CHECKPOINT), "engine": engine}
        config = replace(
            build(WorkerConfig, settings),
            discovery=self.discovery,
            signing_keys_file=self.signing_keys_file,
            drain_timeout_s=2.0,
        )
        stop = asyncio.Event()
        process = WorkerProcess(config, Role(worker_id.partition("-")[0]))
        self.workers[worker_id] = Running(asyncio.create_task(process.run(stop)), stop)


@asynccontextmanager
async def serving(directory: Path, **engines: dict[str, object]) -> AsyncIterator[tuple[TinySystem, Stub]]:
    """Workers by role, with a number where there are several, and a stub for the router before them."""
    system = TinySystem(directory)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(system.close)
        await system.start_router()
        for role, engine in engines.items():
            # One after the other: loading a model is not made for several at a time in one process.
            name, _, number = role.partition("_")
            system.start_tiny(f"{name}-{number or 0}", engine)
            await system.wait_ready()
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(system.address))
        yield system, Stub(channel)


def start_about(look: Look, **changes: Any) -> pb.GenerateStart:
    parts = [
        pb.ContentPart(media=pb.MediaPart(data=look.files[0])),
        pb.ContentPart(text=look.question),
    ]
    sampling = types_pb2.Sampling(temperature=0.0, max_tokens=24)
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", parts=parts)])
    return pb.GenerateStart(**{"chat": chat, "sampling": sampling, **changes})


async def ask(stub: Stub, start: pb.GenerateStart) -> tuple[pb.Accepted, str, pb.ChoiceFinished]:
    texts, accepted, finished = [], pb.Accepted(), pb.ChoiceFinished()
    async with asyncio.timeout(WAIT_S):
        async for response in stub.Generate(iter([pb.GenerateRequest(start=start)])):
            match response.WhichOneof("message"):
                case "accepted":
                    accepted = response.accepted
                case "delta":
                    texts.append(response.delta.text)
                case "finished":
                    finished = response.finished
    return accepted, "".join(texts), finished


@pytest.mark.parametrize(
    ("engines", "rank"),
    [
        ({"encode": ENGINE, "prefill": ENGINE, "decode": ENGINE}, "encode-0"),
        ({"prefill": TOWER, "decode": ENGINE}, ""),
        ({"decode": TOWER}, ""),
    ],
    ids=["encode workers", "prefill workers", "decode workers"],
)
async def test_every_way_gives_the_right_answer(
    tmp_path: Path, engines: dict[str, dict[str, object]], rank: str
) -> None:
    async with serving(tmp_path, **engines) as (system, stub):
        for look in LOOKS:
            accepted, text, finished = await ask(stub, start_about(look))
            assert text.strip() == look.answer, look.question
            assert accepted.encode.worker_id == rank
            assert finished.usage.num_media_tokens == 64
            assert finished.usage.num_prompt_tokens > 64
            assert finished.time.HasField("media")
        again = (await ask(stub, start_about(LOOKS[0])))[2]
        assert again.usage.num_cached_tokens >= 32, "the same picture, the same blocks"
        with pytest.raises(grpc.aio.AioRpcError) as torn:
            await ask(stub, start_about(replace(LOOKS[0], files=(b"no picture",))))
        error = from_rpc_error(torn.value)
        assert (type(error), error.field) == (InvalidMediaError, "chat.messages[0].parts[0].media.data")
        await system.wait_idle()


async def test_a_request_that_only_decode_workers_can_encode_is_not_placed(tmp_path: Path) -> None:
    async with serving(tmp_path, decode=TOWER) as (_system, stub):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Place(pb.PlaceRequest(start=start_about(LOOKS[0])), timeout=WAIT_S)
        error = from_rpc_error(refused.value)
        assert (type(error), error.field) == (UnsupportedFieldError, "chat.messages[0].parts[0].media.data")


async def test_choices_sessions_placements_and_the_death_of_an_encode_worker(tmp_path: Path) -> None:
    engines = {"encode": ENGINE, "encode_1": ENGINE, "prefill": ENGINE, "decode": ENGINE}
    async with serving(tmp_path, **engines) as (system, stub):
        look, other = LOOKS[:2]
        start = start_about(look, num_choices=3)
        texts = await asyncio.gather(*(all_texts(stub, start) for _ in range(2)))
        assert texts == [dict.fromkeys(range(3), look.answer)] * 2
        assert await ask_in_session(stub, start_about(look)) == look.answer
        placed = await stub.Place(pb.PlaceRequest(start=start_about(look)), timeout=WAIT_S)
        tokenizer = Tokenizer.from_file(str(tiny.CHECKPOINT / "tokenizer.json"))
        assert placed.num_prompt_tokens > 64
        assert tokenizer.decode(await take_up(placed.choices[0])).strip() == look.answer
        # Its picture is there, and it goes.
        encode = (await ask(stub, start_about(look)))[0].encode.worker_id
        gone = system.workers.pop(encode)
        gone.task.cancel()
        assert (await ask(stub, start_about(look)))[1].strip() == look.answer
        assert (await ask(stub, start_about(other)))[1].strip() == other.answer
        await asyncio.wait([gone.task])


async def all_texts(stub: Stub, start: pb.GenerateStart) -> dict[int, str]:
    texts: dict[int, str] = {}
    async with asyncio.timeout(WAIT_S):
        async for response in stub.Generate(iter([pb.GenerateRequest(start=start)])):
            if response.HasField("delta"):
                texts[response.delta.choice] = texts.get(response.delta.choice, "") + response.delta.text
    return {choice: text.strip() for choice, text in texts.items()}


async def ask_in_session(stub: Stub, start: pb.GenerateStart) -> str:
    request = pb.SessionRequest(start=pb.SessionStart(slot=3, start=start))
    text = ""
    async with asyncio.timeout(WAIT_S):
        async for response in stub.Session(iter([request])):
            assert not response.failures
            text += "".join(response.texts)
    return text.strip()
