"""This machine, probed once, or another machine, described by its data sheet."""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from atomc import cgroup
from atomc.errors import suggestion
from atomc.tested_versions import series
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


def _nvidia(
    arch: str,
    name: str,
    memory: int,
    num_sms: int,
    capability: tuple[int, int],
    bandwidth: float,
    flops: float,
    link: float | None,
) -> Platform:
    return Platform(
        "cuda",
        arch,
        name,
        "cuda",
        memory=memory,
        num_sms=num_sms,
        capability=capability,
        vendor="NVIDIA",
        bandwidth=bandwidth,
        flops=flops,
        link=link,
    )


def _amd(
    arch: str, name: str, memory: int, num_sms: int, bandwidth: float, flops: float
) -> Platform:
    return Platform(
        "rocm",
        arch,
        name,
        "cuda",
        memory=memory,
        num_sms=num_sms,
        vendor="AMD",
        bandwidth=bandwidth,
        flops=flops,
    )


def _cpu(
    arch: str,
    name: str,
    vendor: str,
    num_cores: int,
    flags: frozenset[str],
    bandwidth: float | None = None,
) -> Platform:
    return Platform(
        "cpu",
        arch,
        name,
        "cpu",
        num_sms=num_cores,
        cpu_flags=flags,
        vendor=vendor,
        bandwidth=bandwidth,
    )


# From the vendors' data sheets, the largest common model of each architecture. The last number is
# half of NVLink's bandwidth, which they give for both directions.
DESCRIBED = {
    "gfx942": _amd("gfx942", "AMD Instinct MI300X", 192 * GIB, 304, 5.3e12, 1.3074e15),
    "gfx950": _amd("gfx950", "AMD Instinct MI355X", 288 * GIB, 256, 8.0e12, 2.5e15),
    "sm80": _nvidia(
        "sm80", "NVIDIA A100-SXM4-80GB", 80 * GIB, 108, (8, 0), 2.039e12, 312e12, 300e9
    ),
    "sm89": _nvidia("sm89", "NVIDIA L40S", 48 * GIB, 142, (8, 9), 864e9, 362e12, None),
    "sm90": _nvidia("sm90", "NVIDIA H100 80GB HBM3", 80 * GIB, 132, (9, 0), 3.35e12, 989e12, 450e9),
    "h200": _nvidia("sm90", "NVIDIA H200", 141 * GB, 132, (9, 0), 4.8e12, 989e12, 450e9),
    "sm100": _nvidia("sm100", "NVIDIA B200", 180 * GB, 148, (10, 0), 7.7e12, 2.25e15, 900e9),
    "cpu": _cpu("x86_64", "a CPU with AVX2", "", 8, frozenset({"avx2"})),
    "cpu-zen3": _cpu("x86_64", "AMD EPYC 7763", "AuthenticAMD", 64, frozenset({"avx2"}), 204.8e9),
    "cpu-zen4": _cpu("x86_64", "AMD EPYC 9654", "AuthenticAMD", 96, ZEN4, 460.8e9),
    "cpu-zen5": _cpu("x86_64", "AMD EPYC 9755", "AuthenticAMD", 128, ZEN4 | {"avx_vnni"}, 614e9),
    "cpu-cascadelake": _cpu(
        "x86_64", "Intel Xeon 8280", "GenuineIntel", 28, AVX512 | {"avx512_vnni"}, 140.8e9
    ),
    "cpu-sapphirerapids": _cpu(
        "x86_64",
        "Intel Xeon 8480+",
        "GenuineIntel",
        56,
        ZEN4 | AMX | {"avx_vnni", "avx512_fp16"},
        307.2e9,
    ),
    "cpu-neoverse-v2": _cpu("aarch64", "AWS Graviton4", "ARM", 96, ARM, 537.6e9),
}


@functools.cache
def _gpu_here(index: int) -> Platform:
    properties = torch.cuda.get_device_properties(index)
    sheet = next((p for p in DESCRIBED.values() if p.name == properties.name), None)
    here = Platform(
        "cuda",
        "",
        properties.name,
        "cuda",
        here=True,
        memory=properties.total_memory,
        num_sms=properties.multi_processor_count,
        bandwidth=sheet.bandwidth if sheet else None,
        flops=sheet.flops if sheet else None,
        link=sheet.link if sheet else None,
    )
    if torch.version.hip:
        # "gfx942:sramecc+:xnack-": the parts after the first colon are compiler settings.
        return replace(here, kind="rocm", arch=properties.gcnArchName.split(":")[0], vendor="AMD")
    return replace(
        here,
        arch=f"sm{properties.major}{properties.minor}",
        capability=(properties.major, properties.minor),
        vendor="NVIDIA",
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


def provider_versions(cxx: str | None = None) -> dict[str, Provider]:
    """The libraries and compilers that are available here, without importing them. Never raises.

    `cxx` is the requested C++ compiler (the value of CXX).
    """
    probes: dict[str, Callable[[], Provider]] = {
        "cuda": lambda: _built_with("CUDA", torch.version.cuda),
        "rocm": lambda: _built_with("ROCm", torch.version.hip),
        "triton": lambda: _package("triton"),
        "aiter": _aiter,
        "zentorch": _zentorch,
        "fla": lambda: _package("fla", "fla-core"),
        "transformers": lambda: _package("transformers"),
        "c++": lambda: _compiler(cxx),
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
    return Provider(True, _version(distribution or name))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path has no metadata
        return None


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


def _compiler(cxx: str | None) -> Provider:
    # CXX may carry a launcher or arguments: "ccache g++".
    commands = [shlex.split(cxx)] if cxx else [["g++"], ["clang++"]]
    command = next((command for command in commands if shutil.which(command[0])), None)
    if command is None:
        names = " or ".join(shlex.join(command) for command in commands)
        return Provider(
            False, reason=f"{names} is not on the path, so Inductor cannot compile for the CPU"
        )
    shown = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, timeout=10, check=True
    ).stdout
    return Provider(True, shown.partition("\n")[0])
