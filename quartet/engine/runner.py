"""The seam between scheduling and the model: a ``ModelRunner`` computes a step's chunks and samples tokens.

A runner computes a step while its caller waits (``run``). It may have a ``StepLauncher`` as well: its steps go on in a
device while the caller plans and launches the next one. ``RunningRequest`` is a request as the engine thread knows it,
``ScheduledChunk`` the part of it that a step computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from quartet.engine.base import EngineRequest
from quartet.engine.guided.masks import Guide
from quartet.engine.sampling import PromptLogprobs, Sampling, TokenLogprobs
from quartet.kvcache import sequence
from quartet.kvcache.layout import KvLayout
from quartet.transfer.base import BlockMemory, EmbeddingMemory


class ModelRunner(Protocol):
    """A loaded, warmed-up model with its block pool. Made, used and closed in the engine thread."""

    @property
    def layout(self) -> KvLayout:
        """Shape of one block."""
        ...

    @property
    def memory(self) -> BlockMemory | None:
        """The block pool's bytes; ``None``: transfers can't reach them."""
        ...

    @property
    def embeddings(self) -> EmbeddingMemory | None:
        """Where it reads embeddings of media; ``None``: its model takes none."""
        ...

    @property
    def placeholder_id(self) -> int | None:
        """The token that stands for media in prompts; ``None``: it takes text only."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an output unless ``ignore_eos``."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are in ``[0, vocab_size)``."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, numbered from 0."""
        ...

    @property
    def launcher(self) -> StepLauncher | None:
        """Launches steps without waiting for them; ``None``: there is ``run`` only."""
        ...

    def run(self, chunks: Sequence[ScheduledChunk]) -> list[SampledToken]:
        """Write the KV of all chunks' tokens into the blocks of their ``seq.block_table``; sample.

        Block tables cover the chunks' tokens. A request is in at most one chunk. When it returns, the device has done
        the step: transfers then read blocks of it, or write blocks that it used and that were freed since.

        Returns:
            One token for each chunk that samples, in the order of the chunks. It means nothing if ``running.guide`` has
            an error.

        Raises:
            Exception: any; the engine is dead then.
        """
        ...

    def close(self) -> None:
        """Free the model and the pool, after any step in flight; called once, last."""
        ...


class StepLauncher(Protocol):
    """Launches steps that a device computes one after the other, in the order of the calls.

    A step is *in flight* from its launch until it is read. Steps are read in that order too. At most two are in flight
    at a time.
    """

    def launch(self, chunks: Sequence[ScheduledChunk]) -> LaunchedStep:
        """Have the device do what ``ModelRunner.run`` does; returns as soon as it has all it needs from the caller.

        If a sequence's last token is unread, the step in flight samples it: it is number ``unread_row`` among that
        step's tokens, and the device has it. Sequences and requests may change as soon as this returns; nothing is
        freed that a step in flight writes or reads.

        Raises:
            Exception: any; the engine is dead then.
        """
        ...


class LaunchedStep(Protocol):
    """A step that a device computes, or has computed."""

    @property
    def can_follow(self) -> bool:
        """Whether a next step can be launched before this one is read: all that it needs will be on the device."""
        ...

    def read(self) -> list[SampledToken]:
        """Wait until the device has done the step; called once.

        Returns:
            As ``ModelRunner.run``, and what that says of the device is true from now on, for this step.

        Raises:
            Exception: any; the engine is dead then.
        """
        ...


@dataclass(frozen=True)
class SampledToken:
    """One sampled token; ``logprobs`` where the request's output options ask for them.

    ``prompt_logprobs`` are those of the whole prompt, with the token of a chunk that ``reports``.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True)
class ScheduledChunk:
    """Part of a request that a step computes: ``seq.token_ids[first_position : first_position + num_tokens]``.

    The KV of all earlier tokens is in the blocks already, or the step in flight writes it. ``samples``: the chunk
    reaches the sequence's end, and the logits of its last token yield the next one. ``reports``: it is a part of a
    prompt whose log probabilities are wanted; the runner keeps them until the token of the chunk that samples takes
    them along. Chunks of such a prompt begin at its first token; they do so again if it was preempted meanwhile.
    """

    running: RunningRequest
    first_position: int
    num_tokens: int
    samples: bool
    reports: bool = False

    @property
    def num_reported(self) -> int:
        """So many of its first tokens have logits that are wanted, beside that which samples."""
        return self.num_tokens - self.samples if self.reports else 0


class RequestState(Enum):
    """The state of a request in the scheduler."""

    WAITING = auto()  # holds no blocks; new or preempted
    PULLING = auto()  # holds blocks that a transfer, or a load from a lower tier, writes to
    RUNNING = auto()  # holds blocks and takes part in steps
    ENDING = auto()  # holds blocks until its last step, which is in flight, has ended
    ENDED = auto()  # holds nothing any more, or only until the steps that it is in have ended


@dataclass(eq=False, kw_only=True)
class RunningRequest:
    """One request between ``submit`` and its end; changed by the engine thread only.

    Compared and hashed by identity, so a runner can keep state beside it (``WeakKeyDictionary``).

    Attributes:
        seq: prompt, generated and sampled tokens; ``seq.block_table`` says where their KV is.
        arrival: number of the submit; first come, first served within a priority.
        num_initial_tokens: tokens that came with the request: prompt and generated.
        media_end: the position after its last media token; 0: it is all text.
        max_output_tokens: output tokens at which it ends, generated ones included.
        stop_ids: tokens that end the output once it has ``min_tokens``: masked before that.
        needs_pull: its KV must still be fetched from another worker.
        num_cached_tokens: tokens whose KV was cached when it was first admitted.
        num_evicted_tokens: tokens after those whose KV was cached lately.
        is_admitted: it had blocks before.
        is_started: it was in a step before.
        is_cancelled: it ends as soon as nothing writes to its blocks.
        num_steps_in_flight: steps in flight that it is in.
        unread_row: number of its unread token among those that the last launched step samples; ``None``: it has none.
        guide: which tokens its grammar allows; ``None``: it has none, and any may come.
    """

    request: EngineRequest
    seq: sequence.Sequence
    arrival: int = 0
    max_output_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    state: RequestState = RequestState.WAITING
    needs_pull: bool = False
    num_cached_tokens: int = 0
    num_evicted_tokens: int = 0
    is_admitted: bool = False
    is_started: bool = False
    is_cancelled: bool = False
    num_steps_in_flight: int = 0
    unread_row: int | None = None
    guide: Guide | None = None

    def __post_init__(self) -> None:
        """Compute once what every step needs."""
        self.id = self.request.id
        self.num_prompt_tokens = len(self.request.generation.prompt_token_ids)
        self.num_initial_tokens = self.num_prompt_tokens + len(self.request.generation.generated_token_ids)
        media = self.request.generation.media
        self.media_end = max([span.first_position + span.num_tokens for span in media], default=0)
        self.position = (-self.request.priority, self.arrival)
        # Another worker has computed what is handed off, and reported it.
        self._wants_report = (
            self.request.generation.output.num_prompt_logprobs is not None and self.request.hand_off is None
        )

    @property
    def sampling(self) -> Sampling:
        """The request's sampling parameters."""
        return self.request.generation.sampling

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt so far: generated by earlier attempts or sampled here."""
        return len(self.seq.token_ids) - self.num_prompt_tokens

    @property
    def reports_prompt(self) -> bool:
        """Whether log probabilities of its prompt are wanted and not given out yet: all of it has to be computed."""
        return self._wants_report and self.num_output_tokens == 0

    @property
    def lacks_embeddings(self) -> bool:
        """Whether it has media and no embeddings to compute them from: their KV must be fetched or cached."""
        return self.media_end > 0 and not self.request.media_blocks

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is still missing."""
        return len(self.seq.token_ids) - self.seq.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether the KV of one token is missing, whose logits yield the next token."""
        return self.num_uncomputed_tokens == 1
