"""Tiny models of transformers with image towers, and their processors: what ours are compared with.

A family is a function that returns (config, processor) of transformers. Special tokens have the
ids that the config names.
"""

import json
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pytest
import torch

from quire.config.facts import read_hf_config
from quire.media.expand import ReadyItem, place_items
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
FLAT = {"phi4_multimodal"}
"""Without a section for the text half."""
WORDS = [f"w{i}" for i in range(3, 100)]


def family(make):
    FAMILIES[make.__name__] = make
    return make


def tokenizer_of(tokens, **named):
    """A tokenizer of words. tokens: text -> id of special tokens; named: of extra special ones."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **{word: i for i, word in enumerate(WORDS, 3)}}
    vocab |= {"\n" * count: 100 + count for count in range(1, 6)}
    vocab |= tokens
    made = Tokenizer(models.WordLevel(vocab | {"<unk>": 198}, unk_token="<unk>"))
    parts = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex("\\n+"), "isolated")]
    made.pre_tokenizer = pre_tokenizers.Sequence(parts)
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
        ready = []
        for index, item in enumerate(items, 1):
            made = self.own_processor.expand(item, index)
            if not made.replaces:
                form = self.own_processor.files.encode(self.own_processor.placeholder("", 1))
                made = replace(made, replaces=tuple(form))
            ready.append(ReadyItem(item.modality, index, b"", item, made))
        placed = place_items(ids, ready, self.own_processor)
        runs = [[(one.start + offset, count) for offset, count in one.runs] for one in placed.items]
        return list(placed.ids), runs

    def encoder_inputs(self, items):
        """Processed items as the encoder reads them."""
        return [
            EncoderInput(
                item.modality,
                {one.name: torch.from_numpy(from_tensor(one).copy()) for one in item.tensors},
            )
            for item in items
        ]

    def rows(self, items):
        """What our encoder makes of processed items."""
        with torch.inference_mode():
            return self.ours[0].media_encoder.encode(self.encoder_inputs(items))

    @torch.inference_mode()
    def logits(self, ids, runs, rows):
        """Logits of a prompt in whose runs the rows replace the embeddings."""
        model, config = self.ours
        embeds = model.embed_tokens(torch.tensor(ids, dtype=torch.int32)).clone()
        ids = list(ids)
        for own, places in zip(rows, runs, strict=True):
            at = torch.cat([torch.arange(start, start + count) for start, count in places])
            embeds[at] = own
            for place in at.tolist():
                ids[place] = 0  # as engines have it
        stepper = Stepper(Embedded(model, embeds), config, max_tokens=len(ids) + 16)
        return stepper.logits(ids)


def check_answers(llm, prompts, wants, sampling, bound):
    """Assert greedy answers, twice: the second time from the prefix cache.

    wants: ids of a prompt, those of its answer, and their log-probabilities, within the bound.
    """
    for _ in range(2):
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        for output, (prompt, ids, best) in zip(outputs, wants, strict=True):
            assert list(output.prompt_token_ids) == prompt
            (one,) = output.outputs
            assert list(one.token_ids) == ids
            got = [at[i].logprob for at, i in zip(one.logprobs, ids, strict=True)]
            assert got == pytest.approx(best, abs=bound)


class Embedded:
    """A model whose next step takes these embeddings."""

    def __init__(self, model, embeds):
        self._model, self._embeds = model, embeds
        self.modules, self.logits = model.modules, model.logits

    def __call__(self, step: StepInputs):
        return self._model(replace(step, inputs_embeds=self._embeds))


def made(name, folder):
    """The pair of a family, with random weights, saved in the folder."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    config, processor = FAMILIES[name]()
    torch.manual_seed(1)
    kind = AutoModelForCausalLM if config.model_type in FLAT else AutoModelForMultimodalLM
    model = kind.from_config(config, attn_implementation="eager").eval()
    scale_weights(model, 0.3 if "gemma" in name else 2.0)
    set_buffers(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return Pair(model, processor, folder)


def set_buffers(model):
    """Give values that have an effect to what only checkpoints fill."""
    for name, buffer in model.named_buffers():
        if name.endswith(("put_max", "put_min")):
            buffer.fill_(1.5 if name.endswith("max") else -1.25)
        elif name.endswith(("std_bias", "std_scale")):
            buffer.copy_(torch.randn(buffer.shape) * 0.1 + 0.5)
    for name, parameter in model.named_parameters():
        if "rel_pos" in name or name.endswith("pos_embed"):  # zeros, in a new model
            parameter.data.normal_(std=0.3)


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


@family
def vipllava():
    theirs, processor = llava()
    fields = theirs.to_dict() | {"model_type": "vipllava", "vision_feature_layer": [-2, -3, 1]}
    from transformers import AutoConfig

    return AutoConfig.for_model(**fields), processor


@family
def llava_next():
    from transformers import AutoConfig, LlavaNextImageProcessorPil, LlavaNextProcessor

    points = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
    config = AutoConfig.for_model(
        "llava_next", text_config=TEXT | {"model_type": "mistral", "sliding_window": None},
        vision_config=VISION | {"model_type": "clip_vision_model"}, image_token_index=150,
        image_grid_pinpoints=points,
    )  # fmt: skip
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56},
        image_grid_pinpoints=points,
    )  # fmt: skip
    processor = LlavaNextProcessor(
        images, tokenizer_of({"<image>": 150}), patch_size=14,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    return config, processor


@family
def llava_next_video(**more):
    from transformers import AutoConfig, LlavaNextVideoProcessor

    theirs, processor = llava_next()
    fields = theirs.to_dict() | {"model_type": "llava_next_video", "video_token_index": 151} | more
    config = AutoConfig.for_model(**fields)
    tokens = tokenizer_of({"<image>": 150, "<video>": 151})
    processor = TiledProcessor.of(
        lambda images, tokenizer, video, **rest: LlavaNextVideoProcessor(
            video, images, tokenizer, **rest
        ),
        processor.image_processor, tokens, patch_size=14,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    return config, processor


def siglip_images(side, **more):
    from transformers import SiglipImageProcessorPil

    return SiglipImageProcessorPil(size={"height": side, "width": side}, **more)


@family
def paligemma(text_type="gemma2"):
    from transformers import AutoConfig, PaliGemmaProcessor

    config = AutoConfig.for_model(
        "paligemma", text_config=TEXT | {"model_type": text_type, "head_dim": 16},
        vision_config=VISION | {"model_type": "siglip_vision_model"}, image_token_index=150,
        projection_dim=64, hidden_size=64, vocab_size=VOCAB,
    )  # fmt: skip
    images = siglip_images(56)
    images.image_seq_length = 16
    tokens = {"<image>": 150, "<bos>": 151}
    made = tokenizer_of(tokens, image_token="<image>")
    made.bos_token = "<bos>"
    return config, PaliGemmaProcessor(images, made)


@family
def paligemma_1():
    return paligemma("gemma")


@family
def gemma3():
    from transformers import AutoConfig, Gemma3ImageProcessorPil, Gemma3Processor

    text = TEXT | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 40}
    config = AutoConfig.for_model(
        "gemma3", text_config=text | {"query_pre_attn_scalar": 16},
        vision_config=VISION | {"model_type": "siglip_vision_model"}, image_token_index=150,
        mm_tokens_per_image=4, boi_token_index=151, eoi_token_index=152,
    )  # fmt: skip
    tokens = {"<image_soft_token>": 150, "<start_of_image>": 151, "<end_of_image>": 152}
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>"}
    made = tokenizer_of(tokens, **names, eoi_token="<end_of_image>")
    images = Gemma3ImageProcessorPil(
        size={"height": 56, "width": 56}
    )  # fmt: skip
    return config, Gemma3Processor(images, made, image_seq_length=4)


GEMMA4 = {"boi_token_id": 151, "eoi_token_id": 152, "image_token_id": 150, "video_token_id": 153,
          "boa_token_id": 154, "eoa_token_index": 155, "audio_token_id": 156}  # fmt: skip
GEMMA4_AUDIO = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "output_proj_dims": 40,
    "subsampling_conv_channels": [128, 4],
}  # fmt: skip


@family
def gemma4(**more):
    """With audio, clipped matrices, inputs of each layer and shared caches, as the small ones."""
    from transformers import AutoConfig, Gemma4ImageProcessorPil, Gemma4Processor
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    text = TEXT | {
        "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "sliding_window": 40,
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB, "use_bidirectional_attention": None,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    vision = VISION | {"head_dim": 8, "num_key_value_heads": 4, "position_embedding_size": 256}
    config = AutoConfig.for_model(
        "gemma4", **GEMMA4,
        text_config=text | more.pop("text", {}),
        vision_config=vision | {"use_clipped_linears": True} | more.pop("vision", {}),
        audio_config=more.pop("audio", GEMMA4_AUDIO),
    )  # fmt: skip
    names = {
        "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
        "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
    }  # fmt: skip
    tokens = {"<|video|>": 153, **dict(zip(names.values(), (150, 151, 152, 156, 154, 155)))}
    tokens |= {f"00:0{i}": 160 + i for i in range(10)}
    images = Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=14)
    processor = TiledProcessor.of(
        lambda images, tokenizer, video, **rest: Gemma4Processor(
            Gemma4AudioFeatureExtractor(), images, tokenizer, video, **rest
        ),
        images, tokenizer_of(tokens, **names),
    )  # fmt: skip
    return config, processor


@family
def gemma4_of_31b():
    """Without what is special in the small ones; its tower standardizes rows."""
    text = {
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "attention_k_eq_v": True,
        "use_bidirectional_attention": "vision",
    }  # fmt: skip
    vision = {"use_clipped_linears": False, "standardize": True, "num_key_value_heads": 2}
    return gemma4(text=text, vision=vision, audio=None)


def tiled_images(side):
    from transformers import GotOcr2ImageProcessorPil

    return GotOcr2ImageProcessorPil(
        size={"height": side, "width": side}, max_patches=6, crop_to_patches=True
    )


@family
def internvl(**vision):
    from transformers import AutoConfig, InternVLProcessor

    vision = VISION | {"image_size": [56, 56], "patch_size": [14, 14]} | vision
    config = AutoConfig.for_model(
        "internvl", text_config=TEXT | {"model_type": "qwen2"}, vision_config=vision,
        image_token_id=150, image_seq_length=4, tie_word_embeddings=False,
    )  # fmt: skip
    tokens = {"<IMG_CONTEXT>": 150, "<img>": 151, "</img>": 152, "<video>": 153}
    names = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}
    made = tokenizer_of(tokens, **names, context_image_token="<IMG_CONTEXT>")
    return config, TiledProcessor.of(InternVLProcessor, tiled_images(56), made, image_seq_length=4)


@family
def internvl_of_6b():
    return internvl(
        use_qk_norm=True, norm_type="rms_norm", attention_bias=True, use_mean_pooling=False
    )


class TiledProcessor:
    """Makes processors without a processor for video."""

    @staticmethod
    def of(kind, images, tokenizer, **more):
        from unittest import mock

        from transformers import ProcessorMixin

        with mock.patch.object(ProcessorMixin, "check_argument_for_proper_class"):
            return kind(images, tokenizer, None, **more)


def resized_as_pil(kind):
    """An image processor of torchvision that resizes as PIL does."""
    from unittest import mock

    from PIL import Image
    from transformers.image_processing_backends import TorchvisionBackend

    def resize(self, images, size, **more):
        found = [
            Image.fromarray(one.permute(1, 2, 0).numpy()).resize((size.width, size.height), 2)
            for one in images
        ]
        return torch.stack([torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in found])

    class Resized(kind):
        def __call__(self, *given, **more):
            with mock.patch.object(TorchvisionBackend, "resize", resize):
                return super().__call__(*given, **more)

    return Resized


@family
def lfm2_vl(images=(), **more):
    """images: settings of them."""
    from transformers import AutoConfig, Lfm2VlImageProcessor, Lfm2VlProcessor

    text = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
    text["block_auto_adjust_ff_dim"] = False
    vision = {"model_type": "siglip2_vision_model", "num_patches": 16}
    config = AutoConfig.for_model(
        "lfm2_vl", text_config=TEXT | text, vision_config=VISION | vision, image_token_id=150,
        projector_hidden_size=40, **more,
    )  # fmt: skip
    places = {f"<|img_row_{y}_col_{x}|>": 147 + 6 * y + x for y in range(1, 6) for x in range(1, 7)}
    tokens = {"<image>": 150, "<|image_start|>": 151, "<|image_end|>": 152}
    tokens |= {"<|img_thumbnail|>": 153, **places}
    usual = {"tile_size": 56, "min_image_tokens": 2, "max_image_tokens": 9, "max_tiles": 6}
    made = resized_as_pil(Lfm2VlImageProcessor)(encoder_patch_size=14, **usual | dict(images))
    return config, Lfm2VlProcessor(made, tokenizer_of(tokens))


@family
def lfm2_vl_without_norm():
    return lfm2_vl(projector_use_layernorm=False, projector_bias=False)


@family
def aya_vision():
    from transformers import AutoConfig, AyaVisionProcessor

    config = AutoConfig.for_model(
        "aya_vision", text_config=TEXT | {"model_type": "cohere2", "sliding_window": 40, "logit_scale": 1.0},
        vision_config=VISION | {"model_type": "siglip_vision_model"}, image_token_index=150,
        alignment_intermediate_size=48, downsample_factor=2,
    )  # fmt: skip
    tiles = {f"TILE_{i}": 155 + i for i in range(1, 7)}
    tokens = {"<|IMG_PATCH|>": 150, "<|START_OF_IMG|>": 151, "<|END_OF_IMG|>": 152}
    tokens |= {"TILE_GLOBAL": 153, "<image>": 154, **tiles}
    processor = AyaVisionProcessor(
        tiled_images(56), tokenizer_of(tokens), patch_size=14, img_size=56, downsample_factor=2
    )
    return config, processor


@family
def idefics3(model_type="idefics3"):
    from transformers import AutoConfig, Idefics3ImageProcessorPil, Idefics3Processor

    config = AutoConfig.for_model(
        model_type, text_config=TEXT | {"model_type": "llama"}, vision_config=VISION,
        image_token_id=150, scale_factor=2,
    )  # fmt: skip
    places = {f"<row_{y}_col_{x}>": 147 + 6 * y + x for y in range(1, 6) for x in range(1, 7)}
    tokens = {"<image>": 150, "<fake_token_around_image>": 151, "<end_of_utterance>": 152}
    tokens |= {"<global-img>": 153, **places}
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 168}, max_image_size={"longest_edge": 56}
    )
    return config, Idefics3Processor(images, tokenizer_of(tokens), image_seq_len=4)


@family
def idefics2(**images):
    from transformers import AutoConfig, Idefics2ImageProcessorPil, Idefics2Processor

    config = AutoConfig.for_model(
        "idefics2", text_config=TEXT | {"model_type": "mistral", "sliding_window": None},
        vision_config=VISION | {"image_size": 70}, image_token_id=150,
        perceiver_config={
            "hidden_size": 64, "resampler_n_latents": 3, "resampler_depth": 2,
            "resampler_n_heads": 4, "resampler_head_dim": 12, "num_key_value_heads": 2,
        },
    )  # fmt: skip
    tokens = {"<image>": 150, "<fake_token_around_image>": 151, "<end_of_utterance>": 152}
    made = Idefics2ImageProcessorPil(size={"shortest_edge": 28, "longest_edge": 70}, **images)
    return config, Idefics2Processor(made, tokenizer_of(tokens), image_seq_len=3)


@family
def idefics2_of_quarters():
    return idefics2(do_image_splitting=True)


@family
def smolvlm():
    return idefics3("smolvlm")


@family
def llava_onevision():
    from transformers import AutoConfig, LlavaOnevisionImageProcessorPil, LlavaOnevisionProcessor

    points = [[56 * y, 56 * x] for y in range(1, 4) for x in range(1, 4)]
    config = AutoConfig.for_model(
        "llava_onevision", text_config=TEXT | {"model_type": "qwen2"},
        vision_config=VISION | {"model_type": "siglip_vision_model"}, image_token_index=150,
        video_token_index=151, image_grid_pinpoints=points, vision_aspect_ratio="anyres_max_2",
    )  # fmt: skip
    images = LlavaOnevisionImageProcessorPil(
        size={"height": 56, "width": 56}, image_grid_pinpoints=points
    )
    processor = TiledProcessor.of(
        LlavaOnevisionProcessor, images, tokenizer_of({"<image>": 150, "<video>": 151}),
        num_image_tokens=16, vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
    )  # fmt: skip
    return config, processor


@family
def got_ocr2():
    """Its windows do not divide the map, and the last layer attends to the whole of it."""
    from transformers import AutoConfig, GotOcr2Processor

    vision = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "mlp_dim": 48,
        "image_size": 112, "patch_size": 16, "window_size": 3, "global_attn_indexes": [2],
        "output_channels": 8,
    }  # fmt: skip
    config = AutoConfig.for_model(
        "got_ocr2", text_config=TEXT | {"model_type": "qwen2"}, vision_config=vision,
        image_token_index=150, tie_word_embeddings=False,
    )  # fmt: skip
    tokens = {"<imgpad>": 150, "<img>": 151, "</img>": 152}
    images = tiled_images(112)
    images.crop_to_patches = False
    GotOcr2Processor.num_image_tokens = 4
    return config, GotOcr2Processor(images, tokenizer_of(tokens))


def with_pil(kind):
    """A processor of transformers that resizes with PIL, where it has no twin that does."""

    class Resizing(kind):
        def resize(self, image, size, resample=None, **_):
            from PIL import Image

            flat = image.reshape(-1, *image.shape[-3:]).permute(0, 2, 3, 1).numpy()
            made = [
                np.asarray(Image.fromarray(one).resize((size.width, size.height), resample or 2))
                for one in flat
            ]
            found = torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)
            return found.reshape(*image.shape[:-2], *found.shape[-2:])

    Resizing.__name__ = kind.__name__
    return Resizing


@family
def llama4(**images):
    from transformers import AutoConfig, Llama4ImageProcessor, Llama4Processor

    text = TEXT | {
        "model_type": "llama4_text", "head_dim": 16, "num_local_experts": 4,
        "intermediate_size_mlp": 80, "no_rope_layers": [1, 0], "floor_scale": 32,
        "attention_chunk_size": 4096,
    }  # fmt: skip
    vision = VISION | {"intermediate_size": 128, "projector_input_dim": 40}
    config = AutoConfig.for_model(
        "llama4", text_config=text, image_token_index=150, boi_token_index=151,
        eoi_token_index=152,
        vision_config=vision | {"projector_output_dim": 40, "vision_output_dim": 40,
                                "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    )  # fmt: skip
    tokens = {"<|patch|>": 150, "<|image_start|>": 151, "<|image_end|>": 152, "<|image|>": 153}
    tokens |= {"<|tile_x_separator|>": 154, "<|tile_y_separator|>": 155}
    made = with_pil(Llama4ImageProcessor)(size={"height": 56, "width": 56}, max_patches=6, **images)
    return config, Llama4Processor(made, tokenizer_of(tokens), patch_size=14)


@family
def cohere2_vision():
    from transformers import AutoConfig, Cohere2VisionImageProcessor, Cohere2VisionProcessor

    config = AutoConfig.for_model(
        "cohere2_vision",
        text_config=TEXT | {"model_type": "cohere2", "sliding_window": 40, "logit_scale": 1.0},
        vision_config=VISION | {"model_type": "siglip_vision_model"}, image_token_id=150,
        alignment_intermediate_size=48,
    )  # fmt: skip
    names = {
        "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>",
        "image_token": "<|IMG_PATCH|>", "img_line_break_token": "<|IMG_LINE_BREAK|>",
    }  # fmt: skip
    ids = {"image_token": 150, "boi_token": 151, "eoi_token": 152, "img_line_break_token": 153}
    tokens = tokenizer_of({names[key]: at for key, at in ids.items()}, **names)
    size = {"height": 56, "width": 56}
    images = with_pil(Cohere2VisionImageProcessor)(size=size, max_patches=6, patch_size=2)
    return config, Cohere2VisionProcessor(images, tokens)


@family
def llama4_of_largest_canvas():
    return llama4(resize_to_max_canvas=True)


@family
def phi4_multimodal():
    from transformers import (
        AutoConfig,
        Phi4MultimodalFeatureExtractor,
        Phi4MultimodalImageProcessor,
        Phi4MultimodalProcessor,
    )

    class Images(Phi4MultimodalImageProcessor):
        """Counts 4 + 2 tokens of the whole image, in place of 256 + 16 of one of 448 pixels."""

        def _preprocess(self, *given, **more):
            found = super()._preprocess(*given, **more)
            found["num_img_tokens"] = [count - 272 + 6 for count in found["num_img_tokens"]]
            return found

    Images.__name__ = Phi4MultimodalImageProcessor.__name__
    audio = {
        "hidden_size": 32, "intermediate_size": 40, "num_blocks": 3, "num_attention_heads": 4,
        "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16,
        "audio_token_id": 151, "bias_max_distance": 20,
    }  # fmt: skip
    config = AutoConfig.for_model(
        "phi4_multimodal", **TEXT, audio_config=audio,
        vision_config=VISION | {"crop_size": 56, "image_token_id": 150},
    )  # fmt: skip
    tokens = tokenizer_of(
        {"<|image|>": 150, "<|audio|>": 151}, image_token="<|image|>", audio_token="<|audio|>"
    )
    images = Images(size={"height": 56, "width": 56}, patch_size=14, dynamic_hd=9)
    return config, Phi4MultimodalProcessor(images, Phi4MultimodalFeatureExtractor(), tokens)


PIXTRAL = VISION | {"model_type": "pixtral", "image_size": 112}


def pixtral_processor(merge):
    from transformers import PixtralImageProcessorPil, PixtralProcessor

    tokens = {"[IMG]": 150, "[IMG_BREAK]": 151, "[IMG_END]": 152}
    images = PixtralImageProcessorPil(
        size={"longest_edge": 112}, patch_size={"height": 14, "width": 14}
    )
    return PixtralProcessor(images, tokenizer_of(tokens), patch_size=14, spatial_merge_size=merge)


@family
def pixtral():
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "llava", text_config=TEXT | {"model_type": "mistral", "head_dim": 16},
        vision_config=PIXTRAL, image_token_index=150, vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    return config, pixtral_processor(1)


@family
def mistral3():
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "mistral3", text_config=TEXT | {"model_type": "mistral", "head_dim": 16},
        vision_config=PIXTRAL, image_token_index=150, spatial_merge_size=2,
    )  # fmt: skip
    return config, pixtral_processor(2)


@family
def lighton_ocr(step=14):
    """step: of sides of images; an odd number of patches leaves some over."""
    from transformers import AutoConfig, LightOnOcrProcessor, PixtralImageProcessorPil

    config = AutoConfig.for_model(
        "lighton_ocr", text_config=TEXT | {"model_type": "qwen3", "head_dim": 16},
        vision_config=PIXTRAL, image_token_id=150, spatial_merge_size=2,
    )  # fmt: skip
    tokens = {"<|image_pad|>": 150, "<break>": 151, "<end>": 152}
    names = {
        "image_token": "<|image_pad|>",
        "image_break_token": "<break>",
        "image_end_token": "<end>",
    }
    images = PixtralImageProcessorPil(
        size={"longest_edge": 112}, patch_size={"height": step, "width": step}
    )
    return config, LightOnOcrProcessor(images, tokenizer_of(tokens, **names), 14, 2)


@family
def deepseek_vl():
    from transformers import AutoConfig, DeepseekVLImageProcessorPil, DeepseekVLProcessor

    config = AutoConfig.for_model(
        "deepseek_vl", text_config=TEXT | {"model_type": "llama"}, image_token_id=150,
        vision_config=VISION | {"model_type": "siglip_vision_model"}, tie_word_embeddings=False,
    )  # fmt: skip
    images = DeepseekVLImageProcessorPil(size={"height": 56, "width": 56})
    made = tokenizer_of({"<image_placeholder>": 150}, image_token="<image_placeholder>")
    return config, DeepseekVLProcessor(images, made, num_image_tokens=16)
