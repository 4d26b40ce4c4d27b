"""Bugs in which forms of weights are held, and when originals are freed."""

from mutations import Bug

HELD_ONCE = "tests/weights/test_memory_held_once.py"


def bug(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(f"{file}.py", old, new, f"{HELD_ONCE} -k {tests}")


BUGS = [
    # Caches on a CPU, whose pages are taken when they are written.
    Bug(
        "atomc/ops/state.py",
        "memory = np.zeros(size + ALIGNMENT, np.uint8)",
        "memory = np.full(size + ALIGNMENT, 0, np.uint8)",
        "tests/ops/test_ops.py -k pages_of",
    ),
    Bug(
        "atomc/ops/state.py",
        "start = -memory.ctypes.data % ALIGNMENT",
        "start = 0",
        "tests/ops/test_ops.py -k pages_of",
    ),
    Bug(
        "atomc/ops/state.py",
        "except MemoryError as error:",
        "except OSError as error:",
        "tests/ops/test_ops.py -k no_host_has_memory",
    ),
    Bug(
        "runtime/execution/worker.py",
        "self._check_host()\n        self.runner.allocate()",
        "self.runner.allocate()",
        "tests/runtime/test_engine.py -k whose_pages",
    ),
    Bug(
        "runtime/execution/capacity.py",
        "if needed > (free := free_on_host()):",
        "if needed > 2**62 + (free := free_on_host()):",
        "tests/runtime/test_engine.py -k whose_pages",
    ),
    bug(
        "atomc/compiler/weight_forms",
        "and not self.owned and _is_expert",
        "and _is_expert",
        "one_at_a_time",
    ),
    bug(
        "atomc/compiler/weight_forms",
        "if None not in held.forms and not self._serves(held, reading):",
        "if False:",
        "no_kernel_for_another_layout",
    ),
    bug(
        "atomc/compiler/weight_forms",
        "self.stored |= {operand.name for operand in node.all_input_nodes}",
        "pass",
        "tied_to_the_embedding",
    ),
    bug(
        "atomc/compiler/weight_forms",
        "if any(_is_expert(reading.name, node) for _, node in reading.readers):\n            return True",
        "",
        "two_layouts",
    ),
    bug("atomc/weights/inputs", "weights.mark_read(parameter)", "pass", "earlier_program_reads"),
    bug("atomc/weights/inputs", "weights.free(_parameters(args, group))", "pass", "one_at_a_time"),
    bug(
        "atomc/weights/freed",
        "module.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]",
        "pass",
        "refuses_to_save",
    ),
    bug("atomc/program", "before_free(loaded.key, compiled.state, report)", "pass", "stock_class"),
    bug(
        "atomc/loading/dummy_weights",
        "stored_bytes(model, methods) + unquantized_bytes",
        "0 * unquantized_bytes",
        "counted_as_they_are_stored",
    ),
]
