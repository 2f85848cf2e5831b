"""What a worker's part in serving sets and refuses of TensorRT-LLM's arguments, and what AutoDeploy is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quartet.config import build
from quartet.engine.settings import Backend
from quartet.engine.trtllm import schema
from quartet.engine.trtllm.arguments import Use, llm_arguments
from quartet.errors import ConfigError
from quartet.transfer.config import TransferConfig
from services.workers.config import WorkerConfig
from tests.engine.trtllm.specs import arguments, spec_of
from tests.tiny import MAX_MODEL_LEN

AUTODEPLOY = {"backend": Backend.AUTODEPLOY, "dtype": "auto"}


def cache_of(made: Any) -> Any:
    return made.values.get("kv_cache_config", {})


@pytest.mark.parametrize("use", [Use.PREFILL, Use.DECODE])
def test_blocks_are_handed_over_by_nixl_unless_a_layer_says_how(use: Use) -> None:
    made = arguments(use)
    config = {"backend": "NIXL", "kv_transfer_timeout_ms": 60_000}
    assert made.values["cache_transceiver_config"] == config
    assert made.has_transceiver
    assert made.transfer_timeout_s == 60.0 > TransferConfig().hand_off_ttl_s, (
        "nothing renews it, as decode renews a hand-off"
    )


@pytest.mark.parametrize("use", [Use.PREFILL, Use.DECODE])
def test_given_settings_of_the_transceiver_are_kept(use: Use) -> None:
    config = {"backend": "UCX", "max_tokens_in_buffer": 64, "kv_transfer_timeout_ms": 1500}
    made = arguments(use, {"cache_transceiver_config": config})
    assert made.values["cache_transceiver_config"] == config
    assert made.transfer_timeout_s == 1.5
    partly = arguments(use, {"cache_transceiver_config": {"max_tokens_in_buffer": 64, "kv_transfer_timeout_ms": None}})
    assert partly.values["cache_transceiver_config"] == {
        "backend": "NIXL",
        "max_tokens_in_buffer": 64,
        "kv_transfer_timeout_ms": 60_000,
    }


@pytest.mark.parametrize("config", [None, {"backend": None}])
def test_without_a_transceiver_decode_serves_alone_and_prefill_not_at_all(config: object) -> None:
    made = arguments(Use.DECODE, {"cache_transceiver_config": config})
    assert made.values["cache_transceiver_config"] == config
    assert not made.has_transceiver
    assert made.transfer_timeout_s is None
    with pytest.raises(ConfigError, match=r"^override_engine_args: cache_transceiver_config: a prefill worker"):
        arguments(Use.PREFILL, {"cache_transceiver_config": config})


def test_prefill_switches_the_overlap_scheduler_off_and_refuses_it() -> None:
    assert arguments(Use.PREFILL).values["disable_overlap_scheduler"] is True
    assert "disable_overlap_scheduler" not in arguments(Use.DECODE).values
    assert arguments(Use.DECODE, {"disable_overlap_scheduler": False}).values["disable_overlap_scheduler"] is False
    with pytest.raises(ConfigError, match=r"^override_engine_args: disable_overlap_scheduler: must be true"):
        arguments(Use.PREFILL, {"disable_overlap_scheduler": False})


def test_logits_processors_see_every_token_or_are_refused() -> None:
    processors = {"logits_processors": ("brand_names",)}
    decode, prefill = arguments(Use.DECODE, **processors), arguments(Use.PREFILL, **processors)
    assert decode.values["disable_overlap_scheduler"] is prefill.values["disable_overlap_scheduler"] is True
    assert arguments(Use.DECODE, {"disable_overlap_scheduler": True}, **processors).warnings == decode.warnings == ()
    assert prefill.warnings == ("logits_processors: NVIDIA does not support them where prompts are handed on",)
    with pytest.raises(
        ConfigError, match=r"^override_engine_args: disable_overlap_scheduler: must be true with logits"
    ):
        arguments(Use.DECODE, {"disable_overlap_scheduler": False}, **processors)
    speculative = {"speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 1}}
    assert arguments(Use.DECODE, speculative).values["speculative_config"] == speculative["speculative_config"]
    for use in (Use.PREFILL, Use.DECODE):
        with pytest.raises(ConfigError, match=r"^override_engine_args: speculative_config: must be unset with logits"):
            arguments(use, speculative, **processors)
    assert arguments(Use.DECODE, {"speculative_config": None}, **processors).warnings == ()
    with pytest.raises(ConfigError, match=r"^logits_processors: the backend _autodeploy"):
        arguments(**processors, **AUTODEPLOY)


def test_room_for_beams_is_refused_by_the_layer_that_asks_for_it() -> None:
    for use in (Use.PREFILL, Use.DECODE):
        with pytest.raises(ConfigError, match=r"^max_beam_width: must be 1, not 2"):
            arguments(use, max_beam_width=2)
        for alone in ({}, {"cache_transceiver_config": None}):
            with pytest.raises(ConfigError, match=r"^override_engine_args: max_beam_width: must be 1: no request"):
                arguments(use, {"max_beam_width": 2, **alone})
    assert arguments(Use.DECODE, {"max_beam_width": None}).values["max_beam_width"] is None


def test_prefill_warns_of_a_buffer_that_longest_prompts_do_not_fit() -> None:
    def warnings(use: Use, num_tokens: int) -> tuple[str, ...]:
        config = {"cache_transceiver_config": {"max_tokens_in_buffer": num_tokens}}
        return arguments(use, config, max_model_len=100).warnings

    [warning] = warnings(Use.PREFILL, 99)
    assert warning.startswith("override_engine_args: cache_transceiver_config.max_tokens_in_buffer: ")
    assert warnings(Use.PREFILL, 100) == warnings(Use.DECODE, 99) == ()


@pytest.mark.parametrize(
    ("override", "longest"),
    [
        ({}, MAX_MODEL_LEN),  # as the model's files say
        ({"max_seq_len": 9_000}, 8_192),  # what a step computes by default
        ({"max_num_tokens": 500}, 500),
        ({"max_num_tokens": 500, "enable_chunked_prefill": True}, MAX_MODEL_LEN),
    ],
)
def test_the_longest_prompt_is_known_without_a_bound_of_its_own(override: dict[str, Any], longest: int) -> None:
    for num_tokens, is_warned in ((longest - 1, True), (longest, False)):
        config = {"cache_transceiver_config": {"max_tokens_in_buffer": num_tokens}}
        warnings = arguments(Use.PREFILL, {**config, **override}).warnings
        assert bool(warnings) is is_warned
        assert all(f"up to {longest} tokens" in warning for warning in warnings)


def test_a_model_that_is_not_here_yet_has_no_known_length() -> None:
    config = {"cache_transceiver_config": {"max_tokens_in_buffer": 4}}
    spec = replace(spec_of(override_engine_args=config), model_path="nobody/nothing")
    assert llm_arguments(spec, Use.PREFILL).warnings == ()


def test_only_an_encode_worker_loads_the_vision_part_alone() -> None:
    with pytest.raises(ConfigError, match=r"^override_engine_args: mm_encoder_only: "):
        arguments(Use.DECODE, {"mm_encoder_only": True})


@pytest.mark.parametrize("use", [Use.PREFILL, Use.DECODE])
def test_a_worker_that_publishes_has_events_and_statistics(use: Use) -> None:
    made = arguments(use)
    assert (made.has_events, made.has_stats, made.has_perf_metrics) == (True, True, True)
    assert cache_of(made) == {"event_buffer_max_size": 16_384}
    assert made.values["enable_iter_perf_stats"] is made.values["return_perf_metrics"] is True
    assert cache_of(arguments(use, {"kv_cache_config": {"event_buffer_max_size": 9}})) == {"event_buffer_max_size": 9}


@pytest.mark.parametrize("use", [Use.PREFILL, Use.DECODE])
def test_a_worker_that_publishes_nothing_asks_for_nothing(use: Use) -> None:
    made = arguments(use, publish_events_and_metrics=False)
    assert (made.has_events, made.has_stats, made.has_perf_metrics) == (False, False, False)
    assert not {"kv_cache_config", "enable_iter_perf_stats", "return_perf_metrics"} & made.values.keys()
    said = {"kv_cache_config": {"event_buffer_max_size": 0}, "enable_iter_perf_stats": False}
    assert arguments(use, said, publish_events_and_metrics=False).warnings == ()


def test_a_buffer_of_no_events_contradicts_publishing_them() -> None:
    off = {"kv_cache_config": {"event_buffer_max_size": 0}}
    with pytest.raises(ConfigError, match=r"^override_engine_args: kv_cache_config.event_buffer_max_size: must be"):
        arguments(override=off)


def test_a_cache_without_reuse_has_nothing_to_report() -> None:
    made = arguments(override={"kv_cache_config": {"enable_block_reuse": False, "event_buffer_max_size": 0}})
    assert not made.has_events
    assert made.has_stats
    [warning] = made.warnings
    assert warning.startswith("override_engine_args: kv_cache_config.enable_block_reuse: ")
    assert arguments(override={"kv_cache_config": {"enable_block_reuse": True}}).has_events


@pytest.mark.parametrize(
    ("name", "field"), [("enable_iter_perf_stats", "has_stats"), ("return_perf_metrics", "has_perf_metrics")]
)
def test_measuring_may_be_switched_off_apart(name: str, field: str) -> None:
    made = arguments(override={name: False})
    assert getattr(made, field) is False
    assert made.has_events
    [warning] = made.warnings
    assert warning.startswith(f"override_engine_args: {name}: ")


def test_autodeploy_is_given_its_own_arguments() -> None:
    override = {
        "world_size": 2,
        "mode": "transformers",
        "model_kwargs": {"num_hidden_layers": 2},
        "cuda_graph_batch_sizes": [1, 2],
        "kv_cache_config": {"enable_partial_reuse": False},
    }
    made = arguments(override=override, max_batch_size=4, max_model_len=256, block_size=64, **AUTODEPLOY)
    cache = {"enable_partial_reuse": False, "tokens_per_block": 64, "event_buffer_max_size": 16_384}
    expected = {**override, "backend": "_autodeploy", "max_batch_size": 4, "max_seq_len": 256, "kv_cache_config": cache}
    assert {name: value for name, value in made.values.items() if name != "model"} == expected
    assert made.warnings == ()
    assert (made.block_size, made.max_batch_size, made.max_seq_len) == (64, 4, 256)
    assert (made.has_events, made.has_stats, made.has_transceiver, made.num_ranks) == (True, False, False, 1)
    assert (arguments(**AUTODEPLOY).max_batch_size, arguments(**AUTODEPLOY).max_seq_len) == (8, 512)


def test_arguments_that_not_every_autodeploy_takes_are_left_out_with_a_warning_each() -> None:
    given = {"stream_interval": 2, "cuda_graph_config": None, "cache_transceiver_config": {"backend": "UCX"}}
    made = arguments(override=given, tensor_parallel_size=2, max_num_tokens=64, **AUTODEPLOY)
    assert made.values.keys() <= schema.AUTODEPLOY.types.keys() | {"backend"}
    named = sorted(warning.partition(": left out")[0] for warning in made.warnings)
    assert named == [
        "max_num_tokens",
        "override_engine_args: cache_transceiver_config",
        "override_engine_args: stream_interval",
    ]


@pytest.mark.parametrize(
    ("given", "world_size"),
    [
        ({"tensor_parallel_size": 4}, 4),
        ({"override_engine_args": {"tensor_parallel_size": 2}}, 2),
        ({"tensor_parallel_size": 1}, None),
        ({"tensor_parallel_size": 4, "override_engine_args": {"world_size": 2}}, 2),
    ],
)
def test_tensor_parallel_ranks_are_autodeploy_s_world_size(given: dict[str, Any], world_size: int | None) -> None:
    made = arguments(override=given.pop("override_engine_args", None), **given, **AUTODEPLOY)
    assert made.values.get("world_size") == world_size
    assert "tensor_parallel_size" not in made.values


def test_autodeploy_refuses_unknown_arguments() -> None:
    with pytest.raises(ConfigError, match=r"^override_engine_args: surprise: "):
        arguments(override={"surprise": 1}, **AUTODEPLOY)
    with pytest.raises(ConfigError, match=r"^override_engine_args: world_size: must be int"):
        arguments(override={"world_size": "2", "backend": "_autodeploy"})


def test_autodeploy_cannot_prefill_for_other_workers() -> None:
    with pytest.raises(ConfigError, match=r"^backend: _autodeploy"):
        arguments(Use.PREFILL, **AUTODEPLOY)


def test_the_upper_layer_says_which_backend_it_is() -> None:
    assert arguments(override={"backend": "pytorch"}, backend=Backend.AUTODEPLOY).has_transceiver
    assert "backend" not in arguments(override={"backend": "pytorch"}).values
    assert arguments(override={"backend": "_autodeploy"}, dtype="auto").values["backend"] == "_autodeploy"


@pytest.mark.parametrize("use", [Use.PREFILL, Use.DECODE])
def test_a_worker_that_traces_hands_over_its_endpoint_unless_a_layer_says_otherwise(use: Use) -> None:
    spec = replace(spec_of(override_engine_args={}), otlp_endpoint="http://collector:4317")
    values = llm_arguments(spec, use).values
    assert (values["otlp_traces_endpoint"], values["return_perf_metrics"]) == ("http://collector:4317", True)
    own = {"otlp_traces_endpoint": "http://mine:4317", "return_perf_metrics": False}
    spec = replace(spec_of(override_engine_args=own), otlp_endpoint="http://collector:4317")
    assert own.items() <= llm_arguments(spec, use).values.items()


def test_a_workers_endpoint_is_that_of_its_settings_or_the_default() -> None:
    def endpoint(**tracing: object) -> str:
        return build(WorkerConfig, {"model_path": "x", "tracing": tracing}).engine_spec.otlp_endpoint

    assert endpoint(enabled=True, endpoint="http://c:1") == "http://c:1"
    assert endpoint(enabled=True) == "http://localhost:4317"
    assert endpoint(endpoint="http://c:1") == ""
