"""Requests, answers and fleets as the wire can carry them."""

from __future__ import annotations

from array import array
from dataclasses import fields

from hypothesis import strategies as st

from quartet.api.chat import ChatPrompt, ToolChoice
from quartet.api.fleet import Explanation, Model, RankOption, WorkerState, WorkerStatus
from quartet.api.request import (
    TIMES,
    Accepted,
    ChoiceFinished,
    ChoicePlacement,
    Delta,
    GenerateStart,
    Placed,
    TextOptions,
    TextPrompt,
    TimeBreakdown,
    TokenPrompt,
    Usage,
)
from quartet.discovery.base import Rank, Role
from quartet.engine.base import FinishReason
from quartet.media.items import MediaUrl
from quartet.text.chat_message import ChatMessage, Tool, ToolCall
from quartet.text.json_object import JsonObject
from quartet.text.parsed import ToolCallDelta
from quartet.transfer.base import TransferWay
from tests.events.loads import make_load
from tests.streams.strategies import (
    LOGPROBS,
    MEDIA_FILES,
    NAMES,
    OUTPUTS,
    PROMPT_LOGPROBS,
    SAMPLINGS,
    TEXT,
    TOKEN_IDS,
    U32,
    U64,
    WORKER_RECORDS,
)

# As they come off the wire.
TOKEN_ARRAYS = TOKEN_IDS.map(lambda token_ids: array("I", token_ids))
# Whole nanoseconds that a float holds exactly.
SECONDS = st.integers(0, 10**6).map(lambda parts: parts / 512)
MEDIA_PARTS = MEDIA_FILES | st.builds(MediaUrl, TEXT.filter(bool))
# Pieces that are all text come back as one.
PIECES = st.builds(
    lambda before, media, after: (*before, media, *after),
    st.lists(TEXT | MEDIA_PARTS, max_size=2),
    MEDIA_PARTS,
    st.lists(TEXT | MEDIA_PARTS, max_size=2),
)
JSON_OBJECTS = TEXT.filter(bool).map(JsonObject.of_text)
CALLS = st.builds(ToolCall, TEXT.filter(bool), JSON_OBJECTS, TEXT)
TOOLS = st.builds(Tool, TEXT, TEXT, JSON_OBJECTS, st.none() | st.booleans())
CHAT_MESSAGES = st.builds(ChatMessage, TEXT.filter(bool), TEXT | PIECES) | st.builds(
    ChatMessage,
    TEXT.filter(bool),
    TEXT | PIECES,
    name=st.none() | TEXT.filter(bool),
    tool_calls=st.lists(CALLS, max_size=2).map(tuple),
    tool_call_id=st.none() | TEXT.filter(bool),
    reasoning=TEXT,
)
CHATS = st.builds(
    ChatPrompt,
    st.lists(CHAT_MESSAGES, max_size=3).map(tuple),
    st.booleans(),
    tools=st.lists(TOOLS, max_size=2).map(tuple),
    tool_choice=st.sampled_from(ToolChoice),
    tool_name=TEXT,
    parallel_tool_calls=st.booleans(),
    template_arguments=st.none() | JSON_OBJECTS,
)
PROMPTS = st.builds(TextPrompt, TEXT) | CHATS | st.builds(TokenPrompt, TOKEN_ARRAYS)
TEXT_OPTIONS = st.builds(
    TextOptions,
    stop_strings=NAMES,
    include_stop_string=st.booleans(),
    omit_text=st.booleans(),
    omit_token_ids=st.booleans(),
    show_special_tokens=st.booleans(),
    raw_text=st.booleans(),
    stream_tool_arguments=st.booleans(),
)
GENERATE_STARTS = st.builds(
    GenerateStart,
    prompt=PROMPTS,
    model=TEXT,
    sampling=SAMPLINGS,
    seed=st.none() | U64,
    output=OUTPUTS,
    text_options=TEXT_OPTIONS,
    adapter=TEXT,
    cache_salt=TEXT,
    tenant=TEXT,
    priority=st.integers(-(2**31), 2**31 - 1),
    session_key=TEXT,
    timeout_s=st.none() | SECONDS,
    num_choices=U32,
    client_request_id=TEXT,
    ttft_target_s=st.none() | SECONDS,
    itl_target_s=st.none() | SECONDS,
    media=st.lists(MEDIA_PARTS, max_size=3).map(tuple),
)
PLACES = st.builds(Rank, TEXT, U32)
COSTS = st.floats(allow_nan=False)
PLACEMENTS = st.builds(
    ChoicePlacement,
    choice=U32,
    prefill=st.none() | PLACES,
    decode=PLACES,
    num_matched_tokens=U32,
    cost=st.none() | COSTS,
)
EXPLANATIONS = st.builds(
    Explanation,
    policy=TEXT,
    model=TEXT,
    model_fingerprint=TEXT,
    num_prompt_tokens=U32,
    num_waiting=U32,
    options=st.lists(
        st.builds(
            RankOption,
            rank=PLACES,
            role=st.sampled_from([Role.PREFILL, Role.DECODE]),
            is_chosen=st.booleans(),
            num_matched_tokens=U32,
            cost=st.none() | COSTS,
            cost_unit=TEXT,
            terms=st.dictionaries(TEXT, COSTS, max_size=3),
            obstacle=TEXT,
        ),
        max_size=3,
    ).map(tuple),
    wait_s=st.none() | SECONDS,
)
ACCEPTED = st.builds(
    Accepted,
    request_id=TEXT,
    choices=st.lists(PLACEMENTS, max_size=3).map(tuple),
    num_prompt_tokens=U32,
    seed=U64,
    model_fingerprint=TEXT,
    encode=st.none() | PLACES,
)
DELTAS = st.builds(
    Delta,
    choice=U32,
    token_offset=U32,
    token_ids=TOKEN_IDS.map(tuple),
    text=TEXT,
    logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
    reasoning=TEXT,
    tool_calls=st.lists(st.builds(ToolCallDelta, U32, TEXT, TEXT, TEXT, st.booleans()), max_size=2).map(tuple),
)
FINISHED = st.builds(
    ChoiceFinished,
    choice=U32,
    reason=st.sampled_from(FinishReason),
    usage=st.builds(Usage, **{item.name: U32 for item in fields(Usage)}),
    time=st.builds(
        TimeBreakdown,
        **{name: st.none() | SECONDS for name in TIMES},
        transfer_bytes=st.integers(1, 2**64 - 1),
        transfer_way=st.none() | st.sampled_from(TransferWay),
    ),
    stop_string=st.none() | TEXT.filter(bool),
)
ANSWER_PARTS = ACCEPTED | st.builds(Placed, placement=PLACEMENTS) | PROMPT_LOGPROBS | DELTAS | FINISHED
WORKER_STATUSES = st.builds(
    WorkerStatus,
    record=WORKER_RECORDS,
    state=st.sampled_from(WorkerState),
    load=st.none() | st.builds(make_load),
    load_age_s=st.none() | SECONDS,
    num_requests=U32,
)
MODELS = st.builds(
    Model,
    name=TEXT,
    fingerprint=TEXT,
    max_model_len=U32,
    num_prefill_workers=U32,
    num_decode_workers=U32,
    sampling_fields=NAMES,
    media=NAMES,
    adapters=NAMES,
    has_chat_template=st.booleans(),
    reasoning_parser=TEXT,
    tool_call_parser=TEXT,
    chat_features=NAMES,
    template_arguments=NAMES,
)
