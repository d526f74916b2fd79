"""Several threads take part in a capture: no launch is lost, and queries of the capture's state
return the right results.
"""

import ctypes
import itertools
import threading

import torch
import torch_npu  # noqa: F401

LAUNCHES, FORKS = 400, 30
EVENT_CAPTURED, NOT_SUPPORTED = 107028, 207000
EXTERNAL = 0x20  # ACL_EVENT_EXTERNAL
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def handle(maker, *flags):
    made = ctypes.c_void_p()
    assert maker(ctypes.byref(made), *flags) == 0
    return made


def test_threads_append_fork_and_ask_during_one_capture():
    acl = ctypes.CDLL("libascendcl.so")
    torch.npu.synchronize()
    runs, codes = itertools.count(), []
    count_run = HostFunction(lambda _: next(runs) and None)
    main = handle(acl.aclrtCreateStream)
    asked = handle(acl.aclrtCreateEventWithFlag, 0)
    status, graph = ctypes.c_int(), ctypes.c_void_p()

    def launch():
        for _ in range(LAUNCHES):
            codes.append(acl.aclrtLaunchHostFunc(main, count_run, None))

    def fork():
        for _ in range(FORKS):
            side, away, back = (
                handle(acl.aclrtCreateStream),
                *(handle(acl.aclrtCreateEventWithFlag, 0) for _ in range(2)),
            )
            codes.append(acl.aclrtRecordEvent(away, main))
            codes.append(acl.aclrtStreamWaitEvent(side, away))
            codes.append(acl.aclrtLaunchHostFunc(side, count_run, None))
            codes.append(acl.aclrtRecordEvent(back, side))
            codes.append(acl.aclrtStreamWaitEvent(main, back))

    def ask():
        for _ in range(LAUNCHES):
            codes.append(acl.aclrtRecordEvent(asked, main))
            answer = acl.aclrtQueryEventStatus(asked, ctypes.byref(status))
            codes.append(answer if answer != EVENT_CAPTURED else 0)

    assert acl.aclmdlRICaptureBegin(main, 2) == 0
    threads = [threading.Thread(target=work) for work in (launch, launch, fork, fork, ask)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert acl.aclmdlRICaptureEnd(main, ctypes.byref(graph)) == 0
    assert set(codes) == {0}

    for replay in range(2):
        assert acl.aclmdlRIExecuteAsync(graph, main) == 0
        assert acl.aclrtSynchronizeStream(main) == 0
        assert next(runs) == (replay + 1) * (2 * LAUNCHES + 2 * FORKS) + replay
    assert acl.aclmdlRIDestroy(graph) == 0


def test_the_host_may_ask_nothing_of_captured_events_nor_of_external_ones():
    acl = ctypes.CDLL("libascendcl.so")
    stream, graph = handle(acl.aclrtCreateStream), ctypes.c_void_p()
    plain, captured = (handle(acl.aclrtCreateEventWithFlag, 0) for _ in range(2))
    external = handle(acl.aclrtCreateEventExWithFlag, EXTERNAL)
    answer = ctypes.byref(ctypes.c_uint64())
    assert acl.aclrtRecordEvent(plain, stream) == 0

    def codes(event):
        return {
            acl.aclrtSynchronizeEvent(event),
            acl.aclrtQueryEventStatus(event, answer),
            acl.aclrtQueryEventWaitStatus(event, answer),
            acl.aclrtEventElapsedTime(answer, plain, event),
            acl.aclrtEventElapsedTime(answer, event, plain),
            acl.aclrtEventGetTimestamp(event, answer),
        }

    assert codes(plain) == {0}
    assert codes(external) == {NOT_SUPPORTED}
    assert acl.aclmdlRICaptureBegin(stream, 2) == 0
    assert acl.aclrtRecordEvent(captured, stream) == 0
    assert codes(captured) == {EVENT_CAPTURED}
    assert acl.aclmdlRICaptureEnd(stream, ctypes.byref(graph)) == 0
    assert codes(captured) == {0}
    assert acl.aclmdlRIDestroy(graph) == 0
