"""This machine, probed once, or another machine, described by its data sheet."""

import functools
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from atomc import cgroup
from atomc.errors import suggestion
from atomc.tested_versions import installed_version, series
from atomc.torch_compat import peer_memory

AVX512 = frozenset({"avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl"})
ZEN4 = AVX512 | {"avx512_vnni", "avx512_bf16"}
AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
ARM = frozenset({"asimd", "asimddp", "sve", "sve2", "bf16", "i8mm"})
CPU_FLAGS = ZEN4 | AMX | ARM | {"avx_vnni", "avx512_fp16"}

GB = 10**9
GIB = 2**30


@dataclass(frozen=True)
class Platform:
    """One device and its properties that kernels need.

    kind        the software platform
    arch        "sm90", "gfx950", "x86_64", "aarch64"
    name        of the vendor
    device      the torch device type: ROCm calls it "cuda" too
    here        whether it is the machine of this process
    memory      bytes
    num_sms     multiprocessors, compute units or, on a CPU, cores
    capability  of CUDA, else None
    cpu_flags   those of CPU_FLAGS that the CPU has, with Linux' names
    bandwidth   of the memory, in bytes per second, and
    flops       dense bf16 operations per second: as published, None if unknown
    link        bytes per second that it sends to the other devices of a host, all links together
    asked       the providers that the user named: some run on unsupported machines only on request
    peer_groups names of process groups: why their ranks cannot write each other's memory, or ""
    """

    kind: Literal["cuda", "rocm", "cpu"]
    arch: str
    name: str
    device: Literal["cuda", "cpu"]
    here: bool = False
    memory: int = 0
    num_sms: int = 0
    capability: tuple[int, int] | None = None
    cpu_flags: frozenset[str] = frozenset()
    vendor: str = ""
    bandwidth: float | None = None
    flops: float | None = None
    link: float | None = None
    asked: tuple[str, ...] = ()
    peer_groups: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def detect(device_type: str | None = None) -> "Platform":
        """This machine: its current GPU if it has one, else its CPU; or the given device type."""
        if device_type is None:
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
        if device_type == "cpu":
            return _cpu_here()
        if device_type != "cuda":
            raise ValueError(
                f"no platform for device type {device_type!r}: expected 'cuda' or 'cpu'"
            )
        if not torch.cuda.is_available():
            raise ValueError(
                "device type 'cuda' was requested, but torch sees no GPU here: use 'cpu'"
            )
        return replace(_gpu_here(torch.cuda.current_device()), peer_groups=peer_memory.reasons())

    @staticmethod
    def named(name: str) -> "Platform":
        """A described machine, by its architecture or nickname."""
        if name not in DESCRIBED:
            hint = suggestion(name, DESCRIBED)
            raise ValueError(f"unknown platform {name!r}{hint}; known are {', '.join(DESCRIBED)}")
        return DESCRIBED[name]

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def is_rocm(self) -> bool:
        return self.kind == "rocm"

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def supports_bf16(self) -> bool:
        """Whether it has bf16 instructions: every CPU can compute with bf16, but without them
        slower than with fp32.
        """
        if self.is_cuda:
            return self.capability is not None and self.capability >= (8, 0)
        return self.is_rocm or any(self.has(flag) for flag in ("avx512_bf16", "amx_bf16", "bf16"))

    def has(self, flag: str) -> bool:
        """Whether the CPU has this instruction set."""
        if flag not in CPU_FLAGS:
            raise ValueError(f"unknown CPU flag {flag!r}; known are {', '.join(sorted(CPU_FLAGS))}")
        return flag in self.cpu_flags


_nvidia = functools.partial(Platform, "cuda", device="cuda", vendor="NVIDIA")
_amd = functools.partial(Platform, "rocm", device="cuda", vendor="AMD")
_cpu = functools.partial(Platform, "cpu", device="cpu")


# From the vendors' data sheets, the largest common model of each architecture. `link` is half of
# NVLink's bandwidth, which they give for both directions.
DESCRIBED = {
    "gfx942": _amd(
        "gfx942",
        "AMD Instinct MI300X",
        memory=192 * GIB,
        num_sms=304,
        bandwidth=5.3e12,
        flops=1.3074e15,
    ),
    "gfx950": _amd(
        "gfx950",
        "AMD Instinct MI355X",
        memory=288 * GIB,
        num_sms=256,
        bandwidth=8.0e12,
        flops=2.5e15,
    ),
    "sm80": _nvidia(
        "sm80",
        "NVIDIA A100-SXM4-80GB",
        memory=80 * GIB,
        num_sms=108,
        capability=(8, 0),
        bandwidth=2.039e12,
        flops=312e12,
        link=300e9,
    ),
    "sm89": _nvidia(
        "sm89",
        "NVIDIA L40S",
        memory=48 * GIB,
        num_sms=142,
        capability=(8, 9),
        bandwidth=864e9,
        flops=362e12,
    ),
    "sm90": _nvidia(
        "sm90",
        "NVIDIA H100 80GB HBM3",
        memory=80 * GIB,
        num_sms=132,
        capability=(9, 0),
        bandwidth=3.35e12,
        flops=989e12,
        link=450e9,
    ),
    "h200": _nvidia(
        "sm90",
        "NVIDIA H200",
        memory=141 * GB,
        num_sms=132,
        capability=(9, 0),
        bandwidth=4.8e12,
        flops=989e12,
        link=450e9,
    ),
    "sm100": _nvidia(
        "sm100",
        "NVIDIA B200",
        memory=180 * GB,
        num_sms=148,
        capability=(10, 0),
        bandwidth=7.7e12,
        flops=2.25e15,
        link=900e9,
    ),
    "cpu": _cpu("x86_64", "a CPU with AVX2", num_sms=8, cpu_flags=frozenset({"avx2"})),
    "cpu-zen3": _cpu(
        "x86_64",
        "AMD EPYC 7763",
        vendor="AuthenticAMD",
        num_sms=64,
        cpu_flags=frozenset({"avx2"}),
        bandwidth=204.8e9,
    ),
    "cpu-zen4": _cpu(
        "x86_64",
        "AMD EPYC 9654",
        vendor="AuthenticAMD",
        num_sms=96,
        cpu_flags=ZEN4,
        bandwidth=460.8e9,
    ),
    "cpu-zen5": _cpu(
        "x86_64",
        "AMD EPYC 9755",
        vendor="AuthenticAMD",
        num_sms=128,
        cpu_flags=ZEN4 | {"avx_vnni"},
        bandwidth=614e9,
    ),
    "cpu-cascadelake": _cpu(
        "x86_64",
        "Intel Xeon 8280",
        vendor="GenuineIntel",
        num_sms=28,
        cpu_flags=AVX512 | {"avx512_vnni"},
        bandwidth=140.8e9,
    ),
    "cpu-sapphirerapids": _cpu(
        "x86_64",
        "Intel Xeon 8480+",
        vendor="GenuineIntel",
        num_sms=56,
        cpu_flags=ZEN4 | AMX | {"avx_vnni", "avx512_fp16"},
        bandwidth=307.2e9,
    ),
    "cpu-neoverse-v2": _cpu(
        "aarch64", "AWS Graviton4", vendor="ARM", num_sms=96, cpu_flags=ARM, bandwidth=537.6e9
    ),
}


@functools.cache
def _gpu_here(index: int) -> Platform:
    properties = torch.cuda.get_device_properties(index)
    sheet = next((p for p in DESCRIBED.values() if p.name == properties.name), None)
    here = replace(
        sheet or _nvidia("", properties.name),
        here=True,
        memory=properties.total_memory,
        num_sms=properties.multi_processor_count,
    )
    if torch.version.hip:
        # "gfx942:sramecc+:xnack-": the parts after the first colon are compiler settings.
        return replace(here, kind="rocm", arch=properties.gcnArchName.split(":")[0], vendor="AMD")
    return replace(
        here,
        arch=f"sm{properties.major}{properties.minor}",
        capability=(properties.major, properties.minor),
    )


@functools.cache
def _cpu_here() -> Platform:
    path = Path("/proc/cpuinfo")
    name, vendor, flags = cpu_info(path.read_text(errors="replace") if path.is_file() else "")
    return Platform(
        "cpu",
        platform.machine(),
        name or platform.processor() or "unknown CPU",
        "cpu",
        here=True,
        memory=_memory_here(),
        num_sms=os.cpu_count() or 1,
        vendor=vendor,
        cpu_flags=flags or _flags_known_to_torch(),
    )


def cpu_info(text: str) -> tuple[str, str, frozenset[str]]:
    """Name, vendor and flags of the first CPU in /proc/cpuinfo; empty if missing."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()
    vendor = fields.get("vendor_id", "ARM" if fields.get("CPU implementer") == "0x41" else "")
    return fields.get("model name", ""), vendor, CPU_FLAGS.intersection(flags)


def _flags_known_to_torch() -> frozenset[str]:
    """The flags implied by torch's CPU capability, for systems without /proc/cpuinfo."""
    return {"AVX2": frozenset({"avx2"}), "AVX512": AVX512}.get(
        torch.backends.cpu.get_cpu_capability(), frozenset()
    )


def _memory_here() -> int:
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_cores(root: Path = cgroup.ROOT, cpus: Collection[int] | None = None) -> int:
    """The number of physical cores that this process may use, by CPU affinity and CPU time quota.

    CPUs that share a core (hyper-threads) count once; a quota is rounded down.
    """
    if cpus is None:
        cpus = (
            os.sched_getaffinity(0)
            if hasattr(os, "sched_getaffinity")
            else range(os.cpu_count() or 1)
        )
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    files = [root / topology.format(cpu) for cpu in cpus]
    cores = len({file.read_text() if file.is_file() else str(file) for file in files})
    quota = cgroup.cpu_quota(root)
    return max(cores if quota is None else min(cores, int(quota)), 1)


class Provider(NamedTuple):
    """Whether a library is installed. `reason` says why it cannot be used, None if it can."""

    found: bool
    version: str | None = None
    reason: str | None = None


def provider_versions() -> dict[str, Provider]:
    """The libraries and compilers that are available here, without importing them. Never raises."""
    probes: dict[str, Callable[[], Provider]] = {
        "cuda": lambda: _built_with("CUDA", torch.version.cuda),
        "rocm": lambda: _built_with("ROCm", torch.version.hip),
        "triton": lambda: _package("triton"),
        "aiter": _aiter,
        "mori": lambda: _package("mori", "amd-mori"),
        "zentorch": _zentorch,
        "fla": lambda: _package("fla", "fla-core"),
        "transformers": lambda: _package("transformers"),
        "c++": _compiler,
    }
    return {name: _safely(name, probe) for name, probe in probes.items()}


def _safely(name: str, probe: Callable[[], Provider]) -> Provider:
    try:
        return probe()
    except Exception as error:  # a broken installation of one library must not hide the others
        return Provider(
            False, reason=f"{name} could not be probed: {type(error).__name__}: {error}"
        )


def _built_with(name: str, version: str | None) -> Provider:
    return (
        Provider(True, version)
        if version
        else Provider(False, reason=f"this torch is built without {name}")
    )


def _package(name: str, distribution: str | None = None) -> Provider:
    if importlib.util.find_spec(name) is None:
        return Provider(False, reason=f"not installed: pip install {distribution or name}")
    return Provider(True, installed_version(distribution or name))


def _aiter() -> Provider:
    spec = importlib.util.find_spec("aiter")
    if (
        spec is None or spec.origin is None
    ):  # a folder without __init__.py, such as the parent of a checkout
        return Provider(False, reason="not installed: pip install amd-aiter")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    # Check its files: importing it would start its compiler, and fails without ROCm.
    if not any((folder / "ops/enum.py").is_file() for folder in folders):
        reason = (
            "the installed package `aiter` is another project, not AMD's: pip install amd-aiter"
        )
        return Provider(False, reason=reason)
    return _package("aiter", "amd-aiter")


def _zentorch() -> Provider:
    package = _package("zentorch")
    if package.version and series(package.version) != series(torch.__version__):
        reason = (
            f"zentorch {package.version} needs torch {series(package.version)}, this is "
            f"torch {torch.__version__}"
        )
        return Provider(False, package.version, reason)
    return package


def _compiler() -> Provider:
    command = next(filter(shutil.which, ("g++", "clang++")), None)
    if command is None:
        return Provider(
            False,
            reason="g++ or clang++ is not on the path, so Inductor cannot compile for the CPU",
        )
    shown = subprocess.run(
        [command, "--version"], capture_output=True, text=True, timeout=10, check=True
    ).stdout
    return Provider(True, shown.partition("\n")[0])
