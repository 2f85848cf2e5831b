"""Whatever the order of arrivals, steps, cancels, pulls and releases: every request ends with its solo run's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from quartet.engine.base import EngineRequest, RequestKind
from quartet.engine.runner import RequestState
from quartet.engine.sampling import Sampling
from quartet.kvcache.block_hash import MediaSpan
from tests.engine.fakes import expected_output, make_request, write_embeddings
from tests.engine.stepping import Stepper

# Two tokens make equal prefixes common, as eight blocks do preemptions.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
EOS = frozenset(range(2, 10))
PLACEHOLDER = 63
# Two pictures, of fewer tokens than a block and of more.
PICTURES = [(bytes([number]) * 32, num_tokens) for number, num_tokens in enumerate((3, 6))]


@dataclass(frozen=True)
class Seen:
    """A picture in a prompt.

    Attributes:
        picture: which one.
        position: where it begins, in a prompt that is long enough.
        has_blocks: its embeddings are here.
    """

    picture: int
    position: int
    has_blocks: bool


SEEN = st.none() | st.builds(Seen, st.integers(0, 1), st.integers(0, 14), st.booleans())


def media_blocks(picture: int) -> tuple[int, ...]:
    return (2 * picture + 1, 2 * picture)


def with_picture(prompt: list[int], seen: Seen | None) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """The prompt with the picture in place of some of its tokens, no longer than any; and where the picture is."""
    if seen is None:
        return prompt, ()
    media_id, num_tokens = PICTURES[seen.picture]
    text = prompt[: 14 - num_tokens]
    position = min(seen.position, len(text))
    whole = [*text[:position], *[PLACEHOLDER] * num_tokens, *text[position:]]
    return whole, (MediaSpan(media_id, position, num_tokens),)


class SchedulerMachine(RuleBasedStateMachine):
    """A tiny pool under random traffic; the fake model checks every KV slot it attends to."""

    requests: Bundle[EngineRequest] = Bundle("requests")

    @initialize(max_num_seqs=st.integers(1, 4), extra_tokens=st.integers(0, 8))
    def begin(self, max_num_seqs: int, extra_tokens: int) -> None:
        self.stepper = Stepper(
            num_blocks=8,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            eos_token_ids=tuple(EOS),
            num_embedding_blocks=4,
            placeholder_id=PLACEHOLDER,
        )
        assert self.stepper.runner.embeddings is not None
        for picture, (media_id, num_tokens) in enumerate(PICTURES):
            write_embeddings(self.stepper.runner.embeddings, media_blocks(picture), MediaSpan(media_id, 0, num_tokens))
        self.submitted: list[EngineRequest] = []
        self.cancelled: set[int] = set()
        self.failed_pulls: set[int] = set()

    @rule(
        target=requests,
        prompt=PROMPTS,
        kind=st.sampled_from(RequestKind),
        num_resumed=st.integers(0, 6),
        num_output=st.integers(1, 18),
        priority=st.integers(0, 2),
        has_hand_off=st.booleans(),
        seen=SEEN,
    )
    def submit(
        self,
        prompt: list[int],
        kind: RequestKind,
        num_resumed: int,
        num_output: int,
        priority: int,
        has_hand_off: bool,
        seen: Seen | None,
    ) -> EngineRequest:
        sampling = Sampling(max_tokens=num_output)
        prompt, media = with_picture(prompt, seen)
        whole = self._expected(make_request(prompt, sampling=sampling, media=media))
        generated = whole[: min(num_resumed, len(whole) - 1)]
        given = [*prompt, *generated]
        hand_off = None
        if has_hand_off and kind is RequestKind.DECODE and len(given) > 1:
            hand_off = self.stepper.puller.offer_prefix(given, media)
        request = make_request(
            prompt,
            kind=kind,
            generated=generated,
            priority=priority,
            sampling=sampling,
            hand_off=hand_off,
            media=media,
            media_blocks=(media_blocks(seen.picture),) if seen is not None and seen.has_blocks else (),
        )
        self.stepper.add(request)
        self.submitted.append(request)
        return request

    @rule(num_steps=st.integers(1, 5))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.stepper.step()

    @rule(request=consumes(requests))
    def cancel(self, request: EngineRequest) -> None:
        if self.stepper.scheduler.cancel(request.id) is not None:
            self.cancelled.add(request.id)

    @rule(request=requests)
    def release(self, request: EngineRequest) -> None:
        self.stepper.scheduler.release(request.id)

    @rule(succeeds=st.booleans(), index=st.integers(0, 7))
    def end_pull(self, succeeds: bool, index: int) -> None:
        if not self.stepper.pulls:
            return
        pull = self.stepper.pulls.pop(index % len(self.stepper.pulls))
        if succeeds:
            self.stepper.copy(pull)
        else:
            self.failed_pulls.add(pull.id)
        self.stepper.scheduler.end_pull(pull.id, succeeded=succeeds)

    @invariant()
    def blocks_are_used_by_requests_that_live_only(self) -> None:
        counts = self.stepper.counts
        assert counts.free + counts.cached + counts.held + counts.in_use == counts.total
        live = self.stepper.scheduler.live.values()
        assert counts.in_use == len({block for running in live for block in running.seq.block_table})
        assert all(bool(running.seq.block_table) != (running.state is RequestState.WAITING) for running in live)

    def teardown(self) -> None:
        if hasattr(self, "stepper"):
            self._finish()
            self._check_outputs()

    def _finish(self) -> None:
        for _ in range(len(self.submitted) + 1):
            while self.stepper.pulls:
                self.end_pull(succeeds=True, index=0)
            for request in self.submitted:
                self.stepper.scheduler.release(request.id)
            self.stepper.run()
        assert not self.stepper.scheduler.live, "everything ends once nothing is held or pulled"
        for request in self.submitted:
            self.stepper.scheduler.release(request.id)
        assert self.stepper.counts.free + self.stepper.counts.cached == self.stepper.counts.total
        assert self.stepper.scheduler.num_queued_prefill_tokens == 0

    def _check_outputs(self) -> None:
        for request in self.submitted:
            output = self.stepper.outputs[request.id]
            expected = self._expected(request)[len(request.generation.generated_token_ids) :]
            if request.id in self.stepper.media_lost:
                assert request.generation.media
                assert not request.media_blocks, "nothing was lost"
            if request.id in self.cancelled | self.failed_pulls | self.stepper.media_lost:
                assert output == expected[: len(output)]
            elif request.kind is RequestKind.PREFILL:
                assert output == expected[:1]
            else:
                assert output == expected

    def _expected(self, request: EngineRequest) -> list[int]:
        return expected_output(request.generation, eos_token_ids=EOS)


SchedulerMachine.TestCase.settings = settings(stateful_step_count=40)
test_every_request_ends_with_the_tokens_of_its_solo_run = SchedulerMachine.TestCase
