"""Tasks beside the requests: none of them ends without a word."""

import asyncio
import logging

from api.app import keep_running


def test_a_task_that_ends_or_fails_is_logged_and_begun_again(monkeypatch, caplog):
    monkeypatch.setattr("api.app.RESTART_S", 0.01)
    begun = []
    third = asyncio.Event()

    async def work():
        begun.append(len(begun) + 1)
        if begun[-1] == 1:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        if begun[-1] == 3:
            third.set()
            await asyncio.sleep(60)

    async def scenario():
        keeping = asyncio.create_task(keep_running("listen", work))
        await asyncio.wait_for(third.wait(), 10)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await asyncio.sleep(0)  # its own task hears of it in the loop's next turn
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert begun == [1, 2, 3]
    assert caplog.messages == ["task ended: name=listen"] * 2
    assert "UnicodeDecodeError" in caplog.text
