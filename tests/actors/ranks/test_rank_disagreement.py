"""If ranks have different models, the group notices this before the first replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.actors.capture.graph_transaction import GraphTransaction
from dist_aclgraph.errors import RankDisagreementError
from dist_aclgraph.planning.plan import CaptureFailure
from tests.actors.local_ranks import LocalRanks, make_local_config, start_rank
from tests.checkpoints import make_reference
from tests.plans import decode_graph, pieces

GRAPHS = [decode_graph(8), pieces(16)]


@pytest.fixture(scope="module")
def other_checkpoint(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shallow")
    make_reference("Qwen3ForCausalLM", directory, num_hidden_layers=2)
    return directory


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_a_rank_with_another_model_is_named_with_the_graph(
    checkpoint: Path, other_checkpoint: Path, graph: Any
) -> None:
    models = [checkpoint, checkpoint, other_checkpoint]
    ranks = LocalRanks(
        [start_rank(make_local_config(m), rank, GRAPHS) for rank, m in enumerate(models)]
    )
    before = [answer.live_bytes for answer in ranks.carry_out("prepare", 1.0, graph)]

    with pytest.raises(RankDisagreementError, match=f"captured other operators for {graph}") as e:
        GraphTransaction(ranks, 1.0, 1.0).capture(graph)

    assert (e.value.rank, e.value.phase) == (2, "CAPTURING")
    assert [answer.live_bytes for answer in ranks.carry_out("prepare", 1.0, graph)] == before


def test_ranks_with_one_model_agree(checkpoint: Path) -> None:
    config = make_local_config(checkpoint)
    ranks = LocalRanks([start_rank(config, rank, GRAPHS) for rank in range(2)])

    for graph in GRAPHS:
        assert not isinstance(GraphTransaction(ranks, 1.0, 1.0).capture(graph), CaptureFailure)
