"""Calls that control an engine, beside requests: their messages, and what they do in the engine's
process. A new call is a name in CallName and a case in `ControlCalls.run`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from atomc.runtime.scheduling.stats import Stats

if TYPE_CHECKING:
    from atomc.runtime.engine import Engine

CallName = Literal[
    "stats",
    "report",
    "reset_prefix_cache",
    "sleep",
    "wake_up",
    "is_sleeping",
    "load_adapter",
    "unload_adapter",
    "start_profile",
    "stop_profile",
]


class ControlCall(msgspec.Struct, tag=True):
    """A call that the engine answers with a Reply of the same number.

    args: of a LoRA adapter its name, and the folder to load it from; of a profile the folder
    """

    number: int
    name: CallName
    args: tuple[str, ...] = ()


class Reply(msgspec.Struct, tag=True):
    """The result of a ControlCall as text, or its error message; stats: those that it asked for."""

    number: int
    value: str = ""
    error: str | None = None
    stats: Stats | None = None


@dataclass
class ControlCalls:
    """Runs calls in the engine's process.

    is_compiling   whether requests wait for a compile
    profile        torch's, while it records
    """

    engine: "Engine"
    is_compiling: Callable[[], bool]
    profile: Any = None

    def run(self, call: ControlCall) -> Reply:
        """Raises ValueError for an error that a user can fix."""
        engine, value = self.engine, ""
        match call.name:
            case "stats":
                return Reply(call.number, stats=engine.stats())
            case "report":
                value = self._report()
            case "reset_prefix_cache":
                engine.reset_prefix_cache()
            case "sleep":
                self._sleep()
            case "wake_up":
                engine.wake_up()
            case "is_sleeping":
                value = "yes" if engine.is_sleeping else ""
            case "load_adapter":
                engine.adapters.load(*call.args)
            case "unload_adapter":
                engine.adapters.unload(*call.args)
            case "start_profile":
                self._start_profile()
            case "stop_profile":
                value = self._stop_profile(Path(*call.args))
        return Reply(call.number, value)

    def _report(self) -> str:
        """The compiler's report as JSON text."""
        stats = self.engine.stats()
        report = self.engine.program.report.to_dict() | {
            "steps": stats.steps,
            "expert_load": stats.expert_load,
        }
        return msgspec.json.encode(report, enc_hook=str).decode()

    def _sleep(self) -> None:
        if self.is_compiling():
            raise ValueError(
                "sleep: grammars, or the model for embeddings, are being compiled: call it "
                "when requests have ended"
            )
        self.engine.sleep()

    def _start_profile(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity

        if self.profile is not None:
            raise ValueError("a profile is already running: call /stop_profile first")
        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
        ]
        self.profile = torch.profiler.profile(activities=activities)
        self.profile.start()

    def _stop_profile(self, folder: Path) -> str:
        """The name of the trace file."""
        if self.profile is None:
            raise ValueError("no profile is running: call /start_profile first")
        profile, self.profile = self.profile, None
        profile.stop()
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"engine-{time.strftime('%Y%m%d-%H%M%S')}.json.gz"
        profile.export_chrome_trace(str(file))
        return file.name
