"""Names of media items: equal names have equal embeddings on every worker.

A media id is the SHA-256 of the kind's name, a zero byte, the preprocessing fingerprint's 32 bytes and the file's own:
no decoding is needed to know it. The preprocessing fingerprint is the SHA-256 over the model's files that say how a
picture becomes embeddings, each as name, zero byte, big-endian u64 length and bytes, in the order of
``PREPROCESSING_FILES``; files that the model lacks are left out. Items of a trust domain have names of their own: their
fingerprint is the SHA-256 of the model's fingerprint and the domain's id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from quartet.media.items import MediaFile

#: Bytes of a media id.
MEDIA_ID_SIZE_BYTES = 32
#: The files that say how a picture becomes embeddings. ``config.json`` has the vision tower's shape.
PREPROCESSING_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")


def preprocessing_fingerprint(files: Mapping[str, bytes]) -> bytes:
    """Of a model whose small files are ``files``; 32 bytes."""
    digest = hashlib.sha256()
    for name in PREPROCESSING_FILES:
        if name in files:
            digest.update(name.encode() + b"\0" + len(files[name]).to_bytes(8, "big"))
            digest.update(files[name])
    return digest.digest()


def media_id(file: MediaFile, fingerprint: bytes) -> bytes:
    """The name of ``file`` for models of that preprocessing fingerprint; 32 bytes."""
    digest = hashlib.sha256(file.kind.value.encode() + b"\0" + fingerprint)
    digest.update(file.data)
    return digest.digest()


def in_trust_domain(fingerprint: bytes, domain_id: str) -> bytes:
    """The fingerprint for media ids of a trust domain; the model's own where ``domain_id`` is empty."""
    return hashlib.sha256(fingerprint + domain_id.encode()).digest() if domain_id else fingerprint


def media_hash(media_id: bytes) -> int:
    """The name of an item in KV events, where names are unsigned 64-bit numbers."""
    return int.from_bytes(media_id[:8], "big")
