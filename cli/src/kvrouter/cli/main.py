"""The ``kvrouter`` command: subcommands and error handling.

This module and those that it imports only declare commands, so that help is shown fast. What a command does is imported
when it runs.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from kvrouter.cli.arguments import parse_address
from kvrouter.cli.component import component_app
from kvrouter.cli.engine.commands import engine_app
from kvrouter.cli.errors import CommandFailed, WrongUsage, reason_of
from kvrouter.cli.extras import add_development_commands
from kvrouter.cli.index.commands import index_app
from kvrouter.cli.interrupts import Interrupted, run_interruptibly
from kvrouter.cli.keys import keys_app
from kvrouter.cli.running import Run, chosen_system
from kvrouter.runtime.config.stored_help import stored_help
from kvrouter.v1.names import InvalidName, check_name

if TYPE_CHECKING:
    from kvrouter.cli.top.sources import Where

app = typer.Typer(
    name="kvrouter",
    help="Routes LLM requests to the worker whose KV cache already holds most of their prompt.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(engine_app, name="engine")
app.add_typer(index_app, name="index")
app.add_typer(component_app, name="component")
app.add_typer(keys_app, name="keys")
add_development_commands(app)

Etcd = Annotated[
    str | None,
    typer.Option(
        envvar=["KVROUTER_ETCD", "ETCD_ENDPOINTS"],
        help="Endpoints of etcd, host:port, separated by commas; by default of the system that up or serve runs on "
        "this machine, else 127.0.0.1:2379.",
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option(envvar="KVROUTER_NAMESPACE", help="Namespace of the services in etcd; kvrouter by default."),
]
Schedulers = Annotated[
    list[str] | None,
    typer.Option("--scheduler", help="gRPC address of a Scheduler, host:port, instead of discovery through etcd."),
]
DEFAULT_ETCD = "127.0.0.1:2379"
_PASSED_ON: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
"""Declares a command that passes its options on, since they are settings."""
STORED_HELP = ("serve", "relay", "sidecar")
"""Commands whose options are settings."""


@app.callback()
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    tls_ca_file: Annotated[
        str,
        typer.Option(envvar="KVROUTER_TLS_CA_FILE", help="Authorities of services' certificates, PEM; turns TLS on."),
    ] = "",
    tls_cert_file: Annotated[
        str, typer.Option(envvar="KVROUTER_TLS_CERT_FILE", help="Certificate that this command shows to services, PEM.")
    ] = "",
    tls_key_file: Annotated[
        str, typer.Option(envvar="KVROUTER_TLS_KEY_FILE", help="Private key of --tls-cert-file, PEM, of mode 0600.")
    ] = "",
    tls_peer_domain: Annotated[
        str, typer.Option(envvar="KVROUTER_TLS_PEER_DOMAIN", help="Domain of the roles in the services' certificates.")
    ] = "",
    api_key_file: Annotated[
        str,
        typer.Option(
            envvar="KVROUTER_API_KEY_FILE", help="File with the API key or token of this command, of mode 0600."
        ),
    ] = "",
    service_token_file: Annotated[
        str,
        typer.Option(envvar="KVROUTER_SERVICE_TOKEN_FILE", help="File with the token that services expect, if any."),
    ] = "",
    etcd_user: Annotated[str, typer.Option(envvar="KVROUTER_ETCD_USER", help="User in etcd.")] = "",
    etcd_password_file: Annotated[
        str, typer.Option(envvar="KVROUTER_ETCD_PASSWORD_FILE", help="File with the password of --etcd-user.")
    ] = "",
) -> None:
    if version:
        from kvrouter.runtime.version import VERSION

        print(f"kvrouter {VERSION}")  # noqa: T201
        raise typer.Exit
    if tls_ca_file or tls_cert_file or tls_key_file or tls_peer_domain:
        from kvrouter.cli.connections import use_tls

        use_tls(tls_cert_file, tls_key_file, tls_ca_file, tls_peer_domain)
    if api_key_file:
        from kvrouter.cli.connections import use_api_key

        use_api_key(api_key_file)
    if service_token_file:
        from kvrouter.cli.connections import service_token
        from kvrouter.net.auth import showing

        context.with_resource(showing(service_token(service_token_file)))
    if etcd_user or etcd_password_file:
        from kvrouter.cli.connections import use_etcd_user

        use_etcd_user(etcd_user, etcd_password_file)
    if context.invoked_subcommand is None:
        print(context.get_help())  # noqa: T201


@app.command(
    "serve",
    short_help="Run several services in one process.",
    **_PASSED_ON,
)
def serve_command(
    context: typer.Context,
    roles: Annotated[str, typer.Option(help="Services to run, separated by commas.")] = "frontend,scheduler,indexer",
) -> None:
    """Run several services in one process without sockets between them; takes the options of each."""
    from kvrouter.cli.serve import ROLES, serve

    chosen = [role.strip() for role in roles.split(",")]
    for role in chosen:
        if role not in ROLES:
            raise WrongUsage(f"role {role!r} is unknown: use {', '.join(ROLES)}")
    serve(chosen, context.args)


@app.command(
    "relay",
    short_help="Publish the KV events of a vLLM or SGLang engine.",
    **_PASSED_ON,
)
def relay_command(context: typer.Context) -> None:
    """Publish the KV events of an engine that speaks vLLM's or SGLang's ZMQ format."""
    from kvrouter.relay.__main__ import main as relay

    relay(context.args)


@app.command(
    "sidecar",
    short_help="Serve an unchanged vLLM or SGLang server as a worker.",
    **_PASSED_ON,
)
def sidecar_command(context: typer.Context) -> None:
    """Serve an unchanged vLLM or SGLang server as a worker, with its KV events."""
    from kvrouter.sidecar.__main__ import main as sidecar

    sidecar(context.args)


@app.command("explain", short_help="Show why a request was sent to its rank.")
def explain_command(
    which: Annotated[
        str,
        typer.Argument(
            help="Id of the request (header x-request-id of its response), of a response written by the Frontend "
            "(chatcmpl-…, cmpl-…), or of the decision; by default the last decision."
        ),
    ] = "",
    etcd: Etcd = None,
    namespace: Namespace = None,
    scheduler: Schedulers = None,
    run: Run = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="Deadline of the whole command, in seconds.")] = 10.0,
    everything: Annotated[bool, typer.Option("--all", help="Show every candidate with all terms of its cost.")] = False,
) -> None:
    """Show why a request was sent to its rank, compared with the next three candidates."""
    from kvrouter.cli.explain import explain

    run_interruptibly(explain(_where(run, etcd, namespace, scheduler), which, seconds, everything=everything))


WorkerId = Annotated[int, typer.Argument(min=0, help="Id of the worker.")]
WorkerComponent = Annotated[str, typer.Option("--component", help="Component of the worker, namespace/name.")]


@app.command("drain", short_help="Stop new requests to a worker, and wait for its others.")
def drain_command(
    worker: WorkerId,
    component: WorkerComponent = "kvrouter/workers",
    etcd: Etcd = None,
    namespace: Namespace = None,
    scheduler: Schedulers = None,
    run: Run = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds after which running requests continue on other workers; none lets them end."),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Longest wait until no request runs on the worker, in seconds; 0 for none.")
    ] = 600.0,
) -> None:
    """Stop new requests to a worker, and wait until its running ones have ended."""
    from kvrouter.cli.drain import drain

    where = _where(run, etcd, namespace, scheduler)
    run_interruptibly(drain(where, component, worker, migrate_after_seconds=timeout, wait_seconds=wait))


@app.command("undrain")
def undrain_command(
    worker: WorkerId,
    component: WorkerComponent = "kvrouter/workers",
    etcd: Etcd = None,
    namespace: Namespace = None,
    scheduler: Schedulers = None,
    run: Run = None,
) -> None:
    """Let a drained worker get requests again."""
    from kvrouter.cli.drain import undrain

    run_interruptibly(undrain(_where(run, etcd, namespace, scheduler), component, worker))


@app.command("top", short_help="Show load, cache hits and the last decisions.")
def top_command(
    etcd: Etcd = None,
    namespace: Namespace = None,
    scheduler: Schedulers = None,
    run: Run = None,
    indexer: Annotated[
        list[str] | None, typer.Option(help="gRPC address of an Indexer, host:port, instead of discovery through etcd.")
    ] = None,
    frontend: Annotated[
        list[str] | None, typer.Option(help="gRPC address of a Frontend, host:port, instead of discovery through etcd.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Refresh interval, in seconds.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame with every rank and exit.")] = False,
) -> None:
    """Show load, cache hits, event lag and the last decisions of a running system until Ctrl-C."""
    from kvrouter.cli.top.command import top, top_once

    where = _where(run, etcd, namespace, scheduler, indexer, frontend)
    if once:
        run_interruptibly(top_once(where))
        return
    with suppress(Interrupted):  # the intended way to end
        run_interruptibly(top(where, interval))


def main() -> None:
    """Runs the command. Wrong usage ends it with one line on stderr and status 2, a failure with one and status 1."""
    status = 0
    try:
        help_page = _help_page(sys.argv[1:])
        if help_page is None:
            status = app(standalone_mode=False) or 0
        else:
            print(help_page)  # noqa: T201
        sys.stdout.flush()
    except typer.TyperException as error:
        status = _fail(f"{error.format_message().rstrip('.')}{_help_hint(error)}", error.exit_code)
    except Interrupted as error:
        status = error.exit_status
    except KeyboardInterrupt:  # the second Ctrl-C; child processes die with this one
        status = 130
    except BrokenPipeError:  # the reader of the output left: kvrouter … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except OSError as error:
        status = _fail(reason_of(error), CommandFailed.exit_code)
    sys.exit(status)


def _help_page(arguments: list[str]) -> str | None:
    """Returns the help if it is all that is asked for; None otherwise.

    Typer would first convert the options before the subcommand, for which it imports pydantic.
    """
    if arguments and arguments[0] in STORED_HELP and (page := stored_help(arguments[0], arguments[1:])) is not None:
        return page.rstrip()
    *names, last = arguments or [""]
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="kvrouter")
    for name in names:
        command = getattr(command, "commands", {}).get(name)
        if command is None:
            return None
        context = command.context_class(command, info_name=name, parent=context)
    is_asked = last == "--help" and command.add_help_option
    return str(command.get_help(context)) if is_asked else None


def _help_hint(error: typer.TyperException) -> str:
    """Returns which help has the right usage, if the command line could not be parsed."""
    context = getattr(error, "ctx", None)
    if context is None:
        return ""
    names: list[str] = []
    while context.parent is not None:
        names.insert(0, context.info_name or "")
        context = context.parent
    return f"; see {' '.join(['kvrouter', *names, '--help'])}"


def _fail(words: str, status: int) -> int:
    from kvrouter.cli.terminal import visible

    print(f"kvrouter: {visible(words)}", file=sys.stderr)  # noqa: T201
    return status


def _where(
    run: str | None,
    etcd: str | None,
    namespace: str | None,
    schedulers: list[str] | None,
    indexers: list[str] | None = None,
    frontends: list[str] | None = None,
) -> Where:
    from kvrouter.cli.top.sources import Where
    from kvrouter.net.etcd import InvalidEndpoint, parse_endpoints

    if (indexers or frontends) and not schedulers:
        raise WrongUsage("--indexer and --frontend also need --scheduler; without all three, etcd is used")
    named = [[parse_address(each) for each in addresses or ()] for addresses in (schedulers, indexers, frontends)]
    system = chosen_system(run, addresses={"--etcd": etcd, "--scheduler": schedulers})
    if system is not None:
        etcd, namespace = system.etcd, namespace or system.namespace
        if not etcd:
            named = [[each] if each else [] for each in (system.scheduler, system.indexer, system.frontend)]
            if not system.scheduler:
                raise WrongUsage(f"the system {system.name} has no Scheduler: name one with --scheduler")
    etcd, namespace = etcd or DEFAULT_ETCD, namespace or "kvrouter"
    try:
        parse_endpoints(etcd)
        check_name(namespace)
    except (InvalidEndpoint, InvalidName) as error:
        raise WrongUsage(str(error)) from None
    return Where(named[0], named[1], etcd, namespace, named[2])


if __name__ == "__main__":
    main()
