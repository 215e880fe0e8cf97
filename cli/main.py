"""The `tokenmill` command. Each subcommand is loaded when it is called: --help stays quick, and a
process holds only its own floor of the house.

Exit status: 0 done, 1 it failed (the last line on stderr says why), 2 wrong usage.
"""

import atexit
import errno
import gc
import importlib
import sys

import click

from jobs.settings import SettingsError

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # of a write these name no file

# name: (where, what it does)
COMMANDS = {
    "up": ("cli.up:up", "Run the whole service on this machine until Ctrl-C."),
    "demo": ("cli.demo:demo", "Run 48 prompts through the whole service and show what happened."),
    "submit": ("cli.client_commands:submit", "Send jobs to a running service."),
    "run-batch": ("cli.run_batch:run_batch", "Answer a file of requests; go on where it stopped."),
    "dataset": ("cli.dataset_commands:dataset", "Make a dataset of a spec and an input's rows."),
    "status": ("cli.client_commands:status", "Show a running service, or one job."),
    "models": ("cli.model_commands:models", "List and fetch models."),
    "keys": ("cli.key_commands:keys", "Create, list and revoke API keys."),
    "tenants": ("cli.key_commands:tenants", "Create and list tenants, set their quotas."),
    "dead": ("cli.dead_commands:dead", "Show jobs that have failed, and why."),
    "requeue": ("cli.dead_commands:requeue", "Queue failed jobs again."),
    "doctor": ("cli.doctor:doctor", "Say what is missing or unsafe, and how to mend it."),
    "api": ("cli.processes:api", "Run the HTTP API."),
    "worker": ("cli.processes:worker", "Run a worker: one engine for one model."),
    "sweeper": ("cli.processes:sweeper", "Run the sweeper."),
    "migrate": ("cli.processes:migrate", "Bring the database to the newest schema."),
}


class Commands(click.Group):
    """Knows its subcommands' names and summaries without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tokenmill")
def tokenmill() -> None:
    """Turn a queue of generation jobs into rows of text and token statistics.

    Settings come from the environment (DATABASE_URL, REDIS_URL, TOKENMILL_*; see
    docs/settings.md); options of a command override them.
    """


def main() -> None:
    """Entry point of the `tokenmill` script."""
    atexit.register(gc.freeze)  # nobody should wait for a last look through all objects
    try:
        tokenmill()
    except SettingsError as error:
        click.echo(f"tokenmill: {error}", err=True)
        sys.exit(1)
    except OSError as error:
        # not about a file that the caller named, nor a disk: a fault of ours
        if error.filename is None and error.errno not in DISK_ERRORS:
            raise
        what = "a file could not be written" if error.filename is None else error.filename
        click.echo(f"tokenmill: {what}: {error.strerror}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
