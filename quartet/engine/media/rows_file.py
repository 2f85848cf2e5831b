"""Embeddings that a client computed itself: a safetensors file with one tensor ``[num_tokens, hidden_size]``.

It is read without a library: the format is a JSON header and raw bytes, a library would map or copy more than needed,
and a client's wrong file must be refused in one sentence.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quartet.errors import InvalidMediaError, MediaTooLargeError
from quartet.kvcache.layout import DTYPE_SIZE_BYTES

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_SIZE_BYTES = 1 << 16  # the header of one tensor takes about 100
_METADATA = "__metadata__"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class RowsHeader:
    """The position and type of a file's one tensor.

    Attributes:
        dtype: by its PyTorch name.
        offset: of its first byte in the file; its last byte is the file's.
    """

    num_tokens: int
    hidden_size: int
    dtype: str
    offset: int


def read_rows_header(data: bytes, *, hidden_size: int, max_item_tokens: int) -> RowsHeader:
    """Read only the header, and check the file's length.

    Raises:
        InvalidMediaError: field ``file``; it has another format, or does not hold embeddings for this model.
        MediaTooLargeError: field ``file``; it has more tokens than one item may have.
    """
    offset, entry = _one_tensor(data)
    name = entry.get("dtype")
    if not isinstance(name, str) or name not in _DTYPES:
        raise _complaint(f"its dtype is none of {', '.join(_DTYPES)}")
    num_tokens = _num_rows(entry.get("shape"), hidden_size)
    if num_tokens > max_item_tokens:
        message = f"the embeddings are of {num_tokens} tokens, one item may have {max_item_tokens}"
        raise MediaTooLargeError(message, field="file")
    size_bytes = num_tokens * hidden_size * DTYPE_SIZE_BYTES[_DTYPES[name]]
    if entry.get("data_offsets") != [0, size_bytes] or len(data) != offset + size_bytes:
        raise _complaint(f"it has not the {size_bytes} bytes that its tensor takes")
    return RowsHeader(num_tokens, hidden_size, _DTYPES[name], offset)


def read_rows(data: bytes, header: RowsHeader, dtype: str) -> torch.Tensor:
    """The tensor, converted to the dtype of that PyTorch name.

    Raises:
        InvalidMediaError: field ``file``; not all numbers are finite after the conversion.
    """
    raw = torch.from_numpy(np.frombuffer(data, np.uint8, offset=header.offset).copy())  # aligned, and writable
    rows = raw.view(getattr(torch, header.dtype)).view(header.num_tokens, header.hidden_size)
    rows = rows.to(getattr(torch, dtype))
    if not bool(torch.isfinite(rows).all()):
        raise _complaint(f"not all of its numbers are finite in {dtype}")
    return rows


def _one_tensor(data: bytes) -> tuple[int, dict[str, Any]]:
    """The end of the header, and its entry for the one tensor."""
    if len(data) < _LENGTH.size:
        raise _complaint("it is too short")
    (size_bytes,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + size_bytes
    if size_bytes > _MAX_HEADER_SIZE_BYTES or end > len(data):
        raise _complaint(f"its header would have {size_bytes} bytes")
    try:
        header = json.loads(data[_LENGTH.size : end])
    except (ValueError, RecursionError) as error:
        raise _complaint("its header is no JSON") from error
    if not isinstance(header, dict):
        raise _complaint("its header is no JSON object")
    entries = [entry for name, entry in header.items() if name != _METADATA]
    if len(entries) != 1 or not isinstance(entries[0], dict):
        raise _complaint(f"it holds {len(entries)} tensors, not one")
    return end, entries[0]


def _num_rows(shape: object, hidden_size: int) -> int:
    # Compare types: isinstance takes JSON's ``true`` for an int.
    if isinstance(shape, list) and [type(size) for size in shape] == [int, int]:
        num_rows: int = shape[0]
        if num_rows >= 1 and shape[1] == hidden_size:
            return num_rows
    raise _complaint(f"its tensor is not of shape [num_tokens, {hidden_size}]")


def _complaint(what: str) -> InvalidMediaError:
    return InvalidMediaError(f"this is no safetensors file of embeddings: {what}", field="file")
