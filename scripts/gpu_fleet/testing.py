"""scripts/test: the tiers, one step after the other.

    scripts/test                 lint, unit, lab, e2e
    scripts/test lint            one tier
    scripts/test lab firewall    one scenario of molecule/
    scripts/test e2e many_hosts  one of those with the real engine; without a name the demo's own tests, `demo`
    scripts/test unit -k plan    whatever pytest takes
    scripts/test long            what takes too long for every day
    scripts/test long faults --count 3    tests/long/test_faults.py, with what pytest takes
    scripts/test --changed [REF] [--list]    lint and what stands nearest to the changes since a commit, HEAD; or only which that is

The last line is `N passed, M failed`: tests where a step runs tests (pytest counts them), the step itself where not.
Exit status 0 only when all is well; 2 when used wrongly. Labs are removed whatever happens. Logs: .cache/logs/test.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from gpu_fleet.steps import LAB, LOGS, ROOT, Runner, Step, interruptible, undisturbed

TIERS = ("lint", "unit", "lab", "e2e", "long")
DAILY = TIERS[:4]
# Scenarios that the tier lab runs only when they are named: they take longer than the daily tests have.
HEAVY = (
    "doctor",
    "gateway",
    "gateway_pair",
    "gpu_driver",
    "gpu_driver_nvidia",
    "gpu_driver_upgrade",
    "life",
    "monitoring",
    "strangers",
    "teardown",
)
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
# Files go whole to a worker, so that what a module makes once is made once; eight are as many as are worth their start.
EVERY_CORE = ("-n", "auto", "--maxprocesses", "8", "--dist", "loadfile")


class Usage(Exception):
    """Used wrongly; the message says how it is meant."""


# -- counting -------------------------------------------------------------------------------------------------------------

_SUMMARY = re.compile(r"^=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+s", re.MULTILINE)


def counted(step: Step) -> tuple[int, int]:
    """Passed and failed tests of a step by pytest's closing lines; a step without any counts as one test itself."""
    passed = failed = 0
    for summary in _SUMMARY.findall(step.text()):
        for number, word in re.findall(r"(\d+) (\w+)", summary):
            passed += int(number) if word == "passed" else 0
            failed += int(number) if word in ("failed", "error", "errors") else 0
    if step.ok:
        return max(passed, 1), 0
    return passed, max(failed, 1)


# -- tiers ----------------------------------------------------------------------------------------------------------------


def scenarios() -> list[str]:
    """Molecule's scenarios of the tier lab; the lab's own first, since all others stand on it."""
    from gpu_fleet import endtoend

    known = (path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml"))
    names = sorted(name for name in known if name not in endtoend.SCENARIOS)
    return sorted(names, key=lambda name: name != "lab")


def shell_scripts() -> list[str]:
    """Scripts of the repository that a shell runs; some are programs that a host of a test gets."""
    folders = (".ci", "scripts", "tests/driver_repository")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file() and not path.suffix]
    return sorted(str(path) for path in files if re.match(rb"#!\S*(/| )(ba)?sh\n", path.read_bytes()[:40]))


def lint(runner: Runner, names: list[str]) -> None:
    refuse_names("lint", names)
    commands = {
        "ruff check": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "yamllint": ["yamllint", "--strict", "."],
        "ansible-lint": ["ansible-lint", "--offline", "--strict"],
        "mypy": ["mypy"],
        "shell syntax": ["bash", "-n", *shell_scripts()],
        "shellcheck": ["shellcheck", *shell_scripts()],
        "changelog": ["antsibull-changelog", "lint"],
        "site.yml -i prod": ["ansible-playbook", "site.yml", "-i", "prod", "--syntax-check"],
        "validate -i prod": ["ansible-playbook", "playbooks/validate.yml", "-i", "prod"],
    }
    for name, command in commands.items():
        runner.run(f"lint {name}", command, timeout=300)


def unit(runner: Runner, names: list[str]) -> None:
    runner.run("unit", [*PYTEST, *EVERY_CORE, *(names or ["tests/unit"])], timeout=600)


def lab(runner: Runner, names: list[str]) -> None:
    known = scenarios()
    if unknown := [name for name in names if name not in known]:
        raise Usage(f"no scenario {', '.join(unknown)} in molecule/; there are {', '.join(known)}")
    for name in names or [name for name in known if name not in HEAVY]:
        # What an interrupted run left is not what this one tests.
        for what, command in (
            ("clean", lab_down(f"test-{name}")),
            ("forget", ["molecule", "reset", "--scenario-name", name]),
        ):
            runner.run(f"{what} {name}", command, timeout=120, quiet=True)
            runner.steps.pop()
        try:
            limit = 3600 if name in HEAVY else 1200
            step = runner.run(f"lab {name}", ["molecule", "test", "--scenario-name", name], timeout=limit)
            refuse_empty(runner, step, name)
        finally:
            with undisturbed():
                runner.run(f"clean {name}", lab_down(f"test-{name}"), timeout=120, quiet=True)
                runner.steps.pop()


def refuse_empty(runner: Runner, step: Step, name: str) -> None:
    """A scenario whose verify step ran no test proves nothing; molecule calls it a success."""
    if step.ok and not _SUMMARY.search(step.text()):
        runner.console.print(
            f"  [red]FAILED[/red]  lab {name}: no test ran; tests/host/test_{name}.py has to hold some"
        )
        step.returncode = 1


def e2e(runner: Runner, names: list[str]) -> None:
    from gpu_fleet import endtoend

    known = ("demo", *endtoend.SCENARIOS)
    if unknown := [name for name in names if name not in known]:
        raise Usage(f"no {', '.join(unknown)} in the tier e2e; there are {', '.join(known)}")
    # The scenarios take longer than the daily tests have: they run when they are named.
    if not names or "demo" in names:
        endtoend.run(runner)
    for name in endtoend.SCENARIOS:
        if name in names:
            endtoend.scenario(runner, name, partial(refuse_empty, runner, name=name))


def long(runner: Runner, names: list[str]) -> None:
    named = [
        f"tests/long/test_{name}.py" if (ROOT / f"tests/long/test_{name}.py").is_file() else name for name in names
    ]
    runner.run("long", [*PYTEST, "-s", *(named or ["tests/long"])], timeout=6 * 3600)


def lab_down(name: str) -> list[str]:
    return [sys.executable, str(LAB), "down", name]


def refuse_names(tier: str, names: list[str]) -> None:
    if names:
        raise Usage(f"the tier {tier} takes no name ({' '.join(names)})")


# -- what is changed --------------------------------------------------------------------------------------------------------


def changes(ref: str) -> list[str]:
    """Files that differ from a commit, those that went away and new ones among them."""
    if _git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}") is None:
        raise Usage(f"there is no commit {ref} in this checkout")
    differ = _git("diff", "--name-only", "--no-renames", ref) or []
    return sorted({*differ, *(_git("ls-files", "--others", "--exclude-standard") or [])})


def texts() -> dict[str, str]:
    """Every file of the repository that is text, by its path."""
    found = {}
    for name in _git("ls-files", "--cached", "--others", "--exclude-standard") or []:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found[name] = (ROOT / name).read_text(encoding="utf-8")
    return found


def _git(*words: str) -> list[str] | None:
    """Names that git tells; None where it fails."""
    command, *rest = words
    names = ["-z"] if command != "rev-parse" else []
    done = subprocess.run(["git", command, *names, *rest], cwd=ROOT, capture_output=True, text=True, check=False)
    return [name for name in done.stdout.split("\0") if name] if done.returncode == 0 else None


def changed_only(words: list[str]) -> tuple[str, bool]:
    """The commit to compare with, and whether to list only."""
    refs = [word for word in words if not word.startswith("-")]
    if len(refs) > 1 or set(words) - {*refs, "--list"}:
        raise Usage(f"--changed takes a commit and --list ({' '.join(words)})")
    return (refs[0] if refs else "HEAD"), "--list" in words


def nearest(runner: Runner, ref: str, differ: list[str]) -> list[tuple[str, list[str]]]:
    """Tiers with their names for these changes, told before they run."""
    from gpu_fleet import changed, endtoend

    found = changed.choose(differ, texts())
    if found.everything:
        runner.console.print(f"{found.everything}: all that runs daily", markup=False, soft_wrap=True)
        return [(tier, []) for tier in DAILY]
    by_name = dict.fromkeys(endtoend.SCENARIOS, "e2e") | dict.fromkeys(HEAVY, "lab")
    now = [name for name in found.scenarios if name not in by_name and name != "demo"]
    chosen = [
        ("lint", []),
        ("unit", list(found.unit)),
        ("lab", now),
        ("e2e", ["demo"] if "demo" in found.scenarios else []),
    ]
    chosen = [(tier, names) for tier, names in chosen if names or tier == "lint"]
    runner.console.print(f"{len(differ)} files are changed since {ref}; nearest to them:", markup=False, soft_wrap=True)
    for tier, names in chosen:
        runner.console.print(f"  {tier:<5} {' '.join(names)}", markup=False, soft_wrap=True)
    for name in found.scenarios:
        if name in by_name:
            runner.console.print(
                f"  takes longer, by name: scripts/test {by_name[name]} {name}", markup=False, soft_wrap=True
            )
    return chosen


RUN: dict[str, Callable[[Runner, list[str]], None]] = {"lint": lint, "unit": unit, "lab": lab, "e2e": e2e, "long": long}


# -- the program ----------------------------------------------------------------------------------------------------------


def chosen(runner: Runner, arguments: list[str]) -> list[tuple[str, list[str]]]:
    """The tiers to run, each with its names."""
    if not arguments:
        return [(tier, []) for tier in DAILY]
    if arguments[0] == "--changed":
        ref, only_list = changed_only(arguments[1:])
        differ = changes(ref)
        if not differ:
            runner.console.print(f"nothing is changed since {ref}", markup=False)
        found = nearest(runner, ref, differ) if differ else []
        return [] if only_list else found
    if arguments[0] not in TIERS:
        raise Usage(f"'{arguments[0]}' is no tier; scripts/test [{'|'.join(TIERS)}] [NAME], or --changed [REF]")
    return [(arguments[0], arguments[1:])]


def totals(steps: Iterable[Step]) -> tuple[int, int]:
    counts = [counted(step) for step in steps]
    return sum(passed for passed, _ in counts), sum(failed for _, failed in counts)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    runner = Runner(LOGS / "test")
    try:
        plan = chosen(runner, arguments)
    except Usage as error:
        runner.console.print(f"test: {error}", markup=False)
        return 2
    if not plan:
        return 0
    with open(runner.folder / ".lock", "w", encoding="utf-8") as lock, interruptible():
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            runner.console.print("test: another scripts/test runs in this checkout; wait for it or end it")
            return 2
        return _run(runner, plan)


def _run(runner: Runner, plan: list[tuple[str, list[str]]]) -> int:
    began = time.monotonic()
    interrupted = False
    try:
        for tier, names in plan:
            runner.console.print(f"[bold]{tier}[/bold]")
            RUN[tier](runner, names)
    except Usage as error:
        runner.console.print(f"test: {error}", markup=False)
        return 2
    except KeyboardInterrupt:
        interrupted = True
        with undisturbed():
            runner.stop()
        runner.console.print("test: interrupted; what ran was ended and its labs were removed")
    passed, failed = totals(runner.steps)
    bad = [step.name for step in runner.steps if not step.ok]
    if bad:
        runner.console.print(f"failed: {', '.join(bad)} (logs: {_short(runner.folder)})")
    runner.console.print(f"{time.monotonic() - began:.0f} s in all")
    print(f"{passed} passed, {failed} failed", flush=True)
    return 130 if interrupted else int(failed > 0 or passed == 0)


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    sys.exit(main())
