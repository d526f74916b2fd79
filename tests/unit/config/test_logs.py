"""Log lines, and the folder with the log files."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import LoggingConfig, make_config
from dist_aclgraph.files.log_folder import KEPT_FILES, LOCK, file_name, open_folder, with_log_folder
from dist_aclgraph.logs import ACCESS, PACKAGE, ProcessLog, Role, event, logged

source = logging.getLogger(f"{PACKAGE}.some.module")


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """Remove the log handlers that a test has added."""
    before = {name: logging.getLogger(name).handlers[:] for name in (PACKAGE, ACCESS)}
    yield
    for name, handlers in before.items():
        for handler in set(logging.getLogger(name).handlers) - set(handlers):
            logging.getLogger(name).removeHandler(handler)
            handler.close()
        logging.getLogger(name).propagate = True
        logging.getLogger(name).setLevel(logging.NOTSET)


def make_logging(directory: Path, **keys: Any) -> LoggingConfig:
    return LoggingConfig(directory=str(directory), folder="start", **keys)


def open_log(config: LoggingConfig, role: Role, *, has_terminal: bool = False) -> ProcessLog:
    log = ProcessLog(role)
    log.open(config, has_terminal=has_terminal)
    return log


def lines_of(folder: Path, name: str) -> list[str]:
    (path,) = folder.glob(f"{name}-*-{os.getpid()}.log")
    return path.read_text(encoding="utf-8").splitlines()


def test_a_line_has_time_level_host_and_the_place_of_the_process(tmp_path: Path) -> None:
    log = open_log(make_logging(tmp_path), "worker")
    source.info("first")
    log.group, log.rank, log.get_epoch = 0, 3, lambda: 1
    source.warning("second\nand more")

    first, second = lines_of(tmp_path / "start", "worker")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO host=\S+ role=worker first", first
    )
    assert second.endswith(" role=worker group=0 rank=3 epoch=1 second and more")
    assert (
        abs(datetime.fromisoformat(first.split()[0]).timestamp() - datetime.now(UTC).timestamp())
        < 600
    )


def test_an_event_has_a_name_and_values(tmp_path: Path) -> None:
    log = open_log(make_logging(tmp_path), "engine")
    log.group = 7
    event(
        source, "group_lost", logging.WARNING, group=1, cause='it said "no"\nrole=admin', rank=None
    )
    event(source, "resumed", seconds=1.23456)

    lost, resumed = lines_of(tmp_path / "start", "engine")
    assert lost.endswith(
        r' role=engine event=group_lost group=1 cause="it said \"no\"\nrole=admin"'
    )
    assert resumed.endswith(" role=engine group=7 event=resumed seconds=1.235")


def test_work_is_logged_with_its_time_and_its_failure(tmp_path: Path) -> None:
    open_log(make_logging(tmp_path), "controller")
    with logged(source, "scale", wanted=2):
        pass
    with pytest.raises(ValueError), logged(source, "roll"):
        raise ValueError("no room")

    begun, done, _, failed = lines_of(tmp_path / "start", "controller")
    assert begun.endswith("event=scale_begun wanted=2")
    assert re.search(r"event=scale_done wanted=2 seconds=0\.\d+$", done)
    assert re.search(r'event=roll_failed seconds=0\.\d+ cause="ValueError: no room"$', failed)


def test_a_traceback_is_a_value_of_its_line(tmp_path: Path) -> None:
    open_log(make_logging(tmp_path), "engine")
    forged = "2026-01-01T00:00:00.000Z INFO host=h role=controller event=scale_done"
    try:
        raise ValueError(f"bad\n{forged}")
    except ValueError:
        source.exception("it failed")

    (line,) = lines_of(tmp_path / "start", "engine")
    message, _, exception = line.partition(" exception=")
    assert message.endswith(" role=engine it failed")
    assert json.loads(exception).endswith(f"ValueError: bad\n{forged}")


def test_json_lines_have_the_same_values(tmp_path: Path) -> None:
    open_log(make_logging(tmp_path, format="json"), "engine")
    event(source, "group_lost", logging.WARNING, group=1, cause="a\nb")
    try:
        raise ValueError("bad")
    except ValueError:
        source.exception("it failed")

    lost, failed = map(json.loads, lines_of(tmp_path / "start", "engine"))
    assert (lost["event"], lost["group"], lost["cause"]) == ("group_lost", 1, "a\nb")
    assert (lost["level"], lost["role"]) == ("WARNING", "engine")
    assert failed["message"] == "it failed" and "ValueError: bad" in failed["exception"]


def test_lines_below_the_level_are_not_written(tmp_path: Path) -> None:
    open_log(make_logging(tmp_path, level="warning"), "engine")
    source.info("first")
    event(source, "second")
    source.warning("third")

    assert len(lines_of(tmp_path / "start", "engine")) == 1


def test_files_are_limited_in_size_and_number(tmp_path: Path) -> None:
    open_log(make_logging(tmp_path, max_file_mib=1, max_old_files=2), "engine")
    for _ in range(45):
        source.info("x" * 100_000)

    files = [path for path in (tmp_path / "start").iterdir() if path.name != LOCK]
    assert len(files) == 3
    assert all(path.stat().st_size <= 1 << 20 for path in files)


def test_the_command_of_the_page_reads_full_files_too(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "operate" / "logs.md").read_text()
    (command,) = re.findall(r"^grep .*FOLDER.*$", page, re.M)
    for name in ("engine-h-1.log", "engine-h-1.log.1"):
        (tmp_path / name).write_text(f"event={name}\n")

    said = subprocess.run(
        ["sh", "-c", command.replace("FOLDER", str(tmp_path))], capture_output=True, text=True
    )

    assert said.stdout.split() == ["event=engine-h-1.log", "event=engine-h-1.log.1"]


def test_only_the_user_can_read_the_folder(tmp_path: Path) -> None:
    open_log(make_logging(tmp_path / "new"), "engine")

    assert (tmp_path / "new" / "start").stat().st_mode & 0o777 == 0o700


def test_a_terminal_gets_warnings_as_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_log(make_logging(tmp_path), "owner", has_terminal=True)
    source.info("first")
    source.warning("second")
    event(source, "third", logging.WARNING)

    assert capsys.readouterr().err == "warning: second\n"
    assert len(lines_of(tmp_path / "start", "owner")) == 3


def test_lines_go_to_stderr_if_the_configuration_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    open_log(LoggingConfig(destination="stderr", folder="start"), "owner", has_terminal=True)
    source.warning("first")

    assert capsys.readouterr().err.endswith(" role=owner first\n")


def test_lines_go_to_stderr_if_the_files_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    open_log(make_logging(tmp_path / "file"), "owner")
    source.info("first")

    first, second = capsys.readouterr().err.splitlines()
    assert "logs are written to stderr" in first and str(tmp_path / "file") in first
    assert second.endswith(" role=owner first")


def test_access_lines_are_off_unless_they_are_asked_for(tmp_path: Path) -> None:
    open_log(make_logging(tmp_path), "ingress")

    assert not logging.getLogger(ACCESS).isEnabledFor(logging.INFO)


def test_access_lines_have_their_own_file_whatever_the_level(tmp_path: Path) -> None:
    open_log(make_logging(tmp_path, access=True, level="error"), "ingress")
    event(logging.getLogger(ACCESS), "request", status=200)

    assert len(lines_of(tmp_path / "start", "access")) == 1
    assert not lines_of(tmp_path / "start", "ingress")


def test_the_log_of_a_process_replaces_that_of_its_parent(tmp_path: Path) -> None:
    open_log(make_logging(tmp_path), "owner")
    open_log(make_logging(tmp_path), "ingress")
    source.info("first")

    assert not lines_of(tmp_path / "start", "owner")
    assert len(lines_of(tmp_path / "start", "ingress")) == 1


def test_the_folder_of_a_start_is_named_once() -> None:
    config = with_log_folder(make_config({"model": "some/Model 7B"}))

    assert re.fullmatch(r"\d{8}T\d{6}Z-Model-7B", config.logging.folder or "")
    assert with_log_folder(config) is config


def test_a_folder_keeps_the_newest_files_of_processes_that_have_ended(tmp_path: Path) -> None:
    config = make_logging(tmp_path)
    folder, lock = open_folder(config)
    os.close(lock)
    host, first = file_name(socket.gethostname()), 1 << 30  # too large to be the id of a process
    for age in range(KEPT_FILES + 2):
        path = folder / f"worker-{host}-{first + age}.log"
        path.touch()
        os.utime(path, (age, age))
    others = [folder / f"worker-{host}-{os.getpid()}.log.1", folder / f"worker-other-{first}.log"]
    for path in others:
        path.touch()
        os.utime(path, (0, 0))

    _, lock = open_folder(config)

    os.close(lock)
    left = {path.name for path in folder.iterdir()}
    assert {LOCK, *(path.name for path in others)} <= left
    assert len(left) == 3 + KEPT_FILES
    assert f"worker-{host}-{first + 1}.log" not in left


def test_a_new_folder_removes_the_oldest_unused_folders_of_ours(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    names = ["a", "b", "c", "d"]
    for age, name in enumerate(names):
        _, lock = open_folder(LoggingConfig(directory=str(tmp_path), folder=name))
        os.close(lock)
        os.utime(tmp_path / name, (age, age))
    holding = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_SH); "
        "print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holding, str(tmp_path / "a" / LOCK)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        open_folder(LoggingConfig(directory=str(tmp_path), folder="new", keep_folders=2))
        holder.kill()

    assert {path.name for path in tmp_path.iterdir()} == {"others", "a", "d", "new"}
