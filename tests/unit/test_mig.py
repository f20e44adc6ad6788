"""Failure 13: MIG instances that are gone after a boot are made anew, looked at, and never destroyed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from ansible_collections.gpu_fleet.vllm.plugins.module_utils import mig
from conftest import REPOSITORY

HEAD = (
    "+-------------------------------------------------------+\n| GPU instances:                                        |\n"
    "| GPU   Name             Profile  Instance   Placement  |\n|                          ID       ID       Start:Size |\n"
    "|=======================================================|\n"
)
LINE = "+-------------------------------------------------------+\n"
NUMBERS = {"1g.10gb": 19, "2g.20gb": 14, "1g.10gb+me": 20}


class Played:
    """nvidia-smi, as its answers are printed in NVIDIA's MIG user guide."""

    def __init__(self, *names, mode="Enabled", makes=True, enables=True, refuses=False):
        self.names, self.mode, self.makes, self.enables, self.refuses = list(names), mode, makes, enables, refuses
        self.asked = []

    def __call__(self, argv):
        self.asked.append(" ".join(argv[1:]))
        if "--query-gpu=mig.mode.current,mig.mode.pending" in argv:
            return 0, f"{self.mode}, {self.mode if self.enables else 'Enabled'}\n"
        if "-mig" in argv:
            self.mode = "Enabled" if self.enables else self.mode
            return 0, "Warning: MIG mode is in pending enable state for GPU 00000000:07:00.0:In use by another client"
        if "-lgi" in argv:
            rows = "".join(
                f"|   0  MIG {name:<14}   {NUMBERS[name]:3d}     {number:4d}          {number}:1     |\n{LINE}"
                for number, name in enumerate(self.names)
            )
            return (0, HEAD + rows) if self.names else (6, "No GPU instances found: Not Found\n")
        if self.refuses:
            return 19, "Unable to create a GPU instance on GPU  0 using profile 19: Insufficient Resources\n"
        wanted = argv[argv.index("-cgi") + 1].split(",")
        by_number = {str(number): name for name, number in NUMBERS.items()}
        self.names += [by_number.get(profile, profile) for profile in wanted] if self.makes else []
        return 0, "Successfully created GPU instance ID  1 on GPU  0\n"


def test_what_is_missing_is_made_by_name_or_number():
    played = Played("1g.10gb")
    assert mig.make(played, {"0": ["1g.10gb", "2g.20gb", 19]}) == {"0": ["2g.20gb", "19"]}
    assert "mig -i 0 -cgi 2g.20gb,19 -C" in played.asked
    assert mig.make(played, {"0": ["1g.10gb", "2g.20gb", 19]}) == {}


def test_mig_is_switched_on_first():
    played = Played(mode="Disabled")
    assert mig.make(played, {0: ["1g.10gb"]}) == {"0": ["1g.10gb"]}
    assert played.asked.index("-i 0 -mig 1") < played.asked.index("mig -i 0 -cgi 1g.10gb -C")


@pytest.mark.parametrize(
    ("played", "says"),
    [
        (Played(makes=False), "-lgi does not list them: GPU 0: 1g.10gb"),
        (Played("2g.20gb"), "They may be in use"),
        (Played("1g.10gb", "1g.10gb"), "wanted are 1g.10gb"),
        (Played(mode="Disabled", enables=False), "pending is Enabled"),
        (Played(refuses=True), "Insufficient Resources"),
        (Played(mode="[N/A]"), "has no MIG"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_made_is_said_and_nothing_destroyed(played, says):
    with pytest.raises(mig.Wrong, match=says.replace("[", r"\[")):
        mig.make(played, {"0": ["1g.10gb"]})
    assert not any("-dgi" in line or "-dci" in line for line in played.asked)


def test_a_name_that_begins_like_another_is_not_it():
    assert mig.lacking([("1g.10gb+me", "20")], ["1g.10gb"]) == (["1g.10gb"], ["1g.10gb+me"])


def test_the_file_is_the_program_that_the_unit_runs(tmp_path):
    layout = tmp_path / "mig.json"
    layout.write_text(json.dumps({"0": ["1g.10gb"]}))
    program = REPOSITORY / "plugins" / "module_utils" / "mig.py"
    done = subprocess.run(
        [sys.executable, "-I", str(program), str(layout)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/nowhere"},
    )
    assert (done.returncode, done.stderr) == (1, "nvidia-smi is not there. Install the driver first\n")
