"""What places have of one prompt, looked up when a policy asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from quartet.discovery.place import Place
from router.prefix_index import PrefixIndex


class PromptMatches(Mapping[Place, int]):
    """Leading tokens of a prompt by place, as of the last ``renew``; places that have none are left out.

    A request that waits is shown to its policy again and again, and most times the policy does not get as far as to
    look at it: so the index is asked at the first look after each ``renew``.
    """

    __slots__ = ("_block_size", "_index", "_num_tokens", "_sequence_hashes")

    def __init__(self, index: PrefixIndex, sequence_hashes: Sequence[int], block_size: int) -> None:
        """``sequence_hashes`` name the prompt's full blocks, of ``block_size`` tokens each."""
        self._index = index
        self._sequence_hashes = sequence_hashes
        self._block_size = block_size
        self._num_tokens: Mapping[Place, int] | None = None

    def renew(self) -> None:
        """Forget what was looked up."""
        self._num_tokens = None

    def __getitem__(self, place: Place) -> int:
        return self._known()[place]

    def __iter__(self) -> Iterator[Place]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def get(self, place: Place, default: int = 0) -> int:  # type: ignore[override]
        """As of any mapping, without the exception that the default one catches for each place that has nothing."""
        return self._known().get(place, default)

    def _known(self) -> Mapping[Place, int]:
        if self._num_tokens is None:
            matches = self._index.match(self._sequence_hashes)
            self._num_tokens = {place: match.num_blocks * self._block_size for place, match in matches.items()}
        return self._num_tokens
