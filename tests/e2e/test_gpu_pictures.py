"""Pictures on one GPU: embeddings go from Encode to Prefill, in processes of their own, and touch no host memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TypeAlias

import pytest
from safetensors.torch import save

from quartet.client import ChatMessage, Completion, QuartetClient, Sampling
from quartet.media.items import MediaFile, MediaKind
from tests.e2e.oracle import one_oracle
from tests.e2e.test_gpu_hand_off import WAYS, free_size_bytes, kill, pulled_bytes, running, until_back, until_free
from tests.e2e.test_multimodal import CAPTION, PICTURE
from tests.pictures import Look, make_look

pytestmark = pytest.mark.gpu

NUM_LOOKS = 12
NUM_TOKENS = 32
ON_CPU = {"engine": {"device": "cpu", "num_blocks": 512}}
EPD = "epd_multimodal_image"
ALL_WAYS = {"cuda_ipc", "staged", "shm", "grpc"}
MULTIMODAL = {"engine": {"modality": "multimodal"}}

Expected: TypeAlias = list[tuple[Look, tuple[int, ...]]]


@pytest.fixture(scope="module")
def expected() -> Expected:
    """Pictures, some in pairs, and what the oracle says of them, where it is sure."""
    looks = [make_look(number, num_pictures=2 if number % 4 == 3 else 1) for number in range(NUM_LOOKS + 3)]
    with one_oracle() as oracle:
        answers = [(look, *oracle.look(look, NUM_TOKENS)) for look in looks]
    sure = [(look, ids) for look, ids, is_near in answers if not is_near]
    assert len(sure) >= NUM_LOOKS, "near ties: some of these prompts prove nothing"
    return sure[:NUM_LOOKS]


@pytest.fixture(scope="module")
def embeddings() -> MediaFile:
    """Of ``PICTURE``, computed elsewhere."""
    with one_oracle() as oracle:
        return MediaFile(MediaKind.EMBEDDINGS, save({"rows": oracle.embeddings(PICTURE.read_bytes()).contiguous()}))


async def ask(client: QuartetClient, media: tuple[MediaFile, ...], question: str, max_tokens: int) -> Completion:
    message = ChatMessage("user", (*media, question))
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
    return await client.complete(messages=[message], sampling=sampling, timeout_s=60)


async def check(client: QuartetClient, expected: Expected) -> None:
    for _ in range(2):  # the second time from what Encode and Prefill keep
        files = [tuple(MediaFile(MediaKind.IMAGE, file) for file in look.files) for look, _ids in expected]
        completions = await asyncio.gather(
            *(ask(client, media, look.question, NUM_TOKENS) for media, (look, _) in zip(files, expected, strict=True))
        )
        for (look, ids), completion in zip(expected, completions, strict=True):
            assert completion.choices[0].token_ids == ids, look


async def check_one_way(client: QuartetClient, embeddings: MediaFile, way: str) -> None:
    """That Prefill has pulled by ``way`` alone, embeddings that were computed elsewhere too."""
    size_bytes = await pulled_bytes(client, way, "prefill-0")
    assert size_bytes > 0
    assert (await ask(client, (embeddings,), "Describe the picture.", 128)).text == CAPTION
    assert await pulled_bytes(client, way, "prefill-0") > size_bytes
    assert [await pulled_bytes(client, other, "prefill-0") for other in ALL_WAYS - {way}] == [0, 0, 0]


async def ways_of_encode(client: QuartetClient) -> tuple[str, ...]:
    ways = {worker.record.worker_id: worker.record.transfer_ways for worker in await client.list_workers()}
    return tuple(ways["encode-0"])


async def test_embeddings_stay_on_the_gpu_and_nothing_stays_of_an_encode_worker_that_was_killed(
    tmp_path: Path, expected: Expected, embeddings: MediaFile
) -> None:
    async with running(tmp_path, topology_name=EPD) as (up, client):
        assert await ways_of_encode(client) == WAYS
        await check(client, expected[: NUM_LOOKS // 2])
        await check_one_way(client, embeddings, "cuda_ipc")
        free, epoch = free_size_bytes(), await until_back(client, 0, "encode-0")
        asking = asyncio.create_task(check(client, expected))
        kill(up, "encode")
        await asking
        await until_back(client, epoch, "encode-0")
        await check(client, expected)
        await until_free(free)


@pytest.mark.parametrize(
    ("overrides", "encode_ways"), [({"prefill": ON_CPU}, WAYS), ({"encode": ON_CPU}, ("shm", "grpc"))]
)
async def test_embeddings_go_between_a_gpu_and_a_cpu(
    tmp_path: Path,
    expected: Expected,
    embeddings: MediaFile,
    overrides: dict[str, dict[str, object]],
    encode_ways: tuple[str, ...],
) -> None:
    async with running(tmp_path, overrides, topology_name=EPD) as (_up, client):
        assert await ways_of_encode(client) == encode_ways
        await check(client, expected)
        await check_one_way(client, embeddings, "staged")


async def test_a_prefill_worker_s_tower_writes_to_the_memory_that_its_model_reads(
    tmp_path: Path, expected: Expected
) -> None:
    async with running(tmp_path, {"prefill": MULTIMODAL}, topology_name="disagg_multimodal") as (_up, client):
        await check(client, expected)
