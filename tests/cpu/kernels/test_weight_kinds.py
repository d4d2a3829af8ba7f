"""Every form of weights multiplies: its kind has a kernel, or it has a method of its own."""

import importlib
import inspect
import pkgutil

import pytest

import quire.kernels.moe_experts
import quire.quant
from quire.kernels import formats
from quire.kernels.formats.grouped_weight import GroupedWeight
from quire.kernels.formats.panel_codes import PanelCodes
from quire.kernels.formats.weight import _KERNELS, StoredExperts, StoredWeight

for package in (formats, quire.quant):
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{found.name}")


def forms_below(base):
    """All classes of quire below a class that have instances."""
    for one in base.__subclasses__():
        if one.__module__.startswith("quire.") and not inspect.isabstract(one):
            yield one
        yield from forms_below(one)


def kinds_of(form):
    """Its own; of separate experts, those that each may have."""
    if isinstance(form.kind, property):
        return [GroupedWeight.kind, PanelCodes.kind]
    return [form.kind]


@pytest.mark.parametrize(
    ("form", "method"),
    [(one, "product") for one in forms_below(StoredWeight)]
    + [(one, "mlp") for one in forms_below(StoredExperts)],
)
def test_a_form_has_a_product(form, method):
    base = StoredWeight if method == "product" else StoredExperts
    own = getattr(form, method) is not getattr(base, method)
    assert own or all((method, kind) in _KERNELS for kind in kinds_of(form))
