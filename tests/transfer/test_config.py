"""What a deployment may not set."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.errors import ConfigError
from quartet.transfer.base import TransferWay
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
    ],
)
def test_an_impossible_setting_is_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=setting):
        TransferConfig(**{setting: value})
