#!/usr/bin/env bash
# Stops Ray on this node, and everything that runs on this Ray.
set -euo pipefail
PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin:$PATH" exec ray stop
