"""Folders of tiny pooling models with tokenizers, as sentence-transformers writes and reads them.

encoder_folder   a model of transformers and its tokenizer
st_folder        sentence-transformers' folder around one; the oracle is returned
older_format     the same folder with the files of sentence-transformers before version 5
"""

import json
import string

import torch
from safetensors.torch import load_file

from tests.cpu.encoders.tiny_encoders import VARIANTS, write_peer

OLDER_KEYS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""Method -> key of older files; several are concatenated in this order."""
METHODS = tuple(OLDER_KEYS)
OLDER_TYPES = {
    "Transformer": "sentence_transformers.models.Transformer",
    "Pooling": "sentence_transformers.models.Pooling",
    "Dense": "sentence_transformers.models.Dense",
    "Normalize": "sentence_transformers.models.Normalize",
}
LINES = (
    "the of and to in is that for it as was with be by on not he his but at are this have from "
    "or had an they which one you were all her she there would their we him been has when who "
    "will no more if out so up said what its about than into them can only other time new some "
    "could these two may first then do any like my now over such our man me even most made after"
)
WORDS = LINES.split()
VOCAB = 150
UNIGRAM = ("roberta", "xlm-roberta", "camembert", "mpnet")
"""Model types whose tokenizer here is a Unigram with <s> and </s>; the others' is a WordPiece."""


def texts(limit, count=14):
    """Texts of about 1 to more than `limit` tokens, each of words of its own."""
    generator = torch.Generator().manual_seed(7)
    lengths = [0, 1, 2, 3, 5, 9, 17, 31, 60, limit - 2, limit - 1, limit, 2 * limit]
    lengths += [4] * (count - len(lengths))
    found = []
    for n in lengths:
        own = torch.randint(len(WORDS), (6,), generator=generator).tolist()
        picks = torch.randint(len(own), (n,), generator=generator).tolist()
        found.append(" ".join(WORDS[own[pick]] for pick in picks))
    return found


def wordpiece(**settings):
    """BERT's tokenizer: [CLS] A [SEP] B [SEP], with types 0 and 1."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    letters = string.ascii_lowercase
    vocab = [*names.values(), *letters, *(f"##{letter}" for letter in letters)]
    vocab += [word for word in WORDS if len(word) > 1][: VOCAB - len(vocab)]
    tokenizer = Tokenizer(
        models.WordPiece({piece: at for at, piece in enumerate(vocab)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    settings |= {f"{name}_token": piece for name, piece in names.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def unigram(**settings):
    """XLM-RoBERTa's tokenizer: <s> A </s> </s> B </s>; the padding token is 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = [(piece, 0.0) for piece in specials]
    pieces += [(letter, -9.0) for letter in string.ascii_lowercase]
    pieces += [("\u2581", -8.0)]
    pieces += [(f"\u2581{word}", -4.0) for word in WORDS][: VOCAB - len(pieces)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token="<mask>",
        **settings,
    )


def encoder_folder(folder, variant, head="none", **settings):
    """A model of transformers with its tokenizer; the model is returned."""
    hf = VARIANTS[variant]
    model = write_peer(folder, variant, head, **settings)
    inputs = ["input_ids", "attention_mask"]
    if hf.get("type_vocab_size", 1) > 1:
        inputs.append("token_type_ids")
    build = unigram if hf["model_type"] in UNIGRAM else wordpiece
    build(model_max_length=limit_of(hf), model_input_names=inputs).save_pretrained(folder)
    return model


def limit_of(hf):
    """Tokens of the longest sequence of a model."""
    offset = hf["pad_token_id"] + 1 if hf["model_type"] in UNIGRAM else 0
    return hf["max_position_embeddings"] - offset


def st_folder(folder, variant, methods=("mean",), *, dense=(), normalize=False, **settings):
    """A SentenceTransformer, saved to the folder. dense: (outputs, activation) of each layer.

    settings: of SentenceTransformer, or `max_seq_length`, `include_prompt`.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    encoder = folder.with_name(f"{folder.name}_transformers")
    encoder_folder(encoder, variant)
    length = settings.pop("max_seq_length", None)
    include = settings.pop("include_prompt", True)
    transformer = Transformer(str(encoder), max_seq_length=length)
    pooling = Pooling(transformer.get_embedding_dimension(), list(methods), include)
    modules = [transformer, pooling]
    width = pooling.get_embedding_dimension()
    for outputs, activation in dense:
        layer = Dense(width, outputs, activation_function=activation)
        torch.nn.init.normal_(layer.linear.weight, std=width**-0.5)
        modules.append(layer)
        width = outputs
    if normalize:
        modules.append(Normalize())
    model = SentenceTransformer(modules=modules, device="cpu", **settings).eval()
    model.save(str(folder), create_model_card=False)  # a card takes a second
    return model


def older_format(folder, methods):
    """Rewrite a folder as versions before 5 had it: flags of pooling modes, older module paths."""
    modules = json.loads((folder / "modules.json").read_text())
    for module in modules:
        kind = module["type"].rpartition(".")[2]
        module["type"] = OLDER_TYPES[kind]
        own = folder / module["path"]
        if kind == "Pooling":
            (config,) = own.glob("*.json")
            saved = json.loads(config.read_text())
            flags = {key: method in methods for method, key in OLDER_KEYS.items()}
            size = {"word_embedding_dimension": saved["embedding_dimension"]}
            config.write_text(json.dumps(size | flags | {"include_prompt": True}))
        if kind == "Dense":
            weights = own / "model.safetensors"
            torch.save(load_file(weights), own / "pytorch_model.bin")
            weights.unlink()
    (folder / "modules.json").write_text(json.dumps(modules))
