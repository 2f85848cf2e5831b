from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from quartet.engine.guided.compiler import SHORT_LENGTH, Compiled, GrammarCompiler
from quartet.engine.guided.masks import Guide, MaskThread, Restarts
from quartet.engine.runner import RunningRequest
from quartet.engine.sampling import GrammarKind, GuidedDecoding, Sampling
from quartet.errors import InvalidRequestError, ServingError, UnsupportedFieldError
from quartet.kvcache.sequence import Sequence as TokenSequence
from tests import tiny
from tests.engine.fakes import WAIT_S, make_request
from tests.schemas import SCHEMAS, guided

PERSON = guided(SCHEMAS["person"])
BOMB = guided({"type": "string", "pattern": "^(([a-z]{1,40}){1,40}){1,40}(x.*y.*z){20}$"})


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    source = (tiny.CHECKPOINT / "tokenizer.json").read_text()
    compiler = GrammarCompiler(source, tiny.VOCAB_SIZE, [tiny.EOS_ID])
    yield compiler
    compiler.close()


@pytest.fixture
def masks() -> Iterator[MaskThread]:
    thread = MaskThread(tiny.VOCAB_SIZE)
    yield thread
    thread.close()


def compiled(compiler: GrammarCompiler, grammar: GuidedDecoding) -> Compiled:
    found = list[Compiled]()
    ended = threading.Event()

    def end(result: Compiled) -> None:
        found.append(result)
        ended.set()

    compiler.compile(grammar, end, lambda: True)
    assert ended.wait(WAIT_S)
    return found[0]


def guide_of(compiler: GrammarCompiler, grammar: GuidedDecoding) -> Guide:
    guide = compiled(compiler, grammar)
    assert isinstance(guide, Guide)
    return guide


def running(guide: Guide | None, output: Sequence[int] = (), sampling: Sampling | None = None) -> RunningRequest:
    request = make_request([5, 6, 7], sampling=sampling or Sampling())
    seq = TokenSequence((5, 6, 7, *output), block_size=4)
    return RunningRequest(request=request, seq=seq, stop_ids=frozenset({tiny.EOS_ID}), guide=guide)


def allowed(masks: MaskThread, *requests: RunningRequest) -> list[set[int]]:
    pending = masks.begin(requests)
    assert pending is not None
    bits = np.unpackbits(pending.read().bits.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def output_of(compiler: GrammarCompiler, masks: MaskThread, grammar: GuidedDecoding, seed: int) -> list[int]:
    """Tokens that follow the grammar up to its end, drawn at random."""
    rng, guide = random.Random(seed), guide_of(compiler, grammar)
    request = running(guide)
    while len(request.seq) < 400:
        [ids] = allowed(masks, request)
        token_id = rng.choice(sorted(ids))
        request.seq.append(token_id)
        if token_id == tiny.EOS_ID:
            break
    return list(request.seq.token_ids[3:])


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_new_guide_goes_on_after_any_token_as_the_old_one_would_have(
    name: str, compiler: GrammarCompiler, masks: MaskThread
) -> None:
    grammar = guided(SCHEMAS[name])
    output = output_of(compiler, masks, grammar, seed=1)
    old = running(guide_of(compiler, grammar))
    assert len(output) > 21
    for position, token_id in enumerate(output[:60]):
        new = running(guide_of(compiler, grammar), output[:position])
        [wanted], [found] = allowed(masks, old), allowed(masks, new)
        assert found == wanted and token_id in wanted
        old.seq.append(token_id)


def test_a_mask_allows_just_the_tokens_after_which_the_grammar_can_go_on(
    compiler: GrammarCompiler, masks: MaskThread
) -> None:
    guide = guide_of(compiler, GuidedDecoding(GrammarKind.REGEX, "(sun|sea)?[0-9]+"))
    [ids] = allowed(masks, running(guide))
    expected = {i for i in range(tiny.VOCAB_SIZE) if guide.matcher.validate_tokens([i]) == 1}
    assert ids == expected and tiny.EOS_ID not in ids
    free = running(None)
    pending = masks.begin([free, running(guide)])
    assert pending is not None and pending.read().rows == [1], "only rows with a grammar are masked"
    assert masks.begin([free]) is None


def test_an_output_ends_where_its_grammar_ends_and_only_there(compiler: GrammarCompiler, masks: MaskThread) -> None:
    grammar = GuidedDecoding(GrammarKind.REGEX, "a{2,4}")
    [a] = [i for i in sorted(allowed(masks, running(guide_of(compiler, grammar)))[0]) if piece(i) == "a"]

    def ids_after(num: int, **sampling: object) -> set[int]:
        request = running(guide_of(compiler, grammar), [a] * num, Sampling(**sampling))  # type: ignore[arg-type]
        return allowed(masks, request)[0]

    assert tiny.EOS_ID not in ids_after(1)
    assert {a, tiny.EOS_ID} <= ids_after(2)
    # They put the end off, but can't keep an output from ending where nothing else may come.
    for late in ({"ignore_eos": True}, {"min_tokens": 9}):
        assert a in ids_after(2, **late) and tiny.EOS_ID not in ids_after(2, **late)
        assert ids_after(4, **late) == {tiny.EOS_ID}


def piece(token_id: int) -> str:
    vocabulary = json.loads((tiny.CHECKPOINT / "tokenizer.json").read_text())["model"]["vocab"]
    return next((text for text, number in vocabulary.items() if number == token_id), "")


def test_a_token_outside_the_grammar_is_that_guides_error_alone(compiler: GrammarCompiler, masks: MaskThread) -> None:
    grammar = GuidedDecoding(GrammarKind.REGEX, "[0-9]+")
    wrong, right = running(guide_of(compiler, grammar), [tiny.EOS_ID]), running(guide_of(compiler, grammar))
    ids = allowed(masks, wrong, right)
    assert wrong.guide is not None and wrong.guide.error is not None
    assert wrong.guide.error.field == "sampling.guided"
    assert right.guide is not None and right.guide.error is None
    assert ids[1] == allowed(masks, running(guide_of(compiler, grammar)))[0]


def test_a_pattern_that_explodes_is_that_guides_error_alone(compiler: GrammarCompiler, masks: MaskThread) -> None:
    bomb, other = running(guide_of(compiler, BOMB)), running(guide_of(compiler, PERSON))
    rng = random.Random(0)
    for _ in range(50):
        ids = allowed(masks, bomb, other)
        assert bomb.guide is not None and other.guide is not None and other.guide.error is None
        if bomb.guide.error is not None:
            break
        for request, row in zip((bomb, other), ids, strict=True):
            if len(row - {tiny.EOS_ID}) > 0:
                request.seq.append(rng.choice(sorted(row - {tiny.EOS_ID})))
    assert bomb.guide is not None and isinstance(bomb.guide.error, InvalidRequestError)
    assert "can't be followed any further" in bomb.guide.error.message and len(bomb.guide.error.message) < 300


def followed(masks: MaskThread, request: RunningRequest, seed: int) -> int:
    """How many tokens, drawn by ``seed``, it can be given before its guide has an error."""
    rng = random.Random(seed)
    for num_tokens in range(100):
        [ids] = allowed(masks, request)
        assert request.guide is not None
        if request.guide.error is not None:
            return num_tokens
        request.seq.append(rng.choice(sorted(ids - {tiny.EOS_ID})))
    raise AssertionError("it never fails")


def test_a_guide_that_fails_leaves_others_of_its_grammar_as_they_were(masks: MaskThread) -> None:
    source = (tiny.CHECKPOINT / "tokenizer.json").read_text()
    alone = list[int]()
    for seed in range(3):
        compiler = GrammarCompiler(source, tiny.VOCAB_SIZE, [tiny.EOS_ID])
        alone.append(followed(masks, running(guide_of(compiler, BOMB)), seed))
        compiler.close()
    assert min(alone) > 1
    compiler = GrammarCompiler(source, tiny.VOCAB_SIZE, [tiny.EOS_ID])
    # They share a lexer, and the first one brings it to its limits.
    first, second = running(guide_of(compiler, BOMB)), running(guide_of(compiler, BOMB))
    assert [followed(masks, first, 0), followed(masks, second, 1)] == alone[:2]
    assert compiler.find(BOMB) is None, "those that come later begin anew"
    assert followed(masks, running(guide_of(compiler, BOMB)), 2) == alone[2]
    compiler.close()


def test_a_grammar_that_takes_long_to_compile_is_not_compiled_beside_a_step(
    compiler: GrammarCompiler, masks: MaskThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quartet.engine.guided.masks._FREE_S", 0.0)
    monkeypatch.setattr("quartet.engine.guided.masks._MASK_S", 0.0)
    grammar = guided({"type": "string", "pattern": "^[0-9]{1,9}$"})
    guides = [guide_of(compiler, grammar) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr("quartet.engine.guided.compiler.llguidance.LLMatcher", None)  # compiling would fail loudly
        guides[0].take([tiny.EOS_ID], Restarts())
    assert guides[0].error is not None and guides[1].error is None


def test_the_guides_of_one_step_begin_again_for_a_bounded_time(compiler: GrammarCompiler) -> None:
    grammar = guided({"type": "string", "pattern": "^[0-9]{1,8}$"})
    spent = Restarts()
    spent.left_s = 0.0
    begun = list[float]()
    for restarts in (spent, Restarts()):
        guide = Guide(guide_of(compiler, grammar).matcher, lambda budget_s: begun.append(budget_s))
        guide.take([tiny.EOS_ID], restarts)
        assert guide.error is not None
    assert len(begun) == 1 and 0 < begun[0] <= Restarts().left_s


def test_an_error_while_it_begins_again_is_that_guides_own(compiler: GrammarCompiler) -> None:
    def fail(_budget_s: float) -> None:
        raise ValueError("no grammar any more")

    guide = Guide(guide_of(compiler, guided({"type": "string", "pattern": "^[0-9]{1,7}$"})).matcher, fail)
    guide.take([tiny.EOS_ID], Restarts())
    assert guide.error is not None


def test_a_grammar_whose_masks_take_too_long_is_that_guides_error_alone(
    compiler: GrammarCompiler, masks: MaskThread
) -> None:
    # Each token can be split into parts in more ways than the last one.
    ambiguous = GuidedDecoding(GrammarKind.LARK, "start: e\ne: e e | e e e | /[a-z ]/")
    slow, other = running(guide_of(compiler, ambiguous)), running(guide_of(compiler, PERSON))
    [letter] = [i for i in allowed(masks, slow)[0] if piece(i) == "a"]
    for _ in range(200):
        allowed(masks, slow, other)
        assert slow.guide is not None and other.guide is not None and other.guide.error is None
        if slow.guide.error is not None:
            break
        slow.seq.append(letter)
    assert slow.guide is not None and slow.guide.error is not None
    assert "can't be followed any further" in slow.guide.error.message
    assert slow.guide.num_tokens < 100


def test_a_grammar_is_compiled_once_and_guides_do_not_know_each_other(compiler: GrammarCompiler) -> None:
    first, second = guide_of(compiler, PERSON), compiler.find(PERSON)
    assert isinstance(second, Guide)
    first.take([tiny.EOS_ID], Restarts())
    assert first.error is not None and second.error is None and not second.matcher.is_error()


@pytest.mark.parametrize(
    ("grammar", "kind"),
    [
        (guided({"uniqueItems": True}), UnsupportedFieldError),
        (GuidedDecoding(GrammarKind.REGEX, "(a"), InvalidRequestError),
        (GuidedDecoding(GrammarKind.LARK, "start: <|nothing|>"), InvalidRequestError),
        (GuidedDecoding(GrammarKind.STRUCTURAL_TAG, "{}"), InvalidRequestError),
    ],
)
def test_what_can_not_be_compiled_is_remembered_as_that(
    grammar: GuidedDecoding, kind: type[ServingError], compiler: GrammarCompiler
) -> None:
    assert compiler.find(grammar) is None
    assert type(compiled(compiler, grammar)) is kind
    assert type(compiler.find(grammar)) is kind


def test_only_the_grammars_that_were_used_last_are_kept(compiler: GrammarCompiler) -> None:
    grammars = [GuidedDecoding(GrammarKind.REGEX, f"{number}a*") for number in range(70)]
    for grammar in grammars:
        compiled(compiler, grammar)
        assert compiler.find(grammars[0]) is not None, "it was used last"
    kept = [compiler.find(grammar) is not None for grammar in grammars]
    assert sum(kept) <= 64 and kept[0] and kept[-1] and not kept[1]


def test_nothing_is_compiled_for_a_request_that_has_gone(compiler: GrammarCompiler) -> None:
    gone = GuidedDecoding(GrammarKind.REGEX, "gone")
    compiler.compile(gone, lambda _found: pytest.fail("it was compiled"), lambda: False)
    compiled(compiler, GuidedDecoding(GrammarKind.REGEX, "next"))
    assert compiler.find(gone) is None


def test_short_grammars_do_not_wait_for_long_ones_and_shorter_ones_go_first(compiler: GrammarCompiler) -> None:
    order, is_open, last = list[int](), threading.Event(), threading.Event()

    def note(length: int) -> Callable[[Compiled], None]:
        def end(_found: Compiled) -> None:
            order.append(length)
            if len(order) == 4:
                last.set()

        return end

    def wait() -> bool:
        return is_open.wait(WAIT_S)

    long = GuidedDecoding(GrammarKind.REGEX, "(x|" + "ab" * SHORT_LENGTH + ")")
    compiler.compile(long, note(2 * SHORT_LENGTH), wait)  # keeps its thread busy
    compiled(compiler, GuidedDecoding(GrammarKind.REGEX, "no waiting"))
    assert order == []
    blocked = threading.Event()
    compiler.compile(GuidedDecoding(GrammarKind.REGEX, "first"), note(0), lambda: blocked.set() is None and wait())
    assert blocked.wait(WAIT_S)
    for length in (300, 20):
        compiler.compile(GuidedDecoding(GrammarKind.REGEX, "y" * length), note(length), lambda: True)
    is_open.set()
    assert last.wait(WAIT_S)
    assert [length for length in order if length <= SHORT_LENGTH] == [0, 20, 300]


def test_special_tokens_stand_in_tags_by_their_id(compiler: GrammarCompiler, masks: MaskThread) -> None:
    tag = {"begin": "<|tool|>", "schema": {"enum": [1]}, "end": "<|system|>"}
    text = json.dumps({"type": "structural_tag", "structures": [tag], "triggers": ["<|tool|>"]})
    guide = guide_of(compiler, GuidedDecoding(GrammarKind.STRUCTURAL_TAG, text))
    vocabulary = {
        item["content"]: item["id"]
        for item in json.loads((tiny.CHECKPOINT / "tokenizer.json").read_text())["added_tokens"]
    }
    tool, system = vocabulary["<|tool|>"], vocabulary["<|system|>"]
    [start] = allowed(masks, running(guide))
    assert tool in start and system not in start
    guide.take([tool], Restarts())
    [inside] = allowed(masks, running(guide, [tool]))
    assert {piece(i) for i in inside} == {"1"}
