"""How much memory a process has held."""

import sys

__all__ = ["resident_peak"]


def resident_peak() -> int | None:
    """Most bytes of memory that this process has held at once in its life; None where that is not told (Windows)."""
    try:
        import resource
    except ModuleNotFoundError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
