"""Ranks that torchrun started, on one host or several, instead of rank 0.

All processes have the same command line. Rank 0 and the others meet in torchrun's store:

    rank 0     offer              id, and the addresses of its sockets
    rank r     <id>/answer/<r>    its process, and the settings that it was started with
    rank 0     <id>/go/<key>      of each answer: empty, or why ranks are refused

The store may still have the offer of a group that torchrun restarted: its ranks get no
`go`, and answer the next offer.
"""

import json
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from ipaddress import ip_address
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from atomc.options import TorchrunPlace
from atomc.runtime.config import EngineConfig
from atomc.runtime.processes.stderr_log import exit_process
from atomc.runtime.ranks.local_launcher import device_type
from atomc.runtime.ranks.process_group import TIMEOUT
from atomc.runtime.ranks.rank_settings import RankSettings, TorchSettings

log = logging.getLogger("atomc")
POLL_SECONDS = 0.1
TELL_SECONDS = 30.0


def check_place(config: EngineConfig, place: TorchrunPlace) -> None:
    """Raises ValueError if torchrun did not start the ranks of one engine, or without the GPU of
    this process.
    """
    if config.num_engines > 1:
        raise ValueError(
            f"dp is {config.dp}, which makes {config.num_engines} engines, but torchrun starts the "
            "ranks of one: run this command without torchrun, with --ray for several hosts"
        )
    if config.num_ranks != place.size:
        raise ValueError(
            f"{config.several_ranks}, which makes {config.num_ranks} ranks, but torchrun started "
            f"{place.size} processes: --nnodes x --nproc-per-node must be {config.num_ranks}"
        )
    device = _device(config, place)
    if device.startswith("cuda") and place.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"this is process {place.local_rank + 1} of torchrun on its host, which has "
            f"{torch.cuda.device_count()} GPUs: each rank needs one; lower --nproc-per-node"
        )


def _device(config: EngineConfig, place: TorchrunPlace) -> str:
    kind = device_type(config)
    return f"cuda:{place.local_rank}" if kind == "cuda" else kind


@dataclass(frozen=True)
class TorchrunLauncher:
    """Lets the other processes of torchrun run as ranks. place: of this one, rank 0."""

    place: TorchrunPlace

    @property
    def host(self) -> str:
        """Raises ValueError if other hosts cannot reach this one by the name that they have."""
        name = self.place.master
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        if ip_address(address).is_loopback and name not in ("localhost", address):
            raise ValueError(
                f"torchrun's master is {name}, which is {address} on its own host: pass an address "
                "that the other hosts reach as --master-addr (or --local-addr)"
            )
        return address

    def device_kind(self, config: EngineConfig) -> str:
        return device_type(config)

    def device(self, kind: str, rank: int) -> str:
        """Another rank chooses by its number on its host."""
        return f"cuda:{self.place.local_rank}" if kind == "cuda" and rank == 0 else kind

    def start(self, settings: Sequence[RankSettings]) -> "dict[int, TorchrunRank]":
        """Raises ValueError for ranks with other settings; then none starts."""
        store, offer = _store(self.place), uuid.uuid4().hex
        ranks = {each.rank: _addresses(each) for each in settings}
        store.set("offer", json.dumps({"id": offer, "ranks": ranks}))
        answers = _answers(store, offer, list(ranks))
        reasons = {
            rank: _why_refused(rank, answer["settings"], settings[0].config)
            for rank, answer in answers.items()
        }
        refused = "; ".join(filter(None, reasons.values()))
        for answer in answers.values():
            store.set(f"{offer}/go/{answer['key']}", refused)
        if refused:
            raise ValueError(refused)
        return {
            rank: TorchrunRank(answer["pid"], answer["host"]) for rank, answer in answers.items()
        }


def _answers(store: Store, offer: str, ranks: Sequence[int]) -> dict[int, Any]:
    """What the ranks answer to an offer. Logs which ones are missing while it waits."""
    began = said_at = time.monotonic()
    while missing := [rank for rank in ranks if not store.check([f"{offer}/answer/{rank}"])]:
        if time.monotonic() - said_at > TELL_SECONDS:
            said_at = time.monotonic()
            log.warning(
                "rank 0 has waited %.0f s for rank %s: was torchrun started on all hosts, and did "
                "these ranks end with an error there?",
                said_at - began,
                ", ".join(map(str, missing)),
            )
        time.sleep(POLL_SECONDS)
    return {rank: json.loads(store.get(f"{offer}/answer/{rank}")) for rank in ranks}


@dataclass(frozen=True)
class TorchrunRank:
    """Another rank, as rank 0 sees it; a RankHandle. It ends when its connection is closed."""

    pid: int
    host: str

    def how_it_ended(self) -> None:
        return None

    def kill(self) -> None:
        pass


def run_rank(config: EngineConfig, place: TorchrunPlace) -> NoReturn:
    """Execute the commands of rank 0 until it stops. Raises as settings_from_rank_0 does."""
    from atomc.runtime.ranks.rank import Rank

    settings = settings_from_rank_0(config, place)
    log.info("process %d is rank %d of %d", os.getpid(), place.rank, place.size)
    # torchrun may pass signals to the processes of all hosts; rank 0 handles them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    Rank(settings).run()
    # Skip the interpreter's cleanup, which a device or a collective can block.
    exit_process(0)


def settings_from_rank_0(config: EngineConfig, place: TorchrunPlace) -> RankSettings:
    """What this rank is started with; waits for rank 0. Raises ValueError if rank 0 refuses
    ranks, OSError if it ends.
    """
    key, answered = uuid.uuid4().hex, ""
    answer = {
        "key": key,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "settings": _comparable(config),
    }
    try:
        store = _store(place)
        while True:
            offer = json.loads(store.get("offer"))
            if offer["id"] != answered:
                answered = offer["id"]
                store.set(f"{answered}/answer/{place.rank}", json.dumps(answer))
            if store.check([f"{answered}/go/{key}"]):
                break
            time.sleep(POLL_SECONDS)
        reason = store.get(f"{answered}/go/{key}").decode()
    except DistError as error:
        raise OSError("rank 0 ended before it started this rank") from error
    if reason:
        raise ValueError(reason)
    fields = offer["ranks"][str(place.rank)]
    threads = fields.pop("threads")
    config = replace(config, device=_device(config, place), threads=threads)
    return RankSettings(rank=place.rank, config=config, torch=TorchSettings.current(), **fields)


def _store(place: TorchrunPlace) -> Store:
    """The store that torchrun's first agent serves."""
    store = TCPStore(place.master, place.port, place.size, is_master=False, timeout=TIMEOUT)
    return PrefixStore("atomc", store)


def _addresses(settings: RankSettings) -> dict[str, str | int | None]:
    return {
        "store_host": settings.store_host,
        "store_port": settings.store_port,
        "commands": settings.commands,
        "reports": settings.reports,
        "threads": settings.config.threads,
    }


def _comparable(config: EngineConfig) -> dict[str, str]:
    """What must be equal in all ranks."""
    names = [each.name for each in fields(config) if each.name not in ("device", "threads")]
    return {"atomc": import_module("atomc").__version__} | {
        name: repr(getattr(config, name)) for name in names
    }


def _why_refused(rank: int, settings: Mapping[str, str], config: EngineConfig) -> str:
    """Empty if the rank was started with the settings of rank 0."""
    expected = _comparable(config)
    differ = [
        f"{name} {settings.get(name)} instead of {expected.get(name)}"
        for name in sorted(settings.keys() | expected.keys())
        if settings.get(name) != expected.get(name)
    ]
    return f"rank {rank} was started with {', '.join(differ)}" if differ else ""
