"""``quartet chat``: a conversation, line by line."""

from __future__ import annotations

import readline
import secrets
from typing import Annotated

import typer

from cli.errors import describe, reporting_errors
from cli.options import (
    DEFAULT_ROUTER,
    MaxTokensOption,
    ModelOption,
    PathOption,
    RouterOption,
    SeedOption,
    TemperatureOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TopKOption,
    TopPOption,
    make_sampling,
    make_tls,
)
from quartet.client import ChatMessage, Delta, RequestPath, Sampling
from quartet.client.sync import SyncClient
from quartet.errors import RouterUnavailableError, ServingError

_PROMPT = "> "


def chat(
    *,
    router: RouterOption = [DEFAULT_ROUTER],  # noqa: B006 - Typer copies it
    model: ModelOption = "",
    path: PathOption = RequestPath.GENERATE,
    system: Annotated[str | None, typer.Option("--system", help="What the model is told first.")] = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
) -> None:
    """Talk to a model. Ctrl-C cancels an answer, Ctrl-D leaves."""
    # With it loaded, `input` edits lines and remembers them.
    readline.set_history_length(1000)
    with reporting_errors():
        sampling = make_sampling(max_tokens, temperature, top_p, top_k)
        with SyncClient(router, tls=make_tls(tls_ca, tls_cert, tls_key)) as client:
            # Before anything is typed: nobody wants to write into the void.
            client.list_models()
            _Conversation(client, path, model, sampling, seed, system).run()


class _Conversation:
    def __init__(
        self,
        client: SyncClient,
        path: RequestPath,
        model: str,
        sampling: Sampling,
        seed: int | None,
        system: str | None,
    ) -> None:
        self._client = client
        self._path = path
        self._model = model
        self._sampling = sampling
        self._seed = seed
        # Its turns begin with the same tokens: a router that heeds sessions has them where those are cached.
        self._session_key = secrets.token_hex(16)
        self._messages = [] if system is None else [ChatMessage("system", system)]

    def run(self) -> None:
        while (line := _read_line()) is not None:
            if line.strip():
                self._ask(line)

    def _ask(self, text: str) -> None:
        messages = [*self._messages, ChatMessage("user", text)]
        stream = self._client.generate(
            path=self._path,
            messages=messages,
            model=self._model,
            sampling=self._sampling,
            seed=self._seed,
            session_key=self._session_key,
        )
        texts: list[str] = []
        try:
            for part in stream:
                if isinstance(part, Delta):
                    print(part.text, end="", flush=True)
                    texts.append(part.text)
            print()
        except KeyboardInterrupt:
            typer.secho(" (cancelled)", fg=typer.colors.YELLOW)
        except RouterUnavailableError:
            raise
        except ServingError as error:
            # The conversation goes on as if this had not been asked.
            typer.secho(f"quartet: {describe(error)}", fg=typer.colors.RED, err=True)
            return
        finally:
            stream.close()
        self._messages = [*messages, ChatMessage("assistant", "".join(texts))]


def _read_line() -> str | None:
    while True:
        try:
            return input(_PROMPT)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            typer.secho(" (Ctrl-D leaves)", fg=typer.colors.YELLOW)
