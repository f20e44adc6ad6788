"""Make the collection importable by its full name, from the checkout, and scripts/gpu_fleet as `gpu_fleet`."""

import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# ansible_collections is a namespace package: the link in collections/ gives the checkout its full name.
for folder in (REPOSITORY / "scripts", REPOSITORY / "collections"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory):
    """What runs of the command line leave belongs to the tests, not to the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def fleet_prometheus(tmp_path_factory):
    """The address of a real Prometheus that watches a fleet (metrics_world.py); one for all tests, since rates need time."""
    import metrics_world
    from test_monitoring_rules import plan

    with metrics_world.prometheus(tmp_path_factory.mktemp("prometheus"), plan(), {}) as url:
        yield url
