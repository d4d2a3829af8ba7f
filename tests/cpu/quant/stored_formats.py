"""Every format of checkpoints in safetensors, by name: what tests over all formats are given.

FORMATS[name]() -> (quantize, quantization_config) for `oracle.write_pair`; the test is skipped
where the library that writes the format is not installed. GGUF files have tests of their own.
"""

from functools import partial

import pytest

from quire.kernels.formats.fp8_weight import quantize_blocks
from tests.cpu.quant import test_awq, test_gptq, test_hqq, test_squeezellm
from tests.cpu.quant import test_other_makers as makers
from tests.cpu.quant.checkpoints import BLOCKS


def gptq(bits=4, group=32, symmetric=True, shuffle=False):
    how = {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": shuffle}
    return test_gptq.quantizer(bits, group, symmetric, shuffle), test_gptq.CONFIG | how


def awq(layout="gemm", bits=4):
    config = test_awq.CONFIG | {"version": layout, "bits": bits}
    return test_awq.quantizer(layout=layout, bits=bits), config


def squeezellm(bits=4, **outliers):
    config = test_squeezellm.CONFIG | {"wbits": bits}
    return test_squeezellm.quantizer(bits, **outliers), config


def hqq(bits=4, group=32):
    return test_hqq.quantizer(bits, group), test_hqq.config(bits, group)


def fp8_blocks(name, weight):
    if name == "lm_head":
        return None
    made = quantize_blocks(weight)
    return {"weight": made.data, "weight_scale_inv": made.scale}, made.dequantize()


def bitsandbytes(kind="nf4", nested=False):
    bnb = pytest.importorskip("tests.cpu.quant.test_bitsandbytes", exc_type=ImportError)
    return bnb.four_bits(kind, nested), bnb.config(
        bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested
    )


def llm_int8():
    bnb = pytest.importorskip("tests.cpu.quant.test_bitsandbytes", exc_type=ImportError)
    return bnb.eight_bits, bnb.EIGHT


def compressed(case):
    ct = pytest.importorskip("tests.cpu.quant.test_compressed_tensors", exc_type=ImportError)
    weights, fmt = ct.CASES[case]
    return ct.quantizer(weights, fmt), ct.settings(weights, fmt)


def w8a8():
    int8 = pytest.importorskip("tests.cpu.quant.test_int8", exc_type=ImportError)
    return int8.quantizer(int8.ROWS), int8.settings(int8.ROWS)


COMPRESSED = (
    *("w4 group", "w4 group asymmetric", "w2 group", "w3 group", "w5 asymmetric", "w6 channel"),
    *("w7 group", "w8 channel asymmetric", "w4 tensor", "w4 tensor asymmetric"),
    *("int8 unpacked", "int4 unpacked group", "fp8 channel", "fp8 tensor", "fp8 group"),
    *("fp8 block", "mxfp8", "nvfp4", "mxfp4"),
)
"""Those of test_compressed_tensors.py, which cannot be imported without its library."""

FORMATS = {
    "gptq": gptq,
    "gptq asymmetric": partial(gptq, symmetric=False),
    "gptq in order of activations": partial(gptq, shuffle=True),
    "gptq 2": partial(gptq, 2),
    "gptq 3": partial(gptq, 3),
    "gptq 8 rows": partial(gptq, 8, -1),
    "awq": awq,
    "awq gemv": partial(awq, "gemv"),
    "awq 8": partial(awq, bits=8),
    "squeezellm": squeezellm,
    "squeezellm 3 dense": partial(squeezellm, 3, sparse=False),
    "squeezellm 3 whole rows": partial(squeezellm, 3, full=True),
    "hqq": hqq,
    "hqq rows": partial(hqq, 4, None),
    **{f"hqq {bits}": partial(hqq, bits) for bits in (1, 2, 3, 5, 6, 8)},
    "bitsandbytes nf4": bitsandbytes,
    "bitsandbytes nf4 nested": partial(bitsandbytes, nested=True),
    "bitsandbytes fp4": partial(bitsandbytes, "fp4"),
    "bitsandbytes int8": llm_int8,
    **{f"compressed {case}": partial(compressed, case) for case in COMPRESSED},
    "modelopt nvfp4": lambda: (makers.nvfp4, makers.MODELOPT | {"quant_algo": "NVFP4"}),
    "quark mxfp4": lambda: (
        makers.mxfp4,
        makers.quark(makers.MX_SPEC, {**makers.MX_SPEC, "is_dynamic": True}),
    ),
}
"""Formats whose rows of activations are not rounded: they equal a dense model."""

ROUNDED_ROWS = {
    "fp8": lambda: (makers.fp8_rows, {"quant_method": "fp8"}),
    "fp8 blocks": lambda: (fp8_blocks, BLOCKS),
    "modelopt fp8": lambda: (makers.fp8_tensor, makers.MODELOPT),
    "fbgemm": lambda: (makers.fp8_rows, {"quant_method": "fbgemm_fp8"}),
    "quark fp8": lambda: (makers.fp8_tensor, makers.quark(makers.FP8_SPEC, makers.FP8_SPEC)),
    "quark int8": lambda: (
        makers.int8_rows,
        makers.quark(makers.INT8_SPEC, makers.INT8_FIXED),
    ),
    "w8a8": w8a8,
}
"""The others."""

ALL = FORMATS | ROUNDED_ROWS
WITH_OUTLIERS = ("squeezellm", "squeezellm 3 whole rows")
"""Those that experts are never published in."""
SIDES = {"compressed fp8 block": 128, "fp8 blocks": 128}
"""Least sizes of parts of a model, where a format has larger blocks than 64."""
