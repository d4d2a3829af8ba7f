"""The pipeline with real worker processes: caches, tenants, limits, and workers that end."""

import asyncio
import io
import os
import signal
import time

import numpy as np
import pytest
from PIL import Image

from quire.core.types import MediaTensor
from quire.engine.startup.text_setup import start_media_worker
from quire.errors import EngineError, Overloaded, RequestError, Unsupported
from quire.media.held_bytes import HeldBytes
from quire.media.items import MediaSource
from quire.media.limits import MediaLimits
from quire.media.objects import read_media_data
from quire.media.pipeline import MediaPipeline, PipelineSettings
from quire.media.processor import DecodedImage, ProcessedMedia, ProcessorFiles
from quire.media.processor_cache import ProcessorCache, framed_digest
from quire.sandbox.tenant_turns import TenantShare
from tests.media.conftest import ROWS
from tests.media.files import data_url, encode, png, png_with_size

WHERE = "messages[0].content[0]"
NOISE = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
PHOTO = encode(Image.fromarray(NOISE))


def part(data=None, **more):
    return MediaSource("image", WHERE, data=data, **more)


def prepare(pipeline, *parts, max_tokens=1000, **more):
    return pipeline.prepare_blocking(parts, max_tokens=max_tokens, **more)


def test_an_image_becomes_pixels_and_tokens(pipeline):
    (item,) = prepare(pipeline, MediaSource("image", WHERE, url=data_url(png())))
    assert item.media.tensors[0].shape == (1, 28, 28, 3)
    assert item.expansion.rows == ROWS
    placed = pipeline.place([1, 3, 5], [item])
    assert placed.ids == (1, *[3] * ROWS, 5)
    assert placed.items[0].tensors == item.media.tensors


def test_a_file_and_the_same_image_in_python_have_equal_pixels(pipeline):
    image = Image.open(io.BytesIO(PHOTO))
    (one,) = prepare(pipeline, part(PHOTO))
    (two,) = prepare(pipeline, *read_media_data({"image": image}))
    assert one.media.tensors == two.media.tensors


def test_equal_items_are_processed_once_also_at_the_same_time(make_pipeline):
    pipeline = make_pipeline(workers=2)
    ran = []
    run = pipeline._run

    async def counting(*given):
        ran.append(given)
        return await run(*given)

    pipeline._run = counting

    async def eight():
        each = [pipeline.prepare([part(png())], max_tokens=99) for _ in range(8)]
        return await asyncio.gather(*each)

    found = asyncio.run(eight())
    assert len({items[0].digest for items in found}) == 1
    prepare(pipeline, part(png()))
    assert len(ran) == 1


def test_a_request_that_is_cancelled_does_not_end_what_others_wait_for(make_pipeline):
    pipeline = make_pipeline()

    async def both():
        first = asyncio.ensure_future(pipeline.prepare([part(png())], max_tokens=99))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(pipeline.prepare([part(png())], max_tokens=99))
        await asyncio.sleep(0.01)
        first.cancel()
        return await second

    assert asyncio.run(both())[0].expansion.rows == ROWS


def test_digests_separate_tenants_contents_and_options(pipeline):
    base = prepare(pipeline, part(png()))[0].digest
    assert prepare(pipeline, part(png()))[0].digest == base
    others = [
        prepare(pipeline, part(png()), root=b"a")[0].digest,
        prepare(pipeline, part(png(41)))[0].digest,
        prepare(pipeline, *read_media_data({"image": np.zeros((4, 6, 3), np.uint8)}))[0].digest,
        prepare(pipeline, *read_media_data({"image": np.zeros((6, 4, 3), np.uint8)}))[0].digest,
    ]
    assert len({base, *others}) == 5
    assert framed_digest(b"ab", b"c") != framed_digest(b"a", b"bc")


def test_a_uuid_names_an_item_of_one_tenant(make_pipeline):
    pipeline = make_pipeline()
    with pytest.raises(RequestError, match="no item with the uuid 'cat' is cached"):
        prepare(pipeline, part(uuid="cat"))
    first = prepare(pipeline, part(png(), uuid="cat"), root=b"a")[0]
    assert prepare(pipeline, part(uuid="cat"), root=b"a")[0].digest == first.digest
    with pytest.raises(RequestError, match="is cached: send its content"):
        prepare(pipeline, part(uuid="cat"), root=b"b")
    # A name does not stand for other content that is sent.
    assert prepare(pipeline, part(png(9), uuid="cat"), root=b"a")[0].digest != first.digest


def test_keys_of_one_tenant_share_items_and_no_uuids(pipeline):
    first = prepare(pipeline, part(png(), uuid="cat"), names=b"key")[0]
    assert prepare(pipeline, part(png(), uuid="cat"), names=b"other")[0].digest == first.digest
    prepare(pipeline, part(png(9), uuid="cat"), names=b"other")
    assert prepare(pipeline, part(uuid="cat"), names=b"key")[0].digest == first.digest
    with pytest.raises(RequestError, match="is cached: send its content"):
        prepare(pipeline, part(uuid="cat"), names=b"third")


def test_the_cache_is_bounded_and_drops_the_least_recent():
    def item(size):
        return ProcessedMedia("image", (MediaTensor("a", "uint8", (size,), bytes(size)),))

    cache = ProcessorCache(10_000)
    for i in range(3):
        cache.put(bytes([i]), item(3000), name=bytes([i]))
        assert cache.find(b"\0") is not None or i == 2
    assert cache.find(b"\1") is None
    assert cache.named(b"\1") is None
    assert cache.named(b"\2") == b"\2"
    assert cache.num_bytes <= 10_000
    cache.put(b"big", item(20_000))
    assert cache.find(b"big") is None
    assert cache.find(b"\2") is not None
    ProcessorCache(0).put(b"a", item(1))


def test_counts_are_checked_before_anything_is_read(make_pipeline):
    pipeline = make_pipeline(limits=MediaLimits(counts={"image": 1}))
    with pytest.raises(
        RequestError, match=r"At most 1 image\(s\) may be .* in one prompt"
    ) as refused:
        prepare(pipeline, *[part(b"bad")] * 2)
    assert "--limit-mm-per-prompt" in str(refused.value)
    with pytest.raises(RequestError, match="reads no video; beside text it reads image"):
        prepare(pipeline, MediaSource("video", WHERE, data=b""))
    began = time.monotonic()
    with pytest.raises(RequestError, match=r"At most 999 image\(s\)"):
        prepare(make_pipeline(), *[part(b"bad")] * 2000)
    assert time.monotonic() - began < 1


def test_items_that_exceed_the_context_stop_early(pipeline):
    parts = [part(png(20 + i)) for i in range(50)]
    with pytest.raises(RequestError, match="the media of the prompt take 12 tokens or more"):
        prepare(pipeline, *parts, max_tokens=2 * ROWS + 1)


@pytest.mark.parametrize("data", [b"text", PHOTO[:-200], png_with_size(60_000, 60_000)])
def test_a_bad_file_names_its_part(pipeline, data):
    bad = MediaSource("image", "messages[0].content[1]", data=data)
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content\[1\] ") as refused:
        prepare(pipeline, part(png()), bad)
    assert refused.value.param == "messages"


def test_options_are_checked_by_name_and_range(make_pipeline):
    pipeline = make_pipeline()
    for kwargs in ({"max_pixels": 10**12}, {"unknown": 1}, 5):
        with pytest.raises(RequestError, match="mm_processor_kwargs"):
            prepare(pipeline, part(png()), kwargs=kwargs)
    for given in ({"video": {"num_frames": -2}}, {"video": {"fps": float("nan")}}, {"x": {}}, 5,
               {"video": {"num_frames": 10**9}}, {"image": {"a": 1}}):  # fmt: skip
        with pytest.raises(RequestError, match="media_io_kwargs"):
            prepare(pipeline, part(png()), io_kwargs=given)
    with pytest.raises(RequestError, match="this model takes none"):
        make_pipeline(kwargs={"max_pixels": 4})


def test_embeddings_need_the_flag_the_width_and_finite_numbers(make_pipeline):
    rows = np.ones((ROWS, 8), np.float32)
    with pytest.raises(Unsupported, match="--enable-mm-embeds"):
        prepare(make_pipeline(), *read_media_data({"image": rows}))
    pipeline = make_pipeline(takes_embeds=True)
    if not pipeline.processor.takes_embeds:
        with pytest.raises(Unsupported, match="takes no embeddings"):
            prepare(pipeline, *read_media_data({"image": rows}))
        return
    (item,) = prepare(pipeline, *read_media_data({"image": rows}))
    assert (item.media.tensors[0].name, item.expansion.rows) == ("embeds", ROWS)
    for bad in (rows[:, :7], rows * np.nan, rows[:2]):
        with pytest.raises(RequestError, match=r"multi_modal_data.image\[0\]"):
            prepare(pipeline, *read_media_data({"image": bad}))


def test_arrays_are_refused_by_families_that_read_none(make_pipeline):
    given = read_media_data({"image": {"heights": np.ones((4, 4))}})
    with pytest.raises(RequestError, match=r"image\[0\] is a dict, .* one entry of embeddings"):
        prepare(make_pipeline(), *given)


# -- workers --------------------------------------------------------------------------------------


def test_a_worker_that_was_killed_is_replaced(make_pipeline):
    pipeline = make_pipeline(cache_bytes=0)
    prepare(pipeline, part(png()))
    for pid in pipeline._pool.idle_workers:
        os.kill(pid, signal.SIGKILL)
    assert prepare(pipeline, part(png(7)))[0].expansion.rows == ROWS


def test_an_image_over_the_memory_of_a_worker_is_an_error_of_its_own(make_pipeline, monkeypatch):
    monkeypatch.setattr("quire.media.pipeline.MEMORY_LIMIT", 32 << 20)
    pipeline = make_pipeline(cache_bytes=0)
    large = png_with_size(6000, 6000, bytes(6000 * (1 + 3 * 6000)))
    with pytest.raises(RequestError, match=r"takes more than 32 MiB|crashed, twice"):
        prepare(pipeline, part(large))
    assert prepare(pipeline, part(png()))[0].expansion.rows == ROWS


def test_a_worker_has_no_files_no_network_and_no_secrets(make_pipeline, monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    pipeline = make_pipeline()
    prepare(pipeline, part(png()))
    (pid,) = pipeline._pool.idle_workers
    with open(f"/proc/{pid}/limits") as limits:
        assert next(line.split()[3] for line in limits if line.startswith("Max open files")) == "1"
    with open(f"/proc/{pid}/environ") as environment:
        assert "secret" not in environment.read()


def test_workers_that_do_not_start_are_errors_of_the_server(make_pipeline):
    def fails():
        raise OSError("no process can be had")

    with pytest.raises(EngineError, match="no process can be had"):
        prepare(make_pipeline(fails), part(png()))


def test_pixels_that_an_encoder_resizes_need_no_worker():
    """A file does, and so does an image that is made smaller here."""
    vision = {"depth": 1, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = {"model_type": "qwen2_5_vl", "vision_config": vision, "image_token_id": 5}
    asked = []

    def launch():
        asked.append(1)
        raise OSError("no process")

    settings = PipelineSettings(cache_bytes=1 << 24)
    pipeline = MediaPipeline("qwen2_5_vl", ProcessorFiles(config), settings, launch)
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    source = MediaSource("image", WHERE, decoded=DecodedImage(pixels))
    want = pipeline.processor.process(DecodedImage(pixels.copy()), {})
    (item,) = prepare(pipeline, source)
    assert item.media == want
    pixels[:] = 0
    assert item.media == want, "it is the caller's memory"
    fixed = np.asarray(Image.linear_gradient("L").convert("RGB"))  # memory that nothing can change
    (item,) = prepare(pipeline, MediaSource("image", WHERE, decoded=DecodedImage(fixed)))
    assert np.shares_memory(np.frombuffer(item.media.tensors[0].data, np.uint8), fixed)
    turned = DecodedImage(fixed[::-1])
    (item,) = prepare(pipeline, MediaSource("image", WHERE, decoded=turned))
    assert item.media == pipeline.processor.process(turned, {})
    assert not asked
    for other, kwargs in ((part(png()), {}), (source, {"max_pixels": 3136})):
        with pytest.raises(EngineError, match="no process"):
            prepare(pipeline, other, kwargs=kwargs)
    narrow = DecodedImage(np.zeros((8000, 28, 3), np.uint8))
    with pytest.raises(RequestError, match=r"200 times"):
        prepare(pipeline, MediaSource("image", WHERE, decoded=narrow))
    pipeline.close()


def test_too_many_items_of_a_tenant_that_wait_are_refused(make_pipeline, monkeypatch):
    pipeline = make_pipeline(cache_bytes=0, launch=start_media_worker)
    monkeypatch.setattr(pipeline._pool, "_max_waiting", 2)

    async def many():
        tenants = [b"a"] * 5 + [b"b"]
        each = [pipeline.prepare([part(png(5 + i))], max_tokens=99, share=TenantShare(one))
                for i, one in enumerate(tenants)]  # fmt: skip
        return await asyncio.gather(*each, return_exceptions=True)

    found = asyncio.run(many())
    assert [isinstance(one, Overloaded) for one in found] == [False] * 3 + [True] * 2 + [False]


def test_bytes_of_requests_that_wait_are_bounded_and_leave_space_for_another_tenant(make_pipeline):
    pipeline = make_pipeline(cache_bytes=0)
    size = len(png(5))
    pipeline._held = HeldBytes(5 * size)

    async def many():
        tenants = [b"a"] * 4 + [b"b"]
        each = [pipeline.prepare([part(png(5 + i))], max_tokens=99, share=TenantShare(one))
                for i, one in enumerate(tenants)]  # fmt: skip
        offline = pipeline.prepare([part(png(20))], max_tokens=99)
        return await asyncio.gather(*each, offline, return_exceptions=True)

    found = asyncio.run(many())
    assert [isinstance(one, Overloaded) for one in found] == [False] * 2 + [True] * 2 + [False] * 2
    assert "wait, 0 of them of this key" in str(found[2])
    assert not pipeline._held._held, "all is given back"


def test_an_item_without_bytes_is_not_refused_beside_others_that_hold_all():
    held = HeldBytes(10)
    with held.hold(b"a", "messages") as grow:
        grow(10)
        grow(0)  # a uuid of what is cached
        with pytest.raises(Overloaded, match=r"leaves no space for 1 more"):
            grow(1)


def test_items_that_all_callers_left_are_not_processed(make_pipeline):
    pipeline = make_pipeline(cache_bytes=0)
    prepare(pipeline, part(png()))

    async def cancelled():
        large = png_with_size(5000, 5000, bytes(5000 * (1 + 3 * 5000)))
        first = asyncio.ensure_future(pipeline.prepare([part(large)], max_tokens=99))
        await asyncio.sleep(0.05)
        others = [asyncio.ensure_future(pipeline.prepare([part(png(7))], max_tokens=99))
                  for _ in range(2)]  # fmt: skip
        await asyncio.sleep(0.05)
        waiting = pipeline._pool._turns.num_waiting
        found = [waiting(b"")]
        for one in others:
            one.cancel()
            await asyncio.sleep(0.01)
            found.append(waiting(b""))
        await first
        return found

    assert asyncio.run(cancelled()) == [1, 1, 0]
    assert not pipeline._running


def test_decoded_images_are_not_copied_into_the_cache_key_by_identity(pipeline):
    pixels = np.zeros((4, 6, 3), np.uint8)
    media = MediaSource("image", WHERE, decoded=DecodedImage(pixels))
    one = prepare(pipeline, media)[0].digest
    pixels[0, 0] = 9
    assert prepare(pipeline, media)[0].digest != one


def test_options_that_follow_from_a_prompt_belong_to_the_digest(make_pipeline, monkeypatch):
    pipeline = make_pipeline()
    kind = type(pipeline.processor)
    monkeypatch.setattr(kind, "prompt_kwargs", lambda self, items: {"count": len(items)})
    alone = prepare(pipeline, part(png()))[0].digest
    first, second = prepare(pipeline, part(png()), part(png(9)))
    assert len({alone, first.digest, second.digest}) == 3
    assert prepare(pipeline, part(png(8)), part(png()))[1].digest == first.digest
