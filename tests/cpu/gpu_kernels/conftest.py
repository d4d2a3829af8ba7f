"""The GPU kernels in Triton's interpreter: no GPU is needed, the arithmetic is the kernels' own.

Infinities are ordinary values on a GPU; numpy, which does the sums here, would warn of them.
"""

import dataclasses
import functools
import inspect
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import tiers

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Skip with the reason where triton was loaded for the GPU before tests/cpu/conftest.py."""
    files = {path for path in {item.path for item in items} if path.is_relative_to(HERE)}
    for item in (item for item in items if item.path in files):
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
        if os.environ.get("TRITON_INTERPRET") != "1":
            item.add_marker(pytest.mark.skip(reason="triton is loaded for the GPU: run tests/cpu"))


@pytest.fixture(autouse=True)
def eight_bits(monkeypatch):
    """The interpreter cuts off where a GPU (and torch) rounds, and loses the carry of e4m3."""
    tl = pytest.importorskip("triton.language")
    from triton.runtime import interpreter

    real = interpreter._convert_float
    kinds = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
    kinds[tl.float32] = torch.float32
    kinds |= {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}

    def convert(given, source, wanted, mode):
        if source not in kinds or wanted not in kinds:
            return real(given, source, wanted, mode)
        if source == tl.bfloat16 and wanted == tl.float32:
            return given.astype(np.uint32) << 16
        raw = torch.from_numpy(np.array(given).reshape(-1).view(np.uint8))
        out = raw.view(kinds[source]).to(kinds[wanted]).view(torch.uint8).numpy()
        return out.view(f"uint{wanted.primitive_bitwidth}").reshape(given.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture(autouse=True)
def loop_bounds(monkeypatch):
    """The interpreter's scalars are arrays of one element, which newer numpy takes for no index."""
    pytest.importorskip("triton")
    from triton.runtime import interpreter

    real = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        real(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.fixture(autouse=True)
def sixteen_bits(monkeypatch):
    """The interpreter keeps bfloat16 as integers, and multiplies them as such in a dot product."""
    tl = pytest.importorskip("triton.language")
    from triton.runtime import interpreter

    real = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return real(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def in_less_time(monkeypatch):
    """Leave out what takes the interpreter most of its time and changes no result.

    Every call inside of a kernel prepares the language anew, every value looks its dtype up in a
    new table and has a new type with a new shape, the types of two operands are compared for each
    operation, a reduction with a function of the kernel's own goes from element to element, and
    every sum is computed again in 64 bits to find overflows: the long tier does that.
    """
    tl = pytest.importorskip("triton.language")
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    prepared = []  # of each kernel that runs, the modules of the language that are prepared

    @functools.cache
    def languages(function):
        found = function.__globals__.values()
        return frozenset(one for one in (tl, tl.core) if any(one is other for other in found))

    def run_kernel(self, *args, **kwargs):
        prepared.append(set(languages(self.fn)))
        try:
            return launch(self, *args, **kwargs)
        finally:
            prepared.pop()

    def call_function(self, *args, **kwargs):
        new = languages(self.fn)
        if not prepared or new - prepared[-1]:
            if prepared:
                prepared[-1] |= new
            return call(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    launch, call = interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_kernel)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call_function)
    scalar_dtype = functools.cache(interpreter._get_np_dtype)

    def get_dtype(kind):
        pointer = kind.scalar.is_ptr()
        return np.dtype(np.uint64) if pointer else scalar_dtype(kind.scalar)

    monkeypatch.setattr(interpreter, "_get_np_dtype", get_dtype)
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", reduce_halves)
    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtins)
    for name in ("binary_op_type_checking_impl", "broadcast_impl_value"):
        monkeypatch.setattr(TritonSemantic, name, match_once(getattr(TritonSemantic, name)))
    for kind in (tl.core.block_type, tl.tensor):
        monkeypatch.setattr(kind, "__init__", init_with_known(kind.__init__))
    if not tiers.LONG:
        builder = interpreter.interpreter_builder
        unchecked = dataclasses.replace(builder.options, sanitize_overflow=False)
        monkeypatch.setattr(builder, "options", unchecked)


@functools.cache
def builtins_of(package, builder):
    """(name, function of the interpreter) of each builtin."""
    from triton.language.core import is_builtin
    from triton.language.semantic import TritonSemantic

    semantic = TritonSemantic(builder)

    def with_semantic(member):
        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        inner = getattr(member, "__wrapped__", member)
        return call

    members = inspect.getmembers(package, is_builtin)
    return [(name, with_semantic(member)) for name, member in members]


def patch_builtins(package, builder, scope):
    for name, member in builtins_of(package, builder):
        scope.set_attr(package, name, member)


def match_once(match):
    """The function that gives two operands one type and shape, which remembers what each pair of
    types needs: nothing, a constant, a splat or a broadcast. Casts are made each time."""
    known = {}

    def key_of(value):
        return (type(value), value) if isinstance(value, int | float) else value.type.name

    def step_of(before, after):
        """What makes one of the other, as a function of (builder, value); None: something else."""
        if after is before:
            return lambda builder, value: value
        if isinstance(before, int | float):
            return lambda builder, value: after
        kind, old = after.type, before.type
        make = type(after)
        if kind.scalar != old.scalar:
            return None
        if not old.is_block():
            return lambda builder, value: make(builder.create_splat(kind, value.handle), kind)
        if len(old.shape) == len(kind.shape):
            shape = kind.shape
            return lambda builder, value: make(builder.create_broadcast(value.handle, shape), kind)
        return None

    def match_types(self, lhs, rhs, *rules, **named):
        key = key_of(lhs), key_of(rhs), rules, *named.items()
        if key in known:
            left, right = known[key]
            return left(self.builder, lhs), right(self.builder, rhs)
        out = match(self, lhs, rhs, *rules, **named)
        steps = step_of(lhs, out[0]), step_of(rhs, out[1])
        if None not in steps:
            known[key] = steps
        return out

    return match_types


def reduce_halves(self, values):
    """Combine one half of the axis with the other until one element is left, as a GPU does."""
    kinds, axis = [one.dtype for one in values], self.axis or 0
    data = [one.handle.data for one in values]
    dims = data[0].ndim
    if self.axis is None:
        data = [one.reshape(-1) for one in data]
    while data[0].shape[axis] > 1:
        parts = [np.split(one, 2, axis) for one in data]
        low, high = ([self.to_tensor(*one) for one in zip(half, kinds)] for half in zip(*parts))
        out = self.combine_fn.fn(*low, *high)
        data = [one.handle.data for one in (out if isinstance(out, tuple) else (out,))]
    if not self.keep_dims:
        data = [one.squeeze(axis) for one in data]
    elif self.axis is None:
        data = [one.reshape((1,) * dims) for one in data]
    return [self.to_tensor(*one) for one in zip(data, kinds)]


def init_with_known(init):
    """The __init__ of block types and values that makes the parts of each type once."""
    known = {}

    def init_type(self, element_ty, shape):
        key = str(element_ty), *(getattr(size, "value", size) for size in shape)
        if key not in known:
            init(self, element_ty, shape)
            known[key] = self.__dict__
        self.__dict__ = known[key]

    def init_value(self, handle, type):
        if (key := str(type)) not in known:
            init(self, handle, type)
            known[key] = {name: self.__dict__[name] for name in ("numel", "dtype", "shape")}
        self.__dict__ = {"handle": handle, "type": type, **known[key]}

    return init_type if "element_ty" in init.__annotations__ else init_value


@pytest.fixture(autouse=True)
def integers_as_sixteen_bits(monkeypatch):
    """The interpreter makes a bfloat16 of an integer by taking the integer for its bits."""
    tl = pytest.importorskip("triton.language")
    from triton.runtime import interpreter

    real = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self, src, dst_type):
        if dst_type.scalar == tl.bfloat16 and src.dtype.scalar.is_int():
            src = real(self, src, tl.float32)
        return real(self, src, dst_type)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast_impl)
