"""A media pipeline of LLaVA with real worker processes, on a tokenizer of characters."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.engine.startup.text_setup import start_media_worker
from quire.media.limits import MediaLimits
from quire.media.pipeline import MediaPipeline, PipelineSettings
from quire.media.processor import ProcessorFiles
from quire.text.tokenizing.tokenizer import load_tokenizer

SIDE, PATCH = 28, 14
ROWS = (SIDE // PATCH) ** 2
CONFIG = {
    "model_type": "llava",
    "image_token_index": 3,
    "vision_feature_select_strategy": "default",
    "vision_config": {"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH},
    "text_config": {"model_type": "llama", "hidden_size": 8},
}
PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": SIDE},
    "crop_size": {"height": SIDE, "width": SIDE},
}


def write_tokenizer(folder):
    """One token for each byte of ASCII, and the special tokens <pad>, <s>, </s>, <image>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<s>", "</s>", "<image>", *alphabet]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in names[:4]])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def make_pipeline(tokenizer):
    """Makes pipelines of these settings; ends their workers."""
    made = []

    def make(launch=start_media_worker, **settings):
        files = ProcessorFiles(
            CONFIG,
            {"image": PREPROCESSOR},
            {},
            encode=lambda text: tokenizer.encode(text, False),
            vocabulary=tokenizer.backend.token_to_id,
        )
        settings = {"limits": MediaLimits(), "cache_bytes": 1 << 20} | settings
        made.append(MediaPipeline("llava", files, PipelineSettings(**settings), launch))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def pipeline(make_pipeline):
    return make_pipeline()
