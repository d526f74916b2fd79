"""What happens after a refused call, with torch_npu's task queue off and on.

If TASK_QUEUE_ENABLE is 1 or more, torch_npu launches operators in a separate thread. If a launch
fails there, this thread skips all later work without an error. So a call that the emulator refuses
in this thread returns success, and the emulator stops the device.
"""

import textwrap

import pytest

# The error of a copy to the host contains only the error's code. torch_npu has printed the reason
# before.
PROLOGUE = """
def attempt(call, operator):
    try:
        result = call()
        torch.npu.synchronize()
        return result.cpu().tolist()
    except RuntimeError as e:
        print("NAMED" if operator in str(e) else "NAMELESS", e)
"""


@pytest.fixture(params=["0", "1", "2"])
def run_queued(run_script, request):
    """Return a function that runs code. Tests run once for each mode of the task queue."""

    def run(code):
        code = PROLOGUE + textwrap.dedent(code)
        return run_script(code, 60, environment={"TASK_QUEUE_ENABLE": request.param})

    return run


def test_work_after_a_refused_ge_operator_is_right_or_fails_by_its_name(run_queued):
    status, output = run_queued("""
        x = torch.ones(3, 32, device="npu")
        for _ in range(2):
            print("RESULT", attempt(lambda: torch_npu.npu_sort_v2(x), "SortV2"))
        print("ZEROS", attempt(lambda: torch.zeros(3, device="npu"), "SortV2"))
        print("SUM", attempt(lambda: torch.ones(3, device="npu") + 1, "SortV2"))
    """)
    assert status == 0 and "NAMELESS" not in output, output
    assert output.count("RESULT None") == 2 and "SortV2" in output
    assert "ZEROS None" in output or "ZEROS [0.0, 0.0, 0.0]" in output
    assert "SUM None" in output or "SUM [2.0, 2.0, 2.0]" in output


def test_work_after_refused_arguments_is_right_or_fails_by_its_name(run_queued):
    status, output = run_queued("""
        x = torch.ones(2, 2, dtype=torch.int64).npu()
        print("RESULT", attempt(lambda: x @ x, "aclnnM"))
        print("SUM", attempt(lambda: torch.ones(3, device="npu") + 1, "aclnnM"))
    """)
    assert status == 0 and "NAMELESS" not in output, output
    assert "RESULT None" in output and "aclnnM" in output
    assert "SUM None" in output or "SUM [2.0, 2.0, 2.0]" in output


def test_a_refusal_does_not_abort_the_process(run_queued):
    """Dropout uses a side stream. A destructor of torch_npu switches back from this stream. An
    error in a destructor would end the process.
    """
    status, output = run_queued("""
        from torch.nn.functional import dropout
        x = torch.ones(64, device="npu")
        print("RESULT", attempt(lambda: dropout(x, 0.5), "StatelessDropOutGenMask"))
    """)
    assert status == 0 and "RESULT None" in output and "NAMELESS" not in output, output
