"""The configuration of the torch engine: model, device and block pool."""

from __future__ import annotations

from dataclasses import dataclass

from quartet.errors import ConfigError

#: Dtypes a model can be run in; "auto" takes the checkpoint's own.
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class TorchEngineConfig:
    """One model on one device.

    Attributes:
        model_path: directory with config.json, tokenizer and safetensors files.
        dtype: of weights, activations and KV cache, by its PyTorch name; ``auto``: the checkpoint's.
        device: ``cpu``, or ``cuda:N``.
        num_blocks: KV blocks of the pool; ``None``: ``free_gpu_memory_fraction`` decides.
        free_gpu_memory_fraction: the pool's share of the memory that is free on a CUDA device after the weights are
            loaded, in (0, 1).
        block_size: tokens of a block.
        max_model_len: tokens of prompt and output together; ``None``: what the model was made for.
        num_threads: CPU threads of one operation; ``None`` leaves PyTorch's choice.
        num_embedding_blocks: blocks of the pool of media embeddings, of ``block_size`` tokens each, in host memory;
            a model that takes text only has no such pool.
        takes_media: whether a model that can take media does.

    Raises:
        ConfigError: a value out of range; begins with the field's name.
    """

    model_path: str
    dtype: str = "auto"
    device: str = "cpu"
    num_blocks: int | None = None
    free_gpu_memory_fraction: float | None = None
    block_size: int = 32
    max_model_len: int | None = None
    num_threads: int | None = None
    num_embedding_blocks: int = 512
    takes_media: bool = True

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        _check(self.dtype in DTYPES, "dtype", f"must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        is_cuda_index = self.device.startswith("cuda:") and self.device.removeprefix("cuda:").isdigit()
        _check(self.device == "cpu" or is_cuda_index, "device", f"must be cpu or cuda:N, not {self.device!r}")
        self._check_pool()
        _check(self.block_size >= 1, "block_size", "must be at least 1")
        _check(self.max_model_len is None or self.max_model_len >= 1, "max_model_len", "must be at least 1")
        _check(self.num_threads is None or self.num_threads >= 1, "num_threads", "must be at least 1")
        _check(self.num_embedding_blocks >= 1, "num_embedding_blocks", "must be at least 1")

    def _check_pool(self) -> None:
        fraction = self.free_gpu_memory_fraction
        if fraction is None:
            _check(self.num_blocks is not None and self.num_blocks >= 1, "num_blocks", "must be at least 1")
            return
        _check(self.num_blocks is None, "num_blocks", "free_gpu_memory_fraction says it; name one of the two")
        _check(0 < fraction < 1, "free_gpu_memory_fraction", f"must be in (0, 1), not {fraction}")
        _check(self.device != "cpu", "free_gpu_memory_fraction", "the device cpu has no GPU's memory")


def _check(is_good: bool, name: str, complaint: str) -> None:
    if not is_good:
        raise ConfigError(f"{name}: {complaint}")
