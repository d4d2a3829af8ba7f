"""Every stored format against damaged tensors: an error that names the layer, no large allocation.

Each tensor of one quantized layer is cut, turned, doubled, emptied, given another dtype or left
out. What cannot be the layer's must be refused; what may be another form of it may load.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from quire.errors import QuireError
from tests import tiers
from tests.cpu.quant import test_hqq
from tests.cpu.quant.oracle import build, tiny, write_pair
from tests.cpu.quant.stored_formats import ALL, SIDES

LAYER = "model.layers.0.mlp.down_proj"
SHARE = tiers.amount(5, 1)
"""One of so many damages is tried."""
MAX_MESSAGE = 1500


EVERYDAY = (
    *("gptq in order of activations", "awq gemv", "squeezellm", "hqq 3", "quark int8"),
    *("modelopt nvfp4", "bitsandbytes nf4 nested", "bitsandbytes int8"),
    *("compressed w4 group asymmetric", "compressed fp8 group", "compressed mxfp4"),
)
OTHERS = sorted(ALL.keys() - {*EVERYDAY, *SIDES})
OTHER_DTYPE = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def left_out(t):
    return None


def fewer_rows(t):
    return t[:-1] if t.dim() and len(t) > 1 else t.new_zeros(0)


def fewer_columns(t):
    return t[..., :-1] if t.dim() > 1 and t.shape[-1] > 1 else None


def turned(t):
    return t.t() if t.dim() == 2 and 1 not in t.shape and t.shape[0] != t.shape[1] else None


def doubled(t):
    return torch.cat([t, t]) if t.dim() else t.repeat(2)


def emptied(t):
    return t.new_zeros(0)


def another_dtype(t):
    """Integers for floats and the other way; wide ones, for words and bytes."""
    return t.float().to(OTHER_DTYPE.get(t.dtype, torch.float64))


DAMAGES = (left_out, fewer_rows, fewer_columns, turned, doubled, emptied, another_dtype)
SETTINGS = test_hqq.quantizer()("", torch.randn(32, 32))[0].keys() - {"W_q", "scale", "zero"}
MAY_BE_ABSENT = {
    *("qzeros", "g_idx", "weight_shape", "rows", "cols", "vals", "startrows"),
    *("weight_zero_point", "input_zero_point", "weight_format", *SETTINGS),
}
"""Tensors without which, or with whatever in which, a layer may be whole."""


class LargestTensor(TorchDispatchMode):
    """Keeps the bytes of the largest tensor that any operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in tree_iter(out):
            if isinstance(one, torch.Tensor) and one.device.type != "meta":
                self.nbytes = max(self.nbytes, one.untyped_storage().nbytes())
        return out


def loaded(folder):
    """The error of a folder, or None; and the bytes of the largest tensor made."""
    with LargestTensor() as seen:
        try:
            build(folder)
        except QuireError as error:
            return error, seen.nbytes
    return None, seen.nbytes


@pytest.fixture(scope="module", params=[*EVERYDAY, *tiers.long(*OTHERS)])
def checkpoint(request, tmp_path_factory):
    """(folder, its tensors, bytes of the largest tensor while it loads)."""
    quantize, config = ALL[request.param]()
    folder = tmp_path_factory.mktemp("whole")
    pair = write_pair(folder, tiny("llama", num_hidden_layers=1), quantize, config)
    error, nbytes = loaded(pair.folder)
    assert error is None
    return pair.folder, load_file(pair.folder / "model.safetensors"), nbytes


@pytest.mark.sampled(3)
def test_damaged_tensors_are_refused_with_the_layer_s_name(checkpoint, tmp_path):
    whole, tensors, usual = checkpoint
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    own = [name for name in tensors if name.startswith(f"{LAYER}.")]
    cases = [(name, damage) for name in own for damage in DAMAGES]
    tried = 0
    for number, (name, damage) in enumerate(cases):
        if number % SHARE != len(own) % SHARE:
            continue
        suffix = name.rpartition(".")[2]
        made = damage(tensors[name])
        if damage is not left_out and made is None:
            continue
        broken = {k: v for k, v in tensors.items() if k != name}
        if made is not None:
            broken[name] = made.contiguous()
        save_file(broken, tmp_path / "model.safetensors")
        error, nbytes = loaded(tmp_path)
        tried += 1
        case = (suffix, damage.__name__, str(error)[:300])
        assert error is not None or suffix in MAY_BE_ABSENT, case
        assert nbytes <= 2 * usual, case
        if error is not None:
            assert "down_proj" in str(error), case
            assert len(str(error)) < MAX_MESSAGE, case
    assert tried


def test_a_tensor_too_many_is_named(checkpoint, tmp_path):
    whole, tensors, _ = checkpoint
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    save_file({**tensors, f"{LAYER}.surplus": torch.zeros(2)}, tmp_path / "model.safetensors")
    error, _ = loaded(tmp_path)
    assert f"unexpected in the checkpoint: {LAYER}.surplus" in str(error)


def test_sizes_that_lie_allocate_nothing(checkpoint, tmp_path):
    """config.json of a model a million times as large, with the small one's tensors."""
    whole, tensors, _ = checkpoint
    hf = json.loads((whole / "config.json").read_text())
    hf |= {"intermediate_size": 1 << 24, "vocab_size": 1 << 26}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    save_file(tensors, tmp_path / "model.safetensors")
    error, nbytes = loaded(tmp_path)
    assert any(words in str(error) for words in ("of the wrong shape", "words a row")), error
    assert nbytes < 1 << 20
