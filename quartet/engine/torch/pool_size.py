"""How many KV blocks a pool gets: as many as it is told, or what a share of the device's free memory holds."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from quartet.engine.torch.config import TorchEngineConfig
from quartet.errors import InvalidRequestError
from quartet.kvcache.layout import KvLayout

_LOG = logging.getLogger(__name__)


def num_pool_blocks(
    config: TorchEngineConfig, layout: KvLayout, free_size_bytes: Callable[[], int] | None = None
) -> int:
    """Blocks of the pool of ``config``; to be asked once the weights are loaded, as what is free then counts.

    Args:
        config: says their number, or the share.
        layout: of one block.
        free_size_bytes: what is free on the device; ``None``: the device is asked.

    Raises:
        InvalidRequestError: field ``free_gpu_memory_fraction``: the share holds no block.
    """
    fraction = config.free_gpu_memory_fraction
    if fraction is None:
        assert config.num_blocks is not None, "the configuration has one of the two"
        return config.num_blocks
    free = _cuda_free_size_bytes(config.device) if free_size_bytes is None else free_size_bytes()
    num_blocks = int(free * fraction) // layout.piece_size_bytes
    if num_blocks < 1:
        message = (
            f"{fraction} of the {free >> 20} MiB that are free on {config.device} holds no block of "
            f"{layout.piece_size_bytes} bytes"
        )
        raise InvalidRequestError(message, field="free_gpu_memory_fraction")
    _LOG.info("%d KV blocks take %g of the %d MiB that are free on %s", num_blocks, fraction, free >> 20, config.device)
    return num_blocks


def _cuda_free_size_bytes(device: str) -> int:
    # What loading needed and PyTorch keeps for later is free, too.
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return free
