"""What the runtime passes to an input of a graph follows from the input's type, never from its
name.
"""

import ast
import hashlib
import io
import logging
import re

import pytest
import torch
from test_imports import PACKAGE, sources
from torch import nn

from atomc.capture.functional import capture, dynamo_graph
from atomc.graph.node_record import record_of
from atomc.loading.create_model import create_model
from atomc.ops.inputs import MODEL_INPUTS, SCALES, StateInput, StepInput
from atomc.ops.state import KINDS, GroupStep, Step
from atomc.program import compile_model

# Two groups of caches: the second layer has a window.
TINY = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=48,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    use_sliding_window=True,
    sliding_window=3,
    max_window_layers=1,
)
OPTIONS = {
    "strict": True,
    "cache": False,
    "glue": "eager",
    "kv_cache_dtype": "fp8",
    "layout": "paged",
}
IDS, X = torch.tensor([3, 1, 4, 1, 5]), torch.zeros(5)


def model_of() -> nn.Module:
    """ApiKeys, values and their scales differ from layer to layer."""
    torch.manual_seed(0)
    model = create_model(TINY, torch.float32).requires_grad_(False).eval()
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_buffer("k_scale", torch.tensor([0.3 * (i + 1)]), persistent=False)
        layer.self_attn.register_buffer("v_scale", torch.tensor([0.7 * (i + 1)]), persistent=False)
    return model


def logits(program):
    """The logits of one sequence, which has another block in each group; and the blocks that each
    cache is written in.
    """
    caches = [spec.allocate(4, 16, "cpu") for spec in program.specs]
    program.bind(caches)
    length = torch.tensor([len(IDS)], dtype=torch.int32)
    state_slots = torch.zeros(1, dtype=torch.int64)
    groups = tuple(
        GroupStep(torch.arange(len(IDS)) + 16 * block, torch.tensor([[block]], dtype=torch.int32))
        for block in (1, 3)
    )
    first = torch.tensor([0, len(IDS)], dtype=torch.int32)
    out = program(
        Step(
            IDS, torch.arange(len(IDS)), first, length, torch.arange(len(IDS)), groups, state_slots
        )
    )
    written = [cache.float().flatten(1).any(1) for layer in caches for cache in layer.values()]
    return out, [blocks.nonzero().flatten().tolist() for blocks in written]


# ---- names carry no meaning


def test_a_program_whose_inputs_have_the_names_of_others_computes_the_same():
    names = {}

    def exchange(name, gm):
        nodes = [
            node
            for node in gm.graph.find_nodes(op="placeholder")
            if record_of(node).input is not None
        ]
        if name == "bind_state":
            before = [node.name for node in nodes]
            for node, other in zip(nodes, before[1:] + before[:1], strict=True):
                node.name = node.target = other
        names.update({record_of(node).input: node.name for node in nodes})

    expected, where = logits(compile_model(model_of(), OPTIONS))
    found, there = logits(compile_model(model_of(), OPTIONS, observers=[exchange]))
    assert (
        names[StateInput(0, "k_cache")] == "v_cache_0"
        and names[StepInput("slots", 0)] == "block_tables_0"
    )
    assert torch.equal(found, expected) and there == where == [[1], [1], [3], [3]]


def test_an_argument_of_the_model_is_an_input_of_the_step_and_a_buffer_of_that_name_is_not():
    class Positioned(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("positions", torch.ones(5))

        def forward(self, x, **given):
            return x + self.positions + given["input_ids"] + given["positions"][:5]

    found = captured(Positioned(), X, input_ids=X.clone(), positions=torch.ones(9), dynamic=True)
    assert {given for given in found if isinstance(given, StepInput) and given.dim is None} == {
        StepInput("input_ids"),
        StepInput("positions"),
    }
    assert StepInput("positions", dim=0) in found and found.count(StepInput("positions")) == 1


def captured(module, *args, dynamic=False, **kwargs):
    """What the runtime passes to each input of the captured graph."""
    found = []

    def backend(gm, inputs):
        graph = capture(dynamo_graph(gm, inputs, {}), inputs).graph.graph
        found.extend(record_of(node).input for node in graph.find_nodes(op="placeholder"))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(module, backend=backend, dynamic=dynamic)(*args, **kwargs)
    return found


# ---- the cache


def kept(folder, **options):
    return compile_model(
        model_of(), {**OPTIONS, "cache": True, "cache_dir": str(folder), **options}
    )


@pytest.mark.rotating
def test_a_program_from_the_cache_has_the_same_inputs_as_the_one_that_was_compiled(tmp_path):
    cold, warm = kept(tmp_path), kept(tmp_path)
    assert (cold.report.cache, warm.report.cache) == ("miss: the cache is empty", "hit")
    assert warm._step_inputs == cold._step_inputs and warm._state_inputs == cold._state_inputs
    assert set(warm._state_inputs) == {
        StateInput(spec, role)
        for spec in (0, 1)
        for role in ("k_cache", "v_cache", "k_scale", "v_scale")
    }
    assert torch.equal(logits(warm)[0], logits(cold)[0])


@pytest.mark.rotating
def test_an_entry_without_the_inputs_is_compiled_again_with_a_line(tmp_path, caplog):
    expected = logits(kept(tmp_path))[0]
    for path in tmp_path.glob("*.atomc"):
        rewrite(path)
    with caplog.at_level(logging.WARNING, "atomc"):
        program = kept(tmp_path)
    lines = [record.getMessage() for record in caplog.records if record.name == "atomc"]
    assert len(lines) == 2 and all(
        "rebuilds a damaged cache entry" in line for line in lines
    )  # of model and graph
    assert program.report.cache.startswith("miss: the entry was damaged and is rebuilt: ")
    assert torch.equal(logits(program)[0], expected) and kept(tmp_path).report.cache == "hit"


def rewrite(path):
    """Make it an entry of the time when names of inputs were parsed."""
    parts, _, data = path.read_bytes().partition(b"\n")[2].partition(b"\n")
    entry = torch.load(io.BytesIO(data), weights_only=True)
    del entry["compiled"]["runtime_inputs"]
    if "places" in entry:
        entry["places"] = [
            ("L['input_ids']", None) if place is None else (None, place)
            for place in entry["places"]
        ]
    buffer = io.BytesIO()
    torch.save(entry, buffer)
    rest = parts + b"\n" + buffer.getvalue()
    path.write_bytes(b"atomc-cache 1 " + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)


# ---- no parsing

NAMES = (
    *MODEL_INPUTS,
    *(field for field in (*Step._fields, *GroupStep._fields) if field != "groups"),
    *SCALES,
    *(role for kind in KINDS.values() for role in kind.roles),
)
MADE = re.compile(rf"\b({'|'.join(NAMES)})\)?_(\d|\W|$)")
TAKES_APART = {
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "partition",
    "rpartition",
    "split",
    "rsplit",
    "match",
    "fullmatch",
    "search",
    "findall",
    "find",
    "index",
}
# Names of something else.
ALSO = {
    (
        "compiler/explain.py",
        "names[:2] == ['input_ids', 'positions']",
    ): "arguments of the user's model",
    ("compiler/explain.py", "'input_ids' in names"): "arguments of the user's model",
    (
        "graph/graph_printer.py",
        "input_name(node).removeprefix('kwargs.')",
    ): "the printed name of an argument",
    ("graph/graph_printer.py", "self.name.rpartition('.')"): "the printed path of a parameter",
    ("passes/fuse/kv_write.py", "'k_scale' in arguments"): "an argument of a pattern",
    ("passes/fuse/write_forms.py", "'slots' not in called.arguments"): "a parameter of an op",
    ("runtime/execution/input_batch.py", "'is_image' in to"): "a field of the batch",
    ("runtime/execution/input_batch.py", "'slots_'"): "a buffer of the batch",
    ("runtime/sleeping.py", "'kv_cache' in tags"): "a tag of vLLM's wake_up",
    ("testing/layouts.py", "role == 'k_cache'"): "a parameter of an op",
}


def parsed_names(text):
    """Expressions of a source that make the name of a graph input, compare one, or take the name of
    a node apart.
    """
    found = []
    has_nodes = "torch.fx" in text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if MADE.search(node.value):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(names_input, sides)) and not any(typed(side) for side in sides):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.match_case):
            for part in patterns(node.pattern):
                if names_input(part.value):
                    found.append(f"case {ast.unparse(node.pattern)}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            apart, whole = node.func.attr in TAKES_APART, [node.func.value, *node.args]
            asked = (apart or node.func.attr == "get") and any(map(names_input, node.args))
            if asked or (apart and has_nodes and any(map(names_node, whole))):
                found.append(ast.unparse(node))
    return found


def names_input(node):
    """Whether there is the name of an input among constants."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(names_input, node.elts))
    return isinstance(node, ast.Constant) and node.value in NAMES


def names_node(node):
    """Whether it is the name of a node of a graph."""
    text = ast.unparse(node)
    return text.endswith((".name", "input_name(node)")) and not text.endswith("schema.name")


def typed(node):
    """Whether it is a field of an input's type."""
    return isinstance(node, ast.Attribute) and node.attr in ("field", "role")


def patterns(pattern):
    """The constants in the pattern of a case, but those of a type."""
    if isinstance(pattern, ast.MatchValue):
        yield pattern
    elif not isinstance(pattern, ast.MatchClass) or ast.unparse(pattern.cls) not in (
        "StepInput",
        "StateInput",
    ):
        for part in ast.iter_child_nodes(pattern):
            if isinstance(part, ast.pattern):
                yield from patterns(part)


def test_no_module_takes_the_name_of_an_input_apart():
    found = {
        (str(path), text)
        for path in sources()
        for text in parsed_names((PACKAGE / path).read_text())
    }
    assert found == set(ALSO)


@pytest.mark.parametrize(
    "text",
    [
        'node.name.startswith("k_cache_")',
        'any(x.name.startswith(("k_cache_", "v_cache_")) for x in nodes)',
        'from torch.fx import Node\nkind, _, number = node.name.rpartition("_")',
        'kind in ("slots", "block_tables")',
        'name == "seq_lens"',
        'from torch.fx import Node\ninput_name(node).rpartition(".")',
        'caches[f"k_cache_{layer}"]',
        'inputs.get("query_start")',
        'graph.placeholder(f"slots_{group}")',
        'from torch.fx import Node\nre.match(r"(.*)_(\\d+)", node.name)',
        'pattern = re.compile(r"(k_cache|v_cache)_(\\d+)")',
        'match name:\n    case "query_start" | "seq_lens": pass',
        'match kind, number:\n    case ("slots", _): pass',
    ],
)
def test_taking_a_name_apart_is_found(text):
    assert parsed_names(text)


@pytest.mark.parametrize(
    "text",
    [
        'given.field == "slots"',
        'match record_of(node).input:\n    case StepInput("slots" | "seq_lens"): pass',
        'call["k_cache"].shape',
        'op(mutates=("k_cache", "v_cache"))',
        'options["kv_cache_dtype"]',
    ],
)
def test_reading_a_type_or_an_argument_of_an_op_is_not(text):
    assert not parsed_names(text)
