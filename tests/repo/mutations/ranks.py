"""Bugs in how several ranks run a model together."""

from mutations import Bug

RANKS = "tests/runtime/ranks/test_ranks.py"


def bug(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(f"runtime/{file}.py", old, new, f"{RANKS} -k {tests}")


LARGEST = "tests/parallel/test_vocab_parallel.py -k largest"
HEADS = "tests/stock/test_stock_head.py -k"
STOCK = (
    "tests/runtime/ranks/test_ranks_models.py -m '' -k 'latent and class and not fp8 and not read'"
)
GREEDY = f"{RANKS} -k gather_no_logits"
TORCHRUN, RAY = "tests/runtime/ranks/test_torchrun.py -k", "tests/runtime/ranks/test_ray.py -k"
BUGS = [
    Bug("atomc/parallel/vocab.py", "column + self.first]", "column]", LARGEST),
    Bug("atomc/parallel/vocab.py", "logits[..., : self.size - self.first].max(-1)", "logits.max(-1)", LARGEST),
    Bug("atomc/parallel/vocab.py", "value.double().view", "value.float().double().view", LARGEST),
    Bug("atomc/parallel/vocab.py", "self.size - 1).amin(-1)", "0).amax(-1)", LARGEST),
    Bug("runtime/requests/sampling_params.py", " or self.min_tokens", "", GREEDY),
    Bug("runtime/requests/sampling_params.py", "self.logprobs is None and not changed", "not changed", GREEDY),
    Bug("runtime/execution/output_processor.py", "chunk.scored or (", "False or (", GREEDY),
    Bug("runtime/execution/output_processor.py", "mask is None and _only_largest", "_only_largest", GREEDY),
    Bug("runtime/execution/views/stock_head.py", "torch.cat(parts, -1).equal(expected)", "torch.cat(parts, -1).shape == expected.shape", f"{HEADS} needs_other"),
    Bug("runtime/execution/views/stock_head.py", "    if type(head) is not VocabParallelHead:\n", "    if head is None:\n", f"{HEADS} is_whole"),
    Bug("runtime/execution/views/stock_head.py", "50 * torch.randn", "torch.zeros", f"{HEADS} needs_other"),
    Bug("runtime/execution/self_check.py", "logits if apart is None else apart.gathered(logits)", "logits", f"{HEADS} compared_with"),
    Bug("runtime/execution/programs.py", "        elif type(model) is StockModel:\n", "        elif False:\n", STOCK),
    bug("ranks/process_group", "    except RuntimeError as error:  # the device", "    except OSError as error:  # the device", "broken"),
    bug("ranks/rank", "        open_device(device)\n", "", "without_its_device"),
    bug("ranks/executor", "    monitor.end_watch()\n", "", "dropped_after"),
    Bug("runtime/execution/graphs.py", "self.captured.clear()", "pass", "tests/compiler/test_cudagraphs.py -k no_graph_is_left"),
    bug("execution/collective_min", "distributed.ReduceOp.MIN", "distributed.ReduceOp.MAX", "outputs_of_one"),
    bug("ranks/rank", "sample(_tensor(mask, num_rows))", "sample(None)", "outputs_of_one"),
    Bug("runtime/interrupts.py", "signal.signal(number, self.receive)", "pass", f"{RANKS} -k ctrl_c"),
    bug("ranks/monitor", "(alike or not self.started)", "not self.started", "alike"),
    Bug("runtime/ranks/torchrun.py", 'if offer["id"] != answered:', "if not answered:", f"{TORCHRUN} not_those_of_a_group"),
    Bug("runtime/ranks/torchrun.py", 'f"{answered}/go/{key}"]', 'f"{answered}/go/other"]', f"{TORCHRUN} not_those_of_a_group"),
    Bug("runtime/ranks/torchrun.py", 'not in ("device", "threads")', "in ()", f"{TORCHRUN} other_flags"),
    Bug("runtime/ranks/torchrun.py", "{answer['key']}\", refused)", "{answer['key']}\", '')", f"{TORCHRUN} other_flags"),
    Bug("runtime/ranks/rank.py", "round(1e3 * CONNECT_SECONDS)", "", f"{TORCHRUN} not_reach_rank_0"),
    Bug("runtime/ranks/torchrun.py", "config.num_engines > 1", "config.dp > 1", f"{TORCHRUN} does_not_fit"),
    Bug("runtime/ranks/torchrun.py", "place.local_rank >=", "place.rank >", f"{TORCHRUN} does_not_fit"),
    Bug("runtime/ranks/torchrun.py", 'name not in ("localhost", address)', "False", f"{TORCHRUN} only_its_own_host"),
    Bug("runtime/server/engines/ray_actors/placement.py", 'if "://" in address:', "if False:", f"{RAY} refused_soon"),
    Bug("runtime/server/engines/ray_actors/placement.py", "share * config.num_processes", "share * config.num_ranks", f"{RAY} too_few"),
    Bug("runtime/server/engines/ray_actors/placement.py", "threads=config.threads or 1)", "threads=config.threads)", f"{RAY} each_rank_is"),
]  # fmt: skip
