"""Flags and config files of `atomc serve`, model names, and errors before the start."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from atomc.cli import _parser, main
from atomc.cli.parser import foreign_flags
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.loading.hub import model_folder
from atomc.runtime.server.config import ServerConfig
from atomc.runtime.server.flags import read_toml, values_of


def configs(*argv):
    """The configs that `atomc serve` creates from these arguments."""
    arguments = _parser().parse_args(["serve", *map(str, argv)])
    file = read_toml(Path(arguments.config), ServerConfig, EngineConfig) if arguments.config else {}
    return tuple(
        config(**values_of(arguments, file, config)) for config in (ServerConfig, EngineConfig)
    )


@pytest.fixture
def wrong(capsys):
    def line(*argv):
        assert main(["serve", *map(str, argv)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return line


def test_without_flags_the_configs_are_their_defaults():
    assert configs() == (ServerConfig(), EngineConfig())


def test_each_field_of_both_configs_has_a_flag_with_help_in_a_group():
    names = {each.name for config in (ServerConfig, EngineConfig) for each in fields(config)} - {
        "model"
    }
    parsed = vars(_parser().parse_args(["serve"]))
    assert not names & parsed.keys()  # not given, so that a file can set them


def test_flags_are_typed_as_their_fields():
    server, engine = configs(
        "some/model", "--port", 1, "--api-key", "a", "--api-key", "b", "--no-log-requests", "--drain-seconds", "0.5",
        "--max-model-len", 512, "--no-enable-prefix-caching", "--scheduling-policy", "priority", "--options", "glue=eager",
        "--options", 'passes={"rope": false}', "--dtype", "float32", "--speculative-tokens", 3,
    )  # fmt: skip
    assert (server.port, server.api_key, server.log_requests, server.drain_seconds) == (
        1,
        ("a", "b"),
        False,
        0.5,
    )
    assert (engine.model, engine.max_model_len, engine.enable_prefix_caching) == (
        "some/model",
        512,
        False,
    )
    assert (engine.scheduling_policy, engine.dtype, engine.speculative_tokens) == (
        "priority",
        "float32",
        3,
    )
    assert engine.options == {"glue": "eager", "passes": {"rope": False}}


FILE = """
model = "some/model"
port = 1234
max-model-len = 256
served_model_name = ["one", "two"]
gpu-memory-utilization = 1
[options]
glue = "eager"
"""


def test_a_file_sets_what_no_flag_says(tmp_path):
    (tmp_path / "server.toml").write_text(FILE)
    server, engine = configs("--config", tmp_path / "server.toml", "--port", 99)
    assert (server.port, server.served_model_name) == (99, ("one", "two"))
    assert (engine.model, engine.max_model_len, engine.options) == (
        "some/model",
        256,
        {"glue": "eager"},
    )
    assert configs("other/model", "--config", tmp_path / "server.toml")[1].model == "other/model"


@pytest.mark.parametrize(
    "text, part",
    [
        ("prot = 1", "has unknown keys 'prot', expected additional_properties"),
        ("port = '1'", "port is '1' in the config file, expected int"),
        ("port = true", "port is True in the config file, expected int"),
        ("api_key = 3", "api_key is 3 in the config file, expected a list of strings"),
        ("options = 3", "options is 3 in the config file, expected a table"),
        ("port =", "is not valid TOML"),
        ("port = 70000", "port is 70000, expected 0 (any free one) to 65535"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, wrong, text, part):
    (tmp_path / "server.toml").write_text(text)
    assert part in wrong("--config", tmp_path / "server.toml")


@pytest.mark.parametrize(
    "argv, part",
    [
        (
            ["/nowhere"],
            "/nowhere is neither a directory nor a name on the hub such as Qwen/Qwen3-0.6B",
        ),
        (["--config", "/nowhere.toml"], "--config /nowhere.toml: No such file or directory"),
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere: No such file or directory"),
        (["--ssl-keyfile", "x"], "needs ssl_certfile: set both"),
        (["--ssl-certfile", __file__], f"{__file__} is not a certificate with its key: "),
        (
            ["--ssl-certfile", "/nowhere.pem"],
            "/nowhere.pem is not a certificate with its key: [Errno 2] No such file",
        ),
        (["--host", "256.1.1.1"], "cannot listen on 256.1.1.1 port 8000: Name or"),
        (["--host", "192.0.2.1"], "assign requested address; give an address of this machine as"),
        (["--api-key", ""], "an api_key is empty"),
        (["--device", "gpu"], "device is 'gpu', expected cpu, cuda or one GPU as cuda:0"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0, it must be at least 1"),
        (["--drain-seconds", "inf"], "drain_seconds is inf, expected a number of seconds that is"),
        (["--drain-seconds", "-1"], "drain_seconds is -1.0, expected a number of seconds"),
    ],
)
def test_a_wrong_flag_is_one_line(wrong, argv, part):
    pytest.importorskip("zmq")
    assert part in wrong(*argv)


@pytest.mark.parametrize(
    "argv, part",
    [
        (
            ["--max-num-sequences", "3"],
            "--max-num-sequences (did you mean --max-num-seqs?); see atomc serve --help",
        ),
        (["--max_model_length=9"], "--max_model_length=9 (did you mean --max-model-len?)"),
        (
            ["--tensor-parallel-size", "2"],
            "--tensor-parallel-size (use --tp)",
        ),
        (["--kv-cache-memory-bytes=1"], "--kv-cache-memory-bytes=1 (use --kv-bytes)"),
        (["--qqq"], "--qqq; see"),
        (["one", "two"], "unrecognized arguments: two; see"),
    ],
)
def test_a_flag_that_does_not_exist_is_refused_with_the_one_that_does(capsys, argv, part):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", *argv])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("atomc: unrecognized arguments: ") and part in line


def test_flags_of_other_servers_lead_to_flags_that_exist():
    serve = next(action for action in _parser()._actions if action.dest == "command").choices[
        "serve"
    ]
    for flag, hint in foreign_flags("atomc serve").items():
        assert flag not in serve._option_string_actions, f"{flag} is one of ours"
        assert all(
            named in serve._option_string_actions for named in re.findall(r"--[\w-]+", hint)
        ), hint


def test_a_port_in_use_is_reported_before_the_model_is_loaded(wrong):
    pytest.importorskip("zmq")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in wrong(
            "--port", port
        )


def test_what_the_model_does_not_allow_is_one_line_from_the_engines_process(wrong):
    pytest.importorskip("fastapi")
    assert "max_model_len=4096 exceeds the model's limit of 2048 tokens" in wrong(
        "--port", 0, "--max-model-len", 4096
    )


def test_a_folder_that_is_no_checkpoint_is_one_line(tmp_path, wrong):
    pytest.importorskip("fastapi")
    assert f"{tmp_path} has no config.json; is it a complete checkpoint?" in wrong(
        "--port", 0, tmp_path
    )


@pytest.mark.rotating
def test_a_gpu_that_is_not_there_is_one_line_from_the_engines_process(wrong):
    pytest.importorskip("fastapi")
    assert "device is 'cuda:99', but torch finds " in wrong("--port", 0, "--device", "cuda:99")


def test_a_missing_extra_says_which(monkeypatch, wrong):
    monkeypatch.setitem(sys.modules, "zmq", None)
    for name in [name for name in sys.modules if name.startswith("atomc.runtime.server")]:
        monkeypatch.delitem(sys.modules, name)
    assert "pip install 'atomc[serve]'" in wrong("--port", 0)


def test_the_front_process_needs_no_torch_so_that_the_engine_starts_at_once():
    pytest.importorskip("fastapi")
    code = (
        "import sys, atomc.runtime.server.serve, atomc.runtime.server.app; print('torch' in "
        "sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "False\n"
    )


def test_help_is_grouped_and_says_defaults(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: atomc serve [MODEL] [flags]")
    for part in (
        "server: --host",
        "security: --api-key",
        "memory and batching:",
        "(default: 8000)",
        "--no-log-requests",
    ):
        assert part in text


def test_a_model_is_a_directory_or_a_name_on_the_hub(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="has no config"):
        model_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path)) == tmp_path
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ValueError, match="nobody/nothing is not a directory and not in the local cache"
    ):
        model_folder("nobody/nothing")
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    os.makedirs(snapshot)
    (snapshot / "config.json").write_text("{}")
    os.makedirs(tmp_path / "models--some--model" / "refs")
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    assert model_folder("some/model") == snapshot
