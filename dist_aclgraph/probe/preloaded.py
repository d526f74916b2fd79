"""Loads the emulator once, in the process from which questions to it are forked."""

from contextlib import redirect_stdout

from dist_aclgraph.device import emulator

with redirect_stdout(None):  # torch_npu prints that no CANN was sourced
    emulator.preload()
