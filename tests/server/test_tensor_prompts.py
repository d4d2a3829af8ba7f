"""Tensors as prompts over HTTP: a `quire serve` of a tiny Prithvi-EO, which has no tokenizer."""

import base64
import io
import threading

import httpx
import numpy as np
import pytest
import torch

from tests.cpu.multimodal.test_prithvi import PLACE, SIZES, plain_form, write
from tests.cpu.multimodal.test_prithvi import pixels as random_pixels
from tests.server.running import SMALL, serving

pytestmark = pytest.mark.slow("starts a server")


def stored(tensor):
    """Base64 of torch.save."""
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def part(**tensors):
    made = {name: stored(one) for name, one in tensors.items()}
    return {"type": "image_embeds", "image_embeds": made}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prithvi")
    tensors = write(folder)
    with serving(
        folder, *SMALL, "--served-model-name", "eo", "--dtype", "float32",
        "--skip-tokenizer-init", "--enable-mm-embeds", "--model-impl", "terratorch",
    ) as found:  # fmt: skip
        threading.Thread(target=found.process.stdout.read, daemon=True).start()
        yield found, tensors


def test_tensors_of_messages_and_of_input_are_read(running):
    server, tensors = running
    pixels, place = random_pixels(), torch.tensor([PLACE])
    content = [part(pixel_values=pixels, location_coords=place)]
    want = plain_form(tensors, SIZES, pixels, None, PLACE)
    bodies = (
        {"messages": [{"role": "user", "content": content}]},
        {"input": [{"content": content}]},
    )
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for body in bodies:
            answer = client.post("/pooling", json={"encoding_format": "base64", **body})
            assert answer.status_code == 200, answer.text
            (one,) = answer.json()["data"]
            found = np.frombuffer(base64.b64decode(one["data"]), np.float32)
            assert np.abs(found - want.flatten().numpy()).max() < 2e-5
        content = [part(pixel_values=pixels[:2])]
        answer = client.post("/pooling", json={"messages": [{"role": "user", "content": content}]})
        assert answer.status_code == 400
        assert "got [2, 2, 24, 24]" in answer.json()["error"]["message"]
        answer = client.post("/pooling", json={"messages": [{"role": "user", "content": "a text"}]})
        assert answer.status_code == 400, answer.text
