"""How tokens are chosen: sampling parameters, output options and log probabilities, checked on construction."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from operator import attrgetter

from quartet.errors import InvalidRequestError, UnsupportedFieldError

_MAX_TOP_LOGPROBS = 20
#: Log probabilities of one prompt, alternatives included: an answer has them in one message, at 9 bytes each.
MAX_PROMPT_LOGPROBS = 100_000
_MAX_LOGIT_BIAS = 1024
# As much as the schemas of some hundred tools.
_MAX_GRAMMAR_LEN = 200_000
#: Texts of a grammar of the kind ``CHOICE``.
MAX_CHOICES_OF_GRAMMAR = 1024
#: Most ``stop_token_ids`` of one request.
MAX_STOP_IDS = 1024
# Field, lowest and highest value, and whether the lowest value itself is excluded.
_RANGES = (
    ("temperature", 0.0, 100.0, False),
    ("top_k", 0, 2**31 - 1, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, 100.0, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
)


class GrammarKind(StrEnum):
    """The language of a grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    LARK = "lark"  # as llguidance reads it, with its extensions
    STRUCTURAL_TAG = "structural_tag"  # JSON: text between whose tags follows a schema, as vLLM and xgrammar have it
    CHOICE = "choice"  # a JSON list of texts, one of which is the output


# Engines that announce ``guided`` follow these; the others they announce as ``guided.KIND``.
_FIRST_KINDS = frozenset({GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.EBNF})


def guided_fields(kinds: Iterable[GrammarKind]) -> frozenset[str]:
    """The names under which an engine that follows grammars of these kinds announces it."""
    return frozenset({"guided", *[f"guided.{kind}" for kind in kinds if kind not in _FIRST_KINDS]})


@dataclass(frozen=True)
class GuidedDecoding:
    """A grammar that the output follows. The engine checks whether ``text`` is valid for its kind."""

    kind: GrammarKind
    text: str = field(repr=False)

    def __post_init__(self) -> None:
        """Refuse empty and overlong grammars, and those that can't be sent."""
        if not 1 <= len(self.text) <= _MAX_GRAMMAR_LEN:
            message = f"a grammar must have 1 to {_MAX_GRAMMAR_LEN} characters, not {len(self.text)}"
            raise InvalidRequestError(message, field="sampling.guided")
        check_encodable(self.text)


def check_encodable(grammar: str) -> None:
    """Refuse half a surrogate pair, which JSON may spell. Raises ``InvalidRequestError``."""
    try:
        grammar.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("a grammar must not have half a surrogate pair", field="sampling.guided") from error


def guided_choice(texts: Collection[str]) -> GuidedDecoding:
    """The grammar of an output that is one of ``texts``. Raises ``InvalidRequestError``."""
    if not texts or "" in texts:
        raise InvalidRequestError("choices must be texts, none of them empty", field="sampling.guided")
    if len(texts) > MAX_CHOICES_OF_GRAMMAR:
        raise InvalidRequestError(
            f"there may be {MAX_CHOICES_OF_GRAMMAR} choices, not {len(texts)}", field="sampling.guided"
        )
    return GuidedDecoding(GrammarKind.CHOICE, json.dumps(list(texts), ensure_ascii=False))


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters as the field names them. ``temperature=0`` is greedy.

    Attributes:
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it.
        min_p: drop tokens less likely than ``min_p`` times the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output (CTRL).
        presence_penalty: subtracted once from logits of tokens in the output.
        frequency_penalty: subtracted for each time a token is in the output.
        logit_bias: added to the logits of these token ids.
        max_tokens: most output tokens, those of earlier attempts included; ``None``: as many as the model can hold.
        min_tokens: no end-of-sequence and no stop id before this many output tokens.
        stop_token_ids: end the output like end-of-sequence ids.
        ignore_eos: the model's own end-of-sequence ids do not end the output; ``stop_token_ids`` still do.
        guided: the output follows this grammar, and ends where that ends, whatever ``min_tokens`` and ``ignore_eos``.

    Raises:
        InvalidRequestError: a value out of range, with ``field`` = ``sampling.NAME``.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    guided: GuidedDecoding | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name, low, high, low_excluded in _RANGES:
            value = getattr(self, name)
            # Checked inline: every request is checked at every hop, and calls would take half of its conversion's time.
            if not low <= value <= high or (low_excluded and value == low):
                _check_range(name, value, low, high, low_excluded=low_excluded)
        check_counts(self.logit_bias, self.stop_token_ids)
        for bias in self.logit_bias.values():
            _check_range("logit_bias", bias, -100.0, 100.0)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens exceeds max_tokens", field="sampling.min_tokens")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def limited(self, max_tokens: int | None, stop_token_ids: tuple[int, ...]) -> Sampling:
        """This with other limits, which are not checked: ``replace`` would check all fields, at five times the cost."""
        limited = object.__new__(Sampling)
        vars(limited).update(vars(self), max_tokens=max_tokens, stop_token_ids=stop_token_ids)
        vars(limited).pop("changed_fields", None)
        return limited

    @cached_property
    def changed_fields(self) -> frozenset[str]:
        """Names of the fields that differ from their defaults: the ones that an engine must honour."""
        values = _read_fields(self)
        changed = frozenset([name for name, own, usual in zip(_NAMES, values, _DEFAULTS, strict=True) if own != usual])
        return changed if self.guided is None else changed | guided_fields((self.guided.kind,))


def check_fields(sampling: Sampling, supported: frozenset[str], who: str) -> None:
    """Refuse what ``who`` does not honour. Raises ``UnsupportedFieldError`` naming the field."""
    for name in sorted(sampling.changed_fields - supported):
        field, _, kind = name.partition(".")
        what = f"grammars of the kind {kind}" if kind else "grammars" if field == "guided" else field
        raise UnsupportedFieldError(f"{who} takes no {what}", field=f"sampling.{field}")


def check_output_fields(output: OutputOptions, supported: frozenset[str], who: str) -> None:
    """Refuse what ``who`` does not report. Raises ``UnsupportedFieldError`` naming the field."""
    for name in sorted(output.fields - supported):
        of_what = "" if name == "logprobs" else " of prompts"
        raise UnsupportedFieldError(f"{who} gives no log probabilities{of_what}", field=f"output.{name}")


def check_counts(logit_bias: Sized, stop_token_ids: Sized) -> None:
    """Refuse too many of either, without a look at any. Raises ``InvalidRequestError`` naming the field."""
    if len(logit_bias) > _MAX_LOGIT_BIAS:
        _check_range("logit_bias", len(logit_bias), 0, _MAX_LOGIT_BIAS)
    if len(stop_token_ids) > MAX_STOP_IDS:
        _check_range("stop_token_ids", len(stop_token_ids), 0, MAX_STOP_IDS)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What to report besides the tokens.

    Attributes:
        logprobs: alternatives to report at each position, 0 to 20, besides the chosen token's own log probability;
            ``None`` reports nothing.
        num_prompt_logprobs: the same for each position of the prompt but the first; a prompt that is continued by
            generated tokens has been reported before, and is not reported again.
    """

    logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("logprobs", "num_prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, 0, _MAX_TOP_LOGPROBS, prefix="output")

    @property
    def fields(self) -> frozenset[str]:
        """Names of those that are asked for: the ones that an engine must honour."""
        names = ("logprobs", "num_prompt_logprobs")
        return frozenset([name for name in names if getattr(self, name) is not None])

    def check_prompt(self, num_prompt_tokens: int, *, has_media: bool) -> None:
        """Refuse to report a prompt that is too long for it, or that has media.

        Raises:
            InvalidRequestError, UnsupportedFieldError: field ``output.num_prompt_logprobs``.
        """
        if self.num_prompt_logprobs is None:
            return
        field = "output.num_prompt_logprobs"
        if has_media:
            raise UnsupportedFieldError("prompts with media have no log probabilities", field=field)
        num_logprobs = num_prompt_tokens * (1 + self.num_prompt_logprobs)
        if num_logprobs > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"{num_prompt_tokens} prompt tokens with {self.num_prompt_logprobs} alternatives each have "
                f"{num_logprobs} log probabilities; {MAX_PROMPT_LOGPROBS} are allowed",
                field=field,
            )


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the model's distribution before temperature and filters.

    ``logprob`` is NaN where the engine does not tell it. ``top_token_ids`` and ``top_logprobs`` are the most likely
    tokens, best first.
    """

    token_id: int
    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class PromptLogprobs:
    """Log probabilities of a prompt's tokens as in ``TokenLogprobs``, each given those before it, in columns.

    Attributes:
        token_ids: the prompt's tokens, ``N`` of them; empty on the way from a worker, whose caller has them.
        logprobs: ``N - 1``: the first token has none.
        top_token_ids: ``N - 1`` times as many as there are alternatives, position by position, best first.
        top_logprobs: aligned with ``top_token_ids``.
    """

    token_ids: Sequence[int] = field(default=(), repr=False)
    logprobs: Sequence[float] = field(default=(), repr=False)
    top_token_ids: Sequence[int] = field(default=(), repr=False)
    top_logprobs: Sequence[float] = field(default=(), repr=False)

    def tokens(self) -> list[TokenLogprobs | None]:
        """One entry a token of the prompt; the first is ``None``."""
        num_top = len(self.top_token_ids) // len(self.logprobs) if self.logprobs else 0
        entries: list[TokenLogprobs | None] = [None]
        for index, logprob in enumerate(self.logprobs):
            top = slice(index * num_top, (index + 1) * num_top)
            entries.append(
                TokenLogprobs(
                    self.token_ids[index + 1], logprob, tuple(self.top_token_ids[top]), tuple(self.top_logprobs[top])
                )
            )
        return entries


def _check_range(
    name: str, value: float, low: float, high: float, *, low_excluded: bool = False, prefix: str = "sampling"
) -> None:
    is_inside = low < value <= high if low_excluded else low <= value <= high
    if not is_inside or not math.isfinite(value):
        bracket = "(" if low_excluded else "["
        raise InvalidRequestError(f"{name} must be in {bracket}{low}, {high}], not {value}", field=f"{prefix}.{name}")


_NAMES = tuple(item.name for item in fields(Sampling))
_read_fields = attrgetter(*_NAMES)
_DEFAULTS = _read_fields(Sampling())
