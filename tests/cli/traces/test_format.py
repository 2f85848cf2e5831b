"""Reading and writing traces: what comes back, and the errors of broken ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.traces.format import TraceError, TraceRequest, TraceSummary, read_trace, write_trace

_GOOD = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [7]}\n'

_REQUESTS = st.lists(
    st.builds(
        lambda at_ms, num_input, num_output, ids, session: TraceRequest(
            arrival_s=at_ms / 1e3,
            num_input_tokens=num_input,
            num_output_tokens=num_output,
            hash_ids=tuple(ids),
            session=session,
        ),
        st.integers(1, 10**9),
        st.integers(1, 10**6),
        st.integers(1, 10**6),
        st.lists(st.integers(0, 2**63), max_size=5),
        st.text(max_size=9),
    ),
    max_size=5,
).map(lambda later: [TraceRequest(arrival_s=0.0, num_input_tokens=1, num_output_tokens=1), *later])


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
@given(requests=_REQUESTS)
def test_a_written_trace_is_read_in_the_order_of_arrivals(
    tmp_path_factory: pytest.TempPathFactory, name: str, requests: list[TraceRequest]
) -> None:
    path = tmp_path_factory.mktemp("trace") / name
    write_trace(requests, path)
    assert read_trace(path) == sorted(requests, key=lambda request: request.arrival_s)


def test_times_count_from_the_first_request(tmp_path: Path) -> None:
    rows = [{"timestamp": at_ms, "input_length": 1, "output_length": 1} for at_ms in (5000, 3500.5)]
    path = write(tmp_path / "trace.jsonl", "".join(json.dumps(row) + "\n\n" for row in rows))
    assert [request.arrival_s for request in read_trace(path)] == [0.0, pytest.approx(1.4995)]


def test_a_name_that_ends_in_gz_makes_a_gzip_file_that_is_the_same_each_time(tmp_path: Path) -> None:
    requests = [TraceRequest(arrival_s=0.0, num_input_tokens=5, num_output_tokens=1, hash_ids=(7,))]
    for name in ("one.gz", "two.gz"):
        write_trace(requests, tmp_path / name)
    assert gzip.decompress((tmp_path / "one.gz").read_bytes()).decode() == _GOOD
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()


def test_gzip_is_known_by_content_not_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(_GOOD.encode()))
    assert read_trace(path)[0].hash_ids == (7,)


def test_a_request_without_hash_ids_has_none(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", '{"timestamp": 1, "input_length": 2, "output_length": 3}\n')
    expected = TraceRequest(arrival_s=0.0, num_input_tokens=2, num_output_tokens=3)
    assert read_trace(path) == [expected]


def test_a_session_is_a_text_or_a_number(tmp_path: Path) -> None:
    row = {"timestamp": 1, "input_length": 2, "output_length": 3}
    lines = [json.dumps({**row, "session_id": session}) for session in (7, "a b")]
    path = write(tmp_path / "trace.jsonl", "\n".join(lines))
    assert [request.session for request in read_trace(path)] == ["7", "a b"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "holds no requests"),
        ("\n \n", "holds no requests"),
        ("\nnonsense\n", "line 2 is no JSON"),
        ("[1]\n", "line 1 is no request"),
        (_GOOD + '{"timestamp": 0, "input_length": 1}\n', "line 2 has no output_length"),
        ('{"input_length": 1, "output_length": 1}\n', "line 1 has no timestamp"),
        ('{"timestamp": "0", "input_length": 1, "output_length": 1}\n', "line 1: timestamp must be a number"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', "line 1: timestamp must be a number"),
        ('{"timestamp": 1%s, "input_length": 1, "output_length": 1}\n' % ("0" * 400), "timestamp must be a number"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}\n', "line 1: input_length must be .* not 0"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1.5}\n', "line 1: output_length must be .* not 1.5"),
        ('{"timestamp": 0, "input_length": 1, "output_length": true}\n', "line 1: output_length must be .* not True"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": 3}\n', "hash_ids must be a list, not 3"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-1]}\n', "hash_ids must be .* not -1"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}\n', "hash_ids must be .* not 'a'"),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "session_id": [1]}\n',
            "session_id must be .* not .1.",
        ),
    ],
)
def test_the_error_of_a_broken_trace_names_line_and_field(tmp_path: Path, text: str, shown: str) -> None:
    with pytest.raises(TraceError, match=shown):
        read_trace(write(tmp_path / "trace.jsonl", text))


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        # The test is named after these bytes: no time may be in them.
        (gzip.compress(_GOOD.encode(), mtime=0)[:-9], "no whole gzip file"),
        (b"\x1f\x8bnonsense", "no whole gzip file"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_the_error_says_that_a_file_is_no_text(tmp_path: Path, content: bytes, shown: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=shown):
        read_trace(path)


def test_the_error_says_that_a_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"can't read .*none\.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl")


def test_a_summary_adds_up() -> None:
    requests = [
        TraceRequest(arrival_s=0, num_input_tokens=600, num_output_tokens=10, hash_ids=(0, 1)),
        TraceRequest(arrival_s=2.5, num_input_tokens=700, num_output_tokens=20, hash_ids=(0, 2)),
    ]
    summary = TraceSummary.of(requests)
    assert (summary.num_blocks, summary.num_seen_blocks) == (4, 1)
    shown = "2 requests in 2.5 s, on average 650 input and 15 output tokens; 25.0% of their blocks came before"
    assert str(summary) == shown
