"""New device memory is poisoned (filled with bytes 255), the host cannot read device memory, and
memory is counted and freed.
"""

import ctypes
import mmap
import signal

import pytest
import torch
import torch_npu


def test_fresh_memory_is_poisoned(run_script):
    status, output = run_script("""
        x = torch.empty(100, device="npu")
        y = torch.empty(1 << 20, dtype=torch.int64, device="npu")
        print("RESULT", x[0].item(), y.min().item(), y.max().item())
    """)
    assert status == 0 and "RESULT nan -1 -1" in output, output


@pytest.mark.parametrize("expandable", [False, True])
def test_the_host_cannot_read_device_memory(run_script, expandable):
    code = """
        x = torch.ones(4, device="npu")
        torch.npu.synchronize()
        import ctypes
        print("REACHED", flush=True)
        ctypes.c_float.from_address(x.data_ptr()).value
    """

    environment = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"} if expandable else {}
    # torch_npu reads this variable when it is imported.
    status, output = run_script(code, fresh=expandable, environment=environment)
    assert "REACHED" in output and status == -signal.SIGSEGV


@pytest.mark.slow
def test_a_segment_that_grows_is_poisoned_in_part(run_script):
    """Only a part of a large segment is poisoned, even if the segment grows. So an allocation of
    gigabytes does not use gigabytes of the host's memory.
    """
    status, output = run_script(
        """
        def shared_mb():
            line = next(l for l in open("/proc/self/status") if l.startswith("RssShmem"))
            return int(line.split()[1]) >> 10
        before = shared_mb()
        x = torch.empty(3000 << 20, dtype=torch.uint8, device="npu")
        print("USED", shared_mb() - before < 1024)
        print("ENDS", x[:4].tolist(), x[-4:].tolist())
        """,
        fresh=True,
        environment={"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
    )
    assert status == 0 and "USED True" in output, output
    assert "ENDS [255, 255, 255, 255] [255, 255, 255, 255]" in output


def test_memory_is_counted_and_given_back(run_script):
    status, output = run_script(
        """
        free = torch.npu.mem_get_info()[0]
        x = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
        taken = free - torch.npu.mem_get_info()[0]
        del x
        torch.npu.empty_cache()
        print("RESULT", taken >> 20 in range(64, 70), free - torch.npu.mem_get_info()[0])
        try:
            torch.empty(2 << 30, dtype=torch.uint8, device="npu")
        except torch.OutOfMemoryError as e:
            print("OOM")
        """,
        hbm_mb=1024,
    )
    assert status == 0 and "RESULT True 0" in output and "OOM" in output, output


def test_the_memory_limit_refuses_earlier_than_the_reported_size(run_script):
    _status, output = run_script(
        """
        print("TOTAL", torch.npu.mem_get_info()[1] >> 20)
        try:
            torch.empty(200 << 20, dtype=torch.uint8, device="npu")
        except torch.OutOfMemoryError as e:
            print("OOM")
        """,
        hbm_mb=1024,
        memory_limit_mb=100,
    )
    assert "TOTAL 1024" in output and "OOM" in output, output


def test_an_index_outside_stops_the_device_with_the_reason(run_script):
    _status, output = run_script("""
        x = torch.ones(3, 2, device="npu")
        x.index_select(0, torch.tensor([7]).npu())
        try:
            torch.npu.synchronize()
        except RuntimeError as e:
            print("SYNC", str(e).replace(chr(10), " "))
        try:
            x + 1
        except RuntimeError as e:
            print("LATER", str(e).replace(chr(10), " "))
    """)
    for when in ("SYNC", "LATER"):
        line = next(line for line in output.splitlines() if line.startswith(when))
        assert "aclnnIndexSelect: index 7 at position 0 lies outside 0..2" in line


def test_skipped_kernels_leave_valid_tokens(run_script):
    status, output = run_script(
        """
        x = torch.randn(4, 50).npu()
        y = (x @ x.t()).softmax(-1)
        print("RESULT", y.argmax(-1).tolist(), torch.multinomial(y, 1).flatten().tolist(),
              torch.tensor([3, 4]).npu().add(1).tolist())
        """,
        kernels="skip",
    )
    assert status == 0 and "RESULT [0, 0, 0, 0] [0, 0, 0, 0] [4, 5]" in output, output


def test_large_blocks_round_trip():
    x = torch.arange(3 << 20)
    assert torch.equal(x.npu().cpu(), x)


def test_memory_of_the_program_is_registered_once_and_counts_as_memory_of_the_host():
    acl = ctypes.CDLL("libascendcl.so")
    mapped, pinned = 0x2, 0x10000000
    host, unregistered = 0, 2
    pages = mmap.mmap(-1, 8192)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    address, middle = ctypes.c_void_p(start), ctypes.c_void_p(start + 5000)

    def location_type():
        attributes = (ctypes.c_uint32 * 32)()
        assert acl.aclrtPointerGetAttributes(ctypes.c_void_p(start + 100), attributes) == 0
        return attributes[1]

    def register(at, size, flags):
        return acl.aclrtHostRegisterV2(at, ctypes.c_uint64(size), ctypes.c_uint32(flags))

    assert register(address, 0, pinned) != 0
    assert register(None, 8192, pinned) != 0
    assert register(address, 8192, 0x1) != 0
    assert register(middle, 100, mapped) != 0  # only memory that begins at a page can be mapped
    assert acl.aclrtHostUnregister(address) != 0
    assert location_type() == unregistered

    on_device = ctypes.c_void_p()
    assert acl.aclrtHostRegister(address, ctypes.c_uint64(8192), 0, ctypes.byref(on_device)) == 0
    assert on_device.value == start
    assert location_type() == host
    assert register(address, 8192, pinned) != 0
    assert acl.aclrtHostUnregister(address) == 0
    assert register(middle, 100, pinned) == 0
    assert acl.aclrtHostUnregister(middle) == 0


def test_tensors_in_memory_of_the_host_are_tensors_of_the_device():
    swapped = torch_npu.empty_with_swapped_memory([1000], dtype=torch.float32, device="npu:0")
    swapped.fill_(2)

    assert (swapped * 3).cpu().unique().tolist() == [6.0]
