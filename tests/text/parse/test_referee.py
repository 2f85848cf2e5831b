"""The fixtures of canitoolcall 0.1.1: outputs of all families, cut and malformed ones among them."""

import pytest
from canitoolcall.chunking import DEFAULT_STRATEGIES

from tests.text.parse.referee import PARSERS, fixtures, parse, parser_of, split, units_of, verdict

#: Strips the space before a call that ``gemma4/sglang-text-before-call`` wants kept.
SOFT = {"gemma4/vllm-text-before-call"}

#: Cut or malformed; a client that takes arguments as they come has a call then, without an end.
FAIL_STREAMED = {
    "deepseek/v3-truncated-mid-arguments",
    "deepseek/v31-truncated-mid-arguments",
    "deepseek/v32-truncated-mid-arguments",
    "deepseek/v4-truncated-mid-arguments",
    "deepseek/v41-truncated-mid-arguments",
    "deepseek/vllm-v3-malformed-missing-brace",
    "gemma4/truncated-before-close",
    "gemma4/truncated-mid-string",
    "gemma4/truncated-second-parallel-call",
    "glm/glm45-truncated-after-arg-key",
    "glm/glm47-truncated-before-close-call",
    "glm/glm47-truncated-inside-arg-value",
    "gpt-oss/harmony-truncated-in-arguments",
    "kimi/k26-truncated-inside-arguments",
    "kimi/k3-truncated-inside-argument",
    "llama/l3-truncated-inside-parameters",
    "llama/l4-truncated-missing-close-bracket",
    "mistral/v13think-truncated-in-arguments",
    "qwen3-hermes/bug-sglang-30480-truncated-mid-arguments",
    "qwen3-hermes/truncated-mid-arguments-no-thinking",
    "qwen3-hermes/truncated-mid-arguments-thinking",
    "qwen3-hermes/truncated-second-parallel-call",
    "qwen3-hermes/vllm-invalid-json-missing-brace",
    "qwen3-xml/q38-truncated-in-parameter",
}


def test_the_referee_has_the_fixtures_that_these_tests_count() -> None:
    assert len(fixtures()) == 469
    assert {fixture.family for fixture in fixtures().values()} == set(PARSERS)
    assert set(fixtures()) > FAIL_STREAMED | SOFT
    # What fails is cut or malformed.
    assert all({"truncated", "malformed"} & set(fixtures()[name].tags) for name in FAIL_STREAMED)


@pytest.mark.parametrize("streams_arguments", [False, True], ids=["whole calls", "streamed arguments"])
@pytest.mark.parametrize("family", PARSERS)
def test_a_family_is_parsed_as_the_referee_wants_it_however_it_is_split(family: str, streams_arguments: bool) -> None:
    verdicts: dict[str, set[str]] = {"pass": set(), "soft": set(), "fail": set()}
    for name, fixture in fixtures().items():
        if fixture.family != family:
            continue
        units, mask = units_of(fixture)
        results = {}
        for strategy in DEFAULT_STRATEGIES:
            parser = parser_of(fixture, streams_arguments=streams_arguments)
            results[strategy.id] = parse(parser, split(units, mask, strategy))
        [result] = set(results.values())  # as the referee demands of all strategies
        verdicts[verdict(fixture, result)].add(name)
    ours = {name for name, fixture in fixtures().items() if fixture.family == family}
    assert verdicts["soft"] == SOFT & ours
    assert verdicts["fail"] == (FAIL_STREAMED & ours if streams_arguments else set())
