# Copyright: the gpu_fleet authors
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Whether CUDA starts on a host: cuInit(0) of the driver's own library, called in a process of its own, which may hang or crash.

Names and signatures are those of cuda.h: cuInit(unsigned int), cuDriverGetVersion(int *), cuDeviceGetCount(int *); 0 is CUDA_SUCCESS.

Pure: standard library, Python 3.9 and newer, no Ansible import.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Dict

# A host with many GPUs and without persistence takes tens of seconds.
PATIENCE = 120.0
PROGRAM = r"""
import ctypes, json, sys
try:
    library = ctypes.CDLL(sys.argv[1])
    init = library.cuInit
except (OSError, AttributeError) as error:
    print(json.dumps({"error": str(error)}))
    raise SystemExit
init.argtypes, init.restype = [ctypes.c_uint], ctypes.c_int
told = {"code": init(0)}
for key, name in (("cuda", "cuDriverGetVersion"), ("devices", "cuDeviceGetCount")):
    number, call = ctypes.c_int(-1), getattr(library, name, None)
    if call is not None and (key == "cuda" or told["code"] == 0) and call(ctypes.byref(number)) == 0:
        told[key] = number.value
print(json.dumps(told))
"""


def init(library: str, patience: float = PATIENCE) -> Dict[str, Any]:
    """code (what cuInit returned, None when it was not reached), devices, cuda (13000 is 13.0) and error, each always there."""
    told: Dict[str, Any] = {"code": None, "devices": None, "cuda": None, "error": None}
    command = [sys.executable, "-I", "-c", PROGRAM, library]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()  # not waited for: one that sleeps in the kernel does not end
        return {**told, "error": f"no answer within {patience:g} s"}
    if process.returncode:
        words = err.decode("utf-8", "backslashreplace").strip().splitlines()
        return {**told, "error": f"it ended with status {process.returncode}: {words[-1] if words else 'no word'}"}
    return {**told, **json.loads(out)}
