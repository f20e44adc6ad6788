"""Every verb of the command line as a function; docs/python.md is the guide.

Each runs one playbook in a process and a folder of its own, so that several go side by side, in threads or processes.
Nothing is printed. Two runs that change the same inventory's fleet: the second is refused at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from gpu_fleet import runs
from gpu_fleet.domain import COLLECTION
from gpu_fleet.events import Event
from gpu_fleet.runs import Failure, FleetResult, Given

__all__ = [
    "Event",
    "Failure",
    "FleetResult",
    "Given",
    "bench",
    "bundle",
    "capacity",
    "deploy",
    "doctor",
    "drain",
    "mirror",
    "plan",
    "play",
    "report",
    "rollback",
    "status",
    "teardown",
    "topology",
    "tune",
    "upgrade",
    "validate",
    "verify",
]

Inventory = str | os.PathLike[str]


class Options(TypedDict, total=False):
    """What every function takes.

    variables  as `ansible-playbook -e`, but typed; they win over the inventory
    on_event   called with each Event while the run goes on; what it raises ends the run and is raised
    cancel     asked once a second; True ends the run as Ctrl-C would, and the result is interrupted
    given      environment of ansible-playbook (a vault's password file, say) and answers to its questions
    """

    variables: Mapping[str, Any]
    on_event: Callable[[Event], None]
    cancel: Callable[[], bool]
    given: Given


def play(
    playbook: str, inventory: Inventory, limit: str | None = None, *, check: bool = False, **options: Unpack[Options]
) -> FleetResult:
    """Any playbook of the collection by its name, such as `gateway` or `monitoring`.

    Raises FileNotFoundError when there is no such inventory or playbook. What goes wrong on hosts is in the result.
    """
    if not (COLLECTION / "playbooks" / f"{playbook}.yml").is_file():
        raise FileNotFoundError(f"the collection has no playbook {playbook}")
    return runs.run(playbook, Path(inventory), limit=limit, check=check, **options)


def _with(options: Options, **own: Any) -> Options:
    """The options with variables of a verb's own, which win."""
    return {**options, "variables": {**options.get("variables", {}), **own}}


def validate(inventory: Inventory, **options: Unpack[Options]) -> FleetResult:
    """Every mistake that can be known without touching a host; `plan` and `summary` of the result when there is none."""
    return play("validate", inventory, **options)


def plan(inventory: Inventory, *, ask_hosts: bool = False, **options: Unpack[Options]) -> FleetResult:
    """What every service will be launched with, and why (`plan`); asks the hub for models that come from it.

    With ask_hosts the hosts are asked for what the inventory no longer names (`left_over`), which makes the status 1.
    """
    if not ask_hosts:
        return play("validate", inventory, **_with(options, validate_ask_hub=True))
    result = play("plan", inventory, **_with(options, plan_ask_hosts=True))
    if result.left_over and not result.exit_status:
        result.status = 1
        result.failures = [
            Failure(
                host,
                "plan",
                f"left over, named by the inventory no longer: {', '.join(names)}. fleet teardown takes it away",
            )
            for host, names in result.left_over.items()
        ]
    return result


def deploy(
    inventory: Inventory, limit: str | None = None, *, check: bool = False, **options: Unpack[Options]
) -> FleetResult:
    """From bare hosts to services that answer; a second run changes nothing."""
    return play("site", inventory, limit, check=check, **options)


def verify(inventory: Inventory, limit: str | None = None, **options: Unpack[Options]) -> FleetResult:
    """Look at everything again, weights hashed; what differs is in `differing`, and makes the status 1."""
    result = play("verify", inventory, limit, check=True, **options)
    differ = {host: count for host, count in result.changed.items() if count}
    if differ and not result.exit_status:
        result.status = 1
        shows = f"ansible-playbook playbooks/verify.yml -i {inventory} --check --diff shows how"

        def left(host: str) -> str:
            return f" ({', '.join(result.left_over[host])})" if host in result.left_over else ""

        result.failures = [
            Failure(host, "verify", f"{'; '.join(result.differing.get(host, [])) or count} differ{left(host)}. {shows}")
            for host, count in differ.items()
        ]
    return result


def upgrade(
    inventory: Inventory, to: str, limit: str | None = None, *, check: bool = False, **options: Unpack[Options]
) -> FleetResult:
    """Another release of vLLM, one replica after the other (docs/change.md)."""
    return play("upgrade", inventory, limit, check=check, **_with(options, vllm_runtime_version=to))


def rollback(
    inventory: Inventory,
    service: str = "",
    limit: str | None = None,
    *,
    check: bool = False,
    **options: Unpack[Options],
) -> FleetResult:
    """Back to what each replica ran before its last change; one service, or all."""
    return play("rollback", inventory, limit, check=check, **_with(options, vllm_service_rollback=service))


def drain(
    inventory: Inventory,
    replicas: Iterable[str] = (),
    hosts: Iterable[str] = (),
    *,
    admit: bool = False,
    deadline: int | None = None,
    check: bool = False,
    **options: Unpack[Options],
) -> FleetResult:
    """Give replicas no new request at any gateway, and wait for those in flight; or let them in again (docs/gateway.md).

    deadline is in seconds. Raises ValueError when neither a replica nor a host is named.
    """
    replicas, hosts = list(replicas), list(hosts)
    if not replicas and not hosts:
        raise ValueError("name replicas, such as chat.0, or hosts")
    own: dict[str, Any] = {
        "drain_instances": replicas,
        "drain_hosts": hosts,
        "drain_state": "admitted" if admit else "drained",
    }
    if deadline:
        own["gateway_drain_deadline"] = deadline
    return play("drain", inventory, check=check, **_with(options, **own))


def teardown(
    inventory: Inventory,
    services: Iterable[str] = (),
    limit: str | None = None,
    *,
    named: bool = False,
    weights: bool = False,
    check: bool = False,
    **options: Unpack[Options],
) -> FleetResult:
    """Take away what is left over of services, or all of the fleet on hosts that leave it (docs/change.md).

    named takes what the inventory still names, too; weights those that nobody uses any more. Raises ValueError when neither a
    service nor hosts are named.
    """
    services = list(services)
    if not services and not limit:
        raise ValueError("name services, such as chat, or hosts")
    own = {"teardown_services": services, "teardown_named": named, "teardown_weights": weights}
    return play("teardown", inventory, limit, check=check, **_with(options, **own))


def topology(
    inventory: Inventory,
    limit: str | None = None,
    *,
    learn: bool = False,
    bandwidth: bool = False,
    **options: Unpack[Options],
) -> FleetResult:
    """GPUs and links of every host and what is wrong with them, in `hosts`: facts, findings, recommendation, measured."""
    own = {"gpu_topology_fail_on": "never", "gpu_topology_learn": learn, "gpu_topology_bandwidth": bandwidth}
    return play("topology", inventory, limit, **_with(options, **own))


def mirror(
    inventory: Inventory, into: Inventory | None = None, *, check: bool = False, **options: Unpack[Options]
) -> FleetResult:
    """Every package, wheel and model that the fleet needs, into one folder; without one they are listed (docs/airgap.md)."""
    folder = str(Path(into).expanduser().resolve()) if into else ""
    return play("mirror", inventory, check=check, **_with(options, mirror_folder=folder))


def status(inventory: Inventory, *, hosts: bool = False) -> dict[str, Any]:
    """Services, replicas, hosts and alerts, as `scripts/fleet status --json` prints them.

    From the monitors; from every host itself where there is none, or with hosts=True. Raises FileNotFoundError without
    such an inventory, and ValueError with what is wrong when it is refused or nobody answered.
    """
    from gpu_fleet import asked_status

    return asked_status.from_fleet(Path(inventory), hosts)


def doctor(inventory: Inventory, since: str = "") -> dict[str, Any]:
    """The first cause over all hosts and what cannot be told, as `scripts/fleet doctor --json` prints it.

    since is how far back, as `journalctl --since` takes it. Raises FileNotFoundError without such an inventory, and
    ValueError when it is refused or no host answered.
    """
    from gpu_fleet import collect

    case = collect.collect(Path(inventory), since)
    if case.silence or not case.evidence:
        raise ValueError("\n".join(case.silence))
    return collect.examine(case)


def bundle(inventory: Inventory, into: Inventory, since: str = "") -> FleetResult:
    """Journals, plans, topology, state and the doctor's findings of every host in the archive `into`, secrets and addresses replaced.

    Hosts that were not reached are in `unreachable`; the archive has the others. Raises FileExistsError when there is such a file,
    FileNotFoundError without such an inventory, and ValueError when it is refused or no host answered.
    """
    from gpu_fleet import archive as maker
    from gpu_fleet import collect

    path = Path(into)
    if path.exists():
        raise FileExistsError(f"{path} is there already")
    case = collect.collect(Path(inventory), since)
    if case.silence or not case.evidence:
        raise ValueError("\n".join(case.silence))
    maker.write(path, maker.of(case))
    return case.outcome


def bench(inventory: Inventory, service: str = "", **options: Unpack[Options]) -> FleetResult:
    """Measure a service under load and judge it (docs/acceptance.md); the run, as it is kept, is in `acceptance`.

    What is measured, and how, are the inventory's variables accept_..., or `variables`. A verdict that fails makes the status 1.
    """
    from gpu_fleet import acceptances

    kept: list[Path] = []
    watch = options.get("on_event")

    def seen(event: Event) -> None:
        written = acceptances.kept_by(event)
        if written:
            kept.append(written)
        if watch:
            watch(event)

    own = {"accept_service": service} if service else {}
    options = _with(options, **own)
    options["on_event"] = seen
    result = play("accept", inventory, **options)
    result.acceptance = acceptances.read(kept[-1]) if kept else None
    return result


def report(source: Inventory, against: Inventory | None = None) -> str:
    """The page of a kept run (its JSON file), or of the last one of an inventory, as HTML; against another run instead of the one before.

    Raises ValueError when there is no such run.
    """
    from gpu_fleet import acceptances
    from gpu_fleet import report_page as maker

    path = Path(source)
    if path.suffix != ".json":
        path = acceptances.last(acceptances.folder(path))
    return maker.page(acceptances.compared(acceptances.read(path), Path(against) if against else None))


def tune(
    inventory: Inventory,
    service: str,
    only: Iterable[str] = (),
    *,
    budget: float = 1800.0,
    one_gpu: bool = False,
    put_back: bool = False,
    **options: Unpack[Options],
) -> FleetResult:
    """Try other settings on a service's last replica under load (docs/acceptance.md); what was found, as it is kept, is in `tuning`.

    Nobody is asked before the replica is started anew. only names settings, budget is in seconds. one_gpu measures it with one GPU
    and nothing else; put_back only has it serve as before a run that was cut short. It serves as before in the end, also when `cancel`
    or `on_event` ended the run, which they cannot do to that part. Raises FileNotFoundError without such an inventory.
    """
    from gpu_fleet import tuned

    if not Path(inventory).exists():
        raise FileNotFoundError(f"there is no inventory {inventory}")
    raised: list[BaseException] = []

    def one(playbook: str, limit: str | None, variables: Mapping[str, Any], check: bool) -> FleetResult:
        asked = _with(options, **variables)
        if variables.get("tune_state") == "back":
            asked.pop("cancel", None)
            if raised:
                asked.pop("on_event", None)
        try:
            return play(playbook, inventory, limit, check=check, **asked)
        except BaseException as error:
            raised.append(error)
            raise

    given = options.get("given") or Given()
    if options.get("variables"):
        given = replace(given, variables=(*given.variables, json.dumps(options["variables"])))
    asked = tuned.Asked(tuple(only), budget, one_gpu)
    return tuned.outcome(one, Path(inventory), service, asked, back=put_back, given=given)


def capacity(
    source: Inventory | Mapping[str, Any], measured: Inventory | None = None, months: int | None = None
) -> dict[str, Any]:
    """Replicas and GPUs for a traffic, month by month, and what an API would cost, as `scripts/fleet capacity --json` prints it.

    source is the input (docs/capacity.md), a file or its content; measured a file in place of what it says. Raises ValueError, which
    names the field, for an input that cannot be used.
    """
    from gpu_fleet import capacity_view
    from gpu_fleet.domain import module_util

    given = source if isinstance(source, Mapping) else Path(source)
    document = capacity_view.load(given, Path(measured) if measured else None)
    answer: dict[str, Any] = module_util("capacity").answer(document, months)
    return answer
