"""Triton's kernels run in its interpreter here. Read at import, so it is said before any import."""

import os
import sys

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
