"""Parts of the sampler that need vLLM's modules, but no engine.

pytest tests/contract/test_sampler_parts.py
"""

import pytest

from backends.protocol import BackendFailed
from backends.sampler.engine import check_version


def test_another_version_of_vllm_than_the_one_our_changes_were_written_for_is_refused():
    check_version()
    check_version("0.32.0+cu130")
    with pytest.raises(BackendFailed, match=r"vLLM 0\.32\.0.* found 0\.33\.0"):
        check_version("0.33.0")
