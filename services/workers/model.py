"""The model that a worker serves: its files, its name in requests, and its chat template."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quartet.engine.fingerprint import fingerprint_with_processor, fingerprint_with_template
from quartet.engine.life_cycle import call_on_loop
from quartet.engine.model_source import Repository, fetch_model, repository_of
from quartet.errors import ConfigError, ModelFilesError
from quartet.text.chat_template import read_template_file
from quartet.text.model_files import CHAT_TEMPLATE, read_text_files
from services.workers.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model whose files are on this machine.

    Attributes:
        path: its folder.
        name: its name in requests.
        template: a chat template in place of the model's own, as it was when the worker started; ``None``: its own.
        processor_kwargs: settings in place of those of its picture processor.
    """

    path: Path
    name: str
    template: bytes | None = field(default=None, repr=False)
    processor_kwargs: Mapping[str, object] = field(default_factory=dict)

    def text_files(self) -> dict[str, bytes]:
        """The files that routers and clients tokenize with. Raises ``ModelFilesError``; reads files."""
        files: Mapping[str, bytes] = read_text_files(self.path)
        return {**files, **({} if self.template is None else {CHAT_TEMPLATE: self.template})}

    def fingerprint(self, engine_fingerprint: str) -> str:
        """The fingerprint to announce for the engine's: another template or picture processor makes another model.

        Engines' own fingerprints may still agree: only routers tell workers to exchange blocks, within a pool.
        """
        fingerprint = engine_fingerprint
        if self.processor_kwargs:
            fingerprint = fingerprint_with_processor(fingerprint, self.processor_kwargs)
        return fingerprint if self.template is None else fingerprint_with_template(fingerprint, self.template)


async def find_model(config: WorkerConfig) -> ServedModel:
    """The model that ``config`` names. A repository that is not on this machine yet is fetched.

    Raises:
        ConfigError: ``model_path`` can't be fetched, or ``custom_jinja_template`` is no template.
    """
    template = None if config.custom_jinja_template is None else _read_template(config.custom_jinja_template)
    repository = repository_of(config.model_path)
    if repository is None:
        path, name = Path(config.model_path), config.model_name or _folder(config)
    else:
        path = await _fetched(repository, needs_weights=config.engine.needs_weights)
        name = config.model_name or repository.id
    return ServedModel(path=path, name=name, template=template, processor_kwargs=config.engine.mm_processor_kwargs)


def _folder(config: WorkerConfig) -> str:
    return Path(config.model_path).resolve().name


def _read_template(file: Path) -> bytes:
    try:
        return read_template_file(file).encode()
    except ModelFilesError as error:
        raise ConfigError(f"custom_jinja_template: {error}") from error


async def _fetched(repository: Repository, *, needs_weights: bool) -> Path:
    """``fetch_model`` in a daemon thread: it may take an hour and can't be interrupted, and a stop must not wait."""
    loop = asyncio.get_running_loop()
    fetched: asyncio.Future[Path] = loop.create_future()

    def settle(path: Path | None, error: ConfigError | None) -> None:
        if fetched.done():  # the worker was stopped
            return
        if path is not None:
            fetched.set_result(path)
        elif error is not None:
            fetched.set_exception(error)

    def fetch() -> None:
        path, error = None, None
        try:
            path = fetch_model(repository, needs_weights=needs_weights)
        except ConfigError as refused:
            error = refused
        call_on_loop(loop, settle, path, error)

    threading.Thread(target=fetch, name="fetch-model", daemon=True).start()
    return await fetched
