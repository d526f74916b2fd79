"""Errors in a model's files are raised at once, before Ray, a worker or the emulator starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_aclgraph.actors.deployment import deployment
from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError, ModelError, UnsupportedModelError
from tests.checkpoints import copy_of
from tests.deployments import make_deployment_config

CHECKPOINT = Path(__file__).parents[3] / "models" / "tiny-qwen3"


@pytest.fixture(autouse=True)
def no_cluster_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each call of Ray fail with an unexpected error. The refused starts must not call Ray."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")


def start(config: Config) -> None:
    """Start a deployment whose start should fail; stop it at once if it starts."""
    deployment.start(config).shut_down()


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        start(make_deployment_config(tmp_path / "nowhere"))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    directory = copy_of(CHECKPOINT, tmp_path, architectures=["MambaForCausalLM"])

    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        start(make_deployment_config(directory))


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tp is 3"):
        start(make_deployment_config(CHECKPOINT, parallel={"tp": 3}))


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        start(make_deployment_config(CHECKPOINT, max_model_len=100_000))


def test_weights_that_are_cut_off_are_named(tmp_path: Path) -> None:
    directory = copy_of(CHECKPOINT, tmp_path)
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])

    with pytest.raises(ModelError, match="is cut off: 100 bytes are missing"):
        start(make_deployment_config(directory))
