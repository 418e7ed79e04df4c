"""Settings of the server: environment variables TINKER_SERVER_*, overridden by the command line."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import URL

from tinker_server.backends.config import BackendConfig
from tinker_server.image_addresses import ImageAddresses


class Settings(BaseSettings):
    """`TINKER_SERVER_PORT=9000` sets `port`; `TINKER_SERVER_BACKEND__DEVICE=cpu` sets `backend.device`."""

    model_config = SettingsConfigDict(
        env_prefix="TINKER_SERVER_", env_nested_delimiter="__", use_attribute_docstrings=True, frozen=True
    )

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 means every interface of the machine."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on. 0 takes a free one."""
    data_dir: Path = Path("tinker-data")
    """Directory of the database, the checkpoints and the scratch files."""
    keys_file: Path | None = None
    """File of the API keys, which `tinker-server keys` writes. If absent: `keys` in data_dir. Without keys: only
    loopback."""
    database_url: str = ""
    """SQLAlchemy URL with an async driver (sqlite+aiosqlite, postgresql+asyncpg). If empty: SQLite in data_dir."""
    backend: BackendConfig = BackendConfig()
    """Served models, devices and limits of trainers and samplers."""
    max_body_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Largest request body, compressed or not. A larger one is answered 413."""
    poll_hold_s: float = Field(default=30, gt=0, lt=45)
    """Seconds for which a poll for an unfinished result is held open. The SDK disconnects at 45 s."""
    gap_grace_s: float = Field(default=5, ge=0)
    """Seconds for which an operation waits for missing earlier numbers, counted from the model's latest arrival."""
    results_kept_s: float = Field(default=24 * 3600, ge=60)
    """Seconds for which results can be fetched. Later polls are answered 410."""
    session_timeout_s: float = Field(default=900, ge=1)
    """Seconds without a heartbeat after which a session's models are moved from memory to disk."""
    unnamed_kept_s: float = Field(default=6 * 3600, gt=0)
    """Seconds that unnamed sampler weights are kept after their last use."""
    unnamed_per_model: int = Field(default=100, ge=1)
    """Sets of unnamed sampler weights that are kept for each model, beside those used in the last 10 minutes."""
    unnamed_bytes_per_owner: int = Field(default=50 << 30, ge=0)
    """Bytes of unnamed sampler weights that are kept for each owner, beside those used in the last 10 minutes."""
    snapshot_every_s: float = Field(default=600, gt=0)
    """Seconds between snapshots of a model in training, from which it is restored after a crash."""
    log_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Bytes of a model's log, which is replayed after a crash. Beyond this, a snapshot is taken."""
    synchronous: Literal["full", "normal"] = "full"
    """Durability of SQLite: answers survive a power loss (`full`, an fsync for each commit) or only crashes
    (`normal`)."""
    metrics_open: bool = False
    """Whether `/metrics` needs no key if the scraper is on this machine without a proxy in between."""
    otel_endpoint: str = Field(default="", pattern=r"^(https?://[^\s?#]+)?$")
    """URL of a collector of OpenTelemetry traces (OTLP/HTTP), such as http://127.0.0.1:4318. If empty: no traces."""
    steps_kept_s: float = Field(default=90 * 24 * 3600, ge=60)
    """Seconds for which the recorded steps of runs are kept. The dashboard plots them."""
    samples_shown: int = Field(default=50, ge=0)
    """Latest samples that the dashboard shows for each owner. 0: none, and no datums of a run's steps."""
    samples_disk_bytes: int = Field(default=64 << 20, ge=0)
    """Bytes of these samples that are also kept on disk, where they survive a restart. 0: none."""
    cors_origins: list[str] = []
    """Origins of web pages whose scripts may call the chat endpoints, such as https://chat.example. * means all."""
    image_hosts: list[str] = []
    """Hosts from which images may be fetched by URL, with the port if the URL has one. A host with a private address
    needs this address in the list too."""
    image_directories: list[Path] = []
    """Directories from which every user of the server may read images by path."""
    drain_s: float = Field(default=5, ge=0)
    """Seconds for which running work may continue after a stop signal. `docker stop` kills after 10 s."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level of the server's log lines. Of libraries, only warnings and errors are logged."""
    log_format: Literal["text", "json"] = "text"
    """Format of the server's log lines. json: one object for each line. Child processes write text."""

    def image_addresses(self) -> ImageAddresses:
        """Return the hosts and directories that images may be read from."""
        hosts = [host.lower() for host in self.image_hosts]
        return ImageAddresses(hosts, self.image_directories, self.max_body_bytes)

    def resolve_keys_file(self) -> Path:
        """Return the keys file, or its default."""
        return self.keys_file or self.data_dir / "keys"

    def resolve_database_url(self) -> str | URL:
        """Return the database URL, or its default, whose path may have characters that a URL's text gives a meaning."""
        return self.database_url or URL.create(
            "sqlite+aiosqlite", database=str(self.data_dir.resolve() / "tinker-server.db")
        )

    def resolve_backend(self) -> BackendConfig:
        """Return the backend's configuration; its files are in data_dir unless set."""
        data, given = self.data_dir.resolve(), self.backend.model_fields_set
        of_data = {"scratch_dir": data / "scratch", "cluster_token_file": data / "cluster-token"}
        return self.backend.model_copy(update={name: path for name, path in of_data.items() if name not in given})
