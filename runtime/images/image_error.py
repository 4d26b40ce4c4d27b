"""The error of an image that cannot be used."""


class ImageError(ValueError):
    """An image is missing, damaged, too large or not allowed; code: for clients of the API."""

    def __init__(self, message: str, code: str = "invalid_image") -> None:
        super().__init__(message)
        self.code = code
