"""Transfers between the memory of two processes with HIXL, CANN's Python package ``hixl``.

CANN demands that all calls of an engine use the ACL context in which the engine was initialized.
Therefore one thread makes all calls of an engine. A transfer that has failed may still write to
memory until ``disconnect`` has returned.
"""

from __future__ import annotations

import ctypes
from typing import Any

from dist_aclgraph.device.npu import runtime
from dist_aclgraph.errors import ConfigError, DeviceError

# Names of HIXL's statuses, for error messages.
STATUSES = (
    "PARAM_INVALID",
    "TIMEOUT",
    "NOT_CONNECTED",
    "ALREADY_CONNECTED",
    "UNSUPPORTED",
    "FAILED",
    "RESOURCE_EXHAUSTED",
)


def import_hixl() -> Any:
    """Return CANN's package ``hixl``.

    Raises:
        ConfigError: this CANN does not have the package.
    """
    try:
        import hixl
    except ImportError as e:
        raise ConfigError(
            f"kv.transport is hixl, but CANN's Python package hixl cannot be imported ({e}): "
            "install a CANN that has it, or set kv.transport to sockets"
        ) from None
    return hixl


class HostMemory:
    """Pinned host memory that devices of other nodes can read. Python's garbage collector does not
    free this memory, because a device might still access it. Call ``free`` to free it.

    Raises:
        DeviceError: there is not enough memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self._acl = ctypes.CDLL("libascendcl.so")
        address = ctypes.c_void_p()
        code = self._acl.aclrtMallocHost(ctypes.byref(address), ctypes.c_size_t(num_bytes))
        if code or not address.value:
            raise DeviceError(f"aclrtMallocHost of {num_bytes >> 20} MiB failed with {code}")
        self.address, self.num_bytes = address.value, num_bytes
        self.view = memoryview((ctypes.c_char * num_bytes).from_address(self.address)).cast("B")

    def free(self) -> None:
        """Free the memory. Call this only when neither a device nor a process can still access the
        memory.
        """
        self._acl.aclrtFreeHost(ctypes.c_void_p(self.address))


class HixlEngine:
    """An engine of HIXL. Only the thread that has made the object may call its methods.

    Raises:
        ConfigError: this CANN does not have the package ``hixl``.
    """

    def __init__(self) -> None:
        self._hixl = import_hixl()
        runtime().set_device(0)
        self._engine = self._hixl.Hixl()

    def _check(self, doing: str, status: int) -> None:
        if status == self._hixl.SUCCESS:
            return
        names = {getattr(self._hixl, name): name for name in STATUSES}
        raise DeviceError(f"HIXL cannot {doing}: {names.get(status, 'status')} ({status})")

    def listen(self, name: str, memory: HostMemory) -> None:
        """Register ``memory``. From now on, other engines can read and write this memory.

        Args:
            name: host and port where the engine listens, as ``host:port``. Any process that can
                reach this port can connect, because HIXL authenticates no process.
        """
        hixl = self._hixl
        # Without this option, a transfer to memory that is not registered would be permitted.
        options = {hixl.OPTION_BUFFER_POOL: "0:0"}
        self._check(f"listen at {name}", self._engine.initialize(name, options))
        described = hixl.MemDesc(memory.address, memory.num_bytes)
        status, _ = self._engine.register_mem(described, hixl.MemType.MEM_HOST)
        self._check(f"register {memory.num_bytes >> 20} MiB", status)

    def connect(self, name: str, timeout_s: float) -> None:
        """Make a link to another engine."""
        self._check(f"connect to {name}", self._engine.connect(name, int(timeout_s * 1000)))

    def read(self, name: str, address: int, remote: int, num_bytes: int, timeout_s: float) -> None:
        """Copy bytes from the memory of a linked engine into this process.

        Args:
            address: address of the first byte in this process.
            remote: address of the first byte in the other process.

        Raises:
            DeviceError: the transfer failed. The bytes are not valid, and this process's memory may
                change until ``disconnect`` has returned.
        """
        hixl = self._hixl
        span = hixl.TransferOpDesc(address, remote, num_bytes)
        status = self._engine.transfer_sync(
            name, hixl.TransferOp.READ, [span], int(timeout_s * 1000)
        )
        self._check(f"read from {name}", status)

    def disconnect(self, name: str, timeout_s: float) -> None:
        """End a link. After this call, no transfer of the link accesses memory.

        Raises:
            DeviceError: a transfer might still access memory.
        """
        self._check(f"disconnect {name}", self._engine.disconnect(name, int(timeout_s * 1000)))

    def close(self) -> None:
        """Stop listening. After this call, no other engine can access the memory."""
        self._engine.finalize()
