"""Benchmarking clients that others wrote, unmodified and in environments of their own (``make test-clients``)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.topology.launch import free_port
from tests.e2e.conftest import StartStack
from tests.e2e.stack import REMOTE_PREFILL, StackConfig

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "models/tiny/checkpoint"
NUM_REQUESTS, NUM_TOKENS = 24, 16
#: They take half a minute to begin, and longer on a busy machine.
WAIT_S = 300.0


@pytest.fixture(scope="module")
def url(start_stack: StartStack) -> str:
    """A router with HTTP before a prefill and a decode worker."""
    port = free_port()
    start_stack(StackConfig(routers={"router": {**REMOTE_PREFILL, "http.port": port}}))
    return f"http://127.0.0.1:{port}"


async def run(program: str, *arguments: str) -> str:
    """What it prints; it must end well."""
    binary = ROOT / ".clients" / program / "bin" / program
    process = await asyncio.create_subprocess_exec(
        binary, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=ROOT
    )
    try:
        async with asyncio.timeout(WAIT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_aiperf_runs_the_command_that_is_documented_for_disaggregated_serving(url: str, tmp_path: Path) -> None:
    await run(
        "aiperf",
        *("profile", "--model", "tiny", "--tokenizer", str(TOKENIZER), "--endpoint-type", "chat"),
        *("--endpoint", "/v1/chat/completions", "--streaming", "--url", url.removeprefix("http://")),
        *("--synthetic-input-tokens-mean", "100", "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", str(NUM_TOKENS), "--output-tokens-stddev", "0"),
        *("--extra-inputs", f"max_tokens:{NUM_TOKENS}", "--extra-inputs", f"min_tokens:{NUM_TOKENS}"),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", '{"nvext":{"ignore_eos":true}}'),
        *("--concurrency", "4", "--request-count", str(NUM_REQUESTS), "--warmup-request-count", "4"),
        *("--num-dataset-entries", "8", "--random-seed", "100", "--artifact-dir", str(tmp_path), "-v"),
        *("-H", "Authorization: Bearer NOT USED", "-H", "Accept: text/event-stream"),
    )
    report: Any = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert not report["error_summary"]
    tokens = report["usage_completion_tokens"]
    assert tokens["min"] == tokens["max"] == NUM_TOKENS
    assert 0.0 < report["time_to_first_token"]["avg"] < report["request_latency"]["avg"]


async def test_guidellm_finds_the_model_and_streams_from_it(url: str, tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    await run(
        "guidellm",
        *("run", "--backend", f"kind=openai_http,target={url}", "--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={NUM_TOKENS}"),
        *("--output", f"kind=json,path={report_file}", "--disable-console-interactive"),
    )
    [benchmark] = json.loads(report_file.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    assert benchmark["metrics"]["output_token_count"]["successful"]["median"] == NUM_TOKENS
