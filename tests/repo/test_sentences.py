"""No decision by sentence: production code searches in no text that was written for people.

Found by how things are called: a text for people is a reason, a note, a message, an exception as
`str` and so on.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("atomc", "passes", "models", "runtime")

# What texts for people are called here, as a variable, an attribute or a function.
SENTENCES = {"text", "found", "expected", "reason", "why", "why_not", "note", "message", "sentence", "said", "error",
             "exception", "cache", "refused", "refusal", "not_kept", "unkept", "line"}  # fmt: skip
SEARCHES = {"startswith", "endswith", "partition", "rpartition", "split", "rsplit", "find", "rfind", "index", "rindex",
            "removeprefix", "removesuffix", "replace", "count"}  # fmt: skip
PATTERNS = {"search", "match", "fullmatch", "findall", "finditer", "sub", "subn"}

# What may be searched in all the same: a file, or a file and how the code in it begins.
ALLOWED = {
    "atomc/cache/graph_fingerprint.py: _ADDRESS.search": "the repr of a constant, in which an "
    "address must not be",
    "atomc/cgroup.py: line.": "files of the system",
    "atomc/cli/doctor.py: 'MKL-DNN' in line": "torch's description of its own build",
    "atomc/report/contract.py: text.": "formulas that a user wrote",
    "atomc/dumps/diff.py": "dumped Python",
    "atomc/kernels/zentorch/library.py: line.": "JSON lines of a process",
    "atomc/graph/graph_printer.py": "the notation of a graph",
    "atomc/platform.py: line.": "files of the system",
    "atomc/report/render/first_sentence.py": "a docstring",
    "atomc/report/render/html.py: re.sub('>": "white space of a page",
    "atomc/report/render/html.py: text.replace('<'": "escapes of a page",
    "atomc/report/render/graph_diff.py": "the notation of a graph",
    "atomc/torch_compat/exceptions.py": "messages of torch, where its exceptions have no class "
    "for it",
    "atomc/torch_compat/trace_failure.py": "messages of Dynamo, which has no code for it",
    "atomc/loading/limits.py: line.": "files of the system",
    "runtime/bench/client.py: line.": "lines of HTTP",
    "runtime/bench/http_client.py: line.": "lines of HTTP",
    "runtime/constrained/grammar_worker.py: error.startswith('NoExtension')": "a message of llguidance, "
    "which has no code for "
    "it",
    "runtime/constrained/grammar_worker.py: message.partition": "a message of llguidance, without its state",
    "runtime/images/placeholders.py: text.replace(mark, token)": "a rendered prompt",
    "runtime/server/http/json_body.py: SURROGATE.search(text)": "a body",
    "runtime/server/http/responses.py: message.removeprefix('Value error, ')": "a message of pydantic",
    "runtime/server/anthropic/chat_request.py: text.startswith(BILLING)": "a client's prompt",
    "runtime/text/chat_template.py: 'tool_calls' in message": "a mapping: the message of a chat",
    "runtime/server/flags.py: text.partition('=')": "a flag",
    "runtime/server/chat/tool_mode.py: text.": "what a model wrote",
    "runtime/server/parsers/text_buffer.py: text.": "what a model wrote",
    "runtime/server/parsers/tool_parsers/argument_values.py": "what a model wrote",
    "runtime/server/parsers/tool_parsers/format_parser.py: text.": "what a model wrote",
    "runtime/server/parsers/tool_parsers/forced_grammar.py: text.partition(token)": "the text of a format",
    "runtime/server/parsers/tool_parsers/tool_format.py": "the text of a format",
}


def is_sentence(node: ast.AST) -> bool:
    """Whether an expression is called as texts for people are, or is made of one."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in SENTENCES
        case ast.Subscript(value=ast.Attribute() | ast.Call() as inner):
            return is_sentence(inner)
        case ast.Call(func=ast.Name(id="str"), args=[argument]):
            return is_sentence(argument)
        case ast.Call(func=ast.Attribute() as function):
            return is_sentence(function) or (
                function.attr in {"lower", "strip", "rstrip"} and is_sentence(function.value)
            )
    return False


def words(node: ast.AST) -> bool:
    """Whether this is a text of several words."""
    return (
        isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip()
    )


def searches(source: str) -> Iterator[tuple[int, str]]:
    """(line, code) of each search in a text for people."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[right]):
                # A name in a name is a membership, but a name in an attribute, or in `str` of
                # something, is a search.
                wrong = is_sentence(right) and (
                    isinstance(left, ast.Constant)
                    or (isinstance(left, ast.Name) and not isinstance(right, ast.Name))
                )
                wrong = wrong or (
                    words(left) and isinstance(right, ast.Name | ast.Attribute | ast.Call)
                )
            case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq()], comparators=[right]):
                wrong = is_sentence(left) and words(right)
            case ast.Call(func=ast.Attribute(value=receiver, attr=name), args=[first, *_]) if (
                name in SEARCHES
            ):
                newline = isinstance(first, ast.Constant) and first.value == "\n"
                wrong = (is_sentence(receiver) and not newline) or (
                    name != "count" and words(first)
                )
            case ast.Call(func=ast.Attribute(attr=name), args=arguments) if name in PATTERNS:
                wrong = any(is_sentence(argument) for argument in arguments)
            case _:
                wrong = False
        if wrong:
            assert isinstance(node, ast.expr)
            yield node.lineno, ast.unparse(node)


def test_production_code_searches_in_no_sentence() -> None:
    found = []
    used = set()
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        name = str(path.relative_to(ROOT))
        for line, code in searches(path.read_text()):
            allowed = next(
                (place for place in ALLOWED if f"{name}: {code}".startswith(place)), None
            )
            if allowed is None:
                found.append(f"{name}:{line}: {code}")
            used.add(allowed)
    assert not found, "decide by a code, not by a sentence:\n" + "\n".join(found)
    assert ALLOWED.keys() <= used, f"no longer needed: {ALLOWED.keys() - used}"


@pytest.mark.parametrize(
    "snippet",
    [
        'crowded = next((miss.found for miss in report.near if "packed with" in miss.found), None)',
        'said, *unkept = report.cache.partition("; not kept: ")',
        'if self.looked_at or report.cache.startswith("off"): pass',
        'why = self.start.said.partition(": ")[2]',
        "missing = [reason for _, reason in choice.refused if _OF_MACHINE.search(reason)]",
        'found = [reason for _, reason in row["refused"] if not reason.startswith(BY_DESIGN)]',
        'fuses = any(note.startswith("glue: inductor") for note in program.report.notes)',
        'return [note for note in report.notes if not note.startswith("glue: ")]',
        'return report.why(name).partition(": ")[2]',
        """return f"Miss, compiled anew: {cache.removeprefix('miss: ')}." """,
        'found = cause.rewrite in first.expected.split("(")[0]',
        'if not str(error).startswith("explain: "): raise',
        """raise ValueError(str(error).replace('explain', 'audit', 1))""",
        """if isinstance(error, MemoryError) or "can't allocate memory" in str(error): raise""",
        "return any(part in str(error) for part in DEVICE_MESSAGES)",
        'raise invalid(str(error), str(error).partition(" ")[0]) from error',
        'return [f"{line} ({why})" if line.startswith("treated") else line for line in found]',
        'if not allowed or "NoExtension" in error: pass',
        'last = None if not tokens or "and more" in tokens else numbers[-1]',
        'if reason == "the cache is empty": pass',
        're.search(r"runs? on", reason)',
    ],
)
def test_a_search_in_a_sentence_is_found(snippet: str) -> None:
    assert len(list(searches(snippet))) >= 1


@pytest.mark.parametrize(
    "snippet",
    [
        'if miss.kind == "packed": pass',
        'if refusal.code in ("hardware", "library"): pass',
        "if note not in self.notes: self.notes.append(note)",
        'first = next(iter(str(error).splitlines()), "")',
        'name = path.removeprefix("atomc/")',
    ],
)
def test_what_is_no_search_in_a_sentence_is_let_through(snippet: str) -> None:
    assert list(searches(snippet)) == []
