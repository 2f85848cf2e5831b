"""What the stand-in takes is what the description of TensorRT-LLM 1.2 has, and nothing else."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.driving import MODEL, engine
from tests.fakes.installation import installed

with installed():
    import tensorrt_llm
    from pydantic import ValidationError
    from tensorrt_llm import LLM, llmapi
    from tensorrt_llm._stand_in import schema
    from tensorrt_llm._stand_in.control import control
    from tensorrt_llm.llmapi import llm_args
    from tensorrt_llm.llmapi.llm_args import LlmArgs, TorchLlmArgs

CONFIGS = [
    "KvCacheConfig",
    "SchedulerConfig",
    "DynamicBatchConfig",
    "CacheTransceiverConfig",
    "CudaGraphConfig",
    "MoeConfig",
    "MoeLoadBalancerConfig",
    "AttentionDpConfig",
    "TorchCompileConfig",
    "Nvfp4GemmConfig",
    "KvCacheConnectorConfig",
    "PeftCacheConfig",
    "EagleDecodingConfig",
    "MTPDecodingConfig",
    "NGramDecodingConfig",
]


def refused(**arguments: Any) -> str:
    with pytest.raises(ValueError) as refusal:
        LLM(MODEL, **arguments)
    assert not control.engines
    return str(refusal.value)


def test_the_stand_in_is_importable_only_while_it_is_installed() -> None:
    with installed():
        assert importlib.import_module("tensorrt_llm") is tensorrt_llm
    del_fixture_path = [entry for entry in sys.path if "fakes" in entry]
    assert len(del_fixture_path) == 1, "only the fixture's own installation is left"


@pytest.mark.parametrize("name", [*CONFIGS, "TorchLlmArgs"])
def test_a_config_has_exactly_the_fields_of_the_description(name: str) -> None:
    kind = getattr(llm_args, name)
    assert set(kind.model_fields) == set(schema.params_of(name))
    required = {field for field, info in kind.model_fields.items() if info.is_required()}
    assert required == {field for field, param in schema.params_of(name).items() if param.get("required")}


@pytest.mark.parametrize("name", [*CONFIGS, "TorchLlmArgs"])
def test_a_config_refuses_unknown_fields_and_those_of_1_3(name: str) -> None:
    given = {field: "x" for field, param in schema.params_of(name).items() if param.get("required")}
    given = dict.fromkeys(given, True) if name == "DynamicBatchConfig" else given
    getattr(llm_args, name)(**given)
    for later in ["surprise", *schema.API["classes"][name].get("not_in_1_2", [])]:
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            getattr(llm_args, name)(**given, **{later: 1})


@pytest.mark.parametrize("name", ["surprise", *schema.API["classes"]["TorchLlmArgs"]["not_in_1_2"]])
def test_llm_names_an_argument_that_it_does_not_know(name: str) -> None:
    assert refused(**{name: 1}) == f"LLM got invalid argument: {name}"


@pytest.mark.parametrize("name", schema.API["rejected_keywords"]["torch_backend"]["names"])
def test_llm_lists_arguments_of_the_other_backend(name: str) -> None:
    assert name in refused(**{name: None})


@pytest.mark.parametrize("name", [*schema.API["methods"]])
def test_signatures_are_the_description_s(name: str) -> None:
    owner, _, method = name.rpartition(".")
    if owner not in ("LLM", "MultimodalEncoder") or method.startswith("_"):
        return
    signature = inspect.signature(getattr(getattr(tensorrt_llm, owner), method))
    assert list(signature.parameters)[1:] == list(schema.API["methods"][name]["params"])


def test_a_later_line_has_what_came_with_it() -> None:
    assert "disk_cache_size" not in llmapi.KvCacheConfig.model_fields
    with installed(version="1.4.0rc1") as other:
        assert other.__version__ == "1.4.0rc1"
        assert other.llmapi.KvCacheConfig(disk_cache_size=1).disk_cache_size == 1
        assert {"priority", "conversation_params"} <= set(inspect.signature(other.LLM.generate_async).parameters)
        assert hasattr(other.LLM, "get_kv_cache_capacity") and hasattr(other.LLM, "_check_health")
        with pytest.raises(ValueError, match="Unknown connector preset: 'other'"):
            other.llmapi.llm_args.KvCacheConnectorConfig(connector="other")
    assert LlmArgs is TorchLlmArgs


def test_a_later_line_has_one_sampler_and_drops_its_name() -> None:
    with installed(version="1.4.0rc1") as other:
        assert "sampler_type" not in other.llmapi.llm_args.TorchLlmArgs.model_fields
        with other.LLM(MODEL, sampler_type="auto") as llm:
            assert not hasattr(llm.args, "sampler_type")
        with pytest.raises(ValueError, match="TorchSampler is the only sampler"):
            other.LLM(MODEL, sampler_type="TRTLLMSampler")
        with pytest.raises(ValueError, match="invalid argument: enable_sleep"):
            other.LLM(MODEL, enable_sleep=False)


def test_an_installation_says_its_version_without_an_import() -> None:
    for version in ("1.2.1", "1.4.0rc1"):
        with installed(version=version):
            assert importlib.metadata.version("tensorrt_llm") == version


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_cache_config", {"free_gpu_memory_fraction": 1.5}),
        ("kv_cache_config", {"disk_cache_size": 1}),
        ("scheduler_config", {"capacity_scheduler_policy": "BEST"}),
        ("scheduler_config", {"dynamic_batch_config": {"enable_batch_size_tuning": True}}),
        ("cache_transceiver_config", {"backend": "ucx"}),
        ("cache_transceiver_config", {"backend": "UCX", "kv_transfer_timeout_ms": 0}),
        ("moe_config", {"backend": "BEST"}),
        ("guided_decoding_backend", "outlines"),
        ("stream_interval", 0),
        ("batch_wait_max_tokens_ratio", 2.0),
        ("allreduce_strategy", "BEST"),
        ("sampler_type", None),
        ("tokenizer_mode", "fast"),
        ("load_format", "other"),
        ("speculative_config", {"decoding_type": "Eagle"}),
        ("cuda_graph_config", {"batch_sizes": [1, 3], "max_batch_size": 8}),
        ("peft_cache_config", {"lora_prefetch_dir": "x"}),
        ("ray_worker_extension_cls", "x"),
    ],
)
def test_llm_refuses_values_out_of_range(field: str, value: Any) -> None:
    assert field.split("_", maxsplit=1)[0] in refused(**{field: value})


def test_transceivers_in_lower_case_may_turn_out_to_be_fine() -> None:
    with installed(lower_case_transceivers=True) as other:
        config = other.llmapi.CacheTransceiverConfig(backend="ucx")
    assert config.backend == "UCX"


def test_arguments_left_out_become_the_torch_backend_s() -> None:
    args = TorchLlmArgs(model=MODEL, load_format="dummy")
    assert (args.max_batch_size, args.max_input_len, args.max_beam_width) == (2048, 1024, 1)
    assert (args.max_num_tokens, args.gpus_per_node, args.moe_tensor_parallel_size) == (8192, 8, -1)
    assert args.checkpoint_format == "HF"
    assert args.load_format is llm_args.LoadFormat.DUMMY


def test_cuda_graphs_are_captured_for_the_sizes_that_are_generated() -> None:
    padded = llmapi.CudaGraphConfig(max_batch_size=300, enable_padding=True)
    assert padded.batch_sizes == [1, 2, 4, *range(8, 129, 8), 256, 300]
    assert llmapi.CudaGraphConfig(batch_sizes=[4, 2]).max_batch_size == 4
    plain = llmapi.CudaGraphConfig()
    assert plain.batch_sizes == [*range(1, 33), 64, 128]
    assert llmapi.CudaGraphConfig(batch_sizes=plain.batch_sizes, max_batch_size=128).max_batch_size == 128


def test_more_ranks_than_gpus_do_not_start() -> None:
    with pytest.raises(RuntimeError, match="8 GPUs"):
        engine(tensor_parallel_size=4, pipeline_parallel_size=4)


def test_arguments_need_a_gpu_to_be_made() -> None:
    with installed(num_gpus=0) as other, pytest.raises(RuntimeError, match="No CUDA GPUs"):
        other.llmapi.llm_args.TorchLlmArgs(model=MODEL)


def test_llm_is_a_context_manager_that_may_be_shut_down_twice_and_is_not_pickled() -> None:
    with engine(backend="pytorch") as llm:
        assert llm._executor is not None
        assert not llm._executor.is_shutdown()
        assert not hasattr(llm, "_check_health")
        with pytest.raises(RuntimeError, match="pickled"):
            pickle.dumps(llm)
    assert llm._executor is None
    llm.shutdown()
    with pytest.raises(RuntimeError, match="LLM is shutting down"):
        llm.generate_async("x")


def test_a_later_candidate_reports_its_health() -> None:
    with installed(check_health=True) as other, other.LLM(MODEL) as llm:
        assert llm._check_health()
    assert not llm._check_health()


def test_yaml_options_win_and_only_the_cache_s_merge(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(
        "kv_cache_config: {tokens_per_block: 64}\nmax_batch_size: 4\n"
        "speculative_config: {decoding_type: NGram, max_draft_len: 2, max_matching_ngram_size: 2}\n"
    )
    given = {"model": MODEL, "max_batch_size": 2, "kv_cache_config": {"enable_block_reuse": False}}
    merged = llm_args.update_llm_args_with_extra_options(given, str(path))
    assert merged["max_batch_size"] == 4
    assert merged["kv_cache_config"] == llmapi.KvCacheConfig(tokens_per_block=64, enable_block_reuse=False)
    assert merged["speculative_config"] == llmapi.NGramDecodingConfig(max_draft_len=2, max_matching_ngram_size=2)
    LLM(**merged).shutdown()


def test_autodeploy_takes_its_own_arguments_and_none_of_the_torch_backend() -> None:
    with engine(backend="_autodeploy", world_size=1, mode="transformers") as llm:
        assert (llm.args.max_seq_len, llm.args.max_batch_size) == (512, 8)
        assert len(llm.generate("<|bos|>").outputs[0].token_ids) > 0
    control.reset()
    assert refused(backend="_autodeploy", stream_interval=2) == "LLM got invalid argument: stream_interval"
    assert "world_size" in refused(backend="_autodeploy", tensor_parallel_size=2)
    with installed(autodeploy_from_torch=True) as other:
        other.LLM(MODEL, backend="_autodeploy", stream_interval=2).shutdown()


def test_modules_of_1_3_are_missing() -> None:
    for name in ("visual_gen", "grpc"):
        with pytest.raises(ImportError):
            importlib.import_module(f"tensorrt_llm.{name}")
    assert tensorrt_llm.__version__ == "1.2.1"
