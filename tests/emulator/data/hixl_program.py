"""A program that uses CANN's Python package ``hixl``. Each line of its standard input is a Python
expression, which can also assign a variable. Each line of its output is the value of one
expression.
"""

import ctypes
import sys

import hixl
import torch
import torch_npu  # noqa: F401

torch.npu.set_device(int(sys.argv[1]))
engine = hixl.Hixl()
acl = ctypes.CDLL("libascendcl.so")


def host_memory(num_bytes: int, value: int) -> int:
    address = ctypes.c_void_p()
    assert acl.aclrtMallocHost(ctypes.byref(address), ctypes.c_size_t(num_bytes)) == 0
    ctypes.memset(address, value, num_bytes)
    assert address.value
    return address.value


for line in sys.stdin:
    try:
        print("VALUE", repr(eval(line)), flush=True)
    except TypeError as e:
        print("VALUE", repr(f"TypeError: {e}"), flush=True)
