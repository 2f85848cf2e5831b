"""The engine: admits requests, computes them a token a step, each by itself, and reports what happened."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensorrt_llm._stand_in.drawing import Drawer
from tensorrt_llm._stand_in.feeds import Source
from tensorrt_llm._stand_in.hand_off import HandOffs, TransferError, give_up
from tensorrt_llm._stand_in.loop import EngineLoop
from tensorrt_llm._stand_in.ranks import Rank
from tensorrt_llm._stand_in.request import Request, RequestState, Sequence, ranked
from tensorrt_llm._stand_in.spool import GoneError, Spool
from tensorrt_llm._stand_in.stats import StepRecord
from tensorrt_llm._stand_in.switches import SWITCHES
from tensorrt_llm._stand_in.weights import Weights, copy_of
from tensorrt_llm.executor.result import Step
from tensorrt_llm.executor.utils import RequestError

_NUM_STATS = 1_000


class StandInEngine(EngineLoop):
    """Continuous batching over the ranks of one `LLM`.

    Attributes:
        events, stats: what `LLM`'s two feeds read.
    """

    def __init__(self, weights: Weights, args: Any) -> None:
        super().__init__("tensorrt_llm-stand-in")
        self.weights, self._args = weights, args
        self.max_seq_len = min(args.max_seq_len or weights.max_seq_len, weights.max_seq_len)
        self.events = Source(self._drain_events)
        num_ranks = args.tensor_parallel_size if args.enable_attention_dp else 1
        self.ranks = [Rank(args, number, self.max_seq_len, self.events.was_put) for number in range(num_ranks)]
        self._stats: deque[dict[str, Any]] = deque(maxlen=args.iter_stats_max_iterations or _NUM_STATS)
        self.stats = Source(self._drain_stats)
        self._shelf = Spool()
        self._hand_offs = HandOffs(weights, args, self._shelf)
        self._without_room: set[int] = set()  # requests for which a step does nothing until others gave something back

    @property
    def num_held(self) -> int:
        return self._hand_offs.num_held

    def num_used_blocks(self, rank: int) -> int:
        """Blocks that requests hold, and prompts that wait to be pulled."""
        return self.ranks[rank].books[0].num_used

    def choose_rank(self, wanted: int | None, *, may_relax: bool) -> int:
        """Return the rank for the next request: the one that is wanted, or else the least loaded."""
        if wanted is not None and not 0 <= wanted < len(self.ranks):
            raise ValueError(f"attention_dp_rank {wanted} is not one of {len(self.ranks)} ranks")
        loads = [
            sum(r.rank == n and r.state is not RequestState.ENDED for r in self._all()) for n in range(len(self.ranks))
        ]
        if wanted is not None and not (may_relax and loads[wanted] >= self._args.max_batch_size):
            return wanted
        return loads.index(min(loads))

    def _all(self) -> list[Request]:
        with self._condition:
            return [*self._requests, *self._incoming]

    def _can_step(self) -> bool:
        return bool(self._incoming) or any(
            request.state is RequestState.RUNNING
            or (request.state is RequestState.QUEUED and request.request_id not in self._without_room)
            for request in self._requests
        )

    def _handle_aborts_and_faults(self) -> None:
        for rank in self.ranks:
            if rank.log is not None:
                rank.log.num_to_lose += self.faults.num_lost_events
        self.faults.num_lost_events = 0
        for request in self._hand_offs.released(is_expired=self.faults.expire_transfers):
            self.ranks[request.rank].release(request)
            self._without_room.clear()
        self.faults.expire_transfers = False
        for request in list(self._requests):
            if request.is_aborted:
                if request.state is RequestState.PULLING and not SWITCHES.abort_pins_state:
                    give_up(request.disagg)
                self._end_all(request, "cancelled")
            elif self.faults.time_out_requests and request.state is RequestState.RUNNING:
                self._end_all(request, "timeout")
            elif request.state is RequestState.PULLING and self.transfers.try_pass():
                self._attempt(request, self._pull)
        self.faults.time_out_requests = False

    def _step(self) -> None:
        began_at, record = time.monotonic(), StepRecord(self.num_steps, len(self._requests))
        for request in list(self._requests):
            if request.state is RequestState.RUNNING:
                record.num_generating += 1
                self._attempt(request, self._decode)
            elif request.state is RequestState.QUEUED:
                self._attempt(request, lambda queued: self._begin(queued, record))
        if self._args.enable_iter_perf_stats:
            latency_ms = (time.monotonic() - began_at) * 1_000
            self._stats.append(record.as_dict(self._args, self._requests, self.ranks, latency_ms))
            self.stats.was_put()

    def _attempt(self, request: Request, work: Callable[[Request], None]) -> None:
        """Do ``work``; what it finds wrong ends this request alone."""
        try:
            work(request)
        except (RequestError, TransferError, GoneError) as error:
            failure = error if isinstance(error, RequestError) else RequestError(str(error))
            self._end(request)
            request.output.put(Step(is_last=True, error=failure))

    def _begin(self, request: Request, record: StepRecord) -> None:
        rank = self.ranks[request.rank]
        if self.faults.failures:
            raise RequestError(self.faults.failures.pop(0))
        if not request.sequences:
            self._make_sequences(request)
        num_tokens = len(request.prompt.token_ids)
        if rank.never_fits(request) or num_tokens >= self.max_seq_len:
            raise RequestError(f"The prompt of {num_tokens} tokens exceeds max_seq_len or the KV cache's capacity")
        if request.prompt.vocab_size is None and max(request.prompt.token_ids) >= self.weights.vocab_size:
            # Only a prompt that comes with its media may have ids beyond the vocabulary; a decode's never does.
            raise RequestError("Token ID out of range")
        if (reason := self._hand_offs.refusal(request)) is not None:
            raise RequestError(reason)
        if rank.num_running >= self._args.max_batch_size or not rank.admit(request, self.max_seq_len):
            self._without_room.add(request.request_id)
            return
        rank.num_running += 1
        request.started_at = time.monotonic()
        if request.type == "generation_only":
            request.state = RequestState.PULLING
            self.wake()
            return
        request.state = RequestState.RUNNING
        record.num_context += 1
        record.num_context_tokens += num_tokens
        self._prefill(request)

    def _make_sequences(self, request: Request) -> None:
        ids = request.prompt.token_ids
        # TorchSampler, the default of 1.2, accepts penalties, min_p and a seed, and ignores them.
        honours_all = SWITCHES.is_1_4 or self._args.sampler_type == "TRTLLMSampler"
        request.sequences = [
            Sequence(
                index,
                Drawer(request.params, index, ids, request.guide, partial(_process, request), honours_all=honours_all),
            )
            for index in range(request.params.n)
        ]

    def _prefill(self, request: Request) -> None:
        wants_all = request.params.prompt_logprobs is not None
        logits, cache = self.weights.prefill(request.prompt, request.adapter_path, all_logits=wants_all)
        if wants_all:
            request.prompt_logprobs = [
                ranked(torch.log_softmax(row, dim=-1), token_id, request.params.prompt_logprobs)
                for row, token_id in zip(logits, request.prompt.token_ids[1:], strict=False)
            ]
        for seq in request.sequences:
            seq.cache = cache if seq is request.sequences[-1] else copy_of(cache)
            self._add(request, seq, logits[-1])
            self.ranks[request.rank].store(request, seq)
            if request.type == "context_only":
                self._end_context(request, seq)
            else:
                self._report_due(request, seq)

    def _pull(self, request: Request) -> None:
        [seq] = request.sequences
        seq.cache, seq.token_ids, seq.logprobs = self._hand_offs.pull(request)
        self.ranks[request.rank].store(request, seq)
        request.state = RequestState.RUNNING
        # Prefill reported the first tokens, but they are this answer's, too: they come with the next one.
        if request.finish_of(seq, self.max_seq_len)[0] is not None:
            self._report_due(request, seq)

    def _decode(self, request: Request) -> None:
        for seq in request.sequences:
            if not seq.is_done:
                logits = self.weights.decode(seq.token_ids[-1:], seq.cache, request.adapter_path)
                self._add(request, seq, logits[-1])
                self.ranks[request.rank].store(request, seq)
                self._report_due(request, seq)

    def _add(self, request: Request, seq: Sequence, logits: torch.Tensor) -> None:
        # The overlap scheduler samples a step before it has read the one before; a pulled prompt's token is read.
        lags = not self._args.disable_overlap_scheduler and seq.num_steps > 0
        seq.add(*seq.drawer.draw(logits, seq.token_ids, num_unseen=int(lags)), request.params.logprobs)
        seq.num_steps += 1
        request.first_token_at = request.first_token_at or time.monotonic()

    def _report_due(self, request: Request, seq: Sequence) -> None:
        """Hand on what is due of a sequence's tokens, and end what has ended."""
        reason, stop, num_trimmed = request.finish_of(seq, self.max_seq_len)
        is_due = seq.num_steps == 1 or seq.num_steps % request.stream_interval == 0
        if reason is None and not (request.streaming and is_due):
            return
        if reason == "stop" and stop is None and not SWITCHES.end_id_in_tokens:
            num_trimmed = 1
        seq.is_done = reason is not None
        if seq.is_done and all(other.is_done for other in request.sequences):
            self._end(request)
        request.report(seq, reason, stop, num_trimmed)

    def _end_context(self, request: Request, seq: Sequence) -> None:
        """End a context-only request: its blocks stay until they are pulled, unless the answer is complete."""
        request.params.max_tokens = 2  # whether the first token ends the answer is not for its length to say
        reason, stop, num_trimmed = request.finish_of(seq, self.max_seq_len)
        request.params.max_tokens = 1
        if reason == "stop":
            self._report_due(request, seq)
            return
        seq.is_done = True
        disagg = self._hand_offs.offer(request, seq)
        self._end(request, keep_blocks=True)
        request.report(seq, SWITCHES.context_finish, stop, num_trimmed, disagg)

    def _end_all(self, request: Request, reason: str) -> None:
        if not request.sequences:
            self._make_sequences(request)
        unfinished = [seq for seq in request.sequences if not seq.is_done]
        self._end(request)
        for seq in unfinished:
            seq.is_done = True
            request.report(seq, reason, None, 0)

    def _end(self, request: Request, *, keep_blocks: bool = False) -> None:
        rank = self.ranks[request.rank]
        rank.num_running -= request.state in (RequestState.RUNNING, RequestState.PULLING)
        request.state = RequestState.ENDED
        self._requests.remove(request)
        self._without_room.clear()
        for seq in request.sequences:
            if seq.token_ids:
                rank.store(request, seq, partial=not keep_blocks)
            seq.cache = None
        if not keep_blocks:
            rank.release(request)

    def _free_all(self) -> None:
        self._shelf.close()

    def _drain_events(self) -> list[dict[str, Any]]:
        return [event for rank in self.ranks if rank.log is not None for event in rank.log.drain()]

    def _drain_stats(self) -> list[dict[str, Any]]:
        return [self._stats.popleft() for _ in range(len(self._stats))]


def _process(request: Request, logits: torch.Tensor, token_ids: list[int]) -> None:
    for processor in request.processors:
        processor(request.request_id, logits.view(1, 1, -1), [token_ids], None, None)
