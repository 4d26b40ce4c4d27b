"""Decodes image files. Sizes are checked in the header, before memory for pixels is allocated."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from atomc.runtime.images.image_error import ImageError

if TYPE_CHECKING:  # optional
    from PIL.Image import Image

# 7680 x 4320 (8K) fits.
MAX_PIXELS = 2**25
# No model reads thinner images, and rows of one pixel are decoded slowly.
MAX_ASPECT = 200
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Each scan of a progressive JPEG updates all pixels; encoders write about ten.
MAX_SCANS = 100
START_OF_SCAN = b"\xff\xda"
# Pillow joins those of one kind in quadratic time; cameras write about ten.
MAX_SEGMENTS = 1000
# A run-length code of few bytes has millions of pixels, which Pillow decodes in Python.
RUN_LENGTH_BMP = (1, 2)
ORIENTATION = 0x0112
# EXIF orientation -> the member of Image.Transpose that undoes it.
TRANSPOSES = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def decode_image(data: bytes) -> "Image":
    """The image as RGB, turned upright; transparent parts are white, of an animation the first
    frame. Raises ImageError.
    """
    return decode_pixels(open_image(data))


def open_image(data: bytes) -> "Image":
    """The image, of which only the header is read and checked. Raises ImageError."""
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise ImageError("the image is empty")
    if (size := _webp_size(data)) is not None:
        # Pillow allocates the canvas of a WebP file when it opens it.
        _check_size(*size)
    _check_header(data)
    with _damaged():
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError as error:
            raise ImageError(
                "the image is damaged, or its format is none of PNG, JPEG, WebP, GIF and BMP"
            ) from error
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise ImageError(f"the image has more than {MAX_PIXELS} pixels: resize it") from error
    _check_size(*image.size)
    if image.format in ("JPEG", "MPO") and data.count(START_OF_SCAN) > MAX_SCANS:
        raise ImageError(f"the JPEG image has more than {MAX_SCANS} scans: save it again")
    return image


def decode_pixels(image: "Image") -> "Image":
    """What `decode_image` returns, for an image of `open_image`."""
    with _damaged():
        image.load()
    return rgb_image(image)


def rgb_image(image: "Image") -> "Image":
    """The image as RGB, upright, on white. Raises ImageError for a mode without value range."""
    with _damaged():
        return _eight_bits(_upright(image))


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height in the header of a WebP file; None for another file."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    match data[12:16]:
        case b"VP8X":
            return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(
                data[27:30], "little"
            )
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 ":
            width = int.from_bytes(data[26:28], "little") & 0x3FFF
            return width, int.from_bytes(data[28:30], "little") & 0x3FFF
    return None


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ImageError(f"the image has {width} x {height} pixels, expected at least 1 x 1")
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"the image has {width} x {height} pixels, at most {MAX_PIXELS} are allowed: resize it"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(
            f"the image has {width} x {height} pixels, its aspect ratio must be smaller than "
            f"{MAX_ASPECT}: crop it"
        )


def _check_header(data: bytes) -> None:
    """Raises ImageError for a file whose header alone makes Pillow slow."""
    if data[:2] == b"BM" and int.from_bytes(data[30:34], "little") in RUN_LENGTH_BMP:
        raise ImageError("the BMP image is run-length encoded: save it as PNG")
    if data[:2] == b"\xff\xd8" and _num_segments(data) > MAX_SEGMENTS:
        raise ImageError(f"the JPEG image has more than {MAX_SEGMENTS} segments: save it again")


def _num_segments(data: bytes) -> int:
    """Markers of a JPEG file before its first scan; counts one more than MAX_SEGMENTS at most."""
    position = count = 0
    while count <= MAX_SEGMENTS:
        position = data.find(b"\xff", position)
        marker = data[position + 1 : position + 2]
        if position < 0 or not marker or marker == START_OF_SCAN[1:]:
            break
        count += 1
        has_length = marker[0] not in (0, 0x01, 0xFF) and not 0xD0 <= marker[0] <= 0xD9
        length = int.from_bytes(data[position + 2 : position + 4], "big") if has_length else 0
        position += (1 if marker[0] == 0xFF else 2) + length
    return count


@contextmanager
def _damaged() -> Iterator[None]:
    try:
        yield
    except (ImageError, MemoryError):
        raise
    # Pillow's decoders raise OSError, SyntaxError, EOFError, struct.error, zlib.error and others.
    except Exception as error:
        raise ImageError("the image is truncated or damaged") from error


def _upright(image: "Image") -> "Image":
    from PIL.Image import Transpose

    try:
        orientation = image.getexif().get(ORIENTATION)
    except Exception:  # damaged metadata; the pixels are fine
        orientation = None
    name = TRANSPOSES.get(orientation) if isinstance(orientation, int) else None
    return image if name is None else image.transpose(Transpose[name])


def _eight_bits(image: "Image") -> "Image":
    """As RGB. Of 16 bits per pixel the upper 8, which Pillow takes of color images, too."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ImageError(
            f"an image of mode {image.mode!r} has no range of values, expected 'RGB' or 'L'"
        )
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
