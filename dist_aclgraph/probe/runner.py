"""Runs questions one after the other, each in new processes with a time limit.

A question can hang, kill its process or stop the device. Then this event is recorded as the answer.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

import msgspec

from dist_aclgraph.config import DeviceConfig
from dist_aclgraph.device.kind import DeviceKind, npus_here
from dist_aclgraph.environment import visible_devices
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.probe.child import Task, main
from dist_aclgraph.probe.device_rules import RuleAnswer, answers_of
from dist_aclgraph.probe.question import Between, Probe
from dist_aclgraph.probe.row import MAX_TEXT, Outcome, Report, Row, judged

LOAD_S = 120.0  # time limit for loading torch_npu, opening the device and joining the other ranks
NEAR = 2.0  # two numbers count as equal if they differ by at most this factor
END_S = 5.0  # a child must end within this time after its answer
NO_ANSWER, DIED, CUT_OFF = "no answer", "the process died", "the run was cut off here"


class Runner:
    """Owns the child processes of the question that is running.

    Args:
        rules: a function that returns, for a chip and a version of CANN, a mapping from names of
            questions to known answers. Known answers replace the emulator's answers.
        child: the function that each child process runs. Its arguments are a ``Task`` and a pipe.
    """

    def __init__(
        self,
        kind: DeviceKind,
        device: DeviceConfig,
        rules: Callable[[str, str], Mapping[str, RuleAnswer]] = answers_of,
        child: Callable[..., None] = main,
    ) -> None:
        self._kind = kind
        self._context = context_of(kind)
        self._device = device
        self._rules = rules
        self._child = child

    def run(
        self,
        probes: Sequence[Probe],
        report: Report,
        save: Callable[[Report], None],
        on_row: Callable[[Row], None],
    ) -> None:
        """Run all questions that the report does not contain yet, and add their rows to the report.

        Args:
            save: a function that writes the report; it is called before and after each question.
            on_row: a function that is called with each new row.

        Raises:
            ConfigError: the report has answers of another chip or of another CANN.
        """
        report.rows = [row for row in report.rows if row.was_asked]
        known = {row.name for row in report.rows}
        for probe in probes:
            if probe.name in known:
                continue
            if report.running == probe.name:
                outcome = Outcome(CUT_OFF)  # the question may have crashed the machine
            else:
                report.running = probe.name
                save(report)
                try:
                    outcome = self._ask(probe)
                    if outcome.chip:
                        report.set_device(outcome.chip, outcome.cann)
                except (KeyboardInterrupt, ConfigError):
                    # This process is still running, so the question has not crashed the machine.
                    report.running = None
                    save(report)
                    raise
            row = judged(probe, self._expected(probe, report), outcome)
            report.rows.append(row)
            report.running = None
            save(report)
            on_row(row)

    def _expected(self, probe: Probe, report: Report) -> str | Between | None:
        expected = probe.expected(report.chip, report.cann)
        known = self._rules(report.chip, report.cann).get(probe.name)
        if known is None:
            return expected
        if isinstance(known, str):
            return known
        unit = expected.unit if isinstance(expected, Between) else ""
        return Between(known / NEAR, known * NEAR, unit)

    def _ask(self, probe: Probe) -> Outcome:
        ids = _device_ids(self._kind, probe.ranks)
        if len(ids) < probe.ranks:
            return Outcome(f"needs {probe.ranks} NPUs, found {len(ids)}", was_asked=False)
        with tempfile.TemporaryDirectory(prefix="probe-") as folder:
            children: list[_Child] = []
            try:
                for rank in range(probe.ranks):
                    children.append(self._start(probe, rank, ids[rank], Path(folder)))
                self._wait(probe, children)
                return _joined([child.outcome() for child in children])
            finally:
                for child in children:
                    child.end()

    def _start(self, probe: Probe, rank: int, device_id: int, folder: Path) -> _Child:
        task = Task(
            name=probe.name,
            kind=self._kind,
            device=self._device.model_copy(update={"task_queue": probe.task_queue}),
            device_id=device_id,
            rank=rank,
            ranks=probe.ranks,
            meeting=folder / "meeting",
            output=folder / f"{rank}.out",
        )
        return _Child(self._context, self._child, task)

    def _wait(self, probe: Probe, children: Sequence[_Child]) -> None:
        """Wait until each child has answered or ended, or until a time limit has passed."""
        deadline = time.monotonic() + LOAD_S
        has_begun = False
        while waiting := [child for child in children if not child.is_done]:
            ready = wait([child.pipe for child in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for child in waiting:
                if child.pipe in ready:
                    child.read()
            if not has_begun and all(child.has_begun or child.is_done for child in children):
                has_begun = True
                deadline = time.monotonic() + probe.limit_s


def context_of(kind: DeviceKind) -> ForkServerContext | SpawnContext:
    """Return the multiprocessing context that starts child processes. For the emulator, child
    processes are forked from a process that has loaded the emulator. For a real device, child
    processes start without loaded libraries.
    """
    if kind == "npu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dist_aclgraph.probe.preloaded"])
    return context


class _Child:
    """One process of a question.

    Attributes:
        pipe: receives the messages of the process. The pipe closes when the process ends.
        has_begun: whether the process has sent a message. The first message says that the device is
            open, or why the device could not be opened.
    """

    def __init__(
        self, context: ForkServerContext | SpawnContext, main: Callable[..., None], task: Task
    ) -> None:
        self.pipe, childs_end = context.Pipe()
        self.has_begun = self.is_done = False
        self._outcome: Outcome | None = None
        self._output = task.output
        self._process = context.Process(target=main, args=(task, childs_end))
        self._process.start()
        childs_end.close()

    def read(self) -> None:
        """Read a message of the process, or notice the end of the process."""
        try:
            self._outcome = self.pipe.recv()
            self.has_begun = True
            self.is_done = self._outcome is not None
        except (EOFError, ConnectionError):
            self.is_done = True

    def outcome(self) -> Outcome:
        """Return the answer, or the reason why there is no answer."""
        if self._outcome is not None:
            return self._outcome
        if not self.is_done:
            found = NO_ANSWER if self.has_begun else "the device was not opened in time"
            return Outcome(found, text=self._last_output(), was_asked=self.has_begun)
        self._process.join(END_S)
        code = self._process.exitcode or 0
        ending = f"signal {-code}" if code < 0 else f"exit status {code}"
        text = f"{ending}\n{self._last_output()}"
        return Outcome(DIED, text=text, was_asked=self.has_begun)

    def end(self) -> None:
        """End the process.

        A process that hangs in the driver cannot be ended, so it continues to exist.
        """
        self.pipe.close()
        self._process.join(END_S if self.is_done else 0)
        if self._process.is_alive() and self._process.pid:
            with suppress(ProcessLookupError):  # the process group does not exist yet
                # The question may have forked processes.
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join(END_S)

    def _last_output(self) -> str:
        if not self._output.exists():
            return ""
        # reads only the end, because the output may be very long
        with self._output.open("rb") as file:
            file.seek(-min(self._output.stat().st_size, MAX_TEXT // 2), os.SEEK_END)
            return file.read().decode(errors="replace")


def _device_ids(kind: DeviceKind, ranks: int) -> tuple[int, ...]:
    if kind == "emulated":
        return tuple(range(ranks))
    visible = visible_devices()
    if visible is not None:
        return visible
    return tuple(range(len(npus_here())))


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    """Join the outcomes of all ranks to one outcome."""
    first = outcomes[0]
    was_asked = all(outcome.was_asked for outcome in outcomes)
    if len({outcome.found for outcome in outcomes}) == 1:
        return msgspec.structs.replace(first, was_asked=was_asked)
    parts = [f"rank {rank}: {outcome.found}" for rank, outcome in enumerate(outcomes)]
    texts = [f"rank {rank}: {o.text}" for rank, o in enumerate(outcomes) if o.text]
    codes = [o.code for o in outcomes if o.code is not None]
    return msgspec.structs.replace(
        first,
        found="; ".join(parts),
        number=None,
        code=codes[0] if codes else None,
        text="\n".join(texts),
        was_asked=was_asked,
    )
