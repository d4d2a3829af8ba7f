"""CodeGen: GPT-J with one tensor of queries, values and keys, a share of them for each of 4 cores.

Source: model_type "codegen", https://huggingface.co/Salesforce/codegen-350M-mono; transformers
        modeling_codegen.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.errors import ConfigError
from quire.models import gptj
from quire.models.base import Hf, Weights

CORES = 4  # that the published models were trained on: a constant of the format

CONVENTIONS = {
    "mlp_kind": "plain",
    "defaults": {"n_positions": 2048, "rotary_dim": 64, "activation_function": "gelu_new"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(gptj.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> gptj.Config:
        config = gptj.Config.from_hf(hf)
        if config.heads % CORES:
            raise ConfigError(
                f"config.json: n_head is {config.heads}; it must be a multiple of {CORES}"
            )
        return replace(config, head_order=_head_order(config.heads))


def _head_order(heads: int) -> tuple[int, ...]:
    """Each core has its queries, values and keys."""
    share = heads // CORES
    places = {
        kind: [core * 3 * share + at * share + i for core in range(CORES) for i in range(share)]
        for at, kind in enumerate("qvk")
    }
    return (*places["q"], *places["k"], *places["v"])


class Model(gptj.Model):
    weights = Weights(
        strip=gptj.Model.weights.strip,
        rename=gptj.Model.weights.rename,
        ignore=("*.attn.causal_mask", "*.attn.masked_bias"),
    )
