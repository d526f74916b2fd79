"""What ranks of a node read ahead of each other."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.models import read_ahead as module
from dist_aclgraph.models.read_ahead import CHUNK_BYTES, Neighbour, part, read_ahead


@given(st.integers(0, 1 << 40), st.integers(1, 64))
def test_ranks_of_a_node_ask_for_each_byte_once(size: int, count: int) -> None:
    parts = [part(size, Neighbour(index, count)) for index in range(count)]

    assert parts[0][0] == 0
    assert parts[-1][1] == size
    assert all(end == begin for (_, end), (begin, _) in pairwise(parts))


def test_a_rank_asks_for_its_part_of_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, asked = [tmp_path / "a", tmp_path / "b"], []
    for file, size in zip(files, (3 * CHUNK_BYTES, 10), strict=True):
        with file.open("wb") as opened:
            opened.truncate(size)
    monkeypatch.setattr("os.posix_fadvise", lambda fd, at, count, why: asked.append((at, count)))

    thread = read_ahead(files, Neighbour(1, 2))
    assert thread is not None
    thread.join()

    half = 3 * CHUNK_BYTES // 2
    assert asked == [(half, CHUNK_BYTES), (half + CHUNK_BYTES, half - CHUNK_BYTES), (5, 5)]


def test_what_memory_does_not_hold_is_left_to_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    monkeypatch.setattr(module, "_available_bytes", lambda: 7)

    assert read_ahead([tmp_path / "a"], Neighbour()) is None
