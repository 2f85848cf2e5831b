"""Prefill in a process of its own, as it is deployed: hand-offs cross processes, and end with them."""

from __future__ import annotations

import ast
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fork_server import ForkedProcess, ForkServer
from tests.e2e.process import wait_until
from tests.fakes.driving import MODEL, STORY, WAIT_S, decode_engine, greedy, params
from tests.fakes.installation import DIRECTORY, installed

with installed():
    from tensorrt_llm._stand_in.control import control
    from tensorrt_llm.executor.utils import RequestError
    from tensorrt_llm.llmapi import DisaggregatedParams


@contextmanager
def prefill_process(fork_server: ForkServer, log: Path) -> Iterator[ForkedProcess]:
    environment = {**os.environ, "PYTHONPATH": str(DIRECTORY), "OMP_NUM_THREADS": "1"}
    process = fork_server.spawn(["tests.fakes.prefill_alone", MODEL, STORY], environment, log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)


def hand_offs(log: Path) -> list[str]:
    """Those that were printed so far, in whole lines."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [line.removeprefix("hand-off ") for line in lines if line.startswith("hand-off ") and line.endswith("\n")]


def submit(llm: Any, line: str) -> Any:
    token_ids, first, request_id, state = ast.literal_eval(line)
    disagg = DisaggregatedParams(
        request_type="generation_only", first_gen_tokens=first, ctx_request_id=request_id, opaque_state=state
    )
    return llm.generate_async(token_ids, params(12), disaggregated_params=disagg)


@pytest.mark.e2e
def test_prefill_may_run_in_another_process_and_die(fork_server: ForkServer, tmp_path: Path) -> None:
    decode, log = decode_engine(), tmp_path / "log"
    with prefill_process(fork_server, log) as process:
        wait_until(lambda: len(hand_offs(log)) == 2, WAIT_S, log.read_text)
        first, second = hand_offs(log)
        assert submit(decode, first).result().outputs[0].token_ids == greedy(STORY, 12)
        control.of(decode).transfers.close()
        handle = submit(decode, second)
        control.of(decode).transfers.wait_reached()
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
        control.of(decode).transfers.open()
        with pytest.raises(RequestError, match="its process died"):
            handle.result()
    # What a killed process leaves on disk, a test must clear away.
    shutil.rmtree(Path(os.fsdecode(ast.literal_eval(second)[3][4:])).parent)
