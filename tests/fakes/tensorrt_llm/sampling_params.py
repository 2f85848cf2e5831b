"""`SamplingParams` and `GuidedDecodingParams`."""

from __future__ import annotations

from typing import Any

from tensorrt_llm._stand_in.schema import NAMES, StandInError, make_dataclass


class LogitsProcessor:
    """The base of what changes a request's logits, in place."""

    def __call__(
        self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: int | None, client_id: int | None
    ) -> None:
        raise NotImplementedError


NAMES["LogitsProcessor"] = LogitsProcessor


class _Guides:
    __slots__ = ()

    def _validate(self) -> None:
        guides: Any = self
        given = [guides.json, guides.regex, guides.grammar, guides.structural_tag]
        if sum(guide is not None for guide in given) + bool(guides.json_object) > 1:
            raise ValueError(f"Only one guide can be used for a request, but got {self}.")


GuidedDecodingParams = make_dataclass("GuidedDecodingParams", _Guides)


class _SamplingRules:
    """Values are checked when the object is made, and again by each call: it is open to change between them."""

    __slots__ = ("_stream_interval", "_submitted")

    def __post_init__(self) -> None:
        self._stream_interval: int | None = None
        self._submitted: int | None = None
        self.validate()

    def validate(self) -> None:
        """Raise a `ValueError` for what no request can have."""
        params: Any = self
        bounds = {
            "top_p": (0, 1),
            "min_p": (0, 1),
            "top_k": (0, None),
            "temperature": (0, None),
            "max_tokens": (1, None),
        }
        for name, (lower, upper) in {**bounds, "n": (1, None), "truncate_prompt_tokens": (1, None)}.items():
            value = getattr(params, name)
            if value is not None and (value < lower or (upper is not None and value > upper)):
                raise ValueError(f"require {lower} <= {name}{'' if upper is None else f' <= {upper}'}, got {value}")
        if params.best_of is not None and params.best_of < params.n:
            raise ValueError(f"best_of ({params.best_of}) cannot be less than n ({params.n})")
        if params.guided_decoding is not None:
            params.guided_decoding._validate()

    def take(self) -> None:
        """Hold this object for one request: `LLM` changes it, and a second one would start with that."""
        # A copy has the slots' values, but not the identity.
        if self._submitted == id(self):
            raise StandInError("this SamplingParams was given to a request before, which changed it: make a fresh one")
        self._submitted = id(self)


SamplingParams = make_dataclass("SamplingParams", _SamplingRules)
