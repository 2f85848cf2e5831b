"""Our tables of TensorRT-LLM 1.2's API say what its checkable description says, no more and no less."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quartet.engine.trtllm import package, schema
from quartet.engine.trtllm.schema import fits, misfit
from tests.fakes.installation import DIRECTORY

API: dict[str, Any] = json.loads((Path(DIRECTORY) / "tensorrt_llm" / "api.json").read_text(encoding="utf-8"))
CLASSES = API["classes"]
_SPECULATIVE = "DraftTarget- | Eagle- | Lookahead- | Medusa- | MTP- | NGram- | UserProvided- | SaveHiddenStates- | Auto"
#: Types whose classes the description does not open: what is in their mappings is up to TensorRT-LLM.
UNOPENED = {
    "RocketSparseAttentionConfig | DeepSeekSparseAttentionConfig | SkipSoftmaxAttentionConfig | None": "dict | None",
    "DecodingConfig | None": "dict | None",
    "RayPlacementConfig | None": "dict | None",
    "LayerwiseBenchmarksConfig": "dict",
    f"{_SPECULATIVE}DecodingConfig | None": "SpeculativeConfig | None",
    "str | LoadFormat": "AnyCase['AUTO','DUMMY','VISION_ONLY']",
}
#: Fields that are optional to its class, but without which such an engine does not speculate.
NEEDED = {"EagleDecodingConfig": {"max_draft_len"}, "NGramDecodingConfig": {"max_draft_len", "max_matching_ngram_size"}}


def literal(choices: list[str]) -> str:
    return f"Literal[{','.join(map(repr, choices))}]"


def expected_type(param: Mapping[str, Any]) -> str:
    if "choices" in param:
        return literal(param["choices"])
    text = UNOPENED.get(param["type"], str(param["type"]))
    for name in ("CapacitySchedulerPolicy", "ContextChunkingPolicy"):
        text = text.replace(name, literal(API["enums"][name]))
    return text


def described(name: str) -> dict[str, str]:
    """Types of the class's fields, those that it inherits and other names of the same included."""
    entry = CLASSES[name]
    inherited = described(entry["extends"]) if "extends" in entry else {}
    own = {
        alias: expected_type(param)
        for field, param in entry["params"].items()
        for alias in {field, param.get("alias", field)}
    }
    return {**inherited, **own}


@pytest.mark.parametrize("name", schema.CONFIGS)
def test_a_sub_config_has_the_fields_of_the_description(name: str) -> None:
    table, entry = schema.CONFIGS[name], CLASSES[name]
    assert table.types == described(name)
    assert set(table.later) == set(entry.get("not_in_1_2", []))
    required = {field for field, param in entry["params"].items() if param.get("required")}
    assert set(table.required) == required | NEEDED.get(name, set())


def test_llm_has_the_arguments_of_the_description() -> None:
    entry = CLASSES["TorchLlmArgs"]
    assert schema.LLM.types == described("TorchLlmArgs")
    assert set(schema.LLM.later) == set(entry["not_in_1_2"])
    assert set(schema.REFUSED) == set(API["rejected_keywords"]["torch_backend"]["names"])


def test_what_is_gone_is_what_the_description_says_of_1_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "version", lambda _: "1.4.0rc1")
    gone = schema.gone_arguments()
    assert set(gone) == set(CLASSES["TorchLlmArgs"]["not_in_1_4"])
    for name, entry in gone.items():
        assert CLASSES["TorchLlmArgs"]["params"][name]["default"] in entry.idle


def test_every_sub_config_of_the_description_is_known() -> None:
    configs = {name for name in CLASSES if name.endswith("Config")}
    assert configs == set(schema.CONFIGS)
    referred = {part for kind in schema.LLM.types.values() for part in kind.split(" | ") if part.endswith("Config")}
    assert referred - {"SpeculativeConfig"} <= set(schema.CONFIGS)


def test_an_encoder_takes_only_arguments_that_llm_takes() -> None:
    assert set(schema.LLM.types) >= schema.ENCODER >= set(CLASSES["MultimodalEncoder"]["params"])


def test_autodeploy_gets_nothing_that_it_refuses() -> None:
    refused = API["rejected_keywords"]["_autodeploy"]
    assert not set(schema.AUTODEPLOY.types) & {*refused["names"], *refused["frozen"]}


def test_decoding_types_are_those_that_are_described() -> None:
    named = {entry["decoding_type"]: name for name, entry in CLASSES.items() if "decoding_type" in entry}
    assert named.items() <= schema.DECODING_CLASSES.items()


@pytest.mark.parametrize("name", ["TorchLlmArgs", *schema.CONFIGS])
def test_every_default_of_the_description_is_of_its_type(name: str) -> None:
    for field, param in CLASSES[name]["params"].items():
        if "default" in param:
            assert fits(expected_type(param), param["default"]), field


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("int", 3, True),
        ("int", -1, "3"),
        ("int | None", None, 1.0),
        ("float", 1, "1"),
        ("bool", False, 0),
        ("str | Path", "x", 1),
        ("int > 0", 1, 0),
        ("int >= 0 | None", 0, -1),
        ("float >= 0", 0.5, -0.5),
        ("float in [0,1]", 1, 1.01),
        ("float in [0,1] | None", None, float("nan")),
        ("list[int]", [1], [True]),
        ("list[list[int]] | None", [[0], []], [0]),
        ("set[int]", [1, 2], "12"),
        ("dict", {}, []),
        ("dict[str,str]", {"a": "b"}, {"a": 1}),
        ("dict[int, list[int]]", {0: [1]}, {"0": [1]}),
        ("list[Literal['a','b']]", ["a"], ["c"]),
        ("Literal['UCX','NIXL']", "UCX", "ucx"),
        ("AnyCase['AUTO','DUMMY']", "dummy", "other"),
        ("TokenizerBase | None", None, "x"),
    ],
)
def test_values_are_distinguished_by_their_types(kind: str, good: object, bad: object) -> None:
    assert fits(kind, good)
    assert not fits(kind, bad)


def test_a_misfit_says_what_would_fit() -> None:
    assert misfit("int | None", "x") == "must be int | None, not 'x'"
    assert misfit("Literal['UCX','NIXL'] | None", "ucx") == "must be one of UCX, NIXL, not 'ucx': write it UCX"
    assert misfit("dict[str,str]", {"token": 1}) == "must be dict[str,str], not a dict"
