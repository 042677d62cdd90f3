"""What is tried again, how often, and what is said in the end; no test waits."""

from __future__ import annotations

import asyncio
import errno
import http.client
import socket

import pytest

from megascale_lightning.errors import CorruptDataError, DataError
from megascale_lightning.sources.stores.retry import RefusedError, RetryPolicy, ShortReadError, is_transient
from megascale_lightning.sources.stores.secrets import remember_secrets


class Answer(Exception):
    """What aiohttp raises of a status: `status` is all that is looked at."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}, message='no', url='http://host/a'")
        self.status = status


class Stored(Exception):
    """What botocore raises."""

    def __init__(self, status: int) -> None:
        super().__init__("An error occurred")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class Failing:
    """Fails so many times, then gives 7."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.left, self.calls = error, times, 0

    def __call__(self) -> int:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self.error
        return 7


def policy(**more) -> tuple[RetryPolicy, list[float]]:
    waits: list[float] = []
    return RetryPolicy(sleep=waits.append, uniform=lambda: 1.0, **more), waits


def named(*names: str) -> type[OSError]:
    """A class of a library that is not imported here, below others of it."""
    kind = OSError
    for name in names:
        kind = type(name, (kind,), {})
    return kind


PASSING = [
    socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    named("ClientConnectorError", "ClientConnectorDNSError")(socket.EAI_AGAIN, "Temporary failure"),
    named("RequestException", "ConnectionError")("Max retries exceeded"),
    named("RequestException", "Timeout", "ReadTimeout")("read timed out"),
    OSError(errno.EIO, "device"),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    ConnectionResetError(),
    TimeoutError(),
    asyncio.TimeoutError(),
    ShortReadError("10 of 20 bytes"),
    http.client.IncompleteRead(b""),
    *(Answer(status) for status in (408, 429, 500, 502, 503, 504)),
    Stored(503),
    caused(FileNotFoundError("http://host/a"), Answer(503)),
    OSError("When reading information for key 'a' in bucket 'b': AWS Error SLOW_DOWN during HeadObject operation: no"),
    OSError("AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 7, Couldn't connect to server"),
]
LASTING = [
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    OSError(socket.EAI_AGAIN, "another's number"),
    FileNotFoundError(errno.ENOENT, "gone"),
    PermissionError(errno.EACCES, "no"),
    IsADirectoryError(errno.EISDIR, "a folder"),
    OSError(errno.ENOSPC, "full"),
    *(Answer(status) for status in (400, 401, 403, 404, 410)),
    Stored(403),
    caused(FileNotFoundError("http://host/a"), Answer(404)),
    OSError("AWS Error ACCESS_DENIED during HeadObject operation: No response body."),
    RefusedError("it has 5 bytes and had 7"),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_may_pass_is_tried_again(error):
    assert is_transient(error)
    run, waits = policy()
    call = Failing(error, 4)
    assert run.run(call, "a") == 7
    assert call.calls == 5
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8])


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_what_lasts_is_raised_at_once(error):
    assert not is_transient(error)
    run, waits = policy()
    call = Failing(error, 1)
    with pytest.raises(DataError, match=r"^source 'web': a\.parquet cannot be read: "):
        run.run(call, "source 'web': a.parquet")
    assert (call.calls, waits) == (1, [])


def test_the_last_attempt_raises_a_data_error_that_counts_them():
    run, waits = policy(attempts=3, max_delay_s=0.15)
    call = Failing(ConnectionResetError(errno.ECONNRESET, "peer"), 9)
    with pytest.raises(DataError, match=r"source 'web': a cannot be read \(3 attempts\): ConnectionResetError.*peer"):
        run.run(call, "source 'web': a")
    assert call.calls == 3
    assert waits == pytest.approx([0.1, 0.15])


def test_waits_are_spread_and_draw_from_no_global_generator(monkeypatch):
    """The global generators are seeded for the user's code: a flaky network must not move them."""
    monkeypatch.setattr("random.random", lambda: pytest.fail("the global generator was used"))
    waits: list[float] = []
    run = RetryPolicy(sleep=waits.append, attempts=40, first_delay_s=1.0, max_delay_s=1.0)
    assert run.run(Failing(TimeoutError(), 39), "a") == 7
    assert all(0.5 <= wait <= 1.0 for wait in waits)
    assert len(set(waits)) > 30


def test_what_is_no_trouble_of_a_store_passes_through():
    run, _ = policy()
    for error in (KeyError("x"), CorruptDataError("torn"), ZeroDivisionError()):
        call = Failing(error, 1)
        with pytest.raises(type(error)) as caught:
            run.run(call, "a")
        assert caught.value is error
        assert call.calls == 1


def test_between_runs_before_each_further_attempt():
    run, _ = policy()
    closed: list[int] = []
    run.run(Failing(TimeoutError(), 2), "a", between=lambda: closed.append(1))
    assert closed == [1, 1]


def test_errors_are_raised_without_the_secret_and_without_the_original():
    """An error of aiohttp holds the request's headers: it must not travel along as cause or context."""
    remember_secrets({"token": "hunter-4711"})
    run, _ = policy()
    text = "401 for http://h/a?X-Amz-Signature=abcdef&v=2 with Bearer hunter-4711"
    with pytest.raises(DataError) as caught:
        run.run(Failing(PermissionError(text), 1), "a")
    assert "hunter" not in str(caught.value)
    assert "abcdef" not in str(caught.value)
    assert "http://h/a?v=2" in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
