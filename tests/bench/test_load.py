"""The bench that loads weights reads the requested number of bytes."""

from __future__ import annotations

from math import prod

import pytest

from benchmarks.load import make_shape
from benchmarks.start import Phases
from dist_aclgraph.actors.controller.controller import Progress


@pytest.mark.parametrize("num_bytes", [1e9, 4e9])
def test_a_shape_takes_about_the_bytes_that_were_asked_for(num_bytes: float) -> None:
    elements = sum(prod(size) for size in make_shape(num_bytes).sizes().values())

    assert 2 * elements == pytest.approx(num_bytes, rel=0.07)


def test_only_the_state_of_loading_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 13.5, 14.0, 15.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    phases = Phases()

    for state in ("PLACING", "LOADING", "LOADING", "NEGOTIATING", "CAPTURING"):
        phases.show(Progress(state))
    phases.end()

    assert phases.seconds["LOADING"] == 3.5
