#!/usr/bin/env bash
# Prepares a node for its end, as Kubernetes' preStop hook or by hand: Ray places nothing more on this node, and
# Ray Serve moves its replicas to other nodes. Waits until this node's HTTP proxy has no requests and closes its
# port, for at most DRAIN_S seconds (default 120); does not wait if another program has this port. Groups on this node
# end when Ray ends; their requests continue on other groups, or wait for a new group.
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
limit=${DRAIN_S:-120}
port=${SERVE_PORT:-8000}

ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the node ends" \
  --deadline-remaining-seconds "$limit" \
  || echo "Ray does not drain this node: a head cannot be drained" >&2

# The answers of Ray Serve's proxy to a health check. A busy proxy may answer late.
answers='success|Route table is not populated yet|No replicas are available yet|This node is being drained'

is_open() (
  trap '' PIPE
  exec 3<> "/dev/tcp/127.0.0.1/$port" || exit 1
  printf 'GET /-/healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' >&3
  reply=$(timeout 5 cat <&3)
  [[ -z $reply || $reply =~ $answers ]]
) 2> /dev/null

end=$((SECONDS + limit))
while [ $SECONDS -lt $end ] && is_open; do
  sleep 1
done
