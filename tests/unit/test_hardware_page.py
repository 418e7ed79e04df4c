"""docs/hardware.md says what the memory plan says."""

from tests import hardware_page


def test_the_page_of_hardware_is_what_the_plan_says() -> None:
    assert hardware_page.PAGE.read_text() == hardware_page.page(), "run `make hardware`"
