"""Chooses whether Ray or a fork server starts processes. No other module depends on this choice."""

from __future__ import annotations

import os

from dist_aclgraph.actors.forks.forking_starter import ForkingStarter
from dist_aclgraph.actors.host.process_starter import ProcessStarter
from dist_aclgraph.config import Config
from dist_aclgraph.device.kind import is_emulated_here
from dist_aclgraph.topology import ParallelLayout


def choose_starter(config: Config) -> ProcessStarter:
    """Return a fork server if NPUs are emulated and the deployment needs more processes than this
    machine has cores. Otherwise return Ray's starter.
    """
    layout = ParallelLayout.from_config(config.parallel)
    num_processes = layout.world_size + len(layout.lockstep_groups)
    num_cores = len(os.sched_getaffinity(0))
    if is_emulated_here(config.device.kind) and num_processes > num_cores:
        return ForkingStarter()
    return ProcessStarter()
