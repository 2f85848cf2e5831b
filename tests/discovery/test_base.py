"""Names, configurations and facts that discovery checks before it uses them; and how a watch and a back-off behave."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quartet.discovery.base import Registration, Synchronised, Watch, WorkerSet
from quartet.discovery.etcd import BackOff
from quartet.discovery.etcd_client import EtcdConfig
from quartet.discovery.file import FileConfig
from quartet.discovery.host import host_identity, new_epoch
from quartet.errors import DiscoveryError
from tests.discovery.records import TIMEOUT_S, make_record, next_event
from tests.fakes.memory_registry import MemoryRegistry


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "ä", "x" * 129])
def test_a_name_that_cannot_be_a_key_or_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="worker_id"):
        make_record(name)
    with pytest.raises(ValueError, match="namespace"):
        EtcdConfig(namespace=name)
    with pytest.raises(ValueError, match="namespace"):
        FileConfig(directory=tmp_path, namespace=name)
    with pytest.raises(ValueError, match="namespace"):
        MemoryRegistry(namespace=name)


def test_an_impossible_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="endpoints"):
        EtcdConfig(endpoints=())
    with pytest.raises(ValueError, match="lease_ttl_s"):
        EtcdConfig(lease_ttl_s=0)
    with pytest.raises(ValueError, match="ttl_s"):
        FileConfig(directory=tmp_path, ttl_s=0)


def test_processes_of_one_host_share_their_identity_but_no_two_starts_an_epoch() -> None:
    assert host_identity() == host_identity()
    assert host_identity().ipc_namespace.startswith("ipc:[")
    assert len({new_epoch() for _ in range(100)}) == 100


class BreakingRegistration(Registration):
    """Kept by a task that breaks when it is told to."""

    def __init__(self) -> None:
        super().__init__(make_record(), on_close=lambda _: None)
        self.must_break = asyncio.Event()
        self._keep(self._break())

    async def _break(self) -> None:
        await self.must_break.wait()
        raise FileNotFoundError("ca.pem")

    async def _remove(self) -> None: ...


async def test_a_registration_whose_task_breaks_tells_its_owner_why() -> None:
    registration = BreakingRegistration()
    registration.must_break.set()
    with pytest.raises(FileNotFoundError, match=r"ca\.pem"):
        await asyncio.wait_for(registration.ended(), TIMEOUT_S)
    await registration.close()


async def test_a_registration_that_is_closed_has_not_ended_by_itself() -> None:
    registration = BreakingRegistration()
    ended = asyncio.create_task(registration.ended())
    await registration.close()
    await asyncio.sleep(0)
    assert not ended.done()
    ended.cancel()


async def test_a_watch_whose_feed_breaks_raises_at_its_reader_instead_of_waiting_for_ever() -> None:
    async def feed(workers: WorkerSet) -> None:
        workers.replace([])
        raise KeyError("a bug")

    watch = Watch(feed, on_close=lambda _: None)
    assert await next_event(watch) == Synchronised()
    with pytest.raises(DiscoveryError, match="a bug"):
        await next_event(watch)


def test_back_off_grows_to_a_second_and_starts_over() -> None:
    back_off = BackOff()
    delays = [back_off.next_delay_s() for _ in range(2000)]
    assert 0.025 <= delays[0] <= 0.05
    assert all(0.5 <= delay <= 1 for delay in delays[10:])
    assert len(set(delays[10:])) > 1
    back_off.reset()
    assert back_off.next_delay_s() <= 0.05


def test_only_the_first_failure_since_a_success_counts_as_first() -> None:
    back_off = BackOff()
    firsts = []
    for _ in range(3):
        firsts.append(back_off.is_first)
        back_off.next_delay_s()
    back_off.reset()
    assert [*firsts, back_off.is_first] == [True, False, False, True]
