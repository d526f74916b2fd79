"""Stores KV outside the device, as files of blocks in a node's memory and on its disk.

All groups of a node that serve the same model use the same files, even if the groups divide the
heads among different numbers of ranks. A block is written to memory first. The block is written to
the disk later, when no other work waits. If a tier is full, its least recently used blocks are
deleted. Files can be deleted at any time, because a block that is in no tier is computed again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from io import FileIO
from itertools import accumulate, product
from pathlib import Path
from types import MappingProxyType

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError, ModelError
from dist_aclgraph.kv.block_files import BlockFiles
from dist_aclgraph.kv.checkpoints import BlockHash
from dist_aclgraph.kv.other_layouts import HeadPart, OtherLayouts
from dist_aclgraph.shapes.model_config import read_model_config
from dist_aclgraph.shapes.model_facts import ModelFacts
from dist_aclgraph.shapes.rope_spec import depends_on_length
from dist_aclgraph.shapes.weight_files import weight_files

FORMAT = "1"  # version of the contents of a block's file
GIB = 1 << 30
PREFIX = "dist-aclgraph-kv-"
MODEL_CONFIG = "config.json"
USERS = "users.lock"
HOST, DISK = "host", "disk"  # names of the tiers
MAX_LATE = 4096  # maximum number of blocks that wait to be written to the disk
OTHERS_WRITE = 0o022  # the bits of a file mode that let the group or all users write
# Of each file, SAMPLES pieces of SAMPLE_BYTES bytes each are hashed.
SAMPLES, SAMPLE_BYTES = 16, 4096


@dataclass(frozen=True)
class CachePlace:
    """The part of a data-parallel rank's cache that one worker keeps.

    Attributes:
        heads: index of the worker's part of the key-value heads, which are divided into
            ``num_heads`` parts. Workers that keep the same heads have the same index. With latent
            attention, all workers keep the same latents, so there is only one part.
        shard: index of the worker's shard. The tokens of each request are divided among
            ``num_shards`` shards.
        interleave: number of consecutive tokens on one shard.
        rank: the worker's tensor parallel rank, from 0 to ``num_ranks - 1``. Each rank keeps a
            different part of the recurrent states.
        has_state: whether the model has recurrent state.
        num_kv_heads: number of key-value heads of the model; 0 with latent attention.
    """

    heads: int = 0
    num_heads: int = 1
    shard: int = 0
    num_shards: int = 1
    interleave: int = 1
    rank: int = 0
    num_ranks: int = 1
    has_state: bool = False
    num_kv_heads: int = 0

    @classmethod
    def of(
        cls, config: Config, facts: ModelFacts, tp_rank: int = 0, dcp_rank: int = 0
    ) -> CachePlace | None:
        """Return the part of the cache that a worker keeps; None if no copies of KV are kept."""
        if not config.kv.keeps_copies:
            return None
        parallel = config.parallel
        num_heads = 1 if facts.mla else min(parallel.tp, facts.num_kv_heads)
        return cls(
            tp_rank * num_heads // parallel.tp,
            num_heads,
            dcp_rank,
            parallel.dcp,
            parallel.cp_interleave,
            tp_rank,
            parallel.tp,
            facts.linear is not None,
            0 if facts.mla else facts.num_kv_heads,
        )

    @property
    def all_places(self) -> list[CachePlace]:
        """The parts into which the data-parallel rank's blocks are divided. A part is listed once,
        even if several workers keep the part.
        """
        parts = product(range(self.num_heads), range(self.num_shards))
        return [replace(self, heads=heads, shard=shard) for heads, shard in parts]

    @property
    def all_state_places(self) -> list[CachePlace]:
        """The parts of the recurrent states that the data-parallel rank's workers keep, one part
        for each tensor parallel rank; empty without recurrent state.
        """
        ranks = range(self.num_ranks if self.has_state else 0)
        return [replace(self, rank=rank) for rank in ranks]

    @property
    def folder(self) -> str:
        """Name of the folder for this worker's part of the blocks."""
        return (
            f"heads-{self.heads}-of-{self.num_heads}-shard-{self.shard}-of-{self.num_shards}"
            f"-by-{self.interleave}"
        )

    @property
    def part(self) -> HeadPart | None:
        """The worker's part of the heads; None with latent attention, which has no KV heads."""
        if not self.num_kv_heads:
            return None
        return HeadPart(self.heads, self.num_heads, self.num_kv_heads)

    @property
    def state_folder(self) -> str:
        """Name of the folder for this worker's part of the recurrent states."""
        return f"states-{self.rank}-of-{self.num_ranks}"


class KVTiers:
    """The files of one worker's blocks, in memory and on disk. Only one thread may read and write;
    any thread may call ``has`` and ``num_bytes``.

    Args:
        tiers: maps the name of each tier to the tier's files; new blocks are written to the first
            tier.
        others: maps the name of each tier to the files of groups that divide the heads in other
            ways.
    """

    def __init__(
        self,
        tiers: Mapping[str, BlockFiles],
        others: Mapping[str, OtherLayouts] = MappingProxyType({}),
    ) -> None:
        self._others = others
        self._by_name = tiers
        self._all: list[BlockFiles | OtherLayouts] = [*tiers.values(), *others.values()]
        # Number of blocks that were read from each tier. Only the thread that reads files changes
        # these numbers.
        self.num_read: Counter[str] = Counter()
        self._first, *lower = tiers.values()
        self._second = lower[0] if lower else None
        # Blocks that must still be written to the second tier. If the second tier is too slow, this
        # queue becomes full. Then the oldest blocks are removed from the queue, and are not written
        # to the second tier.
        self._late: deque[BlockHash] = deque(maxlen=MAX_LATE)

    @classmethod
    def open_states(cls, config: Config, place: CachePlace, identity: str = "") -> KVTiers | None:
        """Return the tiers for recurrent states; None if the model has none. See ``open``."""
        return cls._open(config, place.state_folder, identity) if place.has_state else None

    @classmethod
    def open(cls, config: Config, place: CachePlace, identity: str = "") -> KVTiers:
        """Return the tiers for KV blocks, as the configuration describes them.

        Args:
            identity: name of the cache's contents (``cache_identity``). If ``identity`` is "", this
                method computes the name from the model's files.

        Raises:
            ConfigError: a folder cannot be made, or is too small.
            ModelError: the model's files cannot be found.
        """
        return cls._open(config, place.folder, identity, place)

    @classmethod
    def _open(
        cls, config: Config, name: str, identity: str, place: CachePlace | None = None
    ) -> KVTiers:
        kv, identity = config.kv, identity or cache_identity(config)
        tiers, others = {}, {}
        for tier, root, gib, key in (
            (HOST, host_root(config), kv.host_gib, "kv.host_gib"),
            (DISK, disk_root(config), kv.disk_gib, "kv.disk_gib"),
        ):
            if gib and (tier == HOST or kv.disk is not None):
                tiers[tier] = _open(root, Path(identity, name), gib, key)
                if place is not None and place.part is not None:
                    files_of = partial(_files_of, root, identity, int(gib * GIB), place)
                    others[tier] = OtherLayouts(place.part, kv.block_size, files_of)
        return cls(tiers, others)

    @property
    def names(self) -> Collection[str]:
        """The names of the tiers, in the order in which they are read."""
        return self._by_name.keys()

    def has(self, block_hash: BlockHash, *, only: str = "") -> bool:
        """Return whether a block has a file in any tier.

        Args:
            only: name of a tier; if it is set, the other tiers are not looked up.
        """
        names = [only] if only else self.names
        return any(
            name in files and files[name].has(block_hash)
            for files in (self._by_name, self._others)
            for name in names
        )

    def read(
        self, block_hash: BlockHash, block: memoryview, sizes: Sequence[int], depth: int = 0
    ) -> bool:
        """Read a block from the first tier that has it; see ``BlockFiles.read``.

        A block that is read from the second tier is also written to the first tier.

        Args:
            block: memory that receives the contents of all tensors, one after another.
            sizes: number of bytes that the block has in each tensor.
            depth: number of blocks before this block in its prompt.
        """
        for name, files in self._by_name.items():
            if files.read(block_hash, [block], depth):
                if files is not self._first:
                    self._first.write(block_hash, [block], depth)
                self.num_read[name] += 1
                return True
        starts = accumulate(sizes, initial=0)
        parts = [block[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        for name, others in self._others.items():
            if others.read(block_hash, parts, depth):
                self.num_read[name] += 1
                return True
        return False

    def write(self, block_hash: BlockHash, block: memoryview, depth: int = 0) -> bool:
        """Write a block to the first tier; see ``BlockFiles.write``. A later call of ``write_late``
        writes the block to the second tier.
        """
        if not self._first.write(block_hash, [block], depth):
            return False
        if self._second is not None:
            self._late.append(block_hash)
        return True

    def file_bytes(self, block_hash: BlockHash, max_bytes: int) -> bytes:
        """Return the contents of a block's file from the first tier that has it; see
        ``BlockFiles``.
        """
        found = (files.file_bytes(block_hash, max_bytes) for files in self._by_name.values())
        return next((file for file in found if file), b"")

    def open_file(self, block_hash: BlockHash, max_bytes: int) -> FileIO | None:
        """Return the open file of a block from the first tier that has it; see ``BlockFiles``."""
        found = (files.open_file(block_hash, max_bytes) for files in self._by_name.values())
        return next((file for file in found if file is not None), None)

    def add_file(self, block_hash: BlockHash, file: memoryview, depth: int = 0) -> bool:
        """Store, in the first tier, a file that another node has sent; see ``BlockFiles``. Any
        thread may call this.
        """
        return self._first.add_file(block_hash, file, depth)

    def write_late(self) -> bool:
        """Write one of the waiting blocks to the second tier; return False if no block waits."""
        if self._second is None or not self._late:
            return False
        self._second.copy_from(self._first, self._late.popleft())
        return True

    def touch(self, block_hash: BlockHash, depth: int) -> None:
        """Mark the files of a block in all tiers as used now; see ``BlockFiles.touch``."""
        for files in self._all:
            files.touch(block_hash, depth)

    def delete(self, block_hash: BlockHash) -> None:
        """Delete a block's files in all tiers, including the files of groups that divide the heads
        in other ways.
        """
        for files in self._all:
            files.delete(block_hash)

    def has_first(self, block_hash: BlockHash) -> bool:
        """Return whether a block has a file in the first tier, in the layout of this worker."""
        return self._first.has(block_hash)

    def num_bytes(self, *, only: str = "") -> dict[str, int]:
        """Return, for each tier of this node, the total size of its files; the keys are the tiers'
        names.

        Args:
            only: name of a tier; if it is set, the other tiers are left out.
        """
        tiers = self._by_name.items()
        return {name: tier.num_bytes() for name, tier in tiers if name == (only or name)}


def host_root(config: Config) -> Path:
    """Return this user's folder for copies of KV in memory."""
    return Path(config.kv.host_path) / f"{PREFIX}{os.getuid()}"


def disk_root(config: Config) -> Path:
    """Return the folder for copies of KV on disk; the current folder if ``kv.disk`` is not set.

    Raises:
        ConfigError: the folder begins with the home of a user that does not exist.
    """
    try:
        return Path(config.kv.disk or "").expanduser()
    except RuntimeError as e:
        raise ConfigError(
            f"kv.disk is {config.kv.disk}, but this node knows no such home: write the whole path"
        ) from e


class HostCopies:
    """Registers a group as a user of the copies of the model's KV in the node's memory.

    When a group ends and no other group uses the copies, the group deletes the copies. If a group
    is killed, the copies stay.
    """

    def __init__(self, config: Config) -> None:
        self._folder = host_root(config) / cache_identity(config)
        self._lock = self._enter()
        # Before the lock was taken, another group may have deleted the folder.
        while os.fstat(self._lock).st_nlink == 0:
            os.close(self._lock)
            self._lock = self._enter()

    def _enter(self) -> int:
        """Make the folder, and lock its lock file (shared); return the descriptor of that file."""
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
        while True:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                lock = os.open(self._folder / USERS, flags, 0o600)
                break
        fcntl.flock(lock, fcntl.LOCK_SH)
        return lock

    def leave(self) -> None:
        """Delete the copies if no other group uses these copies."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            BlockFiles(self._folder.parent, self._folder, max_bytes=0).delete_all()
        os.close(self._lock)


def cache_identity(config: Config) -> str:
    """Return a name for the contents of a cache. Two caches have the same name only if the same
    tokens have the same KV in both caches.

    The name depends on the model's files, and on all settings that change KV values or their layout
    within a block. Each file is represented by its name, size, time and samples of its contents,
    because reading all weights would take minutes.
    """
    directory = Path(config.model)
    files = [directory / MODEL_CONFIG]
    if config.weights == "checkpoint":
        files += weight_files(directory)
    facts = {
        "format": FORMAT,
        "files": [(file.resolve().name, *_signature(file)) for file in files],
        "overrides": config.model_overrides,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "fusions": config.device.fusions,
        "weights": config.weights,
        "block_size": config.kv.block_size,
        "has_drafts": config.speculative.num_tokens > 0,
    }
    if config.kv.dtype != "auto":
        facts["kv_dtype"] = config.kv.dtype
    if depends_on_length(read_model_config(directory, config.model_overrides)):
        facts["max_model_len"] = config.max_model_len
    text = json.dumps(facts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _signature(file: Path) -> tuple[int, int, str]:
    """Return size and time of a file, and a hash of some of its contents.

    Size and time are not enough, because tools that pack files often give all files the same time.
    So the weight files of two models with the same shapes can have equal sizes and times.
    """
    try:
        status = file.stat()
        return status.st_size, status.st_mtime_ns, _sample(file, status.st_size, status.st_mtime_ns)
    except OSError as e:
        raise ModelError(f"{file} cannot be read: {e.strerror}") from e


@cache
def _sample(file: Path, size: int, time_ns: int) -> str:
    """Return a hash of ``SAMPLES`` pieces of a file, from its beginning to its end."""
    found = hashlib.blake2b(digest_size=16)
    with file.open("rb", buffering=0) as opened:
        for index in range(SAMPLES):
            start = max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1)
            found.update(os.pread(opened.fileno(), SAMPLE_BYTES, start))
    return found.hexdigest()


def _files_of(
    root: Path, identity: str, max_bytes: int, place: CachePlace, part: HeadPart
) -> BlockFiles:
    other = replace(place, heads=part.index, num_heads=part.count)
    return BlockFiles(root, root / identity / other.folder, max_bytes)


def foreign_problem(root: Path) -> tuple[str, str] | None:
    """Return how other users could change the folder, and a remedy; None if only this user can
    change the folder.
    """
    status = root.stat()
    # In /dev/shm, another user can make a link that leads to a folder of this user.
    is_foreign = root.lstat().st_uid not in (0, os.getuid())
    if is_foreign or status.st_uid != os.getuid() or status.st_mode & OTHERS_WRITE:
        return (
            f"other users can write to {root}, and could change answers",
            "let the service's user own it (`chown`), and run `chmod go-w` on it",
        )
    return None


def _open(root: Path, folder: Path, gib: float, key: str) -> BlockFiles:
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        space = os.statvfs(root)
        if problem := foreign_problem(root):
            raise ConfigError(": ".join(problem))
        files = BlockFiles(root, root / folder, int(gib * GIB))
    except OSError as e:
        raise ConfigError(f"{root} cannot keep copies of KV blocks: {e.strerror}") from e
    if (size := space.f_blocks * space.f_frsize) < gib * GIB:
        raise ConfigError(
            f"{key} is {gib:g}, but the file system of {root} has only {size / GIB:.1f} GiB: lower "
            f"{key}, or enlarge the file system"
        )
    return files
