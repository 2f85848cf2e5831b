"""Many durations in little memory: counts in buckets that grow by one per cent."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_GROWTH = 1.01
_LOWEST_S = 1e-6
_NUM_BUCKETS = 2400  # up to 6.5 hours
_BUCKETS_PER_E_FOLD = 1.0 / math.log(_GROWTH)


class DurationHistogram:
    """Durations in seconds, from a microsecond to hours; quantiles are within half a per cent, the mean is exact.

    The buckets are those of Gil Tene's HdrHistogram in spirit: their width is a share of the value, so that memory
    does not grow with the number of durations and one ``add`` costs well under a microsecond.
    """

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0

    def add(self, value_s: float, count: int = 1) -> None:
        """Count ``value_s`` that many times."""
        index = int(math.log(value_s / _LOWEST_S) * _BUCKETS_PER_E_FOLD) if value_s > _LOWEST_S else 0
        self._counts[min(index, _NUM_BUCKETS - 1)] += count
        self.count += count
        self.sum_s += value_s * count
        self.max_s = max(self.max_s, value_s)

    def quantile_s(self, share: float) -> float:
        """A value that at least ``share`` of all don't exceed, the smallest to half a per cent; 0 without any."""
        if not self.count:
            return 0.0
        cumulated = np.cumsum(self._counts)
        index = int(np.searchsorted(cumulated, math.ceil(share * self.count)))
        return min(_middle_s(index), self.max_s)

    def distribution(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Values in seconds, ascending, and the share of all that don't exceed each; both empty without any."""
        counts = np.asarray(self._counts)
        [used] = counts.nonzero()
        values = np.minimum(_LOWEST_S * _GROWTH ** (used + 0.5), self.max_s)
        return values, counts[used].cumsum() / max(1, self.count)


def _middle_s(index: int) -> float:
    """The value that stands for a bucket: the geometric mean of its bounds, off by half a per cent at most."""
    return _LOWEST_S * math.pow(_GROWTH, index + 0.5)
