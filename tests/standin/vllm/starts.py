"""What the stand-in looks at before it serves, as far as faults of a start are injected: it fails as the real one does, in its words.

Weights: of a folder with an index, every file that it names (vLLM's default_loader.py says which tensors none of the files had). Ranks
on several hosts: the interface that GLOO_SOCKET_IFNAME names (gloo's transport/tcp/device.cc). Memory: as many MiB as a file
/var/lib/standin/eats says, every page of them used.
"""

from __future__ import annotations

import json
import os
import socket

EATS = "/var/lib/standin/eats"
PAGE = 4096
EATEN: list[bytearray] = []


def weights(model):
    try:
        with open(f"{model}/model.safetensors.index.json", encoding="utf-8") as text:
            shards = json.load(text)["weight_map"]
    except OSError:
        return
    left = {name for name, shard in shards.items() if not os.path.exists(f"{model}/{shard}")}
    if left:
        raise ValueError(f"Following weights were not initialized from checkpoint: {left}")


def interface():
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in (known for _, known in socket.if_nameindex()):
            where = "/pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84"
            raise RuntimeError(f"[enforce fail at {where}] ifa != nullptr. Unable to find address for: {name}")


def eat():
    try:
        with open(EATS, encoding="ascii") as text:
            left = int(text.read())
    except OSError:
        return
    for _ in range(left):
        part = bytearray(1 << 20)
        part[::PAGE] = b"x" * len(part[::PAGE])
        EATEN.append(part)


def look(arguments):
    weights(arguments.model)
    eat()
    if arguments.nnodes > 1:
        interface()
