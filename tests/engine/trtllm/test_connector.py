"""A connector by name: what TensorRT-LLM is told, and what is refused before anything loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.engine.settings import Backend, Connector
from quartet.engine.trtllm.arguments import Use, build_objects
from quartet.errors import ConfigError
from tests.engine.trtllm.specs import arguments
from tests.fakes.installation import installed

KVBM = {
    "connector_module": "kvbm.trtllm_integration.connector",
    "connector_scheduler_class": "DynamoKVBMConnectorLeader",
    "connector_worker_class": "DynamoKVBMConnectorWorker",
}


@pytest.mark.parametrize("use", [Use.PREFILL, Use.DECODE])
@pytest.mark.parametrize(
    ("connector", "config"), [(Connector.KVBM, KVBM), (Connector.LMCACHE, {"connector": "lmcache"})]
)
def test_a_connector_is_told_to_tensorrt_llm_and_no_part_of_a_block_is_reused(
    use: Use, connector: Connector, config: dict[str, str]
) -> None:
    made = arguments(use, {"kv_cache_config": {"tokens_per_block": 64}}, connector=connector).values
    assert made["kv_connector_config"] == config
    cache: Any = made["kv_cache_config"]
    assert (cache["enable_partial_reuse"], cache["tokens_per_block"]) == (False, 64)


def test_without_a_connector_nothing_is_said() -> None:
    made = arguments().values
    assert "kv_connector_config" not in made
    assert "enable_partial_reuse" not in made["kv_cache_config"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"override": {"kv_cache_config": {"enable_partial_reuse": True}}},
            "override_engine_args: kv_cache_config.enable_partial_reuse: must be false",
        ),
        (
            {"override": {"kv_connector_config": {**KVBM, "connector_module": "other"}}},
            "override_engine_args: kv_connector_config: connector says kvbm",
        ),
        ({"backend": Backend.AUTODEPLOY}, "connector: the backend _autodeploy"),
    ],
)
def test_a_layer_that_says_otherwise_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        arguments(connector=Connector.KVBM, **settings)


def test_an_encode_worker_leaves_it_out() -> None:
    made = arguments(Use.ENCODE, connector=Connector.KVBM)
    assert "kv_connector_config" not in made.values
    assert "connector: left out, an encode worker has no use for it" in made.warnings


def test_a_connector_that_is_not_installed_is_refused_by_name(tmp_path: Path) -> None:
    kvbm, lmcache = (arguments(connector=connector) for connector in Connector)
    with installed():
        with pytest.raises(ConfigError, match=r"^connector: kvbm needs the package kvbm"):
            build_objects(kvbm)
        with pytest.raises(ConfigError, match=r"^connector: .*knows no lmcache; it came with 1\.3"):
            build_objects(lmcache)
        (tmp_path / "kvbm").mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(tmp_path))
            built = build_objects(kvbm)["kv_connector_config"]
        assert built.connector_worker_class == "DynamoKVBMConnectorWorker"
    with installed(connector_names=True) as tensorrt_llm, tensorrt_llm.LLM(**build_objects(lmcache)) as llm:
        assert llm.args.kv_connector_config.connector == "lmcache"
        assert llm.args.kv_cache_config.enable_partial_reuse is False
