"""Put the notebooks and slides into the wheel, for `mmfsdp course DIR`. All else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class BuildWithCourse(build_py):
    """Builds the package with the course in it."""

    def run(self) -> None:
        """Build the package, then copy the course into it."""
        super().run()
        if self.editable_mode:  # a checkout has the course beside the package
            return
        left_out = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", ".virtual_documents", "runs", "build")
        for part in ("notebooks", "slides"):
            target = Path(self.build_lib, "mmfsdp", "course_files", part)
            shutil.rmtree(target, ignore_errors=True)  # of an earlier build
            shutil.copytree(HERE / part, target, ignore=left_out)


setup(cmdclass={"build_py": BuildWithCourse})
