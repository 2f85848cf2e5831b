"""KV cache connectors: what loads and stores blocks beyond the GPU for TensorRT-LLM, by the names that users know.

TensorRT-LLM 1.2 is told a connector's module and classes. From 1.3 on it knows some by name; LMCache is only known so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quartet.engine.settings import Connector
from quartet.errors import ConfigError

if TYPE_CHECKING:
    from quartet.engine.trtllm.arguments import Arguments

_CONFIG = "kv_connector_config"
_PARTIAL_REUSE = "kv_cache_config.enable_partial_reuse"
_KVBM = "kvbm"

_CONFIGS: Mapping[Connector, Mapping[str, str]] = {
    Connector.KVBM: {
        "connector_module": f"{_KVBM}.trtllm_integration.connector",
        "connector_scheduler_class": "DynamoKVBMConnectorLeader",
        "connector_worker_class": "DynamoKVBMConnectorWorker",
    },
    Connector.LMCACHE: {"connector": "lmcache"},
}


def use_connector(arguments: Arguments, connector: Connector | None) -> None:
    """Have TensorRT-LLM load and store blocks by ``connector``; ``None``: as the arguments say.

    Parts of blocks are not reused then: KVBM asks for it, so that what it keeps is consistent.

    Raises:
        ConfigError: a layer says otherwise.
    """
    if connector is None:
        return
    config = dict(_CONFIGS[connector])
    arguments.set_default(_CONFIG, config)
    if arguments.values[_CONFIG] != config:
        raise ConfigError(f"{arguments.origin(_CONFIG)}: connector says {connector}; name one of the two")
    name, _, below = _PARTIAL_REUSE.partition(".")
    if arguments.section(name).get(below):
        raise ConfigError(f"{arguments.origin(_PARTIAL_REUSE)}: must be false with connector: {connector}")
    arguments.set_default(_PARTIAL_REUSE, False)


def check_connector(config: Mapping[str, object], config_class: Any, version: str) -> None:
    """Refuse a connector that the installed packages lack. Loads nothing of it.

    Args:
        config: what ``kv_connector_config`` is to say.
        config_class: the installed TensorRT-LLM's class for it.
        version: of that package, for the message.

    Raises:
        ConfigError: names ``connector``.
    """
    if "connector" in config and "connector" not in config_class.model_fields:
        raise ConfigError(
            f"connector: the TensorRT-LLM installed here{version} knows no {config['connector']}; it came with 1.3"
        )
    is_kvbm = config.get("connector_module") == _CONFIGS[Connector.KVBM]["connector_module"]
    if is_kvbm and importlib.util.find_spec(_KVBM) is None:
        raise ConfigError(f"connector: {_KVBM} needs the package {_KVBM}, which is not installed here")
