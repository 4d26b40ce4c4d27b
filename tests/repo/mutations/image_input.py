"""Bugs in the reading of images, and in where they are in a prompt."""

from mutations import Bug

INPUT = "runtime/images"


def decode(old: str, new: str, tests: str) -> Bug:
    return Bug(
        f"{INPUT}/decode.py", old, new, f"tests/runtime/images/test_image_decode.py -k '{tests}'"
    )


def access(old: str, new: str, tests: str) -> Bug:
    return Bug(
        f"{INPUT}/media_access.py",
        old,
        new,
        f"tests/runtime/images/test_media_access.py -k '{tests}'",
    )


def fetch(old: str, new: str, tests: str) -> Bug:
    return Bug(
        f"{INPUT}/web_fetch.py", old, new, f"tests/runtime/images/test_media_access.py -k '{tests}'"
    )


def decoder(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(f"{file}.py", old, new, f"tests/runtime/images/test_image_decoder.py -k '{tests}'")


def prompt(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(
        f"{INPUT}/{file}.py", old, new, f"tests/runtime/images/test_image_prompts.py -k '{tests}'"
    )


BUGS = [
    decode(
        "    _check_size(*image.size, max_pixels)\n", "", "bomb_takes_no_memory or huge or no_width"
    ),
    decode("        _check_size(*size, max_pixels)", "        pass", "huge and WebP"),
    decode("    6: \"ROTATE_270\",", "    6: \"ROTATE_90\",", "orientation"),
    decode("np.asarray(image) >> 8", "np.asarray(image) & 255", "sixteen_bits"),
    decode(' or "transparency" in image.info', "", "transparent_color"),
    access("if folder is None or", "if folder is not None and", "outside"),
    access(".resolve(strict=True)", ".absolute()", "outside or allowed_folder_are_read"),
    access("os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK", "os.O_RDONLY | os.O_NONBLOCK", "becomes"),
    access("os.O_DIRECTORY | os.O_NOFOLLOW", "os.O_DIRECTORY", "becomes"),
    access("if not stat.S_ISREG", "if stat.S_ISREG", "allowed_folder_are_read"),
    access("if len(data) > self.max_bytes", "if len(data) > 2 * self.max_bytes", "above_the_limit"),
    fetch("if not all(map(", "if not any(map(", "one_private"),
    fetch("inner = address.ipv4_mapped or address.sixtofour", "inner = None", "not_public"),
    fetch("address.is_global and not address.is_multicast", "address.is_global", "not_public"),
    fetch("    timer.start()\n", "", "trickles"),
    fetch("parts = self._checked(url)", "parts = urlsplit(url)", "no_image_file or invalid_web"),
    fetch("data = response.read(max_bytes + 1)", "data = response.read(max_bytes)", "no_image_file"),
    decoder(f"{INPUT}/decode_worker", "    limits.extend(num_pixels)\n", "    limits._seconds = 0\n", "same_process"),
    decoder(f"{INPUT}/decode_worker", "RLIMIT_AS, (most, hard)", "RLIMIT_AS, (hard, hard)", "memory_is_limited"),
    decoder(f"{INPUT}/decode_worker", "num_pixels > request", "num_pixels >= request", "more_pixels"),
    decoder("runtime/server/service/image_reader", "lambda: asyncio.Semaphore(REQUEST_DECODES)", "lambda: asyncio.Semaphore(DECODES)", "does_not_wait"),
    decoder("runtime/server/service/image_reader", "connection.shutdown(socket.SHUT_RDWR)", "pass", "stops_its_work"),
    Bug(
        "runtime/processes/fork_server.py",
        "    poll.register(connection, 0)\n",
        "",
        "tests/runtime/test_fork_server.py -k closing",
    ),
    prompt("placeholders", "count != num_images", "count < num_images", "two_parts"),
    prompt("placeholders", "PromptImage(len(prompt), ", "PromptImage(len(placed), ", "its_tokens"),
    prompt("placeholders", "(before if i < last else", "(after if i < last else", "literal or cut"),
    prompt("processor", "digest.update(pixels)", "digest.update(pixels[:-64])", "its_tokens"),
    prompt("processor", "repr(grid).encode()", 'b""', "its_tokens"),
    prompt("content_parts", "len(sources) > limit", "len(sources) > limit + 1", "is_limited"),
    Bug(
        "runtime/text/chat_prompts.py",
        "hidden.hide(messages),",
        "messages,",
        "tests/runtime/images/test_image_prompts.py -k literal",
    ),
]  # fmt: skip
