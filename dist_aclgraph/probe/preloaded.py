"""Loads the emulator once, in the process from which questions to it are forked."""

from dist_aclgraph.device import emulator

emulator.preload()
