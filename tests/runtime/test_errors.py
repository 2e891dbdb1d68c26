"""Messages of `UserError`."""

from calibjax.runtime.errors import UserError


def test_the_middle_of_a_long_message_is_left_out():
    message = f"--model {'x' * 10_000} does not exist. Give a directory."
    shown = str(UserError(message))
    assert len(shown) < 4000
    assert shown.startswith("--model xxx")
    assert shown.endswith("xxx does not exist. Give a directory.")
    assert str(UserError(message[:4000])) == message[:4000]
