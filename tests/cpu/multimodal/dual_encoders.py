"""Folders of tiny models that embed a text or an image, and their oracles of transformers."""

import torch

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 199, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "patch_size": 14,
}  # fmt: skip
EOS = 190
"""An end token that is not the last word."""


def tokenizer_of(eos, pad):
    """A tokenizer of words: <s> text eos for CLIP, text eos for SigLIP."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<s>": 1, "</s>": eos, "<fill>": 3, "<unk>": 4}
    vocab |= {f"w{i}": i for i in range(5, 189)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    head = "" if pad else "<s> "
    made.post_processor = processors.TemplateProcessing(
        single=f"{head}$A </s>", special_tokens=[("<s>", 1), ("</s>", eos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        pad_token="<fill>" if pad else "<pad>", model_input_names=["input_ids"],
    )  # fmt: skip


def parts_of(kind):
    """(config, image processor, tokenizer) of transformers."""
    from transformers import AutoConfig, CLIPImageProcessorPil, SiglipImageProcessorPil
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    if kind.startswith("clip"):
        eos = 2 if kind == "clip with the old end token" else EOS
        config = AutoConfig.for_model(
            "clip", text_config=TEXT | {"eos_token_id": eos, "max_position_embeddings": 30},
            vision_config=VISION | {"image_size": 56}, projection_dim=20,
        )  # fmt: skip
        images = CLIPImageProcessorPil(
            size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
        )
        return config, images, tokenizer_of(EOS, pad=False)
    text = TEXT | {"max_position_embeddings": 16, "projection_size": 24}
    sizes = {"num_patches": 16} if kind == "siglip2" else {"image_size": 56}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=VISION | sizes)
    images = SiglipImageProcessorPil(size={"height": 56, "width": 56})
    if kind == "siglip2":
        images = Siglip2ImageProcessorPil(patch_size=14, max_num_patches=20)
    return config, images, tokenizer_of(EOS, pad=True)


def write(kind, folder):
    """Save a model with random weights; return it with its processors."""
    from transformers import AutoModel

    config, images, tokenizer = parts_of(kind)
    torch.manual_seed(3)
    model = AutoModel.from_config(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim > 1:  # as large as a trained model's
                value.normal_(0, 1.5 / value[0].numel() ** 0.5)
            elif value.ndim:
                value += 0.2 * torch.randn_like(value)
    model.save_pretrained(folder)
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, images, tokenizer
