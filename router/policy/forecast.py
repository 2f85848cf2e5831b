"""The prefill forecast of one rank: in which order it would prefill, which requests share a step, and the cost.

``PrefillForecast.plan`` makes the ``Plan`` for a set of ``Job``; ``router.policy.joint`` spreads jobs over forecasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.policy.base import Candidate

# The last token is always computed.
_MIN_MISSING_TOKENS = 1


@dataclass(frozen=True, kw_only=True)
class CostWeights:
    """What a second of each kind costs; the unit is a second of one request's time to first token.

    Attributes:
        work: per second of prefill computed, for any request: the price of keeping a rank busy, and of one more cached
            copy.
        impatience_per_s: how much more a second costs a request for each second that it will have waited; it keeps
            long prompts from waiting for ever behind short ones.
        decode_delay: per second by which the decoding of one request is delayed: by a prefill at its rank, or by the
            transfer of its own blocks.
    """

    work: float = 0.5
    impatience_per_s: float = 0.15
    decode_delay: float = 0.1


@dataclass(frozen=True)
class Deferral:
    """For how long a request is not sent to each rank; one entry a forecast, or empty: it may go at once.

    Attributes:
        until_s: seconds during which it is not sent to the rank.
        starts_in_s: seconds until a step with it may begin there, as forecast.
    """

    until_s: Sequence[float] = ()
    starts_in_s: Sequence[float] = ()


#: It may go to any rank at once.
AT_ONCE = Deferral()


@dataclass(eq=False, slots=True)
class Job:
    """A request that waits to be prefilled.

    Attributes:
        number: its position among those that are planned together.
        num_tokens: prompt and generated tokens.
        age_s: seconds that it has waited so far.
        priority: higher first.
        is_due: it, or one behind it in the queue, has waited so long, or others overtook it so often, that none behind
            it may go first.
        num_missing: by forecast, tokens to compute there; ``None``: it can't go there.
        onboard_s: by forecast, seconds in which cached tokens come from tiers below the device, while the rank computes
            others; empty: none do.
        num_shared: by the other job's number, leading tokens that both have.
        deferral: for how long it is not sent to which rank.
    """

    number: int
    num_tokens: int
    age_s: float
    priority: int
    num_missing: Sequence[int | None]
    num_shared: Sequence[int]
    deferral: Deferral = AT_ONCE
    is_due: bool = False
    onboard_s: Sequence[float] = ()


@dataclass(slots=True)
class Plan:
    """In which order one rank would prefill some jobs.

    Attributes:
        cost: of all of them together.
        groups: jobs that share a step, in order.
        first_token_in_s: by group, seconds until its jobs have their first tokens, but for what they load.
    """

    cost: float
    groups: Sequence[Sequence[Job]] = ()
    first_token_in_s: Sequence[float] = ()


#: The plan for no jobs.
NO_PLAN = Plan(0.0)


class PrefillForecast:
    """What one rank would do with the prompts that it may be given.

    Attributes:
        number: the forecast's, by which jobs name it.
        free_in_s: seconds until the rank has computed all that it was given.
    """

    def __init__(
        self,
        number: int,
        candidate: Candidate,
        now: float,
        weights: CostWeights,
        *,
        transfer_s_per_token: float = 0.0,
    ) -> None:
        """Nothing is planned yet.

        Args:
            number: the forecast's, by which jobs name it.
            candidate: the rank as it is known.
            now: by the clock of ``Snapshot.now``.
            weights: what costs how much.
            transfer_s_per_token: seconds for moving what is prefilled here to the rank that decodes it.
        """
        self.number = number
        self._num_decoding = candidate.num_decoding
        self._budget = max(candidate.max_step_tokens - candidate.num_decoding, 1)
        self._step_time = candidate.step_time
        self._decode_s = candidate.step_time.decode_s(candidate.num_context_tokens)
        self._weights = weights
        # The first token waits for no transfer, the second one does.
        self._transfer_cost_per_token = weights.decode_delay * transfer_s_per_token
        self._plans: dict[frozenset[int], Plan] = {}
        self.free_in_s = max(candidate.step_ends_at - now, 0.0)
        if candidate.num_unbegun_tokens:
            self.free_in_s += self.prefill_s(candidate.num_unbegun_tokens)

    def plan(self, jobs: Sequence[Job]) -> Plan:
        """The plan for ``jobs``; all of them can go here."""
        if not jobs:
            return NO_PLAN
        key = frozenset([job.number for job in jobs])
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(jobs)
        return plan

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds to compute ``num_tokens`` tokens, including the time that the steps spend on decoding."""
        return self._step_time.prefill_in_steps_s(num_tokens, self._budget, self._decode_s)

    def deferred_s(self, group: Sequence[Job]) -> float:
        """Seconds for which some of ``group`` must not be sent here."""
        return max([job.deferral.until_s[self.number] for job in group if job.deferral.until_s], default=0.0)

    def terms(self, job: Job) -> dict[str, float]:
        """The parts of the cost of ``job``, if it goes here alone; their sum is the cost of that plan."""
        weights, num_missing = self._weights, self._num_missing(job, ())
        wait_s, prefill_s = job.age_s + self._start_s(self.free_in_s, [job]), self.prefill_s(num_missing)
        onboard_s = job.onboard_s[self.number] if job.onboard_s else 0.0
        work_s = self._step_time.prefill_s(num_missing)
        return {
            "wait_s": wait_s,
            "onboard_s": onboard_s,
            "prefill_s": prefill_s,
            "impatience_s": weights.impatience_per_s * (wait_s + onboard_s + prefill_s) ** 2,
            "work_s": weights.work * work_s,
            "decode_delay_s": weights.decode_delay * self._num_decoding * work_s,
            "transfer_s": self._transfer_cost_per_token * job.num_tokens,
        }

    def _make_plan(self, jobs: Sequence[Job]) -> Plan:
        """Shortest first, divided by impatience; small jobs share a step if that saves time."""
        weights, time = self._weights, self._step_time
        groups: list[list[Job]] = []
        num_tokens: list[int] = []  # of each group
        placed: list[Job] = []
        for position, job in enumerate(ordered := self._ordered(jobs)):
            num_missing = self._num_missing(job, placed)
            placed.append(job)
            if groups and (num_in_step := num_tokens[-1] + num_missing) <= self._budget:
                delay_s = time.prefill_s(num_in_step) - time.prefill_s(num_tokens[-1])
                saved_s = time.prefill_base_s + self._decode_s
                if delay_s * len(groups[-1]) < saved_s * (len(ordered) - position):
                    groups[-1].append(job)
                    num_tokens[-1] = num_in_step
                    continue
            groups.append([job])
            num_tokens.append(num_missing)
        cost, ends_in_s, firsts = 0.0, self.free_in_s, []
        for group, tokens in zip(groups, num_tokens, strict=True):
            ends_in_s = self._start_s(ends_in_s, group) + self.prefill_s(tokens)
            firsts.append(ends_in_s)
            for job in group:
                first_s = job.age_s + ends_in_s
                if job.onboard_s:
                    first_s += job.onboard_s[self.number]
                cost += first_s * (1.0 + weights.impatience_per_s * first_s)
                cost += self._transfer_cost_per_token * job.num_tokens
            work_s = time.prefill_s(tokens)
            cost += work_s * (weights.work + weights.decode_delay * self._num_decoding)
        return Plan(cost, groups, firsts)

    def _start_s(self, free_in_s: float, group: Sequence[Job]) -> float:
        for job in group:
            if job.deferral.starts_in_s:
                free_in_s = max(free_in_s, job.deferral.starts_in_s[self.number])
        return free_in_s

    def _ordered(self, jobs: Sequence[Job]) -> list[Job]:
        if len(jobs) == 1:
            return list(jobs)
        impatience = 2.0 * self._weights.impatience_per_s

        def order(job: Job) -> tuple[int, bool, float, int]:
            num_missing = job.num_missing[self.number]
            assert num_missing is not None, "it can go here"
            if job.is_due:
                return -job.priority, False, 0.0, job.number
            return -job.priority, True, num_missing / (1.0 + impatience * job.age_s), job.number

        return sorted(jobs, key=order)

    def _num_missing(self, job: Job, placed: Sequence[Job]) -> int:
        num_missing = job.num_missing[self.number]
        assert num_missing is not None, "it can go here"
        for other in placed:
            num_missing = min(num_missing, job.num_tokens - job.num_shared[other.number])
        return max(num_missing, _MIN_MISSING_TOKENS)
