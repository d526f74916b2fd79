"""HixlMemory: host memory for files of KV blocks that are transferred between nodes over HIXL.

The memory has two parts. Other nodes read this worker's files from the first part. The second part
gets files that this worker reads from other nodes. One thread makes all calls of HIXL. If a
transfer fails, its slot stays reserved until the transfer's link has ended.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Protocol

from dist_aclgraph.actors.wire.addresses import bind_to_one, url_host
from dist_aclgraph.actors.wire.lent_files import IDLE_S, Lender, LentFile, ReadError
from dist_aclgraph.errors import DeviceError, DistAclGraphError, PlacementError, WorkerError
from dist_aclgraph.kv.arena import Arena, Slot
from dist_aclgraph.logs import event
from dist_aclgraph.planning.budget import MAX_LINKS, PART_BYTES

if TYPE_CHECKING:
    from dist_aclgraph.device.hixl import HostMemory

CONNECT_S = TRANSFER_S = DISCONNECT_S = 3.0  # time limits of HIXL's calls

logger = logging.getLogger(__name__)


class Transfers(Protocol):
    """The calls of ``HixlEngine`` that ``HixlMemory`` needs."""

    def listen(self, name: str, memory: HostMemory) -> None: ...
    def connect(self, name: str, timeout_s: float) -> None: ...
    def read(
        self, name: str, address: int, remote: int, num_bytes: int, timeout_s: float
    ) -> None: ...
    def disconnect(self, name: str, timeout_s: float) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class _Read:
    lent: LentFile
    slot: Slot
    done: threading.Event = field(default_factory=threading.Event)
    failure: str | None = "the worker leaves its group"


class HixlMemory:
    """Owns the memory, the HIXL engine, and the thread that calls the engine. Any thread may call
    ``read``.

    Args:
        memory: host memory with at least ``2 * part_bytes`` bytes.
        open_engine: a function that creates the HIXL engine. The thread calls this function.
        host: the node's own address, at which the HIXL engine listens.
        ports: the ports to choose from; None for any free port.
        timeout_s: maximum number of seconds until the HIXL engine listens.

    Attributes:
        engine: name of the HIXL engine, as ``host:port``.
        num_lost: number of slots that are never used again. A link that could not be ended may
            still write to these slots.

    Raises:
        PlacementError: no port is free, or the address is a wildcard.
        ConfigError: this CANN does not have HIXL.
        DeviceError: HIXL cannot listen, or cannot register the memory.
        WorkerError: HIXL did not answer in time.
    """

    def __init__(
        self,
        memory: HostMemory,
        open_engine: Callable[[], Transfers],
        host: str,
        ports: range | None,
        timeout_s: float,
        *,
        part_bytes: int = PART_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = ""
        self.num_lost = 0
        self._memory = memory
        self._clock = clock
        self._lent, self._read = Arena(0, part_bytes), Arena(part_bytes, 2 * part_bytes)
        self._guard = threading.Lock()  # guards the arena for reads
        # The keys are HIXL engines to which there is a link. The values are the times when these
        # links were last used. The least recently used link comes first.
        self._links: dict[str, float] = {}
        self._reads: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._is_closing = self._is_lent = False
        self._problem: DistAclGraphError | None = None
        self._began = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, args=(open_engine, host, ports), name="kv-hixl", daemon=True
        )
        self._thread.start()
        if not self._began.wait(timeout_s):
            raise WorkerError(f"HIXL has not begun to listen at {host} within {timeout_s:g} s")
        if self._problem is not None:
            raise self._problem

    @property
    def lender(self) -> Lender:
        """The part of the memory that other nodes read."""
        return Lender(self.engine, self._memory.address, self._memory.view, self._lent)

    @contextmanager
    def read(self, lent: LentFile) -> Iterator[memoryview]:
        """See ``MemoryReader``."""
        with self._guard:
            slot = None if self._is_closing else self._read.take(lent.num_bytes)
            if slot is None:
                raise ReadError(f"there is no room for {lent.num_bytes} bytes from {lent.engine}")
            call = _Read(lent, slot)
            self._reads.put(call)
        call.done.wait()
        if call.failure is not None:
            raise ReadError(call.failure)  # the thread has freed the slot, if possible
        try:
            yield self._memory.view[slot.start : slot.end]
        finally:
            self._give_back(slot)

    def _give_back(self, slot: Slot) -> None:
        with self._guard:
            self._read.give_back(slot)

    def close(self, timeout_s: float, *, is_lent: bool = False) -> None:
        """End all links, and stop listening. Waiting reads fail. The memory is freed if no thread
        and no link can access it.

        Args:
            is_lent: whether a thread may still use the part of the memory that other nodes read.
        """
        with self._guard:
            self._is_closing, self._is_lent = True, is_lent
        self._reads.put(None)
        self._thread.join(timeout_s)

    # ---- the thread

    def _serve(self, open_engine: Callable[[], Transfers], host: str, ports: range | None) -> None:
        engine, call = None, None
        try:
            engine = self._listen(open_engine, host, ports)
        except DistAclGraphError as e:
            self._problem = e
        except Exception as e:
            self._problem = DeviceError(f"HIXL cannot listen at {host}: {e}")
        self._began.set()
        if self._problem is None:
            assert engine is not None
            while (call := self._next_read(engine)) is not None and not self._is_closing:
                call.failure = self._run(engine, call)
                call.done.set()
        self._drop_reads(call)
        if engine is not None:
            for name in list(self._links):
                self._end_link(engine, name)
            engine.close()
        with self._guard:
            if not (self._is_lent or self._read.is_used):
                self._memory.free()

    def _listen(
        self, open_engine: Callable[[], Transfers], host: str, ports: range | None
    ) -> Transfers:
        """Return an engine that listens."""
        if ip_address(host).is_unspecified:
            raise PlacementError(
                f"HIXL would listen at all addresses of this machine ({host}); start Ray with the "
                "address of the node (--node-ip-address)"
            )
        engine: Transfers | None = None

        def try_port(port: int) -> None:
            nonlocal engine
            found = _free_port(host, port)
            self.engine = f"{url_host(host)}:{found}"
            engine = open_engine()
            try:
                engine.listen(self.engine, self._memory)
            except Exception:
                engine.close()
                _free_port(host, found)  # raises if another worker has taken the port
                raise

        bind_to_one(ports, host, try_port)
        assert engine is not None
        event(logger, "kv_hixl_listens", engine=self.engine)
        return engine

    def _next_read(self, engine: Transfers) -> _Read | None:
        """Wait for the next read and return it; None if the thread must end. Meanwhile, end links
        that were not used for ``IDLE_S``.
        """
        while True:
            late_s = self._clock() - IDLE_S
            for name in [name for name, used_s in self._links.items() if used_s <= late_s]:
                self._end_link(engine, name)
            with contextlib.suppress(queue.Empty):
                return self._reads.get(timeout=IDLE_S if self._links else None)

    def _drop_reads(self, call: _Read | None) -> None:
        """End ``call`` and all waiting reads with an error. Later reads fail at once."""
        with self._guard:
            self._is_closing = True
        with contextlib.suppress(queue.Empty):
            while True:
                if call is not None:
                    self._give_back(call.slot)
                    call.done.set()
                call = self._reads.get_nowait()

    def _run(self, engine: Transfers, call: _Read) -> str | None:
        """Read a file. Return why the read failed; None if it succeeded. After a failure, free the
        slot if the transfer cannot write to the slot later.
        """
        name, slot = call.lent.engine, call.slot
        try:
            self._link(engine, name)
        except Exception as e:  # no transfer has begun
            self._give_back(slot)
            return str(e)
        try:
            address, num_bytes = self._memory.address + slot.start, slot.end - slot.start
            engine.read(name, address, call.lent.address, num_bytes, TRANSFER_S)
        except Exception as e:
            if self._end_link(engine, name):
                self._give_back(slot)
            else:
                self.num_lost += 1
                event(logger, "kv_slot_lost", logging.WARNING, engine=name, lost=self.num_lost)
            return str(e)
        return None

    def _link(self, engine: Transfers, name: str) -> None:
        if name not in self._links:
            if len(self._links) >= MAX_LINKS:
                self._end_link(engine, next(iter(self._links)))
            try:
                engine.connect(name, CONNECT_S)
            except DeviceError:
                # A failed attempt can leave a part of the link. The part is removed, because it
                # would let the next attempt fail.
                with contextlib.suppress(DeviceError):
                    engine.disconnect(name, DISCONNECT_S)
                raise
        self._links.pop(name, None)
        self._links[name] = self._clock()

    def _end_link(self, engine: Transfers, name: str) -> bool:
        """End a link. Return whether the link has ended. Transfers of an ended link cannot access
        memory.
        """
        self._links.pop(name, None)
        try:
            engine.disconnect(name, DISCONNECT_S)
        except Exception as e:
            logger.warning("a link to %s did not end: %s", name, e)
            return False
        return True


def _free_port(host: str, port: int) -> int:
    """Return ``port`` if it is free now. If ``port`` is 0, return any free port.

    Raises:
        OSError: the port is in use, or the machine does not have the address.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, port))
        found: int = probe.getsockname()[1]
    return found
