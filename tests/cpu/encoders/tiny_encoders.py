"""Tiny encoders of transformers with random weights, and our models of the same checkpoints.

A file tiny/<variant>.json is a config.json.
"""

import itertools
import json
from pathlib import Path

import torch

from quire.attention import packed
from quire.attention.base import AttentionMetadata
from quire.config.model_identity import resolve_identity
from quire.kernels.framework import lazy_fusion
from quire.models.base import StepInputs
from quire.models.build import build_model, read_model_config

TINY = Path(__file__).parent / "tiny"
VARIANTS = {path.stem: json.loads(path.read_text()) for path in sorted(TINY.glob("*.json"))}
CLASSES = {
    "none": "AutoModel",
    "lm": "AutoModelForMaskedLM",
    "classify": "AutoModelForSequenceClassification",
    "token_classify": "AutoModelForTokenClassification",
}
"""Head -> class of transformers."""
LABELS = 5


def write_peer(folder, variant, head="none", dtype=torch.float32, **settings):
    """A transformers model with random weights, saved to the folder as well."""
    import transformers

    hf = {"num_labels": LABELS, **VARIANTS[variant], **settings}
    model_type = hf.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **hf)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = getattr(transformers, CLASSES[head]).from_config(config).eval()
    scale_weights(model)
    model.to(dtype).save_pretrained(folder)
    return model.float()


@torch.no_grad()
def scale_weights(model):
    """Weights as large as a trained model's, so that states of different texts differ."""
    for name, value in model.named_parameters():
        noise = torch.randn_like(value)
        if value.ndim == 1:
            value += 0.1 * noise
        elif "embeddings." in name or "relative" in name:
            value.copy_(noise if "word" in name or "relative" in name else 0.25 * noise)
        else:
            value.copy_(noise * 1.2 / value.shape[-1] ** 0.5)


def ours(folder, head="none", dtype=torch.float32, **settings):
    """(model, config) of the checkpoint in a folder."""
    hf = json.loads((folder / "config.json").read_text())
    labels = LABELS if "classify" in head else 0
    model_type, config = read_model_config(resolve_identity(hf), head=head, labels=labels)
    settings = {"folder": folder, "progress": False, **settings}
    return build_model(model_type, config, dtype=dtype, **settings), config


@torch.inference_mode()
def hidden_of(model, texts, types=None, device="cpu"):
    """Hidden states [n, E] of each text, all in one step. types: token types of each text."""
    lengths = [len(text) for text in texts]

    def there(ints):
        return torch.tensor(list(ints), dtype=torch.int32, device=device)

    batch = AttentionMetadata(
        q_starts=there([0, *itertools.accumulate(lengths)]),
        contexts=there(lengths),
        tables=(),
        slots=(),
        max_query=max(lengths),
        max_context=max(lengths),
    )
    step = StepInputs(
        there(itertools.chain(*texts)),
        there(itertools.chain(*map(range, lengths))),
        packed.Backend([]).plan(batch),
        token_types=None if types is None else there(itertools.chain(*types)),
    )
    hidden = model(step)
    lazy_fusion.flush()
    return hidden.split(lengths)


def texts_of(lengths, vocab, seed=0):
    """Random token ids, none of which is a special one."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, vocab, (n,), generator=generator).tolist() for n in lengths]
