"""Domain to proto and back: nothing is lost, and nonsense is refused by the name of its field."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from quartet.discovery.base import HostIdentity, Role, WorkerRecord
from quartet.engine.base import EngineStats, FinishReason, Generation, Prefilled, RequestKind, Started
from quartet.engine.sampling import (
    GrammarKind,
    GuidedDecoding,
    OutputOptions,
    Sampling,
    TokenLogprobs,
    guided_choice,
)
from quartet.errors import InvalidRequestError, ProtocolError
from quartet.kvcache.layout import BlocksPayload, HandOff, KvLayout
from quartet.streams.convert.hand_off import from_hand_off, from_kv_layout, to_hand_off, to_kv_layout
from quartet.streams.convert.messages import (
    from_engine_finish_reason,
    from_finish_reason,
    from_generation,
    from_output_options,
    from_prefill_result,
    from_request_context,
    from_sampling,
    from_slot_started,
    from_start,
    from_token_logprobs,
    put_generation,
    to_engine_request,
    to_finish_reason,
    to_output_options,
    to_prefill_result,
    to_request_context,
    to_sampling,
    to_slot_logprobs,
    to_slot_started,
    to_token_logprobs,
)
from quartet.streams.convert.workers import (
    from_transfer_ways,
    from_worker_record,
    from_worker_role,
    rank_load,
    to_transfer_ways,
    to_worker_record,
    to_worker_role,
)
from quartet.streams.messages import MediaInput, RequestContext, WorkerStart
from quartet.transfer.grpc.messages import host_from_pb, host_to_pb
from quartet.v1 import decode_pb2, prefill_pb2, types_pb2, worker_pb2
from tests.streams import strategies
from tests.streams.starts import decode_start, prefill_start

MessageT = TypeVar("MessageT", bound=Message)
PACKED = array("I", [1, 2, 3]).tobytes()


@given(strategies.SAMPLINGS)
def test_sampling_survives(sampling: Sampling) -> None:
    assert from_sampling(over_the_wire(to_sampling(sampling))) == sampling


def test_absent_fields_have_their_defaults() -> None:
    assert from_sampling(types_pb2.Sampling()) == Sampling()
    assert to_sampling(Sampling()) == types_pb2.Sampling()
    assert from_output_options(types_pb2.OutputOptions()) == OutputOptions()


@given(strategies.OUTPUTS)
def test_output_options_survive(output: OutputOptions) -> None:
    assert from_output_options(over_the_wire(to_output_options(output))) == output


@given(strategies.GENERATIONS)
def test_a_generation_survives(generation: Generation) -> None:
    message = types_pb2.Generation()
    put_generation(message, generation)
    assert from_generation(over_the_wire(message), choice=generation.choice) == generation


@given(strategies.CONTEXTS)
def test_a_context_survives(context: RequestContext) -> None:
    assert_context(from_request_context(over_the_wire(to_request_context(context))), context)


@given(strategies.HAND_OFFS | strategies.EMBEDDING_HAND_OFFS)
def test_a_hand_off_survives(hand_off: HandOff) -> None:
    assert_hand_off(from_hand_off(over_the_wire(to_hand_off(hand_off))), hand_off)


@given(strategies.LAYOUTS)
def test_a_layout_survives(layout: KvLayout) -> None:
    assert from_kv_layout(over_the_wire(to_kv_layout(layout))) == layout


@given(strategies.WORKER_STARTS, st.integers(0, 2**32 - 1))
def test_a_decode_start_survives(start: WorkerStart, slot: int) -> None:
    message = over_the_wire(decode_start(slot, start))
    rebuilt = from_start(message)
    assert message.slot == slot
    assert rebuilt.generation == start.generation
    assert_context(rebuilt.context, start.context)
    assert_media(rebuilt.media, start.media)
    assert (rebuilt.hand_off is None) == (start.hand_off is None)


@given(strategies.WORKER_STARTS, st.integers(0, 2**32 - 1))
def test_a_prefill_start_survives(start: WorkerStart, slot: int) -> None:
    message = over_the_wire(prefill_start(slot, start))
    rebuilt = from_start(message)
    assert (message.slot, rebuilt.generation, rebuilt.hand_off) == (slot, start.generation, None)
    assert_context(rebuilt.context, start.context)
    assert_media(rebuilt.media, start.media)


@given(strategies.LOGPROBS)
def test_log_probabilities_survive(logprobs: TokenLogprobs) -> None:
    assert from_token_logprobs(over_the_wire(to_token_logprobs(logprobs))) == logprobs


@given(strategies.STARTED)
def test_a_decodes_started_message_survives(started: Started) -> None:
    message = over_the_wire(to_slot_started(5, started))
    rebuilt = from_slot_started(message)
    assert message.slot == 5
    assert (rebuilt.num_cached_tokens, rebuilt.transfer_bytes) == (started.num_cached_tokens, started.transfer_bytes)
    assert rebuilt.queue_s == pytest.approx(started.queue_s)
    assert rebuilt.transfer_s == pytest.approx(started.transfer_s)
    assert rebuilt.transfer_way is started.transfer_way
    assert rebuilt.onboard_s == pytest.approx(started.onboard_s)


@pytest.mark.parametrize("way", [0, 99])
def test_a_worker_of_another_version_may_say_no_way_or_one_unknown_here(way: int) -> None:
    message = decode_pb2.SlotStarted(transfer_bytes=5, transfer_way=way)  # type: ignore[arg-type]
    assert from_slot_started(over_the_wire(message)).transfer_way is None


@given(strategies.PREFILLED, st.none() | strategies.HAND_OFFS)
def test_a_prefills_outcome_survives(prefilled: Prefilled, hand_off: HandOff | None) -> None:
    rebuilt = from_prefill_result(over_the_wire(to_prefill_result(prefilled, hand_off)))
    assert (rebuilt.token_id, rebuilt.logprobs, rebuilt.finish_reason, rebuilt.num_cached_tokens) == (
        prefilled.token_id,
        prefilled.logprobs,
        prefilled.finished,
        prefilled.num_cached_tokens,
    )
    assert rebuilt.queue_s == pytest.approx(prefilled.queue_s)
    assert rebuilt.compute_s == pytest.approx(prefilled.compute_s)
    assert rebuilt.onboard_s == pytest.approx(prefilled.onboard_s)
    assert (rebuilt.hand_off is None) == (hand_off is None)
    assert rebuilt.prompt_logprobs == prefilled.prompt_logprobs


@given(strategies.WORKER_RECORDS)
def test_a_worker_record_survives(record: WorkerRecord) -> None:
    assert from_worker_record(over_the_wire(to_worker_record(record))) == record


@pytest.mark.parametrize("reason", FinishReason)
def test_every_finish_reason_survives(reason: FinishReason) -> None:
    assert from_finish_reason(to_finish_reason(reason)) is reason


def test_slot_logprobs_keep_their_order() -> None:
    entries = [TokenLogprobs(1, -0.5), TokenLogprobs(2, -1.5, (7,), (-0.25,))]
    message = to_slot_logprobs(9, entries)
    assert (message.slot, [from_token_logprobs(entry) for entry in message.tokens]) == (9, entries)


def test_a_ranks_load_is_the_engines_own_figures() -> None:
    stats = EngineStats(num_running=1, num_held_blocks=2, num_in_use_blocks=3, num_steps=9, max_step_tokens=64)
    load = rank_load(stats, 5.0)
    assert (load.num_running, load.num_used_blocks, load.num_steps, load.max_step_tokens) == (1, 5, 9, 64)


@pytest.mark.parametrize(("ends_at", "ends_in_s"), [(0.0, 0.0), (1000.25, 0.25), (999.0, 0.0)])
def test_a_steps_end_is_sent_in_seconds_from_now(ends_at: float, ends_in_s: float) -> None:
    assert rank_load(EngineStats(step_ends_at=ends_at), 1000.0).step_ends_in_s == ends_in_s


def test_the_engine_is_asked_for_what_the_start_says() -> None:
    generation = Generation(prompt_token_ids=[1])
    context = RequestContext(
        priority=4, traceparent="00-1-2-01", session_key="tea", tenant="acme", trust_domain="a-domain"
    )
    start = WorkerStart(context=context, generation=generation)
    request = to_engine_request(7, RequestKind.DECODE, start)
    assert (request.id, request.kind, request.priority) == (7, RequestKind.DECODE, 4)
    assert (request.traceparent, request.session_key) == ("00-1-2-01", "tea")
    assert (request.tenant, request.trust_domain) == ("acme", "a-domain")
    assert request.generation is generation


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (types_pb2.Generation(), "generation.prompt_token_ids"),
        (types_pb2.Generation(prompt_token_ids=b"12345"), "generation.prompt_token_ids"),
        (types_pb2.Generation(prompt_token_ids=PACKED, generated_token_ids=b"1"), "generation.generated_token_ids"),
        (types_pb2.Generation(prompt_token_ids=PACKED, sampling=types_pb2.Sampling(top_p=0)), "sampling.top_p"),
        (
            types_pb2.Generation(prompt_token_ids=PACKED, sampling=types_pb2.Sampling(temperature=float("nan"))),
            "sampling.temperature",
        ),
        (types_pb2.Generation(prompt_token_ids=PACKED, output=types_pb2.OutputOptions(logprobs=21)), "output.logprobs"),
        (types_pb2.Generation(prompt_token_ids=PACKED, media=[types_pb2.MediaSpan(media_id=b"short")]), "media"),
    ],
)
def test_an_impossible_generation_is_refused_by_its_field(message: types_pb2.Generation, field: str) -> None:
    for start in (decode_pb2.DecodeStart(generation=message), prefill_pb2.PrefillStart(generation=message)):
        with pytest.raises(InvalidRequestError) as caught:
            if isinstance(start, decode_pb2.DecodeStart):
                from_start(start)
            else:
                from_start(start)
        assert caught.value.field == field


def test_a_start_without_a_generation_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        from_start(decode_pb2.DecodeStart())
    assert caught.value.field == "generation"


@pytest.mark.parametrize("kind", [kind for kind in GrammarKind if kind is not GrammarKind.CHOICE])
def test_a_grammar_comes_back_as_it_was(kind: GrammarKind) -> None:
    sampling = Sampling(guided=GuidedDecoding(kind, "a*"))
    message = to_sampling(sampling)
    assert getattr(message.guided, kind.value) == "a*"
    assert from_sampling(message) == sampling


def test_choices_come_back_as_they_were() -> None:
    sampling = Sampling(guided=guided_choice(['yes, "sir"', "no", "é"]))
    message = to_sampling(sampling)
    assert list(message.guided.choice.texts) == ['yes, "sir"', "no", "é"]
    assert from_sampling(message) == sampling


NO_GRAMMARS = (
    types_pb2.GuidedDecoding(),
    types_pb2.GuidedDecoding(regex="a" * 200_001),
    types_pb2.GuidedDecoding(choice=types_pb2.GuidedChoice()),
    types_pb2.GuidedDecoding(choice=types_pb2.GuidedChoice(texts=["a", ""])),
    types_pb2.GuidedDecoding(choice=types_pb2.GuidedChoice(texts=["a"] * 1025)),
)


@pytest.mark.parametrize("guided", NO_GRAMMARS)
def test_a_grammar_that_is_none_is_refused_by_its_field(guided: types_pb2.GuidedDecoding) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        from_sampling(types_pb2.Sampling(guided=guided))
    assert caught.value.field == "sampling.guided"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (types_pb2.RequestContext(request_id="F" * 32), "context.request_id"),
        (types_pb2.RequestContext(request_id="f" * 31), "context.request_id"),
        (types_pb2.RequestContext(timeout=Duration(seconds=-1)), "context.timeout"),
        (types_pb2.RequestContext(traceparent="t" * 300), "context.traceparent"),
        (types_pb2.RequestContext(tenant="t" * 300), "context.tenant"),
        (types_pb2.RequestContext(session_key="t" * 300), "context.session_key"),
        (types_pb2.RequestContext(trust_domain="t" * 300), "context.trust_domain"),
        (types_pb2.RequestContext(router_id="r" * 65), "context.router_id"),
        (types_pb2.RequestContext(router_id="\u20ac" * 22), "context.router_id"),
    ],
)
def test_an_impossible_context_is_refused_by_its_field(message: types_pb2.RequestContext, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        from_request_context(message)
    assert caught.value.field == field


def some_hand_off() -> types_pb2.HandOff:
    layout = KvLayout(model_fingerprint="f", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=1, block_size=4)
    blocks = types_pb2.BlocksPayload(layout=to_kv_layout(layout), num_tokens=9)
    return types_pb2.HandOff(hand_off_id=b"i" * 16, secret=b"s" * 16, worker_id="w", address="a:1", blocks=blocks)


def test_a_hand_off_of_blocks_knows_its_pieces() -> None:
    payload = from_hand_off(some_hand_off()).payload
    assert isinstance(payload, BlocksPayload)
    assert payload.num_pieces == 3


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (types_pb2.HandOff(hand_off_id=b"short"), "hand_off.hand_off_id"),
        (types_pb2.HandOff(secret=b"s" * 17), "hand_off.secret"),
        (types_pb2.HandOff(time_to_live=Duration(seconds=-1)), "hand_off.time_to_live"),
        (
            types_pb2.HandOff(blocks=types_pb2.BlocksPayload(layout=types_pb2.KvLayout(dtype="int3"))),
            "hand_off.blocks.layout.dtype",
        ),
    ],
)
def test_an_impossible_hand_off_is_refused_by_its_field(change: types_pb2.HandOff, field: str) -> None:
    message = some_hand_off()
    message.MergeFrom(change)
    with pytest.raises(InvalidRequestError) as caught:
        from_hand_off(message)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "field"),
    [("worker_id", "hand_off.worker_id"), ("address", "hand_off.address"), ("blocks", "hand_off.payload")],
)
def test_a_hand_off_that_lacks_something_is_refused_by_its_field(name: str, field: str) -> None:
    message = some_hand_off()
    message.ClearField(name)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as caught:
        from_hand_off(message)
    assert caught.value.field == field


def test_zeros_in_a_layout_are_refused() -> None:
    message = some_hand_off()
    message.blocks.layout.head_dim = 0
    with pytest.raises(InvalidRequestError) as caught:
        from_hand_off(message)
    assert caught.value.field == "hand_off.blocks.layout.head_dim"


def test_unspecified_values_are_the_peers_fault() -> None:
    with pytest.raises(ProtocolError):
        from_finish_reason(types_pb2.FINISH_REASON_UNSPECIFIED)
    with pytest.raises(ProtocolError):
        from_engine_finish_reason(types_pb2.FINISH_REASON_CANCELLED)
    with pytest.raises(ProtocolError):
        from_worker_role(worker_pb2.WORKER_ROLE_UNSPECIFIED)
    with pytest.raises(ProtocolError):
        from_token_logprobs(types_pb2.TokenLogprobs(top_token_ids=[1]))
    with pytest.raises(ProtocolError):
        from_worker_record(worker_pb2.WorkerRecord(role=worker_pb2.WORKER_ROLE_DECODE, worker_id="/"))


def test_ways_of_a_newer_version_are_left_out() -> None:
    assert from_transfer_ways([2, 99, 1]) == ("shm", "grpc")  # type: ignore[list-item]
    assert len(to_transfer_ways(["teleport", "grpc"])) == 1


def test_a_router_has_no_worker_role() -> None:
    assert to_worker_role(Role.ROUTER) == worker_pb2.WORKER_ROLE_UNSPECIFIED


def test_a_host_survives() -> None:
    host = HostIdentity(boot_id="b", ipc_namespace="ipc:[1]")
    assert host_from_pb(host_to_pb(host)) == host


def test_secrets_do_not_show_in_reprs() -> None:
    start = WorkerStart(
        context=RequestContext(session_key="hush"), generation=Generation(prompt_token_ids=[77777], cache_salt="hush")
    )
    assert "hush" not in repr(start) and "77777" not in repr(start)
    assert "ssss" not in repr(from_hand_off(some_hand_off()))


def over_the_wire(message: MessageT) -> MessageT:
    return type(message).FromString(message.SerializeToString())


def assert_context(rebuilt: RequestContext, context: RequestContext) -> None:
    assert rebuilt.timeout_s == (None if context.timeout_s is None else pytest.approx(context.timeout_s))
    assert replace(rebuilt, timeout_s=None) == replace(context, timeout_s=None)


def assert_hand_off(rebuilt: HandOff, hand_off: HandOff) -> None:
    assert rebuilt.time_to_live.total_seconds() == pytest.approx(hand_off.time_to_live.total_seconds(), abs=1e-5)
    assert replace(rebuilt, time_to_live=hand_off.time_to_live) == hand_off


def assert_media(rebuilt: Sequence[MediaInput], media: Sequence[MediaInput]) -> None:
    assert [item.media_id for item in rebuilt] == [item.media_id for item in media]
    for ours, theirs in zip(rebuilt, media, strict=True):
        if isinstance(ours.source, HandOff) and isinstance(theirs.source, HandOff):
            assert_hand_off(ours.source, theirs.source)
        else:
            assert ours.source == theirs.source
