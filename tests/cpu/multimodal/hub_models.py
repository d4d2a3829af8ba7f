"""Tiny models of families whose code is on the hub alone: tensors under the names of the hub, and
what their rows must be, computed in plain float32 or by relatives in transformers.

A family is a function of a folder that returns a HubModel.
"""

import json
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from safetensors.torch import save_file

from quire.config.facts import read_hf_config
from quire.media.image_ops import from_tensor
from quire.models.base import EncoderInput
from quire.models.build import build_model, read_model_config
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import scale_weights
from tests.cpu.multimodal.families import TEXT, VISION, Embedded
from tests.cpu.multimodal.hub_prompts import HubPrompts, array

FAMILIES = {}


def family(make):
    FAMILIES[make.__name__] = make
    return make


@dataclass
class HubModel:
    """A folder with the files of a model.

    text: the text half, of transformers. rows_of: item -> its rows [n, E]. towers: names of tensors
    of the encoder, one at least.
    """

    folder: object
    config: dict
    tensors: dict
    prompts: HubPrompts
    rows_of: object
    text: object
    towers: tuple

    def __post_init__(self):
        (self.folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: one.contiguous() for name, one in self.tensors.items()}
        save_file(tensors, self.folder / "model.safetensors", {"format": "pt"})

    @cached_property
    def ours(self):
        return built(self.folder)

    @torch.inference_mode()
    def rows(self, items):
        """What our encoder makes of processed items."""
        inputs = [
            EncoderInput(
                item.modality,
                {one.name: torch.from_numpy(from_tensor(one).copy()) for one in item.tensors},
            )
            for item in items
        ]
        return self.ours[0].media_encoder.encode(inputs)

    @torch.inference_mode()
    def logits(self, ids, runs, rows):
        """Logits of a prompt in whose runs the rows replace the embeddings: ours, transformers'."""
        model, config = self.ours
        at = torch.cat([torch.arange(start, start + n) for own in runs for start, n in own])
        embeds = model.embed_tokens(torch.tensor(ids, dtype=torch.int32)).clone()
        embeds[at] = torch.cat(rows)
        stepper = Stepper(Embedded(model, embeds), config, max_tokens=len(ids) + 16)
        given = self.text.get_input_embeddings()(torch.tensor([ids]))
        given[0, at] = torch.cat(rows)
        return stepper.logits(ids), self.text(inputs_embeds=given).logits[0]


def built(folder):
    found = read_model_config(read_hf_config(folder))
    return build_model(*found, folder=folder, dtype=torch.float32, progress=False), found[1]


def text_half(model_type, **more):
    """A tiny text model of transformers with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **(TEXT | more))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    scale_weights(model, 2.0)
    model.generation_config.eos_token_id = None
    return model


def tower_of(kind, **more):
    """A tiny vision tower of transformers: "CLIP" or "Siglip"."""
    import transformers

    config = getattr(transformers, f"{kind}VisionConfig")(**(VISION | more))
    torch.manual_seed(2)
    model = getattr(transformers, f"{kind}VisionModel")(config).eval()
    scale_weights(model, 1.0)
    return model


def named(tensors, *pairs):
    """Tensors under other names: each pair is a prefix of theirs and one of the hub."""
    found = {}
    for name, tensor in tensors.items():
        for theirs, hub in pairs:
            if name.startswith(theirs):
                found[hub + name.removeprefix(theirs)] = tensor
                break
    return found


def random(*shape, scale=None):
    return torch.randn(*shape) * (scale or shape[-1] ** -0.5)


def normal(item):
    """The pixels of an item, normalized: [..., C, H, W] float32."""
    scale, shift = torch.from_numpy(array(item, "scale_shift").copy())
    pixels = torch.from_numpy(array(item, "pixels").copy())
    return (pixels * scale + shift).movedim(-1, -3)


def words(count, special):
    """Texts for the ids of a vocabulary: what tokenizers of tests have is larger than it."""
    return [*special, *(f"<w{i}>" for i in range(count))]


# -- Phi-3-vision -------------------------------------------------------------------------------


def squares(states, side):
    """States [N, side * side, C] of patches joined in squares of 2 x 2: [N, side/2, side/2, 4C]."""
    cells = states.view(len(states), side // 2, 2, side // 2, 2, -1)
    return cells.permute(0, 1, 3, 2, 4, 5).flatten(3)


@family
def phi3_v(folder):
    text = text_half("phi3", num_key_value_heads=4, sliding_window=None, vocab_size=300)
    tower = tower_of("CLIP", hidden_act="quick_gelu")
    at = "model.vision_embed_tokens"
    tensors = named(text.state_dict(), ("", ""))
    prefix = f"{at}.img_processor.vision_model."
    tensors |= named(tower.state_dict(), ("vision_model.", prefix), ("", prefix))
    own = {
        f"{at}.glb_GN": random(1, 1, 128),
        f"{at}.sub_GN": random(1, 1, 1, 128),
        f"{at}.img_projection.0.weight": random(64, 128),
        f"{at}.img_projection.0.bias": random(64),
        f"{at}.img_projection.2.weight": random(64, 64),
        f"{at}.img_projection.2.bias": random(64),
    }
    tensors |= own | {f"{at}.wte.weight": tensors["model.embed_tokens.weight"].clone()}
    config = text.config.to_dict() | {
        "model_type": "phi3_v",
        "architectures": ["Phi3VForCausalLM"],
        "img_processor": VISION | {"name": "clip_vision_model", "layer_idx": -2},
        "embd_layer": {"hd_transform_order": "sub_glb", "use_hd_transform": True},
    }
    prompts = HubPrompts(folder, config, ["<|image|>"], {"num_crops": 4})

    def rows_of(item):
        image = normal(item)
        whole = F.interpolate(image[None], (56, 56), mode="bicubic")
        y, x = image.shape[1] // 56, image.shape[2] // 56
        tiles = [
            image[None, :, 56 * i : 56 * (i + 1), 56 * j : 56 * (j + 1)]
            for i in range(y)
            for j in range(x)
        ]
        states = tower(torch.cat([whole, *tiles]), output_hidden_states=True).hidden_states[-2]
        cells = squares(states[:, 1:], 4)
        lines = []
        for i in range(y):
            for line in range(2):
                for j in range(x):
                    lines += list(cells[1 + i * x + j, line])
                lines.append(own[f"{at}.sub_GN"].flatten())
        lines.append(own[f"{at}.glb_GN"].flatten())
        for line in cells[0]:
            lines += [*line, own[f"{at}.sub_GN"].flatten()]
        inner = torch.stack(lines) @ own[f"{at}.img_projection.0.weight"].T
        inner = F.gelu(inner + own[f"{at}.img_projection.0.bias"])
        return inner @ own[f"{at}.img_projection.2.weight"].T + own[f"{at}.img_projection.2.bias"]

    return HubModel(folder, config, tensors, prompts, rows_of, text, tuple(own))


def hd_image(image, most, side):
    """Phi-3-vision's resized and padded image, with PIL."""
    turned = image.width < image.height
    if turned:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    ratio, scale = image.width / image.height, 1
    while scale * -(-scale // ratio) <= most:
        scale += 1
    width = (scale - 1) * side
    image = image.resize((width, int(width / ratio)), Image.Resampling.BILINEAR)
    missing = -image.height % side
    image = ImageOps.expand(image, (0, missing // 2, 0, missing - missing // 2), (255, 255, 255))
    return image.transpose(Image.Transpose.TRANSPOSE) if turned else image
