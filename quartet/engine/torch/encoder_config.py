"""The configuration of the torch encoder: model, device and pool of embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from quartet.engine.torch.config import TorchEngineConfig
from quartet.errors import ConfigError
from quartet.media.items import MediaKind


@dataclass(frozen=True, kw_only=True)
class TorchEncoderConfig:
    """One model's vision tower on one device.

    Attributes:
        model_path: directory with config.json, preprocessor_config.json and safetensors files.
        dtype: of weights, activations and embeddings, by its PyTorch name; ``auto``: the checkpoint's.
        device: ``cpu``, or ``cuda:N``.
        num_blocks: of the encoder's own pool; ignored if it writes to an engine's pool.
        block_size: tokens of a block of embeddings.
        num_threads: CPU threads of one operation; ``None`` leaves PyTorch's choice.
        kinds: of files that it takes; without pictures among them no tower is loaded.
        max_batch_size: items in one run of the tower.
        max_pixels: of a picture, and of the intermediate pictures that preprocessing makes of it.
        max_item_tokens: most tokens of one item; ``None``: those of the largest picture.

    Raises:
        ConfigError: a value out of range; begins with the field's name.
    """

    model_path: str
    dtype: str = "auto"
    device: str = "cpu"
    num_blocks: int = 512
    block_size: int = 32
    num_threads: int | None = None
    kinds: tuple[MediaKind, ...] = tuple(MediaKind)
    max_batch_size: int = 8
    max_pixels: int = 16_777_216
    max_item_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        # The fields that an engine has too are checked in the same way.
        TorchEngineConfig(
            model_path=self.model_path,
            dtype=self.dtype,
            device=self.device,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_threads=self.num_threads,
        )
        for name in ("max_batch_size", "max_pixels", "max_item_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be at least 1")
