"""`DisaggregatedParams`: what prefill gives to decode, and an encoder to prefill."""

from __future__ import annotations

import secrets
from typing import Any

from tensorrt_llm._stand_in.schema import API, make_dataclass
from tensorrt_llm._stand_in.switches import SWITCHES


class _Rules:
    __slots__ = ()

    def __post_init__(self) -> None:
        params: Any = self
        if params.request_type is not None:
            params.request_type = params.request_type.lower()
            if params.request_type not in API["enums"]["DisaggRequestType"]:
                raise ValueError(f"Unknown request type: {params.request_type}")
        handles, hashes = params.multimodal_embedding_handles, params.multimodal_hashes
        if handles is not None:
            if hashes is None:
                # Nothing is shared between requests whose hashes are made up.
                params.multimodal_hashes = hashes = [[secrets.randbits(31) for _ in range(8)] for _ in handles]
            if len(handles) != len(hashes):
                raise ValueError(f"{len(handles)} multimodal_embedding_handles, but {len(hashes)} multimodal_hashes")
        for item in hashes or []:
            if not isinstance(item, list) or len(item) != 8 or not all(type(part) is int for part in item):
                raise ValueError("each of multimodal_hashes must be a list of 8 ints")
        if SWITCHES.mrope_handles and (params.mrope_position_ids_handle is None) != (
            params.mrope_position_deltas_handle is None
        ):
            raise ValueError("mrope_position_ids_handle and mrope_position_deltas_handle: both or neither")


_HAS = {
    "mrope_position_ids_handle": SWITCHES.mrope_handles,
    "mrope_position_deltas_handle": SWITCHES.mrope_handles,
    "disagg_request_id": SWITCHES.disagg_request_id,
    "first_gen_log_probs": SWITCHES.first_gen_log_probs,
}
DisaggregatedParams = make_dataclass(
    "DisaggregatedParams",
    _Rules,
    uncertain=True,
    without=tuple(name for name, is_there in _HAS.items() if not is_there),
)
