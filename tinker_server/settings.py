"""Everything an operator can set: environment variables TINKER_SERVER_*, overridden by the command line."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from backends.config import BackendConfig
from tinker_server.image_addresses import ImageAddresses


class Settings(BaseSettings):
    """`TINKER_SERVER_PORT=9000`; a field of `backend` is `TINKER_SERVER_BACKEND__DEVICE=cpu`."""

    model_config = SettingsConfigDict(
        env_prefix="TINKER_SERVER_", env_nested_delimiter="__", use_attribute_docstrings=True, frozen=True
    )

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every network the machine is in."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    data_dir: Path = Path("tinker-data")
    """Directory of the database, the checkpoints and the scratch files."""
    keys_file: Path | None = None
    """File of the API keys that `tinker-server keys` keeps; absent: `keys` in data_dir. No keys: loopback only."""
    database_url: str = ""
    """SQLAlchemy URL with an async driver (sqlite+aiosqlite, postgresql+asyncpg); empty: SQLite in data_dir."""
    backend: BackendConfig = BackendConfig()
    """The served models and how they compute."""
    max_body_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Largest request body, compressed or not; a larger one is answered 413."""
    poll_hold_s: float = Field(default=30, gt=0, lt=45)
    """How long a poll for an unfinished result is held open; the SDK hangs up at 45 s."""
    gap_grace_s: float = Field(default=5, ge=0)
    """How long a forward_backward waits for missing earlier numbers after the model's last arrival."""
    results_kept_s: float = Field(default=24 * 3600, ge=60)
    """How long results can be fetched; later polls are answered 410."""
    session_timeout_s: float = Field(default=900, ge=1)
    """How long a session may go without a heartbeat before its models are moved from memory to disk."""
    unnamed_kept_s: float = Field(default=6 * 3600, gt=0)
    """How long sampler weights without a name are kept after they were sampled from last."""
    unnamed_per_model: int = Field(default=100, ge=1)
    """Sets of sampler weights without a name that are kept of one model, beside those used in the last 10 minutes."""
    unnamed_bytes_per_owner: int = Field(default=50 << 30, ge=0)
    """Sampler weights without a name that are kept of one owner, beside those used in the last 10 minutes."""
    snapshot_every_s: float = Field(default=600, gt=0)
    """How often a model in training is copied to disk, by which it is restored after a crash."""
    log_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Requests of one model that are kept to be run again after a crash; beyond, its snapshot is taken."""
    synchronous: Literal["full", "normal"] = "full"
    """What answered requests outlive in SQLite: `full` power loss too, for an fsync a commit; `normal` crashes."""
    metrics_open: bool = False
    """Whether `/metrics` asks for no key where the scraper is on this machine and no proxy stands between."""
    otel_endpoint: str = Field(default="", pattern=r"^(https?://[^\s?#]+)?$")
    """Where a collector takes OpenTelemetry traces (OTLP/HTTP), such as http://127.0.0.1:4318; empty: none are made."""
    steps_kept_s: float = Field(default=90 * 24 * 3600, ge=3600)
    """How long the steps of runs, which the dashboard draws, are kept."""
    samples_shown: int = Field(default=50, ge=0)
    """Samples of one owner that the dashboard shows, the latest, kept in memory alone; 0 keeps none."""
    image_hosts: list[str] = []
    """Hosts, with the port where an address has one, that images named by their address are fetched from."""
    image_directories: list[Path] = []
    """Directories that images named by their path are read from, by whoever may use the server."""
    drain_s: float = Field(default=5, ge=0)
    """How long running work may go on when the server is told to stop; `docker stop` kills after 10 s."""

    def image_addresses(self) -> ImageAddresses:
        """Where images that are named by their address may come from."""
        return ImageAddresses([host.lower() for host in self.image_hosts], self.image_directories)

    def resolved_keys_file(self) -> Path:
        """The file in use, with the default filled in."""
        return self.keys_file or self.data_dir / "keys"

    def resolved_database_url(self) -> str:
        """The URL in use, with the default filled in."""
        return self.database_url or f"sqlite+aiosqlite:///{self.data_dir.resolve() / 'tinker-server.db'}"

    def resolved_backend(self) -> BackendConfig:
        """The backend's configuration; its scratch directory is in data_dir unless set."""
        if "scratch_dir" in self.backend.model_fields_set:
            return self.backend
        return self.backend.model_copy(update={"scratch_dir": self.data_dir.resolve() / "scratch"})
