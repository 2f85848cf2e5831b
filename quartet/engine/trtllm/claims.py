"""Hand-offs that this engine was given: each is used once, and kept alive until TensorRT-LLM has moved its KV cache."""

from __future__ import annotations

import logging
from collections import OrderedDict

from quartet.engine.base import EngineRequest, StepOutput
from quartet.engine.pulls import Pulls
from quartet.engine.scheduler import Pull
from quartet.engine.settings import EngineKind
from quartet.engine.trtllm.hand_off import CacheIdentity, HandOffState
from quartet.errors import (
    HandOffStateError,
    InvalidRequestError,
    LayoutMismatchError,
    ServingError,
    UnsupportedFieldError,
)
from quartet.kvcache.layout import HandOff, OpaquePayload
from quartet.transfer.base import FetchResult, Puller

logger = logging.getLogger(__name__)

# Hand-offs end within minutes, so no request brings one after this many others.
_MAX_REMEMBERED = 1 << 16


class Claims:
    """Claims on hand-offs whose bytes TensorRT-LLM moves by itself. Lives on the event loop."""

    def __init__(self, puller: Puller, *, can_pull: bool) -> None:
        """Without ``can_pull`` every hand-off is refused: TensorRT-LLM was made to move nothing."""
        self._can_pull = can_pull
        self._pulls = Pulls(puller, self._end)
        self._used: OrderedDict[bytes, None] = OrderedDict()
        self._opened: set[int] = set()

    def open(self, request: EngineRequest, cache: CacheIdentity) -> HandOffState:
        """Accept the hand-off of ``request`` for an engine with ``cache``; renew it from now on.

        Raises:
            UnsupportedFieldError: this engine takes no hand-offs.
            LayoutMismatchError: it is of another engine, or of one with another model, dtype or block size.
            HandOffStateError: it was used before.
            InvalidRequestError: it is not of this request's tokens.
        """
        assert request.hand_off is not None
        if not self._can_pull:
            raise UnsupportedFieldError("this engine takes no hand-offs", field="hand_off")
        hand_off = request.hand_off
        state = HandOffState.from_bytes(_opaque_state(hand_off))
        if state.cache != cache:
            raise LayoutMismatchError("the hand-off is of another model, dtype or block size", field="hand_off")
        generation = request.generation
        num_given = len(generation.prompt_token_ids) + len(generation.generated_token_ids)
        if state.num_tokens != num_given - 1 or not generation.generated_token_ids:
            raise InvalidRequestError(
                f"the hand-off holds {state.num_tokens} tokens, {num_given - 1} are needed", field="hand_off"
            )
        if state.first_token_id != generation.generated_token_ids[-1]:
            raise InvalidRequestError("the hand-off's first token is not the last one given", field="hand_off")
        if hand_off.hand_off_id in self._used:
            raise HandOffStateError("the hand-off was used already", field="hand_off")
        self._pulls.claim(request.id, hand_off)
        self._opened.add(request.id)
        self._remember(hand_off.hand_off_id)
        return state

    def follow(self, output: StepOutput) -> None:
        """Let go of hand-offs whose KV has arrived, or whose request has failed, as ``output`` shows."""
        for started in output.started:
            if started.id in self._opened:
                self._opened.discard(started.id)
                # No pieces: TensorRT-LLM has moved everything.
                self._pulls.fetch(Pull(started.id, ()))
        for failed in output.failed:
            if failed.id in self._opened:
                self._opened.discard(failed.id)
                self._pulls.stop(failed.id)

    def stop_all(self) -> None:
        """End everything."""
        self._opened.clear()
        self._pulls.stop_all()

    async def close(self, timeout_s: float) -> None:
        """End everything and wait for that, ``timeout_s`` at most."""
        await self._pulls.close(timeout_s)

    def _remember(self, hand_off_id: bytes) -> None:
        self._used[hand_off_id] = None
        if len(self._used) > _MAX_REMEMBERED:
            self._used.popitem(last=False)

    def _end(self, id: int, outcome: FetchResult | ServingError) -> None:
        if isinstance(outcome, ServingError):
            # The blocks are here all the same; the source frees its own when the hand-off expires.
            logger.info("request %s: the source was not told that its hand-off is done: %s", id, outcome.message)


def _opaque_state(hand_off: HandOff) -> bytes:
    payload = hand_off.payload
    if isinstance(payload, OpaquePayload) and payload.engine == EngineKind.TRTLLM:
        return payload.state
    what = f"of engine {payload.engine!r}" if isinstance(payload, OpaquePayload) else "of blocks"
    raise LayoutMismatchError(f"a hand-off {what} cannot be taken over here", field="hand_off")
