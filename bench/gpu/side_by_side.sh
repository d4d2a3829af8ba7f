#!/usr/bin/env bash
# quire and vLLM one after the other on one GPU, then the ratios. JSON lines in $OUT/side_by_side.jsonl,
# output in $OUT/side_by_side.log. Needs .vllm/ (pack_vllm.py) and .whl/ (prepare.sh).
#
#     bash bench/gpu/side_by_side.sh [SECONDS] [--steps NAME,NAME]        540 s by default; the limits of all add up to 2,280
#     bash bench/gpu/side_by_side.sh --steps "llama vllm,llama quire"     ratios: also of earlier lines in that file
#     bash bench/gpu/side_by_side.sh unpack        only that; .vllm/ may have some of the parts at each call
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export VLLM_SITE=${VLLM_SITE:-/tmp/quire-vllm}
if [ ! -e "$VLLM_SITE/.ready" ]; then
  kept=$VLLM_SITE.parts
  mkdir -p "$kept" "$VLLM_SITE"
  cp .vllm/vllm.*of* "$kept"
  parts=("$kept"/vllm.*of*)
  echo "${#parts[@]} parts of vLLM: ${parts[*]##*/}"
  if ((${#parts[@]} == 10#${parts[0]##*of})); then
    cat "${parts[@]}" | python3 -c 'import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall(sys.argv[1], filter="data")' "$VLLM_SITE"
    touch "$VLLM_SITE/.ready"
  fi
fi
[ "${1:-}" = unpack ] || exec python3 bench/gpu/run_steps.py side_by_side "$@"
