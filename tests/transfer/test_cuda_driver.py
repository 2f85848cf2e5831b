"""The layer over cuda.bindings, with a stand-in for that package: what is passed, and how failures are named."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from quartet.transfer.cuda.driver import CudaDriver, CudaError
from quartet.transfer.cuda.survey import CudaSurveyDriver


class _Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600


def _bindings(**functions: object) -> SimpleNamespace:
    return SimpleNamespace(
        CUresult=_Result,
        CUstream_flags=SimpleNamespace(CU_STREAM_NON_BLOCKING=1),
        CUevent_flags=SimpleNamespace(CU_EVENT_BLOCKING_SYNC=1, CU_EVENT_DISABLE_TIMING=2),
        cuGetErrorName=lambda status: (_Result.CUDA_SUCCESS, _Result(status).name.encode()),
        cuGetErrorString=lambda _status: (_Result.CUDA_SUCCESS, b"out of memory"),
        **{"cuInit": lambda _flags: (_Result.CUDA_SUCCESS,), **functions},
    )


def _install(monkeypatch: pytest.MonkeyPatch, driver: object) -> None:
    package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


def test_a_failure_has_the_driver_s_name_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, _bindings(cuMemAlloc=lambda _size: (_Result.CUDA_ERROR_OUT_OF_MEMORY, None)))
    with pytest.raises(CudaError) as raised:
        CudaDriver().allocate(1 << 40)
    assert (raised.value.call, raised.value.name) == ("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
    assert str(raised.value) == "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (out of memory)"


def test_a_machine_without_a_driver_or_the_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_flags: int) -> None:
        raise RuntimeError("no libcuda.so.1")

    _install(monkeypatch, _bindings(cuInit=missing))
    with pytest.raises(CudaError, match=r"no CUDA driver \(no libcuda.so.1\)"):
        CudaDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CudaError, match=r"quartet\[cuda\]"):
        CudaDriver()


def test_a_context_is_retained_once_and_made_each_caller_s(monkeypatch: pytest.MonkeyPatch) -> None:
    retained, current = [], []

    def retain(device: int) -> tuple[_Result, str]:
        retained.append(device)
        return _Result.CUDA_SUCCESS, f"context {device}"

    def set_current(context: str) -> tuple[_Result]:
        current.append(context)
        return (_Result.CUDA_SUCCESS,)

    get = lambda index: (_Result.CUDA_SUCCESS, 10 + index)  # noqa: E731
    _install(monkeypatch, _bindings(cuDeviceGet=get, cuDevicePrimaryCtxRetain=retain, cuCtxSetCurrent=set_current))
    driver = CudaDriver()
    for device in (1, 0, 1):
        driver.bind(device)
    assert retained == [11, 10]
    assert current == ["context 11", "context 10", "context 11"]


def test_streams_wait_for_no_other_and_waiters_of_events_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(
        monkeypatch,
        _bindings(
            cuStreamCreate=lambda flags: (_Result.CUDA_SUCCESS, 100 + flags),
            cuEventCreate=lambda flags: (_Result.CUDA_SUCCESS, 200 + flags),
        ),
    )
    driver = CudaDriver()
    assert (driver.create_stream(), driver.create_event()) == (101, 203)


def test_an_event_is_asked_whether_it_is_ready_and_streams_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [_Result.CUDA_ERROR_NOT_READY, _Result.CUDA_SUCCESS, _Result.CUDA_ERROR_OUT_OF_MEMORY]
    ordered = []

    def order(stream: int, event: int, flags: int) -> tuple[_Result]:
        ordered.append((stream, event, flags))
        return (_Result.CUDA_SUCCESS,)

    _install(monkeypatch, _bindings(cuEventQuery=lambda _event: (answers.pop(0),), cuStreamWaitEvent=order))
    driver = CudaDriver()
    assert [driver.is_ready(7), driver.is_ready(7)] == [False, True]
    with pytest.raises(CudaError, match="cuEventQuery"):
        driver.is_ready(7)
    driver.order(3, 7)
    assert ordered == [(3, 7, 0)]


def test_a_survey_names_gpus_and_says_which_reach_which(monkeypatch: pytest.MonkeyPatch) -> None:
    ok = _Result.CUDA_SUCCESS
    _install(
        monkeypatch,
        _bindings(
            cuDriverGetVersion=lambda: (ok, 13010),
            cuDeviceGetCount=lambda: (ok, 2),
            cuDeviceGet=lambda index: (ok, 10 + index),
            cuDeviceGetName=lambda size, device: (ok, f"GPU {device}".encode().ljust(size, b"\0")),
            cuDeviceTotalMem=lambda device: (ok, device << 30),
            cuDeviceCanAccessPeer=lambda here, there: (ok, int(here < there)),
        ),
    )
    driver = CudaSurveyDriver()
    assert (driver.cuda_version(), driver.num_devices()) == ((13, 1), 2)
    assert (driver.name(1), driver.total_size_bytes(1)) == ("GPU 11", 11 << 30)
    assert [driver.can_reach(0, 1), driver.can_reach(1, 0)] == [True, False]


def test_pinned_memory_is_asked_for_as_the_driver_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def take(name: str) -> Callable[..., tuple[object, ...]]:
        def call(*arguments: object) -> tuple[object, ...]:
            calls.append((name, *arguments))
            return (_Result.CUDA_SUCCESS, 900) if name == "cuMemHostAlloc" else (_Result.CUDA_SUCCESS,)

        return call

    both = ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync")
    names = ("cuMemHostAlloc", "cuMemFreeHost", "cuMemHostRegister", "cuMemHostUnregister", *both)
    _install(monkeypatch, _bindings(CU_MEMHOSTALLOC_WRITECOMBINED=4, **{name: take(name) for name in names}))
    driver = CudaDriver()
    assert driver.allocate_host(64, is_write_combined=True) == 900
    driver.allocate_host(64, is_write_combined=False)
    driver.free_host(900)
    driver.pin(100, 8)
    driver.unpin(100)
    driver.copy_to_host(1, 2, 3, 4)
    driver.copy_to_device(5, 6, 7, 8)
    assert calls == [
        ("cuMemHostAlloc", 64, 4),
        ("cuMemHostAlloc", 64, 0),
        ("cuMemFreeHost", 900),
        ("cuMemHostRegister", 100, 8, 0),
        ("cuMemHostUnregister", 100),
        ("cuMemcpyDtoHAsync", 1, 2, 3, 4),
        ("cuMemcpyHtoDAsync", 5, 6, 7, 8),
    ]


def test_an_architecture_is_the_compute_capability_without_its_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"
    values = {(major, 11): 12, (minor, 11): 1}
    _install(
        monkeypatch,
        _bindings(
            CUdevice_attribute=SimpleNamespace(**{major: major, minor: minor}),
            cuDeviceGet=lambda index: (_Result.CUDA_SUCCESS, 10 + index),
            cuDeviceGetAttribute=lambda name, device: (_Result.CUDA_SUCCESS, values[name, device]),
        ),
    )
    assert CudaDriver().architecture(1) == 121


class _Handle:
    """As the bindings' classes: an object that is a number too."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __int__(self) -> int:
        return self.number


def test_a_kernel_is_launched_with_its_arguments_and_zeros_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[object, ...]] = []
    unloaded: list[object] = []
    module, function = _Handle(7), _Handle(70)

    def launch(*arguments: object) -> tuple[_Result]:
        *shape, places, extra = arguments
        assert isinstance(places, int)
        pointers = ctypes.cast(places, ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)))
        launches.append((*shape, [pointers[number][0] for number in range(6)], extra))
        return (_Result.CUDA_SUCCESS,)

    def unload(found: object) -> tuple[_Result]:
        unloaded.append(found)
        return (_Result.CUDA_SUCCESS,)

    _install(
        monkeypatch,
        _bindings(
            cuModuleLoadData=lambda code: (_Result.CUDA_SUCCESS, {b"code": module}[code]),
            cuModuleGetFunction=lambda found, name: (_Result.CUDA_SUCCESS, {(module, b"pull"): function}[found, name]),
            cuLaunchKernel=launch,
            cuModuleUnload=unload,
        ),
    )
    driver = CudaDriver()
    kernel = driver.load(b"code", "pull")
    driver.launch(kernel, 32, 256, (1 << 40, 3), 5)
    assert launches == [(function, 32, 1, 1, 256, 1, 1, 0, 5, [1 << 40, 3, 0, 0, 0, 0], 0)]
    driver.unload(kernel)
    assert unloaded == [module]


def test_code_without_the_kernel_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    unloaded: list[object] = []
    _install(
        monkeypatch,
        _bindings(
            cuModuleLoadData=lambda _code: (_Result.CUDA_SUCCESS, 7),
            cuModuleGetFunction=lambda _module, _name: (_Result.CUDA_ERROR_OUT_OF_MEMORY, None),
            cuModuleUnload=lambda module: (unloaded.append(module), (_Result.CUDA_SUCCESS,))[1],
        ),
    )
    with pytest.raises(CudaError, match="cuModuleGetFunction"):
        CudaDriver().load(b"code", "pull")
    assert unloaded == [7]


class _Batches:
    """What the driver copies, by either call; ``status``: of copies of several at once; ``None``: it knows no such."""

    def __init__(self, status: _Result | None) -> None:
        self.status = status
        self.num_calls = 0
        self.copies: list[tuple[int, int, int, int]] = []
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._batch = ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 3, size, *[pointer] * 2, size, pointer)(self.batch)

    def bindings(self) -> SimpleNamespace:
        return _bindings(
            CUmemcpySrcAccessOrder=SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1),
            CUmemcpyFlags=SimpleNamespace(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE=2),
            cuGetProcAddress=self.find,
            cuMemcpyAsync=self.one,
        )

    def find(self, name: bytes, version: int, flags: int) -> tuple[object, ...]:
        assert (name, version, flags) == (b"cuMemcpyBatchAsync", 13000, 0)
        address = 0 if self.status is None else ctypes.cast(self._batch, ctypes.c_void_p).value
        return _Result.CUDA_SUCCESS, address, "status"

    def batch(self, targets, sources, sizes, count, attributes, first, num_attributes, stream):
        self.num_calls += 1
        if self.status is not _Result.CUDA_SUCCESS:
            return int(self.status)
        # The order, two locations of two numbers, the flags.
        assert [*(ctypes.c_uint32 * 6).from_address(attributes)] == [1, 0, 0, 0, 0, 2]
        assert (num_attributes, ctypes.c_size_t.from_address(first).value) == (1, 0)
        columns = [(ctypes.c_uint64 * count).from_address(column) for column in (targets, sources, sizes)]
        self.copies += [(*copy, stream) for copy in zip(*columns, strict=True)]
        return 0

    def one(self, target, source, size_bytes, stream):
        self.copies.append((target, source, size_bytes, stream))
        return (_Result.CUDA_SUCCESS,)


@pytest.mark.parametrize("status", [_Result.CUDA_SUCCESS, None, _Result.CUDA_ERROR_OUT_OF_MEMORY])
def test_several_copies_are_one_call_and_single_ones_where_the_driver_refuses_that(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: _Result | None
) -> None:
    batches = _Batches(status)
    _install(monkeypatch, batches.bindings())
    driver = CudaDriver()
    for _ in range(2):
        driver.copy_many(np.array([[1, 2, 3], [4, 1 << 62, 6]]), 7)
    assert batches.copies == 2 * [(2, 1, 3, 7), (1 << 62, 4, 6, 7)]
    num_refused = int(status is not _Result.CUDA_SUCCESS)
    assert batches.num_calls == {None: 0, _Result.CUDA_SUCCESS: 2}.get(status, 1)
    assert len(caplog.records) == num_refused
