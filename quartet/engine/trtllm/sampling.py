"""Turns a request's sampling into TensorRT-LLM's ``SamplingParams``."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from quartet.engine.base import Generation, RequestKind
from quartet.engine.sampling import GrammarKind, Sampling, check_fields, check_output_fields, guided_fields
from quartet.engine.trtllm.arguments import LlmArguments
from quartet.engine.trtllm.package import Package

# Fields of ``Sampling`` and ``OutputOptions`` that every release honours, whatever arguments the engine was made with.
_SAMPLING_FIELDS = frozenset("temperature top_k top_p max_tokens min_tokens stop_token_ids ignore_eos logprobs".split())
# What the default sampler accepts and ignores as long as there are two to choose from.
_FIELDS_OF_COMPLETE_SAMPLERS = frozenset("seed min_p repetition_penalty presence_penalty frequency_penalty".split())
_COMPLETE_SAMPLER = "TRTLLMSampler"
# The names of ``GuidedDecodingParams``; a choice is made a regular expression.
_GRAMMARS = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "grammar",
    GrammarKind.CHOICE: "regex",
}
_XGRAMMAR = "xgrammar"
_SEED_MASK = 2**63 - 1


def sampling_fields(arguments: LlmArguments, package: Package, kind: RequestKind) -> frozenset[str]:
    """Names of the ``Sampling`` and ``OutputOptions`` fields that an engine made with ``arguments`` honours."""
    fields = _SAMPLING_FIELDS
    if package.has_one_sampler or arguments.values.get("sampler_type") == _COMPLETE_SAMPLER:
        fields |= _FIELDS_OF_COMPLETE_SAMPLERS
    if kind is RequestKind.PREFILL and not package.hands_logprobs_over:
        fields -= {"logprobs"}
    if arguments.guided_backend is not None:
        fields |= guided_fields((*_GRAMMARS, *_kinds_of(arguments.guided_backend)))
    return fields


def _kinds_of(backend: str) -> Sequence[GrammarKind]:
    return (GrammarKind.STRUCTURAL_TAG,) if backend == _XGRAMMAR else ()


def check_sampling_fields(generation: Generation, supported: frozenset[str]) -> None:
    """Refuse a field that the engine would ignore. Raises ``UnsupportedFieldError``, which names it."""
    check_fields(generation.sampling, supported, "this engine")
    check_output_fields(generation.output, supported, "this engine")


def stop_ids_of(sampling: Sampling, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """All tokens that end an output, without repeats."""
    eos = () if sampling.ignore_eos else tuple(eos_token_ids)
    return tuple(dict.fromkeys((*eos, *sampling.stop_token_ids)))


def sampling_params(
    package: Package,
    generation: Generation,
    eos_token_ids: Sequence[int],
    *,
    max_output_tokens: int,
    num_done: int,
    add_special_tokens: bool = True,
) -> Any:
    """A fresh ``SamplingParams``: each call changes the one that it is given.

    Of ``max_output_tokens`` in all, the call is given the first ``num_done``.

    TensorRT-LLM takes the output of a resumed request as a part of the prompt, so presence and frequency penalties
    forget it. The engine promises only for greedy sampling that an answer goes on as if nothing had happened.
    """
    sampling, num_logprobs = generation.sampling, generation.output.logprobs
    end_id = eos_token_ids[0] if eos_token_ids else None
    stop_ids = [
        token_id for token_id in stop_ids_of(sampling, eos_token_ids) if sampling.ignore_eos or token_id != end_id
    ]
    return package.SamplingParams(
        max_tokens=max_output_tokens - num_done,
        # So many must come before anything may stop the output.
        min_tokens=max(0, sampling.min_tokens - num_done) or None,
        end_id=end_id,
        pad_id=end_id,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=stop_ids or None,
        # Our protocol gives the stop id out. If TensorRT-LLM still trims the end's id, ``TokenCursor`` puts it back.
        include_stop_str_in_output=True,
        repetition_penalty=_unless(sampling.repetition_penalty, 1.0),
        presence_penalty=_unless(sampling.presence_penalty, 0.0),
        frequency_penalty=_unless(sampling.frequency_penalty, 0.0),
        # To some samplers 0 means no log probabilities at all, not even the token's own.
        logprobs=None if num_logprobs is None else max(num_logprobs, 1),
        guided_decoding=_guide(package, sampling),
        detokenize=False,
        add_special_tokens=add_special_tokens,
        **_choice(generation),
    )


def _choice(generation: Generation) -> dict[str, Any]:
    sampling = generation.sampling
    if sampling.is_greedy:
        return {"temperature": 0.0}
    return {
        "temperature": sampling.temperature,
        # Set these even if they change nothing: TensorRT-LLM may take a missing one to mean greedy.
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
        "seed": _seed(generation),
    }


def _seed(generation: Generation) -> int:
    """A seed from the request's seed, choice and position: choices, and answers that go on elsewhere, differ."""
    position = len(generation.generated_token_ids)
    key = f"{generation.seed} {generation.choice} {position}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") & _SEED_MASK


def _unless(value: float, default: float) -> float | None:
    return None if value == default else value


def _guide(package: Package, sampling: Sampling) -> Any:
    guided = sampling.guided
    if guided is None:
        return None
    if guided.kind is GrammarKind.STRUCTURAL_TAG:
        return package.GuidedDecodingParams(structural_tag=guided.text)
    text = guided.text
    if guided.kind is GrammarKind.CHOICE:
        text = "|".join(f"({re.escape(choice)})" for choice in json.loads(text))
    return package.GuidedDecodingParams(**{_GRAMMARS[guided.kind]: text})
