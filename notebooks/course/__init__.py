"""What the notebooks of the course share: cells that run on real ranks, checks with hints, quizzes, pictures, progress.

`from course import *` in a notebook's first cell also teaches Jupyter the cell magic `%%ranks`.
"""

import os

from IPython import get_ipython

from mmfsdp.widgets.ranks_magic import load_ipython_extension
from mmfsdp.widgets.ranks_magic import results as results

from .checks import check, compare
from .contents import contents
from .quiz import quiz

__all__ = ["check", "compare", "contents", "quiz", "results"]

os.environ.setdefault("MMFSDP_COURSE", "../runs/course")  # where `%%ranks` cells leave what they made
if get_ipython() is not None:
    load_ipython_extension(get_ipython())
