#!/usr/bin/env bash
# Adapters: tests, then the figures. JSON lines in $OUT/lora.jsonl, output in $OUT/lora.log.
#
#     bash bench/gpu/lora.sh [SECONDS] [--steps NAME,NAME]        540 s by default; what no time is left for is named
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec python3 bench/gpu/run_steps.py lora "$@"
