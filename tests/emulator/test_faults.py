"""Injected faults: the n-th call of an operator fails or stalls, on one rank or on any."""


def test_the_third_call_fails_with_its_name(run_script):
    _status, output = run_script(
        """
        x = torch.ones(4).npu()
        for i in range(5):
            x.cumsum(0)
            try:
                torch.npu.synchronize()
            except RuntimeError as e:
                print("FAILED AT", i + 1, str(e).replace(chr(10), " "))
                break
        """,
        fault_op="aclnnCumsum",
        fault_call=3,
    )
    assert "FAILED AT 3" in output and "injected fault in call 3 of aclnnCumsum" in output, output


def test_replays_count_and_a_stall_only_delays(run_script):
    status, output = run_script(
        """
        x, y = torch.ones(4).npu(), torch.zeros(4).npu()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            torch.add(x, x, out=y)
        for i in range(3):
            begin = time.time()
            graph.replay()
            torch.npu.synchronize()
            print("STEP", i, time.time() - begin > 0.9)
        print(y.tolist())
        """,
        fault_op="aclnnAdd",
        fault_call=2,
        fault_kind="stall",
        stall_s=1,
    )
    assert status == 0, output
    assert "STEP 0 False" in output and "STEP 1 True" in output and "STEP 2 False" in output
    assert "[2.0, 2.0, 2.0, 2.0]" in output


def test_a_fault_of_one_rank_leaves_the_others_alone(run_ranks):
    results = run_ranks(
        """
        dist.init_process_group("hccl")
        dist.all_reduce(torch.ones(4).npu())
        torch.npu.synchronize()
        torch.ones(4).npu().cumsum(0)
        try:
            torch.npu.synchronize()
            print("FINE")
        except RuntimeError as e:
            print("FAULT", e)
        os._exit(0)
        """,
        2,
        fault_op="aclnnCumsum",
        fault_rank=1,
    )
    assert "FINE" in results[0][1]
    assert "FAULT" in results[1][1] and "injected fault" in results[1][1]
