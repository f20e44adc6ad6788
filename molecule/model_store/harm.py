"""What hands do to a model: one byte of the weights altered and the time set back, a file removed, one added, one hidden.

harm.py FOLDER
"""

import os
import sys

os.chdir(sys.argv[1])
before = os.stat("model.safetensors")
with open("model.safetensors", "r+b") as weights:
    weights.seek(1000)
    byte = weights.read(1)[0]
    weights.seek(1000)
    weights.write(bytes([byte ^ 1]))
os.utime("model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
os.unlink("deep/vocabulary.txt")
with open("added.py", "w", encoding="utf-8"):
    pass
os.chmod("modeling_own.py", 0o600)
with open("/var/tmp/untouched", "w", encoding="utf-8") as note:
    note.write(str(os.stat("config.json").st_ino))
