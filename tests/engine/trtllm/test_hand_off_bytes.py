"""A hand-off's way through bytes, and what is made of bytes that are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quartet.engine.trtllm.hand_off import CacheIdentity, PromptState
from quartet.engine.trtllm.package import Package
from quartet.errors import EngineError, InvalidRequestError, LayoutMismatchError
from tests.engine.trtllm.engines import stand_in

CACHE = CacheIdentity(model_fingerprint="f" * 64, block_size=32)
ALL_BYTES = bytes(range(256)) + b"\0\0\xff"


def state_of(**fields: Any) -> PromptState:
    return PromptState(cache=CACHE, num_tokens=7, fields=fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"first_gen_tokens": [5], "ctx_request_id": 2**63 - 1, "opaque_state": ALL_BYTES},
        {"first_gen_tokens": [5], "ctx_request_id": 1, "opaque_state": b"", "draft_tokens": [1, 2]},
        {
            "opaque_state": ALL_BYTES,
            "mrope_position_ids_handle": {"storage_handle": b"\0h\xff", "tensor_size": (3, 1), "storage_device": 0},
            "mrope_position_deltas_handle": {"event_handle": b"\x80", "requires_grad": False, "nothing": None},
        },
    ],
)
def test_every_byte_and_type_comes_back(fields: dict[str, Any]) -> None:
    state = state_of(**fields)
    back = PromptState.from_bytes(state.to_bytes())
    assert back == state
    assert back.fields["opaque_state"] == fields["opaque_state"]


def test_types_of_tensors_come_back_and_what_is_no_plain_data_is_refused() -> None:
    state = state_of(mrope_position_ids_handle={"dtype": torch.int64})
    assert PromptState.from_bytes(state.to_bytes()) == state
    with pytest.raises(InvalidRequestError):
        PromptState.from_bytes(state.to_bytes().replace(b'"int64"', b'"nn"   '))
    with pytest.raises(EngineError, match="a object"):
        state_of(mrope_position_ids_handle={"dtype": object()}).to_bytes()


def test_bytes_that_nothing_made_are_refused_by_their_field() -> None:
    whole = state_of(first_gen_tokens=[5], opaque_state=ALL_BYTES).to_bytes()
    for broken in (b"", whole[:1], whole[:5], whole[:20], whole[:-1], b"\1\xff\xff\xff\xff{}", b"\1\2\0\0\0{}"):
        with pytest.raises(InvalidRequestError) as caught:
            PromptState.from_bytes(broken)
        assert caught.value.field == "hand_off"


@pytest.mark.parametrize(
    ("ours", "theirs", "differs"),
    [
        ({"backend": "NIXL"}, {"backend": "UCX"}, "backend UCX, here it is NIXL"),
        ({"backend": "NIXL"}, {"backend": "nixl"}, None),
        ({"backend": "DEFAULT"}, {"backend": "UCX"}, None),
        ({"backend": "NIXL"}, {"backend": None}, None),
        ({"backend": "NIXL"}, None, None),
        ({"backend": "NIXL", "transceiver_runtime": "CPP"}, {"backend": "NIXL", "transceiver_runtime": "auto"}, None),
        (
            {"backend": "NIXL", "transceiver_runtime": "CPP"},
            {"backend": "NIXL", "transceiver_runtime": "PYTHON"},
            "transceiver_runtime PYTHON, here it is CPP",
        ),
    ],
)
def test_transceivers_must_be_the_same_where_both_are_known(ours: Any, theirs: Any, differs: str | None) -> None:
    here, there = (CacheIdentity.of_arguments("f" * 64, 32, config) for config in (ours, theirs))
    sent = PromptState(cache=there, num_tokens=7, fields={"opaque_state": b""}).to_bytes()
    came = PromptState.from_bytes(sent)
    assert came.cache == there
    said = None if differs is None else f"the hand-off goes by cache_transceiver_config.{differs}"
    assert here.refusal_of(came.cache) == said


def test_a_hand_off_of_before_names_no_transceiver_and_is_taken() -> None:
    state = state_of(opaque_state=b"")
    assert PromptState.from_bytes(state.to_bytes().replace(b'"transceiver"', b'"was-unknown"')) == state
    with pytest.raises(InvalidRequestError):
        PromptState.from_bytes(state.to_bytes().replace(b'"transceiver":{}', b'"transceiver":[1]'[:-3] + b"17"))


def test_another_version_is_a_mismatch_and_no_failure() -> None:
    with pytest.raises(LayoutMismatchError):
        PromptState.from_bytes(b"\2" + state_of().to_bytes()[1:])


@pytest.mark.parametrize("has_field", [False, True])
def test_a_field_that_this_release_lacks_is_left_out(has_field: bool) -> None:
    with stand_in(disagg_request_id=has_field):
        params = state_of(first_gen_tokens=[5], ctx_request_id=1, opaque_state=b"s", disagg_request_id=9).params(
            Package()
        )
    assert (params.request_type, params.first_gen_tokens, params.opaque_state) == ("generation_only", [5], b"s")
    assert getattr(params, "disagg_request_id", None) == (9 if has_field else None)


def test_fields_for_prefill_alone_are_not_carried() -> None:
    with stand_in():
        given = Package().DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=[5],
            ctx_request_id=1,
            opaque_state=b"s",
            multimodal_embedding_handles=[{}],
            multimodal_hashes=[[1] * 8],
        )
        state = PromptState.of(given, CACHE, 3)
    assert dict(state.fields) == {"first_gen_tokens": [5], "ctx_request_id": 1, "opaque_state": b"s"}
    assert state.first_token_id == 5
    assert PromptState(cache=CACHE, num_tokens=1, fields={}).first_token_id is None


def test_log_probabilities_are_carried_as_lists_and_logits_are_not() -> None:
    with stand_in(version="1.4.0rc1"):
        package = Package()
        logprobs = [{5: package.Logprob(-0.5, 1), 7: package.Logprob(-1.5, None)}]
        given = package.DisaggregatedParams(
            first_gen_tokens=[5], ctx_request_id=1, opaque_state=b"s", first_gen_log_probs=logprobs
        )
        given.first_gen_logits = [torch.zeros(1, 9)]
        state = PromptState.from_bytes(PromptState.of(given, CACHE, 3).to_bytes())
        assert state.fields["first_gen_log_probs"] == [{"top": [[5, -0.5, 1], [7, -1.5, None]]}]
        assert "first_gen_logits" not in state.fields
        assert state.params(package).first_gen_log_probs == logprobs
        each_beam = state_of(first_gen_log_probs=[[{"top": [[5, -0.5, 1]]}, -0.25]]).params(package)
        assert each_beam.first_gen_log_probs == [[{5: package.Logprob(-0.5, 1)}, -0.25]]


def test_a_state_s_bytes_are_in_no_log() -> None:
    assert "secret" not in repr(state_of(opaque_state=b"secret"))
