"""Packers of GPTQ, AWQ and SqueezeLLM tensors, written bit by bit from the formats' descriptions.

They share nothing with the readers: a weight's codes become one Python integer per word.
Codes are lists or tensors q [O, I]; zeros and scales are [O, G].
"""

import numpy as np
import torch

WORD = 32


def words_of(bits, codes):
    """uint32 words of codes that lie in order, in as many words as they need."""
    if bits == 3:
        return three_bits(codes)
    each = WORD // bits
    filled = np.zeros((-(-len(codes) // each), each), dtype=np.int64)
    filled.flat[: len(codes)] = codes
    return (filled << bits * np.arange(each)).sum(1).tolist()


def three_bits(codes):
    """32 codes in three words: 10 whole ones, two that cross a border, and so on."""
    assert len(codes) % 32 == 0
    words = []
    for start in range(0, len(codes), 32):
        c = [int(one) for one in codes[start : start + 32]]
        first = sum(c[j] << (3 * j) for j in range(10)) | (c[10] & 3) << 30
        second = c[10] >> 2 | sum(c[11 + j] << (3 * j + 1) for j in range(10)) | (c[21] & 1) << 31
        third = c[21] >> 1 | sum(c[22 + j] << (3 * j + 2) for j in range(10))
        words += [first, second, third]
    return words


def int32(rows):
    """A tensor int32 of rows of unsigned words."""
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32).copy())


def rtn(weight, bits, group, *, symmetric=True, order=None):
    """Codes, zeros, float16 scales, and the group of each input, of a weight [O, I].

    group -1: one. order: the inputs in the order in which groups take them (desc_act).
    """
    outputs, inputs = weight.shape
    size = inputs if group == -1 else group
    order = torch.arange(inputs) if order is None else order
    g_idx = torch.empty(inputs, dtype=torch.long)
    g_idx[order] = torch.arange(inputs) // size
    groups, most = -(-inputs // size), (1 << bits) - 1
    scale, zero = torch.empty(outputs, groups), torch.empty(outputs, groups)
    for g in range(groups):
        part = weight[:, g_idx == g]
        if symmetric:
            scale[:, g] = part.abs().amax(1) / (most / 2)
            zero[:, g] = 1 << (bits - 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale[:, g] = (high - low) / most
            zero[:, g] = (-low / scale[:, g]).round()
    scale = scale.clamp(min=1e-4).half()
    wide, offset = scale.float()[:, g_idx], zero[:, g_idx]
    q = (weight / wide + offset).round().clamp(0, most)
    return q.int(), zero.int(), scale, g_idx


def dense(q, zero, scale, g_idx):
    """The definition: float32 [O, I]."""
    return (q - zero[:, g_idx]).float() * scale.float()[:, g_idx]


def gptq_tensors(q, zero, scale, g_idx, bits, *, version=1, keep_g_idx=True, keep_zeros=True):
    """{suffix: tensor} of a GPTQ layer."""
    stored = (zero - int(version == 1)) % (1 << bits)
    found = {
        "qweight": int32([words_of(bits, row) for row in q.tolist()]).t().contiguous(),
        "scales": scale.t().contiguous(),
    }
    if keep_zeros:
        found["qzeros"] = int32([words_of(bits, row) for row in stored.t().tolist()])
    if keep_g_idx:
        found["g_idx"] = g_idx.int()
    return found


AWQ_COLUMNS = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}
"""The column of each field of a word, from the least significant."""


def awq_words(rows, bits):
    """int32 [n, O * bits / 32] of rows of O codes in AWQ's order."""
    packed, columns = [], AWQ_COLUMNS[bits]
    for row in rows:
        words = []
        for start in range(0, len(row), len(columns)):
            words.append(sum(int(row[start + c]) << bits * i for i, c in enumerate(columns)))
        packed.append(words)
    return int32(packed)


def awq_gemm_tensors(q, zero, scale, bits=4):
    """{suffix: tensor} of an AWQ layer of version gemm."""
    return {
        "qweight": awq_words(q.t().tolist(), bits),
        "qzeros": awq_words(zero.t().tolist(), bits),
        "scales": scale.t().contiguous(),
    }


def awq_gemv_tensors(q, zero, scale, group):
    """{suffix: tensor} of an AWQ layer of version gemv: zeros and scales have room at the end."""
    groups = zero.shape[1]
    group = group if group > 0 else q.shape[1]
    multiple = {64: 2, 32: 4}.get(group, 1)
    width = (groups + 8 * multiple - 1) // (8 * multiple) * multiple
    room = (0, 8 * width - groups)
    zero = torch.nn.functional.pad(zero, room)
    return {
        "qweight": int32([words_of(4, row) for row in q.tolist()]),
        "qzeros": int32([words_of(4, row) for row in zero.tolist()]),
        "scales": torch.nn.functional.pad(scale, room),
    }
