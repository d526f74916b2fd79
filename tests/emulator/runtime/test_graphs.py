"""Captured graphs: a replay equals eager execution, streams become lanes, tasks can be updated, and
some calls are refused.
"""

import time

import pytest
import torch
import torch_npu

from dist_aclgraph.device.npu import release_failed_capture


def capture(body, **options):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        result = body()
    return graph, result


def test_replay_reads_inputs_anew():
    x = torch.ones(8, device="npu")
    graph, y = capture(lambda: (x * 2 + 1).cumsum(0))
    for value in (1.0, 5.0, -2.0):
        x.fill_(value)
        graph.replay()
        assert y.cpu().tolist() == (torch.full((8,), value) * 2 + 1).cumsum(0).tolist()


def test_two_streams_are_ordered_by_their_events():
    x, side = torch.ones(64, 64, device="npu"), torch.npu.Stream()

    def body():
        main = torch.npu.current_stream()
        a = x * 2
        side.wait_stream(main)
        with torch.npu.stream(side):
            for _ in range(20):
                b = a @ x * 0.01
        c = a + 1
        main.wait_stream(side)
        return b + c

    graph, y = capture(body)
    for value in (1.0, 3.0):
        x.fill_(value)
        graph.replay()
        want = 2 * value * value * 64 * 0.01 + 2 * value + 1
        assert torch.allclose(y.cpu(), torch.full((64, 64), want), rtol=1e-4)


class Updatable:
    """A graph that computes z = (2 x + scalar) * 10. An update can change the scalar."""

    def __init__(self):
        self.x, self.z = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
        y = torch.zeros(4, device="npu")
        self.stream, self.event = torch.npu.Stream(), torch.npu.ExternalEvent()
        torch.npu.synchronize()
        self.graph = torch.npu.NPUGraph()
        with torch.npu.graph(self.graph):
            stream = torch.npu.current_stream()
            self.a, self.y = self.x * 2, y
            self.event.wait(stream)
            self.event.reset(stream)
            torch.npu.graph_task_group_begin(stream)
            torch.add(self.a, 3.0, out=y)
            self.group = torch.npu.graph_task_group_end(stream)
            self.z.copy_(y * 10)

    def update(self, operation, value):
        with torch.npu.stream(self.stream):
            torch.npu.graph_task_update_begin(self.stream, self.group)
            operation(self.a, value, out=self.y)
            torch.npu.graph_task_update_end(self.stream)
            self.event.record(self.stream)

    def result(self):
        torch.npu.synchronize()
        return self.z[0].item()


def test_updates_before_and_after_the_replay():
    u = Updatable()
    u.update(torch.add, 1.0)
    u.graph.replay()
    assert u.result() == 30

    u.graph.replay()
    assert not torch.npu.current_stream().query()
    u.update(torch.add, 7.0)
    assert u.result() == 90


def test_attention_lengths_are_updated():
    heads, dim, block = 2, 64, 16
    keys, values = (torch.randn(8, block, dim).half() for _ in range(2))
    query, table = torch.randn(2, heads, dim).half(), torch.arange(8, dtype=torch.int32).view(2, 4)
    device = [t.npu() for t in (query, keys, values, table)]

    def attention(lengths):
        q, k, v, t = device
        return torch_npu.npu_fused_infer_attention_score(
            q,
            k,
            v,
            actual_seq_lengths=[1, 2],
            actual_seq_lengths_kv=lengths,
            block_table=t,
            num_heads=heads,
            num_key_value_heads=1,
            scale=0.125,
            input_layout="TND",
            block_size=block,
        )[0]

    graph, out = capture(lambda: attention([13, 5]) * 1.0, auto_dispatch_capture=True)
    for lengths in ([13, 5], [64, 1], [3, 40]):
        graph.replay()
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        torch.npu.synchronize()
        assert torch.equal(out.cpu(), attention(lengths).cpu())


def test_random_numbers_change_from_replay_to_replay():
    graph, y = capture(lambda: torch.rand(100, device="npu"))
    graph.replay()
    first = y.cpu()
    graph.replay()
    assert not torch.equal(first, y.cpu())


def recorded_event():
    event = torch.npu.Event(enable_timing=True)
    event.record()
    return event


def ask(event):
    """Query the event until torch_npu's task queue no longer contains the recording of this event.

    Until then, torch_npu answers queries itself, without a call of CANN.
    """
    for _ in range(200):
        event.query()
        time.sleep(0.01)


TIMED = recorded_event()


def elapsed_of(begin, end=None):
    return begin.elapsed_time(end or TIMED)


@pytest.mark.parametrize(
    "call,code",
    [
        (lambda x: torch.npu.current_stream().synchronize(), "107027"),
        (lambda x: torch.npu.current_stream().query(), "107027"),
        (lambda x: x.cpu(), "107030"),
        (lambda x: recorded_event().synchronize(), "107028"),
        (lambda x: ask(recorded_event()), "107028"),
        (lambda x: elapsed_of(recorded_event()), "107028"),
        (lambda x: elapsed_of(TIMED, recorded_event()), "107028"),
        (lambda x: torch.npu.synchronize(), "107030"),
    ],
)
def test_a_call_that_is_refused_in_a_capture_leaves_it_valid(call, code):
    x = torch.ones(4, device="npu")

    def body():
        y = x + 1
        with pytest.raises(RuntimeError, match=code):
            call(x)
        return y * 2

    graph, y = capture(body)
    graph.replay()
    assert y.cpu().tolist() == [4.0] * 4


def test_an_unjoined_stream_is_refused():
    x, side = torch.ones(4, device="npu"), torch.npu.Stream()

    def body():
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            return x + 1

    pool = torch.npu.graph_pool_handle()
    with pytest.raises(RuntimeError, match="107025"):
        capture(body, pool=pool)
    release_failed_capture(pool)


def test_a_missing_wait_gives_another_result_than_with_it(run_script):
    status, output = run_script("""
        x, side = torch.zeros(4, device="npu"), torch.npu.Stream()
        def tenfold(wait):
            torch.npu._sleep(1_000_000_000)
            x.add_(1)
            if wait:
                side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                y = x * 10
            torch.npu.synchronize()
            return y[0].item()
        tenfold(True)
        print("RESULT", tenfold(False), tenfold(True))
    """)
    assert status == 0 and "RESULT 10.0 30.0" in output, output


def test_an_update_with_another_operator_is_refused(run_script):
    status, output = run_script("""
        x, y = torch.ones(4).npu(), torch.zeros(4).npu()
        updates = torch.npu.Stream()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            stream = torch.npu.current_stream()
            torch.npu.graph_task_group_begin(stream)
            torch.add(x, 3.0, out=y)
            group = torch.npu.graph_task_group_end(stream)
        with torch.npu.stream(updates):
            torch.npu.graph_task_update_begin(updates, group)
            torch.mul(x, 3.0, out=y)
    """)
    assert status == 1 and "captured aclnnAdds, update aclnnMuls" in output and "207019" in output


def test_a_deadlock_names_stream_and_event(run_script):
    status, output = run_script(
        """
        event = torch.npu.ExternalEvent()
        torch.npu.synchronize()
        event.wait(torch.npu.current_stream())
        torch.npu.synchronize()
        """,
        wait_s=1,
    )
    assert status != 0
    assert "timeout after 1 s: stream" in output and "waits for the external event" in output
