"""How ranks join a lockstep group: the address at which they connect, and the time limit of their
collectives.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from dist_aclgraph.actors.wire.addresses import open_meeting
from tests.forks import forks, run_code

END_S = 120.0

PROLOGUE = """
from dist_aclgraph.comm.groups import join_lockstep_group, make_groups
from dist_aclgraph.config import make_config
from dist_aclgraph.device.npu import open_npu
from dist_aclgraph.topology import ParallelLayout

config = make_config({"model": "m", "device": {"kind": "emulated"}})
open_npu(config.device, 0)
"""


def run_ranks(code: str, count: int, folder: Path) -> list[str]:
    """Run code in one process per rank; the variable ``RANK`` contains the rank. Return each
    process's output.
    """
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


def test_ranks_meet_at_a_socket_that_listens_at_one_address_alone(tmp_path: Path) -> None:
    """The test reads the address of the listening socket from the kernel's table of sockets."""
    with open_meeting("127.0.0.2", None, 1.0) as free:
        port = free.getsockname()[1]
    outputs = run_ranks(
        f"""
        from dist_aclgraph.actors.wire.addresses import open_meeting
        meeting = open_meeting("127.0.0.2", range({port}, {port + 1}), 60.0) if RANK == 0 else None
        join_lockstep_group("tcp://127.0.0.2:{port}", RANK, 2, 60.0, meeting)
        groups = make_groups(ParallelLayout(tp=2), RANK)
        table = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
        print("LISTENS", [line[1] for line in table if line[1].endswith("{port:04X}")])
        print("JOINED", groups.tp.size)
        """,
        2,
        tmp_path,
    )
    assert all("JOINED 2" in output for output in outputs), outputs
    assert f"'0200007F:{port:04X}'" in outputs[0]
    assert f"'00000000:{port:04X}'" not in outputs[0]


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
