"""``python -m mfsdp plan ...``; ``python -m mfsdp --help`` lists the commands."""

import sys

from mfsdp.planning.cli import main

if __name__ == "__main__":
    sys.exit(main())
