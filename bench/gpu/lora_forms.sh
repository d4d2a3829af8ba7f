#!/usr/bin/env bash
# Adapters at decode: figures of all forms, by which FORMS (quire/kernels/gpu/lora/adapted_linear.py)
# is chosen; tests of all forms; other constants of the kernels. JSON lines in $OUT/lora_forms.jsonl.
#
#     bash bench/gpu/lora_forms.sh [figures|tests|constants]        all by default: 90, 90 and 60 seconds
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
what=${1:-all}
measure() { timeout 100 python3 bench/lora_gpu.py --layers --json "$OUT/lora_forms.jsonl" "$@" | tee -a "$OUT/lora_forms.log"; }

if [[ $what =~ all|figures ]]; then
  measure --rows 1,8,32,64,2,4,16 --ranks 16,64 --seconds 60
fi
if [[ $what =~ all|tests ]]; then
  timeout 150 python3 -m pytest -n 8 -q tests/gpu/test_lora_fused.py tests/gpu/test_lora.py 2>&1 | tail -40 | tee "$OUT/lora_tests.log"
fi
if [[ $what =~ all|constants ]]; then
  measure --rows 1,8 --adapters 1,8 --ranks 16 --forms late,early --seconds 20 --set few_rows.PREFETCH=0 \
    --set few_rows.PREFETCH=20 --set gemv_lora.MAX_PROGRAMS=8192 --set small_m_lora.RANKS=8
  measure --rows 32,64 --adapters 1,32 --ranks 16 --forms before,beside --seconds 20 --set few_rows.PREFETCH=0 \
    --set few_rows.PREFETCH=20 --set few_rows.EXPAND_ROWS=4 --set few_rows.EXPAND_ROWS=16,few_rows.EXPAND_WARPS=8
fi
