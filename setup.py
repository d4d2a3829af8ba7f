"""Build the CPU kernels at install time, where there is a compiler. The rest: pyproject.toml.

Without a compiler the install is the same less the library; the first use then tries once more.
"""

import importlib.util
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NATIVE = Path("quire/kernels/native")


class BuildWithKernels(build_py):
    """Put the library beside its source: in the wheel, or in place for an editable install."""

    def run(self) -> None:
        super().run()
        root = Path() if self.editable_mode else Path(self.build_lib)
        spec = importlib.util.spec_from_file_location("kernels_build", NATIVE / "build.py")
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            built = build.build_into(root / NATIVE / "prebuilt")
            built.with_suffix(".lock").unlink(missing_ok=True)
            self.announce(f"native kernels: {built}", level=2)
        except build.NativeBuildError as e:
            self.announce(f"no native kernels ({e}); the PyTorch references will run", level=2)


setup(cmdclass={"build_py": BuildWithKernels})
