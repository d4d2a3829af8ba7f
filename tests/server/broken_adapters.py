"""Adapters that no server may accept: changes of a good folder, by name."""

import json
import os
import pickle
import shutil
import struct

import torch
from safetensors.torch import load_file, save_file

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def config(**changed):
    """Change keys of the config; None: leave it out."""

    def change(folder):
        found = json.loads((folder / CONFIG).read_text()) | changed
        kept = {key: value for key, value in found.items() if value is not None}
        (folder / CONFIG).write_text(json.dumps(kept))

    return change


def text(name, content):
    def change(folder):
        (folder / name).write_bytes(content)

    return change


def tensors(change_tensors):
    """Change a tensor of a B, given all tensors and its name."""

    def change(folder):
        found = load_file(folder / TENSORS)
        change_tensors(found, next(name for name in found if "lora_B" in name))
        save_file(found, folder / TENSORS)

    return change


def replaced(name, make):
    def change(folder):
        (folder / name).unlink()
        make(folder / name)

    return change


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("this-code-ran",)


def pickled(folder):
    (folder / TENSORS).unlink()
    with (folder / "adapter_model.bin").open("wb") as file:
        pickle.dump({"a": Bomb()}, file)


def put(value):
    return lambda found, name: found.update({name: value(found[name])})


def cut(folder):
    whole = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(whole[: len(whole) // 2])


BROKEN = {
    "config: none": replaced(CONFIG, lambda path: None),
    "config: empty": text(CONFIG, b""),
    "config: no JSON": text(CONFIG, b"{'r': 4}"),
    "config: a list": text(CONFIG, b"[4]"),
    "config: deep": text(CONFIG, b"[" * 100_000),
    "config: binary": text(CONFIG, bytes(range(256))),
    "config: a folder": replaced(CONFIG, os.mkdir),
    "config: a pipe": replaced(CONFIG, os.mkfifo),
    "config: a link out": replaced(CONFIG, lambda path: path.symlink_to("/etc/passwd")),
    "config: a circle": replaced(CONFIG, lambda path: path.symlink_to(path)),
    "kind": config(peft_type="LOHA"),
    "no rank": config(r=None),
    "rank 0": config(r=0),
    "rank -1": config(r=-1),
    "rank 1e6": config(r=10**6),
    "rank above the maximum": config(r=64),
    "alpha": config(lora_alpha="8"),
    "pissa": config(init_lora_weights="pissa"),
    "biases": config(bias="all"),
    "alora": config(alora_invocation_tokens=[1]),
    "a slow pattern": config(rank_pattern={"(a+)+$": 4}),
    "many patterns": config(rank_pattern={f"x{i}.*": 4 for i in range(1000)}),
    "tensors: none": replaced(TENSORS, lambda path: None),
    "tensors: empty": text(TENSORS, b""),
    "tensors: cut": cut,
    "tensors: a huge header": text(TENSORS, struct.pack("<Q", 1 << 60) + b"{}"),
    "tensors: a pipe": replaced(TENSORS, os.mkfifo),
    "tensors: a link out": replaced(TENSORS, lambda path: path.symlink_to("/etc/passwd")),
    "tensors: a pickle": pickled,
    "NaN": tensors(put(lambda one: one * float("nan"))),
    "fp8": tensors(put(lambda one: one.to(torch.float8_e4m3fn))),
    "wrong outputs": tensors(put(lambda one: one[1:].clone())),
    "wrong rank": tensors(put(lambda one: one[:, 1:].clone())),
    "one half": tensors(lambda found, name: found.pop(name)),
    "a module too much": tensors(
        lambda found, name: found.update({name.replace("layers.0", "layers.99"): found[name] + 0})
    ),
    "a wrong prefix": tensors(
        lambda found, name: found.update({name.replace("model.model", "net"): found.pop(name)})
    ),
    "a name twice": tensors(
        lambda found, name: found.update({name.replace("base_model.model.", ""): found[name] + 0})
    ),
}


def write_broken(good, root):
    """Yield (what is broken, folder)."""
    for number, (what, change) in enumerate(BROKEN.items()):
        folder = root / f"broken{number}"
        shutil.copytree(good, folder)
        change(folder)
        yield what, folder
