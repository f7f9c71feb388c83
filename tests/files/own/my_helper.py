"""Hold what the reader imports."""

VERSION = "as launched"


def opened(path):
    from PIL import Image

    return Image.open(path)
