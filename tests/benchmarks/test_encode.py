"""What the benchmark of images makes of the answers, that its images are new, and each part on real servers."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.disagg_client import Answered
from benchmarks.encode import (
    ENCODE,
    NUM_PROMPT_TOKENS,
    Load,
    Prompt,
    Sample,
    checked,
    make_stack,
    measure_rate,
    measure_ttft,
    noise_image,
    photo,
    split,
    summarize_rate,
    summarize_ttft,
)
from benchmarks.processes import Metrics
from benchmarks.stack import Stack
from benchmarks.table import encode_tables
from benchmarks.transfer import CpuPerGb, Figures, Run
from quartet.kvcache.layout import EmbeddingLayout, EmbeddingsPayload, HandOff
from quartet.streams.messages import EncodedItem

LAYOUT = EmbeddingLayout(model_fingerprint="0" * 64, dtype="float32", hidden_size=4, block_size=32)
HAND_OFF = HandOff(
    hand_off_id=bytes(16),
    secret=bytes(16),
    worker_id="encode-0",
    epoch=1,
    address="127.0.0.1:1",
    time_to_live=timedelta(seconds=30),
    payload=EmbeddingsPayload(LAYOUT, 64),
)
ANSWERED = Answered(
    ttft_ms=30.0,
    second_token_ms=40.0,
    first_token_ms=28.0,
    total_ms=38.0,
    media_ms=16.0,
    prefill_ms=11.0,
    decode_queue_ms=1.0,
    transfer_ms=1.0,
    num_prompt_tokens=NUM_PROMPT_TOKENS,
)
CPU = {way: CpuPerGb(puller=0.5, source=0.25) for way in ("shm", "grpc", "memcpy")}
FIGURES = Figures(
    gb_per_s={"shm": 5.0, "grpc": 0.5, "memcpy": 10.0}, share_of_memcpy={"shm": 0.5, "grpc": 0.05}, cpu_s_per_gb=CPU
)


def sample(duration_s: float, tower_s: Sequence[float], num_batches: int) -> Sample:
    items = [
        EncodedItem(item=number, hand_off=HAND_OFF, queue_s=value / 4, compute_s=value)
        for number, value in enumerate(tower_s)
    ]
    return Sample(duration_s=duration_s, cpu_s=duration_s / 2, others_share=0.25, items=items, num_batches=num_batches)


def test_noise_has_the_towers_size_and_is_never_the_same() -> None:
    rng = random.Random(0)
    files = [noise_image(rng) for _ in range(3)]
    assert len(set(files)) == 3
    with Image.open(io.BytesIO(files[0])) as image:
        assert (image.format, image.size) == ("PNG", (96, 96))
    # A start with eight of them is one message.
    assert 8 * max(map(len, files)) < 1 << 19


def test_a_photo_has_millions_of_smooth_pixels_and_is_never_the_same() -> None:
    rng = random.Random(0)
    files = [photo(rng) for _ in range(2)]
    assert files[0] != files[1]
    with Image.open(io.BytesIO(files[0])) as image:
        assert (image.format, image.size) == ("JPEG", (2000, 1500))
        row = image.convert("L").crop((0, 700, 2000, 701)).tobytes()
    assert len(set(row)) > 16
    assert max(abs(left - right) for left, right in pairwise(row)) <= 8


def test_rates_are_medians_over_turns_and_times_over_images() -> None:
    figures = summarize_rate(
        [
            sample(1.0, [0.008] * 4, num_batches=4),
            sample(2.0, [0.008] * 4, num_batches=2),
            sample(4.0, [0.016] * 4, num_batches=1),
        ]
    )
    assert (figures.images_per_s, figures.mean_batch_size) == (2.0, 2.0)
    assert (figures.tower_ms, figures.before_tower_ms) == (8.0, 2.0)
    assert (figures.cpu_ms_per_image, figures.others_share) == (250.0, 0.25)


def test_the_parts_add_up_to_the_first_token() -> None:
    assert split(ANSWERED) == {"media": 16.0, "route": 1.0, "prefill": 11.0, "api": 2.0}
    text = replace(ANSWERED, media_ms=None)
    assert split(text) == {"media": 0.0, "route": 17.0, "prefill": 11.0, "api": 2.0}


def test_the_first_tokens_times_are_summed_up_by_kind_of_prompt() -> None:
    rounds = [
        {prompt: replace(ANSWERED, ttft_ms=10.0 * number + rank) for rank, prompt in enumerate(Prompt)}
        for number in range(11)
    ]
    figures = summarize_ttft(rounds)
    assert asdict(figures)["ttft_ms"] == {
        prompt: {"p50": 50.0 + rank, "p90": 90.0 + rank} for rank, prompt in enumerate(Prompt)
    }
    assert figures.parts_ms[Prompt.NEW]["media"] == 16.0


def test_a_prompt_that_is_cached_where_it_should_not_be_is_an_error() -> None:
    assert checked(Prompt.NEW, ANSWERED) is ANSWERED
    with pytest.raises(RuntimeError, match="cached_embeddings: 64 of 97 tokens were cached, not 0"):
        checked(Prompt.CACHED_EMBEDDINGS, replace(ANSWERED, num_cached_tokens=64))


def test_a_prompt_that_is_not_cached_where_it_should_be_is_an_error() -> None:
    cached = replace(ANSWERED, num_cached_tokens=NUM_PROMPT_TOKENS - 1)
    assert checked(Prompt.CACHED_PREFIX, cached) is cached
    with pytest.raises(RuntimeError, match="cached_prefix: 0 of 97"):
        checked(Prompt.CACHED_PREFIX, ANSWERED)


def test_an_image_that_fills_another_number_of_tokens_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="34 tokens"):
        checked(Prompt.NEW, replace(ANSWERED, num_prompt_tokens=34))


def test_the_tables_show_every_load_and_prompt() -> None:
    rates = {load: summarize_rate([sample(2.0, [0.008] * 8, num_batches=1)]) for load in ("batch_1", "batch_8")}
    ttft = summarize_ttft([dict.fromkeys(Prompt, ANSWERED)] * 2)
    pulls = Run(size_bytes=90 << 18, piece_size_bytes=1 << 18, num_rounds=1, warm=FIGURES, cold=FIGURES)
    worker = {load: asdict(figures) for load, figures in rates.items()}
    tables = encode_tables({"worker": worker, **asdict(ttft), "pulls": asdict(pulls)})
    lines = tables.splitlines()
    assert sum(line.endswith("| 4 | 125.0 | 8.0 | 2.0 | 8.0 | 0.25 |") for line in lines) == 2
    assert sum(line.endswith("| 30.0, 30.0 | 16.0 | 1.0 | 11.0 | 2.0 |") for line in lines) == len(Prompt)
    assert "| 22.5 MiB | 256 KiB | warm | 5.0 | 0.50 | 10.0 | 0.50 | 0.50, 0.25 | 0.50, 0.25 |" in lines


async def encode_metrics(stack: Stack) -> Metrics:
    return (await stack.metrics())[ENCODE]


async def assert_nothing_stays_held(stack: Stack) -> None:
    """Every item is handed off, and taken or released."""
    num_items = (await encode_metrics(stack)).total("quartet_encode_items_total")
    assert num_items > 0
    async with asyncio.timeout(60):
        outcomes: Mapping[str, float] = {}
        while sum(outcomes.values()) < num_items:
            outcomes = (await encode_metrics(stack)).by_label("quartet_worker_hand_offs_total", "outcome")
    assert not outcomes.get("expired")
    assert sum(outcomes.values()) == num_items


@pytest.mark.bench
@pytest.mark.e2e
async def test_images_are_measured_on_real_servers_and_none_stays_held(tmp_path: Path) -> None:
    async with make_stack(tmp_path / "workers", lambda _: None, log=tmp_path / "log") as stack:
        rates = await measure_rate(stack, range(2))
        assert rates.keys() == set(Load)
        assert all(figures.images_per_s > 0 < figures.cpu_ms_per_image for figures in rates.values())
        assert all(figures.before_tower_ms > 0 < figures.tower_ms for figures in rates.values())
        assert rates[Load.BATCH_1].mean_batch_size == 1 < rates[Load.BATCH_8].mean_batch_size <= 8
        ttft = await measure_ttft(stack, range(4))
        assert ttft.ttft_ms.keys() == set(Prompt)
        assert all(0 < quantiles.p50 <= quantiles.p90 for quantiles in ttft.ttft_ms.values())
        assert {prompt for prompt, parts in ttft.parts_ms.items() if not parts["media"]} == {Prompt.TEXT}
        await assert_nothing_stays_held(stack)
