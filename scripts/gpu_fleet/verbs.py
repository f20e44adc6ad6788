"""What the verbs of scripts/fleet share: options, examples in their help, a run shown while it goes on, its end told."""

from __future__ import annotations

import functools
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from gpu_fleet.events import Progress
    from gpu_fleet.runs import FleetResult, Given

Verb = TypeVar("Verb", bound=Callable[..., Any])

Inventory = Annotated[
    Path, typer.Option("-i", "--inventory", help="Inventory folder or file, such as inventories/prod.")
]
Limit = Annotated[str | None, typer.Option("--limit", help="Only these hosts, as ansible-playbook --limit takes them.")]
Check = Annotated[bool, typer.Option("--check", help="Say what would change, change nothing.")]
Profile = Annotated[bool, typer.Option("--profile", help="Say at the end where the time went, by stage and task.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")]

# What every verb that asks hosts takes besides: name, type, default.
SHARED: tuple[tuple[str, Any, Any], ...] = (
    (
        "extra_vars",
        Annotated[
            list[str] | None,
            typer.Option(
                "-e", "--extra-vars", help="Variables, as ansible-playbook -e takes them; several may follow."
            ),
        ],
        None,
    ),
    (
        "vault_password_file",
        Annotated[Path | None, typer.Option("--vault-password-file", help="Opens the vaults of the inventory.")],
        None,
    ),
    (
        "ask_become_pass",
        Annotated[bool, typer.Option("-K", "--ask-become-pass", help="Ask for the password of sudo on the hosts.")],
        False,
    ),
    (
        "ask_pass",
        Annotated[
            bool,
            typer.Option(
                "-k", "--ask-pass", help="Ask for the password to log in with (ansible-core 2.18 wants sshpass for it)."
            ),
        ],
        False,
    ),
)

# By verb: what it is for in few words, and examples of its use, each checked against the verb's own options by a test.
ABOUT: Mapping[str, tuple[str, Sequence[str]]] = {
    "validate": ("Every mistake in an inventory, no host touched", ("scripts/fleet validate -i inventories/prod",)),
    "plan": (
        "What every service will be launched with, and why",
        (
            "scripts/fleet plan -i inventories/prod",
            "scripts/fleet plan -i inventories/prod --ask-hosts",
            "scripts/fleet plan --from launch.yml --json",
        ),
    ),
    "deploy": (
        "From bare hosts to services that answer",
        (
            "scripts/fleet deploy -i inventories/prod --check",
            "scripts/fleet deploy -i inventories/prod --limit gpu-01,gpu-02 -K",
        ),
    ),
    "verify": ("Look at everything again and say what differs", ("scripts/fleet verify -i inventories/prod --json",)),
    "upgrade": (
        "Another release of vLLM, replica by replica",
        ("scripts/fleet upgrade -i inventories/prod --to 0.33.0",),
    ),
    "rollback": (
        "Back to what ran before the last change",
        ("scripts/fleet rollback -i inventories/prod --service chat",),
    ),
    "drain": (
        "Take replicas out of service, and let them in again",
        (
            "scripts/fleet drain -i inventories/prod chat.0 --deadline 120",
            "scripts/fleet drain -i inventories/prod --host gpu-01 --admit",
        ),
    ),
    "teardown": (
        "Take away what the inventory names no longer",
        (
            "scripts/fleet teardown -i inventories/prod chat --check",
            "scripts/fleet teardown -i inventories/prod --limit gpu-02 --named --weights",
        ),
    ),
    "mirror": (
        "All that a fleet needs, in one folder to carry",
        ("scripts/fleet mirror -i inventories/prod --into /media/carried",),
    ),
    "topology": (
        "GPUs, links and what is wrong with them",
        (
            "scripts/fleet topology -i inventories/prod --learn",
            "nvidia-smi topo -m | scripts/fleet topology --from - --svg host.svg",
        ),
    ),
    "status": (
        "The fleet on one screen",
        (
            "scripts/fleet status -i inventories/prod --watch 10",
            "scripts/fleet status --prometheus http://127.0.0.1:9090 --json",
        ),
    ),
    "doctor": (
        "Why it does not start, died, or does not answer",
        (
            "scripts/fleet doctor -i inventories/prod --since '1 hour ago'",
            "journalctl -u 'vllm@*' -k -b -o json | scripts/fleet doctor --from -",
            "scripts/fleet doctor --endpoint https://models.example/v1 --key-file key",
        ),
    ),
    "bundle": ("One archive for a report of a fault", ("scripts/fleet bundle -i inventories/prod --into case.tar.gz",)),
    "capacity": (
        "Replicas and GPUs that a traffic needs",
        ("scripts/fleet capacity --from docs/examples/capacity.yml --months 12",),
    ),
    "bench": (
        "Measure a service under load and judge it",
        (
            "scripts/fleet bench -i inventories/prod chat --peak 40",
            "scripts/fleet bench -i inventories/prod chat --prompts mine.jsonl --rate 5 --rate 10",
        ),
    ),
    "report": (
        "The page of an acceptance",
        (
            "scripts/fleet report -i inventories/prod --service chat --open",
            "scripts/fleet report inventories/prod/.acceptance/chat/2026-11-30T08-45-12Z.json --serve 8080",
        ),
    ),
    "tune": (
        "Try other settings under load, offer the best",
        (
            "scripts/fleet tune -i inventories/prod chat --only max-num-seqs --budget 1200",
            "scripts/fleet tune -i inventories/prod chat --put-back",
        ),
    ),
    "completion": ("Completion for bash, zsh or fish", ("scripts/fleet completion bash >> ~/.bash_completion",)),
}


class Verbs(typer.Typer):
    """Adds to each verb its examples, and to each that asks hosts the options that all of these have."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Verb], Verb]:
        def add(function: Verb) -> Verb:
            verb = name or function.__name__.replace("_", "-")
            if verb in ABOUT:
                short, examples = ABOUT[verb]
                settings.setdefault("short_help", short)
                settings.setdefault("epilog", "\b\nFor example:\n" + "\n".join(f"  {line}" for line in examples))
            super(Verbs, self).command(name, **settings)(_shared(function))
            return function

        return add


def _shared(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function, eval_str=True)
    if "inventory" not in signature.parameters:
        return function

    @functools.wraps(function)
    def verb(**arguments: Any) -> Any:
        from gpu_fleet import runs

        shared = {name: arguments.pop(name) for name, _kind, _default in SHARED}
        runs.GIVEN.set(given(**shared))
        return function(**arguments)

    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, keyword, default=value, annotation=kind) for name, kind, value in SHARED]
    own = [parameter.replace(kind=keyword) for parameter in signature.parameters.values()]
    verb.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    return verb


def given(
    extra_vars: Sequence[str] | None, vault_password_file: Path | None, ask_become_pass: bool, ask_pass: bool
) -> Given:
    """The shared options as runs take them. Passwords are asked for here, once."""
    from getpass import getpass

    from gpu_fleet.runs import Given

    for named in [Path(word[1:]) for word in extra_vars or [] if word.startswith("@")] + [
        path for path in (vault_password_file,) if path
    ]:
        if not named.expanduser().is_file():
            refuse(f"{named}: there is no such file")
    for word in extra_vars or ():
        if wrong := _wrong_variables(word):
            refuse(wrong)
    passwords, flags = {}, []
    if ask_pass:
        flags.append("--ask-pass")
        passwords[r"^SSH password:\s*?$"] = getpass("SSH password: ", sys.stderr)
    if ask_become_pass:
        flags.append("--ask-become-pass")
        passwords[r"^BECOME password.*:\s*?$"] = getpass("BECOME password: ", sys.stderr)
    vault = {"ANSIBLE_VAULT_PASSWORD_FILE": str(vault_password_file.expanduser())} if vault_password_file else {}
    return Given(tuple(extra_vars or ()), vault, passwords, tuple(flags))


def _wrong_variables(word: str) -> str:
    """What is wrong with what -e is given: Ansible passes over the first and blames the inventory for the others."""
    if not word.startswith("@") and "=" not in word and not word.startswith(("{", "[")):
        return f"-e {word}: write NAME=VALUE, a mapping such as '{{\"name\": 1}}', or @FILE"
    if not word.startswith(("@", "{", "[")):
        return ""
    import yaml

    try:
        text = Path(word[1:]).expanduser().read_text(encoding="utf-8") if word.startswith("@") else word
        if not text.startswith("$ANSIBLE_VAULT"):
            yaml.compose(text)
    except OSError as error:
        return f"{word[1:]}: {error.strerror}"
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return f"{word.removeprefix('@')}: this is no YAML: {' '.join(str(error).split())[:200]}"
    return ""


def refuse(message: str, as_json: bool = False) -> NoReturn:
    """Used wrongly, or an input that is not taken: say why, and leave with 2."""
    if as_json:
        typer.echo(json.dumps({"exit_status": 2, "failures": [{"host": "", "task": "", "message": message}]}, indent=1))
    else:
        typer.echo(message, err=True)
    raise typer.Exit(2)


def needed(inventory: Path, as_json: bool = False) -> None:
    """Refuse an inventory that is not there."""
    if not inventory.exists():
        refuse(f"there is no inventory {inventory}. An example to copy is inventories/prod of the collection", as_json)


def call(function: Callable[..., FleetResult], as_json: bool, *arguments: Any, **options: Any) -> FleetResult:
    """Call a function of gpu_fleet.api, showing what goes on; Ctrl-C ends it in an order that the next run repairs."""
    from gpu_fleet import events, progress

    seen = events.Progress()
    takes = [seen.take, *([options["on_event"]] if "on_event" in options else [])]
    with nullcontext() if as_json else progress.shown() as board, _stoppable(seen) as cancel:
        if board is not None:
            takes.append(board.take)

        def take(event: events.Event) -> None:
            for one in takes:
                one(event)

        try:
            outcome = function(*arguments, cancel=cancel, **{**options, "on_event": take})
        except FileNotFoundError as error:
            refuse(f"{error}. An example to copy is inventories/prod of the collection", as_json)
    if outcome.interrupted:
        told_interrupted("interrupted", seen)
    return outcome


def run(playbook: str, inventory: Path, as_json: bool, **options: Any) -> FleetResult:
    """Call with a playbook by its name."""
    from gpu_fleet import api

    return call(api.play, as_json, playbook, inventory, **options)


def program() -> str:
    """What it was called by."""
    return "fleet" if Path(sys.argv[0]).name == "fleet" else "scripts/fleet"


def told_interrupted(how: str, seen: Progress) -> None:
    """How far each host is, and the command for the rest."""
    from gpu_fleet import interrupted

    lines = [
        f"{how}. What a task had begun on a host may still end there",
        *interrupted.reached(seen),
        f"for the rest, which repairs what is half done: {interrupted.again(program(), sys.argv[1:])}",
    ]
    typer.echo("\n".join(lines), err=True)


@contextmanager
def _stoppable(seen: Progress) -> Iterator[Callable[[], bool]]:
    """What a run asks whether it is to end. A second Ctrl-C ends it at once."""
    asked: list[int] = []

    def ask(number: int, _frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        os.write(2, b"\ninterrupted: ending what runs; once more to end it at once\n")

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    former = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield lambda: bool(asked)
    except KeyboardInterrupt:
        told_interrupted("ended at once", seen)
        raise typer.Exit(130) from None
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def finish(outcome: FleetResult, as_json: bool, text: str, profile: bool = False) -> NoReturn:
    """Print the outcome, with profile also where its time went, and leave with its status."""
    if as_json:
        typer.echo(json.dumps({**outcome.as_dict(), **({"profile": outcome.times} if profile else {})}, indent=1))
    else:
        if profile and outcome.times:
            from gpu_fleet import timing

            typer.echo("\n".join(timing.lines(outcome.times)), err=True)
        complain(outcome)
        if not outcome.exit_status and text:
            typer.echo(text)
    raise typer.Exit(outcome.exit_status)


def complain(outcome: FleetResult) -> None:
    """Every failure and every host that was not reached, each with what to do; where the whole log is."""
    for failure in outcome.failures:
        where = f"{failure.host}: {failure.task}: " if failure.host and not outcome.refused else ""
        typer.echo(f"{where}{failure.message}", err=True)
    for host in outcome.unreachable:
        typer.echo(
            f"{host}: not reached; nothing was changed there. {outcome.why_unreachable.get(host, '')}".rstrip(),
            err=True,
        )
    if outcome.exit_status and outcome.folder and not outcome.refused:
        typer.echo(f"the whole log: {outcome.folder}/artifacts/run/stdout", err=True)
