"""Executes strikes.

A strike consists of a load, a fault, a wait for the recovery, and a check for files and processes
that were left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dist_aclgraph.actors.host import processes
from dist_aclgraph.kv.tiers import PREFIX
from tools.chaos import disk
from tools.chaos.answers import Answer
from tools.chaos.clients import Clients, Hangup
from tools.chaos.hosts import CONTROLLER, ENGINE, WORKER, Hosts
from tools.chaos.outcome import Outcome, Sight, judge
from tools.chaos.plan import HOST_FAULTS, Kind, Strike
from tools.chaos.service import LOOK_S, ChaosError, Service, new_folder, wait_for
from tools.chaos.shapes import STALL_S, Shape
from tools.namespaces import Node

ANSWERS_S = 300.0  # seconds in which all answers must end after a strike
RECOVERY_S = 240.0
KNOWN_S = 90.0  # time limit in seconds for each wait, e.g. until a fault is noticed
SETTLE_S = 30.0
ASK_S = 0.5  # seconds between two questions to Ray; each question starts a process
FULL_S = 20.0  # seconds for which the disk stays full
OVERLOAD, SLOW_COPIES = 12, 4
RAYLET, GCS = "raylet", "gcs_server"
OWNER, INGRESS = "serve:owner", "serve:ingress"
BUSY = ("num_requests_running", "num_requests_waiting", "held_requests", "kv_cache_usage")
PROCESSES = {
    Kind.KILL_WORKER: WORKER,
    Kind.STOP_WORKER: WORKER,
    Kind.FULL_DISK: WORKER,
    Kind.KILL_ENGINE: ENGINE,
    Kind.STOP_ENGINE: ENGINE,
    Kind.KILL_CONTROLLER: CONTROLLER,
    Kind.KILL_RAYLET: RAYLET,
    Kind.STOP_RAYLET: RAYLET,
    Kind.KILL_GCS: GCS,
    Kind.STOP_GCS: GCS,
    Kind.KILL_OWNER: OWNER,
    Kind.STOP_OWNER: OWNER,
    Kind.KILL_INGRESS: INGRESS,
    Kind.STOP_INGRESS: INGRESS,
}
STOPS = (
    Kind.STOP_WORKER,
    Kind.STOP_ENGINE,
    Kind.STOP_INGRESS,
    Kind.STOP_OWNER,
    Kind.STOP_RAYLET,
    Kind.STOP_GCS,
)
# Seconds for which the rig cuts the link of a host, or stops Ray's control store.
DOWN_S = {Kind.FLAP_LINK: 10.0, Kind.CUT_LINK: 60.0, Kind.STOP_GCS: 20.0}
AWAY = (*HOST_FAULTS, Kind.KILL_RAYLET, Kind.STOP_RAYLET, Kind.STOP_GCS)
ARMED = (
    Kind.PREFILL_DEATH,
    Kind.OPERATOR_FAILS,
    Kind.LINK_FAILS,
    Kind.BAD_KV,
    Kind.BAD_WEIGHT,
    Kind.STALL,
)

Say = Callable[[str], None]


def damage(kind: Kind, memory: Path) -> None:
    """Damage each file of KV blocks, as ``kind`` says: change its last byte, cut it in half, or
    delete it.
    """
    for path in (memory / f"{PREFIX}{os.getuid()}").glob("*/*/*"):
        with contextlib.suppress(OSError):  # the service has just deleted the file
            if kind is Kind.LOST_FILES:
                path.unlink()
            elif kind is Kind.CUT_FILES:
                os.truncate(path, path.stat().st_size // 2)
            else:
                with path.open("r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    byte = file.read(1)[0]
                    file.seek(-1, os.SEEK_END)
                    file.write(bytes([byte ^ 0x55]))


@dataclass
class Watcher:
    """Polls ``/ready`` on a thread while this context is active."""

    service: Service
    sights: list[Sight] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watcher:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.sights.append(self.service.look())

    def knows_since(self, struck_s: float) -> bool:
        """Whether a poll after ``struck_s`` has shown that a group was missing."""
        groups = self.service.shape.num_groups
        return any(s.serving < groups and s.at_s >= struck_s for s in list(self.sights))


class Rig:
    """Owns the service under test. If this service has ended, starts another one.

    Args:
        room: a folder on a small disk for temporary files; None for the system's temporary folder.
        say: a function that is called with one line of text for each event.
        hosts: the hosts on which the service runs; None if it runs on this machine. If there are
            hosts, this process must be in the network of the head.
    """

    def __init__(
        self, shape: Shape, room: Path | None, say: Say, hosts: Hosts | None = None
    ) -> None:
        self._hosts = hosts
        self._shape = shape
        self._room = room
        self._full: threading.Timer | None = None  # frees the disk; None while the disk is not full
        self._say = say
        self._service: Service | None = None
        self._wanted: list[Answer] = []
        self._usual: dict[str, int] = {}

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._service is not None:
            self._service.kill()

    # ---- the service

    def service(self) -> Service:
        """Return a service in which all groups serve, and its answers in a run without faults.

        Raises:
            ChaosError: the service did not start, or gives wrong answers without any fault.
        """
        if self._service is None:
            self._say("starting the service")
            self._service = Service(self._shape, new_folder(self._room), self._hosts)
            self._service.wait_until_ready()
            self._usual = self._things()
        if not self._wanted:
            self._say("asking for answers without a fault")
            self._wanted = self._ask_quietly(self._service)
        return self._service

    def _ask_quietly(self, service: Service) -> list[Answer]:
        clients = Clients(service.url, dict(enumerate(self._shape.bodies())))
        clients.start()
        clients.join(ANSWERS_S)
        if bad := [a for a in clients.answers if not a.is_whole]:
            raise ChaosError(f"without any fault a request failed: {bad[0].error}")
        return clients.answers

    def stop(self) -> list[str]:
        """Stop the service if one runs. Return the files and processes that remain."""
        service, self._service = self._service, None
        return [] if service is None else service.end()

    # ---- one strike

    def run(self, strike: Strike) -> Outcome:
        service = self.service()
        kind = strike.fault.kind
        normal = self._clients(service, self._shape.num_streams)
        others = self._other_clients(service, kind, normal)
        # The target is searched before the load begins, because the search takes time on a busy
        # machine.
        if self._full is not None:  # the disk must have space for the file that arms faults
            self._full.join()
        victim = self._victim(service, kind, strike.target)
        host = self._host(kind, strike.target)
        if kind is Kind.PREFILL_DEATH:
            service.arm(fault_op=self._shape.operator, fault_kind="die")
        stopped: list[int] = []
        with Watcher(service) as watcher:
            began_s = time.monotonic()
            normal.start()
            if kind is not Kind.PREFILL_DEATH:
                normal.wait_for_deltas(strike.after_deltas, ANSWERS_S)
                began_s = time.monotonic()
            self._say("striking")
            if others is not None:
                others.start()
            stopped += self._strike(service, kind, victim, host)
            self._second(service, strike, watcher, began_s)
            late = self._late_clients(service, kind, normal, watcher, began_s)
            if self._repair(kind, victim, host, began_s):
                stopped.clear()
            self._say("waiting for answers")
            answers = self._collect([c for c in (normal, others, late) if c is not None])
            if stopped:  # if the process's group was idle, the fault may still be unnoticed
                wait_for(lambda: watcher.knows_since(began_s), KNOWN_S)
            recovered_s = self._wait_for_groups(service)
        exit_code = service.exit_code
        said = "" if exit_code is None else service.error()
        left: list[str] = []
        if recovered_s is not None:
            left += self._left(service, stopped)
            left += self._missing_hosts()
        elif exit_code is None:
            left.append("not all groups serve")
        if recovered_s is None:
            left += self.stop()
        return judge(
            strike,
            answers,
            self._wanted,
            watcher.sights,
            struck_s=began_s,
            num_groups=self._shape.num_groups,
            recovered_s=recovered_s,
            exit_code=exit_code,
            left=left,
            said=said,
        )

    def _clients(self, service: Service, count: int, **options: Any) -> Clients:
        bodies = self._shape.bodies()
        return Clients(service.url, {i: bodies[i] for i in range(count)}, **options)

    def _other_clients(self, service: Service, kind: Kind, normal: Clients) -> Clients | None:
        """Some faults consist of clients that misbehave. For such a fault, return these clients;
        otherwise None.
        """
        bodies = self._shape.bodies()
        few = range(self._shape.num_streams)
        long = range(self._shape.num_streams, len(bodies))

        def read_late(answer: Answer) -> None:
            normal.join(ANSWERS_S)

        def vanish(answer: Answer) -> None:
            if len(answer.times_s) >= 3 * answer.body:
                raise Hangup

        def chosen(numbers: Sequence[int]) -> Mapping[int, Any]:
            return {i: bodies[i] for i in numbers}

        match kind:
            case Kind.SLOW_READERS:
                return Clients(
                    service.url, chosen(long), copies=SLOW_COPIES, before_delta=read_late,
                    has_small_buffer=True,
                )  # fmt: skip
            case Kind.VANISHING:
                return Clients(service.url, chosen(few), copies=2, before_delta=vanish)
            case Kind.OVERLOAD:
                return Clients(service.url, chosen(few), copies=OVERLOAD)
            case _:
                return None

    def _late_clients(
        self, service: Service, kind: Kind, normal: Clients, watcher: Watcher, struck_s: float
    ) -> Clients | None:
        """If the fault is the loss of a host, start clients that send the usual requests while the
        host is away. Return None for other faults.

        These clients are needed because the first answers may end before Ray notices that the host
        is away.
        """
        if self._hosts is None or kind not in AWAY:
            return None

        def is_noticed() -> bool:
            return watcher.knows_since(struck_s) or bool(self._missing_hosts())

        if kind not in DOWN_S:
            wait_for(is_noticed, KNOWN_S, ASK_S)
        elif kind is Kind.CUT_LINK:
            wait_for(is_noticed, DOWN_S[kind] / 2, ASK_S)
        late = self._clients(service, self._shape.num_streams)
        late.start()
        return late

    def _victim(self, service: Service, kind: Kind, target: int) -> int | None:
        """Return the process that a fault hits; None if the fault hits no process.

        Raises:
            ChaosError: no such process has appeared in time.
        """
        if kind not in PROCESSES:
            return None
        pids: list[int] = []

        def are_there() -> bool:
            pids[:] = service.pids(PROCESSES[kind])
            return bool(pids)

        if not wait_for(are_there, KNOWN_S):
            raise ChaosError(f"there is no process left for the fault {kind.value!r}")
        return pids[target % len(pids)]

    def _host(self, kind: Kind, target: int) -> Node | None:
        """Return the host that a fault hits; None if the fault hits no host.

        Raises:
            ChaosError: no such host has appeared in time.
        """
        hosts = self._hosts
        if hosts is None or kind not in HOST_FAULTS or kind in PROCESSES:
            return None
        found: list[Node] = []

        def are_there() -> bool:
            busy = hosts.with_groups()
            spare = [host for host in hosts.others if host not in busy]
            found[:] = spare if kind is Kind.KILL_SPARE else busy
            return bool(found)

        if not wait_for(are_there, KNOWN_S):
            raise ChaosError(f"there is no host for the fault {kind.value!r}")
        return found[target % len(found)]

    def _repair(self, kind: Kind, victim: int | None, host: Node | None, struck_s: float) -> bool:
        """Undo a fault that the service cannot undo, such as the lost link of a host. Return
        whether ``kind`` is such a fault.

        First wait for ``DOWN_S``, or until Ray has noticed that the host is lost. Then connect the
        host again, start it again, or let the stopped process continue.
        """
        if self._hosts is None:
            return False
        match kind:
            case Kind.FLAP_LINK | Kind.CUT_LINK:
                assert host is not None
                time.sleep(max(0.0, struck_s + DOWN_S[kind] - time.monotonic()))
                host.set_link(True)
            case Kind.KILL_HOST | Kind.KILL_SPARE:
                assert host is not None
                wait_for(lambda: bool(self._missing_hosts()), KNOWN_S, ASK_S)
                self._hosts.come_back(host)
            case Kind.STOP_RAYLET | Kind.STOP_GCS:
                assert victim is not None
                if kind is Kind.STOP_RAYLET:
                    wait_for(lambda: bool(self._missing_hosts()), KNOWN_S, ASK_S)
                else:
                    time.sleep(DOWN_S[kind])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGCONT)
            case _:
                return False
        return True

    def _missing_hosts(self) -> list[str]:
        """Return a line with the number of hosts on which Ray does not run; empty if there are
        none.
        """
        if self._hosts is None:
            return []
        count = len(self._hosts.all) - self._hosts.num_alive()
        return [f"{count} hosts missing"] if count else []

    def _strike(
        self, service: Service, kind: Kind, victim: int | None, host: Node | None = None
    ) -> list[int]:
        """Inject a fault. Return the processes that the fault has stopped by SIGSTOP."""
        match kind:
            case Kind.OPERATOR_FAILS:
                service.arm(fault_op=self._shape.operator)
            case Kind.LINK_FAILS:
                service.arm(fault_op=self._shape.collective, fault_kind="link")
            case Kind.BAD_KV:
                service.arm(fault_op=self._shape.attention, fault_kind="uce", fault_operand=1)
            case Kind.BAD_WEIGHT:
                service.arm(fault_op=self._shape.linear, fault_kind="uce", fault_operand=1)
            case Kind.STALL:
                service.arm(fault_op=self._shape.collective, fault_kind="stall", stall_s=STALL_S)
            case Kind.FULL_DISK:
                assert self._room is not None, "such plans need a small disk"
                disk.fill(self._room)
                self._full = threading.Timer(FULL_S, disk.make_room, [self._room])
                self._full.start()
            case Kind.SPOILT_FILES | Kind.CUT_FILES | Kind.LOST_FILES:
                for memory in service.memories():
                    damage(kind, memory)
            case Kind.FLAP_LINK | Kind.CUT_LINK:
                assert host is not None, "such plans need hosts"
                host.set_link(False)
            case Kind.KILL_HOST | Kind.KILL_SPARE:
                assert host is not None and self._hosts is not None, "such plans need hosts"
                self._hosts.fail(host)
        if kind in ARMED:
            wait_for(lambda: not service.fault_file.exists(), KNOWN_S)
        if victim is None:
            return []
        # the process may have ended already, together with its lockstep group
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP if kind in STOPS else signal.SIGKILL)
        return [victim] if kind in STOPS else []

    def _second(self, service: Service, strike: Strike, watcher: Watcher, struck_s: float) -> None:
        match strike.fault.second:
            case None:
                return
            case Kind.CAPTURE_DEATH:
                service.arm(fault_op=self._shape.operator, fault_when="capture", fault_kind="die")
            case Kind.CAPTURE_MEMORY:
                service.arm(fault_op="alloc")
            case second:
                wait_for(lambda: watcher.knows_since(struck_s), KNOWN_S)
                self._strike(service, second, self._victim(service, second, strike.target))

    def _collect(self, all_clients: Sequence[Clients]) -> list[Answer]:
        until_s = time.monotonic() + ANSWERS_S
        for clients in all_clients:
            clients.join(max(0.0, until_s - time.monotonic()))
        return [answer for clients in all_clients for answer in clients.answers]

    def _wait_for_groups(self, service: Service) -> float | None:
        """Wait until all groups serve. Return the time at which they served; None if this took too
        long.
        """
        groups = self._shape.num_groups
        wait_for(lambda: service.has_ended or service.serving() == groups, RECOVERY_S)
        recovered_s = time.monotonic() if service.serving() == groups else None
        wait_for(lambda: service.has_ended or not self._missing_hosts(), RECOVERY_S, ASK_S)
        return recovered_s

    # ---- remains

    def _left(self, service: Service, stopped: Sequence[int]) -> list[str]:
        """Return the files, processes and requests in a running service that should have
        disappeared after a strike.
        """
        left = []
        if service.disarm():
            left.append("a fault that struck nobody")
        for pid in stopped:
            if pid in processes.living():
                os.kill(pid, signal.SIGCONT)
        if not wait_for(lambda: not set(stopped) & processes.living(), SETTLE_S):
            left.append("a process that was stopped, and lives")
        if not wait_for(lambda: not self._busy(service), SETTLE_S):
            left += [f"{name} {value:g}" for name, value in self._busy(service).items()]
        if not wait_for(lambda: not self._more(), SETTLE_S):
            left += [f"{count} more {name}" for name, count in self._more().items()]
        return left

    def _busy(self, service: Service) -> dict[str, float]:
        found = service.metrics()
        return {name: found[name] for name in BUSY if found.get(name, 0.0)}

    def _things(self) -> dict[str, int]:
        """A strike can leave behind objects of several kinds. Return how many objects of each kind
        exist now.
        """
        assert self._service is not None
        names = (WORKER, ENGINE, CONTROLLER, RAYLET, OWNER, INGRESS)
        counts = {name: len(self._service.pids(name)) for name in names}
        counts["run directories"] = len(self._service.dead_run_directories())
        return counts | {"segments of shared memory": len(self._service.dead_segments())}

    def _more(self) -> dict[str, int]:
        things = self._things()
        return {name: n - self._usual[name] for name, n in things.items() if n > self._usual[name]}
