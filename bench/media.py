"""Images through an engine: how many a second, and how soon the first token.

    python bench/media.py [--images 32] [--side 512] [--out 64] [--repeat 2] [--kw JSON]

The model has the shape of Qwen2.5-VL-7B and random weights. Images are unique JPEG files of noise
and lines. ENGINE=vllm measures vLLM. One JSON line a case:

    crowd       `images` requests at once, one image each: requests and output tokens a second
    lone        milliseconds until the first token of one request: `text` of as many tokens, an image
                for the first time, the same image `again`, and a text of as many tokens as that
                computes (`own`: the rest is in the prefix cache)
    parts       milliseconds of an image: decoding and processing; the encoder from its graph, and
                kernel by kernel, with the copy to the device
    beside      milliseconds between tokens of eight streams of text, the 99th percentile and the
                median: alone, while `images` requests of as many tokens of text as an image has are
                always underway, and while as many of one image each are; its engine has a process
                of its own, and the target of a server. `loop ms`: the 99th percentile of how late
                this process is by itself
"""

import argparse
import asyncio
import importlib
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from make_models import tokenizer_files
from PIL import Image

ENGINE = importlib.import_module(os.environ.get("ENGINE", "quire"))
STREAM_TOKENS = 400
IDS = {"vision_start_token_id": 151652, "vision_end_token_id": 151653,
       "image_token_id": 151655, "video_token_id": 151656}  # fmt: skip
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
CONFIG = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen2_5_vl_text", "hidden_size": 3584, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
        "vocab_size": 152064, "max_position_embeddings": 128000, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "eos_token_id": 1,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "model_type": "qwen2_5_vl", "depth": 32, "hidden_size": 1280, "intermediate_size": 3420,
        "num_heads": 16, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "out_hidden_size": 3584, "hidden_act": "silu", "tokens_per_second": 2,
    },
    **IDS,
}  # fmt: skip
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056,
    "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip


def write_model(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    first = IDS["vision_start_token_id"]
    tokenizer_files(folder, first)
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    for number, mark in enumerate(MARKS, first):
        found["model"]["vocab"][mark] = number
        found["added_tokens"].append(found["added_tokens"][0] | {"id": number, "content": mark})
    path.write_text(json.dumps(found))


def photo(seed, side):
    """An image of PIL."""
    return Image.open(io.BytesIO(photo_file(seed, side)))


def photo_file(seed, side):
    """A JPEG file."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (side // 16, side // 16, 3), np.uint8)
    image = Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


def prompt_of(number, image=None, tokens=40):
    words = [1000 + (number * 31 + k) % 5000 for k in range(tokens)]
    if image is None:
        return {"prompt_token_ids": words}
    marks = [IDS["vision_start_token_id"], IDS["image_token_id"], IDS["vision_end_token_id"]]
    return {"prompt_token_ids": marks + words, "multi_modal_data": {"image": image}}


def params(tokens):
    return ENGINE.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)


def timed(llm, prompts, tokens):
    began = time.perf_counter()
    found = llm.generate(prompts, params(tokens), use_tqdm=False)
    return time.perf_counter() - began, found


def crowd(llm, a, turn):
    prompts = [prompt_of(i, photo(1000 * turn + i, a.side)) for i in range(a.images)]
    seconds, found = timed(llm, prompts, a.out)
    return {"requests/s": a.images / seconds, "out tok/s": a.images * a.out / seconds,
            "prompt tokens": len(found[0].prompt_token_ids), "s": seconds}  # fmt: skip


def lone(llm, a, turn):
    found = {"image ms": [], "again ms": [], "text ms": [], "own ms": []}
    for i in range(5):
        image = photo(77_000 + 100 * turn + i, a.side)
        seconds, (one,) = timed(llm, prompt_of(i, image), 1)
        found["image ms"].append(seconds * 1e3)
        seconds, (again,) = timed(llm, prompt_of(i + 500, image), 1)
        found["again ms"].append(seconds * 1e3)
        tokens = len(one.prompt_token_ids)
        own = tokens - (again.num_cached_tokens or 0)
        for at, (name, count) in enumerate((("text ms", tokens), ("own ms", own))):
            text = prompt_of(i + 900 + 2500 * at + 700 * turn, None, count)
            found[name].append(timed(llm, text, 1)[0] * 1e3)
    return {name: statistics.median(some) for name, some in found.items()}


def encode_once(pool, item, runner):
    with torch.inference_mode(), runner.worker.execution_context():
        pool.encode([item])
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def print_kernels(run):
    """The kernels that take most of the device's time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
    kernels = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    for one in kernels[:14]:
        print(f"{one.self_device_time_total:9.0f} us {one.count:5d} x {one.key[:90]}", flush=True)
    print(f"{sum(one.self_device_time_total for one in kernels):9.0f} us in all", flush=True)


def parts(llm, a, turn):
    """Milliseconds of what the first token of a new image waits for, part by part."""
    from quire.media.objects import read_media_data
    from quire.runner.media.encoder_pool import EncodeItem

    pipeline = llm.llm_engine.inputs.media.pipeline
    runner = llm.llm_engine.engine.executor.runner
    model = runner.model
    pool, found = model.media_rows.pool, {"prepare ms": [], "encode ms": [], "kernels ms": []}
    for i in range(6):
        image = photo(900_000 + 100 * turn + i, a.side)
        image.load()
        sources = read_media_data({"image": image})
        began = time.perf_counter()
        (ready,) = pipeline.prepare_blocking(sources, max_tokens=4096)
        found["prepare ms"].append((time.perf_counter() - began) * 1e3)
        rows = ready.expansion.rows
        item = EncodeItem("image", rows, ready.media.tensors, tuple(range(-(-rows // 16))))
        for name, graphs in (("encode ms", pool.graphs), ("kernels ms", None)):
            model.media_encoder.graphs = graphs
            for _ in range(2):  # the first has sizes to compute
                began = time.perf_counter()
                encode_once(pool, item, runner)
                taken = (time.perf_counter() - began) * 1e3
            found[name].append(taken)
        model.media_encoder.graphs = pool.graphs
    if torch.cuda.is_available():
        print_kernels(lambda: encode_once(pool, item, runner))
    return {name: statistics.median(some) for name, some in found.items()}


CASES = {"crowd": crowd, "lone": lone, "parts": parts}


async def stream(llm, number, gaps):
    """Time between the tokens of one stream of text."""
    last = None
    async for _ in llm.generate(prompt_of(10_000 + number, tokens=200), params(STREAM_TOKENS)):
        now = time.perf_counter()
        if last is not None:
            gaps.append((now - last) * 1e3)
        last = now


async def lateness(found):
    """Milliseconds that a task of this process waits beyond what it asked for."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        found.append((time.perf_counter() - began - 0.001) * 1e3)


def percentile(some, part):
    return sorted(some)[int(len(some) * part)]


async def streams(llm, turn):
    gaps, late = [], []
    watch = asyncio.create_task(lateness(late))
    await asyncio.gather(*(stream(llm, 8 * turn + i, gaps) for i in range(8)))
    watch.cancel()
    return {"p99 ms": percentile(gaps, 0.99), "p90 ms": percentile(gaps, 0.9),
            "median ms": statistics.median(gaps), "most ms": max(gaps),
            "loop ms": percentile(late, 0.99)}  # fmt: skip


async def flood(llm, a, prompt_at, counts):
    """Keep `images` requests underway until it is cancelled."""

    async def client():
        while True:
            counts[0] += 1
            async for _ in llm.generate(prompt_at(counts[0]), params(a.out)):
                pass

    await asyncio.gather(*(client() for _ in range(a.images)))


async def beside(llm, a, turn):
    found = {f"alone {name}": value for name, value in (await streams(llm, 3 * turn)).items()}
    files = [photo_file(500_000 + 10_000 * turn + i, a.side) for i in range(a.unique)]
    tokens = 40 + 2 + (a.side // 28) ** 2

    def of_image(number):  # made before: the process that makes one reads no tokens meanwhile
        return prompt_of(number, Image.open(io.BytesIO(files[number % len(files)])))

    kinds = {"text": lambda number: prompt_of(number, tokens=tokens), "image": of_image}
    for at, (kind, prompt_at) in enumerate(kinds.items(), 1):
        counts = [0]
        others = asyncio.create_task(flood(llm, a, prompt_at, counts))
        await asyncio.sleep(2.0)  # all of them are underway
        before = counts[0], time.perf_counter()
        one = await streams(llm, 3 * turn + at)
        seconds = time.perf_counter() - before[1]
        others.cancel()
        await asyncio.gather(others, return_exceptions=True)
        found |= {f"{kind}s {name}": value for name, value in one.items()}
        found[f"{kind}s/s"] = (counts[0] - before[0]) / seconds
    return found


async def run_beside(folder, given, a):
    from quire import AsyncLLM

    llm = AsyncLLM.from_engine_args({"model": str(folder), "inter_token_target_ms": 40} | given)
    try:
        for turn in range(a.repeat):
            show(a, "beside", turn, await beside(llm, a, turn))
    finally:
        llm.shutdown()


def show(a, case, turn, found):
    line = {"model": "qwen2.5-vl-7b", "case": case, "side": a.side, "turn": turn}
    found = {name: round(value, 2) for name, value in found.items()}
    print(json.dumps(line | found), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--out", type=int, default=64)
    parser.add_argument("--unique", type=int, default=600, help="different images of beside")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--cases", default="crowd,lone")
    parser.add_argument("--kw", default="{}", help="options of the engine")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-vl-") as folder:
        write_model(Path(folder))
        given = {"load_format": "dummy", "max_model_len": 4096} | json.loads(a.kw)
        cases = a.cases.split(",")
        llm = ENGINE.LLM(folder, **given) if set(cases) - {"beside"} else None
        for case in cases:
            if case == "beside":
                asyncio.run(run_beside(folder, given, a))
                continue
            for turn in range(a.repeat):
                show(a, case, turn, CASES[case](llm, a, turn))


if __name__ == "__main__":
    main()
