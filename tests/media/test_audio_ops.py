"""Resampling and log-mel features against formulas and against transformers."""

import numpy as np
import pytest

from quire.errors import RequestError
from quire.media.audio_ops import LogMel, Resampler, mel_filters, resample

RATE = 16_000


def tone(frequency, rate, seconds=2):
    return np.sin(2 * np.pi * frequency * np.arange(rate * seconds) / rate).astype(np.float32)


def decibels(error, signal=1.0):
    return 10 * np.log10(np.mean(np.square(error, dtype=np.float64)) / np.mean(np.square(signal)))


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_tones_keep_their_shape_below_the_cut_off(rate):
    for share in (0.02, 0.5, 0.85):
        frequency = share * min(rate, RATE) / 2
        got, want = resample(tone(frequency, rate), rate, RATE), tone(frequency, RATE)
        assert len(got) == len(want)
        middle = slice(2000, -2000)  # the ends have no neighbours
        assert decibels(got[middle] - want[middle], want[middle]) < -115


@pytest.mark.parametrize("rate", [22050, 44100, 48000])
def test_tones_above_the_cut_off_are_removed(rate):
    got = resample(tone(8100, rate), rate, RATE)[2000:-2000]
    assert decibels(got, 0.7) < -95


def test_a_rate_of_no_simple_ratio_drifts_little():
    got = resample(tone(100, 44_099), 44_099, RATE)
    assert len(got) == 2 * RATE
    assert decibels(got[2000:-2000] - tone(100, RATE)[2000:-2000]) < -50


@pytest.mark.parametrize(("source", "target"), [(44_100, RATE), (8000, RATE), (RATE, RATE)])
def test_blocks_make_what_the_whole_makes(source, target):
    audio = np.random.default_rng(1).standard_normal(30_000).astype(np.float32)
    resampler, parts = Resampler(source, target), []
    for low in range(0, len(audio), 777):
        parts.append(resampler.push(audio[low : low + 777]))
    got = np.concatenate((*parts, resampler.finish()))
    assert len(got) == -(-len(audio) * target // source)
    np.testing.assert_allclose(got, resample(audio, source, target), atol=2e-5)


def test_rates_out_of_range_are_refused():
    for rate in (0, 3999, 1_000_000):
        with pytest.raises(RequestError, match="4000 to 384000 Hz"):
            Resampler(rate, RATE)


@pytest.mark.slow("imports transformers")
@pytest.mark.parametrize("bins", [80, 128])
def test_features_are_those_of_whisper(bins):
    from transformers import WhisperFeatureExtractor

    theirs, ours = WhisperFeatureExtractor(feature_size=bins), LogMel(bins)
    assert np.abs(theirs.mel_filters - mel_filters(201, bins, RATE)).max() < 1e-7
    draw = np.random.default_rng(3)
    for length in (1, 5, 200, 201, 16_000, 479_900, 480_000, 500_000):
        noise = draw.standard_normal(length).astype(np.float32)
        fading = np.exp(-np.arange(length) / 8000) * np.sin(np.arange(length) / 20)
        for audio in (0.1 * noise, (fading + 1e-4 * noise).astype(np.float32)):
            want = theirs(audio, sampling_rate=RATE, return_tensors="np").input_features[0]
            assert np.abs(ours(audio) - want).max() < 1e-3


def test_features_without_padding_are_as_many_as_hops():
    audio = tone(440, RATE)[:5000]
    short, padded = LogMel(80)(audio, pad=False), LogMel(80)(audio)
    assert short.shape == (80, 5000 // 160)
    np.testing.assert_allclose(short[:, 2:-3], padded[:, 2 : 5000 // 160 - 3], atol=1e-5)
