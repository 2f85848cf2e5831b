"""The TypeScript client on a running fleet: the Python client's tokens, pictures, sessions, cancels and TLS."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from quartet.client import ChatMessage, QuartetClient, Sampling, read_media
from quartet.rpc.channels import TlsConfig
from tests.certificates import CertificateAuthority
from tests.e2e.conftest import StartStack
from tests.e2e.process import wait_until
from tests.e2e.stack import Stack, StackConfig

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "models/tiny/pictures/shapes.jpg"
QUESTION = "Describe the picture."
PROMPTS = ("Once upon a time", "There was a", "In a small house", "One sunny morning")
GREEDY = {"temperature": 0, "maxTokens": 16, "ignoreEos": True}
PYTHON_GREEDY = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
PATHS = ("generate", "session")
TIMEOUT_S = 120.0
#: Less than a request that nobody ended would take.
FREED_WITHIN_S = 25.0


@dataclass(frozen=True)
class Live:
    """Runs ``tests/live.ts`` of the client."""

    folder: Path
    shows_certificate: bool = True

    async def complete(self, address: str, *requests: dict[str, Any], tls: TlsConfig | None = None) -> list[Any]:
        """The results of these requests, which run at once."""
        process = await self.start("complete", address, list(requests), tls)
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        results: list[Any] = json.loads(out)
        return results

    async def start(
        self, command: str, address: str, argument: object, tls: TlsConfig | None = None
    ) -> asyncio.subprocess.Process:
        files = {"ca": str(tls.ca_file), "cert": str(tls.cert_file), "key": str(tls.key_file)} if tls else None
        if files and not self.shows_certificate:
            files = {"ca": files["ca"]}
        words = [command, address, json.dumps(argument), *([json.dumps(files)] if files else [])]
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            "node", "dist/tests/live.js", *words, cwd=self.folder, stdin=pipe, stdout=pipe, stderr=pipe
        )


@pytest.fixture
def live(typescript_client: Path) -> Live:
    return Live(typescript_client)


@dataclass(frozen=True)
class TlsFleet:
    """A fleet that sees pictures and speaks TLS only, and a client that it lets in."""

    stack: Stack
    client: TlsConfig
    # Of another authority.
    stranger: TlsConfig


@pytest.fixture(scope="module")
def tls_fleet(start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory, typescript_client: Path) -> TlsFleet:
    authority = CertificateAuthority(tmp_path_factory.mktemp("certificates"))
    other = CertificateAuthority(tmp_path_factory.mktemp("others"))
    names = {"encode-0": "worker", "prefill-0": "worker", "decode-0": "worker", "router": "router"}
    config = StackConfig(
        num_encode=1,
        worker={"transfer.ways": ["grpc"]},
        tls={name: authority.issue(name, f"quartet://default/{kind}/{name}") for name, kind in names.items()},
        operator=authority.issue("operator", "quartet://default/operator/bob"),
    )
    stack = start_stack(config)
    return TlsFleet(
        stack,
        authority.issue("client", "quartet://default/client/alice"),
        other.issue("client", "quartet://default/client/alice"),
    )


@pytest.fixture
async def stopping(
    live: Live, stack: Stack, request: pytest.FixtureRequest
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process whose request runs at the decode worker; ``request.param`` says how it will end it."""
    process = await live.start("stop", stack.router_address, request.param)
    try:
        assert await read_line(process) == "running"
        assert await asyncio.to_thread(lambda: stack.load("decode-0").num_running) > 0
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def read_line(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout is not None and process.stderr is not None
    async with asyncio.timeout(TIMEOUT_S):
        line = await process.stdout.readline()
        assert line, (await process.stderr.read()).decode()
    return json.loads(line)


async def run(folder: Path, *words: str) -> str:
    """What a Node program prints."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("node", *words, cwd=folder, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(TIMEOUT_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


def test_its_own_tests_pass(typescript_client: Path) -> None:
    files = sorted((typescript_client / "dist/tests").glob("*.test.js"))
    assert files
    ran = subprocess.run(["node", "--test", *files], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ran.returncode == 0, ran.stdout


async def test_it_gets_the_tokens_of_the_python_client_on_both_paths(
    live: Live, stack: Stack, client: QuartetClient
) -> None:
    expected = [await client.complete(prompt, sampling=PYTHON_GREEDY) for prompt in PROMPTS]
    requests = [
        {"path": path, "prompt": prompt, "options": {"sampling": GREEDY}} for path in PATHS for prompt in PROMPTS
    ]
    results = await live.complete(stack.router_address, *requests)
    wanted = [
        {"text": completion.text, "tokenIds": list(completion.choices[0].token_ids), "reason": "LENGTH"}
        for completion in expected
    ]
    assert results == wanted * len(PATHS)


async def test_a_refused_request_names_reason_and_field_and_ends_no_other(live: Live, stack: Stack) -> None:
    good = {"prompt": PROMPTS[0], "options": {"sampling": GREEDY}}
    bad = [
        ({"prompt": "x", "options": {"sampling": {"topP": 2}}}, "InvalidArgument", "INVALID_FIELD", "sampling.top_p"),
        ({"prompt": "x", "options": {"model": "nobody"}}, "NotFound", "MODEL_NOT_FOUND", "model"),
    ]
    requests = [{"path": path, **one} for path in PATHS for one in (good, *(entry[0] for entry in bad))]
    results = await live.complete(stack.router_address, *requests)
    for answered, *refused in (results[:3], results[3:]):
        assert len(answered["tokenIds"]) == GREEDY["maxTokens"]
        assert [(entry["code"], entry["error"], entry["field"]) for entry in refused] == [entry[1:] for entry in bad]


@pytest.mark.parametrize(
    ("stopping", "ended"),
    [
        ({"path": path, "by": by}, ended)
        for path in PATHS
        for by, ended in (
            ("abort", {"error": "AbortError"}),
            ("cancel", {"reason": "CANCELLED"}),
            ("leave", {"reason": "none"}),
        )
    ],
    indirect=["stopping"],
    ids=lambda value: "-".join(value.values()) if "by" in value else "",
)
async def test_a_request_that_is_ended_early_leaves_its_worker(
    stopping: asyncio.subprocess.Process, ended: object, stack: Stack
) -> None:
    assert stopping.stdin is not None
    stopping.stdin.write(b"\n")
    assert await read_line(stopping) == ended
    # The process lives on: it was the client that ended the request, not the connection's end.
    await asyncio.to_thread(
        wait_until,
        lambda: stack.load("decode-0").num_running == 0,
        FREED_WITHIN_S,
        lambda: f"nothing runs, but {stack.load('decode-0')}",
    )
    assert stopping.returncode is None
    stopping.stdin.close()
    async with asyncio.timeout(TIMEOUT_S):
        assert await stopping.wait() == 0
    await asyncio.to_thread(stack.wait_blocks_returned, timeout_s=FREED_WITHIN_S)


async def test_it_shows_a_picture_over_tls(live: Live, tls_fleet: TlsFleet) -> None:
    address = tls_fleet.stack.router_address
    async with QuartetClient(address, tls=tls_fleet.client) as client:
        message = ChatMessage("user", (read_media(PICTURE), QUESTION))
        expected = await client.complete(messages=[message], sampling=Sampling(temperature=0.0))
    prompt = {"messages": [{"role": "user", "content": [{"file": str(PICTURE)}, QUESTION]}]}
    requests = [{"path": path, "prompt": prompt, "options": {"sampling": {"temperature": 0}}} for path in PATHS]
    results = await live.complete(address, *requests, tls=tls_fleet.client)
    assert [result.get("tokenIds", result) for result in results] == [list(expected.choices[0].token_ids)] * len(PATHS)
    assert results[0]["text"].startswith("A small blue circle at the top")


@pytest.mark.parametrize(
    ("who", "why"),
    [("stranger", "want another certificate"), ("nobody", "want another certificate"), ("plaintext", "want TLS")],
)
async def test_a_router_with_tls_lets_no_other_in(live: Live, tls_fleet: TlsFleet, who: str, why: str) -> None:
    request = {"path": "generate", "prompt": "x"}
    # It trusts the router.
    tls = None if who == "plaintext" else replace(tls_fleet.stranger, ca_file=tls_fleet.client.ca_file)
    live = replace(live, shows_certificate=who != "nobody")
    [result] = await live.complete(tls_fleet.stack.router_address, request, tls=tls)
    assert result["code"] == "Unavailable" and result["error"] == "ROUTER_UNAVAILABLE", result
    assert tls_fleet.stack.router_address in result["message"] and why in result["message"], result


async def test_the_example_and_the_lines_of_the_readme_run(
    typescript_client: Path, stack: Stack, client: QuartetClient
) -> None:
    asked = "What is 17 plus 25?"
    shown = await run(typescript_client, "dist/examples/chat.js", stack.router_address, asked)
    assert shown.strip() == "42"
    readme = (ROOT / "README.md").read_text()
    [lines] = [block for block in readme.split("```ts\n")[1:] if "quartet-client" in block]
    program = lines.partition("```")[0].replace("127.0.0.1:50050", stack.router_address).replace("\n  ", "\n")
    path = typescript_client / "dist/examples/readme.mjs"
    path.write_text(program.replace("maxTokens: 32", "maxTokens: 8, temperature: 0"))
    expected = await client.complete(PROMPTS[0], sampling=Sampling(temperature=0.0, max_tokens=8))
    assert await run(typescript_client, str(path)) == expected.text
