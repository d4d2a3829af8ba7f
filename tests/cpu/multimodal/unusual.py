"""Tiny models with images beside other architectures than a decoder with a tower, as folders.

A family is a function of a folder that saves a random model, and returns a Pair: the model and the
processor of transformers, and how prompts are written.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from tests.cpu.multimodal import families
from tests.cpu.multimodal.families import VISION, VOCAB, tokenizer_of

FAMILIES = {}


def family(make):
    FAMILIES[make.__name__] = make
    return make


@dataclass
class Pair:
    """decodes: the text is read by an encoder. limit: images of a prompt. needs_image: each prompt
    has one. few_blocks: of 8 tokens, in which hardly more than one prompt fits."""

    theirs: object
    processor: object
    folder: object
    decodes: bool = False
    limit: int = 1
    needs_image: bool = False
    texts: tuple = ("w5 w6 w7", "w9", "w40 w41 w42 w43 w44")
    settings: dict = field(default_factory=dict)
    few_blocks: int = 14

    def prompt(self, text, images):
        """The text with the placeholders of so many images."""
        return text

    def inputs(self, text, images):
        """What transformers' model reads of a prompt."""
        given = {"images": images} if images else {}
        return dict(self.processor(text=text, **given, return_tensors="pt"))

    @torch.inference_mode()
    def logprobs(self, text, images, made):
        """Log-probabilities [len(made), V] of transformers where each of these tokens comes."""
        inputs, model = self.inputs(text, images), self.theirs
        if not images and model.config.model_type == "blip-2":
            model = model.language_model
        made = torch.tensor([made])
        if self.decodes:
            start = torch.tensor([[self.theirs.config.text_config.decoder_start_token_id or 0]])
            inputs["decoder_input_ids"] = torch.cat((start, made[:, :-1]), dim=1)
            logits = model(**inputs).logits[0]
        else:
            ids = inputs.pop("input_ids")
            whole = torch.cat((ids, made[:, :-1]), dim=1)
            inputs["attention_mask"] = torch.ones_like(whole)
            logits = model(input_ids=whole, **inputs).logits[0, ids.shape[1] - 1 :]
        return logits.log_softmax(-1)


def save(folder, config, processor, images=None, kind=None, **more):
    """Save a model with random weights as large as a trained model's. kind: its class."""
    from transformers import AutoModelForMultimodalLM

    torch.manual_seed(3)
    if kind is None:
        model = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager").eval()
    else:
        model = kind(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "embed" in name or "shared" in name or "position" in name:
                value.normal_(0, 1.0)
            elif value.ndim > 1:
                value.normal_(0, 1.5 / value[0].numel() ** 0.5)
            else:
                value += 0.2 * torch.randn_like(value)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    (images or processor.image_processor).save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    return Pair(model, processor, folder, **more)


BART = {
    "model_type": "bart", "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 48, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip


@family
def florence2(folder):
    from transformers import AutoConfig, CLIPImageProcessorPil, Florence2Processor

    vision = {
        "depths": [1, 2, 1, 1], "embed_dim": [8, 16, 24, 32], "num_heads": [2, 2, 3, 4],
        "num_groups": [2, 4, 3, 2], "window_size": 3, "projection_dim": 32,
        "max_position_embeddings": 6, "max_temporal_embeddings": 4,
    }  # fmt: skip
    config = AutoConfig.for_model(
        "florence2", text_config=BART, vision_config=vision, image_token_id=150
    )
    images = CLIPImageProcessorPil(
        size={"height": 112, "width": 112}, do_center_crop=False, resample=3
    )
    images.image_seq_length = 17
    processor = Florence2Processor(images, tokenizer_of({"<image>": 150}, image_token="<image>"))
    texts = ("<OD>", "w9", "<CAPTION_TO_PHRASE_GROUNDING> w5 w6", "w40 w41 w42")
    return save(folder, config, processor, decodes=True, texts=texts)


def blip2(folder, text, **more):
    """The processor adds the token of images behind the vocabulary."""
    from transformers import AutoConfig, Blip2Processor, BlipImageProcessorPil

    qformer = {
        "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3,
        "intermediate_size": 40, "encoder_hidden_size": 32,
    }  # fmt: skip
    processor = Blip2Processor(
        BlipImageProcessorPil(size={"height": 56, "width": 56}), tokenizer_of({}), 5
    )
    config = AutoConfig.for_model(
        "blip-2", text_config=text | {"vocab_size": VOCAB + 9}, vision_config=VISION,
        qformer_config=qformer, num_query_tokens=5, image_token_index=199,
    )  # fmt: skip
    return save(folder, config, processor, **more)


@family
def blip2_of_opt(folder):
    text = {
        "model_type": "opt", "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48,
        "num_attention_heads": 4, "max_position_embeddings": 256, "word_embed_proj_dim": 32,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return blip2(folder, text)


@family
def blip2_of_t5(folder):
    text = {
        "model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
        "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    }  # fmt: skip
    return blip2(folder, text, decodes=True)


class BlipPair(Pair):
    """The decoder begins with its own first token, then has the text."""

    def inputs(self, text, images):
        ids = self.processor.tokenizer.encode(text, add_special_tokens=False)
        pixels = self.processor.image_processor(images, return_tensors="pt")["pixel_values"]
        return {"input_ids": torch.tensor([[151, *ids]]), "pixel_values": pixels}


@family
def blip(folder):
    from transformers import (
        AutoConfig,
        BlipForConditionalGeneration,
        BlipImageProcessorPil,
        BlipProcessor,
    )

    text = {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 128, "bos_token_id": 151,
        "sep_token_id": 152, "pad_token_id": 0,
    }  # fmt: skip
    images = BlipImageProcessorPil(size={"height": 56, "width": 56})
    processor = BlipProcessor(images, tokenizer_of({"[DEC]": 151, "[SEP]": 152}))
    config = AutoConfig.for_model("blip", text_config=text, vision_config=VISION)
    found = save(folder, config, processor, kind=BlipForConditionalGeneration, needs_image=True)
    return BlipPair(**vars(found))


class FuyuPair(Pair):
    """Parts of the processor: the whole takes the first token of images for a space, and cuts no
    patches of images of PIL."""

    def inputs(self, text, images):
        tokenizer, found, parts = self.processor.tokenizer, {}, [text]
        if images:
            kind, patch = self.processor.image_processor, 14
            made = kind(images, return_tensors="np")
            tall, wide = (
                -(-int(made[f"image_unpadded_{side}s"][0][0]) // patch) * patch
                for side in ("height", "width")
            )
            patches = kind.patchify_image(np.asarray(made["images"][0])[..., :tall, :wide])
            found = {"pixel_values": torch.from_numpy(patches).reshape(1, len(patches), -1)}
            rows = self.processor.replace_image_token(
                made, 0, num_patches=len(patches), row_width=wide // patch
            )
            parts = [rows, text + "<0x04>"]
        return {"input_ids": torch.tensor([_ids(tokenizer, parts)]), **found}


def _ids(tokenizer, parts):
    return [one for part in parts for one in tokenizer.encode(part, add_special_tokens=False)]


@family
def fuyu(folder):
    from transformers import AutoConfig, FuyuImageProcessorPil, FuyuProcessor

    text = {
        "model_type": "persimmon", "hidden_size": 32, "num_hidden_layers": 2,
        "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": VOCAB,
        "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model("fuyu", text_config=text, patch_size=14, image_token_id=150)
    images = FuyuImageProcessorPil(
        size={"height": 70, "width": 98}, patch_size={"height": 14, "width": 14}
    )
    tokens = {"|SPEAKER|": 150, "|NEWLINE|": 151, "<0x04>": 152}
    found = save(folder, config, FuyuProcessor(images, tokenizer_of(tokens)))
    return FuyuPair(**vars(found))


class MllamaPair(Pair):
    """The mask of cross attention goes on behind the prompt. Tokens before the first image skip
    cross attention, of which transformers leaves them the first half."""

    def prompt(self, text, images):
        if "<|image|>" in text:
            return text
        first, *rest = text.split()
        marks = ["<|image|>"] * len(images)
        return " ".join([first, *marks[:1], *rest[:1], *marks[1:], *rest[1:]])

    def inputs(self, text, images):
        written, how = self.prompt(text, images), {"add_special_tokens": False}
        if not images:  # the first token is then the tokenizer's, and this one has none
            return {"input_ids": torch.tensor([self.processor.tokenizer.encode(written, **how)])}
        return dict(self.processor(text=written, images=images, **how, return_tensors="pt"))

    @torch.inference_mode()
    def logprobs(self, text, images, made):
        inputs = self.inputs(text, images)
        ids, made = inputs.pop("input_ids"), torch.tensor([made])
        whole = torch.cat((ids, made[:, :-1]), dim=1)
        mask = inputs.get("cross_attention_mask")
        if mask is not None:
            more = mask[:, -1:].expand(-1, made.shape[1] - 1, -1, -1)
            inputs["cross_attention_mask"] = torch.cat((mask, more), dim=1)
        inputs |= {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
        return self.run(self.theirs, inputs).logits[0, ids.shape[1] - 1 :].log_softmax(-1)

    @torch.inference_mode()
    def states(self, text, images):
        """Hidden states [T, E] of a prompt."""
        return self.run(self.theirs.model, self.inputs(text, images)).last_hidden_state[0]

    def run(self, model, inputs):
        hooks = [
            layer.register_forward_pre_hook(_skip_unseen, with_kwargs=True)
            for layer in self.theirs.model.language_model.layers
            if hasattr(layer, "cross_attn")
        ]
        found = model(**inputs)
        for hook in hooks:
            hook.remove()
        return found


def _skip_unseen(layer, args, kwargs):
    seen = kwargs["full_text_row_masked_out_mask"]

    def skip(module, args, output):
        handle.remove()
        return seen[:, 0] * output[0], output[1]

    handle = layer.cross_attn.register_forward_hook(skip)


def mllama_of(vocab, image, first):
    """A config and a processor of images. image, first: ids of the mark of images, and of BOS."""
    from transformers import AutoConfig, MllamaImageProcessorPil

    text = {
        "hidden_size": 32, "num_hidden_layers": 5, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab,
        "cross_attention_layers": [1, 3], "max_position_embeddings": 256, "bos_token_id": first,
        "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_global_layers": 2, "image_size": 56, "patch_size": 14, "max_num_tiles": 4,
        "intermediate_layers_indices": [0, 2], "vision_output_dim": 96,
    }  # fmt: skip
    config = AutoConfig.for_model(
        "mllama", text_config=text, vision_config=vision, image_token_index=image
    )
    return config, MllamaImageProcessorPil(size={"height": 56, "width": 56})


@family
def mllama(folder):
    from transformers import MllamaProcessor

    config, images = mllama_of(VOCAB, VOCAB, 150)
    tokenizer = tokenizer_of({"<|image|>": VOCAB, "<|begin_of_text|>": 150})
    tokenizer.bos_token = "<|begin_of_text|>"
    more = {"limit": 3, "settings": {"limit_mm_per_prompt": {"image": 3}}, "few_blocks": 30}
    found = save(folder, config, MllamaProcessor(images, tokenizer), **more)
    return MllamaPair(**vars(found))


class MarkedPair(Pair):
    """Images have placeholders in the text."""

    def prompt(self, text, images):
        return " ".join([*["<image>"] * len(images), text])

    def inputs(self, text, images):
        given = {"images": [images]} if images else {}
        return dict(self.processor(text=[self.prompt(text, images)], **given, return_tensors="pt"))


@family
def lfm2_vl(folder):
    """Layers that convolve the last tokens of a sequence, beside rows of images."""
    config, processor = families.lfm2_vl({"tile_size": 28, "max_image_tokens": 4, "max_tiles": 4})
    return MarkedPair(**vars(save(folder, config, processor, limit=3, few_blocks=24)))
