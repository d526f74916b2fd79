"""One NPU of this process: how it is opened, its streams, its memory and its limits.

The same code runs on hardware and on the emulator; only ``open_npu`` distinguishes the two.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_aclgraph.config import DeviceConfig
from dist_aclgraph.device import emulator
from dist_aclgraph.device.bad_memory import BadMemory, MemoryRange
from dist_aclgraph.device.cann import cannot_load
from dist_aclgraph.device.failures import device_error, device_fault, fault_of_code, first_lines
from dist_aclgraph.device.kind import DeviceKind, emulator_settings, resolve_kind
from dist_aclgraph.device.launch_gate import LaunchGate
from dist_aclgraph.device.staging import Staging
from dist_aclgraph.device.versions import installed_line
from dist_aclgraph.environment import prepare_device
from dist_aclgraph.errors import DeviceError, DeviceFault

# Observed on a 910C with CANN 9.0: this number of streams can be created; creating one more fails
# with the code 207005.
STREAMS_OF_A_FRESH_DEVICE = 1979
THREAD_LEVEL = 0  # ACL_RT_THREAD_LEVEL
PACKAGE_CANN, VERSION_BYTES = 0, 2048  # ACL_PKG_NAME_CANN; CANN's answer begins with the version
CAPTURE_THREAD_LOCAL = 1  # ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL
STDERR = 2
HCCL_KERNELS = "Hccl"  # prefix of the names of HCCL's kernels on the AI CPU, e.g. HcclLaunch...


@dataclass(frozen=True)
class Memory:
    """Memory of the device, in bytes."""

    free_bytes: int
    total_bytes: int


def runtime() -> Any:
    """Return ``torch.npu`` (streams, events, graphs). It exists only after torch_npu was loaded."""
    return torch.npu  # type: ignore[attr-defined]


def torch_npu() -> Any:
    """Return the loaded package torch_npu."""
    return sys.modules["torch_npu"]


class Npu:
    """The NPU that this process drives.

    This object owns only the handle of the runtime: tensors, streams and graphs belong to their
    creators. The device index is always 0, because Ray limits ASCEND_RT_VISIBLE_DEVICES to the
    worker's NPU.

    Attributes:
        is_waiting: whether the host waits for the device; any thread may read it.
        on_wait: called with True when the host begins to wait for the device, and with False when
            the wait ends.
    """

    def __init__(self, kind: DeviceKind) -> None:
        self.kind = kind
        self.is_waiting = False
        self.on_wait: Callable[[bool], None] = lambda _: None
        self._gate = LaunchGate()
        self.device = torch.device("npu", 0)
        runtime().set_device(0)
        self._staging = Staging(runtime().current_stream(), runtime().Event, self.waiting)
        self._acl = ctypes.CDLL("libascendcl.so")
        self._bad_memory = BadMemory(self._acl, kind)

    @property
    def name(self) -> str:
        return str(runtime().get_device_name(0))

    @property
    def cann(self) -> str:
        """Version of CANN, e.g. 9.1.0; empty if CANN does not report it.

        This property queries CANN, because torch_npu only stores the version that was installed
        when torch_npu was loaded.
        """
        version = ctypes.create_string_buffer(VERSION_BYTES)
        code = self._acl.aclsysGetCANNVersion(PACKAGE_CANN, version)
        return "" if code else version.value.decode()

    @property
    def description(self) -> str:
        """A description of the device, for users."""
        if self.kind == "emulated":
            return f"emulated NPU ({self.name}) on this machine's CPU"
        return f"NPU {self.name}"

    def available_streams(self) -> int:
        """CANN's count of the streams that can still be created on this device.

        If CANN is too old to count streams, this is the number of streams of an unused device. In
        this case, the real limit is unknown until a capture fails.
        """
        try:
            query = self._acl.aclrtGetStreamAvailableNum
        except AttributeError:
            return STREAMS_OF_A_FRESH_DEVICE
        count = ctypes.c_uint32()
        code = query(ctypes.byref(count))
        if code:
            raise DeviceError(f"aclrtGetStreamAvailableNum failed with {code}")
        return count.value

    def try_capture(self, stream: Any) -> int:
        """Capture an empty graph on ``stream``; return how many streams are free during the
        capture.

        This method does not use torch_npu's allocator, because the allocator does not recover from
        a capture that cannot begin. The test is necessary even if streams are free: with software
        queues, CANN does not count the resources that captures use.

        Raises:
            RuntimeError: a capture cannot begin; the message contains CANN's code.
        """
        handle, graph = ctypes.c_void_p(stream.npu_stream), ctypes.c_void_p()
        if code := self._acl.aclmdlRICaptureBegin(handle, CAPTURE_THREAD_LOCAL):
            raise RuntimeError(
                f"no capture can begin ({code}); capture fewer sizes, or reduce other "
                "uses of streams"
            )
        self._acl.aclmdlRICaptureEnd(handle, ctypes.byref(graph))
        left = self.available_streams()
        if graph:
            self._acl.aclmdlRIDestroy(graph)
        return left

    def counts_graphs(self, stream: Any) -> bool:
        """Return whether CANN counts the streams of graphs. The result is true if a capture reduces
        the number of free streams that CANN reports, and if the release of the captured graph
        increases this number again.

        With software queues, the release does not increase the number, because CANN keeps the
        queues of released graphs for later graphs.
        """
        before = self.available_streams()
        if before == 0:
            # The test capture needs a free stream. Without a free stream, the usual result is
            # returned.
            return True
        return self.try_capture(stream) < before == self.available_streams()

    def memory(self) -> Memory:
        free, total = runtime().mem_get_info(0)
        return Memory(free_bytes=free, total_bytes=total)

    def synchronize(self) -> None:
        with self.waiting(), translated("synchronizing the device"):
            runtime().synchronize()

    def give_back(self) -> None:
        """Return the allocator's unused memory to the device."""
        runtime().empty_cache()

    def fault_of(self, error: BaseException) -> DeviceFault | None:
        """Return why the device stopped; None if the cause is unknown.

        Call this once for each error, on the thread in which the error was raised. A library above
        CANN's runtime can hide the cause. For example, HCCL reports the same code for all launches
        that the runtime refuses. CANN's runtime stores the code of each thread's last error until
        this code is read.
        """
        code = self._acl.aclrtGetLastError(THREAD_LEVEL)
        return device_fault(error) or fault_of_code(code)

    def bad_memory(self) -> tuple[MemoryRange, ...]:
        """Return the faulty memory that was not repaired; see ``BadMemory.ranges``."""
        return self._bad_memory.ranges()

    def tensor_memory(self) -> list[MemoryRange]:
        """Return the memory that torch's allocator has reserved, for existing and for future
        tensors.
        """
        return [
            MemoryRange(segment["address"], segment["address"] + segment["total_size"])
            for segment in runtime().memory_snapshot()
        ]

    def stop(self, timeout_s: float) -> None:
        """Abort all running and queued work of the device; threads that wait for this work get an
        error.

        Do not call this in the thread that works with the device. After the stop, no thread can
        launch work until ``restart``. torch_npu's function has no time limit, and holds the GIL
        while the device stops. If the stop takes longer than ``timeout_s``, a C thread (of
        ``faulthandler``) ends the process.

        Raises:
            DeviceError: the device cannot be stopped.
        """
        self._gate.close(timeout_s / 2)
        runtime().set_device(0)
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=STDERR)
        try:
            with translated("stopping the device"):
                # This call, which reads a stream's handle, returns only after torch_npu's task
                # queue has launched all of its work.
                torch_npu()._C._npu_getCurrentRawStream(0)
                failed = runtime().stop_device(0)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if failed:
            raise DeviceError("the device could not be stopped")

    def restart(self, *, resumes_groups: bool = True) -> None:
        """Make a stopped device work again.

        Memory, graphs, and the handles of streams and events are unchanged. The output of aborted
        tasks, the state of events in graphs, and the contents of repaired memory are undefined.

        Args:
            resumes_groups: whether the communicators of this process are resumed. If true, the
                devices of all ranks of these communicators must be stopped before the call. A
                communicator that is not resumed can only be destroyed.

        Raises:
            DeviceError: the device cannot be restarted, or a communicator cannot be resumed.
        """
        with translated("restarting the device"):
            runtime().restart_device(0)
            self._bad_memory.repair()
            if resumes_groups:  # ``reinit_process_group(None)`` resumes all communicators.
                torch_npu().distributed.reinit_process_group(None, False)
        self._acl.aclrtGetLastError(THREAD_LEVEL)
        self._gate.open()

    def launching(self) -> AbstractContextManager[None]:
        """The context in which a thread launches work that ``stop`` may abort. See
        ``LaunchGate.launching``.
        """
        return self._gate.launching()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside this context, ``is_waiting`` is true, so that other threads see that the host
        waits.

        Raises:
            DeviceError: the device was stopped.
        """
        with self._gate.waiting():
            self.is_waiting = True
            self.on_wait(True)
            try:
                yield
                self.on_wait(False)
            finally:
                self.is_waiting = False

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return pinned host memory. The host does not wait for copies to or from this memory."""
        return torch.zeros(shape, dtype=dtype).pin_memory()

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """Copy an array to the device; the host does not wait for the copy.

        The copy runs on the stream that was current when this ``Npu`` object was made.
        """
        return self._staging.send(array, self.device)


def load_torch_npu(kind: DeviceKind) -> None:
    """Load torch_npu without opening a device. A process that is forked after this call has
    torch_npu already, so that ``open_npu`` is fast.

    Raises:
        EmulatorBuildError: the emulator cannot be built.
        DeviceError: a library cannot be loaded.
    """
    if kind == "emulated":
        emulator.preload()
    else:
        _import_torch_npu()


def _import_torch_npu() -> None:
    """Import torch_npu, which loads the libraries of an installed CANN.

    Raises:
        DeviceError: the import fails; the message contains the remedy.
    """
    try:
        import torch_npu  # noqa: F401
    except ModuleNotFoundError as e:
        raise DeviceError(f"torch_npu cannot be imported ({e}): run `dist-aclgraph doctor`") from e
    except Exception as e:  # raised if a library is missing, or if a check of torch_npu fails
        raise cannot_load(first_lines(e)) from e


def open_npu(config: DeviceConfig, rank: int, *, deterministic: bool = False) -> Npu:
    """Load torch_npu, open the device that ``config`` selects, and return this device.

    Args:
        deterministic: whether collectives sum in a fixed order.

    Raises:
        DeviceError: the device does not exist, its runtime does not start, or torch is built for
            CUDA.
    """
    emulator.check_torch()
    kind = resolve_kind(config.kind)
    prepare_device(config, is_npu=kind == "npu", deterministic=deterministic)
    if kind == "emulated":
        emulator.load(emulator_settings(config, rank))
    else:
        _import_torch_npu()
    with translated("opening the device"):
        return Npu(kind)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Convert torch_npu's RuntimeErrors to error types of this package."""
    try:
        yield
    except (RuntimeError, torch.OutOfMemoryError) as e:
        raise device_error(e, doing) from e


@dataclass(frozen=True)
class PoolMemory:
    """The number of bytes of a graph pool's device memory, and how many of these bytes the pool's
    tensors occupy.
    """

    total_bytes: int
    live_bytes: int


class GraphPool:
    """The memory that all graphs of this process share.

    When the last graph of a pool is released, torch_npu frees the pool, and then refuses the pool's
    handle. After the last release, ``remove_graph`` creates a new handle.
    """

    def __init__(self) -> None:
        self.handle = runtime().graph_pool_handle()
        self._num_graphs = 0

    def memory(self) -> PoolMemory:
        """Return the sizes of the pool, from the counts of torch_npu's allocator."""
        segments = [
            segment
            for segment in runtime().memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(self.handle)
        ]
        return PoolMemory(
            total_bytes=sum(segment["total_size"] for segment in segments),
            live_bytes=sum(segment["allocated_size"] for segment in segments),
        )

    def add_graph(self) -> None:
        self._num_graphs += 1

    def remove_graph(self) -> None:
        self._num_graphs -= 1
        if self._num_graphs == 0:
            self.handle = runtime().graph_pool_handle()


def release_failed_capture(pool: Any) -> None:
    """Release the memory of a capture that CANN has refused to end.

    Without this call, the pool would never release the memory: torch_npu's allocator has not
    recorded the end of the capture, and ``reset`` does nothing for the graph of such a capture.

    Args:
        pool: handle of the capture's pool.
    """
    functions = torch_npu()._C
    if not installed_line().forgets_failed_captures:
        functions._npu_endAllocateCurrentStreamToPool(0, pool)
    functions._npu_releasePool(0, pool)


def hccl_options(buffer_mb: int | None) -> Any:
    """Return the options of a process group whose communicators have buffers of ``buffer_mb`` MB.
    If ``buffer_mb`` is None, the environment variable HCCL_BUFFSIZE sets the size.
    """
    if buffer_mb is None:
        return None
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": buffer_mb}
    return options


def ai_cpu_operators(graph: Any) -> dict[str, int]:
    """Return, for each operator that the AI CPU runs, the number of its tasks in a captured graph.

    The numbers come from CANN's own description of the graph. HCCL's collectives are not included:
    the configuration decides whether HCCL runs them on the AI CPU.

    Raises:
        RuntimeError: CANN does not describe graphs.
    """
    with tempfile.NamedTemporaryFile(prefix="graph-", suffix=".json") as file:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # debug_dump warns at each call
            # NPUGraph's own method is not called, because it also writes a second, readable file.
            super(runtime().NPUGraph, graph).debug_dump(file.name)
        lines = Path(file.name).read_text().splitlines()
    # Each line describes one task. The lines are parsed one by one. The whole file is not valid
    # JSON if the last stream has no task, because the file then ends with a comma.
    tasks = [json.loads(line.rstrip(",")) for line in lines if line.startswith("{")]
    names = [task["name"] for task in tasks if task["args"]["Task Type"] == "KERNEL_AICPU"]
    return dict(Counter(name for name in names if not name.startswith(HCCL_KERNELS)))


@contextmanager
def on_stream(stream: Any, back: Any) -> Iterator[None]:
    """Make a stream current inside this context; on exit, make ``back`` current again."""
    runtime().set_stream(stream)
    try:
        yield
    finally:
        runtime().set_stream(back)


def external_event() -> Any:
    """Return an event for which a captured graph waits. A stream records the event outside of the
    graph.
    """
    return runtime().ExternalEvent()


def clear_event(event: Any, stream: Any) -> None:
    """Reset an external event of unknown state, on ``stream``."""
    # In torch_npu 2.13, ``wait`` also resets the event, and ``reset`` does nothing.
    event.record(stream)
    event.wait(stream)
    event.reset(stream)


def weak_reference(value: Any) -> Any:
    """Return a view of a device tensor that does not keep the tensor's memory alive. For a list of
    device tensors, return a list of such views. Return other values unchanged.
    """
    if isinstance(value, list):
        return [weak_reference(item) for item in value]
    if isinstance(value, torch.Tensor) and value.device.type == "npu":
        return runtime().graphs.TensorWeakRef(value)
    return value


def begin_task_group(stream: Any) -> None:
    runtime().graph_task_group_begin(stream)


def end_task_group(stream: Any) -> Any:
    return runtime().graph_task_group_end(stream)


def update_at_once(operator: str) -> Any:
    """Return torch_npu's function that updates one captured operator in a single call; None if the
    operator has no such function. The function releases the GIL, begins the update, issues the
    operator, ends the update and records an event.
    """
    return getattr(torch_npu()._C, f"_{operator}_out_graph", None)


def begin_task_update(stream: Any, handle: Any) -> None:
    runtime().graph_task_update_begin(stream, handle)


def end_task_update(stream: Any) -> None:
    runtime().graph_task_update_end(stream)
