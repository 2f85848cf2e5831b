"""CPU time of processes and waits for cores as Linux counts them, figures of /metrics, and the evidence of these.

CPU time is measured for each process and for the whole machine: it shows which process was busy and what disturbed it.
``Evidence`` answers for one phase of load: was work done twice, and which requests had to wait?
"""

from __future__ import annotations

import asyncio
import os
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
# How clock_getcpuclockid(3), which Python lacks, turns a process id into a clock: include/linux/posix-timers_types.h.
_CPU_CLOCK_BITS, _CPU_CLOCK_SCHED = 3, 2
# Fields of the line ``cpu`` of /proc/stat that count when a core worked, or another guest had it.
_BUSY = (0, 1, 2, 5, 6, 7)
_TIMEOUT_S = 10.0
_NS_PER_S = 1e9
_FIRST_ATTEMPT = "first"
# A bucket bound of the router's histogram: an attempt that waited longer did not pass straight through.
_WAITED_OVER_S = "0.01"


@dataclass(frozen=True, kw_only=True)
class CpuUse:
    """CPU time used over some period.

    Attributes:
        duration_s: length of the period.
        cpu_s: CPU seconds by process.
        share: CPU seconds by process for each second: 1 is a whole core.
        others_share: the same of everything else on the machine, which disturbed the measurement.
    """

    duration_s: float
    cpu_s: Mapping[str, float]
    share: Mapping[str, float]
    others_share: float


class CpuMeter:
    """Measures from its construction on."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """Watch the processes ``pids``, by name; all of them must outlive the measurement."""
        self._pids = dict(pids)
        self._began = time.monotonic()
        self._before = self._read()
        self._machine_before = machine_cpu_s()

    def read(self) -> CpuUse:
        """The CPU time used until now."""
        duration_s = time.monotonic() - self._began
        cpu_s = {name: value - self._before[name] for name, value in self._read().items()}
        others_s = machine_cpu_s() - self._machine_before - sum(cpu_s.values())
        return CpuUse(
            duration_s=duration_s,
            cpu_s=cpu_s,
            share={name: value / duration_s for name, value in cpu_s.items()},
            others_share=max(0.0, others_s / duration_s),
        )

    def _read(self) -> dict[str, float]:
        return {name: process_cpu_s(pid) for name, pid in self._pids.items()}


@dataclass(frozen=True, kw_only=True)
class CoreUse:
    """How one process got along with the machine's cores over some period.

    Attributes:
        cores: CPU seconds of all its threads for each second.
        main_waited: share of the time for which its main thread was ready to run and had no core.
        busiest_waited: the same of the thread that used most CPU time.
    """

    cores: float
    main_waited: float
    busiest_waited: float


class CoreMeter:
    """Measures from its construction on, by thread. On Linux only: elsewhere ``read`` returns nothing."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """Watch the processes ``pids``, by name."""
        self._pids = dict(pids)
        self._began = time.monotonic()
        self._before = {name: _read_threads(pid) for name, pid in self._pids.items()}

    def read(self) -> Mapping[str, CoreUse]:
        """How each process got along until now; one that is gone, or not counted, is left out."""
        duration_ns = (time.monotonic() - self._began) * _NS_PER_S
        found: dict[str, CoreUse] = {}
        for name, pid in self._pids.items():
            before = self._before[name]
            threads = {
                thread: (ran - before.get(thread, (0, 0))[0], waited - before.get(thread, (0, 0))[1])
                for thread, (ran, waited) in _read_threads(pid).items()
            }
            if pid in threads:
                found[name] = CoreUse(
                    cores=round(sum(ran for ran, _ in threads.values()) / duration_ns, 3),
                    main_waited=round(threads[pid][1] / duration_ns, 4),
                    busiest_waited=round(max(threads.values())[1] / duration_ns, 4),
                )
        return found


def _read_threads(pid: int) -> dict[int, tuple[int, int]]:
    """By thread id, the nanoseconds for which each thread ran, and was ready and waited for a core."""
    found: dict[int, tuple[int, int]] = {}
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            ran, waited, _ = file.read_text(encoding="ascii").split()
            found[int(file.parent.name)] = int(ran), int(waited)
    return found


def process_cpu_s(pid: int) -> float:
    """CPU seconds of the process and its threads so far, to the nanosecond; /proc counts in ticks of 10 ms.

    Raises:
        OSError: the process is gone.
    """
    return time.clock_gettime(~pid << _CPU_CLOCK_BITS | _CPU_CLOCK_SCHED)


def machine_cpu_s() -> float:
    """CPU seconds that all cores together have worked since the machine started."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0].split()[1:]
    return sum(int(fields[index]) for index in _BUSY) * _TICK_S


class Metrics:
    """All samples of one process at one time."""

    def __init__(self, samples: list[Sample]) -> None:
        """``scrape`` makes it."""
        self._samples = samples

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples ``name`` that have ``labels``; 0 if there are none, because counters begin at 0."""
        return sum(self.by_label(name, None, **labels).values())

    def by_label(self, name: str, by: str | None, **labels: str) -> dict[str, float]:
        """The sums of ``total``, separately for each value of the label ``by``."""
        sums: dict[str, float] = {}
        for sample in self._samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                key = "" if by is None else sample.labels[by]
                sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    def since(self, before: Metrics) -> Metrics:
        """How much each counter grew since ``before``, of the same process; new counters began at 0."""
        old = {_key(sample): sample.value for sample in before._samples}
        return Metrics([sample._replace(value=sample.value - old.get(_key(sample), 0.0)) for sample in self._samples])


def parse(text: str) -> Metrics:
    """Metrics in Prometheus's text form."""
    return Metrics([sample for family in text_string_to_metric_families(text) for sample in family.samples])


async def scrape(http_address: str) -> Metrics:
    """The metrics of the process at ``http_address`` (``host:port``). Raises ``OSError``."""
    return parse(await asyncio.to_thread(_get, f"http://{http_address}/metrics"))


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Sums over one phase that began and ended with nothing in flight.

    Attributes:
        hand_offs: hand-offs that ended at the prefill worker, by outcome.
        hand_offs_expired: the ones among them that expired.
        preemptions: requests that lost their blocks, at either worker.
        attempts: attempts that the router began, by cause; all but ``first`` are retries.
        prompts_prefilled: prompts that the prefill worker got.
        prompts_prefilled_twice: the ones among them beyond the first attempts at requests.
        tokens_computed_again: tokens prefilled (computed or found in the cache, at either worker) beyond once each,
            without the one token of a handed-off prompt that decode computes itself. Tokens of failed requests are
            included.
        tokens_cached: prompt tokens that the prefill worker found in its cache.
        requests_waited: attempts that waited in the router for more than 10 ms.
        mean_wait_s: mean wait for room, over all attempts.
    """

    hand_offs: Mapping[str, int]
    hand_offs_expired: int
    preemptions: int
    attempts: Mapping[str, int]
    prompts_prefilled: int
    prompts_prefilled_twice: int
    tokens_computed_again: int
    tokens_cached: int
    requests_waited: int
    mean_wait_s: float


def collect_evidence(router: Metrics, prefill: Metrics, decode: Metrics, *, prompt_tokens_sent: int) -> Evidence:
    """Compute it from what each process's counters grew by; ``prompt_tokens_sent``: of requests that ended well."""
    hand_offs = _counts(prefill, "quartet_worker_hand_offs_total", "outcome")
    attempts = _counts(router, "quartet_router_attempts_total", "cause")
    prompts_prefilled = round(prefill.total("quartet_worker_requests_total"))
    tokens_cached = round(prefill.total("quartet_worker_cached_tokens_total"))
    tokens_prefilled = round(prefill.total("quartet_worker_prompt_tokens_total")) + tokens_cached
    tokens_of_decode = round(decode.total("quartet_worker_prompt_tokens_total"))
    num_taken_over = round(decode.total("quartet_worker_requests_total"))
    num_waits = router.total("quartet_router_queue_seconds_count")
    return Evidence(
        hand_offs=hand_offs,
        hand_offs_expired=hand_offs.get("expired", 0),
        preemptions=round(sum(worker.total("quartet_worker_preemptions_total") for worker in (prefill, decode))),
        attempts=attempts,
        prompts_prefilled=prompts_prefilled,
        prompts_prefilled_twice=max(0, prompts_prefilled - attempts.get(_FIRST_ATTEMPT, 0)),
        tokens_computed_again=tokens_prefilled - prompt_tokens_sent + tokens_of_decode - num_taken_over,
        tokens_cached=tokens_cached,
        requests_waited=round(
            num_waits - router.total("quartet_router_queue_seconds_bucket", le=_WAITED_OVER_S),
        ),
        mean_wait_s=router.total("quartet_router_queue_seconds_sum") / num_waits if num_waits else 0.0,
    )


def _key(sample: Sample) -> tuple[object, ...]:
    return sample.name, *sorted(sample.labels.items())


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        body: bytes = answer.read()
    return body.decode("utf-8")


def _counts(metrics: Metrics, name: str, by: str) -> dict[str, int]:
    return {key: round(value) for key, value in metrics.by_label(name, by).items() if value}
