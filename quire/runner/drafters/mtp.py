"""Layers of the model's own checkpoint that predict further tokens."""

from quire.runner.drafters._chain import build_head_drafter

build = build_head_drafter
