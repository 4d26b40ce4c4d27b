"""Divides a model over ranks: cuts parameters, updates sizes, and has ranks exchange results.

The three steps are apart, because a checkpoint is read between the first two and the last.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from atomc.files.json_types import JSONMapping
from atomc.models.experts import Experts
from atomc.parallel import delta_nets, heads, latent_attention, layers, sizes
from atomc.parallel.collectives import (
    COLUMNS,
    EXPERT_MAP,
    EXPERT_PLACES,
    ColumnsOfRank,
    ExpertsOfRank,
    ResultsOfRanks,
    SumOverRanks,
    TokensOfRanks,
)
from atomc.parallel.expert_placement import Placement, check_placement, equal_ranges
from atomc.parallel.layers import GATE_AND_UP, IN, OUT, Cuts
from atomc.parallel.process_group import TensorParallel
from atomc.parallel.shard_plan import EXPERTS, GATHERED, SPLIT_INPUT, SUMMED, plan_of, without_parts
from atomc.parallel.shard_slice import ShardSlice
from atomc.parallel.vocab import gather_logits, sum_lookups
from atomc.quantization.experts import QuantizedExperts
from atomc.quantization.experts_spec import is_experts
from atomc.quantization.linear import QuantizedLinear
from atomc.stock.delta_net import is_delta_net
from atomc.weights.parameters import assign, parameter_names, tensor_of

# Which dimension of the weight of a linear layer is divided.
SIDES = {"colwise": OUT, "packed_colwise": OUT, "rowwise": IN, **dict.fromkeys(SPLIT_INPUT, IN)}
# Layers of whose results each rank gets all.
TABLES = ("embedding_rowwise", *GATHERED)


@dataclass
class Sharding:
    """How the layers of a model are divided.

    linears   name -> how its weight [N, K] is cut
    experts   name -> whether they are divided by expert
    tensors   bare parameters
    tables    embeddings and heads, divided by vocabulary, and other layers whose outputs are
              gathered
    summed    names of modules whose results are summed
    keys      name of an attention layer -> how its keys and values are cut
    recurrent names of gated delta nets
    data_ranks  the processes with other tokens, which are sent to those of their experts; of tp
              processes with the same tokens, each sends them to those with the same rank among tp
    placement name of experts -> the rank of each; others are divided into equal ranges by rank
    """

    model: nn.Module
    place: TensorParallel
    plan: dict[str, str]
    linears: Cuts = field(default_factory=dict)
    experts: dict[str, bool] = field(default_factory=dict)
    tensors: Cuts = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)
    summed: list[str] = field(default_factory=list)
    keys: Cuts = field(default_factory=dict)
    recurrent: list[str] = field(default_factory=list)
    data_ranks: TensorParallel | None = None
    placement: Placement = field(default_factory=dict)

    @classmethod
    def of_experts(
        cls,
        model: nn.Module,
        place: TensorParallel,
        *,
        placement: Placement | None = None,
    ) -> "Sharding":
        """Of processes that each have all but some of the experts, and tokens of their own.

        Raises ValueError for a model without experts, or one whose experts do not divide, and for a
        placement of other experts.
        """
        plan = plan_of(model, ep=True)
        modules = dict(model.named_modules())
        of_experts = {name: how for name, how in plan.items() if how in EXPERTS}
        sharding = cls(model, place, of_experts, data_ranks=place, placement=placement or {})
        for name, how in sharding.plan.items():
            sharding._add_experts(name, modules[name], how)
        sharding._check_placement()
        sharding.cuts()
        return sharding

    @classmethod
    def of(
        cls,
        model: nn.Module,
        place: TensorParallel,
        *,
        ep: bool = False,
        quantized: Collection[str] = (),
        placement: Placement | None = None,
        data_ranks: TensorParallel | None = None,
    ) -> "Sharding":
        """quantized  names of layers that are quantized afterwards
        placement  of experts, with ep
        data_ranks as in Sharding, with ep

        Raises ValueError for a model without a plan, or one that this number of ranks does not
        divide, and for a placement of other experts.
        """
        plan = plan_of(model, ep=ep)
        sizes.check(_fields(model), place.size, ep=ep)
        modules = dict(model.named_modules())
        nets = [name for name, module in modules.items() if is_delta_net(module)]
        latent = latent_attention.words_of(modules, plan)
        sharding = cls(
            model,
            place,
            without_parts(plan, nets) | latent,
            data_ranks=data_ranks,
            placement=placement or {},
        )
        experts = tuple(f"{name}." for name, how in sharding.plan.items() if how in EXPERTS)
        for name, how in sharding.plan.items():
            if not name.startswith(experts):
                sharding._add(name, modules, how, quantized)
        sharding._check_placement()
        sharding._check_keys(modules)
        for name in nets:
            sharding._add_delta_net(name, modules[name])
        sharding._keep_whole_if_shared()
        sharding.cuts()
        return sharding

    @property
    def part(self) -> ShardSlice:
        """What this rank has of the first dimension of a tensor."""
        return ShardSlice(0, self.place.size, self.place.rank)

    @property
    def part_of_experts(self) -> ShardSlice:
        """What this rank has of the experts, if they are divided by expert."""
        tp, dp = self.place, self.data_ranks
        if dp is None or dp is tp:
            return self.part
        return ShardSlice(0, dp.size * tp.size, dp.rank * tp.size + tp.rank)

    def _add(
        self, name: str, modules: dict[str, nn.Module], how: str, quantized: Collection[str]
    ) -> None:
        """Add a module or parameter that the plan divides so."""
        module = modules.get(name)
        if how in TABLES:
            # A layer of another kind stays whole: its input is, and so is what it returns.
            if isinstance(module, nn.Embedding | nn.Linear) and name not in quantized:
                self._add_table(name, module)
        elif module is None:
            self._add_tensor(name, how)
        elif how in EXPERTS:
            self._add_experts(name, module, how)
        elif how == SUMMED:
            self.summed.append(name)
        elif how in SIDES and layers.is_linear(module):
            self._add_linear(name, modules, how)
        else:
            raise ValueError(
                f"{name} is a {type(module).__name__}, which the plan divides {how}: only "
                "linear layers and stacked experts are supported"
            )

    def _keep_whole_if_shared(self) -> None:
        """Keep an embedding and a head whole that share a weight, if one of them is not divided."""
        divided = {f"{name}.weight" for name in self.tables}
        for names in parameter_names(self.model):
            if len(names) > 1 and not divided.issuperset(names):
                undivided = {name.rpartition(".")[0] for name in names}
                self.tables = [name for name in self.tables if name not in undivided]

    def _add_table(self, name: str, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise ValueError(f"{name} cannot be cut by vocabulary: its rows have a max_norm")
        self.tables.append(name)

    def _add_tensor(self, name: str, how: str) -> None:
        if how != "colwise":
            raise ValueError(f"{name}: a parameter that is divided {how} is not supported")
        self.tensors[name] = self.part

    def _add_experts(self, name: str, module: nn.Module, how: str) -> None:
        if not (isinstance(module, QuantizedExperts) or is_experts(module)):
            raise ValueError(
                f"{name}: the experts of {type(module).__name__} have no weights [E, N, K], which "
                "can be divided"
            )
        self.experts[name] = how == "ep_dispatch_experts"
        if self.data_ranks is not self.place:
            self.summed.append(name)

    def _check_placement(self) -> None:
        by_expert = [name for name, divided in self.experts.items() if divided]
        number = {name: layers.num_experts_of(self.model.get_submodule(name)) for name in by_expert}
        check_placement(self.placement, number)

    def _add_linear(self, name: str, modules: dict[str, nn.Module], how: str) -> None:
        side = SIDES[how]
        owner, _, leaf = name.rpartition(".")
        cut = replace(self.part, segments=GATE_AND_UP if how == "packed_colwise" else (1,))
        if side == OUT and leaf in heads.GROUPED:
            cut = heads.kv_cut(modules[owner], self.place, owner) or cut
        if side == OUT and leaf in heads.KEYS:
            self.keys[owner] = cut
        self.linears[name] = replace(cut, dim=side)
        if side == IN:
            self.summed.append(name)

    def _add_delta_net(self, name: str, net: nn.Module) -> None:
        delta_nets.check(net, self.place, name)
        self.recurrent.append(name)
        for part, how in delta_nets.words_of(net).items():
            path, cut = f"{name}.{part}", delta_nets.cut_of(net, part, self.place)
            if part in dict(net.named_parameters()):
                self.tensors[path] = cut
            else:
                self.linears[path] = replace(cut, dim=SIDES[how])
            if how == "rowwise":
                self.summed.append(path)
            self.plan[path] = how

    def _check_keys(self, modules: dict[str, nn.Module]) -> None:
        """Raise ValueError for an attention layer whose output is cut, and its keys are not."""
        for name, cut in self.linears.items():
            owner = name.rpartition(".")[0]
            handle = modules[owner]._buffers.get("kv")
            of_heads = handle is not None and handle.dim() == 3 and owner not in self.keys
            if cut.dim == IN and of_heads and self.plan[name] == "rowwise":
                raise ValueError(
                    f"{name} is divided by its inputs, but {owner} has none of "
                    f"{', '.join(heads.KEYS)}, whose outputs say which heads of keys a rank has: "
                    "this model cannot be divided over ranks"
                )

    def cuts(self, only: Collection[str] | None = None) -> Cuts:
        """Name of a parameter -> its part, of a model whose layers have their whole sizes.

        only  names of layers; None: of all, and bare parameters
        """
        by_name: Cuts = {} if only is not None else dict(self.tensors)
        for name in self.tables if only is None else ():
            for leaf, weight in self.model.get_submodule(name).named_parameters(recurse=False):
                by_name[f"{name}.{leaf}"] = cut = replace(self.part, padded=True)
                cut.size_of(weight.shape[0])
        for name in (*self.linears, *self.experts):
            if only is not None and name not in only:
                continue
            module = self.model.get_submodule(name)
            try:
                if name in self.linears:
                    of_layer = layers.cuts_of_linear(module, self.linears[name])
                elif self.experts[name]:
                    ranks = self.placement.get(name, ())
                    of_layer = layers.cuts_by_expert(module, self.part_of_experts, ranks)
                else:
                    of_layer = layers.cuts_of_experts(module, self.part)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            by_name |= {f"{name}.{leaf}": cut for leaf, cut in of_layer.items()}
        return {name: cut for name, cut in by_name.items() if cut.parts > 1}

    def cut(self) -> Cuts:
        """Cut all parameters and give layers their sizes; how the parameters are cut."""
        cuts = self.cuts()
        cut_parameters(self.model, cuts)
        self.resize()
        return cuts

    def resize(self) -> None:
        """Give layers the sizes and state handles of their parts."""
        for name, cut in self.linears.items():
            layers.resize_linear(self.model.get_submodule(name), cut)
        for name, by_expert in self.experts.items():
            module = self.model.get_submodule(name)
            parts = self.part_of_experts.parts if by_expert else self.place.size
            layers.resize_experts(module, parts, by_expert=by_expert)
        for name, cut in self.keys.items():
            attention = self.model.get_submodule(name)
            heads.resize_heads(attention, cut)
            heads.resize_groups(attention, cut.parts, self.place.size)
        for name in self.recurrent:
            delta_nets.resize(self.model.get_submodule(name), self.place.size)

    def connect(self) -> None:
        """Have ranks exchange results. A bias of a sum is added by the first rank only: it is zero
        on others, so that the graphs of all ranks are equal.
        """
        for name in self.tables:
            table = self.model.get_submodule(name)
            if isinstance(table, nn.Embedding):
                sum_lookups(table, self.place)
            else:
                assert isinstance(table, nn.Linear)
                gather_logits(table, self.place)
        for name in self.summed:
            module = self.model.get_submodule(name)
            if self.place.rank:
                self._clear_bias(name, module)
            module.register_forward_hook(SumOverRanks(self.place.group))
        self.connect_experts()
        for name, how in self.plan.items():
            if how in SPLIT_INPUT and name in self.linears:
                self._split_input(self.model.get_submodule(name))

    def connect_experts(self) -> None:
        """Have experts get the tokens that choose them: a part of `connect`."""
        for name, by_expert in self.experts.items():
            if by_expert:
                self._map_experts(name, self.model.get_submodule(name))

    def _clear_bias(self, name: str, module: nn.Module) -> None:
        if name in self.experts:
            leaves = [] if self.experts[name] else ["down_proj_bias"]
        else:
            leaves = ["bias"] if name in self.linears else []
        for leaf in leaves:
            bias = module._parameters.get(leaf)
            if bias is not None:
                assign(self.model, (f"{name}.{leaf}",), torch.zeros_like(bias.data))

    def _map_experts(self, name: str, module: nn.Module) -> None:
        """Register the row of each expert in the weights of this rank."""
        held, part = layers.num_experts_of(module), self.part_of_experts
        # For classes of transformers, the expert behind the last is none; for ours, that before
        # the first.
        nowhere = -1 if isinstance(module, Experts | QuantizedExperts) else held
        ranges = equal_ranges(held * part.parts, part.parts)
        owners = torch.tensor(self.placement.get(name) or ranges)
        rows = torch.full_like(owners, nowhere)
        rows[owners == part.index] = torch.arange(held)
        if self.data_ranks is None:
            module.register_buffer(EXPERT_MAP, rows.to(_device(module)), persistent=False)
            module.register_forward_pre_hook(ExpertsOfRank(nowhere))
            return
        places = torch.stack((rows, self._numbers(owners, held)))
        module.register_buffer(EXPERT_PLACES, places.to(_device(module)), persistent=False)
        size, group = self.data_ranks.size, self.data_ranks.group
        module.register_forward_pre_hook(TokensOfRanks(nowhere, size, group))
        # Before the sum over those with the same tokens.
        module.register_forward_hook(ResultsOfRanks(size, group), prepend=True)

    def _numbers(self, owners: Tensor, held: int) -> Tensor:
        """The second row of what ops.dispatch_tokens calls places, of experts with these owners."""
        assert self.data_ranks is not None
        row = owners.argsort(stable=True).argsort() % held  # among those of its owner
        dp, tp = self.data_ranks, self.place
        others = len(owners) // (held * dp.size)  # with the same tokens as a rank, and itself
        of_rank = others * held
        numbers = owners // others * of_rank + row
        return numbers.masked_fill(owners % others != tp.rank % others, dp.rank * of_rank + held)

    def _split_input(self, module: nn.Module) -> None:
        assert isinstance(module, nn.Linear | QuantizedLinear)
        columns = torch.arange(module.in_features) + self.place.rank * module.in_features
        module.register_buffer(COLUMNS, columns.to(_device(module)), persistent=False)
        module.register_forward_pre_hook(ColumnsOfRank())


def _device(module: nn.Module) -> torch.device:
    """Where a buffer of the module belongs; the CPU for one on meta, whose values are not read."""
    device = next(module.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def _fields(model: nn.Module) -> JSONMapping:
    """The fields of a model's config by their names in config.json."""
    config: Any = getattr(model, "config", None)
    fields: JSONMapping
    fields = config.to_dict() if hasattr(config, "to_dict") else getattr(config, "__dict__", {})
    return fields


def cut_parameters(
    model: nn.Module,
    cuts: Cuts,
    parameters: Sequence[tuple[str, ...]] | None = None,
) -> None:
    """Replace parameters by their parts, in memory of their own.

    parameters  the names of each; None: all
    """
    for names in parameter_names(model) if parameters is None else parameters:
        if names[0] in cuts:
            tensor = tensor_of(model, names[0]).detach()
            assign(model, names, cuts[names[0]].of(tensor))


def refuse_divided(model: nn.Module) -> None:
    """Raise ValueError if the parameters of a model are parts of others already."""
    from torch.distributed.tensor import DTensor

    name = next((name for name, x in model.named_parameters() if isinstance(x, DTensor)), None)
    if name is not None:
        raise ValueError(
            f"{name} is a DTensor: the model is already divided (tp_plan of transformers or "
            "parallelize_module). Use it as it is, or load it whole for atomc.parallelize"
        )
    for name, module in model.named_modules():
        hooks = module._forward_hooks.values()
        if any(isinstance(hook, SumOverRanks | ResultsOfRanks) for hook in hooks):
            raise ValueError(f"{name} is already divided: atomc.parallelize was called before")
