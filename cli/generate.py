"""``quartet generate``: sends one prompt and prints the answer as it comes."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer

from cli.options import (
    DEFAULT_ROUTER,
    MaxTokensOption,
    ModelOption,
    PathOption,
    RouterOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    TimeoutOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TopKOption,
    TopPOption,
    make_sampling,
    make_tls,
)
from cli.output import json_value, reporting_errors
from cli.prompt import (
    ChatOption,
    FileOption,
    ImageOption,
    PromptArgument,
    SessionKeyOption,
    TokenIdsOption,
    read_prompt,
)
from quartet.client import Completion, Delta, GenerateFields, QuartetClient, RequestPath
from quartet.rpc.channels import TlsConfig


def generate(
    prompt: PromptArgument = None,
    *,
    router: RouterOption = [DEFAULT_ROUTER],  # noqa: B006 - Typer copies it
    model: ModelOption = "",
    path: PathOption = RequestPath.GENERATE,
    is_chat: ChatOption = False,
    image: ImageOption = None,
    file: FileOption = None,
    token_ids: TokenIdsOption = None,
    session_key: SessionKeyOption = "",
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    timeout_s: TimeoutOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as one JSON object.")] = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
) -> None:
    """Continue a text. Tokens are printed as they come.

    With --chat, pictures come before the text. Without it, a prompt holds the model's placeholder for each of them.
    """
    text, given = read_prompt(prompt, file, token_ids, image, is_chat=is_chat)
    with reporting_errors():
        fields: GenerateFields = {
            **given,
            "model": model,
            "sampling": make_sampling(max_tokens, temperature, top_p, top_k),
            "seed": seed,
            "stop": stop or (),
            "timeout_s": timeout_s,
            "session_key": session_key,
        }
        tls = make_tls(tls_ca, tls_cert, tls_key)
        asyncio.run(_run(router, tls, path, text, fields, as_json=as_json))


async def _run(
    routers: list[str],
    tls: TlsConfig | None,
    path: RequestPath,
    prompt: str | None,
    fields: GenerateFields,
    *,
    as_json: bool,
) -> None:
    async with QuartetClient(routers, tls=tls) as client:
        if as_json:
            print(json.dumps(_to_json(await client.complete(prompt, path=path, **fields)), ensure_ascii=False))
            return
        async for part in client.generate(prompt, path=path, **fields):
            if isinstance(part, Delta):
                print(part.text, end="", flush=True)
        print()


def _to_json(completion: Completion) -> dict[str, object]:
    [choice] = completion.choices
    return {
        "request_id": completion.accepted.request_id,
        "seed": completion.accepted.seed,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finished.reason,
        "stop_string": choice.finished.stop_string,
        "encode": json_value(completion.accepted.encode),
        "placements": json_value(completion.accepted.choices),
        "usage": json_value(choice.finished.usage),
        "time": json_value(choice.finished.time),
    }
