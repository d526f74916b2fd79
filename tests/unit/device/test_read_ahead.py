"""Each rank of a node reads a part of the files in advance. Together, the ranks read all files."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.models import read_ahead as module
from dist_aclgraph.models.read_ahead import CHUNK_BYTES, Neighbour, read_ahead, turns


@given(
    st.lists(st.integers(0, 5 * CHUNK_BYTES), max_size=4),
    st.integers(1, 7),
)
def test_ranks_of_a_node_ask_for_each_byte_once_and_in_order(sizes: list[int], count: int) -> None:
    asked = [list(turns(sizes, Neighbour(index, count))) for index in range(count)]

    at = [(index, 0) for index, size in enumerate(sizes) if size]
    for turn in zip_longest(*asked):
        for index, begin, num_bytes in filter(None, turn):
            assert at[0] == (index, begin)
            end = begin + num_bytes
            at[:1] = [(index, end)] if end < sizes[index] else []
    assert not at


def test_a_rank_asks_for_every_chunk_that_is_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, asked = [tmp_path / "a", tmp_path / "b"], []
    for file, size in zip(files, (2 * CHUNK_BYTES + 7, 10), strict=True):
        with file.open("wb") as opened:
            opened.truncate(size)
    monkeypatch.setattr("os.posix_fadvise", lambda fd, at, count, why: asked.append((at, count)))

    thread = read_ahead(files, Neighbour(1, 2))
    assert thread is not None
    thread.join()

    assert asked == [(CHUNK_BYTES, CHUNK_BYTES), (0, 10)]


def test_files_that_do_not_fit_into_memory_are_not_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    monkeypatch.setattr(module, "_available_bytes", lambda: 7)

    assert read_ahead([tmp_path / "a"], Neighbour()) is None
