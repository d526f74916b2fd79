"""Copies of KV blocks in memory and on disk: ranks and services share files only if their contents
are the same.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import Config, make_config
from dist_aclgraph.errors import ConfigError, ModelError
from dist_aclgraph.kv.block_files import HEADER, BlockFiles
from dist_aclgraph.kv.tiers import (
    CachePlace,
    HostCopies,
    KVTiers,
    cache_identity,
    host_root,
)
from tests.unit.kv.test_cache_spec import make_facts

MODEL = Path(__file__).parents[3] / "models" / "tiny-qwen3"
NAME = bytes(range(16))
GIB = 1 << 30


def configure(tmp_path: Path, **kv) -> Config:
    values = {"host_path": str(tmp_path), "host_gib": 0.001} | kv
    return make_config({"model": str(MODEL), "kv": values})


def test_the_same_tokens_have_the_same_file_in_each_tier(tmp_path: Path) -> None:
    config = configure(tmp_path, disk=str(tmp_path / "disk"), disk_gib=0.001)
    tiers = KVTiers.open(config, CachePlace())
    data = memoryview(os.urandom(400_000))
    names = [bytes([number]) * 16 for number in range(4)]
    assert all(tiers.write(name, data) for name in names)
    while tiers.write_late():
        pass
    assert all(tiers.has(name) for name in names[2:])
    assert all(size > 0 for size in tiers.num_bytes().values())
    target = bytearray(400_000)
    assert tiers.read(names[3], memoryview(target), [400_000]) and target == data
    assert tiers.num_read == {"host": 1}


def test_a_deleted_block_is_in_no_tier(tmp_path: Path) -> None:
    config = configure(tmp_path, disk=str(tmp_path / "disk"), disk_gib=0.001)
    mine = CachePlace(heads=1, num_heads=2, num_kv_heads=4)
    other = CachePlace(heads=0, num_heads=1, num_kv_heads=4)
    tiers = KVTiers.open(config, mine)
    for place in (mine, other):
        opened = KVTiers.open(config, place)
        opened.write(NAME, memoryview(b"x"))
        opened.write_late()
    tiers.delete(NAME)
    assert not tiers.has(NAME) and not KVTiers.open(config, other).has(NAME)


def test_the_disk_alone_keeps_blocks_beyond_the_service(tmp_path: Path) -> None:
    config = configure(tmp_path, host_gib=0, disk=str(tmp_path / "disk"), disk_gib=0.001)
    KVTiers.open(config, CachePlace()).write(NAME, memoryview(b"x"))
    assert KVTiers.open(config, CachePlace()).has(NAME)


def test_the_last_group_of_a_node_deletes_the_copies_in_memory(tmp_path: Path) -> None:
    config = configure(tmp_path)
    first, second = HostCopies(config), HostCopies(config)
    KVTiers.open(config, CachePlace()).write(NAME, memoryview(b"x"))
    first.leave()
    assert KVTiers.open(config, CachePlace()).has(NAME)
    other_model = KVTiers.open(config, CachePlace(), "another model")
    other_model.write(NAME, memoryview(b"xyz"))
    second.leave()
    assert not KVTiers.open(config, CachePlace()).has(NAME)
    assert other_model.num_bytes() == {"host": HEADER.size + 3}, "deleted files are not counted"


@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_group_can_start_while_the_last_other_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    config = configure(tmp_path)
    last, module = HostCopies(config), os if call == "open" else fcntl
    real = getattr(module, call)

    def end_first(*arguments: Any) -> Any:
        monkeypatch.undo()
        last.leave()
        return real(*arguments)

    monkeypatch.setattr(module, call, end_first)
    group, other = HostCopies(config), HostCopies(config)
    KVTiers.open(config, CachePlace()).write(NAME, memoryview(b"x"))
    other.leave()
    assert KVTiers.open(config, CachePlace()).has(NAME), "the first group still uses the files"
    group.leave()
    assert not KVTiers.open(config, CachePlace()).has(NAME)


def test_a_block_on_disk_returns_to_memory_when_it_is_read(tmp_path: Path) -> None:
    config = configure(tmp_path, disk=str(tmp_path / "disk"), disk_gib=0.001)
    tiers, group = KVTiers.open(config, CachePlace()), HostCopies(config)
    tiers.write(NAME, memoryview(b"x"))
    assert tiers.write_late()
    group.leave()
    tiers = KVTiers.open(config, CachePlace())
    memory = KVTiers.open(configure(tmp_path), CachePlace())
    assert not memory.has(NAME)
    assert tiers.read(NAME, memoryview(bytearray(1)), [1])
    assert memory.has(NAME) and tiers.num_read == {"disk": 1}


def test_a_block_that_cannot_be_copied_to_the_disk_delays_no_other_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path, disk=str(tmp_path / "disk"), disk_gib=0.001)
    tiers, other = KVTiers.open(config, CachePlace()), bytes(16)

    def fail(*arguments: object) -> None:
        monkeypatch.undo()
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(BlockFiles, "copy_from", fail)
    for name in (NAME, other):
        tiers.write(name, memoryview(b"x"))
    with pytest.raises(PermissionError):
        tiers.write_late()
    assert tiers.write_late() and not tiers.write_late()
    disk = configure(tmp_path, host_gib=0, disk=str(tmp_path / "disk"), disk_gib=0.001)
    assert KVTiers.open(disk, CachePlace()).has(other)


@pytest.mark.parametrize(
    ("changes", "is_shared"),
    [
        ({"graph": {"mode": "NONE"}}, True),
        ({"scheduler": {"max_num_seqs": 3}}, True),
        ({"parallel": {"tp": 2, "dp": 2}}, True),
        ({"dtype": "float16"}, False),
        ({"quantization": "w8a8"}, False),
        ({"device": {"fusions": "none"}}, False),
        ({"weights": "dummy"}, False),
        ({"kv": {"block_size": 32}}, False),
        ({"kv": {"block_size": 16, "dtype": "int8"}}, False),
        ({"speculative": {"num_tokens": 1}}, False),
        ({"model_overrides": {"rope_theta": 5.0}}, False),
    ],
)
def test_only_equal_contents_have_equal_names(changes: dict, *, is_shared: bool) -> None:
    base = {"model": str(MODEL), "kv": {"block_size": 16}}
    changed = cache_identity(make_config(base | changes))
    assert (changed == cache_identity(make_config(base))) == is_shared


@pytest.mark.parametrize(("kind", "is_shared"), [("dynamic", False), ("linear", True)])
def test_a_context_length_that_changes_positions_changes_the_name(
    kind: str, *, is_shared: bool
) -> None:
    scaling = {"rope_type": kind, "factor": 4.0}
    base = {"model": str(MODEL), "model_overrides": {"rope_scaling": scaling}}
    names = {cache_identity(make_config(base | {"max_model_len": n})) for n in (64, 128)}
    assert (len(names) == 1) == is_shared


def test_a_changed_checkpoint_has_another_name(tmp_path: Path) -> None:
    for file in MODEL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = make_config({"model": str(tmp_path)})
    before = cache_identity(config)
    os.utime(tmp_path / "model.safetensors", (5, 5))
    assert cache_identity(config) != before
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        cache_identity(config)


def test_other_weights_of_the_same_size_and_time_have_another_name(tmp_path: Path) -> None:
    """Files that come from an archive can all have the same time of change, so names must not
    depend on the time alone.
    """
    names = set()
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        for file in MODEL.iterdir():
            copy, data = tmp_path / place / file.name, file.read_bytes()
            if place == "b" and file.suffix == ".safetensors":
                data = data[: len(data) // 2] + data[len(data) // 2 :][::-1]
            copy.write_bytes(data)
            os.utime(copy, (1, 1))
        names.add(cache_identity(make_config({"model": str(tmp_path / place)})))
    assert len(names) == 2


def test_ranks_with_the_same_heads_share_files() -> None:
    def places(tp: int, num_kv_heads: int, **changes) -> list[str]:
        config = make_config({"model": "m", "parallel": {"tp": tp}, "kv": {"host_gib": 1}})
        facts = make_facts(num_kv_heads=num_kv_heads, **changes)
        return [CachePlace.of(config, facts, rank).folder for rank in range(tp)]

    assert len(set(places(4, 8))) == 4
    assert places(4, 2)[:2] == [places(4, 2)[0]] * 2
    assert len(set(places(4, 2))) == 2
    assert set(places(4, 8)).isdisjoint(places(2, 8))
    assert set(places(4, 128, latent_size=576)) == {places(1, 128, latent_size=576)[0]}


def test_shards_of_contexts_have_files_of_their_own() -> None:
    kv, parallel = {"host_gib": 1}, {"tp": 4, "dcp": 2}
    config = make_config({"model": "m", "parallel": parallel, "kv": kv})
    facts = make_facts(num_kv_heads=2)
    places = {CachePlace.of(config, facts, rank, rank % 2) for rank in range(4)}
    assert len({place.folder for place in places}) == 4


def test_a_folder_that_others_can_change_is_refused(tmp_path: Path) -> None:
    config = configure(tmp_path)
    host_root(config).mkdir(mode=0o700)
    host_root(config).chmod(0o770)
    with pytest.raises(ConfigError, match="other users can write"):
        KVTiers.open(config, CachePlace())


def test_a_link_that_another_user_has_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the service would write and delete files in the folder to which the link leads."""
    config, target = configure(tmp_path), tmp_path / "mine"
    target.mkdir(mode=0o700)
    host_root(config).symlink_to(target)
    KVTiers.open(config, CachePlace())  # a link of this user
    us, lstat = os.getuid(), Path.lstat

    def stranger(path: Path) -> os.stat_result:
        fields = list(lstat(path))
        fields[4] = us + 1
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "lstat", stranger)
    with pytest.raises(ConfigError, match="other users can write"):
        KVTiers.open(config, CachePlace())


def test_a_folder_in_a_small_file_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv\.host_gib is 1e\+06, but the file system"):
        KVTiers.open(configure(tmp_path, host_gib=1e6), CachePlace())


def test_copies_without_a_prefix_cache_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.prefix_cache=false turns off"):
        make_config({"model": "m", "kv": {"host_gib": 1}, "scheduler": {"prefix_cache": False}})
    with pytest.raises(ConfigError, match=r"recovery\.exact=true turns off"):
        make_config({"model": "m", "kv": {"disk": "/x"}, "recovery": {"exact": True}})
