"""CANN lists faulty memory. The tests check which tensors are found in faulty memory, and whether a
failed repair is noticed.
"""

from __future__ import annotations

from typing import Any

import pytest

from dist_aclgraph.device.bad_memory import (
    NOT_SUPPORTED,
    BadMemory,
    MemoryRange,
    lies_in,
    touches,
)
from dist_aclgraph.errors import DeviceError

PAGE = 4096
BAD = MemoryRange(PAGE, 2 * PAGE)


class Acl:
    """A fake of the runtime's functions that list and repair bad memory.

    Args:
        code: error code that the query returns.
        left: addresses that are still faulty after a repair.
    """

    def __init__(self, *addresses: int, code: int = 0, left: tuple[int, ...] = ()) -> None:
        self.addresses, self.repaired = addresses, 0
        self._code, self._left = code, left

    def aclrtGetMemUceInfo(self, device: int, infos: Any, room: Any, count: Any) -> int:
        count._obj.value = len(self.addresses)
        for info, address in zip(infos, self.addresses, strict=False):
            info.address, info.num_bytes = address, 64
        return self._code

    def aclrtMemUceRepair(self, device: int, infos: Any, count: Any) -> int:
        assert [info.address for info in infos[: count.value]] == list(self.addresses)
        self.addresses, self.repaired = self._left, self.repaired + 1
        return 0


def memory_of(acl: Any) -> BadMemory:
    return BadMemory(acl, "emulated")


def test_listed_faulty_addresses_count_as_whole_pages() -> None:
    assert memory_of(Acl(PAGE + 100, 3 * PAGE - 10)).ranges() == (
        BAD,
        MemoryRange(2 * PAGE, 4 * PAGE),
    )


def test_memory_that_torch_npu_did_not_repair_is_repaired_once() -> None:
    acl = Acl(PAGE)

    memory_of(acl).repair()
    memory_of(acl).repair()

    assert acl.repaired == 1


def test_a_repair_that_helps_nothing_is_told() -> None:
    with pytest.raises(DeviceError, match="as faulty as before"):
        memory_of(Acl(PAGE, left=(PAGE,))).repair()


def test_where_cann_is_too_old_to_say_nothing_is_known_and_where_it_refuses_that_is_told() -> None:
    assert memory_of(object()).ranges() == ()
    assert memory_of(Acl(PAGE, code=NOT_SUPPORTED)).ranges() == ()
    with pytest.raises(DeviceError, match="507899"):
        memory_of(Acl(PAGE, code=507899)).ranges()


@pytest.mark.parametrize(
    ("parts", "holds", "meets"),
    [
        ([MemoryRange(0, 3 * PAGE)], True, True),
        ([MemoryRange(PAGE + 8, 2 * PAGE), MemoryRange(0, PAGE + 8)], True, True),  # adjacent parts
        ([MemoryRange(0, PAGE + 8)], False, True),
        ([MemoryRange(0, PAGE), MemoryRange(2 * PAGE, 3 * PAGE)], False, False),
        ([], False, False),
    ],
)
def test_memory_is_somebodys_whole_or_in_part(
    parts: list[MemoryRange], holds: bool, meets: bool
) -> None:
    assert (lies_in([BAD], parts), touches([BAD], parts)) == (holds, meets)
