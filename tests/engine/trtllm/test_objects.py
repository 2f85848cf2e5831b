"""The installed package gets objects where it needs them; an argument that it lacks is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.engine.settings import Backend
from quartet.engine.trtllm.arguments import Use, build_objects
from quartet.errors import ConfigError
from tests.engine.trtllm.specs import arguments
from tests.fakes.installation import installed

NGRAM = {"decoding_type": "NGram", "max_draft_len": 2, "max_matching_ngram_size": 2}
EAGLE = {"decoding_type": "Eagle", "max_draft_len": 2, "speculative_model_dir": "draft"}


def objects(override: dict[str, object], **settings: Any) -> dict[str, Any]:
    return build_objects(arguments(override=override, **settings))


def test_sub_configs_become_the_package_s_classes() -> None:
    dynamic = {
        "enable_batch_size_tuning": True,
        "enable_max_num_tokens_tuning": False,
        "dynamic_batch_moving_average_window": 128,
    }
    override: dict[str, object] = {
        "scheduler_config": {"dynamic_batch_config": dynamic},
        "lora_config": {"max_lora_rank": 8},
        "moe_config": {"backend": "TRTLLM"},
        "cuda_graph_config": {"max_batch_size": 4},
        "attention_dp_config": {"enable_balance": True},
        "nvfp4_gemm_config": {"allowed_backends": ["cutlass"]},
        "peft_cache_config": {"num_put_workers": 2},
    }
    with installed() as tensorrt_llm:
        built = objects(override)
        dynamic_config = built["scheduler_config"].dynamic_batch_config
        assert isinstance(dynamic_config, tensorrt_llm.llmapi.DynamicBatchConfig)
        assert type(built["lora_config"]).__name__ == "LoraConfig"
        assert built["kv_cache_config"].event_buffer_max_size == 16_384
        with tensorrt_llm.LLM(**built) as llm:
            assert llm.args.moe_config.backend == "TRTLLM"
            assert llm.args.peft_cache_config.num_put_workers == 2


@pytest.mark.parametrize("config", [NGRAM, EAGLE])
def test_speculation_is_chosen_by_its_decoding_type(config: dict[str, object]) -> None:
    with installed() as tensorrt_llm:
        built = objects({"speculative_config": config})
        assert type(built["speculative_config"]).__name__ == f"{config['decoding_type']}DecodingConfig"
        tensorrt_llm.LLM(**built).shutdown()


def test_every_call_makes_new_objects() -> None:
    made = arguments()
    with installed():
        assert build_objects(made)["kv_cache_config"] is not build_objects(made)["kv_cache_config"]
    assert made.values["kv_cache_config"] == {"event_buffer_max_size": 16_384}


def test_an_argument_that_the_installed_package_lacks_is_named() -> None:
    with installed() as other, pytest.MonkeyPatch.context() as patch:
        patch.delitem(other.llmapi.llm_args.TorchLlmArgs.model_fields, "max_stats_len")
        with pytest.raises(ConfigError, match=r"^max_stats_len: .*\(1\.2\.1\) does not have it$"):
            objects({"max_stats_len": 5})


def test_an_argument_of_a_later_line_is_taken_where_that_line_is_installed() -> None:
    later = {"kv_cache_config": {"disk_cache_size": 5}}
    with pytest.raises(ConfigError, match=r"kv_cache_config\.disk_cache_size: .* 1\.2\.1 does not have it"):
        objects(later)
    with installed(version="1.4.0rc1"):
        made = arguments(override=later)
        assert build_objects(made)["kv_cache_config"].disk_cache_size == 5  # type: ignore[attr-defined]
    with installed(), pytest.raises(ConfigError, match=r"^kv_cache_config: .* refuses it"):
        build_objects(made)


def test_an_argument_that_the_installed_package_refuses_is_named() -> None:
    speculative = {"decoding_type": "DraftTarget", "max_draft_len": 2}
    with installed(), pytest.raises(ConfigError, match=r"^speculative_config\.decoding_type: "):
        objects({"speculative_config": speculative})
    with installed(), pytest.raises(ConfigError, match=r"^nvfp4_gemm_config: .* refuses it"):
        made = arguments(override={"nvfp4_gemm_config": {"allowed_backends": ["cutlass"]}})
        made.values["nvfp4_gemm_config"]["surprise"] = 1  # type: ignore[index]
        build_objects(made)


def test_without_the_package_the_error_says_so() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.kind: trtllm needs the package tensorrt_llm"):
        objects({})


@pytest.mark.parametrize("autodeploy_from_torch", [False, True])
def test_either_autodeploy_takes_what_it_is_given(autodeploy_from_torch: bool) -> None:
    with installed(autodeploy_from_torch=autodeploy_from_torch) as tensorrt_llm:
        built = objects(
            {"mode": "transformers", "stream_interval": 2, "world_size": 2},
            backend=Backend.AUTODEPLOY,
            tensor_parallel_size=2,
            max_batch_size=4,
        )
        with tensorrt_llm.LLM(**built) as llm:
            assert (llm.args.max_batch_size, llm.args.max_seq_len, llm.args.world_size) == (4, 512, 2)
            assert llm.args.kv_cache_config.event_buffer_max_size == 16_384


@pytest.mark.parametrize("use", Use)
def test_bounds_are_those_that_the_package_works_with(use: Use) -> None:
    made = arguments(use)
    with installed() as tensorrt_llm:
        kind = tensorrt_llm.MultimodalEncoder if use is Use.ENCODE else tensorrt_llm.LLM
        with kind(**build_objects(made)) as llm:
            assert (llm.args.max_batch_size, llm.args.max_num_tokens) == (made.max_batch_size, made.max_num_tokens)
