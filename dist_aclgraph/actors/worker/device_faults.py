"""DeviceFaults: the faults of a rank's device, and what they mean for its memory."""

from __future__ import annotations

from dist_aclgraph.actors.worker.rank_stages import JoinedRank, RunningRank
from dist_aclgraph.device.bad_memory import MemoryRange, touches
from dist_aclgraph.errors import DeviceError, DeviceFault
from dist_aclgraph.planning.way_back import MAY_SURVIVE


class DeviceFaults:
    """Owns the known faults of a rank's device, for all lockstep groups that the rank joins.

    Attributes:
        is_told_to_stop: whether the device was aborted; if so, any error can follow.
    """

    def __init__(self) -> None:
        self.is_told_to_stop = False
        self._is_sound = True  # whether device memory is intact, apart from KV and _bad_memory
        self._bad_memory: set[MemoryRange] = set()  # faulty memory that held tensors

    def fault_of(self, error: Exception, rank: RunningRank) -> DeviceFault | None:
        """Return the fault that stopped the device; None if the fault is unknown."""
        fault = rank.joined.npu.fault_of(error) if isinstance(error, DeviceError) else None
        if fault == "uce":
            return self._locate_bad_memory(rank)
        return "stopped" if fault is None and self.is_told_to_stop else fault

    def _locate_bad_memory(self, rank: RunningRank) -> DeviceFault:
        """Return the kind of a memory fault, which depends on the use of the faulty memory."""
        try:
            memory = rank.joined.npu.bad_memory()
        except DeviceError:
            return "uce"
        self._bad_memory.update(memory)
        return rank.locate(memory)

    def note(self, fault: DeviceFault | None) -> None:
        """Record whether the weights are still intact after this fault."""
        self._is_sound = self._is_sound and fault in MAY_SURVIVE

    def check_memory(self, rank: RunningRank) -> None:
        """Check that the contents of the rank's memory are known, apart from faulty memory that can
        be freed.

        Raises:
            DeviceError: the contents are unknown, so the rank cannot join another group.
        """
        memory = rank.joined.npu.bad_memory() if self._is_sound else ()
        self._bad_memory.update(memory)
        if not self._is_sound or (memory and rank.locate(memory) == "uce"):
            raise DeviceError(f"rank {rank.joined.rank} cannot trust its memory any more")

    def holds_bad_memory(self, joined: JoinedRank) -> bool:
        """Return whether the allocator still holds faulty memory, in use or free."""
        memory = tuple(self._bad_memory)
        return bool(memory) and touches(memory, joined.npu.tensor_memory())

    def end(self) -> None:
        """Forget the stop and the faulty memory: the device works again, without this memory."""
        self.is_told_to_stop = False
        self._bad_memory.clear()
