"""The files in cluster/ pass Ray's own validation, and match published schemas."""

from __future__ import annotations

import copy
import gzip
import json
import os
import re
import socket
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dist_aclgraph.cli.doctor.ascend_versions import DRIVER
from dist_aclgraph.cli.doctor.examine import PYTHONS
from dist_aclgraph.cli.doctor.npu_host import HostFiles
from dist_aclgraph.config import load_config
from dist_aclgraph.config.chips import CHIP_FAMILIES
from dist_aclgraph.config.device import ASSUMED_CANN
from dist_aclgraph.environment import GCS_WAIT_VARIABLE, gcs_wait_s, prepare_ray_environment
from dist_aclgraph.serve.app import AppArgs

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "cluster"
SCHEMAS = [ROOT / "tests" / "data" / name for name in ("kuberay", "kubernetes")]
RAY_UP = ("cluster.yaml", "cluster-docker.yaml", "local.yaml")
MANIFESTS = ("raycluster.yaml", "rayservice.yaml", "redis.yaml", "budget.yaml", "podmonitor.yaml")
IMAGES = ("Dockerfile.emulated", "Dockerfile.ascend")
SERVE = ("serve.yaml", "serve-several.yaml")
PROVIDER_KEYS = {"type", "head_ip", "worker_ips"}


def read(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((CLUSTER / name).read_text())
    return read


def read_text(name: str) -> str:
    return (CLUSTER / name).read_text()


def check_ray_up(config: dict[str, Any]) -> None:
    """Apply Ray's validation, and check the names of keys that Ray does not check.

    If the name of such a key had a spelling mistake, only a part of the cluster would start.
    """
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(copy.deepcopy(config)))
    assert config.get("cluster_name"), "without a name, Ray calls it default"
    provider = config["provider"]
    assert set(provider) == PROVIDER_KEYS, f"not of the provider: {set(provider) ^ PROVIDER_KEYS}"
    assert config["min_workers"] == config["max_workers"] == len(provider["worker_ips"])
    assert provider["head_ip"] not in provider["worker_ips"]
    assert "--autoscaling-config=" in " ".join(config["head_start_ray_commands"])


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_takes_what_ray_up_is_given(name: str) -> None:
    check_ray_up(read(name))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda config: config.pop("cluster_name"),
        lambda config: config["provider"].update(head_ips=config["provider"].pop("head_ip")),
        lambda config: config["provider"].update(worker_ip=[]),
        lambda config: config.update(max_workers=99),
        lambda config: config.update(docker={"run_options": "--ipc=host"}),
        lambda config: config.update(start_commands=[]),
    ],
    ids=["no name", "typo", "unknown key", "more than hosts", "options as text", "unknown section"],
)
def test_a_cluster_file_that_starts_only_a_part_of_a_cluster_is_refused(spoil: Any) -> None:
    config = read("cluster.yaml")
    spoil(config)

    with pytest.raises(Exception):  # noqa: B017 - Ray's errors have many types
        check_ray_up(config)


@pytest.mark.parametrize("name", RAY_UP)
def test_commands_are_scripts_that_are_there(name: str) -> None:
    config = read(name)

    for command in config["head_start_ray_commands"] + config["worker_start_ray_commands"]:
        (script,) = re.findall(r"dist_aclgraph/(cluster/[\w-]+\.sh)", command)
        assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_has_the_programs_with_which_a_head_starts_workers(name: str) -> None:
    """Ray's monitor runs in the head's container. It uses these programs to reach other hosts."""
    text = (CLUSTER / name).read_text().replace("\\\n", "")

    (line,) = re.findall(r"apt-get install -y --no-install-recommends ([\w+ -]+)", text)

    assert {"openssh-client", "rsync"} <= set(line.split())
    assert "rm -rf /var/lib/apt/lists/*" in text


def strict(schema: Any) -> Any:
    """Return a schema that refuses unknown keys, which Kubernetes would drop silently."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    is_open = "additionalProperties" in made or made.get("x-kubernetes-preserve-unknown-fields")
    if made.get("type") == "object" and "properties" in made and not is_open:
        made["additionalProperties"] = False
    return made


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    (path,) = [found for folder in SCHEMAS for found in folder.glob(f"{kind.lower()}s.json.gz")]
    schema = strict(json.loads(gzip.decompress(path.read_bytes())))
    schema["properties"]["metadata"] = {"required": ["name"]}
    return jsonschema.Draft202012Validator(schema)


def check_manifest(manifest: dict[str, Any]) -> None:
    validator(manifest["kind"]).validate(manifest)


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_takes_the_manifests(name: str) -> None:
    for manifest in yaml.safe_load_all(read_text(name)):
        check_manifest(manifest)


@pytest.mark.parametrize(
    ("name", "key", "wrong"),
    [
        ("raycluster.yaml", "workerGroupSpecs", "workerGroupSpec"),
        ("raycluster.yaml", "authOptions", "authOption"),
        ("budget.yaml", "minAvailable", "minimumAvailable"),
        ("podmonitor.yaml", "podMetricsEndpoints", "endpoints"),
    ],
)
def test_a_key_that_kubernetes_does_not_know_is_found(name: str, key: str, wrong: str) -> None:
    manifest = read(name)
    manifest["spec"][wrong] = manifest["spec"].pop(key)

    with pytest.raises(jsonschema.ValidationError):
        check_manifest(manifest)


def test_both_manifests_have_the_same_cluster() -> None:
    assert read("rayservice.yaml")["spec"]["rayClusterConfig"] == read("raycluster.yaml")["spec"]


def test_workers_ask_for_all_npus_of_a_host_and_tell_ray_of_them() -> None:
    spec = read("raycluster.yaml")["spec"]
    asked = {}
    for group in spec["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        resources = container["resources"]
        asked[group["groupName"]] = (container["image"], resources["limits"])
        assert resources["requests"] == resources["limits"]
        declared = json.loads(json.loads(group["rayStartParams"]["resources"]))
        assert declared == {"NPU": resources["limits"]["huawei.com/Ascend910"]}

    npus = {name: limits["huawei.com/Ascend910"] for name, (_, limits) in asked.items()}
    assert npus == {each.generation.lower(): each.node_npus for each in CHIP_FAMILIES}
    images = {name: image for name, (image, _) in asked.items()}
    assert images == {"a2": "dist-aclgraph:ascend", "a3": "dist-aclgraph:ascend-a3"}
    assert all(f"-t {image} " in read_text("Dockerfile.ascend") for image in images.values())
    assert spec["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("num_npus", [0, 8, 16])
def test_a_container_gets_all_npus_of_its_host(tmp_path: Path, num_npus: int) -> None:
    """Ray joins the container's options into one command line. A shell on the host expands it."""
    from ray.autoscaler._private.docker import docker_start_cmds

    docker = read("cluster-docker.yaml")["docker"]
    npus = [f"davinci{number}" for number in range(num_npus)]
    others = ["davinci_manager", "devmm_svm", "hisi_hdc"] if npus else []
    for name in (*npus, *others, "null"):
        (tmp_path / name).touch()
    options = [option.replace("/dev ", f"{tmp_path} ") for option in docker["run_options"]]
    command = docker_start_cmds("root", "image", {}, "name", options, "cluster", "/root", "echo")

    said = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60
    )

    devices = re.findall(r"--device=(\S+)", said.stdout)
    assert sorted(devices) == sorted(f"{tmp_path}/{name}" for name in (*npus, *others))
    assert "--shm-size=64g" in said.stdout.split()


@pytest.mark.parametrize("name", ["cluster-docker.yaml", "raycluster.yaml", "rayservice.yaml"])
def test_a_container_has_the_files_that_doctor_reads(name: str) -> None:
    for folder in (DRIVER.parent, HostFiles().firmware.parent, HostFiles().etc / "hccn.conf"):
        # The file contains each folder's path on the host, and its path in the container.
        assert read_text(name).count(str(folder)) >= 2, folder


def test_images_are_of_the_cann_and_the_chips_that_are_supported() -> None:
    text = read_text("Dockerfile.ascend")

    (base,) = re.findall(r"^ARG CANN=(.*)$", text, re.MULTILINE)
    cann, *_, python = base.rpartition(":")[2].split("-")
    assert cann == ASSUMED_CANN
    assert tuple(map(int, python.removeprefix("py").split("."))) in PYTHONS
    assert "ARG CHIP=910b\n" in text and "--build-arg CHIP=a3" in text


@pytest.mark.parametrize("is_in_home", [False, True])
@pytest.mark.parametrize("shell", [["bash", "-c"], ["bash", "-lc"]])
def test_shells_that_kuberay_starts_have_canns_variables(
    tmp_path: Path, shell: list[str], is_in_home: bool
) -> None:
    (name,) = re.findall(
        r"^ENV BASH_ENV=/opt/dist_aclgraph/(.*)$", read_text("Dockerfile.ascend"), re.M
    )
    script = tmp_path / "Ascend" / "cann" / "set_env.sh"
    script.parent.mkdir(parents=True)
    # CANN's own script also starts a shell, which reads the file in BASH_ENV again.
    script.write_text("export ASCEND_HOME_PATH=$(bash -c 'echo found')$#\n")
    environment = {"PATH": os.environ["PATH"], "BASH_ENV": str(ROOT / name)}
    if is_in_home:
        environment["HOME"] = str(tmp_path)
    else:
        environment["ASCEND_INSTALL_PATH"] = str(script.parents[1])

    said = subprocess.run(
        [*shell, "echo $ASCEND_HOME_PATH; declare -F", "name", "argument"],
        env=environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip

    assert said.stdout == "found0\n"


def applications(name: str) -> list[dict[str, Any]]:
    config = read(name)
    if name == "rayservice.yaml":
        config = yaml.safe_load(config["spec"]["serveConfigV2"])
    found: list[dict[str, Any]] = config["applications"]
    return found


@pytest.mark.parametrize("name", [*SERVE, "rayservice.yaml"])
def test_ray_serve_takes_the_applications(name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    text = read(name) if name in SERVE else {"applications": applications(name)}

    schema = ServeDeploySchema.model_validate(text)

    assert {each.import_path for each in schema.applications} == {"dist_aclgraph:app"}


@pytest.mark.parametrize("name", SERVE)
def test_applications_name_configurations_that_load(name: str) -> None:
    for application in applications(name):
        assert AppArgs(**application["args"]).load().model


def test_the_service_on_kubernetes_names_a_configuration_of_ours() -> None:
    (application,) = applications("rayservice.yaml")
    config = Path(application["args"]["config"])

    assert load_config(ROOT / config.relative_to("/opt/dist_aclgraph"), {"model": "m"}).model == "m"


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(CLUSTER / script), *arguments],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "arguments"), [("start-head.sh", ()), ("start-worker.sh", ("h",))]
)
def test_a_node_without_the_token_starts_nothing(
    tmp_path: Path, script: str, arguments: tuple[str, ...]
) -> None:
    ended = run(script, *arguments, HOME=str(tmp_path))

    assert ended.returncode == 1
    assert "auth_token is missing: make a token with 'ray get-auth-token" in ended.stderr


def test_a_worker_wants_to_know_its_head() -> None:
    ended = run("start-worker.sh", HOME="/")

    assert ended.returncode == 2
    assert "usage:" in ended.stderr


@pytest.mark.parametrize("script", ["start-head.sh", "start-worker.sh"])
def test_no_script_names_an_array_that_may_be_empty_as_old_shells_refuse(script: str) -> None:
    text = (CLUSTER / script).read_text()

    # Some hosts have a bash older than 4.4, for which an empty array is an unset variable.
    bare = text.replace('${resources[@]+"${resources[@]}"}', "")
    assert "resources[@]" in text and "resources[@]" not in bare


@pytest.mark.parametrize(
    ("script", "arguments", "wanted"),
    [
        (
            "start-head.sh",
            ("--node-ip-address=10.0.0.1",),
            "start --head --port 6379 --dashboard-host 127.0.0.1 "
            '--resources {"NPU": 4} --node-ip-address=10.0.0.1',
        ),
        ("start-worker.sh", ("10.0.0.1",), 'start --address 10.0.0.1:6379 --resources {"NPU": 4}'),
        (
            "start-worker.sh",
            ("h:9", "--block"),
            'start --address h:9 --resources {"NPU": 4} --block',
        ),
    ],
)
def test_the_scripts_tell_ray_what_it_must_know(
    tmp_path: Path, script: str, arguments: tuple[str, ...], wanted: str
) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    ray = tmp_path / ".venv" / "bin" / "ray"
    ray.write_text('#!/bin/sh\necho "$@"\necho "$RAY_AUTH_MODE $RAY_worker_niceness"\n')
    ray.chmod(0o755)
    (tmp_path / "cluster").mkdir()
    for name in (script, "environment.sh", "cann.sh"):
        (tmp_path / "cluster" / name).write_bytes((CLUSTER / name).read_bytes())
    (tmp_path / "cluster" / script).chmod(0o755)

    ended = subprocess.run(
        [str(tmp_path / "cluster" / script), *arguments],
        env={"PATH": "/usr/bin:/bin", "HOME": "/", "RAY_AUTH_TOKEN": "t", "EMULATED_NPUS": "4"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert ended.stdout.splitlines() == [wanted, "token 0"]


def pods() -> list[dict[str, Any]]:
    spec = read("raycluster.yaml")["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def defaults_of_the_scripts() -> dict[str, str]:
    found = re.findall(r'^export (\w+)="\$\{\1:-(.*)\}"', read_text("environment.sh"), re.M)
    return dict(found)


def test_a_ray_that_we_start_has_the_settings_of_the_scripts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)

    prepare_ray_environment(is_local=True)

    shared = {k: v for k, v in defaults_of_the_scripts().items() if k in environment}
    del shared[GCS_WAIT_VARIABLE]  # the control store of a local Ray is never restarted
    assert shared.keys() >= {"RAY_worker_niceness", "RAY_task_events_report_interval_ms"}
    assert shared == {name: environment[name] for name in shared}


def test_pods_have_the_environment_of_the_scripts() -> None:
    defaults = defaults_of_the_scripts()
    of_the_scripts = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"}  # KubeRay sets these variables

    for pod in pods():
        (container,) = pod["containers"]
        found = {each["name"]: each.get("value") for each in container["env"]}
        secret = found.pop("DIST_ACLGRAPH_API_KEY", "missing")
        assert secret is None, "the key comes from a secret"
        assert found == {k: v for k, v in defaults.items() if k not in of_the_scripts}


def test_an_owner_knows_how_long_the_nodes_wait_for_their_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(GCS_WAIT_VARIABLE, raising=False)
    (wait_s,) = re.findall(rf"{GCS_WAIT_VARIABLE}:-(\d+)", read_text("environment.sh"))

    assert gcs_wait_s() == float(wait_s)


def test_pods_have_the_time_that_they_need_to_end_and_no_rights() -> None:
    configs = [load_config(path, {"model": "m"}) for path in (ROOT / "configs").glob("*.yaml")]
    stop_s = max(config.timeouts.stop_s for config in configs)
    drain_s = max(config.serve.drain_s for config in configs)
    (hook_s,) = re.findall(r"DRAIN_S:-(\d+)", read_text("drain.sh"))

    for pod in pods():
        (container,) = pod["containers"]
        needed_s = int(hook_s) + drain_s + 2 * stop_s
        assert pod["terminationGracePeriodSeconds"] > needed_s
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        assert command[-1] == "/opt/dist_aclgraph/cluster/drain.sh"
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


def test_kubernetes_asks_each_pod_whether_its_ray_is_ready_and_alive() -> None:
    from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
    from ray.dashboard.http_server_agent import PUBLIC_EXACT_PATHS

    for pod in pods():
        (container,) = pod["containers"]
        for probe in (container["readinessProbe"], container["livenessProbe"]):
            assert probe["httpGet"]["port"] == DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
            assert probe["httpGet"]["path"] in PUBLIC_EXACT_PATHS, "a probe has no token"


def test_a_drain_may_end_one_pod() -> None:
    spec = read("raycluster.yaml")["spec"]
    num_pods = 1 + sum(group["replicas"] for group in spec["workerGroupSpecs"])

    assert read("budget.yaml")["spec"]["minAvailable"] == num_pods - 1


def test_all_files_for_kubernetes_name_the_same_secret_and_the_same_redis() -> None:
    text = "".join(map(read_text, ("raycluster.yaml", "rayservice.yaml", "redis.yaml")))

    secrets = set(re.findall(r"secretKeyRef: \{name: ([\w-]+), key: ([\w-]+)\}", text))
    assert secrets == {("dist-aclgraph", "api-key"), ("dist-aclgraph", "redis-password")}
    assert set(re.findall(r"redisAddress: ([\w-]+):6379", text)) == {"dist-aclgraph-redis"}
    service, stateful = yaml.safe_load_all(read_text("redis.yaml"))
    assert service["metadata"]["name"] == "dist-aclgraph-redis"
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == stateful["spec"]["selector"]["matchLabels"]


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    """Return the path of a copy of drain.sh. The copy calls a fake ``ray``, which prints its
    arguments.
    """
    ray = tmp_path / ".venv" / "bin" / "ray"
    ray.parent.mkdir(parents=True)
    ray.write_text('#!/bin/sh\necho "$1 $2 $3"\n')
    ray.chmod(0o755)
    (tmp_path / "cluster").mkdir()
    for name in ("drain.sh", "environment.sh", "cann.sh"):
        (tmp_path / "cluster" / name).write_bytes((CLUSTER / name).read_bytes())
    return tmp_path / "cluster" / "drain.sh"


def start_hook(hook: Path, server: socket.socket) -> subprocess.Popen[str]:
    port = str(server.getsockname()[1])
    environment = {**os.environ, "SERVE_PORT": port, "DRAIN_S": "300", "RAY_AUTH_TOKEN": "t"}
    return subprocess.Popen(["bash", str(hook)], env=environment, stdout=subprocess.PIPE, text=True)


def reply(server: socket.socket, status: str, body: str) -> None:
    with server.accept()[0] as peer:
        assert peer.recv(1000).startswith(b"GET /-/healthz HTTP/1.1\r\n")
        peer.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())


def test_the_hook_waits_until_the_proxy_has_closed_its_port(hook: Path) -> None:
    from ray.serve._private.constants import DRAINING_MESSAGE, HEALTHY_MESSAGE

    with socket.create_server(("127.0.0.1", 0)) as proxy:
        process = start_hook(hook, proxy)
        reply(proxy, "200 OK", HEALTHY_MESSAGE)
        proxy.accept()[0].close()  # an overloaded proxy
        reply(proxy, "503 Service Unavailable", DRAINING_MESSAGE)
        assert process.poll() is None
    assert process.communicate(timeout=60)[0] == (
        "drain-node --reason DRAIN_NODE_REASON_PREEMPTION\n"
    )


def test_the_hook_does_not_wait_for_another_program(hook: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:
        process = start_hook(hook, service)
        reply(service, "404 Not Found", '{"error": {"message": "no such path"}}')

        process.communicate(timeout=60)


def test_the_hook_knows_the_answers_of_the_proxy() -> None:
    from ray.serve._private import constants

    for name in ("HEALTHY", "NO_ROUTES", "NO_REPLICAS", "DRAINING"):
        message = getattr(constants, f"{name}_MESSAGE")
        assert message.rstrip(".") in read_text("drain.sh")
