"""A report describes the state of all groups at one moment, even if some engines answer late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dist_aclgraph.actors.controller import controller
from dist_aclgraph.actors.controller.controller import Controller
from dist_aclgraph.actors.controller.term import Term
from dist_aclgraph.config import make_config
from dist_aclgraph.files.shipped import shipped


def test_a_group_that_comes_while_engines_are_asked_is_not_reported_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "leave_with_raylet", lambda: None)
    context = SimpleNamespace(gcs_address="127.0.0.1:1")
    monkeypatch.setattr(controller.ray, "get_runtime_context", lambda: context)
    config = make_config({"model": str(shipped("models") / "tiny-qwen3")})
    made = Controller(config, "some", Term(0, "a token"))
    serving = SimpleNamespace(
        groups=["dead"], num_missing=1, watch=SimpleNamespace(losses=lambda: list(serving.lost)),
        lost=["group 0: its node is gone"],
    )  # fmt: skip

    def ask(groups: list[Any]) -> list[dict[str, Any]]:
        serving.groups, serving.num_missing, serving.lost = ["new"], 0, []
        return [{"name": group} for group in groups]

    monkeypatch.setattr(made, "_serving", serving)
    monkeypatch.setattr(made, "_upkeep", SimpleNamespace(trouble="", failure=""))
    monkeypatch.setattr(made, "_reports_of", ask)

    before, after = made.report(), made.report()

    assert (before["name"], before["missing_groups"]["count"]) == ("dead", 1)
    assert before["lost_groups"] == ["group 0: its node is gone"]
    assert (after["name"], after["missing_groups"]["count"], after["lost_groups"]) == ("new", 0, [])
