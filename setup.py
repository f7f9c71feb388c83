"""Put the notebooks and slides into the wheel, for `mmfsdp course DIR`. All else is in pyproject.toml."""

import shutil
import tempfile
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
        package = Path(self.build_lib, "mmfsdp")
        shutil.rmtree(package / "course_files", ignore_errors=True)  # of an earlier build
        with tempfile.TemporaryDirectory() as folder:
            for part in ("notebooks", "slides"):
                shutil.copytree(HERE / part, Path(folder, part), ignore=left_out)
            # An archive, since no search in an installed package should find a solution.
            shutil.make_archive(str(package / "course_files"), "zip", folder)


setup(cmdclass={"build_py": BuildWithCourse})
