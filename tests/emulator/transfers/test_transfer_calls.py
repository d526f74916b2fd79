"""The runtime's calls that transfer engines use: copies in batches, mapped pages, and queries of
devices.
"""

import ctypes

import pytest
import torch

INVALID, NOT_EMULATED = 107000, 161003
HOST, DEVICE = 0, 1
SIZE_MAX = ctypes.c_size_t(-1).value


class Location(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("type", ctypes.c_int))


class Attribute(ctypes.Structure):
    _fields_ = (("to", Location), ("from_", Location), ("reserved", ctypes.c_uint8 * 16))


class Properties(ctypes.Structure):
    _fields_ = (
        ("handle", ctypes.c_int),
        ("allocation", ctypes.c_int),
        ("pages", ctypes.c_int),
        ("location", Location),
        ("reserved", ctypes.c_uint64),
    )


@pytest.fixture(scope="module")
def acl():
    return ctypes.CDLL("libascendcl.so")


def copy_batch(acl, copies, attributes, first):
    """Copy a batch; return (status, index of the failed copy). A copy is (target, room at the
    target in bytes, source, number of bytes).
    """
    targets, room, sources, sizes = zip(*copies, strict=True)
    pointers, counts = ctypes.c_void_p * len(copies), ctypes.c_size_t * len(copies)
    failed = ctypes.c_size_t(0)
    status = acl.aclrtMemcpyBatch(
        pointers(*targets),
        counts(*room),
        pointers(*sources),
        counts(*sizes),
        ctypes.c_size_t(len(copies)),
        (Attribute * len(attributes))(*attributes),
        (ctypes.c_size_t * len(first))(*first),
        ctypes.c_size_t(len(attributes)),
        ctypes.byref(failed),
    )
    return status, failed.value


def test_a_batch_copies_between_host_and_device_only(acl):
    x = torch.arange(8, device="npu")
    out = torch.zeros(8, dtype=torch.int64)
    torch.npu.synchronize()
    device, host = x.data_ptr(), out.data_ptr()
    to_host = Attribute(Location(0, HOST), Location(0, DEVICE))
    to_device = Attribute(Location(0, DEVICE), Location(0, HOST))

    copies = [(host + 8, 16, device + 24, 16), (host + 40, 8, device + 8, 8)]
    assert copy_batch(acl, copies, [to_host], [0]) == (0, SIZE_MAX)
    assert out.tolist() == [0, 3, 4, 0, 0, 1, 0, 0]
    copies.append((device, 8, host + 16, 8))
    assert copy_batch(acl, copies, [to_host, to_device], [0, 2]) == (0, SIZE_MAX)
    assert x.cpu().tolist() == [4, 1, 2, 3, 4, 5, 6, 7]

    assert copy_batch(acl, copies, [to_host], [0]) == (INVALID, 2)  # another location
    within = Attribute(Location(0, DEVICE), Location(0, DEVICE))
    assert copy_batch(acl, [(device, 8, device + 8, 8)], [within], [0]) == (INVALID, 0)
    assert copy_batch(acl, [(host, 7, device, 8)], [to_host], [0])[0] == INVALID
    assert copy_batch(acl, copies, [to_host], [1])[0] == INVALID
    assert x.cpu().tolist() == [4, 1, 2, 3, 4, 5, 6, 7]


def test_the_size_of_pages_depends_on_their_kind(acl):
    def granularity(pages, place=DEVICE):
        found = ctypes.c_size_t()
        properties = Properties(pages=pages, location=Location(0, place))
        status = acl.aclrtMemGetAllocationGranularity(
            ctypes.byref(properties), 0, ctypes.byref(found)
        )
        return status or found.value

    huge, normal, gigantic = 4, 5, 10
    assert granularity(huge) == 2 << 20
    assert granularity(gigantic) == 1 << 30
    assert granularity(normal) == NOT_EMULATED
    assert granularity(huge, HOST) == INVALID


def test_a_physical_device_is_the_one_that_the_variable_names(run_script):
    status, output = run_script(
        """
        import ctypes
        acl = ctypes.CDLL("libascendcl.so")
        found = ctypes.c_int32()
        for logical in (0, 1, 2):
            status = acl.aclrtGetPhyDevIdByLogicDevId(logical, ctypes.byref(found))
            print("GOT", status, found.value)
        """,
        fresh=True,
        environment={"ASCEND_RT_VISIBLE_DEVICES": "1,3"},
    )

    assert status == 0, output
    assert [line for line in output.splitlines() if line.startswith("GOT")] == [
        "GOT 0 1",
        "GOT 0 3",
        "GOT 107001 3",
    ]


def test_memory_of_other_processes_is_not_emulated_by_handles_and_keys(acl):
    for call in (
        "aclrtMemExportToShareableHandleV2",
        "aclrtMemImportFromShareableHandleV2",
        "aclrtIpcMemGetExportKey",
        "aclrtIpcMemImportByKey",
        "aclrtIpcMemClose",
    ):
        assert acl[call](None, None, None, None, None) == NOT_EMULATED
    acl.aclrtStreamAbort.argtypes = [ctypes.c_void_p]
    assert acl.aclrtStreamAbort(None) == INVALID
    stream = torch.npu.Stream()
    stream.synchronize()
    assert acl.aclrtStreamAbort(stream.npu_stream) == 0
