"""peft without bitsandbytes, of which no adapter here is: its import takes 1 s of the processor."""

import sys

import pytest

with pytest.MonkeyPatch.context() as _patch:
    _patch.setitem(sys.modules, "bitsandbytes", None)  # peft asks once whether it is installed
    from peft import LoraConfig, PeftModel, get_peft_model

__all__ = ["LoraConfig", "PeftModel", "get_peft_model"]
