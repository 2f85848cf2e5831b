"""The outputs whose parsing is measured are what they seem, and a short run measures all of them."""

import json

from benchmarks import parsing
from quartet.text.parse import CallArguments, OutputParser, Reasoning, choose_format


def test_each_output_has_a_call_and_mostly_reasoning_and_is_measured() -> None:
    for names, output in parsing.OUTPUTS.items():
        parser = OutputParser(choose_format(*names), tools=parsing._TOOLS)
        events = [*parser.push(output), *parser.finish()]
        [arguments] = [event.text for event in events if isinstance(event, CallArguments)]
        assert json.loads(arguments) == {"text": parsing._ARGUMENT}
        assert any(isinstance(event, Reasoning) for event in events) == bool(names[0])
    results = parsing.measure(1)
    assert set(results.paths) == set(results.costs)
    assert all(path.plain_us > 0 and path.parsed_us > 0 and path.streamed_us > 0 for path in results.paths.values())
    assert set(results.costs) == {" and ".join(filter(None, names)) for names in parsing.OUTPUTS}
    assert all(cost.output_us > 0 and cost.streamed_us > 0 and cost.content_us > 0 for cost in results.costs.values())
    assert all(cost.num_head_tokens > 4 and cost.head_us > 0 for cost in results.costs.values())
