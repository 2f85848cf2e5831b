"""``deploy/two_hosts.yaml`` on two hosts, as docs/deploy.md says it (``make test-deploy``).

TLS, encrypted events, and an etcd with a user; the hosts are network namespaces, so one can vanish.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from quartet.client import Completion, Delta, QuartetClient, RequestPath, Sampling, TransferWay, WorkerState
from quartet.client.discovery import find_routers
from quartet.client.stream import CompletionBuilder
from quartet.discovery.create import DiscoveryConfig, create_registry
from quartet.discovery.etcd_access import EtcdTls
from quartet.discovery.etcd_client import EtcdConfig
from quartet.errors import DiscoveryError
from quartet.events.curve import read_events_key
from quartet.rpc.channels import TlsConfig, is_serving
from tests.e2e.network import Host, Network, require_network
from tests.e2e.process import wait_until
from tests.e2e.stack import Stack
from tests.e2e.test_up_tls import lets_in
from tests.e2e.up import QUARTET, Up
from tests.etcd_server import add_user, enable_auth

pytestmark = [pytest.mark.deploy, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

FILE = Path(__file__).resolve().parents[2] / "deploy/two_hosts.yaml"
NAMESPACE, WORKERS = "two-hosts", {"prefill-0", "decode-0", "decode-1"}
WAIT_S = 120.0
NUM_STREAMS = 8
# So many that the streams last, and few enough that all of them fit one worker's pool.
NUM_TOKENS = 400


@dataclass
class Fleet:
    """Both hosts, with everything on them.

    Attributes:
        ups: by host, the running ``quartet up``.
        secrets: what ``quartet secrets`` has written.
    """

    network: Network
    secrets: Path
    directory: Path
    ups: dict[str, Up]

    @property
    def right(self) -> Host:
        return self.network.hosts["right"]

    def up(self, host: str) -> Up:
        """Another ``quartet up`` of that host's share, not started yet."""
        directory = self.directory / host
        directory.mkdir(exist_ok=True)
        variables = {**self.variables, "SECRETS": str(self.secrets / "hosts" / host)}
        there = self.network.hosts[host].command
        return Up(directory, str(FILE), "--host", host, variables=variables, within=there)

    @property
    def variables(self) -> dict[str, str]:
        left, right = (self.network.hosts[name].address for name in ("left", "right"))
        return {"LEFT": left, "RIGHT": right, "ETCD": f"{left}:2379"}

    def identity(self, name: str) -> TlsConfig:
        files = self.secrets / name
        return TlsConfig(ca_file=files / "ca.pem", cert_file=files / f"{name}.pem", key_file=files / f"{name}.key")

    def client(self, name: str = "operator", host: str = "left") -> QuartetClient:
        """A client with that identity of that host's router."""
        return QuartetClient(f"{self.network.hosts[host].address}:50050", tls=self.identity(name))

    async def wait_ready(self) -> None:
        """Wait until both routers have all workers of both hosts ready."""
        async with asyncio.timeout(WAIT_S):
            for host in self.network.hosts:
                async with self.client(host=host) as client, aclosing(client.watch_workers()) as seen:
                    async for workers in seen:
                        if {it.record.worker_id for it in workers if it.state is WorkerState.READY} == WORKERS:
                            break


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    require_network()
    with Network(tmp_path_factory.mktemp("network"), "left", "right") as network:
        yield network


@pytest.fixture(scope="module")
def stopped_fleet(network: Network, etcd_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The hosts with their secrets, and etcd on the left one."""
    directory = tmp_path_factory.mktemp("fleet")
    fleet = Fleet(network, directory / "secrets", directory, {})
    command = [QUARTET, "secrets", FILE, fleet.secrets]
    subprocess.run(command, check=True, env=fleet.variables, cwd=directory, timeout=WAIT_S, capture_output=True)
    with (directory / "etcd.log").open("wb") as log:
        etcd = subprocess.Popen(etcd_command(fleet, etcd_binary), stdout=log, stderr=log)
    try:
        password = (fleet.secrets / "authority/etcd/password").read_text().strip()
        wait_until(lambda: is_healthy(fleet), WAIT_S, (directory / "etcd.log").read_text)
        of_reader = (fleet.secrets / "authority/etcd/reader_password").read_text().strip()
        ask_etcd = partial(post, fleet)
        add_user(ask_etcd, "reader", of_reader, f"/quartet/{NAMESPACE}/router/", "READ")
        enable_auth(ask_etcd, "quartet", password, f"/quartet/{NAMESPACE}/")
        yield fleet
    finally:
        etcd.kill()
        etcd.wait(WAIT_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(stopped_fleet: Fleet) -> AsyncIterator[Fleet]:
    fleet = stopped_fleet
    async with fleet.up("left") as left, fleet.up("right") as right:
        fleet.ups.update(left=left, right=right)
        await asyncio.gather(left.wait_ready(), right.wait_ready())
        await fleet.wait_ready()
        yield fleet
        if fleet.ups["right"] is not right:
            await fleet.ups["right"].end(signal.SIGINT)
            await fleet.ups["right"].__aexit__()


def etcd_command(fleet: Fleet, binary: Path) -> list[str]:
    """As docs/deploy.md has it, but for passwords that are cheap to check."""
    left, files = fleet.network.hosts["left"], fleet.secrets / "etcd"
    url = f"https://{left.address}:2379"
    options = {
        "name": "quartet",
        "data-dir": str(fleet.directory / "etcd"),
        "listen-client-urls": url,
        "advertise-client-urls": url,
        "listen-peer-urls": "http://127.0.0.1:2380",
        "cert-file": f"{files}/etcd.pem",
        "key-file": f"{files}/etcd.key",
        "trusted-ca-file": f"{files}/ca.pem",
        "client-cert-auth": "true",
        "bcrypt-cost": "4",
    }
    return [*left.command, str(binary), *(f"--{name}={value}" for name, value in options.items())]


def post(fleet: Fleet, method: str, body: dict[str, Any]) -> Any:
    """Call a method of etcd's JSON gateway with the certificate of a host."""
    files = fleet.secrets / "hosts/left/etcd"
    context = ssl.create_default_context(cafile=files / "ca.pem")
    context.load_cert_chain(files / "client.pem", files / "client.key")
    request = urllib.request.Request(f"https://{fleet.variables['ETCD']}/v3/{method}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as answer:
        return json.load(answer)


def is_healthy(fleet: Fleet) -> bool:
    try:
        return "leader" in post(fleet, "maintenance/status", {})
    except (OSError, ValueError, urllib.error.URLError):
        return False


def prompts(count: int, first: int = 0) -> list[list[int]]:
    """Of 80 tokens each, none of which begins as another one does: caches would draw those to one worker."""
    return [[40 + first + number, *range(100, 179)] for number in range(count)]


def sampling(num_tokens: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.choices[0].token_ids for completion in completions]


async def ask(client: QuartetClient, asked: Sequence[list[int]], num_tokens: int) -> list[Completion]:
    """The answers to all of them, asked at once."""
    answers = (client.complete(token_ids=ids, sampling=sampling(num_tokens), timeout_s=WAIT_S) for ids in asked)
    return await asyncio.gather(*answers)


class Streams:
    """Answers that are streamed at once; each goes to its end whatever happens to a worker."""

    def __init__(self, client: QuartetClient, asked: Sequence[list[int]]) -> None:
        self._begun = [asyncio.Event() for _ in asked]
        self._placed: dict[int, str] = {}
        self._tasks = [asyncio.create_task(self._stream(client, *numbered)) for numbered in enumerate(asked)]

    async def wait_begun(self) -> None:
        """Wait until each has tokens; some at ``decode-1`` have not ended then."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(begun.wait() for begun in self._begun))
        assert "decode-1" in {self._placed[number] for number, task in enumerate(self._tasks) if not task.done()}

    async def answers(self) -> list[Completion]:
        """All of them, whole; raises what any of them failed with."""
        async with asyncio.timeout(WAIT_S):
            return await asyncio.gather(*self._tasks)

    async def _stream(self, client: QuartetClient, number: int, ids: list[int]) -> Completion:
        built = CompletionBuilder()
        async for part in client.generate(token_ids=ids, sampling=sampling(NUM_TOKENS), timeout_s=WAIT_S):
            built.add(part)
            if isinstance(part, Delta) and part.token_ids and number not in self._placed:
                self._placed[number] = worker_of(built.build("router"))
                self._begun[number].set()
        return built.build("router")


def worker_of(completion: Completion) -> str:
    """Where the answer was placed first."""
    return completion.accepted.choices[0].decode.worker_id


async def test_blocks_go_by_grpc_between_hosts_and_answers_are_those_of_one_host(fleet: Fleet, stack: Stack) -> None:
    asked = prompts(8, first=200)
    async with QuartetClient(stack.router_address) as one_host:
        expected = tokens(await ask(one_host, asked, 24))
    ways: dict[str, set[TransferWay | None]] = {}
    async with fleet.client("client") as client:
        answers = await ask(client, asked, 24)
    for answer in answers:
        ways.setdefault(worker_of(answer), set()).add(answer.choices[0].finished.time.transfer_way)
    assert tokens(answers) == expected
    assert ways == {"decode-0": {TransferWay.SHM}, "decode-1": {TransferWay.GRPC}}


async def test_every_path_leads_from_each_router_to_both_hosts(fleet: Fleet, stack: Stack) -> None:
    asked = prompts(4, first=300)
    async with QuartetClient(stack.router_address) as one_host:
        expected = tokens(await ask(one_host, asked, 16))
    for router, path in itertools.product(fleet.network.hosts, RequestPath):
        async with fleet.client("client", router) as client:
            answers = await asyncio.gather(
                *(client.complete(token_ids=ids, sampling=sampling(16), path=path, timeout_s=WAIT_S) for ids in asked)
            )
        assert tokens(answers) == expected, (router, path)
        assert {worker_of(answer) for answer in answers} == {"decode-0", "decode-1"}, (router, path)


async def test_what_the_page_says_to_paste_works(fleet: Fleet) -> None:
    operator = fleet.secrets / "operator"
    files = {"CA": "ca.pem", "CERT": "operator.pem", "KEY": "operator.key"}
    variables = {f"QUARTET_TLS_{name}": str(operator / file) for name, file in files.items()}
    generate, workers = fleet.ups["right"].lines[-2:]
    assert workers.endswith(f"--router {fleet.right.address}:50050")
    listed = await run(workers, variables)
    assert all(name in listed for name in WORKERS)
    assert (await run(generate, variables)).strip()
    router = f"https://{fleet.network.hosts['left'].address}:8000"
    curl = f"curl -sS --cacert {fleet.secrets}/client/ca.pem" + ' -H "Authorization: Bearer $(cat {}/http_key)" {}'
    chat = curl.format(fleet.secrets / "client", f"{router}/v1/chat/completions")
    answer = await run(f"""{chat} -d '{{"messages":[{{"role":"user","content":"Once"}}],"max_tokens":4}}'""", {})
    assert json.loads(answer)["usage"]["completion_tokens"] == 4
    targets = [
        await run(curl.format(fleet.secrets / who, f"{router}/prometheus/targets"), {})
        for who in ("operator", "client")
    ]
    # Metrics are on loopback, of which only their own host is told, as another test shows.
    assert isinstance(json.loads(targets[0]), list)
    assert "error" in json.loads(targets[1]), "who asks may not look at the fleet"


async def run(line: str, variables: dict[str, str]) -> str:
    """What a line prints in a shell."""
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        line,
        stdout=asyncio.subprocess.PIPE,
        env={"PATH": f"{QUARTET.parent}:{os.environ['PATH']}", **variables},
    )
    async with asyncio.timeout(WAIT_S):
        out, _ = await process.communicate()
    assert process.returncode == 0, line
    return out.decode()


async def test_nothing_listens_but_where_the_page_says(fleet: Fleet) -> None:
    left, right = fleet.network.hosts["left"], fleet.right
    of_left = {50050, 8000, 50101, 50103, 50104, 50106, 50107, 2379}
    local_of_left = {50102, 50105, 50108, 2380}
    assert left.listeners() == {(left.address, port) for port in of_left} | {
        ("127.0.0.1", port) for port in local_of_left
    }
    of_right, local_of_right = {50050, 8000, 50101, 50103, 50104}, {50102, 50105}
    assert right.listeners() == {(right.address, port) for port in of_right} | {
        ("127.0.0.1", port) for port in local_of_right
    }


async def test_a_prometheus_on_each_host_is_told_of_that_hosts_processes(fleet: Fleet) -> None:
    for name, workers in (("left", {"prefill-0", "decode-0"}), ("right", {"decode-1"})):
        host = fleet.network.hosts[name]
        listed = json.loads(run_there(host, "curl", "-sS", "http://127.0.0.1:50102/prometheus/targets"))
        assert {group["labels"]["__meta_quartet_worker_id"] for group in listed} == {f"router-{name}", *workers}
        for group in listed:
            assert "quartet_process_" in run_there(host, "curl", "-sS", f"http://{group['targets'][0]}/metrics")


def run_there(host: Host, *command: str) -> str:
    """What a command prints on that host."""
    return subprocess.run([*host.command, *command], check=True, capture_output=True, text=True, timeout=WAIT_S).stdout


async def test_who_has_no_certificate_key_or_password_gets_in_nowhere(fleet: Fleet, tmp_path: Path) -> None:
    left, right = fleet.network.hosts["left"].address, fleet.right.address
    for address in (f"{left}:50050", f"{left}:50103", f"{right}:50103"):
        assert await is_serving(address, fleet.identity("operator"), timeout_s=WAIT_S)
        assert not await is_serving(address, timeout_s=5)
    key = read_events_key(fleet.secrets / "authority/events_key")
    for port_of in (f"tcp://{left}:50101", f"tcp://{left}:50104", f"tcp://{right}:50104"):
        assert await lets_in(port_of, key)
        assert not await lets_in(port_of, None)
    files = fleet.secrets / "hosts/right/etcd"
    tls = EtcdTls(ca_file=files / "ca.pem", cert_file=files / "client.pem", key_file=files / "client.key")
    wrong = tmp_path / "password"
    wrong.write_text("wrong\n")
    wrong.chmod(0o600)
    right_one = {"tls": tls, "user": "quartet", "password_file": files / "password"}
    assert await lists_workers(fleet, right_one) == WORKERS
    for access in ({"tls": tls}, {**right_one, "password_file": wrong}, {}):
        with pytest.raises(DiscoveryError):
            await lists_workers(fleet, access)


@pytest.mark.parametrize("kind", ["operator", "client"])
async def test_who_operates_and_who_asks_find_the_routers_in_etcd_and_nothing_else(fleet: Fleet, kind: str) -> None:
    files = fleet.secrets / kind / "etcd"
    tls = EtcdTls(ca_file=files / "ca.pem", cert_file=files / "client.pem", key_file=files / "client.key")
    access = {"tls": tls, "user": "reader", "password_file": files / "password"}
    addresses = {f"{host.address}:50050" for host in fleet.network.hosts.values()}
    assert set(await find_routers(discovery(fleet, access))) == addresses
    with pytest.raises(DiscoveryError, match="permission denied"):
        await lists_workers(fleet, access)


def discovery(fleet: Fleet, access: dict[str, Any]) -> DiscoveryConfig:
    return DiscoveryConfig(
        etcd=EtcdConfig(endpoints=(fleet.variables["ETCD"],), namespace=NAMESPACE, request_timeout_s=10, **access)
    )


async def lists_workers(fleet: Fleet, access: dict[str, Any]) -> set[str]:
    registry = create_registry(discovery(fleet, access))
    try:
        return {record.worker_id for record in await registry.workers()}
    finally:
        await registry.close()


async def test_a_host_whose_cable_is_pulled_costs_no_answer_and_returns(fleet: Fleet, stack: Stack) -> None:
    asked = prompts(NUM_STREAMS, first=1000)
    async with QuartetClient(stack.router_address) as one_host:
        expected = tokens(await ask(one_host, asked, NUM_TOKENS))
    async with fleet.client() as client:
        streams = Streams(client, asked)
        await streams.wait_begun()
        fleet.right.unplug()
        try:
            assert tokens(await streams.answers()) == expected
            while_gone = await ask(client, prompts(4, first=400), 16)
            assert {worker_of(answer) for answer in while_gone} == {"decode-0"}
        finally:
            fleet.right.plug()
        await fleet.wait_ready()
        again = await ask(client, prompts(8, first=500), 16)
    way_of = {worker_of(answer): answer.choices[0].finished.time.transfer_way for answer in again}
    assert way_of["decode-1"] is TransferWay.GRPC


async def test_the_other_host_serves_alone_while_the_one_with_etcd_is_away(fleet: Fleet) -> None:
    left, asked = fleet.network.hosts["left"], prompts(4, first=700)
    async with fleet.client(host="right") as client:
        expected = tokens(await ask(client, asked, 16))
    left.unplug()
    try:
        async with fleet.client(host="right") as client:
            # The first ones may have been sent to the other host before its silence was noticed.
            assert tokens(await ask(client, asked, 16)) == expected
            answers = await ask(client, asked, 16)
        assert tokens(answers) == expected
        assert {worker_of(answer) for answer in answers} == {"decode-1"}
        assert {answer.choices[0].finished.time.transfer_way for answer in answers} == {None}
    finally:
        left.plug()
    await fleet.wait_ready()
    async with fleet.client(host="right") as client:
        again = await ask(client, prompts(8, first=800), 16)
    assert {worker_of(answer) for answer in again} == {"decode-0", "decode-1"}


async def test_a_host_that_loses_power_costs_no_answer_and_returns(fleet: Fleet, stack: Stack) -> None:
    asked = prompts(NUM_STREAMS, first=1100)
    async with QuartetClient(stack.router_address) as one_host:
        expected = tokens(await ask(one_host, asked, NUM_TOKENS))
    async with fleet.client() as client:
        streams = Streams(client, asked)
        await streams.wait_begun()
        fleet.right.kill_all()
        assert tokens(await streams.answers()) == expected
        await fleet.ups["right"].__aexit__()
        await restart_right(fleet)
        again = await ask(client, prompts(8, first=600), 16)
    assert {worker_of(answer) for answer in again} == {"decode-0", "decode-1"}


async def test_a_host_that_is_upgraded_hands_its_answers_on(fleet: Fleet, stack: Stack) -> None:
    asked = prompts(NUM_STREAMS, first=1200)
    async with QuartetClient(stack.router_address) as one_host:
        expected = tokens(await ask(one_host, asked, NUM_TOKENS))
    async with fleet.client() as client:
        streams = Streams(client, asked)
        await streams.wait_begun()
        await fleet.ups["right"].end(signal.SIGTERM)
        assert tokens(await streams.answers()) == expected
        await fleet.ups["right"].__aexit__()
        await restart_right(fleet)


async def restart_right(fleet: Fleet) -> None:
    fleet.ups["right"] = await fleet.up("right").__aenter__()
    await fleet.ups["right"].wait_ready()
    await fleet.wait_ready()
