"""A thin layer over the CUDA driver: what pools and copies need of it, by numbers and bytes, so that tests can fake it.

Devices are named by their index in this process. A device's primary context, which PyTorch uses too, is retained when
the device is first bound and kept until the process ends. Every call but ``bind`` and ``uuid`` needs a context bound to
the calling thread.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

#: What ``cuIpcGetMemHandle`` gives.
HANDLE_SIZE_BYTES = 64

UUID_SIZE_BYTES = 16

#: A driver reads as many arguments as the kernel has; compilers add some for memory that ours do not use.
_NUM_ZERO_ARGUMENTS = 4


#: ``[num_copies, 3]``: of each, where its bytes are, where they go, and how many they are.
Copies: TypeAlias = npt.NDArray[np.int64]

_NOT_READY = "CUDA_ERROR_NOT_READY"

#: The release of CUDA whose ``cuMemcpyBatchAsync`` takes the arguments below.
_BATCH_VERSION = 13000


class CudaError(Exception):
    """A call of the CUDA driver failed.

    Attributes:
        call: the function's name.
        name: the error's, such as ``CUDA_ERROR_OUT_OF_MEMORY``.
    """

    def __init__(self, call: str, name: str, text: str = "") -> None:
        """``text``: what the driver says of this error."""
        super().__init__(f"{call}: {name}" + (f" ({text})" if text else ""))
        self.call = call
        self.name = name


class Driver(Protocol):
    """What is used of the CUDA driver. Every method raises ``CudaError``; addresses are of this process.

    A copy has not happened when ``copy`` returns, and calls of one stream happen in order. An event is ready once all
    that its stream had to do at ``record`` is done.
    """

    def bind(self, device: int) -> None:
        """Make the primary context of ``device`` the calling thread's."""
        ...

    def uuid(self, device: int) -> bytes:
        """The 16 bytes that name a GPU in every process."""
        ...

    def architecture(self, device: int) -> int:
        """For which machine code a GPU runs: 90 for compute capability 9.0."""
        ...

    def allocate(self, size_bytes: int) -> int:
        """Reserve memory on the bound device; returns its address."""
        ...

    def free(self, address: int) -> None:
        """Give ``allocate``'s memory back. Another process's copies from it stay right until that closes it, too."""
        ...

    def export(self, address: int) -> bytes:
        """The 64 bytes by which another process opens what ``allocate`` gave."""
        ...

    def open(self, handle: bytes) -> int:
        """Map another process's memory where the bound device reads it; returns its address here."""
        ...

    def size_of(self, address: int) -> int | None:
        """Bytes of the memory that begins at ``address``; ``None``: the driver does not know."""
        ...

    def close(self, address: int) -> None:
        """Unmap what ``open`` gave."""
        ...

    def pin(self, address: int, size_bytes: int) -> None:
        """Make host memory of this process what the GPU copies to and from at full speed, until ``unpin``."""
        ...

    def unpin(self, address: int) -> None:
        """End ``pin``; before the memory is unmapped."""
        ...

    def allocate_host(self, size_bytes: int, *, is_write_combined: bool) -> int:
        """Reserve pinned host memory; returns its address. The CPU reads write-combined memory slowly."""
        ...

    def free_host(self, address: int) -> None:
        """Give ``allocate_host``'s memory back."""
        ...

    def create_stream(self) -> int:
        """A stream that no other waits for, nor it for them."""
        ...

    def destroy_stream(self, stream: int) -> None:
        """Free a stream."""
        ...

    def synchronize(self, stream: int) -> None:
        """Wait, perhaps busily, until ``stream`` has nothing to do; an error of what it did is raised as well."""
        ...

    def create_event(self) -> int:
        """An event whose waiters sleep."""
        ...

    def destroy_event(self, event: int) -> None:
        """Free an event."""
        ...

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Have ``stream`` copy between two places that the bound device reaches."""
        ...

    def copy_many(self, copies: Copies, stream: int) -> None:
        """Have ``stream`` copy between places of the bound device, others that it reaches, and pinned host memory.

        In any order.
        """
        ...

    def copy_to_host(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Have ``stream`` copy from the bound device to pinned host memory."""
        ...

    def copy_to_device(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Have ``stream`` copy from pinned host memory to the bound device."""
        ...

    def load(self, code: bytes, name: str) -> int:
        """Load a kernel on the bound device; returns what ``launch`` takes."""
        ...

    def unload(self, kernel: int) -> None:
        """End ``load``; nothing runs the kernel any more."""
        ...

    def launch(self, kernel: int, num_programs: int, num_threads: int, arguments: Sequence[int], stream: int) -> None:
        """Have ``stream`` run so many programs of so many threads.

        All parameters of the kernel are of 64 bits; those after ``arguments``, at most four, are 0.
        """
        ...

    def record(self, event: int, stream: int) -> None:
        """Have ``event`` tell when all is done that ``stream`` has to do by now."""
        ...

    def wait(self, event: int) -> None:
        """Sleep until ``event`` is ready; other threads run meanwhile."""
        ...

    def is_ready(self, event: int) -> bool:
        """Whether ``event`` is ready; never recorded, it is."""
        ...

    def order(self, stream: int, event: int) -> None:
        """Have ``stream`` begin what it gets from now on only once ``event`` is ready. Waits for nothing itself."""
        ...


class CudaDriver:
    """The ``Driver`` of this machine. May be used on any thread."""

    def __init__(self) -> None:
        """Initialise the driver. Raises ``CudaError``: none, no ``cuda-bindings``, or no GPU."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise CudaError("import", "cuda-bindings is not installed", "pip install 'quartet[cuda]'") from error
        self._cuda: Any = driver
        self._lock = threading.Lock()
        self._contexts: dict[int, Any] = {}
        self._kernels: dict[int, tuple[Any, Any]] = {}  # function and module
        self._batches = True
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:  # what cuda-bindings raises where it finds no libcuda
            raise CudaError("cuInit", "no CUDA driver", str(error)) from error

    def bind(self, device: int) -> None:
        """As ``Driver``."""
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device))
                self._contexts[device] = context
        self._call("cuCtxSetCurrent", context)

    def uuid(self, device: int) -> bytes:
        """As ``Driver``."""
        found = self._call("cuDeviceGetUuid", self._call("cuDeviceGet", device))
        return ctypes.string_at(found.getPtr(), UUID_SIZE_BYTES)

    def architecture(self, device: int) -> int:
        """As ``Driver``."""
        found, names = self._call("cuDeviceGet", device), self._cuda.CUdevice_attribute
        major = self._call("cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, found)
        minor = self._call("cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, found)
        return 10 * int(major) + int(minor)

    def allocate(self, size_bytes: int) -> int:
        """As ``Driver``."""
        return int(self._call("cuMemAlloc", size_bytes))

    def free(self, address: int) -> None:
        """As ``Driver``."""
        self._call("cuMemFree", address)

    def export(self, address: int) -> bytes:
        """As ``Driver``."""
        # By address: not every release of cuda-bindings shows the structure's field.
        return ctypes.string_at(self._call("cuIpcGetMemHandle", address).getPtr(), HANDLE_SIZE_BYTES)

    def open(self, handle: bytes) -> int:
        """As ``Driver``."""
        structure = self._cuda.CUipcMemHandle()
        ctypes.memmove(structure.getPtr(), handle, HANDLE_SIZE_BYTES)
        flags = self._cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._call("cuIpcOpenMemHandle", structure, int(flags)))

    def size_of(self, address: int) -> int | None:
        """As ``Driver``."""
        try:
            base, size_bytes = self._call("cuMemGetAddressRange", address)
        except CudaError:
            return None
        return int(size_bytes) if int(base) == address else None

    def close(self, address: int) -> None:
        """As ``Driver``."""
        self._call("cuIpcCloseMemHandle", address)

    def pin(self, address: int, size_bytes: int) -> None:
        """As ``Driver``."""
        self._call("cuMemHostRegister", address, size_bytes, 0)

    def unpin(self, address: int) -> None:
        """As ``Driver``."""
        self._call("cuMemHostUnregister", address)

    def allocate_host(self, size_bytes: int, *, is_write_combined: bool) -> int:
        """As ``Driver``."""
        flags = int(self._cuda.CU_MEMHOSTALLOC_WRITECOMBINED) if is_write_combined else 0
        return int(self._call("cuMemHostAlloc", size_bytes, flags))

    def free_host(self, address: int) -> None:
        """As ``Driver``."""
        self._call("cuMemFreeHost", address)

    def create_stream(self) -> int:
        """As ``Driver``."""
        return int(self._call("cuStreamCreate", int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def destroy_stream(self, stream: int) -> None:
        """As ``Driver``."""
        self._call("cuStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        """As ``Driver``."""
        self._call("cuStreamSynchronize", stream)

    def create_event(self) -> int:
        """As ``Driver``."""
        flags = self._cuda.CUevent_flags
        return int(self._call("cuEventCreate", int(flags.CU_EVENT_BLOCKING_SYNC) | int(flags.CU_EVENT_DISABLE_TIMING)))

    def destroy_event(self, event: int) -> None:
        """As ``Driver``."""
        self._call("cuEventDestroy", event)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """As ``Driver``."""
        self._call("cuMemcpyDtoDAsync", target, source, size_bytes, stream)

    def copy_many(self, copies: Copies, stream: int) -> None:
        """As ``Driver``.

        One call for all of them: each call gives the interpreter's lock away, and waits for an engine's thread to have
        it back.
        """
        if self._batches:
            try:
                self._copy_batch(copies, stream)
                return
            except CudaError as error:
                self._batches = False
                logger.warning("copies on GPUs begin one by one: %s", error)
        for source, target, size_bytes in copies.tolist():
            self._call("cuMemcpyAsync", target, source, size_bytes, stream)

    def copy_to_host(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """As ``Driver``."""
        self._call("cuMemcpyDtoHAsync", target, source, size_bytes, stream)

    def copy_to_device(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """As ``Driver``."""
        self._call("cuMemcpyHtoDAsync", target, source, size_bytes, stream)

    def load(self, code: bytes, name: str) -> int:
        """As ``Driver``."""
        module = self._call("cuModuleLoadData", code)
        try:
            function = self._call("cuModuleGetFunction", module, name.encode())
        except CudaError:
            self._call("cuModuleUnload", module)
            raise
        self._kernels[int(function)] = (function, module)
        return int(function)

    def unload(self, kernel: int) -> None:
        """As ``Driver``."""
        _, module = self._kernels.pop(kernel)
        self._call("cuModuleUnload", module)

    def launch(self, kernel: int, num_programs: int, num_threads: int, arguments: Sequence[int], stream: int) -> None:
        """As ``Driver``."""
        values = (ctypes.c_uint64 * (len(arguments) + _NUM_ZERO_ARGUMENTS))(*arguments)
        begin = ctypes.addressof(values)
        places = (ctypes.c_void_p * len(values))(*(begin + 8 * number for number in range(len(values))))
        function, _ = self._kernels[kernel]
        shape = (num_programs, 1, 1, num_threads, 1, 1, 0)
        self._call("cuLaunchKernel", function, *shape, stream, ctypes.addressof(places), 0)

    def record(self, event: int, stream: int) -> None:
        """As ``Driver``."""
        self._call("cuEventRecord", event, stream)

    def wait(self, event: int) -> None:
        """As ``Driver``."""
        self._call("cuEventSynchronize", event)

    def is_ready(self, event: int) -> bool:
        """As ``Driver``."""
        try:
            self._call("cuEventQuery", event)
        except CudaError as error:
            if error.name == _NOT_READY:
                return False
            raise
        return True

    def order(self, stream: int, event: int) -> None:
        """As ``Driver``."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def _copy_batch(self, copies: Copies, stream: int) -> None:
        # By address: the bindings would make an object of each address.
        sources, targets, sizes = (np.ascontiguousarray(column, np.uint64) for column in copies.T)
        orders, flags = self._cuda.CUmemcpySrcAccessOrder, self._cuda.CUmemcpyFlags
        # By the copy engine: else the driver may take the processors that steps need.
        attributes = _CopyAttributes(
            order=int(orders.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM),
            flags=int(flags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE),
        )
        first = ctypes.c_size_t(0)  # the copy from which the attributes hold
        places = (column.ctypes.data for column in (targets, sources, sizes))
        status = self._batch_function(
            *places, len(copies), ctypes.addressof(attributes), ctypes.addressof(first), 1, stream
        )
        if status:
            found = self._cuda.CUresult(status)
            raise CudaError("cuMemcpyBatchAsync", self._name_of(found), self._text_of(found))

    @cached_property
    def _batch_function(self) -> Callable[..., int]:
        """``cuMemcpyBatchAsync``. Raises ``CudaError``: the driver is older."""
        address, _ = self._call("cuGetProcAddress", b"cuMemcpyBatchAsync", _BATCH_VERSION, 0)
        if not address:
            raise CudaError("cuGetProcAddress", "no cuMemcpyBatchAsync")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        return ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 3, size, *[pointer] * 2, size, pointer)(int(address))

    def _call(self, name: str, *args: object) -> Any:
        """What the function returns beside its status: nothing, one value, or a tuple of them."""
        function: Callable[..., tuple[Any, ...]] = getattr(self._cuda, name)
        status, *values = function(*args)
        if status != self._cuda.CUresult.CUDA_SUCCESS:
            raise CudaError(name, self._name_of(status), self._text_of(status))
        return values[0] if len(values) == 1 else tuple(values)

    def _name_of(self, status: Any) -> str:
        found, name = self._cuda.cuGetErrorName(status)
        return name.decode() if found == self._cuda.CUresult.CUDA_SUCCESS and name else str(status)

    def _text_of(self, status: Any) -> str:
        found, text = self._cuda.cuGetErrorString(status)
        return text.decode() if found == self._cuda.CUresult.CUDA_SUCCESS and text else ""


class _CopyAttributes(ctypes.Structure):
    """The driver's ``CUmemcpyAttributes``; the locations are for managed memory."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


@cache
def cuda_driver() -> CudaDriver:
    """The driver, initialised at the first call that succeeds. Raises ``CudaError`` as ``CudaDriver`` does."""
    return CudaDriver()
