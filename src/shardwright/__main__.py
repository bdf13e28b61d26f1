"""`python -m shardwright`: the command line, also where the console script is not on the path."""

import sys

from shardwright.planner.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
