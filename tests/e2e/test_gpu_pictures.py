"""Pictures on one GPU: embeddings go from Encode to Prefill, in processes of their own, and touch no host memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import save

from quartet.client import ChatMessage, Completion, QuartetClient, Sampling
from quartet.media.items import MediaFile, MediaKind
from tests.e2e.oracle import one_oracle
from tests.e2e.test_gpu_hand_off import WAYS, pulled_bytes, running
from tests.e2e.test_multimodal import CAPTION, PICTURE
from tests.pictures import Look, make_look

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_LOOKS = 12
NUM_TOKENS = 32
ON_CPU = {"engine": {"device": "cpu", "num_blocks": 512}}
MULTIMODAL = {"engine": {"modality": "multimodal"}}


@pytest.fixture(scope="module")
def expected() -> list[tuple[Look, tuple[int, ...]]]:
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


async def check(client: QuartetClient, expected: list[tuple[Look, tuple[int, ...]]]) -> None:
    for _ in range(2):  # the second time from what Encode and Prefill keep
        files = [tuple(MediaFile(MediaKind.IMAGE, file) for file in look.files) for look, _ids in expected]
        completions = await asyncio.gather(
            *(ask(client, media, look.question, NUM_TOKENS) for media, (look, _) in zip(files, expected, strict=True))
        )
        for (look, ids), completion in zip(expected, completions, strict=True):
            assert completion.choices[0].token_ids == ids, look


@pytest.mark.parametrize(
    ("overrides", "encode_ways", "taken"),
    [
        ({}, WAYS, "cuda_ipc"),
        ({"prefill": ON_CPU}, WAYS, "staged"),
        ({"encode": ON_CPU}, ("shm", "grpc"), "staged"),
    ],
)
async def test_a_pictures_embeddings_go_from_encode_to_prefill(
    tmp_path: Path,
    expected: list[tuple[Look, tuple[int, ...]]],
    embeddings: MediaFile,
    overrides: dict[str, dict[str, object]],
    encode_ways: tuple[str, ...],
    taken: str,
) -> None:
    async with running(tmp_path, overrides, topology_name="epd_multimodal_image") as (_up, client):
        ways = {worker.record.worker_id: worker.record.transfer_ways for worker in await client.list_workers()}
        assert ways["encode-0"] == encode_ways
        await check(client, expected)
        size_bytes = await pulled_bytes(client, taken, "prefill-0")
        assert size_bytes > 0
        completion = await ask(client, (embeddings,), "Describe the picture.", 128)
        assert completion.text == CAPTION
        assert await pulled_bytes(client, taken, "prefill-0") > size_bytes
        assert (
            sum([await pulled_bytes(client, way, "prefill-0") for way in {"cuda_ipc", "staged", "shm"} - {taken}]) == 0
        )


async def test_a_prefill_worker_s_tower_writes_to_the_memory_that_its_model_reads(
    tmp_path: Path, expected: list[tuple[Look, tuple[int, ...]]]
) -> None:
    async with running(tmp_path, {"prefill": MULTIMODAL}, topology_name="disagg_multimodal") as (_up, client):
        await check(client, expected)
