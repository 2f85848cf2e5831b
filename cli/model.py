"""``quartet model``: fetches models to this machine ahead of their workers, lists them, and checks their files."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from cli.output import complain, json_value, open_console, reporting_errors
from quartet.engine import model_source
from quartet.engine.model_cache import CachedModel, cached_models
from quartet.engine.model_check import CheckedFile, FileVerdict, check_model, model_files
from quartet.engine.model_copy import copies_folder, copy_model, copy_target, files_to_copy, is_copy_name, origin_of
from quartet.engine.model_source import (
    Repository,
    drop_cached_files,
    drop_leftovers,
    fetch_model,
    find_cached_model,
    repository_of,
)
from quartet.errors import ConfigError

_PIPE_WIDTH = 200
_PROGRESS_INTERVAL_S = 10.0
_STYLES = {
    FileVerdict.WHOLE: "green",
    FileVerdict.NO_DIGEST: "yellow",
    FileVerdict.DAMAGED: "bold red",
    FileVerdict.MISSING: "bold red",
}

CacheOption = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        help="Where copies of folders are, else ~/.cache/quartet/models. Repositories are in the Hub's cache: HF_HOME.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="The same, for programs.")]

model = typer.Typer(
    name="model",
    no_args_is_help=True,
    add_completion=False,
    help="Fetch models ahead of their workers, list those on this machine, and check their files.",
)


@model.command()
def fetch(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="ORGANISATION/NAME[@REVISION] of the Hugging Face Hub, or a folder to copy."
        ),
    ],
    *,
    cache: CacheOption = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of a folder's copy, else the folder's.")] = None,
    no_weights: Annotated[
        bool, typer.Option("--no-weights", help="Only what routers and random weights need.")
    ] = False,
) -> None:
    """Bring a model to this machine and check its files; what is here already stays, and what broke off goes on.

    Prints the folder. Workers then find a repository without a network (HF_HUB_OFFLINE=1).
    """
    with reporting_errors(OSError):
        repository = repository_of(source)
        if repository is not None:
            _refuse_for_repositories(cache=cache, name=name)
            folder, files = _fetch_repository(repository, needs_weights=not no_weights)
        else:
            to_copy = files_to_copy(Path(source), needs_weights=not no_weights)
            folder = copy_target(Path(source), cache or copies_folder(), name)
            files = _copy(to_copy, folder)
        bad = [file for file in files if file.is_bad and not (no_weights and file.verdict is FileVerdict.MISSING)]
        if bad:
            raise ConfigError("; ".join(f"model: {file.name} is {file.verdict}: {file.why}" for file in bad))
    print(folder)


@model.command("list")
def list_models(*, cache: CacheOption = None, as_json: JsonOption = False) -> None:
    """Show the models on this machine, and what they lack as far as names and headers show."""
    with reporting_errors():
        models = cached_models(
            cache or copies_folder(), on_unreadable=lambda fault: complain(f"left out of the list: {fault}")
        )
    if as_json:
        print(json.dumps([json_value(one) | {"folder": str(one.folder)} for one in models], indent=2))
    else:
        open_console(pipe_width=_PIPE_WIDTH).print(model_table(models))


@model.command()
def check(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A repository in the Hub's cache, the name of a copy, or any other folder (./NAME)."
        ),
    ],
    *,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read all files of a model and compare them with their digests. Exit code 1 if any is damaged or missing."""
    with reporting_errors(OSError):
        folder = _find(source, cache)
        files = _check(folder)
    if as_json:
        print(json.dumps({"folder": str(folder), "files": json_value(files)}, indent=2))
    else:
        open_console(pipe_width=_PIPE_WIDTH).print(file_table(files), str(folder))
    if any(file.is_bad for file in files):
        raise typer.Exit(1)


def model_table(models: Sequence[CachedModel]) -> Table:
    """One row a model."""
    table = Table()
    for column in ("model", "from", "size", "files", "written", "state", "folder"):
        table.add_column(column, justify="right" if column in ("size", "files") else "left", overflow="fold")
    for one in models:
        written = datetime.fromtimestamp(one.changed_at).astimezone().strftime("%Y-%m-%d %H:%M")
        state = f"[red]{'; '.join(one.faults)}[/red]" if one.faults else "[green]complete[/green]"
        table.add_row(
            one.name, one.revision, _size(one.size_bytes), str(one.num_files), written, state, str(one.folder)
        )
    return table


def file_table(files: Sequence[CheckedFile]) -> Table:
    """One row a file."""
    table = Table()
    for column in ("file", "size", "state", "why"):
        table.add_column(column, justify="right" if column == "size" else "left")
    for file in files:
        style = _STYLES[file.verdict]
        table.add_row(file.name, _size(file.size_bytes), f"[{style}]{file.verdict}[/{style}]", file.why)
    return table


def _fetch_repository(repository: Repository, *, needs_weights: bool) -> tuple[Path, list[CheckedFile]]:
    """Fetch and check a repository; damaged files are fetched a second time."""
    has_bars = sys.stderr.isatty()
    if not has_bars:
        logging.basicConfig(format="%(message)s")
        logging.getLogger(model_source.__name__).setLevel(logging.INFO)
    folder = fetch_model(repository, needs_weights=needs_weights, has_bars=has_bars)
    files = _check(folder)
    if damaged := _damaged(files):
        complain(f"{', '.join(damaged)}: damaged, fetched again")
        drop_cached_files(folder, damaged)
        folder = fetch_model(repository, needs_weights=needs_weights, has_bars=has_bars)
        files = _check(folder)
    drop_leftovers(folder)
    return folder, files


def _copy(files: Sequence[Path], target: Path) -> list[CheckedFile]:
    """Copy and check a folder; damaged files are copied a second time."""
    checked = _copy_once(files, target, ())
    damaged = [name for name in _damaged(checked) if name in {path.name for path in files}]
    if damaged:
        complain(f"{', '.join(damaged)}: damaged, copied again")
        checked = _copy_once(files, target, damaged)
    return checked


def _copy_once(files: Sequence[Path], target: Path, damaged: Sequence[str]) -> list[CheckedFile]:
    with _progress("copying", sum(path.stat().st_size for path in files)) as on_copied:
        copy_model(files, target, on_copied, damaged=damaged)
    return _check(target)


def _damaged(files: Sequence[CheckedFile]) -> list[str]:
    return [file.name for file in files if file.verdict is FileVerdict.DAMAGED]


def _refuse_for_repositories(*, cache: Path | None, name: str | None = None) -> None:
    for option, value in (("cache", cache), ("name", name)):
        if value is not None:
            raise ConfigError(f"{option}: only for copies of folders: repositories are in the Hub's cache, see HF_HOME")


def _find(source: str, cache: Path | None) -> Path:
    """The folder that ``check`` is to look at: the copy of that name comes before a folder here."""
    copies = cache or copies_folder()
    if is_copy_name(source) and (copies / source).is_dir() and origin_of(copies / source) is not None:
        return copies / source
    if Path(source).is_dir():
        return Path(source)
    repository = repository_of(source)
    if repository is None:
        raise ConfigError(f"model: {source} is no folder, no copy in {copies}, and no repository's name")
    _refuse_for_repositories(cache=cache)
    return find_cached_model(repository)


def _check(folder: Path) -> list[CheckedFile]:
    # What can't be read is for the check to say.
    size_bytes = sum(path.stat().st_size for path in model_files(folder) if path.exists()) if folder.is_dir() else 0
    with _progress("checking", size_bytes) as on_read:
        return check_model(folder, on_read)


@contextmanager
def _progress(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """What to tell of bytes that are done: a bar on a terminal, else a line every 10 s; on standard error."""
    if sys.stderr.isatty():
        columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(what, total=total_bytes)
            yield lambda size: progress.advance(task, size)
        return
    num_done, said_at = 0, time.monotonic()

    def on_done(size_bytes: int) -> None:
        nonlocal num_done, said_at
        num_done += size_bytes
        if time.monotonic() - said_at > _PROGRESS_INTERVAL_S:
            said_at = time.monotonic()
            print(f"{what}: {_size(num_done)} of {_size(total_bytes)}", file=sys.stderr)

    yield on_done


def _size(size_bytes: int) -> str:
    """In bytes of 1,000: ``16.4 GB``."""
    size, units = float(size_bytes), iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 1000 and unit != "TB":
        size, unit = size / 1000, next(units)
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
