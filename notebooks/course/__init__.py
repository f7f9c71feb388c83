"""What the notebooks of the course share: cells that run on real ranks, checks with hints, quizzes, pictures, progress.

`from course import *` in a notebook's first cell also teaches Jupyter the cell magic `%%ranks`.
"""

from .checks import check, compare
from .contents import contents
from .quiz import quiz
from .ranks import load_magic
from .ranks import results as results

__all__ = ["check", "compare", "contents", "quiz", "results"]

load_magic()
