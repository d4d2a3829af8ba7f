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
    of the encoder, one at least. added: rows are added to the embeddings of tokens, in place of
    taking their place.
    """

    folder: object
    config: dict
    tensors: dict
    prompts: HubPrompts
    rows_of: object
    text: object
    towers: tuple
    added: bool = False

    def __post_init__(self):
        (self.folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: one.contiguous() for name, one in self.tensors.items()}
        save_file(tensors, self.folder / "model.safetensors", {"format": "pt"})

    @cached_property
    def ours(self):
        return built(self.folder)

    def rows(self, items):
        """What our encoder makes of processed items."""
        return self.encoded(self.ours[0], items)

    @torch.inference_mode()
    def encoded(self, model, items):
        """What the encoder of a model makes of processed items."""
        inputs = [
            EncoderInput(
                item.modality,
                {one.name: torch.from_numpy(from_tensor(one).copy()) for one in item.tensors},
            )
            for item in items
        ]
        return model.media_encoder.encode(inputs)

    @torch.inference_mode()
    def logits(self, ids, runs, rows):
        """Logits of a prompt with these rows in its runs: ours, transformers'."""
        model, config = self.ours
        at = torch.cat([torch.arange(start, start + n) for own in runs for start, n in own])
        embeds = model.embed_tokens(torch.tensor(ids, dtype=torch.int32)).clone()
        embeds[at] = torch.cat(rows) + embeds[at] * self.added
        stepper = Stepper(Embedded(model, embeds), config, max_tokens=len(ids) + 16)
        given = self.text.get_input_embeddings()(torch.tensor([ids]))
        given[0, at] = torch.cat(rows) + given[0, at] * self.added
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


# -- DeepSeek-VL2 -------------------------------------------------------------------------------

TIMM = (
    ("embeddings.patch_embedding", "vision.patch_embed.proj"),
    ("embeddings.position_embedding.weight", "vision.pos_embed"),
    ("encoder.layers", "vision.blocks"),
    ("post_layernorm", "vision.norm"),
)
TIMM_LAYER = {"self_attn.out_proj": "attn.proj", "layer_norm1": "norm1", "layer_norm2": "norm2"}


def timm_names(tower):
    """The tensors of a SigLIP of transformers as timm names and joins them."""
    found, parts = {}, {}
    for name, tensor in named(without_prefix(tower), *TIMM).items():
        for theirs, timm in TIMM_LAYER.items():
            name = name.replace(theirs, timm)
        at, dot, rest = name.partition("self_attn.")
        if dot:
            parts.setdefault(f"{at}attn.qkv.{rest.split('.')[1]}", {})[rest[0]] = tensor
        else:
            found[name] = tensor[None] if name == "vision.pos_embed" else tensor
    return found | {name: torch.cat([own[one] for one in "qkv"]) for name, own in parts.items()}


def without_prefix(tower):
    return {n.removeprefix("vision_model."): x for n, x in tower.state_dict().items()}


class DeepseekMoe(torch.nn.Module):
    """The text half of DeepSeek-OCR-2 in transformers, with a head: DeepSeek-MoE."""

    def __init__(self, fields):
        from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2 as theirs

        super().__init__()
        config = theirs.DeepseekOcr2TextConfig(**fields)
        config._attn_implementation = "eager"
        self.model = theirs.DeepseekOcr2TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def forward(self, inputs_embeds):
        hidden = self.model(inputs_embeds=inputs_embeds).last_hidden_state
        return type("Outputs", (), {"logits": self.lm_head(hidden)})


def hub_experts(tensors):
    """Tensors of transformers with one for each matrix of an expert, as the hub has them."""
    found = {}
    for name, tensor in tensors.items():
        at, _, bank = name.partition("experts.")
        if "shared_" in at or bank not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        for i, one in enumerate(tensor):
            names = ("gate_proj", "up_proj") if bank == "gate_up_proj" else ("down_proj",)
            for part, matrix in zip(names, one.chunk(len(names)), strict=True):
                found[f"{at}experts.{i}.{part}.weight"] = matrix.clone()
    return found


@family
def deepseek_vl_v2(folder):
    fields = TEXT | {
        "vocab_size": 300, "num_key_value_heads": 4, "num_hidden_layers": 3,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "moe_intermediate_size": 32, "routed_scaling_factor": 1.0, "topk_method": "greedy",
        "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    torch.manual_seed(3)
    text = DeepseekMoe(fields | {"mlp_layer_types": ["dense", "sparse", "sparse"]}).eval()
    scale_weights(text.model, 2.0)
    # A side has 5 patches, which are no whole squares, and 2 pixels more, which none has.
    tower = tower_of("Siglip", image_size=62, patch_size=12, hidden_act="gelu_pytorch_tanh")
    own = {
        "image_newline": random(64),
        "view_seperator": random(64),
        "projector.layers.0.weight": random(64, 128),
        "projector.layers.0.bias": random(64),
        "projector.layers.2.weight": random(64, 64),
        "projector.layers.2.bias": random(64),
    }
    tensors = named(hub_experts(text.state_dict()), ("", "language.")) | timm_names(tower) | own
    tensors["vision.attn_pool.latent"] = random(1, 1, 32)
    config = {
        "model_type": "deepseek_vl_v2",
        "language_config": fields | {
            "architectures": ["DeepseekV2ForCausalLM"], "use_mla": False, "kv_lora_rank": None,
            "q_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0,
            "first_k_dense_replace": 1,
        },
        "vision_config": {
            "model_type": "vision", "width": 32, "layers": 3, "heads": 4, "mlp_ratio": 1.5,
            "image_size": 62, "patch_size": 12,
        },
        "projector_config": {"model_type": "mlp_projector", "n_embed": 64},
        "candidate_resolutions": [[62, 62], [62, 124], [124, 62], [124, 124], [186, 62]],
        "tile_tag": "2D",
        "global_view_pos": "head",
    }  # fmt: skip
    prompts = HubPrompts(folder, config, ["<image>"])

    def rows_of(item):
        tiles = normal(item)
        states = tower(tiles).last_hidden_state.view(len(tiles), 5, 5, 32)
        grid = F.pad(states.permute(0, 3, 1, 2), (0, 1, 0, 1))
        cells = F.unfold(grid, 2, stride=2).transpose(1, 2)
        inner = F.gelu(cells @ own["projector.layers.0.weight"].T + own["projector.layers.0.bias"])
        cells = inner @ own["projector.layers.2.weight"].T + own["projector.layers.2.bias"]
        cells = cells.view(len(tiles), 3, 3, 64)
        y, x = deepseek_grid(item)
        found = [row for line in cells[0] for row in (*line, own["image_newline"])]
        found.append(own["view_seperator"])
        for i in range(y):
            for line in range(3):
                found += [row for j in range(x) for row in cells[1 + i * x + j, line]]
                found.append(own["image_newline"])
        return torch.stack(found)

    return HubModel(folder, config, tensors, prompts, rows_of, text, tuple(own))


def deepseek_grid(item):
    """Rows and columns of tiles, of their number and that of all rows."""
    tiles = len(array(item, "pixels")) - 1
    rows = item.sizes["rows"]
    return next(
        (y, tiles // y)
        for y in range(1, tiles + 1)
        if tiles % y == 0 and 3 * 4 + 1 + y * 3 * (tiles // y * 3 + 1) == rows
    )


# -- Kimi-VL ------------------------------------------------------------------------------------


def layer_norm(x, tensors, name, eps=1e-5):
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def linear(x, tensors, name):
    return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def attend(q, k, v):
    """[n, H, D] each."""
    q, k, v = (one.transpose(0, 1)[None] for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


def dense(tensors, name, outputs, inputs, bias=True):
    """Add the random tensors of a linear layer."""
    tensors[f"{name}.weight"] = random(outputs, inputs)
    if bias:
        tensors[f"{name}.bias"] = random(outputs, scale=0.2)


def norm(tensors, name, size):
    tensors[f"{name}.weight"] = 1 + random(size, scale=0.2)
    tensors[f"{name}.bias"] = random(size, scale=0.2)


def turned(x, rows, columns, theta=10000.0):
    """Neighbouring channels of heads [n, H, D] as complex numbers, turned: the first pair by the
    columns, the second by the rows, and so on."""
    n, _, size = x.shape
    angles = torch.empty(n, size // 2)
    for i in range(size // 4):
        step = theta ** (-4 * i / size)
        angles[:, 2 * i], angles[:, 2 * i + 1] = columns * step, rows * step
    pairs = torch.view_as_complex(x.reshape(*x.shape[:2], -1, 2).contiguous())
    made = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(made).flatten(-2)


@family
def kimi_vl(folder):
    text = text_half(
        "deepseek_v3", vocab_size=300, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=32,
        qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20, n_routed_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=2, n_group=1,
        topk_group=1, first_k_dense_replace=1,
    )  # fmt: skip
    own, at = {}, "vision_tower.encoder.blocks"
    torch.manual_seed(4)
    own["vision_tower.patch_embed.proj.weight"] = random(32, 3, 14, 14, scale=0.05)
    own["vision_tower.patch_embed.proj.bias"] = random(32)
    own["vision_tower.patch_embed.pos_emb.weight"] = random(6, 6, 32, scale=0.5)
    for i in range(2):
        norm(own, f"{at}.{i}.norm0", 32)
        norm(own, f"{at}.{i}.norm1", 32)
        dense(own, f"{at}.{i}.wqkv", 96, 32)
        dense(own, f"{at}.{i}.wo", 32, 32)
        dense(own, f"{at}.{i}.mlp.fc0", 48, 32)
        dense(own, f"{at}.{i}.mlp.fc1", 32, 48)
    norm(own, "vision_tower.encoder.final_layernorm", 32)
    norm(own, "multi_modal_projector.pre_norm", 32)
    dense(own, "multi_modal_projector.linear_1", 128, 128)
    dense(own, "multi_modal_projector.linear_2", 64, 128)
    config = {
        "model_type": "kimi_vl",
        "architectures": ["KimiVLForConditionalGeneration"],
        "text_config": text.config.to_dict(),
        "vision_config": {
            "model_type": "moonvit", "hidden_size": 32, "num_attention_heads": 2,
            "num_hidden_layers": 2, "intermediate_size": 48, "patch_size": 14,
            "init_pos_emb_height": 6, "init_pos_emb_width": 6, "merge_kernel_size": [2, 2],
        },
    }  # fmt: skip
    tensors = named(hub_experts(text.state_dict()), ("", "language_model.")) | own
    special = ["<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]
    prompts = HubPrompts(folder, config, special, {"in_token_limit": 64})

    def rows_of(item):
        image = normal(item)
        kernel = own["vision_tower.patch_embed.proj.weight"]
        x = F.conv2d(image, kernel, own["vision_tower.patch_embed.proj.bias"], stride=14)
        _, _, tall, wide = x.shape
        table = own["vision_tower.patch_embed.pos_emb.weight"].permute(2, 0, 1)[None]
        x = x + F.interpolate(table, (tall, wide), mode="bicubic")
        x = x[0].flatten(1).T
        rows = torch.arange(tall * wide) // wide
        columns = torch.arange(tall * wide) % wide
        for i in range(2):
            q, k, v = (
                linear(layer_norm(x, own, f"{at}.{i}.norm0"), own, f"{at}.{i}.wqkv")
                .view(-1, 3, 2, 16)
                .unbind(1)
            )
            q, k = (turned(one, rows, columns) for one in (q, k))
            x = x + linear(attend(q, k, v), own, f"{at}.{i}.wo")
            inner = linear(layer_norm(x, own, f"{at}.{i}.norm1"), own, f"{at}.{i}.mlp.fc0")
            x = x + linear(F.gelu(inner, approximate="tanh"), own, f"{at}.{i}.mlp.fc1")
        x = layer_norm(x, own, "vision_tower.encoder.final_layernorm")
        x = layer_norm(x, own, "multi_modal_projector.pre_norm")
        x = x.view(tall // 2, 2, wide // 2, 2, 32).permute(0, 2, 1, 3, 4).reshape(-1, 128)
        x = F.gelu(linear(x, own, "multi_modal_projector.linear_1"))
        return linear(x, own, "multi_modal_projector.linear_2")

    return HubModel(folder, config, tensors, prompts, rows_of, text, tuple(own))


# -- GLM-4V-9B ----------------------------------------------------------------------------------

CHATGLM = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.layers": "transformer.encoder.layers",
    "model.norm": "transformer.encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


@family
def chatglm(folder):
    text = text_half(
        "glm", vocab_size=300, head_dim=16, partial_rotary_factor=0.5, attention_bias=True,
        rope_theta=20000.0,
    )  # fmt: skip
    own, at = {}, "transformer.vision"
    torch.manual_seed(5)
    own[f"{at}.patch_embedding.cls_embedding"] = random(1, 32, scale=1)
    own[f"{at}.patch_embedding.proj.weight"] = random(32, 3, 14, 14, scale=0.05)
    own[f"{at}.patch_embedding.proj.bias"] = random(32)
    own[f"{at}.patch_embedding.position_embedding.weight"] = random(17, 32, scale=0.5)
    for i in range(2):
        layer = f"{at}.transformer.layers.{i}"
        norm(own, f"{layer}.input_layernorm", 32)
        norm(own, f"{layer}.post_attention_layernorm", 32)
        dense(own, f"{layer}.attention.query_key_value", 96, 32)
        dense(own, f"{layer}.attention.dense", 32, 32)
        dense(own, f"{layer}.mlp.fc1", 48, 32)
        dense(own, f"{layer}.mlp.fc2", 32, 48)
    own[f"{at}.conv.weight"] = random(64, 32, 2, 2, scale=0.1)
    own[f"{at}.conv.bias"] = random(64)
    norm(own, f"{at}.linear_proj.norm1", 64)
    for name, (outputs, inputs) in {
        "linear_proj": (64, 64), "gate_proj": (96, 64), "dense_h_to_4h": (96, 64),
        "dense_4h_to_h": (64, 96),
    }.items():  # fmt: skip
        dense(own, f"{at}.linear_proj.{name}", outputs, inputs, bias=False)
    own[f"{at}.boi"], own[f"{at}.eoi"] = random(1, 1, 64, scale=1), random(1, 1, 64, scale=1)
    config = {
        "model_type": "chatglm", "architectures": ["ChatGLMModel"], "hidden_size": 64,
        "ffn_hidden_size": 96, "num_layers": 2, "num_attention_heads": 4, "kv_channels": 16,
        "multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 300,
        "seq_length": 4096, "layernorm_epsilon": 1e-5, "add_qkv_bias": True, "rope_ratio": 2,
        "rmsnorm": True, "tie_word_embeddings": False,
        "vision_config": {
            "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48,
            "image_size": 56, "patch_size": 14, "in_channels": 3, "num_positions": 17,
            "hidden_act": "gelu", "layer_norm_eps": 1e-6, "scaling_factor": 8,
        },
    }  # fmt: skip
    special = ["<|begin_of_image|>", "<|endoftext|>", "<|end_of_image|>"]
    prompts = HubPrompts(folder, config, special)

    def rows_of(item):
        name = f"{at}.patch_embedding"
        x = F.conv2d(normal(item), own[f"{name}.proj.weight"], own[f"{name}.proj.bias"], stride=14)
        x = torch.cat((own[f"{name}.cls_embedding"], x[0].flatten(1).T))
        x = x + own[f"{name}.position_embedding.weight"]
        for i in range(2):
            layer = f"{at}.transformer.layers.{i}"
            qkv = linear(x, own, f"{layer}.attention.query_key_value").view(-1, 3, 4, 8)
            y = linear(attend(*qkv.unbind(1)), own, f"{layer}.attention.dense")
            x = x + layer_norm(y, own, f"{layer}.input_layernorm", 1e-6)
            y = linear(F.gelu(linear(x, own, f"{layer}.mlp.fc1")), own, f"{layer}.mlp.fc2")
            x = x + layer_norm(y, own, f"{layer}.post_attention_layernorm", 1e-6)
        grid = x[1:].T.view(1, 32, 4, 4)
        x = F.conv2d(grid, own[f"{at}.conv.weight"], own[f"{at}.conv.bias"], stride=2)
        name = f"{at}.linear_proj"
        x = linear(x[0].flatten(1).T, own, f"{name}.linear_proj")
        x = F.gelu(layer_norm(x, own, f"{name}.norm1"))
        x = F.silu(linear(x, own, f"{name}.gate_proj")) * linear(x, own, f"{name}.dense_h_to_4h")
        x = linear(x, own, f"{name}.dense_4h_to_h")
        return torch.cat((own[f"{at}.boi"][0], x, own[f"{at}.eoi"][0])) / 8

    tensors = joined_names(text.state_dict(), CHATGLM, "self_attention.query_key_value") | own
    tensors["transformer.rotary_pos_emb.inv_freq"] = torch.ones(4)
    return HubModel(folder, config, tensors, prompts, rows_of, text, tuple(own))


# -- Qwen-VL ------------------------------------------------------------------------------------

QWEN = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.gate_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w1",
    "mlp.down_proj": "mlp.c_proj",
}


def joined_names(tensors, names, joint):
    """Tensors under other names; queries, keys and values are one with the name of `joint`."""
    found, parts = {}, {}
    for name, tensor in tensors.items():
        for theirs, hub in names.items():
            name = name.replace(theirs, hub)
        at, dot, rest = name.partition("self_attn.")
        if dot:
            parts.setdefault(f"{at}{joint}.{rest.split('.')[1]}", {})[rest[0]] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.cat([own[one] for one in "qkv"]) for name, own in parts.items()}


@family
def qwen(folder):
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 300}
    text = text_half("qwen2", **sizes, num_key_value_heads=4, rms_norm_eps=1e-6)
    own, at = {}, "transformer.visual"
    torch.manual_seed(6)
    own[f"{at}.conv1.weight"] = random(32, 3, 14, 14, scale=0.05)
    own[f"{at}.positional_embedding"] = random(4, 32, scale=0.5)
    norm(own, f"{at}.ln_pre", 32)
    for i in range(2):
        layer = f"{at}.transformer.resblocks.{i}"
        norm(own, f"{layer}.ln_1", 32)
        norm(own, f"{layer}.ln_2", 32)
        dense(own, f"{layer}.attn.in_proj", 96, 32)
        dense(own, f"{layer}.attn.out_proj", 32, 32)
        dense(own, f"{layer}.mlp.c_fc", 48, 32)
        dense(own, f"{layer}.mlp.c_proj", 32, 48)
    pool = f"{at}.attn_pool"
    own[f"{pool}.query"], own[f"{pool}.pos_embed"] = random(4, 256), random(4, 256, scale=0.5)
    dense(own, f"{pool}.kv_proj", 256, 32, bias=False)
    norm(own, f"{pool}.ln_q", 256)
    norm(own, f"{pool}.ln_kv", 256)
    own[f"{pool}.attn.in_proj_weight"] = random(768, 256)
    own[f"{pool}.attn.in_proj_bias"] = random(768, scale=0.2)
    dense(own, f"{pool}.attn.out_proj", 256, 256)
    norm(own, f"{at}.ln_post", 256)
    own[f"{at}.proj"] = random(256, 256)
    config = {
        "model_type": "qwen", "architectures": ["QWenLMHeadModel"], **sizes,
        "intermediate_size": 192, "num_hidden_layers": 2, "kv_channels": 64, "seq_length": 2048,
        "max_position_embeddings": 8192, "layer_norm_epsilon": 1e-6, "rotary_emb_base": 10000,
        "rotary_pct": 1.0, "use_dynamic_ntk": True, "use_logn_attn": True, "no_bias": True,
        "tie_word_embeddings": False,
        "visual": {
            "width": 32, "layers": 2, "heads": 4, "mlp_ratio": 1.5, "image_size": 56,
            "patch_size": 14, "output_dim": 256, "n_queries": 4, "image_start_id": 260,
        },
    }  # fmt: skip
    prompts = HubPrompts(folder, config, ["<img>", "</img>", "<imgpad>"])
    assert prompts.token("<img>") == 260
    whole = torch.nn.MultiheadAttention(256, 2, batch_first=True).eval()
    whole.in_proj_weight.data = own[f"{pool}.attn.in_proj_weight"]
    whole.in_proj_bias.data = own[f"{pool}.attn.in_proj_bias"]
    whole.out_proj.weight.data = own[f"{pool}.attn.out_proj.weight"]
    whole.out_proj.bias.data = own[f"{pool}.attn.out_proj.bias"]

    def stretched(table):
        grid = table.view(1, 2, 2, -1).permute(0, 3, 1, 2)
        return F.interpolate(grid, (4, 4), mode="bicubic")[0].flatten(1).T

    def rows_of(item):
        x = F.conv2d(normal(item), own[f"{at}.conv1.weight"], stride=14)[0].flatten(1).T
        x = layer_norm(x + stretched(own[f"{at}.positional_embedding"]), own, f"{at}.ln_pre", 1e-6)
        for i in range(2):
            layer = f"{at}.transformer.resblocks.{i}"
            y = linear(layer_norm(x, own, f"{layer}.ln_1", 1e-6), own, f"{layer}.attn.in_proj")
            q, k, v = y.view(-1, 4, 3, 8).unbind(2)
            x = x + linear(attend(q, k, v), own, f"{layer}.attn.out_proj")
            y = linear(layer_norm(x, own, f"{layer}.ln_2", 1e-6), own, f"{layer}.mlp.c_fc")
            x = x + linear(F.gelu(y), own, f"{layer}.mlp.c_proj")
        x = layer_norm(linear(x, own, f"{pool}.kv_proj"), own, f"{pool}.ln_kv", 1e-6)
        query = layer_norm(own[f"{pool}.query"], own, f"{pool}.ln_q", 1e-6)
        places = own[f"{pool}.pos_embed"]
        found, _ = whole((query + places)[None], (x + stretched(places))[None], x[None])
        return layer_norm(found[0], own, f"{at}.ln_post", 1e-6) @ own[f"{at}.proj"]

    tensors = joined_names(text.state_dict(), QWEN, "attn.c_attn") | own
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


# -- Molmo --------------------------------------------------------------------------------------

CLIP_TO_MOLMO = {
    "vision_model.": "",
    "embeddings.class_embedding": "class_embedding",
    "embeddings.position_embedding.weight": "positional_embedding",
    "embeddings.patch_embedding": "patch_embedding",
    "pre_layrnorm": "pre_ln",
    "encoder.layers": "transformer.resblocks",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.out_proj": "attention.wo",
    "layer_norm1": "attention_norm",
    "layer_norm2": "ffn_norm",
    "mlp.fc1": "feed_forward.w1",
    "mlp.fc2": "feed_forward.w2",
}
MOLMO_ROWS = 261
"""Of the vocabulary: tokens of images are behind it."""
MOLMO_IMAGES = {
    "max_crops": 6, "overlap_margins": [2, 2], "base_image_input_size": [112, 112],
    "image_patch_size": 14,
}  # fmt: skip


def molmo_text(text, norms):
    """Tensors of a text half under Molmo's names. norms: of a layer, theirs -> Molmo's.

    Those of OLMoE have the names of MolmoE, whose layers are of modules.
    """
    at, found = "model.transformer", {}
    tensors = text.state_dict()
    rows = tensors["model.embed_tokens.weight"]
    found[f"{at}.wte.embedding"] = rows[:MOLMO_ROWS]
    found[f"{at}.wte.new_embedding"] = rows[MOLMO_ROWS:]
    found[f"{at}.ln_f.weight"] = tensors["model.norm.weight"]
    sparse = text.config.model_type == "olmoe"
    for i in range(text.config.num_hidden_layers):
        ours, own = f"model.layers.{i}", f"{at}.blocks.{i}"
        for theirs, name in norms.items():
            found[f"{own}.{name}.weight"] = tensors[f"{ours}.{theirs}.weight"]
        attention = f"{own}.attn" if sparse else own
        found[f"{attention}.attn_out.weight"] = tensors[f"{ours}.self_attn.o_proj.weight"]
        for param in ("weight", "bias"):
            parts = [tensors.get(f"{ours}.self_attn.{one}_proj.{param}") for one in "qkv"]
            if parts[0] is not None:
                found[f"{attention}.att_proj.{param}"] = torch.cat(parts)
        if sparse:
            found[f"{own}.mlp.gate.weight"] = tensors[f"{ours}.mlp.gate.weight"]
            banks = (tensors[f"{ours}.mlp.experts.{one}_proj"] for one in ("gate_up", "down"))
            for n, (both, down) in enumerate(zip(*banks, strict=True)):
                expert = f"{own}.mlp.experts.{n}"
                for one, matrix in zip(("gate", "up", "down"), (*both.chunk(2), down), strict=True):
                    found[f"{expert}.{one}_proj.weight"] = matrix
            continue
        halves = [tensors[f"{ours}.mlp.{one}_proj.weight"] for one in ("up", "gate")]
        found[f"{own}.ff_proj.weight"] = torch.cat(halves)
        found[f"{own}.ff_out.weight"] = tensors[f"{ours}.mlp.down_proj.weight"]
    return found


def molmo_of(folder, kind, norms, sizes=None, **more):
    text = text_half(kind, vocab_size=MOLMO_ROWS + 128, rms_norm_eps=1e-6, **(sizes or {}))
    head = text.lm_head.weight[:MOLMO_ROWS].detach().clone()
    text.lm_head.weight = torch.nn.Parameter(head[: MOLMO_ROWS - 1])
    tower = tower_of("CLIP", hidden_act="quick_gelu", image_size=112, num_hidden_layers=9)
    at = "model.vision_backbone"
    of_head = "lm_head.weight" if kind == "olmoe" else "model.transformer.ff_out.weight"
    tensors = molmo_text(text, norms) | {of_head: head}
    for name, one in tower.state_dict().items():
        if "position_ids" in name or "post_layernorm" in name:
            continue
        for theirs, hub in CLIP_TO_MOLMO.items():
            name = name.replace(theirs, hub)
        if name == "patch_embedding.weight":
            one = one.permute(0, 2, 3, 1).flatten(1)
        tensors[f"{at}.image_vit.{name}"] = one
    torch.manual_seed(6)
    own = {f"{at}.pad_embed": random(2, 64, scale=1.0)}
    for name, inputs in {"wq": 64, "wk": 64, "wv": 64, "wo": 32}.items():
        dense(own, f"{at}.image_pooling_2d.{name}", 32, inputs)
    for name, (outputs, inputs) in {"w1": (96, 32), "w2": (64, 96), "w3": (96, 32)}.items():
        dense(own, f"{at}.image_projector.{name}", outputs, inputs, bias=False)
    config = {
        "model_type": "molmo", "architectures": ["MolmoForCausalLM"], "hidden_size": 64,
        "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": MOLMO_ROWS - 1, "embedding_size": MOLMO_ROWS,
        "max_position_embeddings": 4096, "layer_norm_eps": 1e-6, "layer_norm_type": "rms",
        "rope_theta": 10000.0, "clip_qkv": None, "tie_word_embeddings": False,
        "vision_backbone": {
            "image_emb_dim": 32, "image_num_layers": 9, "image_num_heads": 4, "image_mlp_dim": 48,
            "image_patch_size": 14, "image_default_input_size": [112, 112],
        },
    } | more  # fmt: skip
    config = {name: one for name, one in config.items() if one != "absent"}
    special = ["<|endoftext|>", "<im_start>", "<im_end>", "<im_patch>", "<im_col>"]
    prompts = HubPrompts(folder, config, special, MOLMO_IMAGES)
    (folder / "preprocessor_config.json").write_text(json.dumps(MOLMO_IMAGES))

    def rows_of(item):
        tall, wide = item.sizes["grid"]
        hidden = tower(normal(item), output_hidden_states=True).hidden_states
        x = torch.cat((hidden[8], hidden[1]), -1)[:, 1:]
        for kind, mark in enumerate(own[f"{at}.pad_embed"], 1):
            x = x + mark * torch.from_numpy(array(item, "pads") == kind)[..., None]
        cells = x.view(-1, 4, 2, 4, 2, 64).transpose(2, 3).reshape(-1, 4, 64)
        pool = f"{at}.image_pooling_2d"
        q = linear(cells.mean(1, keepdim=True), own, f"{pool}.wq").view(-1, 1, 4, 8)
        k, v = (linear(cells, own, f"{pool}.{one}").view(-1, 4, 4, 8) for one in ("wk", "wv"))
        weights = torch.einsum("nqhd,nkhd->nhqk", q, k).mul(8**-0.5).softmax(-1)
        rows = linear(torch.einsum("nhqk,nkhd->nqhd", weights, v).flatten(1), own, f"{pool}.wo")
        gate, up = (linear(rows, own, f"{at}.image_projector.{one}") for one in ("w1", "w3"))
        rows = linear(F.silu(gate) * up, own, f"{at}.image_projector.w2").view(-1, 4, 4, 64)
        # Crops are two squares apart, and overlap by two: a border's squares are the first's.
        whole = torch.full((2 * tall + 2, 2 * wide + 2, 64), float("nan"))
        for i, crop in enumerate(rows[1:]):
            y, x = 2 * (i // wide), 2 * (i % wide)
            top, left = int(y > 0), int(x > 0)
            below, right = 4 - int(y < 2 * tall - 2), 4 - int(x < 2 * wide - 2)
            place = whole[y + top : y + below, x + left : x + right]
            assert place.isnan().all()
            place[:] = crop[top:below, left:right]
        return torch.cat((rows[0].flatten(0, 1), whole.flatten(0, 1)))

    return HubModel(folder, config, tensors | own, prompts, rows_of, text, tuple(own), added=True)


@family
def molmo(folder):
    """As 7B-D and 72B are."""
    norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm"}
    return molmo_of(folder, "qwen2", norms, qkv_bias=True)


@family
def molmo_of_olmo(folder):
    """As 7B-O is."""
    norms = {"post_attention_layernorm": "attn_norm", "post_feedforward_layernorm": "ff_norm"}
    norms |= {"self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm"}
    more = {"norm_after": True, "attention_layer_norm": True}
    return molmo_of(folder, "olmo2", norms, **more)


@family
def molmo_of_experts(folder):
    """As MolmoE-1B is."""
    norms = {"input_layernorm": "attn.attn_norm", "post_attention_layernorm": "mlp.ff_norm"}
    norms |= {"self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm"}
    usual = {
        "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads", "intermediate_size": "mlp_hidden_size",
    }  # fmt: skip
    more = dict.fromkeys(usual, "absent") | {
        "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": None, "mlp_hidden_size": None,
        "mlp_ratio": 3, "block_type": "moe", "moe_num_experts": 8, "moe_top_k": 3,
        "moe_dropless": True, "attention_layer_norm": True, "rope": True, "rope_impl": "llama",
        "weight_tying": False, "tie_word_embeddings": "absent", "image_pooling_2d": "attention-meanq",
        "vit_layers": [-2, -9], "image_padding_embed": "pad_and_partial_pad", "head_dim": None,
    }  # fmt: skip
    sizes = {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 3}
    return molmo_of(folder, "olmoe", norms, sizes, **more)
