"""What can go wrong, as one line each."""


class LabError(Exception):
    """Something failed; exit status 1. The message names the lab or host, what was found, and what to do."""


class UsageError(LabError):
    """Used wrongly, or this machine lacks a right or a tool; exit status 2."""
