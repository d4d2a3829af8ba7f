"""Packs vLLM for a GPU machine without a network; run it where there is one.

    python bench/gpu/pack_vllm.py [--out .vllm] [--part-mb 33] [--python 3.12]

Downloads the wheels of REQUIREMENTS, leaves out the files of LEFT_OUT and writes the rest as one
.tar.xz in parts: OUT/vllm.1of4 and so on. No file of vLLM is changed. side_by_side.sh unpacks them
there. The machine must have torch 2.11 for CUDA 13, Triton, transformers 5, and vLLM's other
requirements that are not in the list, as aiohttp and prometheus_client, of its own. FlashInfer is
absent: vLLM then samples with PyTorch and Triton, as it does for seeded requests in any case.
"""

import argparse
import collections
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = """
vllm==0.25.1 annotated-types==0.8.0 anthropic==0.125.0 apache-tvm-ffi==0.1.15.post2 astor==0.8.1
blake3==1.0.11 cachetools==8.0.2 cbor2==6.3.0 compressed-tensors==0.17.0 depyf==0.20.0
diskcache==5.6.3 distro==1.9.0 docstring_parser==0.18.0 fastapi==0.136.3 gguf==0.19.0
httptools==0.9.0 httpx-sse==0.4.3 ijson==3.6.0 interegular==0.3.3 jiter==0.19.0 jmespath==1.1.0
jsonschema==4.26.0 jsonschema-specifications==2025.9.1 lark==1.2.2 llguidance==1.7.6
lm-format-enforcer==0.11.3 loguru==0.7.3 mcp==1.30.0 mistral_common==1.13.1
model-hosting-container-standards==0.1.16 msgspec==0.22.0 openai==2.54.0 openai-harmony==0.0.8
opentelemetry-api==1.45.2 outlines_core==0.2.14 partial-json-parser==0.2.1.1.post7
prometheus-fastapi-instrumentator==8.1.0 pybase64==1.5.1 pycountry==26.2.16 pydantic==2.14.4
pydantic_core==2.50.5 pydantic-extra-types==2.11.1 pydantic-settings==2.16.3 PyJWT==2.15.1
python-dotenv==1.2.4 python-json-logger==4.2.0 python-multipart==0.0.34 pyzmq==27.3.0
referencing==0.37.0 rpds-py==2026.9.1 setproctitle==1.3.8 sniffio==1.3.1 sse-starlette==3.7.0
starlette==1.10.0 typing_extensions==4.16.0 typing-inspection==0.4.5 uvicorn==0.54.0
watchfiles==1.3.0 websockets==17.4 xgrammar==0.2.9
"""
LEFT_OUT = {  # what bfloat16 models on a Hopper GPU do not use -> its files
    "FlashAttention 2": r"vllm/vllm_flash_attn/_vllm_fa2_C",
    "FlashMLA, QuTLASS, DeepGEMM, attention of Blackwell":
        r"vllm/(_flashmla|_qutlass|third_party/(deep_gemm|fmha_sm100)/)",
    "the server in Rust": r"vllm/vllm-rs$",
    "data of other models and pages": r"mistral_common/data/|pycountry/locales/"
        r"|vllm/kernels/helion/configs/|vllm/entrypoints/serve/instrumentator/static/",
    "headers, stubs, tests, scripts": r"(tvm_ffi|xgrammar)/(include|3rdparty)/|[^/]*\.data/"
        r"|(.*/)?(tests?|testing_data)/|.*\.pyi$|.*/RECORD$",
}  # fmt: skip


def download(folder, python):
    """Get the wheels for Linux on x86-64 and that Python, whichever Python runs this."""
    platforms = ["any", "manylinux1_x86_64", "manylinux2014_x86_64"]
    platforms += [f"manylinux_2_{n}_x86_64" for n in (12, 17, 24, 26, 27, 28, 31, 34)]
    abis = [f"cp{python.replace('.', '')}", "abi3", "none"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
               "--implementation", "cp", "--python-version", python, "-d", folder,
               *(f"--abi={abi}" for abi in abis), *(f"--platform={p}" for p in platforms),
               *REQUIREMENTS.split()]  # fmt: skip
    subprocess.run(command, check=True)


def reason_of(name):
    """Return why a file is left out, or None."""
    return next((why for why, files in LEFT_OUT.items() if re.match(files, name)), None)


def pack(wheels, path):
    """Write the files of the wheels to a .tar.xz; return bytes and files by the reason."""
    sizes, counts = collections.Counter(), collections.Counter()
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 1 << 24}]
    with lzma.open(path, "wb", filters=filters) as xz, tarfile.open(fileobj=xz, mode="w|") as tar:
        for wheel in map(zipfile.ZipFile, wheels):
            for one in wheel.infolist():
                why = reason_of(one.filename)
                sizes[why] += one.file_size
                counts[why] += 1
                if why is None and not one.is_dir():
                    entry = tarfile.TarInfo(one.filename)
                    entry.size = one.file_size
                    tar.addfile(entry, wheel.open(one))
    return sizes, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / ".vllm")
    parser.add_argument("--part-mb", type=int, default=33, help="of 1,000,000 bytes")
    parser.add_argument("--python", default="3.12", help="of the GPU machine")
    a = parser.parse_args()
    shutil.rmtree(a.out, ignore_errors=True)
    a.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        download(folder, a.python)
        path = Path(folder) / "vllm.tar.xz"
        sizes, counts = pack(sorted(Path(folder).glob("*.whl")), path)
        size = a.part_mb * 1_000_000
        total = -(-path.stat().st_size // size)
        with path.open("rb") as whole:
            for number in range(1, total + 1):
                part = a.out / f"vllm.{number:02}of{total:02}"
                part.write_bytes(whole.read(size))
                print(f"{part}: {part.stat().st_size / 1e6:.1f} MB")
    for why, size in sizes.most_common():
        what = f"left out: {why}" if why else "packed"
        print(f"{what}: {counts[why]} files of {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
