"""Build the C++ libraries at install time, where there is a compiler. The rest: pyproject.toml.

Without a compiler the install is the same less the libraries; the first use then tries once more.
"""

import importlib.util
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

BUILDER = Path("quire/platform/native_build.py")


class BuildWithLibraries(build_py):
    """Put each library beside its source: in the wheel, or in place for an editable install."""

    def run(self) -> None:
        super().run()
        root = Path() if self.editable_mode else Path(self.build_lib)
        spec = importlib.util.spec_from_file_location("native_build", BUILDER)
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        for library in build.LIBRARIES:
            folder = library.folder.relative_to(Path().absolute())
            try:
                built = library.build_into(root / folder / "prebuilt")
                built.with_suffix(".lock").unlink(missing_ok=True)
                self.announce(f"native library: {built}", level=2)
            except build.NativeBuildError as e:
                self.announce(f"no native {library.name} ({e}); slower code will run", level=2)


setup(cmdclass={"build_py": BuildWithLibraries})
