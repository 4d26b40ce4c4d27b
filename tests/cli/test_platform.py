import sys
from types import SimpleNamespace

import pytest
import torch

from atomc import cgroup, platform
from atomc.platform import AVX512, DESCRIBED, Platform, cpu_info, provider_versions

X86 = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) 8259CL
flags\t\t: fpu sse2 avx2 avx512f avx512dq avx512bw avx512vl avx512_vnni

processor\t: 1
vendor_id\t: another
flags\t\t: amx_tile
"""
ARM = """\
processor\t: 0
Features\t: fp asimd asimddp sve bf16
CPU implementer\t: 0x41
"""


def test_first_cpu_of_cpuinfo_is_read():
    assert cpu_info(X86) == ("Intel(R) Xeon(R) 8259CL", "GenuineIntel", AVX512 | {"avx512_vnni"})


def test_cpuinfo_of_an_arm_machine_is_read():
    assert cpu_info(ARM) == ("", "ARM", {"asimd", "asimddp", "sve", "bf16"})


def test_empty_cpuinfo_says_nothing():
    assert cpu_info("") == ("", "", frozenset())


def test_cpu_can_be_asked_for_on_any_machine():
    cpu = Platform.detect("cpu")
    assert (cpu.kind, cpu.device, cpu.here, cpu.capability) == ("cpu", "cpu", True, None)
    assert cpu.memory > 0 and cpu.num_sms > 0 and cpu.name


def test_flags_agree_with_the_level_torch_uses():
    level = torch.backends.cpu.get_cpu_capability()
    assert Platform.detect("cpu").cpu_flags >= {"AVX512": AVX512, "AVX2": {"avx2"}}.get(
        level, set()
    )


def test_machine_is_probed_once():
    assert Platform.detect("cpu") is Platform.detect("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_cpu_is_detected_and_cuda_refused():
    assert Platform.detect() is Platform.detect("cpu")
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        Platform.detect("cuda")


def test_device_without_a_platform_is_refused():
    with pytest.raises(ValueError, match=r"'mps': expected 'cuda' or 'cpu'"):
        Platform.detect("mps")


@pytest.mark.gpu
def test_gpu_is_described_by_what_torch_says():
    here = Platform.detect()
    assert here.device == "cuda" and here.here
    assert here.name == torch.cuda.get_device_name()
    assert here.memory == torch.cuda.mem_get_info()[1]
    if here.is_cuda:
        assert here.capability == torch.cuda.get_device_capability()
        assert here.arch == "sm{}{}".format(*here.capability)


def detected(monkeypatch, hip, **properties):
    found = SimpleNamespace(total_memory=10**9, multi_processor_count=7, **properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch.version, "hip", hip)
    return platform._gpu_here.__wrapped__(0)


def test_rocm_device_is_named_by_its_architecture_alone(monkeypatch):
    name, arch = "AMD Instinct MI300X", "gfx942:sramecc+:xnack-"
    here = detected(monkeypatch, "7.1", name=name, gcnArchName=arch, major=9, minor=4)
    assert (here.kind, here.arch, here.capability, here.vendor) == ("rocm", "gfx942", None, "AMD")
    assert here.device == "cuda" and here.supports_bf16


def test_gpu_with_a_known_name_gets_the_numbers_of_its_data_sheet(monkeypatch):
    here = detected(monkeypatch, None, name="NVIDIA H200", major=9, minor=0)
    assert (here.kind, here.arch, here.capability) == ("cuda", "sm90", (9, 0))
    assert here.bandwidth == DESCRIBED["h200"].bandwidth and here.memory == 10**9


def test_gpu_with_an_unknown_name_gets_no_invented_numbers(monkeypatch):
    here = detected(monkeypatch, None, name="NVIDIA of tomorrow", major=13, minor=0)
    assert (here.bandwidth, here.flops) == (None, None)


@pytest.mark.parametrize("name", DESCRIBED)
def test_described_machine_is_complete_and_not_here(name):
    machine = Platform.named(name)
    assert not machine.here and machine.num_sms > 0 and hash(machine)
    assert [machine.is_cuda, machine.is_rocm, machine.is_cpu].count(True) == 1
    assert (machine.capability is not None) == machine.is_cuda
    assert machine.is_cpu or (machine.memory and machine.bandwidth and machine.flops)


def test_unknown_machine_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError,
        match=r"'gfx9000' \(did you mean 'gfx950'\?\); known are gfx942, gfx950, .*sm90.*cpu-zen5",
    ):
        Platform.named("gfx9000")


@pytest.mark.parametrize(
    "name, expected",
    [
        ("sm80", True),
        ("gfx942", True),
        ("cpu", False),
        ("cpu-zen3", False),
        ("cpu-zen4", True),
        ("cpu-cascadelake", False),
        ("cpu-sapphirerapids", True),
        ("cpu-neoverse-v2", True),
    ],
)
def test_bf16_is_supported_where_hardware_multiplies_it(name, expected):
    assert Platform.named(name).supports_bf16 is expected


def test_misspelled_cpu_flag_is_refused():
    assert Platform.named("cpu-zen4").has("avx512_bf16")
    with pytest.raises(ValueError, match="unknown CPU flag 'avx512bf16'; known are amx_bf16"):
        Platform.named("cpu-zen4").has("avx512bf16")


def install(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


EXPLODES = "raise RuntimeError('imported')"


def test_the_unrelated_aiter_is_not_taken_for_amds(tmp_path, monkeypatch):
    install(tmp_path, {"aiter/__init__.py": EXPLODES, "aiter/azip.py": ""})
    monkeypatch.syspath_prepend(tmp_path)
    found, _, reason = provider_versions()["aiter"]
    assert not found and "another project" in reason and "amd-aiter" in reason


def test_a_mere_folder_named_aiter_is_nothing(tmp_path, monkeypatch):
    install(tmp_path, {"aiter/notes.txt": ""})
    monkeypatch.syspath_prepend(tmp_path)
    assert provider_versions()["aiter"] == (False, None, "not installed: pip install amd-aiter")


def test_amds_aiter_is_found_without_importing_it(tmp_path, monkeypatch):
    install(
        tmp_path,
        {
            "aiter/__init__.py": EXPLODES,
            "aiter/ops/enum.py": EXPLODES,
            "aiter/jit/core.py": EXPLODES,
            "amd_aiter-0.1.7.dist-info/METADATA": "Metadata-Version: 2.1\nName: "
            "amd-aiter\nVersion: 0.1.7\n",
        },
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert provider_versions()["aiter"] == (True, "0.1.7", None)


@pytest.mark.parametrize(
    "version, found", [(torch.__version__.partition("+")[0] + ".7", True), ("1.4.0", False)]
)
def test_zentorch_is_usable_with_the_torch_it_was_built_for(tmp_path, monkeypatch, version, found):
    install(
        tmp_path,
        {
            "zentorch/__init__.py": EXPLODES,
            f"zentorch-{version}.dist-info/METADATA": "Metadata-Version: 2.1\nName: "
            f"zentorch\nVersion: {version}\n",
        },
    )
    monkeypatch.syspath_prepend(tmp_path)
    zentorch = provider_versions()["zentorch"]
    assert (zentorch.found, zentorch.version) == (found, version)
    assert found or "zentorch 1.4.0 needs torch 1.4, this is torch" in zentorch.reason


def test_package_without_metadata_is_found_without_a_version(tmp_path, monkeypatch):
    install(tmp_path, {"aiter/__init__.py": EXPLODES, "aiter/ops/enum.py": EXPLODES})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(platform.importlib.metadata, "version", missing)
    assert provider_versions()["aiter"] == (True, None, None)


def missing(distribution):
    raise platform.importlib.metadata.PackageNotFoundError(distribution)


def test_one_broken_library_is_reported_and_hides_no_other(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__spec__=None))
    providers = provider_versions()
    assert providers["triton"].found is False
    assert "triton could not be probed: ValueError" in providers["triton"].reason
    libraries = {"triton", "aiter", "mori", "zentorch", "fla", "transformers"}
    assert set(providers) == {"cuda", "rocm", *libraries, "c++"}


def test_what_is_absent_says_why():
    for provider in provider_versions().values():
        assert provider.found == (provider.reason is None)


def test_a_compiler_that_is_absent_says_what_to_install(monkeypatch):
    monkeypatch.setattr(platform.shutil, "which", lambda name: None)
    assert provider_versions()["c++"] == (
        False,
        None,
        "g++ or clang++ is not on the path, so Inductor cannot compile for the CPU",
    )


def files(root, **contents):
    for name, text in contents.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def machine(root, siblings):
    """A tree like that of Linux, with the text of thread_siblings_list for each CPU."""
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return files(root, **{topology.format(cpu): text for cpu, text in enumerate(siblings)})


def test_cpus_that_share_a_core_count_once(tmp_path):
    here = machine(tmp_path, ["0,2\n", "1,3\n", "0,2\n", "1,3\n"])
    assert platform.usable_cores(here, range(4)) == 2
    assert platform.usable_cores(here, [0, 2]) == 1  # what it may run on, by its affinity


def test_without_a_topology_each_cpu_is_a_core(tmp_path):
    assert platform.usable_cores(tmp_path, range(3)) == 3


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)]
)
def test_a_quota_of_cgroup_v2_bounds_the_cores(tmp_path, quota, cores):
    here = files(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/cpu.max": quota + "\n",
        },
    )
    assert platform.usable_cores(here, range(8)) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3)])
def test_a_quota_of_cgroup_v1_bounds_the_cores(tmp_path, quota, cores):
    # In a container the path is that of the host, and what is mounted is the container's own group.
    here = files(
        tmp_path,
        **{
            "proc/self/cgroup": "3:cpu,cpuacct:/docker/1f\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert platform.usable_cores(here, range(8)) == cores


def test_memory_that_a_cgroup_leaves_counts_files_as_free(tmp_path):
    v2 = files(
        tmp_path / "v2",
        **{
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/box/memory.max": "1000",
            "sys/fs/cgroup/box/memory.current": "700",
            "sys/fs/cgroup/box/memory.stat": "anon 600\ninactive_file 50\n",
        },
    )
    v1 = files(
        tmp_path / "v1",
        **{
            "proc/self/cgroup": "4:memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "1000",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1100",
        },
    )
    unlimited = files(
        tmp_path / "max",
        **{
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "max",
            "sys/fs/cgroup/memory.current": "700",
        },
    )
    assert (cgroup.memory_left(v2), cgroup.memory_left(v1)) == (350, 0)
    assert (
        cgroup.memory_left(unlimited) is None and cgroup.memory_left(tmp_path / "elsewhere") is None
    )
