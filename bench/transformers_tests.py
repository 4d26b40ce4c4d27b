"""transformers' own tests of torch.compile, with this backend in place of Inductor.

    python bench/transformers_tests.py path/to/transformers
    python bench/transformers_tests.py path/to/transformers --only llama,gpt_oss --backend inductor
    python bench/transformers_tests.py path/to/transformers --options '{"glue": "eager"}' --text FILE

The argument is a checkout of transformers' repository, of the version that is installed; the tests
need the packages pytest and parameterized. Nothing of the checkout is changed. The tests run as on
a GPU: `generate` compiles the step of one token with each static cache, and no test is skipped for
want of an accelerator. Compilation is strict: an error of atomc fails the test.

A row of the table is a test class. A cell is the outcome, with the number of graphs that atomc
compiled in the test; "-" is a test that the class does not have. Exits with 1 if a test failed.
What the file of --rows has already is not run again.
"""

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import architectures
import pytest
import torch
import transformers
from transformers import CompileConfig, GenerationMixin, testing_utils

import atomc
from atomc.options import Options, written_options

# Short names for the table.
TESTS = {
    "test_generate_compile_model_forward_fullgraph": "fullgraph",
    "test_generate_compilation_all_outputs": "all outputs",
    "test_generate_with_static_cache": "static cache",
    "test_static_cache_no_recompile_with_smaller_length": "smaller length",
    "test_sdpa_can_compile_dynamic": "sdpa dynamic",
}
MODELS = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2", "granite", "glm4", "cohere2", "smollm3",
    "qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "deepseek_v3", "gpt_neox",
)  # fmt: skip
Row = dict[str, Any]


class Recorder:
    """A plugin of pytest: selects the tests, and records what became of each."""

    def __init__(self, tests: list[str]) -> None:
        self.tests, self.found, self.errors = tests, {}, []  # type: ignore[var-annotated]
        self.before: list[atomc.Report] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.name in self.tests]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(last_line(str(report.longrepr)))

    def pytest_runtest_setup(self) -> None:
        self.before = atomc.reports()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _, suite, test = report.nodeid.split("::")
        tests = self.found.setdefault(suite, {})
        if report.when == "call" or report.outcome != "passed":
            text = report.longrepr[2] if report.skipped else str(report.longrepr or "")  # type: ignore[index]
            graphs = [
                each for each in atomc.reports() if not any(each is old for old in self.before)
            ]
            tests[test] = {
                "outcome": report.outcome,
                "graphs": sum(graph.treated for graph in graphs),
                "seconds": round(report.duration, 1),
                "reason": last_line(text),
            }


def last_line(text: str) -> str:
    """The last line of an error: of a traceback of pytest the one that names the exception."""
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    named = [line[1:] for line in lines if re.match(r"E +\w*(Error|Exception|Failed)", line)]
    return (named or lines)[-1].strip()[:300]


@contextlib.contextmanager
def compiling_with(backend: str) -> Iterator[None]:
    """transformers names this backend by default, and treats a CPU as a GPU."""
    made, compiles = CompileConfig.__init__, GenerationMixin._valid_auto_compile_criteria

    def config(self: Any, *args: Any, **settings: Any) -> None:
        made(self, *args, **{"backend": backend} | settings)
        self._compile_all_devices = True

    def criteria(self: Any, inputs: Any, generation: Any) -> bool:
        if generation.compile_config is None:
            generation.compile_config = CompileConfig()
        return bool(compiles(self, inputs, generation))

    with (
        mock.patch.object(CompileConfig, "__init__", config),
        mock.patch.object(GenerationMixin, "_valid_auto_compile_criteria", criteria),
        mock.patch.object(testing_utils, "require_torch_accelerator", lambda test: test),
        mock.patch.object(testing_utils, "get_device_properties", lambda: ("cuda", 9, 0)),
        mock.patch.object(testing_utils, "_run_slow_tests", True),
        # torch.compiler.set_default_backend is younger than the oldest torch that is supported.
        mock.patch.dict(torch.compile.__kwdefaults__, backend=backend),
    ):
        yield


def row(checkout: Path, backend: str, tests: list[str], options: str, model: str) -> Row:
    """What became of the tests of one architecture, in this process."""
    file = f"tests/models/{model}/test_modeling_{model}.py"
    if not (checkout / file).exists():
        return {"name": model, "failed": f"the checkout has no {file}"}
    recorder = Recorder(tests)
    os.chdir(checkout)
    settings = ["-p", "no:cacheprovider", "-o", "addopts=", "-o", "log_cli=false", "-W", "ignore"]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as toml:
        toml.write(options)
        toml.flush()
        os.environ["ATOMC_OPTIONS"] = toml.name
        with compiling_with(backend), contextlib.redirect_stdout(io.StringIO()):
            pytest.main([file, *settings], plugins=[recorder])
    if recorder.errors:
        return {"name": model, "failed": recorder.errors[0]}
    return {"name": model, "tests": recorder.found}


def version_of(checkout: Path) -> str:
    """The version that a checkout gives itself."""
    text = (checkout / "src/transformers/__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)
    return found[1] if found else "unknown"


def cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    graphs = found["graphs"]
    return f"{found['outcome']} ({graphs})" if graphs else str(found["outcome"])


def table(rows: list[Row], tests: list[str]) -> str:
    """The outcomes, the counts of each test, and the reasons of what did not pass."""
    heads = "".join(f"{TESTS[test]:16}" for test in tests)
    lines = [f"{'model':23}{'class':33}{heads}".rstrip()]
    reasons, counts = [], {test: Counter() for test in tests}  # type: ignore[var-annotated]
    for each in rows:
        for suite, found in each.get("tests", {}).items():
            cells = "".join(f"{cell(found.get(test)):16}" for test in tests)
            lines.append(f"{each['name']:23}{suite:33}{cells}".rstrip())
            for test, outcome in found.items():
                counts[test][outcome["outcome"]] += 1
                if outcome["outcome"] != "passed":
                    reasons.append(f"{each['name']} {suite} {TESTS[test]}: {outcome['reason']}")
        if "failed" in each:
            lines.append(f"{each['name']:23}{each['failed']}")
    lines.append("")
    for test, outcomes in counts.items():
        counted = ", ".join(f"{outcomes[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
        lines.append(f"{test:52}{counted}")
    return "\n".join([*lines, *[""] * bool(reasons), *reasons])


def main() -> NoReturn:
    parser = architectures.survey_options(__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of transformers' repository")
    parser.add_argument("--backend", default="atom", help="of torch.compile; default: atom")
    parser.add_argument(
        "--tests",
        type=lambda text: text.split(","),
        default=list(TESTS),
        help="with commas between them; default: " + ",".join(TESTS),
    )
    parser.add_argument(
        "--options", type=json.loads, default={}, help='of atomc, such as \'{"glue": "eager"}\''
    )
    parser.set_defaults(seconds=1800.0)
    args = parser.parse_args()
    if unknown := [test for test in args.tests if test not in TESTS]:
        parser.error(f"no test {unknown[0]!r}: expected some of {','.join(TESTS)}")
    if not (args.checkout / "tests/models").is_dir():
        parser.error(f"{args.checkout} has no tests/models: expected a checkout of transformers")
    Options.of(args.options)
    chosen = args.only.split(",") if args.only else MODELS
    one = partial(
        row, args.checkout.resolve(), args.backend, args.tests, written_options(args.options)
    )
    rows = architectures.survey(chosen, one, args.seconds, args.rows)
    outcomes = [x for each in rows for y in each.get("tests", {}).values() for x in y.values()]
    seconds = sum(outcome["seconds"] for outcome in outcomes)
    text = "\n".join(
        [
            shlex.join(["python", *sys.argv]),
            f"tests of transformers {version_of(args.checkout)}, transformers {transformers.__version__}, torch "
            f"{torch.__version__}, pytest {version('pytest')}; {len(outcomes)} tests in {seconds:.0f} s",
            "",
            table(rows, args.tests),
        ]
    )
    print(text)
    if args.text:
        args.text.write_text(text + "\n")
    failed = any(outcome["outcome"] == "failed" for outcome in outcomes)
    sys.exit(failed or any("failed" in each for each in rows))


if __name__ == "__main__":
    main()
