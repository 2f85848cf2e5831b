"""How fast blocks are pulled out of another process's pool on a GPU: rows ``pull`` and ``busy`` of ``gpu_hand_off``.

Both processes run the transfer plane as workers do. In the row ``busy`` an engine in each decodes streams: pulls are
measured in windows between windows without any, and the steps of both show what the pulls cost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.children import Child, start_child
from benchmarks.progress import LiveLine
from benchmarks.transfer_source import PoolShape

#: The sides: what a process is told to be.
OWNER, READER = "owner", "reader"

_SIDE = "benchmarks.gpu_pull_side"
# Loading a model of 8 billion parameters, and the first steps, in which kernels are chosen.
_DECODE_TIMEOUT_S = 300.0
_STEP_TIMEOUT_S = 60.0
_NUM_WARM_UP_PULLS = 2
# A kernel that pulls is compiled once a pool on a GPU has been opened; until then the copy engine pulls.
_COMPILE_S = 5.0
# Pulls between two looks at the clock.
_NUM_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class PullPlan:
    """What is pulled, and how often.

    Attributes:
        idle: pools that are pulled while nothing else runs.
        busy: pools that are pulled while both sides decode.
        num_pulls: of each pool of ``idle``.
        num_rounds: windows with pulls, of each pool of ``busy``.
        window_s: length of each window.
    """

    idle: Sequence[PoolShape]
    busy: Sequence[PoolShape]
    num_pulls: int
    num_rounds: int
    window_s: float


@dataclass(frozen=True, kw_only=True)
class StreamsPlan:
    """What an engine decodes.

    Attributes:
        engine: arguments of ``TorchEngineConfig``.
        num_output_tokens: after so many a stream begins again with its prompt. The first time the streams end one after
            the other, so that contexts of all lengths are there at any time.
        num_settling_steps: steps of all streams before anything is measured.
    """

    engine: Mapping[str, Any]
    num_streams: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_settling_steps: int


@dataclass(frozen=True, kw_only=True)
class Pulls:
    """Pulls of one pool, all of it at a time. Medians, in 1e9 bytes a second.

    Attributes:
        way: by which the blocks came.
        gb_per_s: from the claim until the owner has released the blocks.
        copy_gb_per_s: of the copying alone.
        plain_gb_per_s: the whole pool copied as one piece, in the same process just before.
    """

    piece_size_bytes: int
    num_pieces: int
    way: str
    num_pulls: int
    gb_per_s: float
    copy_gb_per_s: float
    plain_gb_per_s: float


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Decode steps of one side. Medians of windows' medians, in milliseconds.

    Attributes:
        slower_percent: median of the windows with pulls: how much longer a step takes than in those beside it.
    """

    quiet_ms: float
    busy_ms: float
    slower_percent: float


@dataclass(frozen=True, kw_only=True)
class BusyPulls:
    """Pulls while both sides decode, and the steps of both."""

    pulls: Pulls
    reader: Steps
    owner: Steps


@dataclass(frozen=True, kw_only=True)
class IdleRow:
    """The row ``pull``."""

    pools: Sequence[Pulls]


@dataclass(frozen=True, kw_only=True)
class BusyRow:
    """The row ``busy``."""

    num_streams: int
    pools: Sequence[BusyPulls]


async def measure_idle(plan: PullPlan, devices: tuple[str, str], line: LiveLine) -> IdleRow:
    """Pull each pool while nothing else runs; ``devices``: the owner's and the reader's."""
    pools = []
    async with _sides(devices) as sides:
        for shape in plan.idle:
            async with _pool(sides, shape) as handle:
                pulled = _Pulled(shape, await sides.plain_copies(handle, plan.num_pulls))
                await sides.warm_up()
                for _ in line.rounds(_name(shape), plan.num_pulls):
                    pulled.add(await sides.pull(1))
                await sides.reader.ask({"do": "check"})
            pools.append(pulled.figures())
            line.say(f"pull: {describe(pools[-1])}")
    return IdleRow(pools=pools)


async def measure_busy(plan: PullPlan, streams: Mapping[str, StreamsPlan], line: LiveLine) -> BusyRow:
    """Pull each pool while both sides decode; ``streams``: what the ``owner`` and the ``reader`` decode."""
    devices = streams[OWNER].engine["device"], streams[READER].engine["device"]
    pools = []
    async with _sides(devices) as sides:
        with line.showing(lambda elapsed, _: f"both sides load the model: {elapsed:.0f} s"):
            await sides.decode(streams)
        for shape in plan.busy:
            async with _pool(sides, shape) as handle:
                pulled = _Pulled(shape, await sides.plain_copies(handle, plan.num_pulls))
                await sides.warm_up()
                quiet, busy = [await sides.steps_of_window(plan.window_s)], []
                for _ in line.rounds(f"{_name(shape)}, both decode", plan.num_rounds):
                    busy.append(await sides.steps_of_window(plan.window_s, pulled))
                    quiet.append(await sides.steps_of_window(plan.window_s))
                await sides.reader.ask({"do": "check"})
            pools.append(
                BusyPulls(pulls=pulled.figures(), **{side: _compare(side, quiet, busy) for side in (READER, OWNER)})
            )
            line.say(f"busy: {describe(pools[-1].pulls)}; steps: {_describe_steps(pools[-1])}")
    return BusyRow(num_streams=streams[READER].num_streams, pools=pools)


class _Sides:
    """Both processes."""

    def __init__(self, owner: Child, reader: Child, *, compiles: bool) -> None:
        self.owner, self.reader = owner, reader
        self._compiles = compiles
        self._all = {OWNER: owner, READER: reader}

    async def decode(self, streams: Mapping[str, StreamsPlan]) -> None:
        """Have both decode."""
        for name, child in self._all.items():
            child.send({"do": "decode", "plan": asdict(streams[name])})
        for child in self._all.values():
            await child.read(_DECODE_TIMEOUT_S)

    async def plain_copies(self, handle: str, count: int) -> Sequence[float]:
        """Seconds of each of ``count`` copies of a whole pool as one piece; needs to be done before any pull."""
        copies: Sequence[float] = await self.reader.ask({"do": "plain_copies", "handle": handle, "count": count})
        return copies

    async def warm_up(self) -> None:
        """Pull until the pool is open and what pulls is compiled."""
        await self.pull(_NUM_WARM_UP_PULLS)
        if self._compiles:
            await asyncio.sleep(_COMPILE_S)
            await self.pull(_NUM_WARM_UP_PULLS)

    async def pull(self, count: int) -> Sequence[Mapping[str, Any]]:
        """Pull everything ``count`` times."""
        hand_offs = await self.owner.ask({"do": "offer", "count": count})
        pulls: Sequence[Mapping[str, Any]] = await self.reader.ask({"do": "pull", "hand_offs": hand_offs})
        return pulls

    async def steps_of_window(self, window_s: float, pulled: _Pulled | None = None) -> Mapping[str, float]:
        """The median step of each side, in seconds, in a window of this length; it pulls meanwhile into ``pulled``.

        The window is longer where a side takes no step in it. Raises ``TimeoutError``: that does not change.
        """
        for child in self._all.values():
            await child.ask({"do": "clear"})
        steps: Mapping[str, Sequence[float]] = {OWNER: ()}
        async with asyncio.timeout(_STEP_TIMEOUT_S + window_s):
            while not all(steps.values()):
                ends_at = time.monotonic() + window_s
                while (left_s := ends_at - time.monotonic()) > 0:
                    if pulled is None:
                        await asyncio.sleep(left_s)
                    else:
                        pulled.add(await self.pull(_NUM_AT_ONCE))
                steps = {name: await child.ask({"do": "steps"}) for name, child in self._all.items()}
        return {name: median(of_side) for name, of_side in steps.items()}


class _Pulled:
    """Pulls of one pool so far."""

    def __init__(self, shape: PoolShape, plain_copies_s: Sequence[float]) -> None:
        self._shape = shape
        self._plain_copies_s = plain_copies_s
        self._pulls: list[Mapping[str, Any]] = []

    def add(self, pulls: Sequence[Mapping[str, Any]]) -> None:
        """Add more."""
        self._pulls += pulls

    def figures(self) -> Pulls:
        """The figures of all. Raises ``RuntimeError``: they did not all come by the same way."""
        ways = {pull["way"] for pull in self._pulls}
        if len(ways) != 1:
            raise RuntimeError(f"blocks came by several ways: {sorted(ways)}")
        return Pulls(
            piece_size_bytes=self._shape.piece_size_bytes,
            num_pieces=self._shape.num_blocks,
            way=ways.pop(),
            num_pulls=len(self._pulls),
            gb_per_s=self._gb_per_s(pull["duration_s"] for pull in self._pulls),
            copy_gb_per_s=self._gb_per_s(pull["copy_s"] for pull in self._pulls),
            plain_gb_per_s=self._gb_per_s(self._plain_copies_s),
        )

    def _gb_per_s(self, seconds: Iterable[float]) -> float:
        return self._shape.size_bytes / median(seconds) / 1e9


def compare_steps(quiet_s: Sequence[float], busy_s: Sequence[float]) -> Steps:
    """``quiet_s``: a step in each window without pulls; ``busy_s``: in the windows between them, one fewer."""
    slower = [
        busy / ((before + after) / 2) - 1 for (before, after), busy in zip(pairwise(quiet_s), busy_s, strict=True)
    ]
    return Steps(quiet_ms=1e3 * median(quiet_s), busy_ms=1e3 * median(busy_s), slower_percent=1e2 * median(slower))


def describe(pulls: Pulls) -> str:
    """One line for people."""
    return (
        f"{_size(pulls.piece_size_bytes)} x {pulls.num_pieces} by {pulls.way}: {pulls.gb_per_s:.1f} GB/s, "
        f"copying alone {pulls.copy_gb_per_s:.1f}, one plain copy {pulls.plain_gb_per_s:.1f}"
    )


def _compare(side: str, quiet: Sequence[Mapping[str, float]], busy: Sequence[Mapping[str, float]]) -> Steps:
    return compare_steps([window[side] for window in quiet], [window[side] for window in busy])


def _describe_steps(busy: BusyPulls) -> str:
    sides = {READER: busy.reader, OWNER: busy.owner}
    return ", ".join(
        f"{name} {steps.quiet_ms:.1f} -> {steps.busy_ms:.1f} ms ({steps.slower_percent:+.1f} %)"
        for name, steps in sides.items()
    )


@asynccontextmanager
async def _sides(devices: tuple[str, str]) -> AsyncIterator[_Sides]:
    owner_device, reader_device = devices
    async with start_child(_SIDE, OWNER, owner_device) as owner, start_child(_SIDE, READER, reader_device) as reader:
        for child in (owner, reader):
            await child.read()
        yield _Sides(owner, reader, compiles=reader_device != "cpu")


@asynccontextmanager
async def _pool(sides: _Sides, shape: PoolShape) -> AsyncIterator[str]:
    """Have both sides make pools of this shape, and give them back; gives the owner's handle."""
    children = (sides.reader, sides.owner)
    for child in children:
        child.send({"do": "make_pool", "shape": asdict(shape)})
    _, handle = [await child.read() for child in children]
    yield handle
    for child in children:
        await child.ask({"do": "drop_pool"})


def _name(shape: PoolShape) -> str:
    return f"{_size(shape.piece_size_bytes)} x {shape.num_blocks}"


def _size(size_bytes: int) -> str:
    mib = size_bytes / (1 << 20)
    return f"{mib:g} MiB" if mib >= 1 else f"{1024 * mib:g} KiB"
