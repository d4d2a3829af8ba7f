"""Every form of weights multiplies: its kind has a kernel, or it has a method of its own."""

import importlib
import pkgutil

import pytest

import quire.kernels.moe_experts
import quire.quant
from quire.kernels import formats
from quire.kernels.formats.weight import _KERNELS, StoredExperts, StoredWeight

for package in (formats, quire.quant):
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{found.name}")


def kinds_of(base):
    """All classes of quire below a class."""
    for one in base.__subclasses__():
        if one.__module__.startswith("quire."):
            yield one
        yield from kinds_of(one)


@pytest.mark.parametrize(
    ("form", "method"),
    [(one, "product") for one in kinds_of(StoredWeight)]
    + [(one, "mlp") for one in kinds_of(StoredExperts)],
)
def test_a_form_has_a_product(form, method):
    base = StoredWeight if method == "product" else StoredExperts
    own = getattr(form, method) is not getattr(base, method)
    assert own or (method, form.kind) in _KERNELS
