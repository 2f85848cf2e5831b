"""``quartet explain``: the ranks for a prompt, as a table or as JSON."""

from __future__ import annotations

import json

import pytest

from quartet.errors import ModelNotFoundError
from quartet.v1 import router_pb2, types_pb2, worker_pb2
from tests.cli.conftest import RunCli
from tests.cli.test_workers import rows
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter

DECODE, PREFILL = worker_pb2.WORKER_ROLE_DECODE, worker_pb2.WORKER_ROLE_PREFILL


def option(
    worker_id: str, role: worker_pb2.WorkerRole.ValueType, terms: dict[str, float] | None = None, **changes: object
) -> router_pb2.RankOption:
    rank = types_pb2.Rank(worker_id=worker_id, data_parallel_rank=1)
    return router_pb2.RankOption(rank=rank, role=role, terms=terms or {}, **changes)  # type: ignore[arg-type]


def explaining(*options: router_pb2.RankOption, num_waiting: int = 0) -> FakeRouter:
    router = FakeRouter()
    router.explanation = router_pb2.ExplainResponse(
        policy="kv_aware",
        model="tiny",
        model_fingerprint="f00d",
        num_prompt_tokens=1200,
        num_waiting=num_waiting,
        options=options,
    )
    return router


async def test_every_rank_has_a_row_with_what_it_costs_and_why_not(start_router: StartRouter, run_cli: RunCli) -> None:
    router = explaining(
        option(
            "prefill-0",
            PREFILL,
            {"wait_s": 0.25, "prefill_s": 0.5, "work_s": 0.0},
            is_chosen=True,
            num_matched_tokens=512,
            cost=0.75,
            cost_unit="s",
        ),
        option("decode-0", DECODE, is_chosen=True),
        option("decode-[red]1", DECODE, obstacle="no room: 3 blocks free of 19 needed"),
    )
    address = await start_router(router)
    result = await run_cli("explain", "Hi", "--session-key", "s", "--max-tokens", "9", "--router", address)
    assert (result.exit_code, result.stderr) == (0, "")
    [headline, *_] = result.stdout.splitlines()
    assert headline == "1200 prompt tokens for tiny, placed by kv_aware"
    assert rows(result.stdout) == [
        ["prefill-0/1", "prefill", "yes", "512", "0.75 s", "prefill_s 0.5, wait_s 0.25", ""],
        ["decode-0/1", "decode", "yes", "0", "-", "", ""],
        ["decode-[red]1/1", "decode", "", "0", "-", "", "no room: 3 blocks free of 19 needed"],
    ]
    assert "would wait" not in result.stdout
    [start] = router.starts
    assert (start.text, start.session_key, start.sampling.max_tokens) == ("Hi", "s", 9)


async def test_a_prompt_that_would_wait_is_shown_as_that(start_router: StartRouter, run_cli: RunCli) -> None:
    router = explaining(option("decode-0", DECODE, cost=0.5, cost_unit="s"), num_waiting=3)
    result = await run_cli("explain", "--token-ids", "1,2", "--router", await start_router(router))
    assert result.stdout.startswith("1200 prompt tokens for tiny, placed by kv_aware; 3 choices wait before it\n")
    assert result.stdout.endswith("No rank takes it now: it would wait in the router for room.\n")
    assert list(router.starts[0].token_ids.ids) == [1, 2]


async def test_the_time_that_a_prompt_would_be_kept_is_shown(start_router: StartRouter, run_cli: RunCli) -> None:
    router = explaining(option("decode-0", DECODE, is_chosen=True, cost=0.5, cost_unit="s"))
    router.explanation.wait.FromMilliseconds(12)
    result = await run_cli("explain", "Hi", "--router", await start_router(router))
    assert result.stdout.endswith("The router would keep it for 12 ms first, if nothing changed.\n")
    assert "for room" not in result.stdout


@pytest.mark.parametrize(
    ("held", "unsalted", "foreign", "line"),
    [
        (0, 0, 0, "No rank of the model has it cached."),
        (64, 0, 0, "Cached: 64 tokens at one rank of the model at most."),
        (
            96,
            0,
            0,
            "Cached: 96 tokens at one rank of the model at most; 64 where it goes, as another cost is lower there.",
        ),
        (0, 32, 0, "No rank of the model has it cached; 32 more without its cache_salt."),
        (
            64,
            0,
            16,
            "Cached: 64 tokens at one rank of the model at most; 16 more only at ranks of another model, which can't "
            "be used.",
        ),
    ],
)
async def test_what_is_cached_is_said_in_a_line(
    held: int, unsalted: int, foreign: int, line: str, start_router: StartRouter, run_cli: RunCli
) -> None:
    matched = min(held, 64)
    router = explaining(option("decode-0", DECODE, is_chosen=True, num_matched_tokens=matched))
    explanation = router.explanation
    explanation.num_held_tokens, explanation.num_unsalted_tokens = held, unsalted
    explanation.num_foreign_tokens = foreign
    result = await run_cli("explain", "Hi", "--router", await start_router(router))
    assert result.stdout.endswith(f"{line}\n")


async def test_json_holds_everything(start_router: StartRouter, run_cli: RunCli) -> None:
    router = explaining(
        option("decode-0", DECODE, {"wait_s": 0.5}, is_chosen=True, num_matched_tokens=64, cost=0.5, cost_unit="s")
    )
    result = await run_cli("explain", "Hi", "--chat", "--json", "--router", await start_router(router))
    assert json.loads(result.stdout) == {
        "policy": "kv_aware",
        "model": "tiny",
        "model_fingerprint": "f00d",
        "num_prompt_tokens": 1200,
        "num_waiting": 0,
        "wait_s": None,
        "num_held_tokens": 0,
        "num_foreign_tokens": 0,
        "num_unsalted_tokens": 0,
        "options": [
            {
                "rank": {"worker_id": "decode-0", "data_parallel_rank": 1},
                "role": "decode",
                "is_chosen": True,
                "num_matched_tokens": 64,
                "cost": 0.5,
                "cost_unit": "s",
                "terms": {"wait_s": 0.5},
                "obstacle": "",
                "reason": "",
            }
        ],
    }
    assert router.starts[0].chat.messages[0].content == "Hi"


async def test_a_refusal_is_one_line(start_router: StartRouter, run_cli: RunCli) -> None:
    router = explaining()
    router.error = ModelNotFoundError("no worker serves a model of this name", field="model")
    result = await run_cli("explain", "Hi", "--model", "x", "--router", await start_router(router))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "quartet: NOT_FOUND MODEL_NOT_FOUND (model): no worker serves a model of this name\n"
