"""EAGLE-3: a head over the states of three layers of the target."""

from quire.runner.drafters._chain import build_head_drafter

build = build_head_drafter
