"""One rank's turn of prefills: in which order, which of them share a step, and what that costs everybody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quartet.events.step_time import StepTime

#: Fewer tokens than this are never missing: the last token is always computed.
_MIN_MISSING_TOKENS = 1


@dataclass(frozen=True, kw_only=True)
class CostWeights:
    """What a second of each kind is worth; the unit of cost is a second of one request's time to first token.

    Attributes:
        work: per second of prefill computed, whoever waits for it: the price of a rank kept busy and of a copy in
            one more cache.
        impatience_per_s: how much more a second costs a request for each second that it will have waited; it keeps
            long prompts from waiting for ever behind short ones.
        decode_delay: per second by which one request's decoding is held up: by a prefill at its rank, or by the
            transfer of its own blocks.
    """

    work: float = 0.5
    impatience_per_s: float = 0.15
    decode_delay: float = 0.1


@dataclass(frozen=True)
class Hold:
    """How a request is kept from lanes for a while; by lane, or empty where it is kept from none.

    Attributes:
        until_s: seconds during which it is not sent there.
        starts_in_s: seconds until a step with it is forecast to begin there, at the earliest.
    """

    until_s: Sequence[float] = ()
    starts_in_s: Sequence[float] = ()


#: It is kept from no lane.
AT_ONCE = Hold()


@dataclass(frozen=True, eq=False)
class Job:
    """A request that waits for a rank to prefill it.

    Attributes:
        number: its position among those that are planned together.
        num_tokens: of prompt and generated ones.
        age_s: seconds that it has waited so far.
        priority: higher first.
        is_due: nobody that stands behind it in the queue goes before it any more.
        num_missing: by lane, tokens that would have to be computed there; ``None`` where it can't go.
        num_shared: by other job's number, leading tokens that both have.
        hold: for how long it is kept from which lanes.
    """

    number: int
    num_tokens: int
    age_s: float
    priority: int
    num_missing: Sequence[int | None]
    num_shared: Sequence[int]
    hold: Hold = AT_ONCE
    is_due: bool = False


@dataclass(frozen=True)
class Turn:
    """A lane's plan.

    Attributes:
        cost: of all of it.
        groups: who shares a step, in order.
        first_token_in_s: by group, seconds until it has its first tokens.
    """

    cost: float
    groups: Sequence[Sequence[Job]] = ()
    first_token_in_s: Sequence[float] = ()


_NO_TURN = Turn(0.0)


class Lane:
    """One rank that prefills."""

    def __init__(
        self,
        number: int,
        *,
        free_in_s: float,
        num_decoding: int,
        num_context_tokens: int,
        max_step_tokens: int,
        step_time: StepTime,
        weights: CostWeights,
        transfer_s_per_token: float = 0.0,
    ) -> None:
        """A rank that has computed all that it was given in ``free_in_s`` seconds, while ``num_decoding`` decode.

        ``transfer_s_per_token``: seconds of moving what is prefilled here to where it is decoded.
        """
        self.number = number
        self.free_in_s = free_in_s
        self._num_decoding = num_decoding
        self._budget = max(max_step_tokens - num_decoding, 1)
        self._step_time = step_time
        self._decode_s = step_time.decode_s(num_context_tokens)
        self._weights = weights
        # Its first token waits for no transfer, its second one does.
        self._transfer_cost_per_token = weights.decode_delay * transfer_s_per_token
        self._turns: dict[frozenset[int], Turn] = {}

    def turn(self, jobs: Sequence[Job]) -> Turn:
        """The plan for ``jobs``, all of which can go here."""
        key = frozenset([job.number for job in jobs])
        turn = self._turns.get(key)
        if turn is None:
            turn = self._turns[key] = self._plan(jobs)
        return turn

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds until ``num_tokens`` tokens are computed, what the steps spend on decoding included."""
        return self._step_time.prefill_in_steps_s(num_tokens, self._budget, self._decode_s)

    def held_s(self, group: Sequence[Job]) -> float:
        """Seconds for which some of ``group`` are kept from here."""
        return max([job.hold.until_s[self.number] for job in group if job.hold.until_s], default=0.0)

    def terms(self, job: Job) -> dict[str, float]:
        """What the cost of ``job`` here is made of, were it alone: their sum is that of its ``turn``."""
        weights, num_missing = self._weights, self._num_missing(job, ())
        wait_s, prefill_s = job.age_s + self._start_s(self.free_in_s, [job]), self.prefill_s(num_missing)
        work_s = self._step_time.prefill_s(num_missing)
        return {
            "wait_s": wait_s,
            "prefill_s": prefill_s,
            "impatience_s": weights.impatience_per_s * (wait_s + prefill_s) ** 2,
            "work_s": weights.work * work_s,
            "decode_delay_s": weights.decode_delay * self._num_decoding * work_s,
            "transfer_s": self._transfer_cost_per_token * job.num_tokens,
        }

    def _plan(self, jobs: Sequence[Job]) -> Turn:
        """Shortest first, weighed by impatience; small ones share a step where that pays."""
        if not jobs:
            return _NO_TURN
        weights, time = self._weights, self._step_time
        groups: list[list[Job]] = []
        num_tokens: list[int] = []  # of each group
        placed: list[Job] = []
        for position, job in enumerate(ordered := self._ordered(jobs)):
            num_missing = self._num_missing(job, placed)
            placed.append(job)
            if groups and (together := num_tokens[-1] + num_missing) <= self._budget:
                delay_s = time.prefill_s(together) - time.prefill_s(num_tokens[-1])
                saved_s = time.prefill_base_s + self._decode_s
                if delay_s * len(groups[-1]) < saved_s * (len(ordered) - position):
                    groups[-1].append(job)
                    num_tokens[-1] = together
                    continue
            groups.append([job])
            num_tokens.append(num_missing)
        cost, ends_in_s, firsts = 0.0, self.free_in_s, []
        for group, tokens in zip(groups, num_tokens, strict=True):
            ends_in_s = self._start_s(ends_in_s, group) + self.prefill_s(tokens)
            firsts.append(ends_in_s)
            for job in group:
                first_s = job.age_s + ends_in_s
                cost += first_s * (1.0 + weights.impatience_per_s * first_s)
                cost += self._transfer_cost_per_token * job.num_tokens
            work_s = time.prefill_s(tokens)
            cost += work_s * (weights.work + weights.decode_delay * self._num_decoding)
        return Turn(cost, groups, firsts)

    def _start_s(self, free_in_s: float, group: Sequence[Job]) -> float:
        for job in group:
            if job.hold.starts_in_s:
                free_in_s = max(free_in_s, job.hold.starts_in_s[self.number])
        return free_in_s

    def _ordered(self, jobs: Sequence[Job]) -> list[Job]:
        impatience = 2.0 * self._weights.impatience_per_s

        def rank(job: Job) -> tuple[int, bool, float, int]:
            num_missing = job.num_missing[self.number]
            assert num_missing is not None, "it can go here"
            if job.is_due:
                return -job.priority, False, 0.0, job.number
            return -job.priority, True, num_missing / (1.0 + impatience * job.age_s), job.number

        return sorted(jobs, key=rank)

    def _num_missing(self, job: Job, placed: Sequence[Job]) -> int:
        num_missing = job.num_missing[self.number]
        assert num_missing is not None, "it can go here"
        for other in placed:
            num_missing = min(num_missing, job.num_tokens - job.num_shared[other.number])
        return max(num_missing, _MIN_MISSING_TOKENS)
