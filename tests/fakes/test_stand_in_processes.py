"""Prefill in a process of its own, as it is deployed: hand-offs cross processes, and end with them."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.driving import MODEL, STORY, WAIT_S, decode_engine, greedy, params
from tests.fakes.installation import DIRECTORY, installed

with installed():
    from tensorrt_llm._stand_in.control import control
    from tensorrt_llm.executor.utils import RequestError
    from tensorrt_llm.llmapi import DisaggregatedParams

_PREFILL = """
import sys, tensorrt_llm
from tensorrt_llm.llmapi import DisaggregatedParams
llm = tensorrt_llm.LLM(sys.argv[1], cache_transceiver_config={"backend": "UCX"}, disable_overlap_scheduler=True)
for _ in range(2):
    only = DisaggregatedParams(request_type="context_only")
    result = llm.generate(sys.argv[2], tensorrt_llm.SamplingParams(), disaggregated_params=only)
    given = result.outputs[0].disaggregated_params
    print((result.prompt_token_ids, given.first_gen_tokens, given.ctx_request_id, given.opaque_state), flush=True)
sys.stdin.read()
"""


@contextmanager
def prefill_process() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _PREFILL, MODEL, STORY]
    environment = {**os.environ, "PYTHONPATH": str(DIRECTORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def submit(llm: Any, line: str) -> Any:
    token_ids, first, request_id, state = ast.literal_eval(line)
    disagg = DisaggregatedParams(
        request_type="generation_only", first_gen_tokens=first, ctx_request_id=request_id, opaque_state=state
    )
    return llm.generate_async(token_ids, params(12), disaggregated_params=disagg)


@pytest.mark.e2e
def test_prefill_may_run_in_another_process_and_die() -> None:
    decode = decode_engine()
    with prefill_process() as process:
        assert process.stdout is not None
        first, second = process.stdout.readline(), process.stdout.readline()
        assert submit(decode, first).result().outputs[0].token_ids == greedy(STORY, 12)
        control.of(decode).transfers.close()
        handle = submit(decode, second)
        control.of(decode).transfers.wait_reached()
        process.kill()
        process.wait(WAIT_S)
        control.of(decode).transfers.open()
        with pytest.raises(RequestError, match="its process died"):
            handle.result()
    # What a killed process leaves on disk, a test must clear away.
    shutil.rmtree(Path(os.fsdecode(ast.literal_eval(second)[3][4:])).parent)
