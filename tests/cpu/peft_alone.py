"""peft at its first use, and without bitsandbytes, of which no adapter here is: 1 s of the processor.

peft_alone.LoraConfig(...)
"""

import importlib
import sys

import pytest

NAMES = {"LoraConfig", "PeftModel", "get_peft_model"}


def __getattr__(name):
    if name not in NAMES:  # pytest looks for its own in each module that a test file names
        raise AttributeError(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "bitsandbytes", None)  # peft asks once whether it is installed
        return getattr(importlib.import_module("peft"), name)
