"""Puts questions one after another, each in processes of its own with a limit. A hang, a dead
process and a stopped device are answers; the next question gets new processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from dist_aclgraph.config import DeviceConfig
from dist_aclgraph.device.kind import DeviceKind, npus_here
from dist_aclgraph.environment import environment_with, visible_devices
from dist_aclgraph.probe.child import ANSWER, BEGUN, Task
from dist_aclgraph.probe.device_rules import RuleAnswer, answers_of
from dist_aclgraph.probe.question import Between, Probe
from dist_aclgraph.probe.row import MAX_TEXT, Outcome, Report, Row, judged

LOAD_S = 120.0  # limit of loading torch_npu, opening the device and joining the other ranks
NEAR = 2.0  # factor within which a number is as known
END_S = 5.0  # limit of a child's end after its answer
LOOK_S = 0.02
TAIL_BYTES = 64 << 10
CHILD = (sys.executable, "-m", "dist_aclgraph.probe.child")
NO_ANSWER, DIED, CUT_OFF = "no answer", "the process died", "the run was cut off here"


class Runner:
    """Owns the child processes of one question at a time. Does not know the questions.

    Args:
        device: the device of all questions.
        rules: known answers of a chip with a CANN, by name, in place of the emulator's.
        child: the program of a child process.
        longest_s: lowers the limits of all questions.
    """

    def __init__(
        self,
        kind: DeviceKind,
        device: DeviceConfig,
        rules: Callable[[str, str], Mapping[str, RuleAnswer]] = answers_of,
        child: Sequence[str] = CHILD,
        longest_s: float | None = None,
    ) -> None:
        self._kind = kind
        self._device = device
        self._rules = rules
        self._child = child
        self._longest_s = longest_s

    def run(
        self,
        probes: Sequence[Probe],
        report: Report,
        save: Callable[[Report], None],
        on_row: Callable[[Row], None],
    ) -> None:
        """Put all questions that the report does not have, and add their rows.

        Args:
            save: called before and after each question.
            on_row: called with each new row.
        """
        known = {row.name for row in report.rows}
        for probe in probes:
            if probe.name in known:
                continue
            if report.running == probe.name:
                outcome = Outcome(CUT_OFF)  # perhaps the question ended the machine
            else:
                report.running = probe.name
                save(report)
                try:
                    outcome = self._ask(probe)
                except KeyboardInterrupt:
                    report.running = None  # the user has ended the run, not the question
                    save(report)
                    raise
            report.chip = outcome.chip or report.chip
            report.cann = outcome.cann or report.cann
            row = judged(probe, self._expected(probe, report), outcome)
            report.rows.append(row)
            report.running = None
            save(report)
            on_row(row)

    def _expected(self, probe: Probe, report: Report) -> str | Between | None:
        expected = probe.expected(report.cann)
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
            children = [
                self._start(probe, rank, ids[rank], Path(folder)) for rank in range(probe.ranks)
            ]
            try:
                return _joined([child.outcome() for child in self._finished(probe, children)])
            finally:
                for child in children:
                    child.end()

    def _start(self, probe: Probe, rank: int, device_id: int, folder: Path) -> _Child:
        device = self._device.model_copy(update={"task_queue": probe.task_queue})
        task = Task(
            name=probe.name,
            kind=self._kind,
            device=device.model_dump_json(),
            rank=rank,
            ranks=probe.ranks,
            meeting=str(folder / "meeting"),
        )
        variables = {
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "ASCEND_RT_VISIBLE_DEVICES": str(device_id),
        }
        command = [*self._child, msgspec.json.encode(task).decode()]
        return _Child(command, environment_with(variables), folder / f"{rank}.out")

    def _finished(self, probe: Probe, children: list[_Child]) -> list[_Child]:
        """Wait until each child has answered or ended, or a limit is over."""
        limit_s = min(probe.limit_s, self._longest_s or probe.limit_s)
        deadline = time.monotonic() + LOAD_S
        has_begun = False
        while not all(child.is_done() for child in children):
            if not has_begun and all(child.has_begun() for child in children):
                has_begun = True
                deadline = time.monotonic() + limit_s
            if time.monotonic() > deadline:
                for child in children:
                    child.has_hung = True
                break
            time.sleep(LOOK_S)
        return children


class _Child:
    """One process of a question, in a process group of its own; its output goes to a file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], out: Path) -> None:
        self._out = out
        self.has_hung = False
        with out.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )

    def has_begun(self) -> bool:
        return BEGUN in self._tail() or self.is_done()

    def is_done(self) -> bool:
        # In this order: the answer may be written between the two.
        return self._process.poll() is not None or ANSWER in self._tail()

    def outcome(self) -> Outcome:
        """Return the answer, or the reason why there is none."""
        tail = self._tail()
        lines = [line for line in tail.splitlines() if line.startswith(ANSWER)]
        if lines:
            with suppress(msgspec.MsgspecError):
                return msgspec.json.decode(lines[-1].removeprefix(ANSWER), type=Outcome)
        if self.has_hung:
            asked = BEGUN in tail
            found = NO_ANSWER if asked else "the device was not opened in time"
            return Outcome(found, text=tail[-MAX_TEXT:])
        code = self._process.poll()
        ending = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        return Outcome(DIED, text=f"{ending}\n{tail[-MAX_TEXT // 2 :]}")

    def end(self) -> None:
        """End the process; one that hangs in the driver is left behind."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if self.has_hung else END_S)
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)

    def _tail(self) -> str:
        with self._out.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode(errors="replace")


def _device_ids(kind: DeviceKind, ranks: int) -> tuple[int, ...]:
    """Return the ids of devices that a question may use."""
    if kind == "emulated":
        return tuple(range(ranks))
    visible = visible_devices()
    if visible is not None:
        return visible
    return tuple(sorted(int(name.removeprefix("davinci")) for name in npus_here()))


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the answer of all ranks as one."""
    first = outcomes[0]
    if len({outcome.found for outcome in outcomes}) == 1:
        return first
    parts = [f"rank {rank}: {outcome.found}" for rank, outcome in enumerate(outcomes)]
    texts = [f"rank {rank}: {o.text}" for rank, o in enumerate(outcomes) if o.text]
    codes = [o.code for o in outcomes if o.code is not None]
    return msgspec.structs.replace(
        first,
        found="; ".join(parts),
        number=None,
        code=codes[0] if codes else None,
        text="\n".join(texts),
    )
