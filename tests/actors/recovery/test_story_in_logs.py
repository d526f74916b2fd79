"""The logs show the history of a deployment: its start, the loss of a group, the recovery, and the
end.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from dist_aclgraph.actors.worker.stopped_ranks import explain_stop
from dist_aclgraph.cli.explain import read_groups
from tests.actors.recovery.test_faults_while_serving import worker_pids
from tests.checkpoints import make_prompts
from tests.deployments import (
    ANSWER_S,
    greedy_params,
    make_deployment_config,
    serving,
    tokens_of,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


def story_of(folder: Path, role: str) -> list[str]:
    """Return the log lines of all processes with ``role``, the oldest first."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob(f"{role}-*.log")]
    return sorted("".join(texts).splitlines())


def assert_told(lines: list[str], *events: str) -> None:
    """Check that some of the lines match the patterns, in the order of the patterns."""
    rest = iter(lines)
    for wanted in events:
        found = any(re.search(rf"event={wanted}", line) for line in rest)
        assert found, f"{wanted} is missing, or at the wrong place:\n" + "\n".join(lines)


@pytest.mark.slow
def test_the_logs_tell_the_start_a_loss_the_recovery_and_the_end(
    checkpoint: Path, tmp_path: Path
) -> None:
    logging = {"directory": str(tmp_path), "folder": "start"}
    config = make_deployment_config(checkpoint, parallel={"tp": 2}, logging=logging)
    with serving(config) as service:
        (prompt,) = make_prompts([20])
        answer = service.submit("r", prompt, greedy_params(400))
        assert answer.began.wait(ANSWER_S)
        victim = worker_pids(service)[1]
        assert service.report()["logs"] == str(tmp_path / "start")
        os.kill(victim, signal.SIGKILL)
        tokens_of(ANSWER_S, [answer])

    assert_told(
        story_of(tmp_path / "start", "controller"),
        "controller_started",
        "state state=JOINING previous=PLACING",
        "state state=LOADING previous=JOINING",
        "state state=NEGOTIATING",
        "state state=CAPTURING",
        rf"group_serving group=0 ranks=0,1 hosts=\S+ pids=\d+,{victim} ",
        "state state=SERVING",
        rf'group_lost group=0 rank=1 cause="rank 1 in SERVING: the process {victim} died',
        "service_lost",
        "replace_group_begun",
        "group_serving group=1 .*is_rejoined=True",
        r"group_replaced group=0 way=rejoin seconds=\d",
        "state state=STOPPED",
    )
    # The steps that the lost group recorded are kept. They show that the killed rank is to blame.
    lost = read_groups(tmp_path / "start")[0]
    assert [rank.pid for rank in lost][1] == victim
    assert explain_stop(lost).blamed == (1,)
    # The log lines of each process contain its group, its rank and its epoch.
    assert_told(
        story_of(tmp_path / "start", "engine"),
        "engine_serving",
        "epoch_failed .*rank 1 in SERVING",
        "engine_serving",
        "engine_stopping",
    )
    workers = story_of(tmp_path / "start", "worker")
    assert any(
        re.search("role=worker group=0 rank=1 epoch=1 event=rank_serving", w) for w in workers
    )
    assert_told(
        [line for line in workers if "rank=0" in line],
        "rank_joining",
        "rank_serving",
        "rank_survives",
        "rank_serving",
    )
