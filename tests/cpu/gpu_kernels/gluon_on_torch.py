"""Runs the body of a Gluon kernel as Python: what it loads, multiplies and stores, one program after
the other. Layouts are ignored; asynchronous copies arrive when a group is waited for, not before.
"""

import itertools
from types import FunctionType, SimpleNamespace

import torch


class Pointer:
    """Places in a tensor: what a kernel has of it."""

    def __init__(self, data, at=0):
        self.data, self.at = data, at  # memory, whatever the strides
        self.dtype = SimpleNamespace(element_ty=data.dtype)

    def __add__(self, more):
        return Pointer(self.data, self.at + more)

    def __sub__(self, less):
        return self + -less

    def places(self, mask=None):
        at = torch.as_tensor(self.at)
        return at if mask is None else torch.where(mask, at, 0)


def load(pointer, mask=None, other=0.0, eviction_policy=""):
    found = pointer.data[pointer.places(mask)]
    return found if mask is None else torch.where(mask, found, other)


def store(pointer, value, mask):
    at, value, mask = torch.broadcast_tensors(torch.as_tensor(pointer.at), value, mask)
    pointer.data[at[mask]] = value[mask]


class Shared:
    """A tensor in shared memory, or a view of one. It holds NaN until something is copied."""

    def __init__(self, data):
        self.data = data

    def index(self, i):
        return Shared(self.data[i])

    def permute(self, order):
        return Shared(self.data.permute(order))

    def load(self, layout):
        return self.data.clone()

    def store(self, value):
        self.data.copy_(value)


class Copies:
    """Asynchronous copies of a program, in groups."""

    def __init__(self):
        self.groups = [[]]

    def async_copy_global_to_shared(self, smem, pointer, mask=None, eviction_policy=""):
        mask = torch.ones_like(smem.data, dtype=torch.bool) if mask is None else mask
        smem.data[mask.expand_as(smem.data)] = float("nan")
        self.groups[-1].append((smem, pointer, mask))

    def commit_group(self):
        self.groups.append([])

    def wait_group(self, outstanding):
        while len(self.groups) > outstanding + 1:
            for smem, pointer, mask in self.groups.pop(0):
                smem.data.copy_(torch.where(mask, load(pointer, mask), smem.data))


def multiply(a, b, acc):
    return acc + a.float() @ b.float()


def _language(copies, program):
    return SimpleNamespace(
        **dict.fromkeys(
            ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout",
             "SwizzledSharedLayout"), lambda *args: None),
        program_id=lambda axis: program[axis], static_range=range, load=load, store=store,
        arange=lambda start, end, layout: torch.arange(start, end), sum=torch.sum,
        minimum=lambda x, most: x.clamp(max=most), thread_barrier=lambda: None,
        maximum=lambda x, least: x.clamp(min=least), where=torch.where,
        convert_layout=lambda x, layout: x, rsqrt=torch.rsqrt, reshape=torch.reshape,
        permute=torch.permute, split=lambda x: x.unbind(-1),
        join=lambda x, y: torch.stack((x, y), -1),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        allocate_shared_memory=lambda dtype, shape, layout: Shared(
            torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype)),
        int32=torch.int32, int64=torch.int64, float32=torch.float32,
        nvidia=SimpleNamespace(ampere=SimpleNamespace(mma_v2=multiply)),
    )  # fmt: skip


def _memory(tensor):
    """What is in memory from a tensor's first number on."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((size,), (1,))


def run(kernel, grid, tensors, numbers, consts, functions, tiles=(), more=None):
    """Run each program of a launch. functions: what the kernel calls, by name, in place of its own;
    those that are jitted see the same language. more: of gluon_partitions.py, for what it adds."""
    for program in itertools.product(*map(range, grid)):
        copies = Copies()
        names = {"gl": _language(copies, program), "async_copy": copies, "mma_v2": multiply}
        if more is not None:
            names |= more(names["gl"], grid)
        names |= functions
        modules = [kernel._jit.fn.__globals__]
        for held in modules:  # grows: those of the functions that are found
            for name, value in held.items():
                if name not in names:
                    inner = getattr(value, "fn", None)
                    if isinstance(inner, FunctionType):
                        value = FunctionType(inner.__code__, names, name, inner.__defaults__)
                        if not any(inner.__globals__ is one for one in modules):
                            modules.append(inner.__globals__)
                    names[name] = value
        body = FunctionType(kernel._jit.fn.__code__, names)
        pointers = [None if t is None else Pointer(_memory(t)) for t in tensors]
        body(*pointers, *tiles, *numbers, *consts)
