"""Parses command lines and prints help, both generated from the options."""
