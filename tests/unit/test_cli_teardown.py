"""scripts/fleet teardown: what it asks of the playbook, and what it refuses before."""

import pytest
import typer
from gpu_fleet import cli_teardown, runs
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
        asked.append((playbook, options))
        return runs.FleetResult(changed={"gpu-01": 3, "gpu-02": 0})

    def finish(outcome, as_json, text):
        typer.echo(text)
        raise typer.Exit(outcome.exit_status)

    cli_teardown.register(app, run, finish)
    return app


def test_services_and_hosts_go(app, asked):
    done = CliRunner().invoke(app, ["teardown", "-i", "prod", "chat", "old", "--check"])
    assert (done.exit_code, done.stdout) == (0, "would go: gpu-01 3\n")
    CliRunner().invoke(app, ["teardown", "-i", "prod", "--limit", "gpu-02", "--named", "--weights"])
    assert asked == [
        (
            "teardown",
            {
                "limit": None,
                "check": True,
                "variables": {
                    "teardown_services": ["chat", "old"],
                    "teardown_named": False,
                    "teardown_weights": False,
                },
            },
        ),
        (
            "teardown",
            {
                "limit": "gpu-02",
                "check": False,
                "variables": {"teardown_services": [], "teardown_named": True, "teardown_weights": True},
            },
        ),
    ]


def test_nothing_named_is_used_wrongly(app, asked):
    assert CliRunner().invoke(app, ["teardown", "-i", "prod"]).exit_code == 2
    assert asked == []
