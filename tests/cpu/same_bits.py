"""A marker for tests that need equal bits in any batch.

The native kernels give a row the same bits in any batch; PyTorch's matrix products, which run where
there is no compiler, promise that only up to rounding.
"""

import pytest

from quire.kernels.native import library

needs_same_bits = pytest.mark.skipif(
    not library.available(), reason="without the native kernels rows are equal only up to rounding"
)
