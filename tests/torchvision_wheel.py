"""Lets torchvision be imported beside a CPU build of torch.

Its wheel of the default index is built for CUDA: two operators that its import looks up are missing
then, and with it every import of transformers fails. They are defined once it is imported.
"""

import importlib.metadata
import sys
from importlib.abc import MetaPathFinder

OPERATORS = ("nms", "qnms")
_libraries = []
"""Operators are gone when their library is."""


class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        """Finds nothing: defines the operators before the next finder finds torchvision."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None and "+cpu" not in importlib.metadata.version(name):
                library = torch.library.Library(name, "DEF")
                for one in OPERATORS:
                    library.define(f"{one}(Tensor dets, Tensor scores, float at) -> Tensor")
                _libraries.append(library)


def install():
    sys.meta_path.insert(0, Finder())
