from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.arrays.packing import ALIGNMENT, pack_parts


@given(st.lists(st.integers(0, 1000), max_size=8))
def test_parts_begin_on_aligned_places_and_do_not_overlap(sizes: list[int]) -> None:
    parts, size = pack_parts(sizes)

    assert [part.stop - part.start for part in parts] == sizes
    assert all(part.start % ALIGNMENT == 0 for part in parts)
    ends = [0, *(part.stop for part in parts)]
    assert all(part.start >= end for part, end in zip(parts, ends, strict=False))
    assert ends[-1] <= size < sum(sizes) + ALIGNMENT * (len(sizes) + 1)
