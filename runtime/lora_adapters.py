"""The LoRA adapters of an engine: which are loaded, and which places are free."""

from collections.abc import Callable, Collection

from atomc.runtime.requests.request import LoadedAdapter


class LoraAdapters:
    """Adapters by name, and those that were unloaded while requests still use them.

    capacity  adapters loaded at once; 0: none
    write     (number, folder) reads an adapter to the place with this number; raises ValueError for
              one that cannot be used, which changes nothing
    in_use    the adapters of unfinished requests
    """

    def __init__(
        self,
        capacity: int,
        write: Callable[[int, str], None],
        in_use: Callable[[], Collection[LoadedAdapter]],
    ) -> None:
        self.capacity, self._write, self._in_use = capacity, write, in_use
        self.loaded: dict[str, LoadedAdapter] = {}
        self._num_loads = 0

    def get(self, name: str) -> LoadedAdapter:
        """Raises ValueError for a name that is not loaded."""
        if name not in self.loaded:
            raise ValueError(
                f"no LoRA adapter {name!r} is loaded; loaded are {list(self.loaded) or 'none'}"
            )
        return self.loaded[name]

    def load(self, name: str, folder: str) -> LoadedAdapter:
        """Raises ValueError for a name that is loaded, without a free place, and for an adapter
        that cannot be used.
        """
        if not self.capacity:
            raise ValueError(
                "there is no room for LoRA adapters: set max_loras, the number loaded at once"
            )
        if name in self.loaded:
            raise ValueError(f"a LoRA adapter {name!r} is loaded already: unload it first")
        taken = {adapter.number for adapter in (*self.loaded.values(), *self._in_use())}
        number = next((i for i in range(self.capacity) if i not in taken), None)
        if number is None:
            leaving = len(taken) - len(self.loaded)
            why = f", and requests still use {leaving} that were unloaded" if leaving else ""
            raise ValueError(
                f"{len(self.loaded)} LoRA adapters are loaded{why}, of at most {self.capacity}: "
                "unload one, or raise max_loras"
            )
        try:
            self._write(number, folder)
        except ValueError as error:
            raise ValueError(f"LoRA adapter {name!r}: {error}") from error
        self._num_loads += 1
        self.loaded[name] = LoadedAdapter(name, number, self._num_loads, folder)
        return self.loaded[name]

    def unload(self, name: str) -> None:
        """No further request can have it; those that have it go on. Raises ValueError for a name
        that is not loaded.
        """
        self.get(name)
        del self.loaded[name]
