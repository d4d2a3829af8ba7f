"""Folders of small models to quantize, whose rows are whole groups of 128."""

from tests.cpu.tiny_models import SHAPES, write_model

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "head_dim": 32,
}


def write_source(folder, model_type="llama", **more):
    """A model with a head of its own."""
    SHAPES.setdefault(model_type, {})
    sizes = SIZES if model_type != "gpt2" else {"n_embd": 64, "n_head": 4, "n_layer": 1}
    return write_model(
        folder, model_type, **sizes | {"tie_word_embeddings": model_type == "gpt2"} | more
    )
