"""Stacks shared by tests that do no harm, and what forks the workers of all stacks: imports cost seconds of CPU."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from quartet.client import QuartetClient
from tests.e2e.fork_server import ForkServer
from tests.e2e.stack import LOCAL_PREFILL, REMOTE_PREFILL, Stack, StackConfig

StartStack = Callable[[StackConfig], Stack]

_RUNNING = pytest.StashKey[list[Stack]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    directory = Path(__file__).parent
    here = {path for path in {item.path for item in items} if directory in path.parents}
    for item in items:
        if item.path in here:
            item.add_marker("e2e")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [("services", stack.logs()) for stack in item.config.stash.get(_RUNNING, [])]
    return report


@pytest.fixture(scope="package")
def stack(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    etcd_binary: Path,
    fork_server: ForkServer,
) -> Iterator[Stack]:
    """One prefill, one decode, and two routers, for tests that kill nothing and leave nothing behind.

    They end with the last test of this package: idle ones take 4 % of a core.

    ``router`` prefills remotely, ``router-local`` where it decodes.
    """
    routers = {"router": REMOTE_PREFILL, "router-local": LOCAL_PREFILL}
    config = StackConfig(routers=routers)
    stack = Stack(config, tmp_path_factory.mktemp("stack"), etcd_binary, fork_server)
    with _running(request.config, stack) as running:
        yield running


@pytest.fixture(scope="module")
def start_stack(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    etcd_binary: Path,
    fork_server: ForkServer,
) -> Iterator[StartStack]:
    """A function that starts a stack, which ends with the module."""
    with ExitStack() as stacks:

        def start(config: StackConfig) -> Stack:
            stack = Stack(config, tmp_path_factory.mktemp("stack"), etcd_binary, fork_server)
            return stacks.enter_context(_running(request.config, stack))

        yield start


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[QuartetClient]:
    """A client of the shared stack's router."""
    async with QuartetClient(stack.router_address) as client:
        yield client


@contextmanager
def _running(config: pytest.Config, stack: Stack) -> Iterator[Stack]:
    """Keep ``stack`` known as long as it runs, so that a failing test shows its logs."""
    known = config.stash.setdefault(_RUNNING, [])
    known.append(stack)
    try:
        with stack:
            yield stack
    finally:
        known.remove(stack)
