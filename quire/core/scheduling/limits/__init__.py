"""Scheduling limits: one file per reason to compute fewer tokens in a step."""
