"""docs/models.md says what the families say."""

from tests import models_page


def test_the_page_of_models_is_what_the_server_says() -> None:
    assert models_page.PAGE.read_text() == models_page.page(), "run `make models`"
