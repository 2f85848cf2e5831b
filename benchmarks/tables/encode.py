"""The tables of benchmarks.encode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import Report, markdown_table
from benchmarks.tables.transfer import speeds_table

_LOADS = {"batch_1": "one after the other", "batch_8": "three streams of eight at a time"}
_PROMPTS = {
    "new": "image and text are new",
    "cached_embeddings": "again with another salt: embeddings are cached",
    "cached_prefix": "again: KV is cached too",
    "text": "as many tokens of new text",
    "photo_new": "a photo and text are new",
    "photo_cached_embeddings": "the photo again with another salt: embeddings are cached",
}
_PARTS = ("media", "route", "prefill", "edge")


def encode_tables(report: Report) -> str:
    """What one Encode worker does, what the first token waits for, and how fast embeddings move."""
    rates = markdown_table(
        ["images", "a second", "CPU ms each", "in a batch", "before the tower (ms)", "in the tower (ms)", "others"],
        [[what, *_rate(report["worker"][load])] for load, what in _LOADS.items()],
    )
    times = markdown_table(
        ["prompt", "TTFT p50, p90 (ms)", *_PARTS],
        [[what, *_time(report, prompt)] for prompt, what in _PROMPTS.items()],
    )
    return f"{rates}\n{times}\n{speeds_table([report['pulls']])}"


def _rate(figures: Mapping[str, float]) -> list[str]:
    return [
        f"{figures['images_per_s']:.0f}",
        f"{figures['cpu_ms_per_image']:.1f}",
        f"{figures['mean_batch_size']:.1f}",
        f"{figures['before_tower_ms']:.1f}",
        f"{figures['tower_ms']:.1f}",
        f"{figures['others_share']:.2f}",
    ]


def _time(report: Mapping[str, Any], prompt: str) -> list[str]:
    ttft_ms, parts_ms = report["ttft_ms"][prompt], report["parts_ms"][prompt]
    return [f"{ttft_ms['p50']:.1f}, {ttft_ms['p90']:.1f}", *(f"{parts_ms[part]:.1f}" for part in _PARTS)]
