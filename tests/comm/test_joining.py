"""Joining a lockstep group: ports that are taken for a while, and how long collectives may take."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.forks import forks, run_code

END_S = 120.0

PROLOGUE = """
import socket
import threading

from dist_aclgraph.comm.groups import join_lockstep_group, make_groups
from dist_aclgraph.config import make_config
from dist_aclgraph.device.npu import open_npu
from dist_aclgraph.topology import ParallelLayout

config = make_config({"model": "m", "device": {"kind": "emulated"}})
open_npu(config.device, 0)
"""


def run_ranks(code: str, count: int, folder: Path) -> list[str]:
    """Run code in processes that know their ``RANK``; return what each has printed."""
    outs = [folder / f"out{rank}" for rank in range(count)]
    processes = []
    for rank, out in enumerate(outs):
        script = f"RANK = {rank}\n{PROLOGUE}{textwrap.dedent(code)}"
        environment = {"ASCEND_RT_VISIBLE_DEVICES": str(rank)}
        processes.append(forks().Process(target=run_code, args=(script, environment, out)))
        processes[-1].start()
    for process in processes:
        process.join(END_S)
        process.kill()
    return [out.read_text() for out in outs]


def test_a_port_that_is_taken_is_asked_for_until_it_is_free(tmp_path: Path) -> None:
    (output,) = run_ranks(
        """
        taken = socket.socket()
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        threading.Timer(1.0, taken.close).start()
        join_lockstep_group(f"tcp://127.0.0.1:{port}", 0, 1, 60.0)
        print("JOINED", taken.fileno())
        """,
        1,
        tmp_path,
    )
    assert "JOINED -1" in output, output


def test_a_port_that_stays_taken_is_an_error_that_names_it(tmp_path: Path) -> None:
    (output,) = run_ranks(
        """
        taken = socket.socket()
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        try:
            join_lockstep_group(f"tcp://127.0.0.1:{port}", 0, 1, 1.0)
        except Exception as e:
            print("REFUSED", type(e).__name__, f"port: {port}" in str(e), e)
        """,
        1,
        tmp_path,
    )
    assert "REFUSED DeviceError True" in output, output


def test_collectives_have_a_limit_of_their_own(tmp_path: Path) -> None:
    outputs = run_ranks(
        f"""
        join_lockstep_group("file://{tmp_path}/meeting", RANK, 2, 60.0)
        groups = make_groups(ParallelLayout(tp=2), RANK, watchdog_s=81.0)
        print("LIMIT", groups.tp.backend.options._timeout)
        """,
        2,
        tmp_path,
    )
    assert all("LIMIT 0:01:21" in output for output in outputs), outputs
