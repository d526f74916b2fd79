"""HCCL between hosts: results have the same bytes as on one host, only peers with the secret are
admitted, and the root listens at the selected address.
"""

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_ports


@pytest.fixture(autouse=True)
def forgotten_roots() -> Iterator[None]:
    """After each test, remove the files that ended roots have left behind."""
    yield
    for path in Path("/dev/shm").glob("meeting_of_emulated_hccl_*"):
        pid = path.name.removeprefix("meeting_of_emulated_hccl_").split("_")[0]
        if not Path("/proc", pid).exists():
            path.unlink(missing_ok=True)


EVERYTHING = """
import hashlib

dist.init_process_group("hccl")
n = dist.get_world_size()
digest, generator = hashlib.sha256(), torch.Generator().manual_seed(rank)

def add(tensor):
    digest.update(tensor.cpu().view(torch.uint8).numpy().tobytes())

def collectives(x, sizes, receive):
    total, largest = x.clone(), x.clone()
    dist.all_reduce(total)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    gathered = torch.empty(n * len(x), dtype=x.dtype, device="npu")
    dist.all_gather_into_tensor(gathered, x)
    part = torch.empty(len(x) // n, dtype=x.dtype, device="npu")
    dist.reduce_scatter_tensor(part, x)
    turned, split = torch.empty_like(x), x[: sum(receive)].clone()
    dist.all_to_all_single(turned, x)
    dist.all_to_all_single(split, x[: sum(sizes)], receive, sizes)
    one = x.clone()
    dist.broadcast(one, 2)
    passed = torch.empty_like(x)
    after, before = (rank + 1) % n, (rank - 1) % n
    calls = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, passed, before)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return total, largest, gathered, part, turned, split, one, passed

sizes = [(rank + r) % 3 for r in range(n)]  # symmetric
for dtype, count in (
    (torch.float16, 12),  # in a slot
    (torch.bfloat16, 50000),  # above it
    (torch.float32, 1100000),  # in two chunks
):
    x = torch.randn(count, generator=generator).to(dtype).npu()
    for result in collectives(x, sizes, sizes):
        add(result)
    if count == 1100000:
        break
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        results = collectives(x, sizes, sizes)
    for _ in range(2):
        x.copy_(torch.randn(count, generator=generator).to(dtype))
        graph.replay()
        torch.npu.synchronize()
        for result in results:
            add(result)
    dist.barrier()
    graph.reset()
print("DIGEST", digest.hexdigest(), "SOCKETS", emulator.counters()["socket_bytes"])
os._exit(0)
"""


@pytest.mark.slow
def test_all_results_have_the_same_bytes_on_one_and_on_several_hosts(run_ranks):
    digests = {}
    for hosts in ("a", "aabb", "abbb", "abcd"):
        results = run_ranks(EVERYTHING, 4, hosts=hosts)
        found = [re.search(r"DIGEST (\w+) SOCKETS (\d+)", output) for _, output in results]
        assert all(found), results
        digests[hosts] = [match[1] for match in found if match]
        assert [int(match[2]) > 0 for match in found if match] == [hosts != "a"] * 4
    assert digests["a"] == digests["aabb"] == digests["abbb"] == digests["abcd"]


def test_strangers_at_the_door_are_shut_out_and_nobody_waits_for_them(run_ranks):
    """The root limits the number of simultaneous connections. Rank 1 first opens more connections
    than this limit, without sending the secret. Then rank 1 joins.
    """
    root, other = free_ports(2)
    results = run_ranks(
        f"""
        import socket
        dist.init_process_group("hccl")

        def knock(words):
            while True:
                try:
                    stranger = socket.create_connection(("127.0.0.1", {root}))
                except ConnectionRefusedError:
                    time.sleep(0.01)
                    continue
                stranger.sendall(words)
                return stranger

        strangers = []
        if rank == 1:
            for words in (b"GET / HTTP/1.1\\r\\n\\r\\n", bytes(32), bytes(4000)):
                strangers.append(knock(words))
            strangers += [knock(b"") for _ in range(200)]
            strangers += [knock(b"?" * 31) for _ in range(100)]
        x = torch.ones(8).npu()
        dist.all_reduce(x)
        assert x.cpu().tolist() == [2.0] * 8
        for stranger in strangers:
            stranger.settimeout(30)
            try:
                assert stranger.recv(1) == b""
            except ConnectionResetError:
                pass
        print("ALL DONE")
        os._exit(0)
        """,
        2,
        hosts="ab",
        environment={"HCCL_HOST_SOCKET_PORT_RANGE": f"{root},{other}"},
    )
    for status, output in results:
        assert status == 0 and "ALL DONE" in output, output


# A program that makes communicators by calls of HCCL, without torch_npu.
BY_HAND = """
import ctypes
hccl, runtime = ctypes.CDLL("libhccl.so"), ctypes.CDLL("libascendcl.so")
runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)
torch.zeros(1).npu()

def said():
    return (runtime.aclGetRecentErrMsg() or b"").decode()

def root_info():
    info = ctypes.create_string_buffer(4108)
    if rank == 0:
        assert hccl.HcclGetRootInfo(info) == 0, said()
        store.set("root", info.raw.hex())
    info.raw = bytes.fromhex(store.get("root").decode())
    return info

def create(info, ranks):
    comm = ctypes.c_void_p()
    return hccl.HcclCommInitRootInfo(ranks, info, rank, ctypes.byref(comm)), comm
"""


@pytest.mark.parametrize("secret", ["question", "answer"])
def test_a_wrong_secret_makes_no_communicator(run_ranks, secret):
    """The root refuses a peer with another secret, and a peer refuses a root with another
    secret.
    """
    results = run_ranks(
        BY_HAND
        + f"""
info = root_info()
if rank == 1:
    at = 8 + 128 + 128 + 48 + {0 if secret == "question" else 32}  # see RootInfo in meeting.h
    info[at + 31] = bytes([info[at + 31][0] ^ 1])
result, _ = create(info, 2)
print("RESULT", result, said())
os._exit(0)
""",
        2,
        hosts="ab",
        hccl_s=3,
    )
    for _, output in results:
        assert re.search(r"RESULT [1-9]", output), output
    if secret == "question":
        assert "rank 0 of 2 in the creation of the communicator waits for rank 1" in results[0][1]
        assert "rank 0 of 2 is dead (its connection is closed)" in results[1][1]
    else:
        assert "no rank of this communicator" in results[1][1]


@pytest.mark.parametrize("hosts", ["a", "ab"])
def test_ranks_that_count_differently_are_told(run_ranks, hosts):
    results = run_ranks(
        BY_HAND
        + """
result, _ = create(root_info(), 2 + rank)
print("RESULT", result, said(), "PROCESS", os.getpid())
os._exit(0)
""",
        2,
        hccl_s=3,
    )
    said = "".join(output for _, output in results)
    assert re.search(r"creates a communicator of (2|3) ranks, (another rank|rank 1) one of", said)
    assert len(re.findall(r"RESULT [1-9]", said)) == 2, said
    names = [path.name for path in Path("/dev/shm").glob("*emulated_hccl_*")]
    assert not [n for pid in re.findall(r"PROCESS (\d+)", said) for n in names if f"_{pid}_" in n]


def test_between_ranks_of_one_host_no_socket_stays(run_ranks):
    results = run_ranks(
        BY_HAND
        + """
def sockets():
    folder = "/proc/self/fd/"
    links = [folder + name for name in os.listdir(folder)]
    return sorted(os.readlink(p) for p in links if os.path.islink(p) and "socket" in os.readlink(p))

before = sockets()
info = root_info()
assert len(sockets()) == len(before) + (rank == 0)  # where the root listens
result, _ = create(info, 2)
assert result == 0, said()
assert sockets() == before
print("ALL DONE")
os._exit(0)
""",
        2,
    )
    for status, output in results:
        assert status == 0 and "ALL DONE" in output, output


def test_the_next_root_removes_files_of_a_killed_root(run_script):
    code = """
    import ctypes, glob
    assert ctypes.CDLL("libhccl.so").HcclGetRootInfo(ctypes.create_string_buffer(4108)) == 0
    print("FILES", *glob.glob(f"/dev/shm/*emulated_hccl_{os.getpid()}_*"), flush=True)
    os.kill(os.getpid(), 9)
    """
    environment = {"HCCL_IF_IP": "127.0.0.1"}
    # The root of another program on this machine may have removed the files already.
    left = re.search(r"FILES (.+)", run_script(code, environment=environment)[1])

    run_script(code.replace("os.kill", "print"), environment=environment)

    assert left and not any(Path(path).exists() for path in left[1].split())


def test_a_part_of_a_communicator_spans_hosts_as_well(run_ranks):
    """HcclCreateSubCommConfig makes two communicators. The first has the ranks 3 and 1, and the
    second has the ranks 0 and 2.
    """
    results = run_ranks(
        BY_HAND.replace(", 2, rank == 0", ", 4, rank == 0")
        + """
class Config(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 4096)]

result, parent = create(root_info(), 4)
assert result == 0, said()
members = [3, 1] if rank in (3, 1) else [0, 2]
ids, sub = (ctypes.c_uint32 * 2)(*members), ctypes.c_void_p()
x = torch.full((4,), float(rank)).npu()
stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
result = hccl.HcclCreateSubCommConfig(
    ctypes.byref(parent), 2, ids, ctypes.c_uint64(members[0]), members.index(rank), None,
    ctypes.byref(sub),
)
assert result == 0, said()
at, fp32, total = ctypes.c_void_p(x.data_ptr()), 4, 0
assert hccl.HcclAllReduce(at, at, ctypes.c_uint64(4), fp32, total, sub, stream) == 0
torch.npu.synchronize()
assert x.cpu().tolist() == [float(sum(members))] * 4
print("ALL DONE")
os._exit(0)
""",
        4,
        hosts="aabb",
    )
    for status, output in results:
        assert status == 0 and "ALL DONE" in output, output


@pytest.mark.parametrize(
    "environment,said",
    [
        ({"HCCL_IF_IP": "0.0.0.0"}, "HCCL_IF_IP=0.0.0.0: peers cannot reach a wildcard"),
        ({"HCCL_IF_IP": "192.0.2.1"}, "HCCL cannot listen at 192.0.2.1, any port"),
        ({"HCCL_IF_IP": "eth0"}, "HCCL_IF_IP=eth0: want one IPv4 or IPv6 address"),
        (
            {"HCCL_IF_IP": "", "HCCL_SOCKET_IFNAME": "nosuch"},
            "HCCL_SOCKET_IFNAME=nosuch: admits none of this host's network interfaces: ",
        ),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "70000"}, "HCCL_HOST_SOCKET_PORT_RANGE=70000: want ports"),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "9-8"}, "HCCL_HOST_SOCKET_PORT_RANGE=9-8: the range 9-8"),
    ],
)
def test_a_variable_of_hccl_that_cannot_be_followed_is_named(run_script, environment, said):
    status, output = run_script(
        """
        import ctypes
        hccl, runtime = ctypes.CDLL("libhccl.so"), ctypes.CDLL("libascendcl.so")
        runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
        assert hccl.HcclGetRootInfo(ctypes.create_string_buffer(4108)) != 0
        print(runtime.aclGetRecentErrMsg().decode())
        """,
        environment=environment,
    )
    assert status == 0 and said in output, output


@pytest.mark.parametrize("rule", ["=lo", "lo", "^l", "^=lo", ""])
def test_the_root_listens_at_the_interface_that_is_named(run_script, rule):
    """The root listens at loopback only if ``rule`` allows this and no other interface exists."""
    status, output = run_script(
        """
        import ctypes
        info = ctypes.create_string_buffer(4108)
        print("RESULT", ctypes.CDLL("libhccl.so").HcclGetRootInfo(info))
        print("ADDRESS", info.raw[8 + 128 + 128 :].split(b"\\0")[0].decode())
        """,
        environment={"HCCL_SOCKET_IFNAME": rule, "HCCL_IF_IP": ""},
    )
    assert status == 0, output
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    if rule.startswith("^") and not others:
        assert "RESULT 0" not in output
    else:
        has_loopback = "ADDRESS 127." in output
        assert has_loopback == (rule in ("=lo", "lo") or not others), output
