"""Weights of the Hugging Face hub for nodes without internet: what a run needs, what is in the cache, and `fetch`."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...params import GENERATED, BackboneSource, ParamError, RunParams
from ...params.own import own_fields
from ...params.run import with_cluster
from .files.folder import read_json

HUB_TIMEOUT_S = 5.0
"""Seconds in which the hub must answer."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""Configuration, tokenizer and processor."""


def hub_weights(params: RunParams) -> dict[str, str]:
    """Return the name on the hub of all weights that the ranks will load, by the field that names them."""
    model = params.model
    sources: dict[str, str | None] = {}
    if not model.unavailable("name"):
        sources |= {"model.weights": model.weights} if model.weights else {"model.name": model.name}
    if not model.unavailable("language"):
        sources["model.language.weights"] = model.language.weights
    if not model.unavailable("vision"):
        in_open_clip = model.vision.source is BackboneSource.OPEN_CLIP
        weights = model.vision.weights
        sources["model.vision.weights"] = _of_tag(model.vision.name, weights) if in_open_clip else weights
    found = {}
    for field, name in sources.items():
        if name and name != GENERATED and not Path(name).expanduser().exists():
            found[field] = name
    return found


def _of_tag(name: str, tag: str | None) -> str | None:
    """Return the name on the hub of open_clip's weights of a tag, such as openai; None for a folder or file."""
    if not tag or tag == GENERATED or Path(tag).expanduser().exists():
        return None
    from open_clip.pretrained import get_pretrained_cfg

    return os.path.dirname((get_pretrained_cfg(name, tag) or {}).get("hf_hub", "")) or None


def is_cached(name: str) -> bool:
    """Return True if all weights of a name of the hub are in its cache here."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # nothing of it is there; it is no name of the hub
        return False
    indexes = [*folder.glob("*.safetensors.index.json"), *folder.glob("*.bin.index.json")]
    if not indexes:
        return any(file.exists() for pattern in WEIGHTS for file in folder.glob(pattern))
    return any(_has_parts(index) for index in indexes)


def _has_parts(index: Path) -> bool:
    """Return True if all files that an index of weights names lie beside it."""
    weight_map = (read_json(index) or {}).get("weight_map")
    parts = {str(part) for part in weight_map.values()} if isinstance(weight_map, dict) else set()
    return bool(parts) and all((index.parent / part).exists() for part in parts)


def is_offline(params: RunParams) -> bool:
    """Return True if the ranks of a job, or of a step in one, will not ask the hub.

    So it is unless launch.hub_offline is false, or there is own code, which may ask.
    """
    launch = with_cluster(params.launch)
    is_job = not launch.unavailable("hub_offline")
    return is_job and launch.hub_offline is not False and not own_fields(params)


def check_cached(params: RunParams) -> None:
    """Raise ParamError if a job without the hub would miss weights."""
    if not is_offline(params):
        return
    for field, name in hub_weights(params).items():
        if not is_cached(name):
            words = f"{name!r} is not in the hub's cache here ({cache()}), and the job runs offline; run "
            words += "`mmfsdp fetch` with the same parameters first, where there is internet, or set "
            raise ParamError(field, f"{words}launch.hub_offline to false if the nodes have internet")


def cache() -> str:
    """Return the folder of the hub's cache, which HF_HOME moves."""
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def fetch_weights(params: RunParams, say: Callable[[str], object]) -> None:
    """Download all weights that a run needs into the hub's cache; huggingface_hub shows the progress on stderr.

    Raises ParamError that names the field if the hub cannot be reached or has no such name.
    """
    from huggingface_hub import snapshot_download

    for field, name in hub_weights(params).items():
        say(f"fetching {name} ({field}) into {cache()}")
        try:
            folder = Path(snapshot_download(name, allow_patterns=[*SMALL_FILES, WEIGHTS[0]]))
            if not any(folder.glob(WEIGHTS[0])):  # older releases have no safetensors
                snapshot_download(name, allow_patterns=[*WEIGHTS[1:]])
        except (OSError, ValueError) as error:
            words = " ".join(str(error).split())[:400]
            raise ParamError(field, f"{name!r} cannot be fetched from the hub ({words})") from None


def why_no_answer(address: str) -> str:
    """Return why a web server does not answer within HUB_TIMEOUT_S; "" if it does."""
    reasons: list[str] = []

    def ask() -> None:
        request = urllib.request.Request(address, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S).close()
            reasons.append("")
        except urllib.error.HTTPError:
            reasons.append("")  # an answer
        except (OSError, ValueError) as error:
            reasons.append(str(getattr(error, "reason", None) or error))

    # The timeout of urllib does not hold for the search of the address, which may take minutes.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    return reasons[0] if reasons else f"no answer in {HUB_TIMEOUT_S:g} s"


class _FirstRequest:
    """Say before the first request of this process that it asks the hub, and go offline if the hub does not answer."""

    def __init__(self, say: Callable[[str], object]):
        self.say, self.asked = say, False

    def __call__(self, request: Any) -> None:
        from huggingface_hub import constants

        if self.asked or constants.HF_HUB_OFFLINE:
            return
        self.asked = True
        self.say(f"asking {constants.ENDPOINT}")
        if reason := why_no_answer(constants.ENDPOINT):
            constants.HF_HUB_OFFLINE = True
            self.say(f"it does not answer ({reason}); going on with what the hub's cache here holds")


def tell_of_hub(say: Callable[[str], object]) -> None:
    """Have this process say when it asks the hub for the first time, and go on offline if the hub does not answer.

    Else huggingface_hub tries again for half a minute for each file, also for one that is in its cache.
    """
    from huggingface_hub import get_session

    session = get_session()
    before = session.event_hooks.get("request", [])
    if not any(isinstance(hook, _FirstRequest) for hook in before):
        session.event_hooks = session.event_hooks | {"request": [_FirstRequest(say), *before]}
