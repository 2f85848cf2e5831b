"""Grammars through whole engines: outputs that follow them, also where another engine goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import jsonschema
import pytest
import pytest_asyncio
import tokenizers

from quartet.engine.base import EngineRequest, FinishReason, RequestKind
from quartet.engine.sampling import GrammarKind, GuidedDecoding, OutputOptions, Sampling, guided_choice
from quartet.engine.step_engine import StepEngine
from quartet.errors import InvalidRequestError, RequestCancelledError, UnsupportedFieldError
from tests import tiny
from tests.engine.fakes import make_request
from tests.engine.torch.driving import Outcome, run_all, torch_engine
from tests.schemas import SCHEMAS, guided

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = range(20, 40)
NUM_TOKENS = 400
BOMB = guided({"type": "string", "pattern": "^(([a-z]{1,40}){1,40}){1,40}(x.*y.*z){20}$"})
TOKENIZER = tokenizers.Tokenizer.from_file(str(tiny.CHECKPOINT / "tokenizer.json"))


GRAMMARS = [guided(schema) for schema in SCHEMAS.values()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[StepEngine]:
    async with guided_engine() as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def own_engine() -> AsyncIterator[StepEngine]:
    """Which has compiled no grammar yet, and keeps none that has failed from other tests."""
    async with guided_engine() as engine:
        yield engine


def guided_engine() -> AbstractAsyncContextManager[StepEngine]:
    return torch_engine(tiny.CHECKPOINT, dtype="float32", num_blocks=4096, follows_grammars=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(engine: StepEngine) -> list[Outcome]:
    """Of each of ``GRAMMARS``."""
    return await run_all(engine, [ask(grammar) for grammar in GRAMMARS])


def ask(grammar: GuidedDecoding | None, seed: int = 7, shown: Sequence[int] = (), **sampling: object) -> EngineRequest:
    known = {"temperature": 1.0, "max_tokens": NUM_TOKENS} | sampling
    request = make_request(PROMPT, generated=shown, sampling=Sampling(guided=grammar, **known))  # type: ignore[arg-type]
    return replace(request, generation=replace(request.generation, seed=seed))


def text_of(outcome: Outcome) -> str:
    text: str = TOKENIZER.decode(outcome.token_ids)
    return text


async def test_answers_follow_their_schemas_and_end_by_themselves(undisturbed: list[Outcome]) -> None:
    for schema, outcome in zip(SCHEMAS.values(), undisturbed, strict=True):
        assert outcome.finished is not None and outcome.finished.reason is FinishReason.STOP_ID
        jsonschema.validate(json.loads(text_of(outcome)), schema)


@pytest.mark.parametrize("k", [1, 5])
async def test_answers_whose_worker_dies_after_every_kth_token_are_those_of_an_undisturbed_run(
    k: int, engine: StepEngine, undisturbed: list[Outcome]
) -> None:
    # Each attempt knows only what was shown, and gives k more tokens before its worker is gone. All run at once: if
    # each goes on as the undisturbed run does, so do they one after the other.
    attempts = [
        (number, first) for number, outcome in enumerate(undisturbed) for first in range(0, len(outcome.token_ids), k)
    ]
    outcomes = await run_all(
        engine,
        [
            ask(GRAMMARS[number], shown=undisturbed[number].token_ids[:first], max_tokens=first + k)
            for number, first in attempts
        ],
    )
    for (number, first), outcome in zip(attempts, outcomes, strict=True):
        whole = undisturbed[number].token_ids
        assert outcome.token_ids == whole[first : first + k], f"grammar {number}, from token {first} on"
        assert outcome.finished is not None
        is_last = first + k >= len(whole)
        assert outcome.finished.reason is (FinishReason.STOP_ID if is_last else FinishReason.LENGTH)


async def test_prefill_samples_the_first_token_under_the_grammar(
    engine: StepEngine, undisturbed: list[Outcome]
) -> None:
    prefills = await run_all(engine, [replace(ask(grammar), kind=RequestKind.PREFILL) for grammar in GRAMMARS])
    first_ids = [outcome.prefilled.token_id for outcome in prefills if outcome.prefilled is not None]
    assert first_ids == [outcome.token_ids[0] for outcome in undisturbed]


async def test_grammars_of_all_kinds_and_free_requests_share_a_batch(engine: StepEngine) -> None:
    free = [ask(None, seed=seed, max_tokens=20) for seed in range(4)]
    alone = await run_all(engine, free)
    grammars = {
        GuidedDecoding(GrammarKind.REGEX, "[0-9]{3}-[a-z]{4}"): r"[0-9]{3}-[a-z]{4}",
        GuidedDecoding(GrammarKind.EBNF, 'root ::= "a" "b"+ "c"'): "ab+c",
        GuidedDecoding(GrammarKind.LARK, 'start: "x" /[0-9]{2,5}/ "y"'): "x[0-9]{2,5}y",
        guided_choice(["yes", "no"]): "yes|no",
    }
    again = [ask(None, seed=seed, max_tokens=20) for seed in range(4)]
    outcomes = await run_all(engine, [*again, *map(ask, grammars)])
    assert [outcome.token_ids for outcome in outcomes[:4]] == [outcome.token_ids for outcome in alone]
    for outcome, pattern in zip(outcomes[4:], grammars.values(), strict=True):
        jsonschema.validate(text_of(outcome), {"type": "string", "pattern": f"^({pattern})$"})


async def test_a_grammar_ends_the_output_whatever_else_the_request_says(engine: StepEngine) -> None:
    grammar = GuidedDecoding(GrammarKind.REGEX, "[ab]{1,3}")
    samplings = ({"ignore_eos": True}, {"min_tokens": 20}, {"ignore_eos": True, "min_tokens": 20, "temperature": 0.0})
    for outcome in await run_all(engine, [ask(grammar, **sampling) for sampling in samplings]):
        assert outcome.finished is not None and outcome.finished.reason is FinishReason.STOP_ID
        assert len(text_of(outcome)) == 3, "the end is put off as far as the grammar lets it"


async def test_penalties_bias_and_filters_choose_among_what_the_grammar_allows(engine: StepEngine) -> None:
    grammar = guided(SCHEMAS["enums"])
    samplings = (
        {"temperature": 0.0},
        {"temperature": 2.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 2.0},
        {"logit_bias": {tiny.EOS_ID: 100.0, 300: 100.0}},
    )
    for outcome in await run_all(engine, [ask(grammar, **sampling) for sampling in samplings]):
        jsonschema.validate(json.loads(text_of(outcome)), SCHEMAS["enums"])


async def test_log_probabilities_are_the_models_own(engine: StepEngine) -> None:
    request = ask(GuidedDecoding(GrammarKind.REGEX, "[0-9]{6}"), temperature=0.0)
    options = OutputOptions(logprobs=2)
    [outcome] = await run_all(engine, [replace(request, generation=replace(request.generation, output=options))])
    assert len(outcome.logprobs) == len(outcome.token_ids) > 5
    assert any(report.token_id not in report.top_token_ids for report in outcome.logprobs)
    assert all(report.logprob <= report.top_logprobs[0] < 0 for report in outcome.logprobs)


@pytest.mark.parametrize("kind", RequestKind)
async def test_a_grammar_that_fails_while_it_runs_ends_its_request_alone(
    kind: RequestKind, own_engine: StepEngine
) -> None:
    engine = own_engine
    others = [ask(guided(SCHEMAS["person"])), ask(None, max_tokens=20)]
    # The bomb goes off after its first tokens; for prefill they were shown already.
    [before] = await run_all(engine, [ask(BOMB)], may_fail=True)
    bomb = replace(ask(BOMB, shown=before.token_ids if kind is RequestKind.PREFILL else ()), kind=kind)
    failed, *rest = await run_all(engine, [bomb, *others], may_fail=True)
    assert failed.failed is not None and isinstance(failed.failed.error, InvalidRequestError)
    assert "can't be followed any further" in failed.failed.error.message
    assert all(outcome.finished is not None for outcome in rest)
    [stats] = engine.stats()
    assert stats.num_held_blocks == stats.num_in_use_blocks == 0


async def test_what_can_not_be_compiled_is_refused_and_what_was_cancelled_ends(own_engine: StepEngine) -> None:
    engine = own_engine
    refused, cancelled = ask(guided({"uniqueItems": True})), ask(guided(SCHEMAS["tuple"]))
    unlucky = ask(GuidedDecoding(GrammarKind.REGEX, "a"), shown=[300])  # a token that the grammar does not allow
    for request in (refused, cancelled, unlucky):
        engine.submit(request)
    engine.cancel(cancelled.id)
    errors = dict[int, type]()
    async for output in engine.outputs():
        errors |= {failed.id: type(failed.error) for failed in output.failed}
        if len(errors) == 3:
            break
    assert errors == {
        refused.id: UnsupportedFieldError,
        cancelled.id: RequestCancelledError,
        unlucky.id: InvalidRequestError,
    }
    [stats] = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_queued_prefill_tokens) == (0, 0, 0)


async def test_an_engine_without_grammars_says_so() -> None:
    async with torch_engine(tiny.CHECKPOINT) as plain:
        assert not any(name.startswith("guided") for name in plain.capabilities.sampling_fields)
        [outcome] = await run_all(plain, [ask(guided_choice(["a"]))], may_fail=True)
    assert outcome.failed is not None and isinstance(outcome.failed.error, UnsupportedFieldError)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_on_a_gpu_guided_and_free_rows_share_graphs_and_go_on_after_any_token(dtype: str) -> None:
    async with torch_engine(
        tiny.CHECKPOINT, dtype=dtype, device="cuda:0", num_blocks=4096, follows_grammars=True
    ) as engine:
        free = [ask(None, seed=seed, max_tokens=60, ignore_eos=True) for seed in range(3)]
        outcomes = await run_all(engine, [*map(ask, GRAMMARS), *free])
        for schema, outcome in zip(SCHEMAS.values(), outcomes, strict=False):
            assert outcome.finished is not None and outcome.finished.reason is FinishReason.STOP_ID
            jsonschema.validate(json.loads(text_of(outcome)), schema)
        assert all(len(outcome.token_ids) == 60 for outcome in outcomes[len(GRAMMARS) :])
        cuts = [outcome.token_ids[:8] for outcome in outcomes[: len(GRAMMARS)]]
        resumed = await run_all(
            engine, [ask(grammar, shown=shown) for grammar, shown in zip(GRAMMARS, cuts, strict=True)]
        )
    for schema, shown, outcome in zip(SCHEMAS.values(), cuts, resumed, strict=True):
        jsonschema.validate(json.loads(TOKENIZER.decode([*shown, *outcome.token_ids])), schema)
