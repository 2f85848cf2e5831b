"""Logits processors that settings name change every answer; a name that leads to none is refused at the start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet.engine.base import Prefilled, RequestKind
from quartet.engine.settings import EngineKind, EngineSettings
from quartet.engine.trtllm.engine import TrtllmEngine
from quartet.engine.trtllm.logits import GROUP, LogitsProcessors
from quartet.errors import ConfigError
from tests.engine.trtllm.engines import TIMES, OpaquePuller, asked, decode_of, greedily, running, stand_in
from tests.engine.trtllm.processors import FIRST_ID, CountsUp, only_odd
from tests.engine.trtllm.specs import spec_of
from tests.fakes.driving import STORY, greedy

HERE = "tests.engine.trtllm.processors"


@pytest.fixture
def _stand_in() -> Iterator[None]:
    with stand_in():
        yield


@pytest.mark.usefixtures("_stand_in")
async def test_a_processor_changes_the_tokens_of_prefill_and_decode() -> None:
    settings = {"logits_processors": (f"{HERE}:only_odd",)}
    async with running(**settings) as decode, running(RequestKind.PREFILL, **settings) as prefill:
        alone = asked(STORY, sampling=greedily(12, ignore_eos=True))
        await decode.end_of(alone)
        tokens = decode.tokens_of(alone)
        assert len(tokens) == 12 and all(token_id % 2 for token_id in tokens)
        assert any(token_id % 2 == 0 for token_id in greedy(STORY, 12)), "which they are not by themselves"
        first = asked(STORY, kind=RequestKind.PREFILL, sampling=alone.generation.sampling)
        prefilled = await prefill.end_of(first)
        assert isinstance(prefilled, Prefilled)
        rest = decode_of(first, prefilled)
        await decode.end_of(rest)
        assert [prefilled.token_id, *decode.tokens_of(rest)] == tokens


@pytest.mark.usefixtures("_stand_in")
async def test_every_request_has_an_instance_of_a_class_and_an_error_of_one_harms_nobody() -> None:
    async with running(logits_processors=(f"{HERE}:CountsUp", f"{HERE}:fails")) as decode:
        requests = [asked(STORY, 3), asked(STORY, 4)]
        for request in requests:
            decode.engine.submit(request)
        for request in requests:
            await decode.consumer.wait_terminal(request)
        assert [decode.tokens_of(request) for request in requests] == [
            [FIRST_ID, FIRST_ID + 1, FIRST_ID + 2],
            [FIRST_ID, FIRST_ID + 1, FIRST_ID + 2, FIRST_ID + 3],
        ]
        canary = decode.control.calls[0].arguments
        assert canary["sampling_params"].logits_processor is None, "the adapter's own requests have none"


def test_an_entry_point_names_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    information = tmp_path / "mine-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (information / "entry_points.txt").write_text(f"[{GROUP}]\nodd = {HERE}:only_odd\ncounts = {HERE}:CountsUp\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = LogitsProcessors(["odd", "counts"])
    assert [found for _, found in loaded._found] == [only_odd, CountsUp]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no.such.module:f", "can't be imported: ModuleNotFoundError"),
        (f"{HERE}:absent", "can't be imported: AttributeError"),
        ("absent", f"can't be imported: LookupError.*{GROUP}"),
        (f"{HERE}:NOT_CALLABLE", "is neither a function nor a class"),
        (f"{HERE}:nameless", "can't be sent to the engine's ranks"),
    ],
)
def test_a_name_that_leads_to_no_processor_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^logits_processors: '{name}' {said}"):
        LogitsProcessors([name])


@pytest.mark.usefixtures("_stand_in")
async def test_it_is_refused_before_anything_loads() -> None:
    from tensorrt_llm._stand_in.control import control

    spec = spec_of(logits_processors=("absent",))
    engine = TrtllmEngine(spec, RequestKind.DECODE, OpaquePuller(), TIMES)
    with pytest.raises(ConfigError, match=r"^logits_processors: 'absent'"):
        await engine.start()
    await engine.close()
    assert not control.engines


def test_other_engines_refuse_them() -> None:
    with pytest.raises(ConfigError, match=r"^logits_processors: the engine torch does not have it"):
        EngineSettings(kind=EngineKind.TORCH, logits_processors=("absent",))
