"""python -m atomc: the same as the command `atomc`."""

import sys

from atomc.cli import main

sys.exit(main())
