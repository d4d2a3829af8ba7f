#!/usr/bin/env bash
# Speculation: tests, then the figures. JSON lines in $OUT/speculation.jsonl, output in $OUT/speculation.log.
#
#     bash bench/gpu/speculation.sh [SECONDS] [--steps NAME,NAME]        540 s by default; what no time is left for is named
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec python3 bench/gpu/run_steps.py speculation "$@"
