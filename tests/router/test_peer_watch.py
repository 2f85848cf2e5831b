"""Other routers, found by what workers report."""

from __future__ import annotations

from quartet.events.load import WorkerLoad
from router.book import numbering
from router.policy.base import Peers
from router.workers import PeerWatch


def load(worker_id: str = "decode-0", epoch: int = 7, **arrivals: int) -> WorkerLoad:
    named = {numbering(f"router-{name}", epoch): number for name, number in arrivals.items()}
    return WorkerLoad(worker_id=worker_id, epoch=epoch, ranks=(), router_arrivals=named)


def test_routers_whose_starts_arrive_are_counted_in_the_order_of_their_names() -> None:
    watch = PeerWatch("router-b")
    assert watch.peers == Peers()
    watch.on_report(load(b=1), 0.0)
    watch.on_report(load("decode-1"), 0.0)
    assert watch.peers == Peers()
    watch.on_report(load(b=1, a=5), 1.0)
    assert watch.peers == Peers(number=1, num_routers=2)
    watch.on_report(load("decode-1", c=1, b=3), 2.0)
    assert watch.peers == Peers(number=1, num_routers=3)


def test_a_router_that_starts_no_requests_any_more_is_no_peer() -> None:
    watch = PeerWatch("router-b")
    watch.on_report(load(a=4), 0.0)
    assert watch.peers == Peers(), "that may be long ago"
    watch.on_report(load(a=5), 0.5)
    assert watch.peers.num_routers == 2
    for now in range(1, 15):
        watch.on_report(load(a=5), float(now))  # a worker goes on telling of it for minutes
    watch.poll(15.0)
    assert watch.peers == Peers()
    watch.on_report(load(a=6), 16.0)
    assert watch.peers == Peers(number=1, num_routers=2)


def test_a_new_epoch_of_a_worker_counts_anew() -> None:
    watch = PeerWatch("router-b")
    watch.on_report(load(epoch=7, a=500), 0.0)
    watch.on_report(load(epoch=8), 1.0)
    watch.on_report(load(epoch=8, a=1), 2.0)
    assert watch.peers.num_routers == 2
    watch.poll(40.0)
    watch.forget("decode-0")
    watch.on_report(load(epoch=8, a=1), 41.0)
    assert watch.peers.num_routers == 1
    watch.on_report(load(epoch=8, a=2), 42.0)
    assert watch.peers.num_routers == 2
