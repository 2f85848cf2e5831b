"""Keeping a hand-off alive on behalf of whoever will take it, and letting go of one that nobody will."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from quartet.errors import HandOffNotFoundError, HandOffStateError, ServingError, StaleEpochError
from quartet.kvcache.layout import HandOff
from quartet.transfer.grpc.messages import ticket_to_pb
from quartet.transfer.grpc.peer_channels import PeerChannels
from quartet.transfer.grpc.pull_stream import PullStream
from quartet.v1 import transfer_pb2 as pb

#: How long letting go may take; the lease ends what it misses.
_ABORT_TIMEOUT_S = 1.0
#: A lease this short is a mistake, but must not make us a flood.
_MIN_RENEWAL_INTERVAL_S = 0.01

_log = logging.getLogger(__name__)


class HandOffLease:
    """Renews a hand-off every third of its lease until ``stop`` or ``abort``.

    A renewal is a short stream of its own: most hand-offs are taken before the first is due. One that is refused, lost
    or left unanswered is asked again soon, two more times before the lease ends. The first is due a third of a lease
    from now; of a hand-off that was that old when it came, one renewal may fail.
    """

    def __init__(self, hand_off: HandOff, channels: PeerChannels, *, call_timeout_s: float) -> None:
        """Begin to renew; a renewal waits ``call_timeout_s`` for its answer at most."""
        self.hand_off = hand_off
        self._channels = channels
        self._call_timeout_s = call_timeout_s
        self._has_aborted = False
        self._renewing = asyncio.create_task(self._renew_on(), name="renew-hand-off")

    def stop(self) -> None:
        """Renew no more; the hand-off lives on for what is left of its lease. May be called twice."""
        self._renewing.cancel()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when this stops renewing, for whatever reason."""
        self._renewing.add_done_callback(lambda _task: callback())

    async def abort(self) -> None:
        """Tell the source that nobody will take it. Never raises; takes a second at most; may be called twice."""
        self.stop()
        if self._has_aborted:
            return
        self._has_aborted = True
        request = pb.PullRequest(abort=pb.PullAbort(ticket=ticket_to_pb(self.hand_off)))
        try:
            await self._ask(request, _ABORT_TIMEOUT_S)
        except ServingError as error:
            _log.debug("a hand-off of %s is left to its lease: %s", self.hand_off.worker_id, error)

    async def _renew_on(self) -> None:
        interval_s = max(self.hand_off.lease.total_seconds() / 3, _MIN_RENEWAL_INTERVAL_S)
        retry_interval_s = interval_s / 3
        request = pb.PullRequest(renew=pb.PullRenew(ticket=ticket_to_pb(self.hand_off)))
        pause_s = interval_s
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._ask(request, min(retry_interval_s, self._call_timeout_s))
                pause_s = interval_s
            except (HandOffNotFoundError, HandOffStateError, StaleEpochError) as error:
                _log.debug("a hand-off of %s has ended: %s", self.hand_off.worker_id, error)
                return  # whoever takes it will be told
            except ServingError as error:
                pause_s = retry_interval_s
                _log.info("could not renew a hand-off of %s, trying again: %s", self.hand_off.worker_id, error)

    async def _ask(self, request: pb.PullRequest, timeout_s: float) -> None:
        """Send one message on a stream of its own and wait for the answer. Raises ``ServingError``."""
        with self._channels.use(self.hand_off.address) as channel:
            stream = PullStream(channel, timeout_s=timeout_s, stall_timeout_s=timeout_s)
            try:
                await stream.ask(request)
            finally:
                stream.cancel()
