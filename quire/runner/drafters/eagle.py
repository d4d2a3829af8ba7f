"""EAGLE 1 and 2: a head over the target's last state."""

from quire.runner.drafters._chain import build_head_drafter

build = build_head_drafter
