"""Pools: workers of one model that can stand in for each other, and what they can do together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from quartet.discovery.base import Role
from quartet.errors import UnsupportedFieldError, WorkerUnavailableError
from quartet.media.items import TAKES_HAND_OFF, MediaItem
from router.worker import KnownWorker, PoolKey

_HAND_OFF = frozenset({TAKES_HAND_OFF})


class MediaWay(Enum):
    """Who turns a request's media into embeddings."""

    ENCODE = auto()  # encode workers; who computes the prompt pulls them
    FILES = auto()  # who computes the prompt, from the files


@dataclass(frozen=True, kw_only=True)
class PoolMedia:
    """What a pool takes of media: the kinds of files of each worker, as in ``WorkerRecord.media``; equal ones are one.

    Attributes:
        encoded: of ready encode workers; none too where nobody takes what they hand off.
        filed: of ready workers that compute prompts.
        known: of both, ready or not.
        awaits_encode: workers that compute prompts take what encode workers hand off, though none of these is known.
        max_tokens: that one item fills at most, wherever it is encoded; 0: nobody says.
    """

    encoded: frozenset[frozenset[str]] = frozenset()
    filed: frozenset[frozenset[str]] = frozenset()
    known: frozenset[frozenset[str]] = frozenset()
    awaits_encode: bool = False
    max_tokens: int = 0

    @property
    def kinds(self) -> frozenset[str]:
        """All kinds that any worker takes, ready or not."""
        return frozenset().union(*self.known)

    def way(self, items: Sequence[MediaItem], fields: Sequence[str]) -> MediaWay:
        """How ``items``, which the client knows by ``fields``, get into a prompt now.

        Raises:
            UnsupportedFieldError: an item of a kind that no worker takes, or not with the others; its field is named.
            WorkerUnavailableError: those that take them are not ready.
        """
        kinds = frozenset[str]()
        for item, field in zip(items, fields, strict=True):
            kinds |= {item.file.kind.value}
            if not any(kinds <= taken for taken in self.known):
                if self.awaits_encode:
                    raise WorkerUnavailableError("no encode worker of this model is known")
                message = f"no worker of this model takes media of kind {' and '.join(sorted(kinds))}"
                raise UnsupportedFieldError(message, field=field)
        if any(kinds <= taken for taken in self.encoded):
            return MediaWay.ENCODE
        if any(kinds <= taken for taken in self.filed):
            return MediaWay.FILES
        raise WorkerUnavailableError("no worker that takes such media is ready")


def needs_of(way: MediaWay, items: Iterable[MediaItem]) -> frozenset[str]:
    """What a place has to take to compute a prompt with ``items``."""
    return _HAND_OFF if way is MediaWay.ENCODE else frozenset(item.file.kind.value for item in items)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """What a pool can do: what all its workers can.

    Attributes:
        max_model_len: tokens of prompt and output together.
        num_place_tokens: tokens whose KV the largest decode place holds.
        num_prefill_tokens: tokens whose KV every prefill worker has a place for; 0: there are none.
        block_size: tokens of a block; 0: places differ, so that none has what another one has.
        sampling_fields: fields of ``Sampling`` and ``OutputOptions`` that are honoured.
        media: unlike the rest, what any of its workers can.
        adapters: adapters that at least one decode worker serves; requests for them go only there.
    """

    key: PoolKey
    max_model_len: int
    num_place_tokens: int
    block_size: int
    sampling_fields: frozenset[str]
    media: PoolMedia
    adapters: frozenset[str]
    num_ready_prefill: int
    num_ready_decode: int
    num_ready_encode: int = 0
    num_prefill_tokens: int = 0


def describe_pool(key: PoolKey, workers: Sequence[KnownWorker], is_ready: Callable[[KnownWorker], bool]) -> Pool:
    """The pool of ``workers``, at least one of which computes prompts or decodes."""
    encode, prefill, decode = (
        [worker for worker in workers if worker.record.role is role]
        for role in (Role.ENCODE, Role.PREFILL, Role.DECODE)
    )
    # Encode workers have pieces of their own size, and no tokens to sample.
    models = [*prefill, *decode]
    block_sizes = {worker.record.block_size for worker in models}
    ready_models = [worker for worker in models if is_ready(worker)]
    ready_encode = [worker for worker in encode if is_ready(worker)]
    return Pool(
        key=key,
        max_model_len=min(worker.record.max_model_len for worker in models),
        num_place_tokens=max((worker.num_place_tokens for worker in decode), default=0),
        block_size=block_sizes.pop() if len(block_sizes) == 1 else 0,
        sampling_fields=frozenset.intersection(*(frozenset(worker.record.sampling_fields) for worker in models)),
        media=_describe_media(models, encode, ready_models, ready_encode),
        adapters=frozenset().union(*(worker.record.adapters for worker in decode)),
        num_ready_prefill=sum(worker.record.role is Role.PREFILL for worker in ready_models),
        num_ready_decode=sum(worker.record.role is Role.DECODE for worker in ready_models),
        num_ready_encode=len(ready_encode),
        num_prefill_tokens=min((worker.num_place_tokens for worker in prefill), default=0),
    )


def _describe_media(
    models: Sequence[KnownWorker],
    encode: Sequence[KnownWorker],
    ready_models: Sequence[KnownWorker],
    ready_encode: Sequence[KnownWorker],
) -> PoolMedia:
    takers = [worker for worker in (*models, *encode) if worker.record.media]
    if not takers:
        return _NO_MEDIA
    is_pulled = any(TAKES_HAND_OFF in worker.record.media for worker in models)
    is_pulled_now = any(TAKES_HAND_OFF in worker.record.media for worker in ready_models)
    return PoolMedia(
        encoded=_kinds(ready_encode if is_pulled_now else ()),
        filed=_kinds(ready_models),
        known=_kinds([*models, *encode] if is_pulled else models),
        awaits_encode=is_pulled and not encode,
        max_tokens=max(worker.record.max_media_tokens for worker in takers),
    )


def _kinds(workers: Iterable[KnownWorker]) -> frozenset[frozenset[str]]:
    return frozenset(frozenset(worker.record.media) - _HAND_OFF for worker in workers)


_NO_MEDIA = PoolMedia()
