"""Any worker record that discovery takes."""

from __future__ import annotations

import hypothesis.strategies as st

from quartet.discovery.base import HostIdentity, Role, WorkerRecord
from quartet.discovery.checks import MAX_COUNT, MAX_RANKS

# What ``str.isprintable`` takes: a filter in its place would throw away most records, with their many texts.
_PRINTABLE = st.characters(exclude_categories=["C", "Zl", "Zp", "Zs"], include_characters=" ")
_TEXT = st.text(_PRINTABLE, max_size=20)
_TEXTS = st.lists(_TEXT, max_size=4).map(tuple)
_COUNT = st.integers(0, MAX_COUNT)
_HOST = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,20}", fullmatch=True) | st.ip_addresses(v=6).map(lambda ip: f"[{ip}]")
_ADDRESS = st.builds("{}:{}".format, _HOST, st.integers(1, 2**16 - 1))


def worker_records(**changes: st.SearchStrategy[object]) -> st.SearchStrategy[WorkerRecord]:
    """Records with the fields in ``changes`` drawn from these instead."""
    fields: dict[str, st.SearchStrategy[object]] = {
        "worker_id": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
        "role": st.sampled_from(Role),
        "epoch": st.integers(0, 2**64 - 1),
        "grpc_address": _ADDRESS,
        "events_address": st.just("") | _ADDRESS.map("tcp://{}".format),
        "http_address": st.just("") | _ADDRESS,
        "model_name": _TEXT,
        "model_fingerprint": _TEXT,
        "host": st.builds(HostIdentity, boot_id=_TEXT, ipc_namespace=_TEXT),
        "data_parallel_size": st.integers(1, MAX_RANKS),
        "num_blocks": _COUNT,
        "block_size": _COUNT,
        "max_model_len": _COUNT,
        "max_media_tokens": _COUNT,
        "transfer_ways": _TEXTS,
        "sampling_fields": _TEXTS,
        "media": _TEXTS,
        "adapters": _TEXTS,
        "unannounced_blocks": _TEXTS,
        "contract_version": _TEXT,
        "reasoning_parser": st.sampled_from(["", "none", "qwen3"]),
        "tool_call_parser": st.sampled_from(["", "none", "hermes"]),
    }
    return st.builds(WorkerRecord, **{**fields, **changes})
