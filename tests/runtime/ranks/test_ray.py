"""`atomc serve --ray`: what it asks of a cluster, and two nodes of one on this machine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")
from serving import serving  # noqa: E402
from test_server_dp import (  # noqa: E402
    PROMPTS,
    RUNNING,
    kill_under_streams,
    lines_of_stream,
    per_engine,
    post,
)
from test_server_lifecycle import health, until  # noqa: E402

from atomc.demo import PATH  # noqa: E402
from atomc.runtime.config import EngineConfig  # noqa: E402
from atomc.runtime.llm import LLM, SamplingParams  # noqa: E402
from atomc.runtime.server.engines.ray_actors.placement import (  # noqa: E402
    bundles,
    check_address,
    check_resources,
    choose_device,
)
from atomc.runtime.server.engines.start_engines import start_engines  # noqa: E402

pytestmark = pytest.mark.xdist_group("server lifecycle")
GPUS = {"GPU": 8.0, "CPU": 32.0}
# The second node has place for one rank, so that the ranks of one engine are on two nodes.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

node = {"include_dashboard": False, "object_store_memory": 100 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, **node})
cluster.add_node(num_cpus=1, **node)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def test_each_rank_is_a_bundle_with_a_gpu_of_the_cluster_or_with_its_threads():
    config = EngineConfig(tp=2, pp=2)
    assert bundles(choose_device(config, GPUS)) == [{"GPU": 1.0, "CPU": 1.0}] * 4
    assert bundles(choose_device(config, {"CPU": 8.0})) == [{"CPU": 1.0}] * 4
    on_cpu = choose_device(EngineConfig(device="cpu", threads=3), GPUS)
    assert bundles(on_cpu) == [{"CPU": 3.0}]
    assert choose_device(EngineConfig(), {"CPU": 8.0}).threads == 1
    with pytest.raises(ValueError, match="device is cuda:1, but Ray chooses the GPU of each rank"):
        choose_device(EngineConfig(device="cuda:1"), GPUS)


def test_a_cluster_with_too_few_free_gpus_is_refused():
    config = EngineConfig(device="cuda", tp=2, dp=2)
    check_resources(config, GPUS, {"GPU": 4.0, "CPU": 4.0})
    with pytest.raises(
        ValueError,
        match="tp is 2 and dp is 2: the ranks need 4 GPUs, 1 each, and of 8 GPUs of the Ray "
        "cluster 3 are free",
    ):
        check_resources(config, GPUS, {"GPU": 3.0, "CPU": 32.0})
    with pytest.raises(ValueError, match=r"need 12 CPUs, 3 each, and of 8 CPUs .* 0 are free"):
        check_resources(replace(config, device="cpu", threads=3), {"CPU": 8.0}, {})
    with pytest.raises(ValueError, match=r"^dp is 2 with ep: the ranks need 2 GPUs"):
        check_resources(replace(config, tp=1, ep=True), GPUS, {"GPU": 1.0, "CPU": 4.0})


def test_folders_are_named_by_whole_paths_which_other_hosts_find(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    start = "atomc.runtime.server.engines.start_engines._start_on_ray"
    monkeypatch.setattr(start, lambda config: config)
    (tmp_path / "model").mkdir()
    given = EngineConfig(model="model", lora={"a": "adapters/a"})
    found = start_engines(given, Path("model"), on_ray=True)
    assert found.model == str(tmp_path / "model")
    assert found.lora == {"a": str(tmp_path / "adapters" / "a")}


def test_an_address_without_a_cluster_is_refused_soon():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_address(address)
    with pytest.raises(ValueError, match=f"{address}', and no Ray cluster answers there"):
        check_address(address)
    with pytest.raises(ValueError, match="no Ray cluster answers there"):
        check_address("head")
    with pytest.raises(ValueError, match="not through Ray Client"):
        check_address("ray://head:10001")
    check_address(None)


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    for name in [
        name for name in sys.modules if name.startswith("atomc.runtime.server.engines.ray_actors.")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"--ray needs ray: pip install 'atomc\[ray\]'"):
        start_engines(EngineConfig(), PATH, on_ray=True)


@pytest.fixture
def cluster(monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'atomc[ray]'")
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    monkeypatch.setenv("RAY_ADDRESS", process.stdout.readline().strip())
    yield
    process.stdin.close()
    process.wait(60)


def pids_of_ranks(server, engine):
    """The processes of its ranks, by the last line that names them."""
    line = server.all_of(rf"engine {engine}: 2 ranks: (.*)")[-1]
    return [int(pid) for pid in re.findall(r"is process (\d+) on [\d.]+", line)]


def runs(pid):
    return os.path.exists(f"/proc/{pid}")


@pytest.mark.slow
def test_two_engines_of_two_ranks_on_two_nodes_outlive_their_ranks(cluster):
    flags = ("--ray", "--device", "cpu", "--tp", 2, "--dp", 2, "--dtype", "float64")
    with serving(*flags, "--restart-engine", 2) as server:
        first, second = pids_of_ranks(server, 0), pids_of_ranks(server, 1)
        assert len({*first, *second}) == 4
        body = {"prompt": PROMPTS, "max_tokens": 12, "temperature": 0}
        by_ray = [choice["text"] for choice in post(server, "/v1/completions", **body)["choices"]]
        llm = LLM(device="cpu", threads=1, dtype="float64", progress=False)
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0))
        assert by_ray == [output.text for output in outputs]

        # Rank 1 of engine 0, and then the actor of engine 1.
        error = kill_under_streams(server, first[1])
        assert error["code"] == "engine_restarting"
        assert f"rank 1 (process {first[1]} on " in error["message"]
        server.wait_for("engine 0 serves again, as process")
        error = kill_under_streams(server, second[0])
        assert "engine 1's process ended" in error["message"]
        server.wait_for("engine 1 serves again, as process")
        until(lambda: health(server).json() == {"status": "ok"})
        assert [c["text"] for c in post(server, "/v1/completions", **body)["choices"]] == by_ray
        until(lambda: not any(map(runs, [*first, *second])))
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_a_stopped_rank_on_a_cluster_ends_its_engine(cluster):
    with serving("--ray", "--device", "cpu", "--tp", 2) as server:
        ranks = [int(pid) for pid in server.all_of(r"\d is process (\d+) on [\d.]+")]
        with ThreadPoolExecutor() as threads:
            stream = threads.submit(lines_of_stream, server)
            until(lambda: per_engine(server, RUNNING) == [1])
            os.kill(ranks[1], signal.SIGSTOP)
            began = time.monotonic()
            error = json.loads(stream.result()[-1])["error"]
        assert time.monotonic() - began < 15
        assert "has been silent for 5 s: it hangs" in error["message"]
        assert server.process.wait(60) == 1
    until(lambda: not any(map(runs, ranks)))
