"""What a run says about its watched pictures, as rank 0 writes it."""

import io
from pathlib import Path

from PIL import Image

from mmfsdp.kit.run.files.watched_file import captions_writer, write_pictures

TRUTHS = ("two small red hearts", "one <img src=x onerror=alert(1)> & $circle$")
SAID = {5: ("? ?", "?"), 10: ("two red", "one <b>"), 20: (TRUTHS[0], "one red circle")}
"""The captions of a small run by step."""


def watch(folder: Path, *, said: dict[int, tuple[str, ...]] = SAID) -> Path:
    """Write two pictures into a run folder, and what the run says about them. Returns the folder."""
    pictures = []
    for color in ("red", "blue"):
        file = io.BytesIO()
        Image.new("RGB", (48, 48), color).save(file, "PNG")
        pictures.append(file.getvalue())
    write_pictures(folder, pictures, TRUTHS)
    writer = captions_writer(folder, after=0)
    for step, captions in said.items():
        writer.write({"step": step, "captions": captions, "seconds": 0.5, "wire_bytes": 1 << 20})
    return folder
