"""If the deployment's configuration replaces values of the model's config.json, all ranks use the
new values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.checkpoints import YARN_ROPE, copy_of, make_prompts, make_reference
from tests.deployments import greedy_params, make_deployment_config
from tests.lockstep import lockstep


def generate(directory: Path, **keys: Any) -> list[list[int]]:
    with lockstep(make_deployment_config(directory, parallel={"tp": 2}, **keys)) as group:
        answers = group.generate(make_prompts([7, 90]), greedy_params(6))
    return [answer.tokens for answer in answers]


def test_an_override_gives_the_tokens_of_a_changed_file(npu: Any, tmp_path: Path) -> None:
    plain, scaling = tmp_path / "plain", {"rope_scaling": YARN_ROPE}
    make_reference("Qwen3ForCausalLM", plain, num_hidden_layers=1)
    changed = copy_of(plain, tmp_path / "changed", **scaling)

    want = generate(changed)

    assert generate(plain, model_overrides=scaling) == want != generate(plain)
