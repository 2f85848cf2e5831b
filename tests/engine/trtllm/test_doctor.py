"""What the doctor reports of an installed package: of the stand-in, of ones that differ from it, and of none."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from quartet.engine.trtllm.doctor import Lack, OtherDefault, Report, inspect_package
from tests.fakes.installation import installed


# The first import of the stand-in brings PyTorch and transformers along, which takes a busy machine a minute.
def _fact(report: Report, words: str) -> bool | None:
    [fact] = [fact for fact in report.facts if words in fact.text]
    return fact.holds


def _needed(report: Report) -> list[Lack]:
    return [lack for lack in report.lacks if lack.is_needed]


def test_a_package_as_described_has_all_that_is_relied_on() -> None:
    with installed():
        report = inspect_package()
    assert report.version == "1.2.1"
    assert _needed(report) == []
    assert report.other_defaults == ()
    assert report.num_found > 100
    assert None not in [fact.holds for fact in report.facts]
    assert not any(fact.holds for fact in report.facts if fact.is_later)


def test_what_differs_in_a_later_line_is_named_and_all_that_is_relied_on_is_there() -> None:
    with installed(version="1.4.0rc1"):
        report = inspect_package()
    assert (report.version, _needed(report)) == ("1.4.0rc1", [])
    for words in (
        "a priority",
        "a conversation",
        "rank, endpoint and schedule",
        "hashes in KV events",
        "their pictures",
    ):
        assert _fact(report, words)


def test_classes_that_only_some_engine_args_want_are_reported_as_such() -> None:
    with installed():
        report = inspect_package()
    # The description that the stand-in is made of has no more than the name of this one.
    assert Lack("tensorrt_llm.llmapi.llm_args.AutoDecodingConfig", "AutoDecodingConfig in engine_args", False) in (
        report.lacks
    )


@pytest.mark.parametrize(
    ("switch", "words"),
    [
        ("check_health", "health check"),
        ("first_gen_log_probs", "first_gen_log_probs"),
        ("disagg_request_id", "disagg_request_id"),
        ("mrope_handles", "mrope"),
        ("lower_case_transceivers", "lower case"),
        ("autodeploy_from_torch", "AutoDeploy"),
    ],
)
def test_uncertain_facts_are_reported_either_way(switch: str, words: str) -> None:
    for value in (False, True):
        with installed(**{switch: value}):
            report = inspect_package()
        assert _fact(report, words) is value
        assert _needed(report) == []


def test_it_needs_no_gpu() -> None:
    with installed(num_gpus=0) as tensorrt_llm:
        with pytest.raises(RuntimeError, match="No CUDA GPUs"):
            tensorrt_llm.llmapi.llm_args.TorchLlmArgs(model="m")
        assert _needed(inspect_package()) == []


def test_a_missing_symbol_is_reported_with_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed() as tensorrt_llm, monkeypatch.context() as patch:
        patch.delattr(tensorrt_llm.sampling_params, "GuidedDecodingParams")
        patch.delattr(tensorrt_llm.llmapi, "GuidedDecodingParams")
        assert _needed(inspect_package()) == [
            Lack("tensorrt_llm.llmapi.GuidedDecodingParams", "guided decoding", is_needed=True)
        ]


def test_a_missing_method_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed() as tensorrt_llm, monkeypatch.context() as patch:
        patch.delattr(tensorrt_llm.LLM, "get_kv_cache_events_async")
        [lack] = _needed(inspect_package())
    assert lack.path == "tensorrt_llm.LLM.get_kv_cache_events_async"
    assert "KV events" in lack.loses


def test_a_missing_parameter_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate_async(
        self: Any, inputs: Any, sampling_params: Any = None, streaming: bool = True, **rest: Any
    ) -> None:
        pass

    with installed() as tensorrt_llm, monkeypatch.context() as patch:
        patch.setattr(tensorrt_llm.LLM, "generate_async", generate_async)
        report = inspect_package()
    assert {lack.path.split()[-1]: lack.loses for lack in _needed(report)} == {
        "disaggregated_params": "prefill and decode apart",
        "scheduling_params": "attention data parallelism",
        "lora_request": "LoRA adapters",
        "cache_salt": "cache salts",
        "trace_headers": "spans of requests in TensorRT-LLM's own traces",
    }
    [default] = report.other_defaults
    assert default == OtherDefault(
        "tensorrt_llm.LLM.generate_async: parameter streaming", expected="False", found="True", loses="everything"
    )


def test_an_attribute_that_nothing_assigns_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Output:
        def __init__(self) -> None:
            self.token_ids: list[int] = []
            self.finish_reason = self.stop_reason = None
            self.disaggregated_params = None

    with installed() as tensorrt_llm, monkeypatch.context() as patch:
        patch.setattr(tensorrt_llm.llmapi, "CompletionOutput", Output)
        [lack] = _needed(inspect_package())
    assert (lack.path.split()[-1], lack.loses) == ("logprobs", "log probabilities")


def test_another_default_than_the_adapter_relies_on_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed() as tensorrt_llm, monkeypatch.context() as patch:
        fields = tensorrt_llm.llmapi.KvCacheConfig.model_fields
        patch.setattr(fields["tokens_per_block"], "default", 64)
        [other] = inspect_package().other_defaults
    assert (other.path, other.expected, other.found) == (
        "tensorrt_llm.llmapi.llm_args.KvCacheConfig: field tokens_per_block", "32", "64"
    )  # fmt: skip


def test_an_enum_is_the_same_default_as_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    Type = enum.Enum("Type", ["AUTO"])
    with installed() as tensorrt_llm, monkeypatch.context() as patch:
        patch.setattr(tensorrt_llm.llmapi.KvCacheConfig.model_fields["dtype"], "default", Type["AUTO"])
        assert inspect_package().other_defaults == ()


def test_a_field_that_is_only_passed_on_is_no_need(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed() as tensorrt_llm, monkeypatch.context() as patch:
        patch.delitem(tensorrt_llm.llmapi.llm_args.TorchLlmArgs.model_fields, "enable_autotuner")
        report = inspect_package()
    assert _needed(report) == []
    path = "tensorrt_llm.llmapi.llm_args.TorchLlmArgs: field enable_autotuner"
    assert Lack(path, "enable_autotuner in engine_args", is_needed=False) in report.lacks


def test_a_report_survives_its_way_between_processes() -> None:
    with installed() as tensorrt_llm, pytest.MonkeyPatch.context() as patch:
        patch.delattr(tensorrt_llm.LLM, "get_stats_async")
        patch.setattr(tensorrt_llm.llmapi.KvCacheConfig.model_fields["tokens_per_block"], "default", 64)
        report = inspect_package()
    assert report.lacks and report.other_defaults and report.facts
    assert Report.from_json(report.to_json()) == report


def test_without_the_package_the_import_says_so() -> None:
    with pytest.raises(ModuleNotFoundError, match="tensorrt_llm"):
        inspect_package()
