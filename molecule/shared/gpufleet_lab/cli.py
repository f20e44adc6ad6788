"""The command line of the lab."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from pathlib import Path

from . import hosts, labs, network
from .errors import LabError, UsageError
from .names import LabNames, check_host_name
from .state import Bind, all_ids, load

CHECKOUT = Path(__file__).resolve().parents[3]


def _bind(text: str) -> Bind:
    source, _, target = text.removesuffix(":ro").partition(":")
    if not source.startswith("/") or not target.startswith("/"):
        raise argparse.ArgumentTypeError(f"'{text}' is not SOURCE:TARGET with two absolute paths")
    return Bind(source, target)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab.py", description="Booted Debian hosts on this machine, for tests and for the demo."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)

    up = verbs.add_parser("up", help="make a lab, or what is missing of it; prints the path of its Ansible inventory")
    up.add_argument("name")
    up.add_argument("--host", action="append", required=True, help="a host's name; once for each host")
    up.add_argument(
        "--bind",
        action="append",
        default=[],
        type=_bind,
        metavar="SOURCE:TARGET",
        help="a folder every host sees, read-only",
    )
    up.add_argument("--no-nat", action="store_true", help="give the hosts no way out of the lab")
    up.add_argument("--suite", help="Debian release of the hosts; default: this machine's")

    base = verbs.add_parser(
        "base", help="make the root file system that hosts stand on, ahead of time; prints its path"
    )
    base.add_argument("--suite", help="Debian release; default: this machine's")

    down = verbs.add_parser("down", help="remove a lab, whole or half made")
    down.add_argument("name", nargs="?")
    down.add_argument("--all", action="store_true", help="list the labs of this machine, then remove them all")

    verbs.add_parser("list", help="the labs of this machine")
    for verb, text in (("path", "the folder with a lab's files"), ("inventory", "print a lab's Ansible inventory")):
        verbs.add_parser(verb, help=text).add_argument("name")

    count = verbs.add_parser(
        "counters", help="what left the lab, as JSON: packets to addresses outside it since the last reset"
    )
    count.add_argument("name")
    count.add_argument("--reset", action="store_true", help="print, then count from zero")

    execute = verbs.add_parser("exec", help="run a command on a host: exec NAME HOST -- COMMAND...")
    execute.add_argument("name")
    execute.add_argument("host")
    execute.add_argument("command", nargs=argparse.REMAINDER)

    supervise = verbs.add_parser("_supervise")  # what `up` leaves running for each host
    supervise.add_argument("lab_id")
    supervise.add_argument("host")
    return parser


def _up(args: argparse.Namespace) -> int:
    wanted = tuple(check_host_name(host) for host in args.host)
    if len(set(wanted)) != len(wanted) or len(wanted) > 200:
        raise UsageError("each --host needs a name of its own, and a lab has room for 200")
    try:
        lab = labs.up(labs.Request(args.name, CHECKOUT, wanted, tuple(args.bind), not args.no_nat, args.suite))
    except KeyboardInterrupt:
        labs.say(
            f"interrupted: lab {args.name} is half made; `lab.py down {args.name}` removes it, `up` goes on with it"
        )
        return 130
    print(lab.names.folder / "inventory.yml")
    return 0


def _down(args: argparse.Namespace) -> int:
    if bool(args.name) == args.all:
        raise UsageError("name one lab, or say --all")
    if args.name:
        existed = labs.down(LabNames.of(args.name, CHECKOUT))
        labs.say(f"{args.name}: {'removed' if existed else 'there was nothing to remove'}")
        return 0
    ids = all_ids()
    labs.say(f"removing {', '.join(ids)}" if ids else "there is no lab on this machine")
    for lab_id in ids:
        labs.down(LabNames(lab_id))
        labs.say(f"{lab_id}: removed")
    return 0


def _list(_: argparse.Namespace) -> int:
    for lab_id in all_ids():
        try:
            lab = load(LabNames(lab_id))
        except LabError as error:
            print(f"{lab_id}\tdamaged: {error}")
            continue
        if lab:
            running = sum(hosts.supervisor(lab, host) is not None for host in lab.hosts)
            print(
                f"{lab.name}\t{lab.subnet}\t{running}/{len(lab.hosts)} running: {' '.join(lab.hosts)}\t{lab.checkout}"
            )
    return 0


def _exec(args: argparse.Namespace) -> int:
    lab = labs.find(args.name, CHECKOUT)
    if args.host not in lab.hosts:
        raise UsageError(f"lab {args.name} has no host {args.host}; it has {', '.join(lab.hosts)}")
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("exec NAME HOST -- COMMAND: the command is missing")
    ssh = [
        *hosts.ssh_command(lab, args.host),
        *(["-t"] if sys.stdin.isatty() and sys.stdout.isatty() else []),
        shlex.join(command),
    ]
    os.execvp(ssh[0], ssh)


def _run(args: argparse.Namespace) -> int:
    if args.verb == "_supervise":
        lab = load(LabNames(args.lab_id))
        return hosts.supervise(lab, args.host) if lab else 1
    verbs = {"up": _up, "down": _down, "list": _list, "exec": _exec}
    if args.verb in verbs:
        return verbs[args.verb](args)
    if args.verb == "base":
        print(labs.prepare_base(args.suite))
        return 0
    lab = labs.find(args.name, CHECKOUT)
    if args.verb == "path":
        print(lab.names.folder)
    elif args.verb == "inventory":
        print(labs.inventory(lab), end="")
    else:
        print(json.dumps(network.counters(lab, args.reset), indent=2))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 good, 1 something failed, 2 used wrongly or this machine lacks a right or a tool."""

    def interrupted(*_):
        raise KeyboardInterrupt

    args = _parser().parse_args(argv)
    if args.verb != "_supervise":
        signal.signal(signal.SIGTERM, interrupted)
    try:
        return _run(args)
    except UsageError as error:
        labs.say(str(error))
        return 2
    except LabError as error:
        labs.say(str(error))
        return 1
    except KeyboardInterrupt:
        labs.say("interrupted")
        return 130
    except BrokenPipeError:  # whoever read our answer had enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
