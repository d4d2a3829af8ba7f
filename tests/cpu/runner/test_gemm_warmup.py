"""Each shape of weight is multiplied once per number of rows, the head for decode steps only."""

import torch

from quire.runner.gpu.gemm_warmup import warm_up_gemms
from tests.cpu.engine_of import TINY, model_of


def test_every_shape_is_multiplied_for_every_number_of_rows(monkeypatch):
    model, config = model_of(TINY, torch.float32)
    done = []
    linears = [m for m in model.modules() if getattr(m, "role", None) in ("linear", "head")]
    for kind in {type(module.weight) for module in linears}:

        def noted(weight, x, *more, real=kind.product, **named):
            done.append((tuple(weight.shape), len(x)))
            return real(weight, x, *more, **named)

        monkeypatch.setattr(kind, "product", noted)
    with torch.inference_mode():
        warm_up_gemms(model, [1, 2, 5], [12], 17)
    assert len(done) == len(set(done))
    shapes = {shape for shape, _ in done}
    assert len(shapes) == 5, "qkv, o, gate and up, down, head: whatever the number of layers"
    head = (config.vocab, config.hidden)
    for shape in shapes:
        rows = sorted(n for s, n in done if s == shape)
        assert rows == ([1, 2, 5] if shape == head else [1, 2, 5, 8, 12, 16])
