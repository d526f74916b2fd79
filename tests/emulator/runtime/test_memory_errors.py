"""Memory becomes faulty (UCE, code 507053): some calls fail, CANN reports the error, and torch_npu
can repair the memory.
"""

import re

# The tensor `x` exists until the program ends. Each tensor has 16 MB, so that the allocator uses a
# separate segment for each tensor. An addition reads its first operand and writes its second
# operand.
PROGRAM = """
import ctypes
acl = ctypes.CDLL("libascendcl.so")
class Range(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("len", ctypes.c_size_t),
                ("reserved", ctypes.c_size_t * 14)]
def told(room=128):
    ranges, count = (Range * 128)(), ctypes.c_size_t()
    code = acl.aclrtGetMemUceInfo(0, ranges, ctypes.c_size_t(room), ctypes.byref(count))
    return code, [(ranges[i].at, ranges[i].len) for i in range(count.value)]
def repair(*ranges):
    array = (Range * 21)(*(Range(*r) for r in ranges))
    return acl.aclrtMemUceRepair(0, array, ctypes.c_size_t(len(ranges)))
def attempt(what, body):
    try:
        print(what, "FINE", body(), flush=True)
    except RuntimeError as e:
        print(what, "FAILED", str(e).replace(chr(10), " "), flush=True)
x, small = torch.ones(4 << 20).npu(), torch.ones(8).npu()
def step(part=x):
    y = part + 1
    torch.npu.synchronize()
    return y[:2].tolist()
step()
"""
STRIKES = {"fault_op": "aclnnAdds", "fault_call": 2, "fault_kind": "uce"}


def test_kept_memory_is_bad_until_torch_npu_has_repaired_it_and_then_it_is_lost(run_script):
    status, output = run_script(
        PROGRAM
        + """
attempt("STRUCK", step)
bad = told()[1]
print("TOLD", bad == [(x.data_ptr() + (4 << 20), 4096)], told(room=0)[0])
print("REFUSED", repair(*bad))
print("STOPS", torch.npu.stop_device(0))
print("CHECK", torch.npu.check_uce_in_memory(0))
torch.npu.restart_device(0)
print("REPAIRED", told(), repair(*bad))
attempt("UNSAFE", step)
torch_npu.npu._recovery.update_npu_tensor_to_safe(x)
lost = x.isnan().nonzero().flatten().tolist()
print("LOST", lost == list(range(1 << 20, (1 << 20) + 1024)))
attempt("AGAIN", step)
""",
        **STRIKES,
        fault_offset=4 << 20,
    )
    assert status == 0, output
    # Only some release series of torch_npu add CANN's reason, "[device mem error]".
    assert re.search(r"STRUCK FAILED .*UCE ERROR, error code is 507053", output), output
    for line in (
        "TOLD True 100000",
        "REFUSED 107000",
        "STOPS 0",
        "CHECK 3",
        "REPAIRED (0, []) 107000",
        "LOST True",
        "AGAIN FINE [2.0, 2.0]",
    ):
        assert line in output, output
    assert re.search("UNSAFE FAILED .*unsafe data", output), output


def test_only_calls_that_read_faulty_memory_fail_and_they_fail_each_time(run_script):
    status, output = run_script(
        PROGRAM
        + """
beside, across = x[:1024], x[4096:8192]
attempt("BESIDE", lambda: step(beside))  # which is struck, elsewhere
print("UNTOLD", told())
graph = torch.npu.NPUGraph()
out = torch.zeros(4096).npu()
with torch.npu.graph(graph):
    torch.add(small, 1)
    torch.add(across, 1, out=out)
def replay():
    graph.replay()
    torch.npu.synchronize()
for name in ("FIRST", "SECOND"):
    attempt(name, replay)
    assert acl.aclrtDeviceTaskAbort(0, 0) == 0
attempt("HOST", lambda: x.cpu()[:2])
assert acl.aclrtDeviceTaskAbort(0, 0) == 0
print("REPAIR", repair(*told()[1]))
attempt("REPAIRED", replay)
""",
        **STRIKES,
        fault_offset=16384,
    )
    assert status == 0, output
    assert "BESIDE FINE" in output and "UNTOLD (0, [])" in output, output
    for name in ("FIRST", "SECOND", "HOST"):
        assert re.search(f"{name} FAILED .*UCE ERROR", output), output
    assert "REPAIR 0" in output and "REPAIRED FINE" in output, output


def test_faulty_temporary_memory_is_returned_and_the_step_can_run_again(run_script):
    status, output = run_script(
        PROGRAM
        + """
attempt("STRUCK", step)
torch.npu.stop_device(0)
print("CHECK", torch.npu.check_uce_in_memory(0))
torch.npu.restart_device(0)
attempt("AGAIN", step)
""",
        **STRIKES,
        fault_operand=1,
    )
    assert status == 0, output
    assert re.search("STRUCK FAILED .*UCE ERROR", output), output
    assert "CHECK 2" in output and "AGAIN FINE [2.0, 2.0]" in output, output


def test_memory_of_a_library_is_nobodys_to_repair(run_ranks):
    results = run_ranks(
        PROGRAM
        + """
dist.init_process_group("hccl")
def reduce():
    # Where the device is quicker than its host, the call fails and not only the wait behind it.
    dist.all_reduce(small)
    torch.npu.synchronize()
reduce()
attempt("STRUCK", reduce)
torch.npu.stop_device(rank)
print("CHECK", torch.npu.check_uce_in_memory(rank), flush=True)
os._exit(0)
""",
        1,
        fault_op="HcclAllReduce",
        fault_call=2,
        fault_kind="uce",
    )
    for status, output in results:
        assert status == 0, output
        assert re.search("STRUCK FAILED .*UCE ERROR", output), output
        assert "CHECK 1" in output, output
