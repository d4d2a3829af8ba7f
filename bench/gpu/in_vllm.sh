#!/usr/bin/env bash
# Runs a command with the vLLM that side_by_side.sh has unpacked, without quire and the network.
#
#     bash bench/gpu/in_vllm.sh COMMAND...
set -euo pipefail
site=${VLLM_SITE:-/tmp/quire-vllm}
[ -e "$site/.ready" ] || { echo "vLLM is not in $site: run side_by_side.sh with all parts of .vllm/" >&2; exit 1; }
# bench/ comes last: names of its scripts must not hide modules of vLLM's
export PYTHONPATH=$site:$PWD/bench PYTHONSAFEPATH=1 PYTHONPYCACHEPREFIX=$site.cache/python
export VLLM_CACHE_ROOT=$site.cache/vllm TRITON_CACHE_DIR=$site.cache/triton
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_USE_FLASHINFER_SAMPLER=0 # FlashInfer is absent
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64 # the driver's, in containers
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
for _ in {1..40}; do # vLLM takes a share of the whole memory: the step before must have returned its own
  used=$(nvidia-smi -i 0 --query-gpu=memory.used --format=csv,noheader,nounits 2>/dev/null) || break
  ((used > 3000)) || break
  sleep 0.5
done
exec "$@"
