"""What ``MultimodalEncoder`` gives for a picture: a handle of memory that it keeps until somebody has taken it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from quartet.errors import EngineError

_LOG = logging.getLogger(__name__)

_NUM_HASH_INTS = 8


def read_handle(result: Any) -> tuple[Mapping[str, object], tuple[int, ...]]:
    """The handle and the picture's hash of a result. Raises ``EngineError``: it is not one of one picture."""
    params = getattr(result, "disaggregated_params", None)
    handles = _flat(getattr(params, "multimodal_embedding_handles", None))
    hashes = getattr(params, "multimodal_hashes", None) or []
    is_one = len(handles) == 1 and isinstance(handles[0], Mapping) and len(hashes) == 1
    if not is_one or len(hashes[0]) != _NUM_HASH_INTS:
        raise EngineError("the encoder of TensorRT-LLM did not give one handle for a picture")
    return handles[0], tuple(int(part) for part in hashes[0])


def drop(handle: Mapping[str, object]) -> None:
    """Have the encoder free what is behind ``handle``, as nobody will take it. Never raises."""
    try:
        if not _count_down(handle):
            _take(handle)
    except Exception as error:  # noqa: BLE001 - it was taken after all: nothing is held, whatever CUDA says
        _LOG.debug("a picture's embeddings were gone already: %s", type(error).__name__)


def _count_down(handle: Mapping[str, object]) -> bool:
    """Do to the memory's counter what its taker does; False: there is none here.

    The counter lies in shared memory of the host. So this takes no context on the GPU, which costs hundreds of MB, and
    also works in the process whose memory it is, where CUDA does not open a handle.
    """
    import torch

    release = getattr(torch.UntypedStorage, "_release_ipc_counter", None)  # as torch's own reductions do it
    counter, offset = handle.get("ref_counter_handle"), handle.get("ref_counter_offset")
    if release is None or not isinstance(counter, bytes) or not isinstance(offset, int):
        return False
    if not torch.cuda.is_available():
        return False
    release(counter, offset, device=handle.get("storage_device"))
    return True


def _take(handle: Mapping[str, object]) -> None:
    from tensorrt_llm._torch.shared_tensor import SharedTensorContainer

    SharedTensorContainer.from_dict(dict(handle)).get_local_view()


def _flat(handles: Any) -> list[Any]:
    """Some of the releases put the list into a tuple of one."""
    flat: list[Any] = []
    for handle in handles or ():
        flat += handle if isinstance(handle, list | tuple) else [handle]
    return flat
