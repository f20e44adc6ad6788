"""A tuning of an inventory's service: what tuning.py wants of plan and inventory, and what is kept of it. For the command line and for Python."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpu_fleet import acceptances, kept, runs, tuning
from gpu_fleet.domain import module_util
from gpu_fleet.runs import Failure, FleetResult, Given

# Plays a playbook of the collection: its name, the limit, variables, whether only to check.
Play = Callable[[str, str | None, Mapping[str, Any], bool], FleetResult]
HEAD = (
    "# What scripts/fleet tune found. `settings` go into the service's entry of vllm_services; scripts/fleet deploy then brings them.\n"
    "# Numbers are of the load and the objective below, and of one replica, drained.\n"
)


@dataclass(frozen=True)
class Asked:
    """What is wanted: names of candidates (none: all), seconds for all of it, only to measure with one GPU."""

    only: Sequence[str] = ()
    budget: float = 1800.0
    one_gpu: bool = False


@dataclass
class Prepared:
    """A tuning that nothing stands against so far; nothing was changed."""

    inventory: Path
    service: str
    replica: str
    hosts: Sequence[str]
    tried: Sequence[tuning.Candidate]
    trying: tuning.Tuning

    def run(self) -> list[tuning.Trial]:
        """Try them in turn; nobody else's change comes in between. Raises tuning's exceptions, and kept.Busy."""
        with runs.hold(self.inventory, "tune"):
            return self.trying.run(self.tried)


def note(inventory: Path, service: str) -> Path:
    """Where it is noted what the replica served with."""
    return acceptances.folder(inventory).resolve() / service / "tuning.json"


def _quiet(_line: str) -> None:
    return None


def prepare(
    play: Play,
    inventory: Path,
    service: str,
    asked: Asked,
    *,
    given: Given | None = None,
    said: Callable[[str], None] = _quiet,
) -> Prepared:
    """Plan the fleet and see what can be tried. Raises Refused and Interrupted."""
    planned = play("validate", None, {}, False)
    if planned.interrupted:
        raise tuning.Interrupted
    if planned.exit_status or planned.plan is None:
        raise tuning.Refused("\n".join(failure.message for failure in planned.failures))
    replica = tuning.replica_of(planned.plan, service)
    of = planned.plan["replicas"][replica]
    told = host_variables(inventory, of["head"], given)
    rank = next(one for one in planned.plan["hosts"][of["head"]]["instances"] if one["instance"] == replica)
    tried = [tuning.one_gpu(of)] if asked.one_gpu else tuning.candidates(rank["config"], of, asked.only)
    has_budget = "accept_budget" in told["variables"]
    trying = tuning.Tuning(
        play=play,
        plan=planned.plan,
        services=told["variables"].get("vllm_services"),
        service=service,
        gateways=bool(told["gateways"]),
        allow=module_util("bench_document").truth(told["variables"].get("vllm_service_allow_outage", False)),
        note=note(inventory, service),
        budget=asked.budget,
        load_budget=None if has_budget or asked.one_gpu else tuning.load_budget(asked.budget, len(tried)),
        keep=note(inventory, service).parents[1] if asked.one_gpu else None,
        said=said,
    )
    return Prepared(inventory, service, replica, of["hosts"], tried, trying)


def put_back(play: Play, inventory: Path, service: str, said: Callable[[str], None] = _quiet) -> bool:
    """Only repair what a run that was cut short left; whether there was anything. Raises NotBack and kept.Busy."""
    trying = tuning.Tuning(
        play=play,
        plan={},
        services=[],
        service=service,
        gateways=False,
        allow=False,
        note=note(inventory, service),
        budget=0.0,
        said=said,
    )
    with runs.hold(inventory, "tune"):
        return trying.bring_back()


def judge(trials: Sequence[tuning.Trial]) -> tuning.Trial | None:
    """The best of those that are better beyond the noise, or None."""
    return tuning.judge(trials, module_util("bench_compare").judge)


def keep(prepared: Prepared, trials: Sequence[tuning.Trial], best: tuning.Trial | None) -> tuple[Path, dict[str, Any]]:
    """Write what came of it beside the inventory, as settings to copy: the file, and its content."""
    when = time.strftime("%Y-%m-%d", time.gmtime())
    found = tuning.kept(trials, best, service=prepared.service, replica=prepared.replica, when=when)
    path = prepared.trying.note.with_name("tuned.yml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"---\n{HEAD}{yaml.safe_dump(found, sort_keys=False, width=120)}", encoding="utf-8")
    return path, found


def host_variables(inventory: Path, host: str, given: Given | None = None) -> dict[str, Any]:
    """Variables of a host as they are written, templates unread, and whether there are gateways. Raises Refused."""
    given = given or runs.GIVEN.get() or Given()
    environment = {**os.environ, **runs._environment(), **given.environment}
    extra = [word for variable in given.variables for word in ("--extra-vars", variable)]
    command = ["ansible-inventory", "-i", str(inventory.resolve()), "--list", *extra]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise tuning.Refused(done.stderr.strip()[-2000:])
    listed = json.loads(done.stdout)
    return {
        "variables": listed["_meta"]["hostvars"].get(host, {}),
        "gateways": bool(listed.get("gateways", {}).get("hosts")),
    }


def outcome(play: Play, inventory: Path, service: str, asked: Asked, *, back: bool, given: Given) -> FleetResult:
    """The whole of it as a result, for a program: what was found is in `tuning`. back: only put it back."""
    began = time.monotonic()
    try:
        result = FleetResult(tuning=_found(play, inventory, service, asked, back=back, given=given))
    except (tuning.Refused, kept.Busy) as refused:
        result = FleetResult(status=1, refused=True, failures=[Failure("", "tune", str(refused))])
    except tuning.NotBack as error:
        result = FleetResult(status=1, failures=[Failure("", "tune", str(error))])
    except tuning.Interrupted:
        result = FleetResult(status=1, interrupted=True)
    if asked.one_gpu and result.tuning and result.tuning["problem"]:
        result.status, result.failures = 1, [Failure("", "tune", str(result.tuning["problem"]))]
    result.seconds = time.monotonic() - began
    return result


def _found(play: Play, inventory: Path, service: str, asked: Asked, *, back: bool, given: Given) -> dict[str, Any]:
    if back:
        return {"service": service, "put_back": put_back(play, inventory, service)}
    prepared = prepare(play, inventory, service, asked, given=given)
    trials = prepared.run()
    if asked.one_gpu:
        return trials[0].told()
    return keep(prepared, trials, judge(trials))[1]
