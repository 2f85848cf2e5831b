"""Pictures and embeddings for requests, from files of this machine."""

from __future__ import annotations

from pathlib import Path

from quartet.errors import MediaTooLargeError
from quartet.media.items import MediaFile, MediaKind
from quartet.rpc.channels import MAX_EDGE_MESSAGE_BYTES

_EMBEDDINGS_SUFFIX = ".safetensors"


def read_media(path: str | Path) -> MediaFile:
    """The file at ``path``: embeddings where its name ends in ``.safetensors``, else a picture.

    Nothing of what is in it is looked at: routers do.

    Raises:
        OSError: it can't be read.
        MediaTooLargeError: it is longer than a request can be.
    """
    path = Path(path)
    kind = MediaKind.EMBEDDINGS if path.suffix.lower() == _EMBEDDINGS_SUFFIX else MediaKind.IMAGE
    with path.open("rb") as file:
        # Not by its size: that of a pipe or a device says nothing.
        data = file.read(MAX_EDGE_MESSAGE_BYTES + 1)
    if len(data) > MAX_EDGE_MESSAGE_BYTES:
        raise MediaTooLargeError(f"the file is longer than the {MAX_EDGE_MESSAGE_BYTES >> 20} MiB of a request")
    return MediaFile(kind, data)
