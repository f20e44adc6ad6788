"""scripts/fleet drain: what it asks of the playbook, and what it refuses before."""

import pytest
import typer
from gpu_fleet import cli_drain, runs
from typer.testing import CliRunner


@pytest.fixture
def asked():
    return []


@pytest.fixture
def app(asked):
    app = typer.Typer()

    @app.callback()
    def main() -> None:
        """With a verb of its own, as the whole command line has them."""

    def run(playbook, inventory, as_json, **options):
        asked.append((playbook, options["variables"]))
        return runs.FleetResult()

    def finish(outcome, as_json, text):
        typer.echo(text)
        raise typer.Exit(outcome.exit_status)

    cli_drain.register(app, run, finish)
    return app


def test_replicas_and_hosts_are_drained_or_admitted(app, asked):
    done = CliRunner().invoke(app, ["drain", "-i", "prod", "chat.0", "--host", "gpu-02", "--deadline", "5"])
    assert (done.exit_code, done.stdout) == (0, "chat.0, gpu-02 drained at every gateway\n")
    CliRunner().invoke(app, ["drain", "-i", "prod", "chat.0", "--admit"])
    assert asked == [
        (
            "drain",
            {
                "drain_instances": ["chat.0"],
                "drain_hosts": ["gpu-02"],
                "drain_state": "drained",
                "gateway_drain_deadline": 5,
            },
        ),
        ("drain", {"drain_instances": ["chat.0"], "drain_hosts": [], "drain_state": "admitted"}),
    ]


def test_nothing_named_is_used_wrongly(app, asked):
    assert CliRunner().invoke(app, ["drain", "-i", "prod"]).exit_code == 2
    assert asked == []
