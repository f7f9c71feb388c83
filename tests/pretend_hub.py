"""A hub of one data set on this machine, by which datasets' own downloads and cache are tried without a network.

`main(FOLDER)` prints as JSON what sources of it read, and how many requests each took.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

REVISION = "a" * 40
DATA_SET = "/api/datasets/org/name"
MODEL = "/api/models/org/lm"
CARD = b"""---
configs:
- config_name: one
  default: true
  data_files: [{split: train, path: one/train.parquet}, {split: test, path: one/test.parquet}]
- config_name: two
  data_files: [{split: train, path: two/train.parquet}, {split: test, path: two/test.parquet}]
---
"""


def files() -> dict[str, bytes]:
    """The files of the data set, by their paths: two configurations with two splits each."""
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    picture = BytesIO()
    Image.new("RGB", (8, 8), "red").save(picture, "PNG")
    content = {"README.md": CARD}
    for name in ("one/train", "one/test", "two/train", "two/test"):
        rows = [{"image": {"bytes": picture.getvalue(), "path": f"{i}.png"}, "text": f"{name} {i}"} for i in range(3)]
        file = BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        content[f"{name}.parquet"] = file.getvalue()
    return content


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does, as far as datasets asks."""

    content: dict[str, bytes] = {}
    requests = 0

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        Hub.requests += 1
        path = self.path.partition("?")[0]
        if "/resolve/" in path:
            name = path.split("/resolve/")[1].partition("/")[2]
            if name in self.content:
                self.answer(self.content[name], ETag=f'"{digest(self.content[name])}"')
            else:
                self.answer(b"{}", 404, **{"X-Error-Code": "EntryNotFound"})
        elif path.startswith((f"{DATA_SET}/tree", f"{MODEL}/tree")):
            below = path.split("/tree/")[1].partition("/")[2]
            self.answer_json([entry for entry in self.entries() if entry["path"].startswith(below)])
        elif path.startswith((DATA_SET, MODEL)):
            names = [{"rfilename": name} for name in self.content]
            self.answer_json({"id": "org/name", "sha": REVISION, "private": False, "tags": [], "siblings": names})
        else:
            self.answer(b"{}", 404)

    do_HEAD = do_GET

    def entries(self) -> list[dict[str, Any]]:
        entries = []
        for name, content in self.content.items():
            entries.append({"type": "file", "path": name, "size": len(content), "oid": digest(content)})
        return entries

    def answer_json(self, value: Any) -> None:
        self.answer(json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"X-Repo-Commit": REVISION, "Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def serve(content: dict[str, bytes], folder: str) -> None:
    """Begin to serve these files as the hub of this process, whose cache is in a folder."""
    Hub.content = content
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": folder}
    os.environ |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def fetch(folder: str) -> None:
    """Fetch a language model of this hub by the command, and print what a job without internet is told around it.

    Then a part of its weights is removed from the cache.
    """
    serve({}, folder)
    from mmfsdp.kit.models.backbones import build_language
    from mmfsdp.params import BackboneParams
    from tests.tiny_vlms import tokenizer

    tokens = tokenizer()
    config = {"model_type": "llama", "vocab_size": len(tokens), "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    build_language(BackboneParams(config=config)).save_pretrained(os.path.join(folder, "lm"), max_shard_size="20KB")
    tokens.save_pretrained(os.path.join(folder, "lm"))
    Hub.content = {path.name: path.read_bytes() for path in Path(folder, "lm").iterdir()}
    from mmfsdp.kit.cli import main as command
    from mmfsdp.kit.run.hub_cache import check_cached
    from mmfsdp.params import ParamError, load

    changes = {"model.language.weights": "org/lm", "model.language.name": "org/lm", "model.language.config": {}}
    changes["model.vision.weights"] = None  # or minutes of pretraining
    job = load("tiny").change(**changes | {"launch.executor": "slurm", "train.device": "cpu"})
    said: list[str] = []
    job.to_yaml(os.path.join(folder, "job.yaml"))

    def check(**others: Any) -> None:
        try:
            check_cached(job.change(**others))
            said.append("")
        except ParamError as error:
            said.append(str(error))

    check()
    check(**{"launch.hub_offline": False})
    status = command(["fetch", os.path.join(folder, "job.yaml")])
    check()
    next(path for path in Path(folder, "hub").rglob("*.safetensors")).unlink()
    check()
    print(json.dumps([status, said]))


def main(folder: str) -> None:
    serve(files(), folder)
    from mmfsdp.kit.data import open_splits
    from mmfsdp.params import DataParams, ParamError

    results: list[list[Any]] = []
    paths = ["org/name", "org/name:two", "org/name", "org/name:one", "org/name:two"]
    for number, path in enumerate(paths):
        if number > 2:  # from here on as a rank
            os.environ["RANK"] = "0"
        before = Hub.requests
        try:
            train = open_splits(DataParams(source="hub", path=path), image_size=8)["train"]
            results.append([[sample.text for sample in train], Hub.requests - before])
        except ParamError as error:
            results.append([str(error), Hub.requests - before])
    results.append(look_at_once())
    json.dump(results, sys.stdout)


def look_at_once() -> list[Any]:
    """Open the data set in several threads at the same moment.

    Return what they raised, and the values that the offline mode of datasets had for other threads meanwhile.
    """
    import datasets

    from mmfsdp.kit.data import open_splits
    from mmfsdp.params import DataParams

    del os.environ["RANK"]
    errors: list[str] = []
    modes: set[bool] = set()

    def look() -> None:
        try:
            for _ in range(3):
                open_splits(DataParams(source="hub", path="org/name:two"), image_size=8)
        except Exception as error:
            errors.append(str(error))

    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        modes.add(datasets.config.HF_HUB_OFFLINE)
    modes.add(datasets.config.HF_HUB_OFFLINE)
    return [errors, sorted(modes)]
