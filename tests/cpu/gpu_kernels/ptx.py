"""Runs the inline assembly of kernels on numbers of 32 bits: the interpreter has none of its own."""

import re

import numpy as np
import torch


def run(text, inputs, outputs):
    """Run instructions over int64 arrays that hold words of 32 bits. Returns: $0 .. of `outputs`.

    inputs: of $outputs and the following operands.
    """
    held = {f"${outputs + i}": np.asarray(one) for i, one in enumerate(inputs)}
    body = re.sub(r"\.reg[^;]*;", "", text.strip()[1:-1])

    def value(name):
        return held[name] if name in held else np.int64(int(name, 0))

    for line in filter(None, (part.strip() for part in body.split(";"))):
        name, rest = line.split(None, 1)
        target, *sources = (part.strip() for part in rest.split(","))
        held[target] = FUNCTIONS[name](*map(value, sources)) & 0xFFFFFFFF
    return [held[f"${i}"] for i in range(outputs)]


def permute_bytes(a, b, select):
    both, out = [a >> 8 * i & 255 for i in range(4)] + [b >> 8 * i & 255 for i in range(4)], 0
    for i in range(4):
        nibble = select >> 4 * i & 15
        byte = sum(np.where(nibble % 8 == k, both[k], 0) for k in range(8))
        byte = np.where(nibble >= 8, np.where(byte >= 128, 255, 0), byte)
        out = out | byte << 8 * i
    return out


def any_logic(a, b, c, table):
    out = 0
    for i in range(8):
        picked = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        out = out | (picked if table >> i & 1 else 0)
    return out


def fused(dtype):
    def multiply_add(*operands):
        halves = []
        for at in (0, 16):
            a, b, c = (numbers(one >> at & 0xFFFF, dtype).double() for one in operands)
            halves.append(bits((a * b + c).to(dtype)) << at)
        return halves[0] | halves[1]

    return multiply_add


def numbers(words, dtype):
    """Words of 16 bits as the numbers that they are."""
    return torch.from_numpy(np.asarray(words).astype(np.uint16).view(np.int16)).view(dtype)


def bits(values):
    return values.view(torch.int16).numpy().view(np.uint16).astype(np.int64)


FUNCTIONS = {
    "mov.b32": lambda a: a,
    "shr.b32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "prmt.b32": permute_bytes,
    "lop3.b32": any_logic,
    "fma.rn.bf16x2": fused(torch.bfloat16),
    "fma.rn.f16x2": fused(torch.float16),
}
