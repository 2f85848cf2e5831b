"""``quartet generate``: what it asks for, what it prints, how it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quartet.client import RequestPath
from quartet.errors import InvalidRequestError, QueueFullError
from tests.cli.conftest import RunCli
from tests.client.breaking_router import WORDS, BreakingRouter, KnownAnswer, Script, serving
from tests.client.conftest import StartRouter
from tests.client.fake_router import REQUEST_ID, FakeRouter
from tests.stopwatch import Stopwatch


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


async def test_the_answers_text_is_printed(router: FakeRouter, start_router: StartRouter, run_cli: RunCli) -> None:
    result = await run_cli("generate", "Hi", "--router", await start_router(router))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "one two three\n", "")
    [start] = router.starts
    assert start.text == "Hi"
    assert not start.HasField("seed")


@pytest.mark.parametrize("path", list(RequestPath))
async def test_every_path_prints_the_same(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli, path: RequestPath
) -> None:
    result = await run_cli("generate", "Hi", "--path", path, "--router", await start_router(router))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "one two three\n", "")
    assert (router.num_sessions, router.worker.num_streams) == (
        int(path is RequestPath.SESSION),
        int(path is RequestPath.DIRECT),
    )


@pytest.mark.parametrize("path", [RequestPath.GENERATE, RequestPath.SESSION])
async def test_an_answer_whose_router_is_lost_goes_on_and_says_where(run_cli: RunCli, path: RequestPath) -> None:
    script = Script(KnownAnswer([WORDS]), breaks=[4])
    async with serving(BreakingRouter(script), BreakingRouter(script)) as served:
        first, second = served.addresses
        result = await run_cli("generate", "Hi", "--path", path, "--router", f"{first}, {second}")
    assert (result.exit_code, result.stdout) == (0, "".join(delta.text for delta in WORDS) + "\n")
    assert result.stderr == f"lost the router at {first}; {second} went on\n"


async def test_options_become_the_requests_fields(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli
) -> None:
    options = (
        "--model tiny --max-tokens 7 --temperature 0 --top-p 0.5 --top-k 3 --seed 11 --timeout 9 --stop . --stop !"
        " --ttft-target 250 --itl-target 20"
    )
    result = await run_cli("generate", "Hi", "--chat", *options.split(), "--router", await start_router(router))
    assert result.exit_code == 0
    [start] = router.starts
    assert [(message.role, message.content) for message in start.chat.messages] == [("user", "Hi")]
    sampling = start.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.0, 0.5, 3)
    assert (start.model, start.seed, start.timeout.seconds) == ("tiny", 11, 9)
    assert (start.ttft_target.ToMilliseconds(), start.itl_target.ToMilliseconds()) == (250, 20)
    assert list(start.text_options.stop_strings) == [".", "!"]


async def test_a_schema_in_a_file_guides_the_answer(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli, tmp_path: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "boolean"}')
    address = await start_router(router)
    assert (await run_cli("generate", "Hi", "--json-schema", str(schema), "--router", address)).exit_code == 0
    assert router.starts[0].sampling.guided.json_schema == '{"type": "boolean"}'
    refused = await run_cli("generate", "Hi", "--json-schema", str(tmp_path / "none"), "--router", address)
    assert refused.exit_code == 2 and "No such file" in refused.stderr


async def test_a_prompt_can_come_from_standard_input(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli
) -> None:
    await run_cli("generate", "-", "--router", await start_router(router), input="two\nlines")
    assert router.starts[0].text == "two\nlines"


async def test_json_holds_the_whole_answer(router: FakeRouter, start_router: StartRouter, run_cli: RunCli) -> None:
    result = await run_cli("generate", "Hi", "--json", "--seed", "3", "--router", await start_router(router))
    answer = json.loads(result.stdout)
    assert (answer["request_id"], answer["seed"], answer["text"]) == (REQUEST_ID, 3, "one two three")
    assert (answer["token_ids"], answer["finish_reason"]) == ([100, 101, 102], "length")
    assert answer["usage"]["num_output_tokens"] == 3
    time = answer["time"]
    assert time["first_token_s"] == 0.25
    assert (time["transfer_way"], time["transfer_bytes"], time["transfer_gb_per_s"]) == ("shm", 250_000_000, 2.0)
    [placement] = answer["placements"]
    assert placement["prefill"] == {"worker_id": "prefill-0", "data_parallel_rank": 0}
    assert (placement["decode"]["worker_id"], placement["num_matched_tokens"], placement["cost"]) == (
        "decode-0",
        3,
        0.25,
    )


async def test_where_the_time_went_is_printed_beside_the_answer(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli
) -> None:
    result = await run_cli("generate", "Hi", "--time", "--router", await start_router(router))
    assert result.stdout == "one two three\n"
    assert result.stderr == "time: transfer 125 ms (250 MB by shm 2 GB/s), first token 250 ms, total 500 ms\n"


async def test_a_prompt_can_come_from_a_file_or_as_token_ids(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli, tmp_path: Path
) -> None:
    address = await start_router(router)
    (tmp_path / "prompt.txt").write_text("two\nlines é", encoding="utf-8")
    await run_cli("generate", "--file", str(tmp_path / "prompt.txt"), "--session-key", "s", "--router", address)
    await run_cli("generate", "--token-ids", "5, 7,9", "--router", address)
    assert (router.starts[0].text, router.starts[0].session_key) == ("two\nlines é", "s")
    assert list(router.starts[1].token_ids.ids) == [5, 7, 9]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["Hi", "--token-ids", "1"], "give one of"),
        (["--token-ids", "1,x"], "whole numbers"),
        (["--token-ids", "1", "--chat"], "--chat takes text"),
        (["--file", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "explain"])
async def test_a_wrong_prompt_is_exit_code_2(run_cli: RunCli, command: str, arguments: list[str], shown: str) -> None:
    result = await run_cli(command, *arguments, "--router", "127.0.0.1:1")
    assert result.exit_code == 2
    assert shown in " ".join(result.stderr.replace("│", "").split())


async def test_a_failure_is_one_line_with_status_and_field(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli
) -> None:
    router.error = InvalidRequestError("the prompt is empty", field="text")
    address = await start_router(router)
    result = await run_cli("generate", "", "--router", address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "quartet: INVALID_ARGUMENT INVALID_FIELD (text): the prompt is empty\n"

    router.error = QueueFullError("the queue is full", retry_delay_s=1.5)
    result = await run_cli("generate", "Hi", "--router", address)
    assert result.stderr == "quartet: RESOURCE_EXHAUSTED QUEUE_FULL: the queue is full (try again in 1.5 s)\n"


async def test_nonsense_is_reported_without_a_router(run_cli: RunCli) -> None:
    result = await run_cli("generate", "Hi", "--top-p", "2", "--router", "127.0.0.1:1")
    assert result.exit_code == 1
    assert (
        result.stderr
        == "quartet: INVALID_ARGUMENT INVALID_FIELD (sampling.top_p): top_p must be in (0.0, 1.0], not 2.0\n"
    )


@pytest.mark.parametrize(
    "command", [["generate", "Hi"], ["explain", "Hi"], ["workers"], ["workers", "--watch"], ["chat"]]
)
async def test_a_missing_router_is_soon_reported_in_one_line(
    run_cli: RunCli, free_port: Callable[[], int], command: list[str]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    stopwatch = Stopwatch()
    result = await run_cli(*command, "--router", address)
    assert stopwatch.seconds < 5
    assert result.exit_code == 1
    assert result.stderr.startswith(f"quartet: UNAVAILABLE ROUTER_UNAVAILABLE: no router answers at {address}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["generate"], ["generate", "Hi", "--max-tokens", "x"], ["generate", "Hi", "--tls-ca", "a"], ["no"]]
)
async def test_a_wrong_command_line_is_exit_code_2(run_cli: RunCli, arguments: list[str]) -> None:
    assert (await run_cli(*arguments)).exit_code == 2


async def test_the_version_is_shown(run_cli: RunCli) -> None:
    result = await run_cli("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("quartet 0.")
