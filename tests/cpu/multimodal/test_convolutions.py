"""Convolutions of encoders as products of matrices, as a GPU computes them in float32."""

import pytest
import torch
from torch import nn

from quire.layers import Conv1d, Conv2d


def filled(layer, *shape):
    layer.weight = nn.Parameter(torch.randn(shape))
    layer.bias = nn.Parameter(torch.randn(shape[0]))
    return layer


@pytest.mark.parametrize("sizes", [(3, 1, 20), (3, 2, 20), (3, 2, 21), (5, 3, 17)])
@torch.inference_mode()
def test_a_convolution_over_time_is_a_product(sizes):
    width, stride, length = sizes
    layer = filled(Conv1d(6, 9, width, stride=stride), 9, 6, width)
    x = torch.randn(6, length)
    want = layer(x)
    assert layer.product(x).shape == want.shape
    assert (layer.product(x) - want).abs().max().item() < 1e-4


@pytest.mark.parametrize("sizes", [(7, 4, 3), (3, 2, 1)])
@torch.inference_mode()
def test_a_convolution_of_a_map_is_a_product(sizes):
    kernel, stride, padding = sizes
    layer = filled(Conv2d(3, 8, kernel, stride, padding), 8, 3, kernel, kernel)
    x = torch.randn(2, 30, 41, 3)
    want = layer(x)
    got = layer.product(x.permute(0, 3, 1, 2))
    assert got.shape == want.shape
    assert (got - want).abs().max().item() < 1e-4
