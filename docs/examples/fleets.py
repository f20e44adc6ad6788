"""Plan several fleets at once, and deploy those that are right: what a scheduler or a web service would do.

    .venv/bin/python docs/examples/fleets.py inventories/prod inventories/other            plan them
    .venv/bin/python docs/examples/fleets.py --deploy inventories/prod inventories/other   and deploy

In a checkout PYTHONPATH=scripts lets Python find the package; `pip install .` does as well.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import gpu_fleet


def show(inventory: str, event: gpu_fleet.Event) -> None:
    """One line for what changed a host or went wrong; events come while the run goes on."""
    if event.kind in ("changed", "failed", "unreachable"):
        print(f"{inventory} {event.host} {event.stage}: {event.task} {event.kind} {event.message}".rstrip())


def bring(inventory: str, deploy: bool) -> gpu_fleet.FleetResult:
    """The plan of a fleet, and with deploy its hosts brought to it."""
    result = gpu_fleet.plan(inventory, on_event=lambda event: show(inventory, event))
    if result.ok and deploy:
        result = gpu_fleet.deploy(inventory, on_event=lambda event: show(inventory, event))
    return result


def main(arguments: list[str]) -> int:
    inventories = [word for word in arguments if word != "--deploy"]
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda inventory: bring(inventory, "--deploy" in arguments), inventories))
    for inventory, result in zip(inventories, results, strict=True):
        services = ", ".join((result.plan or {}).get("services", {}))
        print(f"{inventory}: exit status {result.exit_status}, services {services or 'none'}, logs in {result.folder}")
        for failure in result.failures:
            print(f"  {failure.host} {failure.message}".rstrip())
    return max((result.exit_status for result in results), default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
