"""The process of a rank other than 0. Standard input has its RankSettings; it ends when this is
closed, which is at the latest when rank 0 ends.
"""

import os
import signal
import sys
import threading

from atomc.options import let_openmp_sleep
from atomc.runtime.processes.garbage_collection import frozen_imports
from atomc.runtime.processes.stderr_log import exit_process, log_to_stderr


def main() -> None:
    # Ctrl-C and SIGTERM may reach all processes of a terminal or service; rank 0 handles them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    let_openmp_sleep()  # before torch is imported
    with frozen_imports():
        from atomc.runtime.ranks.rank import Rank
        from atomc.runtime.ranks.rank_settings import RankSettings

    settings = RankSettings.read(sys.stdin.buffer)
    log_to_stderr(f"%(asctime)s %(levelname)s rank {settings.rank}: %(message)s")
    threading.Thread(target=_exit_with_rank_0, daemon=True).start()
    Rank(settings).run()
    # Skip the interpreter's cleanup, which a device or a collective can block.
    exit_process(0)


def _exit_with_rank_0() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    exit_process(1)


if __name__ == "__main__":
    main()
