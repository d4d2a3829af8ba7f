"""Contract of media processors: what a model family makes of one image, video or recording.

    process   decoded item -> tensors for the encoder    in a worker process, without a tokenizer
    expand    sizes of the item -> token ids and runs    in the API process; pure and cheap

A family is one file in quire/media/processors that defines `Processor`. It imports NumPy and PIL,
never torch: API processes and workers start without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt

from quire.core.types import MediaTensor
from quire.errors import RequestError
from quire.registry import PluginRegistry

Modality = Literal["image", "video", "audio"]
Pixels = npt.NDArray[np.uint8]
Settings = Mapping[str, Any]

SOUND_KWARGS = ("use_audio_in_video", "load_audio_from_video")
"""Options of mm_processor_kwargs that let the sound of a video be read with it: names of the
hub's processors, of which the first is the older."""
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template for models that were not trained with one: contents alone."""

PROCESSORS = PluginRegistry("quire.media.processors")
MAX_KWARG_PIXELS = 1 << 26
"""Largest number of pixels that options of a request may set."""


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """pixels: [height, width, 3] in RGB, upright, transparency on white."""

    pixels: Pixels


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """What the source of the frames is, and which of its frames they are."""

    fps: float  # of the source; frames per second
    frames_indices: tuple[int, ...]  # of the decoded frames in the source
    total_num_frames: int  # of the source
    duration: float  # of the source; seconds


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    """samples: [n], mono, in the sampling rate that the processor declares."""

    samples: npt.NDArray[np.float32]
    sampling_rate: int


@dataclass(frozen=True, slots=True)
class DecodedVideo:
    """frames: [frames, height, width, 3] in RGB; already sampled, never sample them again.

    sound: read with the frames, from the first of them on. None: the frames alone are read.
    """

    frames: Pixels
    info: VideoInfo
    sound: DecodedAudio | None = None


DecodedMedia = DecodedImage | DecodedVideo | DecodedAudio


@dataclass(frozen=True, slots=True)
class ProcessedMedia:
    """One item as its encoder reads it.

    sizes: what `expand` and `rope` need of it, such as its grid; numbers and tuples of numbers.
    """

    modality: Modality
    tensors: tuple[MediaTensor, ...]
    sizes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Expansion:
    """The tokens of one item in the prompt.

    runs: (offset in token_ids, count) of the tokens that take rows of the encoder, in order.
    bidirectional: tokens of one run attend to each other in both directions.
    replaces: ids of the placeholder that it replaces; (): it has none and is inserted.
    insert_at: index in the prompt, without other items, where an item without placeholder goes.
    shares_border: right behind another such item, the first token is left out: it is the last one
        of that item.
    source_rows: rows of the encoder that cross attention reads; `runs` is then ().
    """

    token_ids: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    bidirectional: bool = False
    replaces: tuple[int, ...] = ()
    insert_at: int = 0
    shares_border: bool = False
    source_rows: int = 0

    @property
    def rows(self) -> int:
        """Rows of the encoder that it takes."""
        return sum(count for _, count in self.runs)

    def without_first(self) -> Expansion:
        """Return it without its first token, which is in no run."""
        runs = tuple((start - 1, count) for start, count in self.runs)
        return replace(self, token_ids=self.token_ids[1:], runs=runs)


@dataclass(frozen=True, slots=True)
class ExpandedItem:
    """An item at its place in the whole prompt: start is the position of its first token."""

    modality: Modality
    start: int
    expansion: Expansion
    sizes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KwargRange:
    """Allowed values of one option of mm_processor_kwargs.

    keys: the option is an object with these keys, each with a number in the range.
    """

    kind: type[int] | type[float] | type[bool]
    low: float = 1
    high: float = MAX_KWARG_PIXELS
    keys: tuple[str, ...] = ()

    def check(self, name: str, value: object) -> None:
        """Raise RequestError if the value is not allowed. name: mm_processor_kwargs.max_pixels."""
        if self.keys:
            if not isinstance(value, Mapping) or not set(value) <= set(self.keys) or not value:
                allowed = ", ".join(self.keys)
                raise _kwarg_error(f"{name} must be an object with {allowed}; got {value!r:.80}")
            for key, number in value.items():
                self._check_number(f"{name}.{key}", number)
        else:
            self._check_number(name, value)

    def _check_number(self, name: str, value: object) -> None:
        if self.kind is bool:
            if not isinstance(value, bool):
                raise _kwarg_error(f"{name} must be true or false; got {value!r:.80}")
            return
        kinds = int if self.kind is int else (int, float)
        number = isinstance(value, kinds) and not isinstance(value, bool)
        # A comparison with NaN is false.
        if not number or not self.low <= cast(float, value) <= self.high:
            what = "an integer" if self.kind is int else "a number"
            allowed = f"{what} in [{self.low:g}, {self.high:g}]"
            raise _kwarg_error(f"{name} must be {allowed}; got {value!r:.80}")


def reads_sound(kwargs: Settings) -> bool:
    """Whether options let the sound of videos be read with them."""
    return any(kwargs.get(name) for name in SOUND_KWARGS)


def _kwarg_error(message: str) -> RequestError:
    return RequestError(message, param=message.partition(".")[0])


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """Files of a checkpoint that processors read, and its tokenizer.

    config: the outer config.json.
    preprocessors: by modality, preprocessor_config.json and its successors.
    processor: processor_config.json without the parts that are in `preprocessors`.
    encode: token ids of a text, where special tokens are parsed and none are added. Workers have
        none: __init__ and process() of a processor must not use it.
    vocabulary: id of a token by its exact text; None: there is no such token.
    """

    config: Settings
    preprocessors: Mapping[str, Settings] = field(default_factory=dict)
    processor: Settings = field(default_factory=dict)
    encode: Callable[[str], Sequence[int]] | None = None
    vocabulary: Callable[[str], int | None] | None = None

    def preprocessor(self, modality: Modality) -> Settings:
        """Return the settings of a modality; of images for video that has none."""
        found = self.preprocessors.get(modality)
        if found is None and modality == "video":
            found = self.preprocessors.get("image")
        return found or {}

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text; None if there is none."""
        assert self.vocabulary is not None, "a worker has no tokenizer"
        return self.vocabulary(text)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text, with special tokens parsed and without BOS."""
        assert self.encode is not None, "a worker has no tokenizer"
        return tuple(self.encode(text))


class MediaProcessor:
    """Base of the processors. One object serves many requests and threads: it must not change."""

    modalities: tuple[Modality, ...] = ("image",)
    allowed_kwargs: ClassVar[Mapping[str, KwargRange]] = {}
    """Options of mm_processor_kwargs; others are refused by name."""
    takes_embeds: ClassVar[bool] = False
    """Whether `expand` also takes an item of `sizes == {"rows": n}`: embeddings that were given."""
    embed_sizes: ClassVar[tuple[str, ...]] = ()
    """Names of integers that a caller gives beside embeddings. They are unchecked in `sizes`."""
    bidirectional_prompt: ClassVar[bool] = False
    """Whether all tokens of a prompt with an item attend to each other in both directions."""
    is_whole_prompt: ClassVar[bool] = False
    """Whether an item is a prompt by itself, without text and without other items."""
    decoder_has_text: ClassVar[bool] = False
    """Whether an encoder reads one item alone, and the text of a prompt is the decoder's."""
    most_items: ClassVar[int | None] = None
    """Items that a prompt may have; None: any number."""
    writes_special_tokens: ClassVar[bool] = False
    """Whether prompt_text() writes all special tokens: the tokenizer adds none."""
    text_placeholders: ClassVar[bool] = False
    """Whether placeholders are texts that are no tokens; `replaces` of an Expansion is then ()."""
    special_tokens_in_parts: ClassVar[bool] = False
    """Whether each text between items is tokenized as a prompt, with the tokens at its start."""
    fallback_template: ClassVar[str | None] = None
    """Chat template of checkpoints that have none."""
    stand_in_ids: ClassVar[tuple[int, ...]] = ()
    """Ids that a prompt of one item may have where the item is the whole prompt."""
    sampling_rate: int = 16000
    """Of the recordings that process() takes, in samples per second."""
    most_seconds: float = math.inf
    """Of a recording that the model reads at once."""

    def __init__(self, files: ProcessorFiles) -> None:
        self.files = files

    @property
    def row_width(self) -> int:
        """Numbers of a row of the encoder's output, for embeddings that are given."""
        config = self.files.config
        sections = (config.get(name) for name in ("text_config", "llm_config", "language_config"))
        return int((next(filter(None, sections), None) or config)["hidden_size"])

    def placeholder(self, modality: Modality, index: int) -> str:
        """Return what a prompt holds for the index-th item of a modality, from 1."""
        raise NotImplementedError

    def read_data(self, data: object) -> object:
        """Return multi_modal_data of a prompt with items under the names of modalities."""
        return data

    def read_arrays(
        self, arrays: Mapping[str, npt.NDArray[Any]], problem: Callable[[str], RequestError]
    ) -> ProcessedMedia:
        """Make the tensors of an item that was given as arrays by name, neither pixels nor rows.

        problem: makes the error of what is wrong with it. Runs in the API process. Raises
        RequestError.
        """
        raise problem("is a dict, which must have one entry of embeddings")

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        """Make the tensors of an item. kwargs: checked. Raises RequestError.

        Equal items and kwargs must give equal tensors.
        """
        raise NotImplementedError

    def passes_pixels(self, media: DecodedMedia, kwargs: Settings) -> bool:
        """Whether process() takes the pixels of this item as they are, for an encoder that resizes:
        it takes no time, and less than sending them to a worker."""
        return False

    def readable_seconds(self, kwargs: Settings) -> float:
        """Return how long a recording may be: no more of a file is decoded. kwargs: checked."""
        return self.most_seconds

    def check_seconds(self, audio: DecodedAudio) -> None:
        """Raise RequestError for more than the model reads at once."""
        seconds = len(audio.samples) / self.sampling_rate
        if seconds > self.most_seconds:
            raise RequestError(
                f"the audio has {seconds:.2f} s, and the model reads {self.most_seconds:g} s at "
                "once: cut it",
                param="audio",
            )

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        """Return the tokens of the index-th item of its modality, from 1. It reads sizes only."""
        raise NotImplementedError

    def rope(
        self, ids: Sequence[int], items: Sequence[ExpandedItem]
    ) -> tuple[npt.NDArray[np.int32], int] | None:
        """Return rotary positions [3, len(ids)] and the delta of later tokens. None: 0, 1, 2 ..."""
        return None

    def item_text(self, media: ProcessedMedia, index: int, following: str = "") -> str:
        """Return the text to be tokenized in place of the placeholder of an item.

        It contains the placeholder once. What it adds around that may form tokens with the text of
        the prompt beside it. following: the character of the prompt behind it, if there is one and
        the placeholder is a token.
        """
        return self.placeholder(media.modality, index)

    def prompt_kwargs(self, modalities: Sequence[Modality]) -> Settings:
        """Return options that follow from the items of a prompt; a request's own are preferred."""
        return {}

    def prompt_text(self, text: str, modalities: Sequence[Modality]) -> str:
        """Return the text to be tokenized in place of a raw prompt; modalities: of its items."""
        return text

    def frame_indices(self, total: int, fps: float, kwargs: Settings) -> list[int]:
        """Return the frames of a video that are decoded, in ascending order.

        total, fps: of the source. kwargs: num_frames and fps of media_io_kwargs, -1 for all.
        """
        wanted = float(kwargs.get("num_frames", 32))
        wanted = total if wanted < 0 else wanted
        rate = float(kwargs.get("fps", -1))
        if rate > 0 and fps > 0:
            wanted = min(wanted, max(math.floor(total / fps * rate), 1))
        count = int(min(max(wanted, 1), total))
        return [int(i) for i in np.linspace(0, total - 1, count)]


def processor_type(model_type: str) -> type[MediaProcessor] | None:
    """Return the processor class of an outer model_type. None: its media are not read."""
    name = model_type.replace("-", "_").lower()
    if name not in PROCESSORS.names():
        return None
    return cast("type[MediaProcessor]", PROCESSORS.load(name).Processor)
