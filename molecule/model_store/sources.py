"""Make the sources of the scenario: a folder and a repository, small, with what is delivered and what is not.

sources.py FOLDER
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

root = Path(sys.argv[1])
numbers = random.Random(5)
for name in ("folder", "hub/files"):
    model = root / name
    (model / "deep").mkdir(parents=True, exist_ok=True)
    (model / ".git").mkdir(exist_ok=True)
    (model / ".git" / "HEAD").write_text("ref", encoding="utf-8")
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}\n', encoding="utf-8")
    (model / "deep" / "vocabulary.txt").write_text("a\nb\n", encoding="utf-8")
    (model / "modeling_own.py").write_text("raise SystemExit('never run')\n", encoding="utf-8")
    (model / "model.safetensors").write_bytes(numbers.randbytes(12 << 20))
    (model / "pytorch_model.bin").write_bytes(b"a pickle")
pickles = root / "pickles"
pickles.mkdir(exist_ok=True)
(pickles / "pytorch_model.bin").write_bytes(b"a pickle")
