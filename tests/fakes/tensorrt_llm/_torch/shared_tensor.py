"""`SharedTensorContainer`: an encoder's tensor in another process's hands, once."""

from __future__ import annotations

import base64
from typing import Any

import torch
from tensorrt_llm._stand_in import spool
from tensorrt_llm._stand_in.schema import API, StandInError

#: Tensors of containers that no engine made.
_own = spool.Spool()


class SharedTensorContainer:
    """What CUDA IPC does upstream; here through a file of this host that one taker gets."""

    def __init__(self, handle: dict[str, Any]) -> None:
        self._handle = handle

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, keeper: spool.Spool = _own) -> SharedTensorContainer:
        """Keep ``tensor`` for one taker."""
        address = keeper.put(tensor.contiguous())
        return cls(
            {
                "method_key": 1,
                "dtype": str(tensor.dtype),
                "event_handle": _text(b"\x00\xfe event"),
                "event_sync_required": True,
                "ref_counter_handle": _text(b"\x80\x00 counter"),
                "ref_counter_offset": 0,
                "requires_grad": False,
                "storage_device": 0,
                "storage_handle": _text(address),
                "storage_offset_bytes": 0,
                "storage_size_bytes": tensor.numel() * tensor.element_size(),
                "tensor_offset": 0,
                "tensor_size": list(tensor.shape),
                "tensor_stride": list(tensor.contiguous().stride()),
            }
        )

    @classmethod
    def from_dict(cls, handle: dict[str, Any]) -> SharedTensorContainer:
        """Take up a handle; every key must have come through, and no other."""
        expected = set(API["shapes"]["mm_embedding_handle"])
        if set(handle) != expected:
            raise StandInError(f"a handle's keys differ: {sorted(set(handle) ^ expected)}")
        for name in ("event_handle", "ref_counter_handle", "storage_handle"):
            if not isinstance(handle[name], str):
                raise TypeError(f"{name} must be base64 text, is {type(handle[name]).__name__}")
        return cls(handle)

    def dump_to_dict(self) -> dict[str, Any]:
        """Return the handle."""
        return dict(self._handle)

    def get_local_view(self) -> torch.Tensor:
        """Return the tensor, and let its keeper free it."""
        tensor: torch.Tensor = spool.take(address_of(self._handle))
        if list(tensor.shape) != list(self._handle["tensor_size"]):
            raise StandInError("a handle's tensor_size was changed on the way")
        return tensor


def address_of(handle: dict[str, Any]) -> bytes:
    """Where the tensor of ``handle`` lies."""
    return base64.b64decode(handle["storage_handle"], validate=True)


def _text(data: bytes) -> str:
    # As upstream: JSON carries a handle from process to process.
    return base64.b64encode(data).decode()
