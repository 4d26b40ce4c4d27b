"""Bugs in LoRA adapters: the op, its kernel, the pass, what requests share, and the files."""

from mutations import Bug


def bug(file: str, old: str, new: str, test: str, words: str) -> Bug:
    return Bug(file, old, new, f"tests/{test}.py -k '{words}'")


KERNEL, FEW = "atomc/kernels/triton/linear/lora.py", "atomc/kernels/triton/linear/lora_few.py"
BUGS = [
    bug("runtime/scheduling/prefix_cache.py", 'b"" if lora is None else b"lora %d " % lora', 'b""', "runtime/execution/test_lora", "one_load"),
    bug("runtime/scheduling/prefix_sharing.py", "request.lora.identity", "request.lora.number", "runtime/execution/test_lora", "one_load"),
    bug("runtime/lora_adapters.py", "(*self.loaded.values(), *self._in_use())", "self.loaded.values()", "runtime/execution/test_lora", "keeps_its"),
    bug("runtime/execution/lora/rows.py", "self._of_slots[chunk.slot] = NONE if number is None else number", "self._of_slots[chunk.slot] = number or 0", "runtime/execution/test_lora", "mixed_batch"),
    Bug("passes/lora.py", "x = quantizer.args[0]", "pass", "tests/runtime/execution/test_lora.py -m '' -k quantized_layers"),
    bug("atomc/weights/lora.py", "layer.lora_b[number].zero_()", "pass", "runtime/execution/test_lora_files", "replaces_all"),
    bug("atomc/weights/lora.py", "a.isfinite().all() and b.isfinite().all()", "True", "runtime/execution/test_lora_files", "changes_nothing"),
    bug("runtime/execution/lora/files.py", "math.sqrt(rank) if self.rslora else rank", "rank", "runtime/execution/test_lora_files", "its_root"),
    bug(KERNEL, "layer[None, :] == (r // RANK)[:, None]", "r[:, None] >= 0", "kernels/test_kernels", "lora and twenty"),
    bug(KERNEL, "for part in tl.static_range(PARTS)", "for part in tl.static_range(1)", "kernels/test_kernels", "lora and twenty"),
    bug(KERNEL, "WIDE_INPUTS if wide else INPUTS", "INPUTS", "kernels/test_triton_compiles", "sm90 and not experts"),
    bug(KERNEL, "tl.where(own[:, None], thin, 0.0)", "thin", "kernels/test_kernels", "lora and twenty"),
    bug(FEW, "tl.where(layer == own, sums, delta)", "sums", "kernels/test_kernels", "lora and merged"),
    bug(FEW, "(part < PARTS)[:, None]", "(part < 1)[:, None]", "kernels/test_kernels", "lora and long"),
    bug(FEW, "* R + own * RANK", "* R", "kernels/test_kernels", "lora and merged"),
    bug("passes/merge/linears.py", "    while call(node).op in VIEWS or _is_adapter(node):", "    while call(node).op in VIEWS:", "stock/test_lora_peft", "gate_and_up"),
    bug("atomc/quantization/kept_layers.py", "if WRAPPED in wrapper._modules", "if None in wrapper._modules", "stock/test_lora_peft", "keep_them_apart"),
    bug("atomc/quantization/linear.py", "unwrapped(name).rpartition", "name.rpartition", "stock/test_lora_peft", "keep_them_apart"),
    bug("passes/recognize/lora_linear.py", "op.quantized_weight for op in present", "False for op in present", "stock/test_lora_peft", "keep_them_apart"),
    bug("runtime/server/engines/engine_group.py", "if isinstance(error, EngineRestarting) or not", "if not", "runtime/server/engines/test_engines", "refuses"),
    bug("runtime/server/engines/engine_group.py", "self.check_none_restarts()", "self._check()", "runtime/server/engines/test_engines", "engines_sleep"),
]  # fmt: skip
