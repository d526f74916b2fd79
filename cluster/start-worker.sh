#!/usr/bin/env bash
# Starts Ray on a node and joins the head: start-worker.sh HEAD_ADDRESS[:PORT] [arguments of `ray start`].
# Write an IPv6 address with a port in brackets: [fd00::1]:6379.
set -euo pipefail
if [ $# -lt 1 ]; then
  echo "usage: $0 HEAD_ADDRESS[:PORT] [arguments of 'ray start']" >&2
  exit 2
fi
head=$1
shift
case $head in
  \[*\]:*) ;;
  \[*\]) head=$head:6379 ;;
  *:*:*) head=[$head]:6379 ;;  # an IPv6 address without a port
  *:*) ;;
  *) head=$head:6379 ;;
esac
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec ray start --address "$head" ${resources[@]+"${resources[@]}"} "$@"
