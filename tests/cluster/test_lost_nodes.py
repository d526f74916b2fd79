"""If a node dies under load, its group moves to the spare NPUs, and no request is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dist_aclgraph.config import load_config
from tests.cluster.several_nodes import APART, Nodes, Program, on_one_node

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

CONFIG = "configs/tiny-qwen3.yaml"
ONE_NPU_EACH = {
    **APART, "parallel.tp": 1, "graph.sizes": [4, 8], "scheduler.max_num_seqs": 8,
    "recovery.spares": 1, "timeouts.place_s": 60,
}  # fmt: skip
PROMPTS = [[70 + i, 71, 72] for i in range(12)]
NUM_TOKENS = 900
WAIT_S = 300.0
ANSWER = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from dist_aclgraph.actors.deployment.llm import LLM
from dist_aclgraph.errors import DistAclGraphError
from tests.deployments import greedy_params

def say(value):
    print("ready", json.dumps(value), flush=True)

def scale(llm, count):
    try:
        llm._deployment.scale(count)
    except DistAclGraphError as e:
        return str(e)

def where(llm):
    report = llm.report()
    groups = [report, *report["groups"]]
    nodes = [rank["node"] for group in groups for rank in group["ranks"]]
    pids = [rank["pid"] for group in groups for rank in group["ranks"]]
    engines = [group.get("engine_pid") for group in groups]
    return [nodes, report["missing_groups"]["count"], pids, engines]

def generate(llm, prompts, count):
    answers = llm.generate(prompts, greedy_params(count))
    return [[answer.outputs[0].token_ids for answer in answers], llm._client.num_resumed]

def num_tokens(llm):
    report = llm.report()
    return sum(each["metrics"]["generation_tokens"] for each in [report, *report["groups"]])

def generate_and_tell(llm, prompts, count):
    # Say "running" when the requests have 20 tokens each on average, and later the tokens.
    enough = num_tokens(llm) + 20 * len(prompts)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(generate, llm, prompts, count)
        while num_tokens(llm) < enough and not answers.done():
            time.sleep(0.02)
        say("running")
        return answers.result()

with LLM(sys.argv[1], json.loads(sys.argv[2])) as llm:
    say("up")
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        say(globals()[what](llm, *arguments))
"""


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes([{}, *({"resources": {"NPU": 1}} for _ in range(3))])
    yield made
    made.end()


def ask(program: Program, *question: Any) -> Any:
    program.write(question)
    return program.read()


def wait_for_missing(program: Program) -> None:
    until_s = time.monotonic() + WAIT_S
    while (now := ask(program, "where"))[1] != 1:
        assert time.monotonic() < until_s, now
        time.sleep(0.5)


def wait_for_groups(program: Program, dead: str) -> dict[str, int]:
    """Wait until no group is on the node ``dead``; return each group's node and process id.

    The wait is necessary: all answers may have ended before the controller notices the death of the
    node.
    """
    until_s = time.monotonic() + WAIT_S
    while True:
        nodes, num_missing, pids, _ = now = ask(program, "where")
        if num_missing == 0 and dead not in nodes and len(nodes) == 2:
            return dict(zip(nodes, pids, strict=True))
        assert time.monotonic() < until_s, now
        time.sleep(0.5)


def test_a_group_whose_node_dies_goes_to_a_spare_place(nodes: Nodes) -> None:
    config = load_config(CONFIG, {**ONE_NPU_EACH, "parallel.dp": 1})
    alone = on_one_node(config, PROMPTS, NUM_TOKENS)
    with nodes.run(ANSWER, CONFIG, json.dumps(ONE_NPU_EACH)) as program:
        assert program.read() == "up"
        before, *_ = ask(program, "where")
        assert len(set(before)) == 2
        assert "1 groups more need 1 NPUs" in ask(program, "scale", 3)
        assert ask(program, "generate_and_tell", PROMPTS, NUM_TOKENS) == "running"

        nodes.kill(before[1])

        tokens, num_resumed = program.read()
        assert tokens == alone
        assert num_resumed > 0
        now = wait_for_groups(program, dead=before[1])
        assert ask(program, "generate", PROMPTS, 20)[0] == [row[:20] for row in alone]

        # The remaining nodes have too few NPUs for two groups. When a worker dies, its group keeps
        # its NPUs only if no other group waits for NPUs.
        dies, stays = now
        nodes.kill(dies)
        wait_for_missing(program)
        os.kill(now[stays], signal.SIGKILL)

        assert ask(program, "generate", PROMPTS, 20)[0] == [row[:20] for row in alone]
