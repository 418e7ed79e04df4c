"""What a machine has to offer when it joins."""

from pathlib import Path

import pytest

from tinker_server.backends.cluster.join import offer_of
from tinker_server.backends.cluster.token import make_token
from tinker_server.backends.protocol import BackendFailed


async def test_a_machine_keeps_what_it_is_sent_in_a_directory_of_its_user_alone(tmp_path: Path) -> None:
    make_token(token_file := tmp_path / "token")
    for directory in (tmp_path / "new" / "node", tmp_path / "old"):
        (tmp_path / "old").mkdir(exist_ok=True)
        offer = await offer_of("a", "127.0.0.1:1", token_file, directory, {})
        assert offer.data_dir == str(directory)
        assert directory.stat().st_mode & 0o777 == 0o700


async def test_a_machine_whose_data_directory_cannot_be_used_does_not_join(tmp_path: Path) -> None:
    make_token(file := tmp_path / "token")
    with pytest.raises(BackendFailed, match=f"the data directory {file}/node cannot be used: Not a directory"):
        await offer_of("a", "127.0.0.1:1", file, file / "node", {})
