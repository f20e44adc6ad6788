"""Generate the documents that repeat facts: one fact stands in one place, the rest is written from it."""

from __future__ import annotations

import argparse
import ast
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTE = "<!-- Written by scripts/docs. Change {source} instead. -->\n\n"


def text(value: Any) -> str:
    """A description as one text; argument specs allow a list of sentences. C(x), V(x), M(x), O(x), P(x#kind) and RV(x) become code."""
    joined = " ".join(value) if isinstance(value, list) else str(value)
    joined = re.sub(r"\b(RV|[CVMOP])\(([^)]*)\)", lambda found: f"`{_marked(*found.groups())}`", joined)
    return " ".join(joined.split())


def _marked(mark: str, inner: str) -> str:
    return inner.partition("#")[0] if mark == "P" else inner


def cell(value: Any) -> str:
    return text(value).replace("|", "\\|")


def shown(value: Any) -> str:
    """A default as YAML on one line."""
    return f"`{yaml.safe_dump(value, default_flow_style=True, width=1000).replace('...', '').strip()}`".replace(
        "|", "\\|"
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def kind(option: dict[str, Any]) -> str:
    name = option.get("type", "str")
    return f"{name} of {option['elements']}" if "elements" in option else name


def option_rows(options: dict[str, Any], prefix: str = "") -> Iterator[list[str]]:
    for name, option in options.items():
        default = "required" if option.get("required") else shown(option.get("default"))
        choices = f" One of {', '.join(f'`{c}`' for c in option['choices'])}." if "choices" in option else ""
        yield [f"`{prefix}{name}`", kind(option), default, cell(option.get("description", "")) + choices]
        yield from option_rows(option.get("options", {}), f"{prefix}{name}.")


def role(folder: pathlib.Path) -> str:
    spec = yaml.safe_load((folder / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]
    described = spec.get("description", [])
    described = described if isinstance(described, list) else [described]
    out = (
        NOTE.format(source="meta/argument_specs.yml")
        + f"# gpu_fleet.vllm.{folder.name}\n\n{text(spec['short_description'])}.\n\n"
    )
    out += "".join(f"- {text(line)}\n" for line in described)
    rows = list(option_rows(spec.get("options", {})))
    return out + ("\n## Variables\n\n" + table(["variable", "type", "default", "meaning"], rows) if rows else "")


PORTS_OF_OTHERS = """
## Ports of others

`validate` refuses a block that covers another block, SSH (`ansible_port`, `firewall_ssh_ports`), `nccl_fixed_ports`, the range of the
kernel, or one of these. On the host, a process that listens on a port of a replica and is not that replica's own unit stops
the role nccl, by its name, process and unit.

"""
PORTS_GUARDED = """
## Who may connect

- The ports of ranks (`rank_store`, `dp_rpc`, `side_channel` and the kernel's range) have no authentication: whoever reaches them can run
  code in the server. They are open to the other hosts of the replica alone, by address and on the interface of the cluster network.
  A rank does not start while the fleet's firewall table does not guard them (`ExecStartPre=` of its unit, and of Ray's).
- The kernel's range also serves every outgoing connection of the host. Ports in it that others need are kept out of it with
  `nccl_reserved_ports`; what somebody else put into `net.ipv4.ip_local_reserved_ports` stays.
- Options of a service may open ports beside its block: the publisher of KV events (`kv-events-config`, 5557; events hold the tokens of
  prompts), the servers of Mooncake's and MoRIIO's connectors (8998, 14579; 6301, 61005), and side channels that were given a host
  (VLLM_P2P_SIDE_CHANNEL_HOST, VLLM_EC_SIDE_CHANNEL_HOST; 5710, 5601) ask for no key. `validate` refuses such a port
  until `nccl_fixed_ports` names it, which keeps blocks and the kernel off it; `firewall_openings` says who may reach it.
- Your own `firewall_openings` are added to those of the plan. One that would open a port of ranks is refused.
- RoCE carries its data over UDP 4791, which the fleet's table leaves alone; NCCL still meets over TCP. InfiniBand passes no firewall of the host.
"""


def ports() -> str:
    layout = yaml.safe_load((ROOT / "data/ports.yml").read_text())
    rows = [
        [name, f"port_base + {port['offset']}", str(port["span"]), port["what"], port["from"]]
        for name, port in layout["offsets"].items()
    ]
    ray = [
        [
            name,
            f"ray_port_base + {port['offset']}",
            str(port["span"]),
            f"`--{port['option']}`" if "option" in port else f"`{port['variable']}`" if "variable" in port else "",
            port["what"],
        ]
        for name, port in layout["ray"]["offsets"].items()
    ]
    return (
        NOTE.format(source="data/ports.yml")
        + "# Ports\n\n"
        + f"A replica takes a block of {layout['stride']} TCP ports, from its service's `port_base` on (default 8000). A second replica of the same service on the "
        + f"same host begins {layout['stride']} further. Everything else that ranks open (gloo, NCCL, vLLM's queues) comes from the kernel's range, `nccl_port_range`.\n\n"
        + table(["port", "number", "ports", "what", "who connects"], rows)
        + "\n## Ray\n\n"
        + f"With `executor: ray` a service takes a block of {layout['ray']['span']} TCP ports more on each of its hosts, from its `ray_port_base` on "
        + f"(default {layout['ray']['default']}). Only the replica's hosts may connect, and Ray asks each of them for the cluster's token.\n\n"
        + table(["port", "number", "ports", "`ray start`", "what"], ray)
        + PORTS_OF_OTHERS
        + table(
            ["port", "who listens", "on hosts of"],
            [[str(item["port"]), item["what"], ", ".join(item["groups"])] for item in layout["known"]],
        )
        + PORTS_GUARDED
    )


def services() -> str:
    sys.path.insert(0, str(ROOT / "collections"))
    from ansible_collections.gpu_fleet.vllm.plugins.module_utils.services import KEYS

    rows = [[f"`{name}`", "yes" if key.required else "", cell(key.description)] for name, key in KEYS.items()]
    return (
        NOTE.format(source="plugins/module_utils/services.py")
        + "# A service\n\n`vllm_services` is a list; each entry is one served model.\n\n"
        + table(["key", "required", "meaning"], rows)
    )


def inventory() -> str:
    known = yaml.safe_load((ROOT / "data/fleet_variables.yml").read_text())
    rows = [[f"`{name}`", entry["type"], shown(entry["default"]), cell(entry["what"])] for name, entry in known.items()]
    return (
        NOTE.format(source="data/fleet_variables.yml")
        + "# The inventory\n\nGroups: `gpu_hosts` (they serve), `gateways` and `monitors` (they reach the API of every service). A host may be in all three. "
        + "What is served is `vllm_services`, see [services.md](services.md); everything else is a variable of a role, in the role's README, or one of these:\n\n"
        + table(["variable", "type", "default", "meaning"], rows)
    )


def findings() -> str:
    sys.path.insert(0, str(ROOT / "collections"))
    from ansible_collections.gpu_fleet.vllm.plugins.module_utils.hardware import FINDINGS
    from ansible_collections.gpu_fleet.vllm.plugins.module_utils.launch_rules import MEANINGS

    launches = [[f"`{name}`", severity, cell(meaning)] for name, (severity, meaning) in MEANINGS.items()]
    rows = [[f"`{name}`", severity, cell(meaning)] for name, (severity, meaning) in FINDINGS.items()]
    return (
        NOTE.format(source="plugins/module_utils/hardware.py")
        + "# Findings\n\n## About GPU hosts\n\n"
        + "Each comes with its evidence and a remedy. An error stops the host before anything is changed on it (`gpu_topology_fail_on`); "
        + "what is known and wanted is named in `gpu_topology_accept`. A healthy host has none.\n\n"
        + table(["finding", "severity", "meaning"], rows)
        + "\n## About launches\n\nRules of a planned launch (docs/plan.md; plugins/module_utils/launch_rules.py). An error refuses the plan before a host is touched.\n\n"
        + table(["rule", "severity", "meaning"], launches)
    )


def releases() -> str:
    known = yaml.safe_load((ROOT / "data/versions.yml").read_text())
    locks = sorted(path.name for path in (ROOT / "locks").glob("*.lock"))
    rows = []
    for version, release in known["releases"].items():
        for name, accelerator in release["accelerators"].items():
            made = sorted(
                {lock.split("-py")[1].split("-")[0] for lock in locks if lock.startswith(f"vllm-{version}-{name}-py")},
                key=lambda p: int(p[1:]),
            )
            driver = (accelerator.get("min_driver") or {}).get("toolkit", "")
            locked = ", ".join(f"3.{p[1:]}" for p in made) or "missing: scripts/lock has the recipe"
            engine = accelerator["engine"]
            rows.append(
                [
                    version,
                    name,
                    accelerator["status"],
                    locked,
                    f"{engine['package']} {engine['version']} by {engine['by']}",
                    accelerator["torch"],
                    driver,
                ]
            )
    head = ["vLLM", "accelerator", "status", "locks for Python", "engine", "torch", "driver, at least"]
    default = f"Default on GPUs: {known['defaults']['cuda']}. Default on CPU: {known['defaults']['cpu']}.\n\n"
    others = (
        "\nWhat a host can run of these is decided by driver, GPUs, glibc and Python; the filter `gpu_fleet.vllm.gpu_wheels` says it.\n\n"
        + "## Not offered\n\nThese are known for hosts that run none of the above. The collection does not install them.\n\n"
        + table(
            [
                "vLLM",
                "accelerator",
                "Python",
                "compute capability",
                "glibc",
                "driver, at least",
                "driver of the toolkit",
            ],
            [
                [
                    version,
                    name,
                    f"{release['python'][0]} to {release['python'][-1]}",
                    " ".join(entry["compute_capabilities"]),
                    entry["glibc"],
                    entry["min_driver"]["minor_compatibility"],
                    entry["min_driver"]["toolkit"],
                ]
                for version, release in known["known"].items()
                for name, entry in release["accelerators"].items()
            ],
        )
    )
    return NOTE.format(source="data/versions.yml") + "# Releases\n\n" + default + table(head, rows) + others


def causes() -> str:
    """Every cause that the doctor knows, by family (a file of data/signatures)."""
    kinds = {"symptom": "symptom", "end": "last words"}
    answered = _answered((ROOT / "docs/pitfalls.md").read_text())
    out = (
        NOTE.format(source="data/signatures/*.yml")
        + "# Causes\n\nWhat `scripts/fleet doctor` names (docs/doctor.md). A symptom is named only where no cause explains it, last words only where nothing else is found. What the collection does about one beforehand, and how, is in docs/pitfalls.md.\n"
    )
    for path in sorted((ROOT / "data" / "signatures").glob("*.yml")):
        rows = [
            [
                f"`{entry['id']}`",
                entry.get("severity", kinds.get(entry.get("kind"), "error")),
                cell(_blanks(entry["cause"])),
                cell(_blanks(entry["fix"])),
                answered.get(entry["id"], "detected: named here"),
                cell(entry["source"]),
            ]
            for entry in yaml.safe_load(path.read_text())
            if entry.get("kind") not in ("note", "consequence")
        ]
        out += f"\n## {path.stem}\n\n" + table(
            ["cause", "kind", "what it is", "what to do", "the collection", "whose message"], rows
        )
    return out


def _answered(pitfalls: str) -> dict[str, str]:
    """By cause what the collection does about it: the first word of each answer in the table of pitfalls."""
    found: dict[str, str] = {}
    for named, answer in re.findall(r"^\| [^|]+ \| ([^|]*) \| ([^|]*) \|$", pitfalls, re.MULTILINE):
        words = dict.fromkeys(re.findall(r"\b(prevented|detected|repaired)\b", answer))
        found.update(dict.fromkeys(re.findall(r"`([^`]+)`", named), f"[{', '.join(words)}](pitfalls.md)"))
    return found


CLI = """# Command line

`scripts/fleet VERB` plays a playbook of the collection through ansible-runner; whatever it does, `ansible-playbook playbooks/NAME.yml` does too. In a checkout it makes
the Python environment that it needs (`.venv`) at its first call; after `pip install .` it is the command `fleet`, and in a collection that ansible-galaxy installed
it is `ansible_collections/gpu_fleet/vllm/scripts/fleet`.

| exit status | means |
|---|---|
| 0 | good |
| 1 | something was found, differs or failed; what was found is on standard output, what failed on standard error |
| 2 | used wrongly, or the input was refused; nothing was touched |
| 130 | interrupted |

- **`--json`**: one JSON document on standard output and no progress. Verbs that run a playbook print `exit_status`, `changed`, `failures` (`host`, `task`, `message`),
  `unreachable`, `why_unreachable`, `summary`, `plan`, `hosts`, `stages` (seconds by host and stage), `seconds` and `folder`. With exit status 2 the reason may be on standard error alone.
- **Progress** goes to standard error: on a terminal a table of hosts by stage (a role) with times, elsewhere a line a task and one a minute. `NO_COLOR` switches colours off.
- **What failed** is told host by host: the task, its message, what to do. The whole log stays in `~/.local/state/gpu_fleet/runs` (`XDG_STATE_HOME`), a folder a run for its owner
  alone: `artifacts/run/stdout`, `artifacts/run/job_events`, `result.json`, and `profile.json`, which says what each task took (`--profile` prints it by stage and task). The last {keep} finished runs are kept.
- **Ctrl-C** ends ansible-playbook in order, a second one at once; both say how far each host is and the command for the rest. What a task had begun on a host may
  still end there; the next run repairs and goes on.
- **Two runs** of one user on one machine do not change the fleet of one inventory at once: the second is refused. Others, and those that only look, go side by side.
- **Settings of Ansible** hold as ever: `ANSIBLE_CONFIG`, an ansible.cfg where you call it, else the collection's own; `ANSIBLE_VAULT_PASSWORD_FILE` and the other variables.
  Relative paths are looked up where you call it.
- **A wrong password** is tried once, unless you have ssh retried (`ansible_ssh_retries`, `ANSIBLE_SSH_RETRIES`): ansible-core 2.19 and newer then try it again each
  time, and a host may lock the account.
- **Completion**: `scripts/fleet completion bash >> ~/.bash_completion`; also zsh and fish. It completes `fleet` and `scripts/fleet`.

Every verb that asks hosts also takes

{shared}
"""


def cli() -> str:
    """docs/cli.md, from the options of the verbs themselves."""
    import typer

    from gpu_fleet import cli as program
    from gpu_fleet import kept, verbs

    group: Any = typer.main.get_command(program.app)
    names = {name for name, _kind, _default in verbs.SHARED}
    shared = [parameter for parameter in group.commands["deploy"].params if parameter.name in names]
    out = NOTE.format(source="scripts/gpu_fleet/cli*.py") + CLI.format(keep=kept.KEEP, shared=_options(shared))
    for name, verb in group.commands.items():
        told = str(verb.help or "").replace("\n\n", "\0").replace("\n", " ").replace("\0", "\n\n")
        own = [parameter for parameter in verb.params if parameter.name not in names]
        examples = "\n".join(verbs.ABOUT[name][1])
        out += f"\n## {name}\n\n{told}\n\n```\n{examples}\n```\n\n{_options(own)}"
    return out


def _options(parameters: list[Any]) -> str:
    rows = []
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            rows.append([f"`{parameter.name.upper()}`", "", cell(getattr(parameter, "help", "") or "")])
            continue
        default = parameter.default
        given = "required" if parameter.required else "" if default in (None, False, "", [], ()) else f"`{default}`"
        rows.append([", ".join(f"`{name}`" for name in parameter.opts), given, cell(parameter.help or "")])
    return table(["option", "default", "meaning"], rows)


def _documentation(path: pathlib.Path) -> dict[str, Any]:
    """The strings DOCUMENTATION, EXAMPLES and RETURN of a module or plugin, read as Ansible does: without running it."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("DOCUMENTATION", "EXAMPLES", "RETURN"):
                value = ast.literal_eval(node.value)
                found[name] = value if name == "EXAMPLES" else yaml.safe_load(value)
    return found


def modules() -> str:
    """docs/modules.md, from the documentation that each module and plugin carries (`ansible-doc` shows the same)."""
    out = NOTE.format(source="the DOCUMENTATION in plugins/") + (
        "# Modules and plugins\n\nWhat roles are made of, for those who write playbooks of their own. `ansible-doc gpu_fleet.vllm.NAME` has the same with examples.\n"
    )
    for folder, title in (("modules", "Modules"), ("filter", "Filters"), ("lookup", "Lookups")):
        out += f"\n## {title}\n"
        for path in sorted((ROOT / "plugins" / folder).glob("*.py")):
            told = _documentation(path)
            about = told["DOCUMENTATION"]
            described = about.get("description", [])
            out += f"\n### {about.get('name') or about['module']}\n\n{text(about['short_description'])}.\n\n"
            out += "".join(f"- {text(line)}\n" for line in ([described] if isinstance(described, str) else described))
            rows = list(option_rows(about.get("options") or {}))
            if rows:
                out += "\n" + table(["option", "type", "default", "meaning"], rows)
            returned = [
                [f"`{name}`", kind(entry), cell(entry.get("description", ""))]
                for name, entry in (told.get("RETURN") or {}).items()
            ]
            if returned:
                out += "\n" + table(["returns", "type", "meaning"], returned)
    return out


def runbooks() -> dict[pathlib.Path, str]:
    """A page an alert, and the list of them."""
    sys.path.insert(0, str(ROOT / "collections"))
    from ansible_collections.gpu_fleet.vllm.plugins.module_utils.monitoring import documented

    known = {
        name: yaml.safe_load((ROOT / f"data/{name}.yml").read_text())
        for name in ("metrics", "recordings", "alerts", "thresholds")
    }
    note, folder = NOTE.format(source="data/alerts.yml"), ROOT / "docs/runbooks"
    pages, rows = {}, []
    for entry in known["alerts"]:
        name, lasts = entry["alert"], entry.get("for")
        rows.append([f"[{name}]({name}.md)", entry["severity"], cell(entry["means"])])
        pages[folder / f"{name}.md"] = (
            note
            + f"# {name}\n\nSeverity {entry['severity']}{f', after {lasts}' if lasts else ''}. {text(entry['means'])}\n\n"
            + f"It fires where this is true:\n\n```\n{documented(entry['expr'], known)}\n```\n\n"
            + "## Look\n\n```\n"
            + "\n".join(entry["look"])
            + "\n```\n\n## Do\n\n"
            + "".join(f"- {line}\n" for line in entry["do"])
        )
    thresholds = [[f"`{name}`", str(entry["value"]), entry["what"]] for name, entry in known["thresholds"].items()]
    pages[folder / "README.md"] = (
        note
        + "# Runbooks\n\nOne page an alert; REPLICA is a name such as chat.0, INVENTORY the fleet's. Rules: [monitoring.md](../monitoring.md).\n\n"
        + table(["alert", "severity", "what it means"], rows)
        + "\n## Thresholds\n\n`monitoring_thresholds` changes them.\n\n"
        + table(["threshold", "default", "what it is"], thresholds)
    )
    return pages


def dashboards() -> dict[pathlib.Path, str]:
    from gpu_fleet.dashboards import dashboard

    folder = ROOT / "roles/monitoring/files/dashboards"
    known = yaml.safe_load((ROOT / "data/dashboards.yml").read_text())
    return {folder / f"{name}.json": dashboard(name, entry) for name, entry in known.items()}


def _blanks(sentence: str) -> str:
    """A sentence of a signature without what a log fills in: {name|else} reads else, {name} stays a name."""
    return re.sub(
        r"\{[^\w{}|]*(\w+)(\|[^{}]*)?\}",
        lambda found: found.group(2)[1:] if found.group(2) else found.group(1).upper(),
        sentence,
    )


def changelog() -> str:
    """What users notice, by version: of the next one from changelogs/fragments, of released ones as antsibull-changelog keeps them."""
    folder = ROOT / "changelogs"
    sections = yaml.safe_load((folder / "config.yaml").read_text())["sections"]
    out = NOTE.format(source="changelogs/fragments") + "# Changelog\n"
    coming: dict[str, Any] = {}
    for path in sorted((folder / "fragments").glob("*.yml")):
        for name, entries in yaml.safe_load(path.read_text()).items():
            coming.setdefault(name, []).extend(entries)
    if coming:
        version = yaml.safe_load((ROOT / "galaxy.yml").read_text())["version"]
        out += f"\n## {version} (not released)\n" + _changes(coming, sections)
    kept = folder / "changelog.yaml"
    releases = yaml.safe_load(kept.read_text())["releases"] if kept.exists() else {}
    for version in sorted(releases, key=lambda text: tuple(map(int, text.split("."))), reverse=True):
        release = releases[version]
        out += f"\n## {version} ({release['release_date']})\n" + _changes(release.get("changes", {}), sections)
    return out


def _changes(entries: dict[str, Any], sections: list[list[str]]) -> str:
    """Entries are reStructuredText, as antsibull-changelog wants them."""
    out = f"\n{text(entries['release_summary'])}\n" if "release_summary" in entries else ""
    for name, title in sections:
        if name in entries:
            out += f"\n### {title}\n\n" + "".join(f"- {text(entry)}\n" for entry in entries[name])
    return out.replace("``", "`")


def documents() -> dict[pathlib.Path, str]:
    made = {
        folder / "README.md": role(folder)
        for folder in sorted((ROOT / "roles").iterdir())
        if (folder / "meta/argument_specs.yml").exists()
    }
    return made | {
        ROOT / "CHANGELOG.md": changelog(),
        ROOT / "docs/ports.md": ports(),
        ROOT / "docs/services.md": services(),
        ROOT / "docs/inventory.md": inventory(),
        ROOT / "docs/releases.md": releases(),
        ROOT / "docs/findings.md": findings(),
        ROOT / "docs/causes.md": causes(),
        ROOT / "docs/cli.md": cli(),
        ROOT / "docs/modules.md": modules(),
        **runbooks(),
        **dashboards(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, say what is out of date")
    parser.add_argument("--site", metavar="FOLDER", type=pathlib.Path, help="build all pages as HTML into this folder")
    arguments = parser.parse_args()
    if arguments.site:
        from gpu_fleet import site

        return site.build(arguments.site)
    check = arguments.check
    stale = {path: content for path, content in documents().items() if not path.exists() or path.read_text() != content}
    for path, content in stale.items():
        print(f"{path.relative_to(ROOT)}: {'out of date, run scripts/docs' if check else 'written'}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
