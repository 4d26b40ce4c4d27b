"""Images decoded in processes: the pixels of the same process, limits, cancellation, and many at
once.
"""

import asyncio
import os
import signal
import sys
import threading
import zlib

import pytest

pytest.importorskip("PIL")
pytest.importorskip("fastapi")
pytest.importorskip("transformers")
from image_files import (
    data_url,
    encoded,
    image_processor,
    picture,
    png_chunk,
    png_of_zeros,
    png_with,
    slow_png,
    write_model,
)
from PIL import Image
from processes import children, wait_until
from test_image_decode import DAMAGED, segments

from atomc.runtime.images.decode import decode_image
from atomc.runtime.images.image_decoder import (
    ImageDecoder,
    LargeImage,
)
from atomc.runtime.images.image_error import ImageError
from atomc.runtime.images.media_access import MediaAccess
from atomc.runtime.images.processor import ImageProcessor, PlaceholderTokens
from atomc.runtime.server.service.image_budget import ImageBudget, ImageReservation
from atomc.runtime.server.service.image_reader import REQUEST_DECODES, ImageReader, RequestLimits

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.xdist_group("image decoder"),
]
GOOD = data_url(encoded(picture(40, 24)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def started_decoder(folder):
    """With half a second of CPU time."""
    decoder = ImageDecoder(folder, PlaceholderTokens(0, ()), seconds=0.5)
    decoder.connect().close()
    return decoder


@pytest.fixture
def decoder(started_decoder):
    """Without processes of tests before: they end a little after their answers."""
    wait_until(lambda: not supervisors(started_decoder))
    return started_decoder


def accept(length, num_bytes):
    pass


def prepare(decoder, source, reserve=accept, **limits):
    limits = {"max_pixels": 2**25, "max_bytes": 2**24} | limits
    return decoder.prepare(decoder.connect(), source, reserve, **limits)


SLOW = slow_png()
# 60 texts of a million characters.
MILLION = zlib.compress(bytes(10**6))
TEXTS = png_with(b"".join(png_chunk(b"zTXt", b"%d\0\0" % i + MILLION) for i in range(60)))
FILES = {
    "PNG": encoded(picture(40, 24)),
    "palette": encoded(picture(50, 70, mode="P")),
    "transparent": encoded(Image.merge("RGBA", [*picture(30, 30).split(), picture(30, 30).split()[0]])),
    "sixteen bits": encoded(Image.new("I;16", (33, 20), 9000)),
    "JPEG": encoded(picture(90, 17), "JPEG"),
    "CMYK": encoded(picture(90, 17, mode="CMYK"), "JPEG"),
    "many Exif segments": segments(0xE1, b"Exif\0\0x" * 3, 900),
    "WebP": encoded(picture(64, 64), "WEBP"),
    "GIF": encoded(picture(64, 30, mode="P"), "GIF"),
    "BMP": encoded(picture(64, 30), "BMP"),
    "large": png_of_zeros(800, 300),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_result_is_that_of_the_same_process(decoder, name):
    reserved = []
    expected = ImageProcessor(image_processor()).prepare(decode_image(FILES[name]))
    for source in (FILES[name], data_url(FILES[name])):
        assert prepare(decoder, source, lambda *sizes: reserved.append(sizes)) == expected
    assert reserved == [(expected.length, len(expected.pixels))] * 2


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_has_the_error_of_the_same_process(decoder, name):
    data, _ = DAMAGED[name]
    with pytest.raises(ImageError) as expected:
        decode_image(data)
    for source in (data, data_url(data)):
        with pytest.raises(ImageError) as caught:
            prepare(decoder, source)
        assert str(caught.value) == str(expected.value)


@pytest.mark.parametrize(
    "url, message",
    [
        ("data:image/png;base64,A!AA", "not valid base64"),
        ("data:image/png;base64,\u00e4\udc80", "not valid base64"),
        ("data:text/html;base64,AAAA", "the type 'text/html'"),
        (GOOD, "more than 100 bytes"),
    ],
)
def test_a_url_is_checked(decoder, url, message):
    with pytest.raises(ImageError, match=message):
        prepare(decoder, url, max_bytes=100)


def test_a_slow_file_is_ended_by_its_limit(decoder):
    with pytest.raises(
        ImageError, match=r"exceeds the limit of CPU time \(0.5 s, and more for more"
    ):
        prepare(decoder, SLOW)


@pytest.mark.rotating
def test_memory_is_limited(folder, decoder):
    prepare(decoder, TEXTS)
    small = ImageDecoder(folder, PlaceholderTokens(0, ()), memory=2**24)
    with pytest.raises(
        ImageError, match=r"exceeds the limit of memory \(16 MiB, and more for more"
    ):
        prepare(small, TEXTS)
    prepare(small, GOOD)


def test_an_image_of_more_pixels_than_the_request_allows_is_not_decoded(decoder):
    prepare(decoder, FILES["large"], max_pixels=800 * 300)
    with pytest.raises(LargeImage):
        prepare(decoder, FILES["large"], max_pixels=800 * 300 - 1)


def test_an_image_that_is_refused_has_no_patches_made(decoder):
    def refuse(length, num_bytes):
        raise ImageError("too many tokens")

    with pytest.raises(ImageError, match="too many tokens"):
        prepare(decoder, GOOD, refuse)


def supervisors(decoder):
    """Of the connections; each has a child that decodes."""
    return children(decoder._server._process.pid)


def stop_decoding(decoder):
    """Stop the children that decode: they end only if they are killed."""
    wait_until(lambda: any(map(children, supervisors(decoder))))
    for supervisor in supervisors(decoder):
        for child in children(supervisor):
            os.kill(child, signal.SIGSTOP)


@pytest.mark.rotating
def test_a_process_that_hangs_is_given_up(folder):
    decoder = ImageDecoder(folder, PlaceholderTokens(0, ()), wait=1.0)
    prepare(decoder, GOOD)

    def stop(length, num_bytes):
        stop_decoding(decoder)

    with pytest.raises(ImageError, match="decoding it exceeds the limit of 1 s"):
        prepare(decoder, GOOD, stop)
    wait_until(lambda: not supervisors(decoder))
    prepare(decoder, GOOD)


def test_a_decoder_that_crashes_is_an_error_of_its_image(decoder):
    def crash(length, num_bytes):
        os.kill(children(*supervisors(decoder))[0], signal.SIGSEGV)

    with pytest.raises(ImageError, match="its decoder was ended by signal 11"):
        prepare(decoder, GOOD, crash)
    prepare(decoder, GOOD)


# Images of requests


def limits(max_len=10**6, budget=2**30):
    return RequestLimits(max_len, max_len, 2**24, ImageReservation(ImageBudget(budget)))


@pytest.fixture
def reader(decoder):
    return ImageReader(decoder, MediaAccess())


class ConcurrentDecodes:
    """Counts the decodes of a decoder that run at the same time; their processes end a little
    later.
    """

    def __init__(self, decoder):
        self.connect, self._prepare = decoder.connect, decoder.prepare
        self.running, self.most, self._lock = 0, 0, threading.Lock()

    def prepare(self, *args, **limits):
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            return self._prepare(*args, **limits)
        finally:
            with self._lock:
                self.running -= 1


def test_a_request_that_ends_stops_its_work(decoder, reader):
    async def cancel():
        sources = [data_url(SLOW), *[GOOD] * 3]
        task = asyncio.create_task(reader.prepare(sources, limits()))
        await asyncio.to_thread(stop_decoding, decoder)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_until, lambda: not supervisors(decoder))
        assert len(await reader.prepare([GOOD], limits())) == 1

    asyncio.run(cancel())


def test_twenty_requests_at_once(decoder, reader):
    async def run():
        return await asyncio.gather(
            *(reader.prepare([GOOD, data_url(FILES["large"])], limits()) for _ in range(20))
        )

    expected = [prepare(decoder, source) for source in (GOOD, FILES["large"])]
    assert asyncio.run(run()) == [expected] * 20
    wait_until(lambda: not supervisors(decoder))


@pytest.mark.parametrize(
    "slow", [[data_url(SLOW)] * 20, [data_url(png_of_zeros(5000, 5000))] * 4], ids=["slow", "large"]
)
def test_an_image_does_not_wait_for_those_of_another_request(decoder, reader, slow):
    decodes = ConcurrentDecodes(decoder)
    reader.decoder = decodes

    async def run():
        others = asyncio.create_task(reader.prepare(slow, limits()))
        await asyncio.to_thread(wait_until, lambda: supervisors(decoder))
        await asyncio.sleep(0.2)
        assert 1 < decodes.most <= REQUEST_DECODES
        await reader.prepare([GOOD], limits())
        assert not others.done()
        others.cancel()
        await asyncio.wait([others])

    asyncio.run(run())
    wait_until(lambda: not supervisors(decoder))
