"""Gives torch another version in the processes that have this folder on their path: another installation's."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

path = Path(importlib.util.find_spec("numpy").origin).parent.parent / "torch/version.py"
module = ModuleType("torch.version")
exec(re.sub(r"__version__ = .*", "__version__ = '2.9.0'", path.read_text()), module.__dict__)
sys.modules["torch.version"] = module
