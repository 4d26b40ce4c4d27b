"""How often each op is recognized in a stock architecture, beside how often its modules ran.

    python bench/counts.py # all; what --rows has already is not run again
    python bench/counts.py --only llama,gpt2 --tokens 1 # some, by model_type, with one token
    python bench/counts.py --rows rows.jsonl --text bench/results/counts-cpu.txt

The models are those of bench/architectures.py: tiny, random weights, fp32. Each runs once in eager,
where modules and ops are counted without our compiler, and once compiled. The families:

norms       modules whose class has a name that ends in Norm; found: rms_norm, layer_norm
adds        sums of two tensors of one shape that norms read, each once, without those of rotations;
            found: add_rms_norm, add_layer_norm
rotations   tensors that functions named apply_rotary... return; found: rope
gates       modules with a gate and an up projection; elsewhere products of a SiLU or GELU with
            another tensor; found: silu_and_mul, gelu_and_mul, moe_experts
attentions  softmaxes in the innermost modules with Attention in the name of their class, at least
            one; found: attention

A cell is the number if both are equal, else "found of expected". The reasons of the differences
follow, from the near misses of the report.
"""

import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

import architectures
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import atomc

aten = torch.ops.aten
FAMILIES = {
    "norms": ("rms_norm", "layer_norm"),
    "adds": ("add_rms_norm", "add_layer_norm"),
    "rotations": ("rope",),
    "gates": ("silu_and_mul", "gelu_and_mul", "moe_experts"),
    "attentions": ("attention",),
}
# The projections of a gated MLP, as modules or parameters.
GATED = (
    {"gate_proj", "up_proj"}, {"gate_up_proj"}, {"wi_0", "wi_1"}, {"w1", "w3"}, {"w1", "v1"},
)  # fmt: skip
NORM = re.compile(r"Norm(Gated|1P)?$")
ROTATION = re.compile(r"_?apply_\w*(rotary|rope)\w*")
ACTIVATIONS = (aten.silu, aten.gelu)
SUMS = (aten.add, aten.add_)
PRODUCTS = (aten.mul, aten.mul_)
NO_NEAR_MISS = "no near miss"
SOFTMAX = re.compile(r"softmax|_attention")
# The place and the arguments of an op in the text of a near miss.
PLACE = re.compile(r" in [\w.]+( \([\w.]+:\d+\))?|\(\w+=[^()]*(\([^()]*\)[^()]*)*\)")
# Of classes for which the report has no near miss.
REASONS = {
    "HYV4UnweightedRMSNorm": "returns 1 / rms only, without the product",
    "Inkling2Experts": "gate and up have softcaps, for which no op exists",
    "ZayaQKNorm": "divides q and k by a clamped L2 norm, no eps under a root",
    "xLSTMMultiHeadLayerNorm": "a LayerNorm of each head by var(), with a weight of all heads",
}
Same = tuple[int, int]
# Sites by module, for each family.
Places = dict[str, Counter[str]]


class Census(TorchDispatchMode):
    """What runs in eager, by family and module; `modules` is the stack of modules that run."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Places = {family: Counter() for family in FAMILIES}
        self.modules: list[str] = [""]
        self.with_attention: set[str] = set()  # modules in which an attention ran
        self.softmaxes: Counter[str] = Counter()  # of a module and those in it
        self.attended: Counter[str] = Counter()  # softmaxes in earlier runs of a module
        self.gated: set[str] = set()
        self.products: Counter[str] = Counter()
        # Sums that no norm has read, and activations. Results are kept, so that no storage is used
        # again.
        self.sums: set[Same] = set()
        self.activations: set[Same] = set()
        self.kept: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet, operands = func.overloadpacket, [x for x in args if isinstance(x, Tensor)]
        if SOFTMAX.search(packet.__name__):
            self.softmaxes.update(_above(self.modules[-1]))
        if isinstance(result, Tensor):
            self.kept.append(result)
            pair = len(operands) == 2 and all(x.shape == result.shape for x in operands)
            if pair and packet in PRODUCTS and self.activations.intersection(map(_same, operands)):
                self.products[self.modules[-1]] += 1
            if packet in ACTIVATIONS:
                self.activations.add(_same(result))
            if func._schema.is_mutable:
                self.sums.discard(_same(result))
            if pair and packet in SUMS and not self.rotates:
                self.sums.add(_same(result))
        return result

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.modules.append(path)
        if NORM.search(type(module).__name__):
            self.places["norms"][path] += 1
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            # A norm with a gate reads the product of both.
            if len(given) == 1 and _same(given[0]) in self.sums:
                self.sums.remove(_same(given[0]))
                self.places["adds"][path] += 1

    def leave(self, path: str, module: nn.Module, args: Any, result: Any) -> None:
        self.modules.pop()
        names = {name for name, _ in (*module.named_children(), *module.named_parameters())}
        if any(names >= gated for gated in GATED):
            self.gated.add(path)
            self.places["gates"][path] += 1
        if "Attention" in type(module).__name__ and path not in self.with_attention:
            ran = self.softmaxes[path] - self.attended[path]
            self.attended[path] += ran
            self.places["attentions"][path] += max(1, ran)
            self.with_attention.update(set(_above(path)) - {path})

    def rotating(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, and each tensor of its result counted, unless it runs in another one."""

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.rotates:
                return function(*args, **kwargs)
            self.rotates = True
            result = function(*args, **kwargs)
            self.rotates = False
            self.places["rotations"][self.modules[-1]] += len(tree_leaves(result))
            return result

        return counted

    rotates = False

    def finished(self) -> Places:
        """The places, with the products of activations outside of gated MLPs."""
        for path, count in self.products.items():
            if not self.gated.intersection(_above(path)):
                self.places["gates"][path] += count
        return self.places


def _same(x: Tensor) -> Same:
    """Equal for a tensor and a view of all of it."""
    return x.untyped_storage().data_ptr(), x.numel()


def _above(path: str) -> Iterator[str]:
    """A module and those that contain it."""
    parts = path.split(".")
    return (".".join(parts[:count]) for count in range(len(parts) + 1))


@contextmanager
def counting(model: nn.Module) -> Iterator[Census]:
    """Count what the model runs. Its hooks and functions are as before afterwards."""
    census = Census()
    classes = {type(module) for module in model.modules()}
    files = {sys.modules[each.__module__] for each in classes}
    with ExitStack() as undo:
        for path, module in model.named_modules():
            before = module.register_forward_pre_hook(
                partial(census.enter, path), with_kwargs=True, prepend=True
            )
            after = module.register_forward_hook(partial(census.leave, path))
            undo.callback(before.remove)
            undo.callback(after.remove)
        for place in files | classes:
            for name, item in list(vars(place).items()):
                function = getattr(item, "__func__", item)
                if isinstance(function, types.FunctionType) and ROTATION.fullmatch(name):
                    counted = census.rotating(function)
                    static = isinstance(item, staticmethod)
                    counted = staticmethod(counted) if static else counted
                    undo.enter_context(mock.patch.object(place, name, counted))
        undo.enter_context(census)
        yield census


def expected(model: nn.Module, ids: Tensor) -> tuple[Places, Counter[str]]:
    """What eager runs, and the number of softmaxes in each module."""
    with counting(model) as census, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return census.finished(), census.softmaxes


def found(model: nn.Module, ids: Tensor) -> tuple[Places, list[atomc.Report]]:
    """Where rewrites fired, and the reports of all graphs."""
    compiled = torch.compile(model, backend="atom", options={"glue": "eager", "cache": False})
    with torch.no_grad():
        compiled(input_ids=ids, use_cache=False)
    reports = atomc.reports()
    sites = [site for report in reports for site in report.sites]
    return {
        family: Counter(site.module_path for site in sites if site.rewrite in rewrites)
        for family, rewrites in FAMILIES.items()
    }, reports


def reason(reports: list[atomc.Report], family: str, path: str) -> str:
    """Why no rewrite of the family fired in a module, in one phrase."""
    near = [
        miss
        for report in reports
        for rewrite in FAMILIES[family]
        if rewrite in report.known
        for miss in report.misses(rewrite)
    ]
    here = [
        miss
        for miss in near
        if f"{miss.module_path}.".startswith(f"{path}.") or f" in {path} " in miss.text()
    ]
    # The nodes of a module without parameters may have the path of the module that contains it.
    here = here or [miss for miss in near if miss.module_path == path.rpartition(".")[0]]
    if here:
        best = max(here, key=lambda miss: miss.depth)
        return PLACE.sub("", f"{best.rewrite}: expected {best.expected}; found {best.found}")
    broken = [report.graph_break for report in reports if report.graph_break is not None]
    if broken:
        first = broken[0].reason.splitlines()[0]
        return f"graph break ({first}), after which layers share graphs, each counted once"
    return NO_NEAR_MISS


def row(model_type: str, tokens: int) -> dict[str, Any]:
    """The counts of one architecture, in this process."""
    name = {"name": model_type}
    try:
        model = architectures.build(model_type)
    except Exception as error:  # a config that does not fit together is no fault of ours
        return name | {"not built": f"{type(error).__name__}: {error}"[:200].replace("\n", " ")}
    ids = torch.tensor([architectures.PROMPTS[0][:tokens]])
    try:
        wanted, softmaxes = expected(model, ids)
        fired, reports = found(model, ids)
    except Exception as error:  # a row of the table, not the end of it
        return name | {"failed": f"{type(error).__name__}: {error}"[:200].replace("\n", " ")}
    classes = {path: type(module).__name__ for path, module in model.named_modules()}
    missing = wanted["norms"].total() > fired["norms"].total()
    unrecognized = wanted["norms"] - fired["norms"] if missing else Counter()
    differences = []
    for family in FAMILIES:
        more = fired[family].total() - wanted[family].total()
        if more == 0:
            continue
        for path in sorted((wanted[family] - fired[family]) | (fired[family] - wanted[family])):
            count = fired[family][path] - wanted[family][path]
            if count > 0 > more:  # after a graph break modules have other paths
                continue
            if count > 0:
                why = "in no such module"
            elif family == "attentions" and not softmaxes[path]:
                why = "runs no softmax"
            elif family == "adds" and path in unrecognized:
                why = "its norm is not recognized"
            else:
                why = reason(reports, family, path)
            differences.append([family, path, classes.get(path, ""), count, why])
    return name | {
        "expected": {family: places.total() for family, places in wanted.items()},
        "found": {family: places.total() for family, places in fired.items()},
        "differences": differences,
    }


def cell(row: dict[str, Any], family: str) -> str:
    wanted, fired = row["expected"][family], row["found"][family]
    return f"{wanted}" if wanted == fired else f"{fired} of {wanted}"


def phrase(name: str, why: str) -> str:
    """The reason of a difference in a module of the class with this name."""
    return REASONS.get(name, why) if why == NO_NEAR_MISS else why


def table(rows: list[dict[str, Any]], command: str) -> str:
    """A summary, the rows as text, and the reasons of all differences."""
    counted = [each for each in rows if "expected" in each]
    equal = [each for each in counted if each["expected"] == each["found"]]
    reasons = Counter(
        (family, why)
        for each in counted
        for family, why in {
            (family, phrase(name, why)) for family, _, name, _, why in each["differences"]
        }
    )
    lines = [
        f"{command} (transformers {transformers.__version__}, torch {torch.__version__}, "
        "fp32, one thread)",
        f"{len(counted)} architectures, {len(equal)} with all counts equal",
    ]
    for family in FAMILIES:
        same = [each for each in counted if each["expected"][family] == each["found"][family]]
        modules = sum(each["expected"][family] for each in counted)
        met = sum(min(each["expected"][family], each["found"][family]) for each in counted)
        lines.append(f"{family:10} equal in {len(same)}; {met} of {modules} found")
    lines += ["", "Differences, by the number of architectures:"]
    lines += [f"{count:4} {family}: {why}" for (family, why), count in reasons.most_common()]
    lines += ["", f"{'model_type':24} " + " ".join(f"{family:10}" for family in FAMILIES)]
    for each in counted:
        cells = " ".join(f"{cell(each, family):10}" for family in FAMILIES)
        lines.append(f"{each['name']:24} {cells}".rstrip())
        for family, path, name, count, why in each["differences"]:
            lines.append(f"    {family} {count:+} in {path} ({name}): {phrase(name, why)}")
    missing = [each for each in rows if "expected" not in each]
    lines += ["", f"{len(missing)} more were not counted:"] * bool(missing)
    for each in missing:
        lines.append(f"{each['name']:24} {each.get('not built', each.get('failed'))}")
    return "\n".join(lines)


def main() -> None:
    parser = architectures.survey_options(__doc__)
    parser.add_argument("--tokens", type=int, default=13, help="of the prompt, at most 13")
    args = parser.parse_args()
    chosen = args.only.split(",") if args.only else architectures.names()
    rows = architectures.survey(
        chosen, lambda name: row(name, args.tokens), args.seconds, args.rows
    )
    text = table(rows, f"python bench/counts.py --tokens {args.tokens}")
    print(text)
    if args.text:
        args.text.write_text(text + "\n")


if __name__ == "__main__":
    main()
