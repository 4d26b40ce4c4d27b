"""The options of a user. Only this module reads the environment."""

import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin

from atomc.errors import OptionsError, suggestion
from atomc.files.json_types import JSONMapping

Rounding = Literal["fp32", "hf"]
Glue = Literal["auto", "inductor", "eager"]
ExpectMode = Literal["error", "warn"]
KVCacheDtype = Literal["auto", "fp8"]
Layout = Literal["paged", "contiguous", "shuffled"]
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True)
class Options:
    """Options of `torch.compile(..., backend="atom", options={...})`; each field is a key.

    strict     raise failures of atomc instead of compiling the graph with Inductor
               (ATOMC_STRICT=1)
    disable    compile all graphs with Inductor
               (ATOMC_DISABLE=1)
    passes     {name: False} turns a pass off, {name: True} requires that it can run, {name:
               ["model.layers.3.*"]} turns it off in these modules and their children; names and
               modules as in the report
    rounding   "fp32": rewrites and kernels may keep fp32 where the model rounds in between; "hf":
               they may not
    glue       what runs the ops without a kernel: "inductor", "eager", or "auto" (Inductor, if it
               works on this machine and there are more than a few ops, or on a GPU a few that move
               much; in the runtime on a CPU: eager)
    providers  providers of kernels in order of preference, () for the default of the platform
    kv_cache_dtype  "auto": as the checkpoint specifies, else the dtype of keys and values; "fp8":
                    e4m3, half the size of 16 bits
    batch_invariant  the result of a request does not depend, bit by bit, on other requests in its
                     batch; slower
    expert_load  count how many tokens each expert of a mixture gets; only for the runtime
    layout     memory layout of the state, "paged", "contiguous" or "shuffled"; None: the
               platform's default
    inductor   options for Inductor, keys as in torch._inductor.config
    dump       a folder for one runnable file per pass that changed the graph
               (ATOMC_DUMP=dir)
    report     a file for an HTML page that shows the changes of every graph
               (ATOMC_REPORT=file.html)
    record     store inputs and outputs of the first call, including weights, with the dump, so that
               its files run on them
    audit      compare each rewritten site with the original in the first call, see docs/audit.md
    audit_bound  maximal error against fp32, relative to the largest value; None: twice the error of
                 the original
    cache      keep compiled graphs on disk, so that a second start compiles nothing
               (ATOMC_CACHE=1)
    cache_dir  the folder; None for the user's cache folder, ~/.cache/atomc on Linux
               (ATOMC_CACHE_DIR=dir)
    cache_size bytes; the least recently used entries are removed first
               (ATOMC_CACHE_SIZE=10G)
    expect     {rewrite: number of sites}, a number or a formula such as "2*layers" or ">= layers"
    expect_mode  "error": raise ContractError if `expect` is not met; "warn": log it
    mode       the mode of torch.compile(mode=...)
    repeat     on an NVIDIA GPU and on a CPU: launch what earlier calls of the same kind launched,
               without the Python that led to it
    """

    strict: bool = False
    disable: bool = False
    passes: Mapping[str, bool | Sequence[str]] = field(default_factory=dict)
    rounding: Rounding = "fp32"
    glue: Glue = "auto"
    providers: tuple[str, ...] = ()
    kv_cache_dtype: KVCacheDtype = "auto"
    batch_invariant: bool = False
    expert_load: bool = False
    layout: str | None = None
    inductor: JSONMapping = field(default_factory=dict)
    dump: str | None = None
    report: str | None = None
    record: bool = False
    audit: bool = False
    audit_bound: float | None = None
    cache: bool = True
    cache_dir: str | None = None
    cache_size: int = 10 * 2**30
    expect: Mapping[str, int | str] = field(default_factory=dict)
    expect_mode: ExpectMode = "error"
    mode: Mode = "default"
    repeat: bool = True

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_values()
        object.__setattr__(self, "providers", tuple(self.providers))
        if self.batch_invariant:
            object.__setattr__(self, "glue", "eager")

    def _check(self, name: str, fine: bool, expected: str) -> None:
        if not fine:
            raise OptionsError(f"option {name}={getattr(self, name)!r}: expected {expected}")

    def _check_kinds(self) -> None:
        for option in fields(self):
            value, kind = getattr(self, option.name), option.type
            if option.name == "layout" and value is not None:
                kind = Layout
            if names := get_args(kind) if get_origin(kind) is Literal else ():
                hint = suggestion(str(value), names)
                self._check(option.name, value in names, f"one of {', '.join(names)}{hint}")
            elif kind is bool:
                self._check(option.name, isinstance(value, bool), "True or False")
            elif get_origin(kind) is Mapping:
                self._check(option.name, isinstance(value, Mapping), "a dict")
        for name in ("dump", "cache_dir"):
            self._check(
                name, isinstance(getattr(self, name), str | Path | None), "the name of a folder"
            )

    def _check_values(self) -> None:
        wrong = {
            key: value
            for key, value in self.passes.items()
            if not isinstance(value, bool) and not _texts(value)
        }
        if wrong:
            raise OptionsError(
                f"option passes={wrong!r}: expected True or False for each pass, or a list of the "
                "modules in which it is off, such as ['model.layers.3.*']"
            )
        if self.record and self.dump is None:
            raise OptionsError(
                "option record=True stores inputs and outputs with a dump: set the option dump"
            )
        bound = self.audit_bound
        self._check(
            "audit_bound", bound is None or _positive(bound), "a number above 0, such as 0.01"
        )
        self._check(
            "report",
            isinstance(self.report, str | None) and self.report != "",
            "the name of a file",
        )
        self._check(
            "cache_size",
            type(self.cache_size) is int and self.cache_size >= 0,
            "a number of bytes",
        )
        self._check("providers", _names(self.providers), "a list of provider names")
        if self.batch_invariant and self.glue == "inductor":
            raise OptionsError(
                "option batch_invariant=True: Inductor sums differently for other numbers of rows; "
                "expected glue='eager' or 'auto'"
            )

    @property
    def cache_folder(self) -> Path:
        """The folder of the cache of compiled graphs."""
        return Path(self.cache_dir).expanduser() if self.cache_dir else _user_caches() / "atomc"

    @classmethod
    def of(
        cls, given: "Mapping[str, Any] | Options | None" = None, mode: str | None = None
    ) -> "Options":
        """The options of one compilation: those given, then the environment, then the file
        ATOMC_OPTIONS, then the defaults.

        Raises OptionsError for an unknown key or a wrong value, with the valid ones.
        """
        if isinstance(given, Options):
            return replace(given, mode=cast(Mode, mode)) if mode else given
        if given is not None and not isinstance(given, Mapping):
            raise OptionsError(f"options={given!r}: expected a dict or atomc.Options")
        file = os.environ.get("ATOMC_OPTIONS")
        values = {**(read_options(Path(file)) if file else {}), **_environment(), **(given or {})}
        if mode:
            values["mode"] = mode
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown:
            hint = suggestion(unknown[0], names)
            raise OptionsError(f"unknown option {unknown[0]!r}{hint}; options are {names}")
        return cls(**values)


def read_options(file: Path) -> dict[str, Any]:
    """The table `options` of a TOML file. Raises OptionsError for other content."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionsError(f"options in {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise OptionsError(f"options in {file}: {error}; expected TOML") from error
    table = content.get("options")
    if not isinstance(table, dict):
        raise OptionsError(
            f"options in {file}: no table [options], only {', '.join(sorted(content)) or 'nothing'}"
        )
    return table


def written_options(options: JSONMapping) -> str:
    """Options as TOML, which `read_options` and `atomc serve --config` read. Raises TypeError
    for a value that TOML cannot represent.
    """
    tables = {name: value for name, value in options.items() if isinstance(value, Mapping)}
    lines = [
        "[options]",
        *(
            f"{json.dumps(name)} = {json.dumps(value)}"
            for name, value in options.items()
            if name not in tables and value is not None
        ),
    ]
    for name, table in tables.items():
        lines += ["", f"[options.{json.dumps(name)}]"]
        lines += [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _texts(value: Sequence[str]) -> bool:
    """Whether it is a non-empty list of strings."""
    return isinstance(value, list | tuple) and bool(value) and _names(value)


def _names(value: Sequence[str]) -> bool:
    """Whether it contains only strings, and is not a string itself."""
    return not isinstance(value, str) and all(isinstance(part, str) for part in value)


def _positive(value: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _environment() -> dict[str, str | int]:
    values: dict[str, str | int] = {}
    for name in ("strict", "disable", "cache", "dump", "report", "cache_dir", "cache_size"):
        variable = f"ATOMC_{name.upper()}"
        text = os.environ.get(variable)
        if not text:
            continue
        values[name] = text
        if name == "cache_size":
            values[name] = _bytes(text)
        elif name in ("strict", "disable", "cache"):
            if text not in ("0", "1"):
                raise OptionsError(f"environment {variable}={text!r}: expected 0 or 1")
            values[name] = text == "1"
    return values


def openmp_threads() -> int | None:
    """The number of OpenMP threads that the user set, or None."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def visible_gpus() -> tuple[str, list[str] | None]:
    """The variable that chooses the GPUs of a process, and those it names; None: all."""
    # On ROCm both work, and of both the first is the one that counts.
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if (gpus := os.environ.get(variable)) is not None:
            return variable, [gpu.strip() for gpu in gpus.split(",")]
    return "CUDA_VISIBLE_DEVICES", None


def atomc_variables() -> dict[str, str]:
    """The variables of the environment that set options, for processes on other hosts."""
    return {name: value for name, value in os.environ.items() if name.startswith("ATOMC_")}


def ray_address() -> str | None:
    """The address of a Ray cluster that the user set; None: that of this host."""
    return os.environ.get("RAY_ADDRESS") or None


class TorchrunPlace(NamedTuple):
    """The place of a process among the `size` that torchrun started: its rank, and its number on
    its host. master, port: of the store that torchrun serves.
    """

    rank: int
    size: int
    local_rank: int
    master: str
    port: int


def torchrun_place() -> TorchrunPlace | None:
    """The place of this process; None if torchrun did not start it, or started only this one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        return None
    rank, size, local_rank, port = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    )
    return TorchrunPlace(rank, size, local_rank, os.environ["MASTER_ADDR"], port)


def let_openmp_sleep() -> None:
    """Let OpenMP threads sleep while they wait for work, unless the user set a policy. Call it
    before torch is imported.

    Spinning threads take cores from other processes and then wait for each other. Demo model with 2
    threads on 2 cores under other load: 4 to 12 ms a token instead of 40 to 85.
    """
    if not any(
        name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    ):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def _bytes(text: str) -> int:
    """ "500M", "10G" or a plain number of bytes."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1].upper() in units else (text, 1)
    if not number.isdecimal():
        raise OptionsError(
            f"environment ATOMC_CACHE_SIZE={text!r}: expected a size such as 500M or 10G"
        )
    return int(number) * unit


def _user_caches() -> Path:
    """The folder for caches of a user on this system."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"])
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
