"""``quartet explain``: shows where a prompt would go now, and why, without running it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from cli.options import MaxTokensOption, ModelOption, RouterOptions
from cli.output import json_value, open_console
from cli.prompt import PromptOptions
from quartet.client import Explanation, GenerateFields, RankOption, Sampling

# Wide enough for whole lines where the output is no terminal.
_PIPE_WIDTH = 240


def explain(
    *,
    router: RouterOptions,
    model: ModelOption = "",
    prompt: PromptOptions,
    max_tokens: MaxTokensOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Show where a prompt would go now, and why; nothing is run."""
    text, given = prompt.read()
    fields: GenerateFields = {**given, "model": model, "sampling": Sampling(max_tokens=max_tokens)}
    explanation = asyncio.run(_ask(router, text, fields))
    if as_json:
        print(json.dumps(json_value(explanation), ensure_ascii=False))
    else:
        _show(explanation)


async def _ask(router: RouterOptions, prompt: str | None, fields: GenerateFields) -> Explanation:
    async with await router.client() as client:
        return await client.explain(prompt, **fields)


def _show(explanation: Explanation) -> None:
    console = open_console(pipe_width=_PIPE_WIDTH)
    console.print(Text(_headline(explanation)))
    console.print(option_table(explanation))
    console.print(reuse_line(explanation))
    if explanation.wait_s is not None:
        console.print(f"The router would keep it for {explanation.wait_s * 1e3:.3g} ms first, if nothing changed.")
    elif not any(option.is_chosen for option in explanation.options):
        console.print("No rank takes it now: it would wait in the router for room.")


def _headline(explanation: Explanation) -> str:
    line = f"{explanation.num_prompt_tokens} prompt tokens for {explanation.model}, placed by {explanation.policy}"
    return line + (f"; {explanation.num_waiting} choices wait before it" if explanation.num_waiting else "")


def reuse_line(explanation: Explanation) -> str:
    """What is cached of the prompt, and why it is no more."""
    held, foreign, unsalted = (
        explanation.num_held_tokens,
        explanation.num_foreign_tokens,
        explanation.num_unsalted_tokens,
    )
    chosen = [option.num_matched_tokens for option in explanation.options if option.is_chosen]
    parts = [
        f"Cached: {held} tokens at one rank of the model at most" if held else "No rank of the model has it cached"
    ]
    if chosen and max(chosen) < held:
        parts.append(f"{max(chosen)} where it goes, as another cost is lower there")
    if unsalted:
        parts.append(f"{unsalted} more without its cache_salt")
    if foreign:
        parts.append(f"{foreign} more only at ranks of another model, which can't be used")
    return "; ".join(parts) + "."


def option_table(explanation: Explanation) -> Table:
    """One row a rank."""
    table = Table()
    for name in ("rank", "role", "chosen"):
        table.add_column(name, no_wrap=name == "rank")
    for name in ("matched tokens", "cost"):
        table.add_column(name, justify="right")
    for name in ("made of", "why"):
        table.add_column(name)
    for option in explanation.options:
        table.add_row(
            *map(Text, _cells(option)), style="green" if option.is_chosen else "dim" if option.obstacle else ""
        )
    return table


def _cells(option: RankOption) -> list[str]:
    return [
        str(option.rank),
        option.role,
        "yes" if option.is_chosen else "",
        str(option.num_matched_tokens),
        "-" if option.cost is None else f"{option.cost:.4g} {option.cost_unit}",
        _terms(option.terms),
        option.obstacle or option.reason,
    ]


def _terms(terms: Mapping[str, float]) -> str:
    """The terms that are not 0, largest first."""
    ordered = sorted(terms.items(), key=lambda term: -abs(term[1]))
    return ", ".join(f"{name} {value:.3g}" for name, value in ordered if value)
