"""On emulated NPUs, processes are forked if there are more processes than cores; otherwise, Ray
starts them.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.actors.cluster.choose_starter import choose_starter
from dist_aclgraph.actors.forks.forking_starter import ForkingStarter
from dist_aclgraph.actors.host import processes
from dist_aclgraph.actors.host.process_starter import ProcessStarter
from dist_aclgraph.config import Config, load_config
from dist_aclgraph.device import kind as device_kind

TP = 4
NUM_PROCESSES = TP + 1  # the workers and the engine


def config_of(kind: str) -> Config:
    return load_config(
        "configs/tiny-qwen3.yaml", {"device.kind": kind, "parallel.tp": TP, "parallel.dp": 1}
    )


def give_cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))


@pytest.fixture
def npu_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this machine look like a machine with an NPU."""
    (tmp_path / "davinci0").touch()
    monkeypatch.setattr(device_kind, "DEV", tmp_path)


@pytest.mark.parametrize("cores", [1, NUM_PROCESSES, 64])
@pytest.mark.parametrize("kind", ["npu", "auto"])
def test_nothing_is_forked_on_a_host_with_an_npu(
    npu_host: None, monkeypatch: pytest.MonkeyPatch, kind: str, cores: int
) -> None:
    give_cores(monkeypatch, cores)
    before = processes.children(os.getpid())
    with closing(choose_starter(config_of(kind))) as starter, starter.ray_settings() as settings:
        assert (starter.command(config_of(kind)), settings) == (None, {})
        assert starter.open_handles(os.getpid()) == []
        assert processes.children(os.getpid()) == before


@pytest.mark.parametrize("kind", ["npu", "auto"])
def test_a_configuration_of_an_npu_that_is_rolled_out_is_not_forked(
    npu_host: None, kind: str
) -> None:
    before = processes.children(os.getpid())
    with closing(ForkingStarter()) as starter:
        starter.command(config_of(kind))

        assert processes.children(os.getpid()) == before


@pytest.mark.parametrize("cores, expected", [(NUM_PROCESSES, ProcessStarter), (4, ForkingStarter)])
def test_emulated_processes_are_forked_where_they_outnumber_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, expected: type[Any]
) -> None:
    give_cores(monkeypatch, cores)

    assert type(choose_starter(config_of("emulated"))) is expected


def test_an_npu_that_is_on_another_node_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_kind, "DEV", tmp_path)

    assert type(choose_starter(config_of("npu"))) is ProcessStarter
