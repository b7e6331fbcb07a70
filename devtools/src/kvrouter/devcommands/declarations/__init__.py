"""Declares the commands of the development stack.

These modules import little, so that help is shown fast; each function imports the implementation when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from kvrouter.cli.errors import CommandFailed, WrongUsage
from kvrouter.devcommands.declarations.certs import certs_command
from kvrouter.devcommands.declarations.demo import demo_command
from kvrouter.devcommands.declarations.replay import replay_command
from kvrouter.devcommands.declarations.simulate import simulate_command
from kvrouter.devcommands.declarations.tune import tune_command
from kvrouter.devcommands.declarations.up import up_command


def add_commands(app: typer.Typer) -> None:
    """Adds certs, demo, up, replay, simulate and tune."""
    app.command("certs", short_help="Create a development CA, certificates and accounts.")(certs_command)
    app.command("demo", short_help="Send a workload through a system, once for each mode.")(
        _errors_reported()(demo_command)
    )
    app.command("up", short_help="Start a whole system and keep it running.")(_errors_reported()(up_command))
    app.command("replay")(_errors_reported()(replay_command))
    short_help = "Run any routing policy on simulated engines."
    app.command("simulate", short_help=short_help)(_errors_reported()(simulate_command))
    short_help = "Find routing settings for a workload and a fleet, by simulation."
    app.command("tune", short_help=short_help)(_errors_reported()(tune_command))


@contextmanager
def _errors_reported() -> Iterator[None]:
    """Converts errors of the development stack to errors of the command line."""
    from kvrouter.devtools.system.processes import ProcessDied
    from kvrouter.devtools.system.servers import BinaryMissing, StartFailed
    from kvrouter.devtools.system.stack import StackFailed
    from kvrouter.devtools.traces.reader import TraceError

    try:
        yield
    except TraceError as error:
        raise WrongUsage(str(error)) from None
    except (ProcessDied, StackFailed, StartFailed, BinaryMissing) as error:
        raise CommandFailed(str(error)) from None
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise CommandFailed("a picture needs matplotlib: pip install 'kvrouter[devstack]'") from None
