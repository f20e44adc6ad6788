#!/usr/bin/env python3
"""The lab: booted Debian hosts on this machine. `lab.py --help` says how; docs/lab.md says what they are.

A shim: the code is the package beside it. Standard library only, so that it runs before anything is installed.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "scripts")]

from gpufleet_lab.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
