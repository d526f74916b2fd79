"""The process of one question: it opens the device, runs the question and sends the answer."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from dist_aclgraph.config import DeviceConfig
from dist_aclgraph.device.kind import DeviceKind
from dist_aclgraph.environment import (
    disable_backend_autoload,
    environment_with,
    take_over_environment,
)
from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.probe.question import MISSING, REFUSED, STOPPED, Answer, Bench, Between, Probe
from dist_aclgraph.probe.questions import probe_named
from dist_aclgraph.probe.row import MAX_TEXT, Outcome

JOIN_S = 60.0
_CODE = re.compile(r"error code is (\d+)|\b([1-5]\d{5})\b")


class Task(msgspec.Struct, frozen=True):
    """The work of one child process.

    Attributes:
        device_id: the NPU that this process may use.
        meeting: a file through which the processes of a question find each other to form an HCCL
            world.
        output: the file to which libraries' output is written.
    """

    name: str
    kind: DeviceKind
    device: DeviceConfig
    device_id: int
    rank: int
    ranks: int
    meeting: Path
    output: Path


def main(task: Task, parent: Connection, plant: Callable[[], None] | None = None) -> None:
    """Send None to ``parent`` when the device is open, and send the outcome at the end.

    Args:
        plant: a function that is called when the device is open; tests use it to change the device.
    """
    _begin(task)
    try:
        probe = probe_named(task.name)
        bench = _open_bench(task, probe)
        if plant is not None:
            plant()
    except Exception as e:  # every error of a broken installation is reported as a row
        outcome = Outcome(
            "the device cannot be opened",
            code=_code_of(e),
            text=str(e)[:MAX_TEXT],
            was_asked=False,
        )
    else:
        parent.send(None)
        outcome = ask(probe, bench)
    parent.send(outcome)
    # Wait until the parent closes the pipe or dies, because another rank may still communicate with
    # this process.
    parent.poll(None)
    # Exit without destructors, because they might wait for a stopped device.
    os._exit(0)


def _begin(task: Task) -> None:
    os.setsid()  # only the parent gets Ctrl-C
    file = os.open(task.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    variables = {"ASCEND_RT_VISIBLE_DEVICES": str(task.device_id), "OMP_NUM_THREADS": "1"}
    take_over_environment(environment_with(variables))
    disable_backend_autoload()


def ask(probe: Probe, bench: Bench) -> Outcome:
    """Run the question, and return the outcome. If the device raises an error, the error is the
    answer.
    """
    begun = time.perf_counter()
    answer: str | float | Answer
    code = None
    try:
        answer = probe.call(bench)
        if bench.npu is not None:
            bench.synchronize()
    except Exception as e:  # Any error is an answer.
        code = _code_of(e)
        answer = Answer(_name_of_error(e, code), f"{type(e).__name__}: {e}")
    us = (time.perf_counter() - begun) * 1e6
    number = None
    if isinstance(answer, int | float):
        number = float(answer)
        unit = f" {probe.says.unit}" if isinstance(probe.says, Between) else ""
        answer = f"{number:.6g}{unit}"
    if isinstance(answer, str):
        answer = Answer(answer)
    return Outcome(
        found=answer.found,
        number=number,
        us=us,
        code=code,
        text=answer.text[:MAX_TEXT],
        chip=bench.npu.name if bench.npu is not None else "",
        cann=bench.npu.cann if bench.npu is not None else "",
    )


def _name_of_error(error: Exception, code: int | None) -> str:
    if code is not None and (code // 1000 == 507 or code == 107022):
        return STOPPED
    if isinstance(error, AttributeError | NotImplementedError):
        return MISSING
    is_refusal = isinstance(error, RuntimeError | DistAclGraphError)
    return REFUSED if is_refusal else f"failed ({type(error).__name__})"


def _code_of(error: Exception) -> int | None:
    found = _CODE.search(str(error))
    return int(found[1] or found[2]) if found else None


def _open_bench(task: Task, probe: Probe) -> Bench:
    if not probe.needs_device:
        return Bench()
    from dist_aclgraph.comm.groups import join_lockstep_group
    from dist_aclgraph.device.npu import open_npu, torch_npu

    npu = open_npu(task.device, task.rank)
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if task.ranks > 1:
        join_lockstep_group(f"file://{task.meeting}", task.rank, task.ranks, JOIN_S)
    return Bench(torch, torch_npu(), npu, task.rank, task.ranks)
