"""The registry on etcd: one key per worker or router under a lease, and watches that survive every break.

Keys are ``/quartet/<namespace>/<role>/<id>``. When a watch breaks (restart, wipe, compaction, silence), it lists
all keys, reports the differences, and watches from the list's revision.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial

from quartet.discovery.base import AnyRecord, RecordSet, Registration, Registry, Role, RouterRecord, WorkerKey
from quartet.discovery.etcd_client import EtcdClient, EtcdConfig, KeyChange, StoredValue, new_lease_id
from quartet.discovery.record_json import RecordReader, read_epoch, to_json
from quartet.errors import DiscoveryError, WorkerReplacedError

logger = logging.getLogger(__name__)

# Enough for an etcd that is just starting or electing a leader, not so long that a wrong address goes unnoticed.
_REGISTER_WITHIN_S = 10.0
# Between two tries to reach etcd.
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 1.0


class EtcdRegistration(Registration):
    """A record in etcd, kept there by a task that renews its lease and registers again when that is lost.

    It is put only in a transaction that changes nothing where another process has come first: the key must be absent,
    or hold this record, or still hold what an earlier start of the worker had left there when this one began, or hold
    nothing that names an epoch. No key of the same id may exist for another role.
    """

    def __init__(self, client: EtcdClient, record: AnyRecord, *, on_close: Callable[[Registration], None]) -> None:
        super().__init__(record, on_close=on_close)
        self._client = client
        prefix = _prefix(client.config)
        own, id = record.key
        self._key = f"{prefix}{own}/{id}"
        self._keys_of_other_roles = [f"{prefix}{role}/{id}" for role in Role if role is not own]
        self._value = to_json(record)
        #: Values that may stand under the key: this one, and that of an earlier start; ``None``: not read yet.
        self._replaceable: set[bytes] | None = None
        self._lease_id: int | None = None
        self._registered = asyncio.Event()
        self._back_off = BackOff()
        self._last_error: DiscoveryError | None = None
        self._keep(self._keep_registered())

    async def wait_registered(self, timeout_s: float) -> None:
        """Wait until the record has been in etcd once.

        Raises:
            DiscoveryError: it was not within ``timeout_s`` seconds; the message ends with the last failure.
            WorkerReplacedError: a later start of the worker came first.
        """
        lost, registered = asyncio.create_task(self.ended()), asyncio.create_task(self._registered.wait())
        try:
            await asyncio.wait({lost, registered}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                lost.result()
            if not registered.done():
                raise DiscoveryError(f"could not register in {timeout_s:g} s: {self._last_error}")
        finally:
            lost.cancel()
            registered.cancel()

    async def _remove(self) -> None:
        """Takes at most one request timeout."""
        # Revoking the lease deletes the key only if it is still attached to *this* lease.
        lease_id, self._lease_id = self._lease_id, None
        if lease_id is not None:
            try:
                async with asyncio.timeout(self._client.config.request_timeout_s):
                    await self._client.revoke(lease_id)
            except (DiscoveryError, TimeoutError) as error:
                logger.warning("left %s to the end of its lease: %s", self._key, error)

    async def _keep_registered(self) -> None:
        while True:
            try:
                if self._replaceable is None:
                    await self._find_earlier_start()
                elif self._lease_id is None:
                    await self._register()
                else:
                    await self._keep_alive(self._lease_id)
            except DiscoveryError as error:
                self._last_error = error
                await self._back_off.pause(f"registration of {self._key}", error)

    async def _find_earlier_start(self) -> None:
        stored = await self._client.get(self._key)
        self._replaceable = {self._value} if stored is None else {self._value, stored.value}

    async def _register(self) -> None:
        # Set before it is granted: if any of this fails, the next step finds the lease held or lost.
        self._lease_id = new_lease_id()
        await self._client.grant(self._lease_id)
        await self._put_if_missing(self._lease_id)

    async def _keep_alive(self, lease_id: int) -> None:
        """Renew the lease and watch over the key, until the lease is lost."""
        async with self._client.keep_alive() as stream:
            while await stream.renew(lease_id) > 0:
                await self._put_if_missing(lease_id)
                self._back_off.reset()
                await asyncio.sleep(self._client.config.lease_ttl_s / 3)
        self._lease_id = None
        raise DiscoveryError("the lease was lost")

    async def _put_if_missing(self, lease_id: int) -> None:
        stored = await self._client.get(self._key)
        self._check_not_replaced(stored)
        if stored is None or stored.value != self._value or stored.lease_id != lease_id:
            await self._put(lease_id, 0 if stored is None else stored.revision)
        self._registered.set()

    def _check_not_replaced(self, stored: StoredValue | None) -> None:
        assert self._replaceable is not None, "it is read before anything is put"
        if stored is None or stored.value in self._replaceable:
            return
        if read_epoch(stored.value) is not None:
            raise WorkerReplacedError(f"another process has registered as {' '.join(self.record.key)}")

    async def _put(self, lease_id: int, revision: int) -> None:
        """Put the record over what was last changed in ``revision``."""
        if await self._client.put_if(
            self._key, self._value, lease_id, revision=revision, absent=self._keys_of_other_roles
        ):
            return
        for key in self._keys_of_other_roles:
            if await self._client.get(key) is not None:
                self._refuse_id(key)
        raise DiscoveryError("another process changed the key at the same moment")

    def _refuse_id(self, key: str) -> None:
        message = f"{self.id_field} {self.record.key.worker_id} is taken by {key}: give each an id of its own"
        # At the start that may be a leftover whose lease ends soon.
        raise WorkerReplacedError(message) if self._registered.is_set() else DiscoveryError(message)


class EtcdRegistry(Registry):
    """A ``Registry`` on etcd; make it and use it within one event loop."""

    def __init__(self, config: EtcdConfig) -> None:
        super().__init__()
        self._client = EtcdClient(config)
        self._prefix = _prefix(config)
        self._reader = RecordReader()

    async def register(self, record: AnyRecord) -> EtcdRegistration:
        """Announce ``record`` and keep it alive.

        Raises:
            DiscoveryError: no endpoint took it within 10 s, or another role's worker had the id all that time.
            WorkerReplacedError: a later start of the worker came first.
        """
        registration = EtcdRegistration(self._client, record, on_close=self._open.discard)
        self._open.add(registration)
        try:
            await registration.wait_registered(_REGISTER_WITHIN_S)
        except BaseException:
            await registration.close()
            raise
        return registration

    async def records(self) -> list[AnyRecord]:
        """All readable records of this moment, ordered by role and id.

        Raises:
            DiscoveryError: no endpoint answered, each within the request timeout.
        """
        return (await self._list(self._prefix))[1]

    async def routers(self) -> list[RouterRecord]:
        """See ``Registry``. Reads nothing else: who only looks for routers needs no right to read the rest."""
        _, records = await self._list(f"{self._prefix}{Role.ROUTER}/")
        return [record for record in records if isinstance(record, RouterRecord)]

    def certificate_end(self) -> float | None:
        """See ``Registry``."""
        return self._client.certificate_end()

    async def close(self) -> None:
        """Close every registration and watch made here, then the channels."""
        await super().close()
        await self._client.close()

    async def _feed(self, known: RecordSet) -> None:
        back_off = BackOff()
        while True:
            try:
                revision, records = await self._list(self._prefix)
                known.replace(records)
                await self._client.follow(self._prefix, revision, back_off.reset, partial(self._apply, known))
            except DiscoveryError as error:
                await back_off.pause(f"watch of {self._prefix}", error)

    async def _list(self, prefix: str) -> tuple[int, list[AnyRecord]]:
        listing = await self._client.list(prefix)
        # etcd lists in the order of keys: by role, then id.
        keyed = [(self._worker_key(value.key), value.value) for value in listing.values]
        records = [self._reader.record(key, data) for key, data in keyed if key is not None]
        return listing.revision, [record for record in records if record is not None]

    def _apply(self, known: RecordSet, change: KeyChange) -> None:
        key = self._worker_key(change.key)
        if key is None:
            return
        record = None if change.value is None else self._reader.record(key, change.value)
        # An unreadable value is no process, here as in a list.
        if record is None:
            known.remove(key)
        else:
            known.put(record)

    def _worker_key(self, key: str) -> WorkerKey | None:
        role, _, worker_id = key.removeprefix(self._prefix).partition("/")
        return self._reader.key(role, worker_id)


def _prefix(config: EtcdConfig) -> str:
    return f"/quartet/{config.namespace}/"


class BackOff:
    """Delays that double from 50 ms to 1 s, each shortened at random by up to half.

    The randomness keeps a fleet that lost its registry at one moment from coming back at one moment.
    """

    def __init__(self) -> None:
        self._num_failures = 0

    def next_delay_s(self) -> float:
        """How long to wait after one more failure, in seconds."""
        # Past 2**10 the longest delay has long been reached; a larger exponent would one day overflow.
        delay_s = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(self._num_failures, 10))
        self._num_failures += 1
        return delay_s * random.uniform(0.5, 1.0)

    @property
    def is_first(self) -> bool:
        """Whether nothing has failed since the last success: the failure worth a warning."""
        return self._num_failures == 0

    async def pause(self, what: str, error: Exception) -> None:
        """Log why ``what`` failed, and wait."""
        logger.log(logging.WARNING if self.is_first else logging.DEBUG, "%s: %s", what, error)
        await asyncio.sleep(self.next_delay_s())

    def reset(self) -> None:
        """It worked: begin with the shortest delay again."""
        self._num_failures = 0
