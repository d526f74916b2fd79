"""Access to the emulated NPU, which is the package ``npu_emulator`` in ``emulator/``. This module
converts the errors of ``npu_emulator`` to errors of dist_aclgraph.

``python -m dist_aclgraph.device.emulator`` builds the emulated libraries. ``python -m
dist_aclgraph.device.emulator run -- COMMAND`` runs a program on the emulated NPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from dist_aclgraph.errors import DeviceError, EmulatorBuildError
from dist_aclgraph.files.shipped import shipped

# Imports use the copy of npu_emulator that belongs to dist_aclgraph, even if another version is
# installed.
sys.path.insert(0, str(shipped("emulator")))
import npu_emulator
from npu_emulator import cli, files, torch_build

sys.path.pop(0)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _with_our_errors(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a wrapper of ``function`` that converts npu_emulator's errors to our error types."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except npu_emulator.BuildError as error:
            raise EmulatorBuildError(str(error)) from error
        except npu_emulator.EmulatorError as error:
            raise DeviceError(str(error)) from error

    return call


SOURCES, BUILD = npu_emulator.SOURCES, npu_emulator.BUILD
is_built, missing_tools = npu_emulator.is_built, npu_emulator.missing_tools
build = _with_our_errors(npu_emulator.build)
load = _with_our_errors(npu_emulator.load)
preload = _with_our_errors(npu_emulator.preload)
counters = _with_our_errors(npu_emulator.counters)
ai_cpu_operators = _with_our_errors(npu_emulator.ai_cpu_operators)
unaligned_operators = _with_our_errors(npu_emulator.unaligned_operators)
rates = _with_our_errors(npu_emulator.rates)
read_rules = _with_our_errors(files.read_rules)
check_torch = _with_our_errors(torch_build.check_torch)
cuda_version, loads_torch_npu = torch_build.cuda_version, torch_build.loads_torch_npu
torch_remedy = torch_build.remedy


if __name__ == "__main__":
    cli.main("python -m dist_aclgraph.device.emulator", [Path(__file__).parents[2]])
