from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from dist_aclgraph.environment import disable_backend_autoload
from dist_aclgraph.logs import ACCESS, PACKAGE, RAY
from tests import laws

gc.disable()  # while pytest collects tests, it creates nearly no garbage
# These variables are set before any test imports torch.
disable_backend_autoload()
# Deployments of tests write their logs to this folder. Processes of Ray inherit the variable.
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir(), f"tests-state-{os.getuid()}"))

OUR_VARIABLES = ("ASCEND_", "HCCL_", "TASK_QUEUE_ENABLE", "DIST_ACLGRAPH_")

# Examples have no time limit, because a shared machine sometimes stalls.
settings.register_profile("quick", deadline=None, max_examples=laws.QUICK)
settings.register_profile("full", deadline=None, max_examples=laws.FULL)
settings.load_profile("quick")


LONGEST = (Path(__file__).parent / "longest_files.txt").read_text().split()


@pytest.hookimpl(tryfirst=True)  # runs before xdist's hook, because that hook reads groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that all pytest processes end at about the same time.

    A process runs one file after another. All tests that use the session's Ray cluster run in the
    same process, so that only one cluster starts.
    """
    place = {Path(__file__).parent / name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    of_cluster = {i.path for i in items if "ray_cluster" in getattr(i, "fixturenames", ())}
    for item in items:
        file = item.nodeid.partition("::")[0]
        group = "ray_cluster" if item.path in of_cluster else file
        item.add_marker(pytest.mark.xdist_group(group))


def freeze_objects() -> None:
    """Make the garbage collector ignore all objects that exist at this point: modules and collected
    tests.

    There are millions of these objects, and they live as long as the process. Without this
    function, each full collection would take a second.
    """
    gc.collect()
    gc.freeze()


def use_one_thread() -> None:
    """Let torch compute with one thread in this process. More threads would wait in busy loops, and
    use more CPU time than they save.
    """
    import torch

    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    freeze_objects()
    gc.enable()
    if "torch" in sys.modules:
        use_one_thread()


@pytest.fixture(autouse=True, scope="module")
def loggers_of_a_module() -> Iterator[None]:
    """After the tests of a module, undo the changes that its services have made to loggers."""
    loggers = [logging.getLogger(name) for name in (PACKAGE, ACCESS, RAY)]
    before = [(each.level, each.propagate, list(each.handlers)) for each in loggers]
    yield
    for each, (level, propagate, handlers) in zip(loggers, before, strict=True):
        each.handlers[:], each.propagate = handlers, propagate
        each.setLevel(level)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove environment variables that would change the results of tests."""
    for name in list(os.environ):
        if name.startswith(OUR_VARIABLES):
            monkeypatch.delenv(name)


@pytest.fixture
def heard_signals() -> Iterator[None]:
    """Make this process and its children react to SIGINT and SIGHUP.

    pytest may ignore these signals: a process that a shell starts with ``&`` ignores SIGINT, and a
        process that ``nohup`` starts ignores SIGHUP.
    """
    handlers: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def npu() -> Any:
    """The emulated NPU of this process. It is not strict: its operators also accept float32, so
    that tests can compare results exactly.

    A process cannot change the settings of its emulator. Tests that need other settings use
    separate processes.
    """
    from dist_aclgraph.config import make_config
    from dist_aclgraph.device.npu import open_npu

    config = make_config(
        {"model": "unused", "device": {"kind": "emulated", "emulator": {"strict": False}}}
    )
    opened = open_npu(config.device, 0)
    freeze_objects()
    use_one_thread()
    return opened


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray cluster with eight emulated NPUs for all tests of the session."""
    import ray

    from dist_aclgraph.actors.cluster.local_ray import start_ray
    from tests import deployments

    config = deployments.make_deployment_config("unused", parallel={"tp": 8})
    with deployments.session_starter(config) as starter:
        starter.command(config)  # starts the fork server while Ray starts
        start_ray(config, starter)
        yield
        ray.shutdown()
