"""Real photographs, and folders and shards made of them."""

import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
from material import PHOTOGRAPHS, write_metadata


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """An imagefolder of the photographs here, and one from matplotlib in a sub-folder of its own."""
    folder = tmp_path / "photographs"
    shutil.copytree(PHOTOGRAPHS, folder)
    (folder / "people").mkdir()
    shutil.copy(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg", folder / "people")
    write_metadata(folder / "people", [{"file_name": "grace_hopper.jpg", "text": "an officer in a dark coat"}])
    return folder


@pytest.fixture
def shard(tmp_path: Path) -> Callable[[str, dict[str, bytes]], Path]:
    """Writes a .tar of members."""

    def write(name: str, members: dict[str, bytes]) -> Path:
        path = tmp_path / name
        with tarfile.open(path, "w") as tar:
            for member, data in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path

    return write
