"""``quartet generate``: sends one prompt and prints the answer as it comes."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated

import typer

from cli.answer import Answer, AnswerPrinter
from cli.options import (
    ItlTargetOption,
    ModelOption,
    PathOption,
    RouterOptions,
    SamplingOptions,
    SeedOption,
    TimeOption,
    TimeoutOption,
    TtftTargetOption,
    seconds,
)
from cli.output import json_value, show_lost, time_line
from cli.prompt import PromptOptions
from quartet.client import ChoiceFinished, Completion, Delta, GenerateFields, RequestPath


def generate(
    *,
    router: RouterOptions,
    model: ModelOption = "",
    path: PathOption = RequestPath.GENERATE,
    prompt: PromptOptions,
    sampling: SamplingOptions,
    seed: SeedOption = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Text that ends the answer. May be given several times.")
    ] = None,
    timeout_s: TimeoutOption = None,
    ttft_target_ms: TtftTargetOption = None,
    itl_target_ms: ItlTargetOption = None,
    shows_time: TimeOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as one JSON object.")] = False,
) -> None:
    """Continue a text. Tokens are printed as they come.

    With --chat, pictures come before the text, and the model's reasoning goes to standard error. Without it, a prompt
    holds the model's placeholder for each picture.
    """
    text, given = prompt.read()
    fields: GenerateFields = {
        **given,
        "model": model,
        "sampling": sampling.sampling(),
        "seed": seed,
        "stop": stop or (),
        "timeout_s": timeout_s,
        "ttft_target_s": seconds(ttft_target_ms),
        "itl_target_s": seconds(itl_target_ms),
    }
    asyncio.run(_run(router, path, text, fields, shows_time=shows_time, as_json=as_json))


async def _run(
    router: RouterOptions,
    path: RequestPath,
    prompt: str | None,
    fields: GenerateFields,
    *,
    shows_time: bool,
    as_json: bool,
) -> None:
    async with await router.client() as client:
        if as_json:
            print(json.dumps(_to_json(await client.complete(prompt, path=path, **fields)), ensure_ascii=False))
            return
        line = ""
        answer, printer = Answer(), AnswerPrinter(keeps_text_apart=True)
        stream = client.generate(prompt, path=path, **fields)
        async for part in stream:
            if isinstance(part, Delta):
                printer.show(part, answer.add(part))
            elif isinstance(part, ChoiceFinished):
                line = time_line(part.time)
        printer.end()
        show_lost(stream.lost_routers, stream.router)
        if shows_time:
            print(line, file=sys.stderr)


def _to_json(completion: Completion) -> dict[str, object]:
    [choice] = completion.choices
    return {
        "request_id": completion.accepted.request_id,
        "seed": completion.accepted.seed,
        "text": choice.text,
        "reasoning": choice.reasoning,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finished.reason,
        "stop_string": choice.finished.stop_string,
        "encode": json_value(completion.accepted.encode),
        "placements": json_value(completion.accepted.choices),
        "usage": json_value(choice.finished.usage),
        "time": {**json_value(choice.finished.time), "transfer_gb_per_s": choice.finished.time.transfer_gb_per_s},
    }
