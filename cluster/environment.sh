# The environment of every node before `ray start`; start-head.sh and start-worker.sh read it.
# Existing values stay. docs/operate/cluster.md explains each variable.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH="$repository/.venv/bin:$PATH"

. "$repository/cluster/cann.sh"

# A client of Ray can run code, so Ray requires a token, which is the same on all nodes.
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
export RAY_AUTH_TOKEN_PATH="${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}"
if [ "$RAY_AUTH_MODE" = token ] && [ -z "${RAY_AUTH_TOKEN:-}" ] && [ ! -s "$RAY_AUTH_TOKEN_PATH" ]; then
  echo "$RAY_AUTH_TOKEN_PATH is missing: make a token with 'ray get-auth-token --generate' on one" \
    "node, and copy this file to all others" >&2
  exit 1
fi

# Ray lowers the priority of its workers by 15, which starves them on a busy host.
export RAY_worker_niceness="${RAY_worker_niceness:-0}"
# A node that hangs or is cut off is lost after 12 to 42 s; a node that dies, at once. A busy host survives these
# checks. Only the head reads these values.
export RAY_health_check_period_ms="${RAY_health_check_period_ms:-2000}"
export RAY_health_check_timeout_ms="${RAY_health_check_timeout_ms:-5000}"
export RAY_health_check_failure_threshold="${RAY_health_check_failure_threshold:-6}"
# All nodes wait this number of seconds for a head that is started again (docs/operate/hosts.md).
export RAY_gcs_rpc_server_reconnect_timeout_s="${RAY_gcs_rpc_server_reconnect_timeout_s:-300}"
# Ray's head stores no events of tasks. Every heartbeat is a task, so they would take more memory all the time.
export RAY_task_events_report_interval_ms="${RAY_task_events_report_interval_ms:-0}"
# By default, Ray's head keeps the records of 100,000 actors that have ended.
export RAY_maximum_gcs_destroyed_actor_cached_count="${RAY_maximum_gcs_destroyed_actor_cached_count:-1000}"
export RAY_maximum_gcs_dead_worker_cached_count="${RAY_maximum_gcs_dead_worker_cached_count:-1000}"
export RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"
# torch must not import torch_npu by itself, because the libraries of emulated NPUs must be loaded first.
export TORCH_DEVICE_BACKEND_AUTOLOAD="${TORCH_DEVICE_BACKEND_AUTOLOAD:-0}"

# Ray counts real NPUs. EMULATED_NPUS=8 declares emulated NPUs on a node that has no real ones.
resources=()
if [ -n "${EMULATED_NPUS:-}" ]; then
  resources=(--resources "{\"NPU\": $EMULATED_NPUS}")
  # Without pyACL, Ray prints a traceback for declared NPUs. This folder has the calls that Ray needs.
  export PYTHONPATH="$repository/emulator/python${PYTHONPATH:+:$PYTHONPATH}"
fi
