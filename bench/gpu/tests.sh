#!/usr/bin/env bash
# Runs tests/gpu, in several processes. JSON lines in $OUT/tests.jsonl, output in $OUT/tests.log.
#
#     bash bench/gpu/tests.sh [SECONDS] [--steps NAME,NAME]        540 s by default; what no time is left for is named
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec python3 bench/gpu/run_steps.py tests "$@"
