"""The model that a worker serves: where its files lie, what requests call it, and how chats become its text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quartet.engine.fingerprint import fingerprint_with_template
from quartet.engine.model_source import Repository, fetch_model, repository_of
from quartet.errors import ConfigError, ModelFilesError
from quartet.text.chat_template import read_template_file
from quartet.text.model_files import CHAT_TEMPLATE, read_text_files
from services.workers.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model whose files are here.

    Attributes:
        path: its folder.
        name: what requests call it by.
        template: the chat template in place of its own, as it was when the worker started; ``None``: its own.
    """

    path: Path
    name: str
    template: bytes | None = field(default=None, repr=False)

    def text_files(self) -> dict[str, bytes]:
        """What routers and clients make its text with. Raises ``ModelFilesError``; reads files."""
        files: Mapping[str, bytes] = read_text_files(self.path)
        return {**files, **({} if self.template is None else {CHAT_TEMPLATE: self.template})}

    def fingerprint(self, engine_fingerprint: str) -> str:
        """What to announce where the engine says ``engine_fingerprint``: another template is another model.

        Blocks may still be exchanged wherever the engines' own fingerprints agree, as they hold tokens, not chats.
        """
        if self.template is None:
            return engine_fingerprint
        return fingerprint_with_template(engine_fingerprint, self.template)


async def find_model(config: WorkerConfig) -> ServedModel:
    """The model that ``config`` names, fetched if it is a repository's that isn't here yet.

    Raises:
        ConfigError: naming ``model_path``, which can't be had, or ``custom_jinja_template``, which is none.
    """
    template = None if config.custom_jinja_template is None else _read_template(config.custom_jinja_template)
    repository = repository_of(config.model_path)
    if repository is None:
        return ServedModel(path=Path(config.model_path), name=config.model_name or _folder(config), template=template)
    path = await _fetched(repository, needs_weights=config.engine.needs_weights)
    return ServedModel(path=path, name=config.model_name or repository.id, template=template)


def _folder(config: WorkerConfig) -> str:
    return Path(config.model_path).resolve().name


def _read_template(file: Path) -> bytes:
    try:
        return read_template_file(file).encode()
    except ModelFilesError as error:
        raise ConfigError(f"custom_jinja_template: {error}") from error


async def _fetched(repository: Repository, *, needs_weights: bool) -> Path:
    """``fetch_model`` in a thread that nobody has to wait for: a fetch may take an hour, and can't be broken off."""
    loop = asyncio.get_running_loop()
    fetched: asyncio.Future[Path] = loop.create_future()

    def tell(path: Path | None, error: ConfigError | None) -> None:
        if fetched.done():  # the worker was stopped meanwhile
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
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, path, error)

    threading.Thread(target=fetch, name="fetch-model", daemon=True).start()
    return await fetched
