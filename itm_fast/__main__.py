"""The `itm-fast` command, also as `python -m itm_fast`."""

import sys

from itm_fast.version import __version__


def main() -> None:
    """Run the command. `--version` alone imports neither torch nor the commands."""
    if sys.argv[1:] == ["--version"]:
        print(f"itm-fast {__version__}")
        return
    from itm_fast.cli import main as run

    run()


if __name__ == "__main__":
    main()
