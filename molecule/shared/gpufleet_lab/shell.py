"""Running a command of the machine, with its own words in the error."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from .errors import LabError

# Debian keeps nft, ip and sshd where an ordinary user's PATH does not look.
PATH = os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/local/sbin:/usr/sbin:/sbin"


def run(command: Sequence[str], *, stdin: str | None = None, doing: str = "") -> str:
    """Run to the end and return what it printed. LabError with the last line of its complaint when it fails."""
    done = subprocess.run(
        list(command),
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": PATH, "LC_ALL": "C.UTF-8"},
    )
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).strip().splitlines() if line.strip()]
        said = lines[0] if lines else f"exit status {done.returncode}"
        raise LabError(f"{doing or 'running ' + command[0]} failed: {said} (command: {' '.join(command)[:200]})")
    return done.stdout


def works(command: Sequence[str]) -> bool:
    """Whether a question put as a command is answered with yes."""
    return (
        subprocess.run(
            list(command), capture_output=True, check=False, env={**os.environ, "PATH": PATH}, stdin=subprocess.DEVNULL
        ).returncode
        == 0
    )
