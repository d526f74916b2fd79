"""If one of a service's two groups is lost, the service continues and reports the loss."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from dist_aclgraph.actors.wire.messages import GroupEntry, GroupList
from dist_aclgraph.config import load_config
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.serve.openai.completion_slots import CompletionSlots
from tests.serve.conftest import CONFIG, SILENT_S, Service, serving, until
from tests.serve.fake_engine import FakeEngine


@pytest.fixture
def other() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture
def service(other: FakeEngine) -> Iterator[Service]:
    with serving(other=other, link_s=SILENT_S) as service:
        yield service


def groups(service: Service) -> dict[str, int]:
    reply = service.http.get("/ready")
    assert reply.status_code == 200
    return dict(reply.json()["groups"])


def ask(service: Service) -> int:
    body = {"model": "tiny-qwen3", "prompt": [70, 71], "max_tokens": 3}
    return service.http.post("/v1/completions", json=body).status_code


def test_ready_says_which_capacity_is_left_and_health_stays_true(service, other):
    assert groups(service) == {"serving": 2, "draining": 0, "lost": 0, "total": 2}

    other.silent = True
    until(lambda: service.state.client.capacity().lost)

    assert groups(service) == {"serving": 1, "draining": 0, "lost": 1, "total": 2}
    assert "silent" in service.http.get("/ready").json()["lost"]["1"]
    assert service.http.get("/health").status_code == 200
    assert [ask(service) for _ in range(4)] == [200] * 4
    assert other.submitted == []


def test_without_a_living_group_nothing_is_ready_or_healthy(service, other):
    other.silent = service.engine.silent = True

    until(lambda: service.http.get("/health").status_code == 503)
    assert service.http.get("/ready").status_code == 503


def test_a_draining_group_is_counted_and_gets_nothing(service, other):
    entries = (
        GroupEntry("0", service.engine.address, 100, 16),
        GroupEntry("1", other.address, 100, 16, is_draining=True),
    )
    service.engine.groups = GroupList(1, entries)
    until(lambda: groups(service)["draining"] == 1)

    assert groups(service) == {"serving": 1, "draining": 1, "lost": 0, "total": 2}
    assert [ask(service) for _ in range(4)] == [200] * 4
    assert other.submitted == []


def test_slots_follow_the_number_of_groups(service, other):
    """The configuration has one group. Scaling has added the other group."""
    # A group has scheduler.max_waiting + scheduler.max_num_seqs slots.
    slots, of_a_group = service.state.slots, 1024 + 16
    slots.acquire(2 * of_a_group - 1)
    assert ask(service) == 200
    until(lambda: slots.taken == 2 * of_a_group - 1)
    slots.acquire(1)
    assert ask(service) == 503

    slots.release(of_a_group)
    assert ask(service) == 200
    other.silent = True
    until(lambda: service.state.client.capacity().lost)
    until(lambda: slots.is_full)
    body = {"model": "tiny-qwen3", "prompt": [70, 71], "max_tokens": 3}
    refusal = service.http.post("/v1/completions", json=body)
    assert refusal.status_code == 503
    assert f"of {of_a_group} that may" in refusal.json()["error"]["message"]

    service.engine.silent = True
    until(lambda: len(service.state.client.capacity().lost) == 2)
    # While no group serves, requests wait, and the service has the slots of the configured number
    # of groups (one).
    assert slots.is_full
    slots.release(1)
    assert not slots.is_full


def test_a_group_that_drains_keeps_its_slots(service, other):
    """Requests of a draining group still use slots, so the service must still count the slots of
    this group.
    """
    entries = (
        GroupEntry("0", service.engine.address, 100, 16),
        GroupEntry("1", other.address, 100, 16, is_draining=True),
    )
    deltas: queue.Queue = queue.Queue()
    until(lambda: service.state.client.query("metrics").keys() == {"0", "1"})
    for i in range(2):
        service.state.client.submit(str(i), [i], SamplingParams(max_tokens=100000), (), deltas.put)
    service.state.slots.acquire(1024 + 16)
    service.engine.groups = GroupList(1, entries)
    until(lambda: groups(service)["draining"] == 1)

    assert ask(service) == 200


def test_metrics_count_what_each_group_was_sent(service, other):
    for _ in range(4):
        assert ask(service) == 200

    text = service.http.get("/metrics").text
    sent = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("dist_aclgraph_routed_requests_total")
    ]
    assert sum(sent) == 4 and len(sent) == 2
    assert 'dist_aclgraph_groups{model_name="tiny-qwen3"' in text


def samples(service: Service, name: str) -> dict[str, float]:
    """Return the values of a metric. The keys are labels; labels that every metric has are left
    out.
    """
    found = {}
    for line in service.http.get("/metrics").text.splitlines():
        if line.startswith(f"dist_aclgraph_{name}{{"):
            labels, _, value = line.partition("{")[2].rpartition("} ")
            own = [x for x in labels.split(",") if not x.startswith(("model_name=", "replica="))]
            found[",".join(own)] = float(value)
    return found


def test_a_group_that_does_not_answer_costs_metrics_its_own_samples_alone(service, other):
    other.answers_queries = False

    assert samples(service, "engine_answered") == {'engine="0"': 1, 'engine="1"': 0}
    assert samples(service, "num_requests_running") == {'engine="0"': 2}
    assert samples(service, "engine_healthy") == {"": 1}


def test_metrics_count_lost_groups_by_kind_and_requests_that_went_on(service, other):
    kinds = {f'kind="{kind}"': 0 for kind in ("gone", "silent", "failed", "refused", "broken")}
    assert samples(service, "group_losses_total") == kinds
    assert samples(service, "resumed_requests_total") == {"": 0}
    deltas: queue.Queue = queue.Queue()
    until(lambda: service.state.client.query("metrics").keys() == {"0", "1"})
    for i in range(2):
        service.state.client.submit(str(i), [i], SamplingParams(max_tokens=100000), (), deltas.put)
    until(lambda: other.submitted)

    other.silent = True

    until(lambda: samples(service, "resumed_requests_total") == {"": 1})
    assert samples(service, "group_losses_total") == {**kinds, 'kind="silent"': 1}


def test_slots_of_lost_groups_stay_because_requests_wait_for_others() -> None:
    config = load_config(CONFIG, {"parallel.dp": 2})
    counts = [2]
    slots = CompletionSlots.from_config(config, lambda: counts[0])
    whole = slots.total

    counts[0] = 0
    slots.acquire(1)

    assert slots.total == whole
    counts[0] = 4
    assert slots.total == 2 * whole
