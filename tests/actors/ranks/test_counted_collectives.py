"""If measuring is on, a worker reports the bytes that the ranks sent to each other in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.checkpoints import make_reference
from tests.deployments import greedy_params, make_deployment_config
from tests.lockstep import lockstep

TP, LAYERS, HIDDEN, FLOAT_BYTES = 2, 2, 128, 4
PROMPT = [1, 2, 3, 4, 5]


def test_a_step_tells_its_collectives_and_their_bytes(npu: Any, tmp_path: Path) -> None:
    make_reference("Qwen3ForCausalLM", tmp_path, num_hidden_layers=LAYERS)
    config = make_deployment_config(
        tmp_path, parallel={"tp": TP}, graph={"sizes": (1,)}, profile=True
    )

    with lockstep(config) as group:
        group.submit("r", PROMPT, greedy_params(3))
        steps = []
        while (plan := group.schedule()) is not None:
            steps.append((plan.graph, group.run(plan)))

    assert [graph is None for graph, _ in steps] == [True, False, False]
    for graph, done in steps:
        num_tokens = len(PROMPT) if graph is None else 1
        # One all-reduce follows the embedding, each attention, and each feed-forward part. In an
        # all-reduce of two ranks, a rank first receives half of the other rank's values, and then
        # half of the sums.
        reduced = (2 * LAYERS + 1) * num_tokens * HIDDEN * FLOAT_BYTES
        for rank in done:
            assert rank.result.counted["collectives"] == rank.num_collectives > 2 * LAYERS
            assert rank.result.counted["collective_bytes"] >= reduced
    by_step = [done[0].result.counted for _, done in steps]
    assert by_step[1] == by_step[2]
    assert by_step[0]["collective_bytes"] > by_step[1]["collective_bytes"]
