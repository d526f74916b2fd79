"""A ledger records how many of a rank's streams each owner has taken."""

from __future__ import annotations

from typing import Any

from dist_aclgraph.actors.worker.stream_ledger import StreamLedger


class FakeNpu:
    def __init__(self) -> None:
        self.left = 100

    def available_streams(self) -> int:
        return self.left


def test_streams_of_one_operation_are_added() -> None:
    npu: Any = FakeNpu()
    ledger = StreamLedger(npu)

    for left in (96, 94):
        npu.left = left
        ledger.book("HCCL domains")

    assert ledger.taken == {"HCCL domains": 6}


def test_streams_that_become_free_are_not_counted_as_taken() -> None:
    npu: Any = FakeNpu()
    ledger = StreamLedger(npu)

    for left in (96, 100):
        npu.left = left
        ledger.book("main stream")

    assert ledger.taken == {}
