"""A request as the caller says it, and as the message that starts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from quartet.client.events import ChatMessage
from quartet.engine.sampling import OutputOptions, Sampling
from quartet.errors import InvalidRequestError
from quartet.rpc import convert
from quartet.rpc.durations import to_duration
from quartet.v1 import router_pb2

_MAX_UINT32 = 2**32 - 1
_MAX_UINT64 = 2**64 - 1
_MAX_NUM_CHOICES = 64


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What to continue, and how. Exactly one of ``prompt``, ``messages`` and ``token_ids`` is set.

    Attributes:
        prompt: text, tokenized as it is.
        messages: a conversation, laid out by the model's chat template.
        model: empty: the only one, if there is but one.
        stop: strings that end the answer; they are not shown.
        num_choices: answers wanted, 1 to 64.
        logprobs: alternatives to report at each position, 0 to 20; ``None``: no log probabilities.
        seed: unsigned 64 bit; ``None``: the router draws one and tells it.
        timeout_s: seconds for the whole request; ``None``: the router's limit.

    Raises:
        InvalidRequestError: naming the field; what only the router can check, it checks.
    """

    prompt: str | None = field(default=None, repr=False)
    messages: Sequence[ChatMessage] | None = field(default=None, repr=False)
    token_ids: Sequence[int] | None = field(default=None, repr=False)
    model: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    num_choices: int = 1
    logprobs: int | None = None
    seed: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse what the message could not even hold, naming the field."""
        if [self.prompt, self.messages, self.token_ids].count(None) != 2:
            raise InvalidRequestError("give one of prompt, messages and token_ids", field="prompt")
        if not all(0 <= token_id <= _MAX_UINT32 for token_id in self.token_ids or ()):
            raise InvalidRequestError("a token id is no unsigned 32-bit number", field="token_ids.ids")
        if self.seed is not None and not 0 <= self.seed <= _MAX_UINT64:
            raise InvalidRequestError("seed must be an unsigned 64-bit number", field="seed")
        if not 1 <= self.num_choices <= _MAX_NUM_CHOICES:
            raise InvalidRequestError(f"num_choices must be in [1, {_MAX_NUM_CHOICES}]", field="num_choices")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise InvalidRequestError("timeout must be above 0", field="timeout")
        if isinstance(self.stop, str):
            # Its letters would become the stop strings.
            raise InvalidRequestError("stop is a list of strings, not a string", field="text_options.stop_strings")


class GenerateFields(TypedDict, total=False):
    """The fields of ``GenerateOptions`` as keyword arguments, ``prompt`` left out."""

    messages: Sequence[ChatMessage] | None
    token_ids: Sequence[int] | None
    model: str
    sampling: Sampling
    stop: Sequence[str]
    num_choices: int
    logprobs: int | None
    seed: int | None
    timeout_s: float | None


def to_generate_start(options: GenerateOptions) -> router_pb2.GenerateStart:
    """The message that starts the request.

    Raises:
        InvalidRequestError: ``logprobs`` is out of range, or a text holds half a surrogate pair.
    """
    try:
        return _to_generate_start(options)
    except UnicodeEncodeError as error:
        raise InvalidRequestError("a text is not valid Unicode") from error


def _to_generate_start(options: GenerateOptions) -> router_pb2.GenerateStart:
    message = router_pb2.GenerateStart(
        model=options.model,
        sampling=convert.to_sampling(options.sampling),
        seed=options.seed,
        output=convert.to_output_options(OutputOptions(logprobs=options.logprobs)),
        text_options=router_pb2.TextOptions(stop_strings=options.stop),
        timeout=None if options.timeout_s is None else to_duration(options.timeout_s),
        num_choices=options.num_choices,
    )
    if options.prompt is not None:
        message.text = options.prompt
    elif options.messages is not None:
        message.chat.SetInParent()
        message.chat.messages.extend(
            router_pb2.ChatMessage(role=entry.role, content=entry.content) for entry in options.messages
        )
    else:
        message.token_ids.SetInParent()
        message.token_ids.ids.extend(options.token_ids or ())
    return message
