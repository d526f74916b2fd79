"""A read of a file returns what was written, and a folder never exceeds its limit of bytes."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.kv import block_files
from dist_aclgraph.kv.block_files import ABANDONED_S, COUNT_FILE, HEADER, BlockFiles
from tests.laws import examples

BLOCK = 100  # bytes of a block's contents
FILE = BLOCK + HEADER.size


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def contents(number: int) -> list[memoryview]:
    data = bytes([number % 256]) * BLOCK
    return [memoryview(data[:30]), memoryview(data[30:])]


def room() -> list[memoryview]:
    data = bytearray(BLOCK)
    return [memoryview(data)[:64], memoryview(data)[64:]]


def use_time(files: BlockFiles, number: int, time_s: float) -> None:
    os.utime(files.path_of(name(number)), (time_s, time_s))


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    return BlockFiles(tmp_path, tmp_path / "model" / "rank", 10 * FILE)


def test_a_block_is_read_as_it_was_written(files: BlockFiles) -> None:
    assert files.write(name(7), contents(7))
    buffers = room()
    assert files.has(name(7)) and files.read(name(7), buffers)
    assert b"".join(buffers) == bytes([7]) * BLOCK
    assert not files.has(name(8)) and not files.read(name(8), room())


def test_many_buffers_are_moved(tmp_path: Path) -> None:
    """More than 1,024 buffers are read or written: Linux moves at most 1,024 in one system call."""
    files = BlockFiles(tmp_path, tmp_path / "rank", 1 << 20)
    data = os.urandom(3000)
    assert files.write(name(1), [memoryview(data)[i : i + 1] for i in range(3000)])
    target = bytearray(3000)
    assert files.read(name(1), [memoryview(target)[i : i + 1] for i in range(3000)])
    assert target == data


@pytest.mark.parametrize("place", [0, 9, 13, 25, HEADER.size, FILE - 1])
def test_a_changed_byte_is_found(files: BlockFiles, place: int) -> None:
    files.write(name(1), contents(1))
    with files.path_of(name(1)).open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    assert not files.read(name(1), room())
    assert not files.has(name(1))
    assert files.num_bytes() == 0


@pytest.mark.parametrize("size", [0, HEADER.size - 1, HEADER.size, FILE - 1])
def test_a_file_that_is_cut_off_is_not_read(files: BlockFiles, size: int) -> None:
    files.write(name(1), contents(1))
    os.truncate(files.path_of(name(1)), size)
    assert not files.read(name(1), room())


def test_a_file_that_cannot_be_opened_is_kept(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(24, "Too many open files")

    files.write(name(1), contents(1))
    monkeypatch.setattr(Path, "open", fail)
    assert not files.read(name(1), room())
    monkeypatch.undo()
    monkeypatch.setattr(os, "utime", fail)
    assert files.has(name(1)) and files.read(name(1), room())


def test_a_file_of_another_block_is_not_read(files: BlockFiles) -> None:
    files.write(name(1), contents(1))
    os.rename(files.path_of(name(1)), files.path_of(name(2)))
    assert not files.read(name(2), room())


def test_a_block_of_another_size_is_not_read(files: BlockFiles) -> None:
    files.write(name(1), contents(1))
    assert not files.read(name(1), [memoryview(bytearray(BLOCK - 1))])


def test_the_blocks_that_were_not_used_for_the_longest_time_are_deleted(files: BlockFiles) -> None:
    for number in range(10):
        assert files.write(name(number), contents(number))
        use_time(files, number, 1000.0 + number)
    files.read(name(0), room())
    assert files.write(name(10), contents(10))
    assert [number for number in range(11) if not files.has(name(number))] == [1]


def test_a_touched_block_is_not_the_first_to_be_deleted(files: BlockFiles) -> None:
    for number in range(10):
        assert files.write(name(number), contents(number))
        use_time(files, number, 1000.0 + number)
    files.touch(name(0))
    files.touch(name(99))
    assert files.write(name(10), contents(10))
    assert [number for number in range(11) if not files.has(name(number))] == [1]


def test_later_blocks_of_a_prompt_are_deleted_first(files: BlockFiles) -> None:
    for number in range(10):
        assert files.write(name(number), contents(number), depth=number)
    assert files.write(name(20), contents(20))
    assert [number for number in range(10) if not files.has(name(number))] == [9]
    for number in range(9):  # reading all blocks does not change the order of deletion
        assert files.read(name(number), room(), depth=number)
    assert files.write(name(21), contents(21))
    assert files.write(name(22), contents(22))
    assert [number for number in range(9) if not files.has(name(number))] == [7, 8]


def test_a_block_that_was_used_after_the_survey_is_kept(files: BlockFiles) -> None:
    for number in range(10):
        files.write(name(number), contents(number))
        use_time(files, number, 1000.0 + number)
    files.write(name(10), contents(10))  # deletes block 0; block 1 would be the next
    files.read(name(1), room())
    files.write(name(11), contents(11))
    assert files.has(name(1)) and not files.has(name(2))


def test_files_of_others_below_the_root_are_not_deleted(files: BlockFiles, tmp_path: Path) -> None:
    """A user may choose a root that also has other files."""
    for place in ("letter.txt", "model/rank/letter", "photos/1.part"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes(bytes(FILE))
        os.utime(tmp_path / place, (5, 5))
    for number in range(12):
        assert files.write(name(number), contents(number))
    assert sorted(path.name for path in tmp_path.rglob("letter*")) == ["letter", "letter.txt"]
    assert (tmp_path / "photos" / "1.part").exists()


def test_a_block_above_the_limit_is_not_written(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, tmp_path / "rank", FILE - 1)
    assert not files.write(name(1), contents(1))
    assert [path.name for path in (tmp_path / "rank").iterdir()] == []


def test_the_count_is_made_again_if_it_is_lost(files: BlockFiles, tmp_path: Path) -> None:
    for number in range(10):
        files.write(name(number), contents(number))
    (tmp_path / COUNT_FILE).unlink()
    files.write(name(10), contents(10))
    assert files.num_bytes() == 10 * FILE


def test_two_processes_do_not_write_the_same_block(files: BlockFiles) -> None:
    files.write(name(0), contents(0))  # makes the folder
    unfinished = files.path_of(name(1)).with_suffix(".part")
    unfinished.touch()
    assert files.write(name(1), contents(1))  # the other process writes it
    assert not files.has(name(1))
    old_s = unfinished.stat().st_mtime - 2 * ABANDONED_S
    os.utime(unfinished, (old_s, old_s))
    assert not files.write(name(1), contents(1))  # the other process has ended
    assert files.write(name(1), contents(1)) and files.has(name(1))


def test_a_process_that_was_stopped_does_not_name_the_file_of_another_one(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.writev
    unfinished = files.path_of(name(1)).with_suffix(".part")

    def write_late(fd: int, buffers: list[memoryview]) -> int:
        unfinished.unlink()  # another process finds the unfinished file, deletes it,
        unfinished.write_bytes(b"half")  # and begins to write the same block
        return real(fd, buffers)

    monkeypatch.setattr(os, "writev", write_late)
    assert not files.write(name(1), contents(1))
    assert not files.has(name(1)) and unfinished.read_bytes() == b"half"
    assert files.num_bytes() == 0


def test_a_stopped_process_with_the_lock_delays_a_write_only_for_a_limited_time(
    files: BlockFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(name(1), contents(1))
    monkeypatch.setattr(block_files, "LOCK_S", 0.01)
    with (tmp_path / COUNT_FILE).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not files.write(name(2), contents(2))
        assert files.read(name(1), room())
    assert files.write(name(2), contents(2))


def test_a_full_file_system_loses_no_count(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, buffers: list[memoryview]) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", fail)
    assert not files.write(name(1), contents(1))
    monkeypatch.undo()
    assert files.num_bytes() == 0
    assert files.write(name(1), contents(1))


def test_a_deleted_folder_is_a_folder_without_blocks(files: BlockFiles, tmp_path: Path) -> None:
    files.write(name(1), contents(1))
    files.path_of(name(1)).unlink()
    files.path_of(name(1)).parent.rmdir()
    assert not files.read(name(1), room())
    assert files.write(name(1), contents(1)) and files.has(name(1))


def test_other_users_cannot_use_the_folders_below_the_root(
    files: BlockFiles, tmp_path: Path
) -> None:
    old = os.umask(0)
    try:
        assert files.write(name(1), contents(1))
    finally:
        os.umask(old)
    folder = files.path_of(name(1)).parent
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]


def test_files_that_cannot_be_counted_are_not_written(files: BlockFiles, tmp_path: Path) -> None:
    disk = BlockFiles(tmp_path / "disk", tmp_path / "disk" / "rank", 4 * FILE)
    files.write(name(1), contents(1))
    (tmp_path / "disk" / COUNT_FILE).mkdir(parents=True)
    assert not disk.write(name(2), contents(2))
    disk.copy_from(files, name(1))
    assert not disk.has(name(1)) and list((tmp_path / "disk" / "rank").iterdir()) == []


def test_a_file_is_copied_from_another_folder(files: BlockFiles, tmp_path: Path) -> None:
    disk = BlockFiles(tmp_path / "disk", tmp_path / "disk" / "rank", 4 * FILE)
    files.write(name(5), contents(5))
    disk.copy_from(files, name(5))
    disk.copy_from(files, name(6))
    times = [each.path_of(name(5)).stat().st_mtime_ns for each in (files, disk)]
    assert times[0] == times[1]
    buffers = room()
    assert disk.read(name(5), buffers) and b"".join(buffers) == bytes([5]) * BLOCK
    assert not disk.has(name(6)) and disk.num_bytes() == FILE


@examples(400)
@given(
    limit=st.integers(1, 5),
    steps=st.lists(st.tuples(st.sampled_from("wrd"), st.integers(0, 9)), max_size=40),
)
def test_law_of_files(
    tmp_path_factory: pytest.TempPathFactory, limit: int, steps: list[tuple[str, int]]
) -> None:
    """The bytes in the folder equal the counted bytes and stay within the limit. A read returns
    what was written.
    """
    root = tmp_path_factory.mktemp("law")
    (root / "rank").mkdir()
    both = [BlockFiles(root, root / "rank", limit * FILE) for _ in range(2)]
    for index, (what, number) in enumerate(steps):
        files = both[index % 2]
        if what == "w":
            assert files.write(name(number), contents(number)) and files.has(name(number))
        elif what == "d":
            files.delete(name(number))
        else:
            buffers = room()
            had = files.has(name(number))
            assert files.read(name(number), buffers) == had
            assert not had or b"".join(buffers) == bytes([number]) * BLOCK
        sizes = [path.stat().st_size for path in (root / "rank").iterdir()]
        assert sum(sizes) == files.num_bytes() <= limit * FILE


def test_threads_share_a_folder(tmp_path: Path) -> None:
    def work(seed: int) -> None:
        files = BlockFiles(tmp_path, tmp_path / "rank", 5 * FILE)
        for index in range(40):
            number = (seed * index) % 13
            files.write(name(number), contents(number))
            buffers = room()
            if files.read(name(number), buffers):
                assert b"".join(buffers) == bytes([number]) * BLOCK
            else:
                missing.append(number)

    missing: list[int] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sizes = [path.stat().st_size for path in (tmp_path / "rank").iterdir()]
    assert all(size == FILE for size in sizes) and sum(sizes) <= 5 * FILE
    assert len(missing) < 120
