"""`vllm serve` of the stand-in: the options that the role writes, and two that tests steer it by."""

from __future__ import annotations

from vllm import server


class Serve:
    name = "serve"
    cmd = staticmethod(server.run)

    def subparser_init(self, subparsers):
        parser = subparsers.add_parser("serve")
        for name in ("model", "host", "master-addr", "ssl-certfile", "ssl-keyfile"):
            parser.add_argument(f"--{name}")
        for name, default in (
            ("port", 8000),
            ("tensor-parallel-size", 1),
            ("pipeline-parallel-size", 1),
            ("nnodes", 1),
            ("node-rank", 0),
        ):
            parser.add_argument(f"--{name}", type=int, default=default)
        for name in ("master-port", "shutdown-timeout", "max-model-len", "seed"):
            parser.add_argument(f"--{name}", type=int)
        parser.add_argument("--served-model-name", nargs="+")
        parser.add_argument("--headless", action="store_true")
        parser.add_argument("--enable-ssl-refresh", action="store_true")
        return parser

    def validate(self, arguments):
        if not arguments.model:
            raise ValueError("No model specified!")


def cmd_init():
    return [Serve()]
