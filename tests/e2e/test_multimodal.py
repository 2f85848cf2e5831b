"""Pictures through encode, prefill and decode, in each topology that takes them: what ``transformers`` says of them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors.torch import save

from quartet.client import ChatMessage, Completion, MediaUrl, QuartetClient, Sampling, read_media
from quartet.media.items import MediaFile, MediaKind
from tests.e2e.fork_server import ForkServer
from tests.e2e.grpcurl import parse_messages
from tests.e2e.oracle import one_oracle
from tests.e2e.up import CONFIGS, Up
from tests.pictures import Look, make_look

pytestmark = [
    pytest.mark.usefixtures("etcd_binary"),
    pytest.mark.asyncio(loop_scope="module"),
]

ROOT = CONFIGS.parent
CHECKPOINT = ROOT / "models/tiny/checkpoint"
TOPOLOGIES = ("epd_multimodal_image", "disagg_multimodal", "agg_multimodal")
#: The first ones one by one, the others at once; some of each have two pictures.
NUM_LOOKS, NUM_ALONE = 6, 2
ALL_GONE_WITHIN_S = 5.0
PICTURE = ROOT / "models/tiny/pictures/shapes.jpg"
# Of it.
CAPTION = (
    "A small blue circle at the top, a large white triangle at the top right, a small yellow diamond at the bottom "
    "left and a small yellow triangle at the bottom, on a plain grey background."
)
NUM_TOKENS = 72


@pytest.fixture(scope="module")
def expected() -> list[tuple[Look, tuple[int, ...]]]:
    """Looks with one picture and with two in turn, and what the oracle says, where it is sure."""
    sure: list[tuple[Look, tuple[int, ...]]] = []
    number = 0
    with one_oracle() as oracle:
        while len(sure) < NUM_LOOKS:
            look = make_look(number, num_pictures=1 + len(sure) % 2)
            ids, is_near = oracle.look(look, NUM_TOKENS)
            if not is_near:  # else this prompt proves nothing
                sure.append((look, ids))
            number += 1
    return sure


@pytest_asyncio.fixture(params=TOPOLOGIES, scope="module", loop_scope="module")
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer
) -> AsyncIterator[Up]:
    """A topology, as a person starts it and ends it: once for all tests that ask it."""
    directory = tmp_path_factory.mktemp("up")
    async with Up(directory, *arguments_of(request.param), python=fork_server.python) as up:
        await up.wait_ready()
        yield up
        assert await up.end(signal.SIGINT) < ALL_GONE_WITHIN_S
        assert "stacktrace" not in up.log


def arguments_of(topology: str) -> tuple[str, ...]:
    return str(CONFIGS / f"{topology}.yaml"), "--set", "router.port=0", "--set", f"model.path={CHECKPOINT}"


async def ask(client: QuartetClient, look: Look) -> Completion:
    pictures = tuple(MediaFile(MediaKind.IMAGE, file) for file in look.files)
    message = ChatMessage("user", (*pictures, look.question))
    return await client.complete(
        messages=[message], sampling=Sampling(temperature=0.0, max_tokens=NUM_TOKENS), timeout_s=120
    )


async def test_greedy_ids_are_those_of_transformers(running: Up, expected: list[tuple[Look, tuple[int, ...]]]) -> None:
    async with QuartetClient(running.router_address) as client:
        for look, ids in expected[:NUM_ALONE]:
            assert (await ask(client, look)).choices[0].token_ids == ids, look
        rest = expected[NUM_ALONE:]
        completions = await asyncio.gather(*(ask(client, look) for look, _ids in rest))
        for (look, ids), completion in zip(rest, completions, strict=True):
            assert completion.choices[0].token_ids == ids, look


@pytest.mark.parametrize("topology", ["e_pd", "epd_disagg", "epd_multimodal_image_and_embeddings"])
async def test_embeddings_of_a_picture_computed_elsewhere_give_its_caption(
    topology: str, tmp_path: Path, fork_server: ForkServer
) -> None:
    with one_oracle() as oracle:
        rows = oracle.embeddings(PICTURE.read_bytes())
    embeddings = MediaFile(MediaKind.EMBEDDINGS, save({"rows": rows.contiguous()}))
    media = tmp_path / "media"
    media.mkdir()
    for name, data in (("rows.safetensors", embeddings.data), ("picture.jpg", PICTURE.read_bytes())):
        (media / name).write_bytes(data)
    urls = [MediaUrl((media / name).as_uri()) for name in ("rows.safetensors", "picture.jpg")]
    options = ("--allowed-local-media-path", str(media))
    async with Up(tmp_path, *arguments_of(topology), *options, python=fork_server.python) as up:
        await up.wait_ready()
        async with QuartetClient(up.router_address) as client:
            parts = (embeddings, read_media(PICTURE), *urls)
            questions = [[ChatMessage("user", (part, "Describe the picture."))] for part in parts]
            greedy = Sampling(temperature=0.0)
            completions = await asyncio.gather(*(client.complete(messages=m, sampling=greedy) for m in questions))
        assert [completion.text for completion in completions] == [CAPTION] * len(parts)
        assert await up.end(signal.SIGINT) < ALL_GONE_WITHIN_S


@pytest.mark.parametrize("running", ["epd_multimodal_image"], indirect=True)
async def test_the_line_of_quartet_that_is_printed_sends_a_picture_and_gets_its_caption(running: Up) -> None:
    generated = await running.paste("quartet generate --chat --image ")
    assert generated.out.strip() == CAPTION, generated.err


@pytest.mark.grpcurl
@pytest.mark.parametrize("running", ["epd_multimodal_image"], indirect=True)
async def test_the_line_of_grpcurl_that_is_printed_sends_a_picture_and_gets_its_caption(running: Up) -> None:
    streamed = await running.paste("grpcurl ", "base64")
    messages = parse_messages(streamed.out)
    assert "".join(message["delta"].get("text", "") for message in messages if "delta" in message) == CAPTION
    assert messages[0]["accepted"]["encode"] == {"worker_id": "encode-0"}
    assert messages[-1]["finished"]["usage"]["num_media_tokens"] == 64
