"""All that wait at once, over all ranks: a local search for the assignment that costs everybody the least."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policy.forecast import Job, Lane, Turn

# Past so many jobs exchanging pairs would cost more time than it saves.
_MAX_SWAPPED_JOBS = 16
_MAX_ROUNDS = 4
_EPSILON = 1e-6


class JointAssignment:
    """Jobs spread over lanes; ``turns`` has each lane's plan."""

    def __init__(self, lanes: Sequence[Lane], jobs: Sequence[Job], rng: random.Random) -> None:
        """Assign ``jobs``, longest first, each where it adds least; then move and swap while that helps.

        A job that can go nowhere is left out. ``rng`` breaks ties.
        """
        self._lanes = lanes
        self._rng = rng
        self._members: list[list[Job]] = [[] for _ in lanes]
        self.turns = [lane.turn(()) for lane in lanes]
        self._lane_of: dict[Job, int] = {}
        placeable = [job for job in jobs if any(missing is not None for missing in job.num_missing)]
        placeable.sort(key=lambda job: -min(missing for missing in job.num_missing if missing is not None))
        for job in placeable:
            added = self._best(job, None)
            assert added is not None, "it can go somewhere"
            self._put(job, *added[1:])
        for _ in range(_MAX_ROUNDS if len(placeable) > 1 else 0):  # the only one is where it costs least
            has_moved = [self._move(job) for job in placeable]
            has_swapped = len(placeable) <= _MAX_SWAPPED_JOBS and self._swap_all(placeable)
            if not (any(has_moved) or has_swapped):
                break

    def _best(self, job: Job, but: int | None) -> tuple[float, int, Turn] | None:
        """What adding ``job`` costs where it costs least, apart from lane ``but``."""
        numbers = list(range(len(self._lanes)))
        self._rng.shuffle(numbers)
        best: tuple[float, int, Turn] | None = None
        for number in numbers:
            if number == but or job.num_missing[number] is None:
                continue
            turn = self._lanes[number].turn([*self._members[number], job])
            added = turn.cost - self.turns[number].cost
            if best is None or added < best[0] - _EPSILON:
                best = (added, number, turn)
        return best

    def _put(self, job: Job, number: int, turn: Turn) -> None:
        self._members[number].append(job)
        self.turns[number] = turn
        self._lane_of[job] = number

    def _without(self, job: Job) -> list[Job]:
        return [other for other in self._members[self._lane_of[job]] if other is not job]

    def _move(self, job: Job) -> bool:
        number = self._lane_of[job]
        rest = self._without(job)
        turn = self._lanes[number].turn(rest)
        added = self._best(job, number)
        if added is None or added[0] >= self.turns[number].cost - turn.cost - _EPSILON:
            return False
        self._members[number], self.turns[number] = rest, turn
        self._put(job, *added[1:])
        return True

    def _swap_all(self, jobs: Sequence[Job]) -> bool:
        swapped = [self._swap(one, other) for index, one in enumerate(jobs) for other in jobs[:index]]
        return any(swapped)

    def _swap(self, one: Job, other: Job) -> bool:
        first, second = self._lane_of[one], self._lane_of[other]
        if first == second or one.num_missing[second] is None or other.num_missing[first] is None:
            return False
        before = self.turns[first].cost + self.turns[second].cost
        ones, others = [*self._without(one), other], [*self._without(other), one]
        turn = self._lanes[first].turn(ones)
        if turn.cost >= before - _EPSILON:
            return False
        other_turn = self._lanes[second].turn(others)
        if turn.cost + other_turn.cost >= before - _EPSILON:
            return False
        self._members[first], self._members[second] = ones, others
        self.turns[first], self.turns[second] = turn, other_turn
        self._lane_of[one], self._lane_of[other] = second, first
        return True
