"""What a graph gains for the last few tokens of a prompt on a GPU, whose kernels are launched one by one otherwise.

The shape of Qwen3-8B with random weights. Each prompt has a context that the pool has cached, or none, and some tokens
behind it that it has not; its first token is timed, alternately with all steps of so few tokens as rows of a graph and
with none of them. The engine itself chooses by how much the rows would read.

    python -m benchmarks.gpu_short --json FILE
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.gpu_rows import gpu_names
from benchmarks.progress import LiveLine
from benchmarks.random_model import QWEN3_8B, RandomModel
from benchmarks.report import Report, make_parser
from benchmarks.tiers import Client
from quartet.engine.settings import EngineSettings, LoadFormat
from quartet.engine.torch import kernel_forward

_BLOCK_SIZE, _NUM_BLOCKS, _MAX_STEP_TOKENS = 32, 1_200, 8_192
_TOKEN_IDS = range(8, 2048)
CONTEXTS, TOKENS = (0, 2_016, 8_000, 16_000), (8, 16, 32, 64)
_ALL, _NONE = 1 << 62, -1
_NUM_WARM_UPS, _NUM_ROUNDS = 3, 12


@dataclass(frozen=True, kw_only=True)
class ShortCase:
    """First tokens of prompts, in seconds.

    Attributes:
        context: tokens that the pool has.
        num_tokens: tokens behind them.
        graph_s: as rows of a graph, median.
        launched_s: kernel by kernel, median.
        is_graph: whether the engine would have taken a graph.
    """

    context: int
    num_tokens: int
    graph_s: float
    launched_s: float
    is_graph: bool


@dataclass(frozen=True, kw_only=True)
class Results:
    """All cases; ``gpus``: names of those that computed."""

    gpus: Sequence[str]
    num_rounds: int
    cases: Sequence[ShortCase]


def main() -> None:
    """Run the command line."""
    arguments = make_parser("gpu_short", __doc__).parse_args()
    report = Report("gpu_short", packages=("torch", "triton"), revision=arguments.commit)
    report.write(asyncio.run(measure("cuda:0", QWEN3_8B, CONTEXTS, TOKENS, _NUM_ROUNDS)), arguments.json)


async def measure(
    device: str, model: RandomModel, contexts: Sequence[int], tokens: Sequence[int], num_rounds: int
) -> Results:
    """Measure each context with each number of tokens. Raises ``ConfigError``: there is no such device."""
    gpus = gpu_names(device.startswith("cuda"))
    with tempfile.TemporaryDirectory(prefix="quartet-benchmark-") as directory, LiveLine() as line:
        model.write(Path(directory))
        settings = EngineSettings(
            device=device,
            num_blocks=_NUM_BLOCKS,
            block_size=_BLOCK_SIZE,
            max_num_tokens=_MAX_STEP_TOKENS,
            load_format=LoadFormat.RANDOM,
        )
        client = Client(settings, directory)
        await client.start()
        try:
            layout = client.engine.capabilities.layout
            assert layout is not None, "it pages by itself"
            size_bytes = layout.piece_size_bytes // layout.block_size
            cases = []
            for context in contexts:
                for num_tokens in tokens:
                    case = await _measure_case(client, context, num_tokens, num_rounds, size_bytes)
                    cases.append(case)
                    line.say(
                        f"{num_tokens} tokens after {context}: {1e3 * case.graph_s:.1f} ms by a graph, "
                        f"{1e3 * case.launched_s:.1f} ms one by one"
                    )
        finally:
            await client.close()
    return Results(gpus=gpus, num_rounds=num_rounds, cases=cases)


async def _measure_case(
    client: Client, context: int, num_tokens: int, num_rounds: int, token_size_bytes: int
) -> ShortCase:
    source = random.Random(context + num_tokens)
    cached = source.choices(_TOKEN_IDS, k=context)
    bound = kernel_forward._MAX_REREAD_SIZE_BYTES
    if context:
        await client.first_token([*cached, 8])
    took: dict[int, list[float]] = {_ALL: [], _NONE: []}
    try:
        for number in range(_NUM_WARM_UPS + num_rounds):
            for most, seconds in took.items():
                kernel_forward._MAX_REREAD_SIZE_BYTES = most
                first_s, _, started = await client.first_token([*cached, *source.choices(_TOKEN_IDS, k=num_tokens)])
                if started.num_cached_tokens != context // _BLOCK_SIZE * _BLOCK_SIZE:
                    raise RuntimeError(f"{started.num_cached_tokens} tokens were cached, not {context}")
                if number >= _NUM_WARM_UPS:
                    seconds.append(first_s)
    finally:
        kernel_forward._MAX_REREAD_SIZE_BYTES = bound
    num_reread = sum(range(context, context + num_tokens - 1))
    return ShortCase(
        context=context,
        num_tokens=num_tokens,
        graph_s=median(took[_ALL]),
        launched_s=median(took[_NONE]),
        is_graph=num_reread * token_size_bytes <= bound,
    )


if __name__ == "__main__":
    main()
