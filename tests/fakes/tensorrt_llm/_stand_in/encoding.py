"""The engine of `MultimodalEncoder`: the vision tower alone; results are kept until prefill took them."""

from __future__ import annotations

from typing import Any

from tensorrt_llm._stand_in.loop import EngineLoop
from tensorrt_llm._stand_in.request import Request, RequestState
from tensorrt_llm._stand_in.spool import Spool
from tensorrt_llm._stand_in.switches import SWITCHES
from tensorrt_llm._stand_in.weights import Weights
from tensorrt_llm._torch.shared_tensor import SharedTensorContainer, address_of
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.result import Step
from tensorrt_llm.executor.utils import RequestError


class StandInEncoder(EngineLoop):
    """Encodes pictures."""

    def __init__(self, weights: Weights, args: Any) -> None:
        super().__init__("tensorrt_llm-stand-in-encoder")
        self.weights, self._args = weights, args
        self._shelf = Spool()
        self._held: set[bytes] = set()

    @property
    def num_held(self) -> int:
        return len(self._held)

    def num_used_blocks(self, rank: int) -> int:
        """An encoder has no blocks."""
        return 0 * rank

    def _can_step(self) -> bool:
        return bool(self._requests or self._incoming)

    def _handle_aborts_and_faults(self) -> None:
        self._held = {address for address in self._held if self._shelf.has(address)}
        self.faults.expire_transfers = False
        for request in list(self._requests):
            if request.is_aborted:
                self._end(request, Step(finish_reason="cancelled", is_last=True))

    def _step(self) -> None:
        for request in list(self._requests):
            if self.faults.failures:
                self._end(request, Step(is_last=True, error=RequestError(self.faults.failures.pop(0))))
                continue
            assert request.prompt.pixel_values is not None
            [features] = self.weights.encode(request.prompt.pixel_values)
            handle = SharedTensorContainer.from_tensor(features, self._shelf).dump_to_dict()
            self._held.add(address_of(handle))
            disagg = DisaggregatedParams(
                multimodal_embedding_handles=[handle], multimodal_hashes=request.prompt.item_hashes
            )
            if SWITCHES.handles_in_tuple:
                disagg.multimodal_embedding_handles = ([handle],)
            self._end(request, Step(finish_reason="length", disaggregated_params=disagg, is_last=True))

    def _end(self, request: Request, step: Step) -> None:
        request.state = RequestState.ENDED
        self._requests.remove(request)
        request.output.put(step)

    def _free_all(self) -> None:
        self._shelf.close()
