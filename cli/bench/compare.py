"""``quartet bench compare``: two results side by side, load by load, and what else differs between them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cli.bench.folder import DEPLOYMENT_FILE, REPORT_FILE
from cli.bench.load import Load, LoadKind
from cli.bench.output import OutputFiles
from cli.output import open_console, reporting_errors

_PIPE_WIDTH = 100
_QUANTILES = ("p50", "p90", "p99")
_LATENCIES = {"TTFT": "ttft_ms", "ITL": "itl_ms", "E2E": "e2e_ms"}
# From here on a ratio has a colour; smaller ones come with every repetition.
_COLOURED_CHANGE = 0.05
_NUM_SHOWN = 6
# Of fewer requests the 90th percentile is that of one or two.
_MIN_REQUESTS = 20
_LABEL_OF_GPUS = "total_gpus"
# Settings that each start draws anew, or that say where a process is and not what it does.
_PLACES = ("address", "endpoints", "port", "directory", "file", "host", "id", "log_dir")


class ResultsError(Exception):
    """Results can't be read or compared; the message names the file."""


@dataclass(frozen=True)
class Figure:
    """One figure of a load; ``None``: it has none."""

    value: float | None
    is_better_if_higher: bool = False


@dataclass(frozen=True, kw_only=True)
class Results:
    """What one ``quartet bench`` has left.

    Attributes:
        name: where it was read.
        report: as ``--json`` writes it.
        deployment: of a folder; ``None``: a report alone was given.
        points: entries of the report by load; of a load that was run twice the last.
    """

    name: str
    report: Mapping[str, Any]
    deployment: Mapping[str, Any] | None
    points: Mapping[Load, Mapping[str, Any]]

    def figures(self, load: Load) -> dict[str, Figure]:
        """What is compared of ``load``, by what the table calls it."""
        point = self.points[load]
        rates = {"requests/s": point["requests_per_s"], "output tokens/s": point["output_tokens_per_s"]}
        if (num_gpus := self._num_gpus()) is not None:
            rates["output tokens/s per GPU"] = point["output_tokens_per_s"] / num_gpus
        figures = {name: Figure(value, is_better_if_higher=True) for name, value in rates.items()}
        for name, key in _LATENCIES.items():
            figures |= {f"{name} {quantile} ms": Figure(point[key][quantile]) for quantile in _QUANTILES}
        return figures

    def describe(self) -> str:
        """One line: where, model, commit and time."""
        commit = self.report["commit"]
        changes = " with changes" if commit["is_dirty"] else ""
        revision = (commit["revision"] or "no commit")[:12]
        return f"{self.name}: {self.report['model']['name']}, {revision}{changes}, {self.report['started_at']}"

    def _num_gpus(self) -> float | None:
        try:
            num_gpus = float((self.deployment or {})["labels"][_LABEL_OF_GPUS])
        except (KeyError, ValueError):
            return None
        return num_gpus if num_gpus > 0 else None


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A folder of --out, or a file of --json.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one; ratios are B to A.")],
    *,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw both, over their loads.", metavar="FILE.png", dir_okay=False),
    ] = None,
) -> None:
    """Compare two results, load by load, and warn of what else differs between them."""
    output = OutputFiles(json=None, plot=plot_file)
    output.check()
    with reporting_errors(ResultsError):
        both = read_results(first), read_results(second)
        loads = [load for load in both[0].points if load in both[1].points]
        if not loads:
            raise ResultsError(f"no load in common: {_list_loads(both[0])}, and {_list_loads(both[1])}")
    console = open_console(pipe_width=_PIPE_WIDTH)
    for letter, results in zip("AB", both, strict=True):
        console.print(f"{letter}: {results.describe()}", soft_wrap=True, markup=False)
    console.print(_table(both, loads))
    for warning in (*differences(*both), *(remark for results in both for remark in _remarks(results))):
        console.print(warning, style="yellow", soft_wrap=True, markup=False)

    def draw(path: Path) -> None:
        # Imported here: matplotlib takes a second, and few users draw.
        from cli.bench.plot import plot_comparison

        plot_comparison(both, path)

    if not output.write({}, draw):
        raise typer.Exit(1)


def read_results(path: Path) -> Results:
    """The results in a folder, or in a file of ``--json``. Raises ``ResultsError``."""
    report = _read_json(path / REPORT_FILE if path.is_dir() else path)
    deployment = _read_json(path / DEPLOYMENT_FILE) if path.is_dir() else None
    try:
        if report["benchmark"] != "bench":
            raise ResultsError(f"{path}: of {report['benchmark']}, and not of quartet bench")
        points = {Load(LoadKind(point["load"]["kind"]), point["load"]["value"]): point for point in report["points"]}
        results = Results(name=str(path), report=report, deployment=deployment, points=points)
        for load in points:
            results.figures(load)
        results.describe()
    except (KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"{path}: not as quartet bench writes it ({type(error).__name__}: {error})") from error
    return results


def differences(a: Results, b: Results) -> Iterator[str]:
    """A line for each thing beside the code in which the two differ."""
    parts = {
        "model": [_pick(results.report["model"], "name", "fingerprint") for results in (a, b)],
        "path": [{"path": results.report["path"]} for results in (a, b)],
        "workload": [_workload(results.report["workload"]) for results in (a, b)],
        "limits": [results.report["limits"] for results in (a, b)],
        "machine": [results.report["machine"] for results in (a, b)],
        "versions": [results.report["versions"] for results in (a, b)],
        "deployment": [_deployment(a, b), _deployment(b, a)],
    }
    for name, (left, right) in parts.items():
        changed = [
            f"{key} {_show(left.get(key))} → {_show(right.get(key))}"
            for key in sorted({*left, *right})
            if left.get(key) != right.get(key)
        ]
        if changed:
            more = f", and {len(changed) - _NUM_SHOWN} more" if len(changed) > _NUM_SHOWN else ""
            yield f"{name} differs: {'; '.join(changed[:_NUM_SHOWN])}{more}"


def ratio_shown(a: Figure, b: Figure) -> str:
    """The ratio of ``b`` to ``a``, as markup: from 5 % on green where ``b`` is better, red where it is worse."""
    if not a.value or b.value is None:
        return "-"
    ratio = b.value / a.value
    if abs(ratio - 1) < _COLOURED_CHANGE:
        return f"{ratio:.2f}"
    colour = "green" if (ratio > 1) == a.is_better_if_higher else "red"
    return f"[{colour}]{ratio:.2f}[/]"


def _table(both: Sequence[Results], loads: Sequence[Load]) -> Table:
    table = Table("load", "figure")
    for name in ("A", "B", "B/A"):
        table.add_column(name, justify="right", no_wrap=True)
    for load in loads:
        a, b = (results.figures(load) for results in both)
        for name in [name for name in a if name in b]:
            is_first = name == next(iter(a))
            table.add_row(
                str(load) if is_first else "",
                name,
                _number(a[name].value),
                _number(b[name].value),
                ratio_shown(a[name], b[name]),
            )
        table.add_section()
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _remarks(results: Results) -> Iterator[str]:
    """What a reader must know of the figures of one of them."""
    runs = Counter((point["load"]["kind"], point["load"]["value"]) for point in results.report["points"])
    for (kind, value), count in runs.items():
        if count > 1:
            yield f"{results.name}: {kind} {value:g} was run {count} times; the last is shown"
    for load, point in results.points.items():
        counts = point["requests"]
        if lost := counts["failed"] + counts["cut_off"]:
            yield f"{results.name}: {load}: {lost} of {counts['sent']} requests did not end well"
        if 0 < counts["finished"] < _MIN_REQUESTS:
            yield f"{results.name}: {load}: percentiles are of {counts['finished']} requests only"
        if point["client"]["is_near_limit"]:
            yield f"{results.name}: {load}: the client was near its limit"
    if results.report["is_interrupted"]:
        yield f"{results.name}: was interrupted"


def _workload(workload: Mapping[str, Any]) -> dict[str, Any]:
    """Without the seed, which is another in each run; of a trace its file's name."""
    trace = workload["trace"]
    return {key: value for key, value in workload.items() if key != "seed"} | {"trace": trace and Path(trace).name}


def _deployment(results: Results, other: Results) -> dict[str, Any]:
    """What is known of the deployments of both; a worker or process that only one has is one entry."""
    shown: dict[str, Any] = _pick(results.report["model"], "num_prefill_workers", "num_decode_workers")
    if results.deployment is None or other.deployment is None:
        return shown
    shown |= {f"label {name}": value for name, value in results.deployment["labels"].items()}
    for own, others in zip(_processes(results.deployment), _processes(other.deployment), strict=True):
        if own is not None and others is not None:
            for name, settings in own.items():
                known = {key: value for key, value in _flat(settings, name) if not _is_place(key)}
                shown |= known if name in others else {name: "there"}
    return shown


def _processes(deployment: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """By name what workers announce, and what processes were set to; ``None``: not known."""
    workers = deployment["workers"]
    announced = None if workers is None else {worker["worker_id"]: worker for worker in workers}
    return announced, deployment["processes"]


def _is_place(key: str) -> bool:
    return key.rpartition(".")[2].rpartition("_")[2] in _PLACES


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Leaves by dotted name."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _pick(mapping: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: mapping[name] for name in names}


def _show(value: Any) -> str:
    return "-" if value is None else str(value)


def _list_loads(results: Results) -> str:
    return f"{results.name} has {', '.join(map(str, results.points)) or 'none'}"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ResultsError(f"{path} is no JSON: {error}") from error
