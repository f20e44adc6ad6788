"""Filters of an acceptance: from the plan to a job for the hosts, and from what they measured to a document."""

from __future__ import annotations

DOCUMENTATION = """
name: acceptance_job
short_description: What the hosts of an acceptance are given
description:
  - The job of C(playbooks/accept.yml). A setting that cannot be used is refused by name.
  - C(acceptance_document), of the same file, judges what came of it, C(acceptance_lines) tells it, C(acceptance_prompts) turns a
    user's JSONL into what the generator reads, C(acceptance_program) gives the files of what runs on the hosts, path to text.
positional: settings, folder, watched
options:
  _input:
    description: The whole plan, C(fleet_plan).
    type: dict
    required: true
  settings:
    description: Variables of the playbook without their C(accept_).
    type: dict
    required: true
  folder:
    description: Folder of the hosts for the job and what it brings.
    type: str
    required: true
  watched:
    description: C(monitoring_objectives).
    type: dict
    default: {}
"""

EXAMPLES = """
- name: Decide what is measured
  ansible.builtin.set_fact:
    job: "{{ fleet_plan | gpu_fleet.vllm.acceptance_job(settings, '/var/lib/gpu_fleet/bench') }}"
"""

RETURN = """
_value:
  description: The job.
  type: dict
"""

import json  # noqa: E402
import pathlib  # noqa: E402

from ansible.errors import AnsibleFilterError  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils import data  # noqa: E402
from ansible_collections.gpu_fleet.vllm.plugins.plugin_utils.later import Module  # noqa: E402

bench_document = Module("bench_document")
bench_driver = Module("bench_driver")
bench_plan = Module("bench_plan")
bench_sample = Module("bench_sample")
probe = Module("probe")


def acceptance_job(plan, settings, folder, watched=None):
    try:
        return bench_document.job(
            plan,
            settings,
            watched=watched or {},
            metrics=data.load("metrics"),
            known=data.load("objectives"),
            folder=folder,
        )
    except (bench_document.BadSetting, bench_plan.BadJob) as error:
        raise AnsibleFilterError(f"{error}. No host was touched") from error


def version():
    """The collection's own: from galaxy.yml in a checkout, from MANIFEST.json where it was installed."""
    manifest = data.ROOT / "MANIFEST.json"
    if manifest.is_file():
        return json.loads(manifest.read_text(encoding="utf-8"))["collection_info"]["version"]
    return data.read(data.ROOT / "galaxy.yml")["version"]


def acceptance_document(plan, job, raw, kept=()):
    texts = [pathlib.Path(path).read_text(encoding="utf-8") for path in kept]
    raw = {
        **raw,
        "collection": version(),
        "hosts": {host: {**seen, "samples": samples(seen)} for host, seen in raw["hosts"].items()},
    }
    return bench_document.document(job, plan, raw, [json.loads(text) for text in texts], data.load("objectives"))


def samples(seen):
    """Lines of JSON, of which the last may be half written."""
    found = []
    for line in (seen.get("samples") or "").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


MAIN = """import sys

from gpu_fleet_bench import bench_driver, bench_sample

PARTS = {"drive": bench_driver.main, "ended": bench_driver.ended, "sample": bench_sample.main}
sys.exit(PARTS[sys.argv[1]](sys.argv[2:]))
"""


def acceptance_program(folder):
    files = {"__main__.py": MAIN, "gpu_fleet_bench/__init__.py": ""}
    for module in (bench_plan, bench_driver, bench_sample, probe):
        path = pathlib.Path(module.__file__)
        files[f"gpu_fleet_bench/{path.name}"] = path.read_text(encoding="utf-8")
    return [{"path": f"{folder}/{path}", "content": text} for path, text in files.items()]


def acceptance_prompts(text):
    try:
        return bench_document.prompts(text)
    except bench_document.BadSetting as error:
        raise AnsibleFilterError(f"{error}. No host was touched") from error


class FilterModule:
    """Filters of this file."""

    def filters(self):
        return {
            "acceptance_job": acceptance_job,
            "acceptance_document": acceptance_document,
            "acceptance_lines": bench_document.function("lines"),
            "acceptance_program": acceptance_program,
            "acceptance_prompts": acceptance_prompts,
        }
