"""Triton's kernels run in its interpreter here. Triton reads the variable at its import."""

import os
import sys

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
