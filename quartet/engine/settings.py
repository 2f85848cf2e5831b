"""Settings of engines and vision towers: the same names for every engine; an engine refuses settings that it lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path

from quartet.engine.mock.model import MockSettings
from quartet.engine.scheduler import SchedulerConfig
from quartet.errors import ConfigError
from quartet.kvcache.retention import RetentionPlan
from quartet.kvcache.tiers import OffloadPolicy, TierPlan
from quartet.media.items import MediaKind


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The specification of one engine or encoder.

    Attributes:
        model_path: folder of a Hugging Face checkpoint.
        tells_contents: KV events say what stored blocks hold, too, where the engine can (``EngineKind``).
        otlp_endpoint: where an engine with spans of its own sends them; empty: it makes none.
    """

    model_path: str
    engine: EngineSettings
    encoder: EncoderSettings
    tells_contents: bool = False
    otlp_endpoint: str = ""


class EngineKind(StrEnum):
    """Which engine computes."""

    TORCH = "torch"
    MOCK = "mock"  # takes a model's time and computes nothing
    TRTLLM = "trtllm"  # TensorRT-LLM, which is installed separately

    @property
    def has_encoder(self) -> bool:
        """Whether it encodes media."""
        return self is not EngineKind.MOCK

    @property
    def tells_contents(self) -> bool:
        """Whether its KV events can say what stored blocks hold."""
        return self is not EngineKind.TRTLLM

    @property
    def shares_cores(self) -> bool:
        """Whether it computes on all CPU cores: several on one host must share them."""
        return self is EngineKind.TORCH

    def num_threads(self, num_cores: int) -> int | None:
        """CPU threads of one operation for so many cores; ``None``: its own choice."""
        if self.shares_cores:
            return num_cores
        return None if self is EngineKind.TRTLLM else 1

    def uses_gpu(self, device: str) -> bool:
        """Whether it runs on a GPU with this ``EngineSettings.device``."""
        return self is EngineKind.TRTLLM or (self is EngineKind.TORCH and device != "cpu")


class Modality(StrEnum):
    """What a prefill or decode worker takes besides tokens."""

    TEXT = "text"  # nothing, even if the model takes media
    MULTIMODAL = "multimodal"  # media files, which it encodes itself


class LoadFormat(StrEnum):
    """Where weights come from."""

    AUTO = "auto"  # the model's files
    RANDOM = "random"  # a seed: to run the shape of a model whose weights are not here


class Connector(StrEnum):
    """What keeps KV blocks beyond the GPU, for TensorRT-LLM."""

    KVBM = "kvbm"  # NVIDIA Dynamo's block manager
    LMCACHE = "lmcache"


class Backend(StrEnum):
    """What runs the model within TensorRT-LLM."""

    PYTORCH = "pytorch"
    AUTODEPLOY = "_autodeploy"


@dataclass(frozen=True, kw_only=True)
class HostCacheSettings:
    """KV blocks in the memory of the host: those that the device's pool evicts. There are none by default.

    Attributes:
        size_gb: of all its blocks, in 10**9 bytes; of each data-parallel rank.
        num_blocks: the same as a number, which wins.
        policy: which evicted blocks come here: ``pass_all``, ``presence`` (those that are not here) or ``presence_lfu``
            (those of them that were used more than ``min_lfu_count`` times).
        min_lfu_count: of ``presence_lfu``; 1: a block comes with its second use.
        max_concurrent_transfers: batches on their way here, or from here to the device, at a time; ``None``: here, all
            that steps and transfers overwrite, and four at a time of all else.
        max_batch_size: blocks of one.
    """

    size_gb: float | None = None
    num_blocks: int | None = None
    policy: OffloadPolicy = OffloadPolicy.PRESENCE
    min_lfu_count: int = 1
    max_concurrent_transfers: int | None = None
    max_batch_size: int = 16

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if self.size_gb is not None and not self.size_gb > 0:
            raise ConfigError(f"size_gb: must be above 0, not {self.size_gb}")
        for name in ("num_blocks", "max_concurrent_transfers", "max_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be at least 1, not {value}")
        if self.min_lfu_count < 0:
            raise ConfigError(f"min_lfu_count: must be at least 0, not {self.min_lfu_count}")

    @property
    def is_on(self) -> bool:
        """Whether there is such a tier."""
        return self.num_blocks is not None or self.size_gb is not None

    def plan(self, block_size_bytes: int) -> TierPlan:
        """The tier of an engine with blocks of so many bytes. Raises ``ConfigError``: ``size_gb`` holds none."""
        num_blocks = self.num_blocks
        if num_blocks is None:
            num_blocks = int((self.size_gb or 0.0) * _BYTES_PER_GB) // block_size_bytes
        if num_blocks < 1:
            raise ConfigError(f"size_gb: {self.size_gb} GB hold no block of {block_size_bytes} bytes")
        return TierPlan(
            num_blocks=num_blocks,
            policy=self.policy,
            min_lfu_count=self.min_lfu_count,
            max_concurrent_transfers=self.max_concurrent_transfers,
            max_batch_size=self.max_batch_size,
        )


@dataclass(frozen=True, kw_only=True)
class DiskCacheSettings(HostCacheSettings):
    """KV blocks in files: those that leave the memory of the host. They outlive the worker.

    Attributes:
        path: folder with a folder for each pool.
    """

    policy: OffloadPolicy = OffloadPolicy.PRESENCE_LFU
    path: Path | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        super().__post_init__()
        if self.is_on and self.path is None:
            raise ConfigError("path: must name a folder for the blocks")


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """How long the device's pool keeps KV blocks, and where those go that it evicts.

    Attributes:
        session_ttl_s: seconds for which blocks of a request with a session key are evicted after others, counted from
            the session's last end of a request; 0: like others.
        session_share: blocks that are kept so over all blocks of the pool, at most, in (0, 1].
    """

    session_ttl_s: float = 0.0
    session_share: float = 0.5
    host: HostCacheSettings = field(default_factory=HostCacheSettings)
    disk: DiskCacheSettings = field(default_factory=DiskCacheSettings)

    def __post_init__(self) -> None:
        """Refuse impossible values, and a disk without a host: what goes there or comes is on the host meanwhile."""
        if not self.session_ttl_s >= 0:
            raise ConfigError(f"session_ttl_s: must be at least 0, not {self.session_ttl_s}")
        if not 0 < self.session_share <= 1:
            raise ConfigError(f"session_share: must be in (0, 1], not {self.session_share}")
        if self.disk.is_on and not self.host.is_on:
            raise ConfigError("disk: needs host.size_gb or host.num_blocks")

    @property
    def retention(self) -> RetentionPlan | None:
        """What sessions retain; ``None``: nothing."""
        if not self.session_ttl_s:
            return None
        return RetentionPlan(ttl_s=self.session_ttl_s, share=self.session_share)

    def plans(self, block_size_bytes: int) -> tuple[TierPlan, TierPlan | None]:
        """The host's tier, which there is, and the disk's, for blocks of so many bytes. Raises ``ConfigError``."""
        plans: list[TierPlan | None] = []
        for name, settings in (("host", self.host), ("disk", self.disk)):
            try:
                plans.append(settings.plan(block_size_bytes) if settings.is_on else None)
            except ConfigError as error:
                raise ConfigError(f"cache.{name}.{error}") from error
        host, disk = plans
        assert host is not None, "there is such a tier"
        return host, disk


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """An engine and its pool.

    Fields that only some engines have say so; other engines refuse them by name.

    Attributes:
        kind: which engine.
        dtype: of weights and KV cache, as PyTorch names it; ``auto``: the checkpoint's own. Not for ``mock``.
        device: ``cpu``, or ``cuda:N``. For ``torch`` only.
        load_format: ``auto``: read the weights; ``random``: make them from ``load_seed``, for which config.json and the
            tokenizer's files are enough. For ``torch`` only, as ``load_seed``.
        load_seed: of random weights, unsigned 63 bit: the same on all workers of a model.
        disable_overlap_scheduler: on a GPU, read a step's tokens before the next step is launched: slower, and simpler
            to look into. For ``torch`` only; ``trtllm`` has its own argument of this name.
        num_blocks: KV blocks of each rank's pool; ``None``: 512, or for ``trtllm`` as many as its memory holds.
        data_parallel_size: attention-data-parallel ranks, each a rank to route to. For ``mock`` only: the engine
            ``torch`` has one, and ``trtllm`` one for each GPU with ``enable_attention_dp``.
        block_size: tokens of a block.
        max_model_len: tokens of prompt and output together; ``None``: what the model was made for.
        max_batch_size: most requests that compute at the same time; ``None``: ``scheduler``'s, or ``trtllm``'s own.
        max_num_tokens: most tokens that one step computes; ``None``: ``scheduler``'s, or ``trtllm``'s own.
        num_threads: CPU threads of one operation; ``None``: the library's choice.
        num_embedding_blocks: blocks of the pool of media embeddings, of ``block_size`` tokens each, for a model that
            takes media.
        modality: of a prefill or decode worker; ``None``: the model's media, as embeddings from encode workers.
        mm_processor_kwargs: settings of the model's picture processor in place of its own, such as ``size``; they
            belong to the model's identity, so all workers of a pool have the same. Not for ``mock``.
        publish_events_and_metrics: report cached blocks and times of steps, which routing by cache needs. ``trtllm`` is
            faster without; the other engines always report them.
        free_gpu_memory_fraction: share of the GPU's free memory that the KV pool takes, in (0, 1); ``None``:
            ``num_blocks``, or ``trtllm``'s own. Not on a CPU.
        cuda_graph_max_batch_size: most sequences of a decode step that a CUDA graph repeats; 0: there are none. For
            ``torch`` only, as the next; no graphs are on a CPU.
        cuda_graph_padding: whether a decode step is filled up to the next size that has a graph; else only steps of
            exactly these sizes are run by one.
        tensor_parallel_size: GPUs that share each layer. For ``trtllm`` only, as all that follow.
        pipeline_parallel_size: groups of GPUs that share the layers.
        expert_parallel_size: GPUs that share the experts; ``None``: the engine's choice.
        enable_attention_dp: every GPU attends to requests of its own, and is a rank to route to.
        max_beam_width: 1: no request can ask for beams, so other values are refused.
        gpus_per_node: GPUs of a host; ``None``: those that it sees.
        backend: of ``trtllm``; ``None``: ``pytorch``.
        connector: what loads and stores KV blocks beyond the GPU; ``None``: nothing but the engine itself.
        logits_processors: names of functions or classes that change the logits of every request; see
            ``quartet.engine.trtllm.logits``.
        extra_engine_args: YAML file with arguments of ``tensorrt_llm.LLM``; they replace those from the fields here.
        override_engine_args: arguments that replace those of the file, too.
        cache: what sessions retain, and tiers below the device's pool, of ``torch`` and ``mock``.
        scheduler: bounds of a step of ``torch`` and ``mock``.
        mock: how fast the engine ``mock`` is.
    """

    kind: EngineKind = EngineKind.TORCH
    dtype: str = "auto"
    device: str = "cpu"
    load_format: LoadFormat = LoadFormat.AUTO
    load_seed: int = 0
    disable_overlap_scheduler: bool = False
    num_blocks: int | None = None
    data_parallel_size: int = 1
    block_size: int = 32
    max_model_len: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    num_threads: int | None = None
    num_embedding_blocks: int = 512
    modality: Modality | None = None
    mm_processor_kwargs: Mapping[str, object] = field(default_factory=dict)
    publish_events_and_metrics: bool = True
    free_gpu_memory_fraction: float | None = None
    cuda_graph_max_batch_size: int = 256
    cuda_graph_padding: bool = True
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    max_beam_width: int = 1
    gpus_per_node: int | None = None
    backend: Backend | None = None
    connector: Connector | None = None
    logits_processors: tuple[str, ...] = ()
    extra_engine_args: Path | None = None
    override_engine_args: Mapping[str, object] = field(default_factory=dict)
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    mock: MockSettings = field(default_factory=MockSettings)

    def __post_init__(self) -> None:
        """Refuse impossible values and settings that the engine does not have, naming the field."""
        self._check_counts()
        fraction = self.free_gpu_memory_fraction
        if fraction is not None and not 0 < fraction < 1:
            raise ConfigError(f"free_gpu_memory_fraction: must be in (0, 1), not {fraction}")
        for name in _REFUSED[self.kind]:
            if getattr(self, name) != _DEFAULTS[name]:
                raise ConfigError(f"{name}: the engine {self.kind} does not have it")
        if self.encodes_media and not self.kind.has_encoder:
            raise ConfigError(f"modality: the engine {self.kind} takes text only")
        if self.kind is EngineKind.TORCH and fraction is not None and self.device == "cpu":
            raise ConfigError("free_gpu_memory_fraction: the device cpu has no GPU's memory")
        if self.kind is EngineKind.TORCH and fraction is not None and self.num_blocks is not None:
            raise ConfigError("num_blocks: free_gpu_memory_fraction says it; name one of the two")
        if self.cuda_graph_max_batch_size < 0:
            raise ConfigError(f"cuda_graph_max_batch_size: must be at least 0, not {self.cuda_graph_max_batch_size}")
        self._check_load_seed()
        self._check_step_bounds()
        self._check_processor()

    def _check_counts(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be at least 1, not {value}")
        if self.max_beam_width > 1:
            raise ConfigError(f"max_beam_width: must be 1, not {self.max_beam_width}: no request can ask for beams")

    def _check_load_seed(self) -> None:
        if not 0 <= self.load_seed < 2**63:
            raise ConfigError(f"load_seed: must be in [0, 2**63), not {self.load_seed}")
        if self.load_seed and self.random_seed is None:
            raise ConfigError("load_seed: only random weights have one (load_format: random)")

    def _check_processor(self) -> None:
        try:
            json.dumps(self.mm_processor_kwargs, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"mm_processor_kwargs: must be of numbers, texts, lists and mappings: {error}") from error

    def _check_step_bounds(self) -> None:
        try:
            _ = self.step_bounds
        except ValueError as error:
            raise ConfigError(f"max_num_tokens: {error}") from error

    @property
    def encodes_media(self) -> bool:
        """Whether a prefill or decode worker takes media files."""
        return self.modality is Modality.MULTIMODAL

    @property
    def needs_weights(self) -> bool:
        """Whether it needs the model's weights."""
        return self.kind is not EngineKind.MOCK and self.load_format is not LoadFormat.RANDOM

    @property
    def random_seed(self) -> int | None:
        """The seed of its weights; ``None``: they are read."""
        return self.load_seed if self.load_format is LoadFormat.RANDOM else None

    @property
    def step_bounds(self) -> SchedulerConfig:
        """Bounds of ``torch`` and ``mock``: ``scheduler``, with ``max_batch_size`` and ``max_num_tokens`` over it."""
        bounds = self.scheduler
        if self.kind is EngineKind.TRTLLM:
            return bounds
        if self.max_batch_size is not None:
            bounds = replace(bounds, max_num_seqs=self.max_batch_size)
        if self.max_num_tokens is not None:
            bounds = replace(bounds, max_num_batched_tokens=self.max_num_tokens)
        return bounds

    @property
    def num_pool_blocks(self) -> int:
        """KV blocks of a pool whose size does not depend on free memory."""
        return _DEFAULT_NUM_BLOCKS if self.num_blocks is None else self.num_blocks


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """The vision tower of a worker that encodes media.

    Attributes:
        kinds: kinds of files that an encode worker takes; ``None``: all that model and engine take. With
            ``embeddings`` only, no tower is loaded.
        max_batch_size: items in one run of the tower.
        max_pixels: of one picture; 4096 x 4096 by default.
        max_waiting_items: items that may wait for the tower; further requests are refused.
        max_waiting_pixels: the same for decoded pixels of waiting items.
    """

    kinds: tuple[MediaKind, ...] | None = None
    max_batch_size: int = 8
    max_pixels: int = 16_777_216
    max_waiting_items: int = 256
    max_waiting_pixels: int = 268_435_456

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if self.kinds == ():
            raise ConfigError("kinds: must name at least one")
        for name in ("max_batch_size", "max_pixels", "max_waiting_items", "max_waiting_pixels"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, not {getattr(self, name)}")


def no_hand_offs(settings: EngineSettings) -> str:
    """Why an engine's blocks can't be moved, though others move them for it, and what to do."""
    return (
        f"the blocks of the engine {settings.kind} on {settings.device} can't go to another worker, nor another's come "
        "to it: the GPU's driver lets no other process open them and pins no host memory; run Decode workers alone "
        "(configs/agg.yaml)"
    )


def refused_fields(kind: EngineKind) -> tuple[str, ...]:
    """Fields of ``EngineSettings`` that the engine never has."""
    return _REFUSED[kind]


_DEFAULT_NUM_BLOCKS = 512
_BYTES_PER_GB = 1e9

_COUNTS = (
    "num_blocks",
    "data_parallel_size",
    "block_size",
    "max_model_len",
    "max_batch_size",
    "max_num_tokens",
    "num_threads",
    "num_embedding_blocks",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel_size",
    "max_beam_width",
    "gpus_per_node",
)

_TORCH_ONLY = (
    "load_format",
    "load_seed",
    "disable_overlap_scheduler",
    "cuda_graph_max_batch_size",
    "cuda_graph_padding",
)

_TRTLLM_ONLY = (
    "publish_events_and_metrics",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel_size",
    "enable_attention_dp",
    "max_beam_width",
    "gpus_per_node",
    "backend",
    "connector",
    "logits_processors",
    "extra_engine_args",
    "override_engine_args",
)

_REFUSED = {
    EngineKind.TORCH: ("data_parallel_size", *_TRTLLM_ONLY),
    EngineKind.MOCK: ("free_gpu_memory_fraction", "mm_processor_kwargs", *_TORCH_ONLY, *_TRTLLM_ONLY),
    EngineKind.TRTLLM: ("data_parallel_size", "device", "cache", *_TORCH_ONLY),
}

_DEFAULTS = {
    item.name: item.default_factory() if callable(item.default_factory) else item.default
    for item in fields(EngineSettings)
}
