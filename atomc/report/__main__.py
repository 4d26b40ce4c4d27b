"""`python -m atomc.report`: converts reports as JSON on stdin to an HTML page on stdout."""

import json
import sys

from atomc.report.render.html import page
from atomc.report.report import Report

found = json.load(sys.stdin)
print(page([Report.of(data) for data in (found if isinstance(found, list) else [found])]), end="")
