"""``quartet chat``: a conversation, line by line, with a tool to show how calls go."""

from __future__ import annotations

import readline
import secrets
import sys
from typing import Annotated

import typer

from cli.answer import Answer, AnswerPrinter
from cli.options import ModelOption, PathOption, RouterOptions, SamplingOptions, SeedOption, TimeOption
from cli.output import complain, describe, print_styled, show_lost, time_line
from cli.prompt import ImageOption, MediaError, read_images, to_media
from cli.tools import ToolsOption, read_tools, run_tool
from quartet.client import ChatMessage, ChoiceFinished, Delta, GenerateFields, MediaPart, RequestPath, ToolCall
from quartet.client.sync import SyncClient
from quartet.errors import RouterUnavailableError, ServingError

_PROMPT = "> "
_IMAGE_COMMAND = "/image"
#: Answers with calls after one message. A model that never stops to call ends there.
_MAX_CALL_ROUNDS = 8


def chat(
    *,
    router: RouterOptions,
    model: ModelOption = "",
    path: PathOption = RequestPath.GENERATE,
    system: Annotated[str | None, typer.Option("--system", help="What the model is told first.")] = None,
    image: ImageOption = None,
    tools: ToolsOption = None,
    sampling: SamplingOptions,
    seed: SeedOption = None,
    shows_time: TimeOption = False,
) -> None:
    """Talk to a model. Ctrl-C cancels an answer, Ctrl-D leaves.

    Pictures go with the first message; a line "/image FILE" adds one to the next.

    Reasoning is dimmed. With --tools the model may call functions; configs/tools/calculator.json is an example.
    """
    media = read_images(image)
    # Once readline is imported, `input` edits lines and remembers them.
    readline.set_history_length(1000)
    fields: GenerateFields = {
        "model": model,
        "sampling": sampling.sampling(),
        "seed": seed,
        "tools": read_tools(tools),
        # All turns begin with the same tokens: a router that heeds sessions sends them where these are cached.
        "session_key": secrets.token_hex(16),
    }
    with router.sync_client() as client:
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
        question = ChatMessage("user", (*media, text) if media else text)
        printer = AnswerPrinter()
        try:
            self._messages = self._answer([*self._messages, question], printer)
        except RouterUnavailableError:
            raise
        except (ServingError, _TooManyCallsError) as error:
            # Go on as if this had not been asked, pictures included: a bad picture would fail every later message too.
            printer.end_line()
            what = describe(error) if isinstance(error, ServingError) else str(error)
            complain(what + ("; its pictures are dropped with it" if media else ""))

    def _answer(self, messages: list[ChatMessage], printer: AnswerPrinter) -> list[ChatMessage]:
        """Print the answer and run its calls until there are none; return all messages, or those before Ctrl-C.

        Raises ``ServingError``, and ``_TooManyCallsError``.
        """
        times: list[str] = []
        for _ in range(_MAX_CALL_ROUNDS):
            answer = Answer()
            try:
                self._show(messages, answer, printer, times)
                calls = answer.tool_calls
                results = [_run(call, printer) for call in calls]
            except KeyboardInterrupt:
                print_styled(" (cancelled)", fg=typer.colors.YELLOW)
                return [*messages, ChatMessage("assistant", answer.text, reasoning=answer.reasoning)]
            turn = ChatMessage("assistant", answer.text, tool_calls=calls, reasoning=answer.reasoning)
            messages = [*messages, turn, *results]
            if not calls:
                break
        else:
            raise _TooManyCallsError(f"the model called tools {_MAX_CALL_ROUNDS} times and did not answer")
        printer.end()
        if self._shows_time:
            print(*times, sep="\n", file=sys.stderr)
        return messages

    def _show(self, messages: list[ChatMessage], answer: Answer, printer: AnswerPrinter, times: list[str]) -> None:
        fields: GenerateFields = {**self._fields, "messages": messages}
        stream = self._client.generate(path=self._path, **fields)
        try:
            for part in stream:
                if isinstance(part, Delta):
                    printer.show(part, answer.add(part))
                elif isinstance(part, ChoiceFinished):
                    times.append(time_line(part.time))
        finally:
            stream.close()
        show_lost(stream.lost_routers, stream.router)


class _TooManyCallsError(Exception):
    """A model goes on to call tools."""


def _run(call: ToolCall, printer: AnswerPrinter) -> ChatMessage:
    result = run_tool(call)
    printer.show_result(result.text, is_error=result.is_error)
    return ChatMessage("tool", result.text, name=call.name, tool_call_id=call.id)


def _read_line() -> str | None:
    while True:
        try:
            return input(_PROMPT)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print_styled(" (Ctrl-D leaves)", fg=typer.colors.YELLOW)
