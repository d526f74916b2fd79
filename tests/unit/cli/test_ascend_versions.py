from __future__ import annotations

from pathlib import Path

import pytest

from dist_aclgraph.cli.doctor.ascend_versions import (
    is_driver_new_enough,
    read_cann_version,
    read_version,
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("version.cfg", "# version: 1.0\nruntime_running_version=[9.1.0:9.1.0]\n"),
        ("share/info/runtime/version.info", "Version=9.1.0\nversion_dir=9.1.0\n"),
        ("aarch64-linux/ascend_toolkit_install.info", "package_name=x\nversion=9.1.0\narch=a\n"),
    ],
)
def test_the_version_of_cann_is_read_from_its_own_files(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)

    assert read_cann_version(tmp_path) == "9.1.0"


def test_where_nothing_is_installed_there_is_no_version(tmp_path: Path) -> None:
    assert read_cann_version(tmp_path / "none") is None
    assert read_version(tmp_path / "version.info") is None


def test_the_version_of_the_driver_is_read(tmp_path: Path) -> None:
    path = tmp_path / "version.info"
    path.write_text("Version=25.2.3\nascendhal_version=7.35.23\n")

    assert read_version(path) == "25.2.3"


@pytest.mark.parametrize(
    ("version", "is_enough"),
    [("25.0.rc1", True), ("25.5.0", True), ("26.0.1", True), ("24.1.0.3", False), ("23.0", False)],
)
def test_drivers_without_task_updates_are_too_old(version: str, is_enough: bool) -> None:
    assert is_driver_new_enough(version) is is_enough
