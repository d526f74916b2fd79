"""Files with copies of KV blocks, in a folder whose size is limited.

A file contains one block of one rank: the block's part in each layer's tensors, one tensor after
another. The file's name is the hash of all tokens from the beginning of the prompt to the end of
the block. So every request with these tokens can use the file. A file is renamed to its final name
when it is complete, and does not change afterwards. Any number of processes may read and write the
same folder. No process keeps an index of the files; each process asks the file system. If one
process deletes a file while another process reads it, the reader can still read the whole file.

The count file, protected by a lock, contains the total size of all block files. If a new file does
not fit, the least recently used files are deleted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from dist_aclgraph.kv.checkpoints import BlockHash

# The fields of the header: magic number, checksum and size of the contents, and the block's hash.
HEADER = struct.Struct("<8sIQ16s")
MAGIC = b"DAGKV\0\0\1"
COUNT = struct.Struct("<Q")
COUNT_FILE = "bytes.count"
UNFINISHED = ".part"  # suffix of a file that is being written
# Block files have these names. All other files in the folder are neither counted nor deleted.
OWN_NAME = re.compile(r"[0-9a-f]{32}(\.part)?")
# seconds; an unfinished file of this age is assumed to belong to no running process
ABANDONED_S = 60.0
LOCK_S = 1.0  # seconds for which a process waits for the lock of the count file
LOCK_POLL_S = 0.005  # seconds between two attempts to lock the count file
COPY_BYTES = 1 << 24
# Each block of a prompt gets a time of use that is this many seconds earlier than the time of the
# block before it. The value must exceed the time in which one block is computed. Otherwise, a later
# block of the prompt could get a later time of use.
BLOCK_AGE_S = 1.0
MAX_PARTS = 1000  # maximum number of buffers in one system call; the limit of Linux is 1,024

Buffers = Sequence[memoryview]
logger = logging.getLogger(__name__)


@dataclass
class _NewFile:
    """A file that a process wants to write.

    Attributes:
        fd: the descriptor of the unfinished file; -1 if this process must not write the file.
        exists: true if the finished file exists, or if another process is writing the file. This
            attribute is set when the context of ``_new_file`` ends.
    """

    fd: int = -1
    exists: bool = False


class BlockFiles:
    """The files of one rank's blocks.

    Args:
        root: the folder whose size is limited. The folder may contain the folders of several models
            and ranks.
        folder: the folder below ``root`` for the blocks of this rank.
        max_bytes: maximum size of all block files below ``root`` together, headers included.
    """

    def __init__(self, root: Path, folder: Path, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._root = root
        self._folder = folder
        # files to delete next; the least recently used file is first
        self._oldest: deque[tuple[float, Path]] = deque()

    def path_of(self, block_hash: BlockHash) -> Path:
        return self._folder / block_hash.hex()

    def has(self, block_hash: BlockHash) -> bool:
        return os.path.exists(self.path_of(block_hash))  # False if the disk has failed

    def num_bytes(self) -> int:
        """Return the total size of the block files below the root, as stored in the count file; 0
        if there is no count file.
        """
        try:
            return int(COUNT.unpack((self._root / COUNT_FILE).read_bytes())[0])
        except (OSError, struct.error):
            return 0

    def read(self, block_hash: BlockHash, buffers: Buffers, depth: int = 0) -> bool:
        """Read a block into ``buffers``; return False if there is no valid file with exactly the
        size of the buffers.

        A file with wrong contents is deleted.

        Args:
            depth: number of blocks before this block in its prompt; see ``_touch``.
        """
        path = self.path_of(block_hash)
        size = sum(map(len, buffers))
        header = bytearray(HEADER.size)
        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError:
            return False
        except OSError as e:  # for example, this process has too many open files
            logger.warning("a KV block is not read: %s", e)
            return False
        with file:
            try:
                if file.readinto(header) != HEADER.size:
                    raise OSError("the header is cut off")
                _move(os.readv, file.fileno(), buffers)
            except OSError as e:
                return self._refuse(path, str(e))
            with suppress(OSError):  # ignored: only the order of deletion depends on this time
                _touch(file.fileno(), depth)
        if header != _header(block_hash, size, buffers):
            return self._refuse(path, "its contents do not match its header")
        return True

    def _refuse(self, path: Path, why: str) -> bool:
        logger.warning("%s is deleted: %s", path, why)
        self._delete(path)
        return False

    def write(self, block_hash: BlockHash, buffers: Buffers, depth: int = 0) -> bool:
        """Write a block to a file; return whether the block's file exists now, or another process
        is writing it.

        The result is False if there is no room, if the lock of the count file is not free within
        ``LOCK_S``, or if the file system refuses the file.

        Args:
            depth: number of blocks before this block in its prompt; see ``_touch``.
        """
        size = sum(map(len, buffers))
        with self._new_file(self.path_of(block_hash), HEADER.size + size) as new:
            if new.fd >= 0:
                header = memoryview(_header(block_hash, size, buffers))
                _move(os.writev, new.fd, [header, *buffers])
                _touch(new.fd, depth)
        return new.exists

    def copy_from(self, other: BlockFiles, block_hash: BlockHash) -> None:
        """Copy a block's file from ``other``; do nothing if ``other`` has no file of this block."""
        try:
            with other.path_of(block_hash).open("rb", buffering=0) as source:
                size = os.fstat(source.fileno()).st_size
                with self._new_file(self.path_of(block_hash), size) as new:
                    if new.fd >= 0:
                        _copy(source.fileno(), new.fd)
                        used_ns = os.fstat(source.fileno()).st_mtime_ns
                        os.utime(new.fd, ns=(used_ns, used_ns))
        except FileNotFoundError:
            pass
        except OSError as e:
            logger.warning("a KV block is not copied: %s", e)

    def file_bytes(self, block_hash: BlockHash, max_bytes: int) -> bytes:
        """Return the contents of a block's file, header included; empty if there is no file, or if
        the file has more than ``max_bytes``.
        """
        file = self.open_file(block_hash, max_bytes)
        if file is None:
            return b""
        with file, suppress(OSError):  # the disk may fail
            return file.read() or b""
        return b""

    def open_file(self, block_hash: BlockHash, max_bytes: int) -> FileIO | None:
        """Open the file of a block. Return None if there is no file, or if the file is empty or has
        more than ``max_bytes``. The caller must close the file.
        """
        try:
            file = FileIO(self.path_of(block_hash))
        except OSError:  # the file does not exist, or the disk has failed
            return None
        if 0 < os.fstat(file.fileno()).st_size <= max_bytes:
            return file
        file.close()
        return None

    def add_file(self, block_hash: BlockHash, file: memoryview, depth: int = 0) -> bool:
        """Store a block's file that another node has sent; return whether the file exists now.

        The result is also False if the file's header does not match the hash or the contents.

        Args:
            file: the result of ``file_bytes`` on the other node.
        """
        contents = file[HEADER.size :]
        if file[: HEADER.size] != _header(block_hash, len(contents), [contents]):
            return False
        with self._new_file(self.path_of(block_hash), len(file)) as new:
            if new.fd >= 0:
                _move(os.writev, new.fd, [file])
                _touch(new.fd, depth)
        return new.exists

    @contextmanager
    def _new_file(self, path: Path, size: int) -> Iterator[_NewFile]:
        """Reserve ``size`` bytes and open an unfinished file. At the end of the context, the file
        gets its final name.

        No file is opened if the block's file exists, if another process writes this file, or if
        there is no room. If the context ends with an OSError, the unfinished file is removed.
        """
        unfinished, new = path.with_name(path.name + UNFINISHED), _NewFile()
        if path.exists():
            new.exists = True
            yield new
            return
        try:
            self._make_folder(path.parent)
            # Only one process can create the file; for the other processes, the open call fails.
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            new.fd = os.open(unfinished, flags, 0o600)
        except FileExistsError:
            new.exists = not _remove_abandoned(unfinished)
            yield new
            return
        except OSError as e:
            logger.warning("a KV block is not kept: %s", e)
            yield new
            return
        is_reserved = False
        try:
            is_reserved = self._make_room(size)
            if not is_reserved:
                os.close(new.fd)
                new.fd = -1
            yield new
            if is_reserved:
                if _is_removed(new.fd):  # another process's file may be at this path now
                    raise OSError("another process has removed the unfinished file")
                os.rename(unfinished, path)
                new.exists = True
        except OSError as e:  # for example, another program has filled the file system
            logger.warning("a KV block is not kept: %s", e)
            if is_reserved:
                self._add(-size)
        finally:
            is_removed = new.exists or _is_removed(new.fd)
            if new.fd >= 0:
                os.close(new.fd)
            if not is_removed:
                unfinished.unlink(missing_ok=True)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and its parents; only this user may use the folders below the root."""
        if folder.is_dir():
            return
        if folder != self._root:
            self._make_folder(folder.parent)
        # Each folder below the root is made by its own call: with ``parents=True``, mkdir would
        # make the parents with the default mode.
        folder.mkdir(mode=0o700, parents=folder == self._root, exist_ok=True)

    def touch(self, block_hash: BlockHash, depth: int = 0) -> None:
        """Mark a block's file as used now, if the file exists; see ``_touch``."""
        with suppress(OSError):  # ignored: only the order of deletion depends on this time
            _touch(self.path_of(block_hash), depth)

    def delete(self, block_hash: BlockHash) -> None:
        """Delete a block's file if it exists."""
        self._delete(self.path_of(block_hash))

    def delete_all(self) -> None:
        """Delete this rank's folder with all of its files."""
        # The bytes are subtracted before the files are deleted. If the count file contains no
        # count, ``_add`` first counts the bytes of all files, and must include these files.
        if size := sum(size for _, _, size in _files_below(self._folder)):
            self._add(-size)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _delete(self, path: Path) -> None:
        """Delete a file, and subtract its bytes from the count."""
        try:
            size = path.stat().st_size
            path.unlink()
        except OSError:
            return  # another process has deleted the file
        self._add(-size)

    def _add(self, num_bytes: int) -> None:
        with self._counting() as count:
            if count is not None:
                count[0] = max(0, count[0] + num_bytes)

    def _make_room(self, num_bytes: int) -> bool:
        """Reserve bytes for a new file, and delete old files if necessary; return whether there is
        enough room.
        """
        if num_bytes > self.max_bytes:
            return False
        with self._counting() as count:
            if count is None:
                return False
            is_fresh = False
            while count[0] + num_bytes > self.max_bytes:
                if not self._oldest:
                    if is_fresh:
                        return False
                    count[0], is_fresh = self._survey(), True
                    continue
                used_s, path = self._oldest.popleft()
                count[0] -= self._evict(path, used_s)
            count[0] += num_bytes
        return True

    def _survey(self) -> int:
        """Read the times of use of all files below the root, and queue the least recently used
        files for deletion. Return the total size of all files.

        The total size of the queued files is about a tenth of ``max_bytes``. No further files are
        queued, because their times of use may change before they are deleted. After the queued
        files were deleted, the next survey reads the times again.
        """
        found = sorted(_files_below(self._root))
        total = sum(size for _, _, size in found)
        chosen, now_s = 0, time.time()
        for used_s, path, size in found:
            if chosen > self.max_bytes // 10:
                break
            if path.name.endswith(UNFINISHED) and now_s - used_s < ABANDONED_S:
                continue  # a process is writing this file
            chosen += size
            self._oldest.append((used_s, path))
        return total

    def _evict(self, path: Path, used_s: float) -> int:
        """Delete a file if no process has used it since ``used_s``; return the freed bytes."""
        try:
            status = path.stat()
            if status.st_mtime != used_s:
                return 0
            path.unlink()
        except OSError:
            return 0
        return status.st_size

    @contextmanager
    def _counting(self) -> Iterator[list[int] | None]:
        """Lock the count file, and yield a list whose only item is the count. The item is stored
        when the context ends.

        Yields None if the count file cannot be opened, or if its lock is not free within
        ``LOCK_S``. The wait is limited because a stopped process may hold the lock.
        """
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
        try:
            file = os.open(self._root / COUNT_FILE, flags, 0o600)
        except OSError as e:
            logger.warning("the bytes of KV copies cannot be counted: %s", e)
            yield None
            return
        try:
            if not _lock(file):
                yield None
                return
            stored = os.pread(file, COUNT.size, 0)
            count = [COUNT.unpack(stored)[0] if len(stored) == COUNT.size else self._survey()]
            yield count
            # Writing fails if, for example, the file system is full. A later survey counts the
            # files again.
            with suppress(OSError):
                os.pwrite(file, COUNT.pack(max(0, count[0])), 0)
        finally:
            os.close(file)


def _header(block_hash: BlockHash, size: int, buffers: Buffers) -> bytes:
    checksum = 0
    for buffer in buffers:
        checksum = zlib.crc32(buffer, checksum)
    return HEADER.pack(MAGIC, checksum, size, block_hash)


def _move(call: Callable[[int, Buffers], int], file: int, buffers: Buffers) -> None:
    """Read or write all bytes of the buffers.

    Raises:
        OSError: the file ends before the buffers are full, or the file system has no room.
    """
    left = deque(buffers)
    while left:
        moved = call(file, list(left)[:MAX_PARTS])
        if moved == 0:
            raise OSError("the file is cut off")
        while left and moved >= len(left[0]):
            moved -= len(left.popleft())
        if moved:
            left[0] = left[0][moved:]


def _touch(file: int | Path, depth: int) -> None:
    """Set the file's last time of use.

    A block is useless if a block before it in the prompt is missing. So each block gets an earlier
    time of use than the block before it, and the last blocks of a prompt are deleted first.
    """
    used_s = time.time() - depth * BLOCK_AGE_S
    os.utime(file, (used_s, used_s))


def _copy(source: int, target: int) -> None:
    while os.sendfile(target, source, None, COPY_BYTES):
        pass


def _files_below(root: Path) -> Iterator[tuple[float, Path, int]]:
    """Yield the last time of use, the path and the size of each block file. Unfinished files are
    included.
    """
    for folder, _, names in os.walk(root):
        for name in names:
            if not OWN_NAME.fullmatch(name):
                continue
            path = Path(folder, name)
            with suppress(FileNotFoundError):
                status = path.stat()
                yield status.st_mtime, path, status.st_size


def _remove_abandoned(unfinished: Path) -> bool:
    """Remove an unfinished file if it is old enough; return whether it was removed."""
    try:
        if time.time() - unfinished.stat().st_mtime < ABANDONED_S:
            return False
        unfinished.unlink()
    except FileNotFoundError:
        return False
    return True


def _is_removed(file: int) -> bool:
    """Return whether an open file was removed from its folder; False for the descriptor -1."""
    return file >= 0 and os.fstat(file).st_nlink == 0


def _lock(file: int) -> bool:
    deadline_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(LOCK_POLL_S)
