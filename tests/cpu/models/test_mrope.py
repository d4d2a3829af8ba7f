"""Rotary positions per axis and DeepStack, in the text halves of multimodal models."""

import pytest
import torch

from quire.config.facts import read_hf_config
from quire.errors import ConfigError
from quire.layers import Rope
from quire.models.build import build_model, read_model_config
from tests.cpu.models.harness import Stepper
from tests.cpu.models.peers import prompt_of, scale_weights
from tests.cpu.models.test_decoder import Extended
from tests.cpu.models.wrappers import wrapper_config


def built(name, folder):
    """transformers' model with random weights, quire's of the same text half, and its config."""
    from transformers import AutoModelForMultimodalLM

    torch.manual_seed(1)
    made = AutoModelForMultimodalLM.from_config(wrapper_config(name), attn_implementation="eager")
    scale_weights(made, 2.0)
    made.eval().save_pretrained(folder)
    model_type, config = read_model_config(read_hf_config(folder))
    model = build_model(model_type, config, folder=folder, dtype=torch.float32, progress=False)
    return made, model, config


def image_positions(before, rows, columns, after):
    """[3, T] of a text, an image and a text."""
    cells = torch.cartesian_prod(torch.tensor([0]), torch.arange(rows), torch.arange(columns)).T
    first, last = torch.arange(before), torch.arange(after) + before + max(rows, columns)
    return torch.cat((first.expand(3, -1), cells + before, last.expand(3, -1)), dim=1).int()


@torch.inference_mode()
def expected(theirs, ids, positions, **further):
    """Their log probabilities [T, V] at positions [3, T]."""
    embeds = theirs.get_input_embeddings()(torch.tensor([ids]))
    found = theirs.model.language_model(
        inputs_embeds=embeds, position_ids=positions[:, None].long(), **further
    )
    return theirs.lm_head(found.last_hidden_state)[0].log_softmax(-1)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v", "glm4v_moe"])
def test_positions_of_three_axes_rotate_as_in_transformers(name, tmp_path):
    theirs, model, config = built(name, tmp_path)
    positions = image_positions(7, 4, 6, 9)
    ids = prompt_of(positions.shape[1], 198)
    got = Stepper(Extended(model, positions=positions), config).logits(ids).log_softmax(-1)
    assert (got - expected(theirs, ids, positions)).abs().max().item() < 1e-4
    plain = Stepper(model, config).logits(ids).log_softmax(-1)
    assert (got - plain).abs().max().item() > 1e-2


def test_equal_positions_give_the_bits_of_one_axis(tmp_path):
    _, model, config = built("qwen3_vl", tmp_path)
    ids = prompt_of(30, 198)
    positions = torch.arange(30, dtype=torch.int32).expand(3, -1)
    got = Stepper(Extended(model, positions=positions), config).logits(ids)
    assert torch.equal(got, Stepper(model, config).logits(ids))


def test_angles_are_gathered_once_per_step(tmp_path, monkeypatch):
    _, model, config = built("qwen2_vl", tmp_path)
    calls, gather = [], Rope.gather
    monkeypatch.setattr(Rope, "gather", lambda *args: calls.append(1) or gather(*args))
    positions = image_positions(2, 2, 2, 2)
    Stepper(Extended(model, positions=positions), config).hidden(prompt_of(8, 198))
    assert (len(calls), config.layers) == (1, 3)
    Stepper(model, config).hidden(prompt_of(8, 198))
    assert len(calls) == 1


def test_deepstack_features_are_added_after_the_first_layers(tmp_path):
    theirs, model, config = built("qwen3_vl", tmp_path)
    positions, ids = image_positions(5, 3, 4, 6), prompt_of(23, 198)
    seen = torch.zeros(1, 23, dtype=torch.bool)
    seen[0, 5:17] = True
    rows = torch.randn(12, 2, config.hidden)
    want = expected(
        theirs, ids, positions, visual_pos_masks=seen, deepstack_visual_embeds=list(rows.unbind(1))
    )
    deepstack = torch.zeros(23, 2 * config.hidden)
    deepstack[5:17] = rows.flatten(1)
    further = {"positions": positions, "deepstack": deepstack}
    got = Stepper(Extended(model, **further), config).logits(ids).log_softmax(-1)
    assert (got - want).abs().max().item() < 1e-4
    assert (got - expected(theirs, ids, positions)).abs().max().item() > 1e-2


def test_sections_that_do_not_fill_a_head_are_refused():
    hf = wrapper_config("qwen2_vl").text_config.to_dict()
    hf["rope_parameters"]["mrope_section"] = [2, 3, 4]
    with pytest.raises(ConfigError, match=r"mrope_section is \[2, 3, 4\]; .*, 8 in all"):
        read_model_config({**hf, "model_type": "qwen2"})
