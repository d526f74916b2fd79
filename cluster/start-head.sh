#!/usr/bin/env bash
# Starts Ray on the head node. Further arguments are passed to `ray start`; some networks need
# --node-ip-address=ADDRESS and --port=PORT (default 6379).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec ray start --head --port 6379 --dashboard-host 127.0.0.1 ${resources[@]+"${resources[@]}"} "$@"
