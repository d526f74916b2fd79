"""A process with an emulated NPU and a worker's files of KV blocks, for tests of HIXL.

Each line of standard input is a call with JSON arguments. Each line of standard output is the
call's result in JSON. Start the process with ``python -m tests.actors.hixl_node FOLDER HOST
{SETTINGS}``. HOST is the name of the emulated host. SETTINGS are settings of the emulator; settings
with names in capitals are limits of ``hixl_memory``.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import msgspec

from dist_aclgraph.actors.wire import block_fetches
from dist_aclgraph.actors.wire.block_server import source_of
from dist_aclgraph.actors.worker import hixl_memory
from dist_aclgraph.actors.worker.node_files import NodeFiles, NodeFilesSettings
from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.config import make_config
from dist_aclgraph.device import emulator
from dist_aclgraph.device.hixl import HixlEngine
from dist_aclgraph.device.npu import runtime
from dist_aclgraph.kv.group_files import GroupFiles
from dist_aclgraph.kv.tiers import CachePlace, KVTiers
from dist_aclgraph.steps.copies import CopyJob
from tests.actors.fetched_files import MODEL, NAMES, TOKEN, contents
from tests.actors.kv_sockets import LOOPBACK
from tests.actors.leftovers import wait_until

PLACE = CachePlace()
LONG_S = 600.0  # seconds; a source on a busy machine must not count as silent


class Node:
    def __init__(self, folder: str, host: str) -> None:
        kv = {"host_path": folder, "host_gib": 0.01, "transport": "hixl", "closed_network": True}
        config = make_config({"model": str(MODEL), "kv": kv})
        self._tiers = KVTiers.open(config, PLACE)
        settings = NodeFilesSettings(
            host, LOOPBACK, TOKEN, (PLACE,), 0, finds=True, fetches=True, serves=True,
            uses_hixl=True,
        )  # fmt: skip
        self._host = host
        self._files = NodeFiles(config, settings)
        assert self._files.server is not None
        self._source = source_of([self._files.server], GroupFiles((PLACE,), (host,)))
        self._num_jobs = 0

    def write(self, count: int = len(NAMES)) -> None:
        names = NAMES[:count]
        assert all(self._tiers.write(name, memoryview(contents(name, 0))) for name in names)

    def restart_device(self) -> None:
        """Abort all work of the device, and make the device ready again, as a resumption does."""
        assert not runtime().stop_device(0)
        runtime().restart_device(0)

    def damage(self) -> None:
        """From now on, change one byte of each file that this node lends to a reader."""
        assert self._files._server is not None
        lent = self._files._server._lent
        assert lent is not None
        memory, lend = lent._lender.memory, lent._lend

        def lend_damaged(key: Any, file: bytes, slot: Any) -> Any:
            answer = lend(key, file, slot)
            memory[slot.end - 1] ^= 1
            return answer

        lent._lend = lend_damaged  # type: ignore[method-assign]

    def end_links_after(self, pid: int) -> None:
        """Delay the end of each link until all threads of the process ``pid`` are stopped by a
        signal.
        """
        disconnect = HixlEngine.disconnect

        def disconnect_late(engine: HixlEngine, name: str, timeout_s: float) -> None:
            threads = Path(f"/proc/{pid}/task")
            wait_until(
                lambda: all(
                    (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
                    for thread in threads.iterdir()
                ),
                "the process is not stopped",
            )
            disconnect(engine, name, timeout_s)

        HixlEngine.disconnect = disconnect_late  # type: ignore[method-assign]

    def source(self) -> str:
        return b64encode(msgspec.msgpack.encode(self._source)).decode()

    def fetch(self, source: str) -> int:
        """Fetch files from ``source``; return the number of blocks that this node then has."""
        depths, self._num_jobs = pack_ints(range(len(NAMES))), self._num_jobs + 1
        job = CopyJob(
            self._num_jobs, "find", b"", b"".join(NAMES), depths, source=b64decode(source)
        )
        found = self._files.advance([job])
        while not found:
            time.sleep(0.01)
            found = self._files.advance([])
        return found[0][1]

    def state(self) -> dict[str, Any]:
        memory = self._files._memory
        assert memory is not None
        return {
            **self._files.fetched,
            "engine": memory.engine,
            "lost": memory.num_lost,
            "is_reading": memory._read.is_used,
            "is_lending": memory._lent.is_used,
            "streams": streams(),
        }

    def close(self) -> bool:
        self._files.close(30.0)
        return self._files._memory is not None and not self._files._memory._thread.is_alive()


def streams() -> int:
    count = ctypes.c_uint32()
    assert ctypes.CDLL("libascendcl.so").aclrtGetStreamAvailableNum(ctypes.byref(count)) == 0
    return count.value


def main() -> None:
    folder, host, settings = sys.argv[1:]
    limits = {"CONNECT_S": LONG_S, "TRANSFER_S": LONG_S, "DISCONNECT_S": LONG_S}
    given = json.loads(settings)
    for name, default in limits.items():
        setattr(hixl_memory, name, given.pop(name, default))
    for name in ("QUEUE_S", "LIMIT_S", "SILENCE_S"):
        setattr(block_fetches, name, LONG_S)
    emulator.load({"devices": 1, "host": host, **given})
    runtime().set_device(0)
    node = Node(folder, host)
    print("VALUE null", flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print("VALUE", json.dumps(getattr(node, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
