"""Folders of tiny multimodal checkpoints, complete as a hub has them, with tokenizers of bytes."""

import json

import torch
from tokenizers import AddedToken, Tokenizer

from tests.cpu.multimodal import families, qwen_models, unusual
from tests.cpu.tiny_models import TEMPLATE, write_tokenizer

QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' or 'image_url' in p %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif p.type == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in p %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MLLAMA_TEMPLATE = (
    "<|begin_of_text|>{% for m in messages %}{{ m.role }}: {% if m.content is string %}"
    "{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}<|image|>"
    "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)
ENDINGS = {"eos_token_id": list(range(2, 400, 10))}  # so that random models come to an end


def add_tokens(folder, tokens, template):
    """Add special tokens to the tokenizer of a folder; return their ids."""
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in tokens])
    tokenizer.save(path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return [tokenizer.token_to_id(one) for one in tokens]


def save(folder, config, processor, endings):
    from transformers import AutoModelForMultimodalLM

    from tests.cpu.models.peers import scale_weights

    torch.manual_seed(1)
    model = AutoModelForMultimodalLM.from_config(config).eval()
    scale_weights(model, 2.0)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(endings))
    values = getattr(processor, "image_processor", processor).to_dict()
    (folder / "preprocessor_config.json").write_text(json.dumps(values, default=str))


def write_llava(folder, endings=ENDINGS, template=TEMPLATE):
    """As llava-hf/llava-1.5-7b-hf. Its template takes text alone."""
    size = write_tokenizer(folder, template)
    (image,) = add_tokens(folder, ["<image>"], template)
    config, processor = families.llava()
    config.image_token_index = config.image_token_id = image
    config.text_config.vocab_size = size + 8
    config.text_config.max_position_embeddings = 8192
    save(folder, config, processor, endings)
    return folder


def write_qwen2_vl(folder, endings=ENDINGS):
    """As Qwen/Qwen2-VL-2B-Instruct. Its template takes parts."""
    from transformers import AutoConfig

    size = write_tokenizer(folder)
    ids = add_tokens(folder, list(qwen_models.SPECIAL), QWEN_TEMPLATE)
    names = [f"{one}_token_id" for one in ("vision_start", "vision_end", "image", "video")]
    text, vision = qwen_models.FAMILIES["qwen2_vl"]
    config = AutoConfig.for_model(
        "qwen2_vl",
        text_config=qwen_models.TEXT | text | {"vocab_size": size + 8},
        vision_config=vision,
        **dict(zip(names, ids)),
    )
    save(folder, config, qwen_models.processor_of("qwen2_vl"), endings)
    return folder


def write_mllama(folder, endings=ENDINGS):
    """As meta-llama/Llama-3.2-11B-Vision-Instruct: the mark of images is behind the vocabulary."""
    size = write_tokenizer(folder)
    first, image = add_tokens(folder, ["<|begin_of_text|>", "<|image|>"], MLLAMA_TEMPLATE)
    config, images = unusual.mllama_of(image, image, first)
    assert image == size + 1
    save(folder, config, images, endings)
    return folder
