"""Pooling facts: what a model's files state about vectors and labels.

    modules.json and what it names      quire.config.sentence_transformers
    config.json                         class, labels, activation, matryoshka, dtype of heads

Fields of config.json are checked when they are read: those about labels mean nothing in a model
that generates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quire.config.conventions import conventions_of, fill_defaults
from quire.config.late_interaction import read_colbert_folder
from quire.config.pooler_config import PoolingMethod
from quire.config.sentence_transformers import FolderModules, activation_of, read_modules
from quire.errors import ConfigError

Json = Mapping[str, Any]
MAX_LABELS = 1 << 20
PROBLEM_TYPES = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
"""problem_type -> activation of logits."""
STATED_METHODS: dict[str, PoolingMethod] = {
    "avg": "mean",
    "mean": "mean",
    "cls": "cls",
    "last": "last",
    "lasttoken": "last",
    "bos": "cls",
    "late": "mean",  # each token is classified, then all are averaged: the same
}
"""`pooling` or `classifier_pooling` of config.json -> method."""
TOKEN_LAYERS = COLBERT_LAYER, SPARSE_LAYER = ("colbert_linear.pt", "sparse_linear.pt")
"""Files of BGE-M3: vectors of tokens are the first layer's; the second's are weights of tokens."""
LABEL_METHODS = ("from_2_way_softmax", "no_post_processing")
"""How logits of tokens become labels: one label, their difference; or each is a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFacts:
    """What the files state, before any option."""

    hf: Json = field(default_factory=dict)  # config.json, of the text half
    modules: FolderModules | None = None  # None: not a folder of sentence-transformers
    token_layers: tuple[str, ...] = ()  # which of TOKEN_LAYERS the folder has

    @property
    def architectures(self) -> tuple[str, ...]:
        """Classes of the outermost model."""
        return tuple(self.hf.get("wrapper_architectures") or self.hf.get("architectures") or ())

    @property
    def dense_bytes(self) -> int:
        """Bytes of the layers behind the pooling, in float32."""
        dense = () if self.modules is None else self.modules.dense
        return sum(one.outputs * (one.inputs + one.bias) for one in dense) * 4

    @property
    def bidirectional(self) -> bool:
        """Whether it is an encoder: every token attends to all others, and nothing is cached."""
        return is_bidirectional(self.hf)

    def embedding_method(self) -> PoolingMethod | None:
        """Return how its class pools embeddings; None: that is not known."""
        if not self.bidirectional:
            return "last"
        if (found := conventions_of(self.hf)).bidirectional:
            return found.embedding_state
        return self._stated_method("pooling")  # a decoder that was made an encoder: in any way

    @property
    def projects(self) -> bool:
        """Whether the model projects the one state that is an embedding."""
        return bool(conventions_of(self.hf).embedding_field)

    @property
    def states_are_results(self) -> bool:
        """Whether the states of all tokens are the result, and are not normalized."""
        return conventions_of(self.hf).states_are_results

    def embedding_size(self, hidden: int) -> int:
        """Return the numbers of an embedding. hidden: of a hidden state."""
        found = self.hf.get(conventions_of(self.hf).embedding_field)
        return found if _is_size(found) and isinstance(found, int) else hidden

    def end_token(self) -> int | Literal["highest"] | None:
        """Return the token whose first state is the embedding; None: there is no such token.

        "highest": of older files of CLIP, whose end token 2 is an error.
        """
        if not conventions_of(self.hf).ends_prompts:
            return None
        token = self.hf.get("eos_token_id")
        token = token[0] if isinstance(token, list) and token else token
        if not isinstance(token, int):
            raise _error("eos_token_id", token, "a token id")
        return "highest" if token == 2 else token

    def padding(self) -> tuple[int | None, int]:
        """Return the length to which texts are padded, None: they are not; and the token."""
        if not conventions_of(self.hf).pads_prompts:
            return None, 0
        return int(self.hf["max_position_embeddings"]), int(self.hf.get("pad_token_id") or 0)

    def classifier_method(self) -> PoolingMethod:
        """Return which state a head that classifies reads."""
        usual: PoolingMethod = "cls" if conventions_of(self.hf).bidirectional else "last"
        return self._stated_method("classifier_pooling") or usual

    def labels(self, usual: int = 2) -> tuple[str, ...]:
        """Return names of labels by index; `usual` without names, if there are none."""
        count, names = self.hf.get("num_labels"), self.hf.get("id2label")
        if names is not None and not isinstance(names, Mapping):
            raise _error("id2label", names, "an object from index to name")
        if count is not None and not (_is_size(count) and count <= MAX_LABELS):
            raise _error("num_labels", count, f"an integer from 1 to {MAX_LABELS}")
        by_index = {str(index): str(name) for index, name in (names or {}).items()}
        number = count or len(by_index) or usual
        if by_index.keys() == {str(i) for i in range(number)}:
            return tuple(by_index[str(i)] for i in range(number))
        if names and count is None:
            raise _error("id2label", names, f"an object with the keys 0 to {number - 1}")
        return tuple(f"LABEL_{i}" for i in range(number))

    def activation(self) -> str | None:
        """Return the activation of logits of labels; None: not stated.

        What sentence-transformers wrote has priority over the type of the problem.
        """
        if self.modules is not None and self.modules.activation is not None:
            return self.modules.activation
        nested = self.hf.get("sentence_transformers")
        nested = nested.get("activation_fn") if isinstance(nested, Mapping) else None
        old = self.hf.get("sbert_ce_default_activation_function")
        for key, value in (
            ("sentence_transformers.activation_fn", nested),
            ("sbert_ce_default_activation_function", old),
        ):
            if value is not None:
                return activation_of(value, f"config.json: {key}")
        problem = self.hf.get("problem_type")
        if problem is None:
            return None
        if not isinstance(problem, str) or problem not in PROBLEM_TYPES:
            raise _error("problem_type", problem, f"one of {', '.join(PROBLEM_TYPES)}")
        return PROBLEM_TYPES[problem]

    def label_tokens(self) -> tuple[str, ...]:
        """Return the tokens whose logits are labels; (): the head is in the checkpoint."""
        tokens = self.hf.get("classifier_from_token")
        if tokens is None:
            return ()
        is_list = isinstance(tokens, (list, tuple))
        if not is_list or not all(isinstance(one, str) for one in tokens):
            raise _error("classifier_from_token", tokens, "a list of tokens")
        return tuple(tokens)

    def matryoshka(self) -> tuple[bool, tuple[int, ...]]:
        """Return whether embeddings may be cut, and the sizes; (): to any."""
        sizes, declared = self.hf.get("matryoshka_dimensions"), self.hf.get("is_matryoshka")
        is_list = isinstance(sizes, (list, tuple))
        if sizes is not None and not (is_list and all(map(_is_size, sizes))):
            raise _error("matryoshka_dimensions", sizes, "a list of integers >= 1")
        if declared is not None and not isinstance(declared, bool):
            raise _error("is_matryoshka", declared, "true or false")
        return bool(declared or sizes), tuple(sorted(sizes or ()))

    def head_dtype(self) -> Literal["float32", "model"]:
        """Return the dtype of what is behind the pooling."""
        stated = self.hf.get("head_dtype")
        if stated in (None, "float32"):
            return "float32"
        if stated != "model":
            raise _error("head_dtype", stated, "float32 or model")
        return "model"

    def token_types(self) -> int:
        """Return the segments that the model distinguishes; 0: it reads none."""
        count = fill_defaults(self.hf).get("type_vocab_size") if self.bidirectional else None
        return count if isinstance(count, int) and count > 1 else 0

    def task_instructions(self) -> dict[str, str]:
        """Return the prompts that config.json has."""
        stated = self.hf.get("task_instructions") or {}
        if not isinstance(stated, Mapping) or not all(isinstance(x, str) for x in stated.values()):
            raise _error("task_instructions", stated, "an object from name to text")
        return dict(stated)

    def _stated_method(self, key: str) -> PoolingMethod | None:
        stated = fill_defaults(self.hf).get(key)
        if stated is None:
            return None
        if not isinstance(stated, str) or stated not in STATED_METHODS:
            raise _error(key, stated, f"one of {', '.join(STATED_METHODS)}")
        return STATED_METHODS[stated]


def read_pooling_facts(folder: Path, hf: Json, *, generates: bool = False) -> PoolingFacts:
    """Read them from a model's folder. Raises ConfigError.

    hf: of read_hf_config(). generates: the user wants text, so files about pooling are not read.
    """
    if generates:
        return PoolingFacts(hf=hf)
    modules = read_modules(folder) or read_colbert_folder(folder, hf)
    found = tuple(name for name in TOKEN_LAYERS if (folder / name).is_file())
    return PoolingFacts(hf=hf, modules=modules, token_layers=found)


def is_bidirectional(hf: Json) -> bool:
    """Whether every token of a model attends to all others."""
    stated = hf.get("is_causal") is False or hf.get("use_bidirectional_attention") in (True, "all")
    return stated or conventions_of(hf).bidirectional


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _error(key: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"config.json: {key} is {value!r:.80}; it must be {allowed}")
