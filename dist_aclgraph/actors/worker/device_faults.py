"""DeviceFaults: the faults of a rank's device, and the parts of the device memory that the faults
have damaged.
"""

from __future__ import annotations

from dist_aclgraph.actors.worker.rank_stages import JoinedRank, RunningRank
from dist_aclgraph.device.bad_memory import MemoryRange, touches
from dist_aclgraph.errors import DeviceError, DeviceFault
from dist_aclgraph.planning.way_back import MAY_SURVIVE


class DeviceFaults:
    """Owns the known faults of a rank's device. The object stays when the rank joins another
    lockstep group.

    Attributes:
        is_told_to_stop: whether the work on the device was aborted on purpose. If so, later calls
            may fail with any error.
    """

    def __init__(self) -> None:
        self.is_told_to_stop = False
        self._is_sound = True  # whether all device memory outside the KV and _bad_memory is intact
        self._bad_memory: set[MemoryRange] = set()  # faulty memory that held tensors

    def fault_of(self, error: Exception, rank: RunningRank) -> DeviceFault | None:
        """Return the fault that stopped the device; None if the fault is unknown."""
        fault = rank.joined.npu.fault_of(error) if isinstance(error, DeviceError) else None
        if fault == "uce":
            return self._locate_bad_memory(rank)
        return "stopped" if fault is None and self.is_told_to_stop else fault

    def _locate_bad_memory(self, rank: RunningRank) -> DeviceFault:
        """Return the kind of a memory fault. The kind says what the faulty memory is used for."""
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
        """Check that the rank's memory is intact, apart from faulty memory that can be freed.

        Raises:
            DeviceError: other memory may be damaged, so the rank cannot join another group.
        """
        memory = rank.joined.npu.bad_memory() if self._is_sound else ()
        self._bad_memory.update(memory)
        if not self._is_sound or (memory and rank.locate(memory) == "uce"):
            raise DeviceError(f"rank {rank.joined.rank} cannot trust its memory any more")

    def holds_bad_memory(self, joined: JoinedRank) -> bool:
        """Return whether torch's allocator still has faulty memory, used or free."""
        memory = tuple(self._bad_memory)
        return bool(memory) and touches(memory, joined.npu.tensor_memory())

    def end(self) -> None:
        """Delete the records of the abort and of the faulty memory. The device works again, and no
        longer uses the faulty memory.
        """
        self.is_told_to_stop = False
        self._bad_memory.clear()
