"""The first process of a service: it supervises the owner of the deployment, and the ingresses.

The supervisor replaces a process that is killed or hangs, and an ingress that fails with an
unforeseen error. A failed start is tried again after a pause.

A shell, a container or a service manager sends signals to a whole process group. Ray's daemons must
not be in this group (``own_process_group``). The leader of a group cannot leave the group. The
supervisor may be the leader. Therefore another process starts Ray. If an owner is killed, the
processes that the owner has started become children of the supervisor. The supervisor ends these
processes.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from dist_aclgraph.actors.host import processes, run_directory
from dist_aclgraph.actors.host.liveness import Beat, SharedHeartbeat, beat_s
from dist_aclgraph.cli.exit_codes import FAILURE, tell
from dist_aclgraph.cli.signals import SIGNALS, Signals
from dist_aclgraph.errors import DistAclGraphError, RayDiedError
from dist_aclgraph.logs import event
from dist_aclgraph.planning.restarts import Backoff, RestartBudget
from dist_aclgraph.serve.resume.holder import ConnectionHolder, HolderLink

OWNER, INGRESS = "serve:owner", "serve:ingress"  # names of processes
OWNS, SERVES = "the process that owns the deployment", "the process that serves HTTP"
CRASHED = 70  # exit code after an unforeseen error; EX_SOFTWARE of sysexits.h
AGAIN = 75  # exit code of an owner that must be replaced; EX_TEMPFAIL of sysexits.h
OF_SIGNALS = 128  # the exit code 128 + N means that signal N has ended the process
END_S = 30.0  # after the end of the service, an ingress must end within this time
WAITED = {signal.SIGCHLD, signal.SIGIO, *SIGNALS}
START_END_S = 10.0  # after a signal, an owner that never served must end within this time
SETTLED_S = 10.0  # after this time, the start of an ingress counts as successful

logger = logging.getLogger(__name__)
Own = Callable[[Signals, SharedHeartbeat], None]
ServeHttp = Callable[[int, Beat, HolderLink], None]


@dataclass
class _Ingress:
    """One ingress: its current process, and the objects that each later process of the ingress
    inherits.

    Attributes:
        pid: process id of the ingress; 0 while no process runs.
        due_s: time of the next start; inf means never.
    """

    serve_http: ServeHttp
    heartbeat: SharedHeartbeat
    backoff: Backoff
    holder: ConnectionHolder = field(default_factory=ConnectionHolder)
    pid: int = 0
    due_s: float = 0.0
    began_s: float = 0.0


class Supervisor:
    """Owns the processes of a service.

    Args:
        own: a function that runs the owner until a signal. The owner sends heartbeats while it
            starts and serves.
        serve_http: for each ingress, a function that runs the ingress. The first argument is the
            read end of a pipe, which is closed when the ingress must end. The second argument is a
            function that the ingress's event loop calls every second. The third argument is a link
            that lets the next ingress continue the connections.
        restarts: budget for restarts of the owner, and of an ingress that has not served. The
            replacement of an ingress that has served costs no budget. With a budget of zero
            restarts per hour, no process is replaced. The budget's pauses apply only to the owner.
        silent_s: a process that sends no heartbeat for this time is killed.
        end_s: an owner that has not ended within this time after a signal is killed.
        end_started: a function that is called after the death of an owner. This function kills the
            processes that the owner has started outside the supervisor's process tree.
        on_fork: a function that each new process calls first.
        make_backoff: a function that returns the pauses before restarts of an ingress that ends
            soon after its start.
    """

    def __init__(
        self,
        own: Own,
        serve_http: Sequence[ServeHttp],
        restarts: RestartBudget,
        silent_s: float,
        end_s: float,
        end_started: Callable[[], None] = lambda: None,
        on_fork: Callable[[], None] = lambda: None,
        make_backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._silent_s = silent_s
        self._look_s = beat_s(silent_s)
        self._end_s = end_s
        self._own = own
        self._restarts = restarts
        self._end_started = end_started
        self._on_fork = on_fork
        self._owner_heartbeat = SharedHeartbeat(silent_s)
        self._ingresses = [
            _Ingress(each, SharedHeartbeat(silent_s), make_backoff()) for each in serve_http
        ]
        # The supervisor and the owner have the write end of this pipe. The pipe closes when both
        # have ended.
        self._life, self._life_end = os.pipe()
        self._pid = self._owner = 0  # process ids of the supervisor and of the owner
        self._owner_due_s = 0.0  # time of the next start; inf means never
        # Children that this process had before ``run``. For example, a shell starts children, and
        # then this program replaces the shell (exec).
        self._strangers: set[int] = set()
        self._next_look_s = 0.0
        self._is_stopping = False
        self._end_by_s = math.inf  # time by which an owner that has received a signal must end
        self._failure = 0  # exit code of an ingress that has failed without a signal

    def run(self) -> int:
        """Serve until a signal or an error, or until the limit of restarts is reached; return the
        exit code.
        """
        # The parent may have ignored SIGCHLD, so the default is restored. Signals are blocked, so
        # that they stay pending between two waits.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, WAITED)
        self._pid = os.getpid()
        self._strangers = processes.children(self._pid)
        processes.adopt_orphans()
        code = None
        while code is None:
            code = self._wait()
        os.close(self._life_end)
        self._end_ingresses()
        self._close_holders()
        return code

    # ---- in this process

    def _wait(self) -> int | None:
        """Wait until a signal arrives or a child process ends. Return the exit code if the service
        is over.
        """
        self._start_due()
        due_s = min(self._owner_due_s, *(ingress.due_s for ingress in self._ingresses))
        due_in_s = due_s - time.monotonic()
        received = signal.sigtimedwait(WAITED, min(self._look_s, max(0.0, due_in_s)))
        if time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + self._look_s
            self._look()
        # This process may have been stopped and continued during the wait. Then Python returns
        # uninitialised memory: any number, or the signal of an earlier wait. Handling a signal
        # twice does no harm.
        if received is None or received.si_signo not in WAITED:
            return None
        if received.si_signo == signal.SIGIO:
            self._take_in()
            return None
        if received.si_signo != signal.SIGCHLD:
            return self._stop(received.si_signo)
        for pid, code in _ended():
            final = None
            if pid == self._owner:
                final = self._replace_owner(code)
            for ingress in self._ingresses:
                if pid == ingress.pid:
                    final = self._replace_ingress(ingress, code)
            if final is not None:
                return final
        return None

    def _stop(self, number: int) -> int | None:
        """Tell the owner to stop. If there is no owner, return the exit code of the service."""
        event(logger, "service_stopping", signal=_name_of(number))
        self._is_stopping = True
        self._owner_due_s = math.inf
        for ingress in self._ingresses:
            ingress.due_s = math.inf
        if not self._owner:
            return self._failure or OF_SIGNALS + number
        if not self._owner_heartbeat.has_served:
            self._end_s = min(self._end_s, START_END_S)
        self._end_by_s = min(self._end_by_s, time.monotonic() + self._end_s)
        os.kill(self._owner, number)
        return None

    def _replace_owner(self, code: int) -> int | None:
        """Start another owner, or return the exit code of the service."""
        self._owner = 0
        served, before = self._owner_heartbeat.has_served, self._owner_heartbeat.served_before
        self._end_orphans()
        final = OF_SIGNALS - code if code < 0 else FAILURE if code in (AGAIN, CRASHED) else code
        if self._is_stopping:
            return self._failure or final
        if code < 0 and -code not in SIGNALS:
            why = f"{OWNS} was killed by {_name_of(-code)}"
        elif code == AGAIN:
            why = "the service has lost its Ray"
        elif 0 < code < OF_SIGNALS and before and not served:
            why = "another one did not come up"
        else:
            return final
        if not (served or before) or not self._may_restart(why, "the deployment"):
            return final
        now_s = time.monotonic()
        if served:
            self._restarts.succeeded()
        else:
            self._restarts.failed(now_s)
        self._owner_due_s = now_s + self._restarts.pause_s(now_s)
        return None

    def _replace_ingress(self, ingress: _Ingress, code: int) -> int | None:
        """Schedule the start of another process for this ingress, or stop the service; see
        ``_stop``.
        """
        ingress.pid = 0
        if not self._is_stopping and (code < 0 or code == CRASHED):
            end = f"was killed by {_name_of(-code)}" if code < 0 else "has failed"
            is_counted = not ingress.heartbeat.has_served
            if self._may_restart(f"{SERVES} {end}", "it", is_counted=is_counted):
                now_s = time.monotonic()
                if now_s - ingress.began_s >= SETTLED_S:
                    ingress.backoff.succeeded()
                # The pause is measured from the previous failure of this ingress. If the process
                # that has ended ran for longer than the pause, the next process is started at once.
                ingress.due_s = now_s + ingress.backoff.pause_s(now_s)
                ingress.backoff.failed(now_s)
                return None
        ingress.holder.close()
        if self._is_stopping:
            return None
        self._failure = FAILURE if code < 0 or code == CRASHED else max(code, FAILURE)
        return self._stop(signal.SIGTERM)

    def _start_due(self) -> None:
        """Start the processes that are due; if a fork fails, try again after a pause."""
        now_s = time.monotonic()
        if now_s >= self._owner_due_s:
            try:
                self._start_owner()
                self._owner_due_s = math.inf
            except OSError as e:
                self._owner_due_s = _pause(OWNS, self._restarts, e)
        for ingress in self._ingresses:
            if now_s >= ingress.due_s:
                try:
                    self._start_ingress(ingress)
                    ingress.due_s = math.inf
                except OSError as e:
                    ingress.due_s = _pause(SERVES, ingress.backoff, e)

    def _start_owner(self) -> None:
        self._owner_heartbeat.begin()
        self._owner = self._fork(OWNER, self._be_owner)

    def _start_ingress(self, ingress: _Ingress) -> None:
        ingress.heartbeat.begin()
        ingress.began_s = time.monotonic()
        with ingress.holder.open() as end:
            ingress.pid = self._fork(INGRESS, partial(self._be_ingress, ingress, end))

    def _look(self) -> None:
        """Kill a process that sends no heartbeats, and an owner that does not end in time."""
        if time.monotonic() > self._end_by_s:
            self._end_by_s = math.inf
            _say(f"error: {OWNS} has not ended for {self._end_s:g} s; it is killed")
            os.kill(self._owner, signal.SIGKILL)
        for pid, heartbeat, what in (
            (self._owner, self._owner_heartbeat, OWNS),
            *((ingress.pid, ingress.heartbeat, SERVES) for ingress in self._ingresses),
        ):
            if pid and heartbeat.listen():
                _say(f"warning: {what} has stood still for {self._silent_s:g} s; it is killed")
                event(logger, "process_hangs", logging.WARNING, pid=pid, silent_s=self._silent_s)
                heartbeat.rest()
                os.kill(pid, signal.SIGKILL)

    def _may_restart(self, why: str, what: str, *, is_counted: bool = True) -> bool:
        """Print a message, and return whether the budget allows this restart.

        Args:
            is_counted: whether the restart uses up a part of the budget. If false, only a budget of
                zero restarts per hour refuses the restart.
        """
        is_left = self._restarts.per_hour > 0
        if is_counted:
            is_left = self._restarts.spend(time.monotonic())
        event(logger, "process_lost", logging.WARNING, cause=why, is_replaced=is_left)
        if is_left:
            _say(f"warning: {why}; {what} is started again")
            return True
        allowed = f"recovery.restarts_per_hour allows {self._restarts.per_hour}"
        _say(f"error: {why}; {what} is not started again: {allowed}")
        return False

    def _end_ingresses(self) -> None:
        """Wait at most ``END_S`` until all ingresses have ended. After this time, kill the
        ingresses that still run. The ingresses have already been told that the service is over.
        """
        until_s = time.monotonic() + END_S
        while running := self._running_ingresses():
            ended = {pid for pid, _ in _ended()}
            for ingress in self._ingresses:
                if ingress.pid in ended:
                    ingress.pid = 0
            if ended:
                continue
            if time.monotonic() > until_s:
                processes.kill_all(running)
            else:
                signal.sigtimedwait({signal.SIGCHLD}, 0.1)
                # A connection stays open until both the supervisor and the ingress have closed the
                # connection.
                self._take_in()

    def _running_ingresses(self) -> set[int]:
        return {ingress.pid for ingress in self._ingresses if ingress.pid}

    def _take_in(self) -> None:
        for ingress in self._ingresses:
            ingress.holder.take_in()

    def _close_holders(self) -> None:
        for ingress in self._ingresses:
            ingress.holder.close()

    def _end_orphans(self) -> None:
        while True:
            self._end_started()
            orphans = processes.children(self._pid) - self._running_ingresses()
            orphans -= self._strangers
            if not orphans:  # all orphans have ended, so none can start another process
                break
            processes.kill_all(orphans)
            for pid in orphans:
                os.waitpid(pid, 0)
        run_directory.sweep()

    # ---- in the other processes

    def _fork(self, name: str, part: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            code = FAILURE
            try:
                try:
                    processes.set_name(name)
                    self._on_fork()
                    part()
                    code = 0
                except BaseException as e:
                    code = _code_of(e)
                # A signal to the whole process group can arrive twice: from the sender and from the
                # supervisor. The second signal is blocked here.
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:  # exit at once, so that this process does not free the supervisor's resources
                os._exit(code)
        event(logger, "process_started", process=name, pid=pid)
        return pid

    def _be_owner(self) -> None:
        self._close_holders()
        with Signals() as signals:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED)
            try:
                # If the supervisor of this process is killed, the service drains and stops.
                processes.signal_with_parent(signal.SIGTERM, self._pid)
                self._own(signals, self._owner_heartbeat)
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def _be_ingress(self, ingress: _Ingress, end: socket.socket) -> None:
        # The ingress ignores these signals, because the owner tells it when to drain.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED)
        os.close(self._life_end)
        link = ingress.holder.become_link(end)
        self._close_holders()  # this ingress must not keep connections of other ingresses open
        ingress.serve_http(self._life, ingress.heartbeat.beat, link)


def _ended() -> Iterator[tuple[int, int]]:
    """Yield ids and exit codes of children and orphans that have ended. Reading an exit code
    removes the zombie.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def _pause(what: str, backoff: Backoff, error: OSError) -> float:
    """Begin a pause, print a message, and return the time of the pause's end (monotonic clock)."""
    now_s = time.monotonic()
    backoff.failed(now_s)
    pause_s = backoff.pause_s(now_s)
    _say(f"warning: {what} cannot be started ({error.strerror}); tried again in {pause_s:g} s")
    return now_s + pause_s


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _code_of(error: BaseException) -> int:
    """Print the error that ends this process, and return the process's exit code."""
    if not isinstance(error, SystemExit):
        event(logger, "process_failed", logging.ERROR, cause=f"{type(error).__name__}: {error}")
    match error:
        case RayDiedError():
            tell(error)
            return AGAIN
        case DistAclGraphError():
            return tell(error)
        case SystemExit(code=int(code)):
            return code
    traceback.print_exception(error)
    return CRASHED
