"""Encoded images and videos for tests."""

import base64
import io
import struct
import zlib

import numpy as np
from PIL import Image


def encode(image, kind="PNG", **more):
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def png(width=40, height=30, color=(200, 100, 50)):
    return encode(Image.new("RGB", (width, height), color))


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png_chunk(name, data):
    crc = zlib.crc32(name + data)
    return struct.pack("!I", len(data)) + name + data + struct.pack("!I", crc)


def png_with_size(width, height, rows=b""):
    """A PNG whose header states a size, whatever follows."""
    header = struct.pack("!IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + body + png_chunk(b"IEND", b"")


def numbered_frames(count, height=48, width=64):
    """Frames whose brightness is their number x 10."""
    frames = np.zeros((count, height, width, 3), np.uint8)
    frames[:] = (np.arange(count) * 10).reshape(-1, 1, 1, 1)
    return frames


def video(frames, kind="mp4", codec="mpeg4", rate=10, gop=4, sound=None):
    """sound: float32 samples of 16 kHz."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = gop
        heard = None if sound is None else container.add_stream("aac", rate=16000, layout="mono")
        for pixels in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
        if heard is not None:
            samples = av.AudioFrame.from_ndarray(sound[None], format="fltp", layout="mono")
            samples.sample_rate, samples.pts = 16000, 0
            for packet in [*heard.encode(samples), *heard.encode(None)]:
                container.mux(packet)
    return file.getvalue()
