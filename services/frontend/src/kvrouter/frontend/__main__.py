"""Entry point of ``kvrouter-frontend``, a Frontend as a process of its own, or as several.

Imports wait until more than its help is asked for.
"""

from __future__ import annotations

import asyncio

from kvrouter.runtime.config.stored_help import exit_with_help


def main() -> None:
    """Runs the Frontend until SIGTERM."""
    exit_with_help("frontend")
    from kvrouter.frontend import app
    from kvrouter.frontend.processes.parent import FrontendProcesses
    from kvrouter.frontend.settings import FrontendSettings
    from kvrouter.runtime.config.settings import load
    from kvrouter.runtime.config.sources import refuse
    from kvrouter.runtime.process.lifecycle import run

    settings = load(FrontendSettings, prog="kvrouter-frontend")
    if settings.lacks_scheduler():
        refuse("kvrouter-frontend", "--static-workers: name the Schedulers with --static-schedulers")

    async def serve(stopping: asyncio.Event) -> None:
        if settings.processes > 1:
            await FrontendProcesses(settings).run(stopping)
        else:
            await app.serve(settings, stopping)

    run(serve, settings, "frontend")


if __name__ == "__main__":
    main()
