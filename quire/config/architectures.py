"""Architectures: how each known one is served, and why some are refused.

    native         a file of quire/models, which the registry finds; it wins over what is here
    transformers   the class of transformers, with quire's attention (quire/models/transformers)
    refused        the reason, in one clause

A model type that is not here is served if the class of transformers passes the checks of a start.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from quire.config.conventions import conventions_of
from quire.errors import ConfigError
from quire.registry import PluginRegistry

Served = Literal["native", "transformers", "refused"]

_RECURRENT = "layers keep a recurrent state per sequence, for which the KV cache has no place"
_CONVOLUTION = "layers convolve the last tokens of a sequence, for which the KV cache has no place"
_OWN_ATTENTION = "the class of transformers computes attention by itself, without its interface"
_CACHE_POSITIONS = "the class of transformers takes positions from its own cache, not from the step"
_BIDIRECTIONAL = "it is an encoder: a token attends to the tokens after it"
_INDEXER = "sparse attention has an index of its own, with keys that the KV cache has no place for"
_ENCODER_DECODER = "it is an encoder-decoder, and the class of transformers serves decoders only"
_CODEBOOKS = "it generates audio codes, not text"

REFUSED: dict[str, str] = {
    _RECURRENT: (
        "bailing_hybrid bamba falcon_h1 falcon_mamba jamba kimi_linear mamba mamba2 minimax "
        "nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next "
        "qwen4_exp qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2"
    ),
    _CONVOLUTION: "inkling2_text inkling_text lfm2 lfm2_moe lfm3 zaya",
    _OWN_ATTENTION: (
        "big_bird bloom codegen cpmant falcon git gpt_neo gpt_neox_japanese gptj megatron-bert mpt "
        "openai-gpt reformer rembert roformer trocr xglm xlm xlnet"
    ),
    _CACHE_POSITIONS: (
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart pegasus plbart"
    ),
    _BIDIRECTIONAL: ("bert bert-generation camembert electra ernie roberta xlm-roberta xmod"),
    _INDEXER: "axk2 deepseek_v32 dots3_note dots3_note_text glm_moe_dsa hy_v4",
    _ENCODER_DECODER: (
        "fsmt led longt5 m2m_100 mt5 mvp nllb-moe pegasus_x prophetnet switch_transformers t5 "
        "t5gemma t5gemma2 umt5"
    ),
    _CODEBOOKS: "musicgen musicgen_melody",
    "attention is over compressed blocks of earlier tokens": "deepseek_v4",
    "attention adds a learned term for each key, which the attention kernels do not take": "doge",
    "it reads patches of bytes, whose number depends on their content": "blt",
    "it drafts for another model, whose keys and values it reads": (
        "gemma4_assistant gemma4_unified_assistant"
    ),
}
"""Reason -> model types, separated by spaces, unless there is a native file."""
MEDIA = "quire.models.multimodal"
"""Folder with a file for each multimodal model whose images, video or audio are read."""
LIMITS: dict[str, str] = {
    "granitemoehybrid": "only if all layers are attention",
    "minimax_m3_vl_text": "only if no layer is block-sparse",
}
"""Model types of transformers that are served in part; the rest is refused at the start."""
CLASSES: dict[str, str] = {
    "afmoe": "AfmoeForCausalLM",
    "albert": "AlbertModel",
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "aria_text": "AriaTextForCausalLM",
    "axk1": "AXK1ForCausalLM",
    "axk2": "AXK2ForCausalLM",
    "aya_vision": "AyaVisionForConditionalGeneration",
    "bailing_hybrid": "BailingHybridForCausalLM",
    "bamba": "BambaForCausalLM",
    "bart": "BartForConditionalGeneration",
    "beam": "BeamForCausalLM",
    "bert": "BertModel",
    "bert-generation": "BertGenerationDecoder",
    "big_bird": "BigBirdForCausalLM",
    "bigbird_pegasus": "BigBirdPegasusForConditionalGeneration",
    "biogpt": "BioGptForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "blenderbot": "BlenderbotForConditionalGeneration",
    "blenderbot-small": "BlenderbotSmallForConditionalGeneration",
    "blip": "BlipForConditionalGeneration",
    "blip-2": "Blip2ForConditionalGeneration",
    "blip_text_model": "BlipTextLMHeadModel",
    "bloom": "BloomForCausalLM",
    "blt": "BltForCausalLM",
    "camembert": "CamembertModel",
    "clip": "CLIPModel",
    "clip_text_model": "CLIPTextModel",
    "chatglm": "ChatGLMModel",
    "codegen": "CodeGenForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "cohere2_vision": "Cohere2VisionForConditionalGeneration",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "cohere_compass_text": "CohereCompassForCausalLM",
    "cpmant": "CpmAntForCausalLM",
    "ctrl": "CTRLLMHeadModel",
    "cwm": "CwmForCausalLM",
    "data2vec-text": "Data2VecTextModel",
    "dbrx": "DbrxForCausalLM",
    "deberta_v2": "DebertaV2Model",
    "deepseek": "DeepseekForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "deepseek_vl": "DeepseekVLForConditionalGeneration",
    "deepseek_vl_v2": "DeepseekVLV2ForCausalLM",
    "diffllama": "DiffLlamaForCausalLM",
    "distilbert": "DistilBertModel",
    "doge": "DogeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "dots3_note": "Dots3NoteForConditionalGeneration",
    "dots3_note_text": "Dots3NoteForCausalLM",
    "electra": "ElectraModel",
    "emu3": "Emu3ForConditionalGeneration",
    "emu3_text_model": "Emu3ForCausalLM",
    "ernie": "ErnieModel",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "eurobert": "EuroBertModel",
    "exaone4": "Exaone4ForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "falcon": "FalconForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "flint": "FlintForCausalLM",
    "fsmt": "FSMTForConditionalGeneration",
    "florence2": "Florence2ForConditionalGeneration",
    "fuyu": "FuyuForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n": "Gemma3nForConditionalGeneration",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_assistant": "Gemma4AssistantForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "gemma4_unified_assistant": "Gemma4UnifiedAssistantForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "git": "GitForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm4v": "Glm4vForConditionalGeneration",
    "glm_ocr": "GlmOcrForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "got_ocr2": "GotOcr2ForConditionalGeneration",
    "gpt2": "GPT2LMHeadModel",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_neox_japanese": "GPTNeoXJapaneseForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gpt-sw3": "GPT2LMHeadModel",
    "gptj": "GPTJForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "gte": "GteModel",
    "h2ovl_chat": "H2OVLChatModel",
    "helium": "HeliumForCausalLM",
    "hrm_text": "HrmTextForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "hy_v4": "HYV4ForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "idefics2": "Idefics2ForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "inkling2_text": "Inkling2ForCausalLM",
    "inkling_text": "InklingForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "internlm3": "LlamaForCausalLM",
    "internvl": "InternVLForConditionalGeneration",
    "internvl_chat": "InternVLChatModel",
    "iquestcoder": "LlamaForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "jamba": "JambaForCausalLM",
    "jetmoe": "JetMoeForCausalLM",
    "jina_bert": "JinaBertModel",
    "jina_embeddings_v3": "JinaEmbeddingsV3Model",
    "kimi_linear": "KimiLinearForCausalLM",
    "kimi_vl": "KimiVLForConditionalGeneration",
    "kolibri1": "Kolibri1ForCausalLM",
    "laguna": "LagunaForCausalLM",
    "led": "LEDForConditionalGeneration",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "lfm3": "Lfm3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "lighton_ocr": "LightOnOcrForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "llama4_text": "Llama4ForCausalLM",
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "llava_next_video": "LlavaNextVideoForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "longcat_flash": "LongcatFlashForCausalLM",
    "longt5": "LongT5ForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "marian": "MarianMTModel",
    "mbart": "MBartForConditionalGeneration",
    "megatron-bert": "MegatronBertForCausalLM",
    "mellum": "MellumForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "minicpmv4_6": "MiniCPMV4_6ForConditionalGeneration",
    "minicpmv4_7": "MiniCPMV4_7ForConditionalGeneration",
    "minimax": "MiniMaxForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "mllama": "MllamaForConditionalGeneration",
    "mllama_text_model": "MllamaForCausalLM",
    "modernbert": "ModernBertModel",
    "modernbert-decoder": "ModernBertDecoderForCausalLM",
    "moshi": "MoshiForCausalLM",
    "moss_transcribe_diarize": "MossTranscribeDiarizeForConditionalGeneration",
    "mpnet": "MPNetModel",
    "molmo": "MolmoForCausalLM",
    "mpt": "MptForCausalLM",
    "mt5": "MT5ForConditionalGeneration",
    "musicgen": "MusicgenForCausalLM",
    "musicgen_melody": "MusicgenMelodyForCausalLM",
    "mvp": "MvpForConditionalGeneration",
    "nanochat": "NanoChatForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "nllb-moe": "NllbMoeForConditionalGeneration",
    "nomic_bert": "NomicBertModel",
    "NVLM_D": "NVLM_D_Model",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "openai-gpt": "OpenAIGPTLMHeadModel",
    "opt": "OPTForCausalLM",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "pegasus_x": "PegasusXForConditionalGeneration",
    "persimmon": "PersimmonForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phi3_v": "Phi3VForCausalLM",
    "phi4mm": "Phi4MMForCausalLM",
    "phi4_multimodal": "Phi4MultimodalForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "plbart": "PLBartForConditionalGeneration",
    "prithvi": "PrithviViT",
    "prithvi_geospatial_mae": "PrithviGeoSpatialMAE",
    "prophetnet": "ProphetNetForConditionalGeneration",
    "qwen": "QWenLMHeadModel",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_omni": "Qwen2_5OmniModel",
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl_moe_text": "Qwen3VLMoeTextModel",
    "qwen4_exp": "Qwen4ExpForConditionalGeneration",
    "qwen4_exp_text": "Qwen4ExpForCausalLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "reformer": "ReformerModelWithLMHead",
    "rembert": "RemBertForCausalLM",
    "roberta": "RobertaModel",
    "roberta-prelayernorm": "RobertaPreLayerNormModel",
    "roc_bert": "RoCBertModel",
    "roformer": "RoFormerForCausalLM",
    "rwkv": "RwkvForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "siglip": "SiglipModel",
    "siglip2": "Siglip2Model",
    "siglip2_text_model": "Siglip2TextModel",
    "siglip_text_model": "SiglipTextModel",
    "skywork_chat": "SkyworkR1VChatModel",
    "smollm3": "SmolLM3ForCausalLM",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "solar_open": "SolarOpenForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "switch_transformers": "SwitchTransformersForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "t5gemma": "T5GemmaForConditionalGeneration",
    "t5gemma2": "T5Gemma2ForConditionalGeneration",
    "trocr": "TrOCRForCausalLM",
    "ultrabert": "UltraBertModel",
    "umt5": "UMT5ForConditionalGeneration",
    "vaultgemma": "VaultGemmaForCausalLM",
    "vipllava": "VipLlavaForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "xglm": "XGLMForCausalLM",
    "xlm": "XLMWithLMHeadModel",
    "xlm-roberta": "XLMRobertaModel",
    "xlm-roberta-xl": "XLMRobertaXLModel",
    "xlnet": "XLNetLMHeadModel",
    "xlstm": "xLSTMForCausalLM",
    "xmod": "XmodForCausalLM",
    "youtu": "YoutuForCausalLM",
    "zamba": "ZambaForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
    "zaya": "ZayaForCausalLM",
}
"""Model type -> architecture, the class in config.json."""
WRAPPERS: dict[str, str] = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "deepseek_vl": "llama",
    "deepseek_vl_v2": "deepseek_v2",
    "blip": "blip_text_model",
    "blip-2": "opt",
    "clip": "clip_text_model",
    "emu3": "emu3_text_model",
    "florence2": "bart",
    "fuyu": "persimmon",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "got_ocr2": "qwen2",
    "glm4v": "glm4",
    "glm_ocr": "glm4",
    "glm4v_moe": "glm4_moe",
    "h2ovl_chat": "mistral",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "internvl_chat": "qwen2",
    "kimi_vl": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "lighton_ocr": "qwen3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "minicpmv4_6": "qwen3_5_text",
    "minicpmv4_7": "qwen3_5_text",
    "mistral3": "mistral",
    "mllama": "mllama_text_model",
    "moss_transcribe_diarize": "qwen3",
    "NVLM_D": "qwen2",
    "paligemma": "gemma2",
    "phi3_v": "phi3",
    "prithvi_geospatial_mae": "prithvi",
    "qwen2_5_omni": "qwen2",
    "qwen2_5_omni_thinker": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe": "qwen3_moe",
    "qwen3_omni_moe_thinker": "qwen3_moe",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "siglip": "siglip_text_model",
    "siglip2": "siglip2_text_model",
    "skywork_chat": "qwen2",
    "smolvlm": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
"""Multimodal model -> type of its text half, which is what is served, if its config states none."""
ENCODED_HALVES = frozenset({"gemma3n_text"})
"""Text halves that run through transformers, and take rows of a media encoder there."""
HUB_WRAPPERS = frozenset(
    (
        *("chatglm", "deepseek_vl_v2", "h2ovl_chat", "internvl_chat", "kimi_vl", "molmo", "NVLM_D"),
        *("phi3_v", "phi4mm", "prithvi_geospatial_mae", "qwen", "skywork_chat"),
    )
)
"""Multimodal models whose code is in their repositories of the hub alone."""


class ModelAlias(NamedTuple):
    """Another name of a model type."""

    target: str
    unless: tuple[str, ...] = ()  # fields of features that the target lacks
    defaults: Mapping[str, Any] = {}  # that differ from the target's


_EPS, _BASE = {"rms_norm_eps": 1e-5}, {"rope_theta": 1_000_000.0}
_INTERLEAVED = {"mrope_interleaved": True}
ALIASES = {
    "aquila": ModelAlias("llama"),
    "internlm3": ModelAlias("llama", unless=("bias", "qkv_bias"), defaults=_EPS),
    "iquestcoder": ModelAlias("llama", unless=("clip_qkv", "use_sliding_window"), defaults=_EPS),
    "llama_bidirec": ModelAlias("llama", defaults={"is_causal": False}),
    "new": ModelAlias("gte"),
    "telechat3": ModelAlias("llama"),
    "xverse": ModelAlias("llama"),
    "mimo": ModelAlias("qwen2"),
    "kimi_k2": ModelAlias("deepseek_v3"),
    "xlm-roberta": ModelAlias("roberta"),
    "camembert": ModelAlias("roberta"),
    "chatglm_text": ModelAlias("chatglm"),
    "molmo_text": ModelAlias("molmo"),
    "phi3_v_text": ModelAlias("phi3"),
    "phi4_multimodal_text": ModelAlias("phi3"),
    "phi4mm_text": ModelAlias("phi4mm"),
    "qwen_text": ModelAlias("qwen"),
    "qwen2_vl_text": ModelAlias("qwen2", defaults=_EPS | _BASE),
    "qwen2_5_vl_text": ModelAlias("qwen2", defaults=_EPS | _BASE),
    "qwen2_5_omni_text": ModelAlias("qwen2", defaults=_BASE),
    "qwen3_vl_text": ModelAlias("qwen3", defaults={"rope_theta": 500_000.0} | _INTERLEAVED),
    "qwen3_omni_moe_text": ModelAlias(
        "qwen3_moe", defaults=_BASE | _INTERLEAVED | {"norm_topk_prob": True}
    ),
    "glm4v_text": ModelAlias("glm4", defaults=_EPS | {"partial_rotary_factor": 1.0}),
    "glm_ocr_text": ModelAlias(
        "glm4", defaults=_EPS | {"partial_rotary_factor": 1.0, "attention_bias": False}
    ),
    "glm4v_moe_text": ModelAlias("glm4_moe", defaults={"attention_bias": True}),
}
"""Model types whose layers and tensors are those of a model of another type.

The text halves of Qwen's have rotary positions per axis (time, height, width); the three of a text
are equal, which makes them the usual ones.
"""
POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")
ENCODER_DECODERS = ("ForConditionalGeneration", "MTModel")
"""Ends of the classes that generate from a source, beside multimodal ones."""
_HEAD = re.compile(
    r"(Model|For(CausalLM|MaskedLM|(Sequence|Token)Classification|\w*RewardModel))$", re.IGNORECASE
)
_REASONS = {name: reason for reason, names in REFUSED.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table."""

    name: str
    model_type: str
    served: Served
    note: str = ""  # why it is refused, or what of it is
    tasks: tuple[str, ...] = ()  # of `runner` generate, or of pooling

    @property
    def tested(self) -> str:
        """Folder of the tests that compare it with transformers. Empty: refused."""
        if self.tasks == POOLING_TASKS:
            return "tests/cpu/encoders"
        if self.tasks == ("embed",):
            return "tests/cpu/multimodal"
        folders = {"native": "tests/cpu/models", "transformers": "tests/cpu/models/fallback"}
        return folders.get(self.served, "")


def refusal_of(model_type: str) -> str | None:
    """Return why the class of transformers cannot be served, a clause; None: it may be."""
    return _REASONS.get(model_type)


def check_class(model_type: str) -> None:
    """Raise ConfigError with the reason if the class of transformers cannot be served."""
    if reason := refusal_of(model_type):
        raise ConfigError(f"models of type {model_type!r} are not supported: {reason}")


def check_served(model_type: str) -> None:
    """Raise ConfigError with the reason if a type is known to be served in no way."""
    if model_type not in PluginRegistry("quire.models").names():
        check_class(model_type)


def architectures() -> list[Architecture]:
    """Return every known architecture, by name."""
    native = set(PluginRegistry("quire.models").names())
    rows = [_with_tasks(_row(one, native)) for one in CLASSES]
    return sorted(rows, key=lambda row: row.name.lower())


def find_architectures(word: str) -> list[Architecture]:
    """Return those with `word` in their name or type; for a class with a head, those without it."""
    rows = architectures()
    for part in (word, _HEAD.sub("", word)):
        part = part.lower()
        if found := [one for one in rows if part in one.name.lower() or part in one.model_type]:
            return found
    return []


def similar_names(name: str, count: int = 3) -> list[str]:
    """Return known model types and architectures that are spelled like a name, nearest first."""
    known = {_plain(one): one for one in (*CLASSES, *CLASSES.values())}
    found = difflib.get_close_matches(_plain(name[:80]), known, n=count, cutoff=0.7)
    return [known[one] for one in found]


def _row(model_type: str, native: Sequence[str] | set[str]) -> Architecture:
    name, refusal = CLASSES[model_type], refusal_of(model_type)
    if model_type in WRAPPERS:
        half = _row(WRAPPERS[model_type], native)
        file = re.sub(r"\W", "_", model_type).lower()
        encodes = half.served == "native" or WRAPPERS[model_type] in ENCODED_HALVES
        encodes = encodes and file in PluginRegistry(MEDIA).names()
        has_words = not conventions_of({"model_type": WRAPPERS[model_type]}).states_are_results
        note = ("text and media" if has_words else "media") if encodes else half.note or "as text"
        note += ", from its description" if model_type in HUB_WRAPPERS else ""
        return Architecture(name, model_type, half.served, note)
    if model_type in native:
        note = "with media if it has a tower, from its description"
        return Architecture(name, model_type, "native", note if model_type in HUB_WRAPPERS else "")
    if model_type in ALIASES and ALIASES[model_type].target in native:
        return Architecture(name, model_type, "native", f"as {ALIASES[model_type].target}")
    if refusal is not None:
        return Architecture(name, model_type, "refused", refusal)
    return Architecture(name, model_type, "transformers", LIMITS.get(model_type, ""))


def _with_tasks(row: Architecture) -> Architecture:
    """Add what an architecture can do: decoders can be converted, with or without a head."""
    if row.served == "refused":
        return row
    model_type = WRAPPERS.get(row.model_type, row.model_type)
    if model_type in ALIASES:
        model_type = ALIASES[model_type].target
    conventions = conventions_of({"model_type": model_type})
    if conventions.embedding_field:
        return replace(row, tasks=("embed",))
    if conventions.states_are_results:
        return replace(row, tasks=("token_embed",))
    if conventions.bidirectional:
        return replace(row, tasks=POOLING_TASKS)
    if row.name.endswith(ENCODER_DECODERS) and row.model_type not in WRAPPERS:
        return replace(row, tasks=("generate",))
    return replace(row, tasks=("generate", *POOLING_TASKS))


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
