#!/usr/bin/env bash
# Stops Ray on this node, and with it everything that runs on its Ray.
set -euo pipefail
PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin:$PATH" exec ray stop
