"""Fixtures for all tests: real etcd, and skips that say why."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from services.topology import launch
from services.topology.launch import find_etcd, find_grpcurl
from tests import etcd_server
from tests.e2e.fork_server import ForkServer
from tests.e2e.prometheus import find_prometheus

# What is imported for thousands of tests stays: until then the collector would only look for what is not there.
gc.disable()
# A fleet of processes that has as many threads as cores each is slow, and the slower the busier the machine is: threads
# that wait for each other spin, where one has no core. A lone worker of `quartet up` has two, and took 75 ms of CPU a
# token in place of 5. Both are read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A shell ignores SIGINT in what it runs in the background, and children would inherit that: no Ctrl-C would end them.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A shared machine stalls now and then; how long one example takes is not what these tests are about.
# Each run draws its own examples, and runs are many: `pytest --hypothesis-profile=thorough` is one that draws most.
hypothesis.settings.register_profile("quartet", deadline=None, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("quartet")


#: Of files that start processes, attack or measure, those that take longest, the longest first: begun late, they would
#: be waited for.
LONGEST = (
    "test_launched_hand_off_model.py",
    "test_isolation.py",
    "test_fuzz.py",
    "test_multimodal_chaos.py",
    "test_trtllm_chaos.py",
    "test_topologies.py",
    "test_chaos.py",
    "test_relay.py",
    "test_multimodal.py",
    "test_paths.py",
    "test_global.py",
    "test_faults.py",
    "test_hand_off_model.py",
    "test_wedge.py",
)


#: Where Debian's package chromium-driver puts it. Others may be of another version than the browser.
CHROMEDRIVER = "/usr/bin/chromedriver"


GO = Path(__file__).resolve().parent.parent / "tools" / "go.sh"
#: It may have to fetch a newer Go first.
GO_TIMEOUT_S = 300.0
#: Files that start processes are spread over so much of a run: of those begun later some would end it alone.
_SPREAD = 0.6


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix files that start processes, the longest first, with the others: those mostly wait, these take a core each."""
    files = list(dict.fromkeys(item.path for item in items))
    starting = {item.path for item in items if any(map(item.get_closest_marker, ("e2e", "chaos", "bench")))}
    waiting = sorted(filter(starting.__contains__, files), key=_rank)
    busy = [path for path in files if path not in starting]
    position = {path: _SPREAD * number / len(waiting) for number, path in enumerate(waiting)}
    position |= {path: number / len(busy) for number, path in enumerate(busy)}
    items.sort(key=lambda item: position[item.path])


def _rank(path: Path) -> int:
    return LONGEST.index(path.name) if path.name in LONGEST else len(LONGEST)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported: pytest itself has it look twice at the end of the run."""
    gc.freeze()
    gc.enable()
    # The interpreter is to free at its end what it keeps of Triton, or nanobind prints dozens of lines of leaks.
    atexit.register(gc.unfreeze)


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that returns a free TCP port of 127.0.0.1, a new one at each call."""
    return launch.free_port


@pytest.fixture
def etcd(etcd_binary: Path, tmp_path: Path) -> Iterator[etcd_server.EtcdServer]:
    """A running etcd of this test's own, which it may kill, wipe or compact."""
    yield from _serve_etcd(etcd_binary, tmp_path / "etcd")


@pytest.fixture(scope="session")
def shared_etcd(etcd_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[etcd_server.EtcdServer]:
    """One running etcd for the whole run: leave it alive, and keep to a namespace of your own."""
    yield from _serve_etcd(etcd_binary, tmp_path_factory.mktemp("etcd"))


@pytest.fixture(scope="session")
def etcd_binary() -> Path:
    """The etcd binary, for those who start it themselves."""
    return _require("etcd", find_etcd())


@pytest.fixture(scope="session")
def grpcurl() -> Path:
    """The grpcurl binary."""
    return _require("grpcurl", find_grpcurl())


@pytest.fixture(scope="session")
def grpcurl_if_any() -> Path | None:
    """The grpcurl binary or ``None``, for tests that show most of what they are about without it."""
    return _demand("grpcurl", find_grpcurl())


@pytest.fixture(scope="session")
def chromedriver() -> Path:
    """What drives Chromium, which is there as well."""
    found = all(shutil.which(program) for program in (CHROMEDRIVER, "chromium"))
    return _require("chromium", Path(CHROMEDRIVER) if found else None)


@pytest.fixture(scope="session")
def prometheus() -> Path:
    """The Prometheus binary."""
    return _require("prometheus", find_prometheus())


@pytest.fixture(scope="session")
def systemd_analyze() -> Path:
    """What checks units of systemd, which need not run for it."""
    found = shutil.which("systemd-analyze")
    return _require("systemd", None if found is None else Path(found))


@pytest.fixture(scope="session")
def typescript_client() -> Path:
    """The folder of the TypeScript client, compiled, where there is Node."""
    folder = Path(__file__).parents[1] / "clients" / "typescript"
    compiler = folder / "node_modules" / "typescript" / "bin" / "tsc"
    node = shutil.which("node")
    _require("node", compiler if node and compiler.exists() else None)
    built = subprocess.run([node, compiler], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout
    return folder


@pytest.fixture(scope="session")
def go() -> Path:
    """What runs Go: ``tools/go.sh``."""
    ran = subprocess.run([GO, "version"], capture_output=True, timeout=GO_TIMEOUT_S, check=False)
    return _require("go", GO if ran.returncode == 0 else None)


@pytest.fixture(scope="session")
def fork_server(testrun_uid: str) -> Iterator[ForkServer]:
    """What starts processes that share one import of torch, one for all processes of this run of tests."""
    with ForkServer(testrun_uid) as server:
        yield server


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _has_cuda():
        pytest.skip("no CUDA device")
    if item.get_closest_marker("grpcurl"):
        _require("grpcurl", find_grpcurl())


def _serve_etcd(binary: Path, directory: Path) -> Iterator[etcd_server.EtcdServer]:
    server = etcd_server.EtcdServer(binary, directory)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _require(name: str, binary: Path | None) -> Path:
    """Return ``binary``, or skip; where the environment demands it (``QUARTET_REQUIRE_<NAME>=1``), fail instead."""
    return _demand(name, binary) or pytest.skip(_reason(name))


def _demand(name: str, binary: Path | None) -> Path | None:
    """Return ``binary``; fail where there is none and the environment demands it."""
    if binary is None and os.environ.get(f"QUARTET_REQUIRE_{name.upper()}") == "1":
        pytest.fail(_reason(name), pytrace=False)
    return binary


def _reason(name: str) -> str:
    if name == "chromium":
        return f"no chromium, or no {CHROMEDRIVER}: apt-get install chromium chromium-driver"
    if name == "node":
        return "no Node (apt-get install nodejs npm), or no clients/typescript/node_modules: `make node` gets it"
    if name == "prometheus":
        return "no prometheus on the PATH or in .tools/prometheus: `tools/prometheus.sh` gets it"
    if name == "systemd":
        return "no systemd-analyze: apt-get install systemd"
    if name == "go":
        return "no Go that takes tools/go.mod: apt-get install golang-go"
    return f"no {name} binary in .tools/bin or on the PATH: `make tools` gets it"


def _has_cuda() -> bool:
    import torch  # here, so that a run without GPU tests stays free of it

    return torch.cuda.is_available()
