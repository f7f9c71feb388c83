"""A reader: the pictures of a folder with metadata.jsonl, as torch's map-style data sets give them."""

import json
from pathlib import Path

from my_helper import opened


class Pictures:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.rows = [json.loads(line) for line in (self.folder / "metadata.jsonl").read_text().splitlines()]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {"image": opened(self.folder / row["file_name"]), "text": row["text"]}
