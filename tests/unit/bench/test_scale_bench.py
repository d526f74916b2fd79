"""The bench of large groups runs. The test does not check the measured times."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale import HOST, NODE, Shape, run
from dist_aclgraph.actors.wire.addresses import Place


@pytest.mark.parametrize(("way", "host"), [("unix", None), ("curve", HOST)])
def test_all_workers_of_a_group_get_their_part_of_each_plan(
    tmp_path: Path, way: str, host: str | None
) -> None:
    row = run(Place(NODE, str(tmp_path), host), Shape(3, 2), requests=2, steps=4, way=way)

    assert row["requests"] == 6
    assert row["plan_bytes"] >= 4 * row["rank_bytes"], "each part is sent to two workers"
    assert row["engine_ms"] > 0 and row[way]["send_ms"] > 0 and row[way]["receive_ms"] > 0
