"""What a deployment may not set."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.errors import ConfigError
from quartet.transfer.base import PoolMemory, TransferWay
from quartet.transfer.config import TransferConfig


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("hand_off_ttl_s", 0.0),
        ("max_pull_s", -1.0),
        ("stall_timeout_s", float("nan")),
        ("ways", (TransferWay.SHM,)),
        ("ways", (TransferWay.GRPC, TransferWay.GRPC)),
        ("ways", (TransferWay.NIXL, TransferWay.GRPC)),
        ("ways", (TransferWay.STAGED, TransferWay.GRPC)),
        ("staging_size_bytes", 0),
    ],
)
def test_an_impossible_setting_is_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=setting):
        TransferConfig(**{setting: value})


def test_blocks_go_by_the_ways_that_reach_them_in_the_configured_order() -> None:
    memory = PoolMemory(1, 8)
    assert TransferConfig().ways_of(memory) == (TransferWay.SHM, TransferWay.GRPC)
    assert TransferConfig(ways=(TransferWay.GRPC,)).ways_of(memory) == (TransferWay.GRPC,)
    assert TransferConfig().ways_of(None) == ()
    memory.close()
