"""RouterService over the wire, in front of real workers with a fake model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from quartet import errors
from quartet.discovery.create import create_registry
from quartet.rpc.errors import from_rpc_error
from quartet.v1 import router_pb2 as pb
from quartet.v1 import types_pb2
from tests.router.system import TIMEOUT_S, Stub, System, expected, running_system

PROMPT = list(range(20, 40))


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[System, Stub]]:
    async with running_system(tmp_path, monkeypatch, "prefill-0", "decode-0") as system:
        yield system


def make_start(**changes: object) -> pb.GenerateStart:
    fields = {"token_ids": pb.TokenIds(ids=PROMPT), "sampling": types_pb2.Sampling(max_tokens=12), **changes}
    if "text" in changes or "chat" in changes:
        del fields["token_ids"]
    return pb.GenerateStart(**fields)


async def generate(stub: Stub, start: pb.GenerateStart, resume: pb.Resume | None = None) -> list[pb.GenerateResponse]:
    async def requests() -> AsyncIterator[pb.GenerateRequest]:
        yield pb.GenerateRequest(start=start, resume=resume)

    async with asyncio.timeout(TIMEOUT_S):
        return [response async for response in stub.Generate(requests())]


async def read_all(call: grpc.aio.StreamStreamCall) -> list[pb.GenerateResponse]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


def token_ids_of(responses: list[pb.GenerateResponse], choice: int = 0) -> list[int]:
    deltas = [response.delta for response in responses if response.HasField("delta")]
    return [token_id for delta in deltas if delta.choice == choice for token_id in delta.token_ids]


async def fails(
    stub: Stub, start: pb.GenerateStart, resume: pb.Resume | None = None
) -> tuple[grpc.StatusCode, errors.ServingError]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, start, resume)
    return caught.value.code(), from_rpc_error(caught.value)


async def test_a_prompt_goes_in_and_tokens_come_out(served: tuple[System, Stub]) -> None:
    system, stub = served
    responses = await generate(stub, make_start(seed=3))
    accepted = responses[0].accepted
    assert (accepted.num_prompt_tokens, accepted.seed, len(accepted.request_id)) == (20, 3, 32)
    assert accepted.choices[0].prefill.worker_id == "prefill-0"
    assert accepted.choices[0].decode.worker_id == "decode-0"
    assert token_ids_of(responses) == expected(PROMPT, 12)
    finished = responses[-1].finished
    assert (finished.reason, finished.usage.num_output_tokens) == (types_pb2.FINISH_REASON_LENGTH, 12)
    assert finished.time.transfer.ToNanoseconds() > 0
    await system.wait_idle()


async def test_a_decode_worker_that_no_transfer_reaches_announces_no_way_and_prefills_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("prefill-0", "decode-0")
    async with running_system(tmp_path, monkeypatch, *names, unreachable=["decode-0"]) as (system, stub):
        registry = create_registry(system.discovery)
        ways = {record.worker_id: record.transfer_ways for record in await registry.workers()}
        await registry.close()
        assert ways == {"prefill-0": ("shm", "grpc"), "decode-0": ()}
        responses = await generate(stub, make_start(seed=3))
        assert token_ids_of(responses) == expected(PROMPT, 12)
        assert responses[-1].finished.usage.num_attempts == 2
        await system.wait_idle()


async def test_a_malformed_trace_context_fails_no_request(served: tuple[System, Stub]) -> None:
    _, stub = served
    call = stub.Generate(metadata=(("traceparent", "0" * 300),))
    async with asyncio.timeout(TIMEOUT_S):
        await call.write(pb.GenerateRequest(start=make_start()))
        await call.done_writing()
        assert token_ids_of(await read_all(call)) == expected(PROMPT, 12)


async def test_half_closing_and_keeping_open_are_the_same(served: tuple[System, Stub]) -> None:
    _system, stub = served
    call = stub.Generate()
    await call.write(pb.GenerateRequest(start=make_start()))
    async with asyncio.timeout(TIMEOUT_S):
        responses = [response async for response in call]
    assert token_ids_of(responses) == expected(PROMPT, 12)
    assert await call.code() == grpc.StatusCode.OK


def make_resume(first: pb.Accepted, token_ids: list[int], **changes: object) -> pb.Resume:
    fields = {
        "request_id": first.request_id,
        "attempt": 1_000_000,
        "seed": first.seed,
        "model_fingerprint": first.model_fingerprint,
        "generated_token_ids": pb.TokenIds(ids=token_ids),
        **changes,
    }
    return pb.Resume(**fields)


@pytest.mark.parametrize("part", ["nothing", "some", "all"])
async def test_one_choice_of_a_request_is_resumed_after_what_was_shown(served: tuple[System, Stub], part: str) -> None:
    system, stub = served
    start = make_start(num_choices=2)
    whole = await generate(stub, start)
    deltas = [response.delta for response in whole if response.HasField("delta") and response.delta.choice == 1]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    text = "".join(delta.text for delta in deltas)
    shown = deltas[: {"nothing": 0, "some": 2, "all": len(deltas)}[part]]
    shown_ids = [token_id for delta in shown for token_id in delta.token_ids]
    shown_text = "".join(delta.text for delta in shown)
    resume = make_resume(whole[0].accepted, shown_ids, choice=1, num_text_bytes=len(shown_text.encode()))
    rest = await generate(stub, start, resume)
    accepted, finished = rest[0].accepted, rest[-1].finished
    assert (accepted.request_id, accepted.seed) == (whole[0].accepted.request_id, whole[0].accepted.seed)
    assert {response.delta.choice for response in rest if response.HasField("delta")} <= {1}
    assert shown_ids + token_ids_of(rest, 1) == token_ids
    assert shown_text + "".join(response.delta.text for response in rest) == text
    assert (finished.choice, finished.usage.num_output_tokens) == (1, 12)
    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    await system.wait_idle()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": "mine"}, "resume.request_id"),
        ({"attempt": 0}, "resume.attempt"),
        ({"attempt": 2**32 - 1}, "resume.attempt"),
        ({"choice": 1}, "resume.choice"),
        ({"generated_token_ids": pb.TokenIds(ids=[2**32 - 1])}, "resume.generated_token_ids"),
        ({"generated_token_ids": pb.TokenIds(ids=[1] * 5000)}, "resume.generated_token_ids"),
    ],
)
async def test_a_resume_that_no_router_can_have_begun_is_refused_and_the_router_serves_on(
    served: tuple[System, Stub], changes: dict[str, object], field: str
) -> None:
    system, stub = served
    [first, *_rest] = await generate(stub, make_start())
    code, error = await fails(stub, make_start(), make_resume(first.accepted, [], **changes))
    assert (code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert token_ids_of(await generate(stub, make_start())) == expected(PROMPT, 12)
    await system.wait_idle()


async def test_tokens_that_a_client_brings_count_for_max_tokens(served: tuple[System, Stub]) -> None:
    system, stub = served
    [first, *_rest] = await generate(stub, make_start())
    responses = await generate(stub, make_start(), make_resume(first.accepted, [7] * 40, num_text_bytes=2**60))
    assert token_ids_of(responses) == []
    assert responses[-1].finished.reason == types_pb2.FINISH_REASON_LENGTH
    await system.wait_idle()


async def test_text_and_chats_are_tokenized(served: tuple[System, Stub]) -> None:
    _system, stub = served
    text = await generate(stub, make_start(text="The quick brown fox"))
    assert 0 < text[0].accepted.num_prompt_tokens < 20
    assert "".join(response.delta.text for response in text)
    messages = [
        pb.ChatMessage(role="user", content="The fox"),
        pb.ChatMessage(role="bot", parts=[pb.ContentPart(text="The "), pb.ContentPart(text="dog")]),
    ]
    chat = await generate(stub, make_start(chat=pb.ChatPrompt(messages=messages)))
    assert chat[-1].finished.usage.num_output_tokens == 12
    without = pb.ChatPrompt(messages=messages, add_generation_prompt=False)
    shorter = await generate(stub, make_start(chat=without))
    assert shorter[0].accepted.num_prompt_tokens < chat[0].accepted.num_prompt_tokens


async def test_chats_are_laid_out_by_the_routers_custom_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "custom.jinja"
    file.write_text("{{ messages[0].content }}")
    async with running_system(tmp_path, monkeypatch, "decode-0", custom_chat_template=file) as (_system, stub):
        text = await generate(stub, make_start(text="The quick brown fox"))
        messages = [pb.ChatMessage(role="user", content="The quick brown fox")]
        chat = await generate(stub, make_start(chat=pb.ChatPrompt(messages=messages)))
    # A prompt of text has the beginning's token before it; a template writes it by itself, or, as this one, does not.
    assert chat[0].accepted.num_prompt_tokens == text[0].accepted.num_prompt_tokens - 1


async def test_choices_and_logprobs_cross_the_wire(served: tuple[System, Stub]) -> None:
    _system, stub = served
    start = make_start(num_choices=3, output=types_pb2.OutputOptions(logprobs=0))
    responses = await generate(stub, start)
    for choice in range(3):
        assert token_ids_of(responses, choice) == expected(PROMPT, 12, choice=choice)
    logprobs = [entry.token_id for r in responses for entry in r.delta.logprobs if r.delta.choice == 1]
    assert logprobs == expected(PROMPT, 12)
    assert sum(response.HasField("finished") for response in responses) == 3


async def test_cancel_ends_every_choice_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system(tmp_path, monkeypatch, "decode-0", gated=("decode-0",)) as (system, stub):
        call = stub.Generate()
        await call.write(pb.GenerateRequest(start=make_start(num_choices=2)))
        async with asyncio.timeout(TIMEOUT_S):
            assert (await call.read()).HasField("accepted")
            await call.write(pb.GenerateRequest(cancel=types_pb2.Cancel()))
            responses = await read_all(call)
        system.gates["decode-0"].release(1000)
        assert await call.code() == grpc.StatusCode.OK
        reasons = [response.finished.reason for response in responses if response.HasField("finished")]
        assert reasons == [types_pb2.FINISH_REASON_CANCELLED] * 2
        await system.wait_idle()


async def test_a_client_that_drops_frees_all_it_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system(tmp_path, monkeypatch, "prefill-0", "decode-0", gated=("decode-0",)) as (system, stub):
        call = stub.Generate()
        await call.write(pb.GenerateRequest(start=make_start()))
        async with asyncio.timeout(TIMEOUT_S):
            await call.read()
            assert list((await call.read()).delta.token_ids) == expected(PROMPT, 1)
        call.cancel()
        system.gates["decode-0"].release(1000)
        await system.wait_idle()


async def test_a_request_goes_where_explain_says_with_what_is_cached_there(served: tuple[System, Stub]) -> None:
    system, stub = served
    num_matched = []
    for _ in range(2):
        explained = await stub.Explain(pb.ExplainRequest(start=make_start(num_choices=3)))
        assert (explained.policy, explained.model, explained.num_prompt_tokens) == ("least_loaded", "tiny", len(PROMPT))
        options = {option.rank.worker_id: option for option in explained.options if option.is_chosen}
        [placement] = (await generate(stub, make_start()))[0].accepted.choices
        assert options.keys() == {placement.prefill.worker_id, placement.decode.worker_id}
        option = options[placement.prefill.worker_id]
        assert (placement.num_matched_tokens, placement.cost) == (option.num_matched_tokens, option.cost)
        assert placement.HasField("cost")
        num_matched.append(placement.num_matched_tokens)
        await system.wait_idle()  # so that nothing is reported between the next two
    # What the first one was sent to is expected to be there still.
    assert num_matched == [0, len(PROMPT)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Explain(pb.ExplainRequest())
    assert from_rpc_error(caught.value).field == "start"


_BAD_STARTS = [
    (pb.GenerateStart(), "prompt"),
    (make_start(text=""), "text"),
    (make_start(chat=pb.ChatPrompt()), "chat.messages"),
    (make_start(chat=pb.ChatPrompt(messages=[pb.ChatMessage(content="hi")])), "chat.messages[0].role"),
    (make_start(token_ids=pb.TokenIds()), "token_ids.ids"),
    (make_start(token_ids=pb.TokenIds(ids=[1, 2**32 - 1])), "token_ids.ids"),
    (make_start(token_ids=pb.TokenIds(ids=[1] * 200)), "token_ids.ids"),
    (make_start(text="fox " * 10_000), "text"),
    (make_start(sampling=types_pb2.Sampling(max_tokens=181)), "sampling.max_tokens"),
    (make_start(sampling=types_pb2.Sampling(max_tokens=0)), "sampling.max_tokens"),
    (make_start(sampling=types_pb2.Sampling(temperature=-1)), "sampling.temperature"),
    (make_start(sampling=types_pb2.Sampling(temperature=float("nan"))), "sampling.temperature"),
    (make_start(sampling=types_pb2.Sampling(top_p=0)), "sampling.top_p"),
    (make_start(sampling=types_pb2.Sampling(min_p=2)), "sampling.min_p"),
    (make_start(sampling=types_pb2.Sampling(repetition_penalty=0)), "sampling.repetition_penalty"),
    (make_start(sampling=types_pb2.Sampling(presence_penalty=3)), "sampling.presence_penalty"),
    (make_start(sampling=types_pb2.Sampling(frequency_penalty=-3)), "sampling.frequency_penalty"),
    (make_start(sampling=types_pb2.Sampling(min_tokens=5, max_tokens=4)), "sampling.min_tokens"),
    (make_start(sampling=types_pb2.Sampling(logit_bias={1: 101})), "sampling.logit_bias"),
    (make_start(sampling=types_pb2.Sampling(logit_bias={2**31: 1})), "sampling.logit_bias"),
    (make_start(sampling=types_pb2.Sampling(stop_token_ids=[2**31])), "sampling.stop_token_ids"),
    (
        make_start(sampling=types_pb2.Sampling(guided=types_pb2.GuidedDecoding(regex="a"))),
        "sampling.guided",
    ),
    (make_start(output=types_pb2.OutputOptions(logprobs=21)), "output.logprobs"),
    (make_start(adapter="lora"), "adapter"),
    (make_start(media=[pb.MediaPart(url="data:,a")]), "media[0]"),
    (make_start(num_choices=0), "num_choices"),
    (make_start(num_choices=65), "num_choices"),
    (make_start(timeout=Duration(seconds=0)), "timeout"),
    (make_start(timeout=Duration(seconds=-5)), "timeout"),
    (make_start(client_request_id="x" * 129), "client_request_id"),
    (make_start(text_options=pb.TextOptions(stop_strings=["x"] * 17)), "text_options.stop_strings"),
    (make_start(text_options=pb.TextOptions(stop_strings=["x" * 1025])), "text_options.stop_strings"),
    (make_start(text_options=pb.TextOptions(stop_strings=["x"], omit_text=True)), "text_options.omit_text"),
]


async def test_every_bad_request_is_refused_by_field_and_the_router_serves_on(served: tuple[System, Stub]) -> None:
    system, stub = served
    for start, field in _BAD_STARTS:
        code, error = await fails(stub, start)
        assert (code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field), str(start)
    code, error = await fails(stub, make_start(model="none"))
    assert (code, error.field) == (grpc.StatusCode.NOT_FOUND, "model")
    assert all(runner.num_steps == 0 for runner in system.runners.values())
    assert token_ids_of(await generate(stub, make_start())) == expected(PROMPT, 12)


async def test_messages_in_a_wrong_order_are_refused_and_the_router_serves_on(served: tuple[System, Stub]) -> None:
    _system, stub = served
    start = pb.GenerateRequest(start=make_start(sampling=types_pb2.Sampling(max_tokens=150)))
    orders = [[], [pb.GenerateRequest(cancel=types_pb2.Cancel())], [pb.GenerateRequest()], [start, start]]
    for messages in orders:
        call = stub.Generate()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(TIMEOUT_S):
                for message in messages:
                    await call.write(message)
                if not messages:
                    await call.done_writing()
                async for _ in call:
                    pass
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert token_ids_of(await generate(stub, make_start())) == expected(PROMPT, 12)


async def test_malformed_messages_are_refused_and_the_router_serves_on(served: tuple[System, Stub]) -> None:
    system, stub = served
    whole = pb.GenerateRequest(start=make_start()).SerializeToString()
    async with grpc.aio.insecure_channel(system.address) as channel:
        method = channel.stream_stream("/quartet.v1.RouterService/Generate")
        for length in range(1, len(whole)):
            call = method()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with asyncio.timeout(TIMEOUT_S):
                    await call.write(whole[:length])
                    await call.done_writing()
                    async for _ in call:
                        pass
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert token_ids_of(await generate(stub, make_start())) == expected(PROMPT, 12)


async def test_a_late_request_is_deadline_exceeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system(tmp_path, monkeypatch, "decode-0", gated=("decode-0",)) as (system, stub):
        code, error = await fails(stub, make_start(timeout=Duration(nanos=50_000_000)))
        assert (code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "TIMEOUT")
        system.gates["decode-0"].release(1000)
        await system.wait_idle()


async def test_workers_and_models_are_listed(served: tuple[System, Stub]) -> None:
    _system, stub = served
    workers = (await stub.ListWorkers(pb.ListWorkersRequest())).workers
    assert [status.record.worker_id for status in workers] == ["decode-0", "prefill-0"]
    assert all(status.state == pb.WORKER_STATE_READY and status.HasField("load") for status in workers)
    assert not (await stub.ListWorkers(pb.ListWorkersRequest(model="none"))).workers
    await generate(stub, make_start(text="fox"))
    [model] = (await stub.GetModel(pb.GetModelRequest())).models
    assert (model.name, model.num_prefill_workers, model.num_decode_workers) == ("tiny", 1, 1)
    assert model.has_chat_template
    assert "top_p" in model.sampling_fields
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetModel(pb.GetModelRequest(name="none"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_message_that_holds_too_much_is_refused_before_it_is_parsed(served: tuple[System, Stub]) -> None:
    system, stub = served
    empty = pb.GenerateStart(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user")] * 50_000))
    code, error = await fails(stub, empty)
    assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MESSAGE_TOO_LARGE")
    # 200 tokens and the other fields have less text than this; a model with another length would have room.
    code, error = await fails(stub, make_start(text="a" * 500_000))
    assert (code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MESSAGE_TOO_LARGE")
    # A file is no text.
    url = pb.MediaPart(url="data:," + "a" * 500_000)
    code, error = await fails(stub, make_start(media=[url]))
    assert error.reason == "UNSUPPORTED_FIELD"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Explain(pb.ExplainRequest(start=empty))
    assert from_rpc_error(caught.value).reason == "MESSAGE_TOO_LARGE"
    await system.wait_idle()


async def test_a_stream_without_a_start_ends_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system(tmp_path, monkeypatch, stall_timeout_s=0.1) as (_system, stub):
        async with asyncio.timeout(TIMEOUT_S):
            codes = await asyncio.gather(
                *(call.code() for call in (*(stub.Generate() for _ in range(50)), stub.Session()))
            )
    assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
