"""``quartet grid``: makes the grids of a global router from measurements or replays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.output import reporting_errors
from quartet.config import build, load_yaml
from quartet.errors import ConfigError
from router.global_router.grid import Axis
from router.global_router.grid_builder import MeasuredPool, length_grid, priorities, target_grid


class Percentile(StrEnum):
    """Which of the measured latencies counts."""

    MEAN = "mean"
    P50 = "p50"
    P90 = "p90"
    P99 = "p99"


@dataclass(frozen=True, kw_only=True)
class Bands:
    """One axis: ``resolution`` bands from ``min`` to ``max``."""

    min: float
    max: float
    resolution: int

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if self.resolution < 1:
            raise ConfigError("resolution: must be at least 1")
        if not 0 <= self.min < self.max:
            raise ConfigError("min: must be below max, and not negative")

    @property
    def axis(self) -> Axis:
        """The same for a grid."""
        return Axis(self.min, self.max, self.resolution)


@dataclass(frozen=True, kw_only=True)
class Point:
    """What a pool takes for requests of ``length`` tokens: milliseconds, or a JSON file of a bench or a replay."""

    length: int
    ttft_ms: float | None = None
    itl_ms: float | None = None
    file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class PoolEntry:
    """One pool of the file."""

    namespace: str
    cost: float
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if not self.points:
            raise ConfigError("points: must be at least one")
        if len({point.length for point in self.points}) < len(self.points):
            raise ConfigError("points: a length stands twice")


@dataclass(frozen=True, kw_only=True)
class PrefillEntry:
    """Pools that prefill, and the axes of their grid."""

    isl: Bands
    ttft: Bands
    pools: tuple[PoolEntry, ...]


@dataclass(frozen=True, kw_only=True)
class DecodeEntry:
    """Pools that decode, and the axes of their grid."""

    context_length: Bands
    itl: Bands
    pools: tuple[PoolEntry, ...]


@dataclass(frozen=True, kw_only=True)
class AggEntry:
    """Pools that do both, and the axes of their grid; ``length``: tokens of the requests that are looked at."""

    ttft: Bands
    itl: Bands
    length: int
    pools: tuple[PoolEntry, ...]


@dataclass(frozen=True, kw_only=True)
class GridFile:
    """What pools were measured to take: prefill and decode together, or agg."""

    percentile: Percentile = Percentile.P90
    prefill: PrefillEntry | None = None
    decode: DecodeEntry | None = None
    agg: AggEntry | None = None

    def __post_init__(self) -> None:
        """Refuse what makes no grid, naming the field."""
        if (self.prefill is None) is not (self.decode is None) or (self.agg is None) is (self.prefill is None):
            raise ConfigError("prefill: there must be prefill and decode, or agg")


def grid(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What pools take: docs/global.md.")],
) -> None:
    """Make the grids of a global router: per cell the cheapest pool that meets its targets.

    Prints JSON, which a global router reads once discovery or pool_routers are added.
    """
    with reporting_errors():
        print(json.dumps(make_grids(build(GridFile, load_yaml(file)), file.parent), indent=2))


def make_grids(found: GridFile, directory: Path) -> dict[str, object]:
    """The part of a global router's file; files of points are looked for below ``directory``.

    Raises:
        ConfigError: a point says nothing of what is needed, or its file can't be read; names the pool.
    """
    if found.agg is not None:
        agg = found.agg
        pools = _measured(agg.pools, ("ttft", "itl"), found.percentile, directory)
        mapping = target_grid(pools, agg.ttft.axis, agg.itl.axis, agg.length)
        ranks = priorities(pools, ("ttft", "itl"), agg.length)
        return {"mode": "agg", **_kind("agg", pools, ranks, {"ttft": agg.ttft, "itl": agg.itl}, mapping)}
    assert found.prefill is not None and found.decode is not None, "checked when it was read"
    prefill, decode = found.prefill, found.decode
    computing = _measured(prefill.pools, ("ttft",), found.percentile, directory)
    writing = _measured(decode.pools, ("itl",), found.percentile, directory)
    return {
        "mode": "disagg",
        **_kind(
            "prefill",
            computing,
            priorities(computing, ("ttft",), prefill.isl.axis.middle),
            {"isl": prefill.isl, "ttft": prefill.ttft},
            length_grid(computing, "ttft", prefill.isl.axis, prefill.ttft.axis),
        ),
        **_kind(
            "decode",
            writing,
            priorities(writing, ("itl",), decode.context_length.axis.middle),
            {"context_length": decode.context_length, "itl": decode.itl},
            length_grid(writing, "itl", decode.context_length.axis, decode.itl.axis),
        ),
    }


def _kind(
    kind: str,
    pools: Sequence[MeasuredPool],
    ranks: Sequence[int],
    axes: Mapping[str, Bands],
    mapping: Sequence[Sequence[int]],
) -> dict[str, object]:
    strategy: dict[str, object] = {}
    for name, bands in axes.items():
        # Tokens are whole numbers in the router's file.
        whole = name in ("isl", "context_length")
        strategy |= {
            f"{name}_min": int(bands.min) if whole else bands.min,
            f"{name}_max": int(bands.max) if whole else bands.max,
            f"{name}_resolution": bands.resolution,
        }
    return {
        f"num_{kind}_pools": len(pools),
        f"{kind}_pool_dynamo_namespaces": [pool.namespace for pool in pools],
        f"{kind}_pool_priorities": list(ranks),
        f"{kind}_pool_selection_strategy": {**strategy, f"{kind}_pool_mapping": mapping},
    }


def _measured(
    entries: Sequence[PoolEntry], measures: Sequence[str], percentile: Percentile, directory: Path
) -> list[MeasuredPool]:
    return [
        MeasuredPool(
            namespace=entry.namespace,
            cost=entry.cost,
            latency_ms={
                measure: {
                    float(point.length): _latency_ms(entry.namespace, point, measure, percentile, directory)
                    for point in entry.points
                }
                for measure in measures
            },
        )
        for entry in entries
    ]


def _latency_ms(namespace: str, point: Point, measure: str, percentile: Percentile, directory: Path) -> float:
    given: float | None = getattr(point, f"{measure}_ms")
    where = f"{namespace}, length {point.length}"
    if given is not None:
        return given
    if point.file is None:
        raise ConfigError(f"{where}: needs {measure}_ms, or a file")
    try:
        report: Any = json.loads((directory / point.file).read_text(encoding="utf-8"))
        # A bench has a point for each load, of which the first counts; a replay has a result for each policy.
        result = report["points"][0] if "points" in report else next(iter(report["policies"].values()))
        return float(result[f"{measure}_ms"][percentile.value])
    except (OSError, ValueError, LookupError, TypeError, StopIteration) as error:
        what = f"{point.file} is no JSON of quartet bench or replay with {measure}_ms"
        raise ConfigError(f"{where}: {what}: {error!r}") from error
