"""What an encode worker sends a prefill worker about a picture in its GPU's memory, as bytes.

The format is JSON, in which bytes are ``{"base64": "..."}``. The handle must come through exactly, whatever its keys
hold. Bytes from a stranger must not run code here, as a pickle would.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from quartet.errors import EngineError, InvalidRequestError

_MAX_EDGE = 1 << 20
_NUM_HASH_INTS = 8
_SIZE_KEY = "tensor_size"


@dataclass(frozen=True, kw_only=True)
class PictureState:
    """An encoded picture.

    Attributes:
        width, height: of the picture, in pixels.
        handle: the handle of its embeddings: a CUDA-IPC pointer, which one worker on the same host may take, once.
        hashes: its name in TensorRT-LLM's KV cache.
        host: the host on which the handle is valid.
    """

    width: int
    height: int
    handle: Mapping[str, object] = field(repr=False)
    hashes: tuple[int, ...] = field(repr=False)
    host: str

    @property
    def num_tokens(self) -> int:
        """Tokens of its embeddings, from the handle; 0: the handle does not say."""
        return num_handle_tokens(self.handle)


def num_handle_tokens(handle: Mapping[str, object]) -> int:
    """Rows of the tensor behind ``handle``; 0: the handle does not say."""
    size = handle.get(_SIZE_KEY)
    rows = size[0] if isinstance(size, list | tuple) and size else 0
    return rows if type(rows) is int else 0


def write_state(state: PictureState) -> bytes:
    """Write ``state`` as bytes. Raises ``EngineError`` if the handle holds something that can't be sent."""
    try:
        return json.dumps(asdict(state), default=_to_json, separators=(",", ":")).encode()
    except TypeError as error:
        raise EngineError(f"the encoder's handle cannot be sent: {error}") from error


def read_state(data: bytes) -> PictureState:
    """Read what ``write_state`` wrote. Raises ``InvalidRequestError``, without a field, for anything else."""
    try:
        content = json.loads(data, object_hook=_from_json)
    except (ValueError, RecursionError) as error:
        raise _malformed() from error
    if not isinstance(content, dict) or set(content) != {item.name for item in fields(PictureState)}:
        raise _malformed()
    state = PictureState(
        **{**content, "hashes": tuple(content["hashes"]) if isinstance(content["hashes"], list) else ()}
    )
    edges = (state.width, state.height)
    are_right = (
        all(type(edge) is int and 0 < edge <= _MAX_EDGE for edge in edges)
        and isinstance(state.handle, dict)
        and isinstance(state.host, str)
        and [type(part) for part in state.hashes] == [int] * _NUM_HASH_INTS
    )
    if not are_right:
        raise _malformed()
    return state


def _to_json(value: object) -> object:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"base64": base64.b64encode(value).decode()}
    raise TypeError(f"a {type(value).__name__}")


def _from_json(content: dict[str, object]) -> object:
    encoded = content.get("base64")
    if len(content) == 1 and isinstance(encoded, str):
        return base64.b64decode(encoded, validate=True)
    return content


def _malformed() -> InvalidRequestError:
    return InvalidRequestError("this is no state of a picture that an encode worker of this engine keeps")
