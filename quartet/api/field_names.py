"""What an API calls the fields of the requests that the pipeline runs, for errors that name them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from quartet.errors import ServingError

_GROUP = re.compile(r"^(sampling|chat|output|text_options)\.")
_IS_OF_MEDIA = re.compile(r"\.parts\[\d+\]\.media\b")
# Fields of `GenerateStart` that every API but gRPC's calls otherwise, and alike.
_SHARED = {
    "adapter": "model",
    "client_request_id": "request_id",
    "chat.tool_name": "tool_choice",
}


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Names of fields by their path in ``GenerateStart``.

    Attributes:
        paths: the client's path for each of ours; what follows such a path is kept, as in ``chat.tools[2].name``.
        leaves: the client's name for the last part of such a path, where it is another one.
    """

    paths: Mapping[str, str]
    leaves: Mapping[str, str]

    def of(self, field: str) -> str:
        """What the client calls ``field``."""
        head = field
        while head:
            known = self.paths.get(head) or _SHARED.get(head)
            if known is not None:
                rest = field[len(head) :]
                leaf = rest.rpartition(".")[2]
                return known + rest.removesuffix(leaf) + self.leaves.get(leaf, leaf)
            head = head[: max(head.rfind("."), head.rfind("["), 0)]
        return _GROUP.sub("", field)

    def of_media(self) -> FieldNames:
        """Only what errors of a request that runs may name: a worker may refuse a picture."""
        is_short = len(self.paths) <= 64
        return self if is_short else FieldNames({k: v for k, v in self.paths.items() if _is_lasting(k)}, self.leaves)

    def rename(self, error: ServingError) -> None:
        """Have ``error`` name its field as the client does."""
        if error.field is not None:
            error.field = self.of(error.field)


def _is_lasting(path: str) -> bool:
    return not path.startswith("chat.messages[") or _IS_OF_MEDIA.search(path) is not None
