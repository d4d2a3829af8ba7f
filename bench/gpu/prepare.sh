#!/usr/bin/env bash
# Collects what a GPU machine without a network lacks, into .whl/ (ignored by git): run it here, with
# a network, and copy the working tree with .whl/ to that machine. It needs torch, triton, transformers
# and pytest of its own.
#
#     bash bench/gpu/prepare.sh [PYTHON]        the other machine's Python, 3.12 by default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python_version=${1:-3.12}
NAMES="msgspec pydantic pydantic_core annotated-types typing-inspection typing_extensions fastapi starlette uvicorn
httptools pyzmq llguidance jsonschema jsonschema-specifications referencing rpds-py gguf
transformers huggingface_hub hf-xet httpx2 httpcore2 truststore opentelemetry-api"

wanted=()
for name in $NAMES; do
  pin=$(sed -n "s/^\($name==[^ ;]*\).*/\1/Ip" constraints.txt)
  wanted+=("${pin:-$name}")
done
platforms=()
for glibc in 2_12 2_17 2_24 2_26 2_27 2_28 2_31 2_34; do
  platforms+=(--platform "manylinux_${glibc}_x86_64")
done
# a start that finds no kernels compiles them late: minutes of the other machine
[ ! -x .venv/bin/python ] || .venv/bin/python -m pytest -n 0 -q tests/cpu/test_kernel_enumeration.py
rm -rf .whl
mkdir .whl
python3 -m pip download -q --no-deps --only-binary=:all: --implementation cp --abi "cp${python_version/./}" --abi abi3 --abi none \
  --python-version "$python_version" "${platforms[@]}" --platform manylinux1_x86_64 --platform manylinux2014_x86_64 \
  --platform any -d .whl "${wanted[@]}"
git rev-parse --short HEAD > .whl/commit
[ -z "$(git status --porcelain --untracked-files=no)" ] || echo "$(cat .whl/commit)-dirty" > .whl/commit
du -sh .whl
ls .whl
