"""Audio files of every format, and files that are none or too long."""

import io
import sys

import numpy as np
import pytest

from quire.errors import RequestError, Unsupported
from quire.media import audio_decode
from quire.media.audio_decode import decode_audio, decode_sound, mix_down
from quire.media.items import MediaSource, with_sounds
from quire.media.limits import MediaLimits
from quire.media.media_worker import MediaJob, carry_out
from quire.media.objects import read_media_data
from quire.media.processor import MediaProcessor, ProcessorFiles
from tests.media.files import numbered_frames, video

soundfile = pytest.importorskip("soundfile")
av = pytest.importorskip("av")

RATE = 16_000
PIXELS = np.zeros((4, 4, 3), np.uint8)


def stereo(rate, seconds=1):
    t = np.arange(rate * seconds) / rate
    left, right = 0.4 * np.sin(2 * np.pi * 440 * t), 0.2 * np.sin(2 * np.pi * 660 * t)
    return np.stack((left, right), 1).astype(np.float32)


def written(kind, subtype, audio, rate):
    file = io.BytesIO()
    soundfile.write(file, audio, rate, format=kind, subtype=subtype)
    return file.getvalue()


def muxed(container, codec, audio, rate, options=None):
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options or {}) as out:
        stream = out.add_stream(codec, rate=rate, layout="stereo")
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(audio.T), format="fltp", layout="stereo"
        )
        frame.sample_rate = rate
        cut = av.AudioResampler(format="fltp" if codec == "aac" else "s16", frame_size=960)
        for one in cut.resample(frame) + cut.resample(None):
            out.mux(stream.encode(one))
        out.mux(stream.encode(None))
    return file.getvalue()


def similarity(got, want):
    """The best correlation over delays of encoders."""
    energy = np.convolve(np.square(got), np.ones(len(want)), "valid")
    return np.max(np.correlate(got, want, "valid") / np.sqrt(energy * np.sum(np.square(want))))


def cases():
    audio = stereo(44_100)
    for subtype in ("PCM_16", "PCM_24", "FLOAT", "ULAW"):
        yield "WAV " + subtype, written("WAV", subtype, audio, 44_100)
    yield "FLAC", written("FLAC", "PCM_16", audio, 44_100)
    yield "Vorbis", written("OGG", "VORBIS", audio, 44_100)
    yield "MP3", written("MP3", "MPEG_LAYER_III", audio, 44_100)
    yield "AIFF", written("AIFF", "PCM_16", audio, 44_100)
    audio = stereo(48_000)
    yield "Opus", written("OGG", "OPUS", audio, 48_000)
    yield "MP4", muxed("mp4", "aac", audio, 48_000)
    yield "WebM", muxed("webm", "libopus", audio, 48_000)
    yield "ADTS", muxed("adts", "aac", audio, 48_000)


@pytest.mark.parametrize(("name", "data"), cases(), ids=lambda x: x if isinstance(x, str) else "")
def test_formats_become_mono_at_the_rate(name, data):
    got = decode_audio(data, RATE, 10)
    assert got.sampling_rate == RATE
    assert abs(len(got.samples) - RATE) < 1700  # encoders pad
    want = stereo(RATE).mean(1)
    assert similarity(got.samples[:8000], want[:4000]) > 0.99


@pytest.mark.parametrize(
    "data",
    [b"", b"RIFF", b"#EXTM3U\nhttp://127.0.0.1/x", b"fLaC" + bytes(99), b"OggS" + b"x" * 999,
     b"\0\0\0\x20ftypM4A " + bytes(99), b"\x1aE\xdf\xa3" + b"z" * 99, b"ID3" + b"q" * 999,
     b"%PDF-1.7", bytes(500)],
)  # fmt: skip
def test_what_is_no_audio_file_is_refused(data):
    with pytest.raises(RequestError, match="cannot be decoded"):
        decode_audio(data, RATE, 10)


@pytest.mark.parametrize("kind", ["OPUS", "webm"])
def test_a_small_file_of_a_long_recording_is_refused_early(kind):
    silence = np.zeros((48_000 * 20, 2), np.float32)
    if kind == "OPUS":
        data = written("OGG", kind, silence, 48_000)
    else:
        data = muxed("webm", "libopus", silence, 48_000)
    assert len(data) < 30_000
    with pytest.raises(RequestError, match="longer than 3 seconds"):
        decode_audio(data, RATE, 3)


@pytest.mark.parametrize("kind", ["FLAC", "Opus", "mp4", "webm"])
def test_a_header_of_a_long_recording_is_refused_before_it_is_decoded(kind, monkeypatch):
    silence = np.zeros((48_000 * 8, 2), np.float32)
    codecs = {"mp4": "aac", "webm": "libopus"}
    if kind in codecs:
        data = muxed(kind, codecs[kind], silence, 48_000)
    else:
        data = written(
            *{"FLAC": ("FLAC", "PCM_16"), "Opus": ("OGG", "OPUS")}[kind], silence, 48_000
        )
    assert len(decode_audio(data, RATE, 9).samples) == pytest.approx(8 * RATE, rel=0.01)
    monkeypatch.setattr(audio_decode, "Resampler", None)
    with pytest.raises(RequestError, match="longer than 3 seconds"):
        decode_audio(data, RATE, 3)


class Heard(MediaProcessor):
    most_seconds = 3


@pytest.mark.parametrize("named", ["model", "server"])
@pytest.mark.parametrize("kind", ["adts", "live webm", "MP3"])
def test_no_more_is_decoded_than_the_model_and_the_server_allow(kind, named, monkeypatch):
    """kind: of a file whose header has no length."""
    noise = np.random.default_rng(0).uniform(-0.1, 0.1, (48_000 * 5, 2)).astype(np.float32)
    if kind == "adts":
        data = muxed("adts", "aac", noise, 48_000)
    elif kind == "live webm":
        data = muxed("webm", "libopus", noise, 48_000, {"live": "1"})
    else:
        data = written("MP3", "MPEG_LAYER_III", noise, 48_000)
        monkeypatch.setattr(audio_decode, "UNKNOWN_FRAMES", 0)  # its header has a length
    read, push = [0], audio_decode.Resampler.push

    def counted(self, block):
        read[0] += len(block)
        return push(self, block)

    monkeypatch.setattr(audio_decode.Resampler, "push", counted)
    processor = (
        Heard(ProcessorFiles({})) if named == "model" else MediaProcessor(ProcessorFiles({}))
    )
    limits = MediaLimits() if named == "model" else MediaLimits(audio_seconds=3)
    job = MediaJob("audio", "a[0]", data, None, b"null", b"{}", b"{}", limits, 60.0, 1 << 30)
    with pytest.raises(RequestError, match=r"a\[0\]: the audio is longer than 3 seconds"):
        carry_out(processor, job)
    assert read[0] <= 3 * 48_000


def test_many_channels_take_small_blocks(monkeypatch):
    data = written("WAV", "PCM_16", np.zeros((48_000 * 3, 32), np.float32), 48_000)
    read, sizes = audio_decode._mono, []
    monkeypatch.setattr(
        audio_decode, "_mono", lambda block: sizes.append(block.size) or read(block)
    )
    assert len(decode_audio(data, RATE, 3).samples) == 3 * RATE
    assert len(sizes) > 1
    assert max(sizes) <= audio_decode.BLOCK_NUMBERS


def test_a_header_that_is_silent_about_the_length_is_no_reason_to_refuse():
    data = bytearray(written("FLAC", "PCM_16", stereo(48_000)[:, 0], 48_000))
    total = int.from_bytes(data[18:26], "big")
    data[18:26] = (total >> 36 << 36).to_bytes(8, "big")
    assert len(decode_audio(bytes(data), RATE, 3).samples) == RATE


def test_the_sound_of_a_video_and_none():
    silent = video(numbered_frames(3))
    assert decode_sound(silent, "mov", RATE, 3) is None
    sounding = muxed("mp4", "aac", stereo(RATE), RATE)
    found = decode_sound(sounding, "mov", RATE, 3)
    assert np.array_equal(found.samples, decode_audio(sounding, RATE, 3).samples)
    with pytest.raises(RequestError, match=r"longer than 0.5 seconds"):
        decode_sound(sounding, "mov", RATE, 0.5)


def test_recordings_become_the_sounds_of_videos_of_frames():
    frames, sounds = [numbered_frames(2), numbered_frames(3)], [np.ones(8), (np.zeros(9), 8000)]
    parts = with_sounds(read_media_data({"video": frames, "audio": sounds, "image": [PIXELS]}))
    assert [one.modality for one in parts] == ["image", "video", "video"]
    assert [len(one.decoded.sound.samples) for one in parts[1:]] == [8, 9]
    alone = read_media_data({"video": frames})
    assert with_sounds(alone) == alone
    files = [MediaSource("video", "a[0]", data=b"x"), MediaSource("audio", "a[1]", data=b"y")]
    assert with_sounds(files) == files
    with pytest.raises(RequestError, match="1 recordings beside 2 videos"):
        with_sounds(read_media_data({"video": frames, "audio": sounds[:1]}))
    with pytest.raises(RequestError, match="must be samples"):
        with_sounds(read_media_data({"video": frames[:1], "audio": [b"file"]}))


def test_contents_that_are_refused():
    def refused(data, words):
        with pytest.raises(RequestError, match=words):
            decode_audio(data, RATE, 10)

    refused(written("WAV", "PCM_16", np.zeros(0, np.float32), RATE), "has no samples")
    refused(written("WAV", "FLOAT", np.full(99, np.nan, np.float32), RATE), "not finite")
    refused(written("WAV", "FLOAT", np.full(99, -1e38, np.float32), RATE), "beyond 1e.10")
    refused(written("WAV", "PCM_16", np.zeros((99, 40), np.float32), RATE), "40 channels")
    refused(written("WAV", "PCM_16", np.zeros(99, np.float32), 1000), "1000 Hz")
    video = io.BytesIO()
    with av.open(video, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        out.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8))))
        out.mux(stream.encode(None))
    refused(video.getvalue(), "no audio stream")


def test_a_missing_decoder_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setitem(sys.modules, "av", None)
    for data in (b"RIFF", b"\x1aE\xdf\xa3"):
        with pytest.raises(Unsupported, match=r"quire-llm\[audio\]"):
            decode_audio(data, RATE, 10)


def test_arrays_become_mono_at_the_rate():
    audio = stereo(RATE)
    want = audio.mean(1)
    for given in (want, audio, audio.T, want.astype(np.float64), want.tolist()):
        np.testing.assert_allclose(mix_down(given, RATE, RATE), want, atol=1e-6)
    words = (want * 32_768).astype(np.int16)
    np.testing.assert_allclose(mix_down(words, RATE, RATE), want, atol=1e-4)
    assert len(mix_down(want, 48_000, RATE)) == -(-len(want) // 3)
    for bad in ("text", [[[1.0]]], [1, [2]], np.zeros(9, np.uint8), np.zeros(9, complex)):
        with pytest.raises(RequestError, match="the audio"):
            mix_down(bad, RATE, RATE)
