"""Any worker record that discovery takes."""

from __future__ import annotations

import string

import hypothesis.strategies as st

from quartet.discovery.base import HostIdentity, Role, WorkerRecord
from quartet.discovery.checks import MAX_COUNT, MAX_RANKS

# What ``str.isprintable`` takes: a filter in its place would throw away most records, with their many texts.
_PRINTABLE = st.characters(exclude_categories=["C", "Zl", "Zp", "Zs"], include_characters=" ")
_TEXT = st.text(_PRINTABLE, max_size=20)
_TEXTS = st.lists(_TEXT, max_size=4).map(tuple)
_COUNT = st.integers(0, MAX_COUNT)
_LOWER, _ALL = string.ascii_lowercase + string.digits, string.ascii_letters + string.digits
# As regular expressions, they take Hypothesis seconds to understand in each process.
_NAME = st.builds(str.__add__, st.sampled_from(_LOWER), st.text(f"{_LOWER}.-", max_size=20))
_WORKER_ID = st.builds(str.__add__, st.sampled_from(_ALL), st.text(f"{_ALL}._-", max_size=20))
_HOST = _NAME | st.ip_addresses(v=6).map(lambda ip: f"[{ip}]")
_ADDRESS = st.builds("{}:{}".format, _HOST, st.integers(1, 2**16 - 1))


def worker_records(**changes: st.SearchStrategy[object]) -> st.SearchStrategy[WorkerRecord]:
    """Records with the fields in ``changes`` drawn from these instead."""
    fields: dict[str, st.SearchStrategy[object]] = {
        "worker_id": _WORKER_ID,
        "role": st.sampled_from([role for role in Role if role is not Role.ROUTER]),
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
