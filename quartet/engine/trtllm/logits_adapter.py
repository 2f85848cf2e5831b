"""How TensorRT-LLM calls a logits processor, in the process of each rank. Imports the package."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensorrt_llm.sampling_params import LogitsProcessor

if TYPE_CHECKING:
    from quartet.engine.trtllm.logits import Processor

logger = logging.getLogger(__name__)


class LogitsAdapter(LogitsProcessor):  # type: ignore[misc]
    """Calls one processor for one request."""

    def __init__(self, name: str, processor: Processor) -> None:
        """``name`` is for the log."""
        super().__init__()
        self._name = name
        self._processor = processor
        self._has_failed = False

    def __call__(
        self,
        req_id: int,
        logits: torch.Tensor,
        token_ids: Sequence[Sequence[int]],
        stream_ptr: int | None,
        client_id: int | None = None,
    ) -> None:
        """Change ``logits`` [1, 1, vocabulary] in place, on the CUDA stream ``stream_ptr`` if there is one.

        There is one beam. Of several, releases disagree whether the first or the second dimension is theirs.

        An error of the processor is logged once a request, and the engine goes on with the logits as they are: raised,
        it would fail the requests of everybody else in the step.
        """
        stream: Any = contextlib.nullcontext()
        if stream_ptr is not None:
            external: Any = torch.cuda.ExternalStream
            stream = torch.cuda.stream(external(stream_ptr))
        try:
            with stream:
                self._processor(token_ids[0], logits[0, 0])
        except Exception as error:  # noqa: BLE001 - the deployment's own code may raise anything
            if not self._has_failed:
                self._has_failed = True
                logger.error("the logits processor %s failed: %s", self._name, type(error).__name__)
