"""``quartet chat``: a conversation, line by line."""

from __future__ import annotations

import readline
import secrets
import sys
from typing import Annotated

import typer

from cli.options import ModelOption, PathOption, RouterOptions, SamplingOptions, SeedOption, TimeOption
from cli.output import complain, describe, time_line
from cli.prompt import ImageOption, MediaError, read_images, to_media
from quartet.client import ChatMessage, ChoiceFinished, Delta, GenerateFields, MediaPart, RequestPath
from quartet.client.sync import SyncClient
from quartet.errors import RouterUnavailableError, ServingError

_PROMPT = "> "
_IMAGE_COMMAND = "/image"


def chat(
    *,
    router: RouterOptions,
    model: ModelOption = "",
    path: PathOption = RequestPath.GENERATE,
    system: Annotated[str | None, typer.Option("--system", help="What the model is told first.")] = None,
    image: ImageOption = None,
    sampling: SamplingOptions,
    seed: SeedOption = None,
    shows_time: TimeOption = False,
) -> None:
    """Talk to a model. Ctrl-C cancels an answer, Ctrl-D leaves.

    Pictures go with the first message; a line "/image FILE" adds one to the next.
    """
    media = read_images(image)
    # Once readline is imported, `input` edits lines and remembers them.
    readline.set_history_length(1000)
    fields: GenerateFields = {
        "model": model,
        "sampling": sampling.sampling(),
        "seed": seed,
        # All turns begin with the same tokens: a router that heeds sessions sends them where these are cached.
        "session_key": secrets.token_hex(16),
    }
    with SyncClient(router.router, tls=router.tls) as client:
        # Fail before the user types anything if no router answers.
        client.list_models()
        _Conversation(client, path, fields, system, media, shows_time=shows_time).run()


class _Conversation:
    def __init__(
        self,
        client: SyncClient,
        path: RequestPath,
        fields: GenerateFields,
        system: str | None,
        media: list[MediaPart],
        *,
        shows_time: bool,
    ) -> None:
        self._client = client
        self._path = path
        self._fields = fields
        self._shows_time = shows_time
        self._messages = [] if system is None else [ChatMessage("system", system)]
        #: For the next message.
        self._media = media

    def run(self) -> None:
        while (line := _read_line()) is not None:
            command, _, argument = line.strip().partition(" ")
            if command == _IMAGE_COMMAND:
                self._add_image(argument.strip())
            elif command:
                self._ask(line)

    def _add_image(self, file_or_url: str) -> None:
        if not file_or_url:
            complain(f"{_IMAGE_COMMAND} takes a file or a URL")
            return
        try:
            self._media.append(to_media(file_or_url))
        except MediaError as error:
            complain(f"{_IMAGE_COMMAND} {error}")

    def _ask(self, text: str) -> None:
        media, self._media = self._media, []
        messages = [*self._messages, ChatMessage("user", (*media, text) if media else text)]
        try:
            answer = self._show_answer(messages)
        except RouterUnavailableError:
            raise
        except ServingError as error:
            # Go on as if this had not been asked, pictures included: a bad picture would fail every later message too.
            complain(describe(error) + ("; its pictures are dropped with it" if media else ""))
        else:
            self._messages = [*messages, ChatMessage("assistant", answer)]

    def _show_answer(self, messages: list[ChatMessage]) -> str:
        """Print the answer; return all of it, or what came before Ctrl-C. Raises ``ServingError``."""
        fields: GenerateFields = {**self._fields, "messages": messages}
        stream = self._client.generate(path=self._path, **fields)
        texts: list[str] = []
        line, thinks = "", False
        try:
            for part in stream:
                if isinstance(part, Delta):
                    if part.reasoning:
                        typer.secho(part.reasoning, dim=True, nl=False)
                    is_first = part.text and thinks and not any(texts)
                    thinks = thinks or bool(part.reasoning)
                    print(f"\n\n{part.text}" if is_first else part.text, end="", flush=True)
                    texts.append(part.text)
                elif isinstance(part, ChoiceFinished):
                    line = time_line(part.time)
            print()
            if self._shows_time:
                print(line, file=sys.stderr)
        except KeyboardInterrupt:
            typer.secho(" (cancelled)", fg=typer.colors.YELLOW)
        finally:
            stream.close()
        return "".join(texts)


def _read_line() -> str | None:
    while True:
        try:
            return input(_PROMPT)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            typer.secho(" (Ctrl-D leaves)", fg=typer.colors.YELLOW)
