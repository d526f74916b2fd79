"""A deployment that cannot start raises an error of the right type, and ends its processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dist_aclgraph.actors.deployment import deployment
from dist_aclgraph.config import Config
from dist_aclgraph.errors import (
    ConfigError,
    MissingTensorError,
    PlacementError,
    StreamBudgetError,
    StreamExhaustedError,
    WorkerError,
)
from tests.actors.leftovers import assert_all_npus_are_free
from tests.checkpoints import copy_of
from tests.deployments import make_deployment_config
from tests.lockstep import lockstep

DEMO = Path(__file__).parents[3] / "models" / "tiny-deepseek"
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


def start(config: Config) -> None:
    """Start a deployment whose start should fail; stop it at once if it starts."""
    deployment.start(config).shut_down()


def start_ranks(config: Config) -> None:
    """Start the ranks without Ray. The test expects that a rank or the negotiation fails."""
    with lockstep(config):
        pass


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert_all_npus_are_free()


def test_a_missing_tensor_is_named(checkpoint: Path, tmp_path: Path) -> None:
    directory = copy_of(checkpoint, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})

    with pytest.raises(MissingTensorError, match=r"layers\.2\.mlp\.down_proj"):
        start(make_deployment_config(directory, parallel={"tp": 2}))


def test_more_npus_than_the_cluster_has_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    directory = copy_of(checkpoint, tmp_path, num_attention_heads=16, num_key_value_heads=16)

    with pytest.raises(PlacementError, match="16 NPUs"):
        start(make_deployment_config(directory, parallel={"tp": 16}))


def test_too_few_streams_for_one_bucket_are_refused(checkpoint: Path) -> None:
    emulator = {"strict": False, "streams": 34}

    with pytest.raises(StreamBudgetError, match="rank 0 offers"):
        start_ranks(make_deployment_config(checkpoint, device={"emulator": emulator}))


@pytest.mark.slow
def test_an_operator_that_fails_at_start_is_reported_for_its_rank(checkpoint: Path) -> None:
    fault = {"op": "aclnnSwiGlu", "call": 1, "rank": 1}
    config = make_deployment_config(
        checkpoint,
        parallel={"tp": 2},
        device={"emulator": {"strict": False, "fault": fault}},
        timeouts={"negotiate_s": 20.0, "step_s": 5.0, "stop_s": 2.0},
    )

    # The device reports the failure at a later call, with the code 507015 (an operator failed).
    with pytest.raises(WorkerError, match=r"aclnnSwiGlu|507015") as caught:
        start(config)

    assert (caught.value.rank, caught.value.phase) == (1, "NEGOTIATING")


@pytest.mark.slow
def test_a_worker_that_stalls_at_start_is_named_in_bounded_time(checkpoint: Path) -> None:
    fault = {"op": "aclnnSwiGlu", "call": 1, "kind": "stall", "rank": 1, "stall_s": 100.0}
    config = make_deployment_config(
        checkpoint,
        parallel={"tp": 2},
        device={"emulator": {"strict": False, "fault": fault}},
        timeouts={"negotiate_s": 5.0, "stop_s": 2.0},
    )

    with pytest.raises(WorkerError, match="1") as caught:
        start(config)

    assert caught.value.phase == "NEGOTIATING"


@pytest.mark.slow
def test_a_device_without_streams_for_the_runtime_is_named_by_its_rank(checkpoint: Path) -> None:
    emulator = {"strict": False, "streams_by_rank": {1: 24}}
    config = make_deployment_config(
        checkpoint, parallel={"tp": 2}, device={"kind": "emulated", "emulator": emulator}
    )

    with pytest.raises(StreamExhaustedError, match="rank 1 in"):
        start(config)


def test_weights_that_a_device_does_not_hold_are_refused_before_they_are_read(
    checkpoint: Path, tmp_path: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | {"vocab_size": 200_000}
    (tmp_path / "config.json").write_text(json.dumps(config))  # there are no weights
    emulator = {"strict": False, "memory_mb": 64}

    with pytest.raises(
        ConfigError, match=r"of the NPU of rank \d, which has 0\.06; weights .*: raise"
    ):
        start_ranks(
            make_deployment_config(
                tmp_path, parallel={"tp": 2}, device={"kind": "emulated", "emulator": emulator}
            )
        )


def test_a_length_that_the_cache_does_not_hold_is_refused_before_weights_are_read(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)

    with pytest.raises(ConfigError, match=r"max_model_len is 512; 3 KV blocks .* of 257"):
        start_ranks(make_deployment_config(tmp_path, max_model_len=512, kv={"num_blocks": 3}))


def test_an_exchange_that_is_not_to_be_had_is_refused_before_weights_are_read(
    tmp_path: Path,
) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)
    parallel = {"dp": 2, "ep": 2, "exchange": "mc2"}

    with pytest.raises(ConfigError, match=r"parallel\.exchange is mc2, .* dtype is float32"):
        start_ranks(make_deployment_config(tmp_path, parallel=parallel))
