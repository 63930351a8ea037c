"""``python -m itm_fast`` is the ``itm-fast`` command."""

from itm_fast.cli import main

main()
