"""Domain values as the wire can carry them: floats of the wire are 32 bit."""

from __future__ import annotations

from array import array
from dataclasses import replace
from datetime import timedelta
from typing import Any

from hypothesis import strategies as st

from quartet.discovery.base import Role
from quartet.engine.base import FinishReason, Generation, Prefilled, Started
from quartet.engine.sampling import OutputOptions, PromptLogprobs, Sampling, TokenLogprobs
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import (
    DTYPE_SIZE_BYTES,
    BlocksPayload,
    EmbeddingLayout,
    EmbeddingsPayload,
    HandOff,
    KvLayout,
    OpaquePayload,
    Payload,
)
from quartet.media.items import MediaFile, MediaKind
from quartet.streams.messages import MediaInput, RequestContext, WorkerStart
from quartet.transfer.base import TransferWay
from tests.discovery.strategies import worker_records

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAME = st.text("abcxyz019.-", min_size=1, max_size=12).map(lambda text: "w" + text)
SECONDS = st.integers(0, 10**9).map(lambda micros: micros / 1e6)
TOKEN_IDS = st.lists(U32, max_size=40).map(lambda ids: array("I", ids))


def floats(low: float, high: float, **options: Any) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, **options)


SAMPLINGS = st.builds(
    Sampling,
    temperature=floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=floats(0, 1, exclude_min=True),
    min_p=floats(0, 1),
    repetition_penalty=floats(0, 100, exclude_min=True),
    presence_penalty=floats(-2, 2),
    frequency_penalty=floats(-2, 2),
    logit_bias=st.dictionaries(U32, floats(-100, 100), max_size=5),
    max_tokens=st.none() | st.integers(1000, 2**31 - 1),
    min_tokens=st.integers(0, 1000),
    stop_token_ids=st.lists(U32, max_size=5).map(tuple),
    ignore_eos=st.booleans(),
)
_NUM_TOP = st.none() | st.integers(0, 20)
OUTPUTS = st.builds(OutputOptions, logprobs=_NUM_TOP, num_prompt_logprobs=_NUM_TOP)
MEDIA_IDS = st.binary(min_size=32, max_size=32)
MEDIA = st.builds(MediaSpan, MEDIA_IDS, st.integers(0, 2**31), st.integers(1, 2**31))
GENERATIONS = st.builds(
    Generation,
    prompt_token_ids=TOKEN_IDS.filter(len),
    generated_token_ids=TOKEN_IDS,
    sampling=SAMPLINGS,
    seed=U64,
    choice=U32,
    adapter=TEXT,
    cache_salt=TEXT,
    data_parallel_rank=U32,
    media=st.lists(MEDIA, max_size=3).map(tuple),
    output=OUTPUTS,
)
CONTEXTS = st.builds(
    RequestContext,
    request_id=st.just("") | st.text("0123456789abcdef", min_size=32, max_size=32),
    attempt=U32,
    choice=U32,
    timeout_s=st.none() | SECONDS,
    traceparent=TEXT,
    tenant=TEXT,
    priority=st.integers(-(2**31), 2**31 - 1),
    session_key=TEXT,
    router_id=st.text(st.characters(exclude_categories=["Cs"]), max_size=16),
    router_request_number=U64,
    trust_domain=TEXT,
    sent_at_unix_ns=U64,
)
LAYOUTS = st.builds(
    KvLayout,
    model_fingerprint=TEXT,
    dtype=st.sampled_from(list(DTYPE_SIZE_BYTES)),
    num_layers=st.integers(1, 200),
    num_kv_heads=st.integers(1, 200),
    head_dim=st.integers(1, 512),
    block_size=st.integers(1, 512),
)
EMBEDDING_LAYOUTS = st.builds(
    EmbeddingLayout,
    model_fingerprint=TEXT,
    dtype=st.sampled_from(list(DTYPE_SIZE_BYTES)),
    hidden_size=st.integers(1, 2**16),
    block_size=st.integers(1, 512),
)


def hand_offs(payloads: st.SearchStrategy[Payload]) -> st.SearchStrategy[HandOff]:
    return st.builds(
        HandOff,
        hand_off_id=st.binary(min_size=16, max_size=16),
        secret=st.binary(min_size=16, max_size=16),
        worker_id=NAME,
        epoch=U64,
        address=NAME,
        time_to_live=st.integers(0, 10**12).map(lambda micros: timedelta(microseconds=micros)),
        payload=payloads,
    )


PIECES = (st.integers(1, 2**32 - 1), st.lists(U32, max_size=5).map(tuple))
HAND_OFFS = hand_offs(
    st.builds(BlocksPayload, LAYOUTS, *PIECES) | st.builds(OpaquePayload, TEXT, st.binary(max_size=50))
)
EMBEDDING_HAND_OFFS = hand_offs(st.builds(EmbeddingsPayload, EMBEDDING_LAYOUTS, *PIECES))
MEDIA_FILES = st.builds(MediaFile, st.sampled_from(MediaKind), st.binary(min_size=1, max_size=50))
LOGPROB = floats(-(2.0**100), 0)
LOGPROBS = st.lists(st.tuples(U32, LOGPROB), max_size=5).flatmap(
    lambda top: st.builds(
        TokenLogprobs,
        U32,
        LOGPROB,
        st.just(tuple(token for token, _ in top)),
        st.just(tuple(logprob for _, logprob in top)),
    )
)


@st.composite
def _prompt_logprobs(draw: st.DrawFn) -> PromptLogprobs:
    num_positions = draw(st.integers(0, 3))
    num_tops = num_positions * draw(st.integers(0, 3))
    token_ids = st.just([]) | st.lists(U32, min_size=num_positions + 1, max_size=num_positions + 1)
    return PromptLogprobs(
        array("I", draw(token_ids)),
        array("f", draw(st.lists(LOGPROB, min_size=num_positions, max_size=num_positions))),
        array("I", draw(st.lists(U32, min_size=num_tops, max_size=num_tops))),
        array("f", draw(st.lists(LOGPROB, min_size=num_tops, max_size=num_tops))),
    )


PROMPT_LOGPROBS = _prompt_logprobs()


@st.composite
def _worker_starts(draw: st.DrawFn) -> WorkerStart:
    context, generation = draw(CONTEXTS), draw(GENERATIONS)
    # The choice is said once on the wire, in the context.
    generation = replace(generation, choice=context.choice)
    media: tuple[MediaInput, ...] = ()
    match draw(st.sampled_from(["nothing", "hand-offs", "files"])):
        case "hand-offs":
            media = tuple(MediaInput(span.media_id, draw(EMBEDDING_HAND_OFFS)) for span in generation.media)
        case "files":
            generation = replace(generation, media=())
            media = tuple(draw(st.lists(st.builds(MediaInput, MEDIA_IDS, MEDIA_FILES), max_size=3)))
    return WorkerStart(context=context, generation=generation, hand_off=draw(st.none() | HAND_OFFS), media=media)


WORKER_STARTS = _worker_starts()
STARTED = st.builds(
    Started, st.just(3), U32, SECONDS, SECONDS, U64, st.none() | st.sampled_from(TransferWay), onboard_s=SECONDS
)
PREFILLED = st.builds(
    Prefilled,
    id=st.just(3),
    token_id=U32,
    num_cached_tokens=U32,
    queue_s=SECONDS,
    compute_s=SECONDS,
    onboard_s=SECONDS,
    finished=st.none() | st.sampled_from([FinishReason.STOP_ID, FinishReason.LENGTH]),
    logprobs=st.none() | LOGPROBS,
    prompt_logprobs=st.none() | PROMPT_LOGPROBS,
)
NAMES = st.lists(TEXT, max_size=4).map(tuple)
WORKER_RECORDS = worker_records(
    role=st.sampled_from([Role.ENCODE, Role.PREFILL, Role.DECODE]),
    transfer_ways=st.lists(st.sampled_from(TransferWay), unique=True).map(tuple),
)
