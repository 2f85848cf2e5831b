"""The models on this machine: in the Hub's cache, and copies of folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from quartet.engine.fingerprint import weight_files
from quartet.engine.model_check import SUMS_FILE, missing_files, model_files, weights_fault
from quartet.engine.model_copy import is_whole_copy, origin_of
from quartet.errors import ConfigError

_COMMIT_LENGTH = 12


class Origin(StrEnum):
    """Where a model on this machine comes from."""

    HUB = "hub"
    COPY = "copy"


@dataclass(frozen=True)
class CachedModel:
    """A model on this machine.

    Attributes:
        name: a repository's id, or the name of a copy's folder.
        revision: commit and branches of a repository, the folder that a copy was made of.
        faults: what it lacks, as far as a look at names and headers shows; empty: nothing.
        changed_at: when the last of its files was fetched or copied, in seconds since 1970.
    """

    name: str
    revision: str
    origin: Origin
    folder: Path
    size_bytes: int
    num_files: int
    faults: tuple[str, ...]
    changed_at: float


def cached_models(copies: Path, on_unreadable: Callable[[str], object] = lambda _: None) -> list[CachedModel]:
    """All models of the Hub's cache (``HF_HOME``) and copies below ``copies``, by name.

    Args:
        copies: the folder of copies.
        on_unreadable: called with what is wrong with each repository in the Hub's cache that can't be listed.

    Raises:
        ConfigError: field ``cache``; a folder can't be read.
    """
    try:
        return sorted([*_of_hub(on_unreadable), *_copies(copies)], key=lambda model: (model.name, model.revision))
    except OSError as error:
        raise ConfigError(f"cache: {error.filename} can't be read: {error.strerror}") from error


def _of_hub(on_unreadable: Callable[[str], object]) -> Iterator[CachedModel]:
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return
    try:
        found = scan_cache_dir()
    except CacheNotFound:
        return
    except ValueError as error:  # it is a file
        raise ConfigError(f"cache: {error}") from error
    # The Hub's library leaves such a repository out. Its texts name the path, and so the kind of repository.
    for warning in found.warnings:
        if "/models--" in str(warning):
            on_unreadable(str(warning))
    for repository in found.repos:
        if repository.repo_type != "model":
            continue
        for revision in repository.revisions:
            names = ", ".join(sorted(revision.refs))
            commit = revision.commit_hash[:_COMMIT_LENGTH]
            yield CachedModel(
                name=repository.repo_id,
                revision=f"{commit} ({names})" if names else commit,
                origin=Origin.HUB,
                folder=revision.snapshot_path,
                size_bytes=revision.size_on_disk,
                num_files=len(revision.files),
                faults=tuple(_faults(revision.snapshot_path)),
                changed_at=revision.last_modified,
            )


def _copies(folder: Path) -> Iterator[CachedModel]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and (origin := origin_of(path)) is not None:
            stats = list(_stats(model_files(path)))
            unfinished = () if is_whole_copy(path) else ("it is being copied, or that broke off",)
            yield CachedModel(
                name=path.name,
                revision=str(origin),
                origin=Origin.COPY,
                folder=path,
                size_bytes=sum(stat.st_size for stat in stats),
                num_files=len(stats),
                faults=(*unfinished, *_faults(path)),
                # Files have the times of those that they are copies of.
                changed_at=(path / SUMS_FILE).stat().st_mtime,
            )


def _stats(paths: list[Path]) -> Iterator[os.stat_result]:
    for path in paths:
        # A link leads to nothing, or a process that copies has just renamed the file.
        if path.exists():
            yield path.stat()


def _faults(folder: Path) -> Iterator[str]:
    for path in model_files(folder):
        if path.is_symlink() and not path.exists():
            yield f"{path.name} is missing: its link leads to no file"
    for name, why in missing_files(folder):
        yield f"{name} is missing: {why}"
    for path in weight_files(folder):
        if fault := weights_fault(path):
            yield f"{path.name}: {fault}"
