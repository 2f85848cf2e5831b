"""A router, a client and the command line need neither torch nor transformers; a worker's engine alone does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import yaml

from quartet.v1 import router_pb2, router_pb2_grpc
from services.topology.launch import free_port
from tests.e2e import placed
from tests.e2e.process import wait_until
from tests.e2e.stack import START_TIMEOUT_S, Stack

_HEAVY = {"torch", "transformers", "safetensors"}
# In the order of what they import, so that the first one of which it prints something is to blame.
_IMPORTS = f"""
import importlib, sys, typer.main
def report(name):
    print(name, *sorted({_HEAVY} & set(sys.modules)))
for name in ("cli.app", "quartet.client", "quartet.client.sync", "quartet.client.direct", "router.__main__"):
    importlib.import_module(name)
    report(name)
# A subcommand is imported when it is called.
for name, command in typer.main.get_command(sys.modules["cli.app"].app).commands.items():
    command.load()
    report(name)
"""


def test_no_import_of_router_client_or_command_imports_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=150, check=True)
    lines = ended.stdout.splitlines()
    assert lines[4:6] == ["router.__main__", "up"]
    assert [line for line in lines if " " in line] == []


def test_a_router_at_work_has_no_torch_in_its_memory(stack: Stack, tmp_path: Path) -> None:
    # The stack's own routers are forked from a process that has imported torch; this one starts as a person starts it.
    with _started_router(stack, tmp_path) as (pid, channel):
        wait_until(lambda: _num_ready_workers(channel) == 2, START_TIMEOUT_S, stack.logs)
        assert len(placed.generate(channel)) == placed.NUM_TOKENS
        mapped = _mapped_files(pid)
    assert any("libtorch" in path for path in _mapped_files(stack.processes["decode-0"].pid)), "maps are misread"
    for name in ("libtorch", "/torch/", "/transformers/", "/safetensors/"):
        assert not [path for path in mapped if name in path]


@contextmanager
def _started_router(stack: Stack, directory: Path) -> Iterator[tuple[int, grpc.Channel]]:
    """One more router of ``stack``, as a process that ends with the block, and a channel to it."""
    settings = yaml.safe_load(stack.processes["router"].config.read_text())
    settings["server"]["address"], settings["http_address"] = (f"127.0.0.1:{free_port()}" for _ in range(2))
    config = directory / "router.yaml"
    config.write_text(yaml.safe_dump(settings))
    process = subprocess.Popen([sys.executable, "-m", "router", "--config", str(config)])
    try:
        with grpc.insecure_channel(settings["server"]["address"]) as channel:
            grpc.channel_ready_future(channel).result(START_TIMEOUT_S)
            yield process.pid, channel
    finally:
        process.kill()
        process.wait(60)


def _num_ready_workers(router: grpc.Channel) -> int:
    workers = router_pb2_grpc.RouterServiceStub(router).ListWorkers(router_pb2.ListWorkersRequest(), timeout=90).workers
    return sum(worker.state == router_pb2.WORKER_STATE_READY for worker in workers)


def _mapped_files(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
