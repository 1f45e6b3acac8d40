"""The command `shoal`: parse, call, print."""


def main() -> None:
    """Run it with the arguments of this process."""
    from shoal.cli.app import app

    app(prog_name="shoal")
