from docs import workarounds


def test_the_list_has_all_workarounds():
    text = workarounds.PATH.read_text()
    assert text == workarounds.with_list(text), "run `make reference`"


def test_a_test_shows_that_each_workaround_is_needed():
    assert {workaround.name for workaround in workarounds.workarounds()} == set(workarounds.tests())
