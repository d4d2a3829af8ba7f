"""Archives of torch.save(): tensors are read as they were, and everything else is refused."""

import base64
import contextlib
import io
import pickle
import random
import re
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

from quire.errors import RequestError
from quire.server.formats.torch_archive import read_tensor
from tests import tiers

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def saved(value, **how):
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def text(data):
    return base64.b64encode(data).decode()


def refusal(data):
    with pytest.raises(RequestError, match=r"^prompt_embeds ") as caught:
        read_tensor(data if isinstance(data, str) else text(data))
    assert caught.value.param == "prompt_embeds"
    return str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_read_as_they_were_saved(dtype):
    whole = torch.randn(9, 7).to(dtype)
    views = (whole, whole[3:], whole[:, 2:5], whole.T, whole[::2], whole[None], whole[:0])
    for view in (*views, whole.clone().requires_grad_()):
        found = np.array(read_tensor(text(saved(view))))
        assert torch.equal(torch.from_numpy(found).to(dtype), view)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_are_read_where_they_are_sizes(dtype):
    sizes = torch.tensor([1, 4, -6], dtype=dtype)
    assert read_tensor(text(saved(sizes)), integers=True).tolist() == [1, 4, -6]
    refused = "must be of float16, bfloat16, float32 or float64, got (int|long)"
    assert re.search(refused, refusal(saved(sizes)))
    with pytest.raises(RequestError, match=r"must be of int32, int64, float16, .*, got bool"):
        read_tensor(text(saved(sizes > 0)), integers=True)


def test_the_label_of_a_device_says_only_where_the_tensor_was():
    data = saved(torch.ones(2, 3))
    assert (
        read_tensor(text(rewritten(data, pickled=lambda b: b.replace(b"cpu", b"gpu")))).sum() == 6
    )


def rewritten(data, pickled=None, compressed=False, **files):
    """The archive with other files. pickled: a change of data.pkl."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            kept = files.pop(name.partition("/")[2].replace(".", "_"), old.read(name))
            if pickled and name.endswith("data.pkl"):
                kept = pickled(kept)
            if kept is not None:
                new.writestr(name, kept, zipfile.ZIP_DEFLATED if compressed else None)
        for name, kept in files.items():
            new.writestr(f"archive/{name}", kept)
    return made.getvalue()


class Shell:
    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (torch.ones(3).expand(4, 3), "share memory"),
        (torch.ones(2, 8).as_strided((4, 3), (2, 1)), "share memory"),
        (torch.ones(2, 2).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.ones(2, 2, dtype=torch.int32), "got int"),
        (torch.ones(2, 2, dtype=torch.complex64), "got complexfloat"),
        (torch.ones(2, 2).to(torch.float8_e4m3fn), "_rebuild_tensor_v3"),
        (torch.ones(2, 2, device="meta"), "_rebuild_meta_tensor"),
        (torch.nn.Parameter(torch.ones(2, 2)), "_rebuild_parameter"),
        ([torch.ones(2, 2)], "one dense tensor"),
        ({"a": torch.ones(2, 2)}, "one dense tensor"),
        ("a text", "one dense tensor"),
        (Shell(), "one dense tensor|saved by exec"),
    ],
)
def test_other_values_are_refused(value, problem):
    assert re.search(problem, refusal(saved(value)))


@pytest.mark.filterwarnings("ignore")  # torch deprecates both
def test_nested_and_quantized_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    assert "_rebuild_nested_tensor" in refusal(saved(nested))
    quantized = torch.quantize_per_tensor(torch.ones(2, 2), 1, 0, torch.qint8)
    assert "one dense tensor" in refusal(saved(quantized))


def test_what_is_no_archive_is_refused():
    assert "must be base64" in refusal("no base64!")
    assert "must be base64" in refusal("汉字")
    assert "must be base64" in refusal("AAA=AAAA")
    assert "is no archive" in refusal("")
    assert "is no archive" in refusal(pickle.dumps(Shell()))
    assert "is no archive" in refusal(saved(torch.ones(2), _use_new_zipfile_serialization=False))
    assert "broken archive" in refusal(saved(torch.ones(2))[:-30])
    many = rewritten(saved(torch.ones(2)), **{f"f{i}": b"" for i in range(100)})
    assert "more than 64 files" in refusal(many)


SHAPE, HUGE = b"K\x02K\x03", b"\x8a\x09" + b"\x00" * 8 + b"\x01"  # [2, 3], 2**64


def described(old, new):
    return {"pickled": lambda description: description.replace(old, new, 1)}


def test_archives_that_torch_does_not_write_are_refused():
    data = saved(torch.ones(2, 3))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        description = archive.read("archive/data.pkl")
    for changed, problem in (
        (dict(compressed=True), "data.pkl' compressed"),
        (dict(data_pkl=None), "without 'data.pkl"),
        (dict(data_pkl=description + b"x" * (1 << 14)), "describes more"),
        (dict(data_pkl=b""), "one dense tensor"),
        (dict(data_pkl=b"."), "one dense tensor"),
        (dict(data_pkl=pickle.dumps(Shell(), 2)), "one dense tensor|saved by exec"),
        (dict(data_pkl=b"\x80\x02r\xff\xff\xff\x7f."), "one dense tensor"),  # a memo of 2**31
        (dict(byteorder=b"big"), "big-endian"),
        (described(SHAPE, b"K\x03K\x03"), "storage has 6"),
        (described(b"K\x00" + SHAPE, b"K\x01" + SHAPE), "storage has 6"),
        (described(SHAPE, b"J\xff\xff\xff\xffK\x03"), "that no tensor has"),
        (described(SHAPE, HUGE + b"K\x03"), "that no tensor has"),
        (described(SHAPE, b"K\x00" + HUGE), "that no tensor has"),
    ):
        found = refusal(rewritten(data, **changed))
        assert re.search(problem, found), (changed, found)


def test_a_bomb_takes_no_memory():
    data = rewritten(saved(torch.ones(2, 3)), compressed=True)
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            archive.writestr(zipfile.ZipInfo("archive/data.pkl"), old.read("archive/data.pkl"))
        archive.writestr("archive/data/0", b"\0" * (64 << 20))
    tracemalloc.start()
    assert "data/0' compressed" in refusal(bomb.getvalue())
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_random_damage_is_refused_or_read():
    rng = random.Random(1)
    data = saved(torch.ones(5, 4))
    for _ in range(tiers.amount(1500, 50_000)):
        broken = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8])):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        with contextlib.suppress(RequestError):
            assert read_tensor(text(broken)).size <= 20
