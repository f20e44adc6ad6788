"""Make the collection importable by its full name, from the checkout, and scripts/gpu_fleet as `gpu_fleet`."""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

# ansible_collections is a namespace package: the link in collections/ gives the checkout its full name.
for folder in (REPOSITORY / "scripts", REPOSITORY / "collections"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
