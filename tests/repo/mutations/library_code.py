"""Bugs in the description of a library's code for the key of a model."""

from mutations import Bug

FILE = "atomc/cache/library_code.py"
CODE = "tests/cache/test_library_code.py -k"
STOCK = "tests/cache/test_model_cache_stock.py -k"
BUGS = [
    Bug(FILE, "            for module in _imported(name, namespace", "            for module in () and _imported(name, found", f"{CODE} imports_when_it_runs"),
    Bug(FILE, "if isinstance(constant, str):", "if False:", f"{CODE} getattr_names"),
    Bug(FILE, "            names |= _names_in(constant)", "            pass", f"{CODE} another_global"),
    Bug(FILE, 'closed = [f"{name}={self.text(cell.cell_contents, where)}"', 'closed = [f"{name}"', f"{CODE} closes_over"),
    Bug(FILE, "digest(repr(_instructions(code)))", "digest('')", f"{CODE} made_from_texts"),
    Bug(FILE, 'parts[f"source of {name}"] = file_digest(Path(file))', "pass", f"{CODE} has_the_files"),
    Bug(FILE, "(name in self._names or special)", "True", f"{CODE} no_forward_names"),
    Bug(FILE, "if id(item) in self._within:", "if False:", f"{CODE} contains_itself"),
    Bug(FILE, "if kind.__module__.partition(\".\")[0] in _KNOWN or is_library_file(file):", "if True:", f"{CODE} object_of_a_class_from_elsewhere"),
    Bug(FILE, '{"_original_object_hash", ', "{", f"{STOCK} two_processes"),
    Bug(FILE, "and not file.startswith(_NOT_FOLLOWED)", "", "tests/cache/test_model_cache.py -k pip_has_installed"),
    Bug("atomc/cache/model_fingerprint.py", "        return parts | self.library.parts()", "        return parts", f"{STOCK} 'seen and function_of'"),
    Bug("atomc/cache/model_cache.py", '                    "graph": key,\n', '                    "graph": "",\n', f"{STOCK} 'second_start and dense'"),
]  # fmt: skip
