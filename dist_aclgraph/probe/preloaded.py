"""Loads the emulator once, in the process that forks the processes of questions."""

from contextlib import redirect_stdout

from dist_aclgraph.device import emulator

with redirect_stdout(None):  # hides torch_npu's message that no CANN was sourced
    emulator.preload()
