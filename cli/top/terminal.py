"""The terminal while ``quartet top`` has it: the other screen, keys one by one; all as before after its end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live

#: Of keys that send more than one byte; ``\x1bO`` begins them where the keypad is in application mode.
_ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left"}
_ESCAPE = "\x1b"
_MAX_BYTES = 1024


class Terminal:
    """Use it with ``with``, in an event loop: it gives keys, and takes what is to be shown."""

    def __init__(self, console: Console, on_keys: Callable[[list[str]], None]) -> None:
        """``on_keys`` gets keys as they are pressed; no keys at all mean that the terminal is gone."""
        self._console = console
        self._on_keys = on_keys
        self._keys_fd = sys.stdin.fileno()
        self._saved = termios.tcgetattr(self._keys_fd)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._take()
        asyncio.get_running_loop().add_reader(self._keys_fd, self._read)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._keys_fd)
        with suppress(OSError, termios.error):  # the terminal may have been closed
            self._give_back()

    def show(self, screen: RenderableType) -> None:
        """Show ``screen``, which fills the terminal."""
        if self._live is not None:
            self._live.update(screen, refresh=True)

    def suspend(self) -> None:
        """Give the terminal back, stop this process as Ctrl-Z does, and take the terminal again once it goes on."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _take(self) -> None:
        try:
            tty.setcbreak(self._keys_fd)
            self._live = Live(
                console=self._console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        except BaseException:
            self._give_back()
            raise

    def _give_back(self) -> None:
        live, self._live = self._live, None
        try:
            if live is not None:
                live.stop()
        finally:
            termios.tcsetattr(self._keys_fd, termios.TCSADRAIN, self._saved)

    def _read(self) -> None:
        try:
            data = os.read(self._keys_fd, _MAX_BYTES)
        except OSError:  # the terminal was closed
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._keys_fd)
        self._on_keys(list(keys_of(data.decode("utf-8", "replace"))))


def keys_of(text: str) -> Iterator[str]:
    """The keys that sent ``text``: characters, ``up``, ``down``, ``left``, ``right``, ``escape``; no others."""
    rest = text
    while rest:
        if not rest.startswith(_ESCAPE):
            yield rest[0]
            rest = rest[1:]
        elif rest[1:2] in ("[", "O"):
            # A sequence ends with its first letter or tilde.
            end = next((number for number, char in enumerate(rest[2:], 2) if char.isalpha() or char == "~"), len(rest))
            if (arrow := _ARROWS.get(rest[2 : end + 1])) is not None:
                yield arrow
            rest = rest[end + 1 :]
        else:
            yield "escape"
            rest = rest[1:]
