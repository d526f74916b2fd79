"""Records the last steps of a rank in a file that outlives the process, like a flight recorder.

A rank records the beginning of each step, and each change of the host's state (``STATES``). For
each of these events, the rank writes one or two records to mapped memory. The rank waits neither
for the device nor for the disk.

| offset | content |
| --- | --- |
| 0 | ``_HEAD``: the process, rank, group and host that wrote the file |
| ``STATE_AT`` | ``_STATE``: the last state of the host, and the time of this record |
| ``_PLACE_AT`` | ``_PLACE``: the last collective that the device began before the last heartbeat |
| ``WORDS_AT`` | the error that ended the steps, or the command for graphs; UTF-8, ends with zeros |
| ``STEPS_AT`` | ``NUM_STEPS`` records: ``_STEP``, then the end of each stage of ``STAGES`` |
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dist_aclgraph.actors.host import processes
from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.comm.collective_place import NUM_STEPS, CollectivePlace
from dist_aclgraph.config import Config
from dist_aclgraph.files.log_folder import last_change_s, open_folder
from dist_aclgraph.planning.commands import GraphCommand
from dist_aclgraph.steps.step import RankPlan

logger = logging.getLogger(__name__)

FOLDER, SUFFIX = "steps", ".steps"  # folder of recordings in the log folder; suffix of recordings
MAGIC = b"STEPS001"
# Maximum number of files per node. If there are more, the oldest files of ended ranks are removed.
KEPT_FILES = 64
STAGES = ("rows", "inputs", "upload", "lengths", "forward", "replay", "update", "sample", "read")
# States of the host. The name of a stage means that this stage has ended. BEGUN: a step has begun,
# and no stage has ended. IDLE: the host waits for a plan. WAITS: the host waits for the device.
# COMMAND: the host carries out a command for graphs. ENDED: the host was told to stop. FAILED: an
# error has ended the steps.
BEGUN, IDLE, WAITS, COMMAND, ENDED, FAILED = "begun", "idle", "waits", "command", "ended", "failed"
STATES = (*STAGES, BEGUN, IDLE, WAITS, COMMAND, ENDED, FAILED)
_NUMBER_OF = {name: number for number, name in enumerate(STATES)}
MODES = ("NONE", "PIECEWISE", "FULL")
MAX_WORDS_BYTES = 512
NO_GROUP = -1

_HEAD = struct.Struct("=8siiii64s")  # MAGIC, pid, rank, index in the group, group, host
_GROUP_AT = struct.calcsize("=8siii")
_STATE = struct.Struct("=IQ")  # state, time in ns since 1970
# The fields of a step: epoch, plan version and step; mode and tokens of the graph; requests and
# tokens of the rank; digest of the plan; data-parallel rank; digest of this rank's batch; time in
# ns since 1970.
_STEP = struct.Struct("=iiqiiiiIiIQ")
# The time at which a stage ended, in microseconds since the step's beginning; 0 if the stage has
# not ended.
_LAP = struct.Struct("=I")
MAX_LAP_US = 0xFFFFFFFF
STATE_AT, WORDS_AT, STEPS_AT, STEP_BYTES = 128, 256, 1024, 128
_COUNT_AT, _COUNT = STATE_AT + 32, struct.Struct("=Q")  # number of steps begun
# The fields: 1 if the device marks its collectives; the step modulo NUM_STEPS; the code of the
# collective's place.
_PLACE_AT, _PLACE = STATE_AT + 48, struct.Struct("=IIi")
_LAPS_AT = _STEP.size
_NO_LAPS = bytes(_LAP.size * len(STAGES))
SIZE = STEPS_AT + NUM_STEPS * STEP_BYTES


class StepRecorder:
    """A recorder without a file, which records nothing."""

    def join(self, group: int | None) -> None:
        """Record the number of the group that the rank has joined."""

    def begin(self, plan: RankPlan) -> None:
        """Record that a step begins."""

    def lap(self, stage: str) -> None:
        """Record that a stage of the last step has ended on the host."""

    def wait(self, is_waiting: bool) -> None:
        """Record that the host begins to wait for the device, or stops waiting."""

    def idle(self) -> None:
        """Record that the host waits for the next plan."""

    def command(self, command: GraphCommand) -> None:
        """Record that the host carries out a command for graphs."""

    def see(self, mark: tuple[int, int] | None) -> None:
        """Record what ``CollectiveMarks.read`` has returned. Any thread may call this."""

    def end(self) -> None:
        """Record that the rank was told to stop. If the rank has failed before, the failure stays
        recorded.
        """

    def fail(self, error: BaseException) -> None:
        """Record the error that has ended the steps."""


class FileRecorder(StepRecorder):
    """Records the steps of one rank in one group. Owns the mapping.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, folder: Path, rank: int, group_rank: int) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        _sweep(folder)
        path = folder / f"rank-{rank}-{os.getpid()}-{time.time_ns()}{SUFFIX}"
        with open(path, "x+b") as file:
            # The space on the disk is reserved now. If the disk were full later, a store to the
            # mapped memory would kill the process.
            os.posix_fallocate(file.fileno(), 0, SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE)
        host = socket.gethostname().encode()[:64]
        _HEAD.pack_into(self._map, 0, MAGIC, os.getpid(), rank, group_rank, NO_GROUP, host)
        self._num_steps = 0
        self._begin_ns = 0
        # Number of the host's state before the last wait for the device began.
        self._before = 0
        self._at = STEPS_AT
        self.idle()

    def join(self, group: int | None) -> None:
        if group is not None:
            struct.pack_into("=i", self._map, _GROUP_AT, group)

    def begin(self, plan: RankPlan) -> None:
        graph, own = plan.graph, unpack_ints(plan.batch.scheduled, 4)
        self._at = STEPS_AT + self._num_steps % NUM_STEPS * STEP_BYTES
        self._begin_ns = time.time_ns()
        _STEP.pack_into(
            self._map,
            self._at,
            plan.epoch,
            plan.plan_version,
            plan.step,
            0 if graph is None else MODES.index(graph.mode),
            0 if graph is None else graph.num_tokens,
            len(own),
            int(own[:, 2].sum()),
            digest_of(plan),
            plan.dp_rank,
            batch_digest_of(plan),
            self._begin_ns,
        )
        self._map[self._at + _LAPS_AT : self._at + _LAPS_AT + len(_NO_LAPS)] = _NO_LAPS
        self._num_steps += 1
        # The number of steps is written last, so that a reader never reads an incomplete record.
        _COUNT.pack_into(self._map, _COUNT_AT, self._num_steps)
        _STATE.pack_into(self._map, STATE_AT, _NUMBER_OF[BEGUN], self._begin_ns)

    def lap(self, stage: str) -> None:
        now_ns, number = time.time_ns(), _NUMBER_OF[stage]
        took_us = min((now_ns - self._begin_ns) // 1000, MAX_LAP_US)
        _LAP.pack_into(self._map, self._at + _LAPS_AT + number * _LAP.size, took_us)
        _STATE.pack_into(self._map, STATE_AT, number, now_ns)

    def wait(self, is_waiting: bool) -> None:
        if is_waiting:
            self._before, _ = _STATE.unpack_from(self._map, STATE_AT)
            self._enter(WAITS)
        else:
            self._enter(STATES[self._before])

    def idle(self) -> None:
        self._enter(IDLE)

    def command(self, command: GraphCommand) -> None:
        self._write_words(str(command))
        self._enter(COMMAND)

    def see(self, mark: tuple[int, int] | None) -> None:
        if mark is not None:
            _PLACE.pack_into(self._map, _PLACE_AT, 1, *mark)

    def end(self) -> None:
        number, _ = _STATE.unpack_from(self._map, STATE_AT)
        if STATES[number] != FAILED:
            self._write_words(STATES[number])
            self._enter(ENDED)

    def fail(self, error: BaseException) -> None:
        self._write_words(f"{type(error).__name__}: {error}")
        self._enter(FAILED)

    def _enter(self, state: str) -> None:
        _STATE.pack_into(self._map, STATE_AT, _NUMBER_OF[state], time.time_ns())

    def _write_words(self, words: str) -> None:
        data = words.encode()[:MAX_WORDS_BYTES]
        self._map[WORDS_AT : WORDS_AT + MAX_WORDS_BYTES] = data.ljust(MAX_WORDS_BYTES, b"\0")


def open_recorder(config: Config, rank: int, group_rank: int) -> StepRecorder:
    """Return the recorder of a rank that joins a group.

    The recorder records nothing in three cases: the configuration disables it; the log folder is
    unknown; the file cannot be created.
    """
    keys = config.logging
    if not keys.record_steps or keys.folder is None:
        return StepRecorder()
    try:
        folder, _ = open_folder(keys)  # the folder stays locked until the process ends
        return FileRecorder(folder / FOLDER, rank, group_rank)
    except OSError as e:
        logger.warning("steps are not recorded: %s", e)
        return StepRecorder()


def digest_of(plan: RankPlan) -> int:
    """Return a short hash of the fields of a plan that are equal on all ranks of a group."""
    graph = "" if plan.graph is None else f"{plan.graph} {plan.graph.num_reqs}"
    size = f"{plan.largest.num_tokens} {plan.largest.num_samples}"
    shared = f"{plan.step} {plan.plan_version} {graph} {plan.exchange} {size}"
    return zlib.crc32(shared.encode())


def batch_digest_of(plan: RankPlan) -> int:
    """Return a short hash of a batch. All ranks of a data-parallel rank have the same batch.

    The hash does not cover prompts, because prompts can be long.
    """
    batch, found = plan.batch, 0
    for part in (batch.scheduled, batch.appended, batch.blocks, batch.cleaned):
        found = zlib.crc32(part, found)
    return found


@dataclass(frozen=True)
class RecordedStep:
    """One step as a rank has recorded it.

    Attributes:
        graph: mode and bucket, e.g. ``FULL 8``; ``eager`` without a graph.
        digest: result of ``digest_of``.
        dp_rank: the data-parallel rank to which the batch of the step belongs.
        batch_digest: result of ``batch_digest_of``.
        laps_us: for each stage that has ended, the time from the step's beginning to the stage's
            end, in microseconds.
    """

    epoch: int
    step: int
    plan_version: int
    graph: str
    num_reqs: int
    num_tokens: int
    digest: int
    dp_rank: int
    batch_digest: int
    begin_ns: int
    laps_us: dict[str, int]


@dataclass(frozen=True, order=True)
class DevicePlace:
    """The last step that a device has begun, and the last collective of this step.

    Attributes:
        collective: None if the device has begun no collective of the step.
    """

    step: int
    code: int

    @property
    def collective(self) -> CollectivePlace | None:
        return CollectivePlace.of_code(self.code) if self.code else None

    def __str__(self) -> str:
        return f"{self.collective or 'no collective yet'} (step {self.step})"


@dataclass(frozen=True)
class RecordedSteps:
    """What a rank has recorded.

    Attributes:
        state: one of ``STATES``.
        words: the error (FAILED), the command for graphs (COMMAND), or the state before the rank
            was told to stop (ENDED).
        at_ns: when the rank entered the state, in ns since 1970.
        steps: the last steps, oldest first.
        place: the step and the collective that the rank's device has reached; None without
            ``logging.record_collectives``.
    """

    host: str
    pid: int
    rank: int
    group_rank: int
    group: int
    state: str
    words: str
    at_ns: int
    steps: tuple[RecordedStep, ...]
    place: DevicePlace | None = None


def read_recording(path: Path) -> RecordedSteps:
    """Read a rank's file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not contain a rank's steps.
    """
    data = path.read_bytes()
    if len(data) != SIZE or not data.startswith(MAGIC):
        raise ValueError(f"{path} has no steps of a rank")
    _, pid, rank, group_rank, group, host = _HEAD.unpack_from(data)
    state, at_ns = _STATE.unpack_from(data, STATE_AT)
    (count,) = _COUNT.unpack_from(data, _COUNT_AT)
    places = [
        STEPS_AT + n % NUM_STEPS * STEP_BYTES for n in range(max(0, count - NUM_STEPS), count)
    ]
    steps = tuple(_read_step(data, at) for at in places)
    words = data[WORDS_AT : WORDS_AT + MAX_WORDS_BYTES].rstrip(b"\0").decode(errors="replace")
    return RecordedSteps(
        host.rstrip(b"\0").decode(errors="replace"),
        pid,
        rank,
        group_rank,
        group,
        STATES[state] if state < len(STATES) else f"state {state}",
        words,
        at_ns,
        steps,
        _read_place(data, steps),
    )


def _read_place(data: bytes, steps: Sequence[RecordedStep]) -> DevicePlace | None:
    is_marked, mark, code = _PLACE.unpack_from(data, _PLACE_AT)
    found = [step.step for step in steps if step.step % NUM_STEPS == mark]
    return DevicePlace(found[-1], code) if is_marked and found else None


def _read_step(data: bytes, at: int) -> RecordedStep:
    found = _STEP.unpack_from(data, at)
    epoch, version, step, mode, tokens, num_reqs, num_tokens, digest, dp_rank, own, begin_ns = found
    laps = [_LAP.unpack_from(data, at + _LAPS_AT + i * _LAP.size)[0] for i in range(len(STAGES))]
    return RecordedStep(
        epoch,
        step,
        version,
        f"{MODES[mode]} {tokens}" if tokens else "eager",
        num_reqs,
        num_tokens,
        digest,
        dp_rank,
        own,
        begin_ns,
        {stage: lap for stage, lap in zip(STAGES, laps, strict=True) if lap},
    )


def began_at_ns(path: Path) -> int:
    """Return the time at which a file was created, in ns since 1970. The file's name contains this
    time. Raise ValueError if the name contains no time.
    """
    return int(path.stem.rpartition("-")[2])


def _sweep(folder: Path) -> None:
    """Remove the oldest files of ranks whose step loops or processes have ended."""
    files = sorted(folder.glob(f"*{SUFFIX}"), key=last_change_s)
    for path in files[:-KEPT_FILES]:
        with suppress(OSError, ValueError):
            found = read_recording(path)
            if found.state == ENDED or not processes.is_running(found.pid):
                path.unlink()
