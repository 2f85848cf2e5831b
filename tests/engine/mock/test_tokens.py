"""Tokens are a function of the request and the position, and obey what a request may rule out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from quartet.engine.base import EngineRequest, Generation, RequestKind
from quartet.engine.mock.runner import MockTokens
from quartet.engine.runner import RunningRequest
from quartet.engine.sampling import Sampling
from quartet.kvcache import sequence

EOS = 1
WORDS = range(300, 350)


def generate(
    generation: Generation, count: int, *, words: Sequence[int] = WORDS, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """The next ``count`` tokens of one engine, whatever they are."""
    request = EngineRequest(id=1, kind=RequestKind.DECODE, generation=generation)
    seq = sequence.Sequence((*generation.prompt_token_ids, *generation.generated_token_ids), block_size=4)
    running = RunningRequest(request=request, seq=seq, stop_ids=stop_ids)
    tokens = MockTokens(words)
    made = []
    for _ in range(count):
        made += tokens.next([running])
        seq.append(made[-1])
    return made


def make(prompt: Sequence[int] = (5, 6, 7), seed: int = 3, choice: int = 0, **sampling: object) -> Generation:
    return Generation(prompt_token_ids=prompt, seed=seed, choice=choice, sampling=Sampling(**sampling))  # type: ignore[arg-type]


@given(
    prompt=st.lists(st.integers(0, 639), min_size=1, max_size=80),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 1.0]),
    done=st.integers(0, 12),
)
def test_another_attempt_goes_on_with_the_same_tokens(
    prompt: list[int], seed: int, temperature: float, done: int
) -> None:
    whole = generate(make(prompt, seed, temperature=temperature), 12)
    assert set(whole) <= set(WORDS)
    again = replace(make(prompt, seed, temperature=temperature), generated_token_ids=whole[:done])
    assert whole[:done] + generate(again, 12 - done) == whole


def test_seed_choice_and_prompt_make_other_answers() -> None:
    answers = [make(), make(seed=4), make(choice=1), make(prompt=(5, 6, 8)), make(prompt=(5, 5, 6, 7))]
    assert len({tuple(generate(answer, 8)) for answer in answers}) == len(answers)


def test_a_greedy_answer_does_not_depend_on_the_seed() -> None:
    assert generate(make(seed=3, temperature=0.0), 8) == generate(make(seed=4, temperature=0.0), 8)


def test_an_answer_has_many_different_tokens() -> None:
    assert len(set(generate(make(), 200))) > 5


def test_no_stop_id_comes_before_min_tokens_and_then_one_may() -> None:
    plain = generate(make(), 8)
    stop_ids = frozenset(plain[:6])
    masked = generate(make(min_tokens=4), 8, stop_ids=stop_ids)
    assert stop_ids.isdisjoint(masked[:4])
    assert masked[4:] == plain[4:]


def test_if_every_word_is_ruled_out_one_is_generated_nevertheless() -> None:
    made = generate(make(min_tokens=4), 4, words=(300, 301), stop_ids=frozenset((300, 301)))
    assert set(made) <= {300, 301}


def test_other_requests_in_a_step_do_not_change_the_tokens() -> None:
    requests = []
    for id, prompt in enumerate(([5], [6], [7])):
        seq = sequence.Sequence(prompt, block_size=4)
        request = EngineRequest(id=id, kind=RequestKind.DECODE, generation=make(prompt))
        requests.append(RunningRequest(request=request, seq=seq))
    tokens = MockTokens(WORDS)
    for step in ([0], [0, 1, 2], [1], [2, 0], [1, 2], [1]):
        for index, token_id in zip(step, tokens.next([requests[index] for index in step]), strict=True):
            requests[index].seq.append(token_id)
    for running in requests:
        assert running.seq.token_ids[1:] == generate(running.request.generation, len(running.seq) - 1)


def test_a_single_word_is_enough() -> None:
    assert generate(make(), 3, words=(300,)) == [300] * 3


def test_a_bias_brings_even_a_special_token_but_no_stop_id_too_early() -> None:
    biased = make(min_tokens=2, logit_bias={EOS: 100.0, 600: 1.0})
    assert generate(biased, 4, stop_ids=frozenset((EOS,))) == [600, 600, EOS, EOS]


def test_a_negative_bias_keeps_a_token_out() -> None:
    plain = generate(make(), 8)
    biased = generate(make(logit_bias={plain[0]: -1.0}), 8)
    assert plain[0] not in biased
