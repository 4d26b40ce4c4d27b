"""Bugs in what keeps pages, keys, users of one machine and hostile texts from each other."""

from mutations import Bug

PAGES = "runtime/server/http/web_pages.py"
PAGES_TESTS = "tests/runtime/server/http/test_web_pages.py"
KEYS = "runtime/server/http/api_keys.py"
FOLDER = "atomc/trusted_folder.py"
FOLDER_TESTS = "tests/files/test_trusted_folder.py"
PARSERS = "runtime/server/parsers/tool_parsers"
WORK = "tests/runtime/server/parsers/test_parser_work.py"
LOG = "runtime/processes/stderr_log.py"
LOG_TESTS = "tests/runtime/test_stderr_log.py"

BUGS = [
    Bug(LOG, "self._waiting.qsize() >= MAX_WAITING", "False", LOG_TESTS),
    Bug(LOG, "    logging.shutdown()\n", "", LOG_TESTS),
    Bug(LOG, "        except BlockingIOError:\n            time.sleep(RETRY_SECONDS)\n", "", LOG_TESTS),
    Bug(PAGES, 'scope["method"] not in SAFE_METHODS and ', "", PAGES_TESTS),
    Bug(PAGES, "return bool(site) and site", "return site", PAGES_TESTS),
    Bug(PAGES, "return address.ipv4_mapped.is_loopback", "return False", PAGES_TESTS),
    Bug(PAGES, "self._hosts = None", "self._hosts = frozenset()", PAGES_TESTS),
    Bug(KEYS, "and caller >= self._first_admin", "and True", PAGES_TESTS),
    Bug(KEYS, "max(len(keys), 1)", "len(keys)", PAGES_TESTS),
    Bug("runtime/server/app.py", 'types.Load, "operator"', "types.Load", PAGES_TESTS),
    Bug("runtime/server/service/service.py", 'f"key {caller} {salt}"', 'f"key {caller}{salt}"', PAGES_TESTS),
    Bug("runtime/engine.py", "image.salted(salt) for image", "image for image", "tests/runtime/test_images.py -k salts"),
    Bug(FOLDER, "os.lstat(path).st_uid not in", "path.exists() and path.stat().st_uid not in", FOLDER_TESTS),
    Bug(FOLDER, "user.pw_uid != 0 and user.pw_gid == number and ", "", f"{FOLDER_TESTS} -k group"),
    Bug(FOLDER, "untrusted(ours.parent) or ", "", f"{FOLDER_TESTS} -k replaces"),
    Bug("atomc/torch_compat/inductor.py", "codecache._HEADER_DIR = f", "_ = f", f"{FOLDER_TESTS} -k unpickles"),
    Bug("runtime/server/parsers/text_buffer.py", "self._text[self._start :] + text, 0", "self._text + text, self._start", WORK),
    Bug(f"{PARSERS}/state_machine.py", "read = self._text.take_read(call.feed)", "read = self._text.take(call.feed(self._text._text[self._text._start :]))", WORK),
    Bug("runtime/server/operations.py", "                renderer.kill()\n", "", "tests/runtime/server/test_compiler_page.py"),
    Bug("runtime/execution/lora/files.py", " or not a.shape[0]:", ":", "tests/runtime/execution/test_lora_files.py -k rank_0"),
]  # fmt: skip
