"""The tiny model over worker processes: whichever way a picture comes to be in a prompt, the model sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from models.tiny.tokenizer import ASSISTANT, BOS, EOS, USER
from quartet.discovery.base import Role
from quartet.engine.base import Generation
from quartet.engine.sampling import Sampling
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.media_spans import expand_placeholders
from quartet.media.items import MediaFile, MediaKind, MediaSize
from quartet.media.media_id import MEDIA_ID_SIZE_BYTES, media_id, preprocessing_fingerprint
from quartet.streams.client import DecodeClient, PrefillClient
from quartet.streams.convert.messages import to_encode_start
from quartet.streams.messages import MediaInput, RequestContext, WorkerStart
from quartet.text.model_files import read_text_files
from quartet.v1 import encode_pb2, encode_pb2_grpc
from tests import tiny
from tests.pictures import Look, make_look
from tests.services.encode_workers import Encoded, make_encode_start
from tests.services.stream_workers import collect_all
from tests.services.worker_processes import RunningWorker, worker_process
from tests.streams.pulled import PullingDecodeClient

PLACEHOLDER_ID = 7
ENGINE = {"dtype": "float32", "num_blocks": 64, "num_threads": 1}
LOOKS = [make_look(number) for number in (1, 2, 4)]


@dataclass
class Fleet:
    """Workers of the tiny model: one with nothing but the tower, two with both, which take files too."""

    encode: RunningWorker
    prefill: RunningWorker
    decode: RunningWorker
    tokenizer: Tokenizer
    fingerprint: bytes

    def prompt(self, look: Look) -> list[int]:
        """With one placeholder for the picture."""
        before = self.tokenizer.encode(f"{BOS}{USER}", add_special_tokens=False).ids
        after = self.tokenizer.encode(f"{look.question}{EOS}{ASSISTANT}", add_special_tokens=False).ids
        return [*before, PLACEHOLDER_ID, *after]

    def file(self, look: Look) -> MediaFile:
        return MediaFile(MediaKind.IMAGE, look.files[0])

    def answer(self, look: Look) -> list[int]:
        """What the model is to say, less the end."""
        return self.tokenizer.encode(look.answer, add_special_tokens=False).ids  # type: ignore[no-any-return]

    def start_with_file(self, look: Look) -> WorkerStart:
        media = MediaInput(media_id(self.file(look), self.fingerprint), self.file(look))
        return _start(self.prompt(look), (), (media,))

    async def encoded(self, look: Look) -> Encoded:
        stream = encode_pb2_grpc.EncodeServiceStub(self.encode.channel).Encode()
        await stream.write(encode_pb2.EncodeRequest(start=to_encode_start(make_encode_start([self.file(look)]))))
        await stream.done_writing()
        encoded = Encoded()
        async for message in stream:
            encoded.take(message)
        return encoded

    async def start_with_hand_off(self, look: Look) -> WorkerStart:
        encoded = await self.encoded(look)
        [size] = encoded.sizes
        sizes = [MediaSize(media_id=size.media_id, num_tokens=size.num_tokens)]
        prompt, spans = expand_placeholders(self.prompt(look), PLACEHOLDER_ID, sizes)
        return _start(prompt, spans, (MediaInput(size.media_id, encoded.hand_offs[0]),))

    def prefills(self) -> PrefillClient:
        return PrefillClient("prefill", self.prefill.channel, lambda _: None, lambda _: None)

    def decodes(self) -> PullingDecodeClient:
        return PullingDecodeClient(DecodeClient("decode", self.decode.channel, lambda _: None))


def _start(prompt: list[int], spans: tuple[MediaSpan, ...], media: tuple[MediaInput, ...]) -> WorkerStart:
    generation = Generation(prompt_token_ids=prompt, media=spans, sampling=Sampling(temperature=0.0, max_tokens=24))
    return WorkerStart(context=RequestContext(), generation=generation, media=media)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    with_tower = {**ENGINE, "modality": "multimodal"}
    async with AsyncExitStack() as stack:
        encode = await stack.enter_async_context(worker_process(tmp_path, Role.ENCODE, engine=ENGINE))
        prefill = await stack.enter_async_context(worker_process(tmp_path, Role.PREFILL, engine=with_tower))
        decode = await stack.enter_async_context(worker_process(tmp_path, Role.DECODE, engine=with_tower))
        files = read_text_files(tiny.CHECKPOINT)
        tokenizer = Tokenizer.from_file(str(tiny.CHECKPOINT / "tokenizer.json"))
        yield Fleet(encode, prefill, decode, tokenizer, preprocessing_fingerprint(files))


async def test_every_way_gives_the_right_answer(fleet: Fleet) -> None:
    assert fleet.encode.record.media == ("image", "embeddings")
    assert fleet.prefill.record.media == fleet.decode.record.media == ("image", "embeddings", "hand_off")
    assert fleet.encode.record.model_fingerprint == fleet.prefill.record.model_fingerprint
    assert fleet.encode.record.max_media_tokens >= 64
    for look in LOOKS:
        wanted = fleet.answer(look)
        # At an encode worker, and pulled from there; then its KV from the prefill worker.
        start = await fleet.start_with_hand_off(look)
        assert len(start.media[0].media_id) == MEDIA_ID_SIZE_BYTES
        by_hand_off = await fleet.prefills().start(start).outcome()
        assert by_hand_off.token_id == wanted[0], look.question
        assert by_hand_off.hand_off is not None
        rest = WorkerStart(
            context=RequestContext(),
            generation=Generation(
                prompt_token_ids=start.generation.prompt_token_ids,
                generated_token_ids=[by_hand_off.token_id],
                media=start.generation.media,
                sampling=start.generation.sampling,
            ),
            hand_off=by_hand_off.hand_off,
        )
        assert (await collect_all(fleet.decodes().start(rest))).token_ids[: len(wanted) - 1] == wanted[1:]
        # At a prefill worker with a tower of its own, which reports the expanded prompt.
        by_file = await fleet.prefills().start(fleet.start_with_file(look)).outcome()
        assert by_file.token_id == wanted[0]
        assert list(by_file.prompt_token_ids) == list(start.generation.prompt_token_ids)
        assert by_file.media == start.generation.media
        assert by_file.num_cached_tokens >= 64, "it has computed just this prompt"
        # All of it at one worker.
        whole = await collect_all(fleet.decodes().start(fleet.start_with_file(look)))
        assert whole.token_ids[: len(wanted)] == wanted
        assert whole.started is not None
        assert whole.started.num_prompt_tokens == len(start.generation.prompt_token_ids)
    metrics = await _metrics(fleet.prefill)
    assert 'quartet_encode_items_total{outcome="cached"} 3.0' in metrics, "what was pulled is not encoded again"
    assert (
        'quartet_encode_blocks{state="cached"} 6.0' in metrics and 'quartet_encode_blocks{state="held"} 0.0' in metrics
    )


async def _metrics(worker: RunningWorker) -> str:
    host, _, port = worker.record.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    body = await reader.read()
    writer.close()
    return body.decode()
