"""Where the time until the first token of one request goes, step by step, on this process's clock.

    python bench/media_timeline.py [--side 512] [--rounds 12] [--kw JSON] [--tiny]

The model is that of bench/media.py (Qwen2.5-VL-7B's shape, random weights). Kinds of requests: `image`
for the first time, the same image `again`, a `text` of as many tokens. One JSON line a kind: the median
of milliseconds from the call of generate() at which each place of the code was reached. "gpu" lines are
when the device was there: events, whose clock was compared with the process's before each request.
"""

import argparse
import functools
import json
import statistics
import tempfile
import time
from pathlib import Path

import media
import torch

from quire import LLM
from quire.engine.core.engine_core import EngineCore
from quire.llm import media as llm_media
from quire.llm.engine import LLMEngine
from quire.media.pipeline import MediaPipeline
from quire.media.processor_cache import ProcessorCache
from quire.models.multimodal._qwen_vision import VisionTower
from quire.runner.media.encoder_graphs import EncoderGraphs
from quire.runner.media.encoder_pool import EncoderPool
from quire.runner.model_input import ModelInputBuilder
from quire.runner.model_runner import ModelRunner
from quire.sandbox.pipe import WorkerPipe
from quire.text.media_prompt import MediaReader

PLACES = [
    (llm_media.MediaFeed, "inputs", "1 media of the prompt"),
    (MediaReader, "start", "2 read image (decoded)"),
    (MediaPipeline, "_process", "3 process in the loop"),
    (ProcessorCache, "find", "4 digest made, cache read"),
    (WorkerPipe, "send", "5 sent to worker"),
    (WorkerPipe, "receive", "6 answer of worker"),
    (ProcessorCache, "put", "7 kept"),
    (MediaReader, "place", "8 tokens placed"),
    (LLMEngine, "submit", "9 submitted"),
    (EngineCore, "_submit_step", "a plan and submit"),
    (ModelInputBuilder, "build", "b inputs built"),
    (ModelRunner, "launch", "c launched"),
    (EncoderPool, "encode", "d encoder"),
    (EncoderPool, "_load", "e tensors to the device"),
    (VisionTower, "patches_of", "f patches"),
    (EncoderGraphs, "run", "g encoder's graph"),
]
ON_DEVICE = ("c launched", "d encoder", "f patches", "g encoder's graph")
CUDA = torch.cuda.is_available()


class Timeline:
    """The first time that a request reached each place."""

    def __init__(self):
        self.host, self.device = {}, {}
        self.began, self.base = 0.0, None

    def begin(self):
        self.host, self.device = {}, {}
        if CUDA:
            torch.cuda.synchronize()
            self.base = torch.cuda.Event(enable_timing=True)
            self.base.record()
            torch.cuda.synchronize()
        self.began = time.perf_counter()

    def mark(self, name, on_device=False):
        self.host.setdefault(name, (time.perf_counter() - self.began) * 1e3)
        if on_device and CUDA and name not in self.device:
            self.device[name] = torch.cuda.Event(enable_timing=True)
            self.device[name].record()

    def found(self):
        if CUDA:
            torch.cuda.synchronize()
        device = {f"gpu {name}": self.base.elapsed_time(one) for name, one in self.device.items()}
        return self.host | device

    def watch(self, owner, method, name):
        call = getattr(owner, method)
        on_device = name in ON_DEVICE

        @functools.wraps(call)
        def watched(*args, **kwargs):
            self.mark(f"{name}: begins", on_device)
            try:
                return call(*args, **kwargs)
            finally:
                self.mark(f"{name}: ends", on_device)

        if method == "_process":

            @functools.wraps(call)
            async def watched(*args, **kwargs):
                self.mark(f"{name}: begins")
                try:
                    return await call(*args, **kwargs)
                finally:
                    self.mark(f"{name}: ends")

        setattr(owner, method, watched)


def tiny():
    text = media.CONFIG["text_config"]
    text |= {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 64}  # fmt: skip
    text["rope_scaling"]["mrope_section"] = [2, 3, 3]
    media.CONFIG["vision_config"] |= {"depth": 1, "hidden_size": 32, "intermediate_size": 32,
                                      "num_heads": 2, "out_hidden_size": 64}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--kw", default="{}", help="options of the engine")
    parser.add_argument("--tiny", action="store_true", help="a shape for any machine")
    a = parser.parse_args()
    if a.tiny:
        tiny()
    timeline = Timeline()
    with tempfile.TemporaryDirectory(prefix="quire-vl-") as folder:
        media.write_model(Path(folder))
        llm = LLM(folder, load_format="dummy", max_model_len=4096, **json.loads(a.kw))
        for owner, method, name in PLACES:
            timeline.watch(owner, method, name)
        found = {"image": [], "again": [], "text": []}
        for i in range(a.rounds + 2):
            image = media.photo(77_000 + i, a.side)
            length = 42 + (a.side // 28) ** 2
            prompts = {"image": media.prompt_of(i, image), "again": media.prompt_of(i + 500, image),
                       "text": media.prompt_of(i + 900, None, length)}  # fmt: skip
            for kind, prompt in prompts.items():
                timeline.begin()
                llm.generate(prompt, media.params(1), use_tqdm=False)
                timeline.mark("z generate: ends")
                found[kind].append(timeline.found())
    for kind, rounds in found.items():
        rounds = rounds[2:]
        names = {name for one in rounds for name in one}
        places = {name: [one[name] for one in rounds if name in one] for name in names}
        median = {name: round(statistics.median(some), 2) for name, some in places.items()}
        line = {
            "case": "timeline",
            "kind": kind,
            "side": a.side,
            "ms": dict(sorted(median.items())),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
