"""Each checkpoint of ``made_checkpoints`` gives the same tokens as in transformers, or is refused
with one sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.planning.planner import Planner
from tests.checkpoints import logprobs
from tests.deployments import Answer, greedy_params, make_deployment_config
from tests.lockstep import lockstep
from tests.parity.conftest import Reference
from tests.parity.made_checkpoints import NUM_TOKENS, Made, make_all, write
from tests.parity.rounding import assert_best_but_for_rounding
from tests.slow import rare_unless

NUM_QUICK = 8
MADE = make_all()


@pytest.mark.parametrize(
    "made", rare_unless(lambda made: made in MADE[:NUM_QUICK], MADE), ids=lambda made: made.name
)
def test_a_made_checkpoint_gives_the_tokens_of_transformers_or_is_refused(
    npu: Any, tmp_path: Path, made: Made
) -> None:
    directory, reference = write(made, tmp_path)
    config = make_deployment_config(
        directory,
        kv={"block_size": 16, "num_blocks": 64},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 64},
        **made.deployment,
    )

    if made.refusal is not None:
        with pytest.raises(DistAclGraphError, match=made.refusal) as refused:
            Planner.from_config(config)
        assert "\n" not in str(refused.value)
        return

    with lockstep(config) as group:
        prompts = make_prompts(made)
        answers = group.generate(prompts, greedy_params(NUM_TOKENS, logprobs=3))

    model = read_model(reference)
    if isinstance(made.quantised, str):
        tokens = [answer.tokens for answer in answers]
        assert_best_but_for_rounding(Reference(reference, model, prompts, []), tokens)
    else:
        assert_greedy(model, prompts, answers)


def make_prompts(made: Made) -> list[list[int]]:
    random = torch.Generator().manual_seed(len(made.name))
    return [
        torch.randint(made.sizes["vocab_size"], (length,), generator=random).tolist()
        for length in made.lengths
    ]


def read_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def assert_greedy(model: Any, prompts: list[list[int]], answers: list[Answer]) -> None:
    """Assert that transformers finds each token of the answers the most probable one at its
    position.
    """
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = logprobs(model, prompt, answer.tokens)
        assert answer.tokens == expected.argmax(-1).tolist()
        for row, found in zip(expected, answer.logprobs, strict=True):
            ids = unpack_ints(found.token_ids).tolist()
            torch.testing.assert_close(row[ids], torch.tensor(found.logprobs), rtol=0, atol=1e-3)
