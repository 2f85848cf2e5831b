"""Which routers place requests at the same workers, as the workers' reports tell."""

from __future__ import annotations

from quartet.events.load import WorkerLoad
from router.policy.base import Peers

# A router of which no new start was heard for so long has nothing to place, or is gone.
_ACTIVE_S = 10.0


class PeerWatch:
    """Finds the other routers by the starts that workers count in; nobody has to be told of them."""

    def __init__(self, router_id: str) -> None:
        """Nobody but the router of that id is known."""
        self._router_id = router_id
        self._last_numbers: dict[tuple[str, str], int] = {}  # by worker and router's numbering
        self._epochs: dict[str, int] = {}
        self._active_at: dict[str, float] = {}
        self.peers = Peers()

    def report(self, load: WorkerLoad, now: float) -> None:
        """A worker counts in what ``load`` says."""
        has_new = False
        # What the first report of a worker's life tells may be long over.
        is_known = self._epochs.get(load.worker_id) == load.epoch
        self._epochs[load.worker_id] = load.epoch
        for name, number in load.router_arrivals.items():
            if number > self._last_numbers.get((load.worker_id, name), 0):
                self._last_numbers[load.worker_id, name] = number
                router_id = name.rpartition(".")[0]
                if is_known:
                    has_new |= router_id not in self._active_at
                    self._active_at[router_id] = now
        if has_new:
            self.look(now)

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        self._epochs.pop(worker_id, None)
        self._last_numbers = {key: number for key, number in self._last_numbers.items() if key[0] != worker_id}

    def look(self, now: float) -> None:
        """Time has passed: some may not be active any more."""
        self._active_at = {name: at for name, at in self._active_at.items() if now - at <= _ACTIVE_S}
        routers = sorted(self._active_at.keys() | {self._router_id})
        self.peers = Peers(number=routers.index(self._router_id), num_routers=len(routers))
