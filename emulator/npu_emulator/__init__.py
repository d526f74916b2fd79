"""An Ascend NPU on the CPU: emulated CANN libraries for the real, unmodified torch_npu.

``npu-emulator run -- python script.py`` runs a program on the emulated NPU. The function ``load``
loads the emulated NPU into the calling process. ``README.md`` in the folder of the C++ sources
describes the settings and the counters.

The C++ sources are compiled at the first use. libtorch_npu.so needs CANN libraries with certain
SONAMEs. The emulated libraries have these SONAMEs. They are loaded before libtorch_npu.so, so the
loader uses them and does not search for other libraries.
"""

from npu_emulator.building import BUILD, SOURCES, build, is_built, missing_tools
from npu_emulator.counters import ai_cpu_operators, counters, rates, unaligned_operators
from npu_emulator.errors import BuildError, EmulatorError
from npu_emulator.loading import load, preload, run
from npu_emulator.version import VERSION

__version__ = VERSION

__all__ = [
    "BUILD",
    "SOURCES",
    "BuildError",
    "EmulatorError",
    "ai_cpu_operators",
    "build",
    "counters",
    "is_built",
    "load",
    "missing_tools",
    "preload",
    "rates",
    "run",
    "unaligned_operators",
]
