"""A child process reads an NPU's properties. In these tests, the child process uses the emulated
CANN.
"""

from __future__ import annotations

import json
import subprocess
import sys


def test_an_npu_says_its_chip_its_cann_and_all_of_its_memory():
    settings = ("soc=Ascend910_9391", "cann=8.5.1", "hbm_mb=62433")
    words = [word for setting in settings for word in ("--set", setting)]
    emulated = [sys.executable, "-m", "dist_aclgraph.device.emulator", "run", *words, "--"]

    done = subprocess.run(
        [*emulated, sys.executable, "-m", "dist_aclgraph.device.ask"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"soc": "Ascend910_9391", "cann": "8.5.1", "memory_mb": 62433}
