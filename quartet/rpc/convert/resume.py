"""What a request goes on after."""

from __future__ import annotations

from quartet.rpc.edge import Resume
from quartet.v1 import router_pb2


def to_resume(resume: Resume) -> router_pb2.Resume:
    """The message."""
    return router_pb2.Resume(
        request_id=resume.request_id,
        attempt=resume.attempt,
        seed=resume.seed,
        choice=resume.choice,
        generated_token_ids=router_pb2.TokenIds(ids=resume.generated_token_ids) if resume.generated_token_ids else None,
        num_text_bytes=resume.num_text_bytes,
        model_fingerprint=resume.model_fingerprint,
    )


def from_resume(message: router_pb2.Resume) -> Resume:
    """What a request goes on after; not checked yet."""
    return Resume(
        request_id=message.request_id,
        attempt=message.attempt,
        seed=message.seed,
        choice=message.choice,
        generated_token_ids=tuple(message.generated_token_ids.ids),
        num_text_bytes=message.num_text_bytes,
        model_fingerprint=message.model_fingerprint,
    )
