#!/usr/bin/env bash
# Runs one node of a Ray cluster in a container, until this script is ended.
#
#   bash run_cluster.sh IMAGE HEAD_IP --head   HF_HOME [docker arguments]     on one machine
#   bash run_cluster.sh IMAGE HEAD_IP --worker HF_HOME [docker arguments]     on each other one
#
# Then, in a container of any node: quire serve MODEL --distributed-executor-backend ray ...
#
# HF_HOME is this machine's folder of Hugging Face. A machine with several networks names its own
# address: -e QUIRE_HOST_IP=ADDRESS (or VLLM_HOST_IP). Docker arguments come last, so they have
# priority: --shm-size, --gpus, --name, -v, -e NCCL_SOCKET_IFNAME=eth0.
# Who can connect to Ray's ports can run programs on all nodes: keep them on a private network.
set -euo pipefail

usage() {
    echo "run_cluster.sh: $1" >&2
    sed -n '4,5s/^# *//p' "$0" >&2
    exit 2
}

[ $# -ge 4 ] || usage "IMAGE, HEAD_IP, --head or --worker, and HF_HOME are needed; got $# arguments"
image=$1 head_ip=$2 kind=$3 hf_home=$4
shift 4

node_ip=${QUIRE_HOST_IP:-${VLLM_HOST_IP:-}}
container= before=
for word in "$@"; do
    case $before$word in
        *QUIRE_HOST_IP=* | *VLLM_HOST_IP=*) node_ip=${word##*_HOST_IP=} ;;
        --name=*) container=${word#--name=} ;;
        --name*) container=${word#--name} ;;
    esac
    before=
    if [ "$word" = --name ]; then before=--name; fi
done

case $kind in
    --head)
        if [ -n "$node_ip" ] && [ "$node_ip" != "$head_ip" ]; then
            usage "HEAD_IP is $head_ip, and this head's own address is $node_ip: they must be equal"
        fi
        node_ip=$head_ip
        start=(--head --port=6379)
        ;;
    --worker) start=("--address=$head_ip:6379") ;;
    *) usage "the third argument is --head or --worker, got '$kind'" ;;
esac
[ -d "$hf_home" ] || usage "HF_HOME: there is no folder '$hf_home' on this machine"
if [ -n "$node_ip" ]; then
    start+=("--node-ip-address=$node_ip")
    set -- -e "QUIRE_HOST_IP=$node_ip" "$@"
fi

if [ -z "$container" ]; then
    container=node
    if docker container inspect node >/dev/null 2>&1; then container=node-$RANDOM; fi
    set -- --name "$container" "$@"
fi

trap 'docker stop "$container" >/dev/null 2>&1 || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
echo "run_cluster.sh: a shell in this node: docker exec -it $container /bin/bash" >&2
docker run --rm --init --entrypoint ray --network host --shm-size 10.24g --gpus all \
    -v "$hf_home:/cache/huggingface" -e HF_HOME=/cache/huggingface -e RAY_USAGE_STATS_ENABLED=0 \
    "$@" "$image" start --block "${start[@]}" &
wait $!  # not in the foreground: a signal ends the container at once
