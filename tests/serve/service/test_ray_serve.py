"""The Ray Serve application and ``dist-aclgraph serve`` run on one real Ray cluster, with fake
engines.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port
from tests.serve.conftest import CONFIG, until

ROOT = Path(__file__).parents[3]
WAIT_S = 120.0
# Ray Serve gives its proxy 5 s to start, which is too short on a busy machine.
PATIENCE = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
ENGINE_HEALTHY = "dist_aclgraph_engine_healthy"
FAKE = """
import sys, ray
from dist_aclgraph.actors.cluster.local_ray import start_daemons
from dist_aclgraph.config import load_config

def start(config, on_progress=None, **options):
    from tests.serve.service.test_llm import FakeDeployment
    return FakeDeployment()

config = load_config(sys.argv[1], {"serve.port": int(sys.argv[2])})
"""
SERVE = (
    FAKE
    + """
from dist_aclgraph.cli.serve import serve_until_signal
ray.init(address=sys.argv[3])
serve_until_signal(config, start)
"""
)
CLUSTER = (
    FAKE
    + """
from ray import serve
from dist_aclgraph.serve.app import make_app
start_daemons(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
serve.start(http_options={"port": config.serve.port})
two = config.model_copy(update={"serve": config.serve.model_copy(update={"replicas": 2})})
apps = {"a": make_app(two, start), "b": make_app(config, start)}
targets = [serve.RunTarget(app, name=n, route_prefix=f"/{n}") for n, app in apps.items()]
serve.run_many(targets)
print("running", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.readline()
serve.delete("b")
print("deleted", flush=True)
sys.stdin.readline()
serve.shutdown()
ray.shutdown()
"""
)
DYING = (
    FAKE
    + """
from ray import serve
from dist_aclgraph.serve.app import make_app

def start_dying(config):
    found = start(config)
    whole = found.engine.reply

    def reply(submit):
        found.engine.silent = True
        return whole(submit)

    found.engine.reply = reply
    return found

start_daemons(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
serve.start(http_options={"port": config.serve.port})
timeouts = config.timeouts.model_copy(update={"link_s": 1.0})
serve.run(make_app(config.model_copy(update={"timeouts": timeouts}), start_dying))
print("running", flush=True)
sys.stdin.readline()
serve.shutdown()
ray.shutdown()
"""
)
REPLACED = (
    FAKE
    + """
import os, secrets
from ray import serve
from dist_aclgraph.actors.wire.messages import GroupEntry, GroupList
from dist_aclgraph.actors.client.outage import Outlook
from dist_aclgraph.arrays.ints import INT_BYTES
from dist_aclgraph.serve.app import make_app
from tests.serve.fake_engine import FakeEngine

def by_position(submit):
    first = len(submit.prompt) // INT_BYTES
    return [70 + (first + i) % 50 for i in range(submit.max_tokens)]

def start_one(config, found=sys.argv[3]):
    from tests.serve.service.test_llm import FakeDeployment

    class Another(FakeDeployment):
        def __init__(self):
            super().__init__()
            self.token = secrets.token_hex(8)
            self.engine.close()
            self.engine = FakeEngine(by_position, step_s=0.02, token=self.token)

        def outlook(self):
            entry = GroupEntry("0", self.engine.address, 100, 16)
            return Outlook(GroupList(1, (entry,)), token=self.token)

    with open(found, "a") as pids:
        print(os.getpid(), file=pids)
    return Another()

start_daemons(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
serve.start(http_options={"port": config.serve.port})
serve.run(make_app(config, start_one))
print("running", flush=True)
sys.stdin.readline()
serve.shutdown()
ray.shutdown()
"""
)
# The lock simulates the NPUs. A deployment uses all NPUs, so only one deployment can run at a time.
AGAIN = (
    FAKE
    + """
import fcntl
from ray import serve
from dist_aclgraph.serve.app import make_app

def start_one(config, npus=sys.argv[3]):
    from tests.serve.service.test_llm import FakeDeployment

    class Exclusive(FakeDeployment):
        def __init__(self):
            self.npus = open(npus, "a")
            fcntl.flock(self.npus, fcntl.LOCK_EX)
            super().__init__()

        def shut_down(self):
            super().shut_down()
            print("ended in order", file=self.npus, flush=True)
            self.npus.close()

    return Exclusive()

start_daemons(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
serve.start(http_options={"port": config.serve.port})
serve.run(make_app(config, start_one))
print("running", flush=True)
for line in sys.stdin:
    changed = config.scheduler.model_copy(update={"max_num_seqs": int(line)})
    serve.run(make_app(config.model_copy(update={"scheduler": changed}), start_one))
    print("deployed", flush=True)
serve.shutdown()
ray.shutdown()
"""
)
EXPOSED = (
    FAKE
    + """
from ray import serve
from dist_aclgraph.serve.app import make_app
start_daemons(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
serve.start(http_options={"port": config.serve.port, "host": "0.0.0.0"})
try:
    serve.run(make_app(config, start))
    print("said nothing", flush=True)
except RuntimeError:
    [application] = serve.status().applications.values()
    messages = [each.message for each in application.deployments.values()]
    print("said", " ".join(" ".join(messages).split()), flush=True)
serve.shutdown()
ray.shutdown()
"""
)
QUESTION = {"model": "tiny-qwen3", "prompt": [70, 71], "max_tokens": 2, "stream": True}


def launch(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code, str(CONFIG), *map(str, arguments)],
        cwd=ROOT, text=True, env={**os.environ, **PATIENCE, "RAY_AUTH_MODE": "token"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def read_until(process: subprocess.Popen[str], beginning: str) -> str:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(beginning):
            return line
    raise AssertionError("".join(lines))


def ask(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=QUESTION, timeout=WAIT_S)


def replica_of(url: str) -> str:
    text = httpx.get(f"{url}/metrics", timeout=WAIT_S).text
    assert f"{ENGINE_HEALTHY}1.0" in re.sub(r"\{.*?\} ", "", text)
    return re.search(r'replica="(\w+)"', text)[1]


@pytest.fixture
def cluster():
    """Run a Ray cluster with two of our applications; yield its process, its address, and the URL
    of its proxy.
    """
    port = free_port()
    process = launch(CLUSTER, port)
    try:
        address = read_until(process, "running").split()[1]
        yield process, address, f"http://127.0.0.1:{port}"
        process.stdin.write("\n\n")
        process.stdin.flush()
        process.wait(WAIT_S)
    finally:
        process.kill()


@pytest.mark.cluster
@pytest.mark.slow
def test_deployments_on_one_cluster_leave_each_other_alone(cluster):
    process, address, proxy = cluster
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # The application has two replicas, and the proxy chooses one of them for each request. The
    # replicas share nothing but the groups.
    names = {replica_of(f"{proxy}/a") for _ in range(40)}
    assert len(names) == 2
    for name in "ab":
        reply = ask(f"{proxy}/{name}")
        assert reply.text.endswith("data: [DONE]\n\n")
        assert len(reply.headers.get_list("x-request-id")) == 1

    ours = launch(SERVE, port, address)
    try:
        read_until(ours, "curl")
        assert ask(url).text.endswith("data: [DONE]\n\n")
        taken = launch(SERVE, port, address)
        assert f"serve.port is {port}" in read_until(taken, "dist_aclgraph.errors.ConfigError")
        assert taken.wait(WAIT_S) != 0

        process.stdin.write("\n")
        process.stdin.flush()
        read_until(process, "deleted")
        assert ask(url).status_code == ask(f"{proxy}/a").status_code == 200

        ours.send_signal(signal.SIGTERM)
        assert ours.wait(WAIT_S) == 0
    finally:
        ours.kill()
    with pytest.raises(httpx.ConnectError):
        ask(url)
    assert ask(f"{proxy}/a").status_code == 200


@pytest.mark.slow
@pytest.mark.cluster
def test_an_ingress_asks_the_groups_what_becomes_of_a_deployment_that_died():
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = launch(DYING, port)
    try:
        read_until(process, "running")
        with pytest.raises(httpx.ReadTimeout):  # the request waits, because no group serves
            httpx.post(f"{url}/v1/completions", json=QUESTION, timeout=5)
        until(lambda: "recovering: PLACING" in httpx.get(f"{url}/ready").text, WAIT_S)
        assert httpx.get(f"{url}/health").status_code == 200
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait(WAIT_S)
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.cluster
def test_a_stream_goes_on_when_serve_replaces_the_groups(tmp_path):
    pids, port = tmp_path / "pids", free_port()
    url = f"http://127.0.0.1:{port}/v1/completions"
    process = launch(REPLACED, port, pids)
    question = {**QUESTION, "max_tokens": 200, "ignore_eos": True}
    try:
        read_until(process, "running")
        whole = httpx.post(url, json=question, timeout=WAIT_S).text
        with httpx.stream("POST", url, json=question, timeout=WAIT_S) as reply:
            lines = reply.iter_lines()
            found = [next(lines) for _ in range(10)]
            os.kill(int(pids.read_text().split()[-1]), signal.SIGKILL)
            found += lines

        assert text_of(found) == text_of(whole.splitlines())
        assert len(pids.read_text().split()) == 2
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait(WAIT_S)
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.cluster
def test_an_application_that_is_deployed_again_fails_no_request(tmp_path):
    """``serve deploy`` deploys the application again from a changed file. Requests arrive
    meanwhile.
    """
    port, npus = free_port(), tmp_path / "npus"
    process = launch(AGAIN, port, npus)
    over, replies = threading.Event(), []

    def keep_asking() -> None:
        while not over.is_set():
            replies.append(ask(f"http://127.0.0.1:{port}"))

    asking = [threading.Thread(target=keep_asking, daemon=True) for _ in range(4)]
    try:
        read_until(process, "running")
        first = replica_of(f"http://127.0.0.1:{port}")
        for thread in asking:
            thread.start()
        process.stdin.write("5\n")
        process.stdin.flush()
        read_until(process, "deployed")
        until(lambda: replica_of(f"http://127.0.0.1:{port}") != first, WAIT_S)
        count = len(replies)
        until(lambda: len(replies) > count + 8, WAIT_S)
        assert npus.read_text() == "ended in order\n"
        over.set()
        for thread in asking:
            thread.join(WAIT_S)
        process.stdin.close()
        assert process.wait(WAIT_S) == 0
    finally:
        over.set()
        process.kill()
    assert {reply.status_code for reply in replies} == {200}
    assert all(reply.text.endswith("data: [DONE]\n\n") for reply in replies)


def text_of(lines: list[str]) -> str:
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines if line[:7] == "data: {"]
    assert not any("error" in body for body in bodies), lines[-3:]
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    return "".join(choice["text"] for body in bodies for choice in body["choices"])


@pytest.mark.slow
def test_a_proxy_that_others_reach_needs_a_key() -> None:
    """On Kubernetes, Ray Serve listens at all addresses of a pod."""
    process = launch(EXPOSED, free_port())
    try:
        said = read_until(process, "said")
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()

    assert "http_options.host is 0.0.0.0" in said and "there is no API key" in said
