"""The program of steps in which a request has a LoRA adapter: its shape, and its adapters."""

from functools import cached_property

from atomc.ops.inputs import LoraShape
from atomc.options import Options
from atomc.program import Program
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.lora.files import AdapterConfig, read_config, read_pairs

MIN_RANK = 16


def lora_shape(config: EngineConfig) -> LoraShape | None:
    """The adapters that the program has room for; None without. Raises ValueError for an adapter
    that cannot be used, and for settings that do not go together.
    """
    if not config.lora_enabled:
        return None
    if Options.of(config.options).batch_invariant:
        raise ValueError(
            "option batch_invariant is not supported with LoRA adapters (lora, max_loras): a step "
            "with an adapter runs another program than a step without"
        )
    adapters = [_named(name, folder) for name, folder in config.lora.items()]
    rank = config.max_lora_rank or max([MIN_RANK, *(each.rank for each in adapters)])
    targets = config.lora_target_modules
    if not targets and config.max_loras is None and all(each.targets for each in adapters):
        targets = tuple(sorted({name for each in adapters for name in each.targets}))
    return LoraShape(config.max_loras or len(adapters), rank, targets)


def _named(name: str, folder: str) -> AdapterConfig:
    try:
        return read_config(folder)
    except ValueError as error:
        raise ValueError(f"LoRA adapter {name!r} in {folder}: {error}") from error


class LoraProgram:
    """A program with room for adapters."""

    def __init__(self, program: Program, shape: LoraShape) -> None:
        self.program, self.shape = program, shape
        if not len(program.lora):
            names = f" named {', '.join(shape.targets)}" if shape.targets else ""
            raise ValueError(
                f"{program.report.model} has no linear layers{names} that LoRA adapters can change"
            )
        self.note = (
            f"steps with LoRA adapters run a second program: {shape.adapters} adapters of rank "
            f"{shape.rank} in {len(program.lora)} linear layers, {program.lora.bytes / 2**20:.1f} "
            "MiB"
        )

    def write(self, number: int, folder: str) -> None:
        """Read an adapter into the place with this number. Raises ValueError for one that cannot be
        used, which changes nothing.
        """
        config = read_config(folder)
        if config.rank > self.shape.rank:
            raise ValueError(
                f"its rank is {config.rank}, at most {self.shape.rank} fits: raise max_lora_rank"
            )
        pairs = {self._path(path): pair for path, pair in read_pairs(config).items()}
        self.program.lora.write(number, pairs)

    def _path(self, path: str) -> str:
        """The path of a layer in the program. Raises ValueError if it has no such layer."""
        if path in self._paths:
            return self._paths[path]
        last = path.rpartition(".")[2]
        names = sorted({layer.rpartition(".")[2] for layer in self._paths})
        why = (
            "; lora_target_modules leaves it out"
            if self.shape.targets and last not in self.shape.targets
            else ""
        )
        raise ValueError(
            f"layer {path} of the adapter is not a linear layer that adapters can change in this "
            f"model, which has {', '.join(names)}{why}"
        )

    @cached_property
    def _paths(self) -> dict[str, str]:
        """Path in the checkpoint -> path in the program, which wraps transformers' classes."""
        return {path.removeprefix("hf_model."): path for path in self.program.lora.paths}
