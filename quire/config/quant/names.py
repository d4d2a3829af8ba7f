"""Values of `quantization` that mean a stored format, and methods that quire does not read.

Other engines name a kernel or a tool with the option ("awq_marlin", "auto_gptq"); here it changes
nothing about how a checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.errors import ConfigError

MEANINGS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("awq", "awq_marlin", "auto_awq", "cpu_awq"), frozenset({"awq"})),
    **dict.fromkeys(("gptq", "gptq_marlin", "auto_gptq", "marlin"), frozenset({"gptq"})),
    "moe_wna16": frozenset({"awq", "gptq", "compressed-tensors"}),
    **dict.fromkeys(
        ("inc", "auto-round", "auto_round"), frozenset({"awq", "gptq", "compressed-tensors"})
    ),
    "squeezellm": frozenset({"squeezellm"}),
    "gpt_oss_mxfp4": frozenset({"mxfp4"}),
    **dict.fromkeys(("modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"), frozenset({"modelopt"})),
    "compressed_tensors": frozenset({"compressed-tensors"}),
}
"""Value of the option -> quant_method of the checkpoints that it fits, beside the method itself."""

_RETRY = "use a GPTQ, AWQ, compressed-tensors or FP8 checkpoint of the model"
UNREAD: Mapping[str, str] = {
    "torchao": "its tensors are Python objects of torchao; use a GPTQ, AWQ or compressed-tensors "
    "checkpoint, or the unquantized model with quantization='int4' or 'int8'",
    **dict.fromkeys(
        ("aqlm", "bitblas", "gptq_bitblas", "quip", "quip_sharp", "qqq", "vptq"),
        _RETRY,
    ),
    **dict.fromkeys(("eetq", "higgs", "spqr", "fp_quant", "sinq", "bitnet", "rtn"), _RETRY),
    **dict.fromkeys(("deepspeedfp", "tpu_int8", "neuron_quant", "petit_nvfp4"), _RETRY),
    **dict.fromkeys(("gptq_marlin_24", "sparseml"), _RETRY),
    "ptpc_fp8": "quantization='fp8' has a scale per output and per token",
    "ipex": "leave quantization out: the format is read from the checkpoint",
}
"""Methods of other engines that quire does not read -> what to do."""


def refuse_unread(method: str, where: str) -> None:
    """Raise ConfigError for a method of UNREAD. where: the field or option that has it."""
    if (hint := UNREAD.get(method.lower())) is not None:
        raise ConfigError(f"{where} is {method!r}, which quire does not read; {hint}")


def means(option: str, method: str) -> bool:
    """Whether a value of `quantization` fits checkpoints of a quant_method, and changes nothing."""
    return option == method or method in MEANINGS.get(option, ())
