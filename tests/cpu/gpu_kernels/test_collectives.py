"""A collective on the GPU reads what the ops before it return, though fusion still holds them."""

import pytest
import torch

from quire.distributed.collectives import ProcessGroupCollectives
from quire.distributed.mesh import Mesh
from quire.kernels.framework import op
from quire.kernels.framework.op import OPS
from quire.kernels.linear import linear
from quire.layers import LMHead, RowLinear

pytest.importorskip("triton", reason="triton is not installed")


class Twin:
    """A process group of two ranks that hold the same values. NaN marks what no kernel wrote."""

    def size(self):
        return 2

    def wait(self):
        pass

    def allreduce(self, tensors):
        assert not tensors[0].isnan().any(), "an unwritten buffer is reduced"
        tensors[0].mul_(2)
        return self

    def broadcast(self, x, root):
        assert not x.isnan().any(), "an unwritten buffer is sent"
        return self

    def _allgather_base(self, out, x):
        assert not x.isnan().any(), "an unwritten buffer is gathered"
        out.copy_(torch.cat([x, x]))
        return self


@pytest.fixture
def on_gpu(monkeypatch):
    """Ops take the path of CUDA tensors; the result of a product is NaN until it is launched."""
    body = OPS["linear"].gpu
    real = body.outputs
    monkeypatch.setattr(op, "_device_type", lambda first: "cuda")
    monkeypatch.setattr(body, "_outputs", lambda *args: real(*args).fill_(float("nan")))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.usefixtures("on_gpu")
def test_a_collective_behind_a_product_of_few_rows_reads_its_result(rows):
    torch.manual_seed(3)
    comm, x = ProcessGroupCollectives(Twin()), torch.randn(rows, 64).bfloat16()
    row, head = RowLinear(128, 32), LMHead(63, 64)
    for layer in (row, head):
        layer.shard(Mesh(tp=2), comm)
        layer.set_param("weight", torch.randn(32, 64).bfloat16())
    want = (x @ row.weight.t()).float()
    torch.testing.assert_close(row(x).float(), 2 * want, atol=0.2, rtol=2e-2)
    logits = head(x)
    assert logits.shape == (rows, 63)
    assert torch.equal(logits[:, :31], logits[:, 32:])
    product = linear(x, row.weight)
    torch.testing.assert_close(comm.broadcast(product).float(), want, atol=0.1, rtol=2e-2)
