"""Checks the folders for copies of KV blocks: file system, space, permissions."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

from dist_aclgraph.cli.doctor.finding import Finding
from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.kv.block_files import BlockFiles
from dist_aclgraph.kv.tiers import GIB, disk_root, foreign_problem, host_root

MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
# File systems of these types are on other hosts. If a type has several parts, such as fuse.sshfs,
# only the last part is looked up in this list.
ON_NETWORK = (
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "juicefs", "lustre", "nfs", "nfs4",
    "smb3", "smbfs", "sshfs", "virtiofs",
)  # fmt: skip
ANSWER_S = 5.0  # a file system that does not answer within this time is reported


def kv_findings(config: Config, mounts: Path = MOUNTS) -> list[Finding]:
    """Return one finding for each tier (host memory, disk) that the configuration uses."""
    kv = config.kv
    found = []
    if kv.host_gib:
        found.append(_within_limit("kv.host_gib", lambda: _memory(config, mounts)))
    if kv.disk is not None:
        found.append(_within_limit("kv.disk", lambda: _disk(config, mounts)))
    return found


def _memory(config: Config, mounts: Path) -> Finding:
    root, name = host_root(config), "kv.host_gib"
    kind, problem = file_system(root, mounts), _problem(root, config.kv.host_gib, name)
    if problem is not None:
        return problem
    told = f"{root}: {_space(root, kind)}"
    if kind not in IN_MEMORY:
        remedy = "set kv.host_path to a folder in memory, such as /dev/shm"
        return Finding(name, True, f"{told}; this is not in memory", remedy, is_warning=True)
    return _with_space(name, told, root, config.kv.host_gib)


def _disk(config: Config, mounts: Path) -> Finding:
    root, name = disk_root(config), "kv.disk"
    kind = file_system(root, mounts)
    problem = _problem(root, config.kv.disk_gib, "kv.disk_gib")
    if problem is not None:
        return problem
    told = f"{root}: {_space(root, kind)}"
    if kind.rpartition(".")[2] in ON_NETWORK:
        remedy = (
            "a local disk is faster and does not hang; a network file system is needed only if "
            "prefill groups and other groups run on different nodes"
        )
        return Finding(name, True, f"{told}, on a network", remedy, is_warning=True)
    return _with_space(name, told, root, config.kv.disk_gib)


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of a path's file system, e.g. tmpfs or nfs4; "unknown" if no file system in
    ``mounts`` contains the path.

    The function first follows the symbolic links in the path. If a link leads to a file system that
    does not answer, the function hangs.
    """
    best, kind = -1, "unknown"
    wanted = os.path.realpath(path)
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), before.split()[4])
        is_inside = wanted == point or wanted.startswith(point.rstrip("/") + "/")
        # of two mounts at the same point, the later mount hides the earlier mount
        if is_inside and len(point) >= best:
            best, kind = len(point), after.split()[0]
    return kind


def _problem(root: Path, gib: float, key: str) -> Finding | None:
    """Return a finding that says why a service could not use the folder; None if a service could
    use it.
    """
    name = "kv.disk" if key == "kv.disk_gib" else key
    there = _existing(root)
    if there == root and (problem := foreign_problem(root)):
        return Finding(name, False, problem[0], problem[1])
    if not os.access(there, os.W_OK | os.X_OK):
        remedy = "choose another folder, or let this user write to it"
        return Finding(name, False, f"this user may not write to {there}", remedy)
    space = os.statvfs(there)
    if (size := space.f_blocks * space.f_frsize) < gib * GIB:
        found = f"{key} is {gib:g}, but the file system of {root} has only {size / GIB:.1f} GiB"
        container = " (of a container: --shm-size)" if key == "kv.host_gib" else ""
        remedy = f"lower {key}, or enlarge the file system{container}"
        return Finding(name, False, found, remedy)
    return None


def _with_space(name: str, told: str, root: Path, gib: float) -> Finding:
    space = os.statvfs(_existing(root))
    # the space of these files counts as free: a service may delete them
    used = BlockFiles(root, root, 0).num_bytes()
    if space.f_bavail * space.f_frsize + used < gib * GIB:
        remedy = "free some space: blocks that do not fit are not kept"
        return Finding(
            name, True, f"{told}, less than the limit of {gib:g} GiB", remedy, is_warning=True
        )
    return Finding(name, True, told)


def _space(root: Path, kind: str) -> str:
    space = os.statvfs(_existing(root))
    free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    return f"{kind}, {free / GIB:.1f} of {size / GIB:.1f} GiB free"


def _existing(path: Path) -> Path:
    """Return the path if it exists; otherwise return its nearest parent that exists."""
    while not path.exists():
        path = path.parent
    return path


def _within_limit(name: str, check: Callable[[], Finding]) -> Finding:
    """Return the finding of a check. If the check takes longer than ``ANSWER_S``, return a finding
    that says that the file system does not answer.
    """
    found: list[Finding] = []

    def run() -> None:
        try:
            found.append(check())
        except OSError as e:
            remedy = "choose another folder, or repair its file system"
            found.append(Finding(name, False, f"{e.filename}: {e.strerror}", remedy))
        except ConfigError as e:
            problem, _, remedy = str(e).partition(": ")
            found.append(Finding(name, False, problem, remedy))

    thread = threading.Thread(target=run, name="kv-folder", daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if found:
        return found[0]
    remedy = "repair the network file system, or choose a folder on a local disk"
    return Finding(name, False, f"its file system has not answered for {ANSWER_S:g} s", remedy)
