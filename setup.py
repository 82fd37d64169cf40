"""Builds the native core (src/hoop/native) into a wheel where there is a C compiler; pyproject.toml has the rest.

A wheel with the core is for one operating system and processor and for every Python, because ctypes loads it. Without a
compiler the wheel is for all of them, and Hoop works with NumPy. An editable installation is not built here: there
``python -m hoop.native.build``, which ``make install`` runs, builds the core in the source folder.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("hoop", "native")


def _native_build() -> ModuleType:
    """``hoop.native.build``, without importing Hoop: its dependencies are not there while it is built."""
    spec = importlib.util.spec_from_file_location("native_build", Path("src") / NATIVE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithNativeCore(build_py):
    """Copies the package, then compiles the native core beside its sources."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        native = _native_build()
        try:
            native.build(Path(self.build_lib, NATIVE).resolve())
        except native.BuildError as error:
            sys.stderr.write(f"the wheel has no native core: {error}\n")


class TaggedWheel(bdist_wheel):
    """A wheel for every Python; for one platform if it has the native core."""

    def get_tag(self) -> tuple[str, str, str]:
        if not Path(self.bdist_dir, NATIVE, _native_build().LIBRARY).exists():
            return super().get_tag()
        return "py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_")


setup(cmdclass={"build_py": BuildWithNativeCore, "bdist_wheel": TaggedWheel})
