"""How many tokens media fill, as workers told it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from quartet.media.items import MediaItem, MediaSize

# A router that knows the size of a picture needs not wait for a worker to tell it; each takes some 200 bytes.
_MAX_KNOWN_SIZES = 65_536


class KnownSizes:
    """Sizes of those items that were told last.

    By media id alone: in it is the preprocessing fingerprint, which covers ``config.json`` and the processor's files:
    items of models that count otherwise have other ids. Where workers disagree, whoever spoke last is believed.
    """

    def __init__(self, max_known: int = _MAX_KNOWN_SIZES) -> None:
        """Know of none, and of ``max_known`` at most."""
        self._max_known = max_known
        self._sizes: OrderedDict[bytes, MediaSize] = OrderedDict()

    def find(self, items: Sequence[MediaItem]) -> Sequence[MediaSize] | None:
        """Of all ``items``; ``None`` where any is unknown."""
        sizes = [self._sizes.get(item.media_id) for item in items]
        for item in items:
            if item.media_id in self._sizes:
                self._sizes.move_to_end(item.media_id)
        return None if None in sizes else [size for size in sizes if size is not None]

    def learn(self, sizes: Sequence[MediaSize]) -> None:
        """A worker told these: what was known of them otherwise is forgotten."""
        for size in sizes:
            self._sizes[size.media_id] = size
            self._sizes.move_to_end(size.media_id)
        while len(self._sizes) > self._max_known:
            self._sizes.popitem(last=False)

    def forget(self, items: Sequence[MediaItem]) -> None:
        """What is known of ``items`` may be wrong."""
        for item in items:
            self._sizes.pop(item.media_id, None)

    def learn_total(self, items: Sequence[MediaItem], num_tokens: int) -> None:
        """A worker told how many tokens ``items`` fill together: where all but one are known, its size follows.

        Where what is known can't be so, it is forgotten.
        """
        counts = Counter(item.media_id for item in items)
        known = {name: self._sizes[name].num_tokens for name in counts if name in self._sizes}
        rest = num_tokens - sum(size * counts[name] for name, size in known.items())
        unknown = [name for name in counts if name not in known]
        if rest < sum(counts[name] for name in unknown) or (rest and not unknown):
            for name in known:
                del self._sizes[name]
            unknown, rest = list(counts), num_tokens
        if len(unknown) == 1 and rest > 0 and rest % counts[unknown[0]] == 0:
            self.learn([MediaSize(media_id=unknown[0], num_tokens=rest // counts[unknown[0]])])
