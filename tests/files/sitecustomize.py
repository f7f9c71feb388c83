"""Find no package that MMFSDP_ALLOWED does not name. Python imports this file first, from PYTHONPATH."""

import os
import sys

ALLOWED = {*os.environ["MMFSDP_ALLOWED"].split(","), *sys.stdlib_module_names, "mmfsdp", "tests"}


class Allowing:
    """Asks the usual finders for what is allowed, and finds nothing else, as if it were not installed."""

    def __init__(self, finders):
        self.finders = finders

    def find_spec(self, name, path=None, target=None):
        """Return the spec of a module, or None."""
        # The build's settings, which `sysconfig` imports, have the platform in their name.
        if name.partition(".")[0] not in ALLOWED and not name.startswith("_sysconfigdata"):
            return None
        specs = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in specs if spec is not None), None)

    def find_distributions(self, *args, **kwargs):
        """Yield what is installed: torch looks there for its own backends."""
        for finder in self.finders:
            if hasattr(finder, "find_distributions"):
                yield from finder.find_distributions(*args, **kwargs)


sys.meta_path[:] = [Allowing(list(sys.meta_path))]
