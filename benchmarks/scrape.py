"""What /metrics of a process says, and what changed since."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Sample:
    """One line of /metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


class Metrics:
    """All samples of one process at one time."""

    def __init__(self, samples: list[Sample]) -> None:
        """Made by ``scrape``."""
        self._samples = samples

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples ``name`` that have ``labels``; 0 where there are none: counters begin so."""
        return sum(self.by_label(name, None, **labels).values())

    def by_label(self, name: str, by: str | None, **labels: str) -> dict[str, float]:
        """The sums of ``total``, apart for each value of the label ``by``."""
        sums: dict[str, float] = {}
        for sample in self._samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                key = "" if by is None else sample.labels[by]
                sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    def since(self, before: Metrics) -> Metrics:
        """What each counter grew by since ``before``, of the same process; new ones began at 0."""
        old = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in before._samples}
        return Metrics(
            [
                Sample(
                    sample.name,
                    sample.labels,
                    sample.value - old.get((sample.name, *sorted(sample.labels.items())), 0.0),
                )
                for sample in self._samples
            ]
        )


def parse(text: str) -> Metrics:
    """Metrics in Prometheus's text form."""
    families = text_string_to_metric_families(text)
    return Metrics([Sample(item.name, item.labels, item.value) for family in families for item in family.samples])


async def scrape(http_address: str) -> Metrics:
    """The metrics of the process at ``http_address`` (``host:port``). Raises ``OSError``."""
    return parse(await asyncio.to_thread(_get, f"http://{http_address}/metrics"))


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        body: bytes = answer.read()
    return body.decode("utf-8")
