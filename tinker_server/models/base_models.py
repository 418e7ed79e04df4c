"""The served base models by name. The models trained on them are in `scheduler.py`."""

from collections.abc import Mapping

from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.protocol import WHOLE_MODEL, BaseModel, Trainer
from tinker_server.errors import OtherBaseModel, UnknownBaseModel, Unsupported


class BaseModels:
    """Finds a base model's trainer and sampler, and refuses what was made on other weights."""

    def __init__(self, served: Mapping[str, BaseModel]) -> None:
        self.served = served

    def base(self, name: str) -> BaseModel:
        """Return a base model. Raises UnknownBaseModel."""
        if name not in self.served:
            raise UnknownBaseModel(f"base model {name!r} is not served here; served: {', '.join(self.served)}")
        return self.served[name]

    def require_same(self, base_model: str, fingerprint: str | None, what: str) -> BaseModel:
        """Return a base model. Refuse what was made on other weights of it; what is older than fingerprints passes.

        Raises UnknownBaseModel, OtherBaseModel.
        """
        served = self.base(base_model)
        if fingerprint not in (None, served.info.fingerprint):
            raise OtherBaseModel(
                f"{what} is of another {base_model} than the one served under this name now: its weights differ"
            )
        return served

    def ranks(self, name: str) -> int:
        """Return the number of the ranks that train a base model; 1 if it is no longer served."""
        said = self.served[name].info.numerics.get("ranks", "") if name in self.served else ""
        return int(said.partition(" ")[0] or 1)  # of several machines it says more

    def trainers(self) -> list[Trainer]:
        """Return each trainer once: names that share a directory share a trainer."""
        return list({id(base.trainer): base.trainer for base in self.served.values()}.values())


def require_adapter(trainable: Trainable, what: str) -> None:
    """Refuse a model that is not an adapter, which only an older server could make. Raises Unsupported."""
    if trainable.full:
        raise Unsupported(f"{what} {WHOLE_MODEL}; an archive of its weights can still be downloaded, and deleted")
