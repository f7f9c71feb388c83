"""What the notebooks of the course share: cells that run on real ranks, checks with hints, quizzes, pictures, progress.

An import of `course` in a notebook's first cell also teaches Jupyter the magics `%%ranks`, `%%part`, `%catch_up`,
`%go_on_from`, `%open_script`, `%run_script`, `%my_changes` and `%%edit_script`.
"""

import os
import sys

from mmfsdp.kit.widgets.ranks_cell.ranks_magic import load_ipython_extension
from mmfsdp.kit.widgets.ranks_cell.ranks_magic import results as results

from .checks import check, compare
from .contents import contents
from .file_parts import catch_up, go_on_from, own_file, part
from .quiz import quiz
from .script import edit_script, my_changes, open_script, run_script

__all__ = ["check", "compare", "contents", "quiz", "results"]

os.environ.setdefault("MMFSDP_COURSE", "../runs/course")  # where `%%ranks` cells leave what they made
# Ranks import the course too, and do without IPython, which takes a second.
shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
if shell is not None:
    own_file().parent.mkdir(parents=True, exist_ok=True)  # Python forgets a folder of the path that is not there yet
    sys.path.insert(0, str(own_file().parent))  # so that ranks import my_fsdp.py
    load_ipython_extension(shell)
    shell.register_magic_function(part, "cell")
    shell.register_magic_function(catch_up, "line")
    shell.register_magic_function(go_on_from, "line")
    shell.register_magic_function(edit_script, "cell")
    for magic in (open_script, run_script, my_changes):
        shell.register_magic_function(magic, "line")
