#!/usr/bin/env bash
# A model on two GPUs beside one: tests, sums, then the figures. JSON lines in $OUT/two_gpus.jsonl, output in
# $OUT/two_gpus.log.
#
#     bash bench/gpu/two_gpus.sh [SECONDS] [--steps NAME,NAME]        540 s by default; what no time is left for is named
#     bash bench/gpu/two_gpus.sh --steps "tests,failures"     small engines of all kinds, and ranks that fail
#     bash bench/gpu/two_gpus.sh --steps "8B in stages,whole experts"     pipeline stages, replicas, experts
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec python3 bench/gpu/run_steps.py two_gpus "$@"
