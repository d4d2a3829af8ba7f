"""Activations that files may name are those that the pooler has."""

from quire.config.sentence_transformers import ACTIVATION_CLASSES
from quire.pooling.activations import ACTIVATIONS


def test_every_activation_of_the_files_is_one_of_the_pooler():
    assert {name.lower() for name in ACTIVATION_CLASSES} == ACTIVATIONS.keys()
