"""Commands run on a simulated host with NPUs. It has the device files, a driver and CANN.

A mount namespace simulates the host. Only CANN's libraries are replaced, by the libraries of the
emulator; all other code runs as on real NPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_aclgraph.device import emulator
from tests.cluster.several_nodes import ROOT
from tools.namespaces import why_no_nodes

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(why_no_nodes() is not None, reason=str(why_no_nodes())),
]

TINY = "configs/tiny-qwen3.yaml"
LARGE = "configs/deepseek-v3-tp8-dp4-ep32-mtp.yaml"
CHIPS = {"Ascend910B1": (8, "FFTS"), "Ascend910_9391": (16, "AICPU")}
NAMESPACES = (
    *("unshare", "--mount", "--propagation", "private", "--net", "--uts"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
)
SET_ENV = """
export ASCEND_HOME_PATH=/usr/local/Ascend/cann ASCEND_OPP_PATH=/usr/local/Ascend/cann/opp
export LD_LIBRARY_PATH={libraries} EMULATED_NPU="{settings}"
"""
# This script prepares the host, and runs a command on it. Its arguments are an empty folder, the
# number of NPUs, CANN's set-up script, and the command.
HOST = """
set -e
folder=$1 npus=$2 set_env=$3; shift 3
ip link set lo up
mkdir $folder/dev $folder/local
mount -t tmpfs none $folder/dev
mount -t tmpfs none $folder/local
cd $folder/dev
for name in null zero full random urandom tty; do touch $name; mount --bind /dev/$name $name; done
mkdir shm; mount --rbind /dev/shm shm
ln -s /proc/self/fd fd; ln -s fd/1 stdout; ln -s fd/2 stderr
touch $(seq -f davinci%g 0 $((npus - 1))) davinci_manager devmm_svm hisi_hdc
mount --rbind . /dev
mkdir $folder/local/upper $folder/local/work
mount -t overlay -o lowerdir=/usr/local,upperdir=$folder/local/upper,workdir=$folder/local/work \
  overlay /usr/local
mkdir -p /usr/local/Ascend/{driver,cann/{opp,runtime,compiler,share/info/runtime}}
echo Version=25.5.0 > /usr/local/Ascend/driver/version.info
echo Version=9.1.0 > /usr/local/Ascend/cann/share/info/runtime/version.info
cp $set_env /usr/local/Ascend/cann/set_env.sh
cd $OLDPWD
exec "$@"
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=CHIPS)
def chip(request: pytest.FixtureRequest) -> str:
    chip: str = request.param
    return chip


@pytest.fixture
def on_host(tmp_path: Path, chip: str) -> Run:
    """Return a function that runs ``dist-aclgraph`` on a simulated host whose NPUs have the chip
    ``chip``.
    """
    npus, expansion = CHIPS[chip]
    settings = f"devices={npus} soc={chip} cann=9.1.0 hbm_mb=62420 hccl_expansion={expansion}"
    set_env = tmp_path / "set_env.sh"
    set_env.write_text(SET_ENV.format(libraries=emulator.build(), settings=settings))

    def run(*arguments: str, sources: bool = True) -> subprocess.CompletedProcess[str]:
        ours = [sys.executable, "-m", "dist_aclgraph.cli.main", *arguments]
        sourced = ["bash", "-c", '. /usr/local/Ascend/cann/set_env.sh; exec "$@"', "bash", *ours]
        (folder := tmp_path / "host").mkdir()
        return subprocess.run(
            [*NAMESPACES, "bash", "-c", HOST, "bash", str(folder), str(npus), str(set_env),
             *(sourced if sources else ours)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=500,
        )  # fmt: skip

    return run


def test_a_whole_host_needs_nothing(on_host: Run, chip: str) -> None:
    said = on_host("doctor")

    assert said.returncode == 0, said.stdout
    assert f"ok   device: {CHIPS[chip][0]} NPUs: davinci0, davinci1, davinci2" in said.stdout
    assert "ok   CANN libraries: can be loaded" in said.stdout


def test_a_plan_is_for_the_chip_of_the_host(on_host: Run, chip: str) -> None:
    said = on_host("plan", LARGE)

    assert said.returncode == 0, said.stderr
    assert f"each NPU is an {chip} with 60.96 GiB under CANN 9.1.0: as configured" in said.stdout
    assert said.stderr == ""


def test_a_start_without_canns_variables_is_one_sentence(on_host: Run) -> None:
    said = on_host("serve", TINY, sources=False)

    assert said.returncode == 1
    assert said.stderr.startswith("error: CANN cannot be loaded (libascendcl.so")
    assert "source /usr/local/Ascend/cann/set_env.sh in this shell" in said.stderr
    assert said.stderr.count("\n") == 1


def test_ranks_answer_on_the_way_of_real_npus(on_host: Run) -> None:
    said = on_host("run", TINY, "--prompt", "hello", "--max-tokens", "4")

    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("> hello\n")
