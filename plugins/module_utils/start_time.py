"""How long the start of a server may take, by the size of its weights. Pure but for looking at files; runs on hosts.

Three numbers, each with its source:
BASE     600 s: vLLM's own patience for its engine (VLLM_ENGINE_READY_TIMEOUT_S in vllm/envs.py), which does not know the model
DISK     100 MB/s: what a hard disk, or a folder on a network of 1 Gbit/s, delivers when read from end to end
ENGINE   9 s a GiB: measured, an 8B model with cold caches (15.0 GiB of weights) took 133 s of engine initialisation on an H200
A start that fails ends the wait at once; the deadline is for one that hangs.
"""

from __future__ import annotations

import math
import os
from typing import Dict, Mapping

BASE, DISK, ENGINE = 600.0, 100e6, 9.0
GIB = float(1 << 30)
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


def seconds(size: int) -> int:
    """Seconds for weights of so many bytes, in whole minutes."""
    return 60 * math.ceil((BASE + size / DISK + ENGINE * size / GIB) / 60)


def weights(path: str) -> int:
    """Bytes of the weights of a model: a folder's own files, links followed, or the one file. 0 when it is not there."""
    if not os.path.isdir(path):
        names = [path]
    else:
        names = [os.path.join(path, name) for name in os.listdir(path) if name.endswith(WEIGHTS)]
    return sum(os.path.getsize(name) for name in names if os.path.isfile(name))


def of_models(models: Mapping[str, str]) -> Dict[str, int]:
    """`seconds` by instance, from instance to the path of its model."""
    return {instance: seconds(weights(path)) for instance, path in models.items()}
