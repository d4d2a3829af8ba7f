#!/usr/bin/env bash
# Weights of few bits: tests, then the figures. JSON lines in $OUT/quant.jsonl, output in $OUT/quant.log.
#
#     bash bench/gpu/quant.sh [SECONDS] [--steps NAME,NAME]        540 s by default; what no time is left for is named
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec python3 bench/gpu/run_steps.py quant "$@"
