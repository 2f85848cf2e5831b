"""What a failed attempt means for the next one."""

from __future__ import annotations

import pytest

from quartet.client.direct import MAX_ATTEMPTS, Retries
from quartet.client.routers import ClientClosedError
from quartet.errors import (
    InvalidRequestError,
    NoSigningKeyError,
    OutOfBlocksError,
    PermissionDeniedError,
    QueueFullError,
    RateLimitedError,
    RouterUnavailableError,
    ServingError,
    SignedStartError,
    SignedStartUsedError,
    StalledStreamError,
    UnauthenticatedError,
    WorkerUnavailableError,
)


def test_the_first_move_elsewhere_is_free_and_later_ones_wait_longer_and_longer() -> None:
    retries = Retries()
    pauses = [retries.note(WorkerUnavailableError("gone")) for _ in range(MAX_ATTEMPTS - 1)]
    assert pauses[0] == 0
    assert pauses == sorted(set(pauses)) and pauses[-1] <= 1
    with pytest.raises(WorkerUnavailableError):
        retries.note(WorkerUnavailableError("gone"))


def test_a_worker_that_is_full_says_how_long_to_wait() -> None:
    assert Retries().note(OutOfBlocksError("full", retry_delay_s=0.5)) == 0.5
    assert Retries().note(OutOfBlocksError("full", retry_delay_s=60)) == 1.0
    assert Retries().note(OutOfBlocksError("full")) > 0


@pytest.mark.parametrize(
    "kind",
    [
        InvalidRequestError,
        SignedStartError,
        NoSigningKeyError,
        StalledStreamError,
        PermissionDeniedError,
        UnauthenticatedError,
    ],
)
def test_an_error_that_another_placement_does_not_mend_is_final(kind: type[ServingError]) -> None:
    with pytest.raises(kind):
        Retries().note(kind("no"))


def test_a_refused_signed_start_is_worth_another_placement() -> None:
    assert Retries().note(SignedStartUsedError("again")) == 0


@pytest.mark.parametrize("kind", [QueueFullError, RateLimitedError])
def test_a_router_that_has_no_room_for_an_answers_rest_is_asked_again_when_it_says(kind: type[ServingError]) -> None:
    retries = Retries()
    assert retries.note_refusal(kind("full", retry_delay_s=2.5)) == 2.5
    assert retries.note_refusal(kind("full", retry_delay_s=600)) == 5.0


def test_a_router_that_restarts_is_given_the_seconds_that_it_needs() -> None:
    retries = Retries()
    assert retries.note(WorkerUnavailableError("gone")) == 0
    pauses = [retries.note_refusal(RouterUnavailableError("refused")) for _ in range(MAX_ATTEMPTS - 2)]
    assert pauses == sorted(set(pauses)) and sum(pauses) > 5
    with pytest.raises(RouterUnavailableError):
        retries.note_refusal(RouterUnavailableError("refused"))


@pytest.mark.parametrize("error", [PermissionDeniedError("no"), InvalidRequestError("no"), ClientClosedError()])
def test_a_routers_refusal_that_a_retry_does_not_change_is_final(error: ServingError) -> None:
    with pytest.raises(type(error)):
        Retries().note_refusal(error)
