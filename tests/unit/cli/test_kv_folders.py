"""The findings of ``doctor`` about the folders for copies of KV."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dist_aclgraph.cli.doctor import kv_folders
from dist_aclgraph.cli.doctor.kv_folders import file_system, kv_findings
from dist_aclgraph.cli.main import cli
from dist_aclgraph.config import Config, make_config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.kv.tiers import disk_root, host_root

MOUNTS = """\
22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
24 22 0:22 / /dev/shm rw shared:3 - tmpfs tmpfs rw
30 22 0:30 / /mnt/a\\040b rw shared:4 - nfs4 host:/x rw
31 22 0:31 / /mnt/over rw - ext4 /dev/sdb rw
32 31 0:32 / /mnt/over rw - fuse.sshfs host:/y rw
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    """Return a list of mounts. In this list, the test's folder is a file system in memory."""
    path = tmp_path / "mountinfo"
    path.write_text(f"{MOUNTS}40 22 0:40 / {tmp_path} rw - tmpfs tmpfs rw\n")
    return path


def configure(**kv: Any) -> Config:
    return make_config({"model": "m", "kv": kv})


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", "ext4"),
        ("/dev/shm/x", "tmpfs"),
        ("/dev/shmem", "ext4"),
        ("/mnt/a b/c", "nfs4"),
        ("/mnt/over", "fuse.sshfs"),
    ],
)
def test_the_file_system_is_that_of_the_innermost_mount(mounts: Path, path: str, kind: str) -> None:
    assert file_system(Path(path), mounts) == kind


def test_the_file_system_of_a_link_is_that_of_its_target(tmp_path: Path, mounts: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/mnt/over")
    assert file_system(link / "kv", mounts) == "fuse.sshfs"


def test_folders_with_enough_space_are_fine(tmp_path: Path, mounts: Path) -> None:
    config = configure(
        host_gib=0.001, host_path=str(tmp_path), disk=str(tmp_path / "disk"), disk_gib=0.001
    )

    memory, disk = kv_findings(config, mounts)

    assert [memory.mark, disk.mark] == ["ok  ", "ok  "]
    assert memory.found.startswith(f"{host_root(config)}: tmpfs, ") and "GiB free" in disk.found
    assert list(tmp_path.iterdir()) == [mounts], "nothing is made"
    assert kv_findings(configure(), mounts) == []


def test_a_file_system_that_is_too_small_is_a_fault(tmp_path: Path, mounts: Path) -> None:
    (memory,) = kv_findings(configure(host_gib=1e6, host_path=str(tmp_path)), mounts)

    assert memory.mark == "FIX " and "kv.host_gib is 1e+06" in memory.found
    assert "--shm-size" in memory.remedy


def test_the_command_checks_the_folders_of_a_configuration(tmp_path: Path) -> None:
    disk = f"kv.disk={tmp_path / 'disk'}"

    said = CliRunner().invoke(cli, ["doctor", "configs/tiny-qwen3.yaml", disk, "kv.disk_gib=1e6"])

    assert said.exit_code == 1
    assert "FIX  kv.disk: kv.disk_gib is 1e+06, but the file system" in said.stdout


def test_a_network_and_a_disk_in_place_of_memory_are_named(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text("22 1 0:20 / / rw - nfs4 host:/x rw\n")
    config = configure(
        host_gib=0.001, host_path=str(tmp_path), disk=str(tmp_path / "disk"), disk_gib=0.001
    )

    memory, disk = kv_findings(config, mounts)

    assert [memory.mark, disk.mark] == ["warn", "warn"]
    assert "this is not in memory" in memory.found
    assert "nfs4" in disk.found and "on a network" in disk.found


def test_a_folder_of_other_users_is_a_fault(tmp_path: Path, mounts: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    disk.chmod(0o777)

    (finding,) = kv_findings(configure(disk=str(disk), disk_gib=0.001), mounts)

    assert finding.mark == "FIX " and "other users can write" in finding.found
    assert "chmod go-w" in finding.remedy


def test_the_home_of_an_unknown_user_is_a_fault(mounts: Path) -> None:
    config = configure(disk="~nobody-has-this-name/kv")

    (finding,) = kv_findings(config, mounts)

    assert finding.mark == "FIX " and "~nobody-has-this-name/kv" in finding.found
    assert "whole path" in finding.remedy
    with pytest.raises(ConfigError, match="no such home"):
        disk_root(config)


def test_a_folder_without_permission_is_a_fault(
    tmp_path: Path, mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere

    (finding,) = kv_findings(configure(disk=str(tmp_path / "disk"), disk_gib=0.001), mounts)

    assert finding.mark == "FIX " and "may not write" in finding.found


def test_a_disk_that_does_not_answer_is_a_fault(
    tmp_path: Path, mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hang(path: Path) -> None:
        answers.wait(60.0)
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(os, "statvfs", hang)
    monkeypatch.setattr(kv_folders, "ANSWER_S", 0.01)

    (finding,) = kv_findings(configure(disk=str(tmp_path / "disk")), mounts)

    assert finding.mark == "FIX " and "has not answered" in finding.found
    answers.set()
