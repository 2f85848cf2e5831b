"""The Go client: its own tests, against a router of theirs, and then against a fleet with TLS and pictures."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quartet.client import ChatMessage, QuartetClient, Sampling, read_media
from quartet.rpc.channels import TlsConfig
from tests.certificates import CertificateAuthority
from tests.e2e.conftest import StartStack
from tests.e2e.process import wait_until
from tests.e2e.stack import REMOTE_PREFILL, Stack, StackConfig

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "models/tiny/pictures/shapes.jpg"
QUESTION = "Describe the picture."
PROMPTS = ("Once upon a time", "The capital of France is", "What is 17 plus 25?", "She loved to sing")
NUM_TOKENS = 24
NUM_PICTURE_TOKENS = 72
#: Without what only debuggers read, which takes the linker half of its time.
LINKED = ("-ldflags", "-s -w")
BUILD_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 150.0
RETURN_S = 40.0
#: Of a router that only the slow reader uses: another's reader may be late on a busy machine.
STALL_TIMEOUT_S = 4.0


@dataclass(frozen=True)
class Programs:
    """The client's tests and its example, compiled."""

    tests: Path
    example: Path


@dataclass(frozen=True)
class Fleet:
    """A fleet with TLS, and what the Python client gets of it.

    Attributes:
        client: who asks.
        file: all that the tests in Go are to know, as JSON.
        caption: of the picture.
    """

    stack: Stack
    client: TlsConfig
    file: Path
    caption: str


@pytest.fixture(scope="module")
def programs(go: Path, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    directory = tmp_path_factory.mktemp("go")
    programs = Programs(tests=directory / "client.test", example=directory / "quartet-go")
    for command in (
        ["test", "-c", *LINKED, "-o", str(programs.tests), "./clients/go"],
        ["build", *LINKED, "-o", str(programs.example), "./clients/go/cmd/quartet-go"],
    ):
        built = subprocess.run(
            [go, *command], cwd=ROOT, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
        assert built.returncode == 0, built.stderr
    return programs


@pytest.fixture(scope="module", autouse=True)
def own_tests(programs: Programs) -> Iterator[subprocess.Popen[str]]:
    """The client's own tests, which run beside the others: one waits 15 s for a host that is gone."""
    running = start_tests(programs, "^Test[^L]|^TestL[^i]", os.environ)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


@pytest.fixture(scope="module")
def fleet(go: Path, start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    authority = CertificateAuthority(tmp_path_factory.mktemp("certificates"))

    def issue(kind: str, name: str) -> TlsConfig:
        return authority.issue(name, f"quartet://default/{kind}/{name}")

    workers = {name: issue("worker", name) for name in ("encode-0", "prefill-0", "decode-0")}
    operator = issue("operator", "bob")
    config = StackConfig(
        num_encode=1,
        routers={"router": REMOTE_PREFILL, "router-stalls": {**REMOTE_PREFILL, "stall_timeout_s": STALL_TIMEOUT_S}},
        worker={"transfer.ways": ["grpc"]},  # shared memory has no TLS
        tls=workers | {name: issue("router", name) for name in ("router", "router-stalls")},
        operator=operator,
    )
    stack, client = start_stack(config), issue("client", "alice")
    told = asyncio.run(ask_in_python(stack.router_address, client))
    told |= {
        "operator_cert": str(operator.cert_file),
        "operator_key": str(operator.key_file),
        "stalling_address": stack.processes["router-stalls"].grpc_address,
    }
    file = tmp_path_factory.mktemp("live") / "fleet.json"
    file.write_text(json.dumps(told))
    return Fleet(stack, client, file, told["picture_text"])


async def ask_in_python(address: str, identity: TlsConfig) -> dict[str, Any]:
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    look = Sampling(temperature=0.0, max_tokens=NUM_PICTURE_TOKENS)
    messages = [ChatMessage("user", (read_media(PICTURE), QUESTION))]
    async with QuartetClient(address, tls=identity) as client:
        answers = {prompt: (await client.complete(prompt, sampling=sampling)).choices[0] for prompt in PROMPTS}
        caption = (await client.complete(messages=messages, sampling=look)).choices[0]
    return {
        "address": address,
        "ca": str(identity.ca_file),
        "cert": str(identity.cert_file),
        "key": str(identity.key_file),
        "answers": {prompt: answer.token_ids for prompt, answer in answers.items()},
        "stall_timeout_s": STALL_TIMEOUT_S,
        "picture": str(PICTURE),
        "question": QUESTION,
        "picture_ids": caption.token_ids,
        "picture_text": caption.text,
    }


def run_tests(programs: Programs, pattern: str, fleet: Fleet) -> list[str]:
    """Run the tests in Go on ``fleet`` whose names match; returns the names of those that passed."""
    return passed(start_tests(programs, pattern, os.environ | {"QUARTET_GO_LIVE": str(fleet.file)}))


def start_tests(programs: Programs, pattern: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [programs.tests, "-test.v", "-test.run", pattern]
    return subprocess.Popen(
        command,
        cwd=ROOT / "clients/go",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def passed(running: subprocess.Popen[str]) -> list[str]:
    """The names of the tests that passed, once all have ended."""
    try:
        output, _ = running.communicate(timeout=RUN_TIMEOUT_S)
    finally:
        running.kill()
    assert running.returncode == 0, output
    return re.findall(r"^--- PASS: (\w+)", output, re.MULTILINE)


def example(programs: Programs, fleet: Fleet, *arguments: str) -> list[str]:
    """The command line of the example, with the certificates that the fleet asks for."""
    tls = fleet.client
    files = ("-ca", str(tls.ca_file), "-cert", str(tls.cert_file), "-key", str(tls.key_file))
    return [str(programs.example), "-address", fleet.stack.router_address, *files, "-temperature", "0", *arguments]


def go_block(page: str) -> str:
    """The first lines of Go on a page, without the indentation of a list."""
    found = re.search(r"^( *)```go\n(.*?)\n\1```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return re.sub(f"^{found[1]}", "", found[2], flags=re.MULTILINE)


def test_what_the_pages_show_compiles_in_a_module_of_a_user(go: Path, tmp_path: Path) -> None:
    (tmp_path / "go.mod").write_text(
        f"module example.com/user\n\ngo 1.26.0\n\nrequire quartet v0.0.0\n\nreplace quartet => {ROOT}\n"
    )
    (tmp_path / "go.sum").write_bytes((ROOT / "go.sum").read_bytes())
    (tmp_path / "main.go").write_text(go_block("docs/clients.md"))
    (tmp_path / "lines.go").write_text(
        'package main\n\nimport (\n"context"\n"fmt"\n\nquartet "quartet/clients/go"\n)\n\n'
        "func lines(ctx context.Context, picture []byte) (string, error) {\n"
        f"{go_block('README.md')}\nreturn completion.Text(), err\n}}\n"
    )
    vetted = subprocess.run(
        [go, "vet", "-mod=mod", "."], cwd=tmp_path, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )
    assert vetted.returncode == 0, vetted.stderr


@pytest.mark.parametrize(
    "name",
    [
        "GenerateGivesTheTokensOfThePythonClient",
        "SessionGivesThemForManyRequestsAtOnce",
        "ChatAboutAPictureIsAnsweredOnBothPaths",
        "SlowReaderOfGenerateIsWaitedForSoLong",
        "RefusalsNameTheField",
        "RouterOfAnotherAuthorityIsNotTrusted",
    ],
)
def test_on_a_fleet_with_tls(programs: Programs, fleet: Fleet, name: str) -> None:
    assert run_tests(programs, f"^TestLive{name}$", fleet) == [f"TestLive{name}"]
    fleet.stack.wait_blocks_returned(timeout_s=RETURN_S)


def test_a_cancel_ends_the_request_at_its_worker_on_both_paths(programs: Programs, fleet: Fleet) -> None:
    def num_cancelled() -> float:
        return fleet.stack.metrics("decode-0").value("quartet_worker_requests_total", outcome="cancelled")

    before = num_cancelled()
    # The client sees it while it is still connected; that the requests did not end by themselves, the worker says.
    assert run_tests(programs, "^TestLiveCancelFreesTheWorkerOnBothPaths$", fleet)
    assert num_cancelled() == before + 2
    fleet.stack.wait_blocks_returned(timeout_s=RETURN_S)


def test_the_example_shows_a_caption_and_several_answers(programs: Programs, fleet: Fleet) -> None:
    def run(*arguments: str) -> str:
        command = example(programs, fleet, *arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=True).stdout

    assert run("-chat", "-image", str(PICTURE), QUESTION) == fleet.caption + "\n"
    answers = run("-chat", "What is 17 plus 25?", "What is 3 plus 4?")
    assert answers == "What is 17 plus 25?\n42\n\nWhat is 3 plus 4?\n7\n\n"


def test_ctrl_c_frees_the_worker(programs: Programs, fleet: Fleet) -> None:
    command = example(programs, fleet, "-ignore-eos", "-max-tokens", "4400", "Once upon a time")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.read(1)
            wait_until(
                lambda: fleet.stack.load("decode-0").num_running == 1,
                RETURN_S,
                lambda: f"the request runs, but {fleet.stack.load('decode-0')}",
            )
            running.send_signal(signal.SIGINT)
            running.communicate(timeout=RUN_TIMEOUT_S)
            assert running.returncode == 130
        finally:
            running.kill()
    fleet.stack.wait_blocks_returned(timeout_s=RETURN_S)


def test_its_own_tests_pass(own_tests: subprocess.Popen[str]) -> None:
    assert len(passed(own_tests)) >= 15
