from docs import mends


def test_the_list_is_of_these_mends():
    text = mends.PATH.read_text()
    assert text == mends.with_list(text), "run `make reference`"


def test_each_mend_is_needed_by_a_test():
    assert {mend.name for mend in mends.mends()} == set(mends.tests())
