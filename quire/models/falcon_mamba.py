"""Falcon-Mamba: Mamba with norms, without weights, of time steps, B and C.

Source: model_type "falcon_mamba", https://huggingface.co/tiiuae/falcon-mamba-7b; transformers
        modeling_falcon_mamba.py
"""

from quire.models import mamba

CONVENTIONS = {
    "recurrent": "mamba",
    "positions_kind": "computed",
    "tied": True,
    "defaults": {
        "num_attention_heads": 1,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "vocab_size": 65024,
        "expand": 2,
        "state_size": 16,
        "conv_kernel": 4,
        "mixer_rms_eps": 1e-6,
    },
}

Config = mamba.Config
Model = mamba.Model
