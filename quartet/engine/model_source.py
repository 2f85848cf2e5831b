"""Finds a model's files: in a folder, or in a repository of the Hugging Face Hub, which is fetched once."""

from __future__ import annotations

import fnmatch
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from quartet.errors import ConfigError

logger = logging.getLogger(__name__)

#: Fetches the files of a repository that match the patterns, unless they are on this machine, and returns their folder.
#: Raises any exception.
Fetch: TypeAlias = Callable[["Repository", Sequence[str]], Path]

# The files that configure a model, its tokenizer, template and preprocessing. Never code.
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
_WEIGHT_FILES = ("*.safetensors",)
# Folders and consolidated files hold the same weights again, for other programs.
_LEFT_OUT = ("*/*", "consolidated*")

_PROGRESS_INTERVAL_S = 10.0

_REPOSITORY = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)


@dataclass(frozen=True)
class Repository:
    """A repository of the Hub.

    Attributes:
        id: ``organisation/name``.
        revision: branch, tag or commit; ``None``: the main branch.
    """

    id: str
    revision: str | None = None

    def __str__(self) -> str:
        """Its form in ``model_path``."""
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


def is_repository_id(text: str) -> bool:
    """Whether ``text`` names a repository: ``org/name`` or ``org/name@revision``, and no existing path."""
    return repository_of(text) is not None


def repository_of(text: str) -> Repository | None:
    """The repository that ``text`` names; ``None``: it is a path."""
    match = _REPOSITORY.fullmatch(text)
    if match is None or Path(text).exists():
        return None
    return Repository(match["id"], match["revision"])


def is_model_file(name: str, *, needs_weights: bool) -> bool:
    """Whether a file of that name in a model's folder is one that serves it: never code, nor the same weights twice."""
    is_wanted = any(fnmatch.fnmatchcase(name, pattern) for pattern in _patterns(needs_weights=needs_weights))
    return is_wanted and not any(fnmatch.fnmatchcase(name, pattern) for pattern in _LEFT_OUT)


def fetch_model(
    repository: Repository, *, needs_weights: bool, has_bars: bool = False, fetch: Fetch | None = None
) -> Path:
    """The folder with the files of ``repository``, fetched if they are not on this machine yet. Blocks until then.

    Needs the package ``huggingface_hub`` and honours its variables (``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN``).

    Args:
        repository: what to fetch.
        needs_weights: also fetch the weights.
        has_bars: show the progress as bars on standard error, for a terminal; else it is logged.
        fetch: used in place of the Hub.

    Raises:
        ConfigError: it can't be fetched; names ``model_path`` and says why.
    """
    logger.info("looking for %s on the Hugging Face Hub", repository)
    started_at = time.monotonic()
    fetch = fetch or (lambda repository, patterns: _fetch_from_hub(repository, patterns, has_bars=has_bars))
    folder = fetch(repository, _patterns(needs_weights=needs_weights))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model_path: the repository {repository} holds no config.json")
    logger.info("%s is here after %.1f s", repository, time.monotonic() - started_at)
    return folder


def find_cached_model(repository: Repository) -> Path:
    """The folder of ``repository`` in the Hub's cache, with or without weights; nothing is fetched.

    Raises:
        ConfigError: it is not there, or a small file of it is not; names ``model_path``.
    """
    return _fetch_from_hub(repository, _SMALL_FILES, has_bars=False, is_offline=True)


def drop_cached_files(folder: Path, names: Iterable[str]) -> None:
    """Delete files of a repository from the Hub's cache, so that they are fetched again. Raises ``OSError``."""
    for path in (folder / name for name in names):
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def drop_leftovers(folder: Path) -> None:
    """Delete what downloads that were killed left of files that the Hub's cache has now. Raises ``OSError``.

    The Hub's library begins each file under a name of its own. A download that still waits for the same file then
    finds it there.
    """
    for path in folder.parent.parent.glob("blobs/*.incomplete"):
        if path.with_name(path.name.partition(".")[0]).exists():
            path.unlink(missing_ok=True)


def _patterns(*, needs_weights: bool) -> tuple[str, ...]:
    return (*_SMALL_FILES, *_WEIGHT_FILES) if needs_weights else _SMALL_FILES


def _fetch_from_hub(
    repository: Repository, patterns: Sequence[str], *, has_bars: bool, is_offline: bool = False
) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # they are documented
            disable_progress_bars,
            enable_progress_bars,
        )
    except ImportError:
        raise _refusal(repository, "the package huggingface_hub is not installed to fetch it with") from None
    # Logs of servers are not read on a terminal.
    (enable_progress_bars if has_bars else disable_progress_bars)()
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    try:
        with nullcontext() if has_bars or is_offline else _logged_progress(repository, cache):
            return Path(
                huggingface_hub.snapshot_download(
                    repository.id,
                    revision=repository.revision,
                    allow_patterns=list(patterns),
                    ignore_patterns=list(_LEFT_OUT),
                    local_files_only=is_offline,
                )
            )
    # The process ends with this error. Its type depends on the version, as each uses another HTTP package. Its text
    # contains addresses, so it is not shown.
    except Exception as error:
        logger.debug("fetching %s failed", repository, exc_info=True)
        if (fault := _disk_fault(error, cache)) is not None:
            raise ConfigError(f"model_path: {repository}: the Hub's cache can't be used: {fault}") from None
        raise _refusal(repository, _reason(error)) from None


def _disk_fault(error: Exception, cache: Path) -> str | None:
    """What the system says of a file or folder; ``None``: the error is of another kind. HTTP errors are ``OSError``."""
    if not isinstance(error, OSError) or error.strerror is None or isinstance(error, ConnectionError | TimeoutError):
        return None
    return f"{error.filename or cache}: {error.strerror}"


def _reason(error: Exception) -> str:
    """Why fetching from the Hub failed."""
    from huggingface_hub import errors

    reasons: list[tuple[type[Exception], str]] = [
        (errors.GatedRepoError, "its terms have to be accepted, and HF_TOKEN set"),
        (errors.RepositoryNotFoundError, "there is none of that name, or it is private and HF_TOKEN is not set"),
        (errors.RevisionNotFoundError, "it has no such revision"),
        (
            errors.LocalEntryNotFoundError,
            "it is not in the cache, or not wholly, and the Hub can't be reached (or HF_HUB_OFFLINE is set)",
        ),
        (errors.OfflineModeIsEnabled, "it is not in the cache, and HF_HUB_OFFLINE is set"),
    ]
    return next((text for kind, text in reasons if isinstance(error, kind)), f"{type(error).__name__}")


def _refusal(repository: Repository, reason: str) -> ConfigError:
    return ConfigError(
        f"model_path: {repository} is no folder here, and no repository that can be had from the Hugging Face Hub: "
        f"{reason}"
    )


@contextmanager
def _logged_progress(repository: Repository, cache: Path) -> Iterator[None]:
    """Log every 10 s how much of ``repository`` is in the Hub's ``cache``."""
    done = threading.Event()
    blobs = cache / f"models--{repository.id.replace('/', '--')}" / "blobs"

    def log() -> None:
        while not done.wait(_PROGRESS_INTERVAL_S):
            logger.info("fetching %s: %d MiB so far", repository, _size_bytes(blobs) >> 20)

    threading.Thread(target=log, name="fetch-progress", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _size_bytes(directory: Path) -> int:
    size_bytes = 0
    for path in directory.glob("*"):
        try:
            size_bytes += path.stat().st_size
        except OSError:  # a finished file was just renamed
            continue
    return size_bytes
