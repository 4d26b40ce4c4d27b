"""`python -m atomc.render`: reports as JSON on stdin become a page on stdout, in a process of its own."""

import json
import sys

from atomc.render.html import page
from atomc.report import Report

found = json.load(sys.stdin)
print(page([Report.of(data) for data in (found if isinstance(found, list) else [found])]), end="")
