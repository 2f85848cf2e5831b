"""What ``quartet up`` shows: progress and logs on standard error, what to paste on standard output."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from cli.options import DEFAULT_ROUTER
from services.topology.child import Child
from services.topology.launch import find_grpcurl

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_green")
_MIN_NAME_WIDTH = 9
_PROMPT = "Once upon a time"
_MAX_TOKENS = 32
_PICTURE = Path(__file__).resolve().parents[1] / "models/tiny/pictures/shapes.jpg"
_QUESTION = "Describe the picture."


class LaunchDisplay:
    """A ``LaunchObserver`` for a terminal, or for a file.

    Attributes:
        last_progress: the last message of ``progress``.
    """

    def __init__(self) -> None:
        self.last_progress = ""
        self._log = Console(stderr=True, highlight=False)
        self._colours: dict[str, str] = {}

    def log_line(self, process: str, line: str) -> None:
        """Show a line of a process behind its name."""
        colour = self._colours.setdefault(process, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._show(process, colour, line)

    def progress(self, message: str) -> None:
        """Show what ``up`` itself is doing."""
        self.last_progress = message
        self._show("up", "bold", message)

    def died(self, child: Child) -> None:
        """Show that a process ended by itself, and why; its last lines are shown already."""
        self._show("up", "bold red", child.describe_end().splitlines()[0])

    def ready(self, router_address: str, *, takes_images: bool = False) -> None:
        """Print ``ready`` and lines to paste into another terminal."""
        lines = paste_lines(router_address, os.environ.get("PATH", ""), takes_images=takes_images)
        print("\n".join(["", "ready", *lines]), flush=True)
        if find_grpcurl() is None:
            self.progress("no grpcurl here: with any Go that can download modules, `make tools` gets it")

    def _show(self, name: str, style: str, line: str) -> None:
        prefix = Text(f"{name:<{_MIN_NAME_WIDTH}} | ", style=style)
        # A terminal that was closed takes nothing; that must not keep anything from being ended.
        with contextlib.suppress(OSError):
            # Wrapped lines could not be told from new ones, nor searched.
            self._log.print(prefix + Text(line), soft_wrap=True)


def paste_lines(router_address: str, search_path: str, *, takes_images: bool = False) -> list[str]:
    """Shell lines that use the router: ``export PATH`` where programs are not on ``search_path`` yet, then calls."""
    router = "" if router_address == DEFAULT_ROUTER else f" --router {router_address}"
    grpcurl = find_grpcurl()
    programs = [Path(sys.executable).with_name("quartet"), *([grpcurl] if grpcurl else [])]
    lines = [_export_line(programs, search_path)] if _directories_to_add(programs, search_path) else []
    has_picture = takes_images and _PICTURE.is_file()
    if grpcurl is not None:
        request = f'{{"start":{{"text":"{_PROMPT}","sampling":{{"max_tokens":{_MAX_TOKENS}}}}}}}'
        lines.append(_grpcurl_line(shlex.quote(request), router_address))
        if has_picture:
            lines.append(_grpcurl_line(_picture_request(), router_address))
    lines.append(f"quartet generate {shlex.quote(_PROMPT)} --max-tokens {_MAX_TOKENS}{router}")
    if has_picture:
        lines.append(
            f"quartet generate --chat --image {_shown_picture()} {shlex.quote(_QUESTION)} --temperature 0{router}"
        )
    lines.append(f"quartet workers{router}")
    return lines


def _grpcurl_line(request: str, router_address: str) -> str:
    return f"grpcurl -plaintext -d {request} {router_address} quartet.v1.RouterService/Generate"


def _picture_request() -> str:
    """A shell word: JSON, and in it what a command makes of the picture's file."""
    before = '{"start":{"chat":{"messages":[{"role":"user","parts":[{"media":{"data":"'
    after = f'"}}}},{{"text":"{_QUESTION}"}}]}}]}},"sampling":{{"temperature":0}}}}}}'
    return f"{shlex.quote(before)}$(base64 -w0 {_shown_picture()}){shlex.quote(after)}"


def _shown_picture() -> str:
    is_below = _PICTURE.is_relative_to(Path.cwd())
    return shlex.quote(str(_PICTURE.relative_to(Path.cwd()) if is_below else _PICTURE))


def _export_line(programs: Sequence[Path], search_path: str) -> str:
    directories = [shlex.quote(str(directory)) for directory in _directories_to_add(programs, search_path)]
    return f"export PATH={':'.join(directories)}:$PATH"


def _directories_to_add(programs: Sequence[Path], search_path: str) -> list[Path]:
    return [program.parent for program in programs if shutil.which(program.name, path=search_path) is None]
