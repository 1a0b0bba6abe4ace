"Calls to servers: what is this machine, what is tried again, what stays hidden."

import copy
import json
import email.utils
import logging
import pickle
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthrag.remote import (
    MAX_RETRY_AFTER,
    Failure,
    Secret,
    call_again,
    check_base_url,
    failure_of_connection,
    failure_of_status,
    hide,
    is_loopback,
    retry_after,
    without_login,
)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1", "http://127.8.9.1:80/x", "localhost", "LOCALHOST:11434", "http://a.localhost", "http://[::1]:8080/v1",
            "http://user:pw@localhost/v1", "0.0.0.0:11434", "http://[::ffff:127.0.0.1]", "http://localhost."])  # fmt: skip
def test_this_machine(url):
    assert is_loopback(url)


@pytest.mark.parametrize(
    "url", ["https://api.openai.com/v1", "http://10.0.0.1", "http://192.168.1.5", "http://127.0.0.1.evil.example", "http://localhost.evil.example",
            "http://localhost@evil.example", "http://evil.example/127.0.0.1", "http://evil.example#localhost", "http://evil.example?localhost", "",
            "http://", "http://2130706433", "http://0x7f.1", "http://[bad", "http://[2001:db8::1]", "http://127.0.0.1:80@evil.example/", "http://notlocalhost"])  # fmt: skip
def test_elsewhere(url):
    assert not is_loopback(url)


@given(st.text(max_size=60))
def test_any_address_is_judged(url):
    assert is_loopback(url) in (True, False)


@pytest.mark.parametrize("url", ["", "x", "ftp://h", "file:///etc/passwd", "http://", "http://h:0x", "http://h:99999", "http://[bad", "http://h?k=secret", "http://h#secret"])
def test_an_address_that_is_no_server_is_refused(url):
    with pytest.raises(ValueError) as caught:
        check_base_url(url)
    assert "secret" not in str(caught.value)


def test_an_address_loses_login_and_query():
    assert without_login("https://me:pw@host:8/v1/?k=1#f") == "https://host:8/v1" and check_base_url("http://h/v1/") == "http://h/v1"


def test_a_secret_shows_nowhere():
    key = Secret("sk-12345678")
    shown = [repr(key), str(key), f"{key}", f"{key!r:>4}", "%s" % key, repr([key]), repr({"a": key}), logging.LogRecord("", 0, "", 0, "%s", (key,), None).getMessage()]  # noqa: UP031
    assert not any("sk-" in text for text in shown) and key.reveal() == "sk-12345678" and type(key.reveal()) is str and bool(key) and not Secret("")
    for keep in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="not stored"):
            keep(key)
    for use in (json.dumps, "".join, lambda one: json.dumps({"key": one}), lambda one: "".join([one]), lambda one: "a" + one, urllib.parse.quote, iter):
        with pytest.raises(TypeError) as caught:
            use(key)
        assert "sk-" not in str(caught.value)
    assert not isinstance(key, str) and Secret(key) == key != "sk-12345678" and key in {Secret("sk-12345678")} and Secret("") == ""
    assert hide("a sk-12345678 b", key) == "a … b" and hide("short", Secret("sh")) == "short"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_statuses_worth_another_try(status):
    assert failure_of_status(status, {}).again


@pytest.mark.parametrize("status", [200, 301, 307, 400, 401, 403, 404, 408, 409, 422, 500, 501, 505, 529, -1])
def test_statuses_that_are_final(status):
    assert not failure_of_status(status, {"Retry-After": "1"}).again


def test_connections():
    import httpx

    for again, errors in ((True, [httpx.ReadError, httpx.WriteError]), (False, [httpx.ConnectError, httpx.ReadTimeout, httpx.ConnectTimeout, httpx.PoolTimeout])):
        for error in errors:
            assert failure_of_connection(error("x")).again is again, error
    assert failure_of_connection(httpx.RemoteProtocolError("Server disconnected without sending a response.")).again
    assert not failure_of_connection(httpx.RemoteProtocolError("conflicting Content-Length headers")).again
    assert failure_of_connection(ConnectionResetError()).again and not failure_of_connection(ConnectionRefusedError()).again


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7), ({"RETRY-AFTER": "0.5"}, 0.5), ({"retry-after-ms": "250", "retry-after": "9"}, 0.25), ({"retry-after": "-3"}, 0),
        ({"retry-after": "soon"}, None), ({"retry-after": "inf"}, None), ({"retry-after": ""}, None), ({}, None),
        ({"retry-after": email.utils.formatdate(1000, usegmt=True)}, 40), ({"retry-after": email.utils.formatdate(10, usegmt=True)}, 0),
    ],
)  # fmt: skip
def test_retry_after(headers, seconds):
    assert retry_after(headers, now=960.0) == seconds


class Fails(Exception):
    def __init__(self, failure):
        self.failure = failure


def run(*failures, **options):
    waits, calls = [], []

    def once():
        calls.append(1)
        if len(calls) <= len(failures):
            raise Fails(failures[len(calls) - 1])
        return "answer"

    try:
        return call_again(once, lambda e: e.failure, sleep=waits.append, **options), len(calls), waits
    except Fails:
        return None, len(calls), waits


def test_pauses_grow_and_the_server_decides():
    answer, calls, waits = run(Failure(True), Failure(True), Failure(True), retries=3, pause=1.0)
    assert answer == "answer" and calls == 4 and all(low <= w <= low * 1.26 + 0.01 for w, low in zip(waits, (1, 2, 4), strict=True))
    assert run(Failure(True, 7.0), Failure(True, 0.0))[2] == [7.0, 0.0]
    assert run(Failure(True, MAX_RETRY_AFTER + 1)) == (None, 1, []) and run(Failure(False)) == (None, 1, [])
    assert run(Failure(True), Failure(True), Failure(True), retries=2)[:2] == (None, 3) and run(Failure(True), retries=0)[:2] == (None, 1)


def test_the_last_error_is_raised_as_it_is_and_interrupts_pass():
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_again(stop, lambda e: Failure(isinstance(e, Exception)))
    with pytest.raises(ZeroDivisionError):
        call_again(lambda: 1 / 0, lambda e: Failure(True), retries=1, sleep=lambda s: None)


def test_what_is_logged_names_the_error_and_nothing_else(caplog):
    caplog.set_level(logging.DEBUG)

    def once():
        raise ValueError("Bearer sk-12345678 Ada Byron")

    with pytest.raises(ValueError):
        call_again(once, lambda e: Failure(True), retries=1, sleep=lambda s: None)
    assert "ValueError" in caplog.text and "sk-" not in caplog.text and "Ada" not in caplog.text
