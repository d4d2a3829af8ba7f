"""Tiny models of transformers with image towers, and their processors: what ours are compared with.

A family is a function that returns (config, processor) of transformers. Special tokens have the
ids that the config names.
"""

import json
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from quire.config.facts import read_hf_config
from quire.media.image_ops import from_tensor
from quire.media.processor import DecodedImage, ProcessorFiles, processor_type
from quire.models.base import EncoderInput, StepInputs
from quire.models.build import build_model, read_model_config
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import scale_weights

VOCAB = 199
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
FAMILIES = {}
WORDS = [f"w{i}" for i in range(3, 100)]


def family(make):
    FAMILIES[make.__name__] = make
    return make


def tokenizer_of(tokens, **named):
    """A tokenizer of words. tokens: text -> id of special tokens; named: of extra special ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **{word: i for i, word in enumerate(WORDS, 3)}}
    vocab |= tokens
    made = Tokenizer(models.WordLevel(vocab | {"<unk>": 198}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        unk_token="<unk>", extra_special_tokens=named,
    )  # fmt: skip
    found.add_special_tokens({"additional_special_tokens": list(tokens)}, False)
    return found


def image(height, width, seed=0):
    """Smooth noise, so that filters differ by little."""
    from PIL import Image

    small = np.random.default_rng((height, width, seed)).integers(0, 256, (9, 9, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@dataclass
class Pair:
    """A model of transformers and ours, of one folder, and both processors."""

    theirs: object
    processor: object
    folder: object

    @cached_property
    def hf(self):
        return json.loads((self.folder / "config.json").read_text())

    @cached_property
    def ours(self):
        model_type, config = read_model_config(read_hf_config(self.folder))
        model = build_model(
            model_type, config, folder=self.folder, dtype=torch.float32, progress=False
        )
        return model, config

    @cached_property
    def own_processor(self):
        tokenizer = self.processor.tokenizer
        vocabulary = tokenizer.get_vocab()
        images = self.processor.image_processor.to_dict()
        stated = {
            key: value
            for key, value in self.processor.to_dict().items()
            if isinstance(value, (str, int, bool))
        }
        files = ProcessorFiles(
            self.hf,
            {"image": images},
            stated,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            vocabulary.get,
        )
        return processor_type(self.hf["model_type"])(files)

    def process(self, images, **kwargs):
        """What our processor makes of PIL images."""
        return [self.own_processor.process(DecodedImage(np.asarray(one)), kwargs) for one in images]

    def expanded(self, ids, items):
        """Token ids with placeholders replaced, and (start, count) of the rows of each item."""
        ids, runs = list(ids), []
        at = 0
        for index, item in enumerate(items, 1):
            made = self.own_processor.expand(item, index)
            size = len(made.replaces)
            at = next(i for i in range(at, len(ids)) if tuple(ids[i : i + size]) == made.replaces)
            ids[at : at + size] = made.token_ids
            runs += [[(at + offset, count) for offset, count in made.runs]]
            at += len(made.token_ids)
        return ids, runs

    def rows(self, items):
        """What our encoder makes of processed items."""
        inputs = [
            EncoderInput(
                item.modality,
                {one.name: torch.from_numpy(from_tensor(one).copy()) for one in item.tensors},
            )
            for item in items
        ]
        with torch.inference_mode():
            return self.ours[0].media_encoder.encode(inputs)

    @torch.inference_mode()
    def logits(self, ids, runs, rows):
        """Logits of a prompt in whose runs the rows replace the embeddings."""
        model, config = self.ours
        embeds = model.embed_tokens(torch.tensor(ids, dtype=torch.int32)).clone()
        for own, places in zip(rows, runs, strict=True):
            at = torch.cat([torch.arange(start, start + count) for start, count in places])
            embeds[at] = own
        stepper = Stepper(Embedded(model, embeds), config, max_tokens=len(ids) + 16)
        return stepper.logits(ids)


class Embedded:
    """A model whose next step takes these embeddings."""

    def __init__(self, model, embeds):
        self._model, self._embeds = model, embeds
        self.modules, self.logits = model.modules, model.logits

    def __call__(self, step: StepInputs):
        return self._model(replace(step, inputs_embeds=self._embeds))


def made(name, folder):
    """The pair of a family, with random weights, saved in the folder."""
    from transformers import AutoModelForMultimodalLM

    config, processor = FAMILIES[name]()
    torch.manual_seed(1)
    model = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager").eval()
    scale_weights(model, 0.3 if "gemma" in name else 2.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return Pair(model, processor, folder)


def clip_images(side, **more):
    from transformers import CLIPImageProcessorPil

    size = {"height": side, "width": side}
    return CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=size, **more)


@family
def llava(vision=None, **more):
    from transformers import AutoConfig, LlavaProcessor

    vision = vision or {"model_type": "clip_vision_model", "hidden_act": "quick_gelu"}
    config = AutoConfig.for_model(
        "llava", text_config=TEXT | {"model_type": "llama"}, vision_config=VISION | vision,
        image_token_index=150, image_seq_length=16, **more,
    )  # fmt: skip
    processor = LlavaProcessor(
        clip_images(56), tokenizer_of({"<image>": 150}), patch_size=14,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
    )  # fmt: skip
    return config, processor


@family
def llava_of_siglip():
    config, processor = llava(
        {"model_type": "siglip_vision_model"},
        vision_feature_layer=[1, -1],
        vision_feature_select_strategy="full",
    )
    processor.num_additional_image_tokens = 0
    return config, processor
