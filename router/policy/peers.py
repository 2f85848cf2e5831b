"""What several routers leave to each other, who see each other's placements only when workers report them.

Without it all of them send to the same free place at once. So each place is first one router's: it takes it as if it
were alone. Another router leaves a prompt to the place's own router, and then to those between the two in their order,
for as long as it takes until their placements are reported; what is free then is free to take. A prompt that finds much
more of itself at a place than elsewhere does not wait: computing it anew costs all more than meeting somebody there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.policy.base import Candidate, Peers
from router.policy.lane import AT_ONCE, Hold


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """How far routers keep out of each other's way.

    Attributes:
        report_s: after so long a placement is in the load that all routers know.
        doubt_s: a place that is another router's is forecast to be free so much later than it looks.
        saving_share: a prompt does not wait for another router's place that spares it at least this share of what the
            best of the router's own places lacks.
    """

    report_s: float = 0.06
    doubt_s: float = 0.15
    saving_share: float = 0.25


class Turns:
    """For how long each place is left to others."""

    def __init__(
        self, places: Sequence[Candidate], everybody: Iterable[Candidate], peers: Peers, config: PeerConfig
    ) -> None:
        """``places`` are known by their position from here on; whose each is follows from all names.

        These are ``peers.places``, or those of ``everybody`` where they are not given.
        """
        self._config = config
        self._waits_s = [0.0] * len(places)
        if peers.num_routers > 1:
            order = peers.places or sorted(place.place for place in everybody)
            ranks = {place: rank for rank, place in enumerate(order)}
            distances = [(peers.number - ranks[place.place]) % peers.num_routers for place in places]
            self._waits_s = [distance * config.report_s for distance in distances]
        self._is_alone = not any(self._waits_s)

    def hold(self, num_missing: Sequence[int | None], age_s: float, least_s: float) -> Hold:
        """How a prompt is kept from places that has waited for ``age_s`` and goes nowhere for another ``least_s``."""
        if self._is_alone:
            return Hold([least_s] * len(num_missing), [least_s] * len(num_missing)) if least_s else AT_ONCE
        own = [count for count, wait_s in zip(num_missing, self._waits_s, strict=True) if count and not wait_s]
        num_spared = (1.0 - self._config.saving_share) * min(own, default=0)
        until_s, starts_in_s = list[float](), list[float]()
        for count, wait_s in zip(num_missing, self._waits_s, strict=True):
            is_free = not wait_s or (count is not None and count <= num_spared)
            until_s.append(least_s if is_free else max(wait_s - age_s, least_s))
            starts_in_s.append(until_s[-1] if is_free else until_s[-1] + self._config.doubt_s)
        return Hold(until_s, starts_in_s)
