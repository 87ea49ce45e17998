"""The command `quantdrift`."""

from quantdrift.cli.interrupt import leave_on_interrupt


def main() -> None:
    """Run the command line."""
    leave_on_interrupt()
    from quantdrift.cli.main import main as command  # noqa: PLC0415 - loading it takes time

    command()


if __name__ == "__main__":
    main()
