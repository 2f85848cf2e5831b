"""A request made ready: checked, tokenized, named, and bound to a pool."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from quartet.engine.sampling import MAX_STOP_IDS, Sampling
from quartet.kvcache.block_hash import ExtraKey, MediaSpan, sequence_hashes
from quartet.rpc.check_start import check_resume, check_start
from quartet.rpc.edge import ChatPrompt, GenerateStart, Resume
from quartet.text.model_text import ModelText
from router.media_run import RequestMedia
from router.pools import Pool
from router.validation import check_length, num_output_tokens

# Enough for a first word to keep its space, and for an accent to find its letter.
_TAIL_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class ArrivedRequest:
    """A request as it came: nothing of it is checked yet.

    Attributes:
        resume: what it goes on after; ``None``: a new request.
        traceparent: W3C trace context; empty: no trace.
        request_id: 32 lower-case hexadecimal digits where it is new; else what it says.
        arrived_at: monotonic seconds.
    """

    start: GenerateStart
    resume: Resume | None
    traceparent: str
    request_id: str
    arrived_at: float

    @classmethod
    def now(cls, start: GenerateStart, resume: Resume | None, traceparent: str) -> ArrivedRequest:
        """It arrives; a new one's id is drawn here."""
        return cls(
            start=start,
            resume=resume,
            traceparent=traceparent,
            request_id=secrets.token_hex(16) if resume is None else resume.request_id,
            arrived_at=time.monotonic(),
        )

    @property
    def choices(self) -> Sequence[int]:
        """Numbers of the choices that run."""
        return range(self.start.num_choices) if self.resume is None else (self.resume.choice,)

    def check(self) -> None:
        """Refuse what is impossible with any model. Raises ``InvalidRequestError``."""
        check_start(self.start)
        if self.resume is not None:
            check_resume(self.resume, self.start)


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """A request that can be placed.

    Attributes:
        request_id, traceparent: as in ``ArrivedRequest``.
        arrived_at, deadline: monotonic seconds.
        prompt_token_ids: with the tokens of its media in it where ``spans`` says where they lie; else with one
            placeholder an item.
        tokenize_s: seconds that template and tokenizer took.
        max_output_tokens: output tokens at which each choice ends at the latest; as long as the tokens of its media are
            unknown, its worker may end it sooner where no number of them was asked for.
        media: ``None``: it is text only.
        num_unknown_tokens: that the prompt grows by at most once its media are in it.
    """

    request_id: str
    start: GenerateStart
    pool: Pool
    text: ModelText
    prompt_token_ids: Sequence[int] = field(repr=False)
    seed: int
    traceparent: str
    arrived_at: float
    deadline: float
    tokenize_s: float
    max_output_tokens: int
    media: RequestMedia | None = None
    spans: tuple[MediaSpan, ...] = ()
    num_unknown_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; as long as those of its media are unknown, the most that it can have."""
        return len(self.prompt_token_ids) + self.num_unknown_tokens

    @property
    def num_media_tokens(self) -> int:
        """Of the prompt's tokens, those that media fill; 0 also as long as they are unknown."""
        return sum(span.num_tokens for span in self.spans)

    @property
    def encode_worker(self) -> str:
        """The encode worker that has its media; empty: none has."""
        place = None if self.media is None else self.media.encode_place
        return "" if place is None else place.worker_id

    @property
    def num_placeholders(self) -> int:
        """Tokens of the prompt that stand for media whose own number is unknown."""
        return 0 if self.media is None or self.spans else len(self.media.items)

    def with_prompt(self, token_ids: Sequence[int], spans: tuple[MediaSpan, ...]) -> PreparedRequest:
        """The request, now that a worker told its prompt with the media in it.

        Raises:
            PromptTooLongError: it leaves no room for the answer.
        """
        check_length(self.start, len(token_ids), self.pool)
        return replace(
            self,
            prompt_token_ids=token_ids,
            spans=spans,
            num_unknown_tokens=0,
            max_output_tokens=num_output_tokens(self.start, len(token_ids), self.pool),
        )

    @property
    def prompt_tail(self) -> Sequence[int]:
        """The prompt's last few tokens where the answer's text continues it; a chat's answer stands alone."""
        return () if isinstance(self.start.prompt, ChatPrompt) else self.prompt_token_ids[-_TAIL_TOKENS:]

    @cached_property
    def sampling(self) -> Sampling:
        """What workers are told: everything that ends the answer, so that it ends alike wherever it is generated.

        Their own idea of the longest sequence may differ from place to place; and engines don't read the tokenizer's
        files, which for chat models often are the only ones to name the end of a turn.
        """
        given = self.start.sampling
        stop_token_ids = given.stop_token_ids
        if not given.ignore_eos and "stop_token_ids" in self.pool.sampling_fields:
            known = (token_id for token_id in self.text.eos_token_ids if token_id < self.text.vocab_size)
            stop_token_ids = tuple(dict.fromkeys((*stop_token_ids, *known)))[:MAX_STOP_IDS]
        # How much room the prompt leaves is for the worker to say that learns its length first.
        max_tokens = given.max_tokens if self.num_placeholders else self.max_output_tokens
        if given.max_tokens == max_tokens and stop_token_ids == given.stop_token_ids:
            return given
        return replace(given, max_tokens=max_tokens, stop_token_ids=stop_token_ids)

    @cached_property
    def _prompt_hashes(self) -> Sequence[int]:
        return self._hashes(self.prompt_token_ids)

    def sequence_hashes(self, generated: Sequence[int]) -> Sequence[int]:
        """Names of the full blocks of the prompt and of ``generated``, which follows it, as workers name them.

        Empty where the pool's workers have blocks of different sizes.
        """
        return self._hashes([*self.prompt_token_ids, *generated]) if generated else self._prompt_hashes

    def _hashes(self, token_ids: Sequence[int]) -> Sequence[int]:
        if not self.pool.block_size:
            return ()
        extra_key = ExtraKey(adapter=self.start.adapter, cache_salt=self.start.cache_salt)
        if self.media is not None and not self.spans:
            # What follows the first item lies nobody knows where.
            token_ids = token_ids[: token_ids.index(self.media.placeholder_id)]
        return sequence_hashes(token_ids, self.pool.block_size, extra_key, self.spans)

    def ended_by(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of ``token_ids`` is one that ends the output."""
        sampling = self.start.sampling
        eos_token_ids = () if sampling.ignore_eos else self.text.eos_token_ids
        # Up to min_tokens, engines take such a token for one like any other.
        return len(token_ids) > sampling.min_tokens and (
            token_ids[-1] in sampling.stop_token_ids or token_ids[-1] in eos_token_ids
        )
