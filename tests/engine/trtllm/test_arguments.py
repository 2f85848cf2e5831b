"""Which layer sets which of TensorRT-LLM's arguments, and what is refused by name before a model loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from quartet.engine.settings import Backend, EncoderSettings
from quartet.engine.trtllm import schema
from quartet.engine.trtllm.arguments import Use, llm_arguments
from quartet.errors import ConfigError
from tests.engine.trtllm.specs import arguments, spec_of
from tests.fakes.installation import DIRECTORY
from tests.tiny import CHECKPOINT

API: dict[str, Any] = json.loads((Path(DIRECTORY) / "tensorrt_llm" / "api.json").read_text(encoding="utf-8"))
#: Our field, what it is set to, and where it arrives as what.
FIELDS: list[tuple[str, Any, str, Any]] = [
    ("dtype", "bfloat16", "dtype", "bfloat16"),
    ("tensor_parallel_size", 2, "tensor_parallel_size", 2),
    ("pipeline_parallel_size", 2, "pipeline_parallel_size", 2),
    ("expert_parallel_size", 2, "moe_expert_parallel_size", 2),
    ("enable_attention_dp", True, "enable_attention_dp", True),
    ("gpus_per_node", 4, "gpus_per_node", 4),
    ("max_batch_size", 7, "max_batch_size", 7),
    ("max_num_tokens", 777, "max_num_tokens", 777),
    ("max_model_len", 512, "max_seq_len", 512),
    ("block_size", 64, "kv_cache_config.tokens_per_block", 64),
    ("free_gpu_memory_fraction", 0.25, "kv_cache_config.free_gpu_memory_fraction", 0.25),
    ("num_blocks", 10, "kv_cache_config.max_tokens", 320),
]
OTHER = {"dtype": "float16", "enable_attention_dp": False, "kv_cache_config.free_gpu_memory_fraction": 0.75}


def value_at(values: Mapping[str, Any], path: str) -> Any:
    for name in path.split("."):
        values = values.get(name, {})
    return values


def nested(path: str, value: object) -> dict[str, Any]:
    name, _, below = path.partition(".")
    return {name: {below: value} if below else value}


def written(tmp_path: Path, values: object) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def refusal(use: Use = Use.DECODE, override: Mapping[str, object] | None = None, **settings: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        arguments(use, override, **settings)
    return str(refused.value)


@pytest.mark.parametrize(("field", "value", "path", "argument"), FIELDS)
def test_a_field_of_ours_arrives_and_both_layers_win_over_it(
    tmp_path: Path, field: str, value: Any, path: str, argument: Any
) -> None:
    assert value_at(arguments(**{field: value}).values, path) == argument
    in_file, over_it = OTHER.get(path, 3), OTHER.get(path, 5)
    settings = {field: value, "extra_engine_args": written(tmp_path, nested(path, in_file))}
    assert value_at(arguments(**settings).values, path) == in_file
    assert value_at(arguments(override=nested(path, over_it), **settings).values, path) == over_it


@pytest.mark.parametrize(("field", "value", "path", "argument"), FIELDS)
def test_a_field_of_ours_that_loses_to_a_file_is_warned_of_with_both_values(
    tmp_path: Path, field: str, value: Any, path: str, argument: Any
) -> None:
    def lost(in_file: Any, over_it: Mapping[str, Any] | None = None) -> list[str]:
        file = written(tmp_path, nested(path, in_file))
        made = arguments(override=dict(over_it or {}), extra_engine_args=file, **{field: value})
        return [warning for warning in made.warnings if "wins over engine." in warning]

    other = OTHER.get(path, 3)
    [warning] = lost(other)
    assert warning.startswith(f"extra_engine_args: {path}: {other!r} wins over engine.{field} = {argument!r}")
    assert lost(argument) == []
    assert lost(other, nested(path, argument)) == []


def test_a_field_of_ours_at_its_default_sets_no_argument(tmp_path: Path) -> None:
    plain = arguments(dtype="auto", publish_events_and_metrics=False)
    transceiver = {"backend": "NIXL", "kv_transfer_timeout_ms": 60_000}
    ours = {"cache_transceiver_config": transceiver, "scheduler_config": plain.values["scheduler_config"]}
    assert plain.values == {"model": str(CHECKPOINT), **ours}
    path = written(tmp_path, {"kv_cache_config": {"tokens_per_block": 64}, "tensor_parallel_size": 2})
    said = arguments(extra_engine_args=path)
    assert (said.block_size, said.values["tensor_parallel_size"]) == (64, 2)


_KEYS = st.sampled_from(["max_tokens", "sink_token_length", "tokens_per_block", "host_cache_size"])
_CACHES = st.dictionaries(_KEYS, st.integers(1, 99))


@given(ours=st.sampled_from([32, 64]), extra=_CACHES, override=_CACHES)
def test_the_cache_s_config_merges_key_by_key(
    tmp_path_factory: pytest.TempPathFactory, ours: int, extra: dict[str, int], override: dict[str, int]
) -> None:
    path = written(tmp_path_factory.mktemp("layers"), {"kv_cache_config": extra})
    settings: dict[str, Any] = {"block_size": ours, "extra_engine_args": path, "publish_events_and_metrics": False}
    made = arguments(override={"kv_cache_config": override}, **settings)
    own = {} if ours == 32 else {"tokens_per_block": ours}
    assert made.values["kv_cache_config"] == {**own, **extra, **override}
    assert made.block_size == {"tokens_per_block": ours, **extra, **override}["tokens_per_block"]


def test_every_other_config_is_replaced(tmp_path: Path) -> None:
    path = written(tmp_path, {"cuda_graph_config": {"enable_padding": True, "max_batch_size": 16}})
    made = arguments(extra_engine_args=path, override={"cuda_graph_config": {"batch_sizes": [1, 2]}})
    assert made.values["cuda_graph_config"] == {"batch_sizes": [1, 2]}
    assert arguments(extra_engine_args=path, override={"cuda_graph_config": None}).values["cuda_graph_config"] is None


def test_blocks_are_counted_in_the_size_that_they_end_up_with() -> None:
    made = arguments(num_blocks=10, override={"kv_cache_config": {"tokens_per_block": 64}})
    assert value_at(made.values, "kv_cache_config.max_tokens") == 640


def test_changing_the_result_does_not_change_the_given_settings() -> None:
    override: dict[str, Any] = {"kv_cache_config": {"max_tokens": 64}, "env_overrides": {"A": "B"}}
    made: Any = arguments(override=override).values
    made["env_overrides"]["A"] = "C"
    assert override == {"kv_cache_config": {"max_tokens": 64}, "env_overrides": {"A": "B"}}


def test_the_scheduler_is_as_published_unless_a_layer_says_another() -> None:
    scheduler: Any = arguments().values["scheduler_config"]
    assert scheduler["capacity_scheduler_policy"] == "GUARANTEED_NO_EVICT"
    dynamic = scheduler["dynamic_batch_config"]
    assert dynamic["enable_batch_size_tuning"] is not dynamic["enable_max_num_tokens_tuning"] is False
    assert dynamic["dynamic_batch_moving_average_window"] == 128
    given = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    assert arguments(override={"scheduler_config": given}).values["scheduler_config"] == given


@pytest.mark.parametrize("use", Use)
@pytest.mark.parametrize("name", [*API["classes"]["TorchLlmArgs"]["not_in_1_2"]])
def test_an_argument_of_1_3_is_refused_by_layer_and_name(tmp_path: Path, use: Use, name: str) -> None:
    message = f"{name}: TensorRT-LLM 1.2.1 does not have it; a later release may"
    assert refusal(use, {name: {}}) == f"override_engine_args: {message}"
    assert refusal(use, extra_engine_args=written(tmp_path, {name: {}})) == f"extra_engine_args: {message}"


@pytest.mark.parametrize("name", API["rejected_keywords"]["torch_backend"]["names"])
def test_an_argument_that_the_pytorch_backend_rejects_is_refused(name: str) -> None:
    assert refusal(override={name: 1}).startswith(f"override_engine_args: {name}: the PyTorch backend")


_LATER = [
    (argument, later)
    for argument, kind in schema.LLM.types.items()
    for later in API["classes"].get(kind.removesuffix(" | None"), {}).get("not_in_1_2", [])
]


@pytest.mark.parametrize(("argument", "later"), _LATER)
def test_so_are_fields_of_sub_configs(argument: str, later: str) -> None:
    required = api_required(argument)
    message = refusal(override={argument: {**required, later: 1}})
    assert (
        message == f"override_engine_args: {argument}.{later}: TensorRT-LLM 1.2.1 does not have it; a later release may"
    )


def api_required(argument: str) -> dict[str, object]:
    entry = API["classes"][schema.LLM.types[argument].removesuffix(" | None")]
    return {name: "x" for name, param in entry["params"].items() if param.get("required")}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"max_batch_siz": 1}, "max_batch_siz: TensorRT-LLM 1.2 does not know it; did you mean max_batch_size?"),
        ({"use_cute_dsl_blockscaling_mm": True}, "use_cute_dsl_blockscaling_mm: TensorRT-LLM 1.2.1 does not have it"),
        ({"layer_wise_benchmarks_config": {}}, "layer_wise_benchmarks_config: TensorRT-LLM 1.2.1 does not have it"),
        ({"world_size": 2}, "world_size: only the backend _autodeploy"),
        ({"model": "other"}, "model: is the worker's own"),
        ({"backend": "tensorrt"}, "backend: must be one of pytorch, _autodeploy, not 'tensorrt'"),
        *(
            ({name: value}, f"{name}: must be at least 1, not {value}")
            for name in ("max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width", "pipeline_parallel_size")
            for value in (-3, 0)
        ),
        ({"kv_cache_config": {"max_tokens": -1}}, "kv_cache_config.max_tokens: must be at least 1"),
        ({"max_batch_size": "8"}, "max_batch_size: must be int | None, not '8'"),
        ({"trust_remote_code": 1}, "trust_remote_code: must be bool, not 1"),
        ({"stream_interval": 0}, "stream_interval: must be int > 0, not 0"),
        ({"load_format": "other"}, "load_format: must be one of AUTO, DUMMY, VISION_ONLY, not 'other'"),
        ({"kv_cache_config": None}, "kv_cache_config: must be KvCacheConfig, not None"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 2}}, "kv_cache_config.free_gpu_memory_fraction: must be"),
        ({"kv_cache_config": {"tokens_per_block": 0}}, "kv_cache_config.tokens_per_block: must be at least 1"),
        ({"cache_transceiver_config": {"backend": "ucx"}}, "cache_transceiver_config.backend: must be one of"),
        ({"cache_transceiver_config": {"kv_transfer_timeout_ms": 0}}, "cache_transceiver_config.kv_transfer_timeout"),
        ({"cuda_graph_config": {"batch_sizes": [1], "max_batch_size": 8}}, "cuda_graph_config.batch_sizes: set it or"),
        ({"moe_config": {"load_balancer": {"slots": 1}}}, "moe_config.load_balancer.slots: TensorRT-LLM 1.2 does not"),
        ({"peft_cache_config": {"lora_prefetch_dir": "x"}}, "peft_cache_config.lora_prefetch_dir: "),
        ({"kv_connector_config": {}}, "kv_connector_config.connector_module: is missing"),
        ({"speculative_config": {}}, "speculative_config.decoding_type: must be one of Eagle, MTP"),
        ({"speculative_config": {"decoding_type": "Medusa"}}, "speculative_config.decoding_type: the PyTorch backend"),
        ({"speculative_config": {"decoding_type": "Lookahead"}}, "speculative_config.decoding_type: the PyTorch"),
        ({"speculative_config": {"decoding_type": "Eagle3"}}, "speculative_config.decoding_type: TensorRT-LLM 1.2"),
        ({"speculative_config": {"decoding_type": "MTP", "x": 1}}, "speculative_config.x: TensorRT-LLM 1.2 does not"),
        ({"speculative_config": {"decoding_type": "NGram"}}, "speculative_config.max_draft_len: is missing"),
        (
            {"speculative_config": {"decoding_type": "Eagle", "max_draft_len": 3}},
            "speculative_config.speculative_model: is missing",
        ),
        *(
            (
                {"scheduler_config": {"dynamic_batch_config": {n: v for n, v in whole.items() if n != left_out}}},
                f"scheduler_config.dynamic_batch_config.{left_out}: is missing",
            )
            for whole in [
                {
                    "enable_batch_size_tuning": True,
                    "enable_max_num_tokens_tuning": False,
                    "dynamic_batch_moving_average_window": 128,
                }
            ]
            for left_out in whole
        ),
    ],
)
def test_a_refusal_names_the_layer_and_the_key(override: dict[str, object], message: str) -> None:
    assert refusal(override=override).startswith(f"override_engine_args: {message}")


def test_a_file_that_cannot_be_read_is_named_by_its_setting(tmp_path: Path) -> None:
    assert refusal(extra_engine_args=tmp_path / "missing.yaml").startswith("extra_engine_args: cannot read ")
    assert refusal(extra_engine_args=written(tmp_path, ["a"])).startswith("extra_engine_args: ")


@pytest.mark.parametrize("name", ["max_stats_len", "sampler_force_async_worker"])
def test_an_argument_that_1_2_1_surely_has_passes_without_a_warning(name: str) -> None:
    made = arguments(override={name: 1 if name == "max_stats_len" else True})
    assert (name in made.values, made.warnings) == (True, ())


def test_fields_of_an_undescribed_decoding_pass_with_a_warning() -> None:
    speculative = {"decoding_type": "DraftTarget", "max_draft_len": 2, "other": 1}
    [warning] = arguments(override={"speculative_config": speculative}).warnings
    assert warning.startswith("override_engine_args: speculative_config.other: ")


def test_bounds_that_no_layer_sets_are_the_package_s_own() -> None:
    assert (arguments().max_batch_size, arguments().max_num_tokens, arguments().max_seq_len) == (2048, 8192, None)
    made = arguments(override={"max_num_tokens": None, "max_batch_size": 3, "max_seq_len": 99})
    assert (made.max_batch_size, made.max_num_tokens, made.max_seq_len) == (3, None, 99)


def test_arguments_say_what_follows_for_requests() -> None:
    made = arguments(
        override={
            "enable_chunked_prefill": True,
            "guided_decoding_backend": "xgrammar",
            "lora_config": {"max_lora_rank": 8},
            "kv_cache_config": {"dtype": "fp8"},
        },
        enable_attention_dp=True,
        tensor_parallel_size=4,
    )
    assert made.has_chunked_prefill
    assert made.has_lora
    assert (made.guided_backend, made.kv_dtype, made.num_ranks) == ("xgrammar", "fp8", 4)
    plain = arguments(tensor_parallel_size=4)
    assert not plain.has_chunked_prefill
    assert not plain.has_lora
    assert (plain.guided_backend, plain.kv_dtype, plain.num_ranks) == (None, "float32", 1)


def test_caches_of_other_weights_dtypes_are_not_alike() -> None:
    assert arguments(dtype="bfloat16").kv_dtype == "bfloat16"
    assert arguments(dtype="bfloat16", override={"kv_cache_config": {"dtype": "auto"}}).kv_dtype == "bfloat16"
    assert arguments(dtype="bfloat16", override={"kv_cache_config": {"dtype": "fp8"}}).kv_dtype == "fp8"
    assert arguments(override={"dtype": "float16"}).kv_dtype == "float16"


def test_an_encoder_is_given_what_the_vision_part_has_a_use_for(tmp_path: Path) -> None:
    path = written(tmp_path, {"max_num_tokens": 30192, "enable_chunked_prefill": True, "kv_cache_config": {}})
    made = arguments(Use.ENCODE, {"trust_remote_code": True}, extra_engine_args=path, max_model_len=99)
    assert made.values == {
        "model": str(CHECKPOINT),
        "dtype": "float32",
        "trust_remote_code": True,
        "max_num_tokens": 30192,
        "max_batch_size": 8,
    }
    [warning] = made.warnings
    for name in ("extra_engine_args: enable_chunked_prefill", "extra_engine_args: kv_cache_config", "max_model_len"):
        assert name in warning
    assert not (made.has_transceiver or made.has_events or made.has_stats or made.has_perf_metrics)
    assert (made.transfer_timeout_s, made.max_batch_size, made.max_num_tokens) == (None, 8, 30192)
    spec = spec_of(encoder=EncoderSettings(max_batch_size=3))
    assert llm_arguments(spec, Use.ENCODE).max_batch_size == 3


def test_an_encoder_refuses_what_it_cannot_be() -> None:
    assert refusal(Use.ENCODE, backend=Backend.AUTODEPLOY).startswith("backend: ")
    assert refusal(Use.ENCODE, {"dtype": "fp8"}).startswith("override_engine_args: dtype: must be one of auto")
