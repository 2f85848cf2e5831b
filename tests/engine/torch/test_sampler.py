"""The sampler's rules, row by row, against transformers' processors and plain arithmetic."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from quartet.engine.base import EngineRequest, Generation, RequestKind
from quartet.engine.guided.masks import TokenMasks
from quartet.engine.runner import RunningRequest
from quartet.engine.sampling import OutputOptions, Sampling
from quartet.engine.torch.sampler import RequestRules, Row, Sampler, apply_rules, unset_bits
from quartet.kvcache.sequence import Sequence as TokenSequence

VOCAB_SIZE = 40


def running(
    sampling: Sampling,
    *,
    prompt: Sequence[int] = (1, 2, 3, 2),
    generated: Sequence[int] = (),
    output: Sequence[int] = (),
    logprobs: int | None = None,
    stop_ids: frozenset[int] = frozenset(),
    seed: int = 11,
) -> RunningRequest:
    generation = Generation(
        prompt_token_ids=prompt,
        generated_token_ids=generated,
        sampling=sampling,
        seed=seed,
        output=OutputOptions(logprobs=logprobs),
    )
    request = EngineRequest(id=1, kind=RequestKind.DECODE, generation=generation)
    seq = TokenSequence([*prompt, *generated, *output], block_size=4)
    return RunningRequest(request=request, seq=seq, stop_ids=stop_ids)


def random_logits(num_rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def ruled(request: RunningRequest, logits: torch.Tensor) -> torch.Tensor:
    """The logits after the request's rules."""
    changed = torch.stack((logits, logits))
    apply_rules(changed, [Row(1, request, RequestRules(request))])
    assert torch.equal(changed[0], logits), "another row was changed"
    return changed[1]


def test_repetition_penalty_is_transformers_over_prompt_and_output() -> None:
    [logits] = random_logits(1)
    request = running(Sampling(repetition_penalty=1.7), generated=[9, 9], output=[30])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([request.seq.token_ids]), logits[None])[0]
    torch.testing.assert_close(ruled(request, logits), expected)


def test_presence_and_frequency_penalties_count_output_alone_earlier_attempts_included() -> None:
    [logits] = random_logits(1)
    request = running(
        Sampling(presence_penalty=0.7, frequency_penalty=-0.3), prompt=[1, 2, 9], generated=[9, 9, 4], output=[4, 5]
    )
    counts = Counter([9, 9, 4, 4, 5])
    expected = [float(logit) - 0.7 * (i in counts) + 0.3 * counts[i] for i, logit in enumerate(logits)]
    torch.testing.assert_close(ruled(request, logits), torch.tensor(expected))


def test_penalties_follow_the_output_step_by_step() -> None:
    request = running(Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25))
    rules = RequestRules(request)
    for token_id in (5, 7, 5):
        logits = random_logits(1)
        fresh = ruled(request, logits[0])
        apply_rules(logits, [Row(0, request, rules)])
        torch.testing.assert_close(logits[0], fresh)
        request.seq.append(token_id)


def test_bias_is_added_after_penalties() -> None:
    [logits] = random_logits(1)
    request = running(Sampling(repetition_penalty=2.0, logit_bias={2: 3.0, 20: -50.0}))
    expected = ruled(running(Sampling(repetition_penalty=2.0)), logits)
    expected[2] += 3.0
    expected[20] -= 50.0
    torch.testing.assert_close(ruled(request, logits), expected)


@pytest.mark.parametrize(("num_output", "is_masked"), [(0, True), (2, True), (3, False)])
def test_stop_ids_are_out_of_reach_before_min_tokens(num_output: int, is_masked: bool) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 6], logits[0, 8], logits[0, 3] = 9.0, 8.0, 7.0
    request = running(Sampling(temperature=0.0, min_tokens=3), generated=[0] * num_output, stop_ids=frozenset({6, 8}))
    [token] = Sampler().sample(logits, [request])
    assert token.token_id == (3 if is_masked else 6)


def test_greedy_rows_take_the_best_token_whatever_their_neighbours_do() -> None:
    logits = random_logits(6)
    best = logits.argmax(-1).tolist()
    greedy, hot = Sampling(temperature=0.0), Sampling(temperature=5.0)
    sampler = Sampler()
    plain = sampler.sample(logits.clone(), [running(greedy) for _ in range(6)])
    assert [token.token_id for token in plain] == best
    mixed = sampler.sample(logits.clone(), [running(hot if i % 2 else greedy, seed=i) for i in range(6)])
    assert [token.token_id for token in mixed][::2] == best[::2]
    assert [token.token_id for token in mixed][1::2] != best[1::2]


def test_logprobs_are_the_models_own_before_temperature_penalties_and_filters() -> None:
    logits = random_logits(3)
    expected = logits.double().log_softmax(-1)
    sampling = Sampling(temperature=0.3, top_k=2, logit_bias={5: 100.0})
    requests = [running(sampling, logprobs=n) for n in (0, 4)] + [running(sampling)]
    tokens = Sampler().sample(logits, requests)
    assert [token.token_id for token in tokens] == [5, 5, 5]
    assert tokens[2].logprobs is None
    for row, num_top in ((0, 0), (1, 4)):
        report = tokens[row].logprobs
        assert report is not None
        assert report.token_id == 5
        assert report.logprob == pytest.approx(float(expected[row, 5]), abs=1e-5)
        top = expected[row].topk(num_top)
        assert report.top_token_ids == tuple(top.indices.tolist())
        assert report.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_all_dtypes_of_logits_are_sampled(dtype: torch.dtype) -> None:
    logits = random_logits(2).to(dtype)
    requests = [running(Sampling(top_p=0.9, frequency_penalty=0.5), logprobs=2), running(Sampling(temperature=0.0))]
    tokens = Sampler().sample(logits, requests)
    assert all(0 <= token.token_id < VOCAB_SIZE for token in tokens)


def test_the_same_seed_gives_the_same_tokens_in_any_batch_and_on_any_attempt() -> None:
    sampling = Sampling(temperature=1.5, top_p=0.95, repetition_penalty=1.1)
    logits = random_logits(20, seed=3)

    def tokens_of(splits_at: int, neighbours: int) -> list[int]:
        """Twenty tokens, the first ones of an earlier attempt, between other rows."""
        first = running(sampling)
        sampler = Sampler()
        token_ids: list[int] = []
        for i in range(20):
            if i == splits_at:
                first = running(sampling, generated=token_ids)
                sampler = Sampler()
            others = [running(Sampling(), seed=100 + i + j) for j in range(neighbours)]
            batch = torch.cat((random_logits(neighbours, seed=50 + i), logits[i : i + 1]))
            token_ids.append(sampler.sample(batch, [*others, first])[-1].token_id)
            first.seq.append(token_ids[-1])
        return token_ids

    alone = tokens_of(splits_at=0, neighbours=0)
    assert len(set(alone)) > 5
    assert all(tokens_of(splits_at, neighbours=splits_at % 4) == alone for splits_at in range(1, 20, 3))


def test_other_seeds_and_choices_give_other_tokens() -> None:
    requests = [running(Sampling(temperature=3.0), seed=seed) for seed in range(40)]
    logits = random_logits(1).expand(40, -1).clone()
    assert len({token.token_id for token in Sampler().sample(logits, requests)}) > 10


def test_nothing_is_kept_of_requests_that_are_gone() -> None:
    sampler = Sampler()
    request = running(Sampling(presence_penalty=1.0))
    sampler.sample(random_logits(1), [request])
    assert len(sampler._rules) == 1
    del request
    gc.collect()
    assert len(sampler._rules) == 0


def masks_of(*rows: tuple[int, Sequence[int]]) -> TokenMasks:
    """Masks that allow these tokens, by row number."""
    is_allowed = np.zeros((len(rows), -(-VOCAB_SIZE // 32) * 32), dtype=bool)
    for number, (_, token_ids) in enumerate(rows):
        is_allowed[number, list(token_ids)] = True
    return TokenMasks([row for row, _ in rows], np.packbits(is_allowed, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (0, 2), (3,)])
@pytest.mark.parametrize("is_plain", [True, False])
def test_masked_rows_choose_among_what_is_allowed_and_others_as_ever(rows: tuple[int, ...], is_plain: bool) -> None:
    samplings = [Sampling(temperature=0.0)] * 4
    if not is_plain:
        samplings = [
            Sampling(temperature=1.5),
            Sampling(temperature=1.0, top_p=0.5, frequency_penalty=1.0),
            Sampling(temperature=0.0, logit_bias={9: 100.0}),
            Sampling(temperature=1.0, top_k=3, repetition_penalty=1.2),
        ]
    requests = [running(item, seed=number) for number, item in enumerate(samplings)]
    logits, allowed = random_logits(4), (3, 31, 32, VOCAB_SIZE - 1)
    free = Sampler().sample(logits.clone(), requests)
    launched = Sampler().launch(logits.clone(), requests, masks_of(*((row, allowed) for row in rows)))
    assert not launched.can_follow, "the next mask needs these tokens"
    for row, token in enumerate(launched.read()):
        assert token.token_id in allowed if row in rows else token == free[row]


def test_bits_are_unpacked_on_devices_as_on_the_host() -> None:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (5, 7), dtype=np.int64).astype(np.int32)
    expected = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=211) == 0
    assert torch.equal(unset_bits(torch.from_numpy(words), 211), torch.from_numpy(expected))


def test_sampling_does_not_change_the_request() -> None:
    request = running(Sampling(presence_penalty=1.0, logit_bias={3: 1.0}), output=[4])
    before = copy.deepcopy(request.seq.token_ids)
    Sampler().sample(random_logits(1), [request])
    assert request.seq.token_ids == before
