"""The configuration of the torch engine and of the torch encoder: model, device and pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quartet.errors import ConfigError
from quartet.media.items import MediaKind

#: Dtypes a model can be run in; "auto" takes the checkpoint's own.
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class TorchModelConfig:
    """A model on one device: what engines and encoders have in common.

    Attributes:
        model_path: directory with config.json, tokenizer or preprocessor_config.json, and safetensors files.
        dtype: of weights, activations, KV cache and embeddings, by its PyTorch name; ``auto``: the checkpoint's.
        device: ``cpu``, or ``cuda:N``.
        block_size: tokens of a block.
        num_threads: CPU threads of one operation; ``None`` leaves PyTorch's choice.
        random_seed: take weights from this seed, and read none; ``None``: the checkpoint's.

    Raises:
        ConfigError: a value out of range; begins with the field's name.
    """

    model_path: str
    dtype: str = "auto"
    device: str = "cpu"
    block_size: int = 32
    num_threads: int | None = None
    random_seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        _check(self.dtype in DTYPES, "dtype", f"must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        is_cuda_index = self.device.startswith("cuda:") and self.device.removeprefix("cuda:").isdigit()
        _check(self.device == "cpu" or is_cuda_index, "device", f"must be cpu or cuda:N, not {self.device!r}")
        self._check_counts("block_size", "num_threads")

    def _check_counts(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            _check(value is None or value >= 1, name, "must be at least 1")


@dataclass(frozen=True, kw_only=True)
class TorchEngineConfig(TorchModelConfig):
    """One model on one device.

    Attributes:
        num_blocks: KV blocks of the pool; ``None``: ``free_gpu_memory_fraction`` decides.
        free_gpu_memory_fraction: the pool's share of the memory that is free on a CUDA device after the weights are
            loaded and the pool of media embeddings, CUDA graphs and sampling have their own, in (0, 1).
        max_num_seqs: sequences of a step at most: so many can be sampled without memory that the pool has.
        max_model_len: tokens of prompt and output together; ``None``: what the model was made for.
        num_embedding_blocks: blocks of the pool of media embeddings, of ``block_size`` tokens each, on ``device``; a
            model that takes text only has no such pool.
        takes_media: whether a model that can take media does.
        disable_overlap_scheduler: read a step's tokens before the next step is launched, on a GPU too.
        cuda_graph_max_batch_size: most sequences of a decode step that a CUDA graph repeats; 0: there are none, as on a
            CPU.
        cuda_graph_padding: whether a step takes the next larger graph; else only one of exactly its size.

    Raises:
        ConfigError: a value out of range; begins with the field's name.
    """

    num_blocks: int | None = None
    free_gpu_memory_fraction: float | None = None
    max_num_seqs: int = 256
    max_model_len: int | None = None
    num_embedding_blocks: int = 512
    takes_media: bool = True
    disable_overlap_scheduler: bool = False
    cuda_graph_max_batch_size: int = 256
    cuda_graph_padding: bool = True

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        super().__post_init__()
        self._check_counts("num_blocks", "max_num_seqs", "max_model_len", "num_embedding_blocks")
        _check(self.cuda_graph_max_batch_size >= 0, "cuda_graph_max_batch_size", "must be at least 0")
        fraction = self.free_gpu_memory_fraction
        if fraction is None:
            _check(self.num_blocks is not None, "num_blocks", "must be at least 1")
            return
        _check(self.num_blocks is None, "num_blocks", "free_gpu_memory_fraction says it; name one of the two")
        _check(0 < fraction < 1, "free_gpu_memory_fraction", f"must be in (0, 1), not {fraction}")
        _check(self.device != "cpu", "free_gpu_memory_fraction", "the device cpu has no GPU's memory")


@dataclass(frozen=True, kw_only=True)
class TorchEncoderConfig(TorchModelConfig):
    """One model's vision tower on one device.

    Attributes:
        num_blocks: of the encoder's own pool; ignored if it writes to an engine's pool.
        kinds: of files that it takes; without pictures among them no tower is loaded.
        max_batch_size: items in one run of the tower.
        max_pixels: of a picture, and of the intermediate pictures that preprocessing makes of it.
        max_item_tokens: most tokens of one item; ``None``: those of the largest picture.
        processor_kwargs: settings in place of those of the checkpoint's image processor.

    Raises:
        ConfigError: a value out of range; begins with the field's name.
    """

    num_blocks: int = 512
    kinds: tuple[MediaKind, ...] = tuple(MediaKind)
    max_batch_size: int = 8
    max_pixels: int = 16_777_216
    max_item_tokens: int | None = None
    processor_kwargs: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        super().__post_init__()
        self._check_counts("num_blocks", "max_batch_size", "max_pixels", "max_item_tokens")


def _check(is_good: bool, name: str, complaint: str) -> None:
    if not is_good:
        raise ConfigError(f"{name}: {complaint}")
