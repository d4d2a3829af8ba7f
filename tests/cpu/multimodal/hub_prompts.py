"""Prompts of models whose code is on the hub alone: their processors on a tokenizer of bytes.

The form of a prompt with all tokens of its items is written as text, as the model's description has
it; its encoding is what the tokens of a prompt with placeholders must be.
"""

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.media.expand import ReadyItem, place_items
from quire.media.image_ops import from_tensor
from quire.media.processor import DecodedImage, ProcessorFiles, processor_type
from quire.text.media_prompt import MediaInputs, tokenize_prompt
from quire.text.tokenizing.tokenizer import load_tokenizer
from tests.cpu.multimodal.families import image

MERGES = [(">", "<"), ("<", "|"), ("|", ">"), ("1", "2")]


def tokenizer_of(folder, special):
    """Bytes, a few merges, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = [*alphabet, *(a + b for a, b in MERGES)]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(vocab)}, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(one, special=True) for one in special])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return load_tokenizer(folder)


class HubPrompts:
    """The processor of a model. config: its config.json. images: of preprocessor_config.json."""

    def __init__(self, folder, config, special, images=None):
        self.tokenizer = tokenizer_of(folder, special)
        files = ProcessorFiles(
            config,
            {"image": images or {}},
            {},
            encode=lambda text: self.tokenizer.encode(text, False),
            vocabulary=self.tokenizer.backend.token_to_id,
        )
        self.processor = processor_type(config["model_type"])(files)

    def items(self, *sizes, **kwargs):
        """What the processor makes of images of these sizes (height, width) in one prompt."""
        given = {**self.processor.prompt_kwargs(["image"] * len(sizes)), **kwargs}
        return [
            self.processor.process(DecodedImage(np.asarray(image(*size))), given) for size in sizes
        ]

    def place(self, text, items):
        """The tokens of a prompt with these items, and their places: [(start, count), ...]."""
        ready = [
            ReadyItem("image", i, bytes([i]), one, self.processor.expand(one, i))
            for i, one in enumerate(items, 1)
        ]
        text = self.processor.prompt_text(text, ["image"] * len(items))
        inputs = MediaInputs(ready)
        found = tokenize_prompt(
            self.tokenizer, text, inputs, self.processor, add_special_tokens=False
        )
        placed = place_items(*found, self.processor)
        runs = [[(one.start + at, count) for at, count in one.runs] for one in placed.items]
        return list(placed.ids), runs

    def encode(self, text):
        return self.tokenizer.encode(text, False)

    def token(self, text):
        return self.tokenizer.backend.token_to_id(text)


def array(item, name):
    """A tensor of an item."""
    return next(from_tensor(one) for one in item.tensors if one.name == name)
