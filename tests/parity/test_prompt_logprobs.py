"""Log-probabilities of prompts equal those of transformers. Prompts run in chunks, with other
requests, and more than once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_aclgraph.arrays.ints import unpack_ints
from tests.deployments import Answer, greedy_params, make_deployment_config
from tests.lockstep import Lockstep, lockstep
from tests.parity.conftest import Reference
from tests.slow import slow

NUM_TOKENS = 4


def assert_equal(reference: Reference, index: int, answer: Answer, num_best: int) -> None:
    """Compare the log-probabilities of a prompt's tokens, and of the most probable tokens at each
    position.
    """
    prompt, rows = reference.prompts[index], answer.prompt_logprobs
    with torch.no_grad():
        exact = torch.log_softmax(reference.model(torch.tensor([prompt])).logits[0].float(), -1)
    assert len(rows) == len(prompt) - 1
    for place, row in enumerate(rows):
        ids = unpack_ints(row.token_ids).tolist()
        own = prompt[place + 1]
        assert ids[0] == own
        assert len(ids) == 1 + num_best
        assert row.logprobs == pytest.approx(exact[place, ids].tolist(), abs=1e-4)
        best = exact[place].topk(max(1, num_best)).values.tolist()
        assert list(row.logprobs[1:]) == pytest.approx(best[:num_best], abs=1e-4)
        higher = exact[place] - exact[place, own]
        assert int((higher > 1e-4).sum()) < row.rank <= int((higher > -1e-4).sum())


def answers(group: Lockstep, reference: Reference, name: str) -> list[Answer]:
    """Answer all prompts; every second answer contains its prompt's log-probabilities."""
    asked = [
        group.submit(
            f"{name}{i}",
            prompt,
            greedy_params(NUM_TOKENS, prompt_logprobs=i % 5 if i % 2 else None),
        )
        for i, prompt in enumerate(reference.prompts)
    ]
    group.finish()
    return asked


@pytest.mark.parametrize(
    ("architecture", "mode", "layout"),
    [
        ("Qwen3ForCausalLM", "FULL_AND_PIECEWISE", {"tp": 2}),
        slow("Qwen3ForCausalLM", "FULL", {"tp": 1}),
        slow("Qwen3ForCausalLM", "NONE", {"tp": 2}),
        slow("DeepseekV3ForCausalLM", "FULL_DECODE_ONLY", {"tp": 2, "dcp": 2}),
    ],
)
def test_log_probabilities_of_prompts_equal_those_of_transformers(
    references: Any, architecture: str, mode: str, layout: dict[str, int]
) -> None:
    reference = references(architecture)
    config = make_deployment_config(
        reference.directory,
        graph={"mode": mode},
        parallel=layout,
        kv={"block_size": 16},
        scheduler={"max_num_batched_tokens": 48},
        speculative={"num_tokens": 1 if "Deepseek" in architecture else 0},
    )
    with lockstep(config) as group:
        # In the second run, prefixes are cached; in the third run, requests are preempted.
        for name, num_blocks in [("a", None), ("b", None), ("c", 24)]:
            if num_blocks is not None:
                group.restart(num_blocks=num_blocks)
            for i, answer in enumerate(answers(group, reference, name)):
                assert answer.tokens == reference.tokens[i][:NUM_TOKENS]
                if i % 2:
                    assert_equal(reference, i, answer, i % 5)
                else:
                    assert not answer.prompt_logprobs
