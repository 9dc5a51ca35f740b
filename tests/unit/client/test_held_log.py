"""The log while a script runs under ``torchperfd run``: standard error belongs to the script."""

import logging

import pytest

from torchperfd.safety.logs import Log

NAME = "torchperfd-held-log"


def test_held_log_keeps_each_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(NAME)
    log.hold()
    with caplog.at_level(logging.DEBUG):
        log.info("searching took %.1f s", 2.5)
        log.warning("device times are off: %s", "no events")
        log.warning("device times are off: %s", "no events")
        log.warning("gave up", exc_info=ValueError("bad"))
        log.warning("%d of %d", "wrong")
    assert caplog.text == ""
    assert log.release() == ["device times are off: no events", "gave up (ValueError: bad)"]
    assert log.release() == []
    log.warning("written again")
    assert "written again" in caplog.text


def test_held_log_is_written_to_handlers_of_its_own() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign,assignment]
    logging.getLogger(NAME).addHandler(handler)
    try:
        log = Log(NAME)
        log.hold()
        log.warning("asked for")
    finally:
        logging.getLogger(NAME).removeHandler(handler)
    assert [each.getMessage() for each in records] == ["asked for"]
    assert log.release() == []
