"""An encode worker's encoder proves that it works, before all pictures and between them; it says when it does not."""

from __future__ import annotations

import asyncio
import base64
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from quartet.engine.trtllm import pictures
from quartet.engine.trtllm.pictures import drop
from quartet.engine.trtllm.times import TrtllmTimes
from quartet.errors import EngineError, WorkerUnavailableError
from tests.engine.trtllm.media import WAIT_S, kept, running_encoder
from tests.engine.trtllm.test_media_encoder import tower, until
from tests.fakes.conftest import stand_in  # noqa: F401 - a fixture
from tests.fakes.driving import picture
from tests.fakes.installation import installed

QUIET = TrtllmTimes(canary_interval_s=3_600.0, check_interval_s=0.01, close_timeout_s=0.1)
SHORT = replace(QUIET, canary_interval_s=0.01)


async def test_it_has_encoded_a_picture_before_it_is_ready() -> None:
    async with running_encoder(QUIET) as encoder:
        [call] = tower().calls
        assert call.arguments["inputs"]["multi_modal_data"]["image"][0].size == (224, 224)
        await until(lambda: tower().num_held == 0)
        assert encoder.stats().num_items == 0, "it is no request's"


@pytest.mark.parametrize("is_heeded", [True, False])
async def test_an_encoder_whose_first_picture_does_not_come_is_not_started(
    is_heeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(result_timeout_works=is_heeded) as package:
        control, encoder_class = package._stand_in.control.control, package.MultimodalEncoder._engine_class
        make = encoder_class.__init__

        def make_held(held: Any, *given: Any) -> None:
            make(held, *given)
            held.steps.close()

        monkeypatch.setattr(encoder_class, "__init__", make_held)
        control.loads.close()
        starting = asyncio.create_task(_start(replace(QUIET, warm_up_timeout_s=0.05)))
        await asyncio.to_thread(control.loads.wait_reached)
        assert not starting.done(), "a load takes as long as it takes"
        control.loads.open()
        with pytest.raises(EngineError):
            await starting
        control.reset()


async def _start(times: TrtllmTimes) -> None:
    async with running_encoder(times):
        pass


@pytest.mark.parametrize("is_heeded", [True, False])
async def test_an_encoder_that_hangs_on_a_blank_picture_is_not_alive(is_heeded: bool) -> None:
    with installed(result_timeout_works=is_heeded) as package:
        async with running_encoder(replace(SHORT, canary_timeout_s=0.05)) as encoder:
            assert encoder.is_alive
            held = package._stand_in.control.control.engines[-1]
            held.steps.close()
            await until(lambda: not encoder.is_alive)
            with pytest.raises(EngineError):
                await kept(encoder, 1, picture())
            held.steps.open()


@pytest.mark.parametrize("is_heeded", [True, False])
async def test_an_encoder_that_hangs_on_pictures_is_not_alive(is_heeded: bool) -> None:
    with installed(result_timeout_works=is_heeded) as package:
        async with running_encoder(replace(QUIET, encode_timeout_s=0.05)) as encoder:
            held = package._stand_in.control.control.engines[-1]
            held.steps.close()
            waiting = asyncio.create_task(kept(encoder, 1, picture()))
            await until(lambda: not encoder.is_alive)
            async with asyncio.timeout(WAIT_S):
                await encoder.close()
            held.steps.open()
            with pytest.raises((EngineError, WorkerUnavailableError)):
                await waiting


async def test_an_idle_encoder_is_probed_again_and_again_and_keeps_no_item() -> None:
    async with running_encoder(SHORT) as encoder:
        await until(lambda: len(tower().calls) >= 4)
        tower().fail_next_request("what a stranger wrote")
        num_calls = len(tower().calls)
        await until(lambda: len(tower().calls) >= num_calls + 3)
        await kept(encoder, 1, picture())
        assert encoder.is_alive
        assert encoder.stats().num_items == 1
        await until(lambda: tower().num_held == 1)


async def test_a_rank_that_died_ends_an_encoder_that_has_nothing_to_do() -> None:
    async with running_encoder(QUIET) as encoder:
        tower().lose_rank()
        await until(lambda: not encoder.is_alive)


async def test_an_unreadable_handle_fails_only_its_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_encoder(QUIET) as encoder:
        with monkeypatch.context() as patched:
            patched.setattr(pictures, "read_handle", _unreadable)
            with pytest.raises(EngineError, match="could not be read: KeyError"):
                await kept(encoder, 1, picture())
        await kept(encoder, 2, picture())
        assert encoder.is_alive


@pytest.mark.parametrize("error", [AssertionError(), NotImplementedError("Only one mm_handle"), IndexError()], ids=repr)
async def test_a_result_that_contradicts_itself_fails_only_its_picture(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    async with running_encoder(QUIET) as encoder:
        with monkeypatch.context() as patched:
            patched.setattr(pictures.EncoderThread, "_result", fail)
            with pytest.raises(EngineError, match="could not encode the picture"):
                await kept(encoder, 1, picture())
        await kept(encoder, 2, picture())
        assert encoder.is_alive


async def test_the_packages_messages_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running_encoder(QUIET) as encoder:
        tower().fail_next_request("what a stranger wrote")
        with pytest.raises(EngineError):
            await kept(encoder, 1, picture())
        tower().steps.close()
        waiting = asyncio.create_task(kept(encoder, 2, picture()))
        await until(lambda: encoder.stats().num_running == 1)
        tower().die(RuntimeError("what a stranger wrote"))
        tower().steps.open()
        with pytest.raises(EngineError):
            await waiting
        await until(lambda: not encoder.is_alive)
    assert "TensorRT-LLM broke" in caplog.text
    assert "stranger" not in caplog.text


def test_a_handle_that_no_worker_takes_is_counted_down_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.UntypedStorage, "_release_ipc_counter", lambda *given, device: released.append((*given, device))
    )
    handle = {
        "ref_counter_handle": base64.b64encode(b"/counter").decode(),
        "ref_counter_offset": 3,
        "storage_device": 1,
    }
    drop(handle)
    assert released == [(b"/counter", 3, 1)]
    drop({})
    assert len(released) == 1


def _unreadable(_result: object) -> None:
    raise KeyError("what a stranger wrote")
