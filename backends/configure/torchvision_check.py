"""Import torchvision before transformers does, which would hide the reason in sixty lines if it does not load."""

from importlib.metadata import version

from tinker_server.backends.protocol import BackendFailed


def require_torchvision() -> None:
    """Raise BackendFailed if the installed torchvision does not load with the installed torch."""
    try:
        import torchvision
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise BackendFailed(
            f"this torchvision ({version('torchvision')}) does not belong to this torch ({version('torch')}): on a"
            " machine without a GPU, install with `.ci/install.sh VENV cpu` in a clone; elsewhere, install torchvision"
            f" from the index that torch came from ({reason})"
        ) from None
    del torchvision
