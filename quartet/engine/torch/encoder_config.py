"""What the torch encoder is told about its model, device and pool of embeddings."""

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
        num_blocks: of the encoder's own pool; means nothing where it writes to another's.
        block_size: tokens of a block of embeddings.
        num_threads: CPU threads of one operation; ``None`` leaves PyTorch's choice.
        kinds: of files that it takes; no tower is loaded where pictures are not among them.
        max_batch_size: items in one run of the tower.
        max_pixels: of a picture, and of what preprocessing scales it to on the way.
        max_item_tokens: tokens that one item fills at most; ``None``: as many as the largest picture.

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
        # What an engine is told as well is held to the same.
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
