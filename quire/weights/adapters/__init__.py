"""Reads LoRA adapters: folders of PEFT, checked against the model that they are for."""
