"""Moving a prompt's KV from prefill to decode: what an opaque state stands for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tensorrt_llm._stand_in import spool
from tensorrt_llm._stand_in.request import Request, Sequence
from tensorrt_llm._stand_in.schema import StandInError
from tensorrt_llm._stand_in.switches import SWITCHES
from tensorrt_llm._stand_in.weights import Weights, cache_of, layers_of
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.result import Logprob

#: What a decode of 1.4 must get just as prefill gave it.
_OF_1_4 = ("disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint", "schedule_style")


class TransferError(Exception):
    """A pull that failed; its text goes into the request's error."""


@dataclass
class _Held:
    request: Request
    deadline: float | None


class HandOffs:
    """One engine's prompts that wait to be pulled, and its pulls from others."""

    def __init__(self, weights: Weights, args: Any, shelf: spool.Spool) -> None:
        self._weights, self._args, self._shelf = weights, args, shelf
        self._held: dict[bytes, _Held] = {}

    @property
    def num_held(self) -> int:
        """Prompts that wait."""
        return len(self._held)

    def refusal(self, request: Request) -> str | None:
        """Say why this engine cannot take part in ``request``, if so."""
        config = self._args.cache_transceiver_config
        if request.type == "context_and_generation":
            return None
        if config is None or config.backend is None:
            return f"{request.type} request needs a cache transceiver"
        if request.type == "context_only" and not self._args.disable_overlap_scheduler:
            return "context_only request needs disable_overlap_scheduler"
        if config.max_tokens_in_buffer is not None and len(request.prompt.token_ids) > config.max_tokens_in_buffer:
            return "KV cache transfer failed: the prompt is longer than max_tokens_in_buffer"
        return None

    def offer(self, request: Request, seq: Sequence) -> Any:
        """Keep a computed prompt; return the params that decode needs."""
        address = self._shelf.put(
            {
                "layers": layers_of(seq.cache),
                "token_ids": [-1 if request.prompt.is_item(one) else one for one in request.prompt.token_ids],
                "first_token_id": seq.token_ids[0],
                "ctx_request_id": request.request_id,
                "layout": self._layout(),
                "disagg_request_id": getattr(request.disagg, "disagg_request_id", None),
                **_pulled_from(request),
            }
        )
        timeout_ms = self._args.cache_transceiver_config.kv_transfer_timeout_ms
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1_000
        self._held[address] = _Held(request, deadline)
        kept = {
            name: getattr(request.disagg, name)
            for name in DisaggregatedParams.__dataclass_fields__
            if name in ("multimodal_hashes", "disagg_request_id") or name.startswith("mrope_")
        }
        if SWITCHES.is_1_4:
            # Its result does not repeat the id that the request was given.
            kept |= {"disagg_request_id": None, **_pulled_from(request)}
        if SWITCHES.first_gen_log_probs and request.params.logprobs is not None:
            kept["first_gen_log_probs"] = [dict(entry) for entry in seq.logprobs]
        return DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=[seq.token_ids[0]],
            ctx_request_id=request.request_id,
            opaque_state=address,
            **kept,
        )

    def pull(self, request: Request) -> tuple[Any, list[int], list[dict[int, Any]]]:
        """Take a prompt from prefill; return its cache, first tokens, and their log-probabilities, if they came along.

        Raises:
            TransferError: it is gone, or isn't this request's.
        """
        disagg = request.disagg
        try:
            state = spool.take(disagg.opaque_state, once=SWITCHES.single_use_state)
        except spool.GoneError as error:
            raise TransferError(f"KV cache transfer failed: {error}") from error
        except (ValueError, OSError) as error:
            raise TransferError("KV cache transfer failed: opaque_state is malformed") from error
        # What stands in place of an item does not matter to decode: its KV is what prefill computed.
        theirs, token_ids = state["token_ids"], request.prompt.token_ids
        is_same = len(theirs) == len(token_ids) and all(
            one in (-1, other) for one, other in zip(theirs, token_ids, strict=True)
        )
        for name, ours in (
            ("ctx_request_id", disagg.ctx_request_id),
            ("token_ids", theirs if is_same else token_ids),
            ("layout", self._layout()),
            *((name, getattr(disagg, name)) for name in _OF_1_4 if SWITCHES.is_1_4),
        ):
            if state[name] != ours:
                raise TransferError(f"KV cache transfer failed: {name} differs from prefill's")
        if disagg.first_gen_tokens[0] != state["first_token_id"]:
            raise TransferError("KV cache transfer failed: first_gen_tokens differs from prefill's")
        logprobs = list(getattr(disagg, "first_gen_log_probs", None) or [])
        if not all(isinstance(top, Logprob) for entry in logprobs for top in entry.values()):
            raise StandInError("first_gen_log_probs must be of Logprob, by token id")
        return cache_of(state["layers"]), list(disagg.first_gen_tokens), logprobs

    def released(self, *, is_expired: bool) -> list[Request]:
        """Return, once, the requests whose prompts were pulled, or whose time (or ``is_expired``) is over."""
        gone, now = [], time.monotonic()
        for address, held in list(self._held.items()):
            is_late = is_expired or (held.deadline is not None and now >= held.deadline)
            if is_late:
                self._shelf.drop(address)
            if is_late or not self._shelf.has(address):
                gone.append(self._held.pop(address).request)
        return gone

    def _layout(self) -> str:
        """What both sides must have alike."""
        cache, transceiver = self._args.kv_cache_config, self._args.cache_transceiver_config
        backend = "NIXL" if transceiver.backend == "DEFAULT" else transceiver.backend
        ways = f"{backend}|{getattr(transceiver, 'transceiver_runtime', None)}"
        return f"{self._weights.path}|{cache.dtype}|{cache.tokens_per_block}|{ways}"


def _pulled_from(request: Request) -> dict[str, Any]:
    """Where the Python transceiver of 1.4 pulls a prompt from."""
    return {"ctx_dp_rank": request.rank, "ctx_info_endpoint": "tcp://127.0.0.1:1", "schedule_style": 0}


def give_up(disagg: Any) -> None:
    """Notify prefill that no worker will pull this."""
    try:
        spool.take(disagg.opaque_state)
    except (spool.GoneError, ValueError, OSError):
        return
