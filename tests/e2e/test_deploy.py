"""The files of ``deploy`` with a real Prometheus and a fleet under load (``make test-deploy``).

Every panel's queries have data, every alert fires when its fault is made, and none does else. Windows are those of
``deploy/prometheus``, 15 times shorter.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.wedged_process import WEDGE_VARIABLE, Place, wedge_file
from quartet.client import QuartetClient, RequestPath, Sampling
from quartet.errors import ServingError
from quartet.rpc.channels import TlsConfig
from quartet.telemetry.encode_metrics import EncodeMetrics
from quartet.telemetry.gpus import watch_gpus
from quartet.telemetry.http import Probes, TelemetryServer
from tests.certificates import CertificateAuthority
from tests.e2e.conftest import StartStack
from tests.e2e.faulty_worker import lost_file
from tests.e2e.placed import place
from tests.e2e.process import wait_until
from tests.e2e.prometheus import DEPLOY, Prometheus
from tests.e2e.stack import REMOTE_PREFILL, Stack, StackConfig
from tests.fakes.nvml import FakeNvml

pytestmark = pytest.mark.deploy

WAIT_S = 120.0
NUM_CLIENTS = 6
#: So many scrapes, one a second, are the longest window of the rules.
NUM_SCRAPES = 40
#: More than the batches, the queue and what the policy may place at once.
NUM_TOO_MANY = 400
#: So many clients, each with a request at any time, keep the queue full.
NUM_CROWD = 150
TEXT = "Once upon a time there was a rabbit named Olive who lived near the sea. "
WORKER = {
    "engine.kind": "mock",
    "engine.scheduler.max_num_seqs": 16,
    "engine.num_blocks": 256,
    "engine.cache.host.num_blocks": 64,
    "transfer.hand_off_ttl_s": 1.5,
}
ROUTER = {
    **REMOTE_PREFILL,
    "admission.max_queue_length": 16,
    "admission.unavailable_timeout_s": 1.0,
    "heartbeat_timeout_s": 3.0,
}


class Load:
    """Clients that ask one thing after the other, on all paths, from ``with`` to its end; failures are none of theirs.

    Attributes:
        num_ended: requests that ended well.
    """

    def __init__(self, connect: Callable[[], QuartetClient], num_clients: int = NUM_CLIENTS) -> None:
        self.num_ended = 0
        self._num_clients = num_clients
        self._connect = connect
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(WAIT_S)

    async def _run(self) -> None:
        async with self._connect() as client:
            await asyncio.gather(*(self._ask(client, number) for number in range(self._num_clients)))

    async def _ask(self, client: QuartetClient, number: int) -> None:
        for turn, path in enumerate(itertools.cycle(RequestPath)):
            if self._is_over.is_set():
                return
            # Some begin alike, and others like none before: what they leave in the cache is announced.
            prompt = TEXT * (number + 1) if number % 2 else f"Tale {turn} of {number}. " + TEXT * 3
            try:
                await client.complete(
                    prompt, path=path, sampling=Sampling(max_tokens=24, ignore_eos=True), timeout_s=20
                )
                self.num_ended += 1
            except ServingError:
                await asyncio.sleep(0.05)  # none of these may spin while the fleet is down


@dataclass(frozen=True)
class Site:
    """What runs, all with certificates of ``authority``.

    In ``folder`` are the files that bring faults about, and ``usage``, the folder of usage records. Mock engines take
    no media, so ``encode`` stands for the metrics of a worker that does.
    """

    authority: CertificateAuthority
    stack: Stack
    prometheus: Prometheus
    load: Load
    folder: Path
    encode: EncodeMetrics

    def client(self) -> QuartetClient:
        """A client of the router."""
        return client_of(self.stack)

    def give_certificate(self, name: str, valid: timedelta) -> None:
        """Another certificate for that process, in place of the one that it has."""
        issue(self.authority, name, valid=valid)

    def wait_fires(
        self, alert: str, among: frozenset[str] = frozenset(), act: Callable[[], object] = lambda: None
    ) -> None:
        """Wait until ``alert`` fires, and meanwhile no others but ``among``; ``act`` is done again and again."""

        def fires() -> bool:
            act()
            firing = self.prometheus.firing()
            assert firing <= among | {alert}, firing
            return alert in firing

        wait_until(fires, WAIT_S, lambda: f"{alert} fires, but {self.prometheus.firing()}\n{self.stack.logs()}")

    def wait_silent(self) -> None:
        """Wait until no alert fires any more."""
        wait_until(lambda: not self.prometheus.firing(), WAIT_S, lambda: f"silence, but {self.prometheus.firing()}")

    def wait_num_ended(self, num_more: int) -> None:
        """Wait until so many more requests have ended well."""
        goal = self.load.num_ended + num_more
        wait_until(lambda: self.load.num_ended >= goal, WAIT_S, lambda: f"{self.load.num_ended} of {goal} ended")


@pytest.fixture(scope="module")
def site(prometheus: Path, start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One prefill, two decodes and a router under load, scraped by Prometheus, and the GPUs of a worker that is not."""
    folder, gpus = tmp_path_factory.mktemp("faults"), CollectorRegistry()
    watch_gpus(gpus, "0", None, FakeNvml)
    encode = EncodeMetrics(gpus)
    telemetry = TelemetryServer("127.0.0.1:0", gpus, Probes(is_alive=lambda: True, is_ready=lambda: True))
    gpu_address = f"127.0.0.1:{telemetry.start()}"
    (folder / "usage").mkdir()
    authority = CertificateAuthority(tmp_path_factory.mktemp("certificates"))
    names = StackConfig(num_decode=2).worker_names
    stack = start_stack(
        StackConfig(
            num_decode=2,
            tls={name: issue(authority, name) for name in ("router", *names)},
            operator=authority.issue("operator", "quartet://default/operator/operator"),
            worker=WORKER,
            routers={"router": {**ROUTER, "usage_log": str(folder / "usage/records.jsonl")}},
            launcher=("tests.e2e.faulty_worker",),
            environment={WEDGE_VARIABLE: str(folder)},
        )
    )
    targets = f"http://{stack.processes['router'].http_address}/prometheus/targets"
    with (
        Prometheus(prometheus, tmp_path_factory.mktemp("prometheus"), targets, gpu_address) as server,
        Load(partial(client_of, stack)) as load,
    ):
        yield Site(authority, stack, server, load, folder, encode)
    asyncio.run(telemetry.close())


def issue(authority: CertificateAuthority, name: str, *, valid: timedelta = timedelta(days=365)) -> TlsConfig:
    """A certificate for the process of that name; always in the same files."""
    kind = "router" if name == "router" else "worker"
    return authority.issue(name, f"quartet://default/{kind}/{name}", valid=valid)


def client_of(stack: Stack) -> QuartetClient:
    return QuartetClient(stack.router_address, tls=stack.config.operator)


@pytest.fixture
def quiet(site: Site) -> Iterator[Site]:
    """Nothing is wrong before, and all is mended after."""
    site.wait_silent()
    yield site
    site.stack.restart_dead()


def test_every_process_is_found_and_while_all_is_well_no_alert_fires(site: Site) -> None:
    names = set(site.stack.config.worker_names)

    def is_watched() -> bool:
        assert site.prometheus.firing() == frozenset()
        up = site.prometheus.up()
        scrapes = site.prometheus.query('min(count_over_time(up{job="quartet"}[60s]))')
        return names < set(up) and all(up.values()) and float(scrapes[0]["value"][1]) >= NUM_SCRAPES

    wait_until(is_watched, WAIT_S, site.prometheus.log)
    assert site.load.num_ended > NUM_CLIENTS
    roles = {
        series["metric"]["quartet_role"]
        for series in site.prometheus.query('up{quartet_namespace="e2e"}')
        if "quartet_role" in series["metric"]
    }
    assert roles == {"router", "prefill", "decode"}


def test_a_worker_that_is_killed_is_missed(quiet: Site) -> None:
    quiet.stack.kill("decode-1")
    quiet.wait_fires("QuartetWorkerLost", frozenset({"QuartetHandOffsExpired", "QuartetNotScraped"}))
    quiet.stack.restart_dead()
    quiet.wait_silent()


def test_a_full_queue_shows(quiet: Site) -> None:
    async def burst() -> None:
        async with quiet.client() as client:
            asks = [
                client.complete(TEXT * 8, sampling=Sampling(max_tokens=32), timeout_s=30) for _ in range(NUM_TOO_MANY)
            ]
            await asyncio.gather(*asks, return_exceptions=True)

    asyncio.run(burst())
    quiet.wait_fires("QuartetQueueFull", frozenset({"QuartetQueueNearFull"}))


def test_a_queue_that_stays_nearly_full_shows(quiet: Site) -> None:
    with Load(quiet.client, NUM_CROWD):
        quiet.wait_fires("QuartetQueueNearFull", frozenset({"QuartetQueueFull", "QuartetHandOffsExpired"}))


def test_usage_records_that_are_lost_show(quiet: Site) -> None:
    folder = quiet.folder / "usage"
    away = folder.rename(quiet.folder / "away")
    quiet.wait_fires("QuartetUsageRecordsLost")
    away.rename(folder)


def test_a_changed_configuration_that_is_refused_shows(quiet: Site) -> None:
    file = quiet.stack.processes["router"].config
    text = file.read_text()
    file.write_text(f"{text}\nno_setting: 1\n")
    quiet.wait_fires("QuartetReloadFailed")
    file.write_text(text)


def test_a_certificate_that_ends_soon_shows_until_there_is_another(quiet: Site) -> None:
    # A worker that dials nobody: it has no connection that would keep the certificate.
    quiet.give_certificate("prefill-0", timedelta(days=13))
    quiet.wait_fires("QuartetCertificateExpires")
    quiet.give_certificate("prefill-0", timedelta(days=15))
    quiet.wait_silent()


def test_a_certificate_that_a_worker_can_not_use_shows(quiet: Site) -> None:
    cert_file = issue(quiet.authority, "prefill-0").cert_file
    content = cert_file.read_bytes()
    # Another such file for each scrape: what is counted before the first one is no growth.
    quiet.wait_fires("QuartetReloadFailed", act=lambda: cert_file.write_bytes(b"none"))
    cert_file.write_bytes(content)


def test_hand_offs_that_nobody_takes_show(quiet: Site) -> None:
    with quiet.stack.channel("router") as router:
        assert place(router).token_ids
    quiet.wait_fires("QuartetHandOffsExpired")


def test_an_engine_that_stands_still_shows(quiet: Site) -> None:
    file = wedge_file(quiet.folder, Place.STEP, "decode-0")
    file.touch()
    quiet.wait_fires("QuartetEngineStalled", frozenset({"QuartetWorkerLost", "QuartetHandOffsExpired"}))
    file.unlink()
    quiet.stack.wait_ready()


def test_lost_kv_events_show(quiet: Site) -> None:
    file = lost_file(quiet.folder, "prefill-0")
    file.touch()
    quiet.wait_fires("QuartetIndexGaps")
    file.unlink()


def test_requests_that_fail_show_and_a_missing_role_for_as_long_as_it_is(quiet: Site) -> None:
    for name in ("decode-0", "decode-1"):
        quiet.stack.kill(name)
    others = frozenset({"QuartetWorkerLost", "QuartetHandOffsExpired", "QuartetNotScraped", "QuartetQueueFull"})
    quiet.wait_fires("QuartetRequestsFail", others | {"QuartetRoleMissing"})
    quiet.wait_fires("QuartetRoleMissing", others | {"QuartetRequestsFail"})

    def is_only_missing() -> bool:
        firing = quiet.prometheus.firing()
        assert "QuartetRoleMissing" in firing
        return "QuartetWorkerLost" not in firing

    wait_until(is_only_missing, WAIT_S, lambda: f"the loss is long ago, but {quiet.prometheus.firing()}")
    quiet.stack.restart_dead()
    quiet.wait_num_ended(NUM_CLIENTS)
    quiet.wait_silent()


def test_every_query_of_every_panel_has_data(site: Site) -> None:
    def lacking() -> list[str]:
        site.encode.observe_encoded(queue_s=0.01, compute_s=0.1)
        return [
            f"{path.stem}: {panel['title']}: {target['expr']}"
            for path in sorted((DEPLOY / "grafana").glob("*.json"))
            for panel in json.loads(path.read_text())["panels"]
            for target in panel["targets"]
            if not has_data(site.prometheus, target["expr"])
        ]

    # All that happened since the start is in the window: also what made a request begin again, or fail.
    wait_until(lambda: not lacking(), WAIT_S, lambda: "\n".join(lacking()))


def test_a_router_that_is_gone_is_noticed(quiet: Site) -> None:
    quiet.stack.kill("router")
    quiet.wait_fires("QuartetNotScraped", frozenset({"QuartetHandOffsExpired"}))
    quiet.stack.restart_dead()
    quiet.wait_silent()


def has_data(prometheus: Prometheus, expr: str) -> bool:
    """Whether a panel's query, with what Grafana fills in, gives a number."""
    for name, value in (("$__rate_interval", "30m"), ("$namespace", ".*"), ("$worker", "decode-0")):
        expr = expr.replace(name, value)
    return any(not math.isnan(float(series["value"][1])) for series in prometheus.query(expr))
