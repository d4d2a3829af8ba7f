# Sourced by the scripts beside it: installs the wheels of prepare.sh, and sets OUT, MODELS and PYTHONPATH.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${OUT:-$PWD/build/gpu}
MODELS=${MODELS:-/tmp/quire-models}
site=/tmp/quire-site
mkdir -p "$OUT"
if compgen -G ".whl/*.whl" >/dev/null && [ ! -e "$site/.ready" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl
  touch "$site/.ready"
fi
export OUT MODELS PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
# several processes measure beside each other, and multicast over NVLink is never used
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
[ -e "$MODELS/llama-8b" ] || python3 bench/make_models.py "$MODELS"
