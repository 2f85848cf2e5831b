"""Media on their way to the router: on every path as the caller gave them, and never more than one message holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quartet.client import (
    ChatMessage,
    GenerateFields,
    MediaFile,
    MediaKind,
    MediaPart,
    MediaUrl,
    QuartetClient,
    RequestPath,
    read_media,
)
from quartet.client.sync import SyncClient
from quartet.errors import InvalidRequestError, MediaNotAllowedError, MediaTooLargeError, WorkerUnavailableError
from quartet.rpc.channels import MAX_API_MESSAGE_BYTES
from quartet.v1 import router_pb2
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter
from tests.client.fake_worker import Failing

PICTURE = MediaFile(MediaKind.IMAGE, b"\x89PNG")
EMBEDDINGS = MediaFile(MediaKind.EMBEDDINGS, b"tensors")
ELSEWHERE = MediaUrl("https://example.org/a.png")
MESSAGE = ChatMessage("user", (PICTURE, "Compare", ELSEWHERE, " with ", EMBEDDINGS))
SENT = [
    router_pb2.MediaPart(data=b"\x89PNG"),
    router_pb2.MediaPart(url="https://example.org/a.png"),
    router_pb2.MediaPart(embeddings=b"tensors"),
]


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture(params=list(RequestPath))
def path(request: pytest.FixtureRequest) -> RequestPath:
    """Tests that take it run over every path."""
    return RequestPath(request.param)


@pytest.fixture(scope="module")
def big() -> MediaFile:
    """So long that a request with two of them is too long."""
    return MediaFile(MediaKind.IMAGE, bytes(MAX_API_MESSAGE_BYTES // 2))


def parts(start: router_pb2.GenerateStart) -> list[router_pb2.ContentPart]:
    [message] = start.chat.messages
    return list(message.parts)


def texts_and_media() -> list[router_pb2.ContentPart]:
    picture, elsewhere, embeddings = (router_pb2.ContentPart(media=part) for part in SENT)
    compare, with_ = (router_pb2.ContentPart(text=text) for text in ("Compare", " with "))
    return [picture, compare, elsewhere, with_, embeddings]


async def test_a_message_keeps_its_pieces_in_order(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    async with QuartetClient(await start_router(router)) as client:
        completion = await client.complete(path=path, messages=[MESSAGE])
    assert completion.text == "one two three"
    assert parts(router.starts[0]) == texts_and_media()
    assert not router.starts[0].media


async def test_a_prompt_has_its_media_beside_it(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    media: list[MediaPart] = [PICTURE, ELSEWHERE, EMBEDDINGS]
    async with QuartetClient(await start_router(router)) as client:
        await client.complete("<|image|> <|image|> <|image|>", path=path, media=media)
        await client.complete(token_ids=[7, 7, 7], path=path, media=media)
    text, ids = router.starts
    assert text.text and list(text.media) == SENT
    assert ids.token_ids.ids and list(ids.media) == SENT


async def test_an_explain_request_has_its_media(router: FakeRouter, start_router: StartRouter) -> None:
    async with QuartetClient(await start_router(router)) as client:
        await client.explain(messages=[MESSAGE])
    assert parts(router.starts[0]) == texts_and_media()


async def test_the_blocking_client_sends_the_same(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    address = await start_router(router)

    def use() -> None:
        with SyncClient(address) as client:
            client.complete(path=path, messages=[MESSAGE])
            client.complete("<|image|>", path=path, media=[PICTURE])

    async with asyncio.timeout(30):
        await asyncio.to_thread(use)
    assert parts(router.starts[0]) == texts_and_media()
    assert list(router.starts[1].media) == SENT[:1]


async def test_a_request_that_is_placed_again_brings_its_media_again(
    router: FakeRouter, start_router: StartRouter
) -> None:
    router.worker.failing = [Failing(WorkerUnavailableError("gone"))]
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(30):
        completion = await client.complete(path="direct", messages=[MESSAGE])
    assert completion.text == "one two three"
    assert [parts(start) for start in router.starts] == [texts_and_media()] * 2


async def test_media_that_the_router_does_not_allow_are_reported_as_that(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    router.error = MediaNotAllowedError("no files are allowed", field="chat.messages[0].parts[1].media.url")
    async with QuartetClient(await start_router(router)) as client:
        with pytest.raises(MediaNotAllowedError, match="no files are allowed") as caught:
            await client.complete(path=path, messages=[MESSAGE])
    assert caught.value.field == "chat.messages[0].parts[1].media.url"


@pytest.mark.parametrize("in_chat", [True, False])
async def test_too_much_for_one_message_is_refused_before_it_is_sent(
    router: FakeRouter, start_router: StartRouter, path: RequestPath, big: MediaFile, in_chat: bool
) -> None:
    fields = GenerateFields(messages=[ChatMessage("user", (big, big))]) if in_chat else GenerateFields(media=[big, big])
    async with QuartetClient(await start_router(router)) as client:
        with pytest.raises(MediaTooLargeError, match="64 MiB") as caught:
            client.generate(None if in_chat else "Hi", path=path, **fields)
        assert caught.value.field == ("chat.messages" if in_chat else "media")
        # A session's other requests are none the worse.
        await client.complete("Hi", path=path)
    assert len(router.starts) == 1


async def test_as_much_as_one_message_holds_is_sent(
    router: FakeRouter, start_router: StartRouter, path: RequestPath, big: MediaFile
) -> None:
    almost = MediaFile(MediaKind.IMAGE, big.data[: -128 * 1024])
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(120):
        await client.complete(path=path, messages=[ChatMessage("user", (big, almost))])
    assert [len(part.media.data) for part in parts(router.starts[0])] == [len(big.data), len(almost.data)]


async def test_too_much_to_be_explained_is_refused_too(big: MediaFile) -> None:
    async with QuartetClient("127.0.0.1:1") as client:
        with pytest.raises(MediaTooLargeError):
            await client.explain("Hi", media=[big, big])


async def test_a_conversation_has_no_media_beside_it() -> None:
    async with QuartetClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequestError) as caught:
            client.generate(messages=[MESSAGE], media=[PICTURE])
    assert caught.value.field == "media"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.png", MediaKind.IMAGE),
        ("picture", MediaKind.IMAGE),
        ("a.safetensors", MediaKind.EMBEDDINGS),
        ("A.SAFETENSORS", MediaKind.EMBEDDINGS),
    ],
)
def test_the_kind_of_a_file_follows_from_its_name(tmp_path: Path, name: str, kind: MediaKind) -> None:
    (tmp_path / name).write_bytes(b"content")
    assert read_media(tmp_path / name) == read_media(str(tmp_path / name)) == MediaFile(kind, b"content")


def test_a_file_that_no_request_could_hold_is_not_read_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "sparse.png"
    with file.open("wb") as sparse:
        sparse.truncate(MAX_API_MESSAGE_BYTES + 1)
    with pytest.raises(MediaTooLargeError, match="64 MiB"):
        read_media(file)
    with pytest.raises(MediaTooLargeError, match="64 MiB"):
        read_media("/dev/zero")


def test_a_file_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_media(tmp_path / "none.png")
