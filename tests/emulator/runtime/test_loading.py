"""The emulator's build, its loading, and its settings."""

import pytest

from dist_aclgraph.device import emulator
from dist_aclgraph.errors import DeviceError
from tests.forks import forks, run_code


def test_the_build_is_fresh():
    assert emulator.is_built()


def test_loading_again_with_the_same_settings_is_nothing():
    emulator.load({"devices": 4, "cann": "9.0.0"})


def test_loading_again_with_other_settings_is_refused():
    with pytest.raises(DeviceError, match="the emulator is loaded with"):
        emulator.load({"devices": 3})


@pytest.mark.parametrize(
    "settings,problem",
    [
        ({"colour": "red"}, "unknown setting colour"),
        ({"devices": 0}, "devices=0: want a whole number from 1 to 64"),
        ({"kernels": "fast"}, "kernels=fast: want compute or skip or timed"),
        ({"strict": "maybe"}, "strict=maybe: want true or false"),
        ({"cann": "7.0"}, "cann=7.0: want a version of CANN 8.5 or 9"),
    ],
)
def test_wrong_settings_are_refused(run_script, settings, problem):
    status, output = run_script("", fresh=True, **settings)
    assert status == 1 and problem in output


def test_an_ordinary_process_ends_by_itself(run_script):
    """A process exits normally even if it has not released its streams, graphs and memory."""
    status, output = run_script(
        """
        x, side = torch.ones(4).npu(), torch.npu.Stream()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y = x + 1
        graph.replay()
        with torch.npu.stream(side):
            x + 1
        print("RESULT", y.tolist())
        """,
        fresh=True,
    )
    assert status == 0 and "RESULT [2.0, 2.0, 2.0, 2.0]" in output, output


@pytest.mark.parametrize(
    "visible,ids",
    [("2", [2]), ("1,3", [1, 3]), ("1,9,2", [1]), ("0, 1", [0])],
)
def test_only_visible_devices_are_there_numbered_from_zero(run_script, visible, ids):
    status, output = run_script(
        """
        import ctypes
        runtime, device = ctypes.CDLL("libascendcl.so"), ctypes.c_int32()
        def logical(index):
            assert runtime.aclrtGetLogicDevIdByUserDevId(index, ctypes.byref(device)) == 0
            return device.value
        count = torch.npu.device_count()
        print("IDS", [logical(index) for index in range(count)])
        if count:
            print("LAST", torch.ones(2, device=f"npu:{count - 1}").sum().item())
        try:
            torch.npu.set_device(count)
        except RuntimeError as e:
            print("REFUSED")
        """,
        devices=4,
        environment={"ASCEND_RT_VISIBLE_DEVICES": visible},
    )
    assert status == 0 and f"IDS {ids}" in output and "LAST 2.0" in output, output
    assert "REFUSED" in output


COUNTING = """
import ctypes, os
from dist_aclgraph.device import emulator
emulator.load({"devices": 4})
import torch, torch_npu

def runtime_count():
    count = ctypes.c_uint32()
    assert ctypes.CDLL("libascendcl.so").aclrtGetDeviceCount(ctypes.byref(count)) == 0
    return count.value

counts = [torch.npu.device_count()]
for visible in ("1", "1,2,3"):
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = visible
    counts += [torch.npu.device_count(), runtime_count()]
print("COUNTS", counts, torch.ones(2).npu().sum().item())
"""


def run_forked(code, folder):
    """Run code in a forked process, and return the output."""
    out = folder / "out"
    process = forks().Process(target=run_code, args=(code, {}, out), daemon=True)
    process.start()
    process.join(90)
    output = out.read_text()
    assert process.exitcode == 0, output
    return output


def test_visible_devices_are_read_once_when_devices_are_first_used(tmp_path):
    assert "COUNTS [4, 1, 1, 3, 1] 2.0" in run_forked(COUNTING, tmp_path)


WITHOUT_SOURCES = """
from dist_aclgraph.device import emulator
from npu_emulator import loading

def build():
    raise AssertionError("a forked process reads the sources again")

loading.build = build
emulator.load({"devices": 3})
import torch, torch_npu
print("COUNT", torch.npu.device_count())
"""


def test_a_process_that_is_forked_from_loaded_libraries_does_not_check_the_build_again(tmp_path):
    assert "COUNT 3" in run_forked(WITHOUT_SOURCES, tmp_path)


@pytest.mark.parametrize("visible", ["none", "", "1,3,0"])
def test_a_process_without_a_visible_device_is_told_so(run_script, visible):
    status, output = run_script("", environment={"ASCEND_RT_VISIBLE_DEVICES": visible})
    assert status == 1 and "No NPUs are available" in output, output
