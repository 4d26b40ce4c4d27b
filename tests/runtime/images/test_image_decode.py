"""Decoding of image files: formats, orientation, transparency, and files that must be refused before
they take memory.
"""

import io
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("PIL")
from image_files import encoded, picture, png_of_zeros
from PIL import Image

from atomc.runtime.images.decode import MAX_PIXELS, decode_image
from atomc.runtime.images.image_error import ImageError


def same(image, expected):
    assert image.mode == "RGB" and image.size == expected.size
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))


@pytest.mark.parametrize("kind, more", [("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True})])
def test_a_lossless_image_keeps_its_pixels(kind, more):
    image = picture(13, 7)
    same(decode_image(encoded(image, kind, **more)), image)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_becomes_rgb(mode, progressive):
    data = encoded(picture(16, 24, mode=mode), "JPEG", progressive=progressive)
    same(decode_image(data), Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("kind, more", [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})])
def test_of_an_animation_the_first_frame_is_read(kind, more):
    frames = [picture(8, 8, seed, "P").convert("RGB").quantize(8) for seed in range(3)]
    frames = [frame if kind == "GIF" else frame.convert("RGB") for frame in frames]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **more)
    assert Image.open(io.BytesIO(data)).n_frames == 3
    same(decode_image(data), frames[0].convert("RGB"))


def test_transparent_parts_are_white():
    colors = picture(4, 4)
    image = colors.copy()
    image.putalpha(Image.new("L", (4, 4), 0))
    image.putpixel((1, 2), (10, 20, 30, 255))
    white = Image.new("RGB", (4, 4), "white")
    white.putpixel((1, 2), (10, 20, 30))
    same(decode_image(encoded(image)), white)


def test_the_transparent_color_of_a_palette_is_white():
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    found = decode_image(encoded(image, transparency=0))
    assert found.getpixel((0, 0)) == (255, 255, 255) and found.getpixel((1, 0)) == (0, 0, 255)


def test_of_sixteen_bits_the_upper_eight_are_read():
    values = np.array([[0, 255, 256, 65535, 0x8001]], dtype=np.uint16)
    found = np.asarray(decode_image(encoded(Image.fromarray(values))))
    assert found[0, :, 0].tolist() == [0, 0, 1, 255, 128] and (found == found[:, :, :1]).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_turns_the_image_upright(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(6, 4), "PNG", exif=exif)
    from PIL import ImageOps

    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    same(decode_image(data), expected)
    assert (decode_image(data).size == (4, 6)) == (orientation > 4)


def test_damaged_exif_data_does_not_matter():
    data = encoded(picture(6, 4), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert decode_image(data).size == (6, 4)


def canvas(width, height, kind=b"VP8X"):
    """The header of a WebP file of this size."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBP" + kind + (10).to_bytes(4, "little") + bytes(4) + size
    if kind == b"VP8L":
        bits = (width - 1) | (height - 1) << 14
        body = b"WEBPVP8L" + (10).to_bytes(4, "little") + b"\x2f" + bits.to_bytes(4, "little")
    if kind == b"VP8 ":
        sides = width.to_bytes(2, "little") + height.to_bytes(2, "little")
        body = b"WEBPVP8 " + (10).to_bytes(4, "little") + b"\0\0\0\x9d\x01\x2a" + sides
    return b"RIFF" + (len(body) + 50).to_bytes(4, "little") + body + bytes(50)


PNG, JPEG = encoded(picture(32, 32)), encoded(picture(32, 32), "JPEG")


def segments(kind, body, count):
    """A JPEG file with this segment `count` times before the others."""
    one = b"\xff" + bytes([kind]) + (len(body) + 2).to_bytes(2, "big") + body
    return JPEG[:2] + one * count + JPEG[2:]


def run_length_bmp(width, height):
    """A BMP file of 1 kB."""
    header = (54 + 1024).to_bytes(4, "little") + (40).to_bytes(4, "little")
    header += width.to_bytes(4, "little") + height.to_bytes(4, "little")
    header += (1).to_bytes(2, "little") + (8).to_bytes(2, "little")  # planes, bits
    header += (1).to_bytes(4, "little") + bytes(12) + (256).to_bytes(4, "little") + bytes(4)
    return b"BM" + bytes(8) + header + bytes(1024) + b"\0\1"


DAMAGED = {
    "empty": (b"", "the image is empty"),
    "text": (b"hello", "none of PNG, JPEG, WebP, GIF and BMP"),
    "TIFF": (encoded(picture(4, 4), "TIFF"), "none of PNG"),
    "ICO": (encoded(picture(16, 16), "ICO"), "none of PNG"),
    "PPM": (encoded(picture(4, 4), "PPM"), "none of PNG"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of PNG"),
    "header only": (PNG[:30], "damaged"),
    "truncated PNG": (PNG[:-200], "truncated or damaged"),
    "truncated JPEG": (JPEG[:-200], "truncated or damaged"),
    "truncated WebP": (encoded(picture(32, 32), "WEBP")[:-100], "damaged"),
    "truncated GIF": (encoded(picture(32, 32, mode="P"), "GIF")[:-500], "truncated or damaged"),
    "truncated BMP": (encoded(picture(32, 32), "BMP")[:-500], "truncated or damaged"),
    "flipped bits": (PNG[:200] + bytes(b ^ 255 for b in PNG[200:]), "truncated or damaged"),
    "no width": (png_of_zeros(0, 5), "damaged|at least 1 x 1"),
    "huge PNG": (png_of_zeros(6000, 6000), "6000 x 6000 pixels, at most 33554432"),
    "huge WebP": (canvas(16000, 16000), "16000 x 16000 pixels"),
    "huge lossless WebP": (canvas(16000, 16000, b"VP8L"), "16000 x 16000 pixels"),
    "huge lossy WebP": (canvas(16000, 16000, b"VP8 "), "16000 x 16000 pixels"),
    "wide": (png_of_zeros(2**15, 100), "32768 x 100 pixels, its aspect ratio"),
    "wide run-length BMP": (run_length_bmp(2**25, 1), "run-length encoded"),
    "small Exif segments": (segments(0xE1, b"Exif\0\0x", 1100), "more than 1000 segments"),
    "small comments": (segments(0xFE, b"x", 400_000), "more than 1000 segments"),
    "fill bytes": (JPEG[:2] + b"\xff" * 5000 + JPEG[2:], "more than 1000 segments"),
    "scans": (JPEG[:-2] + b"\xff\xda" * 200 + b"\xff\xd9", "more than 100 scans"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_cannot_be_decoded_is_refused_in_one_sentence(name):
    data, message = DAMAGED[name]
    with pytest.raises(ImageError, match=message) as caught:
        decode_image(data)
    assert "\n" not in str(caught.value) and "0x" not in str(caught.value)


def test_the_size_of_real_webp_files_is_read_from_their_header():
    from atomc.runtime.images.decode import _webp_size

    for more in ({}, {"lossless": True}, {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}):
        assert _webp_size(encoded(picture(300, 77), "WEBP", **more)) == (300, 77)
    assert _webp_size(PNG) is None


def test_the_black_png_of_these_tests_is_one():
    data = png_of_zeros(3000, 1000)
    image = Image.open(io.BytesIO(data))
    image.load()
    assert image.size == (3000, 1000) and image.getextrema() == (0, 0)


def test_segments_within_the_limit_are_read():
    assert decode_image(segments(0xE1, b"Exif\0\0x" * 3, 900)).size == (32, 32)


def test_the_largest_allowed_image_is_decoded():
    assert decode_image(png_of_zeros(2**14, 2**11)).size == (2**14, 2**11)
    assert MAX_PIXELS == 2**14 * 2**11


GROWTH = """
import resource, sys
from PIL import Image, BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin
from PIL import WebPImagePlugin
from atomc.runtime.images.decode import decode_image
from atomc.runtime.images.image_error import ImageError

data = sys.stdin.buffer.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode_image(data)
except ImageError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux")
@pytest.mark.parametrize("side", [20_000, 9_000])  # above and below Pillow's own limit
def test_a_bomb_takes_no_memory(side):
    data = png_of_zeros(side, side)
    assert len(data) < 450_000
    found = subprocess.run(
        [sys.executable, "-c", GROWTH], input=data, capture_output=True, check=True
    )
    message, kilobytes = found.stdout.decode().splitlines()
    assert message.startswith("the image has ") and "33554432" in message
    assert int(kilobytes) < 100 * 1024
