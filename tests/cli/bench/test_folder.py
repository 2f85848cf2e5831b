"""``quartet bench --wait`` and ``--out``: a deployment that is not there yet, and the folder that a run leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest
import yaml

from cli.bench.folder import SETTINGS_FILE
from quartet.errors import InvalidRequestError, PermissionDeniedError, QueueFullError
from quartet.rpc.server import RpcServer, ServerConfig
from quartet.v1 import router_pb2
from services.topology import launch
from tests.cli.conftest import RunCli
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter, worker_status

SHORT = ("--prompt-tokens", "4", "--output-tokens", "3", "--warmup", "0")
WARM_UP_TOKENS = 30


def unframed(text: str) -> str:
    """A usage error, out of the frame that it is printed in."""
    return " ".join(text.replace("│", " ").split())


class LoggingRouter(FakeRouter):
    """Writes a line to a log as often as it answers."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log = log
        self._numbers = count()

    async def Generate(self, requests: object, context: object) -> AsyncIterator[router_pb2.GenerateResponse]:
        with self.log.open("a") as log:
            log.write(f"request {next(self._numbers)}\n")
        async for response in super().Generate(requests, context):
            yield response


class Stopped:
    """A router that is not serving yet, at its address."""

    def __init__(self) -> None:
        self.fake = FakeRouter()
        self.server = RpcServer(ServerConfig(), [self.fake.service()])

    async def start(self) -> str:
        return f"127.0.0.1:{await self.server.start()}"


@pytest.fixture
async def stopped() -> AsyncIterator[Stopped]:
    stopped = Stopped()
    yield stopped
    await stopped.server.drain(0)


async def test_a_deployment_is_waited_for_until_it_has_answered(stopped: Stopped, run_cli: RunCli) -> None:
    address = await stopped.start()
    stopped.fake.answers = [[QueueFullError("no room yet")]]
    options = (*SHORT, "--wait", "15", "--requests", "2")
    running = asyncio.create_task(run_cli("bench", "--router", address, *options))
    await stopped.server.set_serving(None, True)
    result = await running
    assert result.exit_code == 0, result.output
    # Refused, answered, and the two that are measured.
    lengths = [start.sampling.max_tokens for start in stopped.fake.starts]
    assert lengths == [WARM_UP_TOKENS, WARM_UP_TOKENS, 3, 3]
    assert "2 finished, 0 failed" in result.stdout
    assert "waiting: RESOURCE_EXHAUSTED QUEUE_FULL: no room yet" in result.stderr


@pytest.mark.parametrize(
    ("state", "is_serving", "missing"),
    [
        (router_pb2.WORKER_STATE_JOINING, True, "decode-9 (joining)"),
        (router_pb2.WORKER_STATE_READY, False, "a router that serves"),
    ],
)
async def test_the_end_of_the_wait_says_what_is_missing(
    stopped: Stopped,
    run_cli: RunCli,
    state: router_pb2.WorkerState.ValueType,
    is_serving: bool,
    missing: str,
) -> None:
    address = await stopped.start()
    await stopped.server.set_serving(None, is_serving)
    stopped.fake.workers = [worker_status("decode-9", state=state)]
    result = await run_cli("bench", "--router", address, "--wait", "0.1")
    assert (result.exit_code, stopped.fake.starts) == (1, [])
    assert result.stderr.endswith(f"quartet: not ready within 0.1 s: {missing}\n")


async def test_what_no_wait_mends_ends_it_at_once(stopped: Stopped, run_cli: RunCli) -> None:
    address = await stopped.start()
    await stopped.server.set_serving(None, True)
    stopped.fake.error = InvalidRequestError("never", field="start")
    # Its limit is longer than that of the test's commands.
    result = await run_cli("bench", "--router", address, "--wait", "60")
    assert result.exit_code == 1
    assert "INVALID_ARGUMENT INVALID_FIELD (start): never" in result.stderr


async def test_a_folder_has_the_deployment_and_for_each_load_its_figures_and_the_lines_of_its_time(
    start_router: StartRouter, run_cli: RunCli, tmp_path: Path
) -> None:
    logs, out = tmp_path / "logs", tmp_path / "new" / "out"
    logs.mkdir()
    router = LoggingRouter(logs / "decode-0.log")
    router.log.write_text("loading\n")
    (logs / "prefill-0.log").write_text("loading\n")
    settings = {"decode-0": {"engine": {"num_blocks": 7}}, "router": {}}
    (logs / SETTINGS_FILE).write_text(yaml.safe_dump(settings))
    router.workers = [worker_status("decode-0")]
    options = ("--sweep", "1,2,1", "--rounds", "3", "--out", str(out), "--log-dir", str(logs))
    labels = ("--label", "kind=disagg", "--label", "total_gpus=8")
    result = await run_cli("bench", "--router", await start_router(router), *SHORT, *options, *labels)
    assert result.exit_code == 0, result.output

    deployment = json.loads((out / "deployment.json").read_text())
    assert deployment["labels"] == {"kind": "disagg", "total_gpus": "8"}
    assert deployment["command"].startswith("quartet") and deployment["versions"]["quartet"]
    assert (deployment["model"]["name"], deployment["processes"]) == ("tiny", settings)
    [worker] = deployment["workers"]
    assert (worker["worker_id"], worker["role"], worker["block_size"]) == ("decode-0", "decode", 32)

    points = json.loads((out / "bench.json").read_text())["points"]
    loads = {"concurrency_1": 3, "concurrency_2": 6, "concurrency_1_2": 3}
    assert {path.name for path in out.iterdir()} == {"deployment.json", "bench.json", *loads}
    num_before = 0
    for (name, num_requests), point in zip(loads.items(), points, strict=True):
        assert json.loads((out / name / "result.json").read_text()) == point
        assert point["requests"]["finished"] == num_requests
        lines = [f"request {number}\n" for number in range(num_before, num_before + num_requests)]
        assert (out / name / "logs" / "decode-0.log").read_text() == "".join(lines)
        assert (out / name / "logs" / "prefill-0.log").read_text() == ""
        num_before += num_requests

    for of_killed_run in (False, True):
        if of_killed_run:
            (out / "bench.json").unlink()
        again = await run_cli("bench", "--router", "127.0.0.1:1", "--out", str(out))
        assert again.exit_code == 2
        assert "holds results already" in unframed(again.stderr)


async def test_a_log_that_began_anew_is_copied_from_its_start(
    start_router: StartRouter, run_cli: RunCli, tmp_path: Path
) -> None:
    class Rotating(LoggingRouter):
        async def Generate(self, requests: object, context: object) -> AsyncIterator[router_pb2.GenerateResponse]:
            self.log.write_text("")
            async for response in super().Generate(requests, context):
                yield response

    router = Rotating(tmp_path / "decode-0.log")
    router.log.write_text("a long line before the load\n")
    options = ("--requests", "1", "--out", str(tmp_path / "out"), "--log-dir", str(tmp_path))
    result = await run_cli("bench", "--router", await start_router(router), *SHORT, *options)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out/concurrency_1/logs/decode-0.log").read_text() == "request 0\n"


async def test_a_client_that_may_not_list_workers_writes_the_rest(
    start_router: StartRouter, run_cli: RunCli, tmp_path: Path
) -> None:
    class Closed(FakeRouter):
        async def ListWorkers(self, request: object, context: object) -> router_pb2.ListWorkersResponse:
            raise PermissionDeniedError("operators only")

    options = ("--requests", "1", "--out", str(tmp_path / "out"))
    result = await run_cli("bench", "--router", await start_router(Closed()), *SHORT, *options)
    assert result.exit_code == 0, result.output
    deployment = json.loads((tmp_path / "out/deployment.json").read_text())
    assert (deployment["workers"], deployment["model"]["name"]) == (None, "tiny")


async def test_a_folder_without_logs_and_figures_that_cannot_be_written_are_reported(
    start_router: StartRouter, run_cli: RunCli, tmp_path: Path
) -> None:
    address = await start_router(FakeRouter())
    result = await run_cli(
        "bench", "--router", address, *SHORT, "--out", str(tmp_path / "a"), "--log-dir", str(tmp_path)
    )
    assert result.exit_code == 2 and "holds no *.log" in unframed(result.stderr)
    out = tmp_path / "b"
    (out / "concurrency_1" / "result.json").mkdir(parents=True)
    result = await run_cli("bench", "--router", address, *SHORT, "--requests", "1", "--out", str(out))
    assert result.exit_code == 1
    assert "result.json: Is a directory" in result.stderr
    assert "1 finished" in result.stdout and (out / "bench.json").is_file()


def test_settings_are_read_where_up_keeps_them() -> None:
    assert SETTINGS_FILE == launch.SETTINGS_FILE
