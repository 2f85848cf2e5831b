"""The engine files that come along say what published ones say, in words that TensorRT-LLM 1.2 has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quartet.config import load_yaml
from quartet.engine.trtllm.arguments import LlmArguments, Use, build_objects
from quartet.engine.trtllm.schema import DECODING_CLASSES, fits
from quartet.errors import ConfigError
from tests.engine.trtllm.specs import arguments
from tests.engine.trtllm.test_schema import CLASSES, expected_type
from tests.fakes.installation import installed

DIRECTORY = Path(__file__).parents[3] / "configs" / "engines"
FILES = sorted(DIRECTORY.rglob("*.yaml"))
USES = {"agg": Use.DECODE, "prefill": Use.PREFILL, "decode": Use.DECODE, "encode": Use.ENCODE}


def graph(max_batch_size: int, **more: Any) -> dict[str, Any]:
    return {"cuda_graph_config": {"max_batch_size": max_batch_size, **more}}


def cache(fraction: float, **more: Any) -> dict[str, Any]:
    return {"kv_cache_config": {"free_gpu_memory_fraction": fraction, **more}}


def bounds(num_tokens: int, batch_size: int) -> dict[str, Any]:
    return {"max_num_tokens": num_tokens, "max_batch_size": batch_size}


NO_OVERLAP, OVERLAP = {"disable_overlap_scheduler": True}, {"disable_overlap_scheduler": False}
ALONE: dict[str, Any] = {"cache_transceiver_config": None}
DEFAULT = {"cache_transceiver_config": {"backend": "DEFAULT"}}
UCX = {"cache_transceiver_config": {"backend": "UCX"}}


def ucx(num_tokens: int) -> dict[str, Any]:
    return {"cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": num_tokens}}


NO_REUSE = {"enable_block_reuse": False}
CHUNKS = {"enable_chunked_prefill": True}

_QWEN = {
    **{"tensor_parallel_size": 1, "moe_expert_parallel_size": 1, "enable_attention_dp": False},
    **{"max_num_tokens": 8192, "trust_remote_code": True, **CHUNKS},
    **cache(0.5),
    **graph(16),
}
_ALL_OF_FOUR = {"tensor_parallel_size": 4, "moe_expert_parallel_size": 4}
_GPT_OSS = {**_ALL_OF_FOUR, "stream_interval": 10, "print_iter_log": False, "moe_config": {"backend": "CUTLASS"}}
_MTP = {**_ALL_OF_FOUR, "speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 1}, **ucx(16384)}
_WIDE_EP = {
    **{"tensor_parallel_size": 16, "moe_expert_parallel_size": 16, "pipeline_parallel_size": 1},
    **{"enable_attention_dp": True, **cache(0.3, dtype="fp8"), **ucx(16384)},
    "moe_config": {"backend": "WIDEEP", "load_balancer": {"num_slots": 288, "layer_updates_per_iter": 1}},
}
_SCOUT = {"tensor_parallel_size": 4, **cache(0.3, **NO_REUSE), **UCX}
_LLAVA = {"tensor_parallel_size": 1, **DEFAULT}

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "qwen3/agg": {**_QWEN, "max_batch_size": 16, **ALONE},
    "qwen3/prefill": {**_QWEN, **NO_OVERLAP, **DEFAULT},
    # Published with graphs to 16, and batches of up to 2048.
    "qwen3/decode": {**_QWEN, **OVERLAP, **DEFAULT, **graph(2048, enable_padding=True)},
    "gpt-oss-120b/agg": {
        **{**_ALL_OF_FOUR, "enable_attention_dp": True, "stream_interval": 20, "num_postprocess_workers": 4},
        **{"max_batch_size": 800, **cache(0.9, **NO_REUSE), **graph(800, enable_padding=True), **ALONE},
        **{"moe_config": {"backend": "TRTLLM"}},
    },
    # Published decode takes 0.8 of the memory here, over the 0.9 of its command line.
    "gpt-oss-120b/prefill": {
        **{**_GPT_OSS, "enable_attention_dp": False, **CHUNKS},
        **{**graph(32, enable_padding=True), **NO_OVERLAP, **ucx(65536)},
    },
    "gpt-oss-120b/decode": {
        **{**_GPT_OSS, "enable_attention_dp": True},
        **{**graph(128, enable_padding=True), **OVERLAP, **ucx(65536)},
    },
    # Published with a log line for each step, and with the powers of two as sizes of graphs.
    "deepseek-r1/mtp/prefill": {
        **{**_MTP, "enable_attention_dp": True, **bounds(8192, 1), "max_seq_len": 8192},
        **{**cache(0.75, dtype="fp8"), **NO_OVERLAP},
    },
    "deepseek-r1/mtp/decode": {
        **{**_MTP, "enable_attention_dp": False, **bounds(512, 256), "max_seq_len": 8704},
        **{**cache(0.85, dtype="fp8"), **graph(256, enable_padding=True)},
    },
    "deepseek-r1/wide_ep/prefill": {**_WIDE_EP, **bounds(8192, 1), "max_seq_len": 8192, **NO_OVERLAP},
    "deepseek-r1/wide_ep/decode": {
        **_WIDE_EP,
        **bounds(256, 256),
        "max_seq_len": 8448,
        **OVERLAP,
        **graph(256, enable_padding=True),
    },
    "llama4-scout/agg": {**_SCOUT, **bounds(4096, 8), "moe_expert_parallel_size": 1, **CHUNKS},
    "llama4-scout/prefill": {**_SCOUT, **bounds(8192, 16), **NO_OVERLAP},
    "llama4-scout/decode": {**_SCOUT, **bounds(8192, 16), **OVERLAP},
    "llava-v1.6-mistral-7b/agg": {**_LLAVA, **bounds(4096, 8), **cache(0.1, **NO_REUSE)},
    "llava-v1.6-mistral-7b/encode": {**_LLAVA, **bounds(30192, 16), **NO_OVERLAP, **CHUNKS},
    "llava-v1.6-mistral-7b/prefill": {**_LLAVA, **bounds(30192, 32), **cache(0.5, **NO_REUSE), **NO_OVERLAP},
    "llava-v1.6-mistral-7b/decode": {**_LLAVA, **bounds(30192, 16), **cache(0.3, **NO_REUSE), **OVERLAP},
}


def name_of(file: Path) -> str:
    return str(file.relative_to(DIRECTORY).with_suffix(""))


def load(made: LlmArguments, use: Use) -> Any:
    """Load the tiny model with these arguments, as 1.2 would take them; what it made of them."""
    with installed(num_gpus=16) as tensorrt_llm:
        kind = tensorrt_llm.MultimodalEncoder if use is Use.ENCODE else tensorrt_llm.LLM
        with kind(**build_objects(made)) as llm:
            return llm.args


def test_each_file_says_what_was_published() -> None:
    assert {name_of(file): load_yaml(file) for file in FILES} == PUBLISHED


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_begins_with_what_it_is_for(file: Path) -> None:
    assert file.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_key_is_one_of_1_2_and_of_its_type(file: Path) -> None:
    def check(values: Mapping[str, Any], class_name: str) -> None:
        params = CLASSES[class_name]["params"]
        for key, value in values.items():
            kind = expected_type(params[key])
            inner = kind.removesuffix(" | None")
            if key == "speculative_config":
                value = dict(value)
                inner = DECODING_CLASSES[value.pop("decoding_type")]
            if isinstance(value, Mapping) and inner in CLASSES:
                check(value, inner)
            else:
                assert fits(kind, value), key

    check(load_yaml(file), "TorchLlmArgs")


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_the_package_takes_each_file_in_its_role(file: Path) -> None:
    use = USES[file.stem]
    made = arguments(use, extra_engine_args=file)
    args = load(made, use)
    assert args.max_batch_size == made.max_batch_size
    assert args.max_num_tokens == made.max_num_tokens
    if use is not Use.ENCODE:
        assert made.has_transceiver == bool(args.cache_transceiver_config and args.cache_transceiver_config.backend)
        assert made.has_events == args.kv_cache_config.enable_block_reuse
        assert args.kv_cache_config.tokens_per_block == made.block_size
        assert args.kv_cache_config.dtype in ("auto", made.kv_dtype)
        assert args.max_seq_len == made.max_seq_len
        assert args.disable_overlap_scheduler == (use is Use.PREFILL)
        assert args.enable_iter_perf_stats


@pytest.mark.parametrize("use", [Use.DECODE, Use.ENCODE])
@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_of_another_role_is_taken_where_it_makes_sense(file: Path, use: Use) -> None:
    assert load(arguments(use, extra_engine_args=file), use).model == arguments(use).values["model"]


@pytest.mark.parametrize("file", [file for file in FILES if file.stem in ("agg", "decode")], ids=name_of)
def test_a_file_that_hands_nothing_on_is_refused_to_prefill(file: Path) -> None:
    if "disable_overlap_scheduler" in load_yaml(file) or load_yaml(file)["cache_transceiver_config"] is None:
        with pytest.raises(ConfigError, match=r"^extra_engine_args: (disable_overlap|cache_transceiver)"):
            arguments(Use.PREFILL, extra_engine_args=file)
    else:
        assert arguments(Use.PREFILL, extra_engine_args=file).has_transceiver


def test_warnings_are_of_what_is_known_to_be_off_or_left_out() -> None:
    said = {name_of(file): arguments(USES[file.stem], extra_engine_args=file).warnings for file in FILES}
    for name, warnings in said.items():
        if name.startswith(("qwen3/", "deepseek-r1/")) or name in ("gpt-oss-120b/prefill", "gpt-oss-120b/decode"):
            assert warnings == (), name
        else:
            assert warnings, name
            assert all("enable_block_reuse" in warning or "left out" in warning for warning in warnings), name


def test_results_are_not_sent_through_processes_that_make_text() -> None:
    file = next(file for file in FILES if name_of(file) == "gpt-oss-120b/agg")
    assert load_yaml(file)["num_postprocess_workers"] == 4
    made = arguments(Use.DECODE, extra_engine_args=file)
    assert "num_postprocess_workers" not in made.values
    assert any(warning.startswith("extra_engine_args: num_postprocess_workers: left out") for warning in made.warnings)


def test_ranks_are_those_that_attend_to_requests_of_their_own() -> None:
    ranks = {name_of(file): arguments(USES[file.stem], extra_engine_args=file).num_ranks for file in FILES}
    assert {name: num for name, num in ranks.items() if num > 1} == {
        "gpt-oss-120b/agg": 4,
        "gpt-oss-120b/decode": 4,
        "deepseek-r1/mtp/prefill": 4,
        "deepseek-r1/wide_ep/prefill": 16,
        "deepseek-r1/wide_ep/decode": 16,
    }


def test_graphs_of_every_decode_worker_are_as_large_as_its_batches() -> None:
    for file in FILES:
        if file.stem in ("agg", "decode") and (graphs := load_yaml(file).get("cuda_graph_config")):
            # The topology gives gpt-oss's decode workers their bound.
            bound = 128 if name_of(file) == "gpt-oss-120b/decode" else load_yaml(file).get("max_batch_size", 2048)
            assert graphs["max_batch_size"] == bound, name_of(file)
