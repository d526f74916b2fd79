"""Laws of Arena: no byte belongs to two slots, and all bytes are free again at the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.kv.arena import ALIGNMENT, Arena, Slot

START, END = 1 << 20, 2 << 20
SIZES = st.integers(1, END - START)


@given(st.lists(st.one_of(SIZES, st.floats(0, 1, exclude_max=True)), max_size=60))
def test_no_byte_has_two_owners(actions: list[int | float]) -> None:
    """An action that is an integer takes a slot of this number of bytes. An action that is a
    fraction selects a slot, and frees this slot.
    """
    arena, taken = Arena(START, END), list[Slot]()
    for action in actions:
        if isinstance(action, float):
            if taken:
                arena.give_back(taken.pop(int(action * len(taken))))
            continue
        slot = arena.take(action)
        if slot is None:
            continue
        assert slot.start >= START and slot.end <= END and slot.end - slot.start == action
        assert slot.start % ALIGNMENT == 0
        assert all(slot.end <= other.start or other.end <= slot.start for other in taken)
        taken.append(slot)
    assert arena.is_used == bool(taken)
    for slot in taken:
        arena.give_back(slot)
    assert arena.take(END - START) == Slot(START, END), "all bytes have come back"


def test_a_gap_between_slots_is_used_again() -> None:
    arena = Arena(0, 4 * ALIGNMENT)
    slots = [arena.take(ALIGNMENT) for _ in range(4)]
    assert arena.take(1) is None
    assert slots[1] is not None and slots[2] is not None
    arena.give_back(slots[1])
    arena.give_back(slots[2])
    assert arena.take(2 * ALIGNMENT) == Slot(ALIGNMENT, 3 * ALIGNMENT)
