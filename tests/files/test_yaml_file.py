import pytest

from jaxglue.files.yaml_file import parse_yaml


def test_plain_values_are_read():
    text = "a: 1_000\nb: 2e-4\nc: [no, 0x1F, -1.5]\nd: {e: text, f: }\ng: 0\nh:\n"
    assert parse_yaml(text) == {"a": 1000, "b": 2e-4, "c": [False, 31, -1.5], "d": {"e": "text"}, "g": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 10\nsteps: 20", "the key 'steps' is there twice"),
        ("a: {b: 1, b: 2}", "the key 'b' is there twice"),
        ("steps: 010", "010 is octal"),
        ("steps: 1:30", "base 60"),
        ("a: !!bool maybe", "tags"),
        ("a: !!timestamp x", "tags"),
        ("a: !!int ''", "tags"),
        ("a: !own x", "tags"),
        ("a: &x 1\nb: *x", "aliases"),
        ("- a", "expected keys and values"),
    ],
)
def test_values_that_readers_take_differently_are_refused(text, message):
    with pytest.raises(ValueError, match=message) as raised:
        parse_yaml(text)
    assert len(str(raised.value).splitlines()) == 1
