"""Makes an engine or encoder from settings; the only module that knows all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from quartet.engine.base import Engine, RequestKind
from quartet.engine.data_parallel import DataParallelEngine
from quartet.engine.encoder import MediaEncoder, MediaSizer
from quartet.engine.guided.compiler import GrammarCompiler
from quartet.engine.mock import SAMPLING_FIELDS as MOCK_SAMPLING_FIELDS
from quartet.engine.mock import MockEngineConfig, rank_loader
from quartet.engine.runner import ModelRunner
from quartet.engine.settings import EngineKind, EngineSettings, EngineSpec, Modality
from quartet.engine.step_engine import ALL_SAMPLING_FIELDS, GrammarsFactory, StepEngine
from quartet.engine.tiers import Link, Tiering, TierMessage, open_tiers
from quartet.engine.torch import TorchEncoderConfig, TorchEngineConfig, create_encoder, create_runner
from quartet.errors import ConfigError, InvalidRequestError
from quartet.events.kv import Tier
from quartet.media.items import MediaKind
from quartet.text import model_files
from quartet.transfer.base import EmbeddingMemory, PoolMemory, Puller
from quartet.transfer.cuda.driver import CudaError
from quartet.transfer.cuda.host_slots import PinnedHostBlocks
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.disk_blocks import DiskBlocks
from quartet.transfer.host_blocks import HostBlocks, PlainHostBlocks


def create_engine(spec: EngineSpec, kind: RequestKind, puller: Puller) -> Engine:
    """The engine that ``spec`` names, for requests of ``kind``; not started yet. Hand-offs are pulled by ``puller``.

    Raises:
        ConfigError: a setting out of range.
    """
    if spec.engine.kind is EngineKind.MOCK:
        return _mock_engine(spec, kind, puller)
    if spec.engine.kind is EngineKind.TRTLLM:
        return _trtllm_engine(spec, kind, puller)
    return _step_engine(spec, kind, puller, _torch_loader(spec), ALL_SAMPLING_FIELDS, _grammars(spec))


def create_media_encoder(spec: EngineSpec, embeddings: EmbeddingMemory | None) -> MediaEncoder:
    """The encoder that ``spec`` names, not started yet; it writes to ``embeddings``, or to a pool of its own.

    Raises:
        ConfigError: a setting out of range, or an engine without one.
    """
    settings = spec.engine
    if not settings.kind.has_encoder:
        raise ConfigError(f"engine.kind: the engine {settings.kind} encodes no media")
    if settings.kind is EngineKind.TRTLLM:
        from quartet.engine.trtllm.encoder import TrtllmEncoder

        if embeddings is not None:
            raise ConfigError("engine.kind: the engine trtllm encodes a worker's own media by itself")
        return TrtllmEncoder(spec)
    torch_config = TorchEncoderConfig(
        model_path=spec.model_path,
        dtype=settings.dtype,
        device=settings.device,
        num_blocks=settings.num_embedding_blocks,
        block_size=settings.block_size,
        num_threads=settings.num_threads,
        random_seed=settings.random_seed,
        kinds=tuple(MediaKind) if spec.encoder.kinds is None or embeddings is not None else spec.encoder.kinds,
        max_batch_size=spec.encoder.max_batch_size,
        max_pixels=spec.encoder.max_pixels,
        processor_kwargs=settings.mm_processor_kwargs,
    )
    return create_encoder(torch_config, embeddings)


def create_media_sizer(spec: EngineSpec) -> MediaSizer:
    """The sizer of files for an engine that reads media by itself.

    Raises:
        ConfigError: the engine does not read media, or it can't size this model's media.
        ServingError: the model's files are malformed.
    """
    if spec.engine.kind is not EngineKind.TRTLLM:
        raise ConfigError(f"engine.kind: the engine {spec.engine.kind} reads no media by itself")
    from quartet.engine.trtllm.media_model import create_sizer

    return create_sizer(spec)


def _step_engine(
    spec: EngineSpec,
    kind: RequestKind,
    puller: Puller,
    load: Callable[[], ModelRunner],
    sampling_fields: frozenset[str],
    grammars: GrammarsFactory | None = None,
    rank: int = 0,
) -> StepEngine:
    has_tiers = spec.engine.cache.host.is_on
    return StepEngine(
        load,
        spec.engine.step_bounds,
        puller=puller,
        kinds=frozenset({kind}),
        sampling_fields=sampling_fields,
        grammars=grammars,
        tells_contents=spec.tells_contents,
        tiers=partial(_open_tiers, spec.engine, rank) if has_tiers else None,
        retention=spec.engine.cache.retention,
    )


def _open_tiers(
    settings: EngineSettings, rank: int, runner: ModelRunner, post: Callable[[TierMessage], None]
) -> Tiering:
    """The tiers below the pool of ``rank``. Raises ``InvalidRequestError`` for settings that are impossible here."""
    cache, layout = settings.cache, runner.layout
    try:
        plan, disk_plan = cache.plans(layout.piece_size_bytes)
        host = _host_blocks(runner, rank, plan.num_blocks)
        disk = None if cache.disk.path is None or disk_plan is None else DiskBlocks(cache.disk.path, layout)
        return open_tiers(plan, disk_plan, host, disk, post, links=_links(settings))
    except ConfigError as error:
        name, _, text = str(error).partition(": ")
        raise InvalidRequestError(text, field=name) from error


def _host_blocks(runner: ModelRunner, rank: int, num_slots: int) -> HostBlocks:
    """Slots below the pool of ``rank``. Raises ``ConfigError``: there can be none."""
    memory = runner.memory
    if isinstance(memory, PoolMemory):
        first_block = rank * runner.num_blocks
        return PlainHostBlocks(memory, num_slots, first_block=first_block, num_blocks=runner.num_blocks)
    if not isinstance(memory, DeviceMemory):
        raise ConfigError("cache.host: the GPU's driver gives this pool no host memory to copy to")
    try:
        return PinnedHostBlocks(memory, num_slots)
    except CudaError as error:
        size = f"{num_slots * memory.piece_size_bytes >> 20} MiB"
        raise ConfigError(f"cache.host: {size} of host memory can't be pinned: {error}") from error


def _links(settings: EngineSettings) -> dict[Tier, Link]:
    """What makes the mock's blocks come as slowly as a model's; of other engines, nothing."""
    if settings.kind is not EngineKind.MOCK:
        return {}
    return {tier: Link(settings.mock.load_s(settings.block_size, tier)) for tier in (Tier.HOST, Tier.DISK)}


def _grammars(spec: EngineSpec) -> GrammarsFactory:
    def load(runner: ModelRunner) -> GrammarCompiler:
        source = (Path(spec.model_path) / model_files.TOKENIZER).read_text()
        return GrammarCompiler(source, runner.vocab_size, runner.eos_token_ids)

    return load


def _torch_loader(spec: EngineSpec) -> Callable[[], ModelRunner]:
    settings = spec.engine
    fraction = settings.free_gpu_memory_fraction
    torch_config = TorchEngineConfig(
        model_path=spec.model_path,
        dtype=settings.dtype,
        device=settings.device,
        num_blocks=settings.num_pool_blocks if fraction is None else None,
        free_gpu_memory_fraction=fraction,
        max_num_seqs=settings.step_bounds.max_num_seqs,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        num_threads=settings.num_threads,
        random_seed=settings.random_seed,
        num_embedding_blocks=settings.num_embedding_blocks,
        takes_media=settings.modality is not Modality.TEXT,
        disable_overlap_scheduler=settings.disable_overlap_scheduler,
        cuda_graph_max_batch_size=min(settings.cuda_graph_max_batch_size, settings.step_bounds.max_num_seqs),
        cuda_graph_padding=settings.cuda_graph_padding,
    )
    return lambda: create_runner(torch_config)


def _mock_engine(spec: EngineSpec, kind: RequestKind, puller: Puller) -> Engine:
    settings = spec.engine
    load = rank_loader(
        MockEngineConfig(
            model_path=spec.model_path,
            num_blocks=settings.num_pool_blocks,
            data_parallel_size=settings.data_parallel_size,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len,
            settings=settings.mock,
        )
    )

    def make_rank(rank: int, puller: Puller) -> StepEngine:
        return _step_engine(spec, kind, puller, lambda: load(rank), MOCK_SAMPLING_FIELDS, rank=rank)

    if settings.data_parallel_size == 1:
        return make_rank(0, puller)
    return DataParallelEngine(settings.data_parallel_size, make_rank, puller)


def _trtllm_engine(spec: EngineSpec, kind: RequestKind, puller: Puller) -> Engine:
    # Imported late: other engines do not need TensorRT-LLM's modules.
    from quartet.engine.trtllm.engine import TrtllmEngine

    return TrtllmEngine(spec, kind, puller)
