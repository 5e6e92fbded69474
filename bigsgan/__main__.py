"""`python -m bigsgan`: the `bigsgan` command."""

import sys

from bigsgan.cli import main

if __name__ == "__main__":
    sys.exit(main())
