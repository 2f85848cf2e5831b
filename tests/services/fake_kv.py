"""What a worker publishes of its blocks, kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from quartet.events.kv import RankEvents


@dataclass
class FakeKvPublisher:
    """Numbers what it is given, as the real one does where nothing has to be split."""

    published: list[RankEvents] = field(default_factory=list)

    @property
    def kv_number(self) -> int:
        return len(self.published)

    def publish_kv(self, changed: RankEvents) -> None:
        self.published.append(changed)
