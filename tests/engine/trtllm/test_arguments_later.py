"""Arguments where a line after 1.2 is installed: what that line alone can check, and what is refused all the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from quartet.engine.settings import Backend
from quartet.engine.trtllm import package
from quartet.engine.trtllm.arguments import Use, build_objects
from quartet.errors import ConfigError
from tests.engine.trtllm.specs import arguments
from tests.fakes.installation import installed

ALONE = "; TensorRT-LLM 1.4.0rc1 alone checks it"
LAYER = "override_engine_args: "
EAGLE3 = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model_dir": "draft"}


@pytest.fixture
def later() -> Iterator[Any]:
    with installed(version="1.4.0rc1") as module:
        yield module


def warnings_of(override: Mapping[str, object], use: Use = Use.DECODE, **settings: Any) -> list[str]:
    return list(arguments(use, override, **settings).warnings)


def refusal(override: Mapping[str, object], use: Use = Use.DECODE) -> str:
    with pytest.raises(ConfigError) as refused:
        arguments(use, override)
    return str(refused.value)


#: What it is, and what is said of it, without and with 1.4 installed; of several things wrong, 1.2 names the first.
DOUBTS: list[tuple[dict[str, object], str, list[str]]] = [
    ({"nothing_like_it": 1}, "nothing_like_it: TensorRT-LLM 1.2 does", ["nothing_like_it: is not known of 1.2"]),
    (
        {"max_batch_siz": 1},
        "max_batch_siz: TensorRT-LLM 1.2 does",
        ["max_batch_siz: is not known of 1.2; did you mean max_batch_size?"],
    ),
    ({"sleep_config": {}}, "sleep_config: TensorRT-LLM 1.2 does", ["sleep_config: came with 1.3"]),
    ({"world_size": 2}, "world_size: only", ["world_size: only the backend _autodeploy of TensorRT-LLM 1.2 takes it"]),
    (
        {"kv_cache_config": {"disk_cache_size": 5, "pages": 1}},
        "kv_cache_config.disk_cache_size: TensorRT-LLM 1.2 does",
        ["kv_cache_config.disk_cache_size: came with 1.3", "kv_cache_config.pages: is not known of 1.2"],
    ),
    *(
        (
            {"load_format": said},
            "load_format: must be one of",
            [f"load_format: '{said}' is not known of 1.2, which has AUTO, DUMMY, VISION_ONLY"],
        )
        for said in ("GMS", "gms")
    ),
    (
        {"guided_decoding_backend": "outlines"},
        "guided_decoding_backend: must be one of",
        ["guided_decoding_backend: 'outlines' is not known of 1.2, which has xgrammar, llguidance"],
    ),
    (
        {"nvfp4_gemm_config": {"allowed_backends": ["new"]}},
        "nvfp4_gemm_config.allowed_backends: must be list",
        [
            "nvfp4_gemm_config.allowed_backends: a list is not known of 1.2, which has "
            "list[Literal['cutlass','cublaslt','cutedsl','cuda_core']]"
        ],
    ),
    (
        {"kv_connector_config": {"connector_module": "mine"}},
        "kv_connector_config.connector_scheduler_class: is missing",
        [
            f"kv_connector_config.{name}: is missing, which 1.2 would refuse"
            for name in ("connector_scheduler_class", "connector_worker_class")
        ],
    ),
    (
        {"kv_connector_config": {"connector": "lmcache-mp", "server_url": "tcp://[::1]:5555"}},
        "kv_connector_config.connector: TensorRT-LLM 1.2 does",
        ["kv_connector_config.connector: came with 1.3", "kv_connector_config.server_url: came with 1.3"],
    ),
    (
        {"cuda_graph_config": {"batch_sizes": [1], "max_batch_size": 8}},
        "cuda_graph_config.batch_sizes: set it",
        ["cuda_graph_config.batch_sizes: set it or max_batch_size, not both in 1.2"],
    ),
    (
        {"speculative_config": EAGLE3},
        "speculative_config.decoding_type: TensorRT-LLM 1.2 does",
        ["speculative_config.decoding_type: Eagle3 came with 1.3"],
    ),
    (
        {"speculative_config": {"decoding_type": "NGram"}},
        "speculative_config.max_draft_len: is missing",
        [
            f"speculative_config.{name}: is missing, which 1.2 would refuse"
            for name in ("max_draft_len", "max_matching_ngram_size")
        ],
    ),
]


@pytest.mark.parametrize(("override", "by_1_2", "by_1_4"), DOUBTS)
@pytest.mark.usefixtures("later")
def test_what_1_2_alone_is_known_to_refuse_is_a_warning_that_names_the_installed_version(
    override: dict[str, object], by_1_2: str, by_1_4: list[str]
) -> None:
    assert warnings_of(override) == [f"{LAYER}{said}{ALONE}" for said in by_1_4]
    assert (
        arguments(override=override).values.items()
        >= {name: value for name, value in override.items() if name != "kv_cache_config"}.items()
    )
    for version in ("1.2.1", "1.1.0", "unreadable"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(package, "version", lambda _, version=version: version)
            assert refusal(override).startswith(f"{LAYER}{by_1_2}"), version


@pytest.mark.parametrize("version", ["1.3.0rc29", "2.0"])
def test_any_line_after_1_2_is_a_later_one(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "version", lambda _: version)
    assert warnings_of({"new": 1}) == [f"{LAYER}new: is not known of 1.2; TensorRT-LLM {version} alone checks it"]


@pytest.mark.parametrize("kind", ["SA", "DFlash"])
@pytest.mark.usefixtures("later")
def test_fields_of_a_decoding_that_is_not_described_pass_with_a_warning_each(kind: str) -> None:
    said = warnings_of({"speculative_config": {"decoding_type": kind, "max_draft_len": 2, "own": 1}})
    assert [warning.partition(": ")[2].partition(":")[0] for warning in said] == [
        "speculative_config.decoding_type",
        "speculative_config.own",
    ]
    assert "1.4.0rc1" in said[0] and "1.4.0rc1" in said[1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"max_batch_size": "8"}, "max_batch_size: must be int | None, not '8'"),
        ({"load_format": True}, "load_format: must be one of"),
        ({"nvfp4_gemm_config": {"allowed_backends": "cutlass"}}, "nvfp4_gemm_config.allowed_backends: must be"),
        ({"kv_cache_config": {"tokens_per_block": 0}}, "kv_cache_config.tokens_per_block: must be at least 1"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 2}}, "kv_cache_config.free_gpu_memory_fraction: must be"),
        ({"cache_transceiver_config": {"kv_transfer_timeout_ms": 0}}, "cache_transceiver_config.kv_transfer_timeout"),
        ({"build_config": {}}, "build_config: the PyTorch backend"),
        ({"peft_cache_config": {"lora_prefetch_dir": "x"}}, "peft_cache_config.lora_prefetch_dir: "),
        ({"speculative_config": {"decoding_type": "Medusa"}}, "speculative_config.decoding_type: the PyTorch"),
        ({"speculative_config": {}}, "speculative_config.decoding_type: must be one of"),
        ({"model": "other"}, "model: is the worker's own"),
        ({"disable_overlap_scheduler": False}, "disable_overlap_scheduler: must be true on a prefill worker"),
        ({"max_beam_width": 2}, "max_beam_width: must be 1"),
        ({"sampler_type": "TRTLLMSampler"}, "sampler_type: TensorRT-LLM 1.4.0rc1 has it no more, as TorchSampler is"),
        ({"disable_flashinfer_sampling": True}, "disable_flashinfer_sampling: TensorRT-LLM 1.4.0rc1 has it no more"),
        ({"enable_sleep": True}, "enable_sleep: TensorRT-LLM 1.4.0rc1 has it no more, as sleep_config says it"),
    ],
)
@pytest.mark.usefixtures("later")
def test_what_no_line_takes_and_what_is_gone_is_refused(override: dict[str, object], message: str) -> None:
    assert refusal(override, Use.PREFILL).startswith(f"{LAYER}{message}")


@pytest.mark.parametrize(
    ("name", "value"), [("sampler_type", "auto"), ("sampler_type", "TorchSampler"), ("enable_sleep", False)]
)
def test_what_is_gone_and_asks_for_what_holds_anyway_is_left_out(later: Any, name: str, value: object) -> None:
    made = arguments(override={name: value})
    [warning] = made.warnings
    assert warning.startswith(f"{LAYER}{name}: TensorRT-LLM 1.4.0rc1 has it no more, as ")
    assert warning.endswith("; left out") and name not in made.values
    later.llmapi.llm_args.TorchLlmArgs(**build_objects(made))


def test_1_3_takes_the_sampler_that_1_4_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "version", lambda _: "1.3.0rc10")
    made = arguments(override={"sampler_type": "TRTLLMSampler"})
    assert (made.values["sampler_type"], made.warnings) == ("TRTLLMSampler", ())
    assert "1.3.0rc10 has it no more" in refusal({"enable_sleep": True})


@pytest.mark.usefixtures("later")
def test_of_what_is_left_out_no_line_is_said_to_check_it() -> None:
    override = {"new": 1, "kv_cache_config": {"pages": 1}, "dtype": "bfloat16"}
    by_encoder = warnings_of(override, Use.ENCODE)
    assert [warning for warning in by_encoder if ALONE in warning] == []
    by_autodeploy = warnings_of({"new": 1, "stream_interval": 2}, backend=Backend.AUTODEPLOY)
    assert [warning for warning in by_autodeploy if ALONE in warning] == []
    assert f"{LAYER}new: left out, the backend _autodeploy may not take it" in by_autodeploy


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ({"load_format": "gms"}, "load_format.name", "GMS"),
        ({"speculative_config": EAGLE3}, "speculative_config.speculative_model", "draft"),
        (
            {"speculative_config": {"decoding_type": "SA", "max_matching_ngram_size": 3}},
            "speculative_config.max_matching_ngram_size",
            3,
        ),
        ({"kv_connector_config": {"connector": "lmcache-mp"}}, "kv_connector_config.connector", "lmcache-mp"),
        ({"sleep_config": {"tags": 1}}, "sleep_config", {"tags": 1}),
    ],
)
def test_the_package_gets_what_passed(later: Any, override: dict[str, object], path: str, expected: object) -> None:
    args = later.llmapi.llm_args.TorchLlmArgs(**build_objects(arguments(override=override)))
    for name in path.split("."):
        args = getattr(args, name)
    assert args == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"nothing_like_it": 1}, r"^nothing_like_it: .*\(1\.4\.0rc1\) does not have it"),
        ({"kv_cache_config": {"pages": 1}}, r"^kv_cache_config: .*\(1\.4\.0rc1\) refuses it"),
        ({"kv_connector_config": {"connector_module": "mine"}}, r"^kv_connector_config: .*\(1\.4\.0rc1\) refuses it"),
    ],
)
@pytest.mark.usefixtures("later")
def test_what_the_package_refuses_after_all_is_named(override: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_objects(arguments(override=override))
