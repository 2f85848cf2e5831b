"""A local search for the cheapest assignment of all waiting requests to all ranks at once."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policy.forecast import NO_PLAN, Job, Plan, PrefillForecast

# For more jobs than this, swapping pairs would take more time than it saves.
_MAX_SWAPPED_JOBS = 16
_MAX_ROUNDS = 4
_EPSILON = 1e-6


class JointAssignment:
    """Jobs spread over the forecasts of ranks; ``plans`` has the plan of each forecast."""

    def __init__(self, forecasts: Sequence[PrefillForecast], jobs: Sequence[Job], rng: random.Random) -> None:
        """Assign ``jobs``, longest first, each where it adds least to the cost; then move and swap while that helps.

        A job that can go nowhere is left out. ``rng`` breaks ties.
        """
        self._forecasts = forecasts
        self._rng = rng
        self._members: list[list[Job]] = [[] for _ in forecasts]
        self.plans = [NO_PLAN] * len(forecasts)
        self._forecast_of: dict[Job, int] = {}
        by_length = [(min(able), job) for job in jobs if (able := [one for one in job.num_missing if one is not None])]
        by_length.sort(key=lambda one: -one[0])
        placeable = [job for _num_missing, job in by_length]
        for job in placeable:
            added = self._best(job, None)
            assert added is not None, "it can go somewhere"
            self._put(job, *added[1:])
        for _ in range(_MAX_ROUNDS if len(placeable) > 1 else 0):  # a single job is where it costs least
            has_moved = [self._move(job) for job in placeable]
            has_swapped = len(placeable) <= _MAX_SWAPPED_JOBS and self._swap_all(placeable)
            if not (any(has_moved) or has_swapped):
                break

    def _best(self, job: Job, but: int | None) -> tuple[float, int, Plan] | None:
        """Where ``job`` adds least, apart from forecast ``but``: the cost that it adds, the forecast and its plan."""
        numbers = list(range(len(self._forecasts)))
        if len(numbers) > 1:
            self._rng.shuffle(numbers)
        best: tuple[float, int, Plan] | None = None
        for number in numbers:
            if number == but or job.num_missing[number] is None:
                continue
            plan = self._forecasts[number].plan([*self._members[number], job])
            added = plan.cost - self.plans[number].cost
            if best is None or added < best[0] - _EPSILON:
                best = (added, number, plan)
        return best

    def _put(self, job: Job, number: int, plan: Plan) -> None:
        self._members[number].append(job)
        self.plans[number] = plan
        self._forecast_of[job] = number

    def _without(self, job: Job) -> list[Job]:
        return [other for other in self._members[self._forecast_of[job]] if other is not job]

    def _move(self, job: Job) -> bool:
        number = self._forecast_of[job]
        rest = self._without(job)
        plan = self._forecasts[number].plan(rest)
        added = self._best(job, number)
        if added is None or added[0] >= self.plans[number].cost - plan.cost - _EPSILON:
            return False
        self._members[number], self.plans[number] = rest, plan
        self._put(job, *added[1:])
        return True

    def _swap_all(self, jobs: Sequence[Job]) -> bool:
        swapped = [self._swap(one, other) for index, one in enumerate(jobs) for other in jobs[:index]]
        return any(swapped)

    def _swap(self, one: Job, other: Job) -> bool:
        first, second = self._forecast_of[one], self._forecast_of[other]
        if first == second or one.num_missing[second] is None or other.num_missing[first] is None:
            return False
        before = self.plans[first].cost + self.plans[second].cost
        ones, others = [*self._without(one), other], [*self._without(other), one]
        plan = self._forecasts[first].plan(ones)
        if plan.cost >= before - _EPSILON:
            return False
        other_plan = self._forecasts[second].plan(others)
        if plan.cost + other_plan.cost >= before - _EPSILON:
            return False
        self._members[first], self._members[second] = ones, others
        self.plans[first], self.plans[second] = plan, other_plan
        self._forecast_of[one], self._forecast_of[other] = second, first
        return True
