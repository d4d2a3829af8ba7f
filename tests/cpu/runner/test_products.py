"""Each shape of weight is multiplied once per number of rows, the head for decode steps only."""

import torch

from quire.runner.gpu.gemm_warmup import warm_up_gemms
from tests.cpu.engine_of import TINY, model_of


def test_every_shape_is_multiplied_for_every_number_of_rows(monkeypatch):
    model, config = model_of(TINY, torch.float32)
    done = []
    for module in model.modules():
        method = getattr(module, "method", None)
        if method is not None:

            class Noted:
                def apply(self, layer, x, bias, inner=method):
                    done.append((tuple(layer.weight.shape), len(x)))
                    return inner.apply(layer, x, bias)

            monkeypatch.setattr(module, "method", Noted())
    with torch.inference_mode():
        warm_up_gemms(model, [1, 2, 5], 17)
    assert len(done) == len(set(done))
    shapes = {shape for shape, _ in done}
    assert len(shapes) == 5, "qkv, o, gate and up, down, head: whatever the number of layers"
    head = (config.vocab, config.hidden)
    for shape in shapes:
        rows = sorted(n for s, n in done if s == shape)
        assert rows == ([1, 2, 5] if shape == head else [1, 2, 5, 8, 16])
