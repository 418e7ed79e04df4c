"""How many bytes of a model transformers has taken in while it loads one: its bar's place is ours."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils.logging import set_tqdm_hook

from backends.formats.model_files import tensor_bytes
from backends.processes.progress import Progress

_LOADING = "Loading weights"
"""What transformers writes before that bar. It goes over the model's parameters by name, each with its tensors."""


@contextmanager
def counted(directory: Path, progress: Progress) -> Iterator[None]:
    """Inside, what is read of the files in `directory` is told to `progress`."""
    sizes = tensor_bytes(directory)

    def hook(bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return each(args[0]) if kwargs.get("desc") == _LOADING else bar(*args, **kwargs)

    def each(parameters: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, mapping in parameters:
            read = [key for keys in mapping.layer_targets.values() for key in keys]
            yield name, mapping  # and goes on when it is loaded
            progress.loaded(sum(sizes.get(key, 0) for key in read))

    progress.does("reads weights", sum(sizes.values()))
    before = set_tqdm_hook(hook)
    try:
        yield
    finally:
        set_tqdm_hook(before)
