"""The message on the terminal when a deployment begins to serve."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from dist_aclgraph.config import Config
from dist_aclgraph.environment import API_KEY_VARIABLE, api_key, ray_address
from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.shapes.model_config import read_model_config
from dist_aclgraph.shapes.model_task import Task, read_task
from dist_aclgraph.text.sampling_defaults import read_sampling_defaults

TABLE_KEYS = ("graph", "streams", "bytes")
# Maps each task to an example request: the path of its URL, and the fields of its JSON body.
EXAMPLES: dict[Task, tuple[str, dict[str, Any]]] = {
    "generate": (
        "/v1/chat/completions",
        {"temperature": 0, "messages": [{"role": "user", "content": "Count from 3 to 9."}]},
    ),
    "embed": ("/v1/embeddings", {"input": "Count from 3 to 9."}),
    "rerank": (
        "/v1/rerank",
        {"query": "Which numbers are even?", "documents": ["1 3 5 7", "2 4 6 8"]},
    ),
}


def announce(config: Config, report: dict[str, Any], console: Console) -> None:
    """Print the device, the plan's buckets, and a curl command that sends a first request."""
    count = config.parallel.world_size
    device = report.get("device") or "NPU"
    console.print(f"{config.name} is served on {count} x {device}", highlight=False)
    for reason in report.get("mode_reasons", ()):
        console.print(reason)
    if fusions := report.get("fusions"):
        each = "; ".join(f"{name} {where}" for name, where in fusions.items())
        console.print(f"Fused operators: {each}", highlight=False)
    plan = report.get("plan")
    if plan:
        reasons = "; ".join(plan.get("reasons", ()))
        console.print(f"Graph plan {plan['version']} ({plan['hash'][:12]}): {reasons}")
        table = Table(*TABLE_KEYS)
        for bucket in report.get("buckets", []):
            table.add_row(*(f"{bucket[key]:,}" if key == "bytes" else str(bucket[key])
                            for key in TABLE_KEYS))  # fmt: skip
        console.print(table)
        console.print(
            f"Bytes are what a bucket added to the pool that all share: "
            f"{report['pool_bytes']:,} in all."
        )
        for warning in report.get("graph_warnings", ()):
            console.print(f"Warning: {warning}", highlight=False)
    else:
        console.print("No graphs: every step runs eagerly.")
    if defaults := read_sampling_defaults(config):
        named = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        console.print(
            f"The model samples with {named} where a request says nothing "
            "(sampling_defaults=none: without)",
            highlight=False,
        )
    if config.dtype == "bfloat16" and _is_in_float16(config):
        remedy = " (dtype=float16: without)" if report.get("accepts_float16") else ""
        console.print(
            f"The checkpoint is in float16, and its weights are rounded to bfloat16{remedy}",
            highlight=False,
        )
    if "controller" in report:
        print(f"More groups, or fewer: {_scale_command(report)}")
    if "ray_logs" in report:
        console.print(f"Ray's own logs: {report['ray_logs']}", highlight=False, soft_wrap=True)
    url = _url(config)
    path, fields = EXAMPLES[read_task(config).name]
    body = json.dumps({"model": config.name, **fields})
    others = [_url(config, index) for index in range(1, config.serve.replicas)]
    console.print(f"Ready at {', '.join(f'{each}/v1' for each in (url, *others))} -- try:")
    # Users copy this line. It is printed without rich, because rich would wrap the line.
    print(
        f"curl -s {_curl_options(config)}{url}{path} "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )
    sys.stdout.flush()


def _is_in_float16(config: Config) -> bool:
    try:
        return read_model_config(config.model, config.model_overrides).dtype == "float16"
    except DistAclGraphError:  # an error here must not end the serving deployment
        return False


def _scale_command(report: dict[str, Any]) -> str:
    command = f"dist-aclgraph scale N --deployment {report['controller']}"
    if ray_address() is None:
        return f"{command} --ray {report['ray_address']}"
    return f"RAY_ADDRESS={report['ray_address']} {command}"


def _curl_options(config: Config) -> str:
    """Return curl's options for the service. The shell reads the API key from the keys file or the
    environment.
    """
    options = ""
    if config.serve.uds is not None:
        options += f"--unix-socket {shlex.quote(config.serve.uds)} "
    if api_key() is not None:
        options += f'-H "Authorization: Bearer ${API_KEY_VARIABLE}" '
    elif config.serve.api_keys_file is not None:
        # Awk prints the first key of the file. In a line, the key comes first; its name and limits
        # can follow.
        found = f"awk '/^[^# ]/ {{print $1; exit}}' {shlex.quote(config.serve.api_keys_file)}"
        options += f'-H "Authorization: Bearer $({found})" '
    return options


def _url(config: Config, replica: int = 0) -> str:
    serve = config.serve.of_replica(replica)
    if serve.uds is not None:
        return "http://localhost"
    host = f"[{serve.host}]" if ":" in serve.host else serve.host
    return f"http://{host}:{serve.port}"
