"""Bugs in a server of several engines."""

from mutations import Bug

ENGINES, SERVER = "tests/runtime/server/engines/test_server_dp.py", "runtime/server"


def bug(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(f"{file}.py", old, new, f"{ENGINES} -k {tests}")


BUGS = [
    bug(
        f"{SERVER}/engines/engine_group",
        "None, client.num_unfinished)",
        "None, 0)",
        "fewest_requests",
    ),
    bug(
        f"{SERVER}/engines/engine_group",
        'request.id.partition("/")[0]',
        "request.id",
        "fewest_requests",
    ),
    bug(
        f"{SERVER}/engines/engine_group",
        "(client.unhealthy_reason is not None, ",
        "(",
        "fewest_requests",
    ),
    bug(
        f"{SERVER}/engines/engine_group",
        "return min(restarting",
        "return max(restarting",
        "soonest_restart",
    ),
    bug(
        f"{SERVER}/engines/engine_group",
        " or isinstance(why, EngineRestarting) for",
        " for",
        "engines_remain",
    ),
    bug(
        f"{SERVER}/engines/start_engines",
        "names[engine * ranks :",
        "names[engine :",
        "gpus_are_divided",
    ),
    bug("runtime/scheduling/stats", "min(stats.max_len", "max(stats.max_len", "stats_of_engines"),
]
